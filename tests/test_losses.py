"""Every loss, reduction and advantage against a closed form in float64; the parts of a step that go with them."""

import dataclasses
import math

import pytest
import torch
from batches import prompts_of, questions, uneven_rollouts
from test_core import gradient, relative

import grpo
from support import rundir
from support.errors import UserError

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
    """Loss and derivative by logp of each token, written out number by number."""
    loss, slope = torch.zeros_like(logp), torch.zeros_like(logp)
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
            elif name == "ppo":
                flat = (a > 0 and ratio > 1 + high) or (a < 0 and ratio < 1 - low)
                loss[i, t] = -a * (min(max(ratio, 1 - low), 1 + high) if flat else ratio)
                slope[i, t] = 0.0 if flat else -ratio * a
            else:
                flat = (a > 0 and s > 1 + high) or (a < 0 and s < 1 - low)
                loss[i, t] = -a * (min(max(s, 1 - low), 1 + high) if flat else s)
    if name == "gspo":  # each of the row's losses depends on each of its tokens: d s / d logp_t = s / length
        for i in range(len(logp)):
            length = int(mask[i].sum())
            s = math.exp(sum(logp[i, t].item() - old[i, t].item() for t in range(length)) / length)
            for t in range(length):
                flat = [(advantages[i, u] > 0 and s > 1 + high) or (advantages[i, u] < 0 and s < 1 - low)
                        for u in range(length)]
                slope[i, t] = sum(-advantages[i, u].item() * s / length for u in range(length) if not flat[u])
    return loss, slope


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", list(grpo.LOSS_FNS))
def test_value_and_gradient_are_the_closed_form(name, seed):
    logp, old, advantages, mask = made_up(seed, scale=2.0)
    loss = grpo.LOSS_FNS[name](logp, old, advantages, mask).expand_as(logp)
    loss[mask].sum().backward()
    expected, slope = closed_form(name, logp.detach(), old, advantages, mask, **BOUNDS[name])
    assert torch.allclose(loss[mask], expected[mask], rtol=1e-12, atol=1e-14)
    assert torch.allclose(logp.grad[mask], slope[mask], rtol=1e-12, atol=1e-14)
    assert (logp.grad[~mask] == 0).all()


def test_the_made_up_ratios_lie_on_both_sides_of_every_bound():
    ratios = torch.cat([(logp.detach() - old).exp()[mask] for logp, old, _, mask in map(lambda s: made_up(s, 2.0),
                                                                                        range(4))])
    for bound in (0.8, 1.2, 4.0):
        assert (ratios < bound).any() and (ratios > bound).any()


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "gspo"])
def test_finite_differences_agree_away_from_the_kinks(name):
    logp, old, advantages, mask = made_up(1, scale=0.05 if name == "ppo" else 1e-5 if name == "gspo" else 1.0)
    loss_fn = grpo.LOSS_FNS[name]
    loss_fn(logp, old, advantages, mask).expand_as(logp)[mask].sum().backward()
    step = 1e-7
    for i, t in mask.nonzero().tolist():
        moved = [logp.detach().clone(), logp.detach().clone()]
        moved[0][i, t] -= step
        moved[1][i, t] += step
        values = [loss_fn(m, old, advantages, mask).expand_as(logp)[mask].sum() for m in moved]
        slope = ((values[1] - values[0]) / (2 * step)).item()
        assert slope == pytest.approx(logp.grad[i, t].item(), rel=1e-5, abs=1e-7)


def test_cispo_differences_with_the_clipped_ratio_frozen():
    logp, old, advantages, mask = made_up(1, scale=2.0)
    grpo.cispo(logp, old, advantages, mask)[mask].sum().backward()
    frozen = (logp.detach() - old).exp().clamp(0, 4)
    assert torch.allclose(logp.grad[mask], (-frozen * advantages)[mask])


def test_bounds_are_keyword_arguments_and_flags():
    logp, old, advantages, mask = made_up(2, scale=2.0)
    tight, wide = (grpo.ppo(logp, old, advantages, mask, low=b, high=b) for b in (0.01, 0.9))
    assert not torch.equal(tight[mask], wide[mask])
    config = grpo.Config(loss_fn="ppo", clip_high=0.28)
    assert grpo.loss_bounds(config) == {"low": 0.2, "high": 0.28}
    assert grpo.loss_bounds(grpo.Config(loss_fn="gspo")) == BOUNDS["gspo"]
    assert grpo.loss_bounds(grpo.Config()) == {}


