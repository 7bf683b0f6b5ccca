"""The numbers of a training step, and its line in the terminal."""

import platform
import statistics

import torch


def batch_metrics(batch, shaped_rewards, sampling_seconds):
    """A grpo.Batch and its (B, G) rewards after the length penalty -> what the sampler did, as metrics.

    They have the names of the experiment where it has them. Lengths and entropies are those of trained tokens.
    """
    rows = batch.rows
    groups = [rows[first:first + batch.group_size] for first in range(0, len(rows), batch.group_size)]
    equal = statistics.fmean(len({row.reward for row in group}) == 1 for group in groups)
    trained = torch.cat([row.trained for row in rows])
    tokens = trained.sum().item()
    base_kl = {}
    if rows[0].reference_logprobs is not None:  # k1, see losses.ratio_metrics
        difference = torch.cat([row.logprobs - row.reference_logprobs for row in rows])
        base_kl = {"trainer/base_kl_k1": difference[trained].mean().item()}
    return base_kl | {
        "reward": statistics.fmean(row.reward for row in rows),
        **{f"reward/{name}": statistics.fmean(row.rewards[name] for row in rows) for name in rows[0].rewards},
        "format_rate": statistics.fmean(row.reading.choice is not None for row in rows),
        "degenerate_fraction": equal, "informative_fraction": 1 - equal,
        "rollout/shaped_reward": shaped_rewards.mean().item(),
        "rollout/completion_tokens_mean": tokens / len(rows),
        "rollout/truncated_fraction": statistics.fmean(not row.finished for row in rows),
        "rollout/entropy": torch.cat([row.entropies for row in rows])[trained].mean().item(),
        "rollout/downsized_figures": sum(bool(group[0].prompt.note) for group in groups),
        "rollout/questions": len(batch.questions), "rollout/waves": batch.waves,
        "rate/tokens_per_second": tokens / sampling_seconds,
        "memory/peak_gib": peak_memory_gib()}


def update_metrics(steps, rows, nonfinite, dlogp):
    """The metrics of each optimiser step of an update -> one dict; None where there was no step.

    Means, of ratio_min and ratio_max the extremes, and as clip_fraction_first the share of the first optimiser step.
    `dlogp` is (tokens,).
    """
    if not steps:
        names = ("trainer/loss_mean", "trainer/grad_norm", "trainer/dlogp_mean", "trainer/dlogp_max")
        return {"train_datums": 0, "trainer/optimizer_steps": 0, "trainer/nonfinite": nonfinite, **dict.fromkeys(names)}
    pick = {"trainer/ratio_min": min, "trainer/ratio_max": max}
    metrics = {key: pick.get(key, statistics.fmean)(step[key] for step in steps) for key in steps[0]}
    if "trainer/clip_fraction" in metrics:
        metrics["trainer/clip_fraction_first"] = steps[0]["trainer/clip_fraction"]
    return {"train_datums": rows, "trainer/optimizer_steps": len(steps), "trainer/nonfinite": nonfinite, **metrics,
            "trainer/dlogp_mean": dlogp.mean().item(), "trainer/dlogp_max": dlogp.max().item()}


def peak_memory_gib():
    """Most memory used so far, GiB: of a GPU, or without one of the process; None where the system does not tell."""
    if torch.cuda.is_initialized():
        return max(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count()))) / 2**30
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if platform.system() == "Darwin" else 2**20)


def step_line(step, steps, metrics):
    """One step at a glance, in at most 100 columns.

    len is the mean length in tokens, same the share of groups whose rewards are all equal. Distillation does not use
    rewards, and shows its reverse KL there.
    """
    if metrics["train_datums"]:
        learned = (f"loss {short(metrics['trainer/loss_mean'], '+.4f', 7)} grad "
                   f"{short(metrics['trainer/grad_norm'], '.2f', 5)} dlogp {metrics['trainer/dlogp_mean']:.0e}")
    elif metrics["trainer/nonfinite"]:
        learned = "no update: numbers not finite"
    elif metrics["degenerate_fraction"] == 1.0:
        learned = "no update: equal rewards everywhere"
    else:
        learned = "no update: every completion was cut"
    if "opd/reverse_kl_mean" in metrics:
        groups = f"KL {short(metrics['opd/reverse_kl_mean'], '.3f', 6)}"
    else:
        groups = f"same {metrics['degenerate_fraction']:.2f}"
    seconds = metrics["time/sampling"] + metrics["time/learning"] + metrics["time/rest"]
    return (f"step {step:>3}/{steps} reward {metrics['reward']:.2f} format {metrics['format_rate']:.2f} {groups} "
            f"len {metrics['rollout/completion_tokens_mean']:.0f} {learned} "
            f"{short(seconds, '.1f' if seconds < 99.95 else '.0f', 5)}s")


def short(value, form, width):
    """A number in at most `width` characters, as a power of ten if it needs more."""
    text = f"{value:{form}}"
    return text if len(text) <= width else f"{value:.0e}"
