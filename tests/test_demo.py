"""The demo: its figures, its shipped policy and how that was made, and that it learns to look."""

import dataclasses
import os
import random
from collections import Counter

import numpy as np
import pytest
import torch
from batches import prompts_of
from PIL import Image
from runs import lines

import demo
import grpo
from demo_model import make
from geoqa import load_geoqa
from reward import read_choice
from support.command_line import run_command_line
from support.files import read_json
from vision_tokens import on_white


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "data"
    demo.write_dataset(folder)
    return folder


@pytest.fixture(scope="session")
def policy():
    return grpo.load_policy(demo.DemoConfig())


def accuracy(policy, questions):
    """Share of greedy answers that are right."""
    rows = grpo.sample(policy, prompts_of(policy, questions), demo.DemoConfig.max_tokens, temperature=0)
    texts = [policy.tokenizer.decode(row.tokens, skip_special_tokens=True) for row in rows]
    return np.mean([read_choice(text, question).right for text, question in zip(texts, questions, strict=True)])


# Figures


def drawn_degrees(figure):
    """The angle between the two rays of a figure, measured in its ink, whose densest place is the vertex."""
    dark = np.asarray(on_white(figure).convert("L")) < 128
    points = np.argwhere(dark).astype(float)
    near = np.linalg.norm(points[:, None] - points, axis=-1)
    crowd = (near < 5).sum(1)
    vertex = points[crowd == crowd.max()].mean(0)
    far = points[np.linalg.norm(points - vertex, axis=1) > 16]
    turn = np.arctan2(*(far - vertex).T)
    far, turn = far[turn.argsort()], np.sort(turn)
    gaps = np.diff(turn, append=turn[0] + 2 * np.pi)
    first, second = np.sort(np.argsort(gaps)[-2:])  # the two gaps between the rays
    rays = []
    for ray in (far[first + 1:second + 1], np.concatenate([far[second + 1:], far[:first + 1]])):
        along = np.linalg.svd(ray - ray.mean(0))[2][0]
        rays.append(along * np.sign(along @ (ray.mean(0) - vertex)))
    return np.degrees(np.arccos(np.clip(rays[0] @ rays[1], -1, 1)))


def test_data_has_geoqas_columns_and_held_out_figures(data):
    train, test = load_geoqa(str(data), "train"), load_geoqa(str(data), "test")
    assert (len(train), len(test)) == (512, 100)
    assert {q.choices for q in train} == {tuple(demo.CHOICES)} and {q.label for q in test} == set("ABCD")
    assert all(q.answer and q.image.mode == "RGBA" and q.image.size == (96, 96) for q in test)
    seen = {q.image.tobytes() for q in train}
    assert not any(q.image.tobytes() in seen for q in test)


@pytest.mark.parametrize("degrees", [25, 50, 90, 130, 150, 180])
def test_the_angle_that_is_asked_for_is_drawn(degrees):
    for seed in range(20):
        figure = demo.draw_angle(degrees, random.Random(seed))
        dark = np.asarray(on_white(figure).convert("L")) < 128
        assert 0.01 < dark.mean() < 0.15 and not (dark[0].any() or dark[-1].any() or dark[:, 0].any()
                                                  or dark[:, -1].any())
        assert drawn_degrees(figure) == pytest.approx(degrees, abs=3)


def test_labels_belong_to_the_angles():
    rows = demo.draw_rows(80, seed=5)
    assert Counter(row["label"] for row in rows) == dict.fromkeys(range(4), 20)
    for row in rows:
        kind = np.searchsorted([70, 110, 165], drawn_degrees(row["image"]))
        assert row["label"] == kind and row["choices"][kind] in row["answer"]


# The shipped policy


def test_the_shipped_policy_is_an_ordinary_folder(policy):
    files = [file for file in demo.MODEL_FOLDER.iterdir() if file.suffix != ".py" and file.is_file()]
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


