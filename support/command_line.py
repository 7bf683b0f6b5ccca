"""The command line: flags -> a checked config. Wrong input is one line on stderr and exit code 2."""

import argparse
import dataclasses
import inspect
import math
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
from support.run_settings import LIMITS, SECTIONS, choices_of, dashed, flags_of
from support.trackers import check_tracker


def checked_config(config, rewards):
    """A copy of `config` with its preset applied. `rewards` are the task's, by name.

    Raises UserError, naming the flag, for a value with which no run makes sense.
    """
    config = with_preset(config)
    if Version(transformers.__version__) < Version("5.24"):
        raise UserError(f"transformers {transformers.__version__} is too old, 5.24 is needed: older ones give wrong "
                        "numbers for padded batches without any error; pip install -U -r requirements.txt")
    flags = flags_of(type(config))
    for name, about in flags.items():
        check_value(name, getattr(config, name), about)
    reward_weights(config.reward, rewards)
    check_loss(config, choices_of(flags["loss_fn"])[config.loss_fn])
    if config.adapter and not (Path(config.adapter) / "adapter_model.safetensors").is_file():
        raise UserError(f"--adapter {config.adapter}: no adapter_model.safetensors there")
    if config.eval_only and not config.evaluate:
        raise UserError("--eval-only and --no-evaluate leave nothing to do")
    if config.eval_only and config.resume:
        raise UserError("--resume continues a training: --eval-only goes with --adapter RUN/step-N")
    if config.top_p < 1 and not config.eval_only:
        raise UserError("--top-p below 1 is for --eval-only: training needs the probabilities of the full softmax")
    if config.overlong_penalty and config.max_tokens < 4:
        raise UserError(f"--overlong-penalty does not fit into --max-tokens {config.max_tokens}: it grows over the "
                        "last quarter, so 4 is the least")
    check_tracker(config)
    return config


REASONS = {"group_size": ": the advantage compares a completion with the others of its group",
           "temperature": ": a group of equal completions teaches nothing (evaluation has --eval-temperature)"}


def check_value(name, value, about):
    """Raises UserError for a value outside the range or the choices that stand beside its flag."""
    limits = {key: about[key] for key in LIMITS if key in about}
    if limits and value is not None and not (
            math.isfinite(value) and all(LIMITS[key][0](value, limit) for key, limit in limits.items())):
        text = " and ".join(LIMITS[key][1].format(limit) for key, limit in limits.items())
        text = "0 or more" if text == "at least 0" else text
        raise UserError(f"{dashed(name)} must be {text}, not {value}{REASONS.get(name, '')}")
    table = choices_of(about)
    if table and name != "reward" and value not in table:  # a reward is a list, see reward_weights
        raise none_of(name, value, table)


def none_of(name, value, table):
    return UserError(f"{dashed(name)} {value} is none of {', '.join(table)}; an entry that you add is known only to "
                     "the program that adds it")


def reward_weights(text, rewards):
    """"right:1,brevity:0.2" -> {"right": 1.0, "brevity": 0.2}; a name alone has weight 1. UserError names --reward."""
    weights = {}
    for part in text.split(","):
        name, _, weight = part.strip().partition(":")
        if name not in rewards:
            raise none_of("reward", name or repr(text), rewards)
        if name in weights:
            raise UserError(f"--reward {text} names {name} twice")
        try:
            weights[name] = float(weight or 1)
        except ValueError:
            weights[name] = math.nan
        if not math.isfinite(weights[name]):
            raise UserError(f"--reward {text}: the weight of {name} must be a number, not {weight}")
    return weights


def check_loss(config, entry):
    """Raises UserError for clip bounds and a reduction that the loss does not have.

    `entry` is its entry in LOSS_FNS: a function whose keyword arguments are the bounds, or a Loss with .fn, .reduction.
    """
    bounds = inspect.signature(getattr(entry, "fn", entry)).parameters
    for bound in ("low", "high"):
        if getattr(config, f"clip_{bound}") is not None and bound not in bounds:
            raise UserError(f"--clip-{bound}: --loss-fn {config.loss_fn} has no such bound")
    needed = getattr(entry, "reduction", None) or config.loss_reduction
    if config.loss_reduction not in ("auto", needed):
        what = " is a loss of whole sequences, it" * (needed == "sequence")
        raise UserError(f"--loss-reduction {config.loss_reduction}: {config.loss_fn}{what} needs {needed}")


