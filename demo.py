"""Vision GRPO on a tiny model and drawn figures: watch grpo.py learn on two CPU cores, with no GPU and no download.

    python demo.py                       # the shipped model
    python demo.py --steps 20 --seed 1   # takes every flag of grpo.py

grpo.py is used as it is, with a local model folder and a local data folder. Two things are toys:
 1. The question: which kind of angle is drawn, acute, right, obtuse or straight. The columns are those of GeoQA.
 2. The policy: a Qwen3.5 of 0.8 M parameters with its own vocabulary, made by demo_model/make.py. It was taught to see
    angles and to answer, and then spoiled on purpose: obtuse angles mostly lack the box, straight ones mostly get a
    wrong letter, the others a little of both. As in the real run, half of what GRPO then gains is format.
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


def draw_angle(degrees, rng, size=96):
    """An angle in the style of GeoQA's figures -> RGBA image, black lines on transparent ground."""
    big = 4 * size  # drawn large and shrunk: Pillow's lines have no smooth edges
    ink = Image.new("L", (big, big))
    pen = ImageDraw.Draw(ink)
    first = rng.uniform(0, 360)
    middle = math.radians(first + degrees / 2)
    shift = 0.25 * math.cos(math.radians(degrees / 2))  # the vertex away from the rays: the angle fills the figure
    x, y = (big * (0.5 - shift * turn + rng.uniform(-0.02, 0.02)) for turn in (math.cos(middle), math.sin(middle)))
    width = rng.randint(8, 20)
    for direction in (math.radians(first), math.radians(first + degrees)):
        length = big * rng.uniform(0.36, 0.46)
        pen.line([(x, y), (x + length * math.cos(direction), y + length * math.sin(direction))], fill=255, width=width)
    dot = width * rng.uniform(0.9, 1.2)  # shows the vertex of a straight angle
    pen.ellipse([x - dot, y - dot, x + dot, y + dot], fill=255)
    figure = Image.new("RGBA", (size, size))
    figure.putalpha(ink.resize((size, size), Image.Resampling.LANCZOS))
    return figure


def draw_rows(count, seed):
    """`count` rows with GeoQA's columns, each kind of angle equally often."""
    rng = random.Random(seed)
    labels = [i % 4 for i in range(count)]
    rng.shuffle(labels)
    return [{"id": i, "image": draw_angle(rng.uniform(*DEGREES[label]), rng), "subject": rng.choice(SUBJECTS),
             "choices": CHOICES, "label": label, "answer": f"{REASONS[label]}，是{CHOICES[label]}。"}
            for i, label in enumerate(labels)]


def write_dataset(folder):
    """Writes train.parquet (512 rows) and test.parquet (100 other figures), where they are not there yet."""
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()  # they would flash for a tenth of a second
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the demo's figures cannot be written to {folder}: {error.strerror}") from error
    # The seeds are constants: --seed changes the training, never the figures, so that runs can be compared.
    for split, count, seed in (("train", 512, 1), ("test", 100, 2)):
        path = folder / f"{split}.parquet"
        if not path.exists():
            draft = folder / f"{split}.{os.getpid()}.tmp"
            Dataset.from_list(draw_rows(count, seed)).to_parquet(draft)
            os.replace(draft, path)


def as_question(row):
    return Question(row["id"], row["image"], row["subject"], tuple(row["choices"]), "ABCD"[row["label"]], row["answer"])


if __name__ == "__main__":
    run_command_line(DemoConfig, main)
