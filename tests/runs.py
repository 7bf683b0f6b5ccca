"""What tests of whole runs share: a small data set on disk, flags for a tiny policy, and reading what a run wrote.

Random policies never write a box, so TASK rewards an answer with many bytes of ASCII: rewards then differ within groups,
and every step trains.
"""

import dataclasses
import functools
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
from batches import figure

import grpo
from support.command_line import run_command_line

NOISY = ("time/", "rate/", "memory/")


def png(image, **options):
    encoded = io.BytesIO()
    image.save(encoded, options.pop("format", "PNG"), **options)
    return encoded.getvalue()


def question_row(number, **changes):
    return {"id": f"q{number}", "image": {"bytes": png(figure((70, 64), number)), "path": None},
            "subject": f"求角{number}的度数", "choices": ["1", "2", "3", "4"], "label": number % 4, "answer": "解"} | changes


def make_data_set(folder, rows=None):
    """Writes train.parquet and test.parquet into `folder`, of seven and three questions unless `rows` are given."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, numbers in (("train", range(7)), ("test", range(10, 13))):
        table = pa.Table.from_pylist(rows or [question_row(number) for number in numbers])
        pq.write_table(table, folder / f"{split}.parquet")
    return folder


def flags(policy, data, output, **changes):
    """Flags of a small training, as `grpo.py` takes them."""
    values = {"base_model": policy, "dataset": data, "output_dir": output, "device": "cpu", "steps": 6, "batch_size": 2,
              "group_size": 4, "max_tokens": 6, "lora_rank": 4, "learning_rate": 5e-2, "experiment_name": "run",
              "tokens_per_micro_batch": 1000}  # a group in one micro-batch
    return [part for name, value in (values | changes).items() for part in (f"--{name.replace('_', '-')}", str(value))]


TASK = dataclasses.replace(grpo.GEOQA, rewards={
    "right": lambda answer, question: sum(c.isascii() for c in answer.text) > len(answer.text) / 2})


def command(arguments, task=TASK):
    """Runs the command line in this process -> exit code."""
    try:
        run_command_line(grpo.Config, functools.partial(grpo.main, task=task), arguments)
    except SystemExit as stop:
        return stop.code
    return 0


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def result(run, step):
    """All that a run must repeat bit for bit: metrics but for times, rates and memory, logs, adapter and optimiser."""
    metrics = [{k: v for k, v in row.items() if not k.startswith(NOISY)} for row in lines(run / "metrics.jsonl")]
    assert [row["step"] for row in metrics] == list(range(1, step + 1))
    files = [f"step-{step}/adapter_model.safetensors", f"step-{step}/optimizer.safetensors", "rollouts.jsonl",
             "questions.jsonl"] + [str(path.relative_to(run)) for path in run.glob("eval-*.json")]
    figures = [(path.name, path.read_bytes()) for path in sorted((run / "figures").iterdir())]
    return metrics, {name: (run / name).read_bytes() for name in files}, figures
