"""Whole runs on tiny policies: the run directory, the metrics, the command line, and that a run repeats itself."""

import dataclasses
import functools
import inspect
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from batches import prompts_of, questions

import grpo
from support import models
from support import rundir
from support import command_line
from support.errors import UserError

ROOT = Path(__file__).parents[1]
METRICS = {
    "step", "reward", "format_rate", "degenerate_fraction", "train_datums", "rollout/completion_tokens_mean",
    "rollout/truncated_fraction", "rollout/entropy", "rollout/downsized_figures", "rollout/shaped_reward",
    "rollout/questions", "rollout/waves", "informative_fraction", "trainer/loss_mean", "trainer/dlogp_mean",
    "trainer/dlogp_max", "trainer/grad_norm", "trainer/optimizer_steps", "trainer/nonfinite",
    "time/sampling", "time/learning", "time/rest",
    "rate/tokens_per_second", "memory/peak_gib"}
NOISY = ("time/", "rate/", "memory/")


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def grpo_command(*flags):
    return subprocess.run([sys.executable, str(ROOT / "grpo.py"), *flags], capture_output=True, text=True, cwd=ROOT)


@pytest.fixture
def easy_reward(monkeypatch):
    """Random models never write a box; here an answer is right if its first token id is even."""
    monkeypatch.setattr(grpo, "grade", lambda text, label: float(len(text) % 2))


@pytest.fixture
def config(folders, tmp_path, monkeypatch):
    """Trains on the made-up questions of batches.py, without a data set."""
    from geoqa import Questions

    class Made(Questions):
        def __init__(self, rows):
            super().__init__(rows, "local", [])

        def __getitem__(self, index):
            return self._rows[index]

    monkeypatch.setattr(grpo, "load_geoqa", lambda dataset, split, **settings: Made(questions(split == "test")))
    return grpo.Config(base_model=str(folders()), device="cpu", output_dir=str(tmp_path / "runs"), steps=2,
                       batch_size=2, group_size=4, max_tokens=8, lora_rank=4, learning_rate=1e-3)


