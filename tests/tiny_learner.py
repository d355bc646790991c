# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Tiny models, batches and learners: plain functions, which `mesh_cases.py` imports, and fixtures."""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType

import equinox as eqx
import haliax as hax
import jax
import jmp
import numpy as np
import optax
import pytest
from haliax import Axis
from jax import monitoring
from levanter.layers.attention import AttentionBackend
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmConfig, LmHeadModel
from levanter.models.qwen import Qwen3Config
from levanter.optim.config import AdamConfig, OptimizerConfig
from levanter.trainer_state import TrainerState

from marin_rl.batching.rl_example import RlExample
from marin_rl.batching.rollout_batch import RolloutBatch, make_batch
from marin_rl.learner.loss import RlLoss
from marin_rl.learner.policy_spec import PolicySpec
from marin_rl.learner.train_step import Learner
from marin_rl.objectives.kl import KlEstimator, LossKlConfig
from marin_rl.objectives.policy_loss import PpoClipLossConfig
from marin_rl.utils.devices.setup import start_devices
from marin_rl.utils.devices.trainer_config import TrainerConfig
from marin_rl.utils.levanter_line import seq_len

ROWS, POSITIONS, VOCAB = 8, 12, 264
MESH_ROWS = 32
# A wide initialization, so that probabilities are far from uniform and errors are visible.
LLAMA = LlamaConfig(
    **seq_len(16),
    hidden_dim=16,
    intermediate_dim=32,
    num_layers=1,
    num_heads=4,
    num_kv_heads=4,
    initializer_range=0.3,
    gradient_checkpointing=False,
    attn_backend=AttentionBackend.VANILLA,
)
QWEN3 = Qwen3Config(
    **seq_len(16), hidden_dim=16, intermediate_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, initializer_range=0.3
)


