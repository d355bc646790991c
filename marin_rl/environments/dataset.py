# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Question-answer datasets: JSONL files, and Hugging Face datasets from the hub or a folder."""

import abc
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, ClassVar

from annotated_types import Ge, Lt

from marin_rl.environments.base import AbstractEnvironment, EnvironmentConfig, Split
from marin_rl.environments.row_columns import Row, unused_columns
from marin_rl.environments.row_files import describe_dataset, read_dataset, read_jsonl
from marin_rl.environments.row_format import RowFormat
from marin_rl.environments.single_turn import SingleTurnEnvironment, refuse_garbage_rewards
from marin_rl.environments.splits import (
    Problem,
    TaskSplits,
    check_shares,
    problem_id,
    split_problems,
    without_duplicates,
)
from marin_rl.rewards.grading import (
    ExactConfig,
    FormatConfig,
    Grader,
    GraderConfig,
    NoGraderConfig,
)
from marin_rl.rewards.grading_process import GroundTruthError
from marin_rl.rewards.reply_text import check_pattern
from marin_rl.utils.settings.checks import check_fields
from marin_rl.utils.settings.fields import LOCAL_FILE, LOCAL_PATH

CHECKED_ANSWERS = 100
"""Number of ground truths of each source that are checked at startup. Parsing all answers of a large dataset would
take minutes; an answer column that does not fit its grader fails in the first rows, and a single bad row fails when it
is used."""
CHECKED_ROWS = 1000
"""Number of rows whose columns a dry run lists."""


@dataclasses.dataclass(frozen=True)
class DatasetConfig(EnvironmentConfig):
    """Common settings of question-answer datasets."""

    source_keys: ClassVar[tuple[str, str]]
    """Names of the fields that select the training problems and, if they are separate, the held-out problems."""

    rows: RowFormat = dataclasses.field(default_factory=RowFormat, kw_only=True)
    """Meaning of the columns."""
    grader: GraderConfig = dataclasses.field(default_factory=ExactConfig, kw_only=True)
    """Grader that compares a reply with the answer."""
    reply_regex: str | None = dataclasses.field(default=None, kw_only=True)
    """Optional regular expression; group 1 of its last match in the reply is graded. A reply without a match is
    wrong."""
    held_out: Annotated[float, Ge(0), Lt(1)] | None = dataclasses.field(default=None, kw_only=True)
    """Share of problems that are held out, by hash of their text; default 0.1. Excludes a separate source of held-out
    problems."""
    validation: Annotated[float, Ge(0), Lt(1)] = dataclasses.field(default=0.05, kw_only=True)
    """Share of the (other) problems for validation, by hash of their text."""
    format: FormatConfig | None = dataclasses.field(default=None, kw_only=True)
    """Optional reward for the format of the reply."""
    allow_garbage_rewards: bool = dataclasses.field(default=False, kw_only=True)
    """Whether to accept problems for which the grader rewards empty replies, `nan`, noise or the question itself."""
    name: str | None = dataclasses.field(default=None, kw_only=True)
    """Name for metrics; default: the file name without its extension, or the last part of a dataset's name."""

    def __post_init__(self) -> None:
        check_fields(self)
        if isinstance(self.grader, NoGraderConfig) and self.format is None and not self.rewards:
            raise ValueError(
                "grader is none and rewards is empty, so replies would have no reward; add a reward function to "
                "rewards, or use grader: {type: exact}"
            )
        key = self.source_keys[1]
        if getattr(self, key) is not None and self.held_out is not None:
            raise ValueError(
                f"held_out {self.held_out} and {key} {getattr(self, key)!r} exclude each other; remove one"
            )
        if self.reply_regex is not None:
            check_pattern("reply_regex", self.reply_regex, groups=1)
        check_shares(self._held_out_share, self.validation)

    @property
    def _held_out_share(self) -> float:
        if getattr(self, self.source_keys[1]) is not None:
            return 0.0
        return 0.1 if self.held_out is None else self.held_out

    def build(self) -> AbstractEnvironment:
        """Read the dataset.

        Raises:
            ValueError: if the dataset or its split does not exist, a line is invalid (with file and line number), a
                column is missing, a held-out problem is also a training problem, or the grader rewards garbage.
            FileNotFoundError: if a file is missing.
        """
        name = self._default_name() if self.name is None else self.name
        training, held_out = (getattr(self, key) for key in self.source_keys)
        source = self._describe(training)
        problems = self._problems(training, name)
        separate = [] if held_out is None else self._problems(held_out, name)
        grader = self.grader if isinstance(self.grader, Grader) else None
        if grader is not None:
            _check_answers(grader, (*problems[:CHECKED_ANSWERS], *separate[:CHECKED_ANSWERS]))
        if held_out is None:
            splits = self._split(problems, source)
        else:
            splits = _with_held_out(problems, separate, self.validation, source)
        environment = SingleTurnEnvironment(
            name=name,
            splits=splits,
            score=None if grader is None else lambda task, reply: grader.grade(reply, task.answer),
            read=None if grader is None else grader.read,
            format=self.format,
            reply_regex=self.reply_regex,
            blocks=grader is not None and grader.blocks,
            problem_ids={problem.task.id: problem_id(problem.text) for problem in (*problems, *separate)},
        )
        if not self.allow_garbage_rewards:
            refuse_garbage_rewards(environment, source)
        return environment

    def divide(self, rows: Iterable[Row], source: str) -> TaskSplits:
        """Return the tasks of rows by split, if a share of them is held out.

        Raises:
            ValueError: if a row is invalid.
            EmptySplitError: if a split with a positive share would be empty.
        """
        return self._split(self._to_problems(rows, source, source), source)

    def unused_columns(self) -> list[str]:
        """Return the columns of the first rows that are not used."""
        rows = itertools.islice(self._read(getattr(self, self.source_keys[0])), CHECKED_ROWS)
        return unused_columns(rows, self.rows.used_columns)

    def _problems(self, source: str, name: str) -> list[Problem]:
        return self._to_problems(self._read(source), name, self._describe(source))

    def _to_problems(self, rows: Iterable[Row], name: str, source: str) -> list[Problem]:
        needs_answer = not isinstance(self.grader, NoGraderConfig)
        return without_duplicates((self.rows.problem(row, name, needs_answer=needs_answer) for row in rows), source)

    def _split(self, problems: Sequence[Problem], source: str) -> TaskSplits:
        return split_problems(problems, self._held_out_share, self.validation, source)

    @abc.abstractmethod
    def _default_name(self) -> str:
        """Return the name for metrics if none is configured."""

    def _describe(self, source: str) -> str:
        """Return the description of a source for messages."""
        return source

    @abc.abstractmethod
    def _read(self, source: str) -> Iterator[Row]:
        """Read the rows of a source."""


