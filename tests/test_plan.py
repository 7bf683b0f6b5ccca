"""The memory plan against the allocations of real runs, in float32 on the CPU, and what it chooses and says."""

import dataclasses
import functools
import inspect
import os
import time

import bitsandbytes as bnb
import pytest
import torch
from batches import prompts_of, questions
from conftest import FAMILIES
from torch.profiler import ProfilerActivity, profile

import grpo
from support import models
from support import plan
from support import command_line
from support.errors import UserError

GIB = 2**30


def allocated_at_most(run):
    """Highest running sum of the allocations that torch.profiler records while `run()` runs, bytes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def plan_of(policy, prompt, fused=(False,), **flags):
    config = grpo.Config(device="cpu", lora_rank=4, **flags)
    return plan.make_plans(grpo, config, policy.base.config, prompt, fused)[0]


@pytest.fixture(scope="module")
def mid_size(tmp_path_factory):
    """A Qwen3.5 of 5 M parameters with six layers, in which no phase is small change."""
    import tiny

    folder = tmp_path_factory.mktemp("mid")
    tiny.make_policy_folder(folder, hidden=256, layers=6)
    return lambda **flags: grpo.load_policy(grpo.Config(base_model=str(folder), device="cpu", lora_rank=4, **flags))


def check_phases(policy, max_tokens, **flags):
    """The plan is within 15 % of what prefill, decoding and learning allocate."""
    policy.stop_ids = torch.tensor([-1])  # every completion takes its full length: the worst case
    one, three = (prompts_of(policy, questions()[1:2] * count) for count in (1, 3))
    for prompts in (one, three):
        grpo.encode_figures(policy.base, prompts)
    planned = plan_of(policy, one.input_ids.shape[1], max_tokens=max_tokens, **flags)
    caches, rollouts = [], []
    with torch.no_grad():
        allocated = allocated_at_most(lambda: caches.append(grpo.prefill(policy, three, torch.arange(3))))
    assert allocated == pytest.approx(planned.prefill(3, 1), rel=0.15)
    allocated = allocated_at_most(lambda: rollouts.append(grpo.sample(policy, one, 20, max_tokens)))
    assert allocated == pytest.approx(planned.decoding(20), rel=0.15) and planned.prefill(20, 20) < allocated
    rollouts[0].lengths[1] -= 1  # padding, without which attention needs no mask
    for parameter in policy.parameters():
        parameter.grad = torch.zeros_like(parameter)  # counted with the adapter
    for rows in (4, 20):
        allocated = allocated_at_most(lambda: grpo.accumulate_gradients(
            policy, one, rollouts[0], torch.ones_like(rollouts[0].logprobs), torch.arange(rows),
            grpo.Config(tokens_per_micro_batch=10**6)))
        expected = planned.learning_peak(rows * planned.width) - planned.fixed - planned.adapter
        assert allocated == pytest.approx(expected, rel=0.15), rows


@pytest.mark.parametrize("family, checkpointing", [
    ("qwen3_5", "on"), ("qwen2_5_vl", "off"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("qwen3_5", "off"), ("qwen2_5_vl", "on"), ("qwen2_vl", "on"), ("qwen3_vl", "on")))])
def test_plan_of_a_tiny_model(load, family, checkpointing):
    check_phases(load(family, activation_checkpointing=checkpointing), 24, activation_checkpointing=checkpointing)


@pytest.mark.slow
def test_plan_of_a_mid_size_model(mid_size):
    check_phases(mid_size(activation_checkpointing="on"), 60, activation_checkpointing="on")


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_and_adapter_are_counted_exactly(load, family):
    policy = load(family)
    planned = plan_of(policy, 64, max_tokens=8)
    base = sum(p.nbytes for name, p in policy.base.named_parameters() if "lora_" not in name)
    assert sum(planned.weights.values()) == base
    assert planned.adapter == sum(p.nbytes for p in policy.parameters())


def test_the_plan_of_an_evaluation_is_of_no_training(load, monkeypatch):
    policy, made = load(), []
    monkeypatch.setattr(plan, "model_config", lambda *_: (policy.base.config, "a test"))
    make_plans = plan.make_plans
    monkeypatch.setattr(plan, "make_plans", lambda *args: made.extend(make_plans(*args)) or made)
    text = plan.plan_text(grpo, grpo.Config(device="cuda", lora_rank=4, max_tokens=8, eval_only=True, eval_batch_size=3,
                                            group_size=0))
    assert "learning" not in text and "3 questions x 1 completions" in text and "peak of evaluation" in text
    assert all(planned.optimizer == 0 for planned in made)


def test_a_teacher_is_counted(load, folders):
    planned = plan_of(load("qwen3_vl"), 64, max_tokens=8, advantage="opd", teacher_model=str(folders("qwen3_5")))
    teacher = load("qwen3_5").base
    assert planned.weights["teacher"] == sum(p.nbytes for name, p in teacher.named_parameters() if "lora_" not in name)


def test_nf4_weights_are_counted(mid_size):
    """Real NF4 weights and their scales; the plan's share of a scale is exact but for blocks that are not full."""
    policy = mid_size(quantization="nf4")
    planned = plan_of(policy, 64, max_tokens=8, quantization="nf4")
    four_bit = [module.weight for module in policy.base.modules() if isinstance(module, bnb.nn.Linear4bit)]
    state = [weight.quant_state for weight in four_bit]
    stored = sum(w.nbytes + s.absmax.nbytes + s.state2.absmax.nbytes for w, s in zip(four_bit, state))
    assert planned.weights["language model, 4-bit"] == pytest.approx(stored, rel=0.01)


