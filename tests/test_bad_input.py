"""What a user can get wrong: each is one line on stderr and exit code 2, through the command line, no traceback."""

import json
import shutil
import zlib

import pytest
import torch
from PIL import Image
from runs import command, flags, install_reward, make_data_set, png, question_row

import grpo


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return make_data_set(tmp_path_factory.mktemp("questions"))


@pytest.fixture
def refused(folders, data, tmp_path, capsys):
    """refused(flag=value, ...) runs a training that must be refused, and gives the line that says why."""

    folder = folders()
    capsys.readouterr()  # what making it has printed

    def run(*arguments, **changes):
        code = command([*flags(folder, data, tmp_path / "runs", **changes), *arguments])
        printed = capsys.readouterr()
        assert code == 2, printed.out
        assert printed.err.startswith("error: ") and printed.err.count("\n") == 1 and printed.err.endswith("\n")
        assert "Traceback" not in printed.out + printed.err
        assert printed.err[:-1].isprintable()
        return printed.err[len("error: "):-1]

    return run


# Flags


@pytest.mark.parametrize("arguments, message", [
    (["--stepz", "3"], "unknown flag --stepz"),
    (["--learning", "3"], "unknown flag --learning"),
    (["surplus"], "unknown word surplus"),
    (["--steps"], "expected one argument"),
    (["--steps", "1.5"], "invalid int value: '1.5'"),
    (["--steps", "-1"], "--steps must be at least 1"),
    (["--batch-size", "0"], "--batch-size must be at least 1"),
    (["--group-size", "1"], "--group-size must be at least 2"),
    (["--max-tokens", "0"], "--max-tokens must be at least 1"),
    (["--temperature", "0"], "--temperature must be above 0"),
    (["--temperature", "nan"], "--temperature must be above 0"),
    (["--top-p", "0.99"], "--top-p below 1 is for --eval-only"),
    (["--top-p", "0"], "--top-p must be above 0"),
    (["--learning-rate", "inf"], "--learning-rate must be 0 or more"),
    (["--loss-fn", "magic"], "--loss-fn magic is none of"),
    (["--loss-fn", "\x1b[2J"], r"--loss-fn \x1b[2J is none of"),
    (["--algorithm", "ppo"], "invalid choice: 'ppo'"),
    (["--evaluate", "perhaps"], "perhaps"),
    (["--clip-low", "0.1"], "--clip-low: --loss-fn importance_sampling has no such bound"),
    (["--advantage", "opd"], "--advantage opd and --teacher-model go together"),
    (["--advantage", "opsd", "--dynamic-sampling"], "--dynamic-sampling shapes rewards"),
    (["--loss-fn", "gspo", "--loss-reduction", "token"], "gspo is a loss of whole sequences"),
    (["--overlong-penalty", "--overlong-cache", "99"], "does not fit into --max-tokens"),
    (["--resume", "nowhere"], "--resume nowhere: no run directory"),
    (["--resume", "nowhere", "--eval-only"], "no run directory"),
    (["--on-nonfinite", "panic"], "invalid choice: 'panic'"),
    (["--keep-checkpoints", "-1"], "--keep-checkpoints must be 0 or more"),
    (["--seed", "-1"], "--seed must be 0 or more, not -1"),
    (["--experiment-name", "../up"], "names a folder"),
    (["--experiment-name", "a\x1bb"], r"'a\x1bb'"),
    (["--device", "gpu"], "--device gpu is none of"),
    (["--device", "cpu:x"], "--device cpu:x is none of"),
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


MODELS = {
    "no model at all": (lambda f: [p.unlink() for p in f.iterdir()], "cannot be loaded"),
    "text only": (lambda f: edit(f / "config.json", model_type="qwen3"),
                  "is a qwen3 model; supported are the vision-language families qwen3_5"),
    "its text half": (lambda f: edit(f / "config.json", model_type="qwen3_5_text"), "supported are the vision-"),
    "another kind": (lambda f: edit(f / "config.json", model_type="llava"), "supported are the vision-language"),
    "no kind": (lambda f: (f / "config.json").write_text("{}"), "cannot be loaded"),
    "not even a table": (lambda f: (f / "config.json").write_text("[]"), "cannot be loaded"),
    "not JSON": (lambda f: (f / "config.json").write_text("{"), "cannot be loaded"),
    "no chat template": (without_template, "has no chat template"),
    "a template without a figure": (
        lambda f: [(f / "chat_template.jinja").unlink(missing_ok=True),
                   edit(f / "tokenizer_config.json", chat_template="{{ messages[0].content[0].text }}")],
        "does not place one text followed by one"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "<|image_pad|> is token"),
    "no image processor": (lambda f: (f / "preprocessor_config.json").unlink(), "cannot be loaded"),
    "torn weights": (lambda f: (f / "model.safetensors").write_bytes(b"torn"), "cannot be loaded"),
    "pickled weights": (to_pickle, "cannot be loaded"),
    "code in the config": (lambda f: edit(f / "config.json", auto_map={"AutoConfig": "code.Config"}),
                           "brings code of its own (config.json), which is never run"),
    "code for the tokenizer": (lambda f: edit(f / "tokenizer_config.json", auto_map={"AutoTokenizer": ["a.B", None]}),
                               "brings code of its own (tokenizer_config.json)"),
    "a file of code": (lambda f: (f / "modeling.py").write_text("raise SystemExit('run')"),
                       "brings code of its own (modeling.py)"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(refused, folders, tmp_path, name):
    folder = shutil.copytree(folders(), tmp_path / "model")
    damage, message = MODELS[name]
    damage(folder)
    assert message in refused(base_model=folder)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("flag, kind", [("base_model", "model"), ("dataset", "dataset")])
def test_names_that_lead_nowhere(refused, flag, kind, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    line = refused(**{flag: "nobody/nothing-of-that-name"})
    assert f"the {kind} 'nobody/nothing-of-that-name' could not be fetched" in line
    assert "the path of a local folder works in its place" in line and "HF_HOME" in line
    assert "no such folder" in refused(**{flag: "./nothing"})
    assert "is neither a folder nor a hub id" in refused(**{flag: "a b"})


def test_a_hub_id_that_does_not_exist(refused, monkeypatch):
    from types import SimpleNamespace

    from huggingface_hub import errors

    def missing(*args, **kw):
        raise errors.RepositoryNotFoundError("404", response=SimpleNamespace(headers={}, request=None))

    monkeypatch.setattr("huggingface_hub.snapshot_download", missing)
    line = refused(base_model="nobody/nothing")
    assert "the model 'nobody/nothing' is not on the hub" in line and "a local folder works in its place" in line


def test_a_prompt_too_long_for_the_context(refused, folders, tmp_path):
    folder = shutil.copytree(folders(), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 64
    (folder / "config.json").write_text(json.dumps(config))
    assert "exceed the model's context of 64" in refused(base_model=folder)


# Adapters


@pytest.fixture(scope="session")
def adapter(folders, data, tmp_path_factory):
    """The adapter of a tiny qwen3_5, by a training of one step."""
    undo = install_reward()
    output = tmp_path_factory.mktemp("adapter")
    assert command(flags(folders(), data, output, steps=1, evaluate=False)) == 0
    undo()
    return output / "run" / "step-1"


def test_the_adapter_itself_is_taken(adapter, folders, data, tmp_path):
    assert command(flags(folders(), data, tmp_path, steps=1, evaluate=False, adapter=adapter)) == 0


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
    from support.errors import UserError
    from support.models import check_adapter

    folder = shutil.copytree(adapter, tmp_path / "adapter")
    edit(folder / "adapter_config.json", base_model_name_or_path="Qwen/Qwen3.5-2B")
    base = load().base
    check_adapter(folder, "qwen/qwen3.5-2b", base)
    check_adapter(folder, str(tmp_path), base)  # a folder may hold any model
    with pytest.raises(UserError, match="was made for Qwen/Qwen3.5-2B, not for Qwen/Qwen3.5-4B"):
        check_adapter(folder, "Qwen/Qwen3.5-4B", base)


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


def bomb():
    """A PNG of 20,000 x 20,000 black points in 50 kB."""
    def chunk(kind, data):
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    header = (20_000).to_bytes(4, "big") * 2 + bytes([1, 0, 0, 0, 0])
    pixels = zlib.compress(bytes(20_000 * 2_501), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


WHOLE = png(Image.effect_noise((60, 60), 50))
BAD_FIGURES = {
    "truncated": (WHOLE[:len(WHOLE) // 2], "image file is truncated"),
    "zero bytes": (b"", "no bytes"),
    "10,000 x 10": (png(Image.new("L", (10_000, 10), 255)), "10000 x 10 pixels, an aspect ratio above 200"),
    "a text named .png": (b"this is a text", "none of PNG"),
    "a decompression bomb": (bomb, "DecompressionBombError"),
}


@pytest.mark.parametrize("name", BAD_FIGURES)
def test_figures_that_cannot_be_used(refused, tmp_path, name):
    data, message = BAD_FIGURES[name]
    data = data() if callable(data) else data
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


# Text for the terminal


def test_text_of_questions_and_completions_is_escaped(folders, tmp_path, monkeypatch, capsys):
    right = grpo.completion_texts
    monkeypatch.setattr(grpo, "completion_texts", lambda *args: ["\x1b[2J" + text for text in right(*args)])
    data = make_data_set(tmp_path / "data", [question_row(i, id=f"q{i}\x1b]0;x\x07") for i in range(3)])
    assert command(flags(folders(), data, tmp_path, steps=1, max_image_tokens=1) + ["--show-samples"]) == 0
    printed = capsys.readouterr()
    assert r"\x1b[2J" in printed.out and r"q0\x1b]0;x\x07" in printed.out
    assert "\x1b[2J" not in printed.out + printed.err and "\x1b]0" not in printed.out + printed.err
    assert "downsized" in printed.out
