"""Distillation: the teacher's log-probabilities give the advantage; the solution stays out of the student's input."""

import dataclasses

import pytest
import torch
from batches import prompts_of, questions
from runs import flags, lines, make_data_set, question_row
from tiny import make_policy_folder

import grpo
from recipes import distill
from support.command_line import run_command_line
from support.errors import UserError
from support.order import Order
from support.padding import rectangle


def solved(answer="因为AB平行于CD，所以选A。"):
    return [dataclasses.replace(q, answer=answer) for q in questions()]


def config_of(**changes):
    return distill.DistillConfig(**{"device": "cpu", "batch_size": 3, "group_size": 4, "max_tokens": 12} | changes)


def drawn(policy, config, asked=None):
    return grpo.draw_batch(policy, Order(asked or solved(), 0), config, grpo.GEOQA)


def naive_logprobs(policy, prompts, batch):
    """A row at a time, without branches."""
    for i, row in enumerate(batch.rows):
        alone = dataclasses.replace(row, prompt=prompts[i // batch.group_size])
        yield grpo.completion_logprobs(policy, [alone], 1.0)[0]


def test_opsd_advantage_is_teacher_minus_student(load):
    policy, config = load(adapter=True), config_of()
    batch = drawn(policy, config)
    metrics = distill.load_teacher(policy, config)(batch, config)
    with_solution = grpo.encode_prompts(policy, solved(), grpo.GEOQA, with_solution=True)
    assert all(len(a.ids) > len(b.ids) for a, b in zip(with_solution, prompts_of(policy, questions())))
    with torch.no_grad(), policy.model.disable_adapter():
        teacher = list(naive_logprobs(policy, with_solution, batch))
    for row, logprobs in zip(batch.rows, teacher, strict=True):
        assert torch.allclose(row.advantage, logprobs - row.logprobs, atol=1e-5) and (row.advantage != 0).all()
    away = torch.cat([row.logprobs - logprobs for row, logprobs in zip(batch.rows, teacher)])
    assert metrics["opd/reverse_kl_mean"] == pytest.approx(away.mean().item(), abs=1e-5)


def test_the_solution_never_enters_the_students_input(load):
    """Two runs whose solutions differ give the student the same inputs, and the teacher others."""
    inputs = []
    for answer in ("甲" * 9, "乙丙" * 7):
        policy, seen, config = load(adapter=True), [], config_of(max_tokens=6)
        projection = policy.base.model.language_model.layers[1].self_attn.q_proj
        policy.base.model.register_forward_pre_hook(
            lambda module, args, kwargs, seen=seen, projection=projection: seen.append(
                (projection.disable_adapters, kwargs["input_ids"].tolist())), with_kwargs=True)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
        metrics, _ = grpo.train_step(policy, optimizer, Order(solved(answer), 0), config, grpo.GEOQA,
                                     distill.load_teacher(policy, config))
        assert metrics["train_datums"] == 12, "something was skipped"
        inputs.append(seen)
    students, teachers = ([[ids for off, ids in seen if off == adapter_off] for seen in inputs]
                          for adapter_off in (False, True))
    assert students[0][0] == students[1][0] and teachers[0] and teachers[0] != teachers[1]
    tokenizer = policy.tokenizer
    for calls, answer in zip(students, ("甲甲甲", "乙丙乙丙"), strict=True):
        assert not any(answer in tokenizer.decode(row) for ids in calls for row in ids)
    assert all("甲甲甲" in tokenizer.decode(row) for ids in teachers[0] for row in ids)


def test_another_model_teaches(load, folders, tmp_path):
    policy, config = load(), config_of(max_tokens=6, teacher_model=str(make_policy_folder(tmp_path, seed=9)))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    metrics, batch = grpo.train_step(policy, optimizer, Order(questions(), 0), config, grpo.GEOQA,
                                     distill.load_teacher(policy, config))
    assert metrics["train_datums"] == 12 and abs(metrics["opd/reverse_kl_mean"]) > 1e-3
    itself = distill.load_teacher(policy, dataclasses.replace(config, teacher_model=str(folders())))
    fresh = drawn(load(), config)
    itself(fresh, config)
    assert rectangle(fresh.rows, "advantage").abs().max() <= 1e-4, "a teacher equal to the student has nothing to teach"


def test_a_teacher_needs_the_same_tokenizer(load, tmp_path):
    from transformers import AutoTokenizer

    folder = make_policy_folder(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(folder)
    with pytest.raises(UserError, match="another tokenizer"):
        distill.load_teacher(load(), config_of(teacher_model=str(folder)))


def run(arguments):
    run_command_line(distill.DistillConfig, distill.main, arguments)


def test_a_run_logs_the_mean_advantage_and_resumes_with_its_own_command(folders, tmp_path, capsys):
    data = make_data_set(tmp_path / "data")
    run(flags(folders(), data, tmp_path, steps=2, save_every=1) + ["--no-evaluate"])
    rows = lines(tmp_path / "run" / "rollouts.jsonl")
    assert len(rows) == 16 and all(row["advantage"] for row in rows)
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    assert all(m["train_datums"] == 8 and m["opd/reverse_kl_mean"] for m in metrics)
    assert "KL" in capsys.readouterr().out


@pytest.mark.parametrize("arguments, message", [
    (["--dynamic-sampling"], "--dynamic-sampling shapes rewards"),
    (["--overlong-penalty"], "--overlong-penalty shapes rewards"),
    ([], "7 questions have no worked solution")])
def test_what_does_not_go_together_is_one_line(folders, tmp_path, arguments, message, capsys):
    rows = [question_row(number, answer="") for number in range(7)]
    data = make_data_set(tmp_path / "data", rows)
    with pytest.raises(SystemExit) as stop:
        run(flags(folders(), data, tmp_path) + arguments)
    printed = capsys.readouterr().err
    assert stop.value.code == 2 and message in printed and printed.count("\n") == 1
