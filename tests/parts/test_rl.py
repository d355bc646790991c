# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import contextlib
import dataclasses
import json
import threading
from collections.abc import Callable
from pathlib import Path

import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import pytest
from levanter.layers.attention import AttentionBackend

from marin_rl.batching.attention_kernel import attention_kernel
from marin_rl.batching.packing import GroupRow
from marin_rl.config.sections import RolloutConfig
from marin_rl.environments.arithmetic import ArithmeticConfig
from marin_rl.environments.base import EnvironmentConfig, Split, Step
from marin_rl.environments.dataset import JsonlConfig
from marin_rl.environments.random_reward import RandomRewardConfig
from marin_rl.environments.tool_use import ToolUseConfig
from marin_rl.environments.tools import PythonConfig
from marin_rl.objectives.policy_loss import GspoLossConfig, RlooSequenceLossConfig
from marin_rl.parts.rl import RunParts
from marin_rl.rewards.code import CodeRewardConfig
from marin_rl.rewards.component import FunctionRewardConfig, RewardConfigError
from marin_rl.rewards.grading import NoGraderConfig
from marin_rl.rewards.sandbox.config import SandboxConfig
from marin_rl.rollouts.attempt import Limits
from marin_rl.rollouts.run_rollouts import RolloutRunner
from marin_rl.sampling.config import SamplingConfig
from marin_rl.utils.devices.setup import start_devices
from marin_rl.utils.devices.trainer_config import TrainerConfig
from marin_rl.utils.levanter_line import seq_len
from tests.config.small_config import MODEL, config
from tests.scripted_sampler import ScriptedSampler
from tests.training.bare_run import TOKENIZER, make_config


def test_row_length_that_the_platform_does_not_support_is_refused():
    built = config(rollouts=RolloutConfig(max_length=32, row_length=640))
    trainer = TrainerConfig(per_device_parallelism=6)
    assert RunParts(built, trainer).layout.row_length == 640
    with pytest.raises(ValueError, match=r"rollouts.row_length is 640, but splash .* set rollouts.row_length: 1024"):
        built.rollouts.sizes.positions(attention_kernel(MODEL, "tpu"))


def test_trained_model_sets_the_attention_kernel_and_its_block_size():
    trainer = TrainerConfig(per_device_parallelism=6)
    flash = AttentionBackend.JAX_FLASH
    assert RunParts(config(), trainer).model == dataclasses.replace(MODEL, attn_backend=flash)
    long = dataclasses.replace(MODEL, **seq_len(2048))
    trained = RunParts(config(model=long, rollouts=RolloutConfig(max_length=1100)), trainer).model
    assert trained == dataclasses.replace(long, attn_backend=flash, flash_attention_block_size=640)


def test_layout_of_a_microbatch():
    trainer = TrainerConfig(per_device_parallelism=6)
    layout = RunParts(config(), trainer).layout
    shape = (layout.row_length, layout.rows_per_microbatch, layout.packed, layout.whole_rollouts)
    assert shape == (128, 6, True, False)
    for loss in (GspoLossConfig(), RlooSequenceLossConfig()):
        assert RunParts(config(policy_loss=loss), trainer).layout.whole_rollouts


def test_a_layout_is_likely_if_shorter_rollouts_have_it_too():
    # A row of 128 positions has as many rollouts of 64 tokens as two rows of 64, but more of the shorter ones.
    chosen = RolloutConfig(max_length=64, share_prompts=False)
    trainer = start_devices(TrainerConfig(), rows_per_device=6)
    assert RunParts(config(rollouts=chosen), trainer).likely_layout is None
    for packing in (True, False):
        parts = RunParts(config(rollouts=dataclasses.replace(chosen, packing=packing)), trainer)
        assert parts.likely_layout == parts.layout


