# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Facts about config fields: which ones are paths, and which ones may change when a run is resumed."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def may_change(*keys: str) -> dict[str, Any]:
    """Metadata of a config field that may change when a run is resumed, because it does not affect the results.

    Args:
        keys: keys of the field's section that may change; the whole field if empty.
    """
    return {"may_change": keys}


def changeable_keys(config_class: Any) -> list[str]:
    """Dotted keys and sections of a config that may change when a run is resumed.

    Args:
        config_class: dataclass with fields that have the metadata of `may_change`.
    """
    changeable = {field.name: field.metadata.get("may_change") for field in dataclasses.fields(config_class)}
    return [
        f"{name}.{key}" if key else name
        for name, keys in changeable.items()
        if keys is not None
        for key in keys or ("",)
    ]


def local_path(value: str, key: str) -> Path:
    """Validate that a user's path is on a mounted file system.

    Args:
        value: the path.
        key: key of the setting, for the error message.

    Raises:
        ValueError: if the value is an address such as `gs://bucket/run`, which `pathlib` would read as a folder `gs:`.

    >>> local_path("runs/rloo", "run_dir")
    PosixPath('runs/rloo')
    """
    scheme, separator, _ = value.partition("://")
    if separator:
        raise ValueError(
            f"{key} is {value!r}, but it must be a path on a mounted file system: {scheme}:// is not supported here. "
            "Mount the bucket or share (gcsfuse, rclone, NFS) and use its path, or copy the files to this machine"
        )
    return Path(value)


_PATH_FIELDS = {"run_dir", "initialize_from", "path", "held_out_path", "folder", "chat_template"}
"""Names of this project's settings that are paths."""
_ADDRESS_FIELDS = {"weights.folder"}
"""Path settings that also accept addresses; their sections validate them."""


def check_paths(section: object, prefix: str = "") -> None:
    """Validate that the paths of a config are local, not addresses such as `gs://bucket`."""
    if isinstance(section, Mapping):
        parts = [(str(name), value) for name, value in section.items()]
    elif isinstance(section, Sequence) and not isinstance(section, str):
        parts = [(str(index), value) for index, value in enumerate(section)]
    elif dataclasses.is_dataclass(section) and type(section).__module__.startswith("marin_rl."):
        parts = [(field.name, getattr(section, field.name)) for field in dataclasses.fields(section)]
        for name, value in parts:
            if isinstance(value, str) and name in _PATH_FIELDS and f"{prefix}{name}" not in _ADDRESS_FIELDS:
                local_path(value, f"{prefix}{name}")
    else:
        return
    for name, value in parts:
        check_paths(value, f"{prefix}{name}.")
