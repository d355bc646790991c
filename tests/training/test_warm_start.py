# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import numpy as np
import pytest
from levanter.layers.attention import AttentionBackend
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmHeadModel

from marin_rl.batching.packing import RowLayout
from marin_rl.config.sections import WarmStartConfig
from marin_rl.environments.base import Split
from marin_rl.environments.single_turn import SingleTurnEnvironment
from marin_rl.learner.policy_spec import PolicySpec
from marin_rl.rollouts.attempt import Limits
from marin_rl.rollouts.run_rollouts import RolloutRunner
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import byte_tokenizer
from marin_rl.training.warm_start import WarmStartError, warm_start
from marin_rl.types import Message, Task
from marin_rl.utils.devices.setup import start_devices
from marin_rl.utils.devices.trainer_config import TrainerConfig
from marin_rl.utils.host_status import StopRequestedError
from marin_rl.utils.levanter_line import seq_len
from tests.scripted_sampler import ScriptedSampler

END = 257
TOKENIZER = ChatTokenizer(byte_tokenizer())
LLAMA = LlamaConfig(
    **seq_len(16),
    hidden_dim=16,
    intermediate_dim=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    gradient_checkpointing=False,
    attn_backend=AttentionBackend.VANILLA,
)
LAYOUT = RowLayout(row_length=16, rows_per_microbatch=8, packed=False)
CONFIG = WarmStartConfig(
    max_steps=6, batch_size=8, learning_rate=1e-2, target_accuracy=0.5, check_every=2, check_tasks=4
)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> TrainerConfig:
    section = dataclasses.replace(TrainerConfig(), id="test", jax_compilation_cache_dir=None)
    return start_devices(section, rows_per_device=8)


def make_model(trainer: TrainerConfig) -> LmHeadModel:
    rng = np.random.default_rng(0)
    shape = PolicySpec(LLAMA, 264, trainer).policy
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(scale=0.1, size=leaf.shape), leaf.dtype), shape)


def task(name: str, worked: str | None) -> Task:
    return Task(name, "sums", (Message(role="user", content=name),), "7", worked)


def runner(
    train: Sequence[Task], validation: Sequence[Task] | None = None, *, right: int = 0, length: int = 12
) -> RolloutRunner:
    """A runner with a sampler that answers the first `right` validation tasks correctly."""
    checked = [task(f"v{index}", None) for index in range(8)] if validation is None else list(validation)
    environment = SingleTurnEnvironment(
        name="sums",
        splits={Split.TRAIN: list(train), Split.VALIDATION: checked, Split.HELD_OUT: []},
        score=lambda made, reply: float(reply == made.answer),
    )
    good = {TOKENIZER.prompt_tokens(made.messages) for made in checked[:right]}
    sampler = ScriptedSampler(
        lambda request: (ord("7" if request.prompt_tokens in good else "8"), END), stop_token_ids=[END]
    )
    return RolloutRunner(environment, TOKENIZER, sampler, Limits(length, 4, 1))


@dataclasses.dataclass
class Watch:
    """Records the weights and messages that a warm start emits."""

    used: list[np.ndarray] = dataclasses.field(default_factory=list)
    messages: list[str] = dataclasses.field(default_factory=list)

    def update_weights(self, model: LmHeadModel, version: int) -> None:
        assert version == 0
        self.used.append(np.array(model.get_lm_head().array))


def run(
    trainer: TrainerConfig,
    made: RolloutRunner,
    watch: Watch,
    config: WarmStartConfig = CONFIG,
    seed: int = 0,
    layout: RowLayout = LAYOUT,
    stop_requested: Callable[[], bool] = lambda: False,
) -> np.ndarray:
    made.sampler.update_weights = watch.update_weights
    model = warm_start(
        config,
        make_model(trainer),
        made,
        trainer,
        layout,
        seed=seed,
        block_size=4,
        temperature=1.0,
        report=watch.messages.append,
        stop_requested=stop_requested,
    )
    return np.array(model.get_lm_head().array)


WORKED = [task(f"{index}+1", str(index + 1)) for index in range(6)]


@pytest.mark.medium
def test_trains_to_last_step_below_target_accuracy(trainer: TrainerConfig):
    watch = Watch()
    made = runner(WORKED, right=1)
    final = run(trainer, made, watch)
    assert [line.split(":")[0] for line in watch.messages] == ["warm start 2", "warm start 4", "warm start 6"]
    assert all(line.endswith("validation accuracy 0.250") for line in watch.messages)
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in watch.messages]
    assert losses[0] > losses[1] > losses[2]
    # The sampler received the weights of each check; the last ones are returned.
    assert len(watch.used) == 3
    assert np.array_equal(watch.used[-1], final)
    assert not np.array_equal(watch.used[0], final)
    assert {request.temperature for request in made.sampler.requests} == {1.0}
    assert len(made.sampler.requests) == 3 * CONFIG.check_tasks


def test_stops_at_target_accuracy(trainer: TrainerConfig):
    watch = Watch()
    run(trainer, runner(WORKED, right=2), watch)
    assert len(watch.messages) == 1
    assert watch.messages[0].startswith("warm start 2: loss ")
    assert watch.messages[0].endswith("validation accuracy 0.500")


def test_a_requested_stop_ends_it_before_the_next_update(trainer: TrainerConfig):
    watch = Watch()
    with pytest.raises(StopRequestedError):
        run(trainer, runner(WORKED), watch, stop_requested=lambda: len(watch.messages) == 1)
    assert len(watch.messages) == 1


@pytest.mark.medium
def test_last_step_is_checked_and_weights_depend_only_on_seed(trainer: TrainerConfig):
    config = dataclasses.replace(CONFIG, max_steps=3)
    watches = Watch(), Watch(), Watch()
    finals = [run(trainer, runner(WORKED), watch, config, seed) for watch, seed in zip(watches, (0, 0, 1), strict=True)]
    assert [line.split(":")[0] for line in watches[0].messages] == ["warm start 2", "warm start 3"]
    assert np.array_equal(finals[0], finals[1])
    assert not np.array_equal(finals[0], finals[2])


def test_no_worked_answers_raises(trainer: TrainerConfig):
    with pytest.raises(
        WarmStartError, match=r"environment 'sums' has no worked answers or demonstrations .* warm_start.max_steps: 0"
    ):
        run(trainer, runner([task("1+1", None)]), Watch())


def test_no_validation_tasks_raises(trainer: TrainerConfig):
    with pytest.raises(WarmStartError, match=r"no validation tasks .*environment\.validation"):
        run(trainer, runner(WORKED, validation=[]), Watch())


def test_too_long_worked_answers_raise(trainer: TrainerConfig):
    with pytest.raises(WarmStartError, match=r"none of 8 worked answers fits into 7 tokens; raise rollouts.max_len"):
        run(trainer, runner(WORKED, length=7), Watch())


@pytest.mark.medium
def test_packing_and_microbatches_do_not_change_result(trainer: TrainerConfig):
    config = dataclasses.replace(CONFIG, max_steps=2)
    unpacked = run(trainer, runner(WORKED), Watch(), config)
    # Two sequences of six or seven tokens per row, two rows per microbatch: two microbatches for a batch of eight.
    packed = RowLayout(row_length=16, rows_per_microbatch=2, packed=True)
    np.testing.assert_allclose(run(trainer, runner(WORKED), Watch(), config, layout=packed), unpacked, atol=1e-5)
    assert not np.array_equal(unpacked, np.array(make_model(trainer).get_lm_head().array))
