"""What a step leaves in the logs and metrics: trained tokens alone count, and a question needs no figure."""

import json
import math

import pytest
import torch
from batches import figure
from runs import lines

import grpo
from geoqa import Question
from reward import Reading
from support import logs, metrics


def batch(garbage=0.0):
    """Two groups of two completions; of four tokens, one is not trained and carries `garbage`."""
    rows = []
    for number, image in enumerate((None, figure((20, 20), 0))):
        question = Question(f"q{number}", image, "subject", ("1", "2"), "A", "answer")
        prompt = grpo.Prompt(torch.arange(3), torch.zeros(3, 3), None, question, "downsized" * number)
        for right in (0, 1):
            trained = torch.tensor([True, number == 0, True, True])
            values = torch.where(trained, torch.tensor([-1.0, -2.0, -3.0, -4.0]), garbage)
            row = grpo.Completion(prompt, torch.arange(4), values, -values, trained, finished=bool(right))
            row.text, row.reading, row.rewards = "\\boxed{A}", Reading("A", bool(right)), {"right": right, "short": True}
            row.reward, row.advantage, row.reference_logprobs = float(right * number), values, values - 1
            rows.append(row)
    return grpo.Batch(rows, group_size=2)


def test_untrained_tokens_are_in_no_number():
    first, second = (metrics.batch_metrics(batch(garbage), torch.zeros(2, 2), 2.0) for garbage in (0.0, math.nan))
    first.pop("memory/peak_gib"), second.pop("memory/peak_gib")
    assert first == second
    assert first["rollout/completion_tokens_mean"] == 3.5 and first["rate/tokens_per_second"] == 7
    assert first["rollout/entropy"] == pytest.approx(36 / 14) and first["trainer/base_kl_k1"] == 1
    assert (first["reward"], first["reward/right"], first["reward/short"]) == (0.25, 0.5, 1)
    assert (first["degenerate_fraction"], first["rollout/downsized_figures"]) == (0.5, 1)


def test_a_record_says_what_was_trained_only_where_it_differs():
    records = [logs.rollout_record(5, row) for row in batch(math.nan).rows]
    assert ["trained" in record for record in records] == [False, False, True, True]
    assert (records[0]["length"], records[0]["advantage"]) == (4, -2.5)
    assert (records[3]["length"], records[3]["trained"]) == (3, [1, 0, 1, 1])
    assert records[3]["advantage"] == pytest.approx(-8 / 3)
    assert records[3]["rewards"] == {"right": 1.0, "short": 1.0} and records[3]["right"] and not records[3]["truncated"]
    json.dumps(records, allow_nan=False)
    assert logs.evaluation_record(batch().rows[3])["tokens"] == 3


def test_questions_are_stored_once_with_or_without_a_figure(tmp_path):
    log, questions = logs.Logs(tmp_path), batch().questions
    for split in ("train", "test"):  # an id is unique within a split only
        for question in [*questions, *questions]:
            log.add_question(question, split)
    rows = lines(tmp_path / "questions.jsonl")
    assert [(row["split"], row["question"]) for row in rows] == [
        ("train", "q0"), ("train", "q1"), ("test", "q0"), ("test", "q1")]
    assert [row["figure"] is None for row in rows] == [True, False, True, False]
    (tmp_path / rows[3]["figure"]).unlink()
    again = logs.Logs(tmp_path)
    again.cut_back(0)
    assert again.questions == {("train", "q0"), ("train", "q1"), ("test", "q0")}
    again.add_question(questions[1], "test")
    assert lines(tmp_path / "questions.jsonl") == rows and (tmp_path / rows[3]["figure"]).is_file()
