# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A run that trains on data: supervised fine-tuning.

One step:

    rows of data -> packed batch -> update -> (held-out loss, checkpoint) -> record
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
from levanter.models.lm_model import LmHeadModel

from marin_rl.batching.rl_example import PackedBatch
from marin_rl.batching.rollout_batch import RolloutBatch
from marin_rl.config.input_files import digest_inputs
from marin_rl.config.supervised_config import AbstractSupervisedConfig
from marin_rl.data.dataset import Batches, Data, describe, join_examples, read_examples
from marin_rl.data.rows import Example
from marin_rl.data.token_file import TOKENS, write_tokens
from marin_rl.learner.critic import assemble, policy_of
from marin_rl.learner.loss import loss_metrics
from marin_rl.learner.scoring import Scorer, Scores
from marin_rl.parts.supervised import SupervisedParts
from marin_rl.runs.checkpoint import Checkpoints
from marin_rl.training.evaluation import small_sample_warning
from marin_rl.training.loop import AbstractRun, model_flops_utilization
from marin_rl.training.open_run import Start, compare_files, load_state, report_resume
from marin_rl.training.run_state import RUN_FILES, Progress, RunFiles
from marin_rl.training.shared_run import require_same_batch, require_same_inputs
from marin_rl.training.supervised_updates import SupervisedUpdates
from marin_rl.utils import multihost
from marin_rl.utils.errors import Closing
from marin_rl.utils.signals import interruptible
from marin_rl.utils.storage import StoragePath, storage_path
from marin_rl.utils.timing import PhaseTimer, compile_clock

SupervisedConfig = TypeVar("SupervisedConfig", bound=AbstractSupervisedConfig)

HELD_OUT = "eval/held_out"
"""Prefix of the metrics of held-out rows."""


@dataclasses.dataclass(frozen=True)
class SupervisedTask:
    """The batches of a run, and how they are measured."""

    batches: Batches[Example]
    """The examples of each step."""
    join: Callable[[Sequence[Example]], RolloutBatch]
    """Makes a batch of examples."""
    measure: Callable[[LmHeadModel], dict[str, float]]
    """Returns the held-out metrics of a policy; not called if nothing is held out."""
    first_files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    """Further files of the checkpoint of step 0, by name."""


@dataclasses.dataclass(kw_only=True)
class SupervisedRun(AbstractRun[AbstractSupervisedConfig]):
    """A run that trains on data."""

    milestones: ClassVar[tuple[str, str]] = "before training", "after training"

    parts: SupervisedParts
    """The parts."""
    data: Data
    """The data."""
    task: SupervisedTask
    """Batches and measures."""

    def __post_init__(self) -> None:
        self.step_updates = SupervisedUpdates(self.learner, self._pack)

    def train_step(self, stop_requested: Callable[[], bool]) -> dict[str, float]:
        """Update the weights with the batch of the next step; return the metrics of the step."""
        started, timer = time.perf_counter(), PhaseTimer()
        progress, step = self.progress, self.progress.step + 1
        with timer.phase("batch"):
            packed = self.step_updates.batch(step)
        with timer.phase("step"):
            last = self.config.num_steps
            self.trainer_state, update = self.step_updates.update(self.trainer_state, step, packed, last)
        progress.step = step
        progress.updates += 1
        progress.trained_tokens += packed.num_loss_tokens
        metrics = loss_metrics([update])
        metrics |= {
            "epoch": self.task.batches.epochs(step),
            "updates": float(progress.updates),
            "tokens/trained_per_second": packed.num_loss_tokens / timer.seconds["step"],
            "tokens/processed_per_second": packed.num_tokens / timer.seconds["step"],
            "batch/packing_efficiency": packed.num_tokens / packed.num_positions,
            "batch/microbatches": float(len(packed.microbatches)),
            **{f"seconds/{phase}": timer.seconds[phase] for phase in ("batch", "step")},
            "seconds/total": time.perf_counter() - started,
            "seconds/compile": compile_clock().since(started),
        }
        assert self.config.model is not None
        return metrics | model_flops_utilization(
            self.config.model, progress.vocab_size, [packed], timer.seconds["step"]
        )

    def evaluate(self, stop_requested: Callable[[], bool]) -> dict[str, float]:
        """Measure the held-out rows if an evaluation is due after this step; return the metrics."""
        progress = self.progress
        if not self.config.evaluation.is_due(progress.step, self.config.num_steps):
            return {}
        return self.measure(self.milestones[1])

    def measure(self, milestone: str) -> dict[str, float]:
        """Measure the held-out rows, if there are any; return the metrics."""
        if not self.data.held_out.examples:
            return {}
        metrics = self.task.measure(assemble(policy_of(self.trainer_state.model), self.base))
        self.progress.evaluations[milestone] = metrics
        return metrics

    def save(self) -> StoragePath:
        """Start to write a checkpoint, after all records before it are stored."""
        # The records of step 0 are written after its checkpoint.
        files, first = self.files, self.progress.step == 0
        if multihost.is_main() and not first:
            files = dataclasses.replace(files, metrics=self.store_records())
        others: dict[str, bytes] = {}
        if multihost.is_main():
            others = {RUN_FILES: files.encode(), **(self.task.first_files if first else {})}
        return self.checkpoints.save(self.trainer_state, self.progress.step, dataclasses.asdict(self.progress), others)

    def _pack(self, step: int) -> PackedBatch:
        batch = self.task.join(self.task.batches.of_step(step))
        packed = self.parts.pack(batch)
        require_same_batch(step, batch, [packed])
        return packed


