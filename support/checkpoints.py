"""What a run needs to go on after a stop: its settings, the lock, checkpoints, random state. Nothing of GRPO.

    step-25/adapter_model.safetensors, adapter_config.json   the adapter; loads with PeftModel.from_pretrained
            optimizer.safetensors                            AdamW's moments and step counts, by parameter name
            state.json                                       step, questions drawn, random state, settings, versions

Only safetensors and JSON are read. A checkpoint is written beside its place and renamed, so that one which has its name
is whole; checksums in state.json tell where a disk or a person has changed it since.
"""

import base64
import dataclasses
import hashlib
import json
import math
import os
import random
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from support.errors import UserError

CHECKED = ("adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors")  # by their SHA-256

# Settings that a resumed run may change: the course of the training is the same with any of them, up to rounding.
# With other `rollouts_at_once` the draws are others, from the same distribution: a smaller card must be able to go on.
HARMLESS = {"resume", "steps", "save_every", "keep_checkpoints", "show_samples", "on_nonfinite", "evaluate",
            "eval_batch_size", "tokens_per_micro_batch", "rollouts_at_once", "fused_kernels",
            "activation_checkpointing", "electricity_price", "tracker", "swanlab_mode", "swanlab_project",
            "log_token_changes"}


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM. A KeyboardInterrupt, since no `except Exception` on the way must stop it."""

    def __init__(self, signum):
        self.signum = signum


class NonFinite(UserError):
    """A loss, gradient or log-probability that is no number. `record` is the batch, as JSON can hold it."""

    def __init__(self, message, record):
        super().__init__(message)
        self.record = record


# Settings


def resumed_config(config, given):
    """The settings of the run in `config.resume`, changed by the fields named in `given` (those of the command line).

    Revisions are those that the run resolved, so that a newer commit on the hub changes nothing.
    """
    stored = stored_config(config.resume)
    taken = {}
    for field in dataclasses.fields(config):
        if field.name in given or field.name not in stored:
            continue
        value = stored[field.name]
        if type(field.default) is float and type(value) is int:
            value = float(value)
        if field.default is not None and type(value) is not type(field.default):
            raise UserError(f"--resume {config.resume}: {field.name} is {value!r} in config.json")
        taken[field.name] = value
    for kind in ("model", "dataset"):
        revision = stored.get(f"resolved_{kind}_revision", "local")
        if revision != "local" and f"{kind}_revision" not in given:
            taken[f"{kind}_revision"] = revision
    return dataclasses.replace(config, **taken | {"resume": config.resume})


def stored_config(path):
    """The run directory's config.json. UserError where there is none."""
    try:
        stored = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--resume {path}: no run directory, config.json cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"--resume {path}: config.json is damaged: {error}") from error
    if not isinstance(stored, dict):
        raise UserError(f"--resume {path}: config.json is no table of settings")
    return stored


def check_same_experiment(config):
    """Raises UserError, with the flag's name, where `config` would change the experiment that it resumes."""
    stored = stored_config(config.resume)
    for name, value in dataclasses.asdict(config).items():
        same = stored.get(name, value), stored.get(f"resolved_{name}")  # a revision may be spelled out
        if name not in HARMLESS and value not in same:
            raise UserError(f"--{name.replace('_', '-')} {value}: the run {config.resume} was made with "
                            f"{stored[name]!r}, and another value makes it another experiment")


# Files


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


def cut_lines(path, wanted=lambda row: True):
    """Cuts a JSON-lines file in front of its first line that is torn or not `wanted`. Needs no room on the disk."""
    if not path.exists():
        return
    end = 0
    with open(path, "r+b") as file:
        for line in file:
            try:
                row = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                row = None
            if not isinstance(row, dict) or not wanted(row):
                break
            end += len(line)
        file.truncate(end)


def lock_folder(folder):
    """Locks FOLDER/lock until the file given back is closed or the process dies. UserError names who has it."""
    try:
        file = open(folder / "lock", "a+", encoding="ascii")  # "a" leaves what another process has written
    except OSError as error:
        raise UserError(f"the run directory {folder} cannot be written: {error.strerror}") from error
    try:
        if os.name == "nt":
            import msvcrt

            file.seek(2**20)  # Windows keeps others from reading what is locked; the number stands at the start
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        raise UserError(f"the run directory {folder} is in use by another process, number {holder}") from error
    try:
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
    except OSError:
        pass  # a full disk: the lock holds without its number
    return file


# Random state


