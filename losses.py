"""The losses, each with its paper's formula. A fork that tries a new one adds a function and an entry in LOSS_FNS.

A loss takes (n, T) tensors: `logprobs` of the policy as it is now, with gradients; `old_logprobs`, what the sampler
gave each token when it drew it; `advantages`; and `mask`, True on the tokens that train. Its bounds are keyword
arguments. It gives `(loss, bites)`: the loss of each token (n, T), and where its bound bites: (n, T) bool, or (n, 1)
for a loss that clips whole rows, or None. A loss alone is taken as (loss, None). What is outside the mask is ignored.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from support.errors import UserError
from support.padding import rectangle

MAX_LOG_RATIO = 20.0  # log-ratios are clamped to +-20: squares of larger ratios overflow float32 in the gradient's norm


@dataclass(frozen=True)
class Loss:
    """An entry of LOSS_FNS that fits one reduction only."""

    fn: Callable
    reduction: str


def log_ratio(logprobs, old_logprobs):
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def importance_sampling(logprobs, old_logprobs, advantages, mask):
    """-ratio A with ratio = exp(logp - old_logp) (2): the article's loss, and REINFORCE's gradient at ratio 1."""
    return -log_ratio(logprobs, old_logprobs).exp() * advantages, None


def ppo(logprobs, old_logprobs, advantages, mask, low=0.2, high=0.2):
    """-min(ratio A, clip(ratio, 1 - low, 1 + high) A) (Schulman et al. 2017, arXiv 1707.06347, eq. 7)."""
    ratio = log_ratio(logprobs, old_logprobs).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    return loss, outside(ratio, advantages, low, high)


def cispo(logprobs, old_logprobs, advantages, mask, low=0.0, high=4.0):
    """-stop_gradient(clip(ratio, low, high)) A logp: clipped tokens keep a gradient (MiniMax-M1, arXiv 2506.13585)."""
    ratio = log_ratio(logprobs, old_logprobs).exp()
    return -ratio.clamp(low, high).detach() * advantages * logprobs, (ratio < low) | (ratio > high)


def gspo(logprobs, old_logprobs, advantages, mask, low=3e-4, high=4e-4):
    """-min(s A, clip(s, 1 - low, 1 + high) A), s the exp of the row's mean log-ratio (arXiv 2507.18071, eq. 5)."""
    mean = ((logprobs - old_logprobs) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    s = mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()  # (n, 1) geometric mean of a row's token ratios
    loss = -torch.minimum(s * advantages, s.clamp(1 - low, 1 + high) * advantages)
    return loss, (outside(s, advantages, low, high) & mask).any(1, keepdim=True)


def outside(ratio, advantages, low, high):
    """Where the minimum takes the constant: below 1 - low for a negative advantage, above 1 + high for a positive."""
    return ((ratio < 1 - low) & (advantages < 0)) | ((ratio > 1 + high) & (advantages > 0))


LOSS_FNS = {"importance_sampling": importance_sampling, "ppo": ppo, "cispo": cispo,
            "gspo": Loss(gspo, reduction="sequence")}  # add yours here

# Reductions: (N, T) mask of all rows of an optimiser step -> (N, T) weights; the step's loss is sum(weights * loss).
# Rows that do not train, such as those of groups with equal rewards (5), are not among the N: in no denominator.
LOSS_REDUCTIONS = {
    "token": lambda mask, max_tokens: mask / mask.sum(),  # (4) a mean over all tokens (DAPO, arXiv 2503.14476, eq. 12)
    "sequence": lambda mask, max_tokens: mask / mask.sum(1, keepdim=True) / len(mask),  # GRPO: within rows, over rows
    "constant": lambda mask, max_tokens: mask / (len(mask) * max_tokens),  # Dr. GRPO (arXiv 2503.20783)
}


def token_losses(name, logprobs, old_logprobs, advantages, mask, **bounds):
    """The loss `name` with those `bounds` that are set -> (loss (n, T), bites or None).

    Raises UserError where it gives another shape.
    """
    entry = LOSS_FNS[name]
    loss = (entry.fn if isinstance(entry, Loss) else entry)(logprobs, old_logprobs, advantages, mask, **{
        bound: value for bound, value in bounds.items() if value is not None})
    loss, bites = loss if isinstance(loss, tuple) else (loss, None)
    if loss.shape != mask.shape:
        raise UserError(f"--loss-fn {name} gives a loss of shape {tuple(loss.shape)}; it must give one for each token, "
                        f"{tuple(mask.shape)}")
    return loss, bites


def micro_batch_loss(rows, logprobs, config):
    """-> the loss of each token (n, T), 0 on those that do not train, and clip_counts or None.

    `logprobs` (n, T), with gradients, are those of the policy as it is now.
    """
    mask, old = (rectangle(rows, name, logprobs.device) for name in ("trained", "logprobs"))
    advantages = pad_sequence([row.advantage + torch.zeros(len(row.tokens)) for row in rows], batch_first=True)
    advantages = advantages.to(logprobs.device)
    # What a tool wrote may have any numbers, even -inf.
    logprobs, old, advantages = (x.masked_fill(~mask, 0.0) for x in (logprobs, old, advantages))
    loss, bites = token_losses(config.loss_fn, logprobs, old, advantages, mask, low=config.clip_low,
                               high=config.clip_high)
    if config.kl_coef:  # (3) k3 estimate of KL(policy || base)
        log = log_ratio(rectangle(rows, "reference_logprobs", logprobs.device).masked_fill(~mask, 0.0), logprobs)
        loss = loss + config.kl_coef * (log.exp() - 1 - log)
    return loss.masked_fill(~mask, 0.0), None if bites is None else clip_counts(bites, advantages, mask)


def reduction_of(name, reduction="auto"):
    """The name of the reduction to use: for "auto" the loss's own where it needs one, else the mean over tokens."""
    if reduction != "auto":
        return reduction
    return LOSS_FNS[name].reduction if isinstance(LOSS_FNS[name], Loss) else "token"


def clip_counts(bites, advantages, mask):
    """-> (3,): votes where the bound bites and the advantage is negative, where it is positive, and all votes.

    A token that trains is a vote, or a row where the loss clips rows (bites (n, 1)).
    """
    if bites.shape[1] == 1:
        advantages, mask = (advantages * mask).sum(1, keepdim=True), mask.any(1, keepdim=True)
    votes = bites & mask
    return torch.stack([(votes & (advantages < 0)).sum(), (votes & (advantages > 0)).sum(), mask.sum()])


def clip_metrics(counts):
    """Sum of clip_counts, or None for a loss that tells no bites -> the shares of votes that were clipped."""
    if counts is None:
        return {}
    low, high, votes = counts.tolist()
    return {"trainer/clip_fraction": (low + high) / votes, "trainer/clip_fraction_low": low / votes,
            "trainer/clip_fraction_high": high / votes}


def ratio_metrics(logprobs, old_logprobs):
    """(N,) log-probabilities of the tokens that train -> ratios, and two estimates of KL(old || new).

    k1 = -log ratio and k3 = ratio - 1 - log ratio both estimate the KL divergence without bias
    (http://joschu.net/blog/kl-approx.html); k3 is never negative.
    """
    log = log_ratio(logprobs, old_logprobs)
    ratio = log.exp()
    return {"trainer/ratio_mean": ratio.mean().item(), "trainer/ratio_min": ratio.min().item(),
            "trainer/ratio_max": ratio.max().item(), "trainer/kl_k1": -log.mean().item(),
            "trainer/kl_k3": (ratio - 1 - log).mean().item()}
