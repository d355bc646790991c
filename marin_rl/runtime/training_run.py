# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Puts the parts of a run together, and starts it or takes it up where it stopped."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
from haliax import Axis
from levanter.models.lm_model import LmConfig, LmHeadModel
from levanter.trainer import TrainerConfig
from levanter.trainer_state import TrainerState

from marin_rl import processes
from marin_rl.closing import Closing
from marin_rl.environments.base import Environment
from marin_rl.environments.task_stream import TaskStream, task_stream
from marin_rl.learner.checkpoint import Checkpoint, Checkpoints
from marin_rl.learner.critic import attach_critic, policy_of, with_critic
from marin_rl.learner.loss import RlLoss
from marin_rl.learner.policy_model import initialize_policy, load_hf_policy, model_shape, read_hf_architecture
from marin_rl.learner.scoring import Scorer
from marin_rl.learner.train_step import Learner
from marin_rl.learner.weight_history import WeightHistory
from marin_rl.rollouts.event_loop import BackgroundLoop
from marin_rl.rollouts.judging import Judges, RewardFunctions
from marin_rl.rollouts.orders import OrderBook
from marin_rl.rollouts.replay_buffer import ReplayBuffer
from marin_rl.rollouts.run_rollouts import Player
from marin_rl.rollouts.store import EVALUATION, RolloutStore
from marin_rl.rollouts.stored_rollout import TrainingSignal
from marin_rl.rollouts.token_pieces import TokenPieces
from marin_rl.runtime.config import TrainConfig
from marin_rl.runtime.crew import Crew
from marin_rl.runtime.devices import start_devices
from marin_rl.runtime.evaluation import Keep, evaluate, forget
from marin_rl.runtime.open_crew import make_pace, make_replay, open_crew
from marin_rl.runtime.player import make_player, open_judges
from marin_rl.runtime.policy_engine import PolicyEngine, open_policy_engine
from marin_rl.runtime.run_directory import writing
from marin_rl.runtime.shared_run import check_config, newest_good
from marin_rl.runtime.warm_start import warm_start
from marin_rl.seeds import derive_seed
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.types import RolloutGroup, WeightVersion

logger = logging.getLogger(__name__)

Report = Callable[[str], None]

REPLAY = "replay.parquet"
"""The replay buffer's file in a checkpoint."""


@dataclasses.dataclass
class Progress:
    """The host's share of a run's state; saved in every checkpoint, as JSON."""

    step: int = 0
    """Steps done."""
    updates: int = 0
    """Updates of the weights; several in a step with epochs or minibatches."""
    tasks_drawn: int = 0
    """Training tasks drawn."""
    task_stream: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Where the next step goes on drawing tasks, in each environment, and what a curriculum has seen."""
    episodes: int = 0
    """Rollouts sampled for training."""
    orders: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Groups that were ordered and have not come."""
    sampled_tokens: int = 0
    """Tokens sampled for training."""
    trained_tokens: int = 0
    """Tokens trained on; twice where there are two epochs."""
    vocab_size: int = 0
    """The model's vocabulary, which may be larger than the tokenizer's."""
    evaluations: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    """Held-out accuracy at the run's landmarks: `before warm start`, `before RL`, and `after RL`, the latest."""


