# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Facts about config fields, kept in their metadata, and the checks and conversions that config classes share."""

import dataclasses
import ipaddress
import itertools
import os
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from marin_rl.utils.storage import refuse_credentials, storage_path, user_path

LOCAL_PATH = {"local_path": True}
"""Metadata of a field that is a path on a mounted file system, or a list of such paths; `check_paths` validates it."""

LOCAL_FILE = {**LOCAL_PATH, "is_file": True}
"""Metadata of a local path of a file that the run reads."""

LOCAL_OUTPUT = {**LOCAL_PATH, "is_output": True}
"""Metadata of a local path that the run writes, or whose files follow from the config."""

NAMES_FILES = {"names_files": True}
"""Metadata of a field with arguments of user code; texts in it that are paths of existing files are inputs."""

STORAGE_PATH = {"storage_path": True}
"""Metadata of a field that is a path or an address such as `gs://bucket/run`; `check_paths` validates it."""

STORAGE_INPUT = {**STORAGE_PATH, "is_input": True}
"""Metadata of such a field whose local files a run reads at every start."""


def may_change(*keys: str) -> dict[str, Any]:
    """Metadata of a field that may change when a run is resumed, because it does not affect the results.

    Args:
        keys: keys of the field's section that may change; the whole field if empty.
    """
    return {"may_change": keys}


def may_change_by_name() -> dict[str, Any]:
    """Metadata of a field that may change when a run is resumed, if the user names the key on the command line."""
    return {"may_change_by_name": True}


def changeable_keys(config_class: Any) -> list[str]:
    """Dotted keys and sections of a config class that may differ when a run is resumed.

    These are the keys that `may_change`, and the `keys_without_effect` of the trainer section, of which configs of
    earlier versions contain some.
    """
    keys: list[str] = []
    for field in dataclasses.fields(config_class):
        if field.metadata.get("may_change") == ():
            keys.append(field.name)
        ignored = getattr(field.type, "keys_without_effect", ())
        keys += [f"{field.name}.{name}" for name in (*field.metadata.get("may_change", ()), *ignored)]
    return keys


def keys_changeable_by_name(config_class: Any) -> list[str]:
    """Keys and sections of a config class that `may_change_by_name`."""
    return [field.name for field in dataclasses.fields(config_class) if field.metadata.get("may_change_by_name")]


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by dotted key; an empty mapping is a value.

    >>> flatten({"num_steps": 20, "optimizer": {"warmup": 0}})
    {'num_steps': 20, 'optimizer.warmup': 0}
    """
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        if isinstance(inner, Mapping) and inner:
            flat |= flatten(inner, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = inner
    return flat


def is_within(key: str, keys: Iterable[str]) -> bool:
    """Return whether a dotted key is one of some keys, or belongs to a section among them."""
    return any(key == outer or key.startswith(f"{outer}.") for outer in keys)


def nested_sections(value: object, key: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of all sections of a config, the config included.

    `key` is that of the value; empty for the config.
    """
    parts: Any = ()
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, list | tuple):
        parts = enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield key, value
        parts = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    for name, part in parts:
        yield from nested_sections(part, f"{key}.{name}" if key else str(name))


def input_files(config: object) -> Iterator[tuple[str, str]]:
    """Dotted keys and values of the settings with the metadata `LOCAL_FILE`."""
    for key, section in nested_sections(config):
        for field in dataclasses.fields(section):
            value = getattr(section, field.name)
            if LOCAL_FILE.items() <= field.metadata.items() and value is not None:
                yield f"{key}.{field.name}" if key else field.name, value


def check_paths(config: object) -> None:
    """Validate the fields with the metadata `LOCAL_PATH`, which must be local, and `STORAGE_PATH`.

    Raises:
        ValueError: if paths are invalid; the message has a line for each.
    """
    problems = []
    for key, section in nested_sections(config):
        for field in dataclasses.fields(section):
            checks = {local_path: LOCAL_PATH, storage_path: STORAGE_PATH}
            kinds = [check for check, metadata in checks.items() if metadata.items() <= field.metadata.items()]
            for check, text in itertools.product(kinds, _texts(getattr(section, field.name)) if kinds else ()):
                try:
                    check(text, f"{key}.{field.name}" if key else field.name)
                except ValueError as error:
                    problems.append(str(error))
    if problems:
        raise ValueError("\n".join(problems))


