# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses

import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import pytest
from levanter.models.llama import LlamaConfig

from marin_rl.config.sections import EvaluationConfig, RolloutConfig, UpdateConfig, WarmStartConfig
from marin_rl.config.train_config import TrainConfig
from marin_rl.environments.arithmetic import ArithmeticConfig
from marin_rl.learner.critic import CriticConfig
from marin_rl.objectives import GaeConfig
from marin_rl.objectives.kl import LossKlConfig
from marin_rl.objectives.policy_loss import PpoClipLossConfig
from marin_rl.rollouts.config import ResampleGroupsConfig
from marin_rl.sampling.config import SamplingConfig
from marin_rl.training.run_sizes import describe_run
from marin_rl.utils.levanter_line import seq_len

CONFIG = TrainConfig(
    environment=ArithmeticConfig(),
    run_dir="runs/test",
    model=LlamaConfig(**seq_len(64), hidden_dim=16, intermediate_dim=32, num_layers=2, num_heads=2, num_kv_heads=2),
    num_steps=100,
    rollouts=RolloutConfig(prompts_per_step=8, group_size=4, max_length=50, max_turns=3),
    sampling=SamplingConfig(max_new_tokens=6),
    evaluation=EvaluationConfig(every=25, tasks=20),
    logprob_block_size=16,
)


def lines(config: TrainConfig, vocab_size: int = 264, held_out_tasks: int = 20) -> dict[str, str]:
    text = describe_run(config, vocab_size, train_tasks=400, held_out_tasks=held_out_tasks)
    width = text.splitlines()[0].index("  ")
    column = max(len(name) for name in (line[:20].rstrip() for line in text.splitlines()))
    assert width <= column
    return {line.split("  ")[0].strip(): line.split("  ", 1)[1].strip() for line in text.splitlines()}


def test_counts_of_a_run():
    found = lines(CONFIG)
    # Embedding and head 264 x 16 each; a layer has 4 x 16 x 16 of attention, 3 x 16 x 32 of MLP and two norms of 16;
    # one more norm at the end.
    parameters = 2 * 264 * 16 + 2 * (4 * 256 + 3 * 512 + 32) + 16
    assert found["parameters"] == f"{parameters:,}, vocabulary 264"
    assert found["one step"] == "8 prompts x 4 attempts = 32 rollouts"
    assert found["sampled per step"] == "at most 576 tokens"
    assert found["updates per step"].startswith("1 = 1 x 1 ")
    # Rows of 50 tokens are rounded up to 128 positions; 6 rows have 768. A step has 32 rollouts.
    assert found["one microbatch"] == (
        "6 rows x 128 positions = 768 tokens on each data-parallel device, one or several sequences in a row; "
        "32 x 128 on gpu; 32 x 128 on tpu"
    )
    assert found["the run"] == "100 steps, 100 updates, 3,200 rollouts, each of 400 training tasks 2.00 times"
    assert found["logits at a time"].startswith("16 tokens x 264 floats")
    assert found["reference model"] == "not loaded, the KL coefficient is 0"
    assert found["critic"] == "none"


def test_vocabulary_determines_parameters_and_logits():
    found = lines(CONFIG, vocab_size=320)
    plain = int(lines(CONFIG)["parameters"].partition(", vocabulary")[0].replace(",", ""))
    assert found["parameters"] == f"{plain + 2 * (320 - 264) * 16:,}, vocabulary 320"
    assert found["logits at a time"].startswith("16 tokens x 320 floats")


def test_counts_with_several_updates_and_resampling():
    found = lines(
        dataclasses.replace(
            CONFIG,
            updates=UpdateConfig(epochs=2, minibatches=4),
            policy_loss=PpoClipLossConfig(),
            filter=ResampleGroupsConfig(max_batches=3),
        )
    )
    assert found["updates per step"].startswith("8 = 2 x 4 ")
    assert found["the run"].startswith("100 steps, 800 updates, 3,200 rollouts")
    assert found["sampled per step"] == "at most 576 tokens, 3 times that with resampling"


def test_configured_rows_without_packing():
    found = lines(
        dataclasses.replace(
            CONFIG,
            rollouts=dataclasses.replace(CONFIG.rollouts, packing=False),
            trainer=dataclasses.replace(CONFIG.trainer, per_device_parallelism=6),
        )
    )
    assert found["one microbatch"].startswith(
        "6 rows x 50 positions = 300 tokens on each data-parallel device, one sequence"
    )


def test_row_positions_differ_on_gpu_and_tpu():
    model = dataclasses.replace(CONFIG.model, **seq_len(2048))
    found = lines(dataclasses.replace(CONFIG, model=model, rollouts=RolloutConfig(max_length=1100)))
    assert found["one microbatch"].startswith("1 rows x 1,280 positions = 1,280 tokens on each data-parallel device")
    assert found["one microbatch"].endswith("; 7 x 1,152 on gpu; 7 x 1,536 on tpu")


@pytest.mark.parametrize(("shared", "words"), [(True, "one output on the policy's trunk"), (False, "a separate trunk")])
def test_critic_is_described(shared: bool, words: str):
    found = lines(dataclasses.replace(CONFIG, advantage=GaeConfig(), critic=CriticConfig(shared_trunk=shared)))
    assert found["critic"] == words


def test_number_of_evaluations():
    def count(**changes) -> str:
        return lines(dataclasses.replace(CONFIG, **changes))["evaluations"].split(",")[0]

    # Before RL, after 25, 50 and 75 updates, and at the end.
    assert count() == "5"
    assert count(warm_start=WarmStartConfig(max_steps=10)) == "6"
    assert count(evaluation=EvaluationConfig(every=0)) == "2"
    assert count(evaluation=EvaluationConfig(every=30)) == "5"
    assert count(num_steps=0) == "1"
    # Not `evaluation.tasks`, of which there may be fewer.
    assert lines(CONFIG, held_out_tasks=7)["evaluations"] == "5, of 7 held-out tasks"


def test_reference_is_described():
    assert lines(dataclasses.replace(CONFIG, kl=LossKlConfig(beta=0.1)))["reference model"] == "yes"
    assert lines(dataclasses.replace(CONFIG, kl=LossKlConfig(beta=0.0)))["reference model"].startswith("not loaded")


@pytest.mark.parametrize(("size", "tokens"), [(None, "256"), (512, "512"), (4096, "768")])
def test_logit_block_is_at_most_the_microbatch(size: int | None, tokens: str):
    found = lines(dataclasses.replace(CONFIG, logprob_block_size=size))["logits at a time"]
    assert found.startswith(f"{tokens} tokens x 264 floats")
