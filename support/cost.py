"""What a run cost: seconds, GPU hours, and energy and its price where the driver counts energy.

The energy is the GPU's alone, not the computer's. Its driver counts it, so nothing has to be sampled; reading it needs
the package nvidia-ml-py and a GPU that keeps the count (Volta or newer).
"""

import datetime
import functools
import time

import torch

from support.files import read_lines


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
        return read and read()
    except Exception:  # a driver that stops answering must not stop a run
        return None


class Meter:
    """Time and energy since it was made."""

    def __init__(self, device):
        self.device, self.start, self.joules = device, time.perf_counter(), gpu_joules(device)

    def seconds(self):
        return time.perf_counter() - self.start

    def energy(self, name):
        """-> {"energy/NAME_kwh": ...}; empty without a counter, and where it was reset."""
        before, now = self.joules, gpu_joules(self.device)
        return {} if before is None or now is None or now < before else {f"energy/{name}_kwh": (now - before) / 3.6e6}

    def evaluation(self):
        """-> metrics of an evaluation that ends now."""
        return {"time/evaluation": self.seconds(), **self.energy("evaluation")}


class StepClock:
    """Time and energy of a step. Sampling is from the clock's making to `sampled()`, with encoding and rewards;
    learning from there to `learned()`, with advantages; the rest from there to `metrics()`."""

    def __init__(self, device):
        self.meter = Meter(device)

    def sampled(self):
        self.sampling = self.meter.seconds()

    def learned(self):
        self.learning = self.meter.seconds() - self.sampling

    def metrics(self):
        return {"time/sampling": self.sampling, "time/learning": self.learning,
                "time/rest": self.meter.seconds() - self.sampling - self.learning, **self.meter.energy("step")}


def run_cost(path, electricity_price, gpu):
    """The cost of what a run directory holds, also of a run that goes on. None stands for what is not known.

    From metrics.jsonl and evaluations.jsonl, so it is right after --resume too: a step that was made again counts once.
    Loading and writing files are not in it. `electricity_price` is in yuan per kWh, `gpu` whether there was one.
    """
    rows = [row for log in ("metrics", "evaluations") for row in read_lines(path / f"{log}.jsonl", [])]
    seconds = {part: sum(row.get(f"time/{part}", 0) for row in rows)
               for part in ("sampling", "learning", "rest", "evaluation")}
    wall = sum(seconds.values())
    energy = [row.get("energy/evaluation_kwh" if "evaluation" in row else "energy/step_kwh") for row in rows]
    energy = sum(energy) if gpu and None not in energy else None
    return {"wall_seconds": wall, "sampling_seconds": seconds["sampling"], "learning_seconds": seconds["learning"],
            "evaluation_seconds": seconds["evaluation"], "gpu_hours": wall / 3600 if gpu else None,
            "energy_kwh": energy, "electricity_price": electricity_price,
            "money": None if energy is None else energy * electricity_price}


def cost_lines(cost):
    """The cost as one line of text, or two where there was a GPU."""
    wall, *parts = (datetime.timedelta(seconds=round(cost[f"{part}_seconds"]))
                    for part in ("wall", "sampling", "learning", "evaluation"))
    lines = ["time {}: sampling {}, learning {}, evaluation {}".format(wall, *parts)]
    if cost["gpu_hours"] is not None:
        lines.append(f"GPU hours {cost['gpu_hours']:.2f}")
    if cost["energy_kwh"] is not None:
        lines[-1] += f", {cost['energy_kwh']:.3g} kWh, {cost['money']:.2f} yuan at {cost['electricity_price']:g} a kWh"
    return lines
