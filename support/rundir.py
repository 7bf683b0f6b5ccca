"""The run directory, the lines in the terminal, and the numbers of an evaluation.

    runs/NAME/config.json        settings, resolved revisions, versions
              metrics.jsonl      one line a step
              rollouts.jsonl     one line a completion
              questions.jsonl    each question used, once, with its split; its figure under figures/
              step-25/ ...       checkpoints, each a LoRA adapter in PEFT's format; see checkpoints.py
              eval-base.json, eval-step-100.json, results.json
              evaluations.jsonl  one line an evaluation: its rates, time and energy
              report.html        all of this to look at; see report.py
              nonfinite-step-7.json    a batch that gave NaN or infinite numbers
              lock               held by the process that trains
"""

import contextlib
import dataclasses
import functools
import io
import json
import math
import os
import platform
import re
import secrets
import shutil
import signal
import statistics
import threading
from pathlib import Path

import torch
from safetensors import SafetensorError
from tqdm import tqdm

from support.checkpoints import (
    Interrupted,
    NonFinite,
    check_same_experiment,
    cut_lines,
    lock_folder,
    newest_checkpoint,
    prune_checkpoints,
    random_state,
    restore_checkpoint,
    save_checkpoint,
    stored_config,
    sync,
    write_whole,
)
from support.cost import cost_lines, run_cost
from support.errors import UserError, describe, printable
from reward import extract_choice
from support.trackers import Tracking
from vision_tokens import on_white


def free_run_path(config):
    """The folder of the coming run, or with `--resume` of the one to continue. Else an existing one is never taken.

    Raises UserError for a name that is no name, a run in use, and settings that do not continue it.
    """
    if config.resume:
        check_same_experiment(config)
        lock_folder(Path(config.resume)).close()  # told before gigabytes are loaded
        return Path(config.resume)
    root = Path(config.output_dir)
    there = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise UserError(f"--output-dir {root} cannot hold runs: {there} is not a folder that can be written to")
    if not config.experiment_name:
        stem = Path(config.base_model).name or "run"
        number = 1
        while (root / f"{stem}-{number}").exists():
            number += 1
        return root / f"{stem}-{number}"
    if not re.fullmatch(r"[\w.+-]*\w[\w.+-]*", config.experiment_name):
        raise UserError(f"--experiment-name {config.experiment_name!r}: letters, digits, dot, plus, dash and "
                        "underscore only, since it names a folder")
    if (root / config.experiment_name).exists():
        raise UserError(f"--experiment-name {config.experiment_name}: {root / config.experiment_name} exists already; "
                        "choose another name, or delete that folder")
    return root / config.experiment_name


