"""The demo: its figures, its shipped policy, and that it learns to look."""

import json
import math
import os
import random

import numpy as np
import pytest
from PIL import Image, ImageDraw

import demo
import grpo
from support import command_line
from geoqa import load_geoqa
from reward import grade
from vision_tokens import encode_prompts, on_white


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "data"
    demo.write_dataset(folder)
    return folder


@pytest.fixture(scope="session")
def policy():
    return grpo.load_policy(demo.DemoConfig())


def accuracy(policy, questions):
    prompts = encode_prompts(policy.tokenizer, policy.image_processor, questions)
    texts = grpo.completion_texts(policy, grpo.sample(policy, prompts, 1, 16, temperature=0))
    return sum(grade(text, question.label) for text, question in zip(texts, questions)) / len(questions)


def test_data_has_geoqas_columns_and_held_out_figures(data):
    train, test = load_geoqa(str(data), "train"), load_geoqa(str(data), "test")
    assert (len(train), len(test)) == (512, 100)
    assert {q.choices for q in train} == {tuple(demo.CHOICES)} and {q.label for q in test} == set("ABCD")
    assert all(q.answer and q.image.mode == "RGBA" and q.image.size == (96, 96) for q in test)
    seen = {q.image.tobytes() for q in train}
    assert not any(q.image.tobytes() in seen for q in test)


@pytest.mark.parametrize("degrees", [25, 50, 90, 130, 150, 180])
def test_the_angle_that_is_asked_for_is_drawn(monkeypatch, degrees):
    rays, line = [], ImageDraw.ImageDraw.line
    monkeypatch.setattr(ImageDraw.ImageDraw, "line", lambda pen, ends, **style: rays.append(ends) or line(
        pen, ends, **style))
    for seed in range(20):
        dark = np.asarray(on_white(demo.draw_angle(degrees, random.Random(seed))).convert("L")) < 128
        assert 0.01 < dark.mean() < 0.15 and not (dark[0].any() or dark[-1].any() or dark[:, 0].any())
    for (vertex, end), (same, other) in zip(rays[::2], rays[1::2], strict=True):
        assert vertex == same
        a, b = (math.atan2(y - vertex[1], x - vertex[0]) for x, y in (end, other))
        assert abs((math.degrees(b - a) + 180) % 360 - 180) == pytest.approx(degrees, abs=1e-6)


def test_labels_belong_to_the_angles(monkeypatch):
    asked = []
    monkeypatch.setattr(demo, "draw_angle", lambda degrees, rng: asked.append(degrees) or Image.new("RGBA", (96, 96)))
    for row, degrees in zip(demo.draw_rows(80, seed=5), asked):
        kind = [degrees < 90, degrees == 90, 90 < degrees < 180, degrees == 180].index(True)
        assert row["label"] == kind and row["choices"][kind] in row["answer"]


def test_the_shipped_policy_is_an_ordinary_folder(policy):
    files = list(demo.MODEL_FOLDER.iterdir())
    assert sum(file.stat().st_size for file in files) <= 4 * 2**20
    assert all(file.suffix in (".json", ".jinja", ".safetensors") for file in files)
    turn = [{"role": "user", "content": [{"type": "text", "text": "题"}, {"type": "image"}]}]
    assert policy.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True,
                                                enable_thinking=False) == (
        "<|im_start|>user\n题<|vision_start|><|image_pad|><|vision_end|><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert policy.base.config.text_config.eos_token_id == policy.tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert policy.tokenizer.convert_tokens_to_ids("<|im_end|>") in policy.stop_ids
    assert policy.tokenizer.decode(policy.tokenizer("任何文字 any text 😀").input_ids) == "任何文字 any text 😀"


def test_before_training_it_is_half_right(policy, data):
    assert 0.30 <= accuracy(policy, list(load_geoqa(str(data), "test"))) <= 0.75


def test_the_demo_takes_the_flags_of_grpo(capsys):
    for flags, message in ((["--steps", "0"], "--steps must be at least 1"), (["--nonsense"], "unknown flag --nonsense"),
                           (["--make-model", "--base-model", "x"], "leave out --base-model")):
        with pytest.raises(SystemExit) as stop:
            command_line.run_command_line(demo.DemoConfig, demo.run, flags)
        printed = capsys.readouterr().err
        assert stop.value.code == 2 and message in printed and printed.count("\n") == 1


def resident_mib():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def check_no_drift(resident, metrics):
    """Memory (MiB) and seconds of each step do not grow; the first ten steps fill caches."""
    slope = np.polyfit(range(len(resident) - 10), resident[10:], 1)[0]
    seconds = [sum(row[f"time/{part}"] for part in ("sampling", "learning", "rest")) for row in metrics]
    third = len(seconds) // 3
    print(f"resident memory: {slope:+.3f} MiB a step; median step: {np.median(seconds[2:third]):.2f} s in the first "
          f"third, {np.median(seconds[-third:]):.2f} s in the last")
    assert slope < 0.5 and np.median(seconds[-third:]) <= 1.5 * np.median(seconds[2:third])


@pytest.mark.slow
def test_the_demo_learns_to_look(tmp_path, data, monkeypatch):
    """The acceptance numbers, no drift, and that the trained policy falls to chance where the figure is blank."""
    resident, save_step = [], grpo.RunDir.save_step
    monkeypatch.setattr(grpo.RunDir, "save_step", lambda *args: save_step(*args) or resident.append(
        resident_mib() if os.path.exists("/proc/self/status") else 0.0))
    config = demo.DemoConfig(output_dir=str(tmp_path), dataset=str(data), seed=0, experiment_name="run")
    path = demo.run(config)
    results = json.loads((path / "results.json").read_text())
    before, after = results["before"], results["after"]
    assert 0.30 <= before["accuracy"]["value"] <= 0.75
    assert after["accuracy"]["value"] >= max(0.90, before["accuracy"]["value"] + 0.20)
    assert after["format_rate"]["value"] >= 0.95 and results["mcnemar_p"] < 1e-3
    metrics = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    check_no_drift(resident, metrics)
    assert len(metrics) == config.steps and max(m["trainer/dlogp_max"] or 0 for m in metrics) <= 1e-4

    config.adapter = str(path / f"step-{config.steps}")
    trained = grpo.load_policy(config)
    test = list(load_geoqa(str(data), "test"))
    blank = [demo.Question(q.id, Image.new("RGB", (96, 96), "white"), q.subject, q.choices, q.label) for q in test]
    assert accuracy(trained, test) == after["accuracy"]["value"]
    # One answer to every blank figure is right for a quarter of the questions; 35 % would be 2.3 deviations off.
    assert accuracy(trained, blank) <= 0.35
