# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Code of others: users' Python files and modules, optional packages, and the environment of other programs.

Users' files and modules run in this process without isolation.
"""

import ast
import contextlib
import contextvars
import hashlib
import importlib
import importlib.machinery
import importlib.util
import itertools
import os
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from marin_rl.utils.errors import UserError, explain, install_command, nearest


class UserFileError(UserError, ValueError):
    """Raised if a user's file is missing or invalid; the message names the file, and the cause is chained."""


_REGISTERED = re.compile(r"Cannot register <class '.*'> as (\S+) because <class '(.*)'> is already registered")


@contextlib.contextmanager
def user_errors(what: str, folder: Path | None = None) -> Iterator[None]:
    """Convert any error of a user's code to a `UserFileError`: SystemExit, too, which would end the process silently.

    KeyboardInterrupt propagates in the main thread, where Ctrl-C raises it.

    Args:
        what: beginning of the message, which names the code.
        folder: folder of the code, to name the line that raised; None to name none.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        text = explain(error)
        if registered := _REGISTERED.search(text):
            text = f"type {registered[1]!r} is registered already, by {registered[2]}; choose another name"
        if folder is not None:
            text = text.replace(f"{_package_name(folder)}.", ".")
        raise UserFileError(f"{what} {text}") from error


def load_from_file(path: str, name: str) -> Any:
    """Return an object that a Python file defines at its top level.

    The file is imported once per process, as a module of a package for its folder: `from .helpers import x` imports a
    file in the same folder, and files with equal names in different folders are separate modules. `path` is relative to
    the working directory.

    Raises:
        UserFileError: if the file is missing, its import raises, or it does not define the name.
    """
    module = import_file(path)
    if name not in vars(module):
        public = [known for known in vars(module) if not known.startswith("_")]
        raise UserFileError(f"{path} does not define {name!r}; {nearest(name, sorted(public))}")
    return vars(module)[name]


def load_function(path: str, name: str, expected: str) -> Callable[..., Any]:
    """Return a function that a Python file defines at its top level; see `load_from_file`.

    `expected` are words for the function after "it must be ", for the error message.

    Raises:
        UserFileError: as for `load_from_file`, or if the object cannot be called.
    """
    function = load_from_file(path, name)
    if not callable(function):
        raise UserFileError(f"{name!r} of {path} is {type(function).__name__}; it must be {expected}")
    return function


def imported_files(path: Path) -> list[Path]:
    """Return the files that a Python file imports, directly and through others, as far as its statements name them.

    Absolute imports are those of modules in the folder of the file that imports them or in the working directory;
    installed packages are omitted. Nothing is executed.
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


def is_module_name(text: str) -> bool:
    """Return whether a text is the dotted name of a module rather than the path of a file.

    >>> is_module_name("lab.objectives"), is_module_name("objectives.py"), is_module_name("lab/objectives.py")
    (True, False, False)
    """
    is_dotted = all(part.isidentifier() for part in text.split("."))
    return is_dotted and not text.endswith(".py") and not Path(text).is_file()


def import_module(name: str) -> types.ModuleType:
    """Import a module of an installed package, or of the working directory.

    Raises:
        UserFileError: if there is no such module, or its import raises.
    """
    with user_errors(f"module {name} raised during import:"):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            # Another name is missing if an import inside of the module fails.
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            module = None
    # A folder without __init__.py is a module without origin, too.
    if module is not None and (module.__spec__ is None or module.__spec__.origin is not None):
        return module
    path = Path(*name.split("."))
    remedy = "install its package, or name a Python file"
    if path.with_suffix(".py").is_file():
        remedy = f"did you mean the file {path}.py?"
    elif path.is_dir():
        remedy = f"{path} is a folder: name a Python file in it"
    raise UserFileError(f"there is no module {name!r}; {remedy}")


def import_file(path: str) -> types.ModuleType:
    """Import a Python file once per process; see `load_from_file`.

    `path` is relative to the working directory.

    Raises:
        UserFileError: if it is missing or not a Python file, or its import raises; the message names the line.
    """
    file = _find_file(path)
    package = _package_of(file.parent)
    name = f"{package}.{re.sub(r'[^0-9A-Za-z_]', '_', file.stem)}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with user_errors(f"{path} raised during import:", file.parent):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _find_file(path: str) -> Path:
    file = Path(path).expanduser().resolve()
    if file.is_dir():
        raise UserFileError(f"{path!r} is a folder; name a Python file in it")
    if not file.is_file():
        raise UserFileError(f"file {path!r} does not exist (resolved to {file}); paths start at the working directory")
    if importlib.util.spec_from_file_location(file.stem, file) is None:
        raise UserFileError(f"{path} is not a Python file; its name must end with .py")
    if not os.access(file, os.R_OK):
        raise UserFileError(f"this user may not read {path!r}; change its permissions")
    return file


def _package_of(folder: Path) -> str:
    """Return the name of the package for a folder, created without running its `__init__.py`."""
    name = _package_name(folder)
    if name not in sys.modules:
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        package.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = package
    return name


def _package_name(folder: Path) -> str:
    return f"marin_rl_user_{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"


_SHARED = contextvars.ContextVar[Mapping[str, Any]]("_SHARED", default=types.MappingProxyType({}))


@contextlib.contextmanager
def sharing(objects: Mapping[str, Any]) -> Iterator[None]:
    """Make objects of this program available to configs, which name them, for the duration of a `with` block.

    Other threads do not see them, unless they run coroutines that this one submits.
    """
    token = _SHARED.set({**_SHARED.get(), **objects})
    try:
        yield
    finally:
        _SHARED.reset(token)


def shared_object(name: str) -> Any:
    """Return an object that this program shares.

    Raises:
        UserFileError: if there is none, as in another program than the one that started the run.
    """
    if name not in (shared := _SHARED.get()):
        raise UserFileError(
            f"{name!r} is an object of the Python program that started the run, which is not here: open the run with "
            "marin_rl.RLTrainer.load in a program that has it, or write it into a file that the config names"
        )
    return shared[name]


_SERVER = ("starlette", "uvicorn", "prometheus_client")
PACKAGES = {
    "iris": ("finelog_server", "cryptography"),
    "openenv": ("websockets",),
    "ray": ("ray", "cryptography"),
    "serve": _SERVER,
    "textarena": ("textarena",),
    "textworld": ("textworld",),
    "tinker": (*_SERVER, "google.protobuf"),
    "verifiers": ("verifiers", *_SERVER),
}
"""Modules that the code of an extra of this distribution imports, by extra."""


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
    missing = [name for name in PACKAGES[extra] if not _is_installed(name)]
    if missing:
        line = ", with Python 3.12 or later, which Iris needs" if extra == "iris" else ""
        raise MissingPackageError(
            f"{needed_by} needs packages that are not installed ({', '.join(missing)}); install the extra{line}: "
            f"{install_command(extra)}"
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        # The package that contains it is missing.
        return False


INHERITED = (
    *("PATH", "HOME", "USER", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "XDG_CACHE_HOME"),
    *("VIRTUAL_ENV", "PYTHONPATH", "LD_LIBRARY_PATH", "NLTK_DATA"),
)
"""Environment variables that programs inherit. Any other may be a key or a password."""


def inherited_environment(*more: str) -> dict[str, str]:
    """Return the environment variables for a program: those of `INHERITED`, and those of further names."""
    return {name: os.environ[name] for name in (*INHERITED, *more) if name in os.environ}
