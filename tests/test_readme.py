"""What the READMEs and docs/ show works: programs run, commands and flags parse, files exist, both languages agree."""

import dataclasses
import importlib
import inspect
import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from runs import lines, png

import demo
import geoqa
import grpo
import report
from recipes.distill import DistillConfig
from support.command_line import checked_config, run_command_line

ROOT = Path(__file__).parents[1]
PAIRS = {"README.md": "README.zh-CN.md", **{f"docs/{name}.md": f"docs/{name}.zh-CN.md" for name in (
    "losses", "running", "faq")}}  # English: Chinese
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in (*PAIRS, *PAIRS.values())}
README = TEXTS["README.md"]
LANGUAGES = {"English": "\n".join(TEXTS[name] for name in PAIRS),
             "Chinese": "\n".join(TEXTS[name] for name in PAIRS.values())}
TITLES = {
    "Vision GRPO on one GPU": "单卡 Vision GRPO",
    "See it learn": "看它怎么学",
    "Run it on your card": "在自己的显卡上跑",
    "Speed and memory": "速度与显存",
    "The algorithm": "算法",
    "Read the code": "读代码",
    "Try your own loss": "试试自己的损失函数",
    "Use your own data": "用自己的数据",
    "Where it differs from the article, and from the paper": "与文章、论文的不同之处",
    "Licence": "许可证",
    "Losses, advantages, reductions": "损失函数、advantage、归约",
    "Running it: files, resuming, trackers, cost, other models, kernels, the adapter":
        "运行：文件、断点续训、实验追踪、开销、其他模型、kernel、adapter",
    "What a run leaves": "一次运行留下什么",
    "Interrupted?": "中断了？",
    "Trackers": "实验追踪",
    "Cost": "开销",
    "Kernels": "Kernel",
    "Use other models": "换其他模型",
    "Use the adapter elsewhere": "在别处使用 adapter",
    "Questions people ask": "常见问题",
}
CONFIGS = {"grpo.py": grpo.Config, "demo.py": demo.DemoConfig, "my_loss.py": demo.DemoConfig,
           "my_task.py": demo.DemoConfig, "recipes.distill": DistillConfig}
TOOLS = {"tools.bench", "tools.gpu_check"}
WITHOUT_FLAGS = {"make_data.py", "demo_model.make"}
SAVED_PROGRAMS = {"my_loss.py", "my_task.py", "make_data.py", "use_adapter.py"}  # by the reader
MADE_BY_THEM = {"train.parquet", "test.parquet"}
MADE_BY_A_RUN = {
    "report.html", "results.json", "eval-base.json", "eval-step-100.json", "metrics.jsonl", "evaluations.jsonl",
    "rollouts.jsonl", "questions.jsonl", "figures/", "step-25/", "optimizer.safetensors", "state.json", "config.json"}
MADE_BY_SOME_RUNS = {"eval-adapter.json", "nonfinite-step-7.json"}
FLAGS_OF_OTHERS = {"--logdir", "--enable-lora", "--max-lora-rank", "--lora-modules", "--index-url"}
SUFFIXES = (".py", ".txt", ".md", ".sh", ".html", ".json", ".jsonl", ".safetensors", ".parquet")
METRIC = re.compile(r"(?:reward|rollout|trainer)/\w+|degenerate_fraction")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z]")


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
    """The inline code of the prose, also where a line ends in it."""
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", fences(text)[1])]


def commands(text):
    """-> {(program, arguments)} of every `python X.py ...` and `python -m X ...`."""
    code = spans(text) + [line for _, block in fences(text)[0] for line in block.splitlines()]
    found = {re.search(r"(?:^|\s)python (?:-m )?([\w/.]+)(.*)", line) for line in code} - {None}
    return {(match[1], match[2].strip()) for match in found}


def program_with(word):
    """The one Python program of the English texts that holds `word`."""
    program, = (code for language, code in fences(LANGUAGES["English"])[0] if language == "python" and word in code)
    return program


def check_flags(config_class, arguments):
    """Raises SystemExit where a flag is not known, or its value would end the run before anything is loaded."""
    def action(config):
        # A tracker's package may not be installed, and the run that is resumed here has a loss of its own.
        if not re.search("tracker|swanlab|resume", arguments):
            checked_config(config, grpo.GEOQA.rewards)

    run_command_line(config_class, action, shlex.split(arguments))


