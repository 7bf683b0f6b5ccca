"""The page of a run: before and after, curves, and every group of completions beside its figure.

    python report.py runs/NAME              # writes runs/NAME/report.html; the run may still be going on
    python report.py runs/A runs/B ...      # writes runs/compare.html: curves over each other, what differs, results

Everything comes from the run directory (see support/rundir.py), also one of an older version. The page is one file that
needs no network: support/report_page.html with the data in it as JSON, which its script only ever shows as text.
`--output FILE` names another place.
"""

import argparse
import base64
import io
import json
import math
import re
import sys
from pathlib import Path

from PIL import Image
from tqdm import tqdm

from support.errors import UserError, describe, printable
from support.evaluation import compare, gain, is_right, results_table, summarize
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
    """Writes `report.html` into a run directory. Never raises: a training must not end because of its page."""
    path = Path(path)
    try:
        write_page(path / "report.html", run_blocks(path)[0])
    except Exception as error:
        tqdm.write(f"note: {path / 'report.html'} was not written: {describe(error)}")


# ---------------------------------------------------------------------------------------------------------- Reading


def read_metrics(path, notes):
    """-> {"step": [...], metric: [a number or None for each step]}"""
    rows = [{OLD_CLIP_FRACTION.sub("trainer/clip_fraction", name): value for name, value in row.items()
             if isinstance(value, NUMBER)} for row in read_lines(path / "metrics.jsonl", notes, METRICS)]
    rows.sort(key=lambda row: row["step"])
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}


def read_evaluations(path, notes):
    """-> [(name, step or None, rows)] in the order of training: eval-base.json is of step 0."""
    evaluations = []
    for file in path.glob("eval-*.json"):
        rows = read_json(file, notes)
        if not isinstance(rows, list) or not rows or not all(fits(row, ANSWER) for row in rows):
            if rows is not None:
                notes.append(f"{file.name} is damaged")
            continue
        name = file.stem[5:]
        step = re.fullmatch(r"step-(\d{1,15})", name)
        evaluations.append((name, int(step[1]) if step else 0 if name in ("base", "adapter") else None, rows))
    return sorted(evaluations, key=lambda each: (each[1] is None, each[1] or 0, each[0]))


def read_results(path, before, after, notes):
    """results.json, or while it is missing the same numbers from the evaluations that are there; None without any."""
    results = read_json(path / "results.json", notes, missing="" if before or after else "is missing")
    try:
        if results is not None:
            results_table(results)  # fails where a number is missing
            return results
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        notes.append("results.json is damaged")
    return compare(before, after) if before or after else None


def question_places(rows):
    """Rows of questions.jsonl -> {id: place in `rows`} of those trained on, and the same of those evaluated.

    Ids are unique within a split only. Runs of older versions did not store the split: there the test questions, which
    are evaluated before training begins, come first.
    """
    trained, evaluated = {}, {}
    for place, row in enumerate(rows):
        if row.get("split") in ("train", None):
            trained[row["question"]] = place
        if row.get("split") != "train":
            evaluated.setdefault(row["question"], place)
    return trained, trained | evaluated  # the evaluation's split may be train


def read_groups(path, group_size, places, notes):
    """rollouts.jsonl -> (one index row a group, {step: its groups as JSON}).

    An index row is [step, place of the question or None, completions right, completions, marks]; see `group_marks`.
    """
    steps = {}
    for row in read_lines(path / "rollouts.jsonl", notes, ROLLOUT):
        groups = steps.setdefault(row["step"], [])
        if not groups or groups[-1][0] != row["question"] or len(groups[-1][1]) == group_size:
            groups.append((row["question"], []))
        groups[-1][1].append(shown_rollout(row))
    index, blocks, seen = [], {}, {}
    for step, groups in sorted(steps.items()):
        for question, rows in groups:
            right = sum(row["right"] for row in rows)
            good = right * 2 >= len(rows)
            index.append([step, places.get(question), right, len(rows), group_marks(rows, good, seen.get(question))])
            seen[question] = good
        blocks[step] = to_json([rows for _, rows in groups])
        groups.clear()  # a long run's rows and their JSON would not fit together
    return thin_out(index, blocks, notes)


