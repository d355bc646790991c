# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Trainers for scripts and notebooks: RL, supervised fine-tuning and preference pairs.

```python
trainer = marin_rl.RLTrainer("models/smollm2", tasks, reward, algorithm="grpo", num_steps=50, run_dir="runs/mine")
trainer.train()
print(trainer.evaluate(samples=8), trainer.sample("3 + 4 ="))
```

A trainer builds the config of the command `train`, `sft` or `dpo`, with the same keys, defaults, checks and messages,
and writes the same run directory: every command works on it, and a run resumes in the same way.
"""

import abc
import contextlib
import dataclasses
import io
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from marin_rl.config.command_line import decode_layers
from marin_rl.config.input_files import file_problems
from marin_rl.config.run_config import AbstractRunConfig
from marin_rl.environments import EnvironmentConfig, Split
from marin_rl.environments.dataset import DatasetConfig
from marin_rl.environments.in_process import InProcessConfig
from marin_rl.environments.row_columns import Row
from marin_rl.environments.splits import EmptySplitError
from marin_rl.rewards.component import RewardComponentConfig
from marin_rl.rewards.in_process import as_reward_function
from marin_rl.runs.metrics_file import plots_of, read_records
from marin_rl.runs.run_directory import (
    ROWS,
    RunDirectory,
    check_output,
    list_steps,
    open_existing,
    own_rows,
    write_atomically,
)
from marin_rl.sessions.recipes import config_class_of
from marin_rl.types import Message
from marin_rl.utils.errors import RunDirectoryError, UserError
from marin_rl.utils.settings.decode import encode
from marin_rl.utils.settings.fields import flatten
from marin_rl.utils.settings.section_types import ConfigError, field_types
from marin_rl.utils.storage import storage_path, writing
from marin_rl.utils.user_code import sharing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Self = TypeVar("Self", bound="AbstractTrainer")
_FEW = {"environment": {"held_out": 0.0, "validation": 0.0}, "evaluation": {"tasks": 0}}
"""Settings of a run whose tasks are too few to hold some out."""


class AbstractTrainer(abc.ABC):
    """A run of a command that trains, with its config."""

    command: ClassVar[str]
    """Name of the command."""

    def __init__(
        self,
        config: AbstractRunConfig,
        named: Iterable[str] = (),
        rows: Sequence[Mapping[str, Any]] | None = None,
        shared: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config
        """The config of the run."""
        self._named = frozenset(named)
        self._rows = rows
        self._shared = shared or {}
        self._policy: Any = None

    @classmethod
    def load(cls: type[Self], run_dir: str | Path, **objects: Any) -> Self:
        """Open an earlier run, to continue it or to use its policy.

        `objects` are the functions and the environment of this program that the run uses, by their names in its config.

        Raises:
            RunDirectoryError: if there is no run.
            UserError: if another command has trained it.
        """
        from marin_rl.sessions.earlier_run import read_config

        config = read_config(open_existing(storage_path(str(run_dir), "run_dir")))
        if config.command != cls.command:
            raise UserError(f"{str(run_dir)!r} is a run of marin_rl.{config.command}; open it with the trainer for it")
        trainer = cls.__new__(cls)
        AbstractTrainer.__init__(trainer, dataclasses.replace(config, run_dir=str(run_dir)), shared=objects)
        return trainer

    @property
    def directory(self) -> RunDirectory:
        """The files of the run."""
        return RunDirectory(storage_path(self.config.run_dir, "run_dir"))

    @property
    def metrics(self) -> list[dict[str, int | float]]:
        """The metrics of each step, such as for `pandas.DataFrame`."""
        return read_records(self.directory.metrics)

    def train(self, *, accept_changes: bool = False) -> None:
        """Train to the end, or resume; a run that is complete stays as it is.

        Args:
            accept_changes: whether to resume although rows or files that the run reads were changed.

        Raises:
            KeyboardInterrupt: after Ctrl-C or SIGTERM, when the run is saved; the next call resumes it.
            Exception: as [`run_session`][marin_rl.sessions.session.run_session].
        """
        from marin_rl.sessions.session import run_session

        self._policy = None
        if self._rows is not None:
            _write_rows(self.directory, self._rows, replace=accept_changes)
        if problems := list(file_problems(self.config)):
            raise ConfigError(*problems)
        if self._shared and list_steps(self.directory.checkpoints):
            print(f"not compared with the earlier start, because they are of this program: {', '.join(self._shared)}")
        with sharing(self._shared):
            complete = run_session(
                self.config, sys.stdout or io.StringIO(), accept_changes=accept_changes, named=self._named
            )
        if not complete:
            raise KeyboardInterrupt(f"the run in {self.config.run_dir!r} is saved; train() resumes it")

    def sample(
        self,
        prompt: str | Sequence[Message],
        *,
        temperature: float = 1.0,
        max_new_tokens: int | None = None,
        seed: int = 0,
    ) -> str:
        """Return a reply of the policy of the newest checkpoint.

        Args:
            prompt: text of a message of the user, or a conversation.
            temperature: sampling temperature; 0 is greedy.
            max_new_tokens: maximum tokens of the reply; None for that of the run.
            seed: equal seeds give equal replies.
        """
        from marin_rl.sampling.sampler import SampleRequest
        from marin_rl.sessions.served_policy import load_served_policy

        if self._policy is None:
            self._policy = load_served_policy(run=self.config.run_dir, max_seqs=1)
        policy = self._policy
        messages = [Message(role="user", content=prompt)] if isinstance(prompt, str) else prompt
        tokens = policy.tokenizer.prompt_tokens(messages)
        limit = policy.sampling.max_new_tokens if max_new_tokens is None else max_new_tokens
        [reply] = policy.sampler.sample([SampleRequest(tokens, seed, limit, temperature)])
        return policy.tokenizer.decode_reply(reply.token_ids)

    def save(self, folder: str | Path) -> None:
        """Write the policy of the newest checkpoint in Hugging Face format to a folder, which is new or empty."""
        from marin_rl.sessions.run_export import export_run

        output = storage_path(str(folder), "folder")
        check_output(output, "folder")
        export_run(self.config.run_dir, output)

    def plot(self) -> "Figure":
        """Draw the most important metrics, those of `curves.png` in the run directory; notebooks show the figure.

        Raises:
            UserError: if no step has been recorded.
        """
        from matplotlib import pyplot

        from marin_rl.runs.curves import draw

        records = self.metrics
        if not (plots := plots_of(records)):
            raise UserError(f"the run in {self.config.run_dir!r} has no metrics yet; train it first")
        # Loads the backend, which registers the display of figures in notebooks.
        pyplot.switch_backend(pyplot.get_backend())
        return draw(plots, records)


class RLTrainer(AbstractTrainer):
    """Reinforcement learning, as with `python -m marin_rl.train`."""

    command = "train"

    def __init__(
        self, model: Any = None, tasks: Any = None, reward: Any = None, *, run_dir: str | Path, **settings: Any
    ) -> None:
        """Check the settings; nothing is written before `train`.

        Args:
            model: initial weights: a folder in Hugging Face format, a hub name or a run directory; or an architecture
                to train from scratch, as the key `model` or as levanter's config.
            tasks: dictionaries or a `datasets.Dataset` with the columns `prompt` and, unless reward functions alone
                score replies, `answer`; a JSONL file, or a dataset as of the environment `hf`; an environment, as the
                key `environment` or its config; or an object with turns, see
                [`InProcessConfig`][marin_rl.environments.in_process.InProcessConfig].
            reward: a function that takes a task and a reply and returns a number, or that is decorated with
                `reward_function`; a dictionary as in the key `rewards`, whose `function` may be such a function; or a
                list of these. None: the environment scores replies, rows by comparing them with the answers.
            run_dir: run directory; a run in it is resumed.
            settings: other keys of the config, sections as dictionaries or as their classes, and `algorithm`.

        Raises:
            ConfigError: if settings are invalid; the message names all problems.
            RewardFunctionError: if a function cannot be called.
            ValueError: if a task is invalid.
        """
        shared: dict[str, Any] = {}
        environment, rows = _environment(tasks, own_rows(run_dir), shared)
        if reward is not None:
            components = reward if isinstance(reward, list | tuple) else [reward]
            if "rewards" in encode(settings.get("environment") or {}):
                raise ConfigError("reward and environment.rewards are both given; give all of them in reward")
            environment["rewards"] = [*environment.get("rewards", ()), *(_component(one, shared) for one in components)]
            if environment.get("type") in ("jsonl", "hf"):
                environment.setdefault("grader", {"type": "none"})
        given = _settings(self.command, model, run_dir, settings)
        layers = [{"environment": environment} if environment else {}, given]
        holds_out = False
        with sharing(shared):
            config: Any = decode_layers(config_class_of(self.command), layers)
            with contextlib.suppress(EmptySplitError):
                holds_out = _holds_out(config, rows)
            if not holds_out:
                config = decode_layers(config_class_of(self.command), [layers[0], _FEW, given])
                _holds_out(config, rows)
        AbstractTrainer.__init__(self, config, flatten(settings), rows, shared)

    def evaluate(
        self, *, samples: int = 1, tasks: int = 512, greedy: bool = True, split: str | None = None
    ) -> dict[str, float]:
        """Evaluate the newest checkpoint, as `python -m marin_rl.evaluate`.

        Args:
            samples: attempts at each task at the temperature of the run.
            tasks: maximum number of tasks.
            greedy: whether to make one attempt at temperature 0, too.
            split: `held_out`, `validation` or `train`; None for `held_out`, or `train` if no tasks are held out.

        Returns:
            Metrics as of [`evaluate`][marin_rl.training.evaluation.evaluate].
        """
        from marin_rl.config.sections import EvaluationConfig
        from marin_rl.sessions.evaluate_checkpoint import EvaluateConfig, run_evaluation

        environment: Any = getattr(self.config, self.config.source_key)
        chosen: Any = split or (Split.TRAIN if getattr(environment, "held_out", None) == 0.0 else Split.HELD_OUT)
        evaluation = EvaluationConfig(tasks=tasks, samples=samples, greedy=greedy, pass_at=tuple({1, samples}))
        with sharing(self._shared):
            return run_evaluation(EvaluateConfig(self.config.run_dir, evaluation=evaluation, split=chosen))[1]


class SFTTrainer(AbstractTrainer):
    """Supervised fine-tuning, as with `python -m marin_rl.sft`."""

    command = "sft"

    def __init__(self, model: Any = None, dataset: Any = None, *, run_dir: str | Path, **settings: Any) -> None:
        """Check the settings; nothing is written before `train`.

        Args:
            model: as of [`RLTrainer`][marin_rl.trainers.RLTrainer].
            dataset: rows as dictionaries or a `datasets.Dataset`, or the key `data.path`.
            run_dir: run directory; a run in it is resumed.
            settings: other keys of the config, sections as dictionaries or as their classes.

        Raises:
            ConfigError: if settings are invalid; the message names all problems.
        """
        _open_supervised(self, model, dataset, run_dir, settings)


class DPOTrainer(AbstractTrainer):
    """Training on preference pairs, as with `python -m marin_rl.dpo`."""

    command = "dpo"

    def __init__(self, model: Any = None, dataset: Any = None, *, run_dir: str | Path, **settings: Any) -> None:
        """Check the settings; nothing is written before `train`.

        Arguments and errors are those of [`SFTTrainer`][marin_rl.trainers.SFTTrainer], with the key `preferences.path`.
        """
        _open_supervised(self, model, dataset, run_dir, settings)


def _open_supervised(
    trainer: AbstractTrainer, model: Any, dataset: Any, run_dir: str | Path, settings: Mapping[str, Any]
) -> None:
    kind = config_class_of(trainer.command)
    rows = _rows(dataset, "dataset")
    source = dataset or {}
    if rows is not None or isinstance(dataset, str | Path):
        source = {"path": str(dataset) if rows is None else own_rows(run_dir)}
    layers = [{kind.source_key: encode(source)} if source else {}, _settings(kind.command, model, run_dir, settings)]
    AbstractTrainer.__init__(trainer, decode_layers(kind, layers), flatten(settings), rows)


def _settings(command: str, model: Any, run_dir: str | Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the raw values of the given settings."""
    given = {**settings, "run_dir": str(run_dir)}
    if model is not None:
        given["initialize_from" if isinstance(model, str | Path) else "model"] = model
    kinds = field_types(config_class_of(command))
    return {key: encode(value, kinds.get(key, Any)) for key, value in given.items()}


