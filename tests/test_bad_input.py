"""What a user can get wrong: each is one line on stderr and exit code 2, through the command line, no traceback."""

import dataclasses
import io
import json
import shutil
import sys

import pytest
import torch
from PIL import Image
from runs import TASK, command, flags, lines, make_data_set, png, question_row

import grpo
from support.errors import UserError
from support.models import add_lora


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return make_data_set(tmp_path_factory.mktemp("questions"))


@pytest.fixture
def refused(folders, data, tmp_path, capsys):
    """refused(flag=value, ...) runs a training that must be refused, and gives the line that says why."""

    folder = folders()
    capsys.readouterr()  # what making it has printed

    def run(*arguments, task=TASK, **changes):
        code = command([*flags(folder, data, tmp_path / "runs", **changes), *arguments], task)
        printed = capsys.readouterr()
        assert code == 2, printed.out
        assert printed.err.startswith("error: ") and printed.err.count("\n") == 1 and printed.err.endswith("\n")
        assert "Traceback" not in printed.out + printed.err
        assert printed.err[:-1].isprintable()
        return printed.err[len("error: "):-1]

    return run


# Flags; test_command_line.py has those that need no model and no questions


@pytest.mark.parametrize("arguments, message", [
    (["--loss-fn", "\x1b[2J"], r"--loss-fn \x1b[2J is none of"),
    (["--reward", "right,brevity"], "--reward brevity is none of right"),
    (["--resume", "nowhere"], "--resume nowhere: "),
    (["--resume", "nowhere", "--no-evaluate"], "--resume nowhere: "),
    (["--experiment-name", "../up"], "names a folder"),
    (["--experiment-name", "/tmp/x"], "names a folder"),
    (["--experiment-name", "a/b"], "names a folder"),
    (["--experiment-name", ".."], "names a folder"),
    (["--experiment-name", "."], "names a folder"),
    (["--experiment-name", "a b"], "names a folder"),
    (["--experiment-name", "a\x1bb"], r"'a\x1bb'"),
    (["--device", "cpu:x"], "--device cpu:x is none of"),
    (["--device", "mps"], "--device mps is none of"),
])
def test_flags(refused, tmp_path, arguments, message):
    assert message in refused(*arguments)
    assert not (tmp_path / "runs").exists() and not (tmp_path / "up").exists()


# Models


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def to_pickle(folder):
    from safetensors.torch import load_file

    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def without_template(folder):
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    edit(folder / "tokenizer_config.json", chat_template=None)


def without_weights(folder):
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    save_file({name: value for name, value in load_file(file).items() if "layers.1.mlp" not in name}, file,
              metadata={"format": "pt"})


def text_config(folder, **changes):
    edit(folder / "config.json", text_config=json.loads((folder / "config.json").read_text())["text_config"] | changes)


