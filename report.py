"""The page of a run: before and after, curves, and every group of completions beside its figure.

    python report.py runs/NAME              # writes runs/NAME/report.html; the run may still be going on
    python report.py runs/A runs/B ...      # writes runs/compare.html: curves over each other, what differs, results

Everything comes from the run's folder (see support/rundir.py), also one of an older version. What is damaged is left
out and noted; the rest goes as JSON into support/report_page.html, whose script groups, compares and draws it, and
shows it as text only. The page is one file that needs no network. `--output FILE` names another place.
"""

import argparse
import base64
import contextlib
import io
import json
import math
import re
import sys
from pathlib import Path

from PIL import Image
from tqdm import tqdm

from support.errors import UserError, describe, printable
from support.evaluation import is_right, summarize
from support.files import fits, read_json, read_lines, write_whole

TEMPLATE = Path(__file__).parent / "support" / "report_page.html"
FIGURE_SIZE = 320  # pixels of a figure's longest side in the page
ROLLOUT_BYTES = 14_000_000  # of rollouts in a page; a longer run shows every second step, every third, and so on
OLD_CLIP_FRACTION = re.compile(r"(ppo/|cispo/|gspo/sequence_)clip_fraction")  # trainer/clip_fraction in older runs

NONE = type(None)
NUMBER, ID, TEXT = (int, float), (int, str), (str, NONE)
METRICS = {"step": int}
QUESTION = {"question": ID, "split": TEXT, "figure": TEXT, "subject": str, "choices": list, "label": str}
ROLLOUT = {"step": int, "question": ID, "text": str, "choice": TEXT, "right": (bool, NONE), "reward": NUMBER,
           "rewards": (dict, NONE), "advantage": (*NUMBER, NONE), "length": int, "truncated": bool}
ANSWER = {"question": ID, "gold": str, "choice": TEXT, "right": (bool, NONE), "lenient_choice": TEXT,
          "lenient_right": (bool, NONE), "text": str, "tokens": int, "truncated": bool}


def write_report(path):
    """Writes `report.html` into a run's folder. Never raises: a training must not end because of its page."""
    page = Path(path) / "report.html"
    try:
        write_page(page, [read_whole_run(Path(path))])
    except Exception as error:
        tqdm.write(f"note: {page} was not written: {describe(error)}")


def read_metrics(path, notes):
    """-> {"step": [...], metric: [a number or None for each step]}"""
    rows = [{OLD_CLIP_FRACTION.sub("trainer/clip_fraction", name): value for name, value in row.items()
             if isinstance(value, NUMBER)} for row in read_lines(path / "metrics.jsonl", notes, METRICS)]
    rows.sort(key=lambda row: row["step"])
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}


def read_evaluations(path, notes):
    """-> {step: its answers}, by step. Evaluations before training, of the base or of an adapter, are of step 0."""
    evaluations = {}
    for file in path.glob("eval-*.json"):
        name = re.fullmatch(r"eval-(base|adapter|step-(\d{1,15}))", file.stem)
        rows = name and read_json(file, notes, list)
        if rows and all(fits(row, ANSWER) for row in rows):
            evaluations[int(name[2] or 0)] = [
                {key: row.get(key) for key in ANSWER}
                | {"right": is_right(row), "lenient_right": is_right(row, lenient=True)} for row in rows]
        elif rows is not None:
            notes.append(f"{file.name} is damaged")
    return dict(sorted(evaluations.items()))


def read_rollouts(path, notes):
    """-> the rows of rollouts.jsonl, by step; of a run that is too long for a page only every Nth step and the last."""
    rows = [{name: row.get(name) for name in ROLLOUT} for row in read_lines(path / "rollouts.jsonl", notes, ROLLOUT)]
    rows.sort(key=lambda row: row["step"])
    characters = sum(len(to_json(list(row.values()))) for row in rows)
    every = math.ceil(characters * 1.5 / ROLLOUT_BYTES)  # Chinese has three bytes a character, the rest has one
    if every <= 1:
        return rows
    notes.append(f"a long run: the rollouts of one step in {every} are here, all are in rollouts.jsonl")
    steps = list(dict.fromkeys(row["step"] for row in rows))
    kept = {*steps[::every], steps[-1]}
    return [row for row in rows if row["step"] in kept]


