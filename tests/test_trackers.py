"""Trackers, each run for real and read back, without a network; and the lines of the terminal."""

import json
import math
import shutil
import signal
import struct
import sys

import pytest
from runs import command, flags, lines, make_data_set

import grpo
from support import metrics, trackers


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No network, no key of whoever runs the tests, and nothing written into their home."""
    for name in ("WANDB_API_KEY", "SWANLAB_API_KEY", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / ".netrc"))
    monkeypatch.chdir(tmp_path)


def test_a_swanlab_that_cannot_start_leaves_ctrl_c_as_it_was_and_one_note(monkeypatch, tmp_path):
    swanlab = pytest.importorskip("swanlab")

    def fail(**_):
        signal.signal(signal.SIGINT, lambda *_: None)
        raise RuntimeError("no network")

    before, told = signal.getsignal(signal.SIGINT), []
    monkeypatch.setattr(swanlab, "init", fail)
    trackers.Tracking(grpo.Config(tracker="swanlab"), tmp_path, {"tracker_id": "1"}, 0, told.extend)
    assert signal.getsignal(signal.SIGINT) is before and len(told) == 1 and "no network" in told[0]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data_set(tmp_path_factory.mktemp("trackers") / "data")


def tracked(folders, data, tmp_path, **changes):
    """Two steps and two evaluations -> run directory, and the numbers that a tracker should hold: {(name, step): n}."""
    assert command(flags(folders(), data, tmp_path, steps=2, save_every=1, **changes)) == 0
    return tmp_path / "run", expected(tmp_path / "run")


def expected(run):
    rows = lines(run / "metrics.jsonl") + lines(run / "evaluations.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 0, 2]
    return {(name, row["step"]): value for row in rows for name, value in row.items()
            if name not in ("step", "evaluation") and value is not None}


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    assert all(math.isclose(found[key], wanted[key], rel_tol=1e-6, abs_tol=1e-12) for key in wanted)


def records(path):
    """The records of a log in LevelDB's format, of W&B and SwanLab: records in parts, in blocks of 32 KiB."""
    content, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        _, length, kind = struct.unpack_from("<IHB", content, at)
        record += content[at + 7:at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def test_tensorboard_shows_each_step_once_also_after_resume(folders, data, tmp_path, capfd):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folders()
    capfd.readouterr()  # of making the policy
    run, _ = tracked(folders, data, tmp_path, tracker="tensorboard")
    out, err = capfd.readouterr()
    assert "\r" not in out + err  # no terminal: no bars
    last_step = max(i for i, line in enumerate(out.splitlines()) if line.startswith("step "))
    assert len(out.splitlines()[last_step + 1:]) <= 15
    shutil.rmtree(run / "step-2")
    assert command(["--resume", str(run)]) == 0
    events = reader.EventAccumulator(str(run / "tensorboard")).Reload()
    found = [((name, event.step), event.value) for name in events.Tags()["scalars"] for event in events.Scalars(name)]
    assert len(found) == len(dict(found))
    assert_same(dict(found), expected(run))


def test_swanlab_offline_holds_the_same_numbers(folders, data, tmp_path):
    pytest.importorskip("swanlab")
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    before = sys.stdout, sys.stderr, sys.excepthook, signal.getsignal(signal.SIGINT)
    run, wanted = tracked(folders, data, tmp_path, tracker="swanlab", swanlab_mode="offline", swanlab_project="p")
    assert before == (sys.stdout, sys.stderr, sys.excepthook, signal.getsignal(signal.SIGINT))
    [log] = (run / "swanlog").glob("*/*.swanlab")
    found = [Record.FromString(record) for record in records(log)]
    start = next(record.start for record in found if record.HasField("start"))
    assert (start.project, start.name) == ("p", "run")
    assert start.id == json.loads((run / "config.json").read_text())["tracker_id"]
    scalars = [record.scalar for record in found if record.HasField("scalar")]
    assert_same({(scalar.key, scalar.step): scalar.value.number for scalar in scalars}, wanted)


def test_wandb_offline_holds_the_same_numbers(folders, data, tmp_path):
    wandb = pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # it remembers the environment of its first use
    try:
        run, wanted = tracked(folders, data, tmp_path, tracker="wandb")
    finally:
        wandb.teardown()  # ends its service
    identity = json.loads((run / "config.json").read_text())["tracker_id"]
    [log] = (run / "wandb").glob(f"offline-run-*/run-{identity}.wandb")
    found = {}
    for record in map(Record.FromString, records(log)):
        row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        found |= {(name, row["_step"]): value for name, value in row.items() if not name.startswith("_")}
    assert_same(found, wanted)


def test_a_tracker_that_fails_leaves_one_note_and_the_run_goes_on(folders, data, tmp_path, monkeypatch, capsys):
    class Failing:
        def __init__(self, *_):
            pass

        def log(self, step, values):
            if step == 1:
                raise ConnectionError("no\nnetwork")

    monkeypatch.setattr("support.command_line.check_tracker", lambda config: None)
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Failing)
    run, _ = tracked(folders, data, tmp_path, tracker="wandb")
    assert (run / "results.json").is_file()
    notes = [line for line in capsys.readouterr().out.splitlines() if "wandb" in line]
    assert notes == ["note: --tracker wandb failed, and the run goes on without it: ConnectionError: no network"]