@pytest.mark.slow
def test_command_on_real_figures(folders, geolaux, tmp_path):
    done = grpo_command("--base-model", str(folders()), "--dataset", str(geolaux), "--device", "cpu", "--steps", "2",
                        "--batch-size", "4", "--group-size", "4", "--max-tokens", "16", "--output-dir", str(tmp_path),
                        "--experiment_name", "real", "--save-every", "1", "--show-samples")
    assert done.returncode == 0, done.stderr
    run = tmp_path / "real"
    written = json.loads((run / "config.json").read_text())
    assert written["steps"] == 2
    assert written["resolved_model_revision"] == written["resolved_dataset_revision"] == "local"
    assert written["versions"]["transformers"]
    metrics = lines(run / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [1, 2] and all(set(m) == METRICS for m in metrics)
    rollouts = lines(run / "rollouts.jsonl")
    assert len(rollouts) == 2 * 4 * 4
    assert set(rollouts[0]) == {"step", "question", "tokens", "text", "choice", "reward", "advantage", "length",
                                "truncated"}
    assert all(r["length"] == len(r["tokens"]) <= 16 for r in rollouts)
    stored = lines(run / "questions.jsonl")
    assert len(stored) == 8 + 15 and len({q["figure"] for q in stored}) == len(stored)
    assert {r["question"] for r in rollouts} <= {q["question"] for q in stored}
    assert all((run / q["figure"]).is_file() for q in stored)
    for name in ("eval-base.json", "eval-step-2.json"):
        rows = json.loads((run / name).read_text())
        assert len(rows) == 15
        assert set(rows[0]) == {"question", "gold", "choice", "lenient_choice", "text", "tokens", "truncated"}
    for step in (1, 2):
        assert (run / f"step-{step}" / "adapter_model.safetensors").is_file()
    adapter = json.loads((run / "step-2" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(folders())
    results = json.loads((run / "results.json").read_text())
    assert set(results) == {"before", "after", "mcnemar_p", "cost"}
    for name in ("accuracy", "format_rate", "accuracy_given_format", "lenient_accuracy", "truncated_rate"):
        assert set(results["after"][name]) == {"value", "count", "n", "low", "high"}
    assert results["before"]["mean_tokens"] > 0
    assert "the test split has 15 rows, fewer than the 100" in done.stdout
    assert all(text in done.stdout for text in ("step   2/2", "accuracy", "  question", "right is"))


def test_same_seed_same_metrics(config, easy_reward):
    runs = [lines(grpo.train(config) / "metrics.jsonl") for _ in range(2)]
    quiet = [[{k: v for k, v in m.items() if not k.startswith(NOISY)} for m in run] for run in runs]
    assert quiet[0] == quiet[1]
    assert quiet[0][0]["trainer/grad_norm"] > 0 and quiet[0][0]["trainer/dlogp_max"] <= 1e-4
    config.seed = 1
    other = lines(grpo.train(config) / "metrics.jsonl")
    assert [m["reward"] for m in other] != [m["reward"] for m in quiet[0]] or other[0]["rollout/entropy"] != \
        quiet[0][0]["rollout/entropy"]


def test_evaluation_does_not_change_the_training(config, easy_reward):
    with_evaluation = lines(grpo.train(config) / "rollouts.jsonl")
    config.evaluate = False
    path = grpo.train(config)
    assert lines(path / "rollouts.jsonl") == with_evaluation
    assert json.loads((path / "results.json").read_text())["after"] is None


def test_run_names_count_up_and_never_overwrite(config):
    config.steps, config.evaluate = 1, False
    first, second = grpo.train(config), grpo.train(config)
    assert first != second and first.name[:-1] == second.name[:-1] and (first.name[-1], second.name[-1]) == ("1", "2")
    config.experiment_name = first.name
    with pytest.raises(UserError, match="exists already"):
        grpo.train(config)


def test_a_name_taken_while_the_policy_loads_is_not_used(config, monkeypatch):
    config.steps, config.evaluate, load = 1, False, grpo.load_policy

    def slow_load(config):
        rundir.free_run_path(config).mkdir(parents=True)  # by another run, started at the same time
        return load(config)

    monkeypatch.setattr(grpo, "load_policy", slow_load)
    assert grpo.train(config).name.endswith("-2")


@pytest.mark.parametrize("name", ["../up", "/tmp/x", "a/b", "..", ".", "a b"])
def test_a_run_name_cannot_leave_the_runs_folder(config, name):
    config.experiment_name = name
    with pytest.raises(UserError, match="names a folder"):
        grpo.train(config)


def test_a_degenerate_batch_makes_no_update_and_says_so(config, monkeypatch, capsys):
    monkeypatch.setattr(grpo, "grade", lambda text, label: 1.0)
    policies = []
    load = grpo.load_policy
    monkeypatch.setattr(grpo, "load_policy", lambda config: policies.append(load(config)) or policies[-1])
    metrics = lines(grpo.train(config) / "metrics.jsonl")
    assert all(m["train_datums"] == 0 and m["degenerate_fraction"] == 1.0 for m in metrics)
    assert all(m["trainer/grad_norm"] is None for m in metrics)
    assert "no update: equal rewards everywhere" in capsys.readouterr().out
    assert all((p == 0).all() for name, p in policies[0].model.named_parameters() if "lora_B" in name)


def test_degenerate_groups_are_left_out_of_the_update(load, monkeypatch):
    policy = load(adapter=True)
    trained = []
    right = grpo.accumulate_gradients

    def spy(policy, prompts, rollouts, advantages, rows, *others):
        trained.extend(rows.tolist())
        return right(policy, prompts, rollouts, advantages, rows, *others)

    monkeypatch.setattr(grpo, "accumulate_gradients", spy)
    rewards = iter([1.0, 1, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0])
    monkeypatch.setattr(grpo, "grade", lambda text, label: next(rewards))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    metrics, batch, advantages = grpo.train_step(policy, optimizer, lambda count: questions(),
                                                 grpo.Config(group_size=4, max_tokens=8, lora_rank=4))
    records = rundir.rollout_records(batch, advantages)
    assert sorted(trained) == list(range(8)) and metrics["train_datums"] == 8
    assert metrics["degenerate_fraction"] == pytest.approx(1 / 3) and metrics["reward"] == pytest.approx(4 / 12)
    assert [round(r["advantage"], 6) for r in records] == [0.25] * 3 + [-0.75] + [-0.25] * 3 + [0.75] + [0.0] * 4


def test_training_raises_the_reward(config, monkeypatch):
    """A reward that any policy can learn in a few steps: bytes of ASCII. Signs turned round would fail here."""
    monkeypatch.setattr(grpo, "grade", lambda text, label: float(sum(c.isascii() for c in text) > len(text) / 2))
    config.steps, config.learning_rate, config.group_size, config.evaluate = 12, 1e-1, 8, False
    config.max_tokens, config.max_grad_norm = 6, 0
    rewards = [m["reward"] for m in lines(grpo.train(config) / "metrics.jsonl")]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.6, rewards


def test_waves_reach_training_and_evaluation(config, easy_reward, monkeypatch):
    config.rollouts_at_once, config.steps, drawn, decode = 3, 1, [], grpo.decode
    monkeypatch.setattr(grpo, "decode", lambda *arguments: drawn.append(len(arguments[3])) or decode(*arguments))
    grpo.train(config)
    assert drawn == [3, *(3, 3, 2), 3], "three questions, a step of eight rows, three questions"
    config.eval_only, config.rollouts_at_once = True, 2
    grpo.evaluate(config)
    assert drawn[5:] == [2, 1]


def test_on_a_gpu_the_plan_comes_before_the_run(config, monkeypatch):
    def fit(program, policy, questions, config):
        assert program is grpo and len(questions) == 3
        config.rollouts_at_once = 5

    monkeypatch.setattr(grpo, "fit_memory", fit)
    monkeypatch.setattr(grpo.Policy, "device", types.SimpleNamespace(type="cuda"))
    run = grpo.prepare(config, with_train=True)[0]
    assert json.loads((run.path / "config.json").read_text())["rollouts_at_once"] == 5
    run.lock.close()


def test_eval_only_and_adapter(config, easy_reward):
    config.learning_rate = 5e-2
    run = grpo.train(config)
    trained = json.loads((run / "results.json").read_text())
    config.adapter = str(run / "step-2")
    results = grpo.evaluate(config)
    assert results["before"] is None and results["after"] == trained["after"]
    texts = [[row["text"] for row in json.loads(path.read_text())] for path in (
        run / "eval-base.json", run / "eval-step-2.json", run.parent / f"{run.name[:-1]}2" / "eval-adapter.json")]
    assert texts[1] == texts[2] != texts[0]
    config.adapter = ""
    assert grpo.evaluate(config)["before"] == trained["before"]


def test_a_checkpoint_loads_in_plain_peft(config, easy_reward, load):
    from peft import PeftModel

    run = grpo.train(config)
    config.adapter = str(run / "step-2")
    policy = grpo.load_policy(config)
    plain = PeftModel.from_pretrained(load().model.unload(), config.adapter)
    ours = {k: v for k, v in policy.model.state_dict().items() if "lora_" in k}
    theirs = plain.state_dict()
    assert ours and all(torch.equal(value, theirs[key]) for key, value in ours.items())
    assert any(value.abs().sum() > 0 for key, value in ours.items() if "lora_B" in key)


@pytest.mark.parametrize("flags, message", [
    (["--stepz", "3"], "unknown flag --stepz"),
    (["--step", "3"], "unknown flag --step"),
    (["--steps", "x"], "invalid int value: 'x'"),
    (["--steps", "0"], "--steps must be at least 1"),
    (["--group-size", "1"], "--group-size must be at least 2"),
    (["--temperature", "0"], "--temperature must be above 0"),
    (["--top-p", "0.9"], "--top-p below 1 is for --eval-only"),
    (["--max-tokens", "0"], "--max-tokens must be at least 1"),
    (["--learning-rate", "nan"], "--learning-rate must be 0 or more"),
    (["--loss-fn", "magic"], "--loss-fn magic is none of importance_sampling"),
    (["--quantization", "int3"], "invalid choice: 'int3'"),
    (["--device", "gpu"], "--device gpu is none of"),
    (["--device", "cpu", "--dataset", "/no/such/folder"], "no such folder"),
    ([], "no CUDA GPU here: run `python demo.py` to see it learn on a CPU, or add `--device cpu`"),
])
def test_bad_flags_are_one_line_and_exit_code_2(flags, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        command_line.run_command_line(grpo.Config, grpo.train, flags)
    printed = capsys.readouterr()
    assert stop.value.code == 2
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1 and message in printed.err


def test_help_names_every_flag_with_its_help(capsys):
    with pytest.raises(SystemExit) as stop:
        command_line.run_command_line(grpo.Config, grpo.train, ["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    for field in dataclasses.fields(grpo.Config):
        assert f"--{field.name.replace('_', '-')}" in text and field.metadata["help"]


def test_the_program_itself_stops_without_a_gpu():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA GPU here")
    done = grpo_command()
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1 and "demo.py" in done.stderr


def test_kernels_that_cannot_run_here_are_switched_off(load, monkeypatch, capsys):
    """flash-linear-attention can be imported where there is no GPU; transformers would then call it."""
    import transformers.models.qwen3_5.modeling_qwen3_5 as qwen

    policy = load()
    for name in models.KERNELS:
        @functools.wraps(inspect.unwrap(getattr(qwen, name)))
        def kernel(*_, **__):
            raise RuntimeError("needs a GPU")

        monkeypatch.setattr(qwen, name, kernel)
    prompts = prompts_of(policy, questions())
    with pytest.raises(RuntimeError, match="needs a GPU"):
        grpo.sample(policy, prompts, 1, 2)
    assert models.kernels_line(policy.base, True) == "attention: sdpa; gated delta rule: torch reference"
    assert grpo.sample(policy, prompts, 1, 2).lengths.min() >= 1


@pytest.mark.parametrize("installed, allowed, line", [
    ({"fla", "causal_conv1d"}, True, "flash-linear-attention; convolution: causal-conv1d"),
    ({"fla"}, True, "flash-linear-attention; convolution: torch (pip install causal-conv1d)"),
    (set(), True, "torch reference, correct but slower: pip install flash-linear-attention causal-conv1d"),
    ({"fla", "causal_conv1d"}, False, "torch reference")])
def test_the_line_about_kernels_on_a_gpu(load, monkeypatch, installed, allowed, line):
    import transformers.models.qwen3_5.modeling_qwen3_5 as qwen

    base = load().base  # on the CPU, which has switched the kernels off
    monkeypatch.setattr(models, "importable", lambda package: package in installed)
    monkeypatch.setattr(type(base), "device", torch.device("cuda"))
    assert models.kernels_line(base, allowed) == f"attention: sdpa; gated delta rule: {line}"
    for name, (package, _) in models.KERNELS.items():
        runs = getattr(qwen, name) is models.INSTALLED[qwen.__name__, name]
        assert runs == (allowed and package in installed), "the line is about other code than what runs"


@pytest.mark.parametrize("damage, message", [
    (lambda folder: (folder / "config.json").unlink(), "cannot be loaded"),
    (lambda folder: edit(folder / "config.json", model_type="llama"), "vision-language families"),
    (lambda folder: edit(folder / "preprocessor_config.json", patch_size=14), "patch_size is 14"),
    (lambda folder: (folder / "model.safetensors").write_bytes(b"torn"), "cannot be loaded"),
])
def test_a_wrong_model_folder_is_one_error(folders, tmp_path, damage, message):
    import shutil

    folder = Path(shutil.copytree(folders(), tmp_path / "model"))
    damage(folder)
    with pytest.raises(UserError, match=message) as error:
        grpo.load_policy(grpo.Config(base_model=str(folder), device="cpu"))
    assert "\n" not in str(error.value)


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_adapters_that_do_not_fit(folders, load, tmp_path):
    config = grpo.Config(base_model=str(folders()), device="cpu", adapter=str(tmp_path))
    with pytest.raises(UserError, match="no adapter_config.json"):
        grpo.load_policy(config)
    load("qwen3_vl").model.save_pretrained(tmp_path)  # of another base model
    with pytest.raises(UserError, match="was made for a Qwen3VLForConditionalGeneration"):
        grpo.load_policy(config)
    load().model.save_pretrained(tmp_path)
    load().model.save_pretrained(tmp_path / "dropout")
    edit(tmp_path / "dropout" / "adapter_config.json", lora_dropout=0.1)
    with pytest.raises(UserError, match="trained with dropout"):
        grpo.load_policy(grpo.Config(base_model=str(folders()), device="cpu", adapter=str(tmp_path / "dropout")))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"torn")
    with pytest.raises(UserError, match="cannot be put on"):
        grpo.load_policy(config)


def test_old_transformers_is_refused(config, monkeypatch):
    monkeypatch.setattr(command_line.transformers, "__version__", "5.23.1")
    with pytest.raises(UserError, match="5.24 is needed"):
        grpo.train(config)


# Numbers of an evaluation


def test_wilson_interval():
    """71 of 100: 61.46 % to 78.99 %, worked out by hand from Wilson's formula."""
    n, p, z = 100, 0.71, 1.959963984540054
    low = (p + z**2 / 200 - z * ((p * (1 - p) + z**2 / 400) / n) ** 0.5) / (1 + z**2 / n)
    rate = rundir.rate(71, 100)
    assert rate["value"] == 0.71 and rate["low"] == pytest.approx(low) == pytest.approx(0.6146, abs=1e-4)
    assert rate["high"] == pytest.approx(0.7899, abs=1e-4)
    assert rundir.rate(0, 100)["low"] == 0.0 and rundir.rate(10, 10)["high"] == 1.0
    assert rundir.rate(0, 0) == {"value": None, "count": 0, "n": 0, "low": None, "high": None}


def row(gold, choice, lenient=None, tokens=10, truncated=False):
    return {"gold": gold, "choice": choice, "lenient_choice": lenient or choice, "tokens": tokens,
            "truncated": truncated}


def test_summary_and_mcnemar():
    before = [row("A", "A"), row("B", None, "B", 30, True), row("C", "D"), row("D", None), row("A", None)]
    after = [row("A", "B"), row("B", "B"), row("C", "C"), row("D", "D"), row("A", "A")]
    results = rundir.compare(before, after)
    counts = {k: (v["count"], v["n"]) for k, v in results["before"].items() if k != "mean_tokens"}
    assert counts == {"accuracy": (1, 5), "format_rate": (2, 5), "accuracy_given_format": (1, 2),
                      "lenient_accuracy": (2, 5), "truncated_rate": (1, 5)}
    assert results["before"]["mean_tokens"] == 14
    # 4 gained, 1 lost: 2 * (C(5,0) + C(5,1)) / 2^5
    assert results["mcnemar_p"] == pytest.approx(2 * 6 / 32)
    assert rundir.compare(before, before)["mcnemar_p"] == 1.0
    table = rundir.results_table(results)
    assert "20.0%" in table and "80.0%" in table and "0.38" in table


def test_text_for_the_terminal_has_no_control_characters():
    assert errors.printable("a\x1b[2Jb\r\n中") == "a\\x1b[2Jb\\r\\n中"
