"""Where a model or a data set comes from: a local folder, or the hub's cache."""

import os
from pathlib import Path

from support.errors import UserError


def parse_id(name) -> tuple[str, str]:
    """Split "owner/name@v2" into ("owner/name", "v2"): a revision is a branch, a tag or a commit, "" the newest.

    A local folder whose name contains @ is not split.
    """
    head, _, revision = name.rpartition("@")
    return (head, revision) if head and revision and not os.path.exists(os.path.expanduser(name)) else (name, "")


def hub_folder(name, repo_type, patterns=None) -> tuple[Path, str]:
    """Give the folder that holds `name`, and its revision: the commit on the hub, or "local".

    `name` is a local folder or an id on the hub, with @revision or without; an existing folder wins. `repo_type` is
    "model" or "dataset", `patterns` the only files to fetch, e.g. ["data/*.parquet"].
    Raises UserError, one line, for whatever keeps the folder from being there.
    """
    repo, revision = parse_id(name)
    path = os.path.expanduser(repo)
    if os.path.isdir(path):
        if revision:
            raise UserError(f"{repo!r} is a local folder, which has no revision: leave @{revision} out")
        return Path(path), "local"
    if os.path.exists(path):
        raise UserError(f"{name!r} is a file: give the folder that holds it")
    if repo.startswith((".", "/", "~")) or repo.count("/") > 1:
        raise UserError(f"{name!r}: no such folder (expected a local folder, or a hub id such as owner/name)")

    from huggingface_hub import errors, snapshot_download

    what, instead = f"the {repo_type} {repo!r}", "the path of a local folder works in its place"
    try:
        folder = Path(snapshot_download(repo, repo_type=repo_type, revision=revision or None, allow_patterns=patterns))
    except errors.HFValidationError as error:
        raise UserError(f"{repo!r} is neither a folder nor a hub id (owner/name); {instead}") from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"{what} has no revision {revision!r} on the hub; {instead}") from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(f"{what} is not on the hub, or needs a login (HF_TOKEN); {instead}") from error
    # The client passes on errors of its HTTP library, and its versions use different libraries.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0].partition(". ")[0][:200]
        raise UserError(f"{what} could not be fetched ({type(error).__name__}: {reason}) and is no folder here; "
                        f"{instead}; HF_HOME sets the folder of the cache, HF_ENDPOINT a mirror of the hub") from error
    return folder, folder.name
