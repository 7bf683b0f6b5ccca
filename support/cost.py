"""What a run cost: seconds, GPU hours, and where the driver counts it the GPU's energy, with its price."""

import datetime
import time

import torch

from support.files import read_lines


def gpu_joules(device):
    """The joules that a GPU has used since its driver was loaded; None where nobody counts them."""
    if device.type != "cuda":
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        # By its UUID: torch and the driver may count the GPUs in another order.
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        return pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000
    except Exception:  # no package, no driver, a card older than Volta: NVML has an error class for each
        return None


class Meter:
    """Time and energy since it was made."""

    def __init__(self, device):
        self.device, self.start, self.joules = device, time.perf_counter(), gpu_joules(device)

    def seconds(self):
        return time.perf_counter() - self.start

    def energy(self, name):
        """-> {"energy/NAME_kwh": ...}, or {} where it is not known."""
        before, now = self.joules, gpu_joules(self.device)
        return {} if None in (before, now) else {f"energy/{name}_kwh": (now - before) / 3.6e6}

    def evaluation(self):
        return {"time/evaluation": self.seconds(), **self.energy("evaluation")}


class StepClock(Meter):
    """Sampling, with encoding and rewards, ends at `sampled()`; learning, with advantages, at `learned()`."""

    def sampled(self):
        self.sampling = self.seconds()

    def learned(self):
        self.learning = self.seconds() - self.sampling

    def metrics(self):
        return {"time/sampling": self.sampling, "time/learning": self.learning, **self.energy("step")}


def run_cost(path, electricity_price, gpu):
    """The cost of the steps and evaluations in a run's logs, the price in yuan per kWh; None: not known."""
    rows = [row for log in ("metrics", "evaluations") for row in read_lines(path / f"{log}.jsonl", [])]
    seconds = {f"{part}_seconds": sum(row.get(f"time/{part}", 0) for row in rows)
               for part in ("sampling", "learning", "evaluation")}
    wall = sum(seconds.values())
    energy = [row.get("energy/step_kwh", row.get("energy/evaluation_kwh")) for row in rows]
    energy = sum(energy) if gpu and None not in energy else None
    return {"wall_seconds": wall, **seconds, "gpu_hours": wall / 3600 if gpu else None, "energy_kwh": energy,
            "electricity_price": electricity_price, "money": None if energy is None else energy * electricity_price}


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