class RunDir:
    """Writes one run's files. Every line is flushed, so that a run can be read while it goes on.

    `with run:` covers the training: SIGINT and SIGTERM then end it with exit code 130 or 143, and whatever ends it
    early, the last complete step is left as a checkpoint. A signal drops what is going on, unless an optimiser step
    has made the policy another than that of the last complete step: then the step is finished first. A second signal
    kills.
    """

    def __init__(self, path, config, model_revision, dataset_revision):
        self.config = config
        self.stored, self.told, self.unsynced = {}, set(), set()
        self.progress = 0, 0, None  # step, questions drawn, random state: of the last complete step, replaced as one
        self.saved = 0  # step of the newest checkpoint
        self.touched, self.pending = False, None  # an optimiser step since then; a signal that waits for its end
        try:
            while True:
                try:
                    path.mkdir(parents=True, exist_ok=bool(config.resume))
                    break
                except FileExistsError:  # another run took the name while this one was loading
                    path = free_run_path(config)
        except OSError as error:
            raise UserError(f"the run directory {path} cannot be made: {error.strerror}; --output-dir names another "
                            "place") from error
        self.path, self.lock = path, lock_folder(path)
        written = dataclasses.asdict(config) | {
            "resolved_model_revision": model_revision, "resolved_dataset_revision": dataset_revision,
            "versions": package_versions(), "gpu": gpu_name(config.device)}
        if config.tracker != "none":
            written["tracker_id"] = secrets.token_hex(4)
        with self.writing("figures"):
            (path / "figures").mkdir(exist_ok=True)
        self.folder, self.state = self.reopen(written) if config.resume else (None, None)
        if self.state:
            self.saved = self.state["step"]
            self.progress = self.saved, self.state["questions_drawn"], self.state["random"]
        self.write_json("config.json", written)
        self.gpu, self.tracking = written["gpu"], Tracking(config, path, written, self.saved, self.tell)

    def reopen(self, written):
        """Takes the run's files back to its newest whole checkpoint -> (its folder, its state), or (None, None)."""
        before = stored_config(self.path)
        for name in ("resolved_model_revision", "resolved_dataset_revision"):
            if before.get(name) != written[name]:
                raise UserError(f"--resume {self.path}: {name} was {before.get(name)} and is {written[name]} now")
        if "tracker_id" in before:  # the tracker's run goes on as well
            written["tracker_id"] = before["tracker_id"]
        changed = [f"{name} {then} then, {written['versions'].get(name)} now"
                   for name, then in before.get("versions", {}).items() if written["versions"].get(name) != then]
        self.tell([f"other versions, so numbers may differ a little: {'; '.join(changed)}"] if changed else [])
        with self.writing("files"):
            folder, state = newest_checkpoint(self.path, self.tell)
            step = state["step"] if state else 0
            if step > self.config.steps:
                raise UserError(f"--steps {self.config.steps}: the run {self.path} has made {step} steps already")
            for draft in self.path.glob("*.tmp"):
                shutil.rmtree(draft) if draft.is_dir() else draft.unlink()
            for log in ("metrics.jsonl", "rollouts.jsonl"):
                cut_lines(self.path / log, lambda row: row["step"] <= step)
            cut_lines(self.path / "evaluations.jsonl", lambda row: row["step"] <= step and (
                self.path / f"eval-{row['evaluation']}.json").is_file())  # else it is made again
            cut_lines(self.path / "questions.jsonl", self.remember)
            for evaluation in self.path.glob("eval-step-*.json"):  # of a checkpoint that is damaged
                if int(evaluation.stem[10:]) > step:
                    evaluation.unlink()
        return folder, state

    def remember(self, row):
        """A line of questions.jsonl, if its figure is there, as stored."""
        if not (self.path / row["figure"]).is_file():
            return False
        self.stored[row.get("split"), row["question"]] = row["figure"]
        return True

    def restore(self, policy, optimizer):
        """The run's newest checkpoint into policy, optimiser and random state -> (its step, questions drawn so far).

        (0, 0), and nothing is changed, in a new run and in one that was stopped before its first checkpoint.
        """
        self.policy, self.optimizer = policy, optimizer
        optimizer.register_step_pre_hook(lambda *_: setattr(self, "touched", True))
        if self.state:
            restore_checkpoint(self.folder, self.state, policy, optimizer)
        if self.config.resume:
            tqdm.write(f"going on after step {self.saved} of {self.path}")
        return self.progress[:2]

    def checkpoint(self):
        """Makes `step-N/` of the last complete step, and removes what `--keep-checkpoints` does not keep."""
        step, drawn, random = self.progress
        if step == self.saved:
            return
        with self.writing(f"step-{step}"):
            while self.unsynced:  # the logs of these steps must not be lost where the checkpoint is not
                sync(self.path / self.unsynced.pop())
            save_checkpoint(self.path / f"step-{step}", self.policy.model, self.optimizer, {
                "step": step, "questions_drawn": drawn, "random": random, "config": dataclasses.asdict(self.config),
                "versions": package_versions()})
            self.saved = step
            prune_checkpoints(self.path, self.config.keep_checkpoints)

    def __enter__(self):
        self.handlers = {}
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self.handlers[number] = signal.signal(number, self.interrupt)
        return self

    def __exit__(self, kind, error, traceback):
        try:
            if error is not None:
                self.rescue(error)
        finally:
            for number, handler in self.handlers.items():
                signal.signal(number, handler)
            self.tracking.finish(failed=error is not None)
            self.lock.close()

    def interrupt(self, number, frame):
        """The handler of the first signal."""
        for each in self.handlers:
            signal.signal(each, signal.SIG_DFL)
        self.pending = number
        if not self.touched:
            raise Interrupted(number)
        os.write(2, b"\nfinishing this step first; the same signal again stops at once\n")  # print may be busy

    def rescue(self, error):
        """The last complete step becomes a checkpoint, where the policy still is that of it; says how to go on."""
        step = self.progress[0]
        if isinstance(error, NonFinite):
            name = f"nonfinite-step-{step + 1}.json"
            with contextlib.suppress(UserError):
                self.write_json(name, {"step": step + 1, **error.record})
                error.args = (f"{error}; the batch is in {self.path / name}",)
        if not self.touched:
            try:
                self.checkpoint()
            except (UserError, RuntimeError) as another:  # RuntimeError: the GPU itself may have failed
                tqdm.write(f"step {step} could not be saved: {describe(another)}")
        if self.saved or not isinstance(error, UserError):
            tqdm.write(f"stopped; to go on after step {self.saved}: --resume {self.path}")

    @contextlib.contextmanager
    def writing(self, name):
        """Turns a full disk or a missing permission into a UserError."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or describe(error)
            raise UserError(f"{self.path / name} cannot be written: {reason}; checkpoints already there are good"
                            ) from error

    def write_json(self, name, value):
        """Whole or not at all."""
        text = json.dumps(value, ensure_ascii=False, indent=1, allow_nan=False) + "\n"
        with self.writing(name):
            write_whole(self.path / name, text.encode("utf-8"))

    def read_json(self, name):
        """What a resumed run wrote before it stopped, or None."""
        try:
            return json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def append(self, name, rows):
        with self.writing(name), open(self.path / name, "a", encoding="utf-8") as file:
            file.writelines(json_line(row) for row in rows)
        self.unsynced.add(name)

    def save_step(self, step, metrics, batch, advantages):
        """Files the step, now complete, and prints its line. `batch` is a grpo.Batch, `advantages` (B*G, T)."""
        for question in batch.questions:
            self.store_question(question, "train")
        records = rollout_records(batch, advantages)
        self.append("rollouts.jsonl", ({"step": step, **record} for record in records))
        self.append("metrics.jsonl", [{"step": step, **metrics}])
        self.tracking.log(step, metrics)
        group = records[:batch.rewards.shape[1]]
        if step == 1 or step == self.config.steps or (self.config.save_every and step % self.config.save_every == 0):
            self.tracking.log_group(step, on_white(batch.questions[0].image), group_lines(batch.questions[0], group))
        self.progress = (step, self.progress[1] + len(batch.questions), random_state(batch.rollouts.tokens.device))
        self.touched = False
        self.tell(batch.prompts.downsized)
        tqdm.write(step_line(step, self.config.steps, metrics))
        if self.config.show_samples:
            tqdm.write("\n".join(f"  {line}" for line in group_lines(batch.questions[0], group)))
        if self.pending:
            raise Interrupted(self.pending)

    def store_question(self, question, split):
        """Question and figure, at first use only."""
        key = (split, question.id)  # ids are unique within a split, not across
        if key in self.stored:
            return
        figure, encoded = f"figures/{len(self.stored) + 1:05d}.png", io.BytesIO()
        on_white(question.image).save(encoded, "PNG")
        with self.writing(figure):
            (self.path / figure).write_bytes(encoded.getvalue())
        self.append("questions.jsonl", [{"question": question.id, "split": split, "figure": figure,
                                         "subject": question.subject, "choices": list(question.choices),
                                         "label": question.label, "answer": question.answer}])
        self.unsynced.add(figure)
        self.stored[key] = figure

    def evaluation_records(self, questions, texts, rollouts):
        """One dict a question, for an eval file; the questions are stored."""
        records = []
        for question, text, length, finished in zip(questions, texts, rollouts.lengths.tolist(),
                                                    rollouts.finished.tolist(), strict=True):
            self.store_question(question, self.config.eval_split)
            records.append({"question": question.id, "gold": question.label, "choice": extract_choice(text),
                            "lenient_choice": extract_choice(text, lenient=True), "text": text, "tokens": length,
                            "truncated": not finished})
        return records

    def save_evaluation(self, name, records, metrics):
        """Files the answers, and in evaluations.jsonl their rates with `metrics` (time, energy)."""
        step = int(name[5:]) if name.startswith("step-") else 0
        rates = {f"evaluation/{key}": value["value"] if isinstance(value, dict) else value
                 for key, value in summarize(records).items()}
        self.append("evaluations.jsonl", [{"step": step, "evaluation": name, **rates, **metrics}])
        with self.writing("evaluations.jsonl"):
            sync(self.path / "evaluations.jsonl")
        self.tracking.log(step, rates | metrics)
        self.write_json(f"eval-{name}.json", records)  # last: where it is, the evaluation is not made again

    def finish(self, before, after):
        """Writes and prints the results of two evaluations, each of which may be None, and what the run cost."""
        results = compare(before, after)
        results["cost"] = run_cost(self.path, self.config.electricity_price, bool(self.gpu))
        self.write_json("results.json", results)
        lines = [results_table(results)] if before or after else []
        print("\n".join([*lines, *cost_lines(results["cost"]), f"run directory: {self.path}"]))
        self.tracking.finish()
        return results

    def tell(self, lines):
        """Prints each of the lines at its first time only."""
        for line in lines:
            if line not in self.told:
                self.told.add(line)
                tqdm.write(f"note: {printable(line)}")


def step_line(step, steps, metrics):
    """One step at a glance, in at most 100 columns: len is the mean length in tokens, same the share of groups whose
    rewards are all equal; a distillation, which does not use them, shows its reverse KL there."""
    if metrics["trainer/nonfinite"] and not metrics["train_datums"]:
        learned = "no update: numbers not finite"
    elif metrics["degenerate_fraction"] == 1.0 and not metrics["train_datums"]:
        learned = "no update: equal rewards everywhere"
    elif not metrics["train_datums"]:
        learned = "no update: every completion was cut"
    else:
        learned = (f"loss {short(metrics['trainer/loss_mean'], '+.4f', 7)} grad "
                   f"{short(metrics['trainer/grad_norm'], '.2f', 5)} dlogp {metrics['trainer/dlogp_mean']:.0e}")
    if "opd/reverse_kl_mean" in metrics:
        groups = f"KL {short(metrics['opd/reverse_kl_mean'], '.3f', 6)}"
    else:
        groups = f"same {metrics['degenerate_fraction']:.2f}"
    seconds = metrics["time/sampling"] + metrics["time/learning"] + metrics["time/rest"]
    return (f"step {step:>3}/{steps} reward {metrics['reward']:.2f} format {metrics['format_rate']:.2f} {groups} "
            f"len {metrics['rollout/completion_tokens_mean']:.0f} {learned} "
            f"{short(seconds, '.1f' if seconds < 99.95 else '.0f', 5)}s")


def short(value, form, width):
    """A number in at most `width` characters, where need be as a power of ten."""
    text = f"{value:{form}}"
    return text if len(text) <= width else f"{value:.0e}"


def group_lines(question, records):
    """A question with its right option, and its completions with reward and advantage, a line each."""
    return [printable(f"question {question.id}, right is {question.label}: {question.subject}")] + [
        f"  reward {record['reward']:.0f} advantage {record['advantage']:+.2f} tokens {record['length']}: "
        f"{printable(record['text'])}" for record in records]


def gpu_name(device):
    """The name of the GPU that `--device` means, or None."""
    if device == "cpu" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_name(None if device == "auto" else device)


def rollout_records(batch, advantages):
    """A grpo.Batch -> one dict a completion; its advantage is the mean over its tokens, which GRPO makes all equal."""
    rollouts, group_size = batch.rollouts, batch.rewards.shape[1]
    advantages = (advantages * rollouts.mask).sum(1) / rollouts.lengths
    columns = (rollouts.tokens, rollouts.lengths, rollouts.finished, batch.rewards.flatten(), advantages)
    return [{"question": batch.questions[i // group_size].id, "tokens": tokens[:length], "text": batch.texts[i],
             "choice": extract_choice(batch.texts[i]), "reward": reward, "advantage": advantage, "length": length,
             "truncated": not finished, **batch.token_changes.get(i, {})}
            for i, (tokens, length, finished, reward, advantage) in enumerate(zip(*(c.tolist() for c in columns)))]


def token_texts(tokenizer, tokens):
    """Token ids -> the text that each one adds; a character of several tokens is its last one's. Special tokens: ""."""
    texts, first = [], 0
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[first:end], skip_special_tokens=True)
        whole = not text.endswith("\N{REPLACEMENT CHARACTER}") or end == len(tokens)
        texts.append(text if whole else "")
        first = end if whole else first
    return texts