DAPO = {"loss_fn": "ppo", "clip_low": 0.2, "clip_high": 0.28, "loss_reduction": "token", "advantage": "grpo_std",
        "overlong_penalty": True, "dynamic_sampling": True}  # arXiv 2503.14476


def with_preset(config):
    """A copy of `config` in which --algorithm dapo sets those DAPO flags that are at their default; prints them."""
    if config.algorithm == "grpo" or config.resume:  # the settings of a resumed run have them already
        return dataclasses.replace(config)
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    changes = {name: value for name, value in DAPO.items() if getattr(config, name) == defaults[name]}
    if config.loss_fn not in (defaults["loss_fn"], "ppo"):  # 0.2 and 0.28 mean something else in another formula
        changes = {name: value for name, value in changes.items() if not name.startswith("clip_")}
    given = (dashed(name) if value is True else f"{dashed(name)} {value}" for name, value in changes.items())
    print(f"--algorithm dapo sets {' '.join(given)}")
    return dataclasses.replace(config, **changes)


class ShortHelp(argparse.RawDescriptionHelpFormatter):
    """One line a flag where the terminal is wide enough; each flag in its spelling with dashes."""

    def __init__(self, prog):
        super().__init__(prog, max_help_position=36, width=min(120, shutil.get_terminal_size((120, 40)).columns))

    def _format_action_invocation(self, action):
        return f"{action.option_strings[-1]} {action.metavar or ''}".strip()


class FlagParser(transformers.HfArgumentParser):
    """The dataclass is the command line: types and defaults are its fields', the rest stands in their `flag`."""

    def __init__(self, config_class, rewards=None):
        self.flags, self.groups = flags_of(config_class), {}
        if rewards and "reward" in self.flags:
            self.flags["reward"]["choices"] = rewards
        paragraphs = (sys.modules[config_class.__module__].__doc__ or "").strip().split("\n\n")
        commands = [text for text in paragraphs[1:2] if text.startswith("    ")]
        legend = "A flag's choices stand in braces, its default in brackets."
        super().__init__(config_class, allow_abbrev=False, usage="%(prog)s [flags]", formatter_class=ShortHelp,
                         description="\n\n".join([*paragraphs[:1], *commands, legend]))

    def add_argument(self, *names, **options):
        """Adds a flag to the group of its section, without what argparse does not know of it."""
        name = options.get("dest", names[0].lstrip("-"))
        if name not in self.flags:  # --help
            return super().add_argument(*names, **options)
        about = self.flags[name]
        if not self.groups:
            titles = dict.fromkeys([*SECTIONS, *(flag["section"] for flag in self.flags.values())])
            self.groups = {title: self.add_argument_group(title) for title in titles}
        known = {key: value for key, value in options.items() if key not in about}  # `choices` of a Literal among them
        text, table, default = about.get("help", ""), choices_of(about) or known.get("choices"), options.get("default")
        if options.get("action") == "store_false":
            text = f"do not {text}"
        elif options.get("nargs") != "?":  # it takes a value
            known["metavar"] = "NAME" if table else {int: "N", float: "X"}.get(options["type"], "TEXT")
            text += f" {{{', '.join(table)}}}" if table else ""
            text += f" [{default}]" if default not in (None, "") else ""
        elif default:  # a switch that is on is listed as --no-x
            known["help"] = argparse.SUPPRESS
        return self.groups[about["section"]].add_argument(*names, **{"help": text.replace("%", "%%")} | known)

    def error(self, message):
        print(f"error: {printable(message)} (--help lists the flags)", file=sys.stderr)
        sys.exit(2)


def run_command_line(config_class, action, argv=None):
    """Parses the flags into `config_class` and calls `action(config)`; a UserError becomes one line and exit code 2.

    Where `action` has a parameter `task`, by its default or by `partial`, --help lists the rewards of that task.
    """
    task = inspect.signature(action).parameters.get("task")
    parser = FlagParser(config_class, getattr(task and task.default, "rewards", None))
    config, unknown = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True, look_for_args_file=False)
    if unknown:
        parser.error(f"unknown {'flag' if unknown[0].startswith('-') else 'word'} {unknown[0]}")
    try:
        interrupts.as_usual()
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
    """Names of the fields that the command line sets, even where it sets their default."""
    unset = object()
    names = [field.name for field in dataclasses.fields(config)]
    parsed, _ = parser.parse_known_args(argv, argparse.Namespace(**dict.fromkeys(names, unset)))
    return {name for name in names if getattr(parsed, name) is not unset}
