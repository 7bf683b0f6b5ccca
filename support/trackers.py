"""--tracker: the numbers of metrics.jsonl and of evaluations in another program too.

Its package is imported only if it is asked for, and writes into the run directory: tensorboard/, swanlog/, wandb/.
A tracker is an object with `log(step, values)` and `finish(failed)`.
"""

import importlib
import math
import os
import signal

from support.errors import UserError, describe

PROJECT = "vision-grpo"
NEEDED = {"tensorboard": "2.18", "swanlab": "0.10", "wandb": "0.31"}  # package -> oldest version that works


def check_tracker(config):
    """Raises UserError, before weights are loaded, without the tracker's package, and where W&B would ask for a key."""
    changed = config.swanlab_mode != "cloud" or config.swanlab_project != PROJECT
    if changed and config.tracker != "swanlab" and not config.resume:  # a run may go on with another tracker
        raise UserError("--swanlab-mode and --swanlab-project are settings of --tracker swanlab")
    if config.tracker == "none":
        return
    try:
        package = importlib.import_module(config.tracker)
    except Exception as error:  # a broken installation raises whatever it likes
        needed = f"{config.tracker}>={NEEDED[config.tracker]}"
        raise UserError(f"--tracker {config.tracker} cannot import its package: pip install '{needed}'") from error
    if config.tracker == "wandb" and package.setup().settings.mode in ("online", "run", "shared") and not (
            package.login(prompt=False, verify=False)):
        raise UserError("--tracker wandb has no key: run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline")


class TensorBoard:
    def __init__(self, config, path, settings, done):
        from torch.utils.tensorboard import SummaryWriter

        # What an interrupted run wrote after its last checkpoint is hidden: these steps are made again.
        self.writer = SummaryWriter(path / "tensorboard", purge_step=done + 1)

    def log(self, step, values):
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def finish(self, failed):
        self.writer.close()


class SwanLab:
    def __init__(self, config, path, settings, done):
        import swanlab

        # Its copy of the terminal is off, since it replaces sys.stdout; so are its questions, which nobody may answer.
        quiet = swanlab.Settings(interactive=False, terminal={"proxy_type": "none"})
        handler = signal.getsignal(signal.SIGINT)
        try:
            self.run = swanlab.init(
                project=config.swanlab_project, name=path.name, mode=config.swanlab_mode, log_dir=str(path / "swanlog"),
                config=settings, id=settings["tracker_id"], resume="allow", settings=quiet)
        finally:
            signal.signal(signal.SIGINT, handler)  # with SwanLab's own one, Ctrl-C would leave no checkpoint

    def log(self, step, values):
        self.run.log(values, step=step)

    def finish(self, failed):
        self.run.finish(state="crashed" if failed else "success", error="stopped early" if failed else None)


class WandB:
    def __init__(self, config, path, settings, done):
        import wandb

        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT), name=path.name, dir=path, config=settings,
            id=settings["tracker_id"], resume="allow",
            settings=wandb.Settings(console="off", quiet=True, finish_timeout=300))  # without it: for ever, if offline

    def log(self, step, values):
        self.run.log(values, step=step)

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
        if self.tracker:
            self.guarded(self.tracker.log, step, {name: value for name, value in values.items()
                                                  if isinstance(value, (int, float)) and math.isfinite(value)})

    def finish(self, failed):
        if self.tracker:
            self.guarded(self.tracker.finish, failed)
            self.tracker = None
