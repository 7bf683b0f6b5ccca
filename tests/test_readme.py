"""What both READMEs show works: their programs run, commands and flags parse, files exist, and the two say the same."""

import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

import demo
import geoqa
import grpo
import report
from support import command_line

ROOT = Path(__file__).parents[1]
READMES = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md")}
README = READMES["README.md"]
SECTIONS = {
    "Vision GRPO on one GPU": "单卡 Vision GRPO",
    "See it learn": "看它怎么学",
    "Run it on your card": "在自己的显卡上跑",
    "Speed and memory": "速度与显存",
    "The algorithm": "算法",
    "Read the code": "读代码",
    "Losses": "损失函数",
    "Try your own loss": "试试自己的损失函数",
    "Use your own data": "用自己的数据",
    "Use other models": "换其他模型",
    "Use the adapter elsewhere": "在别处使用 adapter",
    "Questions people ask": "常见问题",
    "Where it differs from the article, and from the paper": "与文章、论文的不同之处",
    "Licence": "许可证",
}
OF_OTHER_PROGRAMS = {"--logdir", "--enable-lora", "--max-lora-rank", "--lora-modules", "--index-url"}
PROGRAMS_SAVED = {"my_loss.py", "make_data.py"}
SAVED_BY_THE_READER = PROGRAMS_SAVED | {"use_adapter.py", "train.parquet", "test.parquet"}
MADE_BY_A_RUN = {
    "report.html", "results.json", "eval-base.json", "eval-step-100.json", "metrics.jsonl", "evaluations.jsonl",
    "rollouts.jsonl", "questions.jsonl", "figures/", "step-25/", "optimizer.safetensors", "state.json", "config.json"}
MADE_BY_SOME_RUNS = {"eval-adapter.json", "nonfinite-step-7.json"}
SUFFIXES = (".py", ".txt", ".md", ".sh", ".html", ".json", ".jsonl", ".safetensors", ".parquet")
NO_FILES = {"gspo/sequence_clip_fraction_first"}  # names with a slash that are none, besides hub ids of Qwen's


def fences(text):
    """-> [(language, code)] of the code blocks, and the text without them."""
    pattern = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    return pattern.findall(text), pattern.sub("", text)


def sections(text):
    """-> [(level, title, body)]; a # in a code block is no heading."""
    found, in_block = [], False
    for line in text.splitlines():
        in_block ^= line.startswith("```")
        heading = None if in_block else re.fullmatch(r"(#+) (.*)", line)
        if heading:
            found.append((len(heading[1]), heading[2], []))
        elif found:
            found[-1][2].append(line)
    return [(level, title, "\n".join(body)) for level, title, body in found]


def spans(text):
    """The inline code of the prose."""
    return re.findall(r"`([^`\n]+)`", fences(text)[1])


def commands(text):
    """-> {(program, arguments)} of every `python X.py ...`."""
    lines = spans(text) + [line for _, code in fences(text)[0] for line in code.splitlines()]
    found = {re.search(r"(?:^|\s)python ([\w/.]+\.py)(.*)", line) for line in lines} - {None}
    return {(match[1], match[2]) for match in found}


def block_with(word):
    """The one Python program of the README that holds `word`."""
    program, = (code for language, code in fences(README)[0] if language == "python" and word in code)
    return program


def parse(config_class, arguments):
    command_line.OneLineParser(config_class, allow_abbrev=False).parse_args_into_dataclasses(
        arguments, look_for_args_file=False)


# -------------------------------------------------------------------------------------------------- Programs


