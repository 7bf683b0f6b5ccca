"""The command line: flags -> a checked config. Wrong input is one line on stderr and exit code 2."""

import argparse
import dataclasses
import inspect
import math
import re
import shutil
import signal
import sys
from pathlib import Path

import torch
import transformers
from packaging.version import Version

from support import interrupts
from support.checkpoints import resumed_config
from support.errors import UserError, printable
from support.run_settings import LIMITS, SECTIONS, dashed, flags_of
from support.trackers import check_tracker


def checked_config(config, rewards):
    """A copy of `config` with its preset applied; `rewards` are the task's. UserError where no run makes sense."""
    config = with_preset(config)
    if Version(transformers.__version__) < Version("5.24"):  # wrong numbers for padded batches, without any error
        raise UserError(f"transformers {transformers.__version__}: 5.24 is needed; pip install -U -r requirements.txt")
    flags = flags_of(type(config))
    for name, about in flags.items():
        check_value(name, getattr(config, name), about)
    reward_weights(config.reward, rewards)
    check_loss(config, flags["loss_fn"]["choices"][config.loss_fn])
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        if config.adapter and not (Path(config.adapter) / file).is_file():
            raise UserError(f"--adapter {config.adapter}: no {file} there")
    for wrong, message in (
            (config.eval_only and not config.evaluate, "--eval-only and --no-evaluate leave nothing to do"),
            (config.eval_only and config.resume, "--resume continues a training: --eval-only goes with --adapter"),
            (config.top_p < 1 and not config.eval_only, "--top-p below 1 is for --eval-only: training needs 1"),
            (config.overlong_penalty and config.max_tokens < 4, "--overlong-penalty does not fit into --max-tokens "
             f"{config.max_tokens}: it needs a last quarter")):
        if wrong:
            raise UserError(message)
    check_tracker(config)
    return config


def check_value(name, value, about):
    """Raises UserError for a value outside the range or the choices that stand beside its flag."""
    limits = {key: about[key] for key in LIMITS if key in about}
    if limits and value is not None and not (
            math.isfinite(value) and all(LIMITS[key](value, limit) for key, limit in limits.items())):
        text = " and ".join(f"{key.replace('_', ' ')} {limit}" for key, limit in limits.items())
        raise UserError(f"{dashed(name)} must be {'0 or more' if text == 'at least 0' else text}, not {value}")
    table = about.get("choices")
    if table and name != "reward" and value not in table:  # --reward holds several, see reward_weights
        raise UserError(f"{dashed(name)} {value} is none of {', '.join(table)}")


def reward_weights(text, rewards):
    """"right:1,brevity:0.2" -> {"right": 1.0, "brevity": 0.2}; a name alone has weight 1. UserError names --reward."""
    weights = {}
    for part in text.split(","):
        name, _, weight = part.strip().partition(":")
        if name not in rewards:
            raise UserError(f"--reward {name or repr(text)} is none of {', '.join(rewards)}")
        if name in weights or not re.fullmatch(r"-?\d*\.?\d+", weight or "1"):
            raise UserError(f"--reward {text}: each name stands once, with a number as its weight")
        weights[name] = float(weight or 1)
    return weights


def check_loss(config, entry):
    """Raises UserError for clip bounds and a reduction that the loss, an entry of LOSS_FNS, does not have."""
    bounds = inspect.signature(getattr(entry, "fn", entry)).parameters  # `low` and `high` are keyword arguments
    for bound in ("low", "high"):
        if getattr(config, f"clip_{bound}") is not None and bound not in bounds:
            raise UserError(f"--clip-{bound}: --loss-fn {config.loss_fn} has no such bound")
    needed = getattr(entry, "reduction", None) or config.loss_reduction
    if config.loss_reduction not in ("auto", needed):
        raise UserError(f"--loss-reduction {config.loss_reduction}: --loss-fn {config.loss_fn} needs {needed}")


DAPO = {"loss_fn": "ppo", "clip_low": 0.2, "clip_high": 0.28, "loss_reduction": "token", "advantage": "grpo_std",
        "overlong_penalty": True, "dynamic_sampling": True}  # arXiv 2503.14476


