# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Importing the package sets `EQX_ON_ERROR` unless it is set already, and one module knows levanter's two lines."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import marin_rl

PACKAGE = Path(marin_rl.__file__).parent
SEAM = "levanter_line.py"
"""The module with all that differs between levanter's lines."""
OF_LINES = {"chex", "equinox", "fray", "haliax", "jax", "jaxlib", "levanter", "optax", "rigging", "tensorstore"}
OF_LINES |= {"transformers"}
"""Packages whose versions differ between the lines."""
ALLOWED = {
    # Versions that a run records.
    "host_status.py": ["from importlib import metadata"],
    # The version of the games is part of the key of a cache.
    "environments/textworld.py": ["import importlib.metadata"],
    # A checkpoint of a newer transformers has settings that this one does not know.
    "models/hf_config.py": ["transformers.__version__", "transformers.__version__"],
}
"""Questions about versions outside the seam, and their reasons."""
VERSIONS = {"IS_NEW", "__version__", "version_info", "hexversion", "python_version", "python_version_tuple"}
"""Names of a version, or of the line that is installed."""


@pytest.mark.parametrize(("given", "expected"), [(None, "off"), ("raise", "raise")])
def test_import_disables_equinox_runtime_checks_by_default(given: str | None, expected: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "EQX_ON_ERROR"}
    if given is not None:
        environment["EQX_ON_ERROR"] = given
    command = [sys.executable, "-c", "import marin_rl, os; print(os.environ['EQX_ON_ERROR'])"]
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert completed.stdout == f"{expected}\n"


def questions(source: str) -> Iterator[str]:
    """The expressions and imports with which a module asks for a version, or whether a line has a module or name."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(attr=name) if name in VERSIONS:
                yield ast.unparse(node)
            case ast.Import(names=names) if any(one.name in ("importlib.metadata", "pkg_resources") for one in names):
                yield ast.unparse(node)
            case ast.ImportFrom(module=str(module), names=names):
                imported = {f"{module}.{one.name}" for one in names} | {module}
                if imported & {"importlib.metadata", "jax.version"} or {one.name for one in names} & VERSIONS:
                    yield ast.unparse(node)
            case ast.Try(body=body) | ast.With(body=body):
                yield from (ast.unparse(one) for one in body if imports_line(one))
            case ast.Call(func=ast.Name(id="hasattr" | "getattr"), args=[ast.Name(id=name), *_]) if name in OF_LINES:
                yield ast.unparse(node)
            case ast.Call(args=[ast.Constant(value=str(name)), *_], func=function):
                if ast.unparse(function).endswith(("find_spec", "import_module")) and name.split(".")[0] in OF_LINES:
                    yield ast.unparse(node)


def imports_line(node: ast.AST) -> bool:
    """Whether a statement is an import of a package whose version differs between the lines."""
    names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
    names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
    return any(name.split(".")[0] in OF_LINES for name in names)


def test_only_one_module_depends_on_versions() -> None:
    files = {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    found = {name: list(questions(source)) for name, source in files.items() if name != SEAM}
    assert {name: asked for name, asked in found.items() if asked} == ALLOWED


@pytest.mark.parametrize(
    "source",
    [
        "import sys\nX = 1 if sys.version_info >= (3, 12) else 2",
        "from sys import version_info",
        "import jax\nNEW = jax.__version__ > '0.11'",
        "from jax import __version__ as version",
        "from importlib.metadata import version",
        "def f():\n    from importlib import metadata",
        "import importlib.metadata as m",
        "from marin_rl import levanter_line\nNAME = 'max_seq_len' if levanter_line.IS_NEW else 'seq_len'",
        "try:\n    from levanter.optim import MarsConfig\nexcept ImportError:\n    MarsConfig = None",
        "try:\n    import fray.device_flops as flops\nexcept Exception:\n    flops = None",
        "import contextlib\nwith contextlib.suppress(ImportError):\n    import jax.extend",
        "import jax\nif hasattr(jax, 'P'): pass",
        "import importlib.util\nNEW = importlib.util.find_spec('levanter.adaptor') is not None",
    ],
)
def test_questions_are_found(source: str) -> None:
    assert list(questions(source))