def _environment(tasks: Any, rows_path: str, shared: dict[str, Any]) -> tuple[dict[str, Any], list[Any] | None]:
    """Return the raw section of an environment, and the rows if tasks are rows; an object is added to `shared`."""
    if (rows := _rows(tasks, "tasks")) is not None:
        return {"type": "jsonl", "path": rows_path, "name": "tasks", "validation": 0.0}, rows
    if tasks is None or isinstance(tasks, Mapping | EnvironmentConfig):
        return encode(tasks, EnvironmentConfig) or {}, None
    if isinstance(tasks, str | Path):
        kind = "jsonl" if str(tasks).endswith((".jsonl", ".jsonl.gz")) else "hf"
        return {"type": kind, "path": str(tasks)}, None
    name = _name_of(tasks if isinstance(tasks, type) else type(tasks))
    shared[name] = tasks
    return {"type": "in_process", "name": name}, None


def _component(reward: Any, shared: dict[str, Any]) -> dict[str, Any]:
    """Return the raw section of a reward component; a function of this program is added to `shared`."""
    if isinstance(reward, RewardComponentConfig):
        return encode(reward, RewardComponentConfig)
    settings = dict(reward) if isinstance(reward, Mapping) else {"function": reward}
    if isinstance(settings.get("function", ""), str):
        return settings
    function = settings.pop("function")
    as_reward_function(function)
    name = settings.setdefault("name", _name_of(function))
    if name in shared:
        raise ConfigError(f"reward: two functions are called {name!r}; give one as {{'function': ..., 'name': ...}}")
    shared[name] = function
    return {"type": "in_process", **settings}


