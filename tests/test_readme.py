"""What the README shows works: its example of a loss is taken from it and trained with; flags and files exist."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

import demo
import grpo

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_loss_trains_two_demo_steps(tmp_path, monkeypatch):
    section = README[README.index("## Add your own loss"):]
    example = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    assert len([line for line in example.splitlines() if line.strip()]) <= 10
    name = re.search(r"--loss-fn (\w+)", section)[1]
    (tmp_path / "my_loss.py").write_text(example, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(grpo, "LOSS_FNS", dict(grpo.LOSS_FNS))  # the example adds to it
    monkeypatch.setattr(sys, "argv", ["my_loss.py", "--loss-fn", name, "--steps", "2", "--no-evaluate",
                                      "--experiment-name", "example"])
    runpy.run_path("my_loss.py", run_name="__main__")
    metrics = [json.loads(line) for line in (tmp_path / "runs/example/metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == 2 and metrics[0]["train_datums"] > 0 and metrics[0]["trainer/grad_norm"] > 0
    # The seed's first batch has both signs of advantage, so this loss is not the default one under another name.
    assert json.loads((tmp_path / "runs/example/config.json").read_text())["loss_fn"] == name


def test_every_flag_exists():
    known = {f"--{field.name.replace('_', '-')}" for field in grpo.dataclasses.fields(demo.DemoConfig)}
    known |= {f"--no-{flag[2:]}" for flag in known} | {"--help"}
    used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", README))
    assert used and used <= known, used - known


def test_every_file_exists():
    named = set(re.findall(r"`([\w/.]+\.(?:py|txt|md))`", README)) - {"my_loss.py"}
    assert {"grpo.py", "geoqa.py", "reward.py", "vision_tokens.py", "demo.py"} <= named
    missing = [name for name in named if not (ROOT / name).is_file()]
    assert not missing


def test_every_loss_and_reduction_is_explained():
    for name in (*grpo.LOSS_FNS, *grpo.LOSS_REDUCTIONS):
        assert f"`{name}`" in README, name


@pytest.mark.parametrize("command", ["pip install -r requirements.txt && python demo.py",
                                     "pip install -r requirements.txt && pytest", "python grpo.py\n"])
def test_the_gate_finds_its_commands(command):
    assert command in README
