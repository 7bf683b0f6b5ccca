"""The report: its numbers, what it makes of older and damaged runs and of hostile text, and the page in a real browser.

Most runs here are written by hand, as the files of a run are the report's only input; one is a real training. What the
page's script computes is read off the page.
"""

import base64
import html
import json
import re
import shutil
import subprocess

import pytest
from batches import figure
from runs import command, flags, lines, make_data_set

import report
from support.evaluation import compare, mcnemar

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
STEPS, GROUP = 3, 4
LETTERS = {0: "BBBA", 1: "AAAA", 2: ["A", None, "B", "A"]}  # choices of the groups, by step modulo 3; A is right
CURVES = ("format_rate", "degenerate_fraction", "rollout/entropy", "rollout/completion_tokens_mean",
          "rollout/truncated_fraction", "trainer/dlogp_mean", "trainer/grad_norm", "trainer/loss_mean",
          "trainer/clip_fraction", "time/sampling", "time/learning", "time/rest", "memory/peak_gib")
HOSTILE = ["<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>", "</script><!-- <script>",
           "\x00\x07\x1b[31m\x9b\u202eabc\r\n\ud800", "x" * 10_000, "\\boxed{", "${1}`&lt;&amp;", "中" * 5_000]


def dump(path, rows):
    """Rows as JSON lines, or in a .json file as one list."""
    text = json.dumps(rows) if path.suffix == ".json" else "".join(json.dumps(row) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")


def change(path, **changes):
    """Changes fields of each row of a file, or of a table; functions are given the row."""
    rows = json.loads(path.read_text()) if path.suffix == ".json" else lines(path)
    for row in rows if isinstance(rows, list) else [rows]:
        row |= {name: value(row) if callable(value) else value for name, value in changes.items()}
    dump(path, rows)


def rollout(step, question, choice, right, **changes):
    return {"step": step, "question": question, "tokens": [5, 6, 7], "text": f"so \\boxed{{{choice}}}",
            "choice": choice, "right": right, "reward": float(right), "rewards": {"right": float(right)},
            "advantage": right - 0.5, "length": 3, "truncated": False} | changes


def answer(question, choice, gold="A", **changes):
    return {"question": question, "gold": gold, "choice": choice, "right": choice == gold, "lenient_choice": choice,
            "lenient_right": choice == gold, "text": f"so \\boxed{{{choice}}}", "tokens": 9,
            "truncated": False} | changes


def write_run(path, steps=STEPS):
    """A finished run: two groups a step, of questions 0, 1, 2, 0 ...; three evaluation questions have the same ids."""
    (path / "figures").mkdir(parents=True)
    questions, rollouts = [], []
    for split in ("test", "train"):
        for number in range(3):
            name = f"figures/{len(questions) + 1:05d}.png"
            figure((70, 64), len(questions)).convert("RGB").save(path / name)
            questions.append({"question": number, "split": split, "figure": name, "subject": f"求{split}{number}",
                              "choices": ["1", "2", "3", "4"], "label": "A", "answer": "解"})
    for step in range(1, steps + 1):
        for question in ((2 * step - 2) % 3, (2 * step - 1) % 3):
            rollouts += [rollout(step, question, choice, choice == "A") for choice in LETTERS[(step - 1) % 3]]
    before, after = [answer(0, "B"), answer(1, None), answer(2, "A")], [answer(0, "A"), answer(1, "A"), answer(2, "A")]
    (path / "config.json").write_text(json.dumps({
        "base_model": "models/tiny", "dataset": "data/geo", "steps": steps, "batch_size": 2, "group_size": GROUP,
        "loss_fn": "importance_sampling", "experiment_name": path.name, "versions": {"torch": "2"}}))
    dump(path / "metrics.jsonl", [{"step": step, "reward": 0.5, "reward/right": 0.5} | dict.fromkeys(CURVES, 0.1 * step)
                                  for step in range(1, steps + 1)])
    dump(path / "questions.jsonl", questions)
    dump(path / "rollouts.jsonl", rollouts)
    dump(path / "eval-base.json", before)
    dump(path / f"eval-step-{steps}.json", after)
    cost = {"wall_seconds": 90.0, "gpu_hours": None}
    (path / "results.json").write_text(json.dumps(compare(before, after) | {"cost": cost}))
    return path


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run")


def shown(page):
    """The data in a page: what it holds of each run."""
    block, = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(encoding="utf-8"),
                        re.DOTALL)
    runs = json.loads(block)
    for run in runs:
        if "rollouts" in run:
            run["rollouts"] = [dict(zip(run["columns"], row, strict=True)) for row in run["rollouts"]]
    return runs