def batch_metrics(batch, shaped_rewards, waves):
    """What the sampler did -> metrics, under the names of the experiment where it has them."""
    rollouts, tokens = batch.rollouts, batch.rollouts.lengths.sum().item()
    degenerate = batch.degenerate.float().mean().item()
    metrics = {
        "reward": batch.rewards.mean().item(),
        "format_rate": sum(extract_choice(text) is not None for text in batch.texts) / len(batch.texts),
        "degenerate_fraction": degenerate, "informative_fraction": 1 - degenerate,
        "rollout/shaped_reward": shaped_rewards.mean().item(),
        "rollout/completion_tokens_mean": tokens / len(batch.texts),
        "rollout/truncated_fraction": 1 - rollouts.finished.float().mean().item(),
        "rollout/entropy": rollouts.entropies.sum().item() / tokens,
        "rollout/downsized_figures": len(batch.prompts.downsized),
        "rollout/questions": len(batch.questions), "rollout/waves": waves}
    return metrics | {"rate/tokens_per_second": tokens / batch.sampling_seconds,
                      "memory/peak_gib": peak_memory_gib(rollouts.tokens.device)}


def update_metrics(steps, rows, nonfinite, dlogp):
    """The metrics of each optimiser step of an update -> one dict; None where there was no step.

    Means, of ratio_min and ratio_max the extremes, and under *_first the first step's clip share. `dlogp` is (tokens,).
    """
    if not steps:
        names = ("trainer/loss_mean", "trainer/grad_norm", "trainer/dlogp_mean", "trainer/dlogp_max")
        return {"train_datums": 0, "trainer/optimizer_steps": 0, "trainer/nonfinite": nonfinite, **dict.fromkeys(names)}
    pick = {"trainer/ratio_min": min, "trainer/ratio_max": max}
    metrics = {key: pick.get(key, statistics.fmean)(step[key] for step in steps) for key in steps[0]}
    first = {f"{key}_first": value for key, value in steps[0].items() if key.endswith("clip_fraction")}
    return {"train_datums": rows, "trainer/optimizer_steps": len(steps), "trainer/nonfinite": nonfinite, **metrics,
            **first, "trainer/dlogp_mean": dlogp.mean().item(), "trainer/dlogp_max": dlogp.max().item()}


