# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Build the parts of a run, and start it or resume it from its newest checkpoint."""

import contextlib
import dataclasses
import functools
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
from levanter.models.lm_model import LmHeadModel
from levanter.trainer_state import TrainerState

from marin_rl import multihost
from marin_rl.batching.packing import RowLayout
from marin_rl.config.device_settings import logprob_block, row_layout, trained_model
from marin_rl.config.input_files import Inputs, digest_inputs
from marin_rl.config.sections import Mode
from marin_rl.config.train_config import TrainConfig
from marin_rl.distributed.make_runner import check_answers, make_runner, open_reward_functions
from marin_rl.distributed.open_rollout_source import (
    make_history,
    make_replay_buffer,
    make_staleness_limits,
    open_rollout_source,
)
from marin_rl.distributed.samplers import open_trainer_sampler
from marin_rl.distributed.scheduler import RolloutScheduler
from marin_rl.distributed.worker_devices import check_worker_devices
from marin_rl.environments.base import AbstractEnvironment, EnvironmentConfig
from marin_rl.errors import Closing, writing
from marin_rl.event_loop import BackgroundLoop
from marin_rl.host_status import raise_if
from marin_rl.learner.checkpoint import Checkpoints
from marin_rl.learner.checkpoint_folders import CheckpointError
from marin_rl.learner.critic import policy_of
from marin_rl.learner.devices import own_rows, platform_of, start_devices
from marin_rl.learner.loss import RlLoss
from marin_rl.learner.policy_spec import PolicySpec
from marin_rl.learner.saved_checkpoint import Checkpoint
from marin_rl.learner.scoring import Scorer
from marin_rl.learner.train_step import Learner
from marin_rl.learner.weight_history import WeightHistory
from marin_rl.rollouts.failures import FailureReports
from marin_rl.rollouts.reward_functions import RewardFunctions
from marin_rl.rollouts.run_rollouts import RolloutRunner
from marin_rl.rollouts.store import EVALUATION, RolloutStore
from marin_rl.seeds import derive_seed
from marin_rl.storage import StoragePath
from marin_rl.timing import PhaseTimer
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import TokenPieces
from marin_rl.trainer_config import AbstractTrainerConfig
from marin_rl.training.batch_builder import BatchBuilder, make_batch_builder
from marin_rl.training.collect import GroupCollector
from marin_rl.training.evaluation import describe_accuracy, evaluate
from marin_rl.training.loop import TrainingRun
from marin_rl.training.run_files import RUN_FILES, RunFiles, compare_on_resume
from marin_rl.training.run_state import REPLAY, Progress, RunState
from marin_rl.training.shared_run import check_config, require_same_inputs, require_same_tasks
from marin_rl.training.starting_weights import first_policy, policy_spec
from marin_rl.training.warm_start import warm_start
from marin_rl.types import RolloutGroup, WeightVersion

Report = Callable[[str], None]
"""Receives progress messages of one line each."""

NOTICE_SECONDS = 5.0
"""Seconds after which work on all tasks is reported."""


class _Parts(NamedTuple):
    """Parts of a run that do not depend on its weights."""

    trainer: AbstractTrainerConfig
    layout: RowLayout
    tokenizer: ChatTokenizer
    environment: AbstractEnvironment
    reward_functions: RewardFunctions
    loop: BackgroundLoop
    store: RolloutStore
    checkpoints: Checkpoints
    learner: Learner
    inputs: Inputs


class _Loaded(NamedTuple):
    """What a run reads of its checkpoint."""

    checkpoint: Checkpoint
    progress: Progress
    state: TrainerState
    replay: bytes
    files: RunFiles


