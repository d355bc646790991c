# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Configs of agents. Their episodes are tested with the server, in tests/serving/openai/test_gateway.py."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from marin_rl.environments.agent import AgentConfig, AgentEnvironment, CommandEpisode, FunctionEpisode, named_rewards
from marin_rl.environments.arithmetic import ArithmeticConfig
from marin_rl.environments.base import AgentConnection
from marin_rl.environments.splits import Split
from marin_rl.utils.user_code import UserFileError
from tests.serving import serving_cases

TASKS = ArithmeticConfig()
CONNECTION = AgentConnection(
    "http://here/v1", "key", "http://here/untrained/v1", "http://here/reward", "r-0", lambda: None
)


def write(folder: Path, text: str) -> str:
    path = folder / "my_agent.py"
    path.write_text(text)
    return str(path)


def test_function_gets_task_address_and_options(tmp_path: Path):
    text = "def play(task, base_url, api_key, bonus): task['messages'][0]['content'] += '!'; return bonus"
    path = write(tmp_path, text)
    config = AgentConfig(tasks=TASKS, path=path, function="play", options={"bonus": 2}, name="mine")
    environment = config.build()
    assert isinstance(environment, AgentEnvironment)
    task = environment.tasks(Split.TRAIN)[0]
    assert task.environment == "mine"
    # An agent may edit its messages.
    given = {"id": task.id, "messages": [dict(message) for message in task.messages], "answer": task.answer, "seed": 5}
    for _ in range(2):
        episode = asyncio.run(environment.start(task, 5))
        assert isinstance(episode, FunctionEpisode)
        assert episode.task == given
        assert asyncio.run(episode.play(CONNECTION)).rewards == {"reward": 2.0}
    with pytest.raises(ValueError, match="environment 'mine' has no task"):
        asyncio.run(environment.start(TASKS.build().tasks(Split.TRAIN)[0], 5))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "needs either path and function"),
        ({"path": "a.py", "function": "play", "command": ("x",)}, "needs either path and function"),
        ({"path": "a.py"}, "function is None; a Python function needs both"),
        ({"command": ("x",), "options": {"a": 1}}, "options are arguments of a function"),
        ({"path": "a.py", "function": "play", "pass_env": ("A",)}, "pass_env is for programs"),
        ({"command": ("x",), "tasks": AgentConfig(tasks=TASKS, command=("x",))}, "tasks.type is 'agent'"),
    ],
)
def test_invalid_configs_are_refused(fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        AgentConfig(**{"tasks": TASKS, **fields})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def other(): pass", "does not define 'play'"),
        ("play = 3", "is int; it must be a function"),
        ("def play(task): pass", "is called with the keyword arguments task, base_url, api_key, but"),
    ],
)
def test_invalid_functions_are_refused(tmp_path: Path, text: str, message: str):
    with pytest.raises(UserFileError, match=message):
        AgentConfig(tasks=TASKS, path=write(tmp_path, text), function="play").build()


def test_rewards():
    assert named_rewards(None) == {}
    assert named_rewards(True) == {"reward": 1.0}
    assert named_rewards({"a-b": 2}) == {"a-b": 2.0}
    for invalid in ("1", float("inf"), 1e31, 10**400, {"a b": 1.0}, {3: 1.0}, {"a": None}):
        with pytest.raises(ValueError, match="reward"):
            named_rewards(invalid)


DAEMON = """
import os, sys

if os.fork():
    while not os.path.lexists(sys.argv[1]):
        pass
    sys.exit()
os.setsid()
os.symlink(str(os.getpid()), sys.argv[1])
while True:
    os.write(1, bytes(4096))
"""


@pytest.mark.medium
def test_a_daemon_of_a_program_keeps_no_pipe(tmp_path: Path):
    pid = tmp_path / "pid"
    episode = CommandEpisode([sys.executable, "-c", DAEMON, str(pid)], (), {})

    async def play() -> None:
        await episode.play(CONNECTION)
        # Its output has no reader any more, so that writing raises an error.
        await asyncio.to_thread(serving_cases.until, lambda: serving_cases.has_ended(int(os.readlink(pid))))

    asyncio.run(play())