def test_a_tracker_that_cannot_start_is_left_out(monkeypatch, tmp_path):
    def refuse(*_):
        raise SystemExit(1)

    told = []
    monkeypatch.setitem(trackers.TRACKERS, "swanlab", refuse)
    tracking = trackers.Tracking(grpo.Config(tracker="swanlab"), tmp_path, {}, 0, told.extend)
    tracking.log(1, {"reward": 1.0})
    tracking.finish(failed=False)
    assert len(told) == 1 and "SystemExit: 1" in told[0]


def test_numbers_only(monkeypatch, tmp_path):
    seen, told = [], []

    class Seeing:
        def __init__(self, *_):
            self.log = lambda step, values: seen.append((step, values))

    monkeypatch.setitem(trackers.TRACKERS, "wandb", Seeing)
    tracking = trackers.Tracking(grpo.Config(tracker="wandb"), tmp_path, {}, 0, told.extend)
    tracking.log(3, {"reward": 0.5, "a": None, "b": math.nan, "c": math.inf, "evaluation": "base", "d": 0})
    assert seen == [(3, {"reward": 0.5, "d": 0})] and not told


def refused(capsys, monkeypatch, *arguments):
    """The one line of a refusal that comes before any weights are loaded."""
    monkeypatch.setattr(grpo, "load_policy", lambda config: pytest.fail("loaded"))
    monkeypatch.setattr(grpo, "load_geoqa", lambda *_, **__: pytest.fail("loaded"))
    assert command(["--device", "cpu", *arguments]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    return line


@pytest.mark.parametrize("name", ["swanlab", "tensorboard", "wandb"])
def test_a_missing_package_is_told_with_its_install_command(name, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    line = refused(capsys, monkeypatch, "--tracker", name, *["--swanlab-mode", "offline"] * (name == "swanlab"))
    assert f"--tracker {name}" in line and f"pip install '{name}>=" in line


def test_wandb_does_not_ask_for_a_key_in_the_terminal(capsys, monkeypatch):
    wandb = pytest.importorskip("wandb")
    wandb.teardown()
    monkeypatch.setenv("WANDB_MODE", "online")
    try:
        assert "WANDB_API_KEY" in refused(capsys, monkeypatch, "--tracker", "wandb")
    finally:
        wandb.teardown()


def test_settings_of_another_tracker_are_refused(capsys, monkeypatch):
    line = refused(capsys, monkeypatch, "--tracker", "wandb", "--swanlab-project", "p")
    assert "--swanlab-project are settings of --tracker swanlab" in line
    assert "--swanlab-mode" in refused(capsys, monkeypatch, "--swanlab-mode", "offline")
    assert "--electricity-price" in refused(capsys, monkeypatch, "--electricity-price", "-1")


WIDEST = {"trainer/nonfinite": 0, "train_datums": 64, "degenerate_fraction": 1.0, "trainer/loss_mean": -123.45678,
          "trainer/grad_norm": 123456.7, "trainer/dlogp_mean": 1.2e-12, "reward": 1.0, "format_rate": 1.0,
          "rollout/completion_tokens_mean": 1023.99, "time/sampling": 9000.0, "time/learning": 999.0}


@pytest.mark.parametrize("changes", [
    {}, {"trainer/loss_mean": -9.9999}, {"trainer/loss_mean": -0.00001, "trainer/grad_norm": 0.0},
    {"rollout/completion_tokens_mean": 32768}, {"train_datums": 0}, {"train_datums": 0, "trainer/nonfinite": 1},
    {"train_datums": 0, "degenerate_fraction": 0.5}, {"time/sampling": 0.1, "time/learning": 99.8}],
    ids=["huge", "loss", "small", "long", "degenerate", "nonfinite", "cut", "time"])
@pytest.mark.parametrize("kl", [None, -12.3456, 1e5])
def test_a_step_is_one_line_of_100_columns(changes, kl):
    numbers = WIDEST | changes | ({} if kl is None else {"opd/reverse_kl_mean": kl})
    line = metrics.step_line(1000, 1000, numbers)
    assert len(line) <= 100 and "\n" not in line and line.startswith("step 1000/1000 reward 1.00 format 1.00 ")
    assert ("KL " in line) == (kl is not None)
