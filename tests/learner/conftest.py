# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Tiny models, batches and learners: plain functions, which `mesh_cases.py` imports, and fixtures."""

import dataclasses
import sys
from types import ModuleType

import equinox as eqx
import haliax as hax
import jax
import jmp
import numpy as np
import optax
import pytest
from haliax import Axis
from levanter.distributed import DistributedConfig, RayConfig
from levanter.layers.attention import AttentionBackend
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmConfig, LmHeadModel
from levanter.models.qwen import Qwen3Config
from levanter.optim import AdamConfig, OptimizerConfig
from levanter.trainer import TrainerConfig
from levanter.trainer_state import TrainerState

from marin_rl.batching.rl_example import RlExample
from marin_rl.learner.loss import RlLoss
from marin_rl.learner.policy_model import model_shape
from marin_rl.learner.train_step import Learner
from marin_rl.objectives.kl import KlEstimator, LossKlConfig
from marin_rl.objectives.policy_loss import PpoClipLossConfig

ROWS, POSITIONS, VOCAB = 8, 12, 264
MESH_ROWS = 32
# A wide initial range, so that probabilities are far from uniform and mistakes show.
LLAMA = LlamaConfig(
    seq_len=16,
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
    seq_len=16, hidden_dim=16, intermediate_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, initializer_range=0.3
)


def make_trainer(rows: int = ROWS, *, per_device: int = -1, model_axis: int = 1, policy: str = "f32") -> TrainerConfig:
    """Levanter's section as a run completes it, for the devices at hand."""
    config = TrainerConfig(
        id="test",
        train_batch_size=rows,
        per_device_parallelism=per_device,
        model_axis_size=model_axis,
        tensor_parallel_axes=["mlp", "heads"] if model_axis > 1 else None,
        mp=jmp.get_policy(policy),
        tracker=(),
        require_accelerator=False,
        log_jaxprs=False,
        log_xla_hlo=False,
        distributed=DistributedConfig(initialize_jax_distributed=False),
        ray=RayConfig(auto_start_cluster=False),
    )
    config._initialize_jax_config()
    config._validate_and_set_defaults()
    return config


def make_model(trainer: TrainerConfig, config: LmConfig = LLAMA, *, seed: int = 0) -> LmHeadModel:
    """A policy filled by numpy, which saves compiling its initializers."""
    rng = np.random.default_rng(seed)

    def fill(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.numpy.asarray(rng.normal(scale=0.3, size=leaf.shape), leaf.dtype)

    shape = model_shape(config, Axis("vocab", VOCAB), trainer)
    with trainer.use_device_mesh():
        return hax.shard(jax.tree.map(fill, shape), trainer.parameter_axis_mapping)


def make_example(rows: int = ROWS, positions: int = POSITIONS, vocab: int = VOCAB, *, seed: int = 0) -> RlExample:
    """Random rows of prompt, answer and padding, the last row all padding."""
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
        "loss_weights": np.where(mask, rng.uniform(0.5, 1.5, mask.shape) / mask.sum(), 0).astype(np.float32),
        "advantages": np.where(mask, rng.normal(size=(rows, 1)), 0).astype(np.float32),
        "policy_logprobs": np.where(mask, policy, 0).astype(np.float32),
        "reference_logprobs": np.where(mask, reference, 0).astype(np.float32),
    }
    axes = (Axis("batch", rows), Axis("position", positions))
    return RlExample(**{name: hax.named(array, axes) for name, array in arrays.items()})


def replace_arrays(example: RlExample, **arrays: np.ndarray) -> RlExample:
    axes = example.input_ids.axes
    return dataclasses.replace(example, **{name: hax.named(array, axes) for name, array in arrays.items()})


def make_loss(*, microbatches: int = 1, block_size: int = 5) -> RlLoss:
    """A loss in which every part counts."""
    return RlLoss(PpoClipLossConfig(), LossKlConfig(0.1, KlEstimator.K3), 0.8, block_size, microbatches)


@dataclasses.dataclass(frozen=True)
class SgdConfig(OptimizerConfig):
    """Plain gradient descent with learning rate 1: weights before minus weights after are the gradient."""

    def build(self, num_train_steps: int) -> optax.GradientTransformation:
        return optax.inject_hyperparams(optax.sgd)(learning_rate=1.0)


def adam(learning_rate: float = 1e-2) -> AdamConfig:
    return AdamConfig(learning_rate=learning_rate, lr_schedule="constant", warmup=0, weight_decay=0.0)


def make_learner(
    trainer: TrainerConfig, *, rows: int = ROWS, optimizer: OptimizerConfig | None = None, num_steps: int = 10
) -> Learner:
    loss = make_loss(microbatches=rows // (trainer.microbatch_size or rows))
    return Learner(trainer, adam() if optimizer is None else optimizer, loss, num_steps=num_steps)


def fresh_state(learner: Learner, *, seed: int = 0) -> TrainerState:
    """A state around weights of its own, which steps may donate."""
    model = make_model(learner.trainer.config, seed=seed)
    return learner.initial_state(model, jax.random.PRNGKey(1))


def loss_and_gradient(learner: Learner) -> tuple[dict[str, float], dict[str, np.ndarray], TrainerState]:
    """What one step of gradient descent measures, its gradient by parameter, and the state after it."""
    state = fresh_state(learner)
    before = arrays_by_path(state.model)
    state, measured = learner.step(state, make_example(MESH_ROWS))
    after = arrays_by_path(state.model)
    return measured, {name: before[name] - after[name] for name in before}, state


def arrays_by_path(tree: object) -> dict[str, np.ndarray]:
    """Every array of a tree on the host, by its path."""
    return {
        jax.tree_util.keystr(path): np.array(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(eqx.filter(tree, eqx.is_array))
    }


def assert_same_bits(found: object, expected: object) -> None:
    left, right = arrays_by_path(found), arrays_by_path(expected)
    assert left.keys() == right.keys()
    for name, array in right.items():
        assert left[name].dtype == array.dtype, name
        assert left[name].tobytes() == array.tobytes(), name


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """The functions of this file; test modules cannot import it."""
    return sys.modules[__name__]


@pytest.fixture(scope="session")
def trainer() -> TrainerConfig:
    return make_trainer()


@pytest.fixture(scope="session")
def model(trainer: TrainerConfig) -> LmHeadModel:
    """Shared: never hand it to a learner, which would donate its arrays."""
    return make_model(trainer)


@pytest.fixture(scope="session")
def learner(trainer: TrainerConfig) -> Learner:
    return make_learner(trainer)
