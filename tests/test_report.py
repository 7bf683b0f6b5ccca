"""The report: its numbers, what it makes of damaged runs and hostile text, and the page in a real browser."""

import base64
import html
import json
import re
import shutil
import subprocess

import pytest
import torch
from batches import questions
from runs import command, flags, install_reward, lines, make_data_set

import grpo
import report
from support.rundir import token_texts

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
STEPS, GROUP = 3, 4
HOSTILE = ["<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>", "</script><!-- <script>",
           "\x00\x07\x1b[31m\x9b\u202eabc\r\n\ud800", "x" * 10_000, "\\boxed{", "${1}`&lt;&amp;", "中" * 5_000]


@pytest.fixture(scope="module")
def run(folders, tmp_path_factory):
    """A small training with evaluations and token changes."""
    folder = tmp_path_factory.mktemp("report")
    undo = install_reward()
    try:
        assert command(flags(folders(), make_data_set(folder / "data"), folder, steps=STEPS, log_token_changes=1)) == 0
    finally:
        undo()
    return folder / "run"


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("step-*", "*.html"))


def blocks(page):
    """The data in a page, by id."""
    found = re.findall(r'<script type="application/json" id="json-([\w-]+)">(.*?)</script>',
                       page.read_text(encoding="utf-8"), re.DOTALL)
    return {name: json.loads(block) for name, block in found}


def make(capsys, *arguments):
    """report.py in this process -> exit code, standard output, standard error."""
    try:
        report.main(list(map(str, arguments)))
        code = 0
    except SystemExit as stop:
        code = stop.code
    return code, *capsys.readouterr()


def test_numbers_are_those_of_the_files(run):
    page = blocks(run / "report.html")
    data, metrics, rollouts = page["data"], lines(run / "metrics.jsonl"), lines(run / "rollouts.jsonl")
    assert data["results"] == json.loads((run / "results.json").read_text()) and data["notes"] == []
    assert data["gain"]["mcnemar_p"] == data["results"]["mcnemar_p"]
    numbers = {name for row in metrics for name, value in row.items() if value is not None}
    assert data["metrics"] == {name: [row.get(name) for row in metrics] for name in numbers}
    assert [each["accuracy"] for each in data["evaluations"]] == [
        data["results"][side]["accuracy"] for side in ("before", "after")]
    assert len(data["groups"]) * GROUP == len(rollouts) == STEPS * 2 * GROUP
    shown = [(row, group, data["groups"][2 * step + i]) for step in range(STEPS)
             for i, group in enumerate(page[f"step-{step + 1}"]) for row in group]
    for record, (row, group, (step, figure, right, size, marks)) in zip(rollouts, shown, strict=True):
        assert all(row[name] == record[name] for name in ("choice", "reward", "advantage", "length", "truncated"))
        assert row.get("text", "".join(row.get("pieces", []))) == record["text"]
        assert row.get("changes") == record.get("token_changes")
        assert step == record["step"] and right == sum(r["reward"] for r in group) and size == GROUP
        question = data["questions"][figure]
        assert (question["question"], question["split"]) == (record["question"], "train")
        assert ("d" in marks) == (len({r["reward"] for r in group}) == 1)
    for row in page["answers"]["before"]:
        assert data["questions"][row["figure"]]["label"] == row["gold"]
        assert data["questions"][row["figure"]]["split"] == "test"
    assert set(page["figures"]) == set(data["questions"])
    assert all(figure.startswith("data:image/webp;base64,") for figure in page["figures"].values())


def test_train_and_test_questions_of_one_id_keep_their_own_figures():
    rows = [{"question": 1, "split": "test", "figure": "figures/1.png"},
            {"question": 1, "split": "train", "figure": "figures/2.png"}]
    for stored in (rows, [{k: v for k, v in row.items() if k != "split"} for row in rows]):  # and in older runs
        find = report.question_finder(stored)
        assert find(1, evaluation=True) == "figures/1.png" and find(1, evaluation=False) == "figures/2.png"