@dataclasses.dataclass
class TrainingRun:
    """A run, ready to go on."""

    config: TrainConfig
    """What was asked for."""
    trainer: TrainerConfig
    """Levanter's section, completed for the devices at hand."""
    environment: Environment
    """Tasks and judge."""
    tokenizer: ChatTokenizer
    """Text to tokens and back."""
    sampler: PolicyEngine
    """Holds the current weights."""
    learner: Learner
    """Makes new ones."""
    scorer: Scorer
    """Log-probs and values of rollouts under given weights."""
    reference: LmHeadModel | None
    """The frozen reference, where the KL coefficient is above 0; otherwise it is neither loaded nor run."""
    checkpoints: Checkpoints
    """Where state is saved."""
    store: RolloutStore
    """Writes rollouts."""
    state: TrainerState
    """Weights, optimizer moments, random key."""
    progress: Progress
    """The host's share of the state."""
    loop: BackgroundLoop
    """Where episodes and rewards run."""
    judges: RewardFunctions
    """The environment's reward functions."""
    crew: Crew
    """Plays the groups that are trained on."""
    orders: OrderBook
    """Groups that were ordered and have not come."""
    replay: ReplayBuffer
    """Groups that have come and wait to be trained on."""
    history: WeightHistory[LmHeadModel] | None
    """The weights that groups in the buffer were sampled with, where a correction is to be computed from them."""
    opened: contextlib.ExitStack
    """Ends the loop, the judges and the store."""

    @property
    def stream(self) -> TaskStream:
        """Draws the run's training tasks; where it stands is in the progress."""
        return task_stream(self.environment, self.config.seed)

    @property
    def player(self) -> Player:
        """What plays episodes under the current weights, with a timer of its own."""
        return make_player(self.config, self.environment, self.tokenizer, self.sampler, self.loop, self.judges)

    def publish(self) -> None:
        """Hand the learner's weights to those who sample; the trainer's own sampler takes them without a copy."""
        self.sampler.update(policy_of(self.state.model), self.progress.step)
        self.offer()

    def offer(self) -> None:
        """Hand the learner's weights to those who keep them, or play with them elsewhere."""
        policy = policy_of(self.state.model)
        if self.history is not None:
            self.history.keep(policy, self.progress.step)
        self.crew.publish(policy, self.progress.step)

    def drop_stale(self, version: WeightVersion, max_staleness: int | None = None) -> int:
        """Drop waiting groups that are too old, and order anew what was not trained on even once; how many they were.

        Args:
            version: of the weights that are to be updated.
            max_staleness: what is too old; None for the configured bound.
        """
        stale = self.replay.expire(version, max_staleness)
        self.orders.again(one.task for one in stale if one.uses_left == self.orders.pace.uses_per_group)
        return len(stale)

    def save(self) -> Path:
        """Write a checkpoint of everything that a resume needs; the rollouts before it are on the disk first."""
        with writing(self.store.folder):
            self.store.flush()
        self.progress.orders = self.orders.state
        return self.checkpoints.save(
            self.state,
            self.progress.step,
            dataclasses.asdict(self.progress),
            lambda into: self.replay.save(into / REPLAY),
        )

    def store_rollouts(self, step: int, groups: Sequence[RolloutGroup], signals: Mapping[str, TrainingSignal]) -> None:
        """Hand a step's rollouts to the store, which writes what the config asks for."""
        if not processes.is_main():
            return
        with writing(self.store.folder):
            self.store.write(step, groups, signals)

    def store_evaluation(self, groups: Sequence[RolloutGroup]) -> None:
        """Hand the rollouts of an evaluation of the current weights to the store."""
        with writing(self.store.folder):
            self.store.write(self.progress.step, groups, {}, EVALUATION)

    def close(self) -> None:
        """End what runs beside the training; rollouts that are under way reach the disk."""
        self.opened.close()


def open_run(config: TrainConfig, folder: Path, report: Report) -> TrainingRun:
    """Start a run, or take it up from its newest good checkpoint.

    What was started by then is ended again where this raises or is interrupted.

    Args:
        config: what is asked for; its `model` filled in.
        folder: the run directory.
        report: is told of progress, a line at a time.

    Raises:
        ValueError: if parts do not fit one another (batch and mesh, tokenizer and model).
        CheckpointError: if there are checkpoints and none is usable.
    """
    with contextlib.ExitStack() as opened:
        run = _assemble(config, folder, report, opened)
        run.opened = opened.pop_all()
    return run


