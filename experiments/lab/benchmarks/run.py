# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The benchmark suite: runs the benchmarks one after the other, prints a table, and writes all reports to one file.

    python -m experiments.lab.benchmarks.run
    python -m experiments.lab.benchmarks.run end_to_end --against trl --output end_to_end.json
    python -m experiments.lab.benchmarks.run startup -- --config experiments/jsonl_start.yaml

Each benchmark is a separate process. Arguments after `--` are those of the benchmark, if only one is named.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.lab.benchmarks.measurement import say, shown
from experiments.lab.benchmarks.peer_environment import PEERS
from marin_rl.runs.run_directory import check_output

ROOT = Path(__file__).parents[3]
PREFIX = "benchmark_"
NAMES = tuple(sorted(path.stem.removeprefix(PREFIX) for path in Path(__file__).parent.glob(f"{PREFIX}*.py")))
"""Names of all benchmarks."""
END_TO_END = "end_to_end"


class Finished(NamedTuple):
    """Result of a benchmark's process."""

    status: int
    """Exit status."""
    output: str
    """Standard output."""


class Row(NamedTuple):
    """One line of the table."""

    name: str
    """Path of the figure in the report."""
    median: float | None
    """Median, or the figure itself."""
    smallest: float | None = None
    """Minimum of a series."""
    largest: float | None = None
    """Maximum of a series."""


def run_benchmark(name: str, arguments: Sequence[str]) -> Finished:
    """Run one benchmark in a process; its progress goes to standard error."""
    command = [sys.executable, "-m", f"experiments.lab.benchmarks.{PREFIX}{name}", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    return Finished(done.returncode, done.stdout)


def run_suite(
    names: Sequence[str],
    arguments: Mapping[str, Sequence[str]],
    run: Callable[[str, Sequence[str]], Finished] = run_benchmark,
) -> dict[str, Any]:
    """Run benchmarks in order; one that fails does not stop the others.

    Args:
        names: benchmarks.
        arguments: command-line arguments by benchmark.
        run: runs one benchmark.

    Returns:
        Start time, and by benchmark its report, or an `error` if it failed, with the load average before and after.
    """
    reports: dict[str, Any] = {}
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    for name in names:
        say(f"{name} ...")
        before = os.getloadavg()[0]
        finished = run(name, arguments.get(name, ()))
        load = [before, os.getloadavg()[0]]
        if finished.status:
            reports[name] = {"error": f"ended with status {finished.status}", "load": load}
        else:
            reports[name] = {**json.loads(finished.output), "load": load}
    return {"started": started, "benchmarks": reports}


def rows(figures: Any, name: str = "") -> Iterator[Row]:
    """Yield the rows of a report: numbers, and series with their spread; lists and texts are in the JSON only.

    >>> list(rows({"a": {"median": 2.0, "min": 1.0, "max": 3.0, "count": 3}, "b": {"c": 5}}))
    [Row(name='a', median=2.0, smallest=1.0, largest=3.0), Row(name='b.c', median=5, smallest=None, largest=None)]
    """
    if isinstance(figures, Mapping):
        if figures.keys() == {"median", "min", "max", "count"}:
            yield Row(name, figures["median"], figures["min"], figures["max"])
            return
        for key, value in figures.items():
            yield from rows(value, f"{name}.{key}" if name else key)
    elif figures is None or (isinstance(figures, int | float) and not isinstance(figures, bool)):
        yield Row(name, figures)


def table(report: Mapping[str, Any]) -> str:
    """Return a Markdown table of the figures of all benchmarks."""
    lines = []
    for name, benchmark in report["benchmarks"].items():
        load = "{:.1f} to {:.1f}".format(*benchmark["load"])
        if "error" in benchmark:
            lines += [f"## {name}", "", f"failed: {benchmark['error']} (load {load})", ""]
            continue
        machine = benchmark["machine"]
        versions = ", ".join(f"{package} {version}" for package, version in machine["versions"].items())
        lines += [
            f"## {name}",
            "",
            f"`{benchmark['command']}`",
            "",
            f"{machine['devices']} x {machine['device_kind']}, {machine['cpu_cores']} cores, load {load}, "
            f"Python {machine['python']}, {versions}",
            "",
            "| figure | median | min | max |",
            "|---|---|---|---|",
        ]
        for row in rows(benchmark["figures"]):
            lines.append(f"| `{row.name}` | {shown(row.median)} | {shown(row.smallest)} | {shown(row.largest)} |")
        lines.append("")
    return "\n".join(lines)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line; return it and the arguments after `--`."""
    argv = list(argv)
    own, rest = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(description="The benchmark suite", allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"benchmarks, by default all: {', '.join(NAMES)}")
    parser.add_argument("--against", choices=list(PEERS), help=f"another program, in {END_TO_END}")
    parser.add_argument("--output", type=Path, default=Path("benchmarks.json"), help="JSON file with all reports")
    arguments = parser.parse_args(own)
    if unknown := [name for name in arguments.names if name not in NAMES]:
        parser.error(f"unknown benchmark {', '.join(unknown)}; choose from {', '.join(NAMES)}")
    if rest and len(arguments.names) != 1:
        parser.error(f"the arguments after -- ({' '.join(rest)}) are those of one benchmark; name exactly one")
    arguments.names = arguments.names or list(NAMES)
    if arguments.against and END_TO_END not in arguments.names:
        parser.error(f"--against {arguments.against} needs the benchmark {END_TO_END}")
    if not arguments.output.absolute().parent.is_dir():
        parser.error(f"--output {arguments.output}: the folder does not exist; create it or choose another one")
    check_output(arguments.output, "--output", b'{\n  "started": "')
    return arguments, rest


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suite; return 1 if a benchmark failed, otherwise 0."""
    arguments, rest = parse(sys.argv[1:] if argv is None else argv)
    given = {name: list(rest) for name in arguments.names}
    if arguments.against:
        given[END_TO_END] += ["--against", arguments.against]
    report = run_suite(arguments.names, given, run_benchmark)
    arguments.output.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
    print(table(report))
    say(f"all reports: {arguments.output}")
    return int(any("error" in benchmark for benchmark in report["benchmarks"].values()))


if __name__ == "__main__":
    sys.exit(main())
