r"""GeoQA rows -> Question, and the text of the prompt.

GeoQA: 5,010 Chinese geometry questions with a figure and four options (train 3,503 / test 759 / dev 748). Two layouts:
  raw       data/*.parquet in name order, the split of each row in the column `original_split` (that of the hub)
  prepared  train.parquet, test.parquet, dev.parquet, of which only the one asked for must be there
The raw layout wins: the published test set is defined on it. Columns: see CHECKS; `answer` may be absent.
"""

import io
import reprlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, UnidentifiedImageError

from support.errors import UserError, describe
from support.hub import hub_folder

SPLITS = ("train", "test", "dev")
TEST_SEED = 42  # a constant: the seed of a run must never choose its test set
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF")  # PIL's reader of EPS would start another program
MAX_ASPECT_RATIO = 200  # the image processor refuses figures beyond it
INSTRUCTION = r"请简要推理，最后把正确选项的字母写在\boxed{}中，即以\boxed{A}、\boxed{B}、\boxed{C}、\boxed{D}之一结尾。"


def _is_text(value):
    return isinstance(value, str) and bool(value.strip())


CHECKS = {  # column: what its value must pass, and how to say so; `type` and not isinstance, since True is an int
    "id": (lambda value: type(value) in (int, str), "a whole number or a string"),
    "image": (lambda value: value is None or isinstance(value, bytes | dict), "an encoded figure"),
    "subject": (_is_text, "a non-empty string"),
    "choices": (lambda value: isinstance(value, list) and len(value) == 4 and all(map(_is_text, value)),
                "a list of four non-empty strings"),
    "label": (lambda value: type(value) is int and 0 <= value <= 3, "one of 0..3"),
    "answer": (lambda value: isinstance(value, str | None), "a string"),
    "original_split": (lambda value: value in SPLITS, f"one of {', '.join(SPLITS)}"),
}


@dataclass(frozen=True)
class Question:
    id: int | str
    image: Image.Image | None  # decoded, in any PIL mode; vision_tokens.on_white makes it RGB
    subject: str
    choices: tuple[str, str, str, str]
    label: str  # "A".."D"
    answer: str = ""  # the worked solution, never in the student's prompt


class Questions(Sequence):
    """Questions, each figure decoded at access: thousands do not fit in memory at once. Slices are Questions too."""

    def __init__(self, rows, revision, notes):
        self._rows, self.revision, self.notes = rows, revision, notes  # commit or "local"; lines for the user

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return Questions(self._rows[index], self.revision, self.notes)
        row = self._rows[index]
        return Question(row["id"], _decode(row["image"]), row["subject"], tuple(row["choices"]), "ABCD"[row["label"]],
                        row.get("answer") or "")


def load_geoqa(dataset, split, test_size=100, seed=42, max_samples=0):
    """Loads one split of a hub id (also id@revision) or a local folder -> Questions.

    train  all rows, shuffled with `seed`
    test   the last `test_size` rows (0: all) of the split shuffled with 42, whatever `seed` is
    dev    all rows in file order
    `max_samples` above 0 then keeps the first so many. Figures that do not decode are left out last: they never change
    which other rows are chosen, and more than 1 % of them is an error. UserError names the file, row and column.
    """
    folder, revision = hub_folder(dataset, "dataset", ["data/*.parquet", "*.parquet"])
    raw, prepared = sorted(folder.glob("data/*.parquet")), folder / f"{split}.parquet"
    notes = [f"{dataset} holds data/*.parquet, so {prepared.name} is not used"] if raw and prepared.exists() else []
    if not raw and not prepared.exists():
        raise UserError(f"{dataset}: neither data/*.parquet nor {prepared.name} in this folder")
    rows = [row for path in raw or [prepared] for row in _read(path, folder, split if raw else None)]
    if not rows:
        raise UserError(f"{dataset}: the {split} split has no rows")
    if split != "dev":  # as Dataset.shuffle of the library `datasets` does, by which the test set was published
        rng = np.random.default_rng(TEST_SEED if split == "test" else seed)
        rows = [rows[i] for i in rng.permutation(len(rows))]
    for wanted, name in (test_size if split == "test" else 0, "test_size"), (max_samples, "max_samples"):
        if wanted > len(rows):
            notes.append(f"the {split} split has {len(rows)} rows, fewer than the {wanted} of {name}: all are used")
        elif wanted:
            rows = rows[-wanted:] if name == "test_size" else rows[:wanted]
    good, bad = [], []
    for row in rows:
        try:
            _decode(row["image"])
            good.append(row)
        except ValueError as error:
            bad.append(f"{row['file']}, row id {row['id']!r}, column image: {error}")
    if len(bad) > 0.01 * len(rows):
        raise UserError(f"{len(bad)} of {len(rows)} figures cannot be used, more than 1 %: " + "; ".join(bad[:3]))
    return Questions(good, revision, notes + [f"left out: {line}" for line in bad])


def format_question(question, with_solution=False):
    """The user turn's text, which the figure follows; `with_solution` is for a teacher, never for the student."""
    # An option that brings its own line break would look like two.
    options = [f"{letter}. {' '.join(choice.split())}" for letter, choice in zip("ABCD", question.choices, strict=True)]
    solution = [f"参考解答：{question.answer.strip()}"] if with_solution else []
    return "\n".join([question.subject.strip(), *options, *solution, INSTRUCTION])


def _read(path, folder, split):
    """Reads one parquet file -> checked rows, dicts with their file's name; only those of `split` unless it is None."""
    import pyarrow.parquet

    file = path.relative_to(folder).as_posix()
    columns = [name for name in CHECKS if name != "answer" and (split or name != "original_split")]
    try:
        with pyarrow.parquet.ParquetFile(path) as parquet:
            for column in columns:
                if (count := parquet.schema_arrow.names.count(column)) != 1:
                    raise UserError(f"{file}, column {column}: expected once, found {count} times")
            table = parquet.read([*columns, "answer"])
            table.validate(full=True)  # otherwise bytes that are no UTF-8 raise only when they are looked at
    except (OSError, ValueError, pyarrow.ArrowException) as error:  # ValueError: a column's name that is no UTF-8
        reason = f"{type(error).__name__}: {describe(error)}"
        raise UserError(f"{file} of {folder} is not a readable parquet file: {reason}") from error
    rows = []
    for row in table.to_pylist():
        if split and row["original_split"] != split and row["original_split"] in SPLITS:
            continue
        for column, value in row.items():
            is_right, expected = CHECKS[column]
            if not is_right(value):
                raise UserError(f"{file}, row id {row['id']!r}, column {column}: "
                                f"{reprlib.repr(value)} is not {expected}")
        rows.append(row | {"file": file})
    return rows


def _decode(cell):
    """Decodes a row's figure ({bytes, path} or bytes) -> PIL image, its first frame. ValueError says why not."""
    encoded = cell.get("bytes") if isinstance(cell, dict) else cell
    if not encoded:
        raise ValueError("no bytes")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(encoded), formats=FORMATS)
            image.load()
    except UnidentifiedImageError as error:  # its own message holds a memory address
        raise ValueError(f"none of {', '.join(FORMATS)}") from error
    except Exception as error:  # Pillow's readers raise nearly anything on damaged bytes
        raise ValueError(f"{type(error).__name__}: {describe(error)}") from error
    if max(image.size) > MAX_ASPECT_RATIO * min(image.size):
        raise ValueError(f"{image.width} x {image.height} pixels, an aspect ratio above {MAX_ASPECT_RATIO}")
    return image
