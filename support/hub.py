"""Where a model or a data set comes from: a local folder, or the hub's cache."""

import os
from pathlib import Path

from support.errors import UserError


def hub_folder(name, repo_type, revision="", patterns=None) -> tuple[Path, str]:
    """Give the folder that holds `name`, and its revision: the commit on the hub, or "local".

    An existing local folder wins over a hub id of the same name. `repo_type` is "model" or "dataset", `revision` a
    branch, tag or commit ("" for the newest), `patterns` the only files to fetch, e.g. ["data/*.parquet"].
    Raises UserError, one line, for whatever keeps the folder from being there.
    """
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        if revision:
            raise UserError(f"{name!r} is a local folder, which has no revision {revision!r}: leave the revision out")
        return Path(path), "local"
    if os.path.exists(path):
        raise UserError(f"{name!r} is a file: give the folder that holds it")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(f"{name!r}: no such folder (expected a local folder, or a hub id such as owner/name)")

    from huggingface_hub import errors, snapshot_download

    what, instead = f"the {repo_type} {name!r}", "the path of a local folder works in its place"
    try:
        folder = Path(snapshot_download(name, repo_type=repo_type, revision=revision or None, allow_patterns=patterns))
    except errors.HFValidationError as error:
        raise UserError(f"{name!r} is neither a folder nor a hub id (owner/name); {instead}") from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"{what} has no revision {revision!r} on the hub; {instead}") from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(f"{what} is not on the hub, or needs a login (HF_TOKEN); {instead}") from error
    # The client lets errors of its HTTP library through, and which library that is differs between its versions.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0].partition(". ")[0][:200]
        raise UserError(f"{what} could not be fetched ({type(error).__name__}: {reason}) and is no folder here; "
                        f"{instead}; HF_HOME sets the folder of the cache, HF_ENDPOINT a mirror of the hub") from error
    return folder, folder.name