# -------------------------------------------------------------------------------------------------- Programs


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A folder with the demo's model, few of its figures, and the programs that the reader saves."""
    folder = tmp_path_factory.mktemp("clone")
    (folder / "demo_model").symlink_to(ROOT / "demo_model")
    (folder / "runs/demo-data").mkdir(parents=True)
    for seed, split in enumerate(("train", "test"), 1):
        rows = [row | {"image": png(row["image"])} for row in demo.draw_rows(24, seed)]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"runs/demo-data/{split}.parquet")
    for name, word in (("my_loss.py", "LOSS_FNS"), ("my_task.py", "brevity"), ("make_data.py", "parquet"),
                       ("use_adapter.py", "PeftModel")):
        (folder / name).write_text(program_with(word), encoding="utf-8")
    return folder


def run_as_shown(folder, program, *more):
    """Runs the README's command of a saved program, with further arguments, in `folder`."""
    shown, = (arguments for name, arguments in commands(README) if name == program)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", [program, *shlex.split(shown), *more])
        runpy.run_path(program, run_name="__main__")


@pytest.fixture(scope="module")
def loss_run(clone):
    """The run directory of two demo steps with the example of a loss."""
    try:
        run_as_shown(clone, "my_loss.py", "--steps", "2")
    finally:
        grpo.LOSS_FNS.pop("sil", None)
    for name in "plain", "NAME", "demo_model-1":  # other names in the texts
        (clone / "runs" / name).symlink_to("sil")
    (clone / "runs/sil/step-100").symlink_to("step-2")
    return clone / "runs/sil"


@pytest.fixture(scope="module")
def task_run(clone):
    """The run directory of one demo step with the example of a reward, and a loss that has bounds."""
    run_as_shown(clone, "my_task.py", "--steps", "1", "--batch-size", "2", "--no-evaluate", "--loss-fn", "ppo",
                 "--experiment-name", "task")
    return clone / "runs/task"


def test_the_example_loss_trains_two_demo_steps(loss_run):
    assert len([line for line in program_with("LOSS_FNS").splitlines() if line.strip()]) <= 10
    metrics = lines(loss_run / "metrics.jsonl")
    assert len(metrics) == 2 and metrics[0]["train_datums"] > 0 and metrics[0]["trainer/grad_norm"] > 0
    # The first batch has both signs of advantage, so this loss is not the default one under another name.
    assert {row["advantage"] > 0 for row in lines(loss_run / "rollouts.jsonl") if row["advantage"]} == {True, False}
    assert metrics[0]["trainer/loss_mean"] > 0  # -logp of good completions only
    assert json.loads((loss_run / "config.json").read_text())["loss_fn"] == "sil"


def test_the_example_task_trains_with_both_of_its_rewards(task_run):
    metrics, = lines(task_run / "metrics.jsonl")
    assert metrics["train_datums"] > 0 and metrics["trainer/grad_norm"] > 0
    for row in lines(task_run / "rollouts.jsonl"):
        brevity = 1 - len(row["tokens"]) / 16
        assert row["rewards"] == {"right": row["right"], "brevity": brevity}
        assert row["reward"] == pytest.approx(row["right"] + 0.2 * brevity)


def test_the_adapter_gives_the_evaluations_answer_in_peft(clone, loss_run, monkeypatch, capsys):
    program = program_with("PeftModel")
    assert program.count("step-80") == 1
    (clone / "use_adapter.py").write_text(program.replace("step-80", "step-2"), encoding="utf-8")
    monkeypatch.chdir(clone)
    runpy.run_path("use_adapter.py")
    first = json.loads((loss_run / "eval-step-2.json").read_text(encoding="utf-8"))[0]
    assert not first["truncated"] and capsys.readouterr().out == first["text"] + "\n"


def test_the_data_script_makes_a_folder_that_trains(clone, monkeypatch):
    assert len([line for line in program_with("parquet").splitlines() if line.strip()]) <= 15
    run_as_shown(clone, "make_data.py")
    monkeypatch.chdir(clone)
    assert len(geoqa.load_geoqa("my_data", "train")) == 64 and len(geoqa.load_geoqa("my_data", "test")) == 20
    run_command_line(demo.DemoConfig, demo.main, ["--dataset", "my_data", "--steps", "1", "--batch-size", "2",
                                                  "--no-evaluate", "--experiment-name", "polygons"])
    assert (clone / "runs/polygons/step-1/adapter_model.safetensors").is_file()