def read_figures(path, questions, notes):
    """The figures of rows of questions.jsonl -> {name: a small data: address}. None outside of figures/ is read."""
    names, figures = {row.get("figure") for row in questions} - {None}, {}
    for name in sorted(names):
        with contextlib.suppress(OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            if re.fullmatch(r"figures/[\w-]+\.\w+", name):
                figures[name] = figure_data(path / name)
    if unread := len(names) - len(figures):
        notes.append(f"{unread} figure{'s' if unread > 1 else ''} cannot be read")
    return figures


def figure_data(path):
    with Image.open(path) as image:
        image = image.convert("RGB")
    image.thumbnail((FIGURE_SIZE, FIGURE_SIZE))
    encoded = io.BytesIO()
    image.save(encoded, "WEBP", quality=50, method=2)  # a third faster than the default, hardly larger
    return f"data:image/webp;base64,{base64.b64encode(encoded.getvalue()).decode('ascii')}"


def read_run(path):
    """What the page of one run and a comparison both show -> JSON values. Raises UserError where there is no run."""
    if not any((path / name).exists() for name in ("config.json", "metrics.jsonl", "results.json")):
        raise UserError(f"{path} is no run's folder: config.json, metrics.jsonl and results.json are missing")
    notes = []
    config = read_json(path / "config.json", notes, dict) or {}
    metrics = read_metrics(path, notes)
    evaluations = read_evaluations(path, notes)
    last = max(evaluations, default=0)
    before, after = evaluations.get(0, []), evaluations[last] if last else []
    if config.get("eval_only") and config.get("adapter"):
        before, after = [], before
    results = {side: summarize(rows) for side, rows in (("before", before), ("after", after)) if rows}
    if (path / "results.json").exists():  # a run writes it last
        results |= read_json(path / "results.json", notes, dict) or {}
    for side, rows, name in (("before", before, "eval-base.json"), ("after", after, "eval-step-N.json")):
        if results.get(side) and not rows:
            notes.append(f"{name} is missing: no answers {side} training to show")
    return {"name": path.resolve().name, "path": str(path), "notes": notes, "config": config, "metrics": metrics,
            "results": results, "before": before, "after": after,
            "accuracy": [[step, summarize(rows)["accuracy"]] for step, rows in evaluations.items()]}


def read_whole_run(path):
    """`read_run` with rollouts, and with the questions and figures that they or the answers belong to."""
    run = read_run(path)
    rollouts = read_rollouts(path, run["notes"])
    used = {row["question"] for rows in (rollouts, run["before"], run["after"]) for row in rows}
    questions = [row for row in read_lines(path / "questions.jsonl", run["notes"], QUESTION) if row["question"] in used]
    return run | {"questions": questions, "figures": read_figures(path, questions, run["notes"]),
                  "columns": list(ROLLOUT), "rollouts": [list(row.values()) for row in rollouts]}


def read_runs(paths):
    """What a comparison shows of runs: no rollouts, and of the answers only whether they are right."""
    runs = [read_run(path) for path in paths]
    return [run | {side: [{name: row[name] for name in ("question", "gold", "right")} for row in run[side]]
                   for side in ("before", "after")} for run in runs]


def to_json(value):
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def write_page(path, runs):
    """Writes the page of one whole run, or of several to compare. UserError where `path` cannot be written."""
    data = to_json(runs).replace("<", "\\u003c")  # so that nothing in it can end its block or begin another
    block = f'<script type="application/json" id="data">{data}</script>'
    page = TEMPLATE.read_text(encoding="utf-8").replace("<!-- data -->", block, 1)
    try:
        write_whole(path, page.encode("utf-8", errors="replace"))  # a lone surrogate becomes ?
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR", type=Path)
    parser.add_argument("--output", metavar="FILE", type=Path)
    arguments = parser.parse_args(argv)
    first, *others = arguments.runs
    output = arguments.output or (first.parent / "compare.html" if others else first / "report.html")
    try:
        runs = read_runs(arguments.runs) if others else [read_whole_run(first)]
        write_page(output, runs)
    except UserError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        sys.exit(2)
    for run in runs:
        if run["notes"]:
            print(f"note: {printable(run['name'])}: {printable('; '.join(run['notes']))}", file=sys.stderr)
    print(output)


if __name__ == "__main__":
    main()
