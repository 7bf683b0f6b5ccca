"""One forward pass over a prompt and its completions: the prompt runs once, and the completions branch from it.

The model gets one sequence without padding, [prompt | completion 1 | completion 2 | ...], in which each completion has
the positions that follow the prompt. Embeddings, projections, norms and MLPs treat tokens one by one and need nothing
else. Three operations mix tokens, and are told here where the branches are:

  attention             the prompt sees itself; a completion sees the prompt and itself
  causal convolution    a completion's first tokens see the prompt's last inputs before their own
  gated delta rule      a completion starts from the state that the prompt ends with

The keyword argument `branches` of `model.model(...)` reaches all three, because transformers hands keyword arguments
that it does not know down to the layers, also under activation checkpointing. Without it they are what they were.
"""

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "branching_sdpa"  # the name under which the attention is registered


@dataclass(frozen=True)
class Branches:
    """Lengths in tokens, known to the host: nothing here waits for a GPU."""

    prompt: int
    completions: tuple[int, ...]

    def split(self, x, dim):
        """The sequence `dim` of x -> (the prompt's part, [each completion's part])."""
        prompt, *completions = x.split([self.prompt, *self.completions], dim)
        return prompt, completions


def attention(module, query, key, value, attention_mask, branches=None, scaling=None, **options):
    """transformers' SDPA, or with `branches` (1, heads, L, width) the branching one -> ((1, L, heads, width), None).

    causal_lower_right(T, P + T) lets the i-th token of a completion see the prompt and its first i tokens; on CUDA it
    is no tensor, so the fast kernels stay possible.
    """
    if branches is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    if query.device.type == "cpu":  # there, the kernel that is fast with a mask takes no groups of heads
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    prompt, completions = zip(*(branches.split(x, 2) for x in (query, key, value)))
    product = functools.partial(F.scaled_dot_product_attention, scale=scaling,
                                enable_gqa=query.shape[1] != key.shape[1])
    parts = [product(*prompt, is_causal=True)]
    for q, k, v in zip(*completions):
        k, v = (torch.cat([before, own], 2) for before, own in zip(prompt[1:], (k, v)))
        parts.append(product(q, k, v, attn_mask=causal_lower_right(q.shape[2], k.shape[2])))
    return torch.cat(parts, 2).transpose(1, 2).contiguous(), None


def branching_convolution(convolution):
    """The library's causal convolution (rows, channels, L) -> the same that also takes `branches`.

    The prompt's last inputs are put before each completion, and what comes out at their places is dropped.
    """
    @functools.wraps(convolution)
    def branching(hidden_states, weight, bias=None, activation=None, branches=None, **options):
        if branches is None:
            return convolution(hidden_states, weight, bias, activation=activation, **options)
        seen = weight.shape[-1] - 1  # inputs that an output sees besides its own
        prompt, completions = branches.split(hidden_states, -1)
        before = prompt[..., -seen:]
        joined = torch.cat([prompt, *(part for own in completions for part in (before, own))], -1)
        out = convolution(joined, weight, bias, activation=activation, **options)
        prompt, *parts = out.split([branches.prompt, *(n for own in branches.completions for n in (seen, own))], -1)
        return torch.cat([prompt, *parts[1::2]], -1)
    return branching


def branching_delta_rule(rule):
    """The library's chunked gated delta rule (rows, L, heads, width) -> the same that also takes `branches`.

    Completions run as rows of a rectangle, padded behind their ends, where the rule is causal and what comes out is
    dropped. Gradients flow through the prompt's final state.
    """
    @functools.wraps(rule)
    def branching(query, key, value, g, beta, branches=None, **options):
        if branches is None:
            return rule(query, key, value, g=g, beta=beta, **options)
        prompt, completions = zip(*(branches.split(x, 1) for x in (query, key, value, g, beta)))
        options |= {"initial_state": None, "output_final_state": True}
        out, state = rule(*prompt[:3], g=prompt[3], beta=prompt[4], **options)
        rows = [pad_sequence([own[0] for own in each], batch_first=True) for each in completions]
        options |= {"initial_state": state.expand(len(rows[0]), -1, -1, -1).contiguous(), "output_final_state": False}
        of_rows, _ = rule(*rows[:3], g=rows[3], beta=rows[4], **options)
        return torch.cat([out, *(row[None, :n] for row, n in zip(of_rows, branches.completions))], 1), None
    return branching


BRANCHING = {"causal_conv1d_fn": branching_convolution, "torch_chunk_gated_delta_rule": branching_delta_rule}


def take_branches(model):
    """Makes a model of transformers take `branches`: its attention by registration, which the library documents."""
    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    model.set_attn_implementation({"text_config": ATTENTION})