def open_run(
    config: TrainConfig,
    folder: StoragePath,
    report: Report,
    stop_requested: Callable[[], bool] = lambda: False,
    check_lock: Callable[[], None] = lambda: None,
    *,
    accept_changes: bool = False,
    command_timer: PhaseTimer | None = None,
) -> TrainingRun:
    """Start a run, or resume it from its newest valid checkpoint.

    Closes all opened resources if it raises or is interrupted.

    Args:
        config: training config; `model` is set.
        folder: run directory.
        report: called with each progress message.
        stop_requested: returns whether this process was asked to stop; called during a warm start and evaluations.
        check_lock: called before rollouts are stored; raises RunDirectoryError if another process has taken the lock.
        accept_changes: whether to resume although files that the run reads or has written were changed.
        command_timer: accumulates the seconds of `warm start`, `evaluation` and `RL steps`.

    Raises:
        KeyboardInterrupt: after SIGINT or SIGTERM while the run is prepared or its weights are loaded.
        StopRequestedError: in all processes, if one was asked to stop before a new run had its first checkpoint.
        ValueError: if components do not fit together (batch and mesh, tokenizer and model, reward functions and mode).
        CheckpointError: if the run has checkpoints and none is usable.
        RunDirectoryError: if files of the run were changed since the checkpoint.
        ProcessesDifferError: if the processes have different input files.
    """
    timer = PhaseTimer() if command_timer is None else command_timer
    with contextlib.ExitStack() as resources:
        with _interruptible():
            parts = _open_parts(config, folder, report, check_lock, resources)
            loaded = parts.checkpoints.restore_newest(functools.partial(_load, config, parts))
            files = RunFiles(parts.inputs)
            if loaded is not None:
                files = _compare_files(loaded, parts.inputs, report, accept=accept_changes)
        trainer_state, runner, progress = (
            _start(config, parts, report, stop_requested, timer)
            if loaded is None
            else _resume(config, parts, loaded, report)
        )
        rollout_source = open_rollout_source(
            config, parts.inputs, runner, progress.vocab_size, progress.worker_counts, resources
        )
        scheduler = RolloutScheduler(make_staleness_limits(config), progress.scheduler)
        state = RunState(progress, scheduler, make_replay_buffer(config))
        if loaded is not None:
            state.replay.load(loaded.replay, loaded.checkpoint.path / REPLAY)
        history = make_history(config)
        if history is not None:
            history.keep(policy_of(trainer_state.model), progress.step)
            drop_groups_of_lost_weights(state, report)
        rollout_source.publish(policy_of(trainer_state.model), progress.step)
        rollout_source.submit(state.scheduler.outstanding)
        if loaded is None:
            if multihost.is_main():
                with writing(parts.store.folder):
                    files = dataclasses.replace(files, rollouts=parts.store.digests())
            state.save(parts.checkpoints, trainer_state, rollout_source.counts, files)
        return TrainingRun(
            config=config,
            state=state,
            trainer_state=trainer_state,
            collector=GroupCollector(config, parts.environment, parts.tokenizer, rollout_source),
            batch_builder=_make_batch_builder(config, parts, history),
            learner=parts.learner,
            history=history,
            runner=runner,
            store=parts.store,
            failures=FailureReports(report),
            checkpoints=parts.checkpoints,
            resources=resources.pop_all(),
            files=files,
            command_timer=timer,
        )


def make_loss(config: TrainConfig, trainer: AbstractTrainerConfig) -> RlLoss:
    """Build the configured loss, for a trainer section of started devices."""
    return RlLoss(
        policy_loss=config.policy_loss,
        kl=config.kl,
        temperature=config.sampling.temperature,
        block_size=logprob_block(config, trainer),
        critic=config.critic,
    )


def make_learner(config: TrainConfig, trainer: AbstractTrainerConfig, layout: RowLayout) -> Learner:
    """Build the learner of a run; the arguments are those of `make_scorer`."""
    capacity = layout.microbatches(math.ceil(config.rollouts.rollouts_per_step / config.updates.minibatches))
    return Learner(
        trainer, config.optimizer, make_loss(config, trainer), num_updates=config.num_updates, capacity=capacity
    )


