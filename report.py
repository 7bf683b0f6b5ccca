"""The page of a run: before and after, curves, and every group of completions beside its figure.

    python report.py runs/NAME              # writes runs/NAME/report.html; the run may still be going on
    python report.py runs/A runs/B ...      # writes runs/compare.html: curves over each other, what differs, results

Everything comes from the run directory (see rundir.py). The page is one file that needs no network: report_page.html
with the data in it as JSON, which its script only ever shows as text. `--output FILE` names another place.
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

from support.checkpoints import write_whole
from support.errors import UserError, describe, printable
from support.rundir import compare, mcnemar, results_table, summarize

TEMPLATE = Path(__file__).parent / "support" / "report_page.html"
FIGURE_SIZE = 320  # pixels of a figure's longest side in the page
ROLLOUT_BYTES = 14_000_000  # of rollouts in a page; a longer run shows every second step, every third, and so on

NUMBER, ID, LETTER = (int, float), (int, str), (str, type(None))
METRICS = {"step": int}
QUESTION = {"question": ID, "figure": str, "subject": str, "choices": list, "label": str}
ROLLOUT = {"step": int, "question": ID, "text": str, "choice": LETTER, "reward": NUMBER,
           "advantage": (*NUMBER, type(None)), "length": int, "truncated": bool}
ANSWER = {"question": ID, "gold": str, "choice": LETTER, "lenient_choice": LETTER, "text": str, "tokens": int,
          "truncated": bool}


def write_report(path):
    """Writes `report.html` into a run directory. Never raises: a training must not end because of its page."""
    path = Path(path)
    try:
        write_page(path / "report.html", run_blocks(path)[0])
    except Exception as error:
        tqdm.write(f"note: {path / 'report.html'} was not written: {describe(error)}")


# ---------------------------------------------------------------------------------------------------------- Reading


def parse(text):
    """JSON -> its value, NaN and infinities, which browsers do not read, as None. ValueError where it is damaged."""
    try:
        return json.loads(text, parse_constant=lambda name: None, parse_float=finite)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def finite(digits):
    value = float(digits)
    return value if math.isfinite(value) else None  # 1e999


def fits(row, fields):
    return isinstance(row, dict) and all(isinstance(row.get(name), kind) for name, kind in fields.items())


def read_json(path, notes, missing="is missing"):
    """The value of a JSON file, or None and a note."""
    try:
        return parse(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        if missing:
            notes.append(f"{path.name} {missing}")
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} cannot be read ({describe(error)})")


def read_lines(path, fields, notes):
    """Yields the rows of a JSON-lines file that have `fields`; the others, such as a torn last line, are counted."""
    damaged = 0
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    row = parse(line)
                except ValueError:
                    row = None
                damaged += not fits(row, fields)
                if fits(row, fields):
                    yield row
    except FileNotFoundError:
        notes.append(f"{path.name} is missing")
    except OSError as error:
        notes.append(f"{path.name} cannot be read ({describe(error)})")
    if damaged:
        notes.append(f"{path.name}: {damaged} damaged line{'s' if damaged > 1 else ''} left out")


def read_metrics(path, notes):
    """-> {"step": [...], metric: [a number or None for each step]}"""
    rows = sorted(read_lines(path / "metrics.jsonl", METRICS, notes), key=lambda row: row["step"])
    names = dict.fromkeys(name for row in rows for name, value in row.items() if isinstance(value, NUMBER))
    return {name: [row.get(name) if isinstance(row.get(name), NUMBER) else None for row in rows] for name in names}


def read_evaluations(path, notes):
    """-> [(name, step or None, rows)] in the order of training: eval-base.json is of step 0."""
    found = []
    for file in path.glob("eval-*.json"):
        rows = read_json(file, notes)
        if not isinstance(rows, list) or not rows or not all(fits(row, ANSWER) for row in rows):
            if rows is not None:
                notes.append(f"{file.name} is damaged")
            continue
        name = file.stem[5:]
        step = re.fullmatch(r"step-(\d+)", name)
        found.append((name, int(step[1]) if step else 0 if name in ("base", "adapter") else None, rows))
    return sorted(found, key=lambda each: (each[1] is None, each[1] or 0, each[0]))


def read_results(path, before, after, notes):
    """results.json, or while it is missing the same numbers from the evaluations that are there; None without any."""
    results = read_json(path / "results.json", notes, missing="" if before or after else "is missing")
    try:
        if results is not None:
            results_table(results)  # fails where a number is missing
            return results
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        notes.append("results.json is damaged")
    return compare(before, after) if before or after else None


# ---------------------------------------------------------------------------------------------------------- Numbers


def paired(before, after):
    """Rows of two evaluations -> the rows of the questions that both have, in one order."""
    later = {(row["question"], row["gold"]): row for row in after}
    both = [(row, later[row["question"], row["gold"]]) for row in before if (row["question"], row["gold"]) in later]
    return [b for b, _ in both], [a for _, a in both]


def gain(before, after):
    """Rows of two evaluations -> the paired test, and where the gain comes from: the box, or the answer in it."""
    before, after = paired(before, after)
    if not before:
        return None
    pairs = list(zip(before, after))
    gained = [(b, a) for b, a in pairs if b["choice"] != b["gold"] and a["choice"] == a["gold"]]
    lost = [(b, a) for b, a in pairs if b["choice"] == b["gold"] and a["choice"] != a["gold"]]
    return {"n": len(pairs), "gained": len(gained), "lost": len(lost), "mcnemar_p": mcnemar(before, after),
            "gained_box": sum(b["choice"] is None for b, _ in gained),
            "gained_box_only": sum(b["choice"] is None and b["lenient_choice"] == b["gold"] for b, _ in gained),
            "gained_answer": sum(b["choice"] is not None for b, _ in gained),
            "lost_box": sum(a["choice"] is None for _, a in lost),
            "lost_answer": sum(a["choice"] is not None for _, a in lost)}


def read_groups(path, group_size, find, notes):
    """rollouts.jsonl -> (one index row a group, {step: its groups as JSON}).

    An index row is [step, question's figure, completions right, completions, marks]; the marks are letters: s solved
    now and l lost now (at least half of the group right, at the question's time before under half; and the reverse),
    d degenerate, t some are truncated, c token changes are there.
    """
    steps = {}
    for row in read_lines(path / "rollouts.jsonl", ROLLOUT, notes):
        groups = steps.setdefault(row["step"], [])
        if not groups or groups[-1][0]["question"] != row["question"] or len(groups[-1]) == group_size:
            groups.append([])
        changes, texts = row.get("token_changes"), row.get("token_texts")
        kept = {name: row[name] for name in ("question", "choice", "reward", "advantage", "length", "truncated")}
        if (isinstance(changes, list) and isinstance(texts, list) and len(changes) == len(texts)
                and all(isinstance(text, str) for text in texts)):
            kept |= {"changes": [c if isinstance(c, NUMBER) else None for c in changes], "pieces": texts}
        else:
            kept["text"] = row["text"]
        groups[-1].append(kept)
    index, seen, blocks = [], {}, {}
    for step, groups in sorted(steps.items()):
        for group in groups:
            key, rewards = group[0]["question"], [row["reward"] for row in group]
            right = sum(reward > 0 for reward in rewards)
            good, earlier = right * 2 >= len(group), seen.get(key)
            marks = "" if earlier in (None, good) else "s" if good else "l"
            marks += "d" * (len(set(rewards)) == 1) + "t" * any(row["truncated"] for row in group)
            marks += "c" * any("changes" in row for row in group)
            index.append([step, find(key, evaluation=False), right, len(group), marks])
            seen[key] = good
            for row in group:
                del row["question"]
        blocks[step] = to_json(groups)
        groups.clear()
    keep_every = math.ceil(sum(map(len, blocks.values())) * 1.5 / ROLLOUT_BYTES) or 1  # 1.5: Chinese in UTF-8
    if keep_every > 1:
        notes.append(f"a long run: of its rollouts every {keep_every}th step is here, all are in rollouts.jsonl")
        last = max(blocks)
        blocks = {step: block for i, (step, block) in enumerate(blocks.items()) if i % keep_every == 0 or step == last}
        index = [row for row in index if row[0] in blocks]
    return index, blocks


def question_finder(rows):
    """Rows of questions.jsonl -> a function of id and use that gives the figure's name, which is unique, or None.

    Ids are unique within a split only. Runs of older versions did not store the split: there the test questions, which
    are evaluated before training begins, come first.
    """
    train, others = {}, {}
    for row in rows:
        if row.get("split") in ("train", None):
            train[row["question"]] = row["figure"]
        if row.get("split") != "train":
            others.setdefault(row["question"], row["figure"])
    return lambda key, evaluation: (others if evaluation else train).get(key)


def figure_data(path):
    """A figure as a small data: address, or None where it cannot be read."""
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
    notes, config = run["notes"], run["config"]
    questions = {row["figure"]: row for row in read_lines(path / "questions.jsonl", QUESTION, notes)
                 if re.fullmatch(r"figures/[\w-]+\.\w+", row["figure"])}
    find = question_finder(questions.values())
    index, blocks = read_groups(path, config.get("group_size"), find, notes)
    answers = [{**{name: row[name] for name in ANSWER}, "figure": find(row["question"], evaluation=True)}
               for rows in (before, after) for row in rows or []]
    count = len(before or [])
    used = {row[1] for row in index} | {row["figure"] for row in answers}
    figures = {name: figure_data(path / name) for name in questions if name in used}
    unread = sum(data is None for data in figures.values())
    if unread:
        notes.append(f"{unread} figure{'s' if unread > 1 else ''} cannot be read")
    data = run | {"gain": gain(before, after) if before and after else None, "groups": index,
                  "questions": {name: row for name, row in questions.items() if name in used}}
    blocks = {f"step-{step}": block for step, block in blocks.items()}
    return {"data": to_json(data), "figures": to_json(figures),
            "answers": to_json({"before": answers[:count], "after": answers[count:]}), **blocks}, notes


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
        run["against_first"] = gain(last[0], rows) if rows and last[0] and rows is not last[0] else None
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