def local_inputs(config: object) -> Iterator[tuple[str, str]]:
    """Dotted keys and values of the settings that name local files or folders which a run reads.

    Some values may be names on a hub.
    """
    for key, section in nested_sections(config):
        for field in dataclasses.fields(section):
            value = getattr(section, field.name)
            is_input = (
                LOCAL_PATH.items() <= field.metadata.items() and not LOCAL_OUTPUT.items() <= field.metadata.items()
            ) or STORAGE_INPUT.items() <= field.metadata.items()
            for text in _texts(value) if is_input else ():
                if "://" not in text:
                    yield f"{key}.{field.name}" if key else field.name, text


def named_files(config: object) -> Iterator[str]:
    """Paths of files that are texts in the fields with the metadata `NAMES_FILES`.

    Also those in `--option=PATH`, and the files of a module after `-m`.
    """
    for _, section in nested_sections(config):
        for field in dataclasses.fields(section):
            texts = list(_texts(getattr(section, field.name))) if NAMES_FILES.items() <= field.metadata.items() else []
            for before, text in zip(["", *texts], texts, strict=False):
                module = text.replace(".", "/")
                files = f"{module}.py", f"{module}/__main__.py", f"{module}/__init__.py"
                yield from filter(_is_file, files if before == "-m" else (text, text.partition("=")[2]))


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(part)


def _is_file(text: str) -> bool:
    """Return whether a text, of any length and with any characters, is the path of a file."""
    try:
        return Path(text).expanduser().is_file()
    except (OSError, ValueError, RuntimeError):
        return False


def local_path(value: str, key: str) -> Path:
    """Validate that a user's path is on a mounted file system.

    Raises:
        ValueError: if the value is an address such as `gs://bucket/data`, which `pathlib` would read as a folder `gs:`,
            or no path can be that text.

    >>> local_path("runs/rloo", "run_dir")
    PosixPath('runs/rloo')
    """
    scheme, separator, _ = value.partition("://")
    if separator:
        refuse_credentials(value, key)
        raise ValueError(
            f"{key} is {value!r}, but it must be a path on a mounted file system: {scheme}:// is not supported here. "
            "Mount the bucket or share (gcsfuse, rclone, NFS) and use its path, or copy the files to this machine"
        )
    return user_path(value, key)


def check_address(key: str, address: str, key_setting: str) -> None:
    """Check the address of a server.

    Args:
        key: the setting, for the error message.
        address: its value.
        key_setting: the setting that names the environment variable with the API key.

    Raises:
        ValueError: if it is no address, or contains a user or a password; the message names the setting.
    """
    import httpx  # It takes 0.3 s, which commands without a server need not wait.

    # The message of another mistake would contain the password.
    if "@" in address or "?" in address or "#" in address:
        raise ValueError(
            f"{key} holds a user, a password or parameters, which would be written to the run's files; "
            f"name the environment variable that holds the key in {key_setting}"
        )
    try:
        parts = urllib.parse.urlsplit(address)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        # `urlsplit` removes line breaks; httpx refuses other characters, and names that cannot be hosts.
        is_valid &= address.isprintable() and " " not in address and bool(httpx.URL(address).host)
    except (ValueError, httpx.InvalidURL):
        is_valid = False
    if not is_valid:
        raise ValueError(
            f"{key} is {address[:200]!r}; it must be an address such as http://localhost:8000/v1, without spaces or "
            "line breaks"
        )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to a host name or address.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("[::1]"), is_loopback("10.0.0.1")
    (True, True, True, False)
    """
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def read_api_key(variable: str) -> str:
    """Return the API key in an environment variable, without whitespace around it.

    Raises:
        ValueError: if the variable is not set, or its value cannot be sent; the message does not contain the value.
    """
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ValueError(f"the environment variable {variable} is not set; set it to the API key")
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"the environment variable {variable} has characters that a key cannot have; set it again")
    return key
