"""The numbers of a training step, and its line in the terminal."""

import statistics

import torch


def batch_metrics(batch, shaped_rewards, sampling_seconds):
    """A grpo.Batch and its (B, G) rewards after the length penalty -> metrics, tokens being those that train."""
    rows = batch.rows
    equal = (batch.rewards == batch.rewards[:, :1]).all(1).double().mean().item()
    trained = torch.cat([row.trained for row in rows])
    tokens = trained.sum().item()
    peak = max(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count())), default=0)
    metrics = {
        "reward": statistics.fmean(row.reward for row in rows),
        **{f"reward/{name}": statistics.fmean(row.rewards[name] for row in rows) for name in rows[0].rewards},
        "format_rate": statistics.fmean(row.reading.choice is not None for row in rows),
        "degenerate_fraction": equal, "informative_fraction": 1 - equal,
        "rollout/shaped_reward": shaped_rewards.mean().item(),
        "rollout/completion_tokens_mean": tokens / len(rows),
        "rollout/truncated_fraction": statistics.fmean(not row.finished for row in rows),
        "rollout/entropy": torch.cat([row.entropies for row in rows])[trained].mean().item(),
        "rollout/downsized_figures": sum(bool(row.prompt.note) for row in rows[::batch.group_size]),
        "rollout/questions": len(batch.questions), "rollout/waves": batch.waves,
        "rate/tokens_per_second": tokens / sampling_seconds,
        "memory/peak_gib": peak / 2**30 or None}
    if rows[0].reference_logprobs is not None:  # k1, see losses.ratio_metrics
        difference = torch.cat([row.logprobs - row.reference_logprobs for row in rows])
        metrics["trainer/base_kl_k1"] = difference[trained].mean().item()
    return metrics


def update_metrics(steps, rows, nonfinite, dlogp):
    """The metrics of each optimiser step of an update -> one dict of means and extremes. `dlogp` is (tokens,)."""
    counts = {"train_datums": rows if steps else 0, "trainer/optimizer_steps": len(steps),
              "trainer/nonfinite": nonfinite}
    if not steps:
        return counts | {f"trainer/{name}": None for name in ("loss_mean", "grad_norm", "dlogp_mean", "dlogp_max")}
    pick = {"trainer/ratio_min": min, "trainer/ratio_max": max}
    metrics = {key: pick.get(key, statistics.fmean)(step[key] for step in steps) for key in steps[0]}
    if "trainer/clip_fraction" in metrics:
        metrics["trainer/clip_fraction_first"] = steps[0]["trainer/clip_fraction"]
    return counts | metrics | {"trainer/dlogp_mean": dlogp.mean().item(), "trainer/dlogp_max": dlogp.max().item()}


def step_line(step, steps, metrics):
    """One step in at most 100 columns; `same` is the share of groups whose rewards are all equal."""
    if metrics["train_datums"]:
        learned = (f"loss {short(metrics['trainer/loss_mean'], '+.4f', 7)} grad "
                   f"{short(metrics['trainer/grad_norm'], '.2f', 5)} dlogp {metrics['trainer/dlogp_mean']:.0e}")
    else:
        learned = "no update: " + ("numbers not finite" if metrics["trainer/nonfinite"] else
                                   "equal rewards everywhere" if metrics["degenerate_fraction"] == 1 else
                                   "every completion was cut")
    groups = f"same {metrics['degenerate_fraction']:.2f}"
    if "opd/reverse_kl_mean" in metrics:
        groups = f"KL {short(metrics['opd/reverse_kl_mean'], '.3f', 6)}"
    seconds = metrics["time/sampling"] + metrics["time/learning"]
    return (f"step {step:>3}/{steps} reward {metrics['reward']:.2f} format {metrics['format_rate']:.2f} {groups} "
            f"len {metrics['rollout/completion_tokens_mean']:.0f} {learned} "
            f"{short(seconds, '.1f' if seconds < 99.95 else '.0f', 5)}s")


def short(value, form, width):
    """A number in at most `width` characters, as a power of ten if it needs more."""
    text = f"{value:{form}}"
    return text if len(text) <= width else f"{value:.0e}"