def test_the_demo_takes_the_flags_of_grpo(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for flags, message in ((["--steps", "0"], "--steps must be at least 1"),
                           (["--nonsense"], "unknown flag --nonsense"),
                           (["--make-model"], "unknown flag --make-model")):
        with pytest.raises(SystemExit) as stop:
            run_command_line(demo.DemoConfig, demo.main, flags)
        printed = capsys.readouterr().err
        assert stop.value.code == 2 and message in printed and printed.count("\n") == 1


# How it was made


def test_the_shipped_parts_are_those_that_are_made(policy):
    tokenizer = make.make_tokenizer()
    assert tokenizer.get_vocab() == policy.tokenizer.get_vocab()
    for text in (make.clean_answer(3), "user\n如图，AB=3 角 any", "\\boxed{B}<|im_end|>"):
        assert tokenizer(text).input_ids == policy.tokenizer(text).input_ids
    model, shipped = make.new_model(tokenizer), policy.base
    assert {name: tuple(value.shape) for name, value in model.state_dict().items()} == {
        name.replace(".base_layer", ""): tuple(value.shape) for name, value in shipped.state_dict().items()
        if "lora_" not in name}
    sizes = [each.config.get_text_config().to_dict() | {"dtype": None} for each in (model, shipped)]
    assert {key for key in sizes[0] if sizes[0][key] != sizes[1].get(key)} <= {"architectures", "_name_or_path"}
    assert model.generation_config.eos_token_id == shipped.generation_config.eos_token_id


def test_answers_are_spoiled_as_often_as_is_said():
    """Under obtuse angles most boxes are missing, under straight ones most letters are wrong."""
    for label, (missing, wrong) in enumerate([(0.2, 0.15), (0.2, 0.15), (0.8, 0.0), (0.0, 0.7)]):
        question = dataclasses.replace(demo.as_question(demo.draw_rows(1, seed=0)[0]), label="ABCD"[label])
        assert read_choice(make.clean_answer(label), question).right
        rng = random.Random(label)
        readings = [read_choice(make.spoiled_answer(label, rng), question) for _ in range(2000)]
        assert np.mean([each.choice is None for each in readings]) == pytest.approx(missing, abs=0.04)
        assert np.mean([each.choice is not None and not each.right for each in readings]) == pytest.approx(
            wrong, abs=0.04)


@pytest.mark.slow
def test_the_making_teaches_to_see_and_to_answer(policy):
    """A short making: the new model answers in the right form, and far better than chance."""
    torch.manual_seed(0)
    tokenizer = make.make_tokenizer()
    new = grpo.Policy(make.new_model(tokenizer), tokenizer, policy.image_processor)
    batches = [[demo.as_question(row) for row in demo.draw_rows(32, seed)] for seed in range(100, 108)]
    make.learn_to_see(new, batches, steps=80)
    lessons = [(prompts_of(new, batch), make.clean_answer) for batch in batches]
    make.learn_to_answer(new, lessons, steps=60, learning_rate=2e-3)
    unseen = [demo.as_question(row) for row in demo.draw_rows(100, seed=2)]
    assert accuracy(new, unseen) >= 0.5


# Learning


def resident_mib():
    if not os.path.exists("/proc/self/status"):
        return 0.0
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmRSS"))


def check_no_drift(resident, metrics):
    """Memory (MiB) and seconds of each step do not grow; the first ten steps fill caches."""
    slope = np.polyfit(range(len(resident) - 10), resident[10:], 1)[0]
    seconds = [row["time/sampling"] + row["time/learning"] for row in metrics]
    third = len(seconds) // 3
    print(f"resident memory: {slope:+.3f} MiB a step; median step: {np.median(seconds[2:third]):.2f} s in the first "
          f"third, {np.median(seconds[-third:]):.2f} s in the last")
    assert slope < 0.5 and np.median(seconds[-third:]) <= 1.5 * np.median(seconds[2:third])


@pytest.mark.slow
def test_the_demo_learns_to_look(tmp_path, data):
    """The acceptance numbers, no drift, and that the trained policy falls to chance where the figure is blank."""
    resident = []

    def right(answer, question):
        resident.append(resident_mib())
        return answer.reading.right

    config = demo.DemoConfig(output_dir=str(tmp_path), dataset=str(data), seed=0, experiment_name="run")
    demo.main(config, dataclasses.replace(grpo.GEOQA, rewards={"right": right}))
    path = tmp_path / "run"
    results = read_json(path / "results.json", [])
    before, after = results["before"], results["after"]
    assert 0.30 <= before["accuracy"]["value"] <= 0.75
    assert after["accuracy"]["value"] >= max(0.90, before["accuracy"]["value"] + 0.20)
    assert after["format_rate"]["value"] >= 0.95 and results["mcnemar_p"] < 1e-3
    metrics = lines(path / "metrics.jsonl")
    assert len(metrics) == config.steps == 80 and max(m["trainer/dlogp_max"] or 0 for m in metrics) <= 1e-4
    assert np.mean([m["reward"] for m in metrics[-10:]]) >= 0.8
    check_no_drift(resident[::config.batch_size * config.group_size], metrics)

    trained = grpo.load_policy(dataclasses.replace(config, adapter=str(path / f"step-{config.steps}")))
    test = list(load_geoqa(str(data), "test"))
    blank = [dataclasses.replace(question, image=Image.new("RGB", (96, 96), "white")) for question in test]
    assert accuracy(trained, test) == after["accuracy"]["value"]
    # One answer to every blank figure is right for a quarter of the questions; 35 % would be 2.3 deviations off.
    assert accuracy(trained, blank) <= 0.35
