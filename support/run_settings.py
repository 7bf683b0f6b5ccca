"""Settings that are also flags: how one is declared, and those that belong to a run, not to the algorithm."""

import dataclasses
import inspect
import operator
from dataclasses import dataclass
from typing import Literal

from support.trackers import PROJECT

SECTIONS = ("model", "data", "algorithm", "memory", "evaluation", "run")  # the groups of --help, in this order
LIMITS = {"at_least": (operator.ge, "at least {}"), "above": (operator.gt, "above {}"),
          "at_most": (operator.le, "at most {}")}


def flag(default, help, section="", choices=None, **limits):
    """A dataclass field that is also a command-line flag; its range stands beside it.

    `section` begins a group of --help: the fields behind it in the class belong to it until the next one.
    `choices` is a table by name, or a function that gives one: it is looked up when the flags are parsed, so that
    entries added by then are known. `limits` are any of at_least, above and at_most; None is in every range.
    `help` of a flag that is on by default is a verb phrase: --help lists --no-x, with "do not" in front of it.
    """
    assert limits.keys() <= LIMITS.keys(), limits
    about = {"help": help, "section": section, "choices": choices} | limits
    return dataclasses.field(default=default, metadata={k: v for k, v in about.items() if v not in (None, "")})


def flags_of(config_class) -> dict[str, dict]:
    """Field name -> what its `flag` was given, its section included.

    What a subclass leaves out, the nearest base class gives: `steps: int = 80` changes the default alone.
    """
    flags = {field.name: {} for field in dataclasses.fields(config_class)}
    for parent in reversed(config_class.__mro__):
        section = "run"
        for name in inspect.get_annotations(parent):
            if name in flags:
                about = parent.__dataclass_fields__[name].metadata
                section = about.get("section", section)
                flags[name] = {"section": section} | flags[name] | about
    return flags


def dashed(name):
    """A field's name as its flag."""
    return f"--{name.replace('_', '-')}"


def choices_of(about):
    """The table of names that a flag accepts, or None."""
    choices = about.get("choices")
    return choices() if callable(choices) else choices


@dataclass
class RunSettings:
    device: str = flag("auto", "auto: the CUDA GPU; or cuda, cuda:1, cpu", section="memory")
    plan: bool = flag(False, "print the GPU memory that the settings need, and do nothing else")
    activation_checkpointing: Literal["auto", "on", "off"] = flag("auto", "recompute layers; auto: on CUDA only")
    fused_kernels: bool = flag(True, "use the CUDA kernels of flash-linear-attention and causal-conv1d")
    tokens_per_micro_batch: int = flag(0, "tokens in one pass of the learner; 0: what fits", at_least=0)
    rollouts_at_once: int = flag(0, "completions drawn at once; 0: what fits", at_least=0)
    eval_batch_size: int = flag(32, "questions decoded at once in evaluation", at_least=1)

    eval_only: bool = flag(False, "evaluate, train nothing", section="evaluation")

    output_dir: str = flag("runs", "folder of the run folders", section="run")
    experiment_name: str = flag("", "name of the run's folder; unset: the policy's name and a number")
    resume: str = flag("", "run folder to continue as if it had never stopped, with its settings")
    save_every: int = flag(25, "steps between checkpoints; 0: only the last", at_least=0)
    keep_checkpoints: int = flag(0, "newest checkpoints to keep; 0: all", at_least=0)
    on_nonfinite: Literal["stop", "skip"] = flag("stop", "at an update with NaN or infinity: stop, or leave it out")
    show_samples: bool = flag(False, "print one group of completions each step")
    tracker: Literal["none", "swanlab", "tensorboard", "wandb"] = flag("none", "program that also gets the metrics")
    swanlab_mode: Literal["cloud", "local", "offline", "disabled"] = flag("cloud", "where SwanLab keeps the metrics")
    swanlab_project: str = flag(PROJECT, "SwanLab's project")
    electricity_price: float = flag(0.6, "yuan per kWh, for the cost in results.json", at_least=0)
