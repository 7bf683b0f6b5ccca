"""What a run cost: the energy counter, sums over steps and evaluations, also after --resume, and their text."""

import json
import shutil
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from runs import command, flags, lines, make_data_set

from support import cost, rundir

WATTS = 200.0
KEYS = ["wall_seconds", "sampling_seconds", "learning_seconds", "evaluation_seconds", "gpu_hours", "energy_kwh",
        "electricity_price", "money"]
JOULES = 3.6e6  # of a kWh


@pytest.fixture
def metered(monkeypatch):
    """A GPU, or so it seems, that always draws 200 W."""
    monkeypatch.setattr(cost, "gpu_joules", lambda device: WATTS * time.perf_counter())
    monkeypatch.setattr(rundir, "gpu_name", lambda device: "a card")


def test_a_resumed_run_costs_what_its_steps_and_evaluations_did(folders, tmp_path, metered, capsys):
    given = flags(folders(), make_data_set(tmp_path / "data"), tmp_path, steps=2, save_every=1, electricity_price=0.5)
    run = tmp_path / "run"
    assert command(given) == 0
    first = json.loads((run / "results.json").read_text())["cost"]
    shutil.rmtree(run / "step-2")
    with open(run / "evaluations.jsonl", "a") as file:  # as a kill just before its answers are written leaves it
        file.write(json.dumps({"step": 1, "evaluation": "step-1", "time/evaluation": 1e6}) + "\n")
    assert command(["--resume", str(run)]) == 0
    found = json.loads((run / "results.json").read_text())["cost"]
    assert list(found) == list(first) == KEYS
    steps, evaluations = lines(run / "metrics.jsonl"), lines(run / "evaluations.jsonl")
    assert len(steps) == 2 and [row["evaluation"] for row in evaluations] == ["base", "step-2"]
    seconds = {part: sum(step[f"time/{part}"] for step in steps) for part in ("sampling", "learning")}
    evaluation = sum(row["time/evaluation"] for row in evaluations)
    assert found["sampling_seconds"] == pytest.approx(seconds["sampling"])
    assert found["learning_seconds"] == pytest.approx(seconds["learning"])
    assert found["evaluation_seconds"] == pytest.approx(evaluation)
    assert found["wall_seconds"] == pytest.approx(sum(seconds.values()) + evaluation)
    assert found["gpu_hours"] == pytest.approx(found["wall_seconds"] / 3600)
    assert found["energy_kwh"] * JOULES == pytest.approx(WATTS * found["wall_seconds"], rel=1e-2)
    assert found["money"] == pytest.approx(found["energy_kwh"] * 0.5)
    assert " kWh, " in capsys.readouterr().out


def test_a_run_without_evaluation_or_gpu_costs_time_alone(folders, tmp_path, capsys):
    given = flags(folders(), make_data_set(tmp_path / "data"), tmp_path, steps=1)
    assert command([*given, "--no-evaluate"]) == 0
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["before"] is results["after"] is results["mcnemar_p"] is None
    known = {key for key, value in results["cost"].items() if value is not None}
    assert known == {"wall_seconds", "sampling_seconds", "learning_seconds", "evaluation_seconds", "electricity_price"}
    assert results["cost"]["evaluation_seconds"] == 0 < results["cost"]["wall_seconds"]
    out = capsys.readouterr().out.splitlines()
    assert out[-2].startswith("time ") and out[-1] == f"run directory: {tmp_path / 'run'}"
    assert out.index(out[-1]) < next(i for i, line in enumerate(out) if line.startswith("step ")), "said at the end only"


def test_one_step_without_energy_makes_the_energy_unknown_and_a_torn_line_is_not_read(tmp_path):
    step = {"time/sampling": 3.0, "time/learning": 3.0}
    rows = [step | {"energy/step_kwh": 0.5}, step, step]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows))[:-20])
    found = cost.run_cost(tmp_path, 0.6, gpu=True)
    assert found["energy_kwh"] is found["money"] is None
    assert (found["learning_seconds"], found["wall_seconds"], found["gpu_hours"]) == (6.0, 12.0, 12 / 3600)
    assert cost.run_cost(tmp_path / "none", 0.6, gpu=False)["wall_seconds"] == 0


def test_the_clock_of_a_step(monkeypatch):
    now, device = [100.0], torch.device("cpu")
    monkeypatch.setattr(cost.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(cost, "gpu_joules", lambda device: WATTS * now[0])
    clock = cost.StepClock(device)
    now[0] += 3
    clock.sampled()
    now[0] += 2
    clock.learned()
    assert clock.metrics() == {"time/sampling": 3, "time/learning": 2, "energy/step_kwh": WATTS * 5 / JOULES}


def test_the_driver_is_asked_for_torchs_gpu_and_its_errors_are_not_ours(monkeypatch):
    asked, answers = [], iter([5000, 7000])

    def energy(handle):
        if (value := next(answers, None)) is None:
            raise RuntimeError("the GPU is lost")
        return value

    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(
        nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=asked.append, nvmlDeviceGetTotalEnergyConsumption=energy))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12-34"))
    device = torch.device("cuda", 0)
    assert cost.gpu_joules(device) == 5.0 and asked == ["GPU-12-34"]  # NVML counts millijoules
    meter = cost.Meter(device)
    assert meter.joules == 7.0 and meter.evaluation().keys() == {"time/evaluation"}
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert cost.gpu_joules(device) is None


def test_the_cost_is_two_short_lines():
    parts = dict(wall_seconds=360000, sampling_seconds=360000, learning_seconds=360000, evaluation_seconds=360000)
    text = cost.cost_lines(parts | dict(gpu_hours=100.0, energy_kwh=123.456, electricity_price=0.6, money=74.07))
    assert len(text) == 2 and all(len(line) <= 100 for line in text)
    parts = dict(wall_seconds=3725.4, sampling_seconds=3599.6, learning_seconds=61.0, evaluation_seconds=0.04)
    assert cost.cost_lines(parts | dict(gpu_hours=3725.4 / 3600, energy_kwh=None)) == [
        "time 1:02:05: sampling 1:00:00, learning 0:01:01, evaluation 0:00:00", "GPU hours 1.03"]
