"""The memory plan against the allocations of real runs, in float32 on the CPU, and what it chooses and says."""

import copy
import dataclasses
import functools
import inspect
import os
import time

import bitsandbytes as bnb
import pytest
import torch
from batches import grouped, naive_logprobs, prompts_of, questions
from conftest import FAMILIES
from torch.profiler import ProfilerActivity, profile

import grpo
from recipes import distill
from support import command_line, models, plan
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


def plan_of(policy, prompt, config_class=grpo.Config, **flags):
    config = config_class(device="cpu", lora_rank=4, **flags)
    return plan.make_plans(grpo.ALGORITHM, config, policy.base.config, prompt, (False,))[0]


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
    prompts = prompts_of(policy, questions()[1:2] * 3)
    prompt = len(prompts[0].ids)
    planned = plan_of(policy, prompt, max_tokens=max_tokens, group_size=20, **flags)
    caches, rows = [], []
    with torch.no_grad():
        allocated = allocated_at_most(lambda: caches.append(grpo.prefill(policy, prompts, max_tokens)))
    assert allocated == pytest.approx(planned.prefill(3), rel=0.15)
    allocated = allocated_at_most(lambda: rows.extend(grpo.sample(policy, grouped(prompts[:1], 20), max_tokens)))
    assert allocated == pytest.approx(planned.decoding(20), rel=0.15) and planned.prefill(1) < allocated
    for row in rows:
        row.advantage = 1.0
    first = rows[1]  # a shorter one beside the others, as the kernels get them
    for name in ("tokens", "logprobs", "entropies", "trained"):
        setattr(first, name, getattr(first, name)[:-1])
    for parameter in policy.parameters():
        parameter.grad = torch.zeros_like(parameter)  # counted with the adapter
    for count in (1, 4, 20):
        allocated = allocated_at_most(lambda: grpo.accumulate_gradients(policy, [rows[:count]], grpo.Config()))
        expected = planned.learning_peak(prompt + count * max_tokens) - planned.fixed - planned.adapter
        assert allocated == pytest.approx(expected, rel=0.15), count


@pytest.mark.parametrize("family, checkpointing", [
    ("qwen3_5", "on"), ("qwen2_5_vl", "off"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("qwen3_5", "off"), ("qwen2_5_vl", "on"), ("qwen2_vl", "on"), ("qwen3_vl", "on")))])
def test_plan_of_a_tiny_model(load, family, checkpointing):
    check_phases(load(family, activation_checkpointing=checkpointing), 24, activation_checkpointing=checkpointing)


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", [60, 256])  # the plan folds the delta rule's longer rows
def test_plan_of_a_mid_size_model(mid_size, max_tokens):
    check_phases(mid_size(activation_checkpointing="on"), max_tokens, activation_checkpointing="on")


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_and_adapter_are_counted_exactly(load, family):
    policy = load(family)
    planned = plan_of(policy, 64, max_tokens=8, eval_only=True)
    base = sum(p.nbytes for name, p in policy.base.named_parameters() if "lora_" not in name)
    assert sum(planned.weights.values()) == base
    assert planned.adapter == sum(p.nbytes for p in policy.parameters())


def test_the_plan_of_an_evaluation_is_of_no_training(load, monkeypatch):
    policy, made = load(), []
    monkeypatch.setattr(plan, "model_config", lambda *_: (policy.base.config, "a test"))
    make_plans = plan.make_plans
    monkeypatch.setattr(plan, "make_plans", lambda *args: made.extend(make_plans(*args)) or made)
    text = plan.plan_text(grpo.ALGORITHM, grpo.Config(device="cuda", lora_rank=4, max_tokens=8, eval_only=True,
                                                      eval_batch_size=3, group_size=0))
    assert "learning" not in text and "3 questions x 1 completions" in text and "peak of evaluation" in text
    assert all(planned.optimizer == 0 for planned in made)


def test_a_teacher_is_counted(load, folders):
    planned = plan_of(load("qwen3_vl"), 64, distill.DistillConfig, max_tokens=8, eval_only=True,
                      teacher_model=str(folders("qwen3_5")))
    teacher = load("qwen3_5").base
    assert planned.weights["teacher"] == sum(p.nbytes for name, p in teacher.named_parameters() if "lora_" not in name)


def test_nf4_weights_are_counted(mid_size):
    """Real NF4 weights and their scales; the plan's share of a scale is exact but for blocks that are not full."""
    policy = mid_size(quantization="nf4")
    planned = plan_of(policy, 64, max_tokens=8, quantization="nf4", eval_only=True)
    four_bit = [module.weight for module in policy.base.modules() if isinstance(module, bnb.nn.Linear4bit)]
    state = [weight.quant_state for weight in four_bit]
    stored = sum(w.nbytes + s.absmax.nbytes + s.state2.absmax.nbytes for w, s in zip(four_bit, state))
    assert planned.weights["language model, 4-bit"] == pytest.approx(stored, rel=0.01)