def _assemble(config: TrainConfig, folder: Path, report: Report, opened: contextlib.ExitStack) -> TrainingRun:
    assert config.model is not None
    trainer = start_devices(config.trainer_config(), rows_per_device=config.rollouts.rows_per_device)
    check_config(config)
    tokenizer = config.tokenizer.build()
    environment = config.environment.build()
    judges, loop = open_judges(config, environment, opened)
    store = RolloutStore(folder / "rollouts", config.rollout_store, TokenPieces(tokenizer.tokenizer))
    opened.enter_context(Closing(lambda: _close_store(store)))
    checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint, keep_first=config.kl.needs_reference)
    # A learning rate schedule has no form for no steps at all, which is a run that only warms up and exports.
    num_updates = max(config.num_steps, 1) * config.updates.per_step
    learner = Learner(trainer, config.optimizer, make_loss(config), num_updates=num_updates)
    if (checkpoint := newest_good(checkpoints)) is not None:
        progress = Progress(**checkpoint.progress)
        state = _restore(checkpoint, learner, config, progress.vocab_size)
        for damaged in [step for step in checkpoints.steps() if step > progress.step]:
            report(f"the checkpoint of step {damaged} is damaged and passed over; log.txt says what is wrong with it")
        report(f"resuming after step {progress.step}, from {checkpoint.path}")
        sampler = open_policy_engine(config, policy_of(state.model), tokenizer, trainer, progress.step)
    else:
        state, sampler, progress = _start(config, learner, trainer, tokenizer, environment, loop, judges, store, report)
    run = TrainingRun(
        config,
        trainer,
        environment,
        tokenizer,
        sampler,
        learner,
        Scorer(
            trainer,
            config.row_layout(trainer),
            pad_token_id=tokenizer.pad_token_id,
            temperature=config.sampling.temperature,
            block_size=config.logprob_block_size,
        ),
        None,
        checkpoints,
        store,
        state,
        progress,
        loop,
        judges,
        open_crew(
            config,
            make_player(config, environment, tokenizer, sampler, loop, judges),
            progress.vocab_size,
            opened,
        ),
        OrderBook(make_pace(config), progress.orders),
        make_replay(config),
        WeightHistory(config.replay.max_staleness + 1) if config.replay.keep_old_weights else None,
        opened,
    )
    if checkpoint is not None:
        run.replay.load(checkpoint.path / REPLAY)
    run.offer()
    if run.history is not None:
        forget_older(run, report)
    run.crew.submit(run.orders.outstanding)
    if checkpoint is None:
        run.save()
    if config.kl.needs_reference:
        run.reference = restore_policy(checkpoints.open(0), config, trainer)
    return run


def forget_older(run: TrainingRun, report: Report) -> None:
    """Order anew what was sampled with weights that no checkpoint keeps.

    Args:
        run: just taken up again.
        report: is told, where there is anything.
    """
    if lost := run.drop_stale(run.progress.step, max_staleness=0):
        report(f"{lost} waiting groups were sampled with older weights than those kept; they are sampled anew")


def _close_store(store: RolloutStore) -> None:
    with writing(store.folder):
        store.close()


def restore_policy(checkpoint: Checkpoint, config: TrainConfig, trainer: TrainerConfig) -> LmHeadModel:
    """The policy's weights out of a checkpoint, without its critic, if any, and without the optimizer's state.

    Args:
        checkpoint: of a run.
        config: that run's config; its `model` filled in.
        trainer: as `start_devices` completed it; mesh and axis mapping.

    Raises:
        CheckpointError: if the checkpoint holds another model than the config says.
    """
    assert config.model is not None
    like = model_shape(config.model, Axis("vocab", checkpoint.progress["vocab_size"]), trainer)
    where = "model" if config.critic is None else "model/policy"
    return checkpoint.restore_model(like, where, axis_mapping=trainer.parameter_axis_mapping, mesh=trainer.device_mesh)


