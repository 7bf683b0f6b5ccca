"""Every loss, reduction and advantage against a closed form in float64; the parts of a step that go with them."""

import dataclasses
import itertools
import math

import pytest
import torch
from batches import (adapter_gradient, gradient, grouped, learned_logprobs, moved_away, naive_logprobs, numbers,
                     prompts_of, questions, relative, set_advantages, two_turns, uneven_rows)

import grpo
from losses import LOSS_FNS, LOSS_REDUCTIONS, Loss, clip_counts, clip_metrics, token_losses
from support.errors import UserError
from support.metrics import batch_metrics
from support.order import Order
from support.padding import micro_batches

BOUNDS = {"importance_sampling": {}, "ppo": dict(low=0.2, high=0.2), "cispo": dict(low=0.0, high=4.0),
          "gspo": dict(low=3e-4, high=4e-4)}
REDUCTION = {"importance_sampling": "token", "ppo": "token", "cispo": "token", "gspo": "sequence"}


def made_up(seed=0, scale=1.0):
    """(5, 7) log-probabilities whose ratios lie on both sides of every clip bound, advantages of both signs, mask."""
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(5, 7, generator=generator, dtype=torch.float64)
    logp = old + scale * torch.randn(5, 7, generator=generator, dtype=torch.float64)
    advantages = torch.randn(5, 1, generator=generator, dtype=torch.float64).expand(5, 7).clone()
    mask = torch.arange(7) < torch.tensor([7, 1, 4, 6, 2])[:, None]
    return logp.requires_grad_(), old, advantages, mask


def closed_form(name, logp, old, advantages, mask, low=None, high=None):
    """Loss and derivative by logp of each token, and whether the bound bites, written out number by number."""
    loss, slope, bites = torch.zeros_like(logp), torch.zeros_like(logp), torch.zeros_like(logp, dtype=torch.bool)
    for i in range(len(logp)):
        length = int(mask[i].sum())
        s = math.exp(sum(logp[i, t].item() - old[i, t].item() for t in range(length)) / length)
        for t in range(length):
            ratio, a = math.exp(logp[i, t].item() - old[i, t].item()), advantages[i, t].item()
            if name == "importance_sampling":
                loss[i, t], slope[i, t] = -ratio * a, -ratio * a
            elif name == "cispo":
                weight = min(max(ratio, low), high)
                loss[i, t], slope[i, t] = -weight * a * logp[i, t].item(), -weight * a
                bites[i, t] = weight != ratio
            elif name == "ppo":
                bites[i, t] = (a > 0 and ratio > 1 + high) or (a < 0 and ratio < 1 - low)
                loss[i, t] = -a * (min(max(ratio, 1 - low), 1 + high) if bites[i, t] else ratio)
                slope[i, t] = 0.0 if bites[i, t] else -ratio * a
            else:
                bites[i, t] = (a > 0 and s > 1 + high) or (a < 0 and s < 1 - low)
                loss[i, t] = -a * (min(max(s, 1 - low), 1 + high) if bites[i, t] else s)
        for t in range(length if name == "gspo" else 0):  # all of a row's losses depend on each of its tokens
            slope[i, t] = sum(-advantages[i, u].item() * s / length for u in range(length) if not bites[i, u])
    return loss, slope, bites


CASES = [(name, bounds, scale) for name in LOSS_FNS for bounds, scale in ((BOUNDS[name], 2.0), *{
    "ppo": [(dict(low=0.2, high=0.28), 0.3)], "cispo": [(dict(low=0.65, high=1.28), 0.3)],
    "gspo": [(dict(low=0.02, high=0.1), 0.1)]}.get(name, []))]  # lower and upper bound far from each other


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name, bounds, scale", CASES)
def test_value_gradient_and_bites_are_the_closed_form(name, bounds, scale, seed):
    logp, old, advantages, mask = made_up(seed, scale)
    loss, bites = token_losses(name, logp, old, advantages, mask, **bounds)
    loss[mask].sum().backward()
    expected, slope, bitten = closed_form(name, logp.detach(), old, advantages, mask, **bounds)
    assert torch.allclose(loss[mask], expected[mask], rtol=1e-12, atol=1e-14)
    assert torch.allclose(logp.grad[mask], slope[mask], rtol=1e-12, atol=1e-14)
    assert (logp.grad[~mask] == 0).all()
    if name == "importance_sampling":
        assert bites is None
    elif name == "gspo":
        assert bites.shape == (5, 1) and torch.equal(bites[:, 0], (bitten & mask).any(1))
    else:
        assert torch.equal(bites[mask], bitten[mask])


