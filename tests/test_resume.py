"""Runs that stop and go on: resuming bit for bit, checkpoints, interrupts, the lock, full disks, broken numbers."""

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from runs import command, flags, lines, make_data_set, result

import grpo
from support import checkpoints, logs, rundir, stopping
from support.errors import UserError

TESTS = Path(__file__).parent
PROGRAM = dict(env=os.environ | {"PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"}, cwd=TESTS.parent, text=True)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return make_data_set(tmp_path_factory.mktemp("questions"))


@pytest.fixture
def given(folders, data, tmp_path):
    """given(steps=3) -> flags of a run in tmp_path/run."""
    return lambda **changes: flags(folders(), data, tmp_path, **changes)


@pytest.fixture(scope="session")
def undisturbed(folders, data, tmp_path_factory):
    """Six steps without a stop."""
    output = tmp_path_factory.mktemp("undisturbed")
    assert command(flags(folders(), data, output, save_every=1)) == 0
    return output / "run"


# Resume


@pytest.mark.parametrize("extra", [
    {}, pytest.param({"algorithm": "dapo", "learning_rate": 1e-2}, marks=pytest.mark.slow),
    pytest.param({"minibatches": 2, "updates_per_rollout": 2, "kl_coef": 0.1}, marks=pytest.mark.slow)])
def test_six_steps_are_three_and_three(given, tmp_path, extra):
    assert command(given(experiment_name="whole", **extra)) == 0
    assert command(given(steps=3, save_every=1, keep_checkpoints=2, **extra)) == 0
    assert not (tmp_path / "run" / "step-1").exists() and (tmp_path / "run" / "step-2").exists()
    assert command(["--resume", str(tmp_path / "run"), "--steps", "6"]) == 0
    whole, parts = result(tmp_path / "whole", 6), result(tmp_path / "run", 6)
    assert parts[1].pop("eval-step-3.json")
    assert parts == whole
    assert sum(row["trainer/optimizer_steps"] for row in whole[0]) >= 5, "it did not train"
    if extra.get("algorithm") == "dapo":
        assert any(row["rollout/waves"] > 1 for row in whole[0]), "no second wave was drawn"


