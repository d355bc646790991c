# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Build the parts of a run, and start it or resume it from its newest checkpoint."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import equinox as eqx
import jax
from levanter.models.lm_model import LmHeadModel
from levanter.trainer_state import TrainerState

from marin_rl.batching.rl_example import empty_microbatch
from marin_rl.config.input_files import Inputs, digest_inputs
from marin_rl.config.ray_cluster import check_worker_devices
from marin_rl.config.sections import Mode
from marin_rl.config.train_config import TrainConfig
from marin_rl.config.workers_config import Engine
from marin_rl.distributed.rollout_source import LocalRollouts, RolloutSource
from marin_rl.learner.critic import policy_of
from marin_rl.learner.policy_spec import TrainedPolicy
from marin_rl.parts.model import AbstractModelParts, Report
from marin_rl.parts.rl import RunParts
from marin_rl.rollouts.metrics import FailureReports
from marin_rl.rollouts.reward_functions import RewardFunctions
from marin_rl.rollouts.run_rollouts import RolloutRunner
from marin_rl.runs.checkpoint import Checkpoints
from marin_rl.runs.rollout_store import EVALUATION, RolloutStore
from marin_rl.runs.run_directory import CheckpointError
from marin_rl.runs.saved_checkpoint import Checkpoint
from marin_rl.sampling.config import OpenAiSamplerConfig
from marin_rl.tokenization.load import TokenPieces
from marin_rl.training.advice import Advice
from marin_rl.training.batch_builder import BatchBuilder
from marin_rl.training.collect import GroupCollector
from marin_rl.training.evaluation import describe_accuracy, evaluate, small_split_warnings
from marin_rl.training.loop import TrainingRun
from marin_rl.training.references import References
from marin_rl.training.run_state import REPLAY, RUN_FILES, Progress, RunFiles, RunState, compare_on_resume
from marin_rl.training.shared_run import (
    check_shared_sampling,
    check_weight_address,
    require_same_inputs,
    require_same_tasks,
)
from marin_rl.training.warm_start import warm_start
from marin_rl.types import RolloutGroup, WeightVersion
from marin_rl.utils import multihost
from marin_rl.utils.devices.setup import platform_of
from marin_rl.utils.errors import Closing
from marin_rl.utils.host_status import raise_if
from marin_rl.utils.signals import interruptible
from marin_rl.utils.storage import StoragePath, writing
from marin_rl.utils.timing import PhaseTimer


class Loaded(NamedTuple):
    """What a run reads of its checkpoint."""

    checkpoint: Checkpoint
    """The checkpoint."""
    progress: Progress
    """Counters and small state."""
    state: TrainerState
    """Weights, optimizer state and random key."""
    files: RunFiles
    """Files of the run."""
    others: dict[str, bytes]
    """Other files of the checkpoint by name."""


@dataclasses.dataclass(frozen=True)
class Start:
    """What a command gives to the start of a run."""

    folder: StoragePath
    """Run directory."""
    report: Report
    """Called with each progress message."""
    stop_requested: Callable[[], bool] = lambda: False
    """Returns whether this process was asked to stop; called during a warm start and evaluations."""
    accept_changes: bool = False
    """Whether to resume although files that the run reads or has written were changed."""
    timer: PhaseTimer = dataclasses.field(default_factory=PhaseTimer)
    """Accumulates the seconds of the parts of the command: `warm start`, `evaluation`, `steps`."""