def shown_rollout(row):
    """A line of rollouts.jsonl -> what the page shows of it; several rewards only, one alone is `reward`."""
    shown = {name: row[name] for name in ("text", "choice", "reward", "advantage", "length", "truncated")}
    right = row.get("right")
    shown["right"] = row["reward"] > 0 if right is None else right  # older runs had one reward: 1 where it is right
    if len(row.get("rewards") or ()) > 1:
        shown["rewards"] = row["rewards"]
    return shown


def group_marks(rows, good, earlier):
    """Letters: s solved now and l lost now (at least half of the group right, at the question's time before under half;
    and the reverse), d degenerate, t some are truncated. `earlier` is None at the question's first time."""
    marks = "" if earlier in (None, good) else "s" if good else "l"
    return marks + "d" * (len({row["reward"] for row in rows}) == 1) + "t" * any(row["truncated"] for row in rows)


def thin_out(index, blocks, notes):
    """Keeps every Nth step, and the last, of a run that is too long for a page."""
    keep_every = math.ceil(sum(map(len, blocks.values())) * 1.5 / ROLLOUT_BYTES) or 1  # 1.5: Chinese in UTF-8
    if keep_every == 1:
        return index, blocks
    notes.append(f"a long run: of its rollouts every {keep_every}th step is here, all are in rollouts.jsonl")
    kept = {*list(blocks)[::keep_every], max(blocks)}
    return [row for row in index if row[0] in kept], {step: block for step, block in blocks.items() if step in kept}


def read_figures(path, names, notes):
    """Names of figures -> {name: a small data: address} of those that can be read. None outside of figures/ is."""
    names = {name for name in names if name is not None}
    figures = {name: figure_data(path / name) for name in sorted(names) if re.fullmatch(r"figures/[\w-]+\.\w+", name)}
    figures = {name: data for name, data in figures.items() if data}
    unread = len(names) - len(figures)
    if unread:
        notes.append(f"{unread} figure{'s' if unread > 1 else ''} cannot be read")
    return figures


def figure_data(path):
    try:
        with Image.open(path) as image:
            image = image.convert("RGB")
        image.thumbnail((FIGURE_SIZE, FIGURE_SIZE))
        encoded = io.BytesIO()
        image.save(encoded, "WEBP", quality=50, method=2)  # a third faster than the default, hardly larger
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    return f"data:image/webp;base64,{base64.b64encode(encoded.getvalue()).decode('ascii')}"


# ---------------------------------------------------------------------------------------------------------- Pages


def read_run(path):
    """What both pages show of a run -> (JSON values, (rows before, rows after)). Raises UserError where it is none."""
    if not path.is_dir():
        raise UserError(f"{path} is not a folder")
    notes = []
    config = read_json(path / "config.json", notes)
    metrics = read_metrics(path, notes)
    evaluations = read_evaluations(path, notes)
    before = next((rows for _, step, rows in evaluations if step == 0), None)
    after = next((rows for _, step, rows in reversed(evaluations) if step), None)
    if not isinstance(config, dict):
        config = {}
    if config.get("eval_only") and config.get("adapter"):
        before, after = None, before
    results = read_results(path, before, after, notes)
    if not (config or metrics or evaluations or results or notes[:1] != ["config.json is missing"]):
        raise UserError(f"{path} is no run directory: config.json, metrics.jsonl, eval-*.json and results.json are "
                        "missing or damaged")
    for side, rows, name in (("before", before, "eval-base.json"), ("after", after, "eval-step-N.json")):
        if results and results[side] and not rows:
            notes.append(f"{name} is missing: no answers {side} training to show")
    return {"name": path.resolve().name, "notes": notes, "config": config, "metrics": metrics, "results": results,
            "evaluations": [{"name": name, "step": step, **summarize(rows)} for name, step, rows in evaluations]}, (
                before, after)