@pytest.fixture(scope="module")
def example_run(tmp_path_factory):
    """The folder in which the example of a loss has trained two steps of the demo, as run demo_model-1."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "my_loss.py").write_text(block_with("LOSS_FNS"), encoding="utf-8")
    (folder / "demo_model").symlink_to(ROOT / "demo_model")
    draw_rows = demo.draw_rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "draw_rows", lambda count, seed: draw_rows(min(count, 24), seed))  # quicker
        patch.chdir(folder)
        patch.setattr(grpo, "LOSS_FNS", dict(grpo.LOSS_FNS))  # the example adds to it
        patch.setattr(sys, "argv", ["my_loss.py", "--loss-fn", "sil", "--steps", "2"])
        runpy.run_path("my_loss.py", run_name="__main__")
    return folder


def test_the_example_loss_trains_two_demo_steps(example_run):
    assert len([line for line in block_with("LOSS_FNS").splitlines() if line.strip()]) <= 10
    assert "python my_loss.py --loss-fn sil" in README
    run = example_run / "runs/demo_model-1"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == 2 and metrics[0]["train_datums"] > 0 and metrics[0]["trainer/grad_norm"] > 0
    # The seed's first batch has both signs of advantage, so this loss is not the default one under another name.
    assert json.loads((run / "config.json").read_text())["loss_fn"] == "sil"


def test_the_adapter_gives_the_evaluations_answer_in_peft(example_run, monkeypatch, capsys):
    program = block_with("PeftModel")
    assert program.count("step-80") == 1
    (example_run / "use_adapter.py").write_text(program.replace("step-80", "step-2"), encoding="utf-8")
    monkeypatch.chdir(example_run)
    runpy.run_path("use_adapter.py")
    first = json.loads((example_run / "runs/demo_model-1/eval-step-2.json").read_text(encoding="utf-8"))[0]
    assert capsys.readouterr().out == first["text"] + "\n"


def test_the_data_script_makes_a_folder_that_trains(tmp_path, monkeypatch):
    program = block_with("parquet")
    assert len([line for line in program.splitlines() if line.strip()]) <= 15
    monkeypatch.chdir(tmp_path)
    (tmp_path / "make_data.py").write_text(program, encoding="utf-8")
    runpy.run_path("make_data.py")
    assert len(geoqa.load_geoqa("my_data", "train")) == 64 and len(geoqa.load_geoqa("my_data", "test")) == 20
    demo.main(["--dataset", "my_data", "--steps", "1", "--batch-size", "2", "--no-evaluate"])
    assert (tmp_path / "runs/demo_model-1/step-1/adapter_model.safetensors").is_file()


# -------------------------------------------------------------------------------------------------- Names


@pytest.mark.parametrize("name", READMES)
def test_every_flag_exists(name, capsys):
    fields = grpo.dataclasses.fields(demo.DemoConfig)
    known = {f"--{field.name.replace('_', '-')}" for field in fields} | {"--help"} | OF_OTHER_PROGRAMS
    known |= {f"--no-{field.name.replace('_', '-')}" for field in fields if field.default is True}
    with pytest.raises(SystemExit):
        report.main(["--help"])
    known |= set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", READMES[name]))
    assert used and used <= known, used - known


@pytest.mark.parametrize("name", READMES)
def test_every_command_parses(name, monkeypatch):
    monkeypatch.setattr(report, "run_blocks", lambda path: ({}, []))
    monkeypatch.setattr(report, "compare_blocks", lambda paths: ({}, []))
    monkeypatch.setattr(report, "write_page", lambda path, blocks: None)
    found = commands(READMES[name])
    programs = {"grpo.py", "demo.py", "report.py", "tools/gpu_check.py", "tools/bench.py"} | PROGRAMS_SAVED
    assert {program for program, _ in found} == programs
    for program, arguments in found:
        assert (ROOT / program).is_file() or program in SAVED_BY_THE_READER, program
        arguments = shlex.split(arguments)
        if program == "report.py":
            report.main(arguments)
        elif program in ("make_data.py", "tools/gpu_check.py"):
            assert not arguments
        elif arguments != ["--help"]:
            parse(grpo.Config if program == "grpo.py" else demo.DemoConfig, arguments)
    for span in spans(READMES[name]):
        if span.startswith("--") and " " in span:  # flags with their values
            parse(grpo.Config, shlex.split(span))


@pytest.mark.parametrize("name", READMES)
def test_every_file_exists(name):
    words = {word for span in spans(READMES[name]) for word in span.split() if re.fullmatch(r"[\w./-]+", word)}
    files = {word for word in words if "/" in word or word.endswith(SUFFIXES)}
    files = {word for word in files if not word.startswith(("runs/", "Qwen/", "geometry="))} - NO_FILES
    files |= set(re.findall(r"\]\((?!https?:)([^)#]+)\)", READMES[name]))  # links and pictures
    assert {"grpo.py", "docs/report.png", "demo_model/"} <= files
    missing = {word for word in files - SAVED_BY_THE_READER - MADE_BY_A_RUN - MADE_BY_SOME_RUNS
               if not (ROOT / word).exists()}
    assert not missing
    assert MADE_BY_A_RUN <= files  # none is listed above for nothing


def test_a_run_leaves_what_the_table_says(example_run):
    run = example_run / "runs/demo_model-1"
    for name in MADE_BY_A_RUN:
        name = name.replace("100", "2").replace("25", "2")
        assert (run / name).exists() or (run / "step-2" / name).exists(), name


@pytest.mark.parametrize("name", READMES)
def test_the_guided_tour_names_what_is_there(name):
    titles = "Read the code", SECTIONS["Read the code"]
    body, = (body for _, title, body in sections(READMES[name]) if title in titles)
    items = re.findall(r"^\d+\. (.*)$", body, re.MULTILINE)
    assert len(items) == 10
    for item in items:
        file, *names = re.findall(r"`(\w+(?:\.py)?)`", item)
        code = (ROOT / file).read_text(encoding="utf-8")
        assert names
        for each in names:
            assert re.search(rf"^(?:def |class )?{each}\b", code, re.MULTILINE), (file, each)


@pytest.mark.parametrize("name", READMES)
def test_every_loss_and_reduction_is_explained(name):
    for each in (*grpo.LOSS_FNS, *grpo.LOSS_REDUCTIONS):
        assert f"`{each}`" in READMES[name], each


@pytest.mark.parametrize("command", ["pip install -r requirements.txt && python demo.py",
                                     "pip install -r requirements.txt && pytest"])
def test_the_gate_finds_its_commands(command):
    assert next(line for line in README.splitlines() if command in line) == command  # grep takes the first


# -------------------------------------------------------------------------------------------------- Both languages


def both_sections():
    return list(zip(*(sections(text) for text in READMES.values()), strict=True))


def test_both_readmes_have_the_same_sections():
    assert [(level, SECTIONS.get(title)) for level, title, _ in sections(README)] == [
        (level, title) for level, title, _ in sections(READMES["README.zh-CN.md"])]
    for name, text in READMES.items():
        other, = READMES.keys() - {name}
        assert f"]({other})" in "\n".join(text.splitlines()[:5])


def test_both_readmes_have_the_same_code_and_tables():
    for (_, title, english), (_, _, chinese) in both_sections():
        english_blocks, chinese_blocks = (
            [(language, re.sub(r" *# .*", "", code)) for language, code in fences(body)[0]]
            for body in (english, chinese))  # comments may differ
        assert english_blocks == chinese_blocks, title
        assert sorted(spans(english)) == sorted(spans(chinese)), title
        rows = [[line.count("|") for line in body.splitlines() if line.startswith("|")] for body in (english, chinese)]
        assert rows[0] == rows[1], title
        assert len(re.findall(r"^(?:\d+\.|-) ", english, re.MULTILINE)) == len(
            re.findall(r"^(?:\d+\.|-) ", chinese, re.MULTILINE)), title


def test_both_readmes_have_the_same_numbers():
    for (_, title, english), (_, _, chinese) in both_sections():
        numbers = [sorted(set(re.findall(r"\d+(?:[.,]\d+)*", fences(body)[1]))) for body in (english, chinese)]
        assert numbers[0] == numbers[1], title
