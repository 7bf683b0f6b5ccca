"""The command line: flags -> a checked config. What is wrong is told in one line, with exit code 2."""

import argparse
import dataclasses
import inspect
import math
import signal
import sys
from pathlib import Path

import torch
import transformers
from packaging.version import Version

from support.checkpoints import resumed_config
from support.errors import UserError, printable
from support.trackers import check_tracker


def check_config(config, losses):
    """Raises UserError, naming the flag, for a value with which no run makes sense. `losses` is grpo.LOSS_FNS."""
    if Version(transformers.__version__) < Version("5.24"):
        raise UserError(f"transformers {transformers.__version__} is too old, 5.24 is needed: older ones give wrong "
                        "numbers for padded batches without any error; pip install -U -r requirements.txt")
    for name in ("batch_size", "max_tokens", "lora_rank", "eval_batch_size", "steps", "minibatches",
                 "updates_per_rollout", "max_candidate_multiplier"):
        if getattr(config, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(config, name)}")
    for name in ("max_samples", "tokens_per_micro_batch", "rollouts_at_once", "max_image_tokens", "test_size",
                 "save_every", "keep_checkpoints", "max_grad_norm", "learning_rate", "eval_temperature", "kl_coef",
                 "overlong_cache", "distill_coef", "seed", "electricity_price", "log_token_changes"):
        if not 0 <= getattr(config, name) < math.inf:
            raise UserError(f"--{name.replace('_', '-')} must be 0 or more, not {getattr(config, name)}")
    for name in ("clip_low", "clip_high"):
        if getattr(config, name) is not None and not 0 <= getattr(config, name) < math.inf:
            raise UserError(f"--{name.replace('_', '-')} must be 0 or more, not {getattr(config, name)}")
    if config.adapter and not (Path(config.adapter) / "adapter_model.safetensors").is_file():
        raise UserError(f"--adapter {config.adapter}: no adapter_model.safetensors there")
    if not 0 < config.top_p <= 1:
        raise UserError(f"--top-p must be above 0 and at most 1, not {config.top_p}")
    if config.eval_only and not config.evaluate:
        raise UserError("--eval-only and --no-evaluate leave nothing to do")
    if not config.eval_only:
        if config.group_size < 2:
            raise UserError(f"--group-size must be at least 2, not {config.group_size}: the advantage compares a "
                            "completion with the others of its group")
        if not 0 < config.temperature < math.inf:
            raise UserError(f"--temperature must be above 0 in training, not {config.temperature}: a group of equal "
                            "completions teaches nothing")
        if config.top_p < 1:
            raise UserError("--top-p below 1 is for --eval-only: training needs the probabilities of the full softmax")
    if config.loss_fn not in losses:
        raise UserError(f"--loss-fn {config.loss_fn} is none of {', '.join(losses)}; a loss of your own is known to "
                        "the program that adds it")
    for bound in ("low", "high"):
        if getattr(config, f"clip_{bound}") is not None and bound not in inspect.signature(
                losses[config.loss_fn]).parameters:
            raise UserError(f"--clip-{bound}: --loss-fn {config.loss_fn} has no such bound")
    if config.loss_fn == "gspo" and config.loss_reduction not in ("auto", "sequence"):
        raise UserError(f"--loss-reduction {config.loss_reduction}: gspo is a loss of whole sequences, it needs "
                        "sequence")
    if config.overlong_penalty and (config.overlong_cache > config.max_tokens or config.max_tokens < 4):
        raise UserError(f"--overlong-cache {config.overlong_cache} does not fit into --max-tokens {config.max_tokens}")
    if config.advantage != "reward":
        for name in ("dynamic_sampling", "overlong_penalty", "normalize_std"):
            if getattr(config, name):
                raise UserError(f"--{name.replace('_', '-')} shapes rewards, which --advantage {config.advantage} "
                                "does not use")
    if config.resume and config.eval_only:
        raise UserError("--resume continues a training: --eval-only goes with --adapter RUN/step-N")
    if (config.advantage == "opd") != bool(config.teacher_model):
        raise UserError("--advantage opd and --teacher-model go together")
    check_tracker(config)


def check_solutions(questions):
    """Raises UserError where a question has no worked solution, which the teacher of --advantage opsd reads."""
    unsolved = [question.id for question in questions if not question.answer.strip()]
    if unsolved:
        raise UserError(f"--advantage opsd: {len(unsolved)} questions have no worked solution (column answer), the "
                        f"first is {unsolved[0]}")


DAPO = {"loss_fn": "ppo", "clip_low": 0.2, "clip_high": 0.28, "loss_reduction": "token", "normalize_std": True,
        "overlong_penalty": True, "dynamic_sampling": True}  # arXiv 2503.14476


def with_preset(config):
    """A copy of `config`, with the flags of `--algorithm dapo` where they were at their default; prints which."""
    if config.algorithm == "grpo" or config.resume:  # the settings of a run that is resumed have them already
        return dataclasses.replace(config)
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    changes = {name: value for name, value in DAPO.items() if getattr(config, name) == defaults[name]}
    if config.loss_fn not in (defaults["loss_fn"], "ppo"):  # 0.2 and 0.28 mean something else in another formula
        changes = {name: value for name, value in changes.items() if not name.startswith("clip_")}
    print(f"--algorithm dapo sets {', '.join(f'{name} {value}' for name, value in changes.items())}")
    return dataclasses.replace(config, **changes)


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The program's description as it is written, and the default of each flag."""


class OneLineParser(transformers.HfArgumentParser):
    """The dataclass is the command line. A wrong flag is one line and exit code 2."""

    def error(self, message):
        print(f"error: {printable(message)} (--help lists the flags)", file=sys.stderr)
        sys.exit(2)


def run_command_line(config_class, action, argv=None):
    """Parses the flags into `config_class` and calls `action(config)`; a UserError becomes one line and exit code 2."""
    parser = OneLineParser(config_class, allow_abbrev=False, description=sys.modules[config_class.__module__].__doc__,
                           formatter_class=HelpFormatter)
    config, unknown = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True, look_for_args_file=False)
    if unknown:
        parser.error(f"unknown {'flag' if unknown[0].startswith('-') else 'word'} {unknown[0]}")
    try:
        action(resumed_config(config, given_flags(parser, config, argv)) if config.resume else config)
    except UserError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        sys.exit(2)
    except torch.OutOfMemoryError:
        print("error: out of GPU memory: lower --tokens-per-micro-batch (learning) or --rollouts-at-once (sampling, "
              "evaluation)", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as stop:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + getattr(stop, "signum", signal.SIGINT))


def given_flags(parser, config, argv):
    """Names of the fields that the command line sets, be it to their default."""
    unset = object()
    names = [field.name for field in dataclasses.fields(config)]
    parsed, _ = parser.parse_known_args(argv, argparse.Namespace(**dict.fromkeys(names, unset)))
    return {name for name in names if getattr(parsed, name) is not unset}
