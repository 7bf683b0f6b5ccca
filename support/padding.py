"""Rows of unlike lengths -> rectangles, and micro-batches."""

import itertools

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

TOKENS_PER_MICRO_BATCH = 8192  # where neither a flag nor the memory plan sets it


def rectangle(rows, name, device="cpu"):
    """The tensor `name` (T_i,) of each row -> (n, T), with 0 or False behind a row's end."""
    return pad_sequence([getattr(row, name) for row in rows], batch_first=True).to(device)


def left_padded(prompts, device):
    """Prompts -> ids (B, P), where there is a token (B, P) bool, rotary positions (3, B, P)."""
    width = max(len(prompt.ids) for prompt in prompts)

    def stacked(tensors, dim=0):
        return torch.stack([F.pad(x, (width - x.shape[-1], 0)) for x in tensors], dim).to(device)

    return (stacked([prompt.ids for prompt in prompts]),
            stacked([torch.ones_like(prompt.ids, dtype=torch.bool) for prompt in prompts]),
            stacked([prompt.positions for prompt in prompts], 1))


def micro_batches(rows, budget=0):
    """Cuts rows into lists for one forward pass each: completions of one prompt, which counts once, in `budget` tokens
    (0: TOKENS_PER_MICRO_BATCH).

    Completions count as long as the longest, since recurrent layers pad them; so those of like length come together.
    A row that is alone may be longer than the budget.
    """
    batches, budget = [], budget or TOKENS_PER_MICRO_BATCH
    for prompt, group in itertools.groupby(rows, key=lambda row: row.prompt):
        batch = []
        for row in sorted(group, key=lambda row: len(row.tokens)):
            if batch and len(prompt.ids) + (len(batch) + 1) * len(row.tokens) > budget:
                batches.append(batch)
                batch = []
            batch.append(row)
        batches.append(batch)
    return batches
