"""Flags: how a dataclass becomes a command line, --help, and what is refused in one line with exit code 2."""

import dataclasses
import json
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import torch

import demo
import grpo
from support import command_line, run_settings
from support.command_line import checked_config, reward_weights, run_command_line, with_preset
from support.errors import UserError
from support.run_settings import RunSettings, flag

ROOT = Path(__file__).resolve().parents[1]
KINDS = {"loop": None}


@dataclass
class Small(RunSettings):
    """A command line with one flag of each kind."""

    base_model: str = flag("owner/name", "model that is trained", section="model")
    quantization: Literal["auto", "none"] = flag("auto", "of the base")
    steps: int = flag(100, "training steps", section="algorithm", at_least=1)
    clip: float | None = flag(None, "a bound", above=0, at_most=1)
    kind: str = flag("loop", "how", choices=lambda: KINDS)
    reward: str = flag("right", "names and weights", choices={"right": None})
    half: bool = flag(False, "take 50% of it")
    evaluate: bool = flag(True, "evaluate before and after training", section="evaluation")


def parsed(*arguments, config_class=Small):
    """The config that these flags give."""
    seen = []
    run_command_line(config_class, seen.append, list(arguments))
    return seen[0]


def refusal(capsys, *arguments, config_class=Small, action=print):
    """The one line that refuses these flags."""
    with pytest.raises(SystemExit) as stop:
        run_command_line(config_class, action, list(arguments))
    printed = capsys.readouterr()
    assert stop.value.code == 2
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1 and printed.err[:-1].isprintable()
    return printed.err[len("error: "):-1]


@pytest.fixture
def help_of(capsys, monkeypatch):
    """help_of(config_class, action, columns) -> the lines of --help on a terminal of so many columns."""
    def run(config_class, action=print, columns=120):
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as stop:
            run_command_line(config_class, action, ["--help"])
        assert stop.value.code == 0
        return capsys.readouterr().out.splitlines()

    return run


def sections(lines):
    """Section -> its flags, as --help lists them."""
    found = {}
    for line in lines:
        if heading := re.fullmatch(r"(\w+):", line):
            found[heading[1]] = []
        elif name := re.match(r"  (--\S+)", line):
            found[list(found)[-1]].append(name[1])
    return found


def line_of(lines, name):
    (line,) = [line for line in lines if line.startswith(f"  {name} ")]
    return " ".join(line.split())


# Parsing


def test_flags_become_a_config():
    assert parsed() == Small()
    config = parsed("--steps", "3", "--base-model=elsewhere", "--no-evaluate", "--half", "--clip", "0.5")
    assert config == Small(steps=3, base_model="elsewhere", evaluate=False, half=True, clip=0.5)
    assert parsed("--base_model", "x", "--no_evaluate") == Small(base_model="x", evaluate=False)
    assert parsed("--evaluate", "False", "--half", "true") == Small(evaluate=False, half=True)


@pytest.mark.parametrize("arguments, message", [
    (["--stepz", "3"], "unknown flag --stepz"),
    (["--step", "3"], "unknown flag --step"),
    (["--base", "x"], "unknown flag --base"),
    (["surplus"], "unknown flag surplus"),
    (["--steps"], "argument --steps: expected one argument"),
    (["--steps", "x"], "invalid int value: 'x'"),
    (["--steps", "1.5"], "invalid int value: '1.5'"),
    (["--quantization", "int3"], "invalid choice: 'int3'"),
    (["--half", "perhaps"], "perhaps"),
    (["--x\x1b[2J"], r"unknown flag --x\x1b[2J"),
])
def test_flags_that_cannot_be_parsed(capsys, arguments, message):
    assert message in refusal(capsys, *arguments)


@dataclass
class Changed(Small):
    steps: int = 80
    base_model: str = flag("here", "another policy")
    extra: bool = flag(False, "also do this", section="model")
    last: int = 7


def test_a_plain_override_keeps_help_section_and_range(help_of):
    flags = run_settings.flags_of(Changed)
    assert flags["steps"] == run_settings.flags_of(Small)["steps"]
    assert flags["base_model"] == {"help": "another policy", "section": "model"}
    lines = help_of(Changed)
    assert line_of(lines, "--steps") == "--steps N training steps [80]"
    assert line_of(lines, "--base-model") == "--base-model TEXT another policy [here]"
    assert sections(lines)["model"] == ["--base-model", "--quantization", "--extra", "--last"]
    assert parsed(config_class=Changed).steps == 80


