# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Episodes of the real package, on the taskset of `experiments/external/verifiers_digits.py`."""

import asyncio
import importlib.util
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import pytest

from marin_rl.batching.processed_rollout import process_rollout
from marin_rl.batching.rollout_batch import sequence_lengths
from marin_rl.environments.base import AgentConnection
from marin_rl.environments.game_process import GameError, GameServerError, call_each
from marin_rl.environments.splits import Split
from marin_rl.environments.verifiers import VerifiersConfig, VerifiersEnvironment, VerifiersEpisode
from marin_rl.parts.rl import make_gateway
from marin_rl.rollouts.attempt import Limits
from marin_rl.rollouts.run_rollouts import RolloutRunner, run_tasks
from marin_rl.sampling.sampler import SampleRequest
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import byte_tokenizer
from marin_rl.types import Rollout, RolloutStatus
from marin_rl.utils.errors import UserError
from tests.scripted_sampler import ScriptedSampler
from tests.serving import serving_cases

real = pytest.mark.skipif(importlib.util.find_spec("verifiers") is None, reason="needs the extra verifiers")

TOKENIZER = ChatTokenizer(byte_tokenizer())
[END] = TOKENIZER.stop_token_ids
EXTERNAL = str(Path(__file__).parents[2] / "experiments" / "external")
AGENT = {"runtime": {"type": "subprocess"}}

TASKSET = """
import os

import verifiers.v1 as vf
from verifiers_digits import DigitData, DigitTask, DigitTaskset, TwoTries

__all__ = ["Digits", "Tries"]

os.environ["TRACES"] = os.path.join(os.path.dirname(__file__), "traces.jsonl")


class Tries(TwoTries):
    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        if data.prompt == "007":
            await runtime.run(["sh", "-c", "echo $$ > $TRACES.pid; exec sleep 1000"], {})
        return await TwoTries.launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data)


class StyledData(DigitData):
    hint: str | None  # It has no default.


class StyledTask(DigitTask, vf.Task[StyledData]):
    @vf.reward(weight=0.5)
    async def style(self, trace: vf.Trace) -> float:
        if trace.last_reply == "!":
            raise OSError("no grader")
        return float(trace.last_reply.isdigit())


class Digits(vf.Taskset[StyledTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        while True:
            for task in DigitTaskset(self.config).load():
                yield StyledTask(StyledData(**task.data.model_dump(), hint=None), self.config.task)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a taskset, a tokenizer, and the traces of verifiers."""
    folder = tmp_path_factory.mktemp("verifiers")
    (folder / "styled_digits.py").write_text(TASKSET)
    byte_tokenizer().save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXTERNAL)
        yield folder


@pytest.fixture(scope="module")
def digits(folder: Path) -> Iterator[VerifiersEnvironment]:
    """Verifiers tokenizes the conversations itself, and its traces are written to a file."""
    environment = build(
        folder,
        env={"agent": AGENT, "taskset": {"task": {"metrics": {"branches": {"fn": "verifiers_digits:record"}}}}},
        client={"type": "train", "renderer_model_name": str(folder)},
    )
    yield environment
    environment.server.close()


def build(folder: Path, taskset: str = "styled_digits", **changes: Any) -> VerifiersEnvironment:
    fields = {"folder": str(folder), "env": {"agent": AGENT}, "num_tasks": 12, "held_out": 0.0, "validation": 0.0}
    environment = VerifiersConfig(taskset, **{**fields, **changes}).build()
    assert isinstance(environment, VerifiersEnvironment)
    return environment


def run(environment: VerifiersEnvironment, replies: Mapping[str, str], max_turns: int = 2) -> dict[str, Rollout]:
    """Play the tasks of these prompts, each with the same reply in every turn; return the rollouts by prompt."""

    def reply(request: SampleRequest) -> tuple[int, ...]:
        prompt = TOKENIZER.decode_reply(request.prompt_tokens, skip_special_tokens=False)
        return (*replies[prompt[len("<|user|>") :][:3]].encode(), END)

    limits = Limits(max_length=40, max_new_tokens=4, max_turns=max_turns, max_seconds=600.0)
    sampler = ScriptedSampler(reply, stop_token_ids=[END])
    connect = make_gateway(TOKENIZER, limits, TOKENIZER.vocab_size)
    runner = RolloutRunner(environment, TOKENIZER, sampler, limits, connect=connect)
    tasks = [task for task in environment.tasks(Split.TRAIN) if task.messages[0]["content"] in replies]
    try:
        groups = run_tasks(runner, tasks, group_size=1, temperature=1.0, seed_parts=(0, "training"))
    finally:
        runner.loop.close()
    return {group.rollouts[0].task.messages[0]["content"]: group.rollouts[0] for group in groups}


