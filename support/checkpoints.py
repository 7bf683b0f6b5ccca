"""What a run needs to go on after a stop: its settings, and checkpoints with the random state. Nothing of GRPO.

A checkpoint is a folder step-N with the adapter in PEFT's format, optimizer.safetensors (AdamW's state by parameter
name), state.json and SHA256SUMS. It is written under another name and renamed, so one under its final name is complete;
the checksums tell where a disk or a person has changed it since.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from support.errors import UserError
from support.files import fits, read_json, sync
from support.hub import parse_id

CHECKED = ("adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors", "state.json")

# Settings that a resumed run may change: the course of the training is the same with any of them, up to rounding.
HARMLESS = {"resume", "steps", "save_every", "keep_checkpoints", "show_samples", "on_nonfinite", "evaluate",
            "eval_batch_size", "tokens_per_micro_batch", "rollouts_at_once", "fused_kernels",
            "activation_checkpointing", "electricity_price", "tracker", "swanlab_mode", "swanlab_project"}
START = {"step": 0, "questions_drawn": 0, "random": None}  # what state.json would hold before the first step
FROM_HUB = {"base_model": "resolved_model_revision", "dataset": "resolved_dataset_revision"}


class NonFinite(UserError):
    """An update that is not finite. `logprobs` are the learner's (T,) of each row; `record` is its batch, for JSON."""

    def __init__(self, rows, logprobs, loss, norm):
        super().__init__(f"loss {loss}, gradient norm {norm}: stopped before the adapter was touched; "
                         "--on-nonfinite skip leaves such a batch out")
        record = {"loss": loss, "grad_norm": norm, "completions": [
            {"question": row.prompt.question.id, "row": number, "tokens": row.tokens.tolist(),
             "sampler_logprobs": row.logprobs.tolist(), "learner_logprobs": own.tolist(),
             "advantages": torch.as_tensor(row.advantage).expand(len(row.tokens)).tolist()}
            for number, (row, own) in enumerate(zip(rows, logprobs, strict=True))]}
        self.record = json.loads(json.dumps(record), parse_constant=str)  # JSON has no NaN: "NaN", "-Infinity"


def resumed_config(config, given):
    """The settings of the run `config.resume`, changed by the fields named in `given`, those of the command line."""
    stored = stored_config(config.resume)
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    taken = {name: stored[name] for name in (defaults.keys() & stored.keys()) - given}
    for name, value in taken.items():
        kinds = (float, int) if type(defaults[name]) is float else (type(defaults[name]),)
        if defaults[name] is not None and type(value) not in kinds:
            raise UserError(f"--resume {config.resume}: {name} is {value!r} in config.json")
    taken |= {name: pinned(stored, name) for name in FROM_HUB
              if name not in given or getattr(config, name) == stored[name]}
    return dataclasses.replace(config, **taken | {"resume": config.resume})


def pinned(stored, name):
    """A stored hub id with the commit that the run resolved: a newer one on the hub changes nothing."""
    revision = stored.get(FROM_HUB[name], "local")
    return stored[name] if revision == "local" else f"{parse_id(stored[name])[0]}@{revision}"


def stored_config(path):
    """The settings in a run's folder. UserError where there are none that this version can continue."""
    stored = read_json(Path(path) / "config.json", notes := [])
    if notes:
        raise UserError(f"--resume {path}: {notes[0]}")
    if not fits(stored, dict.fromkeys(("sampler", *FROM_HUB), str)):
        raise UserError(f"--resume {path}: an older version made this run, and only that version can continue it")
    return stored


def check_same_experiment(config):
    """Raises UserError, with the flag's name, where `config` would change the experiment that it resumes."""
    stored = stored_config(config.resume)
    for name, value in dataclasses.asdict(config).items():
        same = value == stored.get(name, value) or (name in FROM_HUB and value == pinned(stored, name))
        if name not in HARMLESS and not same:
            raise UserError(f"--{name.replace('_', '-')} {value}: the run {config.resume} was made with "
                            f"{stored[name]!r}, and another value makes it another experiment")


def random_state(device):
    """Random state of torch on the CPU, and on `device` where that is a GPU, for JSON. Nothing here draws elsewhere."""
    return {"torch": torch.get_rng_state().tolist(),
            "cuda": torch.cuda.get_rng_state(device).tolist() if device.type == "cuda" else None}


def save_checkpoint(folder, model, optimizer, state):
    """Writes adapter, optimiser and `state` (a dict for JSON) to `folder`. Costs three times the adapter's size."""
    draft = folder.with_name(f"{folder.name}.tmp")
    states, names = optimizer.state_dict()["state"], trainable_names(model)
    try:
        model.save_pretrained(draft, save_embedding_layers=False)
        (draft / "README.md").unlink(missing_ok=True)  # PEFT's empty form, with this machine's folders in it
        save_file({f"{names[i]}.{key}": tensor for i in states for key, tensor in states[i].items()},
                  draft / "optimizer.safetensors")
        (draft / "state.json").write_text(json.dumps(state) + "\n", encoding="utf-8")
        (draft / "SHA256SUMS").write_bytes(checksums(draft))
        for file in draft.iterdir():
            sync(file)
        sync(draft)
        os.replace(draft, folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)  # a full disk needs the room
        raise
    sync(folder.parent)


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
    numbers, states = {name: i for i, name in enumerate(trainable_names(policy.model))}, {}
    for name, tensor in load_file(folder / "optimizer.safetensors").items():
        parameter, _, key = name.rpartition(".")
        states.setdefault(numbers[parameter], {})[key] = tensor.clone()  # else a view of the file
    optimizer.load_state_dict(optimizer.state_dict() | {"state": states})
    torch.set_rng_state(torch.tensor(state["random"]["torch"], dtype=torch.uint8))
    if policy.device.type == "cuda":
        torch.cuda.set_rng_state(torch.tensor(state["random"]["cuda"], dtype=torch.uint8), policy.device)


def trainable_names(model):
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def checkpoint_folders(path):
    """[(step, folder)] of a run's folder, the newest first."""
    return sorted(((int(folder.name[5:]), folder) for folder in path.glob("step-*")
                   if re.fullmatch("step-[0-9]+", folder.name) and folder.is_dir()), reverse=True)


def newest_checkpoint(path, tell):
    """The state in the newest whole checkpoint, or START. Damaged ones are renamed, and `tell` gets a line for each."""
    for _, folder in checkpoint_folders(path):
        if is_whole(folder):
            return json.loads((folder / "state.json").read_text(encoding="utf-8"))
        aside = folder.with_name(f"{folder.name}.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(folder, aside)
        tell([f"the checkpoint {folder} is damaged and not used: it is now {aside.name}, and `sha256sum -c SHA256SUMS` "
              "there names the file"])
    return START


def is_whole(folder):
    """Whether the files of a checkpoint are as they were written."""
    with contextlib.suppress(OSError):
        return (folder / "SHA256SUMS").read_bytes() == checksums(folder)
    return False


def checksums(folder):
    """The content of SHA256SUMS."""
    lines = []
    for name in CHECKED:
        with open(folder / name, "rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}\n")
    return "".join(lines).encode("ascii")


def prune_checkpoints(path, keep):
    """Removes all but the `keep` newest checkpoints; 0 keeps all."""
    for _, folder in checkpoint_folders(path)[keep:] if keep else []:
        gone = folder.with_name(f"{folder.name}.tmp")
        os.replace(folder, gone)  # first: under its final name a checkpoint is always complete
        shutil.rmtree(gone, ignore_errors=True)
