# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Imports a class or function from a user's Python file, which runs in this process without isolation."""

import ast
import contextlib
import hashlib
import importlib.machinery
import importlib.util
import itertools
import re
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from marin_rl.errors import describe, nearest


class UserFileError(ValueError):
    """Raised if a user's file is missing or invalid; the message names the file, and the cause is chained."""


@contextlib.contextmanager
def user_errors(what: str) -> Iterator[None]:
    """Convert any error of a user's code to a `UserFileError`: SystemExit, too, which would end the process silently.

    KeyboardInterrupt propagates in the main thread, where Ctrl-C raises it.

    Args:
        what: beginning of the message, which names the code.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        raise UserFileError(f"{what} {describe(error)}") from error


def load_from_file(path: str, name: str) -> Any:
    """Return an object that a Python file defines at its top level.

    The file is imported once per process, as a module of a package for its folder: `from .helpers import x` imports a
    file in the same folder, and files with equal names in different folders are separate modules.

    Args:
        path: path of the file, relative to the working directory.
        name: name of a class, function or value at its top level.

    Raises:
        UserFileError: if the file is missing, its import raises, or it does not define the name.
    """
    module = _import(path)
    if name not in vars(module):
        public = [known for known in vars(module) if not known.startswith("_")]
        raise UserFileError(f"{path} does not define {name!r}; {nearest(name, sorted(public))}")
    return vars(module)[name]


def imported_files(path: Path) -> list[Path]:
    """Return the files that a Python file imports, directly and through others, as far as its statements name them.

    Absolute imports are those of modules in the folder of the file that imports them or in the working directory;
    installed packages are omitted. Nothing is executed.

    Args:
        path: the file.
    """
    found: dict[Path, None] = {path: None}
    waiting = [path]
    while waiting:
        new = [file for file in _imports_of(waiting.pop()) if file not in found]
        found |= dict.fromkeys(new)
        waiting += new
    return list(found)[1:]


def _imports_of(file: Path) -> Iterator[Path]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # Python cannot import it either. The last two: expressions that are nested too deeply.
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            roots = [file.parents[node.level - 1]] if 0 < node.level <= len(file.parents) else [file.parent, Path()]
            module = node.module.split(".") if node.module else []
            names = [[*module, alias.name] for alias in node.names]
        elif isinstance(node, ast.Import):
            roots, names = [file.parent, Path()], [alias.name.split(".") for alias in node.names]
        else:
            continue
        for root, parts in itertools.product(roots, names):
            if parts[0] != "marin_rl":
                yield from _module_files(root, parts)


def _module_files(root: Path, parts: Sequence[str]) -> Iterator[Path]:
    """The files of a module and of the packages that contain it."""
    for end in range(1, len(parts) + 1):
        module = root.joinpath(*parts[:end])
        yield from (file for file in (module.with_suffix(".py"), module / "__init__.py") if file.is_file())


def _import(path: str) -> types.ModuleType:
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise UserFileError(f"file {path!r} does not exist (resolved to {file}); paths start at the working directory")
    package = _package_of(file.parent)
    name = f"{package}.{re.sub(r'[^0-9A-Za-z_]', '_', file.stem)}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UserFileError(f"{path} is not a Python file; its name must end with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with user_errors(f"{path} raised during import:"):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _package_of(folder: Path) -> str:
    """Return the name of the package for a folder, created without running its `__init__.py`."""
    name = f"marin_rl_user_{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"
    if name not in sys.modules:
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        package.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = package
    return name