def make_scorer(config: TrainConfig, trainer: AbstractTrainerConfig, layout: RowLayout, pad_token_id: int) -> Scorer:
    """Build the scorer of a run.

    Args:
        config: training config.
        trainer: as returned by `start_devices`.
        layout: shape of a microbatch.
        pad_token_id: token id of padding.
    """
    return Scorer(
        trainer,
        layout,
        pad_token_id=pad_token_id,
        temperature=config.sampling.temperature,
        block_size=logprob_block(config, trainer),
        capacity=layout.microbatches(config.rollouts.rollouts_per_step),
    )


def first_state(
    config: TrainConfig, policy: LmHeadModel, trainer: AbstractTrainerConfig, learner: Learner
) -> TrainerState:
    """Return the training state of a run before its first update.

    Args:
        config: training config.
        policy: its arrays become part of the state.
        trainer: as returned by `start_devices`.
        learner: learner of the run.
    """
    spec = PolicySpec(trained_model(config, trainer), policy.vocab_size, trainer, config.critic)
    key = jax.random.PRNGKey(derive_seed(config.seed, "training") % 2**32)
    return learner.initial_state(spec.attach_critic(policy), key)


def drop_groups_of_lost_weights(state: RunState, report: Report) -> None:
    """Drop waiting groups that were sampled with weights that are no longer kept, and request them again.

    Args:
        state: state of a run that was just resumed.
        report: called with a message if any group was dropped.
    """
    if dropped := state.drop_stale(state.progress.step, max_staleness=0).count:
        report(
            f"{dropped} waiting groups were sampled with weights that are no longer kept; those not trained on are "
            "sampled again"
        )


def _open_parts(
    config: TrainConfig,
    folder: StoragePath,
    report: Report,
    check_lock: Callable[[], None],
    resources: contextlib.ExitStack,
) -> _Parts:
    trainer = start_devices(config.trainer, rows_per_device=config.rollouts.rows_per_device)
    layout = row_layout(config, trainer)
    check_config(config)
    check_worker_devices(config, platform_of(trainer), os.environ)
    inputs = digest_inputs(config)
    require_same_inputs(inputs)
    tokenizer, environment = config.tokenizer.build(), build_environment(config.environment, report)
    require_same_tasks(environment)
    if config.mode is Mode.SYNC or config.warm_start.max_steps > 0 or config.evaluation.tasks > 0:
        reward_functions, loop = open_reward_functions(config, environment, resources)
    else:
        # This process runs no episodes, so it needs no reward functions and no sandbox.
        check_answers(config.environment.reward_components(environment), environment)
        reward_functions, loop = RewardFunctions(), BackgroundLoop()
    store = RolloutStore(folder / "rollouts", config.rollout_store, TokenPieces(tokenizer.tokenizer), check_lock)
    resources.enter_context(Closing(functools.partial(_close, store)))
    checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint, keep_first=config.kl.needs_reference)
    resources.enter_context(Closing(checkpoints.close))
    learner = make_learner(config, trainer, layout)
    return _Parts(trainer, layout, tokenizer, environment, reward_functions, loop, store, checkpoints, learner, inputs)


def build_environment(config: EnvironmentConfig, report: Report) -> AbstractEnvironment:
    """Build the environment, and report if that takes long, such as generating games or downloading a dataset."""
    name = EnvironmentConfig.get_choice_name(type(config))
    with notice_if_long(report, f"preparing the tasks of the environment {name!r} ..."):
        return config.build()


