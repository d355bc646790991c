# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Importing the package sets environment variables that are not set, and one module knows levanter's two lines."""

import ast
import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.specifiers import SpecifierSet

import marin_rl
from tests.tiny_run import TinyRun

PACKAGE = Path(marin_rl.__file__).parent
ROOT = PACKAGE.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SEAM = "utils/levanter_line.py"
"""The module with all that differs between levanter's lines."""
OF_LINES = {"chex", "equinox", "fray", "haliax", "jax", "jaxlib", "levanter", "optax", "rigging", "tensorstore"}
OF_LINES |= {"transformers"}
"""Packages whose versions differ between the lines."""
ALLOWED = {
    # Versions that a run records.
    "utils/host_status.py": ["from importlib import metadata"],
    # The version of the games is part of the key of a cache.
    "environments/textworld.py": ["import importlib.metadata"],
    # A checkpoint of a newer transformers has settings that this one does not know.
    "models/hf_config.py": ["transformers.__version__", "transformers.__version__"],
    # Versions that may change tokens are part of the digest of stored ones.
    "tokenization/chat.py": ["module.__version__"],
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


@pytest.mark.parametrize(
    ("plugin", "given", "expected"),
    [(None, None, "3"), (None, "0", "0"), ("jax_plugins", None, None), ("libtpu", None, None), ("libtpu", "2", "2")],
)
def test_xlas_errors_are_hidden_only_without_an_accelerator(
    plugin: str | None, given: str | None, expected: str | None, tmp_path: Path
) -> None:
    if plugin is not None:
        (tmp_path / plugin).mkdir()
    # Without jax_plugins and libtpu of this environment.
    code = f"import sys; sys.path[:] = [{str(tmp_path)!r}, {str(ROOT)!r}, *(p for p in sys.path if 'site-' not in p)]; "
    code += "import marin_rl, os; print(os.environ.get('TF_CPP_MIN_LOG_LEVEL'))"
    environment = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    environment |= {} if given is None else {"TF_CPP_MIN_LOG_LEVEL": given}
    completed = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert completed.stdout == f"{expected}\n"


@pytest.mark.medium
@pytest.mark.parametrize(
    ("program", "shown"),
    [
        ("jax.jit(lambda: jax.numpy.ones(1 << 45))()", "Out of memory allocating"),
        ("jax.distributed.initialize('127.0.0.1:9', 2, 1, initialization_timeout=1)", "Terminating process because"),
    ],
)
def test_errors_of_xla_are_visible_without_its_error_messages(program: str, shown: str) -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", f"import marin_rl, jax; {program}"]
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert completed.returncode != 0
    assert shown in completed.stderr


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


@pytest.mark.medium
def test_no_module_imports_a_command() -> None:
    commands = {f"marin_rl.{path.stem}" for path in PACKAGE.glob("[!_]*.py")} - {"marin_rl.types", "marin_rl.trainers"}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                package = node.module if isinstance(node, ast.ImportFrom) else None
                names = {f"{package}.{one.name}" if package else one.name for one in node.names} | {package}
                assert not names & commands, path


@pytest.mark.medium
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
        "from marin_rl.utils import levanter_line\nNAME = 'max_seq_len' if levanter_line.IS_NEW else 'seq_len'",
        "try:\n    from levanter.optim import MarsConfig\nexcept ImportError:\n    MarsConfig = None",
        "try:\n    import fray.device_flops as flops\nexcept Exception:\n    flops = None",
        "import contextlib\nwith contextlib.suppress(ImportError):\n    import jax.extend",
        "import jax\nif hasattr(jax, 'P'): pass",
        "import importlib.util\nNEW = importlib.util.find_spec('levanter.adaptor') is not None",
    ],
)
def test_questions_are_found(source: str) -> None:
    assert list(questions(source))


UNUSED = (
    *("ray", "datasets", "cryptography", "pyarrow.flight", "gymnasium", "reasoning_gym"),
    *("math_verify", "latex2sympy2_extended", "sympy"),
)
"""Packages that a run imports only if its config names something that needs them."""
WITHOUT_UNUSED = f"""
import sys
import levanter.compat.hf_checkpoints, levanter.tracker.tensorboard, levanter.tracker.wandb
# From here on as if they were not installed. Levanter itself has imported some.
for name in list(sys.modules):
    if any(f"{{name}}.".startswith(f"{{unused}}.") for unused in {UNUSED}):
        del sys.modules[name]
sys.modules.update(dict.fromkeys({UNUSED}))

from jax._src.xla_bridge import backends_are_initialized
from marin_rl import evaluate, export, plan, replay, train, view

config, run = sys.argv[1:]
print("async", train.main(["--config", config, "--mode", "async"]), backends_are_initialized())
print("dry run", train.main(["--config", config, "--dry_run"]))
print("train", train.main(["--config", config]))
print("evaluate", evaluate.main(["--run", run]))
print("view", view.main([run]))
print("replay", replay.main(["--run", run, "--step", "2"]))
print("export", export.main(["--run", run, "--output", f"{{run}}-exported"]))
print("plan", plan.main(["--config", config, "--topology", "cpu:1"]))
"""
RECORDED = """
import sys
def record(event, arguments):
    if event == "import" and arguments[0] in {unused} and sys.orig_argv[1:2] != [{program!r}]:
        with open({file!r}, "a") as file:
            print(arguments[0], sys.orig_argv, file=file)
sys.addaudithook(record)
"""
"""Records imports of unused packages by other processes than the program."""


