"""Whole runs on tiny policies: what they write, that they repeat themselves and learn, and a task of one's own."""

import dataclasses
import functools
import inspect
import json
import subprocess
import sys
import types
from pathlib import Path
from statistics import fmean

import pytest
import torch
from batches import prompts_of, questions
from runs import NOISY, TASK, command, flags, lines, make_data_set
from safetensors.torch import load_file

import grpo
from geoqa import Question
from reward import Reading, read_choice
from support import errors, evaluation, models
from support.errors import UserError
from support.order import Order

ROOT = Path(__file__).parents[1]
METRICS = {
    "step", "reward", "reward/right", "format_rate", "degenerate_fraction", "informative_fraction", "train_datums",
    "rollout/completion_tokens_mean", "rollout/truncated_fraction", "rollout/entropy", "rollout/downsized_figures",
    "rollout/shaped_reward", "rollout/questions", "rollout/waves", "trainer/loss_mean", "trainer/dlogp_mean",
    "trainer/dlogp_max", "trainer/grad_norm", "trainer/optimizer_steps", "trainer/nonfinite", "trainer/ratio_mean",
    "trainer/ratio_min", "trainer/ratio_max", "trainer/kl_k1", "trainer/kl_k3", "time/sampling", "time/learning",
    "rate/tokens_per_second", "memory/peak_gib"}
ROLLOUT = {"step", "question", "tokens", "text", "choice", "right", "reward", "rewards", "advantage", "length",
           "truncated"}
EVALUATED = {"question", "gold", "choice", "right", "lenient_choice", "lenient_right", "text", "tokens", "truncated"}


class Made(list):
    """Questions without a data set."""

    revision, notes = "local", ()


# Random models never write a box: here an answer is right if its text has an odd number of characters.
MADE = dataclasses.replace(grpo.GEOQA, load=lambda config, split: Made(questions(split == "test")),
                           rewards={"right": lambda answer, question: len(answer.text) % 2})


def rewarding(rule):
    """The task MADE whose reward is `rule(answer, question)`."""
    return dataclasses.replace(MADE, rewards={"right": rule})


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture
def config(folders, tmp_path):
    return grpo.Config(base_model=str(folders()), device="cpu", output_dir=str(tmp_path / "runs"), steps=2,
                       batch_size=2, group_size=4, max_tokens=8, lora_rank=4, learning_rate=1e-3)


# What a run writes


