"""Rows of unlike lengths -> one rectangle."""

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence


def rectangle(rows, name, device="cpu"):
    """The tensor `name` (T_i,) of each row -> (n, T), with 0 or False behind a row's end."""
    return pad_sequence([getattr(row, name) for row in rows], batch_first=True).to(device)


def left_padded(prompts, device):
    """Prompts with ids (P_i,) and positions (3, P_i) -> ids (B, P), where a token is (B, P) bool, positions (3, B, P)."""
    width = max(len(prompt.ids) for prompt in prompts)

    def stacked(tensors, dim=0):
        return torch.stack([F.pad(x, (width - x.shape[-1], 0)) for x in tensors], dim).to(device)

    return (stacked([prompt.ids for prompt in prompts]),
            stacked([torch.ones_like(prompt.ids, dtype=torch.bool) for prompt in prompts]),
            stacked([prompt.positions for prompt in prompts], 1))