def random_state(device):
    """Random state of Python, numpy, torch on the CPU, and torch on `device` where that is a GPU, for JSON."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {"python": [version, list(words), gauss],
            "numpy": [name, keys.tolist(), position, has_gauss, cached],
            "torch": to_text(torch.get_rng_state()),
            "cuda": to_text(torch.cuda.get_rng_state(device)) if device.type == "cuda" else None}


def set_random_state(state, device):
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(to_bytes(state["torch"]))
    if device.type == "cuda":
        torch.cuda.set_rng_state(to_bytes(state["cuda"]), device)


def to_text(tensor):
    return base64.b64encode(tensor.numpy().tobytes()).decode()


def to_bytes(text):
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


# Checkpoints


def checkpoint_folders(path):
    """[(step, folder)] of a run directory, the newest first."""
    found = [(int(folder.name[5:]), folder) for folder in path.glob("step-*")
             if folder.name[5:].isascii() and folder.name[5:].isdigit() and folder.is_dir()]
    return sorted(found, reverse=True)


def save_checkpoint(folder, model, optimizer, state):
    """Writes adapter, optimiser and `state` (a dict for JSON) to `folder`. Costs three times the adapter's size."""
    draft = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        model.save_pretrained(draft, save_embedding_layers=False)
        (draft / "README.md").unlink(missing_ok=True)  # PEFT's empty form, with this machine's folders in it
        save_file(optimizer_tensors(model, optimizer), draft / "optimizer.safetensors")
        state = state | {"sha256": {name: file_digest(draft / name) for name in CHECKED}}
        text = json.dumps(state | {"seal": seal(state)}, ensure_ascii=False)
        (draft / "state.json").write_text(text + "\n", encoding="utf-8")
        for file in draft.iterdir():
            sync(file)
        sync(draft)
        os.replace(draft, folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)  # a full disk needs the room
        raise
    sync(folder.parent)


def newest_checkpoint(path, tell):
    """The newest checkpoint that is as it was written -> (folder, state), or (None, None).

    Those that are not are set aside, and `tell` gets a list with one line for each.
    """
    for _, folder in checkpoint_folders(path):
        state, problem = read_state(folder)
        if state:
            return folder, state
        aside = folder.with_name(f"{folder.name}.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(folder, aside)
        tell([f"the checkpoint {folder} is not used and now named {aside.name}: {problem}"])
    return None, None


def read_state(folder):
    """-> (what state.json holds, None), or (None, what is wrong with the checkpoint)."""
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        if state.pop("seal") != seal(state):
            return None, "state.json has been changed"
        for name in CHECKED:
            if file_digest(folder / name) != state["sha256"][name]:
                return None, f"{name} is torn or has been changed"
    except OSError as error:
        return None, f"{Path(error.filename or folder).name}: {error.strerror}"
    except (ValueError, LookupError, TypeError, AttributeError):
        return None, "state.json is torn or has been changed"
    return state, None


def restore_checkpoint(folder, state, policy, optimizer):
    """Puts a checkpoint into the policy's adapter, its optimiser and the random state, bit for bit."""
    from peft import get_peft_model_state_dict

    saved = load_file(folder / "adapter_model.safetensors")
    ours = get_peft_model_state_dict(policy.model, save_embedding_layers=False)  # shares memory with the adapter
    if {name: p.shape for name, p in saved.items()} != {name: p.shape for name, p in ours.items()}:
        raise UserError(f"the checkpoint {folder} does not fit the model, which is another than when the run began")
    with torch.no_grad():
        for name, parameter in ours.items():
            parameter.copy_(saved[name])
    tensors = load_file(folder / "optimizer.safetensors")
    groups, states = optimizer.state_dict()["param_groups"], {}
    for i, name in enumerate(trainable_names(policy.model)):
        keys = [key for key in ("step", "exp_avg", "exp_avg_sq") if f"{name}.{key}" in tensors]
        if keys:  # before its first step an optimiser has none
            states[i] = {key: tensors[f"{name}.{key}"].clone() for key in keys}  # else a view of the file
    optimizer.load_state_dict({"state": states, "param_groups": groups})
    set_random_state(state["random"], policy.device)


def prune_checkpoints(path, keep):
    """Removes all but the `keep` newest checkpoints; 0 keeps all. Renamed first: one with its name is always whole."""
    for _, folder in checkpoint_folders(path)[keep:] if keep else []:
        gone = folder.with_name(f"{folder.name}.tmp")
        shutil.rmtree(gone, ignore_errors=True)
        os.replace(folder, gone)
        shutil.rmtree(gone, ignore_errors=True)


def trainable_names(model):
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def optimizer_tensors(model, optimizer):
    """AdamW's state as named tensors."""
    states = optimizer.state_dict()["state"]
    return {f"{name}.{key}": states[i][key].contiguous() for i, name in enumerate(trainable_names(model))
            if i in states for key in ("step", "exp_avg", "exp_avg_sq")}


def file_digest(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def seal(state):
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


# Numbers that are none


def nonfinite_record(prompts, rollouts, rows, advantages, logprobs, loss, norm):
    """What went into an update that gave no number, one entry a completion; NaN and infinities as text, for JSON."""
    group_size, completions = len(rollouts.tokens) // len(prompts.ids), []
    for row in rows.tolist():
        n = int(rollouts.lengths[row])
        completions.append({
            "question": prompts.ids[row // group_size], "row": row, "tokens": rollouts.tokens[row, :n].tolist(),
            "sampler_logprobs": numbers(rollouts.logprobs[row, :n]), "learner_logprobs": numbers(logprobs[row, :n]),
            "advantages": numbers(advantages[row, :n])})
    return {"loss": number(loss), "grad_norm": number(norm), "completions": completions}


def numbers(tensor):
    return [number(value) for value in tensor.tolist()]


def number(value):
    return value if math.isfinite(value) else str(value)
