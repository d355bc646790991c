# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Training an agent written with the `openai` SDK: synchronous, asynchronous with in-flight weights, and evaluation."""

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from marin_rl.evaluate import EvaluateConfig, run_evaluation
from tests.distributed.thread_workers import thread_workers
from tests.tiny_run import TinyRun, make_run, outcome, without_losses

pytest.importorskip("openai")

AGENT = """
import asyncio
import openai

async def play(task, base_url, api_key):
    http = openai.DefaultAsyncHttpxClient(verify=False)
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http) as client:
        async def ask(*messages):
            response = await client.chat.completions.create(model="policy", messages=messages)
            return response.choices[0].message.content
        question = task["messages"][-1]
        reply = await ask(question)
        said = {"role": "assistant", "content": reply}
        # Two branches and a sub-agent at the same time.
        others = await asyncio.gather(
            ask(question, said, {"role": "user", "content": "a"}),
            ask(question, said, {"role": "user", "content": "bb"}),
            ask({"role": "user", "content": reply + "?"}),
        )
        return {"correct": float("1" in reply), "others": 0.1 * len("".join(others))}
"""


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TinyRun]:
    """Creates runs of the agent that have not started."""
    file = tmp_path_factory.mktemp("agent") / "agent.py"
    file.write_text(AGENT)

    def make_agent_run(**changes: Any) -> TinyRun:
        folder = tmp_path_factory.mktemp("run")
        tasks = {"type": "jsonl", "name": "ones", "path": str(folder / "problems.jsonl"), "held_out": 0.3}
        run = make_run(
            folder,
            model__seq_len=32,
            rollouts={"prompts_per_step": 4, "group_size": 4, "max_length": 32, "max_turns": 4},
            num_steps=2,
            evaluation={"every": 2, "tasks": 8, "samples": 2},
            warm_start={"max_steps": 0},
            checkpoint={"every": 1, "keep_every": 1},
            **changes,
        )
        config = yaml.safe_load(run.config.read_text())
        config["environment"] = {"type": "agent", "path": str(file), "function": "play", "tasks": tasks}
        run.config.write_text(yaml.safe_dump(config))
        return run

    return make_agent_run


@pytest.fixture(scope="module")
def synchronous(make: Callable[..., TinyRun]) -> TinyRun:
    run = make()
    assert run.train() == 0
    return run


@pytest.mark.medium
def test_agent_is_trained_on_exact_tokens(synchronous: TinyRun):
    _, *steps = synchronous.records()
    for record in steps:
        assert record["measured/ones/sequences"] >= 3
        assert record["mismatch/logprob_difference_max"] < 1e-5
        assert record["rollouts/turns"] == 4


@pytest.mark.medium
def test_asynchronous_run_with_in_flight_weights_equals_the_synchronous_one(
    synchronous: TinyRun, make: Callable[..., TinyRun], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("marin_rl.distributed.ray_workers.ray_workers", thread_workers)
    run = make(
        mode="async",
        replay__max_staleness=0,
        workers={"refresh": "in_flight", "decode_steps_per_weight_poll": 1},
    )
    assert run.train() == 0
    assert sequences(run) == sequences(synchronous)
    assert [record["loss/policy_avg"] for record in run.records()[1:]] == pytest.approx(
        [record["loss/policy_avg"] for record in synchronous.records()[1:]], abs=1e-5
    )


@pytest.mark.medium
def test_evaluation_of_a_checkpoint_equals_that_of_the_run(synchronous: TinyRun):
    step, metrics = run_evaluation(EvaluateConfig(run=str(synchronous.path)))
    measured = {name: value for name, value in synchronous.records()[-1].items() if name.startswith("eval/")}
    assert step == 2
    assert without_losses(metrics) == measured


def sequences(run: TinyRun) -> dict[str, list[Any]]:
    """Tokens and versions of the turns of each rollout, in an order that does not depend on concurrent requests."""
    fields = ("observation_tokens", "token_ids", "first_version", "last_version", "starts_sequence")
    return {
        row["id"]: sorted([str([turn[name] for name in fields]) for turn in row["turns"]])
        for rows in outcome(run)["rollouts"].values()
        for row in rows
    }