def test_a_limit_without_a_meaning_is_refused():
    with pytest.raises(AssertionError):
        flag(1, "a number", at_leats=1)


# Help


def test_help_has_sections_and_each_flag_once(help_of):
    lines = help_of(Small)
    found = sections(lines)
    assert list(found) == ["options", "model", "algorithm", "memory", "evaluation", "run"]
    assert found["model"] == ["--base-model", "--quantization"]
    assert found["algorithm"] == ["--steps", "--clip", "--kind", "--reward", "--half"]
    assert found["evaluation"] == ["--eval-only", "--no-evaluate"]
    assert "_" not in "".join(name for names in found.values() for name in names)
    assert line_of(lines, "--steps") == "--steps N training steps [100]"
    assert line_of(lines, "--quantization") == "--quantization NAME of the base {auto, none} [auto]"
    assert line_of(lines, "--clip") == "--clip X a bound", "no empty default"
    assert line_of(lines, "--half") == "--half take 50% of it"
    assert line_of(lines, "--no-evaluate") == "--no-evaluate do not evaluate before and after training"


def test_help_lists_entries_that_a_user_added(help_of, monkeypatch):
    assert line_of(help_of(Small), "--kind") == "--kind NAME how {loop} [loop]"
    monkeypatch.setitem(KINDS, "mine", None)
    assert line_of(help_of(Small), "--kind") == "--kind NAME how {loop, mine} [loop]"

    def main(config, task=None):
        pass

    assert "{right}" in line_of(help_of(Small, main), "--reward")
    task = SimpleNamespace(rewards={"right": None, "speed": None})
    assert "{right, speed} [right]" in line_of(help_of(Small, partial(main, task=task)), "--reward")
    assert "{right}" in line_of(help_of(Small), "--reward"), "the task of another program stays there"


@pytest.mark.parametrize("config_class", [grpo.Config, demo.DemoConfig])
def test_help_of_the_programs(help_of, config_class):
    narrow, lines = help_of(config_class, columns=80), help_of(config_class)
    assert len(lines) < len(narrow) <= 100 and max(map(len, lines)) <= 120
    found = sections(lines)
    assert list(found) == ["options", *run_settings.SECTIONS]
    listed = [name.removeprefix("--no-").removeprefix("--") for names in found.values() for name in names]
    assert sorted(listed) == sorted(["help"] + [f.name.replace("_", "-") for f in dataclasses.fields(config_class)])
    assert all(about.get("help") for about in run_settings.flags_of(config_class).values())
    assert lines[2] == sys.modules[config_class.__module__].__doc__.splitlines()[0]
    for table in (grpo.LOSS_FNS, grpo.ADVANTAGES, grpo.SAMPLERS, grpo.GEOQA.rewards):
        assert f"{{{', '.join(table)}}}" in "\n".join(lines)


def test_the_algorithms_own_settings_fit_on_a_screen():
    assert len(dataclasses.fields(grpo.Config)) - len(dataclasses.fields(RunSettings)) <= 36


# Checks


def check(**changes):
    checked_config(grpo.Config(**changes), grpo.GEOQA.rewards)


def test_the_defaults_and_every_loss_pass():
    check()
    check(eval_only=True, top_p=0.9)
    for name in grpo.LOSS_FNS:
        check(loss_fn=name)
    for reduction in grpo.LOSS_REDUCTIONS:
        check(loss_reduction=reduction)