@EnvironmentConfig.register_subclass("jsonl")
@dataclasses.dataclass(frozen=True)
class JsonlConfig(DatasetConfig):
    """JSONL file with one object per line: `{"prompt": "3+4=", "answer": "7"}`."""

    source_keys: ClassVar[tuple[str, str]] = "path", "held_out_path"

    path: str = dataclasses.field(metadata=LOCAL_FILE)
    """Path of the file, relative to the working directory."""
    held_out_path: str | None = dataclasses.field(default=None, metadata=LOCAL_FILE)
    """Optional second file with the held-out problems; by default a share of the first file is held out."""

    def _default_name(self) -> str:
        return Path(self.path).stem

    def _read(self, source: str) -> Iterator[Row]:
        path = Path(source).expanduser()
        if not path.is_file():
            problem = "is not a file" if path.exists() else "does not exist"
            keys = " or ".join(self.source_keys)
            raise ValueError(f"the file {source!r} of a jsonl environment {problem}; correct {keys}")
        return read_jsonl(path, source)


@EnvironmentConfig.register_subclass("hf")
@dataclasses.dataclass(frozen=True)
class HuggingFaceConfig(DatasetConfig):
    """Hugging Face dataset from the hub, a folder of data files, or a folder written by `save_to_disk`."""

    source_keys: ClassVar[tuple[str, str]] = "split", "held_out_split"

    path: str = dataclasses.field(metadata=LOCAL_PATH)
    """Name on the hub (`openai/gsm8k`) or path of a local folder."""
    subset: str | None = None
    """Configuration of a dataset that has several (`main`)."""
    split: str = "train"
    """Dataset split for training."""
    held_out_split: str | None = None
    """Dataset split with the held-out problems (`test`); by default a share of `split` is held out."""
    revision: str | None = None
    """Commit or tag on the hub; pin it to keep the data of an experiment fixed."""

    def _default_name(self) -> str:
        return Path(self.path).name

    def _describe(self, source: str) -> str:
        return describe_dataset(self.path, source)

    def _read(self, source: str) -> Iterator[Row]:
        return read_dataset(self.path, "environment.path", self.subset, source, self.revision)


def _check_answers(grader: Grader, problems: Iterable[Problem]) -> None:
    for problem in problems:
        try:
            grader.check(problem.task.answer)
        except GroundTruthError as error:
            raise GroundTruthError(f"{problem.where}: {error}") from error


def _with_held_out(
    problems: Sequence[Problem], held_out: Sequence[Problem], validation: float, source: str
) -> TaskSplits:
    by_text = {problem.text: problem for problem in problems}
    by_id = {problem.task.id: problem for problem in problems}
    shared = [problem for problem in held_out if problem.text in by_text]
    if shared:
        first = shared[0]
        raise ValueError(
            f"{len(shared)} held-out problems are also training problems, the first is {first.text[:200]!r} "
            f"({first.where} and {by_text[first.text].where}); remove them from one side, or hold out a share instead"
        )
    for problem in held_out:
        if problem.task.id in by_id:
            raise ValueError(
                f"{problem.where}: id {problem.task.id!r} is also the id of another problem at "
                f"{by_id[problem.task.id].where}; make ids unique, or omit them"
            )
    splits = split_problems(problems, held_out=0.0, validation=validation, source=source)
    return {**splits, Split.HELD_OUT: [problem.task for problem in held_out]}