def open_run(kind: type[RunParts], config: TrainConfig, data: None, start: Start) -> TrainingRun:
    """Start a run, or resume it from its newest valid checkpoint.

    Closes all opened resources if it raises or is interrupted.

    Args:
        kind: class of the parts.
        config: training config; `model` is set.
        data: none; the environment reads the tasks.
        start: what the command gives.

    Raises:
        KeyboardInterrupt: after SIGINT or SIGTERM while the run is prepared or its weights are loaded.
        StopRequestedError: in all processes, if one was asked to stop before a new run had its first checkpoint.
        ValueError: if components do not fit together (batch and mesh, tokenizer and model, reward functions and mode).
        CheckpointError: if the run has checkpoints and none is usable.
        RunDirectoryError: if files of the run were changed since the checkpoint.
        ProcessesDifferError: if the processes have different input files.
    """
    folder, report = start.folder, start.report
    with contextlib.ExitStack() as resources:
        with interruptible():
            parts = kind.start(config, resources=resources, report=report)
            inputs = _check_run(parts)
            require_same_tasks(parts.environment)
            reward_functions = _open_reward_functions(parts)
            pieces = TokenPieces(parts.tokenizer.tokenizer)
            store = RolloutStore(folder / "rollouts", config.rollout_store, pieces)
            resources.enter_context(Closing(functools.partial(_close, store)))
            checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint, keep_first=config.needs_initial_policy)
            resources.enter_context(Closing(checkpoints.close))
            loaded = checkpoints.restore_newest(functools.partial(load_state, parts, (REPLAY,)))
            files = RunFiles(inputs)
            if loaded is not None:
                files = compare_files(loaded, inputs, report, accept=start.accept_changes)
        if loaded is None:
            with interruptible():
                policy = parts.first_policy()
            runner = _open_runner(parts, reward_functions, policy, version=0)
            if config.num_steps > 0:
                _compile_ahead(parts, parts.assemble(policy).vocab_size)
            trainer_state, progress = _start(parts, policy, runner, store, start)
        else:
            trainer_state, progress = loaded.state, loaded.progress
            report_resume(loaded, checkpoints, report)
            if config.num_steps > progress.step:
                _compile_ahead(parts, progress.vocab_size)
            runner = _open_runner(parts, reward_functions, policy_of(trainer_state.model), progress.step)
        rollout_source = _open_rollout_source(parts, inputs, runner, progress)
        replay = config.effective_replay
        state = RunState.create(
            progress,
            replay,
            groups_per_step=config.rollouts.prompts_per_step,
            max_batches=config.filter.max_batches,
            last_step=config.num_steps,
        )
        if loaded is not None:
            state.replay.load(loaded.others[REPLAY], loaded.checkpoint.path / REPLAY)
        rollout_source.publish(policy_of(trainer_state.model), progress.step)
        rollout_source.submit(state.scheduler.outstanding)
        if loaded is None:
            if multihost.is_main():
                with writing(store.folder):
                    files = dataclasses.replace(files, rollouts=store.digests())
            state.save(checkpoints, trainer_state, rollout_source.counts, files)
        references = References(parts, functools.partial(_initial_policy, parts, checkpoints))
        batch_builder = BatchBuilder(parts, parts.score, references.open_scorer())
        return TrainingRun(
            config=config,
            progress=progress,
            state=state,
            trainer_state=trainer_state,
            collector=GroupCollector(
                parts.environment,
                parts.tokenizer,
                rollout_source,
                parts.limits,
                config.overlong,
                config.truncation,
                config.filter,
                config.seed,
            ),
            batch_builder=batch_builder,
            learner=references.open_learner(progress.vocab_size),
            base=parts.base,
            tokenizer=parts.tokenizer,
            runner=runner,
            store=store,
            failures=FailureReports(report),
            advice=Advice(report, reward_functions.separate_calls),
            checkpoints=checkpoints,
            resources=resources.pop_all(),
            files=files,
            command_timer=start.timer,
        )


def _check_run(parts: RunParts) -> Inputs:
    """Check that the config fits the processes and devices, and that all processes have the same input files."""
    config = parts.config
    if config.mode is Mode.SYNC:
        check_shared_sampling(config.sampler, config.batch_scoped_rewards())
    else:
        if config.workers.engine is Engine.RAY:
            check_weight_address(config.weights.host)
        check_worker_devices(
            config.workers.reserved,
            platform_of(parts.trainer),
            os.environ,
            is_own_cluster=config.workers.engine is Engine.RAY and config.ray_address is None,
            asks_server=isinstance(config.sampler, OpenAiSamplerConfig),
        )
    inputs = digest_inputs(config)
    require_same_inputs(inputs)
    return inputs


def _open_reward_functions(parts: RunParts) -> RewardFunctions:
    """Open the reward functions of the run, or none if this process runs no episodes."""
    config = parts.config
    if config.mode is Mode.SYNC or config.warm_start.max_steps > 0 or config.evaluation.tasks > 0:
        return parts.reward_functions
    parts.check_answers()
    return RewardFunctions()


def _close(store: RolloutStore) -> None:
    with writing(store.folder):
        store.close()


def load_state(parts: AbstractModelParts, others: Sequence[str], checkpoint: Checkpoint) -> Loaded:
    """Load the state of a run from a checkpoint, with other files that are given by their names.

    Raises:
        CheckpointError: if it cannot be loaded.
    """
    progress = read_progress(checkpoint)
    parts.check_base(progress.base)
    state = parts.policy_spec(checkpoint.vocab_size).restore_state(checkpoint, parts.learner)
    files = RunFiles.decode(checkpoint.read(RUN_FILES))
    return Loaded(checkpoint, progress, state, files, {name: checkpoint.read(name) for name in others})


def restore_policy(parts: AbstractModelParts, checkpoint: Checkpoint) -> LmHeadModel:
    """Load the policy of a checkpoint of the run, with its base if it is an adapter.

    Raises:
        CheckpointError: if the checkpoint holds another model.
        OtherBaseError: if `initialize_from` has other weights than at the start of the run.
    """
    parts.check_base(checkpoint.progress.get("base", ""))
    return parts.assemble(parts.policy_spec(checkpoint.vocab_size).restore_policy(checkpoint))


def read_progress(checkpoint: Checkpoint) -> Progress:
    """Read the host's part of the state in a checkpoint.

    Raises:
        CheckpointError: if another version wrote it.
    """
    try:
        return Progress(**checkpoint.progress)
    except TypeError as error:
        raise CheckpointError(
            f"the progress in checkpoint {checkpoint.path} is of another version: {error}; resume with the version "
            "that wrote it, or choose another run_dir"
        ) from error