@pytest.mark.parametrize("changes, message", [
    (dict(steps=0), "--steps must be at least 1, not 0"),
    (dict(batch_size=0), "--batch-size must be at least 1"),
    (dict(max_tokens=0), "--max-tokens must be at least 1"),
    (dict(lora_rank=0), "--lora-rank must be at least 1"),
    (dict(eval_batch_size=0), "--eval-batch-size must be at least 1"),
    (dict(minibatches=0), "--minibatches must be at least 1"),
    (dict(updates_per_rollout=0), "--updates-per-rollout must be at least 1"),
    (dict(group_size=1), "--group-size must be at least 2, not 1"),
    (dict(temperature=0.0), "--temperature must be above 0, not 0.0"),
    (dict(temperature=float("nan")), "--temperature must be above 0"),
    (dict(temperature=float("inf")), "--temperature must be above 0"),
    (dict(top_p=0.0), "--top-p must be above 0 and at most 1, not 0.0"),
    (dict(top_p=1.1), "--top-p must be above 0 and at most 1"),
    (dict(top_p=0.9), "--top-p below 1 is for --eval-only"),
    *[({name: value}, f"--{name.replace('_', '-')} must be 0 or more, not {value}")
      for name in ("max_samples", "tokens_per_micro_batch", "rollouts_at_once", "max_image_tokens", "test_size",
                   "save_every", "keep_checkpoints", "seed") for value in (-1,)],
    *[({name: value}, f"--{name.replace('_', '-')} must be 0 or more, not {value}")
      for name in ("max_grad_norm", "learning_rate", "eval_temperature", "kl_coef", "electricity_price", "clip_low",
                   "clip_high") for value in (-1.0, float("nan"), float("inf"))],
    (dict(loss_fn="magic"), "--loss-fn magic is none of importance_sampling, ppo, cispo, gspo"),
    (dict(advantage="magic"), "--advantage magic is none of grpo, grpo_std"),
    (dict(sampler="magic"), "--sampler magic is none of loop, generate"),
    (dict(reward="magic"), "--reward magic is none of right"),
    (dict(loss_fn="gspo", loss_reduction="token"), "--loss-reduction token: --loss-fn gspo needs sequence"),
    (dict(clip_low=0.1), "--clip-low: --loss-fn importance_sampling has no such bound"),
    (dict(clip_high=0.1), "--clip-high: --loss-fn importance_sampling has no such bound"),
    (dict(overlong_penalty=True, max_tokens=3), "--overlong-penalty does not fit into --max-tokens 3"),
    (dict(adapter="/no/such"), "--adapter /no/such: no adapter_model.safetensors there"),
    (dict(eval_only=True, evaluate=False), "--eval-only and --no-evaluate leave nothing to do"),
    (dict(eval_only=True, resume="runs/1"), "--resume continues a training: --eval-only goes with --adapter"),
    (dict(swanlab_mode="offline"), "--swanlab-mode"),
])
def test_settings_with_which_no_run_makes_sense(changes, message):
    with pytest.raises(UserError, match=f"^{re.escape(message)}") as error:
        check(**changes)
    assert "\n" not in str(error.value)


def test_a_loss_of_ones_own_is_checked_by_its_entry(monkeypatch):
    def mine(logprobs, old_logprobs, advantages, mask, low=0.1):
        pass

    monkeypatch.setitem(grpo.LOSS_FNS, "mine", mine)
    monkeypatch.setitem(grpo.LOSS_FNS, "fixed", SimpleNamespace(fn=mine, reduction="constant"))
    check(loss_fn="mine", clip_low=0.3, loss_reduction="token")
    check(loss_fn="fixed", clip_low=0.3, loss_reduction="constant")
    with pytest.raises(UserError, match="--clip-high: --loss-fn mine has no such bound"):
        check(loss_fn="mine", clip_high=0.3)
    with pytest.raises(UserError, match="--loss-reduction token: --loss-fn fixed needs constant"):
        check(loss_fn="fixed", loss_reduction="token")


def test_reward_names_and_weights():
    rewards = {"right": None, "brevity": None}
    assert reward_weights("right", rewards) == {"right": 1.0}
    assert reward_weights("brevity:-0.2, right:2", rewards) == {"brevity": -0.2, "right": 2.0}
    assert reward_weights("right:.5,brevity:10", rewards) == {"right": 0.5, "brevity": 10.0}


@pytest.mark.parametrize("text, message", [
    ("speed", "--reward speed is none of right, brevity"),
    ("right,speed:2", "--reward speed is none of right, brevity"),
    ("", "--reward '' is none of right, brevity"),
    ("right,", "--reward 'right,' is none of right, brevity"),
    *[(text, f"--reward {text}: each name stands once, with a number as its weight")
      for text in ("right:much", "right:nan", "right:inf", "right:1:2", "right:-", "right:1,right:2")],
])
def test_rewards_that_do_not_exist(text, message):
    with pytest.raises(UserError, match=re.escape(message)):
        reward_weights(text, {"right": None, "brevity": None})


def test_old_transformers_is_refused(monkeypatch):
    monkeypatch.setattr(command_line.transformers, "__version__", "5.23.1")
    with pytest.raises(UserError, match="5.24 is needed"):
        check()


