"""The run directory: all that a training writes, and what a resumed one finds.

    runs/NAME/config.json        settings, resolved revisions, versions
              metrics.jsonl      one line a step
              rollouts.jsonl     one line a completion
              questions.jsonl    each question used, once, with its split; its figure under figures/
              step-25/ ...       checkpoints, each a LoRA adapter in PEFT's format; see checkpoints.py
              eval-base.json, eval-step-100.json, results.json
              evaluations.jsonl  one line an evaluation: its rates, time and energy
              report.html        all of this to look at; see report.py
              nonfinite-step-7.json    a batch that gave NaN or infinite numbers
              lock, lock.pid     held by the process that trains, and its number
"""

import contextlib
import dataclasses
import functools
import platform
import secrets
import shutil
from importlib import metadata

import torch
from tqdm import tqdm

from support.checkpoints import (NonFinite, newest_checkpoint, prune_checkpoints, random_state, restore_checkpoint,
                                 save_checkpoint, stored_config)
from support.cost import cost_lines, run_cost
from support.errors import UserError, describe, printable
from support.evaluation import compare, results_table, summarize
from support.files import read_json
from support.folder import free_run_path, make_folder, write_json, writing
from support.logs import Logs, evaluation_record, group_lines, rollout_record
from support.metrics import step_line
from support.stopping import Signals, resume_command
from support.trackers import Tracking
from vision_tokens import on_white

__all__ = ["RunDir", "free_run_path"]


class RunDir:
    """One run's directory, locked from its making to `close` or to the end of `with run:`.

    `with run:` covers the training: SIGINT and SIGTERM then end it with exit code 130 or 143, and whatever ends it
    early, the last complete step is left as a checkpoint.
    """

    def __init__(self, path, config, revisions):
        """`revisions` {"model": ..., "dataset": ...} are commits on the hub, or "local"."""
        self.config, self.signals, self.told = config, Signals(), set()
        self.saved = 0  # step of the newest checkpoint
        self.progress = 0, 0, None  # step, questions drawn, random state: of the last complete step, replaced as one
        self.start = None, None  # folder and state of the checkpoint that a resumed run goes on from
        self.path, self.lock = make_folder(path, config)
        self.logs = Logs(self.path)
        settings = dataclasses.asdict(config) | {
            **{f"resolved_{kind}_revision": revision for kind, revision in revisions.items()},
            "versions": package_versions(), "gpu": gpu_name(config.device)}
        if config.tracker != "none":
            settings["tracker_id"] = secrets.token_hex(4)
        if config.resume:
            settings |= self.reopen(settings)
        write_json(self.path / "config.json", settings)
        self.gpu = settings["gpu"]
        self.tracking = Tracking(config, self.path, settings, self.saved, self.tell)
        tqdm.write(f"run directory: {self.path}")

    def reopen(self, settings):
        """Takes the run's files back to its newest complete checkpoint -> settings that go on as they were."""
        before = stored_config(self.path)
        for name in ("resolved_model_revision", "resolved_dataset_revision"):
            if before.get(name) != settings[name]:
                raise UserError(f"--resume {self.path}: {name} was {before.get(name)} and is {settings[name]} now")
        versions = settings["versions"]
        changed = [f"{name} {then} then, {versions.get(name)} now"
                   for name, then in before.get("versions", {}).items() if versions.get(name) != then]
        self.tell([f"other versions, so numbers may differ a little: {'; '.join(changed)}"] if changed else [])
        with writing(self.path):
            self.start = newest_checkpoint(self.path, self.tell)
            if state := self.start[1]:
                self.saved = state["step"]
                self.progress = self.saved, state["questions_drawn"], state["random"]
            if self.saved > self.config.steps:
                raise UserError(f"--steps {self.config.steps}: the run {self.path} has made {self.saved} steps already")
            for draft in self.path.glob("*.tmp"):
                shutil.rmtree(draft) if draft.is_dir() else draft.unlink()
            self.logs.cut_back(self.saved)
        return {"tracker_id": before["tracker_id"]} if "tracker_id" in before else {}

    # The training

    def restore(self, policy, optimizer):
        """The run's newest checkpoint into policy, optimiser and random state -> (its step, questions drawn so far).

        (0, 0), and nothing is changed, in a new run and in one that was stopped before its first checkpoint.
        """
        self.policy, self.optimizer = policy, optimizer
        optimizer.register_step_pre_hook(self.signals.before_update)
        if self.saved:
            restore_checkpoint(*self.start, policy, optimizer)
        if self.config.resume:
            tqdm.write(f"going on after step {self.saved} of {self.path}")
        return self.progress[:2]

    def save_step(self, step, metrics, batch):
        """Files a step, now complete, and prints its line. `batch` is a grpo.Step."""
        for question in batch.questions:
            self.logs.add_question(question, "train")
        records = [rollout_record(step, row) for row in batch.rows]
        self.logs.append("rollouts.jsonl", records)
        self.logs.append("metrics.jsonl", [{"step": step, **metrics}])
        self.tracking.log(step, metrics)
        question, every = batch.questions[0], self.config.save_every
        sample = group_lines(question, records[:batch.group_size])
        if step in (1, self.config.steps) or (every and step % every == 0):
            figure = None if question.image is None else on_white(question.image)
            self.tracking.log_group(step, figure, sample)
        self.progress = step, self.progress[1] + len(batch.questions), random_state(self.policy.device)
        self.signals.policy_changed = False
        self.tell(row.prompt.note for row in batch.rows)
        tqdm.write(step_line(step, self.config.steps, metrics))
        if self.config.show_samples:
            tqdm.write("\n".join(f"  {line}" for line in sample))
        self.signals.raise_pending()

    def checkpoint(self):
        """Makes `step-N/` of the last complete step, and removes what `--keep-checkpoints` does not keep."""
        step, drawn, random = self.progress
        if step == self.saved:
            return
        with writing(self.path / f"step-{step}"):
            self.logs.sync()
            save_checkpoint(self.path / f"step-{step}", self.policy.model, self.optimizer, {
                "step": step, "questions_drawn": drawn, "random": random, "config": dataclasses.asdict(self.config),
                "versions": package_versions()})
            self.saved = step
            prune_checkpoints(self.path, self.config.keep_checkpoints)

    # The end

    def __enter__(self):
        self.signals.catch()
        return self

    def __exit__(self, kind, error, traceback):
        try:
            if error is not None:
                self.rescue(error)
        finally:
            self.signals.restore()
            self.tracking.finish(failed=error is not None)
            self.close()

    def close(self):
        """Releases the lock."""
        self.lock.release()

    def rescue(self, error):
        """Saves the last complete step, unless the policy has changed since, and says how to go on."""
        step = self.progress[0]
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

    # Evaluations

    def evaluation(self, name):
        """The records of an evaluation that a resumed run made before it stopped, or None."""
        return read_json(self.path / f"eval-{name}.json", notes=[])

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
        with writing(self.path / "evaluations.jsonl"):
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
        self.tracking.finish()
        return results

    def tell(self, lines):
        """Prints each of the lines, other than "", at its first time only."""
        for line in lines:
            if line and line not in self.told:
                self.told.add(line)
                tqdm.write(f"note: {printable(line)}")


def gpu_name(device):
    """The name of the GPU that `--device` means, or None."""
    if device == "cpu" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_name(None if device == "auto" else device)


@functools.cache  # every checkpoint asks, and the answer takes 20 ms
def package_versions():
    versions = {"python": platform.python_version()}
    for package in ("torch", "transformers", "peft", "bitsandbytes", "datasets", "pillow"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions
