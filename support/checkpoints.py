"""What a run needs to go on after a stop: its settings, and checkpoints with the random state. Nothing of GRPO.

    step-25/adapter_model.safetensors, adapter_config.json   the adapter; loads with PeftModel.from_pretrained
            optimizer.safetensors                            AdamW's moments and step counts, by parameter name
            state.json                                       step, questions drawn, random state, settings, versions
            SHA256SUMS                                       of these four; `sha256sum -c SHA256SUMS` checks them too

Only safetensors and JSON are read. A checkpoint is written under another name and renamed, so one under its final name
is complete; the checksums tell where a disk or a person has changed it since.
"""

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
from support.files import sync
from support.hub import parse_id

CHECKED = ("adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors", "state.json")

# Settings that a resumed run may change: the course of the training is the same with any of them, up to rounding.
# Other `rollouts_at_once` give other draws from the same distribution: a smaller card must be able to go on.
HARMLESS = {"resume", "steps", "save_every", "keep_checkpoints", "show_samples", "on_nonfinite", "evaluate",
            "eval_batch_size", "tokens_per_micro_batch", "rollouts_at_once", "fused_kernels",
            "activation_checkpointing", "electricity_price", "tracker", "swanlab_mode", "swanlab_project"}
FROM_HUB = {"base_model": "resolved_model_revision", "dataset": "resolved_dataset_revision"}


class NonFinite(UserError):
    """An update whose loss, gradient norm or log-probabilities are not finite. `record` is its batch, for JSON."""

    def __init__(self, rows, logprobs, loss, norm):
        super().__init__(f"loss {loss}, gradient norm {norm}: stopped before the adapter was touched; "
                         "--on-nonfinite skip leaves such a batch out")
        self.record = nonfinite_record(rows, logprobs, loss, norm)


# Settings


def resumed_config(config, given):
    """The settings of the run in `config.resume`, changed by the fields named in `given` (those of the command line).

    Model and data set are pinned to the commits that the run resolved, so that a newer one on the hub changes nothing.
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
    for name in FROM_HUB:
        if name not in given or getattr(config, name) == stored[name]:
            taken[name] = pinned(stored, name)
    return dataclasses.replace(config, **taken | {"resume": config.resume})


def pinned(stored, name):
    """A stored hub id as `id@commit`, with the commit that the run resolved; a local folder as it is."""
    revision = stored.get(FROM_HUB[name], "local")
    return stored[name] if revision == "local" else f"{parse_id(stored[name])[0]}@{revision}"


def stored_config(path):
    """The run directory's config.json. UserError where there is none that this version can continue."""
    try:
        stored = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--resume {path}: no run directory, config.json cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"--resume {path}: config.json is damaged: {error}") from error
    if not isinstance(stored, dict):
        raise UserError(f"--resume {path}: config.json is not a table of settings")
    missing = {"sampler", *FROM_HUB} - stored.keys()
    if missing:
        raise UserError(f"--resume {path}: config.json lacks {', '.join(sorted(missing))}: an older version made this "
                        "run, and only that version can continue it")
    return stored


def check_same_experiment(config):
    """Raises UserError, with the flag's name, where `config` would change the experiment that it resumes."""
    stored = stored_config(config.resume)
    for name, value in dataclasses.asdict(config).items():
        same = value == stored.get(name, value) or (name in FROM_HUB and value == pinned(stored, name))
        if name not in HARMLESS and not same:
            raise UserError(f"--{name.replace('_', '-')} {value}: the run {config.resume} was made with "
                            f"{stored[name]!r}, and another value makes it another experiment")


# Random state


def random_state(device):
    """Random state of Python, numpy, torch on the CPU, and torch on `device` where that is a GPU, for JSON."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {"python": [version, list(words), gauss],
            "numpy": [name, keys.tolist(), position, has_gauss, cached],
            "torch": torch.get_rng_state().tolist(),
            "cuda": torch.cuda.get_rng_state(device).tolist() if device.type == "cuda" else None}


def set_random_state(state, device):
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if device.type == "cuda":
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8), device)


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
        (draft / "state.json").write_text(json.dumps(state, ensure_ascii=False) + "\n", encoding="utf-8")
        (draft / "SHA256SUMS").write_text("".join(digest_line(draft / name) for name in CHECKED), encoding="ascii")
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
        problem = damage(folder)
        if not problem:
            return folder, json.loads((folder / "state.json").read_text(encoding="utf-8"))
        aside = folder.with_name(f"{folder.name}.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(folder, aside)
        tell([f"the checkpoint {folder} is not used and now named {aside.name}: {problem}"])
    return None, None


def damage(folder):
    """What is wrong with a checkpoint, or None."""
    try:
        written = (folder / "SHA256SUMS").read_bytes()
        for name in CHECKED:
            if digest_line(folder / name).encode() not in written:
                return f"{name} is not as SHA256SUMS says"
    except OSError as error:
        return f"{Path(error.filename or folder).name}: {error.strerror}"


def digest_line(path):
    with open(path, "rb") as file:
        return f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n"


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
    """Removes all but the `keep` newest checkpoints; 0 keeps all."""
    for _, folder in checkpoint_folders(path)[keep:] if keep else []:
        gone = folder.with_name(f"{folder.name}.tmp")
        shutil.rmtree(gone, ignore_errors=True)
        os.replace(folder, gone)  # first: under its final name a checkpoint is always complete
        shutil.rmtree(gone, ignore_errors=True)


def trainable_names(model):
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def optimizer_tensors(model, optimizer):
    """AdamW's state as named tensors."""
    states = optimizer.state_dict()["state"]
    return {f"{name}.{key}": states[i][key].contiguous() for i, name in enumerate(trainable_names(model))
            if i in states for key in ("step", "exp_avg", "exp_avg_sq")}


# Numbers that are not finite


def nonfinite_record(rows, logprobs, loss, norm):
    """What went into an update that gave no number, one entry a completion; NaN and infinities as text, for JSON.

    `rows` are the update's completions, `logprobs` the learner's (T,) for each of them.
    """
    completions = [{
        "question": row.prompt.question.id, "row": number, "tokens": row.tokens.tolist(),
        "sampler_logprobs": as_json(row.logprobs.tolist()), "learner_logprobs": as_json(found.tolist()),
        "advantages": as_json(torch.as_tensor(row.advantage).expand(len(row.tokens)).tolist())}
        for number, (row, found) in enumerate(zip(rows, logprobs, strict=True))]
    return {"loss": as_json([loss])[0], "grad_norm": as_json([norm])[0], "completions": completions}


def as_json(values):
    return [value if math.isfinite(value) else str(value) for value in values]