@pytest.mark.slow
def test_a_run_without_a_checkpoint_starts_again(given, tmp_path, undisturbed, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(rundir.RunDir, "checkpoint", lambda run: None)
        command(given(steps=2))
    base = lines(tmp_path / "run" / "evaluations.jsonl")[0]
    assert command(["--resume", str(tmp_path / "run"), "--steps", "6"]) == 0
    assert lines(tmp_path / "run" / "evaluations.jsonl")[0] == base, "the base was evaluated again"
    assert "going on after step 0" in capsys.readouterr().out
    assert result(tmp_path / "run", 6)[0] == result(undisturbed, 6)[0]


def test_a_finished_run_makes_no_step_and_no_evaluation_again(undisturbed, tmp_path):
    run = shutil.copytree(undisturbed, tmp_path / "run")
    assert command(["--resume", str(run)]) == 0
    for log in ("metrics.jsonl", "evaluations.jsonl"):  # with the seconds that they took
        assert (run / log).read_bytes() == (undisturbed / log).read_bytes()
    assert result(run, 6) == result(undisturbed, 6)


@pytest.mark.parametrize("changes, name", [
    (["--learning-rate", "4e-5"], "--learning-rate 4e-05"),  # the default, which is not what the run had
    (["--seed", "1"], "--seed 1"),
    (["--batch-size", "3"], "--batch-size 3"),
    (["--max_tokens", "7"], "--max-tokens 7"),
    (["--loss-fn", "ppo"], "--loss-fn ppo"),
    (["--advantage", "grpo_std"], "--advantage grpo_std"),
    (["--sampler", "generate"], "--sampler generate"),
    (["--mask-truncated"], "--mask-truncated True"),
    (["--base-model", "elsewhere"], "--base-model elsewhere"),
    (["--adapter", "elsewhere"], "--adapter elsewhere"),
    (["--output-dir", "elsewhere"], "--output-dir elsewhere"),
    (["--experiment-name", "another"], "--experiment-name another"),
    (["--steps", "5"], "--steps 5: the run"),
    (["--eval-only"], "--resume continues a training"),
    (["--keep-checkpoints", "-1"], "--keep-checkpoints must be 0 or more"),
])
def test_a_flag_that_alters_the_experiment_is_refused(undisturbed, tmp_path, capsys, changes, name):
    run = shutil.copytree(undisturbed, tmp_path / "run")
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    assert command(["--resume", str(run), *changes]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {name}") and err.count("\n") == 1
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == before


def test_every_other_flag_is_known_to_alter_or_not():
    assert checkpoints.HARMLESS <= {field.name for field in dataclasses.fields(grpo.Config)}


def test_harmless_flags_are_taken(undisturbed, tmp_path, capsys):
    run = shutil.copytree(undisturbed, tmp_path / "run")
    assert command(["--resume", str(run), "--steps", "8", "--save-every", "4", "--show-samples",
                    "--tokens-per-micro-batch", "300", "--rollouts-at-once", "3", "--on-nonfinite", "skip",
                    "--keep-checkpoints", "3"]) == 0
    assert "  question q" in capsys.readouterr().out
    assert [step for step, _ in checkpoints.checkpoint_folders(run)] == [8, 6, 5]
    stored = json.loads((run / "config.json").read_text())
    assert (stored["steps"], stored["save_every"], stored["learning_rate"]) == (8, 4, 5e-2)


@pytest.mark.parametrize("content, message", [
    (None, "config.json is missing"),
    ("{", "config.json cannot be read"),
    ("[]", "an older version made this run"),
    ('{"base_model": "m", "dataset": "d", "steps": 6}', "an older version made this run"),
])
def test_what_is_no_run_directory(tmp_path, capsys, content, message):
    if content:
        (tmp_path / "config.json").write_text(content)
    assert command(["--resume", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_model_and_data_set_are_those_that_the_run_resolved(tmp_path):
    settings = dataclasses.asdict(grpo.Config(base_model="own/model@main", dataset=str(tmp_path)))
    resolved = {"resolved_model_revision": "abc", "resolved_dataset_revision": "local"}
    (tmp_path / "config.json").write_text(json.dumps(settings | resolved))
    config = checkpoints.resumed_config(grpo.Config(resume=str(tmp_path)), set())
    assert (config.base_model, config.dataset) == ("own/model@abc", str(tmp_path))
    checkpoints.check_same_experiment(config)
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(config) | resolved))  # as resuming leaves it
    assert checkpoints.resumed_config(grpo.Config(resume=str(tmp_path)), set()) == config
    for other in ("own/model@xyz", "own/other"):
        with pytest.raises(UserError, match=f"--base-model {other}: the run"):
            checkpoints.check_same_experiment(dataclasses.replace(config, base_model=other))


# Checkpoints


def test_the_size_of_a_checkpoint(undisturbed):
    newest = undisturbed / "step-6"
    adapter = (newest / "adapter_model.safetensors").stat().st_size
    whole = sum(path.stat().st_size for path in newest.iterdir())
    assert whole <= 3 * adapter + 2**20, (whole, adapter)
    assert {path.suffix for path in newest.iterdir()} == {".safetensors", ".json", ""}
    assert json.loads((newest / "state.json").read_text()).keys() == {"step", "questions_drawn", "random"}


def test_a_checkpoint_in_plain_peft_gives_the_same_logprobs(undisturbed, load, folders):
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    ours, ids = load(), torch.arange(40, 90)[None]
    before = ours.model.eval()(input_ids=ids).logits.log_softmax(-1)
    state = checkpoints.newest_checkpoint(undisturbed, pytest.fail)
    checkpoints.restore_checkpoint(undisturbed / "step-6", state, ours, torch.optim.AdamW(ours.parameters()))
    assert torch.get_rng_state().tolist() == state["random"]["torch"]
    plain = PeftModel.from_pretrained(
        AutoModelForImageTextToText.from_pretrained(folders(), dtype=torch.float32), undisturbed / "step-6").eval()
    found = [model(input_ids=ids).logits.log_softmax(-1) for model in (ours.model, plain)]
    assert torch.equal(*found) and not torch.allclose(found[0], before, atol=1e-3)


DAMAGES = {
    "adapter cut": ("adapter_model.safetensors", lambda file: os.truncate(file, 1000)),
    "adapter edited": ("adapter_model.safetensors", lambda file: flip(file, -1)),
    "optimiser edited": ("optimizer.safetensors", lambda file: flip(file, -1)),
    "optimiser gone": ("optimizer.safetensors", Path.unlink),
    "settings edited": ("adapter_config.json", lambda file: flip(file, 20)),
    "state empty": ("state.json", lambda file: file.write_text("")),
    "state cut": ("state.json", lambda file: os.truncate(file, 400)),
    "state edited": ("state.json", lambda file: file.write_text(file.read_text().replace('"step": 6', '"step": 5'))),
    "state no table": ("state.json", lambda file: file.write_text("[1]")),
    "state gone": ("state.json", Path.unlink),
    "checksums gone": ("SHA256SUMS", Path.unlink),
}


def flip(file, position):
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)


def test_a_flipped_bit_is_noticed_wherever_it_is(undisturbed, tmp_path):
    copy = shutil.copytree(undisturbed / "step-6", tmp_path / "step-6")
    generator = random.Random(0)
    assert checkpoints.is_whole(copy)
    for file in copy.iterdir():
        size = file.stat().st_size
        for position in (0, size - 1, *(generator.randrange(size) for _ in range(20))):
            flip(file, position)
            assert not checkpoints.is_whole(copy), (file.name, position)
            flip(file, position)
    assert checkpoints.is_whole(copy)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(undisturbed, tmp_path, damage):
    run = shutil.copytree(undisturbed, tmp_path / "run")
    name, change = DAMAGES[damage]
    change(run / "step-6" / name)
    told = []
    assert checkpoints.newest_checkpoint(run, told.extend)["step"] == 5
    assert len(told) == 1 and f"{run / 'step-6'} is damaged and not used" in told[0]
    assert (run / "step-6.damaged").is_dir()


def test_training_goes_on_from_the_checkpoint_before(undisturbed, tmp_path, capsys):
    run = shutil.copytree(undisturbed, tmp_path / "run")
    for step in (5, 6):
        os.truncate(run / f"step-{step}" / "optimizer.safetensors", 100)
    (run / "step-7.tmp").mkdir()
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "rew')
    assert command(["--resume", str(run)]) == 0
    out = capsys.readouterr().out
    assert out.count("is damaged and not used") == 2 and "going on after step 4" in out
    assert result(run, 6) == result(undisturbed, 6)
    assert not (run / "step-7.tmp").exists()


def test_keep_checkpoints_keeps_the_newest(tmp_path):
    for step in (1, 2, 10, 9):
        (tmp_path / f"step-{step}").mkdir()
    (tmp_path / "step-x").mkdir()
    checkpoints.prune_checkpoints(tmp_path, 0)
    assert len(list(tmp_path.iterdir())) == 5
    checkpoints.prune_checkpoints(tmp_path, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"step-10", "step-9", "step-x"}


def test_cutting_a_log(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b'{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste')
    logs.cut_lines(log, lambda row: True)
    assert log.read_bytes() == b'{"step": 1}\n{"step": 2}\n{"step": 3}\n'
    logs.cut_lines(log, lambda row: row["step"] <= 1)
    assert log.read_bytes() == b'{"step": 1}\n'
    log.write_bytes(b'{"step": 1}\n\x00\x00\n{"step": 2}\n')
    logs.cut_lines(log, lambda row: True)
    assert log.read_bytes() == b'{"step": 1}\n'
    logs.cut_lines(tmp_path / "none", lambda row: True)


# Interrupts


def when(monkeypatch, name, count, act):
    """Calls `act` before the `count`-th call of grpo's function `name`."""
    right, calls = getattr(grpo, name), []

    def spy(*args, **kw):
        calls.append(1)
        if len(calls) == count:
            act()
        return right(*args, **kw)

    monkeypatch.setattr(grpo, name, spy)


@pytest.mark.parametrize("phase, count, number, code", [
    ("draw_tokens", 21, signal.SIGTERM, 143), ("completion_logprobs", 6, signal.SIGINT, 130),
    ("evaluate_policy", 2, signal.SIGINT, 130)])
def test_a_signal_leaves_the_last_complete_step(given, tmp_path, undisturbed, monkeypatch, capsys, phase, count, number,
                                                code):
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        when(patch, phase, count, lambda: os.kill(os.getpid(), number))
        assert command(given(save_every=0)) == code
    printed = capsys.readouterr()
    steps = lines(tmp_path / "run" / "metrics.jsonl")[-1]["step"]
    assert steps == {"draw_tokens": 2, "completion_logprobs": 3, "evaluate_policy": 6}[phase]
    assert f"stopped; to go on after step {steps}: {stopping.resume_command(tmp_path / 'run')}\n" in printed.out
    assert printed.err.count("interrupted\n") == 1 and "Traceback" not in printed.err
    assert [step for step, _ in checkpoints.checkpoint_folders(tmp_path / "run")] == [steps] and 0 < steps
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert command(["--resume", str(tmp_path / "run")]) == 0
    assert result(tmp_path / "run", 6) == result(undisturbed, 6)


@pytest.mark.parametrize("where, name, count", [(logs.Logs, "append", 14), (rundir, "save_checkpoint", 3)])
def test_a_signal_while_files_are_written(given, tmp_path, undisturbed, monkeypatch, where, name, count):
    right, calls = getattr(where, name), []

    def spy(*args):
        calls.append(1)
        if len(calls) == count:
            os.kill(os.getpid(), signal.SIGINT)
        return right(*args)

    with monkeypatch.context() as patch:
        patch.setattr(where, name, spy)
        assert command(given(save_every=1)) == 130
    assert command(["--resume", str(tmp_path / "run")]) == 0
    assert result(tmp_path / "run", 6) == result(undisturbed, 6)


def test_a_signal_between_two_updates_of_a_step_waits_for_its_end(given, tmp_path, monkeypatch, capfd):
    extra = dict(steps=3, minibatches=2, updates_per_rollout=2, tokens_per_micro_batch=1)  # a row in each
    assert command(given(experiment_name="whole", **extra)) == 0
    with monkeypatch.context() as patch:
        kill = lambda: os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
        when(patch, "accumulate_gradients", 7, kill)  # the third of the second step's four
        assert command(given(save_every=0, **extra)) == 143
    assert "finishing this step first" in capfd.readouterr().err
    assert [step for step, _ in checkpoints.checkpoint_folders(tmp_path / "run")] == [2]
    assert command(["--resume", str(tmp_path / "run")]) == 0
    assert result(tmp_path / "run", 3) == result(tmp_path / "whole", 3)


@pytest.mark.slow
def test_a_signal_before_the_first_step(given, tmp_path, undisturbed, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        when(patch, "draw_tokens", 3, lambda: os.kill(os.getpid(), signal.SIGINT))  # while the base is evaluated
        assert command(given()) == 130
    assert "to go on after step 0" in capsys.readouterr().out
    assert command(["--resume", str(tmp_path / "run")]) == 0
    assert result(tmp_path / "run", 6) == result(undisturbed, 6)


def test_the_command_that_goes_on(monkeypatch):
    run, main = Path("runs/a b"), "__main__"
    monkeypatch.setattr(sys, "argv", ["my loss.py", "--steps", "3"])
    monkeypatch.setitem(sys.modules, main, SimpleNamespace(__spec__=None))
    assert stopping.resume_command(run) == "python 'my loss.py' --resume 'runs/a b'"
    for name in ("recipes.distill", "recipes.distill.__main__"):
        monkeypatch.setitem(sys.modules, main, SimpleNamespace(__spec__=SimpleNamespace(name=name)))
        assert stopping.resume_command(run) == "python -m recipes.distill --resume 'runs/a b'"


@pytest.mark.slow
def test_a_second_signal_stops_at_once(folders, data, tmp_path, undisturbed):
    """The first one waits for the end of a step that never ends."""
    code = ("import os, signal, sys, time, runs\n"
            "from support.logs import Logs\n"
            "def append(logs, name, rows):\n"
            "    right(logs, name, rows)\n"
            "    if name == 'metrics.jsonl' and rows[0]['step'] == 3:\n"
            "        os.kill(os.getpid(), signal.SIGINT); print('waiting', flush=True); time.sleep(600)\n"
            "right, Logs.append = Logs.append, append\n"
            "sys.exit(runs.command(sys.argv[1:]))")
    process = subprocess.Popen([sys.executable, "-c", code, *flags(folders(), data, tmp_path, save_every=2)],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, **PROGRAM)
    for line in process.stdout:
        if line == "waiting\n":
            break
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == -signal.SIGINT  # a shell says 130
    assert "finishing this step first" in err and "Traceback" not in err
    assert command(["--resume", str(tmp_path / "run")]) == 0
    assert result(tmp_path / "run", 6) == result(undisturbed, 6)


def test_other_errors_leave_the_last_complete_step_too(given, tmp_path, undisturbed, monkeypatch, capsys):
    def out_of_memory():
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        when(patch, "completion_logprobs", 9, out_of_memory)
        assert command(given(save_every=0)) == 2
    printed = capsys.readouterr()
    assert "--tokens-per-micro-batch" in printed.err
    assert printed.out.endswith(f" --resume {tmp_path / 'run'}\n") and "stopped; to go on after step" in printed.out
    assert len(checkpoints.checkpoint_folders(tmp_path / "run")) == 1
    assert command(["--resume", str(tmp_path / "run")]) == 0
    assert result(tmp_path / "run", 6) == result(undisturbed, 6)


@pytest.mark.parametrize("changes, message", [
    ({"steps": "six"}, "steps is 'six' in config.json"), ({"evaluate": 1}, "evaluate is 1 in config.json"),
    ({"versions": {"torch": "1.0"}}, "it began with {'torch': '1.0'}")])
def test_a_config_that_was_edited_is_one_line(tmp_path, undisturbed, capsys, changes, message):
    shutil.copytree(undisturbed, tmp_path / "run")
    settings = json.loads((tmp_path / "run" / "config.json").read_text())
    (tmp_path / "run" / "config.json").write_text(json.dumps(settings | changes))
    capsys.readouterr()
    code = command(["--resume", str(tmp_path / "run")])
    printed = capsys.readouterr()
    assert message in printed.out + printed.err and (code == 2) == ("versions" not in changes)


# Kills


@pytest.mark.parametrize("kills", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_killed_runs_end_as_the_undisturbed_one(folders, data, tmp_path, kills):
    if not hasattr(os, "fork"):
        pytest.skip("no fork on this system")
    done = subprocess.run([sys.executable, "-m", "tools.killed", str(kills), "0", str(folders()), str(data),
                           str(tmp_path)], capture_output=True, **PROGRAM)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout
    summary = json.loads(done.stdout.splitlines()[-1])
    assert sum(summary["kills"].values()) == kills and not summary["runs that differ"]


# The lock


LOCK = "import sys, time; from support import rundir; from pathlib import Path\n" \
       "lock = rundir.lock_folder(Path(sys.argv[1])); print('locked', flush=True); time.sleep(600)"


def test_a_run_in_use_is_left_alone_until_its_process_dies(undisturbed, tmp_path, capsys):
    run = shutil.copytree(undisturbed, tmp_path / "run")
    holder = subprocess.Popen([sys.executable, "-c", LOCK, str(run)], stdout=subprocess.PIPE, **PROGRAM)
    assert holder.stdout.readline() == "locked\n"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert command(["--resume", str(run)]) == 2
    err = capsys.readouterr().err
    assert err == f"error: the run directory {run} is in use by another process\n"
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    holder.kill()
    holder.wait()
    rundir.lock_folder(run).release()


def test_a_training_holds_the_lock(given, tmp_path, monkeypatch):
    def look():
        with pytest.raises(UserError, match="in use by another process"):
            rundir.lock_folder(tmp_path / "run")

    when(monkeypatch, "completion_logprobs", 1, look)
    assert command(given(steps=1, evaluate=False)) == 0
    assert command([*given(experiment_name="evaluated"), "--eval-only"]) == 0
    for name in ("run", "evaluated"):
        rundir.lock_folder(tmp_path / name).release()


# Disks


@pytest.fixture
def small_disk(tmp_path):
    """small_disk(kilobytes) mounts a file system of that size, or gives it that size, and returns its folder."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def resize(kilobytes, *options):
        kind = ["-o", ",".join(["remount" if os.path.ismount(folder) else "rw", f"size={kilobytes}k", *options])]
        done = subprocess.run(["mount", "-t", "tmpfs", *kind, "none", str(folder)], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no small file system can be mounted here: {done.stderr.strip()}")
        return folder

    if not shutil.which("mount"):
        pytest.skip("no mount command here")
    yield resize
    if os.path.ismount(folder):
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("checkpoints_that_fit", [
    1.2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1.95, 2.03, 2.6))])
def test_a_full_disk_leaves_the_last_checkpoint(given, undisturbed, small_disk, capsys, checkpoints_that_fit):
    size = sum(path.stat().st_size for path in (undisturbed / "step-6").iterdir())
    disk = small_disk(int(size * checkpoints_that_fit / 1024) + 60)
    assert command(given(output_dir=disk, save_every=1)) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"error: {disk / 'run'}") and printed.err.count("\n") == 1
    assert "No space left on device" in printed.err and "--resume" in printed.out
    state = checkpoints.newest_checkpoint(disk / "run", pytest.fail)
    assert 1 <= state["step"] <= int(checkpoints_that_fit)
    assert f"to go on after step {state['step']}:" in printed.out
    small_disk(20_000)
    assert command(["--resume", str(disk / "run")]) == 0
    assert result(disk / "run", 6) == result(undisturbed, 6)


@pytest.mark.slow
def test_a_file_size_limit_leaves_the_last_checkpoint(folders, data, tmp_path, undisturbed):
    """The log of rollouts outgrows the limit, in the middle of a line."""
    pytest.importorskip("resource", reason="no such limits on this system")
    size = sum(len(json.dumps(row, ensure_ascii=False).encode()) + 1
               for row in lines(undisturbed / "rollouts.jsonl") if row["step"] <= 4) + 100
    code = ("import resource, sys, runs\n"
            "from support.logs import Logs\n"
            "def append(logs, name, rows):\n"
            f"    resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, -1))\n"
            "    right(logs, name, rows)\n"
            "    resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))\n"
            "right, Logs.append = Logs.append, append\n"
            "sys.exit(runs.command(sys.argv[1:]))")
    done = subprocess.run([sys.executable, "-c", code, *flags(folders(), data, tmp_path, save_every=3)],
                          capture_output=True, **PROGRAM)
    assert done.returncode == 2 and done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr
    assert "rollouts.jsonl cannot be written: File too large" in done.stderr
    assert not (tmp_path / "run" / "rollouts.jsonl").read_bytes().endswith(b"\n"), "no torn line was there to mend"
    assert command(["--resume", str(tmp_path / "run")]) == 0
    assert result(tmp_path / "run", 6) == result(undisturbed, 6)


def test_a_read_only_disk(given, undisturbed, small_disk, capsys):
    disk = small_disk(20_000)
    shutil.copytree(undisturbed, disk / "run")
    small_disk(20_000, "ro")
    assert command(["--resume", str(disk / "run")]) == 2
    assert command(given(output_dir=disk, experiment_name="new")) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"error: the run directory {disk / 'run'} is not writable: Read-only file system"
    assert second == f"error: --output-dir {disk} cannot hold runs: {disk} is not a folder that can be written to"


def test_no_place_for_a_run_directory(given, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert command(given(output_dir=tmp_path / "file")) == 2
    err = capsys.readouterr().err
    assert f"--output-dir {tmp_path / 'file'} cannot hold runs" in err and err.count("\n") == 1


# Numbers that go wrong


def poison(monkeypatch, kind, count):
    """Spoils the `count`-th call: what the learner finds, what the sampler found, or the gradient alone."""
    right, calls = grpo.sample if kind == "sampler" else grpo.completion_logprobs, []

    def spoiled(*args, **kw):
        found = right(*args, **kw)
        calls.append(1)
        if len(calls) == count and kind == "sampler":
            found[0].logprobs[0] = float("nan")
        elif len(calls) == count and kind == "gradient":
            found.register_hook(lambda gradient: gradient * float("inf"))
        elif len(calls) == count:
            found = found + torch.tensor({"learner": float("nan"), "certain": -float("inf")}[kind])
        return found

    if kind == "sampler":
        monkeypatch.setitem(grpo.SAMPLERS, "loop", spoiled)
    else:
        monkeypatch.setattr(grpo, "completion_logprobs", spoiled)


@pytest.mark.parametrize("kind", ["learner", "gradient", *(pytest.param(kind, marks=pytest.mark.slow)
                                                             for kind in ("certain", "sampler"))])
def test_numbers_that_are_not_finite_stop_before_the_optimiser(given, tmp_path, undisturbed, monkeypatch, capsys, kind):
    with monkeypatch.context() as patch:
        poison(patch, kind, 5 if kind == "sampler" else 6)
        assert command(given(save_every=0)) == 2
    printed = capsys.readouterr()
    run = tmp_path / "run"
    (step,) = [step for step, _ in checkpoints.checkpoint_folders(run)]
    file = run / f"nonfinite-step-{step + 1}.json"
    assert "stopped before the adapter was touched" in printed.err and printed.err.count("\n") == 1
    assert printed.err.rstrip().endswith(f"the batch is in {file}")
    saved = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert saved["step"] == step + 1 and len(saved["completions"]) in (4, 8)
    for row in saved["completions"]:
        assert row["question"].startswith("q")
        assert len(row["tokens"]) == len(row["sampler_logprobs"]) == len(row["learner_logprobs"]) == len(
            row["advantages"]) > 0
    assert {"certain": '"-Infinity"'}.get(kind, '"NaN"') in json.dumps(saved)
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        assert (run / f"step-{step}" / name).read_bytes() == (undisturbed / f"step-{step}" / name).read_bytes()
    assert command(["--resume", str(run)]) == 0  # the poison is gone
    assert result(run, 6) == result(undisturbed, 6)


@pytest.mark.parametrize("kind", ["learner", "sampler", "gradient"])
def test_skipping_an_update_counts_it_and_goes_on(given, tmp_path, undisturbed, monkeypatch, capsys, kind):
    poison(monkeypatch, kind, 3)
    assert command(given(steps=3, save_every=1, on_nonfinite="skip")) == 0
    rows = lines(tmp_path / "run" / "metrics.jsonl")
    assert [row["trainer/nonfinite"] for row in rows] == [0, 1, 0]
    assert [row["trainer/optimizer_steps"] for row in rows] == [1, 0, 1]
    assert "no update: numbers not finite" in capsys.readouterr().out
    adapters = [(tmp_path / "run" / f"step-{step}" / "adapter_model.safetensors").read_bytes() for step in (1, 2, 3)]
    assert adapters[0] == adapters[1] != adapters[2]
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert "NaN" not in (tmp_path / "run" / name).read_text()


def test_a_log_line_is_json_whatever_the_numbers():
    assert logs.json_line({"a": float("nan"), "b": [1.5, -float("inf")], "c": "角"}) == \
        '{"a": null, "b": [1.5, null], "c": "角"}\n'