def make_loss(config: TrainConfig) -> RlLoss:
    """The configured loss."""
    return RlLoss(
        policy_loss=config.policy_loss,
        kl=config.kl,
        temperature=config.sampling.temperature,
        block_size=config.logprob_block_size,
        critic=config.critic,
    )


def resolve_model(config: TrainConfig) -> TrainConfig:
    """Fill in `model` from the weights that the run starts from, where it is left out."""
    if config.model is not None or config.initialize_from is None:
        return config
    return dataclasses.replace(config, model=read_architecture(config.initialize_from))


def read_architecture(source: str) -> LmConfig:
    """The architecture of weights in a run directory or in Hugging Face format."""
    return read_hf_architecture(hf_folder(source))


def hf_folder(source: str) -> str:
    """Where weights lie in Hugging Face format: in a run directory's `hf/`, or in what is named itself."""
    folder = Path(source)
    if (folder / "config.yaml").exists():
        if not (folder / "hf" / "config.json").exists():
            raise ValueError(
                f"initialize_from: the run in {source!r} has not finished: it has no hf/ folder yet. "
                "run its command again to finish it"
            )
        return str(folder / "hf")
    return source


def _start(
    config: TrainConfig,
    learner: Learner,
    trainer: TrainerConfig,
    tokenizer: ChatTokenizer,
    environment: Environment,
    loop: BackgroundLoop,
    judges: Judges,
    store: RolloutStore,
    report: Report,
) -> tuple[TrainerState, PolicyEngine, Progress]:
    assert config.model is not None
    if config.initialize_from is None:
        key = jax.random.PRNGKey(derive_seed(config.seed, "weights") % 2**32)
        model = initialize_policy(config.model, tokenizer, trainer, key=key)
    else:
        model = load_hf_policy(hf_folder(config.initialize_from), tokenizer, trainer, config.model)
    sampler = open_policy_engine(config, model, tokenizer, trainer, version=0)
    player = make_player(config, environment, tokenizer, sampler, loop, judges)
    progress = Progress(vocab_size=model.vocab_size)

    def use_weights(model: LmHeadModel) -> None:
        sampler.update(model, 0)

    def measure(landmark: str, keep: Keep = forget) -> None:
        if not config.evaluation.tasks:
            return
        progress.evaluations[landmark] = evaluate(
            player, config.evaluation, temperature=config.sampling.temperature, seed=config.seed, keep=keep
        )
        report(f"{landmark}: {describe_accuracy(progress.evaluations[landmark])}")

    if config.warm_start.max_steps:
        measure("before warm start")
        model = warm_start(
            config.warm_start,
            model,
            player,
            trainer,
            config.row_layout(trainer),
            seed=config.seed,
            block_size=config.logprob_block_size,
            temperature=config.sampling.temperature,
            use_weights=use_weights,
            report=report,
        )
    trained = attach_critic(config.critic, model, trainer)
    state = learner.initial_state(trained, jax.random.PRNGKey(derive_seed(config.seed, "training") % 2**32))
    use_weights(policy_of(state.model))
    measure("before RL", lambda groups: store.write(0, groups, {}, EVALUATION))
    return state, sampler, progress


def describe_accuracy(evaluation: dict[str, float]) -> str:
    """One line about an evaluation."""
    parts = [f"{name.removeprefix('eval/')} {value:.3f}" for name, value in evaluation.items() if "accuracy" in name]
    return "held-out " + ", ".join(parts)


def _restore(checkpoint: Checkpoint, learner: Learner, config: TrainConfig, vocab_size: int) -> TrainerState:
    assert config.model is not None
    policy = model_shape(config.model, Axis("vocab", vocab_size), learner.trainer.config)
    model = policy if config.critic is None else eqx.filter_eval_shape(with_critic, config.critic, policy)
    like = learner.state_shape(model)
    return learner.place(checkpoint.restore(like, axis_mapping=learner.parameter_mapping, mesh=learner.mesh))