def test_the_made_up_ratios_lie_on_both_sides_of_every_bound():
    for scale, bounds in ((2.0, (0.8, 1.2, 4.0)), (0.3, (0.65, 0.72, 0.8, 1.2, 1.28))):
        ratios = torch.cat([(logp.detach() - old).exp()[mask] for logp, old, _, mask in (
            made_up(seed, scale) for seed in range(4))])
        ends = torch.tensor([0.0, *bounds, torch.inf])
        assert torch.histogram(ratios.float(), ends[:-1]).hist.all() and (ratios > bounds[-1]).any(), "an empty cell"


def test_a_bound_that_is_not_set_is_the_losss_own():
    for name, bounds in BOUNDS.items():
        loss, _ = token_losses(name, *(given := made_up(2, scale=2.0)), low=None, high=None)
        assert torch.equal(loss, token_losses(name, *given, **bounds)[0])


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "gspo"])
def test_finite_differences_agree_away_from_the_kinks(name):
    logp, old, advantages, mask = made_up(1, scale=0.05 if name == "ppo" else 1e-5 if name == "gspo" else 1.0)
    token_losses(name, logp, old, advantages, mask)[0][mask].sum().backward()
    step = 1e-7
    for i, t in mask.nonzero().tolist():
        moved = [logp.detach().clone(), logp.detach().clone()]
        moved[0][i, t] -= step
        moved[1][i, t] += step
        values = [token_losses(name, m, old, advantages, mask)[0][mask].sum() for m in moved]
        slope = ((values[1] - values[0]) / (2 * step)).item()
        assert slope == pytest.approx(logp.grad[i, t].item(), rel=1e-5, abs=1e-7)


def test_cispo_differences_with_the_clipped_ratio_frozen():
    logp, old, advantages, mask = made_up(1, scale=2.0)
    token_losses("cispo", logp, old, advantages, mask)[0][mask].sum().backward()
    frozen = (logp.detach() - old).exp().clamp(0, 4)
    assert torch.allclose(logp.grad[mask], (-frozen * advantages)[mask])


@pytest.mark.parametrize("difference", [50.0, -50.0])
@pytest.mark.parametrize("name", list(LOSS_FNS))
def test_extreme_ratios_stay_finite(name, difference):
    old = torch.full((3, 4), -60.0)
    logp = (old + difference).requires_grad_()
    mask = torch.arange(4) < torch.tensor([4, 1, 2])[:, None]
    for advantage in (1.0, -1.0, 0.0):
        loss, _ = token_losses(name, logp, old, torch.full((3, 4), advantage), mask)
        (slope,) = torch.autograd.grad(loss[mask].sum(), logp)
        assert loss.isfinite().all() and slope.isfinite().all() and slope.norm().isfinite()
        assert advantage or (slope == 0).all()


# Reductions