def test_the_gain_is_split_into_box_and_answer():
    def answers(*choices):
        return [{"question": i, "gold": "A", "choice": choice, "lenient_choice": choice or "A"}
                for i, choice in enumerate(choices)]

    before = answers(None, None, "B", "B", "A", "A", "A", None)
    after = answers("A", "B", "A", "A", "B", None, "A", None)
    split = report.gain(before, after[::-1])
    assert split == {"n": 8, "gained": 3, "lost": 2, "mcnemar_p": 1.0, "gained_box": 1, "gained_box_only": 1,
                     "gained_answer": 2, "lost_box": 1, "lost_answer": 1}


def test_solved_and_lost_now_compare_with_the_questions_time_before(tmp_path):
    rewards = {1: [0, 1, 0, 0], 2: [1, 1, 0, 0], 3: [1, 1, 1, 1], 4: [0, 0, 0, 0]}
    rows = [{"step": step, "question": "q", "text": "", "choice": None, "reward": float(reward), "advantage": 0.0,
             "length": 1, "truncated": step == 4} for step, group in rewards.items() for reward in group]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    index, _ = report.read_groups(tmp_path, 4, lambda key, evaluation: "f", [])
    assert index == [[1, "f", 1, 4, ""], [2, "f", 2, 4, "s"], [3, "f", 4, 4, "d"], [4, "f", 0, 4, "ldt"]]


def test_a_long_run_is_thinned_out(run, monkeypatch):
    monkeypatch.setattr(report, "ROLLOUT_BYTES", 3_000)
    page, notes = report.run_blocks(run)
    kept = [int(name[5:]) for name in page if name.startswith("step-")]
    assert 1 <= len(kept) < STEPS and kept[-1] == STEPS and "a long run" in notes[0]
    assert {row[0] for row in json.loads(page["data"])["groups"]} == set(kept)


def test_token_texts_join_to_the_completion(load):
    tokenizer = load().tokenizer
    text = "角∠ABC=90°，😀 选\\boxed{B}"
    tokens = [*tokenizer(text).input_ids, tokenizer.eos_token_id]
    pieces = token_texts(tokenizer, tokens)
    assert "".join(pieces) == text and len(pieces) == len(tokens) and pieces[-1] == ""
    assert pieces[:4] == ["", "", "角", ""]  # a byte is a token here
    for bad in (tokens[1:9], tokens[:2], [*tokens[:2], *tokens[6:9]]):
        assert "".join(token_texts(tokenizer, bad)) == tokenizer.decode(bad, skip_special_tokens=True)


def test_token_changes_are_those_of_the_update(load, monkeypatch):
    policy = load(adapter=True)
    rewards = iter([1.0] * 4 + [1.0, 0, 0, 1] + [0.0] * 4)
    monkeypatch.setattr(grpo, "grade", lambda text, label: next(rewards))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    config = grpo.Config(group_size=4, max_tokens=8, lora_rank=4, log_token_changes=2)
    _, batch, _ = grpo.train_step(policy, optimizer, lambda count: questions(), config)
    assert sorted(batch.token_changes) == list(range(8))  # the group that trained, then the first of the others
    with torch.no_grad():
        after = grpo.completion_logprobs(policy, batch.prompts, batch.rollouts, range(12))
    largest = 0
    for row, found in batch.token_changes.items():
        length = batch.rollouts.lengths[row]
        expected = (after - batch.rollouts.logprobs)[row, :length]
        assert found["token_changes"] == pytest.approx(expected.tolist(), abs=2e-4)
        assert "".join(found["token_texts"]) == batch.texts[row]
        largest = max(largest, expected.abs().max())
    assert largest > 0.01


# Damaged runs and hostile text