def json_line(row):
    """A line of a log. NaN and infinities, which are no JSON, become null."""
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
    except ValueError:
        return json.dumps(json.loads(json.dumps(row), parse_constant=lambda name: None), ensure_ascii=False) + "\n"


@functools.cache  # every checkpoint asks, and the answer takes 20 ms
def package_versions():
    from importlib import metadata

    versions = {"python": platform.python_version()}
    for package in ("torch", "transformers", "peft", "bitsandbytes", "datasets", "pillow"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def peak_memory_gib(device):
    """Most memory used so far, GiB: of the GPU, or on a CPU of the process; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if platform.system() == "Darwin" else 2**20)


# Evaluation numbers


def rate(count, n):
    """A share with its 95 % Wilson score interval (Wilson 1927); value and interval are None where n is 0."""
    if n == 0:
        return {"value": None, "count": count, "n": n, "low": None, "high": None}
    z, p = 1.959963984540054, count / n
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return {"value": p, "count": count, "n": n, "low": middle - half if count else 0.0,  # exact where rounding is not
            "high": middle + half if count < n else 1.0}


def summarize(records):
    """Rows of an eval file -> its accuracy, format rate and so on."""
    n = len(records)
    right = sum(r["choice"] == r["gold"] for r in records)
    formatted = sum(r["choice"] is not None for r in records)
    return {
        "accuracy": rate(right, n), "format_rate": rate(formatted, n), "accuracy_given_format": rate(right, formatted),
        "lenient_accuracy": rate(sum(r["lenient_choice"] == r["gold"] for r in records), n),
        "truncated_rate": rate(sum(r["truncated"] for r in records), n),
        "mean_tokens": sum(r["tokens"] for r in records) / n}


def mcnemar(before, after):
    """Exact two-sided McNemar test: how likely so uneven a split of the questions that changed would be by chance."""
    pairs = [(b["choice"] == b["gold"], a["choice"] == a["gold"]) for b, a in zip(before, after, strict=True)]
    gained, lost = pairs.count((False, True)), pairs.count((True, False))
    changed = gained + lost
    tail = sum(math.comb(changed, k) for k in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / 2**changed)


def compare(before, after):
    """Rows of two evaluations of the same questions (or None) -> what `results.json` holds."""
    return {"before": summarize(before) if before else None, "after": summarize(after) if after else None,
            "mcnemar_p": mcnemar(before, after) if before and after else None}


def results_table(results):
    """The before/after table as text."""
    columns = [name for name in ("before", "after") if results[name]]
    lines = [f"{'':22}" + "".join(f"{name:>24}" for name in columns)]
    for key in results[columns[0]]:
        cells = []
        for name in columns:
            value = results[name][key]
            if key == "mean_tokens":
                cells.append(f"{value:.1f}")
            elif value["value"] is None:
                cells.append("-")
            else:
                cells.append(f"{value['value']:.1%} ({value['low']:.1%}-{value['high']:.1%})")
        lines.append(f"{key.replace('_', ' '):22}" + "".join(f"{cell:>24}" for cell in cells))
    lines.append(f"n = {results[columns[0]]['accuracy']['n']}, 95 % Wilson intervals")
    if results["mcnemar_p"] is not None:
        lines[-1] += f"; the gain's exact McNemar p = {results['mcnemar_p']:.2g}"
    return "\n".join(lines)
