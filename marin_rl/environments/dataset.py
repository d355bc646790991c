# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Question-answer datasets: JSONL files, and Hugging Face datasets from the hub or a folder."""

import abc
import codecs
import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

from annotated_types import Ge, Lt

from marin_rl.environments.base import AbstractEnvironment, EnvironmentConfig, Split
from marin_rl.environments.data_files import check_data_files
from marin_rl.environments.row_format import Row, RowFormat
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
from marin_rl.rewards.math_worker import GroundTruthError
from marin_rl.rewards.reply_text import check_pattern
from marin_rl.utils.hub import DATASET, LFS_PROBLEM, check_source
from marin_rl.utils.settings.checks import check_fields
from marin_rl.utils.settings.fields import LOCAL_FILE, LOCAL_PATH

if TYPE_CHECKING:
    from datasets import Dataset

CHECKED_ANSWERS = 100
"""Number of ground truths of each source that are checked at startup. Parsing all answers of a large dataset would
take minutes; an answer column that does not fit its grader fails in the first rows, and a single bad row fails when it
is used."""


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
        if held_out is None:
            splits = split_problems(problems, self._held_out_share, self.validation, source)
        else:
            splits = _with_held_out(problems, separate, self.validation, source)
        grader = self.grader if isinstance(self.grader, Grader) else None
        if grader is not None:
            _check_answers(grader, (*problems[:CHECKED_ANSWERS], *separate[:CHECKED_ANSWERS]))
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

    def _problems(self, source: str, name: str) -> list[Problem]:
        return without_duplicates((self.rows.problem(row, name) for row in self._read(source)), self._describe(source))

    @abc.abstractmethod
    def _default_name(self) -> str:
        """Return the name for metrics if none is configured."""

    def _describe(self, source: str) -> str:
        """Return the description of a source for messages."""
        return source

    @abc.abstractmethod
    def _read(self, source: str) -> Iterator[Row]:
        """Read the rows of a source."""


MAX_LINE_BYTES = 64 * 2**20
"""Maximum size of a line of a JSONL file."""

_OTHER_FORMATS = {
    b"\x1f\x8b": "decompress the file, which is gzip",
    b"PK\x03\x04": "unpack the file, which is zip",
    b"version https://git-lfs": LFS_PROBLEM,
    b"PAR1": "read the file, which is Parquet, with an environment of type hf, whose path is its folder",
}
"""Remedies by the first bytes of files that are given as JSONL by mistake."""
_ONE_PER_LINE = 'write each problem as one JSON object on a line of its own, {"prompt": "3+4=", "answer": "7"}'
"""Remedy for CSV, arrays and objects over several lines."""


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
        # Binary mode, so that errors can report invalid UTF-8 with its line.
        with path.open("rb") as file:
            for number, raw in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
                where = f"{source}:{number}"
                remedy = next((remedy for start, remedy in _OTHER_FORMATS.items() if raw.startswith(start)), None)
                if number == 1 and remedy is not None:
                    raise ValueError(f"{source} is not text with a JSON object per line; {remedy}")
                if len(raw) > MAX_LINE_BYTES:
                    raise ValueError(f"{where}: the line has more than {MAX_LINE_BYTES // 2**20} MiB; {_ONE_PER_LINE}")
                if raw.removeprefix(codecs.BOM_UTF8).strip():
                    yield Row(_parse_object(raw, where), where)


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
        return f"dataset {self.path!r}, split {source!r}"

    def _read(self, source: str) -> Iterator[Row]:
        for index, values in enumerate(self._load(source)):
            yield Row(cast(Mapping[str, Any], values), f"{self._describe(source)}, row {index}")

    def _load(self, split: str) -> "Dataset":
        import datasets

        folder = Path(self.path).expanduser()
        name_or_folder = str(folder) if folder.is_dir() else self.path
        if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
            for name in ("subset", "revision"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name} is {getattr(self, name)!r}, but the folder {self.path!r} was saved with save_to_disk "
                        "and has none; leave it out"
                    )
            saved = datasets.load_from_disk(name_or_folder)
            # A Dataset that was saved alone has no splits.
            splits = {"train": saved} if isinstance(saved, datasets.Dataset) else dict(saved)
            if split not in splits:
                choices = ", ".join(repr(name) for name in splits)
                raise ValueError(f"dataset {self.path!r} has no split {split!r}; it has {choices}")
            return splits[split]
        if check_source(self.path, "environment.path", DATASET) is not None:
            check_data_files(folder)
        try:
            return datasets.load_dataset(name_or_folder, self.subset, split=split, revision=self.revision)
        except (ValueError, OSError, MemoryError, datasets.exceptions.DatasetGenerationError) as error:
            raise ValueError(
                f"cannot load dataset {self.path!r} (subset {self.subset!r}, split {split!r}, revision "
                f"{self.revision!r}): {error.__cause__ or error or 'out of memory'}"
            ) from error


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


def _parse_object(line: bytes, where: str) -> dict[str, Any]:
    """Parse a line of JSON; errors start with its location `where` and quote the start of the line."""
    shown = repr(line[:200])
    try:
        # -sig: editors on Windows may write a byte order mark.
        values = json.loads(line.decode("utf-8-sig").strip(), object_pairs_hook=_without_repeats)
        # Parquet, JSON responses and tokenizers require text that UTF-8 can encode.
        json.dumps(values, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 text at byte {error.start + 1}; save the file as UTF-8") from error
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        raise ValueError(
            f"{where}: \\u{code:04x} is an unpaired surrogate, which is not a character; write the whole pair, or "
            f"remove it: {shown}"
        ) from error
    except RecursionError as error:
        raise ValueError(f"{where}: nested too deeply to read; flatten the row: {shown}") from error
    except ValueError as error:
        # Also a repeated key, and integers of more than 4,300 digits, which Python does not convert.
        problem = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise ValueError(f"{where}: not JSON: {problem}; {_ONE_PER_LINE}: {shown}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{where}: not a JSON object; {_ONE_PER_LINE}: {shown}")
    return values


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Convert an object to a dictionary; its keys must differ."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError(f"a key is repeated, keep one of each: {', '.join(key for key, _ in pairs)}")
    return values