def make(capsys, *arguments):
    """report.py in this process -> exit code, standard output, standard error."""
    try:
        report.main(list(map(str, arguments)))
        code = 0
    except SystemExit as stop:
        code = stop.code
    return code, *capsys.readouterr()


def page_of(run, capsys):
    """The data of the run's page, which is made without a note."""
    code, out, err = make(capsys, run)
    assert (code, out, err) == (0, f"{run / 'report.html'}\n", "")
    data, = shown(run / "report.html")
    return data


def check_numbers(run, data):
    """The page's numbers are those of the files."""
    metrics, rollouts = lines(run / "metrics.jsonl"), lines(run / "rollouts.jsonl")
    assert data["results"] == json.loads((run / "results.json").read_text()) and data["notes"] == []
    numbers = {name for row in metrics for name, value in row.items() if value is not None}
    assert data["metrics"] == {name: [row.get(name) for row in metrics] for name in numbers}
    assert data["accuracy"] == [[step, data["results"][side]["accuracy"]]
                                for step, side in ((0, "before"), (len(metrics), "after"))]
    for record, row in zip(rollouts, data["rollouts"], strict=True):
        assert {"text", "choice", "right", "reward", "advantage", "length", "truncated"} <= set(row)
        assert row == {name: record[name] for name in row}
    questions = {(row["split"], row["question"]): row for row in data["questions"]}
    assert all(("train", row["question"]) in questions for row in rollouts)
    for name, side in (("eval-base.json", "before"), (f"eval-step-{len(metrics)}.json", "after")):
        for record, row in zip(json.loads((run / name).read_text()), data[side], strict=True):
            assert row == record and questions["test", row["question"]]["label"] == row["gold"]
    assert set(data["figures"]) == {question["figure"] for question in data["questions"]}
    assert all(figure.startswith("data:image/webp;base64,") for figure in data["figures"].values())


def test_numbers_are_those_of_the_files(run, capsys):
    check_numbers(run, page_of(run, capsys))


def test_a_training_leaves_its_page(folders, tmp_path):
    assert command(flags(folders(), make_data_set(tmp_path / "data"), tmp_path, steps=2)) == 0
    data, = shown(tmp_path / "run" / "report.html")
    check_numbers(tmp_path / "run", data)


def test_the_task_decides_what_is_right(run, capsys):
    """Not a comparison of two strings: here 0.50 is right where 1/2 is asked for, and half a reward is wrong."""
    for name, right in (("eval-base.json", False), (f"eval-step-{STEPS}.json", True)):
        change(run / name, gold="1/2", choice="0.50", right=right, lenient_choice="0.50", lenient_right=right)
    (run / "results.json").unlink()
    change(run / "rollouts.jsonl", choice="0.50", right=lambda row: row["step"] == 2, reward=0.5)
    data = page_of(run, capsys)
    assert [data["results"][side][key]["count"] for side in ("before", "after")
            for key in ("accuracy", "lenient_accuracy", "accuracy_given_format")] == [0, 0, 0, 3, 3, 3]
    assert [row["right"] for side in ("before", "after") for row in data[side]] == [False] * 3 + [True] * 3
    assert {row["step"] for row in data["rollouts"] if row["right"]} == {2}