@pytest.fixture(scope="module")
def article():
    """The plans of the article's setting, and the CPU seconds that they took."""
    started = time.process_time()
    whole = plan.model_config(plan.DEFAULT_MODEL)[0]
    return plan.make_plans(grpo, grpo.Config(), whole), time.process_time() - started


def test_the_default_model_is_that_of_the_notes(article):
    """DESIGN.md section 4: 4.54 B parameters, 60.9 M in the adapter, 3.9 GB in 4-bit; 2.9 + 3.2 GB of cache."""
    torch_reference, fused = article[0]
    assert torch_reference.adapter / 4 == pytest.approx(60.9e6, rel=0.01)
    assert sum(torch_reference.weights.values()) == pytest.approx(3.9e9, rel=0.05)
    for planned in article[0]:
        assert planned.sampled["recurrent"](64) == pytest.approx(3.2e9, rel=0.05)
        assert planned.sampled["attention"](64) == pytest.approx(64 * 1536 * 32 * 1024, rel=0.02)
    assert fused.learning_peak(15000) < torch_reference.learning_peak(15000)


def test_the_default_setting_fits_24_gib(article):
    for planned in article[0]:
        chosen, peaks = planned.choose(24 * GIB)
        assert planned.advice(24 * GIB) == "" and max(peaks.values()) < plan.room_of(24 * GIB)
        assert list(peaks) == ["sampling", "learning", "evaluation"]
        assert chosen.rollouts_at_once == 64 and chosen.tokens_per_micro_batch >= 4 * planned.width


def test_the_peak_of_a_phase_has_all_that_is_there_at_once(article):
    planned = article[0][0]
    few = planned.sampling_peak(8, 1) - planned.fixed
    assert few >= planned.prefill(8, 1) > planned.decoding(8), "prefill is the highest moment of few rows"
    assert planned.sampling_peak(64, 8) - planned.fixed >= planned.decoding(64) > planned.prefill(64, 8)
    learned = planned.learning_peak(4 * planned.width) - planned.fixed
    assert learned >= planned.adapter + planned.learned["kept"](4) + planned.learned["layers"](4), "gradient too"