def with_preset(config):
    """A copy of `config` in which --algorithm dapo sets those DAPO flags that are at their default; prints them."""
    if config.algorithm == "grpo" or config.resume:  # the settings of a resumed run have them already
        return dataclasses.replace(config)
    changes = {name: value for name, value in DAPO.items() if getattr(config, name) == getattr(type(config), name)}
    if "loss_fn" not in changes and config.loss_fn != "ppo":  # 0.2 and 0.28 mean something else in another formula
        changes = {name: value for name, value in changes.items() if not name.startswith("clip_")}
    given = (dashed(name) if value is True else f"{dashed(name)} {value}" for name, value in changes.items())
    print(f"--algorithm dapo sets {' '.join(given)}")
    return dataclasses.replace(config, **changes)


class ShortHelp(argparse.RawDescriptionHelpFormatter):
    """Each flag in its spelling with dashes, on one line where the terminal is wide enough."""

    def __init__(self, prog):
        width = min(120, shutil.get_terminal_size((120, 40)).columns)
        super().__init__(prog, max_help_position=width // 3, width=width)

    def _format_action_invocation(self, action):
        return f"{action.option_strings[-1]} {action.metavar or ''}".strip()


class FlagParser(transformers.HfArgumentParser):
    """A dataclass as a command line. What it parses holds the flags that were given, and no defaults."""

    def __init__(self, config_class, rewards=None):
        self.flags, self.groups = flags_of(config_class), {}
        if rewards and "reward" in self.flags:
            self.flags["reward"]["choices"] = rewards
        paragraphs = (sys.modules[config_class.__module__].__doc__ or "").strip().split("\n\n")[:2]
        super().__init__(config_class, allow_abbrev=False, usage="%(prog)s [flags]", formatter_class=ShortHelp,
                         description="\n\n".join([*paragraphs, "Choices stand in braces, a default in brackets."]))

    def add_argument(self, *names, **options):
        """Adds a flag to the group of its section, without the settings that argparse does not know."""
        name = options.get("dest", names[0].lstrip("-"))
        if name not in self.flags:  # --help
            return super().add_argument(*names, **options)
        if not self.groups:
            titles = dict.fromkeys([*SECTIONS, *(about["section"] for about in self.flags.values())])
            self.groups = {title: self.add_argument_group(title) for title in titles}
        about, default = self.flags[name], options.get("default")
        text, table = about.get("help", ""), about.get("choices") or options.get("choices")
        known = {key: value for key, value in options.items() if key not in about} | {"default": argparse.SUPPRESS}
        if options.get("action") == "store_false":
            text = f"do not {text}"
        elif options.get("nargs") == "?":  # a switch; one that is on is listed as --no-x
            text = argparse.SUPPRESS if default else text
        else:
            known["metavar"] = "NAME" if table else {int: "N", float: "X"}.get(options["type"], "TEXT")
            text += f" {{{', '.join(table)}}}" if table else ""
            text += f" [{default}]" if default not in (None, "") else ""
        return self.groups[about["section"]].add_argument(*names, **known, help=text.replace("%", "%%"))

    def error(self, message):
        message = message.replace("unrecognized arguments:", "unknown flag")
        self.exit(2, f"error: {printable(message)} (--help lists the flags)\n")


def run_command_line(config_class, action, argv=None):
    """Parses the flags into `config_class` and calls `action(config)`; a UserError becomes one line and exit code 2.

    Where `action` has a parameter `task`, by its default or by `partial`, --help lists the rewards of that task.
    """
    task = inspect.signature(action).parameters.get("task")
    parser = FlagParser(config_class, getattr(task and task.default, "rewards", None))
    given = vars(parser.parse_args(argv))
    config = config_class(**given)
    try:
        interrupts.as_usual()
        action(resumed_config(config, set(given)) if config.resume else config)
    except UserError as error:
        parser.exit(2, f"error: {printable(str(error))}\n")
    except torch.OutOfMemoryError:
        parser.exit(2, "error: out of GPU memory: lower --tokens-per-micro-batch (learning) or --rollouts-at-once "
                       "(sampling, evaluation)\n")
    except KeyboardInterrupt as stop:
        parser.exit(128 + getattr(stop, "signum", signal.SIGINT), "interrupted\n")