def open_supervised(kind: type[SupervisedParts], config: Any, data: Data, start: Start) -> SupervisedRun:
    """Start a run of supervised fine-tuning, or resume it from its newest valid checkpoint; see `open_on_data`."""

    def make_task(parts: SupervisedParts, checkpoints: Checkpoints, policy: LmHeadModel | None) -> SupervisedTask:
        batches = Batches(data.train.examples, config.batch.size, config.seed)
        return SupervisedTask(batches, join_examples, functools.partial(held_out_loss, parts, data.held_out.examples))

    return open_on_data(kind, config, data, start, make_task)


def open_on_data(
    kind: type[SupervisedParts],
    config: Any,
    data: Data,
    start: Start,
    make_task: Callable[[Any, Checkpoints, LmHeadModel | None], SupervisedTask],
) -> SupervisedRun:
    """Start a run that trains on data, or resume it from its newest valid checkpoint.

    Args:
        kind: class of the parts.
        config: config of the run; `model` and `num_steps` are set.
        data: its data.
        start: what the command gives.
        make_task: makes the task of the run from its parts, its checkpoints, and the policy of a new run, which is None
            if the run resumes.

    Raises:
        KeyboardInterrupt: after SIGINT or SIGTERM while the run is prepared or its weights are loaded.
        CheckpointError: if the run has checkpoints and none is usable.
        RunDirectoryError: if files of the run were changed since the checkpoint.
        ProcessesDifferError: if the processes have different input files.
    """
    folder, report = start.folder, start.report
    with contextlib.ExitStack() as resources, interruptible():
        parts = kind.start(config, resources=resources, report=report)
        inputs = digest_inputs(config)
        require_same_inputs(inputs)
        checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint, keep_first=config.trains_on_pairs)
        resources.enter_context(Closing(checkpoints.close))
        loaded = checkpoints.restore_newest(functools.partial(load_state, parts, ()))
        if loaded is None:
            policy = parts.first_policy()
            progress = Progress(vocab_size=parts.assemble(policy).vocab_size, base=parts.base_fingerprint)
            state, files = parts.first_state(policy), RunFiles(inputs)
        else:
            progress, state = loaded.progress, loaded.state
            files = compare_files(loaded, inputs, report, accept=start.accept_changes)
            report_resume(loaded, checkpoints, report)
        described, warnings = describe_data(data)
        report(described)
        if data.digest and progress.step < (config.num_steps or 0) and multihost.is_main():
            write_tokens(folder / TOKENS, data, data.digest)
        for warning in warnings:
            report(f"warning: {warning}")
        policy = None if loaded else parts.assemble(policy_of(state.model))
        run = SupervisedRun(
            config=config,
            progress=progress,
            trainer_state=state,
            learner=parts.learner,
            base=parts.base,
            tokenizer=parts.tokenizer,
            checkpoints=checkpoints,
            files=files,
            command_timer=start.timer,
            parts=parts,
            data=data,
            task=make_task(parts, checkpoints, policy),
            resources=resources.pop_all(),
        )
    if loaded is None:
        with start.timer.phase("evaluation"):
            if metrics := run.measure(run.milestones[0]):
                report(f"{run.milestones[0]}: {describe_held_out(metrics)}")
        run.save()
    return run


def describe_data(data: Data) -> tuple[str, list[str]]:
    """Describe the data of a run; also return a warning if the held-out rows are too few to measure anything."""
    noun = f"held-out {'pairs' if data.train.examples[0].chosen else 'rows'}"
    return describe(data), small_sample_warning(len(data.held_out.examples), noun, "the held-out curves", "held_out")


def describe_held_out(metrics: Mapping[str, float]) -> str:
    """Describe held-out metrics in one line."""
    named = {name.removeprefix(f"{HELD_OUT}/").replace("_", " "): value for name, value in metrics.items()}
    return "held-out " + ", ".join(f"{name} {value:.3f}" for name, value in named.items())


def score_examples(
    scorer: Scorer, policy: LmHeadModel, examples: Sequence[Example], size: int
) -> Iterator[tuple[RolloutBatch, Scores]]:
    """Score examples in batches of a size; with that of a step, one program scores all of them."""
    for first in range(0, len(examples), size):
        batch = join_examples(examples[first : first + size])
        yield batch, scorer.score(policy, batch)


def read_data(config: SupervisedConfig) -> tuple[SupervisedConfig, Data]:
    """Read and tokenize the data of a run; return the config with `num_steps`, and the data.

    Raises:
        ValueError: if the data is invalid; the message names the file, the line and the column.
    """
    limits, tokenizer = (config.batch.max_length, config.batch.long_sequences), config.tokenizer.build()
    stored, pairs = storage_path(config.run_dir, "run_dir") / TOKENS, config.trains_on_pairs
    data = read_examples(config.source, tokenizer, *limits, key=config.source_key, pairs=pairs, stored=stored)
    steps = Batches(data.train.examples, config.batch.size, config.seed).steps(config.epochs)
    return dataclasses.replace(config, num_steps=config.num_steps or steps), data


def held_out_loss(parts: SupervisedParts, examples: Sequence[Example], policy: LmHeadModel) -> dict[str, float]:
    """Return the cross-entropy (nats per token) and the share of tokens that are the most likely ones."""
    loss, correct = 0.0, 0
    for _, scores in score_examples(parts.scorer, policy, examples, parts.config.batch.size):
        assert scores.is_most_likely is not None
        loss -= scores.logprobs.sum(dtype=np.float64)
        correct += np.count_nonzero(scores.is_most_likely)
    tokens = sum(np.count_nonzero(example.loss_mask) for example in examples)
    return {f"{HELD_OUT}/loss": float(loss / tokens), f"{HELD_OUT}/token_accuracy": correct / tokens}
