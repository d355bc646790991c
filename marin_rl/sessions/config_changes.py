# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Changes of the config of a run that resumes: which are possible, and their history in `config.yaml`.

Keys that affect the results may change only if the field is declared `may_change_by_name` and the command line names
the key. `config.yaml` begins with a comment for each change:

```
# after step 12: num_steps 12 -> 20
```
"""

import dataclasses
import functools
import json
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import optax
from levanter.optim.config import OptimizerConfig
from levanter.tracker import NoopTracker, current_tracker
from levanter.trainer_state import init_optimizer_for_trainables

from marin_rl.config.run_config import AbstractRunConfig
from marin_rl.config.train_config import TrainConfig
from marin_rl.learner.policy_spec import PolicySpec
from marin_rl.runs.checkpoint import Checkpoints
from marin_rl.runs.run_directory import (
    CheckpointError,
    RunDirectory,
    comments_of,
    differing_keys,
    exported_step,
    folder_name,
    read_config_text,
    show_value,
    write_atomically,
)
from marin_rl.runs.saved_checkpoint import read_manifest
from marin_rl.sessions.earlier_run import read_config, require_rl
from marin_rl.training.run_state import Progress
from marin_rl.utils.devices.arrays import describe, first_difference, named_arrays
from marin_rl.utils.errors import RunDirectoryError
from marin_rl.utils.settings.decode import decode, encode
from marin_rl.utils.settings.fields import changeable_keys, flatten, is_within, keys_changeable_by_name
from marin_rl.utils.settings.yaml_text import load_yaml, parse_value, parse_yaml
from marin_rl.utils.storage import writing

NOT_SET = "not set"


@dataclasses.dataclass(frozen=True)
class Change:
    """A changed key of the config."""

    step: int
    """Completed steps before the change."""
    key: str
    """Dotted key."""
    old: str
    """Value before the change, as JSON, or `not set`."""
    new: str
    """Value after the change, likewise."""

    def __str__(self) -> str:
        return f"{self.key} {self.old} -> {self.new}"


def read_history(text: str) -> list[Change]:
    """Return the changes that the comments of a `config.yaml` list, in their order."""
    parsed = [_parse(line) for line in comments_of(text).splitlines()]
    return [change for change in parsed if change is not None]


def _parse(line: str) -> Change | None:
    match = re.fullmatch(r"# after step (\d+): (\S+) (.+)", line)
    if match is None:
        return None
    values = match[3]
    try:
        end = len(NOT_SET) if values.startswith(NOT_SET) else json.JSONDecoder().raw_decode(values)[1]
        if values[end + 4 :] != NOT_SET:
            json.loads(values[end + 4 :])
    except ValueError:
        return None
    return Change(int(match[1]), match[2], values[:end], values[end + 4 :])


def record_changes(directory: RunDirectory, changes: Sequence[Change], config: str, step: int) -> list[Change]:
    """Write the config of a run that resumes, with the changes in its history.

    Args:
        directory: run directory.
        changes: new changes.
        config: the new config, as YAML.
        step: step of the checkpoint from which the run resumes. The run repeats later steps with the new config, so
            former changes after later steps are moved to this one.

    Returns:
        The history.

    Raises:
        RunDirectoryError: if the file cannot be written.
    """
    text = read_config_text(directory)
    lines = comments_of(text).splitlines()
    for index, former in enumerate(map(_parse, lines)):
        if former is not None and former.step > step:
            lines[index] = f"# after step {step}: {former}"
    lines += [f"# after step {step}: {change}" for change in changes]
    new = "".join(f"{line}\n" for line in lines) + config
    if new != text:
        write_atomically(directory.config, new)
    return read_history(new)


def changed_values(history: Sequence[Change], step: int) -> dict[str, float]:
    """Return the numbers that were changed after a step, as metrics `config/<key>`."""
    values = {change.key: json.loads(change.new) for change in history if change.step == step and change.new != NOT_SET}
    return {f"config/{key}": float(value) for key, value in values.items() if type(value) in (int, float)}


def values_of_step(directory: RunDirectory, step: int) -> dict[str, Any]:
    """Return the config that a step of a run was trained with, as plain values: later changes are undone.

    Raises:
        RunDirectoryError: if the config cannot be read.
        ConfigError: if it is not valid YAML.
    """
    text = read_config_text(directory)
    values = parse_yaml(text, str(directory.config))
    former: dict[str, Change] = {}
    for change in read_history(text):
        if change.step >= step:
            former.setdefault(change.key, change)
    # A section that replaced a plain value, and keys of another type, are removed before values are set again.
    for change in sorted(former.values(), key=lambda change: change.old != NOT_SET):
        _undo(values, change)
    return values


def _undo(values: dict[str, Any], change: Change) -> None:
    *sections, leaf = change.key.split(".")
    for section in sections:
        inner = values.get(section)
        values[section] = values = inner if isinstance(inner, dict) else {}
    if change.old == NOT_SET:
        values.pop(leaf, None)
    else:
        values[leaf] = json.loads(change.old)


def plan_changes(directory: RunDirectory, config: AbstractRunConfig, named: Collection[str] = ()) -> list[Change]:
    """Compare the config of a run with the one to resume it with; changes no file and uses no device.

    Args:
        directory: run directory, which may be absent.
        config: the new config; `model` is set.
        named: dotted keys that the command line gave.

    Returns:
        The changes of keys that affect the results, at the newest checkpoint.

    Raises:
        RunDirectoryError: if a key differs that cannot change, or that was not named; the message lists all of them.
            Also if the run is of another command.
        ConfigError: if the config of the run is invalid.
    """
    if not directory.config.exists() or not directory.has_results():
        return []
    former = read_config(directory)
    if (begun := former.command) != config.command:
        raise RunDirectoryError(
            f"run directory {str(directory.path)!r} belongs to a run of marin_rl.{begun}, but the command is "
            f"marin_rl.{config.command}; choose another run_dir, or continue the run with python -m marin_rl.{begun}"
        )
    # Keys that a former version did not have count with their defaults, as in every command that reads the run.
    old, new = (flatten(encode(each)) for each in (former, config))
    steps = Checkpoints(directory.checkpoints, config.checkpoint).steps()
    newest = steps[-1] if steps else 0
    changes = [Change(newest, key, show_value(old, key), show_value(new, key)) for key in differing_keys(old, new)]
    assert config.model is not None
    # The size of the vocabulary is not known before the tokenizer is loaded, and the same for both optimizers.
    spec = PolicySpec(config.model, 2**15, config.trainer, config.trained_critic, config.lora)
    difference = functools.partial(_state_difference, former.optimizer, config.optimizer, config.num_updates, spec)
    _require_possible(directory, changes, named, config, difference)
    recorded = keys_changeable_by_name(type(config))
    return [change for change in changes if is_within(change.key, recorded)]


def _require_possible(
    directory: RunDirectory,
    changes: Sequence[Change],
    named: Collection[str],
    config: AbstractRunConfig,
    state_difference: Callable[[], str | None],
) -> None:
    """Raise a RunDirectoryError with all changes that are refused, and the remedy of each kind.

    Args:
        directory: run directory.
        changes: the changes.
        named: dotted keys that the command line gave.
        config: the new config.
        state_difference: returns how the arrays of the optimizer's state differ, None if they do not.
    """
    by_name = keys_changeable_by_name(type(config))
    if any(change.key == "optimizer.type" for change in changes):
        # Another optimizer has other keys.
        changes = [c for c in changes if c.key == "optimizer.type" or not is_within(c.key, ["optimizer"])]
    # Another type of a section below names all keys of it.
    named = {*named, *(c.key.removesuffix(".type") for c in changes if c.key.endswith(".type") and c.key in named)}
    strict = [change for change in changes if not is_within(change.key, changeable_keys(type(config)))]
    fixed = [change for change in strict if not is_within(change.key, by_name) or change.key == "optimizer.type"]
    rest = [change for change in strict if change not in fixed]
    short = [change for change in rest if change.key == "num_steps" and config.num_steps < change.step]
    late = _without_effect(rest, config.num_steps)
    unnamed = [change for change in rest if not _is_named(change.key, named) and change not in (*short, *late)]
    problems = [
        *([_cannot_change(directory, config, fixed)] if fixed else []),
        *(_too_short(change, late) for change in short),
        *([_name_them(unnamed)] if unnamed else []),
    ]
    optimizer = [change for change in rest if is_within(change.key, ["optimizer"])]
    if not problems and optimizer and (difference := state_difference()):
        problems = [_cannot_change(directory, config, optimizer, f" ({difference})")]
    elif late and not short:
        problems.append(_too_late(late))
    if problems:
        refused = {change.key: change for change in (*fixed, *short, *late, *unnamed)} or {c.key: c for c in optimizer}
        raise RunDirectoryError(
            f"run directory {str(directory.path)!r} belongs to a run with another config:\n"
            + "".join(f"  {key}: {change.old} there, {change.new} now\n" for key, change in refused.items())
            + "\n".join(problems)
        )


def _is_named(key: str, named: Collection[str]) -> bool:
    return is_within(key, named) or any(is_within(name, [key]) for name in named)


def _cannot_change(
    directory: RunDirectory, config: AbstractRunConfig, changes: Sequence[Change], reason: str = ""
) -> str:
    names = _listed([change.key for change in changes])
    return (
        f"{names} cannot change in a run{reason}; make {'it' if len(changes) == 1 else 'them'} equal to resume that "
        f"run, or {_another_run(directory, config, changes[0].step)}"
    )


def _another_run(directory: RunDirectory, config: AbstractRunConfig, newest: int) -> str:
    """The options that start another run, from the weights of this one if it has any."""
    run, weights = shlex.quote(str(directory.path)), shlex.quote(str(directory.path))
    if not any(directory.checkpoints.glob("step-*")):
        return "choose another run_dir"
    export = ""
    if exported_step(directory) != newest:
        weights = "WEIGHTS"
        export = f"python -m marin_rl.export --run {run} --output WEIGHTS, and then "
    return (
        f"choose another run_dir; to start it from the weights of this run: {export}--run_dir NEW --initialize_from "
        f"{weights}{' --warm_start.max_steps 0' if config.samples else ''}"
    )


def _too_short(change: Change, late: Sequence[Change]) -> str:
    others = "".join(f" {_option(other.key, other.old)}" for other in late if other.old != NOT_SET)
    remedy = f"--num_steps {change.old}{others} goes on as before"
    if change.old != str(change.step):
        remedy += f", and --num_steps {change.step}{others} ends the run"
    return f"num_steps is {change.new}, but the run has done {change.step} steps; {remedy}"


def _without_effect(changes: Sequence[Change], num_steps: int) -> list[Change]:
    """Return the changes that no step would be trained with, except for those that end the run."""
    length = {"num_steps", "epochs"} if any(change.key == "num_steps" for change in changes) else set()
    return [change for change in changes if num_steps <= change.step and change.key not in length]


def _too_late(changes: Sequence[Change]) -> str:
    names, step = _listed([change.key for change in changes]), changes[0].step
    return (
        f"the run has done {step} steps, so no step would be trained with the new {names}, and nothing is changed; "
        f"give {_options((change.key, change.old) for change in changes)}, as in the run, or also --num_steps N with N "
        f"above {step} to train longer"
    )


def _options(values: Iterable[tuple[str, str]]) -> str:
    """The command line's options for the keys that are set."""
    return " ".join(_option(key, value) for key, value in values if value != NOT_SET)


