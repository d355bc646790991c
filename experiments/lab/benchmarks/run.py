# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The benchmark suite: runs the benchmarks one after the other, prints a table, and writes all reports to one file.

    python -m experiments.lab.benchmarks.run
    python -m experiments.lab.benchmarks.run end_to_end --against trl --output end_to_end.json
    python -m experiments.lab.benchmarks.run startup -- --config experiments/jsonl_start.yaml
    python -m experiments.lab.benchmarks.run end_to_end --compare_to v0.1 -- --sizes tiny --cores one --pairs 1

Each benchmark is a separate process. Arguments after `--` are those of the benchmark, if only one is named. With
`--compare_to`, each benchmark runs in turn in the tree of a commit and in this one, and the report has the ratios.
"""

import argparse
import contextlib
import datetime
import functools
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.lab.benchmarks.measurement import ratios, say, shown, spread
from experiments.lab.benchmarks.peer_environment import PEERS
from marin_rl.runs.run_directory import check_output
from marin_rl.utils.signals import interruptible

ROOT = Path(__file__).parents[3]
PREFIX = "benchmark_"
NAMES = tuple(sorted(path.stem.removeprefix(PREFIX) for path in Path(__file__).parent.glob(f"{PREFIX}*.py")))
"""Names of all benchmarks."""
END_TO_END = "end_to_end"


class CommitError(ValueError):
    """A commit cannot be checked out; the message has the output of git."""


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


def run_benchmark(name: str, arguments: Sequence[str], tree: Path = ROOT) -> Finished:
    """Run the benchmark of a source tree in a process; its progress goes to standard error."""
    # Other commits may have it in another folder.
    paths = sorted(tree.glob(f"experiments/**/{PREFIX}{name}.py"))
    if not paths:
        say(f"{tree} has no benchmark {name}")
        return Finished(1, "")
    module = ".".join(paths[0].relative_to(tree).with_suffix("").parts)
    given = os.environ.get("PYTHONPATH")
    env = {**os.environ, "PYTHONPATH": str(tree) if given is None else f"{tree}{os.pathsep}{given}"}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=tree, env=env, stdout=subprocess.PIPE, text=True, check=False)
    return Finished(done.returncode, done.stdout)


@contextlib.contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """Check out a commit in a temporary worktree; raises CommitError if git fails."""

    def git(*arguments: str) -> None:
        done = subprocess.run(["git", "worktree", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CommitError(done.stderr.strip())

    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        git("add", "--detach", str(tree), commit)
        try:
            yield tree
        finally:
            git("remove", "--force", str(tree))


def run_pairs(name: str, arguments: Sequence[str], *, tree: Path, commit: str, pairs: int) -> Finished:
    """Run a benchmark in the tree of a commit and in this one, in turn, and compare their times.

    Args:
        name: the benchmark.
        arguments: its command-line arguments, in both trees.
        tree: checkout of the commit.
        commit: its name in the report.
        pairs: runs in each tree; which one is first alternates.

    Returns:
        A report; its figures are the ratios of all times, this tree over the commit, and the times in both trees. If a
        run fails, its status.
    """
    reports: dict[Path, list[Any]] = {tree: [], ROOT: []}
    for pair in range(pairs):
        for place in (tree, ROOT) if pair % 2 == 0 else (ROOT, tree):
            say(f"{name}, pair {pair + 1}: {'this tree' if place == ROOT else commit} ...")
            finished = run_benchmark(name, arguments, place)
            if finished.status:
                return finished
            reports[place].append(json.loads(finished.output))
    before, now = (_times([report["figures"] for report in reports[place]]) for place in (tree, ROOT))
    common = [figure for figure in now if figure in before]
    command = ["python", "-m", "experiments.lab.benchmarks.run", name, "--compare_to", commit, "--pairs", str(pairs)]
    report = {
        "command": shlex.join([*command, "--", *arguments]),
        "machine": reports[ROOT][-1]["machine"],
        "figures": {
            "ratio": {figure: ratios(now[figure], before[figure]) for figure in common},
            "before": {figure: spread(before[figure]) for figure in common},
            "now": {figure: spread(now[figure]) for figure in common},
        },
    }
    return Finished(0, json.dumps(report))


def _times(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the times above 0 that all runs report, one value per run: the medians of series.

    >>> _times([{"step_seconds": 2.0, "steps": 3}, {"step_seconds": 1.0, "steps": 3}])
    {'step_seconds': [2.0, 1.0]}
    """
    found = [
        {row.name: row.median for row in rows(figures) if "seconds" in row.name and row.median} for figures in runs
    ]
    return {name: [times[name] for times in found] for name in found[0] if all(name in times for times in found)}


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
    parser.add_argument(
        "--compare_to", metavar="COMMIT", help="commit whose times are compared with those of this tree"
    )
    parser.add_argument("--pairs", type=int, default=3, help="runs in each of both trees, with --compare_to")
    parser.add_argument("--output", type=Path, default=Path("benchmarks.json"), help="JSON file with all reports")
    arguments = parser.parse_args(own)
    if unknown := [name for name in arguments.names if name not in NAMES]:
        parser.error(f"unknown benchmark {', '.join(unknown)}; choose from {', '.join(NAMES)}")
    if rest and len(arguments.names) != 1:
        parser.error(f"the arguments after -- ({' '.join(rest)}) are those of one benchmark; name exactly one")
    arguments.names = arguments.names or list(NAMES)
    if arguments.against and END_TO_END not in arguments.names:
        parser.error(f"--against {arguments.against} needs the benchmark {END_TO_END}")
    if arguments.pairs < 1:
        parser.error(f"--pairs is {arguments.pairs}; it must be at least 1")
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
    if arguments.compare_to is None:
        report = run_suite(arguments.names, given, run_benchmark)
    else:
        try:
            # A signal, too, removes the worktree.
            with interruptible(), checked_out(arguments.compare_to) as tree:
                run = functools.partial(run_pairs, tree=tree, commit=arguments.compare_to, pairs=arguments.pairs)
                report = run_suite(arguments.names, given, run)
        except CommitError as error:
            say(f"--compare_to {arguments.compare_to}: {error}")
            return 1
    arguments.output.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
    print(table(report))
    say(f"all reports: {arguments.output}")
    return int(any("error" in benchmark for benchmark in report["benchmarks"].values()))


if __name__ == "__main__":
    sys.exit(main())
