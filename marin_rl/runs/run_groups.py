# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Several runs next to each other: runs that differ only in their seed form a group, with mean and range."""

import dataclasses
import itertools
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from marin_rl.runs.metrics_file import Record, points, read_records
from marin_rl.runs.run_directory import RunDirectory, open_existing, read_config_text
from marin_rl.utils.errors import RunDirectoryError
from marin_rl.utils.settings.fields import flatten
from marin_rl.utils.settings.yaml_text import parse_yaml
from marin_rl.utils.storage import StoragePath, storage_path

_NAMED = re.compile(r"([^=/]+)=(.+)", re.DOTALL)
_SEED_ENDING = re.compile(r"((^|[-_./])(seed|s))?[-_.]*\d*$")


@dataclasses.dataclass(frozen=True)
class ComparedRun:
    """A run of a comparison."""

    name: str
    """The last parts of its path, as many as distinguish it from the others."""
    directory: RunDirectory
    """Its files."""
    config: Mapping[str, Any]
    """Its resolved config by dotted key."""
    records: Sequence[Record]
    """Its metrics; empty before the first step."""


@dataclasses.dataclass(frozen=True)
class RunGroup:
    """Runs that are drawn as one curve."""

    label: str
    """The given name, or the common part of the names of its runs."""
    runs: Sequence[ComparedRun]
    """At least one."""

    def __str__(self) -> str:
        count, seeds = len(self.runs), {run.config.get("seed") for run in self.runs}
        return self.label if count == 1 else f"{self.label} ({count} {'seeds' if len(seeds) == count else 'runs'})"


class Band(NamedTuple):
    """A metric of a group at one step, over its runs."""

    step: int
    mean: float
    low: float
    """Smallest value of a run."""
    high: float
    """Largest value of a run."""


def band(runs: Iterable[Sequence[Record]], name: str) -> list[Band]:
    """Return mean, minimum and maximum of a metric over runs, at the steps at which all runs that measure it have it.

    Without the last condition, the mean would jump where the shortest run ends.

    >>> band([[{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}], [{"step": 1, "loss": 4.0}]], "loss")
    [Band(step=1, mean=3.0, low=2.0, high=4.0)]
    """
    measured = [dict(series) for records in runs if (series := points(records, name))]
    steps = sorted(set.intersection(*map(set, measured))) if measured else []
    columns = ([series[step] for series in measured] for step in steps)
    return [
        Band(step, math.fsum(values) / len(values), min(values), max(values))
        for step, values in zip(steps, columns, strict=True)
    ]


def group_runs(arguments: Sequence[str]) -> list[RunGroup]:
    """Open runs and group them: those with the same given name, and those whose configs differ only in the seed.

    A setting that contains `seed1` in a run with seed 1, such as the run that it starts from, counts as the same. Where
    a seed repeats, such as for runs of two versions of the code, only runs whose names differ in the seed are a group.
    Arguments are `DIR` or `NAME=DIR`. Groups are in the order of their first runs.

    Raises:
        RunDirectoryError: if an argument is not a run directory or is given twice, or a metrics.jsonl is damaged.
    """
    named = [_split(argument) for argument in arguments]
    directories = [open_existing(storage_path(path, "RUN")) for _, path in named]
    names = _short_names([directory.path for directory in directories])
    alike: dict[object, list[ComparedRun]] = {}
    for (given, path), directory, name in zip(named, directories, names, strict=True):
        config = flatten(parse_yaml(read_config_text(directory), f"the config of {path}"))
        run = ComparedRun(name, directory, config, read_records(directory.metrics))
        alike.setdefault(given or tuple(sorted(_without_seed(config).items())), []).append(run)
    groups = [
        (key if isinstance(key, str) else _common_name(group), group)
        for key, runs in alike.items()
        for group in ([runs] if isinstance(key, str) else _without_repeated_seeds(runs))
    ]
    groups.sort(key=lambda group: names.index(group[1][0].name))
    labels = [label for label, _ in groups]
    return [RunGroup(label if labels.count(label) == 1 else f"{label}, {runs[0].name}", runs) for label, runs in groups]


def _split(argument: str) -> tuple[str | None, str]:
    """The given name of a run, if it has one, and its path; an existing path may contain the character =."""
    match = None if os.path.exists(argument) else _NAMED.fullmatch(argument)
    return (None, argument) if match is None else (match[1], match[2])


def _absolute(path: StoragePath) -> str:
    return str(path.resolve() if isinstance(path, Path) else path)


def _short_names(paths: Sequence[StoragePath]) -> list[str]:
    texts = list(map(_absolute, paths))
    for text in texts:
        if texts.count(text) > 1:
            raise RunDirectoryError(f"the run {text!r} is given twice; give each run once")
    parts = [text.split("/") for text in texts]
    for length in itertools.count(1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            break
    return names


def _without_seed(config: Mapping[str, Any]) -> dict[str, str]:
    own = re.compile(rf"(seed[-_=]?){re.escape(str(config.get('seed')))}(?!\d)")
    return {key: own.sub(r"\1", repr(value)) for key, value in config.items() if key not in ("seed", "run_dir")}


def _without_repeated_seeds(runs: Sequence[ComparedRun]) -> list[list[ComparedRun]]:
    """Split runs with equal configs by their names without the seed, unless each has another seed."""
    if len({run.config.get("seed") for run in runs}) == len(runs):
        return [list(runs)]
    parts: dict[tuple[str, str], list[ComparedRun]] = {}
    for run in runs:
        before, _, after = run.name.rpartition(str(run.config.get("seed")))
        parts.setdefault((before, after), []).append(run)
    return list(parts.values())


def _common_name(runs: Sequence[ComparedRun]) -> str:
    """The last part of the path that runs share, without the word seed at its end."""
    if len(runs) == 1:
        return runs[0].name
    paths = [_absolute(run.directory.path) for run in runs]
    # All texts share what the first and the last in alphabetical order share.
    pairs = zip(min(paths), max(paths), strict=False)
    shared = "".join(one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return _SEED_ENDING.sub("", shared).rstrip("/").rpartition("/")[2] or runs[0].name
