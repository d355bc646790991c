# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The runs of the results page, and the records of their held-out scores in `records/`."""

import dataclasses
import datetime
import fcntl
import json
import re
import resource
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from marin_rl.runs.metrics_file import read_records
from marin_rl.utils.levanter_line import distribution_of
from marin_rl.utils.storage import write_bytes

RECORDS = Path(__file__).parent / "records"
ROOT = Path(__file__).parents[3]
SCORE = re.compile(r"eval/.*/(?:accuracy|reward)_(sampled|greedy)")
AGAINST = {"trl": "against_trl", "tunix": "against_tunix"}
"""Names of the records of `experiments.lab.against_peer`, by program."""
LABELS = {"trl": "TRL", "tunix": "Tunix"}
"""Names of these programs."""
OURS = "marin_rl"
"""Label of the runs of this package among them."""
PACKAGES = ("jax", "levanter")


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of the page."""

    label: str
    """Runs with equal labels differ in their seeds only."""
    seed: int
    command: str
    """Module and arguments, as after `python -m`."""
    directory: str
    """The run directory."""
    before: tuple[str, ...] = ()
    """Commands that make its start, and do nothing if it exists."""


@dataclasses.dataclass(frozen=True)
class Record:
    """Held-out scores of a finished run by step, and its cost."""

    label: str
    seed: int
    command: str
    date: str
    versions: dict[str, str]
    cpu_seconds: float
    """User and system time of the command, compilation included, without the commands before it."""
    steps: tuple[int, ...]
    sampled: tuple[float, ...]
    greedy: tuple[float, ...]
    times: tuple[tuple[float, float], ...] = ()
    """Seconds and CPU seconds from the start of the process to each evaluation after step 0, if they were measured."""


def execute(run: Run) -> Record:
    """Run the commands, of which those of finished runs do nothing, and return the record.

    Raises:
        subprocess.CalledProcessError: if a command fails; its output is on the terminal.
    """
    for command in run.before:
        _python(command)
    before = _cpu_seconds()
    _python(run.command)
    today, seconds = datetime.date.today().isoformat(), round(_cpu_seconds() - before, 1)
    return Record(run.label, run.seed, run.command, today, own_versions(), seconds, *scores(ROOT / run.directory))


def own_versions() -> dict[str, str]:
    """Return the versions of the packages that determine a run of this package."""
    return {name: metadata.version(distribution_of(name)) for name in PACKAGES}


def scores(directory: Path) -> tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...]]:
    """Return the steps of the evaluations of a run, and the scores at them, sampled and greedy.

    Raises:
        ValueError: if the run has no evaluation, or evaluates several environments.
    """
    points: dict[int, dict[str, float]] = {}
    for record in read_records(directory / "metrics.jsonl"):
        named = [(found[1], value) for name, value in record.items() if (found := SCORE.fullmatch(name))]
        if named:
            points[int(record["step"])] = dict(named)
        if len(named) > 2:
            raise ValueError(f"{directory} evaluates several environments in step {record['step']}: {record}")
    if not points:
        raise ValueError(f"{directory} has no evaluation; set evaluation.every")
    columns = (tuple(round(point[name], 4) for point in points.values()) for name in ("sampled", "greedy"))
    return tuple(points), next(columns), next(columns)


def read(name: str) -> list[Record]:
    """Return the records of a result; none if there is no file."""
    file = RECORDS / f"{name}.json"
    return [Record(**record) for record in json.loads(file.read_text())] if file.exists() else []


def add(name: str, record: Record) -> None:
    """Add a record to a result, or replace that of the same label and seed; other processes may do so, too."""
    RECORDS.mkdir(exist_ok=True)
    with (RECORDS / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        others = [old for old in read(name) if (old.label, old.seed) != (record.label, record.seed)]
        ordered = sorted([*others, record], key=lambda one: (one.label, one.seed))
        text = ",\n".join(json.dumps(dataclasses.asdict(one)) for one in ordered)
        # Others read without the lock.
        write_bytes(RECORDS / f"{name}.json", f"[\n{text}\n]\n".encode())


def _python(command: str) -> None:
    subprocess.run([sys.executable, "-m", *shlex.split(command)], check=True, cwd=ROOT)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