def make_trainer(rows: int = ROWS, *, model_axis: int = 1, policy: str = "f32") -> TrainerConfig:
    """Return the section as a run completes it for the available devices, with microbatches of `rows` rows."""
    config = TrainerConfig(
        id="test",
        model_axis_size=model_axis,
        tensor_parallel_axes=["mlp", "heads"] if model_axis > 1 else None,
        mp=jmp.get_policy(policy),
        tracker=(),
        require_accelerator=False,
    )
    return start_devices(config, rows_per_device=rows * model_axis // jax.device_count())


def make_model(trainer: TrainerConfig, config: LmConfig = LLAMA, *, seed: int = 0) -> LmHeadModel:
    """Return a policy initialized by numpy, which avoids compiling its initializers."""
    rng = np.random.default_rng(seed)

    def fill(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.numpy.asarray(rng.normal(scale=0.3, size=leaf.shape), leaf.dtype)

    shape = PolicySpec(config, VOCAB, trainer).policy
    with trainer.use_device_mesh():
        return hax.shard(jax.tree.map(fill, shape), trainer.parameter_axis_mapping)


def make_example(rows: int = ROWS, positions: int = POSITIONS, vocab: int = VOCAB, *, seed: int = 0) -> RlExample:
    """Return random rows of prompt, answer and padding; the last row is padding only."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(positions // 2, positions + 1, rows)
    lengths[-1] = 0
    at = np.arange(positions)[None]
    mask = (at >= rng.integers(1, positions // 2, rows)[:, None]) & (at < lengths[:, None])
    policy, reference = rng.uniform(-7, -4, (2, rows, positions))
    arrays = {
        "input_ids": np.where(at < lengths[:, None], rng.integers(0, vocab, (rows, positions)), 0).astype(np.int32),
        "loss_mask": mask,
        "segment_ids": (at < lengths[:, None]).astype(np.int32),
        "position_ids": np.where(at < lengths[:, None], at, 0).astype(np.int32),
        "rollout_ids": np.where(at < lengths[:, None], np.arange(rows)[:, None], -1).astype(np.int32),
        "importance_weights": np.where(mask, rng.uniform(0.5, 1.5, mask.shape), 0).astype(np.float32),
        "values": np.where(mask, rng.normal(size=mask.shape), 0).astype(np.float32),
        "returns": np.where(mask, rng.normal(size=mask.shape), 0).astype(np.float32),
        "loss_weights": np.where(mask, rng.uniform(0.5, 1.5, mask.shape) / mask.sum(), 0).astype(np.float32),
        "advantages": np.where(mask, rng.normal(size=(rows, 1)), 0).astype(np.float32),
        "policy_logprobs": np.where(mask, policy, 0).astype(np.float32),
        "reference_logprobs": np.where(mask, reference, 0).astype(np.float32),
    }
    axes = (Axis("batch", rows), Axis("position", positions))
    return RlExample(**{name: hax.named(array, axes) for name, array in arrays.items()})


def one_sequence(ids: Sequence[int], prompt: int) -> RolloutBatch:
    """Return a rollout of one sequence whose tokens after the prompt have loss."""
    turn_ids = np.repeat(np.array([-1, 0], np.int32), [prompt, len(ids) - prompt])
    return make_batch(["test"], [[len(ids)]], input_ids=np.array(ids, np.int32), turn_ids=turn_ids)


def replace_arrays(example: RlExample, **arrays: np.ndarray) -> RlExample:
    axes = example.input_ids.axes
    return dataclasses.replace(example, **{name: hax.named(array, axes) for name, array in arrays.items()})


def split_rows(example: RlExample, parts: int) -> list[RlExample]:
    """Split the rows into microbatches. Rollout ids need not start at 0 in each."""
    rows = example.input_ids.axis_size("batch") // parts

    def rows_from(start: int) -> RlExample:
        return jax.tree.map(
            lambda leaf: leaf["batch", slice(start, start + rows)],
            example,
            is_leaf=lambda leaf: isinstance(leaf, hax.NamedArray),
        )

    return [rows_from(start) for start in range(0, rows * parts, rows)]


def make_loss(*, block_size: int = 5) -> RlLoss:
    """Return a loss with all parts enabled."""
    return RlLoss(PpoClipLossConfig().per_token, LossKlConfig(0.1, KlEstimator.K3), 0.8, block_size)


@dataclasses.dataclass(frozen=True)
class SgdConfig(OptimizerConfig):
    """Plain gradient descent with learning rate 1: the difference of the weights is the gradient."""

    def build(self, num_train_steps: int) -> optax.GradientTransformation:
        return optax.inject_hyperparams(optax.sgd)(learning_rate=1.0)


def adam(learning_rate: float = 1e-2) -> AdamConfig:
    return AdamConfig(learning_rate=learning_rate, lr_schedule="constant", warmup=0, weight_decay=0.0)


def make_learner(trainer: TrainerConfig, *, optimizer: OptimizerConfig | None = None, num_updates: int = 10) -> Learner:
    return Learner(
        trainer, adam() if optimizer is None else optimizer, make_loss(), num_updates=num_updates, capacity=4
    )


def fresh_state(learner: Learner, *, seed: int = 0) -> TrainerState:
    """Return a state with new weights, which steps may donate."""
    model = make_model(learner.trainer, seed=seed)
    return learner.initial_state(model, jax.random.PRNGKey(1))


def loss_and_gradient(
    learner: Learner, microbatches: int = 1
) -> tuple[dict[str, float], dict[str, np.ndarray], TrainerState]:
    """Return metrics of one step of gradient descent, its gradient by parameter, and the new state."""
    state = fresh_state(learner)
    before = arrays_by_path(state.model)
    state, measures = learner.update(state, split_rows(make_example(MESH_ROWS), microbatches))
    measured = {name: float(metric) for name, metric in measures.items()}
    after = arrays_by_path(state.model)
    return measured, {name: before[name] - after[name] for name in before}, state


def arrays_by_path(tree: object) -> dict[str, np.ndarray]:
    """Return every array of a tree on the host, by path."""
    return {
        jax.tree_util.keystr(path): np.array(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(eqx.filter(tree, eqx.is_array))
    }


def placements(tree: object) -> dict[str, tuple[object, bool]]:
    """Return the sharding of every array and whether it is committed, which select the compiled program."""
    return {
        jax.tree_util.keystr(path): (leaf.sharding, leaf.committed)
        for path, leaf in jax.tree_util.tree_leaves_with_path(eqx.filter(tree, eqx.is_array))
    }


@contextlib.contextmanager
def counted_compiles() -> Iterator[list[str]]:
    """Collect an event for every program that is compiled or loaded from the cache within the `with` block."""
    compiled: list[str] = []

    def listen(event: str, _seconds: float, **_: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        monitoring.unregister_event_duration_listener(listen)


def assert_same_bits(found: object, expected: object) -> None:
    left, right = arrays_by_path(found), arrays_by_path(expected)
    assert left.keys() == right.keys()
    for name, array in right.items():
        assert left[name].dtype == array.dtype, name
        assert left[name].tobytes() == array.tobytes(), name


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """Return the functions of this file, which test modules cannot import."""
    return sys.modules[__name__]


@pytest.fixture(scope="module")
def compiled_quickly() -> Iterator[None]:
    """Compile without most optimizations: for many small programs compilation takes longer than execution."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="session")
def trainer() -> TrainerConfig:
    return make_trainer()


@pytest.fixture(scope="session")
def model(trainer: TrainerConfig) -> LmHeadModel:
    """Shared model; do not pass it to a learner, which would donate its arrays."""
    return make_model(trainer)


@pytest.fixture(scope="session")
def learner(trainer: TrainerConfig) -> Learner:
    return make_learner(trainer)
