# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Faults of tools in single episodes: the tool raises, or its subprocess is killed.

Each tool call is one token of the vocabulary, and a warm start trains the policy to produce such calls.
"""

import asyncio
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_run import PROBLEMS, TinyRun
from tests.training.fault_cases import (
    Row,
    ShortRuns,
    assert_nothing_else_is_lost,
    assert_trained,
    is_alive,
    rows_of,
    written,
)

ECHO = """
    import asyncio


    class Echo:
        name = "echo"
        description = "Says ok."
        parameters = {"type": "object", "properties": {}}

        def __init__(self, faults):
            self.faults = faults
            self.episodes = []

        async def call(self, arguments):
            # Every episode runs in a separate asyncio task; faults affect the first call of some of them.
            episode = asyncio.current_task()
            is_first = episode not in self.episodes
            if is_first:
                self.episodes.append(episode)
            fault = self.faults.get(str(self.episodes.index(episode))) if is_first else None
            if fault == "raise":
                raise RuntimeError("the tool broke")
            process = await asyncio.create_subprocess_exec(
                "cat", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
            if fault == "kill":
                process.kill()
            output, _ = await process.communicate(b"ok")
            if process.returncode != 0:
                raise ChildProcessError(f"cat ended with status {process.returncode}")
            return output.decode()
"""

CALLS = [
    "<tool_call>\n" + json.dumps(call) + "\n</tool_call>"
    for call in (
        {"name": "echo", "arguments": {}},
        {"name": "python", "arguments": {"code": "print('ok', end='')"}},
    )
]


def save_tokenizer(folder: Path) -> None:
    """Save the built-in tokenizer with the two calls in place of its two reserved tokens."""
    from transformers import PreTrainedTokenizerFast

    from marin_rl.tokenization.load import byte_tokenizer

    source = json.loads(byte_tokenizer().backend_tokenizer.to_str())
    for token, call in zip(source["added_tokens"][-2:], CALLS, strict=True):
        token |= {"content": call, "special": False}
    file = folder / "tokenizer.json"
    folder.mkdir()
    file.write_text(json.dumps(source))
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token="<|end|>", pad_token="<|pad|>")
    tokenizer.chat_template = byte_tokenizer().chat_template
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> ShortRuns:
    """Runs that start from weights which call tools occasionally."""
    folder = tmp_path_factory.mktemp("tools")
    save_tokenizer(folder / "tokenizer")
    written(folder / "echo.py", ECHO)
    shown = [*CALLS, "1", "2"]
    calling = [{**problem, "worked_answer": shown[at % 4]} for at, problem in enumerate(PROBLEMS)]
    (folder / "calling.jsonl").write_text("".join(f"{json.dumps(problem)}\n" for problem in calling))
    shape = {
        "tokenizer__path": str(folder / "tokenizer"),
        "model__seq_len": 160,
        "rollouts__max_length": 160,
        "rollouts__max_turns": 3,
        "sampling__max_new_tokens": 2,
        "optimizer__learning_rate": 1e-4,
        "sandbox": {"workers": 2, "require": "none"},
    }
    (folder / "warm").mkdir()
    warm = ShortRuns(
        folder / "warm",
        **shape,
        environment=environment(folder),
        num_steps=0,
        warm_start={"max_steps": 40, "batch_size": 8, "learning_rate": 1e-2, "target_accuracy": 1.0, "check_tasks": 1},
    ).run()
    return ShortRuns(folder, **shape, initialize_from=str(warm.path))


def environment(folder: Path, faults: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Questions with both tools; the echo tool fails in the episodes with these numbers."""
    options = {"faults": dict(faults or {})}
    return {
        "type": "tool_use",
        "questions": {
            "type": "jsonl",
            "name": "asked",
            "path": str(folder / "calling.jsonl"),
            "held_out": 0.3,
            "validation": 0.2,
        },
        "tools": [
            {"type": "file", "path": str(folder / "echo.py"), "name": "Echo", "options": options},
            {"type": "python"},
        ],
        "describe": "none",
        "error_reward": -0.5,
    }


@pytest.fixture(scope="module")
def undisturbed(runs: ShortRuns) -> TinyRun:
    run = runs.run(environment=environment(runs.folder))
    assert_trained(run, [{}, {}])
    rows = rows_of(run, 1).values()
    assert sum(measured(row, "tool_calls") for row in rows) > 10
    assert sum(measured(row, "tool_errors") for row in rows) == 0
    return run


def measured(row: Row, name: str) -> float:
    return dict(row["metrics"]).get(name, 0.0)


def answers(row: Row) -> list[str]:
    """Replies of the tools."""
    return [message["content"] for turn in row["turns"] for message in turn["messages"] if message["role"] == "tool"]


@pytest.mark.medium
def test_tool_failure_is_returned_to_the_policy(runs: ShortRuns, undisturbed: TinyRun):
    # At most the first episode that calls it belongs to the preceding evaluation.
    run = runs.run(environment=environment(runs.folder, {"2": "raise", "4": "kill"}))
    assert_trained(run, [{}, {}])
    found = rows_of(run, 1)
    hit = {id: row for id, row in found.items() if measured(row, "tool_errors")}
    errors = sorted(answer for row in hit.values() for answer in answers(row) if answer != "ok")
    assert errors == [
        "Error: echo failed: ChildProcessError: cat ended with status -9",
        "Error: echo failed: RuntimeError: the tool broke",
    ]
    assert [measured(row, "tool_errors") for row in hit.values()] == [1.0, 1.0]
    assert [dict(row["rewards"])["tools"] for row in hit.values()] == [-0.5, -0.5]
    assert run.records()[1]["measured/asked/tool_errors"] == pytest.approx(2 / 16)
    assert run.records()[2]["measured/asked/tool_errors"] == 0
    assert_nothing_else_is_lost(found, rows_of(undisturbed, 1), hit)
    # The rollout gets the error reward and is trained on.
    assert {row["not_trained"] for row in found.values()} == {None}


@pytest.mark.medium
def test_killed_sandbox_worker_fails_one_rollout(
    runs: ShortRuns, undisturbed: TinyRun, monkeypatch: pytest.MonkeyPatch
):
    from marin_rl.rewards.sandbox.processes import list_descendants
    from marin_rl.rewards.sandbox.worker_process import WorkerProcess

    ask = WorkerProcess.ask
    episodes: set[Any] = set()
    killed: list[int] = []

    async def kill_after_two_episodes(self: WorkerProcess, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        episode = asyncio.current_task()
        is_first = "'ok'" in request.get("code", "") and episode not in episodes
        if is_first:
            episodes.add(episode)
        if not is_first or len(episodes) < 3 or killed or not self.is_loaded:
            return await ask(self, request, seconds)
        killed.append(self.pid)
        # The worker is killed while the program runs, so that the call is not repeated in another worker.
        idle = set(list_descendants(self.pid))
        answer = asyncio.ensure_future(ask(self, {**request, "code": "import time; time.sleep(20)"}, seconds))
        while set(list_descendants(self.pid)) <= idle:
            await asyncio.sleep(0.01)
        os.kill(self.pid, signal.SIGKILL)
        return await answer

    monkeypatch.setattr(WorkerProcess, "ask", kill_after_two_episodes)
    run = runs.run(environment=environment(runs.folder))
    assert len(killed) == 1
    assert not is_alive(killed[0])
    assert_trained(run, [{"rollouts/failed": 1.0}, {}])
    found = rows_of(run, 1)
    [lost] = [row for row in found.values() if row["status"] == "failed"]
    assert lost["error"].startswith("RewardCallError: worker: the worker died")
    assert lost["not_trained"] == "failed"
    assert sum(measured(row, "tool_errors") for row in found.values()) == 0
    assert_nothing_else_is_lost(found, rows_of(undisturbed, 1), [lost["id"]])