def _name_them(changes: Sequence[Change]) -> str:
    new = _options((change.key, change.new) for change in changes)
    old = _options((change.key, change.old) for change in changes)
    return (
        f"to go on as before, add {old} to the command line; to change {_listed([c.key for c in changes])} from step "
        f"{changes[0].step + 1} on, add {new}"
    )


def _option(key: str, value: str) -> str:
    """The command line's option for a value.

    >>> _option("optimizer.lr_schedule", '"cosine"'), _option("evaluation.pass_at", "[1, 2]")
    ('--optimizer.lr_schedule cosine', "--evaluation.pass_at '[1, 2]'")
    """
    text = json.loads(value)
    is_plain = isinstance(text, str) and text.isalnum() and parse_value(text) == text
    return f"--{key} {shlex.quote(text if is_plain else value)}"


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _state_difference(old: OptimizerConfig, new: OptimizerConfig, num_updates: int, spec: PolicySpec) -> str | None:
    """Return how the arrays of two optimizers' states differ, None if they do not."""
    before, after = (_state_arrays(each.build(num_updates), spec.trained) for each in (old, new))
    difference = first_difference(before, after)
    return difference and (
        f"the state of the optimizer in the checkpoints would not fit: {difference[0]} is {difference[1]} there, and "
        f"{difference[2]} now"
    )


