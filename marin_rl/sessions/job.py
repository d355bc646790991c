# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A run as a step of another program: a job and its result are JSON files, and another attempt resumes the run.

Former attempts and inputs are checked before levanter is imported.
"""

import contextlib
import dataclasses
import errno
import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO

from marin_rl.config.command_line import decode_layers
from marin_rl.config.input_files import file_problems
from marin_rl.config.run_config import AbstractRunConfig
from marin_rl.runs.lock import RunInUseError
from marin_rl.runs.run_directory import EXPORTED_STEP, RunDirectory, check_output, exported_step, list_steps
from marin_rl.sessions.recipes import config_class
from marin_rl.utils.errors import USER_ERRORS, RunDirectoryError, UserError, explain
from marin_rl.utils.output import escape, go_on_without_output
from marin_rl.utils.settings.checks import ConfigSection, check_fields
from marin_rl.utils.settings.decode import decode
from marin_rl.utils.settings.section_types import ConfigError
from marin_rl.utils.signals import interruptible
from marin_rl.utils.storage import StoragePath, path_digest, read_small, storage_path, write_bytes, writing
from marin_rl.utils.user_code import MissingPackageError

_PATH_ERRORS = {errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.EROFS, errno.ENXIO}
"""What the system says of paths that no attempt can use."""
JOB = "job.json"
"""File of a run directory with the job of its first attempt, and step and checksum of the export of a complete run."""


@dataclasses.dataclass(frozen=True)
class JobInput(ConfigSection):
    """A file or folder that a run reads or writes."""

    path: str
    """Path, or address such as `gs://bucket/folder`."""
    sha256: str | None = None
    """Checksum, as of [`path_digest`][marin_rl.utils.storage.path_digest]; null: not compared."""


@dataclasses.dataclass(frozen=True)
class Job(ConfigSection):
    """A run of `marin_rl.train`, `sft` or `dpo` in one process, which the keys of the config choose."""

    config: dict[str, Any]
    """The config, as in a YAML file. Its `run_dir` is replaced."""
    run_dir: str
    """Run directory, a path or an address. All attempts have the same; the trained model is exported to `hf` in it."""
    inputs: dict[str, JobInput] = dataclasses.field(default_factory=dict)
    """Files and folders that the run reads, by dotted key of the config, such as `initialize_from` or `data.path`."""
    attempt: str = ""
    """Name of this attempt, which the result repeats."""

    def __post_init__(self) -> None:
        check_fields(self)
        path = storage_path(self.run_dir, "run_dir")
        # Not resolved: a link may lead to itself.
        if isinstance(path, Path) and os.path.abspath(path) in (os.sep, os.sep * 2):
            raise ValueError(f"run_dir is {self.run_dir!r}, the root of the file system; give a folder for the run")

    @property
    def identity(self) -> dict[str, Any]:
        """JSON values that are equal for all attempts."""
        return {"config": self.config, "inputs": {key: vars(value) for key, value in self.inputs.items()}}


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why an attempt failed."""

    type: str
    """Class of the error."""
    message: str
    """Its message."""
    retry: bool
    """Whether another attempt may succeed; false for mistakes in the job, and if training diverged."""


@dataclasses.dataclass(frozen=True)
class JobResult:
    """How an attempt ended. There is no result if its process was killed, after which another attempt resumes."""

    state: Literal["succeeded", "failed", "interrupted"]
    """`interrupted`: a signal ended the attempt, after a checkpoint if there was something to save."""
    attempt: str
    """Name of the attempt."""
    run_dir: str | None
    """The run directory; null if the job cannot be read."""
    step: int | None
    """Step of the newest checkpoint, or of the export; null if there is none."""
    export: JobInput | None = None
    """The trained model in Hugging Face format, if the attempt succeeded."""
    failure: Failure | None = None
    """Reason, if the attempt failed."""

    @property
    def can_be_retried(self) -> bool:
        """Whether another attempt may succeed."""
        return self.state == "interrupted" or (self.failure is not None and self.failure.retry)