@pytest.fixture(scope="module")
def article():
    """The plans of the article's setting, with all that is printed of them, and the CPU seconds that they took."""
    started = time.process_time()
    plans = plan.make_plans(grpo.ALGORITHM, grpo.Config(), plan.model_config(plan.DEFAULT_MODEL)[0])
    for planned in plans:
        planned.choose(24 * GIB)
    return plans, time.process_time() - started


def test_the_default_model_is_that_of_the_notes(article):
    """DESIGN.md section 4: 4.54 B parameters, 60.9 M in the adapter, 3.9 GB in 4-bit; 2.9 + 3.2 GB of cache."""
    torch_reference, fused = article[0]
    assert torch_reference.adapter / 4 == pytest.approx(60.9e6, rel=0.01)
    assert sum(torch_reference.weights.values()) == pytest.approx(3.9e9, rel=0.05)
    for planned in article[0]:
        assert planned.sampled("recurrent", 64) == pytest.approx(3.2e9, rel=0.05)
        assert planned.sampled("attention", 64) == pytest.approx(64 * 1536 * 32 * 1024, rel=0.02)
    assert fused.learning_peak(15000) < torch_reference.learning_peak(15000)


GROUP = 512 + 8 * 1024  # tokens of a whole group of the article's setting, its prompt counted once


def test_learning_holds_the_completions_of_one_prompt(article):
    planned = article[0][0]
    assert planned.learning_peak(16384) == planned.learning_peak(GROUP) < 14.8 * GIB, "as planned before branching"
    assert planned.learning_peak(GROUP - 1) == planned.learning_peak(512 + 7 * 1024) < planned.learning_peak(GROUP)
    assert planned.learning_peak(1) == planned.learning_peak(512 + 1024)


def test_the_default_setting_fits_24_gib(article):
    for planned in article[0]:
        chosen, peaks = planned.choose(24 * GIB)
        assert planned.advice(24 * GIB) == "" and max(peaks.values()) < plan.room_of(24 * GIB)
        assert list(peaks) == ["sampling", "learning", "evaluation"]
        assert chosen.rollouts_at_once == 64 and chosen.tokens_per_micro_batch == GROUP


def test_the_peak_of_a_phase_has_all_that_is_there_at_once(article):
    planned = article[0][0]
    few = planned.sampling_peak(8, 1) - planned.fixed
    assert few >= planned.prefill(8) > planned.decoding(8), "prefill is the highest moment of few rows"
    assert planned.sampling_peak(64, 8) - planned.fixed >= planned.decoding(64) > planned.prefill(8)
    learned = planned.learning_peak(512 + 4 * 1024) - planned.fixed
    assert learned >= planned.adapter + planned.learned("kept", 4) + planned.learned("layers", 4), "gradient too"


def test_smaller_cards_get_smaller_waves_and_micro_batches(article):
    planned = article[0][0]
    choices = [planned.choose(size * GIB)[0] for size in (24, 12, 10, 8)]
    rows, tokens = [c.rollouts_at_once for c in choices], [c.tokens_per_micro_batch for c in choices]
    assert rows == sorted(rows, reverse=True) and rows[-1] < 64
    assert tokens == sorted(tokens, reverse=True) and tokens[-1] < tokens[0] == GROUP
    assert all((count - 512) % 1024 == 0 for count in tokens), "whole completions"
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
    planned = copy.copy(article[0][0])
    planned.config = dataclasses.replace(planned.config, batch_size=50, group_size=50, **flags)
    if flags.get("quantization") == "none":
        planned.weights = {"language model": 9.1e9}
    assert planned.advice(card * GIB).startswith(advice)


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


@pytest.mark.slow
def test_planning_runs_no_kernel_that_is_installed(load, monkeypatch):
    """flash-linear-attention's and causal-conv1d's cannot run on tensors without data."""
    import transformers.models.qwen3_5.modeling_qwen3_5 as qwen

    policy = load()
    for name in models.KERNELS:
        @functools.wraps(inspect.unwrap(getattr(qwen, name)))
        def kernel(*_, **__):
            raise RuntimeError("no data")

        monkeypatch.setattr(qwen, name, kernel)
    config = grpo.Config(device="cpu", lora_rank=4, max_tokens=8)
    for planned in plan.make_plans(grpo.ALGORITHM, config, policy.base.config, 64, (False, True)):
        planned.choose(GIB)
    assert all(hasattr(getattr(qwen, name), "__wrapped__") for name in models.KERNELS), "not put back"