MODELS = {
    "no model at all": (lambda f: [p.unlink() for p in f.iterdir()], "cannot be loaded"),
    "text only": (lambda f: edit(f / "config.json", model_type="qwen3"),
                  "is a qwen3 model; supported are the vision-language families qwen3_5"),
    "its text half": (lambda f: edit(f / "config.json", model_type="qwen3_5_text"), "supported are the vision-"),
    "another kind": (lambda f: edit(f / "config.json", model_type="llava"), "supported are the vision-language"),
    "no kind": (lambda f: (f / "config.json").write_text("{}"), "cannot be loaded"),
    "not even a table": (lambda f: (f / "config.json").write_text("[]"), "cannot be loaded"),
    "not JSON": (lambda f: (f / "config.json").write_text("{"), "cannot be loaded"),
    "no settings": (lambda f: (f / "config.json").unlink(), "cannot be loaded"),
    "a size that is no number": (lambda f: text_config(f, hidden_size="many"), "cannot be loaded"),
    "another size": (lambda f: text_config(f, hidden_size=128), "cannot be loaded"),
    "no heads": (lambda f: text_config(f, num_attention_heads=0), "cannot be loaded"),
    "attention of a package that is not here": (
        lambda f: edit(f / "config.json", attn_implementation="nobody/kernel"), "cannot be loaded"),
    "no chat template": (without_template, "has no chat template"),
    "a template that is none": (lambda f: (f / "chat_template.jinja").write_text("{% if %}"), "/model"),
    "a template that refuses": (
        lambda f: (f / "chat_template.jinja").write_text("{{ raise_exception('no') }}"), "/model"),
    "a template that looks around": (
        lambda f: (f / "chat_template.jinja").write_text("{{ ''.__class__.__mro__ }}"), "/model"),
    "a template without a figure": (
        lambda f: [(f / "chat_template.jinja").unlink(missing_ok=True),
                   edit(f / "tokenizer_config.json", chat_template="{{ messages[0].content[0].text }}")],
        "does not place one text followed by one"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "<|image_pad|> is token"),
    "no image processor": (lambda f: (f / "preprocessor_config.json").unlink(), "cannot be loaded"),
    "another image processor": (lambda f: edit(f / "preprocessor_config.json", patch_size=14),
                                "patch_size is 14, and 16 in config.json"),
    "torn weights": (lambda f: (f / "model.safetensors").write_bytes(b"torn"), "cannot be loaded"),
    "weights missing": (without_weights, "3 weights"),
    "pickled weights": (to_pickle, "cannot be loaded"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(refused, folders, tmp_path, name):
    folder = shutil.copytree(folders(), tmp_path / "model")
    damage, message = MODELS[name]
    damage(folder)
    assert message in refused(base_model=folder)
    assert not (tmp_path / "runs").exists()


MODEL_CODE = {"AutoConfig": "code.It", "AutoModelForImageTextToText": "code.It"}
TOKENIZER_CODE, PROCESSOR_CODE = {"AutoTokenizer": ["code.It", "code.It"]}, {"AutoImageProcessor": "code.It"}
OWN_CODE = {  # what brings code -> settings that ask for it, and whether the model can do without
    "everything": ({"config.json": {"auto_map": MODEL_CODE}, "tokenizer_config.json": {"auto_map": TOKENIZER_CODE},
                    "preprocessor_config.json": {"auto_map": PROCESSOR_CODE}}, True),
    "the tokenizer": ({"tokenizer_config.json": {"tokenizer_class": "Own", "auto_map": TOKENIZER_CODE}}, True),
    "the model": ({"config.json": {"model_type": "own", "auto_map": MODEL_CODE}}, False),
    "the image processor": ({"preprocessor_config.json": {"image_processor_type": "Own", "auto_map": PROCESSOR_CODE}},
                            False),
}


@pytest.mark.parametrize("name", OWN_CODE)
def test_code_that_a_model_brings_is_never_run(refused, folders, data, tmp_path, monkeypatch, name):
    """Nor is anybody asked on the terminal, who could say yes."""
    folder = shutil.copytree(folders(), tmp_path / "model")
    (folder / "custom_generate").mkdir()
    for file in ("code.py", "custom_generate/generate.py"):
        (folder / file).write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass It:\n    pass\n")
    changes, can_do_without = OWN_CODE[name]
    for file, values in changes.items():
        edit(folder / file, **values)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 10))
    if can_do_without:
        assert command([*flags(folder, data, tmp_path, steps=1, sampler="generate"), "--no-evaluate"]) == 0
    else:
        assert "it brings code of its own, which is never run" in refused(base_model=folder)
    assert not (tmp_path / "ran").exists()
    assert sys.stdin.tell() == 0, "asked"


@pytest.mark.parametrize("flag, kind", [("base_model", "model"), ("dataset", "dataset")])
def test_names_that_lead_nowhere(refused, flag, kind):
    line = refused(**{flag: "nobody/nothing-of-that-name"})
    assert f"the {kind} 'nobody/nothing-of-that-name' could not be fetched" in line
    assert "the path of a local folder works in its place" in line and "HF_HOME" in line
    assert "no such folder" in refused(**{flag: "./nothing"})
    assert "is neither a folder nor a hub id" in refused(**{flag: "a b"})


def test_a_prompt_too_long_for_the_context(refused, folders, tmp_path):
    folder = shutil.copytree(folders(), tmp_path / "model")
    text_config(folder, max_position_embeddings=64)
    assert "exceed the model's context of 64" in refused(base_model=folder)


# Adapters


@pytest.fixture(scope="session")
def adapter(folders, data, tmp_path_factory):
    """The adapter of a tiny qwen3_5, by a training of one step."""
    output = tmp_path_factory.mktemp("adapter")
    assert command([*flags(folders(), data, output, steps=1), "--no-evaluate"]) == 0
    return output / "run" / "step-1"


def test_the_adapter_itself_is_taken(adapter, folders, data, tmp_path):
    assert command([*flags(folders(), data, tmp_path, steps=1, adapter=adapter), "--no-evaluate"]) == 0


def drop_weights(folder):
    from safetensors.torch import load_file, save_file

    file = folder / "adapter_model.safetensors"
    save_file(dict(list(load_file(file).items())[:-2]), file)