def attempt_to_file(job_file: Path, result_path: str) -> JobResult:
    """Run a job, and write its result to a path or an address.

    Raises:
        ConfigError: if the result would replace the job, or has the name of a record.
        OutputExistsError: if the file exists and is no result.
    """
    result_file = storage_path(result_path, "RESULT.json")
    if isinstance(result_file, Path) and result_file.resolve() == job_file.resolve():
        raise ConfigError(f"the job and the result are the same file, {str(job_file)!r}; give the result another name")
    if result_file.name == JOB:
        raise ConfigError(f"the result {result_path!r} has the name of a record in run directories; rename it")
    check_output(result_file, "RESULT.json", b'"attempt": "')
    result_file.parent.mkdir(parents=True, exist_ok=True)
    # The result of a former attempt would count as that of this one, if this one is killed.
    result_file.unlink(missing_ok=True)
    go_on_without_output()
    with interruptible():
        result = attempt(job_file)
        write_bytes(result_file, json.dumps(dataclasses.asdict(result), indent=2).encode() + b"\n")
    return result


def attempt(job_file: Path) -> JobResult:
    """Run a job; errors and signals become its result."""
    job: Job | None = None
    try:
        job = read_job(job_file)
        return run_job(job, sys.stdout)
    except KeyboardInterrupt:
        return unfinished(job, "interrupted")
    except (Exception, SystemExit) as error:
        text = explain(error, str(error)) if isinstance(error, USER_ERRORS) else traceback.format_exc()
        print(f"error: {escape(text)}", file=sys.stderr)
        return unfinished(job, "failed", error)


def read_job(file: Path) -> Job:
    """Read a job.

    Raises:
        ConfigError: if the file cannot be read, or a key is unknown, missing or of the wrong type.
    """
    try:
        values = json.loads(read_small(file), object_pairs_hook=_with_unique_keys, parse_constant=_refuse_constant)
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"the job {str(file)!r} cannot be read: {reason}; give a file with a JSON object") from error
    # Other files may give a number for a text.
    if isinstance(values, dict) and isinstance(number := values.get("run_dir"), int | float):
        raise ConfigError(f"run_dir is {number!r}, but it takes text; give a path in quotes")
    return decode(Job, values)


def _with_unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        repeated = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {repeated!r} is given twice; keep one of them")
    return values


def _refuse_constant(name: str) -> None:
    """JSON has no such numbers; NaN would also differ from itself in a former attempt."""
    raise ValueError(f"{name} is not a JSON value")


def run_job(job: Job, stream: TextIO) -> JobResult:
    """Start or resume the run of a job; if a former attempt has succeeded, return its result.

    `stream` is for console output.

    Raises:
        ConfigError: if the config is invalid, an input is missing, or has another checksum.
        RunDirectoryError: if the run directory belongs to another job or a run without one, or cannot be used.
        Exception: as [`run_session`][marin_rl.sessions.session.run_session].
    """
    directory = RunDirectory(storage_path(job.run_dir))
    former = _recorded_export(job, directory)
    is_exported = former is not None and exported_step(directory) == former["step"]
    if is_exported and _export_of(result := _succeeded(job, directory)) == former:
        return result
    config = _config_of(job)
    if is_exported:
        # Without its step, a changed export is written again.
        with writing(directory.hf):
            (directory.hf / EXPORTED_STEP).unlink()
    _record(job, directory, None)
    # Imported here because levanter takes seconds to import, and most mistakes can be reported without it.
    from marin_rl.sessions.session import run_session

    if not run_session(config, stream):
        return unfinished(job, "interrupted")
    result = _succeeded(job, directory)
    _record(job, directory, _export_of(result))
    return result


def unfinished(
    job: Job | None, state: Literal["failed", "interrupted"], error: BaseException | None = None
) -> JobResult:
    """Return the result of an attempt that did not succeed; `job` is None if it cannot be read."""
    failure = None if error is None else Failure(type(error).__name__, str(error), may_be_temporary(error))
    if job is None:
        return JobResult(state, "", None, None, failure=failure)
    steps: list[int] = []
    # The store may be the reason of the failure.
    with contextlib.suppress(OSError):
        steps = list_steps(RunDirectory(storage_path(job.run_dir)).checkpoints)
    return JobResult(state, job.attempt, job.run_dir, max(steps, default=None), failure=failure)


