"""The run directory, the lines in the terminal, and the numbers of an evaluation.

    runs/NAME/config.json        settings, resolved revisions, versions
              metrics.jsonl      one line a step
              rollouts.jsonl     one line a completion
              questions.jsonl    each question used, once; its figure under figures/
              step-25/ ...       LoRA adapters in PEFT's format
              eval-base.json, eval-step-100.json, results.json
"""

import dataclasses
import json
import math
import os
import platform
import re
from pathlib import Path

import torch
from tqdm import tqdm

from hub import UserError
from reward import extract_choice
from vision_tokens import on_white


def free_run_path(config):
    """The folder of the coming run; an existing one is never taken. Raises UserError for a name that is no name."""
    root = Path(config.output_dir)
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
    """Writes one run's files. Every line is flushed, so that a run can be read while it goes on."""

    def __init__(self, path, config, model_revision, dataset_revision):
        self.path, self.config = path, config
        self.stored, self.told = {}, set()
        try:
            (path / "figures").mkdir(parents=True)
        except OSError as error:
            raise UserError(f"the run directory {path} cannot be made: {error.strerror}; --output-dir names another "
                            "place") from error
        versions = {"python": platform.python_version()}
        for package in ("torch", "transformers", "peft", "bitsandbytes", "datasets", "pillow"):
            versions[package] = _version(package)
        self.write_json("config.json", dataclasses.asdict(config) | {
            "resolved_model_revision": model_revision, "resolved_dataset_revision": dataset_revision,
            "versions": versions})

    def write_json(self, name, value):
        """Whole or not at all: written beside the file, then renamed over it."""
        draft = self.path / f"{name}.tmp"
        draft.write_text(json.dumps(value, ensure_ascii=False, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(draft, self.path / name)

    def append(self, name, rows):
        with open(self.path / name, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

    def save_step(self, step, metrics, batch, advantages):
        """Files the step and prints its line. `batch` is a grpo.Batch, `advantages` (B*G, T)."""
        for question in batch.questions:
            self.store_question(question)
        records = rollout_records(batch, advantages)
        self.append("rollouts.jsonl", ({"step": step, **record} for record in records))
        self.append("metrics.jsonl", [{"step": step, **metrics}])
        self.tell(batch.prompts.downsized)
        self.show_step(step, metrics, records[:batch.rewards.shape[1]] if self.config.show_samples else [])

    def store_question(self, question):
        """Question and figure, at first use only."""
        key = (question.id, question.subject)  # ids are unique within a split, not across
        if key in self.stored:
            return
        self.stored[key] = figure = f"figures/{len(self.stored) + 1:05d}.png"
        on_white(question.image).save(self.path / figure)
        self.append("questions.jsonl", [{"question": question.id, "figure": figure, "subject": question.subject,
                                         "choices": list(question.choices), "label": question.label,
                                         "answer": question.answer}])

    def tell(self, lines):
        """Prints each of the lines at its first time only."""
        for line in lines:
            if line not in self.told:
                self.told.add(line)
                tqdm.write(f"note: {line}")

    def show_step(self, step, metrics, group):
        """The step's summary line, and the completions of `group` where there are any."""
        if metrics["degenerate_fraction"] == 1.0 and not metrics["train_datums"]:
            learned = "no update: the rewards of every group are all equal"
        elif not metrics["train_datums"]:
            learned = "no update: every completion that could train was cut"
        else:
            learned = (f"loss {metrics['trainer/loss_mean']:+.4f} grad {metrics['trainer/grad_norm']:.2f} "
                       f"|dlogp| {metrics['trainer/dlogp_mean']:.0e}")
        if "opd/reverse_kl_mean" in metrics:
            learned = f"reverse KL {metrics['opd/reverse_kl_mean']:.3f} {learned}"
        tqdm.write(f"step {step:>3}/{self.config.steps} reward {metrics['reward']:.2f} format "
                   f"{metrics['format_rate']:.2f} same {metrics['degenerate_fraction']:.2f} tokens "
                   f"{metrics['rollout/completion_tokens_mean']:.0f} {learned} "
                   f"{metrics['time/sampling'] + metrics['time/learning'] + metrics['time/rest']:.1f} s")
        for record in group:
            tqdm.write(f"  question {record['question']} reward {record['reward']:.0f} advantage "
                       f"{record['advantage']:+.2f} tokens {record['length']}: {printable(record['text'])}")


def rollout_records(batch, advantages):
    """A grpo.Batch -> one dict a completion; its advantage is the mean over its tokens, which GRPO makes all equal."""
    rollouts, group_size = batch.rollouts, batch.rewards.shape[1]
    advantages = (advantages * rollouts.mask).sum(1) / rollouts.lengths
    columns = (rollouts.tokens, rollouts.lengths, rollouts.finished, batch.rewards.flatten(), advantages)
    return [{"question": batch.questions[i // group_size].id, "tokens": tokens[:length], "text": batch.texts[i],
             "choice": extract_choice(batch.texts[i]), "reward": reward, "advantage": advantage, "length": length,
             "truncated": not finished}
            for i, (tokens, length, finished, reward, advantage) in enumerate(zip(*(c.tolist() for c in columns)))]


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


def printable(text):
    """Text for the terminal on one line: control characters, which could move its cursor, are escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def describe(error):
    """An exception as part of one line."""
    return printable(" ".join(str(error).split()))[:300] or type(error).__name__


def _version(package):
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


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
    if results["mcnemar_p"] is not None:
        lines.append(f"n = {results['before']['accuracy']['n']}, 95 % Wilson intervals; the gain's exact McNemar "
                     f"p = {results['mcnemar_p']:.2g}")
    return "\n".join(lines)