def test_the_report_commands_write_their_pages(clone, loss_run, monkeypatch):
    monkeypatch.chdir(clone)
    (loss_run / "report.html").unlink()
    arguments = {arguments for program, arguments in commands(LANGUAGES["English"]) if program == "report.py"}
    assert arguments == {"runs/NAME", "runs/plain runs/sil"}
    for each in arguments:
        report.main(each.split())
    assert (loss_run / "report.html").is_file() and Path("runs/compare.html").is_file()


def test_a_run_leaves_what_the_table_says(loss_run):
    for name in MADE_BY_A_RUN:
        name = name.replace("100", "2").replace("25", "2")
        assert (loss_run / name).exists() or (loss_run / "step-2" / name).exists(), name


# -------------------------------------------------------------------------------------------------- Names


@pytest.fixture
def help_flags(monkeypatch, capsys):
    """Program that has a parser of its own -> the flags in its --help."""
    found = {}
    for program in {"report", *TOOLS}:
        monkeypatch.setattr(sys, "argv", [program, "--help"])
        with pytest.raises(SystemExit) as stop:
            importlib.import_module(program).main()
        assert not stop.value.code
        found[program] = set(FLAG.findall(capsys.readouterr().out))
    return found


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_flag_exists(language, help_flags):
    flags = {field.name.replace("_", "-"): field.default for field in dataclasses.fields(DistillConfig)}
    known = {f"--{name}" for name in flags} | {f"--no-{name}" for name, default in flags.items() if default is True}
    known |= {"--help"} | FLAGS_OF_OTHERS | set().union(*help_flags.values())
    used = set(FLAG.findall(LANGUAGES[language]))
    assert used and used <= known, used - known


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_command_parses(language, help_flags, clone, loss_run, monkeypatch):
    monkeypatch.chdir(clone)  # --resume reads the run
    found = commands(LANGUAGES[language])
    assert {program for program, _ in found} == {*CONFIGS, *TOOLS, *WITHOUT_FLAGS, "report.py"}
    shown = [(CONFIGS[program], arguments) for program, arguments in found if program in CONFIGS
             and program not in SAVED_PROGRAMS and arguments != "--help"]  # the saved ones are run above
    shown += [(DistillConfig, span) for span in spans(LANGUAGES[language]) if re.match(r"--\S+ \S", span)]
    assert len(shown) > 20
    for each in shown:
        check_flags(*each)
    for program, arguments in found:
        assert program in SAVED_PROGRAMS or (ROOT / (program.removesuffix(".py").replace(".", "/") + ".py")).is_file()
        if program in TOOLS:
            assert set(FLAG.findall(arguments)) <= help_flags[program], (program, arguments)
        elif program in WITHOUT_FLAGS:
            assert not arguments


@pytest.mark.parametrize("name", TEXTS)
def test_every_file_exists(name):
    words = {word for span in spans(TEXTS[name]) for word in span.split() if re.fullmatch(r"[\w./-]+", word)}
    files = {word for word in words if "/" in word or word.endswith(SUFFIXES)}
    files = {word for word in files if not word.startswith(("runs/", "Qwen/")) and not METRIC.fullmatch(word)}
    missing = {word for word in files - SAVED_PROGRAMS - MADE_BY_THEM - MADE_BY_A_RUN - MADE_BY_SOME_RUNS
               if not (ROOT / word).exists()}
    missing |= {link for link in links(TEXTS[name]) if not (ROOT / name).parent.joinpath(link).exists()}
    assert not missing
    if "README" in name:
        assert {"grpo.py", "demo_model/", "support/branching.py"} <= files and "docs/report.png" in links(TEXTS[name])
    if "running" in name:
        assert MADE_BY_A_RUN | MADE_BY_SOME_RUNS <= files  # none is listed above for nothing


def links(text):
    """Where links and pictures of the prose lead, in their order, but for the web."""
    return re.findall(r"\]\((?!https?:)([^)#]+)\)", fences(text)[1])


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_metric_is_logged(language, task_run):
    metrics, = lines(task_run / "metrics.jsonl")
    named = {span for span in spans(LANGUAGES[language]) if METRIC.fullmatch(span)}
    assert {"degenerate_fraction", "trainer/clip_fraction", "reward/brevity"} <= named <= metrics.keys()


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_name_of_grpo_exists(language):
    names = {name for span in spans(LANGUAGES[language]) for name in re.findall(r"\bgrpo\.(\w+)", span)} - {"py"}
    assert {"Task", "ADVANTAGES"} <= names and all(hasattr(grpo, name) for name in names), names


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_the_guided_tour_names_what_is_there(name):
    body, = (body for _, title, body in sections(TEXTS[name]) if title in ("Read the code", TITLES["Read the code"]))
    items = re.findall(r"^\d+\. (.*)$", body, re.MULTILINE)
    assert len(items) == 10
    for item in items:
        file, *names = re.findall(r"`([\w/]+(?:\.py)?)`", item)
        code = (ROOT / file).read_text(encoding="utf-8")
        assert names
        for each in names:
            assert re.search(rf"^(?:def |class )?{each}\b", code, re.MULTILINE), (file, each)