@real
@pytest.mark.medium
def test_rewards_and_tokens_are_those_of_verifiers(folder: Path, digits: VerifiersEnvironment):
    task = digits.tasks(Split.TRAIN)[11]
    assert (task.environment, task.messages, task.answer, task.worked_answer) == (
        "styled_digits",
        ({"role": "user", "content": "011"},),
        "1",
        "1",
    )
    rollouts = run(digits, {"001": "0", "002": "x", "010": "23"})
    assert all(rollout.status is RolloutStatus.COMPLETED for rollout in rollouts.values())
    assert {prompt: dict(rollout.rewards) for prompt, rollout in rollouts.items()} == {
        "001": {"correct": 1.0, "style": 0.5},
        "002": {"correct": 0.0, "style": 0.0},
        "010": {"correct": 0.0, "style": 0.5},
    }
    metrics = {"branches": 1.0, "replies": 1.0, "sequences": 1.0, "success": 1.0}
    assert dict(rollouts["001"].metrics) == metrics
    assert dict(rollouts["002"].metrics) == {**metrics, "replies": 2.0, "success": 0.0}
    reported = [json.loads(line) for line in (folder / "traces.jsonl").read_text().splitlines()]
    assert sorted(recorded(rollout) for rollout in rollouts.values()) == sorted(
        tuple(tuple(branch[name]) for name in ("token_ids", "sampled_mask", "logprobs")) for [branch] in reported
    )


def recorded(rollout: Rollout) -> tuple[tuple[int, ...], tuple[bool, ...], tuple[float, ...]]:
    """Return tokens, loss mask and log-probs of a rollout's only sequence, as they are trained on."""
    [length] = sequence_lengths(rollout)
    row = process_rollout(rollout, length=length, pad_token_id=0)
    return (
        tuple(row.input_ids[0].tolist()),
        tuple(row.loss_mask[0].tolist()),
        tuple(row.policy_logprobs[0].tolist()),
    )


@real
@pytest.mark.medium
def test_a_failing_reward_costs_its_own_rollout(digits: VerifiersEnvironment):
    rollouts = run(digits, {"001": "!", "002": "0"})
    assert rollouts["001"].status is RolloutStatus.FAILED
    assert "OSError: no grader" in str(rollouts["001"].error)
    assert rollouts["002"].rewards["correct"] == 1.0


@real
@pytest.mark.medium
def test_a_limit_of_the_run_truncates_the_episode(digits: VerifiersEnvironment):
    rollouts = run(digits, {"001": "x", "002": "0"}, max_turns=1)
    assert [rollouts[prompt].status for prompt in ("001", "002")] == [RolloutStatus.TRUNCATED, RolloutStatus.COMPLETED]
    assert dict(rollouts["001"].rewards) == {"truncated": 0.0}


@real
@pytest.mark.medium
def test_a_cancelled_episode_ends_the_program_of_its_harness(folder: Path, digits: VerifiersEnvironment):
    file = folder / "traces.jsonl.pid"
    [task] = [task for task in digits.tasks(Split.TRAIN) if task.messages[0]["content"] == "007"]

    async def cancel() -> None:
        episode = await digits.start(task, 0)
        address = "http://127.0.0.1:9/v1"
        connection = AgentConnection(address, "key", address, f"{address}/reward", "r-0", lambda: None)
        playing = asyncio.ensure_future(episode.play(connection))
        while not (playing.done() or (file.exists() and file.read_text())):
            await asyncio.sleep(0.01)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    asyncio.run(cancel())
    pid = int(file.read_text())
    serving_cases.until(lambda: serving_cases.has_ended(pid))


@real
@pytest.mark.medium
def test_infinite_and_unknown_tasksets_and_retries_are_refused(folder: Path, digits: VerifiersEnvironment):
    with pytest.raises(GameError, match="the taskset is infinite; set num_tasks"):
        call_each(digits.server, "load", [{"limit": None}])
    with pytest.raises(GameServerError, match="taskset 'no_such' not found"):
        build(folder, "no_such")
    agent = {**AGENT, "retries": {"max_retries": 1}}
    with pytest.raises(GameServerError, match=r"env\.agent\.retries is set; remove it"):
        build(folder, env={"agent": agent})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"taskset": ""}, "taskset is empty"),
        ({"env": {"taskset": {"id": "x"}}}, "env.taskset has 'id'"),
        ({"client": {"base_url": "http://x"}}, "client has base_url, which differ"),
        ({"client": {"type": "train"}}, "set client.renderer_model_name"),
    ],
)
def test_invalid_configs_are_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        VerifiersConfig(**{"taskset": "x", **changes})


class Game:
    """A process of verifiers, and its server, that scores every episode alike."""

    async def start(self) -> "Game":
        return self

    async def call(self, function: str, **arguments: Any) -> dict[str, Any]:
        return {"rewards": {"correct": 0.5, "style": 0.25}, "metrics": {"turns": 2.0}, "info": {}}

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("success_at", "success"), [(0.75, 1.0), (1.0, 0.0)])
def test_success_needs_rewards_of_success_at(success_at: float, success: float):
    game: Any = Game()
    episode = VerifiersEpisode(VerifiersConfig("x", success_at=success_at), game, {})
    connection = AgentConnection("http://x", "key", "http://x", "http://x", "r1", lambda: None)
    assert asyncio.run(episode.play(connection)).metrics == {"turns": 2.0, "success": success}


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[verifiers\]'"):
        VerifiersConfig("x").build()