@pytest.mark.slow
def test_advice_to_shorten_fits(article):
    """Where one row is too much: the length that is named fits, by the plan of that length."""
    planned = article[0][1]
    room = (planned.one_row() + planned.limited(64).one_row()) / 2
    card = (room + plan.RESERVE) / (1 - plan.MARGIN)
    flag, length = planned.advice(card).split()
    assert flag == "--max-tokens" and 64 <= int(length) < 1024
    assert planned.limited(int(length)).advice(card) == ""
    assert planned.advice((planned.fixed + plan.RESERVE) / (1 - plan.MARGIN) + 1) == "a smaller --base-model"


def test_planning_is_quick(article):
    assert article[1] < 20, f"{article[1]:.1f} s of CPU time"


def test_a_model_without_config_is_one_error(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="needs config.json"):
        plan.model_config(str(tmp_path / "empty"))


# In a real run; planning takes a family without recurrent layers a third of the time


def shapes_of(policy, monkeypatch, batch, config, card=100 * GIB, algorithm=grpo.ALGORITHM):
    """Runs fit_memory on a card of `card` bytes -> (its config, shapes of what the language model was given)."""
    shapes = []
    with monkeypatch.context() as patch:
        patch.setattr(plan, "card_bytes", lambda device: card)
        hook = policy.base.model.language_model.register_forward_pre_hook(
            lambda module, args, inputs: shapes.append(tuple(inputs["inputs_embeds"].shape[:2])), with_kwargs=True)
        try:
            chosen = plan.fit_memory(algorithm, policy, grpo.GEOQA, batch, config)
        finally:
            hook.remove()
    return chosen, shapes


def longest_prompt(policy, batch):
    return max(len(prompt.ids) for prompt in prompts_of(policy, batch))


def test_choice_and_dry_run_before_the_first_step(load, monkeypatch, capsys):
    """What happens on CUDA, here on the CPU: longest prompts, what is left open chosen, the worst case tried."""
    policy = load(adapter=True)
    batch = questions() + questions(1) + questions(2, sizes=(None,))
    config = grpo.Config(device="cpu", lora_rank=4, batch_size=2, group_size=3, max_tokens=150)
    monkeypatch.setattr(grpo, "PREFILL_TOKENS", 200)
    chosen, shapes = shapes_of(policy, monkeypatch, batch, config, plan.RESERVE + 2**25)
    longest = longest_prompt(policy, batch)
    count = (chosen.tokens_per_micro_batch - longest) // 150
    assert 1 <= chosen.rollouts_at_once and 1 <= count <= 3 and chosen.tokens_per_micro_batch == longest + count * 150
    assert shapes == [(1, longest)] * (1 + (chosen.rollouts_at_once > 3)) + [
        (min(6, chosen.rollouts_at_once), 1), (1, longest + count * 150)]
    assert all(p.grad is None for p in policy.parameters())
    assert "memory plan: --rollouts-at-once" in capsys.readouterr().out
    assert config == grpo.Config(device="cpu", lora_rank=4, batch_size=2, group_size=3, max_tokens=150), "changed"
    given = dataclasses.replace(config, rollouts_at_once=2, tokens_per_micro_batch=77)
    assert shapes_of(policy, monkeypatch, batch, given) == (
        given, [(1, longest), (2, 1), (1, longest + 150)])


def test_a_card_with_less_room_gets_a_part_of_a_group(load, monkeypatch):
    policy, batch = load("qwen2_5_vl"), questions()
    config = grpo.Config(device="cpu", lora_rank=4, batch_size=2, group_size=6, max_tokens=50)
    longest = longest_prompt(policy, batch)
    chosen, shapes = shapes_of(policy, monkeypatch, batch, config)
    assert chosen.tokens_per_micro_batch == longest + 6 * 50 and shapes[-1] == (1, longest + 6 * 50)
    planned = plan_of(policy, longest, batch_size=2, group_size=6, max_tokens=50)
    card = (planned.learning_peak(longest + 4 * 50) + plan.RESERVE) / (1 - plan.MARGIN) + 1
    chosen, shapes = shapes_of(policy, monkeypatch, batch, config, card)
    assert chosen.tokens_per_micro_batch == longest + 4 * 50 and shapes[-1] == (1, longest + 4 * 50)


def dry_run_sizes(policy, monkeypatch, batch, **flags):
    """-> shapes of the language model's inputs in a dry run (rows, new tokens): those of decoding, and the last."""
    config = grpo.Config(device="cpu", lora_rank=4, max_tokens=20, **flags)
    shapes = shapes_of(policy, monkeypatch, batch, config)[1]
    return [shape for shape in shapes if shape[1] == 1], shapes[-1]


