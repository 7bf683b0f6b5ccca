"""Files of a run: JSON and JSON lines read whatever state they are in, and bytes written whole or not at all."""

import json
import math
import os

from support.errors import describe

LARGEST = 1e300  # numbers beyond it overflow where they are added or divided


def parse(text):
    """JSON -> its value, NaN and infinities, which browsers do not read, as None. ValueError where it is damaged."""
    try:
        return json.loads(text, parse_constant=lambda name: None, parse_float=finite)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def finite(digits):
    value = float(digits)
    return value if math.isfinite(value) else None  # 1e999


def fits(row, fields):
    """Whether a row has each of `fields` ({name: type or types}); an optional one has NoneType among its types."""
    return isinstance(row, dict) and all(
        isinstance(row.get(name), kind) and not (isinstance(row.get(name), int) and abs(row[name]) > LARGEST)
        for name, kind in fields.items())


def read_json(path, notes, kind=object):
    """The value of a JSON file, which is a `kind`; or None, and a line in `notes` that says why."""
    try:
        value = parse(path.read_text(encoding="utf-8", errors="replace"))
        if isinstance(value, kind):
            return value
        notes.append(f"{path.name} is damaged")
    except FileNotFoundError:
        notes.append(f"{path.name} is missing")
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} cannot be read ({describe(error)})")


def read_lines(path, notes, fields=None):
    """Yields the rows of a JSON-lines file that have `fields`; the others, such as a torn last line, are counted."""
    damaged = 0
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    row = parse(line)
                except ValueError:
                    row = None
                if fits(row, fields or {}):
                    yield row
                else:
                    damaged += 1
    except FileNotFoundError:
        notes.append(f"{path.name} is missing")
    except OSError as error:
        notes.append(f"{path.name} cannot be read ({describe(error)})")
    if damaged:
        notes.append(f"{path.name}: {damaged} damaged line{'s' if damaged > 1 else ''} left out")


def write_whole(path, data):
    """Bytes to a file, whole or not at all: written beside it, forced to the disk, then renamed over it."""
    draft = path.with_name(f"{path.name}.tmp")
    draft.write_bytes(data)
    sync(draft)
    os.replace(draft, path)
    sync(path.parent)


def sync(path):
    """Forces a file, or a folder's names, to the disk: a power failure then finds them there."""
    if path.is_dir() and os.name == "nt":
        return  # Windows opens no folders, and keeps its names in order itself
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