def test_a_long_run_is_thinned_out(run, capsys):
    dump(run / "rollouts.jsonl", [rollout(step, 0, "A", True, text="x" * 300_000) for step in range(1, 41)])
    code, _, err = make(capsys, run)
    kept = [row["step"] for row in shown(run / "report.html")[0]["rollouts"]]
    assert code == 0 and "a long run" in err and 1 < len(kept) < 40 and kept[-1] == 40
    assert (run / "report.html").stat().st_size < 15_000_000


# Damaged runs and hostile text


def test_every_file_may_be_missing_or_damaged(run, capsys):
    names = ["config.json", "metrics.jsonl", "rollouts.jsonl", "questions.jsonl", "results.json", "eval-base.json",
             f"eval-step-{STEPS}.json", "figures/00001.png"]
    for name in names:
        file = run / name
        whole = file.read_bytes()
        for damaged in (None, b"", whole[:len(whole) // 2], b"\xff\x00{", b"null\n", b"[]\n", b"{}\n", b"[" * 100_000,
                        whole.replace(b": 0", b": 1e999").replace(b": 1", b": -1e999"),
                        whole.replace(b": 9", b": " + b"9" * 400).replace(b": 3", b": " + b"3" * 400),
                        whole.replace(b": 1", b": NaN").replace(b'": "', b'": ["x"], "y": "')):
            file.unlink(missing_ok=True)
            if damaged is not None:
                file.write_bytes(damaged)
            code, out, err = make(capsys, run)
            assert code == 0 and out == f"{run / 'report.html'}\n" and err.count("\n") <= 1
            data, = shown(run / "report.html")
            if damaged in (None, b"\xff\x00{", b"null\n") and (name, damaged) != ("results.json", None):  # made from the others
                assert {"figures/00001.png": "1 figure", f"eval-step-{STEPS}.json": "eval-step-"}.get(name, name) in err
            assert len(data["rollouts"]) == STEPS * 2 * GROUP or name == "rollouts.jsonl"
        file.write_bytes(whole)


def test_what_is_no_run_is_one_line(tmp_path, capsys):
    for path in (tmp_path / "none", tmp_path):
        code, out, err = make(capsys, path)
        assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1
        assert f"{path} is no run's folder" in err
    assert make(capsys, tmp_path, tmp_path)[0] == 2
    (tmp_path / "config.json").write_text("{}")
    code, out, err = make(capsys, tmp_path)
    assert code == 0 and "metrics.jsonl is missing; rollouts.jsonl is missing" in err and err.count("\n") == 1
    code, _, err = make(capsys, tmp_path, "--output", tmp_path / "no" / "page.html")
    assert code == 2 and "cannot be written" in err and err.count("\n") == 1


def test_a_training_goes_on_without_its_report(run, tmp_path, capsys):
    report.write_report(tmp_path / "none")
    (run / "report.html").mkdir()
    report.write_report(run)
    printed = capsys.readouterr().out
    assert printed.count("\n") == 2 and "is no run's folder" in printed and "report.html was not written" in printed


def test_a_figure_outside_the_run_is_not_read(run, capsys):
    figure((70, 64), 0).convert("RGB").save(run.parent / "secret.png")
    for name in ("figures/../../secret.png", str(run.parent / "secret.png"), "../secret.png"):
        change(run / "questions.jsonl", figure=name)
        assert make(capsys, run)[0] == 0 and shown(run / "report.html")[0]["figures"] == {}


def make_hostile(run):
    """The same run with text in it that wants out."""
    rows = lines(run / "rollouts.jsonl")
    for i, row in enumerate(rows):
        row |= {"text": HOSTILE[i % len(HOSTILE)], "rewards": {HOSTILE[0]: 1, HOSTILE[3]: HOSTILE[0]}}
    dump(run / "rollouts.jsonl", rows)
    rows = lines(run / "questions.jsonl")
    for i, row in enumerate(rows):
        row |= {"subject": HOSTILE[i % len(HOSTILE)], "choices": HOSTILE[:4], "answer": HOSTILE[i % 5]}
    dump(run / "questions.jsonl", rows)
    for file in run.glob("eval-*.json"):
        rows = json.loads(file.read_text())
        dump(file, [row | {"text": HOSTILE[i], "gold": HOSTILE[i], "choice": HOSTILE[i]} for i, row in enumerate(rows)])
    change(run / "metrics.jsonl", **{HOSTILE[0]: 1.0, "x" * 999: 2, f"reward/{HOSTILE[0]}": 1.0})
    change(run / "config.json", **{"base_model": HOSTILE[0], HOSTILE[1]: HOSTILE[3]})
    return run.rename(run.with_name("<img src=x onerror=hacked=1>"))


def test_no_text_ends_its_block(run):
    path = make_hostile(run)
    report.write_report(path)
    data, = shown(path / "report.html")
    assert data["config"][HOSTILE[1]] == HOSTILE[3]
    assert {HOSTILE[0], HOSTILE[3]} <= {row["text"] for row in data["rollouts"]}
    assert (path / "report.html").read_text(encoding="utf-8").count("<script") == 2


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


def test_the_page_in_a_browser(tmp_path, capsys):
    """Curves have a point for each step; a chosen step and question shows its figure and its completions."""
    run = write_run(tmp_path / "run", steps := 30)  # long enough for smoothed curves
    figures = page_of(run, capsys)["figures"]
    out = browse(run / "report.html", """
        const count = name => $(`polyline.raw[data-name="${name}"]`).getAttribute("points").split(" ").length;
        out.curves = ["reward", "format rate", "mean tokens", "degenerate", "clipped", "sampling"].map(count);
        out.titles = [...document.querySelectorAll(".chart h3")].map(node => node.textContent);
        out.steps = [...$("#step").options].map(option => Number(option.value));
        out.groups = [];
        for (const step of out.steps) {
          choose("#step", step);
          for (let i = 0; i < document.querySelectorAll("#questions button").length; i++) {
            document.querySelectorAll("#questions button")[i].click();
            out.groups.push([step, $("#group img").dataset.figure, $("#group img").src,
              [...document.querySelectorAll("#group .completion")].map(card => card.querySelector(".text").textContent),
              document.querySelectorAll("#group .completion.right").length]);
          }
        }
        choose("#filter", "s");
        out.solved = [...$("#step").options].length;
        const svg = $(".chart svg"), box = svg.getBoundingClientRect();
        svg.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + box.width / 2, clientY: box.top + 9}));
        out.hover = $(".chart .legend").textContent;
        out.answers = document.querySelectorAll(".question").length;
        for (const fold of document.querySelectorAll("details")) fold.open = true;
        out.accuracy = $(".big").textContent;
        """)
    assert re.fullmatch(r"reward 50\.0 %step 1[3-6]", out["hover"])
    assert out["curves"] == [steps] * 6 and out["steps"] == list(range(1, steps + 1))
    assert not any(title.lower().startswith("reward:") for title in out["titles"])  # one reward is the reward itself
    questions = {row["figure"]: row["question"] for row in lines(run / "questions.jsonl") if row["split"] == "train"}
    rollouts = lines(run / "rollouts.jsonl")
    assert len(out["groups"]) == steps * 2
    for i, (step, name, source, texts, right) in enumerate(out["groups"]):
        group = rollouts[i * GROUP:(i + 1) * GROUP]
        assert step == group[0]["step"] and questions[name] == group[0]["question"] and source == figures[name]
        assert texts == [row["text"] for row in group] and right == sum(row["right"] for row in group)
    assert 0 < out["solved"] < steps and out["answers"] == 3
    assert out["accuracy"].startswith("33.3 %→100.0 %")


def test_rewards_and_questions_of_another_task_in_a_browser(run, capsys):
    """Several rewards each have a curve and a place in the facts; a question without a figure is its text alone."""
    change(run / "questions.jsonl", figure=None, choices=[], label="1/2")
    shutil.rmtree(run / "figures")
    change(run / "rollouts.jsonl", rewards=lambda row: {"right": row["reward"], "brevity": -0.25}, right=True,
           choice=None)
    change(run / "metrics.jsonl", **{"reward/brevity": -0.25})
    assert page_of(run, capsys)["figures"] == {}
    out = browse(run / "report.html", """
        out.titles = [...document.querySelectorAll(".chart h3")].map(node => node.textContent);
        out.question = $("#group").firstChild.textContent;
        out.facts = $("#group .completion .facts").textContent;
        out.images = document.querySelectorAll("img").length;
        """)
    assert [title for title in out["titles"] if "eward" in title] == ["Reward", "Reward: brevity", "Reward: right"]
    assert out["images"] == 0 and re.fullmatch(r"求train\dRight answer: 1/2worked solution", out["question"])
    assert re.fullmatch(r"✓reward [01]right [01]brevity -0.25advantage .*", out["facts"])


def test_an_older_run_looks_the_same(run, capsys):
    """Without splits, judged answers and named rewards, with clip shares named after the loss and token changes."""
    look = """
        for (const fold of document.querySelectorAll("details")) fold.open = true;
        for (const button of document.querySelectorAll("#questions button")) {
          button.click();
          (out.groups ??= []).push($("#group").textContent, $("#group img").dataset.figure); }
        out.figures = [...document.images].map(image => image.dataset.figure);
        out.text = $("main").textContent;"""
    page_of(run, capsys)
    new = browse(run / "report.html", look)
    drop = {"rollouts.jsonl": ("right", "rewards"), "questions.jsonl": ("split",), "metrics.jsonl": ("reward/right",),
            "eval-base.json": ("right", "lenient_right"), f"eval-step-{STEPS}.json": ("right", "lenient_right")}
    for name, fields in drop.items():
        rows = lines(run / name) if name.endswith("l") else json.loads((run / name).read_text())
        rows = [{key: value for key, value in row.items() if key not in fields} for row in rows]
        for row in rows:
            if "trainer/clip_fraction" in row:
                row["ppo/clip_fraction"] = row.pop("trainer/clip_fraction")
            if "advantage" in row:
                row |= {"token_changes": [0.1, -0.1, 0.0], "token_texts": ["so", " B", ""]}
        dump(run / name, rows)
    page_of(run, capsys)
    assert browse(run / "report.html", look) == new and len(set(new["figures"])) >= 4


def test_the_gain_is_split_into_box_and_answer(run, capsys):
    choices = [None, None, "B", "B", "A", "A", "A", None], ["A", "B", "A", "A", "B", None, "A", None]
    for name, side, order in (("eval-base.json", choices[0], 1), (f"eval-step-{STEPS}.json", choices[1], -1)):
        dump(run / name, [answer(i, choice, lenient_choice=choice or "A", lenient_right=choice in (None, "A"))
                          for i, choice in enumerate(side)][::order])
    page_of(run, capsys)
    out = browse(run / "report.html", """
        out.verdict = $("#section-result > p").textContent;
        const card = [...document.querySelectorAll(".card")].find(card => card.textContent.startsWith("Is it reason"));
        out.cells = [...card.querySelectorAll("td")].map(cell => cell.textContent);
        out.format = card.querySelector("p").textContent;
        out.tests = [[3, 2], [9, 0], [1, 12], [0, 0], [900, 300]].map(([gained, lost]) => mcnemar(gained, lost));
        """)
    assert out["cells"] == ["1", "1", "0", "2", "1", "+1"]  # gained, lost, net: of the box, of the answer
    assert "Of 8 evaluation questions" in out["verdict"] and "p = 1)" in out["verdict"]
    assert "Of the 1 that are right now and had no box before, 1 had named the right letter" in out["format"]
    wrong, right = answer(0, "B"), answer(0, "A")
    assert out["tests"] == pytest.approx([mcnemar([wrong] * gained + [right] * lost, [right] * gained + [wrong] * lost)
                                          for gained, lost in ((3, 2), (9, 0), (1, 12), (0, 0), (900, 300))])


def test_solved_and_lost_now_compare_with_the_questions_time_before(run, capsys):
    right = {1: [0, 1, 0, 0], 2: [1, 1, 0, 0], 3: [1, 1, 1, 1], 4: [0, 0, 0, 0]}
    dump(run / "rollouts.jsonl", [rollout(step, 0, "A", bool(each), truncated=step == 4)
                                  for step, group in right.items() for each in group])
    page_of(run, capsys)
    out = browse(run / "report.html", """
        out.steps = {};
        for (const mark of "sldt") {
          choose("#filter", mark);
          out.steps[mark] = [...$("#step").options].map(option => Number(option.value)); }
        choose("#filter", "");
        out.right = [];
        for (const step of [1, 2, 3, 4]) {
          choose("#step", step);
          out.right.push($("#questions").textContent); }
        """)
    assert out["steps"] == {"s": [2], "l": [4], "d": [3, 4], "t": [4]}
    assert out["right"] == ["0 · 1/4", "0 · 2/4", "0 · 4/4", "0 · 0/4"]


def test_hostile_text_on_a_phone(run):
    path = make_hostile(run)
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


def test_headings_on_a_phone_are_not_under_the_navigation(run, capsys):
    page_of(run, capsys)
    out = browse(run / "report.html", """
        out.lines = Math.round($("nav").offsetHeight / 24);
        out.covered = [...document.querySelectorAll("nav a")].map(link => {
          const heading = $(link.getAttribute("href"));
          heading.scrollIntoView();
          return $("nav").getBoundingClientRect().bottom - heading.getBoundingClientRect().top; });
        """, width=320)
    assert out["lines"] > 1 and len(out["covered"]) == 5 and max(out["covered"]) <= 0


def test_comparing_runs_in_a_browser(run, tmp_path, capsys):
    copy = shutil.copytree(run, tmp_path / "copy" / "run")
    change(copy / "config.json", loss_fn="mine")
    (copy / "results.json").unlink()
    code, out, err = make(capsys, run, copy, "--output", copy / "compare.html")
    assert code == 0 and out == f"{copy / 'compare.html'}\n" and err == ""
    out = browse(copy / "compare.html", """
        out.curves = document.querySelectorAll("polyline.raw[data-name$=run]").length;
        const cells = row => [...row.children].map(cell => cell.textContent);
        const rows = id => [...document.querySelectorAll(`#section-${id} tr`)].map(cells);
        [out.results, out.settings] = [rows("result"), rows("settings")];""")
    assert out["curves"] >= 2 * 10
    names = [str(run), str(copy)]  # folders of one name
    assert out["settings"] == [["", *names], ["loss_fn", "importance_sampling", "mine"]]
    results = {name: cells for name, *cells in out["results"]}
    assert results[""] == names and results["accuracy, at the end"][0] == results["accuracy, at the end"][1]
    paired, = (cells for name, cells in results.items() if "McNemar" in name)
    assert paired == ["–", "0 / 0, p = 1"]


def test_partial_runs_in_a_browser(run, capsys):
    for name in ("results.json", "questions.jsonl", f"eval-step-{STEPS}.json", "config.json"):
        (run / name).unlink()
    make(capsys, run)
    browse(run / "report.html", "", width=390)
    for file in ("rollouts.jsonl", "eval-base.json"):
        (run / file).unlink()
    make(capsys, run)
    assert browse(run / "report.html", "out.note = $('.note').textContent")["note"].startswith("Not all of the run")
