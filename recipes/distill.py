"""Distillation on the same core: a teacher's log-probabilities in place of a reward (chapters 2 and 4 of the series).

    python -m recipes.distill                                  # opsd: the teacher is the base, which reads the solution
    python -m recipes.distill --teacher-model OTHER/MODEL      # opd: the teacher is another model of the same tokenizer

The policy draws its own answers; the advantage of a token is teacher logp - sampled logp, so its expectation is minus
the reverse KL divergence KL(policy || teacher) of that token (on-policy distillation). No group is compared and none is
skipped. Rewards are drawn along and logged; they do not train.
"""

import contextlib
import dataclasses
from dataclasses import dataclass

import torch

import grpo
from support.command_line import run_command_line
from support.errors import UserError
from support.models import load_base
from support.run_settings import flag


@dataclass
class DistillConfig(grpo.Config):
    teacher_model: str = flag("", "another model as the teacher; empty: the base that reads the solution",
                              section="model")


def load_teacher(policy, config, task=grpo.GEOQA):
    """-> teacher(batch), which sets each row's advantage (T,) and gives the reverse KL as a metric."""
    model = policy
    if config.teacher_model:
        model = grpo.Policy(*load_base(config.teacher_model, policy.device, config.quantization, config.fused_kernels))
        if model.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
            raise UserError(f"--teacher-model {config.teacher_model} has another tokenizer than {config.base_model}")

    def teacher(batch):
        prompts = grpo.encode_prompts(model, batch.questions, task, config.max_image_tokens,
                                      with_solution=not config.teacher_model)
        rows = [dataclasses.replace(row, prompt=prompts[i // batch.group_size]) for i, row in enumerate(batch.rows)]
        with contextlib.nullcontext() if config.teacher_model else policy.model.disable_adapter():
            logprobs = grpo.frozen_logprobs(model, rows, config)
        for row, teacher_logprobs in zip(batch.rows, logprobs):
            row.advantage = teacher_logprobs - row.logprobs
        away = torch.cat([-row.advantage[row.trained] for row in batch.rows])
        return {"opd/reverse_kl_mean": away.mean().item()}

    return teacher


def with_solutions(task):
    """The task, which refuses training questions without a worked solution."""
    def load(config, split):
        questions = task.load(config, split)
        unsolved = [question.id for question in questions if not question.answer.strip()] if split == "train" else []
        if unsolved and not config.teacher_model:
            raise UserError(f"{len(unsolved)} questions have no worked solution (column answer) for the teacher to read, "
                            f"the first is {unsolved[0]}")
        return questions

    return dataclasses.replace(task, load=load)


def main(config):
    for name in ("dynamic_sampling", "overlong_penalty"):
        if getattr(config, name):
            raise UserError(f"--{name.replace('_', '-')} shapes rewards, which distillation does not use")
    return grpo.main(config, with_solutions(grpo.GEOQA), load_teacher)


if __name__ == "__main__":
    run_command_line(DistillConfig, main)
