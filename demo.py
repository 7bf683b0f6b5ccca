"""Vision GRPO on a tiny model and drawn figures: watch grpo.py learn on two CPU cores, with no GPU and no download.

    python demo.py                       # the shipped model
    python demo.py --steps 20 --seed 1   # takes every flag of grpo.py

What learns here is grpo.py as it is: it gets a local model folder and a local data folder, as anybody may give it
theirs, and does not know that this is a demo. What is a toy:
 1. The question is which kind of angle is drawn: acute, right, obtuse or straight. The columns are those of GeoQA.
 2. The policy is a Qwen3.5 of 0.8 M parameters with a vocabulary of its own (demo_model/make.py made it). It was taught
    to see angles and to answer, and then spoiled on purpose: under obtuse angles it mostly leaves out the box, under
    straight ones it mostly names a wrong letter, and a little of both elsewhere. As in the real run, half of what GRPO
    then gains is format.
"""

if __name__ == "__main__":  # before torch, so that Ctrl-C is no traceback while libraries load
    from support.interrupts import quiet_while_loading

    quiet_while_loading()

import math
import os
import random
from dataclasses import dataclass
from pathlib import Path

# Threads that spin while they wait make this many times slower where something else keeps a core busy.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from PIL import Image, ImageDraw

import grpo
from geoqa import Question
from support.command_line import run_command_line
from support.errors import UserError

MODEL_FOLDER = Path(__file__).resolve().parent / "demo_model"
CHOICES = ["锐角", "直角", "钝角", "平角"]
DEGREES = [(25, 50), (90, 90), (130, 150), (180, 180)]  # apart, so that each figure has one right answer
REASONS = ["夹角小于直角", "两边互相垂直", "夹角大于直角", "两边成一条直线"]
SUBJECTS = ["如图，图中所画的角是哪一种角？", "看图判断，这是哪一种角？", "图中的角属于下列哪一种？"]


@dataclass
class DemoConfig(grpo.Config):
    base_model: str = str(MODEL_FOLDER)
    dataset: str = "runs/demo-data"  # drawn if missing
    device: str = "cpu"
    steps: int = 80
    max_tokens: int = 16
    learning_rate: float = 1e-3
    eval_batch_size: int = 100


def main(config, task=grpo.GEOQA):
    if config.dataset == DemoConfig.dataset:
        write_dataset(Path(config.dataset))
    return grpo.main(config, task)


def as_question(row):
    return Question(row["id"], row["image"], row["subject"], tuple(row["choices"]), "ABCD"[row["label"]], row["answer"])


if __name__ == "__main__":
    run_command_line(DemoConfig, main)