def test_smaller_cards_get_smaller_waves_and_micro_batches(article):
    planned = article[0][0]
    choices = [planned.choose(size * GIB)[0] for size in (24, 12, 10, 8)]
    rows, tokens = [c.rollouts_at_once for c in choices], [c.tokens_per_micro_batch for c in choices]
    assert rows == sorted(rows, reverse=True) and rows[-1] < 64
    assert tokens == sorted(tokens, reverse=True) and tokens[-1] < tokens[0]
    for size, choice in zip((12, 10, 8), choices[1:]):
        assert max(planned.choose(size * GIB)[1].values()) <= plan.room_of(size * GIB)
        more = dataclasses.replace(choice, rollouts_at_once=choice.rollouts_at_once + 1)
        if choice.rollouts_at_once < 64:
            assert planned.sampling_peak(more.rollouts_at_once, 1) > plan.room_of(size * GIB)


@pytest.mark.parametrize("card, flags, advice", [
    (24, {"tokens_per_micro_batch": 40000}, "--tokens-per-micro-batch "), (24, {"rollouts_at_once": 400},
                                                                           "--rollouts-at-once "),
    (8, {"quantization": "none"}, "--quantization nf4"), (5, {}, "a smaller --base-model"),
    (24, {"activation_checkpointing": "off", "tokens_per_micro_batch": 40000}, "--activation-checkpointing on")])
def test_what_does_not_fit_names_the_flag(article, card, flags, advice):
    planned = article[0][0]
    other = object.__new__(plan.Plan)
    other.__dict__.update(planned.__dict__, config=dataclasses.replace(planned.config, batch_size=50, **flags))
    if flags.get("quantization") == "none":
        other.weights = {"language model": 9.1e9}
    assert other.advice(card * GIB).startswith(advice)


