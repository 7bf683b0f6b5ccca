"""What a run cost: seconds, GPU hours, and where the driver tells it energy and money.

Energy is the GPU's alone, not the computer's: NVML counts it in the driver, so nothing has to be sampled. It needs the
package nvidia-ml-py and a GPU that keeps the count (Volta or newer).
"""

import functools
import json
import time

import torch


@functools.cache
def energy_reader(device):
    """torch.device -> a function that gives the joules the GPU has used since the driver was loaded, or None."""
    if device.type != "cuda":
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        # By its UUID: torch and the driver may count the GPUs in another order.
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000
    except Exception:  # no package, no driver, an old card, a virtual machine: NVML has an error class for each
        return None


def gpu_joules(device):
    """The GPU's energy counter; None where there is none."""
    read = energy_reader(device)
    try:
        return read() if read else None
    except Exception:  # a driver that stops answering must not stop a run
        return None


def kwh(start, end):
    """Two readings of the counter -> the energy between them; None where one is missing or the counter was reset."""
    return None if start is None or end is None or end < start else (end - start) / 3.6e6


def known(**values):
    """Those that are not None, as metrics named energy/..."""
    return {f"energy/{name}": value for name, value in values.items() if value is not None}


def step_energy(started, sampled, ended):
    """Readings before sampling, between it and learning, and after -> metrics; none where the energy is not known."""
    return known(sampling_kwh=kwh(started, sampled), learning_kwh=kwh(sampled, ended))


class Meter:
    """Time and energy since it was made."""

    def __init__(self, device):
        self.device = device
        self.seconds, self.joules = time.perf_counter(), gpu_joules(device)

    def evaluation(self):
        """-> metrics of an evaluation that ends now."""
        return {"time/evaluation": time.perf_counter() - self.seconds,
                **known(evaluation_kwh=kwh(self.joules, gpu_joules(self.device)))}


def run_cost(path, electricity_price, gpu):
    """The cost of what a run directory holds, also of a run that goes on. None stands for what is not known.

    From metrics.jsonl and evaluations.jsonl, so it is right after --resume too: a step that was made again counts once.
    Loading and writing files are not in it. `electricity_price` is in yuan per kWh, `gpu` whether there was one.
    """
    steps = read_lines(path / "metrics.jsonl")
    evaluations = read_lines(path / "evaluations.jsonl")
    sampling, learning, rest = (total(steps, f"time/{part}") for part in ("sampling", "learning", "rest"))
    evaluation = total(evaluations, "time/evaluation")
    wall = add(sampling, learning, rest, evaluation)
    energy = [total(steps, "energy/sampling_kwh"), total(steps, "energy/learning_kwh"),
              total(evaluations, "energy/evaluation_kwh")] if gpu else [None] * 3
    energy_kwh = add(*energy)
    return {"wall_seconds": wall, "sampling_seconds": sampling, "learning_seconds": learning,
            "evaluation_seconds": evaluation, "gpu_hours": wall / 3600 if gpu and wall is not None else None,
            "energy_kwh": energy_kwh, "sampling_kwh": energy[0], "learning_kwh": energy[1],
            "electricity_price": electricity_price,
            "money": None if energy_kwh is None else energy_kwh * electricity_price}


def add(*values):
    return None if None in values else sum(values)


def total(rows, key):
    """The sum of a column; None where a row lacks it."""
    return add(*(row.get(key) for row in rows))


def read_lines(path):
    """The rows of a JSON-lines file, up to one that is torn; none where there is no file."""
    rows = []
    try:
        with open(path, encoding="utf-8") as file:
            for line in file:
                rows.append(json.loads(line))
    except (OSError, ValueError):
        pass
    return rows


def cost_lines(cost):
    """The cost as one line of text, or two where there was a GPU."""
    parts = [f"{name} {duration(cost[f'{name}_seconds'])}" for name in ("sampling", "learning", "evaluation")]
    time_line = f"time {duration(cost['wall_seconds'])}: {', '.join(parts)}"
    if cost["gpu_hours"] is None:
        return [time_line]
    gpu_line = f"GPU hours {cost['gpu_hours']:.2f}"
    if cost["energy_kwh"] is not None:
        gpu_line += (f", {cost['energy_kwh']:.3g} kWh (sampling {cost['sampling_kwh']:.3g}, learning "
                     f"{cost['learning_kwh']:.3g}), {cost['money']:.2f} yuan at {cost['electricity_price']:g} a kWh")
    return [time_line, gpu_line]


def duration(seconds):
    """3725 -> "1 h 02 min"."""
    if seconds is None:
        return "unknown"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"
