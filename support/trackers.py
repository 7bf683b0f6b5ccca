"""--tracker: the numbers of metrics.jsonl and of evaluations, and some groups of completions, in another program.

Its package is imported only if it is asked for, and writes into the run directory: tensorboard/, swanlog/, wandb/.
A tracker is an object with `log(step, values)`, `log_group(step, image, lines)` (no image: None) and `finish(failed)`.
"""

import contextlib
import dataclasses
import importlib.util
import math
import os
import signal
import threading
from importlib import metadata

from packaging.version import Version

from support.errors import UserError, describe

PROJECT = "vision-grpo"
NEEDED = {"tensorboard": "2.18", "swanlab": "0.10", "wandb": "0.31"}  # package -> oldest version that works


def check_tracker(config):
    """Raises UserError for what the tracker would only miss after the weights are loaded."""
    if config.tracker != "swanlab" and not config.resume:  # a run's own settings may go with another tracker
        for field in dataclasses.fields(config):
            if field.name.startswith("swanlab_") and getattr(config, field.name) != field.default:
                raise UserError(f"--{field.name.replace('_', '-')} is a setting of --tracker swanlab"
                                + "; W&B reads WANDB_MODE and WANDB_PROJECT" * (config.tracker == "wandb"))
    if config.tracker == "none":
        return
    needed = f"{config.tracker}>={NEEDED[config.tracker]}"
    try:
        found = Version(metadata.version(config.tracker))
        importlib.import_module(config.tracker)
    except Exception as error:  # a broken installation raises whatever it likes
        raise UserError(f"--tracker {config.tracker} cannot import its package: pip install '{needed}'") from error
    if found < Version(NEEDED[config.tracker]):
        raise UserError(f"--tracker {config.tracker}: {found} is too old: pip install -U '{needed}'")
    if config.tracker == "swanlab":
        check_swanlab(config)
    if config.tracker == "wandb":
        check_wandb()


def check_swanlab(config):
    import swanlab

    if config.swanlab_mode == "cloud" and not swanlab.Settings().api_key:
        raise UserError("--tracker swanlab: no key for its cloud: run `swanlab login`, or set SWANLAB_API_KEY, or "
                        "--swanlab-mode offline")
    if config.swanlab_mode == "local" and importlib.util.find_spec("swanboard") is None:
        raise UserError("--swanlab-mode local needs SwanLab's dashboard: pip install 'swanlab[dashboard]'; offline "
                        "needs nothing more")


def check_wandb():
    import wandb

    if wandb.setup().settings.mode in ("online", "run", "shared") and not wandb.login(prompt=False, verify=False):
        raise UserError("--tracker wandb: no key for W&B: run `wandb login`, or set WANDB_API_KEY, or "
                        "WANDB_MODE=offline")


class TensorBoard:
    def __init__(self, config, path, settings, done):
        from torch.utils.tensorboard import SummaryWriter

        # What an interrupted run wrote after its last checkpoint is hidden: these steps are made again.
        self.writer = SummaryWriter(path / "tensorboard", purge_step=done + 1 if config.resume else None)

    def log(self, step, values):
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def log_group(self, step, image, lines):
        import numpy as np

        if image is not None:
            self.writer.add_image("group/figure", np.asarray(image), step, dataformats="HWC")
        self.writer.add_text("group/completions", "\n".join(f"    {line}" for line in lines), step)  # verbatim

    def finish(self, failed):
        self.writer.close()


class SwanLab:
    def __init__(self, config, path, settings, done):
        import swanlab

        # Its copy of the terminal is off, since it replaces sys.stdout; so are its questions, which nobody may answer.
        quiet = swanlab.Settings(interactive=False, terminal={"proxy_type": "none"})
        with own_interrupt():
            self.swanlab, self.run = swanlab, swanlab.init(
                project=config.swanlab_project, name=path.name, mode=config.swanlab_mode, log_dir=str(path / "swanlog"),
                config=settings, id=settings["tracker_id"], resume="allow", settings=quiet)

    def log(self, step, values):
        self.run.log(values, step=step)

    def log_group(self, step, image, lines):
        figure = {"group/figure": self.swanlab.Image(image, caption=lines[0])} if image is not None else {}
        self.run.log({**figure, "group/completions": self.swanlab.Text("\n".join(lines))}, step=step)

    def finish(self, failed):
        with own_interrupt():
            self.run.finish(state="crashed" if failed else "success", error="stopped early" if failed else None)


@contextlib.contextmanager
def own_interrupt():
    """Ctrl-C stays as it was: SwanLab installs a handler of its own, which would leave no checkpoint."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            signal.signal(signal.SIGINT, handler)


class WandB:
    def __init__(self, config, path, settings, done):
        import wandb

        self.wandb, self.run = wandb, wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT), name=path.name, dir=path, config=settings,
            id=settings["tracker_id"], resume="allow",
            settings=wandb.Settings(console="off", quiet=True, finish_timeout=300))  # without it: for ever, if offline

    def log(self, step, values):
        self.run.log(values, step=step)

    def log_group(self, step, image, lines):
        figure = {"group/figure": self.wandb.Image(image, caption=lines[0])} if image is not None else {}
        self.run.log({**figure, "group/completions": self.wandb.Table(["line"], [[line] for line in lines])}, step=step)

    def finish(self, failed):
        self.run.finish(exit_code=int(failed))


TRACKERS = {"tensorboard": TensorBoard, "swanlab": SwanLab, "wandb": WandB}


class Tracking:
    """The run's tracker, or none. One that fails, even at its start, is dropped with a note: the training goes on."""

    def __init__(self, config, path, settings, done, tell):
        """`settings` is what config.json holds, `done` the step of the checkpoint that the run goes on from."""
        self.name, self.tell, self.tracker = config.tracker, tell, None
        if config.tracker != "none":
            self.tracker = self.guarded(TRACKERS[config.tracker], config, path, settings, done)

    def guarded(self, action, *arguments):
        try:
            return action(*arguments)
        except (Exception, SystemExit) as error:  # SystemExit: a library may end the program over a refused key
            self.tracker = None
            self.tell([f"--tracker {self.name} failed, and the run goes on without it: {type(error).__name__}: "
                       f"{describe(error)}"])

    def log(self, step, values):
        """A row of metrics.jsonl or evaluations.jsonl; numbers only, since no tracker draws NaN."""
        numbers = {name: value for name, value in values.items() if name != "step"
                   and isinstance(value, (int, float)) and math.isfinite(value)}
        if self.tracker:
            self.guarded(self.tracker.log, step, numbers)

    def log_group(self, step, image, lines):
        """A question's figure (PIL, RGB, or None), and lines of text: the question, then one for each completion."""
        if self.tracker:
            self.guarded(self.tracker.log_group, step, image, lines)

    def finish(self, failed=False):
        if self.tracker:
            self.guarded(self.tracker.finish, failed)
            self.tracker = None