def test_reductions():
    """Rows of 5, 1 and 3 tokens that train, with gaps; max_tokens is above all of them."""
    mask = torch.tensor([[1, 1, 0, 1, 0, 1, 1], [0, 0, 0, 1, 0, 0, 0], [1, 1, 0, 0, 1, 0, 0]]).bool()
    loss = torch.randn(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows = [row[own] for row, own in zip(loss, mask)]
    expected = {"token": sum(r.sum() for r in rows) / 9, "sequence": sum(r.mean() for r in rows) / 3,
                "constant": sum(r.sum() for r in rows) / (3 * 20)}
    for name, value in expected.items():
        weights = LOSS_REDUCTIONS[name](mask, 20)
        assert abs((weights * loss)[mask].sum() - value) < 1e-6 and (weights[~mask] == 0).all()


@pytest.fixture(scope="module")
def drawn(made):
    """A policy and 12 rows as it drew them; no test changes them."""
    policy = made("qwen3_5", layers=2)
    stop_ids, rows = policy.stop_ids, uneven_rows(policy, prompts_of(policy, questions()), max_tokens=21)
    policy.stop_ids = stop_ids
    return policy, rows


@pytest.fixture(scope="module")
def batch(drawn):
    """Rows with an advantage each, from which the policy has moved away: ratios are not 1."""
    policy, generator = drawn[0], torch.Generator().manual_seed(0)
    with policy.model.disable_adapter():
        reference_logprobs = grpo.frozen_logprobs(policy, drawn[1], grpo.Config())
    return policy, [dataclasses.replace(
        row, logprobs=row.logprobs - 0.02 * torch.randn(len(row.tokens), generator=generator),
        advantage=torch.randn(1, generator=generator).item(), reference_logprobs=reference)
        for row, reference in zip(drawn[1], reference_logprobs)]


@pytest.mark.parametrize("name, reduction", [(n, r) for n in LOSS_FNS for r in LOSS_REDUCTIONS
                                             if n != "gspo" or r == "sequence"])
def test_micro_batches_change_nothing(batch, name, reduction):
    parts, whole = (gradient(*batch, size, loss_fn=name, loss_reduction=reduction) for size in (260, 10**6))
    assert len(micro_batches(batch[1], 260)) > 4 and whole.norm() > 0 and relative(parts, whole) <= 1e-5


def test_micro_batches_change_nothing_with_a_kl_term(batch):
    parts, whole = (gradient(*batch, size, kl_coef=0.5) for size in (260, 10**6))
    assert relative(parts, whole) <= 1e-5
    assert relative(gradient(*batch), whole) > 1e-3, "the KL term has no gradient"


def test_all_losses_agree_at_ratio_one(drawn):
    policy, rows = drawn
    rows = [dataclasses.replace(row, advantage=1.0 - i % 4) for i, row in enumerate(rows)]
    token = gradient(policy, rows)
    for name in ("ppo", "cispo"):
        assert relative(gradient(policy, rows, loss_fn=name), token) <= 1e-4, name
    sequence = gradient(policy, rows, loss_reduction="sequence")
    assert relative(gradient(policy, rows, loss_fn="gspo"), sequence) <= 1e-4
    assert relative(sequence, token) > 1e-2


def reduced(policy, rows, reduction, max_tokens):
    """The importance-sampling loss of rows, taken apart: trained tokens alone, denominators by hand."""
    found = learned_logprobs(policy, rows)
    losses = [(-(found[row][0] - row.logprobs).exp() * row.advantage)[row.trained] for row in rows]
    return {"token": lambda: torch.cat(losses).mean(), "sequence": lambda: sum(x.mean() for x in losses) / len(rows),
            "constant": lambda: torch.cat(losses).sum() / len(rows) / max_tokens}[reduction]().item()


@pytest.mark.parametrize("reduction", LOSS_REDUCTIONS)
def test_denominators_count_tokens_that_train(turns, reduction):
    policy, rows = turns
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    config = grpo.Config(loss_reduction=reduction, max_tokens=50)
    loss = grpo.update(policy, optimizer, rows, config)["trainer/loss_mean"]
    assert loss == pytest.approx(reduced(policy, rows, reduction, 50), rel=1e-5)


def test_denominators_count_rows_that_train(shared):
    """A group of equal rewards and rows that were cut are in no denominator."""
    policy = shared(layers=2)
    policy.stop_ids = torch.arange(0, 256, 16)
    config = grpo.Config(batch_size=3, group_size=4, max_tokens=8, mask_truncated=True, loss_reduction="sequence")
    metrics, batch = step(policy, rewarding(lambda group: group != 1), config)
    rows = [row for row in batch.rows[:4] + batch.rows[8:] if row.finished]
    assert 0 < len(rows) < 8 and metrics["train_datums"] == len(rows)
    assert metrics["trainer/loss_mean"] == pytest.approx(reduced(policy, rows, "sequence", 8), rel=1e-5)


def test_the_reduction_of_a_loss_is_part_of_its_entry(batch, monkeypatch):
    sequence = gradient(*batch, loss_fn="gspo", loss_reduction="sequence")
    assert torch.equal(gradient(*batch, loss_fn="gspo"), sequence)
    monkeypatch.setitem(LOSS_FNS, "mine", Loss(LOSS_FNS["importance_sampling"], reduction="constant"))
    constant = gradient(*batch, loss_reduction="constant", max_tokens=77)
    assert torch.equal(gradient(*batch, loss_fn="mine", max_tokens=77), constant)
    assert relative(gradient(*batch), constant) > 0.1


def test_losses_differ_from_the_second_update_on(load):
    policy, after = load(), {}
    rows = grpo.sample(policy, grouped(prompts_of(policy, questions()), 4), 12, uniforms=numbers(12, 12))
    for i, row in enumerate(rows):
        row.advantage = (-1) ** i * (1 + i / 6)
    start = [p.detach().clone() for p in policy.parameters()]
    for name in LOSS_FNS:
        for p, value in zip(policy.parameters(), start):
            p.data.copy_(value)
        config = grpo.Config(loss_fn=name, updates_per_rollout=2, loss_reduction="sequence")
        metrics = grpo.update(policy, torch.optim.AdamW(policy.parameters(), lr=2e-2), rows, config)
        assert metrics["trainer/optimizer_steps"] == 2 and metrics["trainer/ratio_max"] > 1.2
        assert metrics["trainer/dlogp_max"] <= 1e-4, "dlogp must be that of the first update"
        if name == "importance_sampling":
            assert not any("clip" in key for key in metrics)
        else:
            assert metrics["trainer/clip_fraction"] > 0 == metrics["trainer/clip_fraction_first"], (name, metrics)
        after[name] = torch.cat([p.detach().flatten() for p in policy.parameters()])
    for a, b in itertools.combinations(after, 2):
        assert not torch.allclose(after[a], after[b], rtol=1e-4, atol=1e-6), (a, b)


class Watch:
    """A loss that notes the rows of each micro-batch by their advantages, and an optimiser that notes its steps."""

    def __init__(self, monkeypatch, policy):
        self.seen = [[]]  # for each optimiser step the micro-batches
        monkeypatch.setitem(LOSS_FNS, "watched", self.loss)
        self.optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
        self.optimizer.register_step_post_hook(lambda *_: self.seen.append([]))

    def loss(self, logprobs, old_logprobs, advantages, mask):
        self.seen[-1].append(tuple(advantages[:, 0].tolist()))
        return -logprobs * advantages


def test_minibatches_are_whole_micro_batches_and_cover_every_row_once(drawn, monkeypatch):
    policy, rows = drawn
    rows = [dataclasses.replace(row, advantage=float(i + 1)) for i, row in enumerate(rows[1:])]
    watch = Watch(monkeypatch, policy)
    config = grpo.Config(loss_fn="watched", updates_per_rollout=2, minibatches=3, tokens_per_micro_batch=260)
    metrics = grpo.update(policy, watch.optimizer, rows, config)
    assert metrics["trainer/optimizer_steps"] == 6 and metrics["train_datums"] == 11
    *steps, rest = watch.seen
    assert rest == [] and all(steps)
    first, second = ([micro for part in steps[i:i + 3] for micro in part] for i in (0, 3))
    cut = sorted(tuple(row.advantage for row in micro) for micro in micro_batches(rows, 260))
    assert sorted(first) == sorted(second) == cut and len(cut) > 3, "cut anew, or not all rows"
    assert sorted(row for micro in first for row in micro) == [float(i + 1) for i in range(11)]
    assert first != second, "not shuffled"


def test_a_minibatch_counts_its_own_tokens(drawn):
    """Three minibatches of one prompt each, with learning rate 0: the mean of their losses, not of all rows."""
    policy, rows = drawn[0], set_advantages(list(map(dataclasses.replace, drawn[1])))
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    config = grpo.Config(minibatches=3, tokens_per_micro_batch=10**6)
    loss = grpo.update(policy, optimizer, rows, config)["trainer/loss_mean"]
    thirds = [reduced(policy, rows[i:i + 4], "token", 0) for i in (0, 4, 8)]
    assert loss == pytest.approx(sum(thirds) / 3, rel=1e-5)
    assert loss != pytest.approx(reduced(policy, rows, "token", 0), rel=1e-2)


# Where a loss clips


def shares(name, ratio, advantages, mask, **bounds):
    _, bites = token_losses(name, ratio.log(), torch.zeros_like(ratio), advantages, mask, **bounds)
    return clip_metrics(clip_counts(bites, advantages, mask))


def test_shares_of_clipping():
    ratio = torch.tensor([[0.5, 1.0, 1.5, 9.0], [0.5, 1.0, 1.5, 9.0]])
    advantages = torch.tensor([[1.0] * 4, [-1.0] * 4])
    mask = torch.tensor([[True] * 4, [True, True, True, False]])
    ppo = shares("ppo", ratio, advantages, mask)
    assert ppo == pytest.approx({"trainer/clip_fraction": 3 / 7, "trainer/clip_fraction_low": 1 / 7,
                                 "trainer/clip_fraction_high": 2 / 7})
    cispo = shares("cispo", ratio, advantages, mask)
    assert (cispo["trainer/clip_fraction_low"], cispo["trainer/clip_fraction_high"]) == pytest.approx((0, 1 / 7))
    gspo = shares("gspo", ratio, advantages, mask)
    # Row 0 moved up with a positive advantage and is clipped; row 1 (0.75 in product) moved down with a negative one.
    assert (gspo["trainer/clip_fraction_low"], gspo["trainer/clip_fraction_high"]) == (0.5, 0.5)
    assert gspo["trainer/clip_fraction"] == 1
    dapo = shares("ppo", torch.tensor([[0.75, 1.25, 1.3]]), torch.tensor([[-1.0, 1.0, 1.0]]), mask[:1, :3], low=0.2,
                  high=0.28)
    assert (dapo["trainer/clip_fraction_low"], dapo["trainer/clip_fraction_high"]) == pytest.approx((1 / 3, 1 / 3))


def test_a_row_is_one_vote_where_a_loss_clips_rows():
    """Rows of 3, 1 and 2 tokens; the sign is that of the advantages that train."""
    mask = torch.tensor([[1, 1, 1], [0, 1, 0], [0, 1, 1]]).bool()
    advantages = torch.tensor([[1.0, 1, 1], [-9, 2, -9], [9, -2, -2]])
    counts = clip_counts(torch.tensor([[True], [False], [True]]), advantages, mask)
    assert counts.tolist() == [1, 1, 3]
    assert clip_counts(mask, advantages, mask).tolist() == [2, 4, 6]


@pytest.mark.parametrize("budget", [260, 10**6])
def test_bounds_of_the_command_line_reach_loss_and_share(drawn, budget):
    """Bounds of .2 below and .28 above, swapped they are others; against the formula, over all micro-batches."""
    policy, rows = drawn[0], set_advantages(list(map(dataclasses.replace, drawn[1])))
    generator = torch.Generator().manual_seed(0)
    for row in rows:
        row.logprobs = row.logprobs - torch.tensor([-0.28, -0.25, 0.0, 0.22, 0.3])[
            torch.randint(5, (len(row.tokens),), generator=generator)]
    found = learned_logprobs(policy, rows)
    ratio, a = (torch.cat(each) for each in zip(*((
        (found[row][0] - row.logprobs).exp(), row.advantage) for row in rows)))
    low, high = (a < 0) & (ratio < 0.8), (a > 0) & (ratio > 1.28)
    assert low.any() and high.any() and ((a < 0) & (ratio < 0.8) & (ratio > 0.72)).any() and (
        (a > 0) & (ratio > 1.2) & (ratio < 1.28)).any()
    loss = torch.where(low, -0.8 * a, torch.where(high, -1.28 * a, -ratio * a)).mean().item()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    config = grpo.Config(loss_fn="ppo", clip_low=0.2, clip_high=0.28, tokens_per_micro_batch=budget)
    metrics = grpo.update(policy, optimizer, rows, config)
    assert metrics["trainer/loss_mean"] == pytest.approx(loss, rel=1e-5)
    assert metrics["trainer/clip_fraction_low"] == pytest.approx(low.float().mean().item())
    assert metrics["trainer/clip_fraction_high"] == pytest.approx(high.float().mean().item())
    assert metrics["trainer/clip_fraction"] == metrics["trainer/clip_fraction_first"] == pytest.approx(
        (low | high).float().mean().item())
    log = ratio.log()
    assert metrics["trainer/ratio_min"] == pytest.approx(ratio.min().item(), rel=1e-4)
    assert metrics["trainer/ratio_max"] == pytest.approx(ratio.max().item(), rel=1e-4)
    assert metrics["trainer/kl_k1"] == pytest.approx(-log.mean().item(), abs=1e-5)
    assert metrics["trainer/kl_k3"] == pytest.approx((ratio - 1 - log).mean().item(), abs=1e-5)


def test_a_loss_of_ones_own(batch, monkeypatch):
    """One that says where it bites gets its share; a bare tensor is a loss too, and has none."""
    policy, rows = batch
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    monkeypatch.setitem(LOSS_FNS, "every_other", lambda logprobs, old, advantages, mask: (
        -logprobs * advantages, (torch.arange(mask.shape[1]) % 2 == 0).expand_as(mask)))
    monkeypatch.setitem(LOSS_FNS, "bare", lambda logprobs, old, advantages, mask: -logprobs * advantages)
    config = grpo.Config(loss_fn="every_other", tokens_per_micro_batch=260)
    metrics = grpo.update(policy, optimizer, rows, config)
    tokens = sum(row.length for row in rows)
    for key, sign in (("low", -1), ("high", 1)):
        votes = sum((row.length + 1) // 2 for row in rows if row.advantage * sign > 0)
        assert metrics[f"trainer/clip_fraction_{key}"] == pytest.approx(votes / tokens)
    bare = grpo.update(policy, optimizer, rows, dataclasses.replace(config, loss_fn="bare"))
    assert bare["trainer/loss_mean"] == metrics["trainer/loss_mean"] and not any("clip" in key for key in bare)


@pytest.mark.parametrize("shape", ["()", "(2, 1)"])
def test_a_loss_that_is_no_loss_of_tokens_is_refused(batch, monkeypatch, shape):
    monkeypatch.setitem(LOSS_FNS, "mine", lambda logprobs, old, advantages, mask: (
        (logprobs * advantages).mean() if shape == "()" else (logprobs * advantages)[:2, :1]))
    with pytest.raises(UserError) as error:
        gradient(*batch, loss_fn="mine")
    assert f"mine gives a loss of shape {shape}; it must give one for each token" in str(error.value)


# Tokens that the policy did not draw


GARBAGE = {"logprobs": math.nan, "entropies": math.nan, "reference_logprobs": -math.inf, "advantage": math.nan}


@pytest.fixture(scope="module")
def turns(made):
    """Rows whose tool says a forbidden token at the end, where nothing follows; what is said of it is 0."""
    policy = made("qwen3_5", layers=2)
    forbidden = policy.tokenizer.convert_tokens_to_ids("<|vision_end|>")
    assert forbidden in policy.forbidden_ids
    stop_ids, rows = policy.stop_ids, two_turns(policy, prompts_of(policy, questions()[:2]))
    policy.stop_ids = stop_ids
    for row in set_advantages(moved_away(rows, 0.1)):
        row.tokens[-1] = forbidden
        row.reading, row.rewards = grpo.Reading(None, False), {"right": 0.0}
        row.reference_logprobs = row.logprobs - 0.1
        for name in GARBAGE:
            setattr(row, name, getattr(row, name).masked_fill(~row.trained, 0.0))
    return policy, rows


def spoiled(rows):
    """Copies whose untrained tokens hold garbage."""
    return [dataclasses.replace(row, **{name: getattr(row, name).masked_fill(~row.trained, value)
                                        for name, value in GARBAGE.items()}) for row in rows]


@pytest.mark.parametrize("kl_coef", [0.0, 0.5])
@pytest.mark.parametrize("name", LOSS_FNS)
def test_what_untrained_tokens_hold_changes_nothing(turns, name, kl_coef):
    policy, rows = turns
    config, found = grpo.Config(loss_fn=name, kl_coef=kl_coef, max_grad_norm=0, tokens_per_micro_batch=260), []
    for each in (rows, spoiled(rows)):
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
        optimizer.register_step_pre_hook(lambda *_: found.append([p.grad.clone() for p in policy.parameters()]))
        found.append(grpo.update(policy, optimizer, each, config))
        batch = grpo.Batch(each, 2)
        found.append({key: value for key, value in batch_metrics(batch, batch.rewards, 1.0).items()
                      if not key.startswith("memory/")})
        found.append([grpo.training_rows(batch, config).index(row) for row in each])
    (gradients, learned, sampled, trained), others = found[:4], found[4:]
    assert all(torch.equal(a, b) for a, b in zip(gradients, others[0], strict=True))
    assert [learned, sampled, trained] == others[1:]
    assert all(math.isfinite(value) for value in learned.values()) and learned["trainer/grad_norm"] > 0
    assert sampled["rollout/completion_tokens_mean"] == sum(row.length for row in rows) / len(rows)


def test_a_group_without_advantages_that_train_is_skipped(turns):
    policy, rows = turns
    rows = [dataclasses.replace(row, advantage=torch.where(row.trained, 0.0, 3.0)) for row in rows[:2]] + rows[2:]
    assert grpo.training_rows(grpo.Batch(rows, 2), grpo.Config()) == rows[2:]


# Whole steps


def rewarding(informative):
    """A task whose k-th group of four has unequal rewards if `informative(k)`."""
    drawn = itertools.count()

    def right(answer, question):
        row = next(drawn)
        return row % 2 if informative(row // 4) else 0

    return dataclasses.replace(grpo.GEOQA, rewards={"right": right})


def step(policy, task, config, order=None, **hooks):
    """One step on the three questions -> (metrics, Batch); the policy stays as it is."""
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    return grpo.train_step(policy, optimizer, order or Order(questions(), 0), config, task, **hooks)


class Asked(Order):
    """Notes how many questions each wave asks for."""

    def take(self, count):
        self.asked = [*getattr(self, "asked", []), count]
        return super().take(count)


@pytest.mark.parametrize("informative, asked, trained", [
    (lambda k: True, [2], 2),
    (lambda k: k in (1, 4), [2, 1, 1, 1], 2),
    (lambda k: k == 7, [2, 2, 2, 2], 1),  # the candidates are used up: a partial batch
    (lambda k: False, [2, 2, 2, 2], 0),
])
def test_dynamic_sampling_asks_for_what_is_missing(shared, informative, asked, trained):
    order = Asked([dataclasses.replace(question, id=f"q{i}") for i, question in enumerate(questions() * 3)], 0)
    config = grpo.Config(batch_size=2, group_size=4, max_tokens=6, dynamic_sampling=True)
    metrics, batch = step(shared(layers=2), rewarding(informative), config, order)
    assert order.asked == asked
    assert [question.id for question in batch.questions] == [f"q{i}" for i in range(sum(asked))]
    assert metrics["rollout/waves"] == len(asked) and metrics["rollout/questions"] == sum(asked) == len(batch.questions)
    assert metrics["train_datums"] == 4 * trained and metrics["informative_fraction"] == pytest.approx(
        trained / sum(asked))
    assert metrics["trainer/optimizer_steps"] == (trained > 0)
    assert not trained or metrics["trainer/dlogp_max"] <= 1e-4, "joined waves do not fit together"


def test_without_dynamic_sampling_one_wave_is_all(shared):
    order, config = Asked(questions(), 0), grpo.Config(batch_size=2, group_size=4, max_tokens=4)
    metrics, _ = step(shared(layers=2), rewarding(lambda k: False), config, order)
    assert order.asked == [2] and metrics["train_datums"] == 0 and metrics["trainer/loss_mean"] is None


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_vl"])
def test_joined_waves_are_the_waves(shared, family):
    """The learner finds for rows of several waves, in whatever order, what the sampler of each wave found."""
    policy = shared(family, layers=2)
    waves = [questions(), questions(1, sizes=((200, 64), (64, 64)), subjects=("短", "一个很长很长的题目" * 3))]
    waves = [grouped(prompts_of(policy, wave), 2) for wave in waves]
    policy.stop_ids = torch.arange(0, 256, 16)
    rows = [row for wave in waves for row in grpo.sample(policy, wave, 12)]
    rows = rows[::-1]
    assert len({len(row.tokens) for row in rows}) > 2
    found = grpo.frozen_logprobs(policy, rows, grpo.Config(tokens_per_micro_batch=500))
    assert all((own - row.logprobs).abs().max() <= 1e-4 for own, row in zip(found, rows, strict=True))
    assert not any(own.requires_grad for own in found)


def test_the_length_penalty_shapes_but_does_not_make_informative(shared):
    policy = shared(layers=2)
    config = grpo.Config(batch_size=3, group_size=4, max_tokens=8, overlong_penalty=True, advantage="grpo_std")
    policy.stop_ids = torch.arange(40)  # lengths differ, so penalties do
    metrics, batch = step(policy, rewarding(lambda k: k == 0), config)
    assert len({row.length for row in batch.rows}) > 1
    assert metrics["rollout/shaped_reward"] < metrics["reward"] == 2 / 12
    assert metrics["train_datums"] == 4
    assert all(row.advantage == 0 for row in batch.rows[4:]) and all(row.advantage != 0 for row in batch.rows[:4])


def test_the_length_penalty_counts_tokens_that_train(turns):
    _, rows = turns
    limit = max(row.length for row in rows)
    assert limit < len(rows[-1].tokens)
    config = grpo.Config(overlong_penalty=True, max_tokens=limit)
    batch = grpo.Batch([dataclasses.replace(row, reward=1.0) for row in rows], 2)
    shaped = grpo.set_advantages(batch, config).flatten()
    expected = [1 - max(0, row.length - (limit - limit // 4)) / (limit // 4) for row in rows]
    assert shaped.tolist() == pytest.approx(expected)


def test_masked_truncated_rows_do_not_train(shared):
    policy = shared(layers=2)
    policy.stop_ids = torch.arange(60)
    config = grpo.Config(batch_size=3, group_size=4, max_tokens=8, mask_truncated=True)
    metrics, batch = step(policy, rewarding(lambda k: True), config)
    assert 0 < sum(row.finished for row in batch.rows) == metrics["train_datums"] < 12


def test_with_a_kl_term_all_rows_train(shared):
    config = grpo.Config(batch_size=3, group_size=4, max_tokens=8, kl_coef=0.1)
    metrics, batch = step(shared(layers=2), rewarding(lambda k: False), config)
    assert metrics["train_datums"] == 12 and metrics["trainer/loss_mean"] > 0 and metrics["trainer/grad_norm"] > 0
    away = torch.cat([row.logprobs - row.reference_logprobs for row in batch.rows]).mean()
    assert metrics["trainer/base_kl_k1"] == pytest.approx(away.item(), abs=1e-6) and away.abs() > 1e-3


def test_the_kl_term_is_k3_of_policy_and_base(batch):
    """d/dtheta of coef / N sum (base/policy - 1 - log(base/policy)) = coef / N sum (1 - base/policy) dlogp/dtheta."""
    policy, rows = batch
    ours = gradient(policy, [dataclasses.replace(row, advantage=0.0) for row in rows], kl_coef=0.5)
    tokens = sum(row.length for row in rows)
    for row in rows:
        with torch.no_grad(), policy.model.disable_adapter():
            base = naive_logprobs(policy, row)
        logprobs = naive_logprobs(policy, row)
        (0.5 * (1 - (base - logprobs.detach()).exp()) / tokens * logprobs).sum().backward()
    assert relative(ours, adapter_gradient(policy)) <= 1e-5


def test_a_teacher_gives_each_token_its_advantage(shared):
    """In place of the comparison: groups of equal rewards train, and a group to which it gives nothing does not."""
    policy = shared(layers=2)

    def teacher(batch, config):
        for i, row in enumerate(batch.rows):
            row.advantage = torch.linspace(-1, 1, len(row.tokens)) * (i >= 4)
        return {"teacher/rows": len(batch.rows)}

    config = grpo.Config(batch_size=3, group_size=4, max_tokens=8)
    metrics, batch = step(policy, rewarding(lambda k: False), config, teacher=teacher)
    assert metrics["teacher/rows"] == 12 and metrics["train_datums"] == 8
    assert metrics["trainer/loss_mean"] == pytest.approx(reduced(policy, batch.rows[4:], "token", 0), abs=1e-5)


# Rewards, through a step


def test_rewards_of_several_kinds_are_weighed_and_logged_raw(shared):
    rewards = {"length": lambda answer, question: len(answer.tokens),  # int, bool and float
               "flag": lambda answer, question: question.id == "q1",
               "half": lambda answer, question: 0.5, "unused": lambda answer, question: 1 / 0}
    config = grpo.Config(batch_size=2, group_size=2, max_tokens=6, reward="length:0.5,flag:2,half:-1")
    metrics, batch = step(shared(layers=2), dataclasses.replace(grpo.GEOQA, rewards=rewards), config)
    for i, row in enumerate(batch.rows):
        assert row.rewards == {"length": len(row.tokens), "flag": i >= 2, "half": 0.5}
        assert row.reward == pytest.approx(0.5 * len(row.tokens) + 2 * (i >= 2) - 0.5)
    assert metrics["reward/flag"] == metrics["reward/half"] == 0.5
    assert metrics["reward/length"] == sum(len(row.tokens) for row in batch.rows) / 4
    assert metrics["reward"] == pytest.approx(sum(row.reward for row in batch.rows) / 4)


@pytest.mark.parametrize("value", [None, math.nan, math.inf, "many", ZeroDivisionError("by zero")])
def test_a_reward_that_is_no_number_is_one_line(shared, value):
    def broken(answer, question):
        if question.id != "q1":
            return 1
        if isinstance(value, Exception):
            raise value
        return value

    config = grpo.Config(batch_size=2, group_size=2, max_tokens=2, reward="broken")
    with pytest.raises(UserError, match="broken.*q1") as error:
        step(shared(layers=2), dataclasses.replace(grpo.GEOQA, rewards={"broken": broken}), config)
    assert "\n" not in str(error.value)


def test_overlong_penalty():
    lengths = torch.tensor([0, 60, 75, 76, 80, 100])
    expected = torch.tensor([0.0, 0.0, 0.0, -1 / 25, -0.2, -1.0])
    assert torch.allclose(grpo.overlong_penalty(lengths, 100), expected)
