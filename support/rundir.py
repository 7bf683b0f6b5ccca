"""The run directory: all that a training writes, and what a resumed one finds. docs/running.md lists its files."""

import contextlib
import dataclasses
import itertools
import os
import platform
import re
import secrets
import shutil
from importlib import metadata
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from tqdm import tqdm

from support.checkpoints import (START, NonFinite, check_same_experiment, newest_checkpoint, prune_checkpoints,
                                 random_state, restore_checkpoint, save_checkpoint, stored_config)
from support.cost import cost_lines, run_cost
from support.errors import UserError, describe, printable
from support.evaluation import compare, results_table, summarize
from support.files import read_json
from support.hub import parse_id
from support.logs import Logs, evaluation_record, group_lines, rollout_record, write_json, writing
from support.metrics import step_line
from support.stopping import Signals, resume_command
from support.trackers import Tracking


class RunDir:
    """One run's directory, locked from its making to `finish` or to the end of `with run:`.

    `with run:` covers the training: SIGINT and SIGTERM then end it with exit code 130 or 143, and whatever ends it
    early, the last complete step is left as a checkpoint.
    """

    def __init__(self, path, config, revisions):
        """`revisions` {"model": ..., "dataset": ...} are commits on the hub, or "local"."""
        self.config, self.signals, self.told = config, Signals(), set()
        self.progress, self.saved = START, 0  # state after the last complete step; step of the newest checkpoint
        self.path, self.lock = make_folder(path, config)
        self.logs, self.gpu = Logs(self.path), gpu_name(config.device)
        before = stored_config(self.path) if config.resume else {}
        settings = dataclasses.asdict(config) | {
            **{f"resolved_{kind}_revision": revision for kind, revision in revisions.items()},
            "versions": package_versions(), "gpu": self.gpu}
        if config.tracker != "none":
            settings["tracker_id"] = before.get("tracker_id") or secrets.token_hex(4)
        if config.resume:
            self.reopen()
            changed = {k: v for k, v in before.get("versions", {}).items() if settings["versions"].get(k) != v}
            self.tell([f"other versions, so numbers may differ a little: it began with {changed}"] if changed else [])
        write_json(self.path / "config.json", settings)
        self.tracking = Tracking(config, self.path, settings, self.saved, self.tell)
        tqdm.write(f"run directory: {self.path}")

    def reopen(self):
        """Takes the run's files back to its newest checkpoint."""
        with writing(self.path):
            self.progress = newest_checkpoint(self.path, self.tell)
            self.saved = self.progress["step"]
            if self.saved > self.config.steps:
                raise UserError(f"--steps {self.config.steps}: the run {self.path} has made {self.saved} steps already")
            for draft in self.path.glob("*.tmp"):
                shutil.rmtree(draft) if draft.is_dir() else draft.unlink()
            self.logs.cut_back(self.saved)

    def restore(self, policy, optimizer):
        """The newest checkpoint into policy, optimiser and random state -> (its step or 0, questions drawn so far)."""
        self.policy, self.optimizer = policy, optimizer
        optimizer.register_step_pre_hook(self.signals.before_update)
        if self.saved:
            restore_checkpoint(self.path / f"step-{self.saved}", self.progress, policy, optimizer)
        if self.config.resume:
            tqdm.write(f"going on after step {self.saved} of {self.path}")
        return self.progress["step"], self.progress["questions_drawn"]

    def save_step(self, step, metrics, batch):
        """Files a step, now complete, and prints its line. `batch` is a grpo.Batch."""
        for question in batch.questions:
            self.logs.add_question(question, "train")
        records = [rollout_record(step, row) for row in batch.rows]
        self.logs.append("rollouts.jsonl", records)
        self.logs.append("metrics.jsonl", [{"step": step, **metrics}])
        self.tracking.log(step, metrics)
        self.progress = {"step": step, "questions_drawn": self.progress["questions_drawn"] + len(batch.questions),
                         "random": random_state(self.policy.device)}  # replaced as one: a signal may come at any time
        self.signals.policy_changed = False
        self.tell(row.prompt.note for row in batch.rows)
        tqdm.write(step_line(step, self.config.steps, metrics))
        if self.config.show_samples:
            tqdm.write("\n".join(group_lines(batch.questions[0], records[:batch.group_size])))
        self.signals.raise_pending()

    def checkpoint(self):
        """Makes `step-N/` of the last complete step, and removes what `--keep-checkpoints` does not keep."""
        step = self.progress["step"]
        if step == self.saved:
            return
        self.logs.sync()
        with writing(self.path / f"step-{step}"):
            save_checkpoint(self.path / f"step-{step}", self.policy.model, self.optimizer, self.progress)
            self.saved = step
            prune_checkpoints(self.path, self.config.keep_checkpoints)

    def __enter__(self):
        self.signals.catch()
        return self

    def __exit__(self, kind, error, traceback):
        try:
            if error is not None:
                self.rescue(error)
        finally:
            self.signals.restore()
            self.close(failed=error is not None)

    def close(self, failed=False):
        self.tracking.finish(failed)
        self.lock.release()

    def rescue(self, error):
        """Saves the last complete step, unless the policy has changed since, and says how to go on."""
        step = self.progress["step"]
        if isinstance(error, NonFinite):
            file = self.path / f"nonfinite-step-{step + 1}.json"
            with contextlib.suppress(UserError):
                write_json(file, {"step": step + 1, **error.record})
                error.args = (f"{error}; the batch is in {file}",)
        if not self.signals.policy_changed:
            try:
                self.checkpoint()
            except (UserError, RuntimeError) as another:  # RuntimeError: the GPU itself may have failed
                tqdm.write(f"step {step} could not be saved: {describe(another)}")
        if self.saved or not isinstance(error, UserError):
            tqdm.write(f"stopped; to go on after step {self.saved}: {resume_command(self.path)}")

    def evaluation(self, name):
        """The records of an evaluation that a resumed run made before it stopped, or None."""
        return read_json(self.path / f"eval-{name}.json", [])

    def evaluation_records(self, rows):
        """Answered questions (grpo.Completion) -> one dict each for an eval file; their questions are stored."""
        self.tell(row.prompt.note for row in rows)
        for row in rows:
            self.logs.add_question(row.prompt.question, self.config.eval_split)
        return [evaluation_record(row) for row in rows]

    def save_evaluation(self, name, records, metrics):
        """Files the answers, and in evaluations.jsonl their rates with `metrics` (time, energy)."""
        step = int(name[5:]) if name.startswith("step-") else 0
        rates = {f"evaluation/{key}": value["value"] if isinstance(value, dict) else value
                 for key, value in summarize(records).items()}
        self.logs.append("evaluations.jsonl", [{"step": step, "evaluation": name, **rates, **metrics}])
        self.logs.sync()
        self.tracking.log(step, rates | metrics)
        write_json(self.path / f"eval-{name}.json", records)  # last: where it is, the evaluation is not made again

    def finish(self, before, after):
        """Writes and prints the results of two evaluations, each of which may be None, and what the run cost."""
        results = compare(before, after)
        results["cost"] = run_cost(self.path, self.config.electricity_price, bool(self.gpu))
        write_json(self.path / "results.json", results)
        lines = [results_table(results)] if before or after else []
        print("\n".join([*lines, *cost_lines(results["cost"]), f"run directory: {self.path}"]))
        self.close()
        return results

    def tell(self, lines):
        """Prints each of the lines, other than "", at its first time only."""
        for line in lines:
            if line and line not in self.told:
                self.told.add(line)
                tqdm.write(f"note: {printable(line)}")