def test_packing_is_chosen_between_rows_of_both_lengths():
    trainer = start_devices(TrainerConfig(), rows_per_device=6)
    (unpacked,) = RunParts(config(rollouts=RolloutConfig(max_length=32)), trainer).layout.alternatives
    assert (unpacked.row_length, unpacked.rows_per_microbatch, unpacked.packed) == (32, 24, False)
    # Longer rows cost more per position, because of attention.
    layout = RunParts(config(rollouts=RolloutConfig(max_length=32)), trainer).layout
    assert layout.row_cost / 128 > unpacked.row_cost / 32 > 1
    rows = dataclasses.replace(TrainerConfig(), per_device_parallelism=5)
    (unpacked,) = RunParts(config(rollouts=RolloutConfig(max_length=32), trainer=rows), trainer).layout.alternatives
    assert unpacked.rows_per_microbatch == 5
    # There is nothing to choose between rows of one length, or if the config decides.
    for rollouts in (
        RolloutConfig(max_length=32, packing=True),
        RolloutConfig(max_length=32, packing=False),
        RolloutConfig(max_length=32, row_length=64),
    ):
        assert RunParts(config(rollouts=rollouts), trainer).layout.alternatives == ()


@pytest.mark.parametrize(
    ("rollouts", "new_tokens", "backend"),
    [
        (RolloutConfig(max_length=32, share_prompts=False), 8, None),
        (RolloutConfig(max_length=32, packing=False), 8, None),
        (RolloutConfig(max_length=32, row_length=64), 8, None),
        (RolloutConfig(max_length=32), 31, None),  # no room for a prompt
        (RolloutConfig(max_length=900), 400, None),  # one answer in a microbatch
        (RolloutConfig(max_length=1100), 8, None),  # too many scores
        (RolloutConfig(max_length=900), 8, AttentionBackend.SPLASH),  # one answer in a microbatch
    ],
)
def test_rows_without_shared_prompts(rollouts: RolloutConfig, new_tokens: int, backend: AttentionBackend | None):
    model = dataclasses.replace(MODEL, attn_backend=backend, **seq_len(2048))
    limited = config(model=model, rollouts=rollouts, sampling=SamplingConfig(max_new_tokens=new_tokens))
    layout = RunParts(limited, start_devices(TrainerConfig(), rows_per_device=6)).layout
    assert all(alternative.group is None for alternative in (layout, *layout.alternatives))


@pytest.mark.parametrize("packing", [None, True])
def test_rows_with_shared_prompts(packing: bool | None):
    rollouts = RolloutConfig(max_length=32, group_size=4, packing=packing)
    sampling = SamplingConfig(max_new_tokens=8)
    trainer = start_devices(TrainerConfig(), rows_per_device=6)
    layout = RunParts(config(rollouts=rollouts, sampling=sampling), trainer).layout
    groups = layout.alternatives[-1]
    assert len(layout.alternatives) == (2 if packing is None else 1)
    assert groups.group == GroupRow(prompt_length=23, answers=4, answer_length=8)
    assert (groups.row_length, groups.rows_per_microbatch, groups.packed) == (55, 13, True)
    # Its attention has fewer pairs than that of a packed row of the same length.
    assert 55 < groups.row_cost < 55 * layout.row_cost / layout.row_length


def test_rows_with_shared_prompts_have_no_more_positions_than_the_configured_ones():
    """`per_device_parallelism` is chosen for the memory of a device."""
    trainer = dataclasses.replace(TrainerConfig(), per_device_parallelism=5)
    rollouts, sampling = RolloutConfig(max_length=200, group_size=12), SamplingConfig(max_new_tokens=49)
    model = dataclasses.replace(MODEL, **seq_len(256))
    five = config(model=model, rollouts=rollouts, sampling=sampling, trainer=trainer)
    layout = RunParts(five, start_devices(trainer, rows_per_device=6)).layout
    assert (layout.row_length, layout.rows_per_microbatch) == (256, 5)
    groups = layout.alternatives[-1]
    # 12 answers of 49 positions after a prompt of 150 in one row; two such rows have 1,476 positions.
    assert groups.group == GroupRow(prompt_length=150, answers=12, answer_length=49)
    assert groups.rows_per_microbatch == 1
    one = dataclasses.replace(trainer, per_device_parallelism=1)
    layout = RunParts(dataclasses.replace(five, trainer=one), start_devices(one, rows_per_device=6)).layout
    assert layout.alternatives[-1].group == GroupRow(prompt_length=150, answers=2, answer_length=49)