# Reductions


def test_reductions():
    mask = torch.arange(7) < torch.tensor([7, 1, 4])[:, None]
    loss = torch.randn(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows = [loss[0, :7], loss[1, :1], loss[2, :4]]
    expected = {"token": sum(r.sum() for r in rows) / 12, "sequence": sum(r.mean() for r in rows) / 3,
                "constant": sum(r.sum() for r in rows) / (3 * 7)}
    for name, value in expected.items():
        weights = grpo.LOSS_REDUCTIONS[name](mask.double(), 7)
        assert ((weights * loss)[mask].sum() - value).abs() < 1e-12 and (weights[~mask] == 0).all()


@pytest.fixture(scope="module")  # no test changes it
def moved(load):
    """A policy, and uneven rollouts from which it has moved away: ratios are not 1."""
    policy = load(adapter=True)
    prompts = prompts_of(policy, questions())
    rollouts = uneven_rollouts(policy, prompts)
    rollouts.logprobs -= (0.02 * torch.randn(rollouts.logprobs.shape, generator=torch.Generator().manual_seed(0))
                          * rollouts.mask)
    advantages = torch.randn(12, 1, generator=torch.Generator().manual_seed(1)).expand_as(rollouts.logprobs)
    return policy, prompts, rollouts, advantages


@pytest.mark.parametrize("name, reduction", [(n, r) for n in grpo.LOSS_FNS for r in grpo.LOSS_REDUCTIONS
                                             if n != "gspo" or r == "sequence"])
def test_micro_batches_change_nothing(moved, name, reduction):
    five, whole = (gradient(*moved, size, loss_fn=name, loss_reduction=reduction) for size in (800, 10**6))
    assert whole.norm() > 0 and relative(five, whole) <= 1e-5


def test_micro_batches_change_nothing_with_a_kl_term(moved):
    policy, prompts, rollouts, advantages = moved
    with policy.model.disable_adapter():
        base = grpo.frozen_logprobs(policy, prompts, rollouts, grpo.Config())
    five, whole = (gradient(*moved, size, kl_coef=0.5, base_logprobs=base) for size in (800, 10**6))
    assert relative(five, whole) <= 1e-5
    assert relative(gradient(*moved, 10**6), whole) > 1e-3, "the KL term has no gradient"


def test_all_losses_agree_at_ratio_one(load):
    policy = load(adapter=True)
    prompts = prompts_of(policy, questions())
    rollouts = uneven_rollouts(policy, prompts)
    advantages = torch.randn(12, 1, generator=torch.Generator().manual_seed(1)).expand_as(rollouts.logprobs)
    batch = policy, prompts, rollouts, advantages
    token = gradient(*batch, 800)
    for name in ("ppo", "cispo"):
        assert relative(gradient(*batch, 800, loss_fn=name), token) <= 1e-4, name
    sequence = gradient(*batch, 800, loss_reduction="sequence")
    assert relative(gradient(*batch, 800, loss_fn="gspo"), sequence) <= 1e-4
    assert relative(sequence, token) > 1e-2


def test_losses_differ_from_the_second_update_on(folders):
    after = {}
    for name in grpo.LOSS_FNS:
        config = grpo.Config(base_model=str(folders()), device="cpu", lora_rank=4, loss_fn=name, updates_per_rollout=2,
                             loss_reduction="sequence")
        policy = grpo.load_policy(config)
        prompts = prompts_of(policy, questions())
        torch.manual_seed(0)
        rollouts = grpo.sample(policy, prompts, 4, 12)
        advantages = torch.randn(12, 1, generator=torch.Generator().manual_seed(1)).expand_as(rollouts.logprobs)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-2)
        metrics = grpo.update(policy, optimizer, prompts, rollouts, advantages, torch.arange(12), config)
        assert metrics["trainer/optimizer_steps"] == 2 and metrics["trainer/ratio_max"] > 1.2
        assert metrics["trainer/dlogp_max"] <= 1e-4, "dlogp must be that of the first update"
        clipped = [value for key, value in metrics.items() if key.endswith("clip_fraction")]
        first = [value for key, value in metrics.items() if key.endswith("clip_fraction_first")]
        assert not clipped or (clipped[0] > 0 and first[0] == 0), (name, metrics)
        after[name] = torch.cat([p.detach().flatten() for p in policy.parameters()])
    names = list(after)
    for i, a in enumerate(names):
        for b in names[i + 1:]:
            assert not torch.allclose(after[a], after[b], rtol=1e-4, atol=1e-6), (a, b)