def test_the_plan_of_the_command_line(monkeypatch, capsys, article):
    monkeypatch.setattr(plan, "make_plans", lambda *_: article[0])
    command_line.run_command_line(grpo.Config, grpo.main, ["--plan"])
    text = capsys.readouterr().out
    for words in ("keys and values", "recurrent states", "AdamW", "the largest layer", "a chunk of logits",
                  "peak of sampling", "peak of learning", "torch reference", "flash-linear-attention", "24 GiB  fits",
                  "16 GiB  fits", "12 GiB  fits"):
        assert words in text, words
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("arguments", [["--group-size", "0"], ["--max-tokens", "0"], ["--eval-only", "--no-evaluate"]])
def test_a_wrong_flag_of_a_plan_is_one_line(capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        command_line.run_command_line(grpo.Config, grpo.main, ["--plan", *arguments])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.startswith(f"error: {arguments[0]}") and err.count("\n") == 1


def test_planning_runs_no_kernel_that_is_installed(load, monkeypatch):
    """flash-linear-attention's and causal-conv1d's cannot run on tensors without data."""
    import transformers.models.qwen3_5.modeling_qwen3_5 as qwen

    policy = load()
    for name in models.KERNELS:
        @functools.wraps(inspect.unwrap(getattr(qwen, name)))
        def kernel(*_, **__):
            raise RuntimeError("no data")

        monkeypatch.setattr(qwen, name, kernel)
    plan.make_plans(grpo, grpo.Config(device="cpu", lora_rank=4, max_tokens=8), policy.base.config, 64, (False, True))
    assert all(hasattr(getattr(qwen, name), "__wrapped__") for name in models.KERNELS), "not put back"


def test_advice_to_shorten_fits(article):
    """Where one row is too much: the length that is named fits, by the plan of that length."""
    planned = article[0][0]
    flag, length = planned.advice(6.6 * GIB).split()
    assert flag == "--max-tokens"
    again, = plan.make_plans(grpo, grpo.Config(max_tokens=int(length)), plan.model_config(plan.DEFAULT_MODEL)[0],
                             fused=(False,))
    assert again.advice(6.6 * GIB) == ""


def test_planning_is_quick(article):
    assert article[1] < 20, f"{article[1]:.1f} s of CPU time"


def test_a_model_without_config_is_one_error(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="needs config.json"):
        plan.model_config(str(tmp_path / "empty"))


# In a real run


def test_choice_and_dry_run_before_the_first_step(load, monkeypatch, capsys):
    """What happens on CUDA, here on the CPU: longest prompts, what is left open chosen, the worst case tried."""
    policy = load(adapter=True)
    batch = questions() + questions(1)
    config = grpo.Config(device="cpu", lora_rank=4, batch_size=2, group_size=3, max_tokens=150)
    monkeypatch.setattr(plan, "card_bytes", lambda device: plan.RESERVE + 2**25)
    monkeypatch.setattr(grpo, "PREFILL_TOKENS", 200)
    widths, rows = [], []
    policy.base.model.language_model.register_forward_pre_hook(
        lambda module, args, inputs: widths.append(inputs["inputs_embeds"].shape[:2]), with_kwargs=True)
    accumulate = grpo.accumulate_gradients
    monkeypatch.setattr(grpo, "accumulate_gradients", lambda *args: rows.append(len(args[4])) or accumulate(*args))
    plan.fit_memory(grpo, policy, batch, config)
    longest = max(prompts_of(policy, batch).attention_mask.sum(1).tolist())
    assert config.rollouts_at_once >= 1 and config.tokens_per_micro_batch >= longest + 150
    assert max(width for _, width in widths) == longest + 150 and (min(6, config.rollouts_at_once), 1) in widths
    assert rows == [max(1, min(6, config.tokens_per_micro_batch // (longest + 150)))]
    assert all(p.grad is None for p in policy.parameters())
    assert "memory plan: --rollouts-at-once" in capsys.readouterr().out
    given = dataclasses.replace(config, rollouts_at_once=2, tokens_per_micro_batch=77)
    plan.fit_memory(grpo, policy, batch, given)
    assert (given.rollouts_at_once, given.tokens_per_micro_batch) == (2, 77)


def dry_run_sizes(policy, monkeypatch, batch, **flags):
    """Runs fit_memory -> shapes of the language model's inputs (rows, new tokens): those of decoding, and the last."""
    shapes = []
    with monkeypatch.context() as patch:
        patch.setattr(plan, "card_bytes", lambda device: 100 * GIB)
        hook = policy.base.model.language_model.register_forward_pre_hook(
            lambda module, args, inputs: shapes.append(tuple(inputs["inputs_embeds"].shape[:2])), with_kwargs=True)
        plan.fit_memory(grpo, policy, batch, grpo.Config(device="cpu", lora_rank=4, max_tokens=20, **flags))
        hook.remove()
    return [shape for shape in shapes if shape[1] == 1], shapes[-1]


def test_the_dry_run_takes_what_a_step_takes(load, monkeypatch):
    policy, batch = load(), questions()
    longest = max(prompts_of(policy, batch).attention_mask.sum(1).tolist())
    # Five questions of three: a step repeats two. A KL term has base log-probabilities.
    assert dry_run_sizes(policy, monkeypatch, batch, batch_size=5, group_size=2, kl_coef=0.1) == (
        [(10, 1)], (10, longest + 20))
    # One row fits into a micro-batch: it is the longest.
    assert dry_run_sizes(policy, monkeypatch, batch, batch_size=3, group_size=2, tokens_per_micro_batch=10) == (
        [(6, 1)], (1, longest + 20))


def test_the_dry_run_of_an_evaluation_has_its_size(load, monkeypatch):
    for size, rows in ((2, 2), (5, 3)):  # three questions are no more than three
        decoded, last = dry_run_sizes(load(), monkeypatch, questions(), eval_only=True, eval_batch_size=size,
                                      batch_size=1, group_size=0)
        assert decoded == [(rows, 1)] and last == (rows, 1), "it learned"


@pytest.mark.parametrize("place, phase, flag", [("prefill", "sampling", "--rollouts-at-once"),
                                                ("micro_batches", "learning", "--tokens-per-micro-batch")])
def test_a_dry_run_that_does_not_fit_stops_with_advice(load, monkeypatch, place, phase, flag):
    def no_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    policy = load()
    monkeypatch.setattr(grpo, place, no_memory)
    config = grpo.Config(device="cpu", lora_rank=4, batch_size=2, group_size=3, max_tokens=20)
    with pytest.raises(UserError, match=f"out of GPU memory in {phase}.*{flag}.*helps most"):
        plan.fit_memory(grpo, policy, questions(), config)


@pytest.mark.parametrize("place, flag", [("prefill", "--rollouts-at-once"),
                                         ("completion_logprobs", "--tokens-per-micro-batch")])
def test_running_out_of_memory_names_phase_and_flag(load, monkeypatch, place, flag):
    def no_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    policy = load()
    prompts = prompts_of(policy, questions())
    rollouts = grpo.sample(policy, prompts, 2, 4)
    monkeypatch.setattr(grpo, place, no_memory)
    with pytest.raises(UserError, match=f"lower {flag}"):
        if place == "prefill":
            grpo.sample(policy, prompts, 2, 4)
        else:
            grpo.accumulate_gradients(policy, prompts, rollouts, rollouts.logprobs, torch.arange(6), grpo.Config())


# The learner's own memory


def naive_logprobs(policy, prompts, rollouts):
    """Whole logits of a whole forward pass: one row, no chunks, nothing made again."""
    completion = rollouts.tokens[0, :rollouts.lengths[0]]
    logits = policy.base(
        input_ids=torch.cat([prompts.input_ids[0], completion])[None], pixel_values=prompts.pixel_values,
        image_grid_thw=prompts.image_grid_thw, mm_token_type_ids=torch.nn.functional.pad(
            prompts.mm_token_type_ids, (0, len(completion))), use_cache=False).logits[0, -len(completion) - 1:-1]
    logits = logits.index_fill(-1, policy.forbidden_ids, -torch.inf)
    return logits.log_softmax(-1).gather(1, completion[:, None])[:, 0]


@pytest.mark.slow
def test_learner_memory_does_not_grow_with_length_times_vocabulary(tmp_path, monkeypatch):
    """A vocabulary of 248,320 and four rows of 1,024 tokens: whole logits alone would be 4 GB, and as much again."""
    import tiny

    right = tiny.model_config
    monkeypatch.setattr(tiny, "model_config", lambda family, ids, vocab_size, hidden, layers: right(
        family, ids, 248320, hidden, layers))
    tiny.make_policy_folder(tmp_path, hidden=256, layers=2)
    policy = grpo.load_policy(grpo.Config(base_model=str(tmp_path), device="cpu", lora_rank=4))
    prompts = prompts_of(policy, questions()[:1])
    grpo.encode_figures(policy.base, prompts)

    def rollouts(rows, length):
        tokens = torch.randint(0, 200, (rows, length), generator=torch.Generator().manual_seed(0))
        return grpo.Rollouts(tokens, torch.zeros(rows, length), torch.zeros(rows, length),
                             torch.full((rows,), length), torch.zeros(rows, dtype=torch.bool), 1.0)

    torch.set_num_threads(min(2, os.cpu_count()))
    long = rollouts(4, 1024)
    assert allocated_at_most(lambda: grpo.completion_logprobs(policy, prompts, long, range(4)).sum().backward()) < 1e9
    short, gradients = rollouts(1, 256), []
    for find in (lambda: grpo.completion_logprobs(policy, prompts, short, [0]),
                 lambda: naive_logprobs(policy, prompts, short)):
        for parameter in policy.parameters():
            parameter.grad = None
        find().sum().backward()
        gradients.append(torch.cat([p.grad.flatten().double() for p in policy.parameters()]))
    torch.set_num_threads(1)
    assert (gradients[0] - gradients[1]).norm() <= 1e-5 * gradients[1].norm()
