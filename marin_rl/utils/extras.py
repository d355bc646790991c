# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Optional packages, which extras of this distribution install."""

import importlib.util

from marin_rl.utils.errors import UserError

_SERVER = ("starlette", "uvicorn", "prometheus_client")
PACKAGES = {
    "openenv": ("websockets",),
    "ray": ("ray", "cryptography"),
    "serve": _SERVER,
    "textarena": ("textarena",),
    "textworld": ("textworld",),
    "verifiers": ("verifiers", *_SERVER),
}
"""Modules that the code of an extra imports, by extra."""


class MissingPackageError(UserError):
    """A package is not installed; the message names the extra that installs it."""


def require_extra(extra: str, needed_by: str) -> None:
    """Check that the packages of an extra are installed, without importing them.

    Args:
        extra: name of the extra, one of `PACKAGES`.
        needed_by: setting or command that needs it, for the error message.

    Raises:
        MissingPackageError: if one is not.
    """
    missing = [name for name in PACKAGES[extra] if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingPackageError(
            f"{needed_by} needs packages that are not installed ({', '.join(missing)}); install the extra: "
            f"pip install 'marin_rl[{extra}]'"
        )
