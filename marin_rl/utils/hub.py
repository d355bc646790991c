# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Names on the Hugging Face hub, checked with one request before libraries load from it.

The libraries repeat each failed request for half a minute and print every failure. If the hub cannot be reached, this
module switches them to their offline mode, in which files in the cache still work.
"""

import functools
import logging
import re
import sys
from pathlib import Path

from marin_rl.utils.levanter_line import reset_hub_sessions
from marin_rl.utils.storage import user_path

logger = logging.getLogger(__name__)

SECONDS = 4.0
"""Time for the hub to answer."""
MODEL, DATASET = "model", "dataset"
"""Kinds of repositories."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class HubError(ValueError):
    """A text is neither a local folder nor a name on the hub that can be loaded; names setting, value and remedy."""


def check_source(text: str, key: str, kind: str = MODEL) -> Path | None:
    """Check that a text is a local folder, or the name of a repository that is in the cache or on the hub.

    `key` is the setting, for the error message; `kind` is `MODEL` (also for tokenizers) or `DATASET`.

    Returns:
        The folder; None for a name on the hub.

    Raises:
        HubError: if it is neither. Asks the hub once per name and process.
    """
    path = user_path(text, key)
    if path.is_dir():
        return path
    if path.exists():
        raise HubError(f"{key} is {text!r}, which is a file; name the folder that contains it: {str(path.parent)!r}")
    if _HUB_NAME.fullmatch(text) is None:
        resolved = "" if str(path) == text and path.is_absolute() else f" (resolved to {path.absolute()})"
        raise HubError(
            f"{key} is {text!r}, but there is no such folder{resolved}; correct the path, or name a repository on the "
            "Hugging Face hub as OWNER/NAME"
        )
    if (problem := _problem(text, kind)) is not None:
        raise HubError(f"{key} is {text!r}: there is no such folder, and {problem}")
    return None


LFS_PROBLEM = "it is a pointer of Git LFS and not the file itself; run `git lfs pull` in the clone"
"""Problem and remedy of a file for which `is_lfs_pointer` is true."""

_LFS_START = b"version https://git-lfs.github.com/spec/"


def is_lfs_pointer(path: Path) -> bool:
    """Return whether a file is a pointer of Git LFS; a clone without Git LFS has them in place of large files."""
    try:
        with path.open("rb") as file:
            return file.read(len(_LFS_START)) == _LFS_START
    except OSError:
        # A file that is missing or cannot be read is reported by its reader.
        return False


@functools.cache
def _problem(name: str, kind: str) -> str | None:
    """Reason why a repository cannot be loaded, with the remedy."""
    # Imported here because it takes half a second.
    import httpx
    from huggingface_hub import constants
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HfHubHTTPError
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status, http_backoff

    logging.getLogger(http_backoff.__module__).setLevel(logging.ERROR)
    if constants.HF_HUB_OFFLINE:
        absent = f"no repository of that name is in the cache of the hub ({_reason})"
        return None if _is_cached(name, kind) else f"{absent}; check the name and the network, or give a folder"
    # Every repository has an address for this file, whether it exists or not.
    page = f"{constants.ENDPOINT}/{constants.REPO_TYPES_URL_PREFIXES.get(kind, '')}{name}"
    try:
        # A redirection is an answer too: to the new name of the repository.
        session, headers = get_session(), build_hf_headers()
        hf_raise_for_status(session.head(f"{page}/resolve/main/config.json", headers=headers, timeout=SECONDS))
    except EntryNotFoundError:
        return None
    except GatedRepoError:
        return f"access to the repository is restricted; ask for it at {page}, and set HF_TOKEN or run `hf auth login`"
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403, 404):
            return (
                f"{constants.ENDPOINT} has no repository of that name, or it is private; correct the name, set "
                "HF_TOKEN or run `hf auth login`, or give a folder"
            )
        _go_offline(f"{constants.ENDPOINT} answers {status}", name, kind)
    except (OSError, httpx.HTTPError) as error:
        # Sessions are those of requests, whose errors are OSErrors, or of httpx.
        _go_offline(f"{constants.ENDPOINT} cannot be reached: {_first_cause(error)}", name, kind)
    else:
        return None
    return _problem.__wrapped__(name, kind)


_reason = "HF_HUB_OFFLINE is set"
"""Why the libraries are in offline mode, if they are."""


def _go_offline(reason: str, name: str, kind: str) -> None:
    """Switch the libraries to their offline mode, in which they do not repeat requests, and warn if that helps."""
    global _reason
    import huggingface_hub.constants

    _reason = reason
    if _is_cached(name, kind):
        logger.warning("%s; files in the cache of the hub are used instead", reason)
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    # Those that have copied the setting already.
    for module, setting in (("transformers.utils.hub", "_is_offline_mode"), ("datasets.config", "HF_HUB_OFFLINE")):
        if module in sys.modules:
            setattr(sys.modules[module], setting, True)
    reset_hub_sessions()


def _is_cached(name: str, kind: str) -> bool:
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"{kind}s--{name.replace('/', '--')}" / "snapshots"
    if kind == DATASET:
        from datasets import config

        # `datasets` keeps the rows apart from the files.
        return folder.is_dir() or any(Path(config.HF_DATASETS_CACHE).glob(name.replace("/", "___")))
    return folder.is_dir()


def _first_cause(error: BaseException) -> str:
    """The innermost error, in one line: outer ones repeat it with addresses of objects."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    text = next(iter(str(error).splitlines()), "") or type(error).__name__
    return re.sub(r"<[^<>]* at 0x[0-9a-f]+>:? ?", "", text)
