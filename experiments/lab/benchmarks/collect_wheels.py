# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Collect the wheels that the benchmark of a GPU needs on a machine without an index, given what is installed there.

    python -m pip list --format=freeze > installed.txt                   # on that machine
    python -m experiments.lab.benchmarks.collect_wheels installed.txt wheels   # here, with the same version of Python

The packages are those that its parts import, at tiny sizes on this machine's CPU, in the versions
that are installed here. So dependencies that nothing imports stay out, and so do those of `OPTIONAL`, without which the
parts run. A package
that the machine has keeps its version; if it is outside the range that one of the wheels declares, the script prints
both. `--replace NAME` carries this environment's version of it instead, which then takes precedence.
"""

import argparse
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from experiments.lab.benchmarks.gpu import ROOT

LIMIT_MB = 60
TRACED = ("device", "packed rows, float32", "log-probs qwen3, float32", "gradient qwen3, float32", "rloo.yaml")
TRACED += ("plan update 4k", "decode 64", "update 4k", "step", "start")
"""Parts whose imports are recorded: one of each function."""
OPTIONAL = ("ray", "pandas", "uvloop", "grpc")
"""Modules that are large and not necessary: the traced parts run without them."""
UNUSED_FILES = re.compile(
    r"wandb/bin/|botocore/data/|pillow\.libs/libavif|fontTools/.*\.(so|c)$|zstandard/_cffi.*\.so$"
    r"|reasoning_gym/data/codeio|(.*/)?tests/"
)
"""Large files of packages that are imported but not used for this: wandb's service, descriptions of AWS, a codec of
images, compiled copies of Python modules, a second binding of zstd, data of another task, and tests."""
RECORDER = """
import os, sys
_seen, _absent = set(), {absent!r}
_pipe = os.open({pipe!r}, os.O_WRONLY)
def _record(event, arguments):
    if event == "import" and arguments[0] not in _seen:
        if arguments[0].partition(".")[0] in _absent:
            raise ModuleNotFoundError(f"No module named {{arguments[0]!r}}", name=arguments[0])
        _seen.add(arguments[0])
        os.write(_pipe, arguments[0].encode() + b"\\n")
