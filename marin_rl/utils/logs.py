# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Log messages of this package: levels, format, stderr and log files."""

import contextlib
import enum
import logging
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import marin_rl
from marin_rl.utils.output import escape
from marin_rl.utils.remote_path import RemotePath
from marin_rl.utils.storage import AppendedFile, StoragePath, writing

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class LogLevel(enum.StrEnum):
    """Minimum level of the messages in a log file."""

    DEBUG = "debug"
    """Every turn of every episode with its tokens, tool calls, rewards and advantages."""
    INFO = "info"
    """Progress."""
    WARNING = "warning"
    """Problems that the run handled."""
    ERROR = "error"
    """Problems that the run could not handle."""

    @property
    def number(self) -> int:
        """The corresponding level of Python's `logging`."""
        return logging.getLevelNamesMapping()[self.name]


def module_levels(levels: Mapping[str, str]) -> dict[str, int]:
    """Convert log levels by module or package name to levels of Python's `logging`. A package covers its modules.

    Raises:
        ValueError: if a module or level does not exist; the message names the key.

    >>> module_levels({"marin_rl.rollouts.rollout_builder": "debug"})
    {'marin_rl.rollouts.rollout_builder': 10}
    """
    for name, level in levels.items():
        if not _is_module(name):
            raise ValueError(
                f"logging.{name} does not name a module of marin_rl; use a name from log.txt, such as "
                "marin_rl.rollouts.rollout_builder, or a package, such as marin_rl.rollouts"
            )
        if level not in tuple(LogLevel):
            raise ValueError(f"logging.{name} is {level!r}; it must be one of {', '.join(LogLevel)}")
    return {name: LogLevel(level).number for name, level in levels.items()}


def _is_module(module: str) -> bool:
    package, *parts = module.split(".")
    if package != "marin_rl" or not all(part.isidentifier() for part in parts):
        return False
    path = Path(next(iter(marin_rl.__path__))).joinpath(*parts)
    return path.is_dir() or path.with_suffix(".py").is_file()


@contextlib.contextmanager
def without_message(logger: str, start: str) -> Iterator[None]:
    """Drop a message of a library about something that the block handles; its other messages are kept.

    `logger` is the name of the library's logger; the message begins with `start`.
    """

    def is_other(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(start)

    logging.getLogger(logger).addFilter(is_other)
    try:
        yield
    finally:
        logging.getLogger(logger).removeFilter(is_other)


@contextlib.contextmanager
def warnings_to_stderr() -> Iterator[None]:
    """Print warnings and errors of this package to stderr until a log file is open, in the format of the log file.

    Those of other packages, such as asyncio, are printed in this format at any time, if they have no handler.
    """
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(LogFormatter(FORMAT))
    logger, handler = logging.getLogger("marin_rl"), logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter(FORMAT))
    handler.setLevel(logging.WARNING)
    handler.addFilter(lambda record: not any(isinstance(other, _LogFile) for other in logger.handlers))
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextlib.contextmanager
def log_to(
    file: StoragePath,
    level: int = logging.INFO,
    modules: Mapping[str, int] | None = None,
) -> Iterator[None]:
    """Append the log messages of this package to a file. Creates its folder.

    A file in an object store is uploaded every 30 seconds and at the end of the block. `level` is the minimum level of
    messages; `modules` has levels of single modules or packages, by name.
    """
    logger, modules = logging.getLogger("marin_rl"), modules or {}
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        handler = _LogFile(file)
    handler.setFormatter(LogFormatter(FORMAT))
    handler.setLevel(min(level, *modules.values(), level))
    former = {name: logging.getLogger(name).level for name in ("marin_rl", *modules)}
    logger.setLevel(min(level, logger.level or level))
    for name, module_level in modules.items():
        logging.getLogger(name).setLevel(module_level)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        for name, former_level in former.items():
            logging.getLogger(name).setLevel(former_level)
        handler.close()


class LogFormatter(logging.Formatter):
    """Escapes control characters and indents further lines of a message, so that texts cannot imitate a log line."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as text without control characters other than newlines."""
        return escape(super().format(record)).replace("\n", "\n    ")


class _LogFile(logging.Handler):
    """Log file that reports errors of writing, such as a full disk, once on stderr and does not stop the run."""

    def __init__(self, file: StoragePath) -> None:
        super().__init__()
        self._name = str(file)
        self._file = AppendedFile(file) if isinstance(file, RemotePath) else file.open("ab", buffering=0)
        self._has_warned = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._file.write(f"{self.format(record)}\n".encode())
        except OSError as error:
            self._warn(error)
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        try:
            self._file.close()
        except (OSError, RuntimeError) as error:
            self._warn(error)
        super().close()

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            print(escape(f"warning: {self._name} cannot be written ({error}); lines are missing"), file=sys.stderr)