def free_run_path(config):
    """The folder of the coming run, which is a new one, or with `--resume` that of the run to continue."""
    if config.resume:
        check_same_experiment(config)
        lock_folder(Path(config.resume)).release()  # a run in use is refused before gigabytes are loaded
        return Path(config.resume)
    root, name = Path(config.output_dir), config.experiment_name
    existing = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise UserError(f"--output-dir {root} cannot hold runs: {existing} is not a folder that can be written to")
    if not name:
        stem = Path(parse_id(config.base_model)[0]).name or "run"
        return next(path for number in itertools.count(1) if not (path := root / f"{stem}-{number}").exists())
    if not re.fullmatch(r"[\w.+-]*\w[\w.+-]*", name):
        raise UserError(f"--experiment-name {name!r} names a folder: letters, digits, dot, plus, dash and underscore")
    if (root / name).exists():
        raise UserError(f"--experiment-name {name}: {root / name} exists already; choose another name, or delete it")
    return root / name


def make_folder(path, config):
    """Makes the run's folder, under the next free name if another run took `path` meanwhile -> (its path, its lock)."""
    try:
        path.mkdir(parents=True, exist_ok=bool(config.resume))
    except FileExistsError:
        return make_folder(free_run_path(config), config)
    except OSError as error:
        raise UserError(f"--output-dir: the run directory {path} cannot be made: {error.strerror}") from error
    return path, lock_folder(path)


def lock_folder(folder):
    """Locks FOLDER/lock until the lock given back is released or the process dies. UserError where another has it."""
    lock = FileLock(folder / "lock", timeout=0)
    try:
        lock.acquire()
    except OSError as error:
        problem = "in use by another process" if isinstance(error, Timeout) else f"not writable: {error.strerror}"
        raise UserError(f"the run directory {folder} is {problem}") from error
    return lock


def gpu_name(device):
    """The name of the GPU that `--device` means, or None."""
    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_name(None if device == "auto" else device)


def package_versions():
    versions = {"python": platform.python_version()}
    for package in ("torch", "transformers", "peft", "bitsandbytes", "datasets", "pillow"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions
