"""A run's folder: its name, the lock that its process holds, and files that cannot be written."""

import contextlib
import itertools
import json
import os
import re
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from support.checkpoints import check_same_experiment
from support.errors import UserError, describe
from support.files import write_whole
from support.hub import parse_id


def free_run_path(config):
    """The folder of the coming run, or with `--resume` that of the run to continue. An existing one is never taken.

    Raises UserError for a name that cannot be a folder's, a run in use, and settings that do not continue the run.
    """
    if config.resume:
        check_same_experiment(config)
        lock_folder(Path(config.resume)).release()  # a run in use is refused before gigabytes are loaded
        return Path(config.resume)
    root = Path(config.output_dir)
    existing = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise UserError(f"--output-dir {root} cannot hold runs: {existing} is not a folder that can be written to")
    if not config.experiment_name:
        stem = Path(parse_id(config.base_model)[0]).name or "run"
        return next(path for number in itertools.count(1) if not (path := root / f"{stem}-{number}").exists())
    if not re.fullmatch(r"[\w.+-]*\w[\w.+-]*", config.experiment_name):
        raise UserError(f"--experiment-name {config.experiment_name!r}: letters, digits, dot, plus, dash and "
                        "underscore only, since it names a folder")
    if (root / config.experiment_name).exists():
        raise UserError(f"--experiment-name {config.experiment_name}: {root / config.experiment_name} exists already; "
                        "choose another name, or delete that folder")
    return root / config.experiment_name


def make_folder(path, config):
    """Makes the run's folder, under the next free name if another run took `path` meanwhile -> (its path, its lock)."""
    try:
        while True:
            try:
                path.mkdir(parents=True, exist_ok=bool(config.resume))
                return path, lock_folder(path)
            except FileExistsError:  # another run took the name while this one was loading
                path = free_run_path(config)
    except OSError as error:
        raise UserError(f"the run directory {path} cannot be made: {error.strerror}; --output-dir names another "
                        "place") from error


def lock_folder(folder):
    """Locks FOLDER/lock until the lock given back is released or the process dies. UserError names who has it."""
    lock, holder = FileLock(folder / "lock", timeout=0), folder / "lock.pid"
    try:
        lock.acquire()
    except Timeout as error:
        number = holder.read_text(encoding="ascii").strip() if holder.is_file() else "unknown"
        raise UserError(f"the run directory {folder} is in use by another process, number {number}") from error
    except OSError as error:
        raise UserError(f"the run directory {folder} cannot be written: {error.strerror}") from error
    with contextlib.suppress(OSError):  # a full disk: the lock holds without its number
        holder.write_text(f"{os.getpid()}\n", encoding="ascii")
    return lock


@contextlib.contextmanager
def writing(path):
    """Turns a full disk or a missing permission into a UserError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or describe(error)
        raise UserError(f"{path} cannot be written: {reason}; checkpoints already there are good") from error


def write_json(path, value):
    """Whole or not at all."""
    text = json.dumps(value, ensure_ascii=False, indent=1, allow_nan=False) + "\n"
    with writing(path):
        write_whole(path, text.encode("utf-8"))