def test_every_file_may_be_missing_or_damaged(copy, capsys):
    names = ["config.json", "metrics.jsonl", "rollouts.jsonl", "questions.jsonl", "results.json", "eval-base.json",
             f"eval-step-{STEPS}.json", "figures/00001.png"]
    for name in names:
        file = copy / name
        whole = file.read_bytes()
        for damaged in (None, b"", whole[:len(whole) // 2], b"\xff\x00{", b"null\n", b"[]\n", b"{}\n", b"[" * 100_000,
                        whole.replace(b": 0", b": 1e999").replace(b": 1", b": -1e999"),
                        whole.replace(b": 1", b": NaN").replace(b'": "', b'": ["x"], "y": "')):
            file.unlink(missing_ok=True)
            if damaged is not None:
                file.write_bytes(damaged)
            code, out, err = make(capsys, copy)
            assert code == 0 and out == f"{copy / 'report.html'}\n" and err.count("\n") <= 1
            page = blocks(copy / "report.html")
            if damaged in (None, b"\xff\x00{") and (name, damaged) != ("results.json", None):  # made from the others
                assert {"figures/00001.png": "1 figure", f"eval-step-{STEPS}.json": "eval-step-"}.get(name, name) in err
            assert len(page["data"]["groups"]) == STEPS * 2 or name == "rollouts.jsonl"
        file.write_bytes(whole)


def test_what_is_no_run_is_one_line(tmp_path, capsys):
    for path, message in ((tmp_path / "none", "is not a folder"), (tmp_path, "is no run directory")):
        code, out, err = make(capsys, path)
        assert code == 2 and out == "" and err.startswith("error: ") and message in err and err.count("\n") == 1
    assert make(capsys, tmp_path, tmp_path)[0] == 2
    (tmp_path / "config.json").write_text("{}")
    code, out, err = make(capsys, tmp_path)
    assert code == 0 and "metrics.jsonl is missing; results.json is missing" in err and err.count("\n") == 1
    assert make(capsys, tmp_path, "--output", tmp_path / "no" / "page.html")[0] == 2


def test_a_training_goes_on_without_its_report(run, tmp_path, monkeypatch, capsys):
    report.write_report(tmp_path / "none")
    monkeypatch.setattr(report, "read_groups", lambda *_: 1 / 0)
    report.write_report(run)
    printed = capsys.readouterr().out
    assert printed.count("\n") == 2 and "is not a folder" in printed and "division by zero" in printed


def test_a_figure_outside_the_run_is_not_read(copy):
    text = (copy / "questions.jsonl").read_text(encoding="utf-8")
    (copy / "questions.jsonl").write_text(text.replace("figures/", "figures/../figures/"), encoding="utf-8")
    assert json.loads(report.run_blocks(copy)[0]["figures"]) == {}


def make_hostile(run):
    """The same run with text in it that wants out."""
    rows = lines(run / "rollouts.jsonl")
    for i, row in enumerate(rows):
        row["text"] = HOSTILE[i % len(HOSTILE)]
        if row.pop("token_changes", None) and row["step"] == STEPS:
            row["token_changes"] = [0.1] * len(row["token_texts"])
            row["token_texts"] = (HOSTILE[i % len(HOSTILE):] + HOSTILE * 2)[:len(row["token_texts"])]
    (run / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = lines(run / "questions.jsonl")
    for i, row in enumerate(rows):
        row |= {"subject": HOSTILE[i % len(HOSTILE)], "choices": HOSTILE[:4], "answer": HOSTILE[i % 5]}
    (run / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for file in run.glob("eval-*.json"):
        rows = json.loads(file.read_text())
        file.write_text(json.dumps([row | {"text": HOSTILE[i]} for i, row in enumerate(rows)]))
    (run / "metrics.jsonl").write_text("".join(json.dumps(row | {HOSTILE[0]: 1.0, "x" * 999: 2}) + "\n"
                                               for row in lines(run / "metrics.jsonl")))
    config = json.loads((run / "config.json").read_text()) | {"base_model": HOSTILE[0], HOSTILE[1]: HOSTILE[3]}
    (run / "config.json").write_text(json.dumps(config))
    return run.rename(run.with_name("<img src=x onerror=hacked=1>"))


def test_no_text_ends_its_block(copy):
    path = make_hostile(copy)
    report.write_report(path)
    page = blocks(path / "report.html")
    assert page["data"]["config"][HOSTILE[1]] == HOSTILE[3]
    assert {HOSTILE[0], HOSTILE[3]} <= {row.get("text") for group in page["step-1"] for row in group}
    assert (path / "report.html").read_text(encoding="utf-8").count("<script") == len(page) + 1


def test_comparing_runs(run, copy, capsys, tmp_path):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"loss_fn": "mine"}))
    (copy / "results.json").unlink()
    code, out, err = make(capsys, run, copy, "--output", tmp_path / "both.html")
    assert code == 0 and out == f"{tmp_path / 'both.html'}\n" and err == ""
    data = blocks(tmp_path / "both.html")["data"]
    assert [each["name"] for each in data["runs"]] == [str(run), str(copy)]  # folders of one name
    assert data["differing"] == [["loss_fn", "importance_sampling", "mine"]]
    assert [each["results"]["after"] for each in data["runs"]] == [
        json.loads((run / "results.json").read_text())["after"]] * 2
    assert data["runs"][1]["against_first"]["mcnemar_p"] == 1.0


