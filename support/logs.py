"""Writing a run's files, those that grow above all: metrics, rollouts, evaluations, questions with their figures."""

import contextlib
import json
import os

import torch
from safetensors import SafetensorError

from support.errors import UserError, describe, printable
from support.files import parse, sync, write_whole
from vision_tokens import on_white


@contextlib.contextmanager
def writing(path):
    """Turns a full disk or a missing permission into a UserError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or describe(error)
        raise UserError(f"{path} cannot be written: {reason}; checkpoints already there are good") from error


def write_json(path, value):
    with writing(path):
        write_whole(path, (json.dumps(value, ensure_ascii=False, indent=1, allow_nan=False) + "\n").encode("utf-8"))


class Logs:
    """Appends to the JSON-lines files of a run's folder. A run can be read while it goes on."""

    def __init__(self, path):
        self.path = path
        self.questions = set()  # (split, id) of those in questions.jsonl

    def append(self, name, rows):
        with writing(self.path / name), open(self.path / name, "a", encoding="utf-8") as file:
            file.writelines(map(json_line, rows))

    def add_question(self, question, split):
        """Writes question and figure, at the question's first use."""
        key = split, question.id  # ids are unique within a split, not across
        if key in self.questions:
            return
        figure = None if question.image is None else f"figures/{len(self.questions) + 1:05d}.png"
        if figure:
            with writing(self.path / figure):
                (self.path / "figures").mkdir(exist_ok=True)
                on_white(question.image).save(self.path / figure)
        self.append("questions.jsonl", [{
            "question": question.id, "split": split, "figure": figure, "subject": question.subject,
            "choices": list(question.choices or ()), "label": question.label, "answer": question.answer}])
        self.questions.add(key)

    def sync(self):
        """Forces everything to the disk: where a checkpoint survives a power failure, its logs must too."""
        with writing(self.path):
            for file in (*self.path.glob("*.jsonl"), *self.path.glob("figures/*.png")):
                sync(file)  # at no cost where it is there already

    def cut_back(self, step):
        """Takes the files back to what they were after `step`."""
        for log in ("metrics.jsonl", "rollouts.jsonl"):
            cut_lines(self.path / log, lambda row: row["step"] <= step)
        cut_lines(self.path / "evaluations.jsonl", lambda row: row["step"] <= step and (
            self.path / f"eval-{row['evaluation']}.json").is_file())  # without its answers it is made again
        cut_lines(self.path / "questions.jsonl", self.keep_question)
        for evaluation in self.path.glob("eval-step-*.json"):  # of a checkpoint that is damaged
            if int(evaluation.stem[10:]) > step:
                evaluation.unlink()

    def keep_question(self, row):
        """Whether a stored question has its figure; if so, it is not written again."""
        if row["figure"] and not (self.path / row["figure"]).is_file():
            return False
        self.questions.add((row["split"], row["question"]))
        return True


def cut_lines(path, wanted):
    """Cuts a JSON-lines file before its first line that is torn or not `wanted`. Needs no room on the disk."""
    if not path.exists():
        return
    end = 0
    with open(path, "r+b") as file, contextlib.suppress(ValueError):  # of a torn line
        for line in file:
            if not (line.endswith(b"\n") and wanted(json.loads(line))):
                break
            end += len(line)
    os.truncate(path, end)


def json_line(row):
    """A line of a log. NaN and infinities, which JSON does not have, become null."""
    return json.dumps(parse(json.dumps(row)), ensure_ascii=False) + "\n"


def rollout_record(step, row):
    """A grpo.Completion -> its line in rollouts.jsonl; `trained` is in it only where some token does not train."""
    trained, advantage = row.trained.tolist(), row.advantage
    if torch.is_tensor(advantage):  # (T,)
        advantage = advantage[row.trained].mean().item()
    record = {
        "step": step, "question": row.prompt.question.id, "tokens": row.tokens.tolist(), "text": row.text,
        "choice": row.reading.choice, "right": bool(row.reading.right), "reward": float(row.reward),
        "rewards": {name: float(value) for name, value in row.rewards.items()}, "advantage": float(advantage),
        "length": sum(trained), "truncated": not row.finished}
    return record if all(trained) else record | {"trained": [int(each) for each in trained]}


def evaluation_record(row):
    """A grpo.Completion -> its row in an eval file."""
    question, reading = row.prompt.question, row.reading
    return {"question": question.id, "gold": question.label, "choice": reading.choice, "right": bool(reading.right),
            "lenient_choice": reading.lenient_choice, "lenient_right": bool(reading.lenient_right), "text": row.text,
            "tokens": int(row.trained.sum()), "truncated": not row.finished}


def group_lines(question, records):
    """A question with its right option, and its completions with reward and advantage, a line each."""
    return [printable(f"  question {question.id}, right is {question.label}: {question.subject}"), *(
        f"    reward {record['reward']:.3g} advantage {record['advantage']:+.2f} tokens {record['length']}: "
        f"{printable(record['text'])}" for record in records)]