def test_minibatches_cover_every_row_once(moved, monkeypatch):
    policy, prompts, rollouts, advantages = moved
    seen = []
    right = grpo.accumulate_gradients

    def spy(policy, prompts, rollouts, advantages, rows, *others):
        seen.append(rows.tolist())
        return right(policy, prompts, rollouts, advantages, rows, *others)

    monkeypatch.setattr(grpo, "accumulate_gradients", spy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.0)
    config = grpo.Config(updates_per_rollout=2, minibatches=3)
    metrics = grpo.update(policy, optimizer, prompts, rollouts, advantages, torch.arange(1, 12), config)
    assert metrics["trainer/optimizer_steps"] == 6 and metrics["train_datums"] == 11
    for rounds in (seen[:3], seen[3:]):
        assert sorted(row for rows in rounds for row in rows) == list(range(1, 12))
    assert seen[:3] != seen[3:]


# Diagnostics


def test_diagnostics_of_clipping():
    ratio = torch.tensor([[0.5, 1.0, 1.5, 9.0], [0.5, 1.0, 1.5, 9.0]])
    advantages = torch.tensor([[1.0] * 4, [-1.0] * 4])
    old = torch.zeros(2, 4)
    mask = torch.tensor([[True] * 4, [True, True, True, False]])
    ppo = grpo.loss_diagnostics("ppo", ratio.log(), old, advantages, mask, 0.2, 0.2)
    assert (ppo["ppo/clip_fraction_low"], ppo["ppo/clip_fraction_high"]) == pytest.approx((1 / 7, 2 / 7))
    assert ppo["ppo/clip_fraction"] == pytest.approx(3 / 7)
    assert (ppo["trainer/ratio_min"], ppo["trainer/ratio_max"]) == pytest.approx((0.5, 9.0))
    cispo = grpo.loss_diagnostics("cispo", ratio.log(), old, advantages, mask, 0.0, 4.0)
    assert cispo["cispo/clip_fraction_high"] == pytest.approx(1 / 7)
    assert cispo["cispo/ratio_mean"] == pytest.approx((0.5 + 1 + 1.5 + 9 + 0.5 + 1 + 1.5) / 7)
    gspo = grpo.loss_diagnostics("gspo", ratio.log(), old, advantages, mask, 3e-4, 4e-4)
    # Row 0 moved up with a positive advantage and is clipped; row 1 (0.75 in product) moved down with a negative one.
    assert (gspo["gspo/sequence_clip_fraction_high"], gspo["gspo/sequence_clip_fraction_low"]) == (0.5, 0.5)
    log = ratio.log()[mask]
    assert ppo["trainer/kl_k1"] == pytest.approx(-log.mean().item())
    assert ppo["trainer/kl_k3"] == pytest.approx((log.exp() - 1 - log).mean().item()) and ppo["trainer/kl_k3"] > 0


# Extreme inputs


@pytest.mark.parametrize("difference", [50.0, -50.0])
@pytest.mark.parametrize("name", list(grpo.LOSS_FNS))
def test_extreme_ratios_stay_finite(name, difference):
    old = torch.full((3, 4), -60.0)
    logp = (old + difference).requires_grad_()
    mask = torch.arange(4) < torch.tensor([4, 1, 2])[:, None]
    for advantage in (1.0, -1.0, 0.0):
        loss = grpo.LOSS_FNS[name](logp, old, torch.full((3, 4), advantage), mask)
        (slope,) = torch.autograd.grad(loss.expand_as(logp)[mask].sum(), logp)
        assert loss.isfinite().all() and slope.isfinite().all() and slope.norm().isfinite()
        assert advantage or (slope == 0).all()
    assert all(map(math.isfinite, grpo.loss_diagnostics(name, logp, old, torch.ones(3, 4), mask,
                                                        **BOUNDS[name]).values()))


# Shaped rewards, dynamic sampling


def test_overlong_penalty():
    lengths = torch.tensor([0, 60, 75, 76, 80, 100])
    expected = torch.tensor([0.0, 0.0, 0.0, -1 / 25, -0.2, -1.0])
    assert torch.allclose(grpo.overlong_penalty(lengths, 100, 25), expected)