# In a browser

CATCH = """<script>window.problems = []; addEventListener("error", e => problems.push(String(e.message)));
console.error = (...words) => problems.push(words.join(" "));</script>"""


def browse(page, script, width=1280):
    """Opens a copy of `page` in a frame `width` pixels wide, runs `script` there and gives what it puts into `out`.

    Fails on any error in the page. The frame is there since no window is narrower than 500 pixels.
    """
    if BROWSER is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    text = page.read_text(encoding="utf-8").replace("<head>", f"<head>{CATCH}", 1)
    (page.parent / "driven.html").write_text(f"""{text}<script>{{
        const out = {{}}, $ = selector => document.querySelector(selector);
        const choose = (selector, value) => {{
            $(selector).value = value; $(selector).dispatchEvent(new Event("change")); }};
        try {{ {script} }} catch (error) {{ problems.push(String(error)); }}
        out.problems = problems;
        out.hacked = window.hacked ?? null;
        out.overflow = document.documentElement.scrollWidth - innerWidth;
        parent.postMessage(btoa(unescape(encodeURIComponent(JSON.stringify(out)))), "*"); }}</script>""",
        encoding="utf-8")
    frame = page.parent / "frame.html"
    frame.write_text(f"""<pre></pre><script>
        addEventListener("message", e => document.querySelector("pre").append(e.data))</script>
        <iframe src="driven.html" style="width:{width}px;height:900px"></iframe>""")
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--no-first-run", f"--user-data-dir={page.parent / 'profile'}",
         "--enable-logging=stderr", "--virtual-time-budget=10000", "--dump-dom", frame.as_uri()],
        capture_output=True, text=True, encoding="utf-8", errors="replace", timeout=120)
    sent = re.search(r"<pre>([\w+/=]+)</pre>", done.stdout)
    assert sent, done.stderr[-2000:]
    out = json.loads(base64.b64decode(html.unescape(sent[1])))
    assert out.pop("problems") == [] and "CONSOLE" not in done.stderr, done.stderr[-2000:]
    assert out.pop("hacked") is None and out.pop("overflow") <= 0
    return out