@pytest.mark.slow
def test_command_on_real_figures(folders, geolaux, tmp_path):
    done = subprocess.run(
        [sys.executable, "grpo.py", "--base-model", str(folders()), "--dataset", str(geolaux), "--device", "cpu",
         "--steps", "2", "--batch-size", "4", "--group-size", "4", "--max-tokens", "16", "--output-dir", str(tmp_path),
         "--experiment_name", "real", "--save-every", "1", "--show-samples"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "real"
    written = read(run / "config.json")
    assert written["steps"] == 2
    assert written["resolved_model_revision"] == written["resolved_dataset_revision"] == "local"
    assert written["versions"]["transformers"]
    metrics = lines(run / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [1, 2]
    # An update without a row that differs from its group has neither ratios nor a loss.
    assert all(METRICS - set(m) <= {name for name in METRICS if "ratio" in name or "kl" in name} for m in metrics)
    rollouts = lines(run / "rollouts.jsonl")
    assert len(rollouts) == 2 * 4 * 4 and all(set(r) == ROLLOUT for r in rollouts)
    assert all(r["length"] == len(r["tokens"]) <= 16 for r in rollouts)
    stored = lines(run / "questions.jsonl")
    assert len(stored) == 8 + 15 and len({q["figure"] for q in stored}) == len(stored)
    assert {r["question"] for r in rollouts} <= {q["question"] for q in stored}
    assert all((run / q["figure"]).is_file() for q in stored)
    for name in ("eval-base.json", "eval-step-2.json"):
        rows = read(run / name)
        assert len(rows) == 15 and all(set(row) == EVALUATED for row in rows)
    for step in (1, 2):
        assert (run / f"step-{step}" / "adapter_model.safetensors").is_file()
    assert read(run / "step-2" / "adapter_config.json")["base_model_name_or_path"] == str(folders())
    results = read(run / "results.json")
    assert set(results) == {"before", "after", "mcnemar_p", "cost"}
    for name in ("accuracy", "format_rate", "accuracy_given_format", "lenient_accuracy", "truncated_rate"):
        assert set(results["after"][name]) == {"value", "count", "n", "low", "high"}
    assert results["before"]["mean_tokens"] > 0
    assert "the test split has 15 rows, fewer than the 100" in done.stdout
    assert all(text in done.stdout for text in ("step   2/2", "accuracy", "  question", "right is"))


def test_what_a_run_writes(config):
    run = grpo.train(config, MADE)
    metrics, rollouts = lines(run / "metrics.jsonl"), lines(run / "rollouts.jsonl")
    assert [m["step"] for m in metrics] == [1, 2] and [set(m) ^ METRICS for m in metrics] == [set(), set()]
    assert len(rollouts) == 2 * 2 * 4 and all(set(row) == ROLLOUT for row in rollouts)
    by_id = {question.id: question for question in questions()}
    for row in rollouts:
        assert row["rewards"] == {"right": len(row["text"]) % 2} and row["reward"] == len(row["text"]) % 2
        # The task's reading, and not its reward, says what is right.
        reading = read_choice(row["text"], by_id[row["question"]])
        assert row["choice"] is reading.choice is None and row["right"] is False
        assert row["length"] == len(row["tokens"]) <= 8
    for m in metrics:
        rewards = [row["reward"] for row in rollouts if row["step"] == m["step"]]
        assert m["reward"] == m["reward/right"] == pytest.approx(fmean(rewards))
    for name in ("eval-base.json", "eval-step-2.json"):
        records = read(run / name)
        assert [(row["question"], row["gold"]) for row in records] == [(q.id, q.label) for q in questions(True)]
        assert all(set(row) == EVALUATED and row["right"] is row["lenient_right"] is False for row in records)
    stored = lines(run / "questions.jsonl")
    assert {(q["question"], q["split"], q["label"]) for q in stored} == {
        (q.id, split, q.label) for split in ("train", "test") for q in questions(split == "test")}
    assert all((run / q["figure"]).is_file() for q in stored)
    assert set(read(run / "results.json")) == {"before", "after", "mcnemar_p", "cost"}
    assert (run / "report.html").is_file() and (run / "step-2" / "adapter_model.safetensors").is_file()


def test_same_seed_same_metrics(config):
    config.evaluate = False
    runs = [lines(grpo.train(config, MADE) / "metrics.jsonl") for _ in range(2)]
    quiet = [[{k: v for k, v in m.items() if not k.startswith(NOISY)} for m in run] for run in runs]
    assert quiet[0] == quiet[1]
    assert quiet[0][0]["trainer/grad_norm"] > 0 and quiet[0][0]["trainer/dlogp_max"] <= 1e-4
    other = lines(grpo.train(dataclasses.replace(config, seed=1), MADE) / "metrics.jsonl")
    assert [m["rollout/entropy"] for m in other] != [m["rollout/entropy"] for m in quiet[0]]


def test_evaluation_does_not_change_the_training(config):
    with_evaluation = lines(grpo.train(config, MADE) / "rollouts.jsonl")
    path = grpo.train(dataclasses.replace(config, evaluate=False), MADE)
    assert lines(path / "rollouts.jsonl") == with_evaluation
    assert read(path / "results.json")["after"] is None


def test_run_names_count_up_and_never_overwrite(config):
    config = dataclasses.replace(config, steps=1, evaluate=False)
    first, second = grpo.train(config, MADE), grpo.train(config, MADE)
    assert first != second and first.name[:-1] == second.name[:-1] and (first.name[-1], second.name[-1]) == ("1", "2")
    with pytest.raises(UserError, match="exists already"):
        grpo.train(dataclasses.replace(config, experiment_name=first.name), MADE)


def test_a_name_taken_while_the_run_loads_is_not_used(config):
    config = dataclasses.replace(config, steps=1, evaluate=False)
    first = Path(config.output_dir) / f"{Path(config.base_model).name}-1"

    def load(config, split):
        first.mkdir(parents=True)  # by another run, started at the same time
        return MADE.load(config, split)

    path = grpo.train(config, dataclasses.replace(MADE, load=load))
    assert path.name == f"{first.name[:-1]}2" and not list(first.iterdir())


def test_eval_only_and_adapter(config):
    config.learning_rate = 5e-2
    run = grpo.train(config, MADE)
    trained = read(run / "results.json")
    results = grpo.evaluate(dataclasses.replace(config, adapter=str(run / "step-2")), MADE)
    assert results["before"] is None and results["after"] == trained["after"]
    texts = [[row["text"] for row in read(path)] for path in (
        run / "eval-base.json", run / "eval-step-2.json", run.parent / f"{run.name[:-1]}2" / "eval-adapter.json")]
    assert texts[1] == texts[2] != texts[0]
    assert grpo.evaluate(config, MADE)["before"] == trained["before"]


def test_a_checkpoint_loads_in_plain_peft(config, load):
    from peft import PeftModel

    run = grpo.train(dataclasses.replace(config, evaluate=False), MADE)
    config.adapter = str(run / "step-2")
    policy = grpo.load_policy(config)
    plain = PeftModel.from_pretrained(load().model.unload(), config.adapter)
    ours = {k: v for k, v in policy.model.state_dict().items() if "lora_" in k}
    theirs = plain.state_dict()
    assert ours and all(torch.equal(value, theirs[key]) for key, value in ours.items())
    assert any(value.abs().sum() > 0 for key, value in ours.items() if "lora_B" in key)


# What trains


def test_a_degenerate_batch_makes_no_update_and_says_so(config, capsys):
    run = grpo.train(dataclasses.replace(config, evaluate=False), rewarding(lambda answer, question: 1))
    metrics = lines(run / "metrics.jsonl")
    assert all(m["train_datums"] == 0 and m["degenerate_fraction"] == 1.0 for m in metrics)
    assert all(m["trainer/grad_norm"] is None for m in metrics)
    assert "no update: equal rewards everywhere" in capsys.readouterr().out
    weights = load_file(run / "step-2" / "adapter_model.safetensors")
    assert all((value == 0).all() for name, value in weights.items() if "lora_B" in name)


def test_degenerate_groups_are_left_out_of_the_update(load, monkeypatch):
    policy, trained = load(adapter=True), []

    def loss(logprobs, old_logprobs, advantages, mask):
        trained.extend(tuple(row[own].tolist()) for row, own in zip(old_logprobs, mask))
        return -(logprobs - old_logprobs).exp() * advantages

    monkeypatch.setitem(grpo.LOSS_FNS, "mine", loss)
    rewards = iter([1.0, 1, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0])
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    config = grpo.Config(loss_fn="mine", batch_size=3, group_size=4, max_tokens=8)
    metrics, batch = grpo.train_step(policy, optimizer, Order(questions(), seed=0), config,
                                     task=rewarding(lambda answer, question: next(rewards)))
    assert sorted(trained) == sorted(tuple(row.logprobs.tolist()) for row in batch.rows[:8])
    assert metrics["train_datums"] == 8
    assert metrics["degenerate_fraction"] == pytest.approx(1 / 3) and metrics["reward"] == pytest.approx(4 / 12)
    assert [round(row.advantage, 6) for row in batch.rows] == [0.25] * 3 + [-0.75] + [-0.25] * 3 + [0.75] + [0.0] * 4


def test_training_raises_the_reward(config):
    """A reward that any policy can learn in a few steps: bytes of ASCII. Signs turned round would fail here."""
    config = dataclasses.replace(config, steps=12, learning_rate=1e-1, group_size=8, max_tokens=6, max_grad_norm=0,
                                 evaluate=False)
    rewards = [m["reward"] for m in lines(grpo.train(config, rewarding(TASK.rewards["right"])) / "metrics.jsonl")]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.6, rewards


def test_rows_at_once_reach_training_and_evaluation_and_change_no_draw(config, monkeypatch):
    drawn = []

    def counting(policy, prompts, *arguments):
        drawn.append(len(prompts))
        return grpo.sample(policy, prompts, *arguments)

    monkeypatch.setitem(grpo.SAMPLERS, "counting", counting)
    config = dataclasses.replace(config, sampler="counting", steps=1)
    few = dataclasses.replace(config, rollouts_at_once=3)
    rollouts = [[(row["question"], row["tokens"]) for row in lines(grpo.train(each, MADE) / "rollouts.jsonl")]
                for each in (few, config)]
    assert drawn == [3, 3, 3, 2, 3, 3, 8, 3], "three questions, a step of eight rows, three questions; twice"
    assert rollouts[0] == rollouts[1]
    del drawn[:]
    grpo.evaluate(dataclasses.replace(config, eval_only=True, rollouts_at_once=2), MADE)
    assert drawn == [2, 1]


def test_on_a_gpu_the_plan_comes_before_the_run(config, monkeypatch):
    def fit(*arguments):
        assert not Path(config.output_dir).exists()
        (given,) = [each for each in arguments if isinstance(each, grpo.Config)]
        assert [question.id for question in next(each for each in arguments if isinstance(each, Made))]
        return dataclasses.replace(given, rollouts_at_once=5)

    monkeypatch.setattr(grpo, "fit_memory", fit)
    monkeypatch.setattr(grpo.Policy, "device", types.SimpleNamespace(type="cuda"))
    run = grpo.prepare(config, MADE)[0]
    run.close()
    assert read(run.path / "config.json")["rollouts_at_once"] == run.config.rollouts_at_once == 5
    assert config.rollouts_at_once == 0, "the caller's own stays as it was"


def test_the_sampler_generate_trains(folders, tmp_path):
    data = make_data_set(tmp_path / "data")
    assert command(flags(folders(), data, tmp_path, steps=1, sampler="generate")) == 0
    (metrics,) = lines(tmp_path / "run" / "metrics.jsonl")
    assert metrics["train_datums"] == 8 and metrics["trainer/grad_norm"] > 0
    assert metrics["trainer/dlogp_max"] <= 1e-4 and metrics["rollout/entropy"] > 0
    weights = load_file(tmp_path / "run" / "step-1" / "adapter_model.safetensors")
    assert any(value.any() for name, value in weights.items() if "lora_B" in name)
    # Greedy tokens are those of the other sampler.
    assert command([*flags(folders(), data, tmp_path, experiment_name="loop"), "--eval-only"]) == 0
    assert read(tmp_path / "loop" / "eval-base.json") == read(tmp_path / "run" / "eval-base.json")


# A task of one's own


def test_rewards_are_weighed_by_the_flag(folders, tmp_path):
    task = dataclasses.replace(TASK, rewards=TASK.rewards | {
        "other": lambda answer, question: len(answer.tokens) if answer.finished else -1,
        "broken": lambda answer, question: 1 / 0})
    data = make_data_set(tmp_path / "data")
    arguments = flags(folders(), data, tmp_path, steps=2, reward="right:1,other:0.5")
    assert command([*arguments, "--no-evaluate"], task) == 0
    metrics, rollouts = (lines(tmp_path / "run" / name) for name in ("metrics.jsonl", "rollouts.jsonl"))
    for row in rollouts:
        assert row["rewards"] == {"right": task.rewards["right"](types.SimpleNamespace(text=row["text"]), None),
                                  "other": -1 if row["truncated"] else len(row["tokens"])}
        assert row["reward"] == row["rewards"]["right"] + 0.5 * row["rewards"]["other"]
    for m in metrics:
        rows = [row for row in rollouts if row["step"] == m["step"]]
        for name in ("right", "other"):
            assert m[f"reward/{name}"] == pytest.approx(fmean(row["rewards"][name] for row in rows))
        assert m["reward"] == pytest.approx(m["reward/right"] + 0.5 * m["reward/other"]) and "reward/broken" not in m
        groups = [rows[:4], rows[4:]]
        assert [row["advantage"] for row in rows] == pytest.approx(
            [row["reward"] - fmean(each["reward"] for each in group) for group in groups for row in group], abs=1e-6)


def read_digit(text, question):
    digits = [int(c) for c in text if c in "0123456789"]
    return Reading(digits[-1] if digits else None, digits[-1:] == [question.label])


def sums(with_figure):
    """Sums to work out: text alone, but where the second one shall have a figure."""
    def load(config, split):
        rows = Made(Question(f"{split}-{n}", None, f"{n}+1=", (), n + 1) for n in range(3))
        if with_figure:
            rows[1] = dataclasses.replace(rows[1], image=questions()[0].image)
        return rows

    return grpo.Task(load=load, prompt=lambda question, with_solution=False: question.subject, read=read_digit,
                     rewards={"right": lambda answer, question: answer.reading.right,
                              "ascii": lambda answer, question: sum(c.isascii() for c in answer.text)})


@pytest.mark.parametrize("family, with_figure", [("qwen3_5", False), ("qwen3_5", True), ("qwen3_vl", False)])
def test_questions_of_text_alone(folders, tmp_path, capsys, family, with_figure):
    task = sums(with_figure)
    arguments = flags(folders(family), "of my own", tmp_path, steps=2, batch_size=3, reward="right,ascii:0.1")
    assert command([*arguments, "--show-samples"], task) == 0
    run = tmp_path / "run"
    metrics = lines(run / "metrics.jsonl")
    assert len(metrics) == 2 and all(m["train_datums"] and m["trainer/dlogp_max"] <= 1e-4 for m in metrics)
    assert [set(m) ^ METRICS for m in metrics] == [{"reward/ascii"}] * 2
    stored = {(row["split"], row["question"]): row for row in lines(run / "questions.jsonl")}
    assert len(stored) == 6
    for (split, name), row in stored.items():
        assert (row["figure"] is not None) == (with_figure and name.endswith("1"))
        assert row["choices"] == [] and row["label"] == int(name[-1]) + 1 and row["subject"] == f"{name[-1]}+1="
    for name in ("eval-base.json", "eval-step-2.json"):
        records = read(run / name)
        assert [(row["question"], row["gold"]) for row in records] == [(f"test-{n}", n + 1) for n in range(3)]
        assert all(row["right"] == (row["choice"] == row["gold"]) for row in records)
    assert (run / "report.html").is_file() and (run / "figures").exists() == with_figure
    assert "question train-" in capsys.readouterr().out


def test_the_task_decides_what_is_right(config):
    """A reading that is right without a letter: in logs, evaluation and its test."""
    task = dataclasses.replace(MADE, read=lambda text, question: Reading(
        None, question.id != "q0", {"guess": [1, None]}, True))
    run = grpo.train(dataclasses.replace(config, batch_size=3), task)
    for row in lines(run / "rollouts.jsonl") + read(run / "eval-base.json"):
        assert row["right"] == (row["question"] != "q0") and row["choice"] is None
    results = read(run / "results.json")
    assert results["before"]["accuracy"]["count"] == 2 and results["before"]["lenient_accuracy"]["count"] == 3
    assert results["before"]["format_rate"]["count"] == 0 and results["mcnemar_p"] == 1.0


# Kernels of other packages


def install_kernels(monkeypatch, packages):
    """Puts stand-ins for kernels where transformers puts them, and for `packages` -> (module, name -> stand-in)."""
    import transformers.models.qwen3_5.modeling_qwen3_5 as qwen

    def stand_in(name):
        @functools.wraps(inspect.unwrap(getattr(qwen, name)))
        def kernel(*_, **__):
            raise RuntimeError("needs a GPU")

        return kernel

    kernels = {name: stand_in(name) for name in models.KERNELS}
    for name, kernel in kernels.items():
        monkeypatch.setattr(qwen, name, kernel)
        monkeypatch.delitem(models.INSTALLED, (qwen.__name__, name), raising=False)
    for package in ("fla", "causal_conv1d"):  # None: it cannot be imported
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package) if package in packages else None)
    return qwen, kernels


def test_kernels_that_cannot_run_here_are_switched_off(load, folders, monkeypatch):
    """flash-linear-attention can be imported where there is no GPU; transformers would then call it."""
    policy = load()
    install_kernels(monkeypatch, {"fla", "causal_conv1d"})
    prompts = prompts_of(policy, questions())
    with pytest.raises(RuntimeError, match="needs a GPU"):
        grpo.sample(policy, prompts, 2)
    policy = grpo.Policy(*models.load_base(str(folders()), torch.device("cpu")))
    for row in grpo.sample(policy, prompts, 2):
        assert torch.allclose(grpo.completion_logprobs(policy, [row], 1.0)[0], row.logprobs, atol=1e-4)
    assert models.kernels_line(policy.base, True) == "attention: sdpa; gated delta rule: torch reference"
    grpo.sample(policy, prompts, 2)


@pytest.mark.parametrize("installed, allowed, line", [
    ({"fla", "causal_conv1d"}, True, "flash-linear-attention; convolution: causal-conv1d"),
    ({"fla"}, True, "flash-linear-attention; convolution: torch (pip install causal-conv1d)"),
    (set(), True, "torch reference, correct but slower: pip install flash-linear-attention causal-conv1d"),
    ({"fla", "causal_conv1d"}, False, "torch reference")])
def test_the_line_about_kernels_on_a_gpu(load, monkeypatch, installed, allowed, line):
    base = load().base
    qwen, kernels = install_kernels(monkeypatch, installed)
    on_gpu = types.SimpleNamespace(device=torch.device("cuda"), model=base.model, config=base.config)
    assert models.kernels_line(on_gpu, allowed) == f"attention: sdpa; gated delta rule: {line}"
    for name, package in models.KERNELS.items():
        inner = inspect.unwrap(getattr(qwen, name), stop=lambda function: function is kernels[name])
        assert (inner is kernels[name]) == (allowed and package in installed), "the line is about other code"


# Numbers of an evaluation


def test_wilson_interval():
    """71 of 100: 61.46 % to 78.99 %, worked out by hand from Wilson's formula."""
    n, p, z = 100, 0.71, 1.959963984540054
    low = (p + z**2 / 200 - z * ((p * (1 - p) + z**2 / 400) / n) ** 0.5) / (1 + z**2 / n)
    rate = evaluation.rate(71, 100)
    assert rate["value"] == 0.71 and rate["low"] == pytest.approx(low) == pytest.approx(0.6146, abs=1e-4)
    assert rate["high"] == pytest.approx(0.7899, abs=1e-4)
    assert evaluation.rate(0, 100)["low"] == 0.0 and evaluation.rate(10, 10)["high"] == 1.0
    assert evaluation.rate(0, 0) == {"value": None, "count": 0, "n": 0, "low": None, "high": None}


def older(gold, choice, lenient=None, tokens=10, truncated=False):
    """A record of a run that did not say what is right."""
    return {"gold": gold, "choice": choice, "lenient_choice": lenient or choice, "tokens": tokens,
            "truncated": truncated}


def newer(gold, choice, lenient=None, tokens=10, truncated=False):
    """The same with letters that say nothing: the task has judged them."""
    right, lenient_right = choice == gold, (lenient or choice) == gold
    return {"gold": "Z", "choice": choice and "X", "right": right, "lenient_choice": "Z",
            "lenient_right": lenient_right, "tokens": tokens, "truncated": truncated}


@pytest.mark.parametrize("row", [older, newer])
def test_summary_and_mcnemar(row):
    before = [row("A", "A"), row("B", None, "B", 30, True), row("C", "D"), row("D", None), row("A", None)]
    after = [row("A", "B"), row("B", "B"), row("C", "C"), row("D", "D"), row("A", "A")]
    results = evaluation.compare(before, after)
    counts = {k: (v["count"], v["n"]) for k, v in results["before"].items() if k != "mean_tokens"}
    assert counts == {"accuracy": (1, 5), "format_rate": (2, 5), "accuracy_given_format": (1, 2),
                      "lenient_accuracy": (2, 5), "truncated_rate": (1, 5)}
    assert results["before"]["mean_tokens"] == 14
    # 4 gained, 1 lost: 2 * (C(5,0) + C(5,1)) / 2^5
    assert results["mcnemar_p"] == pytest.approx(2 * 6 / 32)
    assert evaluation.compare(before, before)["mcnemar_p"] == 1.0
    table = evaluation.results_table(results)
    assert "20.0%" in table and "80.0%" in table and "0.38" in table


def test_text_for_the_terminal_has_no_control_characters():
    assert errors.printable("a\x1b[2Jb\r\n中") == "a\\x1b[2Jb\\r\\n中"