class Questioner:
    """Gives endless questions, and notes how many each wave asked for."""

    def __init__(self):
        self.asked, self.count = [], 0

    def __call__(self, count):
        self.asked.append(count)
        pool = questions() * count
        given = [dataclasses.replace(pool[i], id=f"q{self.count + i}") for i in range(count)]
        self.count += count
        return given


def graded_by_group(monkeypatch, informative):
    """Group k of a run has unequal rewards if `informative(k)`."""
    drawn = iter(range(10**6))

    def grade(text, label):
        row = next(drawn)
        return float(row % 2) if informative(row // 4) else 0.0

    monkeypatch.setattr(grpo, "grade", grade)


@pytest.mark.parametrize("informative, asked, trained", [
    (lambda k: True, [2], 2),
    (lambda k: k in (1, 4), [2, 1, 1, 1], 2),
    (lambda k: k == 5, [2, 2, 2], 1),  # the candidates are used up: a partial batch
    (lambda k: False, [2, 2, 2], 0),
])
def test_dynamic_sampling_asks_for_what_is_missing(load, monkeypatch, informative, asked, trained):
    policy, take = load(), Questioner()
    graded_by_group(monkeypatch, informative)
    config = grpo.Config(batch_size=2, group_size=4, max_tokens=6, dynamic_sampling=True, max_candidate_multiplier=3)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    metrics, batch, advantages = grpo.train_step(policy, optimizer, take, config)
    assert take.asked == asked
    assert metrics["rollout/waves"] == len(asked) and metrics["rollout/questions"] == sum(asked) == len(batch.questions)
    assert metrics["train_datums"] == 4 * trained and metrics["informative_fraction"] == pytest.approx(
        trained / sum(asked))
    assert metrics["trainer/optimizer_steps"] == (trained > 0)
    assert not trained or metrics["trainer/dlogp_max"] <= 1e-4, "joined waves do not fit together"


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_vl"])
def test_joined_waves_are_the_waves(load, family):
    """The learner finds for joined waves of unlike widths what the sampler of each wave found."""
    policy = load(family, adapter=True)
    waves = [questions(), questions(1, sizes=((200, 64), (64, 64)), subjects=("短", "一个很长很长的题目" * 3))]
    waves = [prompts_of(policy, wave) for wave in waves]
    assert waves[0].input_ids.shape[1] != waves[1].input_ids.shape[1]
    rollouts = [grpo.sample(policy, wave, 2, 12) for wave in waves]
    joined, together = grpo.join_prompts(waves), grpo.join_rollouts(rollouts)
    for wave in (joined, *waves):
        wave.pixel_values = None  # features must not be made again
    found = grpo.frozen_logprobs(policy, joined, together, grpo.Config(tokens_per_micro_batch=500))
    assert (found - together.logprobs)[together.mask].abs().max() <= 1e-4


def test_the_length_penalty_shapes_but_does_not_make_informative(load, monkeypatch):
    policy = load()
    graded_by_group(monkeypatch, lambda k: k == 0)
    config = grpo.Config(batch_size=3, group_size=4, max_tokens=8, overlong_penalty=True, normalize_std=True)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    policy.stop_ids = torch.arange(40)  # lengths differ, so penalties do
    metrics, batch, advantages = grpo.train_step(policy, optimizer, lambda count: questions(), config)
    assert len(set(batch.rollouts.lengths.tolist())) > 1
    assert metrics["rollout/shaped_reward"] < metrics["reward"]
    assert metrics["train_datums"] == 4 and (advantages[4:] == 0).all() and (advantages[:4, 0] != 0).any()


def test_masked_truncated_rows_do_not_train(load, monkeypatch):
    policy = load()
    graded_by_group(monkeypatch, lambda k: True)
    policy.stop_ids = torch.arange(60)
    config = grpo.Config(batch_size=3, group_size=4, max_tokens=8, mask_truncated=True)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    metrics, batch, _ = grpo.train_step(policy, optimizer, lambda count: questions(), config)
    assert 0 < batch.rollouts.finished.sum() == metrics["train_datums"] < 12


def test_with_a_kl_term_all_rows_train(load, monkeypatch):
    policy = load(adapter=True)
    graded_by_group(monkeypatch, lambda k: False)
    before = torch.cat([p.detach().flatten().clone() for p in policy.parameters()])
    config = grpo.Config(batch_size=3, group_size=4, max_tokens=8, kl_coef=0.1)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    metrics, _, _ = grpo.train_step(policy, optimizer, lambda count: questions(), config)
    assert metrics["train_datums"] == 12 and metrics["trainer/loss_mean"] > 0
    assert not torch.equal(before, torch.cat([p.detach().flatten() for p in policy.parameters()]))


def test_the_kl_term_is_k3_of_policy_and_base(moved):
    """d/dtheta of coef / N sum (base/policy - 1 - log(base/policy)) = coef / N sum (1 - base/policy) dlogp/dtheta."""
    policy, prompts, rollouts, advantages = moved
    with policy.model.disable_adapter():
        base = grpo.frozen_logprobs(policy, prompts, rollouts, grpo.Config())
    ours = gradient(policy, prompts, rollouts, 0 * advantages, 800, kl_coef=0.5, base_logprobs=base)
    logprobs = grpo.completion_logprobs(policy, prompts, rollouts, list(range(12)))
    mask = rollouts.mask
    weight = 0.5 * (1 - (base - logprobs.detach()).exp()) / mask.sum()
    (weight * logprobs)[mask].sum().backward()
    assert relative(ours, torch.cat([p.grad.flatten() for p in policy.parameters()])) <= 1e-5


# Distillation


def solved(answer="因为AB平行于CD，所以选A。"):
    return [dataclasses.replace(q, answer=answer) for q in questions()]


def test_opsd_advantage_is_teacher_minus_student(load):
    policy = load(adapter=True)
    config = grpo.Config(batch_size=3, group_size=4, max_tokens=12, advantage="opsd", distill_coef=0.5)
    batch = grpo.draw_batch(policy, solved(), config)
    advantages, metrics = grpo.distillation_advantages(policy, policy, batch, config)
    with_solution = grpo.encode_prompts(policy.tokenizer, policy.image_processor, solved(), with_solution=True)
    assert with_solution.input_ids.shape[1] > batch.prompts.input_ids.shape[1]
    with torch.no_grad(), policy.model.disable_adapter():
        teacher = grpo.completion_logprobs(policy, with_solution, batch.rollouts, list(range(12)))
    mask = batch.rollouts.mask
    assert torch.allclose(advantages[mask], 0.5 * (teacher - batch.rollouts.logprobs)[mask], atol=1e-5)
    assert metrics["opd/reverse_kl_mean"] == pytest.approx((batch.rollouts.logprobs - teacher)[mask].mean().item(),
                                                           abs=1e-5)
    assert (advantages[mask] != 0).all()


def test_the_solution_never_enters_the_students_input(load, monkeypatch):
    """Two runs whose solutions differ must give the student the same inputs, and the teacher others."""
    inputs = []
    for answer in ("甲" * 9, "乙丙" * 7):
        policy, seen = load(adapter=True), []
        model = policy.base.model
        model.register_forward_pre_hook(
            lambda module, args, kwargs, seen=seen, policy=policy: seen.append(
                (policy.model.base_model.model.model.language_model.layers[1].self_attn.q_proj.disable_adapters,
                 kwargs["input_ids"].tolist())), with_kwargs=True)
        config = grpo.Config(batch_size=3, group_size=4, max_tokens=6, advantage="opsd")
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
        torch.manual_seed(0)
        metrics, _, _ = grpo.train_step(policy, optimizer, lambda count, answer=answer: solved(answer), config, policy)
        assert metrics["train_datums"] == 12, "something was skipped"
        inputs.append(seen)
    students, teachers = ([[ids for off, ids in seen if off == adapter_off] for seen in inputs]
                          for adapter_off in (False, True))
    prefill = [calls[0] for calls in students]
    assert prefill[0] == prefill[1] and teachers[0] and teachers[0] != teachers[1]
    tokenizer = load().tokenizer
    for calls, answer in zip(students, ("甲甲甲", "乙丙乙丙"), strict=True):
        assert not any(answer in tokenizer.decode(row) for ids in calls for row in ids)
    assert all("甲甲甲" in tokenizer.decode(row) for ids in teachers[0] for row in ids)


def test_opd_with_another_model(load, folders, tmp_path):
    from tiny import make_policy_folder

    policy = load()
    config = grpo.Config(base_model=str(folders()), device="cpu", batch_size=3, group_size=4, max_tokens=6,
                         advantage="opd", teacher_model=str(make_policy_folder(tmp_path, seed=9)))
    teacher = grpo.load_teacher(policy, config)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    metrics, batch, advantages = grpo.train_step(policy, optimizer, lambda count: questions(), config, teacher)
    assert metrics["train_datums"] == 12 and abs(metrics["opd/reverse_kl_mean"]) > 1e-3
    itself = grpo.load_frozen(str(folders()), "", config)
    fresh = grpo.draw_batch(load(), questions(), config)
    advantages, _ = grpo.distillation_advantages(policy, itself, fresh, config)
    assert (advantages * fresh.rollouts.mask).abs().max() <= 1e-4, "a teacher equal to the student has nothing to teach"


def test_opd_needs_the_same_tokenizer(load, folders, tmp_path):
    from transformers import AutoTokenizer

    from tiny import make_policy_folder

    folder = make_policy_folder(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(folder)
    config = grpo.Config(device="cpu", advantage="opd", teacher_model=str(folder))
    with pytest.raises(UserError, match="another tokenizer"):
        grpo.load_teacher(load(), config)


def test_opsd_needs_solutions(load):
    from support.command_line import check_solutions

    assert grpo.load_teacher(policy := load(), grpo.Config(advantage="opsd", device="cpu")) is policy
    check_solutions(solved())
    with pytest.raises(UserError, match="3 questions have no worked solution .* the first is q0"):
        check_solutions(questions())


# Flags


@pytest.mark.parametrize("flags, message", [
    (dict(loss_fn="gspo", loss_reduction="token"), "gspo is a loss of whole sequences"),
    (dict(clip_low=0.1), "importance_sampling has no such bound"),
    (dict(advantage="opsd", dynamic_sampling=True), "--dynamic-sampling shapes rewards"),
    (dict(advantage="opd"), "go together"),
    (dict(teacher_model="x"), "go together"),
    (dict(overlong_penalty=True, overlong_cache=2000), "does not fit"),
    (dict(minibatches=0), "--minibatches must be at least 1"),
    (dict(kl_coef=-1.0), "--kl-coef must be 0 or more"),
    (dict(loss_fn="ppo", clip_high=float("nan")), "--clip-high must be 0 or more"),
    (dict(adapter="/no/such"), "no adapter_model.safetensors"),
])
def test_contradictory_flags(flags, message):
    from support.command_line import check_config

    with pytest.raises(UserError, match=message):
        check_config(grpo.Config(**flags), grpo.LOSS_FNS)


def test_dapo_preset_says_what_it_sets_and_leaves_what_was_given(capsys):
    config = grpo.with_preset(grpo.Config(algorithm="dapo", clip_high=0.3))
    assert (config.loss_fn, config.clip_low, config.clip_high, config.normalize_std) == ("ppo", 0.2, 0.3, True)
    assert config.dynamic_sampling and config.overlong_penalty and config.loss_reduction == "token"
    printed = capsys.readouterr().out
    assert "clip_low 0.2" in printed and "clip_high" not in printed
    assert grpo.with_preset(grpo.Config()) == grpo.Config()
    assert grpo.with_preset(grpo.Config(algorithm="dapo", loss_fn="cispo")).clip_high is None


def test_records_of_distillation_hold_the_mean_advantage(load):
    policy = load(adapter=True)
    config = grpo.Config(batch_size=3, group_size=4, max_tokens=6, advantage="opsd")
    batch = grpo.draw_batch(policy, solved(), config)
    advantages, _ = grpo.distillation_advantages(policy, policy, batch, config)
    record = rundir.rollout_records(batch, advantages)[5]
    assert record["advantage"] == pytest.approx(advantages[5, :record["length"]].mean().item(), abs=1e-6)


def test_a_loss_that_is_no_loss_of_tokens_is_refused(load, monkeypatch):
    policy = load()
    prompts = prompts_of(policy, questions())
    rollouts = grpo.sample(policy, prompts, 2, 4)
    monkeypatch.setitem(grpo.LOSS_FNS, "scalar", lambda logprobs, old, advantages, mask: (logprobs * advantages).mean())
    with pytest.raises(UserError, match=r"scalar gives a loss of shape \(\); it must give one for each token"):
        grpo.accumulate_gradients(policy, prompts, rollouts, rollouts.logprobs, torch.arange(6),
                                  grpo.Config(loss_fn="scalar"))