sys.addaudithook(_record)
"""
"""A `sitecustomize` that reports the name of every module that is imported, in this process and those it starts, which
do not inherit all environment variables."""


def recorded_imports(command: Sequence[str], folder: Path) -> set[str]:
    """Run a command; return the names of the modules that its processes look for.

    Args:
        command: the command, which runs in the root of this repository.
        folder: folder for temporary files.

    Raises:
        SystemExit: if the command fails.
    """
    names, pipe = folder / "imports.txt", folder / "imports"
    (folder / "sitecustomize.py").write_text(RECORDER.format(absent=set(OPTIONAL), pipe=str(pipe)))
    # Processes that check answers confine themselves: they can write to an open pipe, but not to a file.
    os.mkfifo(pipe)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    with names.open("wb") as file, subprocess.Popen(["cat", pipe], stdout=file), pipe.open("wb"):
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, check=False)
    if done.returncode:
        raise SystemExit("a part failed here (see the table), so its imports are not known; repair this environment")
    return set(names.read_text().split())


def packages_of(modules: Iterable[str], files: Mapping[str, Sequence[str]]) -> set[str]:
    """Return the distributions that contain modules.

    Args:
        modules: dotted names; those of the standard library are in no distribution.
        files: paths of the files of each distribution.

    >>> files = {"Foo": ["foo/__init__.py"], "ns-a": ["ns/a.py"], "ns-b": ["ns/b/__init__.py"]}
    >>> sorted(packages_of(["os", "foo.bar", "foo", "ns", "ns.b"], files))
    ['Foo', 'ns-b']
    """
    owners: dict[str, set[str]] = {}
    for name, paths in files.items():
        for path in paths:
            module = re.sub(r"(/__init__)?(\.[\w-]+)*\.(py|so)$", "", path)
            if module != path:
                owners.setdefault(module.replace("/", "."), set()).add(name)
    return set().union(*(owners.get(module, set()) for module in modules))


def installed_here() -> dict[str, importlib.metadata.Distribution]:
    """Return the distributions of this environment by their canonical names."""
    found = importlib.metadata.distributions()
    return {canonicalize_name(one.metadata["Name"]): one for one in found if one.metadata["Name"]}


def read_list(text: str) -> dict[str, str]:
    """Return versions by canonical name from lines `name==version`; other lines are ignored.

    >>> read_list(chr(10).join(["Jax_cuda13==0.11.2", "# a comment", "-e git+https://x"]))
    {'jax-cuda13': '0.11.2'}
    """
    pairs = (line.split("==") for line in text.split() if re.fullmatch(r"[\w.-]+==[^=]+", line))
    return {canonicalize_name(name): version for name, version in pairs}


def conflicts(
    carried: Mapping[str, importlib.metadata.Distribution], installed: Mapping[str, str]
) -> Iterator[tuple[str, str, str]]:
    """Yield name, installed version and requirement of packages outside the range that a carried one declares."""
    for name, one in carried.items():
        for text in one.requires or ():
            needed = Requirement(text)
            version = installed.get(canonicalize_name(needed.name))
            applies = needed.marker is None or needed.marker.evaluate({"extra": ""})
            if applies and version is not None and not needed.specifier.contains(version, prereleases=True):
                yield canonicalize_name(needed.name), version, f"{name} needs {needed.name}{needed.specifier}"


def build(requirements: Sequence[str], folder: Path) -> None:
    """Download or build wheels, without dependencies.

    Raises:
        SystemExit: if pip fails.
    """
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), *requirements]
    if subprocess.run(command, check=False).returncode:
        raise SystemExit("pip could not collect the wheels; its messages are above")


def strip(wheel: Path) -> None:
    """Remove unused files from a wheel."""
    smaller = wheel.with_suffix(".smaller")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new:
        for name in old.namelist():
            content = old.read(name)
            if name.endswith(".dist-info/RECORD"):
                lines = content.decode().splitlines(keepends=True)
                content = "".join(line for line in lines if not UNUSED_FILES.match(line)).encode()
            if not UNUSED_FILES.match(name):
                new.writestr(old.getinfo(name), content, zipfile.ZIP_DEFLATED, 9)
    smaller.replace(wheel)


def main(argv: Sequence[str] | None = None) -> int:
    """Collect the wheels and print them; return 1 if they exceed the limit, otherwise 0."""
    parser = argparse.ArgumentParser(
        description="Collect wheels for experiments.lab.benchmarks.gpu", allow_abbrev=False
    )
    parser.add_argument("installed", type=Path, help="output of `pip list --format=freeze` on the machine")
    parser.add_argument("folder", type=Path, help="new folder for the wheels")
    parser.add_argument("--replace", nargs="*", default=[], metavar="NAME", help="installed packages to carry as well")
    parser.add_argument("--limit_mb", type=float, default=LIMIT_MB, help=f"largest size (default: {LIMIT_MB})")
    arguments = parser.parse_args(argv)
    if arguments.folder.exists():
        parser.error(f"{arguments.folder} exists; give a new folder, or delete it")
    here, there = installed_here(), read_list(arguments.installed.read_text())
    if not there:
        parser.error(f"{arguments.installed} has no line name==version; write it with pip list --format=freeze")
    with tempfile.TemporaryDirectory() as folder:
        files = ["--work", f"{folder}/work", "--output", f"{folder}/report.json"]
        run = [sys.executable, "-m", "experiments.lab.benchmarks.gpu", "--tiny", *files, *TRACED]
        modules = recorded_imports(run, Path(folder))
    contents = {name: [str(path) for path in one.files or ()] for name, one in here.items()}
    replaced = set(map(canonicalize_name, arguments.replace))
    used = packages_of(modules, contents) | replaced
    kept = there.keys() - replaced
    carried = {name: here[name] for name in sorted(used - kept) if name != "marin-rl"}
    build([f"{name}=={one.version}" for name, one in carried.items()], arguments.folder)
    for wheel in arguments.folder.glob("*.whl"):
        strip(wheel)
    for name, version, requirement in sorted(set(conflicts(carried, {name: there[name] for name in kept}))):
        print(f"kept {name} {version}, although {requirement}; to carry another version: --replace {name}")
    sizes = {path.name: path.stat().st_size / 1e6 for path in arguments.folder.glob("*.whl")}
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        print(f"{size:7.2f} MB  {name}")
    total = sum(sizes.values())
    print(f"{total:7.2f} MB  {len(sizes)} wheels, of at most {arguments.limit_mb:.0f} MB")
    return int(total > arguments.limit_mb)


if __name__ == "__main__":
    sys.exit(main())