def test_dapo_preset_says_what_it_sets_and_leaves_what_was_given(capsys):
    given = grpo.Config(algorithm="dapo", clip_high=0.3)
    before = dataclasses.asdict(given)
    config = with_preset(given)
    assert dataclasses.asdict(given) == before
    assert (config.loss_fn, config.clip_low, config.clip_high, config.advantage) == ("ppo", 0.2, 0.3, "grpo_std")
    assert config.dynamic_sampling and config.overlong_penalty and config.loss_reduction == "token"
    assert capsys.readouterr().out == (
        "--algorithm dapo sets --loss-fn ppo --clip-low 0.2 --loss-reduction token --advantage grpo_std "
        "--overlong-penalty --dynamic-sampling\n")
    assert with_preset(grpo.Config()) == grpo.Config()
    assert with_preset(grpo.Config(algorithm="dapo", resume="runs/1")).loss_fn == "importance_sampling"
    assert with_preset(grpo.Config(algorithm="dapo", loss_fn="cispo")).clip_high is None


def test_what_a_preset_sets_is_checked_too():
    given = grpo.Config(algorithm="dapo")
    assert checked_config(given, grpo.GEOQA.rewards).loss_fn == "ppo" and given.loss_fn == "importance_sampling"
    with pytest.raises(UserError, match="--overlong-penalty does not fit into --max-tokens 3"):
        checked_config(grpo.Config(algorithm="dapo", max_tokens=3), grpo.GEOQA.rewards)


# The programs


@pytest.mark.parametrize("arguments, message", [
    (["--steps", "0"], "--steps must be at least 1"),
    (["--loss-fn", "\x1b[2J"], r"--loss-fn \x1b[2J is none of"),
    (["--device", "gpu"], "--device gpu is none of"),
    (["--device", "cpu", "--dataset", "/no/such/folder"], "no such folder"),
    ([], "no CUDA GPU here: run `python demo.py` to see it learn on a CPU, or add `--device cpu`"),
])
def test_what_a_program_refuses(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert message in refusal(capsys, *arguments, config_class=grpo.Config, action=grpo.main)


def test_the_program_itself_stops_without_a_gpu():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA GPU here")
    done = subprocess.run([sys.executable, "grpo.py"], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1 and "demo.py" in done.stderr


def test_resume_takes_the_settings_of_the_run_except_those_given(tmp_path):
    stored = grpo.Config(steps=3, learning_rate=1.0, clip_low=0.5)
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(stored)))
    config = parsed("--resume", str(tmp_path), "--steps", "100", config_class=grpo.Config)
    assert config == dataclasses.replace(stored, resume=str(tmp_path), steps=100), "a flag at its default is given too"


@pytest.mark.parametrize("error, code, line", [
    (UserError("two\nlines\x1b[2J"), 2, "error: two\\nlines\\x1b[2J\n"),
    (torch.OutOfMemoryError("CUDA out of memory"), 2, "error: out of GPU memory: lower --tokens-per-micro-batch "
     "(learning) or --rollouts-at-once (sampling, evaluation)\n"),
    (KeyboardInterrupt(), 130, "interrupted\n"),
])
def test_how_a_program_ends_early(error, code, line, capsys):
    def action(config):
        raise error

    with pytest.raises(SystemExit) as stop:
        run_command_line(Small, action, [])
    assert stop.value.code == code and capsys.readouterr().err == line


@pytest.mark.parametrize("program", ["grpo.py", "demo.py"])
def test_an_interrupt_while_libraries_load_is_no_traceback(program):
    process = subprocess.Popen([sys.executable, "-X", "importtime", program, "--help"], cwd=ROOT, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for line in process.stderr:
        if line.rsplit("|", 1)[-1].strip().startswith("torch"):  # a part of it: most is still to come
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    rest = [line for line in err.splitlines() if not line.startswith("import time:")]
    assert (process.returncode, out, rest) == (-signal.SIGINT, "", [])


def test_an_interrupt_that_a_library_would_swallow_ends_the_process():
    code = ("from support import interrupts\ninterrupts.quiet_while_loading()\nimport time\nprint('here', flush=True)\n"
            "while True:\n    try: time.sleep(60)\n    except BaseException: pass")
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "") and process.returncode == -signal.SIGINT


def test_an_interrupt_after_loading_is_an_exception_again():
    code = ("import signal\nfrom support import interrupts\ninterrupts.quiet_while_loading()\ninterrupts.as_usual()\n"
            "try: signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt: print('caught')\n"
            "signal.signal(signal.SIGINT, signal.SIG_IGN)\ninterrupts.quiet_while_loading()\ninterrupts.as_usual()\n"
            "signal.raise_signal(signal.SIGINT)\nprint('ignored')")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "caught\nignored\n", "")