ADAPTERS = {
    "no folder": (shutil.rmtree, "no adapter_model.safetensors there"),
    "no settings": (lambda f: (f / "adapter_config.json").unlink(), "no adapter_config.json there"),
    "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(), "no adapter_model.safetensors there"),
    "pickled weights": (lambda f: (f / "adapter_model.safetensors").rename(f / "adapter_model.bin"),
                        "no adapter_model.safetensors there"),
    "torn weights": (lambda f: (f / "adapter_model.safetensors").write_bytes(b"torn"), "cannot be put on"),
    "weights missing": (drop_weights, "2 weights are in only one of them"),
    "settings not JSON": (lambda f: (f / "adapter_config.json").write_text("{"), "adapter_config.json is damaged"),
    "settings no table": (lambda f: (f / "adapter_config.json").write_text("[]"), "adapter_config.json is damaged"),
    "another method": (lambda f: edit(f / "adapter_config.json", peft_type="IA3"), "is no plain LoRA adapter"),
    "another class of model": (
        lambda f: edit(f / "adapter_config.json",
                       auto_mapping={"base_model_class": "LlamaForCausalLM", "parent_library": "transformers"}),
        "was made for a LlamaForCausalLM"),
    "dropout": (lambda f: edit(f / "adapter_config.json", lora_dropout=0.1), "was trained with dropout"),
    "another rank": (lambda f: edit(f / "adapter_config.json", r=8), "cannot be put on"),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters(refused, adapter, tmp_path, name):
    folder = shutil.copytree(adapter, tmp_path / "adapter")
    damage, message = ADAPTERS[name]
    damage(folder)
    line = refused(adapter=folder)
    assert message in line and f"--adapter {folder}" in line
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_an_adapter_of_another_family(refused, adapter, folders, family):
    assert "was made for a Qwen3_5ForConditionalGeneration" in refused(adapter=adapter, base_model=folders(family))


def test_an_adapter_of_another_size(refused, adapter, tmp_path):
    from tiny import make_policy_folder

    deeper = make_policy_folder(tmp_path / "deeper", layers=6)
    wider = make_policy_folder(tmp_path / "wider", hidden=96)
    assert "weights are in only one of them" in refused(adapter=adapter, base_model=deeper)
    assert "cannot be put on" in refused(adapter=adapter, base_model=wider)


def test_an_adapter_of_another_hub_model(load, adapter, tmp_path):
    folder = shutil.copytree(adapter, tmp_path / "adapter")
    edit(folder / "adapter_config.json", base_model_name_or_path="Qwen/Qwen3.5-2B")
    base = load().model.unload()
    with pytest.raises(UserError, match="was made for Qwen/Qwen3.5-2B, not for Qwen/Qwen3.5-4B"):
        add_lora(base, "Qwen/Qwen3.5-4B", rank=4, adapter=str(folder))
    for name in ("qwen/qwen3.5-2b", str(tmp_path)):  # a folder may hold any model
        base = add_lora(base, name, rank=4, adapter=str(folder)).unload()


# Data sets


def rows(**changes):
    return [question_row(0), question_row(1, **changes)]


def dropped(column):
    return [{name: value for name, value in row.items() if name != column} for row in rows()]


TABLES = {
    **{f"no column {name}": (dropped(name), f"train.parquet, column {name}: expected once, found 0 times")
       for name in ("id", "image", "subject", "choices", "label")},
    "three options": (rows(choices=["1", "2", "3"]), "column choices: ['1', '2', '3'] is not a list of four"),
    "label 4": (rows(label=4), "train.parquet, row id 'q1', column label: 4 is not one of 0..3"),
    "empty question": (rows(subject=" "), "column subject: ' ' is not a non-empty string"),
    "a name with control characters": (rows(id="q\x1b[2J", label=9), r"row id 'q\x1b[2J'"),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables(refused, tmp_path, name):
    table, message = TABLES[name]
    assert message in refused(dataset=make_data_set(tmp_path / "data", table))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("content", [b"", b"PAR1", b"id,image,subject\n", b"{}" * 500])
def test_files_that_are_no_tables(refused, tmp_path, content):
    folder = make_data_set(tmp_path / "data")
    (folder / "train.parquet").write_bytes(content)
    assert "is not a readable parquet file" in refused(dataset=folder)


def test_folders_without_rows(refused, tmp_path):
    folder = make_data_set(tmp_path / "data")
    (folder / "train.parquet").unlink()
    assert "neither data/*.parquet nor train.parquet in this folder" in refused(dataset=folder)
    raw = tmp_path / "raw"
    make_data_set(raw / "data", [question_row(0, original_split="dev")])
    assert "the train split has no rows" in refused(dataset=raw)
    (tmp_path / "file").write_text("")
    assert "is a file: give the folder that holds it" in refused(dataset=tmp_path / "file")


# Figures


WHOLE = png(Image.effect_noise((60, 60), 50))
BAD_FIGURES = {
    "truncated": (WHOLE[:len(WHOLE) // 2], "image file is truncated"),
    "10,000 x 10": (png(Image.new("L", (10_000, 10), 255)), "10000 x 10 pixels, an aspect ratio above 200"),
    "a text named .png": (b"this is a text", "none of PNG"),
}


@pytest.mark.parametrize("name", BAD_FIGURES)
def test_figures_that_cannot_be_used(refused, tmp_path, name):
    data, message = BAD_FIGURES[name]
    line = refused(dataset=make_data_set(tmp_path / "data", rows(image={"bytes": data, "path": "figure.png"})))
    assert line.startswith("1 of 2 figures cannot be used, more than 1 %: train.parquet, row id 'q1', column image: ")
    assert message in line
    assert not (tmp_path / "runs").exists()


def test_odd_figures_that_can_be_used(folders, tmp_path):
    frames = [Image.new("P", (40, 30), color) for color in (0, 1)]
    figures = [png(Image.new("RGB", (1, 1))), png(Image.new("I;16", (40, 30), 40_000)),
               png(Image.new("CMYK", (40, 30), (0, 255, 0, 0)), format="TIFF"),
               png(Image.new("CMYK", (40, 30), (0, 255, 0, 0)), format="JPEG"),
               png(frames[0], format="GIF", save_all=True, append_images=frames[1:])]
    data = make_data_set(tmp_path / "data", [question_row(i, image={"bytes": figure, "path": None})
                                             for i, figure in enumerate(figures)])
    assert command(flags(folders(), data, tmp_path, steps=1, batch_size=5)) == 0
    assert len(list((tmp_path / "run" / "figures").iterdir())) == 10  # of both splits


# A task of one's own


def test_a_reward_that_fails_ends_the_run_after_its_last_step(folders, data, tmp_path, capsys):
    calls = []

    def mine(answer, question):
        calls.append(question.id)
        return 1 / (len(calls) <= 8) * answer.reading.right  # a step has eight rows

    task = dataclasses.replace(TASK, rewards=TASK.rewards | {"mine": mine})
    capsys.readouterr()
    assert command([*flags(folders(), data, tmp_path, reward="right,mine"), "--no-evaluate"], task) == 2
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-1] == (
        f"error: the reward mine fails for question {calls[-1]}: ZeroDivisionError: division by zero")
    assert "Traceback" not in printed.out + printed.err and "to go on after step 1: " in printed.out
    assert len(calls) == 9 and [row["step"] for row in lines(tmp_path / "run" / "metrics.jsonl")] == [1]
    assert (tmp_path / "run" / "step-1" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("empty", ["train", "test"])
def test_a_task_without_questions(refused, empty):
    def load(config, split):
        questions = grpo.GEOQA.load(config, split)
        return questions[:0] if split == empty else questions

    assert f"no {empty} questions" in refused(task=dataclasses.replace(TASK, load=load), steps=1)


# Text for the terminal


def test_text_of_questions_and_completions_is_escaped(folders, tmp_path, capsys):
    """This model's tokens for capital letters also hold a control sequence: byte-level BPE writes \\x1b as ě."""
    folder = shutil.copytree(folders(), tmp_path / "model")
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = {f"ě[2J{token}" if token in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" else token: number
                  for token, number in tokenizer["model"]["vocab"].items()}
    edit(folder / "tokenizer.json", model=tokenizer["model"] | {"vocab": vocabulary})
    data = make_data_set(tmp_path / "data", [question_row(i, id=f"q{i}\x1b]0;x\x07") for i in range(3)])
    assert command(flags(folder, data, tmp_path, steps=1, max_image_tokens=1) + ["--show-samples"]) == 0
    assert any("\x1b[2J" in row["text"] for row in lines(tmp_path / "run" / "rollouts.jsonl")[:4])
    printed = capsys.readouterr()
    assert r"\x1b[2J" in printed.out and r"q0\x1b]0;x\x07" in printed.out
    assert "\x1b[2J" not in printed.out + printed.err and "\x1b]0" not in printed.out + printed.err
    assert "downsized" in printed.out