def _name_of(value: Any) -> str:
    return getattr(value, "__name__", type(value).__name__).strip("<>")


def _holds_out(config: Any, rows: Sequence[Mapping[str, Any]] | None) -> bool:
    """Check the tasks of this program; return whether some are held out; `EmptySplitError` if a split has none."""
    if rows is not None and isinstance(config.environment, DatasetConfig):
        tasks = config.environment.divide([Row(row, f"tasks[{index}]") for index, row in enumerate(rows)], "tasks")
        return bool(tasks[Split.HELD_OUT])
    return not isinstance(config.environment, InProcessConfig) or bool(config.environment.build().tasks(Split.HELD_OUT))


def _rows(data: Any, name: str) -> list[Any] | None:
    """Return data as rows; None if it is something else.

    Raises:
        ConfigError: if a row is not a dictionary of JSON values.
    """
    kind = type(data).__name__
    if kind in ("DatasetDict", "IterableDataset", "IterableDatasetDict", "generator"):
        raise ConfigError(f"{name} is a {kind}; give a datasets.Dataset, such as one split, or a list of dictionaries")
    if kind == "DataFrame":
        data = data.to_dict("records")
    to_list: Callable[[], list[Any]] | None = getattr(data, "to_list", None)
    if to_list is None and not isinstance(data, list | tuple):
        return None
    rows = list(data) if to_list is None else to_list()
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ConfigError(f"{name}[{index}] is {row!r:.200}; it must be a dictionary, a row of data")
        try:
            json.dumps(row, allow_nan=False, ensure_ascii=False).encode()
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{name}[{index}] is {row!r:.200}; it must have JSON values: {error}") from error
    return rows


def _write_rows(directory: RunDirectory, rows: Iterable[Mapping[str, Any]], *, replace: bool) -> None:
    text = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
    file = directory.path / ROWS
    with writing(directory.path):
        if file.exists() and file.read_bytes() != text.encode() and not replace:
            raise RunDirectoryError(
                f"the run in {str(directory.path)!r} has other rows than these; choose another run_dir, or go on with "
                "train(accept_changes=True)"
            )
        directory.path.mkdir(parents=True, exist_ok=True)
        write_atomically(file, text)
