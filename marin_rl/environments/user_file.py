# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Takes a class or a function out of a user's Python file. What the file says runs in this process, unprotected."""

import difflib
import hashlib
import importlib.machinery
import importlib.util
import re
import sys
import types
from pathlib import Path
from typing import Any


class UserFileError(ValueError):
    """A user's file that cannot be used; the message names it and what is missing, and the cause is kept."""


def load_from_file(path: str, name: str) -> Any:
    """What a Python file calls by a name.

    The file is imported once per process, as a module of its own package: `from .helpers import x` finds what lies
    beside it, and files of equal names in different folders do not meet.

    Args:
        path: the file; relative paths start at the working directory.
        name: of a class, function or value at its top level.

    Raises:
        UserFileError: if there is no such file, if it raises while it is imported, or if it has no such name.
    """
    module = _import(path)
    if name not in vars(module):
        public = [known for known in vars(module) if not known.startswith("_")]
        close = difflib.get_close_matches(name, public, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UserFileError(f"{path} has no {name!r} at its top level; {hint}There is: {', '.join(sorted(public))}")
    return vars(module)[name]


def _import(path: str) -> types.ModuleType:
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise UserFileError(f"there is no file {path!r} (looked for {file}); paths start at the working directory")
    package = _package_of(file.parent)
    name = f"{package}.{re.sub(r'[^0-9A-Za-z_]', '_', file.stem)}"
    if name in sys.modules:
        return sys.modules[name]
    found = importlib.util.spec_from_file_location(name, file)
    if found is None or found.loader is None:
        raise UserFileError(f"{path} is no Python file; its name must end with .py")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise UserFileError(f"{path} raised while it was imported: {type(error).__name__}: {error}") from error
    return module


def _package_of(folder: Path) -> str:
    """The name of a package that stands for a folder, without running an `__init__.py` there."""
    name = f"marin_rl_user_{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"
    if name not in sys.modules:
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        package.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = package
    return name
