"""Settings that are also flags: how one is declared, and those that belong to a run, not to the algorithm."""

import inspect
import operator
from dataclasses import dataclass, field, fields
from typing import Literal

from support.trackers import PROJECT

SECTIONS = ("model", "data", "algorithm", "memory", "evaluation", "run")  # the groups of --help, in this order
LIMITS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le}


def flag(default, help, section="", choices=None, **limits):
    """A dataclass field that is also a command-line flag.

    `section` begins a group of --help, up to the next section in the class. `choices` is a table by name, or a function
    that gives it when the flags are parsed. `limits` are any of LIMITS. `help` of a flag that is on by default is a
    verb phrase: --help lists --no-x, with "do not" in front of it.
    """
    assert limits.keys() <= LIMITS.keys(), limits
    about = {"help": help, "section": section, "choices": choices} | limits
    return field(default=default, metadata={key: value for key, value in about.items() if value not in (None, "")})


def flags_of(config_class) -> dict[str, dict]:
    """Field name -> what its `flag` was given; a plain override, `steps: int = 80`, changes the default alone."""
    flags = {f.name: {} for f in fields(config_class)}
    for parent in reversed(config_class.__mro__):
        section = "run"
        for name in (name for name in inspect.get_annotations(parent) if name in flags):
            about = parent.__dataclass_fields__[name].metadata
            section = about.get("section", section)
            flags[name] = {"section": section} | flags[name] | about
    for about in flags.values():
        if callable(about.get("choices")):
            about["choices"] = about["choices"]()
    return flags


def dashed(name):
    """A field's name as its flag."""
    return f"--{name.replace('_', '-')}"


@dataclass
class RunSettings:
    device: str = flag("auto", "auto: the CUDA GPU; or cuda, cuda:1, cpu", section="memory")
    plan: bool = flag(False, "only print the GPU memory that the settings need")
    activation_checkpointing: Literal["auto", "on", "off"] = flag("auto", "recompute layers; auto: on CUDA")
    fused_kernels: bool = flag(True, "use flash-linear-attention and causal-conv1d")
    tokens_per_micro_batch: int = flag(0, "tokens in one pass of the learner; 0: what fits", at_least=0)
    rollouts_at_once: int = flag(0, "completions drawn at once; 0: what fits", at_least=0)
    eval_batch_size: int = flag(32, "questions decoded at once in evaluation", at_least=1)

    eval_only: bool = flag(False, "evaluate, train nothing", section="evaluation")

    output_dir: str = flag("runs", "folder of the run folders", section="run")
    experiment_name: str = flag("", "of the run's folder; unset: the policy's, numbered")
    resume: str = flag("", "run folder to continue, with its settings")
    save_every: int = flag(25, "steps between checkpoints; 0: only the last", at_least=0)
    keep_checkpoints: int = flag(0, "newest checkpoints to keep; 0: all", at_least=0)
    on_nonfinite: Literal["stop", "skip"] = flag("stop", "at NaN or infinity in an update")
    show_samples: bool = flag(False, "print one group of completions each step")
    tracker: Literal["none", "swanlab", "tensorboard", "wandb"] = flag("none", "program that also gets the metrics")
    swanlab_mode: Literal["cloud", "local", "offline", "disabled"] = flag("cloud", "of SwanLab")
    swanlab_project: str = flag(PROJECT, "SwanLab's project")
    electricity_price: float = flag(0.6, "yuan per kWh, for the cost in results.json", at_least=0)
