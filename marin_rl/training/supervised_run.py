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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
from levanter.models.lm_model import LmHeadModel

from marin_rl.batching.rl_example import PackedBatch, pack_batch
from marin_rl.batching.rollout_batch import RolloutBatch
from marin_rl.config.input_files import digest_inputs
from marin_rl.config.supervised_config import AbstractSupervisedConfig
from marin_rl.config.train_config import SftConfig
from marin_rl.data.dataset import Batches, Encoded, describe, join_examples, read_examples
from marin_rl.data.rows import Example
from marin_rl.learner.critic import assemble, policy_of
from marin_rl.learner.loss import loss_metrics
from marin_rl.learner.scoring import Scores
from marin_rl.model_parts import AbstractModelParts, Report
from marin_rl.objectives.aggregation import TokenMeanConfig
from marin_rl.runs.checkpoint import Checkpoints
from marin_rl.supervised_parts import AbstractSupervisedParts, SftParts
from marin_rl.training.dry_run import dry_run_supervised
from marin_rl.training.loop import AbstractRun, model_flops_utilization
from marin_rl.training.open_run import compare_files, interruptible, load_state, report_resume
from marin_rl.training.run_state import RUN_FILES, Progress, RunFiles
from marin_rl.training.shared_run import require_same_batch, require_same_inputs
from marin_rl.utils import multihost
from marin_rl.utils.devices.setup import collect_garbage, own_rows
from marin_rl.utils.errors import Closing
from marin_rl.utils.storage import StoragePath
from marin_rl.utils.timing import PhaseTimer, compile_clock

SupervisedConfig = TypeVar("SupervisedConfig", bound=AbstractSupervisedConfig)

HELD_OUT = "eval/held_out"
"""Prefix of the metrics of held-out rows."""


@dataclasses.dataclass(frozen=True)
class SupervisedTask:
    """The batches of a run, and how they are measured."""

    batch: Callable[[int], RolloutBatch]
    """Returns the batch of a step, from 1 on."""
    pack: Callable[[RolloutBatch], PackedBatch]
    """Packs a batch into microbatches, of which this process gets its rows."""
    epochs: Callable[[int], float]
    """Returns the number of epochs until the end of a step."""
    measure: Callable[[LmHeadModel], dict[str, float]] | None
    """Returns the held-out metrics of a policy; None if nothing is held out."""
    first_files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    """Further files of the checkpoint of step 0, by name."""


class Start(NamedTuple):
    """The start of a run."""

    policy: Any
    """The weights of a new run; None if it resumes."""
    checkpoints: Checkpoints
    """Checkpoints of a run that resumes."""


@dataclasses.dataclass(kw_only=True)
class SupervisedRun(AbstractRun[AbstractSupervisedConfig]):
    """A run that trains on data."""

    milestones: ClassVar[tuple[str, str]] = "before training", "after training"

    task: SupervisedTask
    """Batches and measures."""
    prepared: dict[int, PackedBatch] = dataclasses.field(default_factory=dict)
    """The batch of the next step, which is packed while the devices compute."""

    def train_step(self, stop_requested: Callable[[], bool]) -> dict[str, float]:
        """Update the weights with the batch of the next step; return the metrics of the step."""
        started, timer, compiled = time.perf_counter(), PhaseTimer(), compile_clock().seconds
        progress, step = self.progress, self.progress.step + 1
        with timer.phase("batch"):
            packed = self.prepared.pop(step, None) or self._pack(step)
        with timer.phase("step"):
            rows = packed.layout.rows_per_microbatch
            self.trainer_state, pending = self.learner.dispatch(self.trainer_state, packed.microbatches, rows)
            if step < self.config.num_steps:
                self.prepared = {step + 1: self._pack(step + 1)}
            collect_garbage(step)
            update = pending.wait()
        progress.step = step
        progress.updates += 1
        progress.trained_tokens += packed.num_loss_tokens
        metrics = loss_metrics([update])
        metrics |= {
            "epoch": self.task.epochs(step),
            "updates": float(progress.updates),
            "tokens/trained_per_second": packed.num_loss_tokens / timer.seconds["step"],
            "tokens/processed_per_second": packed.num_tokens / timer.seconds["step"],
            "batch/packing_efficiency": packed.num_tokens / packed.num_positions,
            "batch/microbatches": float(len(packed.microbatches)),
            **{f"seconds/{phase}": timer.seconds[phase] for phase in ("batch", "step")},
            "seconds/total": time.perf_counter() - started,
            "seconds/compile": compile_clock().seconds - compiled,
        }
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
        if self.task.measure is None:
            return {}
        self.progress.evaluations[milestone] = self.task.measure(
            assemble(policy_of(self.trainer_state.model), self.base)
        )
        return self.progress.evaluations[milestone]

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

    def rewind(self) -> None:
        """Do nothing: only records are stored."""

    def _pack(self, step: int) -> PackedBatch:
        batch = self.task.batch(step)
        packed = self.task.pack(batch)
        require_same_batch(step, batch, [packed])
        return packed