def _export_of(result: JobResult) -> dict[str, Any]:
    """Step and checksum of the export of an attempt that has succeeded."""
    assert result.export is not None
    return {"step": result.step, "sha256": result.export.sha256}


def _record(job: Job, directory: RunDirectory, export: dict[str, Any] | None) -> None:
    with writing(directory.path):
        directory.path.mkdir(parents=True, exist_ok=True)
        write_bytes(directory.path / JOB, json.dumps({"job": job.identity, "export": export}).encode())


def _succeeded(job: Job, directory: RunDirectory) -> JobResult:
    export = JobInput(str(directory.hf), path_digest(directory.hf))
    return JobResult("succeeded", job.attempt, job.run_dir, exported_step(directory), export)


def _recorded_export(job: Job, directory: RunDirectory) -> dict[str, Any] | None:
    """Return step and checksum of the export if a former attempt has succeeded; check that they had the same job."""
    record = directory.path / JOB
    if not record.is_file():
        if directory.config.exists():
            raise RunDirectoryError(f"run_dir {job.run_dir!r} has a run that no job started; choose another run_dir")
        return None
    (identity, export), own = _read_record(record), json.loads(json.dumps(job.identity))
    if differing := [key for key in own if own[key] != identity.get(key)]:
        raise RunDirectoryError(
            f"run_dir {job.run_dir!r} belongs to another job, which differs in its {' and '.join(differing)} (see "
            f"{str(record)!r}); choose another run_dir"
        )
    return export


def _read_record(file: StoragePath) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The identity of the job of former attempts, and step and checksum of the export if one of them has succeeded."""
    try:
        record = json.loads(read_small(file))
        return dict(record["job"]), record["export"] and {name: record["export"][name] for name in ("step", "sha256")}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise RunDirectoryError(
            f"{str(file)!r} is not the record that a job leaves in its run_dir; choose another run_dir, or move the "
            "file if it is a job of your own"
        ) from error


def _config_of(job: Job) -> AbstractRunConfig:
    """Check the inputs, and decode the config with their paths."""
    if problems := list(_input_problems(job.inputs)):
        raise ConfigError(*problems)
    kind = config_class(job.config)
    paths = [_nested(key, value.path) for key, value in job.inputs.items()]
    config = decode_layers(kind, [job.config, *paths, {"run_dir": job.run_dir}])
    problems = list(file_problems(config))
    if config.trainer.distributed.initialize_jax_distributed:
        problems.append("trainer.distributed.initialize_jax_distributed is true, but a job has one process; remove it")
    if problems:
        raise ConfigError(*problems)
    return config


def _input_problems(inputs: Mapping[str, JobInput]) -> Iterator[str]:
    for key, value in inputs.items():
        try:
            found = path_digest(storage_path(value.path, f"inputs.{key}.path"))
        except OSError as error:
            expected = f" (expected sha256: {value.sha256})" if value.sha256 else ""
            yield f"inputs.{key} is {value.path!r}, which cannot be read: {error.strerror or error}{expected}"
            continue
        if value.sha256 is not None and value.sha256.lower() != found:
            yield f"inputs.{key} is {value.path!r}, whose sha256 is {found}, but the job expects {value.sha256}"


def _nested(key: str, value: Any) -> dict[str, Any]:
    """Return a layer of a config with one dotted key.

    >>> _nested("data.path", "rows.jsonl")
    {'data': {'path': 'rows.jsonl'}}
    """
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def may_be_temporary(error: BaseException) -> bool:
    """Return whether another attempt may succeed."""
    if isinstance(error, OSError):
        return not isinstance(error, FileNotFoundError | PermissionError) and error.errno not in _PATH_ERRORS
    if isinstance(error, UserError) and isinstance(error.__cause__, OSError):
        # Such as a full disk.
        return may_be_temporary(error.__cause__)
    if isinstance(error, RunDirectoryError):
        return isinstance(error, RunInUseError)
    from marin_rl.learner.train_step import NonFiniteUpdateError

    return not isinstance(error, ValueError | MissingPackageError | NonFiniteUpdateError)