def run_blocks(path):
    """A run directory -> (the JSON blocks of its page by id, notes on what is missing). Raises UserError."""
    path = Path(path)
    run, (before, after) = read_run(path)
    notes = run["notes"]
    questions = list(read_lines(path / "questions.jsonl", notes, QUESTION))
    trained, evaluated = question_places(questions)
    index, blocks = read_groups(path, run["config"].get("group_size"), trained, notes)
    answers = {side: [{**{name: row.get(name) for name in ANSWER}, "right": is_right(row),
                       "place": evaluated.get(row["question"])} for row in rows or []]
               for side, rows in (("before", before), ("after", after))}
    used = {row[1] for row in index} | {row["place"] for rows in answers.values() for row in rows}
    questions = {place: row for place, row in enumerate(questions) if place in used}
    figures = read_figures(path, (row.get("figure") for row in questions.values()), notes)
    data = run | {"gain": gain(before, after), "groups": index, "questions": questions}
    return {"data": to_json(data), "figures": to_json(figures), "answers": to_json(answers),
            **{f"step-{step}": block for step, block in blocks.items()}}, notes


def compare_blocks(paths):
    """Run directories -> (the JSON blocks of a page that compares them, notes). Raises UserError."""
    loaded = [read_run(Path(path)) for path in paths]
    runs = [run for run, _ in loaded]
    if len({run["name"] for run in runs}) < len(runs):
        for run, path in zip(runs, paths):
            run["name"] = str(path)
    flat = []
    for run in runs:
        settings = {key: value for key, value in run["config"].items() if key != "experiment_name"}  # the folder's name
        versions = settings.pop("versions", None)
        versions = versions if isinstance(versions, dict) else {}
        flat.append(settings | {f"version of {name}": version for name, version in versions.items()})
    names = dict.fromkeys(key for settings in flat for key in settings)
    differing = [[name, *(settings.get(name) for settings in flat)] for name in names
                 if any(settings.get(name) != flat[0].get(name) for settings in flat)]
    last = [after or before for _, (before, after) in loaded]
    for run, rows in zip(runs, last):
        run["against_first"] = None if rows is last[0] else gain(last[0], rows)
    notes = [f"{run['name']}: {note}" for run in runs for note in run["notes"]]
    return {"data": to_json({"runs": runs, "differing": differing, "notes": notes})}, notes


def to_json(value):
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def write_page(path, blocks):
    """Puts the blocks into the template. No `<` in them: nothing there can end its block or begin another."""
    blocks = {name: block.replace("<", "\\u003c") for name, block in blocks.items()}
    parts = "\n".join(f'<script type="application/json" id="json-{name}">{block}</script>'
                      for name, block in blocks.items())
    page = TEMPLATE.read_text(encoding="utf-8").replace("<!-- data -->", parts, 1)
    write_whole(path, page.encode("utf-8", errors="replace"))  # a lone surrogate becomes ?


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR", type=Path)
    parser.add_argument("--output", metavar="FILE", type=Path)
    arguments = parser.parse_args(argv)
    runs = arguments.runs
    try:
        blocks, notes = run_blocks(runs[0]) if len(runs) == 1 else compare_blocks(runs)
        output = arguments.output or (runs[0] / "report.html" if len(runs) == 1 else runs[0].parent / "compare.html")
        try:
            write_page(output, blocks)
        except OSError as error:
            raise UserError(f"{output} cannot be written: {error.strerror}") from error
    except UserError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        sys.exit(2)
    if notes:
        print(f"note: {printable('; '.join(notes))}", file=sys.stderr)
    print(output)


if __name__ == "__main__":
    main()