def test_the_page_in_a_browser(copy, capsys):
    """Curves have a point for each step; a chosen step and question shows its figure and its completions."""
    first = lines(copy / "metrics.jsonl")[0]  # a longer training, whose curves are smoothed
    (copy / "metrics.jsonl").write_text("".join(json.dumps(first | {"step": step}) + "\n" for step in range(1, 31)))
    make(capsys, copy)
    figures = blocks(copy / "report.html")["figures"]
    out = browse(copy / "report.html", """
        const count = name => $(`polyline.raw[data-name="${name}"]`).getAttribute("points").split(" ").length;
        out.curves = ["reward", "format rate", "mean tokens", "degenerate", "entropy", "sampling"].map(count);
        out.steps = [...$("#step").options].map(option => Number(option.value));
        out.groups = [];
        for (const step of out.steps) {
          choose("#step", step);
          for (let i = 0; i < document.querySelectorAll("#questions button").length; i++) {
            document.querySelectorAll("#questions button")[i].click();
            out.groups.push([step, $("#group img").dataset.figure, $("#group img").src,
              [...document.querySelectorAll("#group .completion")].map(card => card.querySelector(".text").textContent),
              document.querySelectorAll("#group .tokens").length]);
          }
        }
        choose("#filter", "c");
        out.changed = [...$("#step").options].length;
        out.shaded = document.querySelectorAll("#group .token").length;
        $("#shade").click();
        out.unshaded = document.querySelectorAll("#group .token").length;
        const svg = $(".chart svg"), box = svg.getBoundingClientRect();
        svg.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + box.width / 2, clientY: box.top + 9}));
        out.hover = $(".chart .legend").textContent;
        out.answers = document.querySelectorAll(".question").length;
        for (const fold of document.querySelectorAll("details")) fold.open = true;
        out.accuracy = $(".big").textContent;
        """)
    reward = first["reward"]
    assert re.fullmatch(rf"reward {reward:.1%}step 1[3-6]".replace("%", " %"), out["hover"])
    assert out["curves"] == [30] * 6 and out["steps"] == list(range(1, STEPS + 1))
    questions = {row["figure"]: row["question"] for row in lines(copy / "questions.jsonl") if row["split"] == "train"}
    rollouts = lines(copy / "rollouts.jsonl")
    assert len(out["groups"]) == STEPS * 2
    for i, (step, figure, source, texts, _) in enumerate(out["groups"]):
        group = rollouts[i * GROUP:(i + 1) * GROUP]
        assert step == group[0]["step"] and questions[figure] == group[0]["question"] and source == figures[figure]
        assert len(texts) == GROUP
    assert sum(group[4] for group in out["groups"]) == STEPS * GROUP == out["changed"] * GROUP
    assert out["shaded"] > GROUP and out["unshaded"] == 0 and out["answers"] == 3
    before, after = (json.loads((copy / "results.json").read_text())[side]["accuracy"]["value"]
                     for side in ("before", "after"))
    assert out["accuracy"].startswith(f"{before:.1%}→{after:.1%}".replace("%", " %"))


def test_hostile_text_on_a_phone(copy):
    path = make_hostile(copy)
    report.write_report(path)
    out = browse(path / "report.html", """
        out.texts = []; out.wide = 0;
        for (const fold of document.querySelectorAll("details")) fold.open = true;
        choose("#step", 1);
        $("#questions button").click();
        for (;;) {
          out.texts.push(...[...document.querySelectorAll("#group .text")].map(node => node.textContent));
          out.wide = Math.max(out.wide, document.documentElement.scrollWidth - innerWidth);
          if ($("[aria-label='next group']").disabled) break;
          $("[aria-label='next group']").click();
        }
        out.title = $("h1").textContent;
        out.elements = document.querySelectorAll("main script, main img:not([data-figure]), header img").length;
        """, width=390)
    assert out["title"] == path.name and out["elements"] == 0 and out["wide"] <= 0
    assert HOSTILE[0] in out["texts"] and HOSTILE[3] in out["texts"]
    assert "␀␇␛[31m⟨009b⟩⟨202e⟩abc␍\n?" in out["texts"]


def test_partial_runs_and_comparisons_in_a_browser(run, copy, capsys):
    make(capsys, run, copy, "--output", copy / "compare.html")
    out = browse(copy / "compare.html", "out.curves = document.querySelectorAll('polyline.raw[data-name$=run]').length")
    assert out["curves"] >= 2 * 10
    for name in ("results.json", "questions.jsonl", f"eval-step-{STEPS}.json", "config.json"):
        (copy / name).unlink()
    make(capsys, copy)
    browse(copy / "report.html", "", width=390)
    for file in ("rollouts.jsonl", "eval-base.json"):
        (copy / file).unlink()
    make(capsys, copy)
    assert browse(copy / "report.html", "out.note = $('.note').textContent")["note"].startswith("Not all of the run")