def test_default_logprob_block_depends_on_the_platform():
    trainer = start_devices(TrainerConfig(), rows_per_device=6)
    assert RunParts(config(), trainer).logprob_block == 256
    assert RunParts(config(logprob_block_size=7), trainer).logprob_block == 7


def player_of(**rollouts: object) -> RolloutRunner:
    config = make_config(
        environment=ArithmeticConfig(digits=1, size=50),
        rollouts=RolloutConfig(prompts_per_step=4, group_size=4, max_length=64, **rollouts),
        sampling=SamplingConfig(max_new_tokens=6),
    )
    sampler = ScriptedSampler({}, stop_token_ids=[0])
    return RunParts(config, config.trainer).make_runner(sampler, TOKENIZER.vocab_size)


def test_limits_are_the_configured_ones():
    found = player_of(row_length=64, max_turns=3, max_tokens=20, max_seconds=7.5).limits
    assert found == Limits(max_length=64, max_new_tokens=6, max_turns=3, max_tokens=20, max_seconds=7.5)


def test_event_loop_closes_after_invalid_reward_function(tmp_path: Path):
    reward = FunctionRewardConfig(path=str(tmp_path / "gone.py"), function="length")
    config = make_config(
        environment=ArithmeticConfig(digits=1, size=50, rewards=(reward,)), sandbox=SandboxConfig(workers=1)
    )
    before = set(threading.enumerate())
    with (
        pytest.raises(RewardConfigError, match=r"the file .*gone\.py does not exist"),
        contextlib.ExitStack() as opened,
    ):
        _ = RunParts(config, config.trainer, opened).reward_functions
    assert "episodes" not in {thread.name for thread in set(threading.enumerate()) - before}


@pytest.mark.parametrize(
    "wrap", [lambda inner: inner, RandomRewardConfig, ToolUseConfig], ids=["direct", "random", "tools"]
)
def test_answers_of_all_tasks_are_checked(tmp_path: Path, wrap: Callable[[EnvironmentConfig], EnvironmentConfig]):
    path = tmp_path / "rows.jsonl"
    rows = [
        {
            "id": f"row{index}",
            "prompt": f"Write f{index}.",
            "answer": f'{{"calls": [{{"call": "f{index}(1)", "returns": 2}}]}}',
        }
        for index in range(200)
    ]
    rows[150]["answer"] = '{"calls": [{"call": "f(1", "returns": 2}]}'
    path.write_text("\n".join(map(json.dumps, rows)))
    questions = JsonlConfig(str(path), grader=NoGraderConfig(), rewards=(CodeRewardConfig(),))
    config = make_config(environment=wrap(questions), sandbox=SandboxConfig(workers=1))
    with (
        pytest.raises(RewardConfigError, match=r"task 'row150' .*'f\(1' is not a Python expression"),
        contextlib.ExitStack() as opened,
    ):
        _ = RunParts(config, config.trainer, opened).reward_functions


def test_tools_share_the_sandbox():
    section = ToolUseConfig(questions=ArithmeticConfig(digits=1, size=50), tools=(PythonConfig(),), name="with_python")
    config = make_config(environment=section, sandbox=SandboxConfig(workers=1))
    with contextlib.ExitStack() as opened:
        parts = RunParts(config, config.trainer, opened)
        environment, _ = parts.environment, parts.reward_functions
        call = '<tool_call>\n{"name": "python", "arguments": {"code": "print(6 * 7)"}}\n</tool_call>'

        async def ask() -> Step:
            episode = await environment.start(environment.tasks(Split.TRAIN)[0], seed=0)
            return await episode.step(call)

        step = parts.loop.submit(ask()).result()
    assert not step.done
    assert "42" in step.messages[-1]["content"]