@pytest.mark.parametrize("name", ["docs/losses.md", "docs/losses.zh-CN.md"])
def test_every_loss_reduction_and_advantage_is_explained(name):
    explained = spans(TEXTS[name])
    for each in (*grpo.LOSS_FNS, *grpo.LOSS_REDUCTIONS, *(f"--advantage {rule}" for rule in grpo.ADVANTAGES)):
        assert each in explained, each
    table = dict(re.findall(r"^\| `(\w+)` \|(?:[^|]+\|)([^|]+)\|", TEXTS[name], re.MULTILINE))
    assert table.keys() == grpo.LOSS_FNS.keys()
    for loss, entry in grpo.LOSS_FNS.items():
        parameters = inspect.signature(getattr(entry, "fn", entry)).parameters
        bounds = [parameters[bound].default for bound in ("low", "high") if bound in parameters]
        assert bounds == [float(bound) for bound in re.findall(r"\d[\d.e-]*", table[loss])], loss


@pytest.mark.parametrize("command", ["pip install -r requirements.txt && python demo.py",
                                     "pip install -r requirements.txt && pytest"])
def test_the_gate_finds_its_commands(command):
    assert next(line for line in README.splitlines() if command in line) == command  # grep takes the first


# -------------------------------------------------------------------------------------------------- The texts


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_is_short_and_finished(name):
    assert TEXTS[name].count("\n") <= 260
    assert not re.findall(r"@[A-Z][A-Z_]*@", TEXTS[name]), "numbers are still to be filled in"


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_a_readme_opens_with_three_bullets_a_picture_and_two_commands(name):
    _, _, body = sections(TEXTS[name])[0]
    (_, code), = fences(body)[0]
    assert len(re.findall(r"^- ", body, re.MULTILINE)) == 3 and len(re.findall(r"^!\[", body, re.MULTILINE)) == 1
    assert code.splitlines() == ["pip install -r requirements.txt && python demo.py", "python grpo.py"]


def test_every_document_is_tested():
    found = {path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))}
    assert found == set(TEXTS)


def both_sections():
    """[(title, English body, Chinese body)] of all documents."""
    pairs = [pair for english, chinese in PAIRS.items()
             for pair in zip(sections(TEXTS[english]), sections(TEXTS[chinese]), strict=True)]
    return [(title, english, chinese) for (_, title, english), (_, _, chinese) in pairs]


@pytest.mark.parametrize("english, chinese", PAIRS.items())
def test_both_languages_have_the_same_sections_and_links(english, chinese):
    assert [(level, TITLES[title]) for level, title, _ in sections(TEXTS[english])] == [
        (level, title) for level, title, _ in sections(TEXTS[chinese])]
    (to_chinese, *there), (to_english, *here) = links(TEXTS[english]), links(TEXTS[chinese])
    assert (to_chinese, to_english) == (Path(chinese).name, Path(english).name)
    assert [PAIRS.get(link, link) for link in there] == here


def test_both_languages_have_the_same_code_lists_and_tables():
    for title, *bodies in both_sections():
        blocks = [[(language, re.sub(r" *# .*", "", code)) for language, code in fences(body)[0]]
                  for body in bodies]  # comments may differ
        assert blocks[0] == blocks[1], title
        assert sorted(spans(bodies[0])) == sorted(spans(bodies[1])), title
        for kind in (r"^\|.*", r"^\d+\. ", r"^- "):
            found = [[line.count("|") for line in re.findall(kind, fences(body)[1], re.MULTILINE)] for body in bodies]
            assert found[0] == found[1], (title, kind)


def test_both_languages_have_the_same_numbers():
    for title, *bodies in both_sections():
        numbers = [sorted(set(re.findall(r"\d+(?:[.,]\d+)*", fences(body)[1]))) for body in bodies]
        assert numbers[0] == numbers[1], title