def open_supervised(
    config: AbstractSupervisedConfig,
    parts_class: type[AbstractModelParts],
    make_task: Callable[[Any, Start], SupervisedTask],
    folder: StoragePath,
    report: Report,
    stop_requested: Callable[[], bool] = lambda: False,
    *,
    accept_changes: bool = False,
    command_timer: PhaseTimer | None = None,
) -> SupervisedRun:
    """Start a run that trains on data, or resume it from its newest valid checkpoint.

    Args:
        config: config of the run; `model` and `num_steps` are set.
        parts_class: class of its parts.
        make_task: returns the batches and measures of the run.
        folder: run directory.
        report: called with each progress message.
        stop_requested: returns whether this process was asked to stop; not read, because the start takes no steps.
        accept_changes: whether to resume although files that the run reads or has written were changed.
        command_timer: accumulates the seconds of `evaluation` and `steps`.

    Raises:
        KeyboardInterrupt: after SIGINT or SIGTERM while the run is prepared or its weights are loaded.
        CheckpointError: if the run has checkpoints and none is usable.
        RunDirectoryError: if files of the run were changed since the checkpoint.
        ProcessesDifferError: if the processes have different input files.
    """
    timer = PhaseTimer() if command_timer is None else command_timer
    with contextlib.ExitStack() as resources, interruptible():
        parts = parts_class.start(config, resources=resources, report=report)
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
            files = compare_files(loaded, inputs, report, accept=accept_changes)
            report_resume(loaded, checkpoints, report)
        policy = None if loaded else parts.assemble(policy_of(state.model))
        task = make_task(parts, Start(policy, checkpoints))
        run = SupervisedRun(
            config=config,
            progress=progress,
            trainer_state=state,
            learner=parts.learner,
            base=parts.base,
            tokenizer=parts.tokenizer,
            checkpoints=checkpoints,
            resources=resources.pop_all(),
            files=files,
            command_timer=timer,
            task=task,
        )
    if loaded is None:
        with timer.phase("evaluation"):
            if metrics := run.measure(run.milestones[0]):
                report(f"{run.milestones[0]}: {describe_held_out(metrics)}")
        run.save()
    return run


def describe_held_out(metrics: Mapping[str, float]) -> str:
    """Describe held-out metrics in one line."""
    named = {name.removeprefix(f"{HELD_OUT}/").replace("_", " "): value for name, value in metrics.items()}
    return "held-out " + ", ".join(f"{name} {value:.3f}" for name, value in named.items())


def score_examples(
    parts: AbstractSupervisedParts, policy: LmHeadModel, examples: Sequence[Example]
) -> Iterator[tuple[RolloutBatch, Scores]]:
    """Score examples in batches of as many as a step has, so that one program scores all of them."""
    size = parts.config.batch.size
    for first in range(0, len(examples), size):
        batch = join_examples(examples[first : first + size])
        yield batch, parts.scorer.score(policy, batch)


def read_data(config: SupervisedConfig) -> tuple[SupervisedConfig, Encoded, Encoded]:
    """Return the config with `num_steps`, the rows to train on, and those that are held out."""
    train, held_out = read_examples(
        config.source, config.source_key, config.batch, config.tokenizer.build(), pairs=config.trains_on_pairs
    )
    steps = Batches(train.examples, config.batch.size, config.seed).steps(config.epochs)
    return dataclasses.replace(config, num_steps=config.num_steps or steps), train, held_out


def dry_run_data(
    config: AbstractSupervisedConfig, report: Report, *, accept_changes: bool, named: Collection[str]
) -> list[str]:
    """Check everything that a run on data needs, and read all its data; see `dry_run_supervised`."""

    def read(config: AbstractSupervisedConfig) -> tuple[AbstractSupervisedConfig, str]:
        config, *data = read_data(config)
        return config, describe(*data)

    return dry_run_supervised(read, config, report, accept_changes=accept_changes, named=named)


# Supervised fine-tuning.


def prepare_sft(config: SftConfig) -> tuple[SftConfig, Callable[..., SupervisedRun]]:
    """Read and tokenize the data of a run; see `Prepare` in `marin_rl.training.session`.

    Returns:
        The config with `num_steps`, and the function that opens the run.

    Raises:
        ValueError: if the data is invalid; the message names the file, the line and the column.
    """
    config, train, held_out = read_data(config)
    batches = Batches(train.examples, config.batch.size, config.seed)

    def make_task(parts: SftParts, start: Start) -> SupervisedTask:
        parts.report(describe(train, held_out))
        return SupervisedTask(
            batch=lambda step: join_examples(batches.of_step(step)),
            pack=lambda batch: pack_cross_entropy(batch, parts),
            epochs=batches.epochs,
            measure=functools.partial(held_out_loss, parts, held_out.examples) if held_out.examples else None,
        )

    return config, functools.partial(open_supervised, config, SftParts, make_task)


def pack_cross_entropy(batch: RolloutBatch, parts: AbstractModelParts) -> PackedBatch:
    """Pack a batch for the cross-entropy of the tokens on its loss mask, the mean over all of them."""
    return pack_batch(
        batch,
        TokenMeanConfig(),
        parts.layout,
        pad_token_id=parts.tokenizer.pad_token_id,
        own_rows=own_rows(parts.trainer),
        ce_mask=batch.loss_mask,
    )


def held_out_loss(parts: SftParts, examples: Sequence[Example], policy: LmHeadModel) -> dict[str, float]:
    """Return the cross-entropy (nats per token) and the share of tokens that are the most likely ones.

    Args:
        parts: parts of the run.
        examples: the held-out rows.
        policy: the weights.
    """
    loss, correct = 0.0, 0
    for _, scores in score_examples(parts, policy, examples):
        assert scores.is_most_likely is not None
        loss -= scores.logprobs.sum(dtype=np.float64)
        correct += np.count_nonzero(scores.is_most_likely)
    tokens = sum(np.count_nonzero(example.loss_mask) for example in examples)
    return {f"{HELD_OUT}/loss": float(loss / tokens), f"{HELD_OUT}/token_accuracy": correct / tokens}