def _state_arrays(optimizer: optax.GradientTransformation, trained: Any) -> dict[str, str]:
    # Levanter logs the decayed weights to the current tracker.
    with current_tracker(NoopTracker()):
        state = eqx.filter_eval_shape(lambda model: init_optimizer_for_trainables(optimizer, model), trained)
    return {name: describe(array) for name, array in named_arrays(state).items()}


def read_config_of_step(directory: RunDirectory, step: int) -> TrainConfig:
    """Read the config that a step of a run was trained with; see `values_of_step`."""
    require_rl(read_config(directory), str(directory.path), "no step of it can be replayed")
    return decode(TrainConfig, values_of_step(directory, step))


def refuse_moved_runs(files: Sequence[Path], run_dir: str) -> None:
    """Refuse a config file that is the `config.yaml` of a run which was moved or copied, and names its former folder.

    `files` are the config files of the command line, and `run_dir` is that of the config.

    Raises:
        RunDirectoryError: if there is one.
    """
    for file in files:
        folder = file.parent
        # A pipe has been read, and is not the file of a run.
        if file.name != "config.yaml" or not file.is_file() or not (folder / "checkpoints").is_dir():
            continue
        values: Mapping[str, Any] = load_yaml(file)
        if folder.resolve() != Path(run_dir).resolve() and values.get("run_dir") == run_dir:
            raise RunDirectoryError(
                f"{str(file)!r} is in the folder of its run, but its run_dir is {run_dir!r}; give --run_dir "
                f"{shlex.quote(str(folder))} to resume the run there, or --run_dir NEW for another one"
            )


def finished_progress(
    config: AbstractRunConfig, directory: RunDirectory, named: Collection[str], *, accept_changes: bool
) -> Progress | None:
    """Return the progress of a run that is complete and exported, so that another start does nothing; otherwise None.

    Changes no file. The arguments are those of `plan_changes`; a start that accepts changed files does something.
    """
    with writing(directory.path):
        # Changes are planned first: a change that cannot be is refused before anything is written.
        if not directory.config.is_file() or plan_changes(directory, config, named) or accept_changes:
            return None
        steps = Checkpoints(directory.checkpoints, config.checkpoint).steps()
        if steps[-1:] != [config.num_steps] or exported_step(directory) != config.num_steps:
            return None
        if not any(directory.hf.glob("*.safetensors")) or read_config(directory).export != config.export:
            return None
        try:
            progress = Progress(**read_manifest(directory.checkpoints / folder_name(config.num_steps)).progress)
        except (CheckpointError, TypeError):
            # The run is opened, which explains it.
            return None
        return None if progress.unrecorded else progress
