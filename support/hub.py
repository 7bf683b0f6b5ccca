"""Where a model or a data set comes from: a local folder, or the hub's cache."""

import os
from pathlib import Path

from support.errors import UserError


def parse_id(name) -> tuple[str, str]:
    """"owner/name@v2" -> ("owner/name", "v2"): a branch, tag or commit, "" the newest. A folder's name keeps its @."""
    head, _, revision = name.rpartition("@")
    return (head, revision) if head and revision and not os.path.exists(os.path.expanduser(name)) else (name, "")


def hub_folder(name, repo_type, patterns=None) -> tuple[Path, str]:
    """Gives the folder that holds `name`, and its revision: the commit on the hub, or "local".

    `name` is a local folder, which wins, or an id on the hub, with @revision or without. `repo_type` is "model" or
    "dataset", `patterns` the only files to fetch, e.g. ["data/*.parquet"]. Raises UserError where it cannot be had.
    """
    repo, revision = parse_id(name)
    path = os.path.expanduser(repo)
    if os.path.isdir(path) and revision:
        raise UserError(f"{repo!r} is a local folder, which has no revision: leave @{revision} out")
    if os.path.isdir(path):
        return Path(path), "local"
    if os.path.exists(path):
        raise UserError(f"{name!r} is a file: give the folder that holds it")
    if repo.startswith((".", "/", "~")) or repo.count("/") > 1:
        raise UserError(f"{name!r}: no such folder (expected a local folder, or a hub id such as owner/name)")

    from huggingface_hub import errors, snapshot_download

    try:
        folder = Path(snapshot_download(repo, repo_type=repo_type, revision=revision or None, allow_patterns=patterns))
    except Exception as error:  # the client also passes on the errors of its HTTP library, whichever that is
        text = (str(error).strip().splitlines() or [""])[0].partition(". ")[0][:200]
        reasons = {errors.HFValidationError: "is neither a folder nor a hub id (owner/name)",
                   errors.RevisionNotFoundError: f"has no revision {revision!r} on the hub",
                   errors.RepositoryNotFoundError: "is not on the hub, or needs a login (HF_TOKEN)",
                   Exception: f"could not be fetched ({type(error).__name__}: {text}); HF_HOME sets the folder of the "
                              "cache, HF_ENDPOINT a mirror of the hub"}
        reason = next(reason for kind, reason in reasons.items() if isinstance(error, kind))
        raise UserError(f"the {repo_type} {repo!r} {reason}; the path of a local folder works in its place") from error
    return folder, folder.name