def compare_files(loaded: Loaded, inputs: Inputs, report: Report, *, accept: bool) -> RunFiles:
    """Compare the files of the run with those at its checkpoint, in the main process; report what is new."""

    def compare() -> bytes:
        files, messages = compare_on_resume(loaded.files, loaded.checkpoint.path, inputs, accept=accept)
        for message in messages:
            report(message)
        return files.encode()

    return RunFiles.decode(multihost.on_main(compare))


def report_resume(loaded: Loaded, checkpoints: Checkpoints, report: Report) -> None:
    """Report the checkpoint from which a run resumes, and damaged ones."""
    step = loaded.progress.step
    for damaged in [other for other in checkpoints.steps() if other > step]:
        report(f"the checkpoint of step {damaged} is damaged and was skipped; see log.txt for the reason")
    report(f"resuming after step {step}, from {loaded.checkpoint.path}")


def _start(
    parts: RunParts,
    policy: TrainedPolicy,
    runner: RolloutRunner,
    store: RolloutStore,
    start: Start,
) -> tuple[TrainerState, Progress]:
    """Warm up the initial weights if configured, and evaluate them."""
    config, report, timer = parts.config, start.report, start.timer
    progress = Progress(vocab_size=parts.assemble(policy).vocab_size, base=parts.base_fingerprint)
    stoppable = dataclasses.replace(runner, interrupt=functools.partial(raise_if, start.stop_requested))
    failures = FailureReports(report)
    for warning in small_split_warnings(config, runner):
        report(f"warning: {warning}")

    def measure(milestone: str) -> list[RolloutGroup]:
        if not config.evaluation.tasks:
            return []
        with timer.phase("evaluation"):
            progress.evaluations[milestone], groups = evaluate(
                stoppable, config.evaluation, temperature=config.sampling.temperature, seed=config.seed
            )
        failures.add(milestone, groups, "count as wrong")
        report(f"{milestone}: {describe_accuracy(progress.evaluations[milestone])}")
        return groups

    if config.warm_start.max_steps:
        measure("before warm start")
        with timer.phase("warm start"):
            policy = warm_start(
                config.warm_start,
                policy,
                stoppable,
                parts.trainer,
                parts.layout,
                base=parts.base,
                seed=config.seed,
                block_size=parts.logprob_block,
                temperature=config.sampling.temperature,
                report=report,
                stop_requested=start.stop_requested,
            )
    state = parts.first_state(policy)
    runner.sampler.update_weights(parts.assemble(policy_of(state.model)), 0)
    groups = measure("before RL")
    if multihost.is_main():
        with writing(store.folder):
            store.write(0, groups, {}, EVALUATION)
    return state, progress


def _compile_ahead(parts: RunParts, vocab_size: int) -> None:
    """Compile the update while the first rollouts are sampled, if the layout of its batch is likely.

    Only on a CPU: for a GPU, XLA chooses kernels by their time, which the sampler would disturb.
    """
    if parts.config.kl.needs_teacher or jax.process_count() > 1 or platform_of(parts.trainer) != "cpu":
        return
    if (layout := parts.likely_layout) is None:
        return
    microbatch = empty_microbatch(layout, parts.optional_arrays, parts.model)
    parts.learner.compile_ahead(cast(eqx.Module, parts.policy_spec(vocab_size).trained), microbatch)


def _initial_policy(parts: RunParts, checkpoints: Checkpoints) -> TrainedPolicy:
    first = checkpoints.open(0)
    return parts.policy_spec(first.vocab_size).restore_policy(first)


def _open_runner(
    parts: RunParts, reward_functions: RewardFunctions, trained: TrainedPolicy, version: WeightVersion
) -> RolloutRunner:
    """Open the trainer's runner: with the configured sampler in `mode: sync`, otherwise with the built-in one."""
    open_sampler = parts.open_sampler if parts.config.mode is Mode.SYNC else parts.open_group_sampler
    policy = parts.assemble(trained)
    return parts.make_runner(open_sampler(policy, version), policy.vocab_size, reward_functions)


def _open_rollout_source(parts: RunParts, inputs: Inputs, runner: RolloutRunner, progress: Progress) -> RolloutSource:
    """Open the trainer's sampler as rollout source, or start workers and a weight server."""
    config = parts.config
    if config.mode is Mode.SYNC:
        return LocalRollouts(
            runner,
            group_size=config.rollouts.group_size,
            temperature=config.sampling.temperature,
            seed=config.seed,
        )
    # Imported here because workers need Ray or Iris, which are extras.
    weights = config.weights
    if config.workers.engine is Engine.RAY:
        from marin_rl.distributed.ray_workers import ray_workers as start_workers
    else:
        from marin_rl.distributed.iris_workers import iris_workers as start_workers
        from marin_rl.distributed.iris_workers import reachable_in_cluster

        weights = reachable_in_cluster(weights)
    from marin_rl.distributed.worker_pool import open_worker_pool
    from marin_rl.training.worker import run_worker

    return open_worker_pool(
        weights,
        functools.partial(start_workers, run_worker, config, inputs, progress.vocab_size, progress.base),
        counts=progress.worker_counts,
        no_progress_timeout=config.workers.no_progress_timeout,
        opened=parts.resources,
    )
