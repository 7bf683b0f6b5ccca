"""Distillation on the same core: a teacher's log-probabilities in place of a reward (chapters 2 and 4 of the series).

    python -m recipes.distill                                  # opsd: the teacher is the base, which reads the solution
    python -m recipes.distill --teacher-model OTHER/MODEL      # opd: the teacher is another model of the same tokenizer

The policy draws its own answers. The advantage of a token is teacher logp - sampled logp, so its expectation is minus
the token's reverse KL divergence KL(policy || teacher) (on-policy distillation). Rewards are logged and do not train:
no group is compared and none is skipped.
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
    teacher_model: str = flag("", "the teacher; empty: the base model, which reads the solution", section="model")


def load_solved(config, split):
    """The questions. Raises UserError where the teacher has no worked solution to read for a training question."""
    questions = grpo.GEOQA.load(config, split)
    if split == "train" and not config.teacher_model:
        unsolved = [question.id for question in questions if not question.answer.strip()]
        if unsolved:
            raise UserError(f"{len(unsolved)} questions have no worked solution (column answer), first {unsolved[0]}")
    return questions


TASK = dataclasses.replace(grpo.GEOQA, load=load_solved)


def load_teacher(policy, config):
    """-> teacher(batch, config), which sets each row's advantage (T,) and gives the reverse KL as a metric."""
    model = policy
    if config.teacher_model:
        model = grpo.Policy(*load_base(config.teacher_model, policy.device, config.quantization, config.fused_kernels))
        if model.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
            raise UserError(f"--teacher-model {config.teacher_model} has another tokenizer than {config.base_model}")

    def teacher(batch, config):
        prompts = grpo.encode_prompts(model, batch.questions, TASK, config.max_image_tokens,
                                      with_solution=not config.teacher_model)
        rows = [dataclasses.replace(row, prompt=prompts[i // batch.group_size]) for i, row in enumerate(batch.rows)]
        with contextlib.nullcontext() if config.teacher_model else policy.model.disable_adapter():
            logprobs = grpo.frozen_logprobs(model, rows, config)
        for row, teacher_logprobs in zip(batch.rows, logprobs):
            row.advantage = teacher_logprobs - row.logprobs
        advantages = torch.cat([row.advantage[row.trained] for row in batch.rows])
        return {"opd/reverse_kl_mean": -advantages.mean().item()}

    return teacher


def main(config):
    for name in ("dynamic_sampling", "overlong_penalty"):
        if getattr(config, name):
            raise UserError(f"--{name.replace('_', '-')} shapes rewards, which distillation does not use")
    return grpo.main(config, TASK, load_teacher)


if __name__ == "__main__":
    run_command_line(DistillConfig, main)