def test_the_dry_run_takes_what_a_step_takes(load, monkeypatch):
    policy, batch = load("qwen2_5_vl"), questions()
    longest = longest_prompt(policy, batch)
    # Five questions of three: a step repeats two. A KL term has base log-probabilities.
    assert dry_run_sizes(policy, monkeypatch, batch, batch_size=5, group_size=2, kl_coef=0.1) == (
        [(10, 1)], (1, longest + 2 * 20))
    # One row fits into a micro-batch: it is beside the longest prompt.
    assert dry_run_sizes(policy, monkeypatch, batch, batch_size=3, group_size=2, tokens_per_micro_batch=10) == (
        [(6, 1)], (1, longest + 20))


def test_the_dry_run_of_an_evaluation_has_its_size(load, monkeypatch):
    for size, rows in ((2, 2), (5, 3)):  # three questions are no more than three
        decoded, last = dry_run_sizes(load("qwen2_5_vl"), monkeypatch, questions(), eval_only=True,
                                      eval_batch_size=size, batch_size=1, group_size=0)
        assert decoded == [(rows, 1)] and last == (rows, 1), "it learned"


def no_memory(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("place, phase, flag", [
    ("encode_prompts", "the vision tower", "--max-image-tokens"), ("next_logits", "sampling", "--rollouts-at-once"),
    ("accumulate_gradients", "learning", "--tokens-per-micro-batch")])
def test_a_dry_run_that_does_not_fit_stops_with_advice(load, place, phase, flag):
    policy = load("qwen2_5_vl")
    failing = dataclasses.replace(grpo.ALGORITHM, **{place: lambda first, *rest, **named: (
        no_memory if first is policy else getattr(grpo, place))(first, *rest, **named)})  # not on the plan's skeleton
    config = grpo.Config(device="cpu", lora_rank=4, batch_size=2, group_size=3, max_tokens=20)
    with pytest.raises(UserError, match=f"out of GPU memory in {phase}.*{flag}") as error:
        plan.fit_memory(failing, policy, grpo.GEOQA, questions(), config)
    assert place == "encode_prompts" or "helps most" in str(error.value)


@pytest.mark.parametrize("place, flag", [("prefill", "--rollouts-at-once"),
                                         ("completion_logprobs", "--tokens-per-micro-batch")])
def test_running_out_of_memory_names_phase_and_flag(load, monkeypatch, place, flag):
    policy = load()
    prompts = grouped(prompts_of(policy, questions()[:1]), 2)
    rows = grpo.sample(policy, prompts, 4)
    monkeypatch.setattr(grpo, place, no_memory)
    with pytest.raises(UserError, match=f"lower {flag}"):
        if place == "prefill":
            grpo.sample(policy, prompts, 4)
        else:
            grpo.accumulate_gradients(policy, [rows], grpo.Config())


# The learner's own memory


@pytest.mark.slow
def test_learner_memory_does_not_grow_with_length_times_vocabulary(tmp_path, monkeypatch):
    """A vocabulary of 248,320 and four rows of 1,024 tokens: whole logits alone would be 4 GB, and as much again."""
    import tiny

    right = tiny.model_config
    monkeypatch.setattr(tiny, "model_config", lambda family, ids, vocab_size, hidden, layers: right(
        family, ids, 248320, hidden, layers))
    tiny.make_policy_folder(tmp_path, hidden=256, layers=2)
    policy = grpo.load_policy(grpo.Config(base_model=str(tmp_path), device="cpu", lora_rank=4))
    prompt, = prompts_of(policy, questions()[:1])

    def rows(count, length):
        tokens = torch.randint(0, 200, (count, length), generator=torch.Generator().manual_seed(0))
        return [grpo.Completion(prompt, own, torch.zeros(length), torch.zeros(length), torch.ones(length) > 0, False)
                for own in tokens]

    torch.set_num_threads(min(2, os.cpu_count()))
    long = rows(4, 1024)
    assert allocated_at_most(lambda: grpo.completion_logprobs(policy, long, 1.0).sum().backward()) < 1e9
    short, gradients = rows(1, 256), []
    for find in (lambda: grpo.completion_logprobs(policy, short, 1.0), lambda: naive_logprobs(policy, short[0])):
        for parameter in policy.parameters():
            parameter.grad = None
        find().sum().backward()
        gradients.append(torch.cat([p.grad.flatten().double() for p in policy.parameters()]))
    torch.set_num_threads(1)
    assert (gradients[0] - gradients[1]).norm() <= 1e-5 * gradients[1].norm()