@contextlib.contextmanager
def notice_if_long(report: Report, message: str) -> Iterator[None]:
    """Report a message if the block takes longer than `NOTICE_SECONDS`."""
    notice = threading.Timer(NOTICE_SECONDS, report, [message])
    notice.start()
    try:
        yield
    finally:
        notice.cancel()


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGINT and SIGTERM raise KeyboardInterrupt while there is nothing to save."""
    signals = signal.SIGINT, signal.SIGTERM
    previous = {number: signal.signal(number, signal.default_int_handler) for number in signals}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _close(store: RolloutStore) -> None:
    with writing(store.folder):
        store.close()


def _load(config: TrainConfig, parts: _Parts, checkpoint: Checkpoint) -> _Loaded:
    progress = read_progress(checkpoint)
    state = policy_spec(checkpoint, config, parts.trainer).restore_state(checkpoint, parts.learner)
    return _Loaded(checkpoint, progress, state, checkpoint.read(REPLAY), RunFiles.decode(checkpoint.read(RUN_FILES)))


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


def _compare_files(loaded: _Loaded, inputs: Inputs, report: Report, *, accept: bool) -> RunFiles:
    """Compare the files of the run with those at its checkpoint, in the main process; report what is new."""

    def compare() -> bytes:
        files, messages = compare_on_resume(loaded.files, loaded.checkpoint.path, inputs, accept=accept)
        for message in messages:
            report(message)
        return files.encode()

    return RunFiles.decode(multihost.on_main(compare))


def _resume(
    config: TrainConfig, parts: _Parts, loaded: _Loaded, report: Report
) -> tuple[TrainerState, RolloutRunner, Progress]:
    progress, state = loaded.progress, loaded.state
    for damaged in [step for step in parts.checkpoints.steps() if step > progress.step]:
        report(f"the checkpoint of step {damaged} is damaged and was skipped; see log.txt for the reason")
    report(f"resuming after step {progress.step}, from {loaded.checkpoint.path}")
    return state, _open_runner(config, parts, policy_of(state.model), progress.step), progress


def _start(
    config: TrainConfig, parts: _Parts, report: Report, stop_requested: Callable[[], bool], timer: PhaseTimer
) -> tuple[TrainerState, RolloutRunner, Progress]:
    """Create or load the initial weights, warm them up if configured, and evaluate them."""
    with _interruptible():
        policy = first_policy(config, parts.tokenizer, parts.trainer)
    progress = Progress(vocab_size=policy.vocab_size)
    runner = _open_runner(config, parts, policy, version=0)
    stoppable = dataclasses.replace(runner, interrupt=functools.partial(raise_if, stop_requested))
    failures = FailureReports(report)

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
                seed=config.seed,
                block_size=logprob_block(config, parts.trainer),
                temperature=config.sampling.temperature,
                report=report,
                stop_requested=stop_requested,
            )
    state = first_state(config, policy, parts.trainer, parts.learner)
    runner.sampler.update_weights(policy_of(state.model), 0)
    groups = measure("before RL")
    if multihost.is_main():
        with writing(parts.store.folder):
            parts.store.write(0, groups, {}, EVALUATION)
    return state, runner, progress


def _open_runner(config: TrainConfig, parts: _Parts, policy: LmHeadModel, version: WeightVersion) -> RolloutRunner:
    sampler = open_trainer_sampler(config, policy, parts.tokenizer, parts.trainer, version)
    return make_runner(
        config, parts.environment, parts.tokenizer, sampler, parts.loop, parts.reward_functions, policy.vocab_size
    )


def _make_batch_builder(config: TrainConfig, parts: _Parts, history: WeightHistory[LmHeadModel] | None) -> BatchBuilder:
    scorer = make_scorer(config, parts.trainer, parts.layout, parts.tokenizer.pad_token_id)
    score_reference = None
    if config.kl.needs_reference:
        first = parts.checkpoints.open(0)
        reference = policy_spec(first, config, parts.trainer).restore_policy(first)
        score_reference = functools.partial(scorer.score, reference)
    return make_batch_builder(
        config,
        parts.layout,
        parts.tokenizer.pad_token_id,
        scorer.score,
        score_reference,
        None if history is None else history.get,
        own_rows(parts.trainer),
    )