@pytest.mark.slow
def test_a_sync_run_imports_no_package_that_it_does_not_use(new_run: Callable[..., TinyRun], tmp_path: Path) -> None:
    run = new_run(num_steps=2, checkpoint__every=1, warm_start__max_steps=10, evaluation__tasks=4)
    program, recorded = tmp_path / "program.py", tmp_path / "recorded.txt"
    program.write_text(WITHOUT_UNUSED)
    source = RECORDED.format(unused=UNUSED, program=str(program), file=str(recorded))
    (tmp_path / "sitecustomize.py").write_text(source)
    done = subprocess.run(
        [sys.executable, str(program), str(run.config), str(run.path)],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[1]}"},
        capture_output=True,
        text=True,
        check=False,
    )
    statuses = [line for line in done.stdout.splitlines() if re.fullmatch(r"[a-z ]+ [01]( False)?", line)]
    expected = ["async 1 False", "dry run 0", "train 0", "evaluate 0", "view 0", "replay 0", "export 0", "plan 0"]
    assert statuses == expected, done.stderr
    assert done.stderr.count("pip install -e '.[ray]'") == 1
    assert not recorded.exists(), recorded.read_text()


def test_the_version_is_that_of_the_distribution_and_types_are_installed() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", marin_rl.__version__)
    assert metadata.version("marin_rl") == marin_rl.__version__
    assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"]["marin_rl"]
    assert (PACKAGE / "py.typed").is_file()


def test_the_public_names_exist_and_type_checkers_see_them() -> None:
    assert set(dir(marin_rl)) >= set(marin_rl.__all__)
    assert all(getattr(marin_rl, name).__name__ == name for name in marin_rl.__all__)
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    [block] = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname: f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    assert seen == {name: f"{module}.{name}" for name, module in marin_rl._PUBLIC.items()}
    page = (ROOT / "docs" / "pages" / "api" / "public.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| \[`(\w+)`\]\[([\w.]+)\]", page, re.MULTILINE)
    assert dict(shown) == seen
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        marin_rl.Trainer  # noqa: B018


def test_importing_the_package_imports_no_other() -> None:
    command = [sys.executable, "-X", "importtime", "-c", "import marin_rl"]
    errors = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in errors.splitlines()}
    assert "marin_rl" in imported
    assert not imported & {"jax", "jaxlib", "numpy", "levanter", "transformers", "pyarrow", "importlib.metadata"}


@pytest.mark.parametrize(
    "version", [(3, 8, 18), (3, 9, 0), (3, 10, 13), (3, 11, 0), (3, 12, 1), (3, 13, 9), (3, 14, 0), (4, 0, 0)]
)
def test_the_build_refuses_the_versions_of_python_that_the_project_excludes(
    version: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[dict[str, str]] = []
    monkeypatch.setitem(sys.modules, "setuptools", SimpleNamespace(setup=lambda **settings: built.append(settings)))
    monkeypatch.setattr(sys, "version_info", version)
    text = ".".join(map(str, version))
    monkeypatch.setattr(sys, "version", f"{text} (main, Jan 1 2026)")
    is_supported = text in SpecifierSet(PROJECT["project"]["requires-python"])
    if is_supported:
        runpy.run_path(str(ROOT / "setup.py"))
        [settings] = built
        links = re.findall(r"\]\(([^)]*)\)", settings["long_description"])
        assert len(links) == len(re.findall(r"\]\([^)]*\)", (ROOT / "README.md").read_text(encoding="utf-8")))
        assert all(link.startswith(("https://", "#")) for link in links)
    else:
        with pytest.raises(SystemExit, match=rf"Python 3\.11, 3\.12 or 3\.13, but this is {text}; "):
            runpy.run_path(str(ROOT / "setup.py"))
    classifier = f"Programming Language :: Python :: {version[0]}.{version[1]}"
    assert is_supported == (classifier in PROJECT["project"]["classifiers"])
