# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Against a server of the test, which speaks OpenEnv's protocol; and, if there is one, against the real package.

The package cannot be installed next to transformers 4. `MARIN_RL_OPENENV_URL` is the address of a server of
`experiments/external/openenv_server.py`, which runs in another Python environment.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from marin_rl.environments.base import Split
from marin_rl.environments.openenv import OpenEnvConfig, OpenEnvEnvironment, OpenEnvError, OpenEnvServerError
from marin_rl.types import Task
from tests.environments.episodes import play

ANSWERS = {"seed": -1}
"""Changed by tests: `seed` replaces the seed of resets if it is not negative."""


def respond(message: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """Respond as a guessing game: the number to guess is drawn by the seed."""
    if message["type"] == "reset":
        seed = message["data"]["seed"] if ANSWERS["seed"] < 0 else ANSWERS["seed"]
        state["secret"] = random.Random(seed).randrange(10)
        observation = {
            "text": f"Guess {message['data'].get('what', 'a number')}. Game {seed}.",
            "tries": 0,
            "metadata": {},
        }
        return {"type": "observation", "data": {"observation": observation, "reward": None, "done": False}}
    number = message["data"].get("number")
    if not isinstance(number, int):
        return {"type": "error", "data": {"message": "number must be an integer", "code": "VALIDATION_ERROR"}}
    if number < 0:
        return {"type": "error", "data": {"message": "broken", "code": "EXECUTION_ERROR"}}
    right = number == state["secret"]
    observation = {"text": "right" if right else "wrong \ud800" + "x" * 200, "tries": 1, "metadata": {}}
    return {"type": "observation", "data": {"observation": observation, "reward": float(right), "done": right}}


async def serve(connection) -> None:
    state: dict[str, Any] = {}
    async for text in connection:
        message = json.loads(text)
        if message["data"].get("what") == "no answer":
            await connection.wait_closed()
        elif message["data"].get("number") == 77:
            await connection.send("[]")
        elif message["data"].get("number") == 88:
            await connection.close()
        else:
            await connection.send(json.dumps(respond(message, state)))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    listen = pytest.importorskip("websockets.asyncio.server", reason="needs the extra openenv").serve
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start():
        return await listen(serve, "127.0.0.1", 0)

    server = asyncio.run_coroutine_threadsafe(start(), loop).result()
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def stop() -> None:
        server.close()
        await server.wait_closed()

    asyncio.run_coroutine_threadsafe(stop(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


class StandInSession:
    """A session without a connection, for machines without the package websockets."""

    def __init__(self) -> None:
        self._state: dict[str, Any] = {}

    async def request(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        response = respond({"type": kind, "data": data}, self._state)
        if response["type"] == "error":
            raise OpenEnvServerError(response["data"]["message"], response["data"]["code"])
        return response["data"]

    async def close(self) -> None:
        self._state.clear()


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> str:
    """Address of stand-in sessions."""

    async def connect(base_url: str) -> StandInSession:
        return StandInSession()

    monkeypatch.setattr("marin_rl.environments.openenv.connect", connect)
    monkeypatch.setattr("marin_rl.environments.openenv.require_extra", lambda extra, setting: None)
    return "http://stand-in"


@pytest.fixture(params=["stand_in", "url"])
def either(request: pytest.FixtureRequest) -> str:
    """Address of a server, or of stand-in sessions."""
    return request.getfixturevalue(request.param)


def build(url: str, **changes) -> OpenEnvEnvironment:
    fields = {
        "base_url": url,
        "num_tasks": 6,
        "observation_field": "text",
        "system_prompt": "",
        "held_out": 0.0,
        "validation": 0.0,
        **changes,
    }
    environment = OpenEnvConfig(**fields).build()
    assert isinstance(environment, OpenEnvEnvironment)
    return environment


def guess(number: object) -> str:
    return f"<think>{{}}</think> I guess {json.dumps({'number': number})}."


def seed_of(environment: OpenEnvEnvironment, task: Task) -> int:
    return environment.starts[task.id][0]


def secret(environment: OpenEnvEnvironment, task: Task) -> int:
    return random.Random(seed_of(environment, task)).randrange(10)


def test_episodes(either: str):
    environment = build(either, reset={"what": "a digit"}, max_characters=50, invalid_reward=-0.25)
    assert [task.messages for task in environment.tasks(Split.TRAIN)] == [
        ({"role": "user", "content": f"Guess a digit. Game {seed_of(environment, task)}."},)
        for task in environment.tasks(Split.TRAIN)
    ]
    task = environment.tasks(Split.TRAIN)[0]
    wrong = (secret(environment, task) + 1) % 10
    steps = play(environment, task, [guess(wrong), "five", guess("five"), "[5]", guess(secret(environment, task))])
    assert [dict(step.rewards) for step in steps] == [
        {"game": 0.0, "format": 0.0},
        *[{"game": 0.0, "format": -0.25}] * 3,
        {"game": 1.0, "format": 0.0},
    ]
    assert [step.done for step in steps] == [False] * 4 + [True]
    assert steps[0].messages[0]["content"] == "wrong ?" + "x" * 43 + "\n[157 more characters]"
    for step in steps[1:4]:
        assert step.messages[0]["content"].startswith("The reply is not a valid action: ")
    assert steps[-1].metrics == {"success": 1.0, "steps": 5.0, "invalid_actions": 3.0}

    async def beside_another() -> list[bool]:
        """Sessions are separate."""
        tasks = environment.tasks(Split.TRAIN)[:2]
        episodes = [await environment.start(one, 0) for one in tasks]
        right = [guess(secret(environment, one)) for one in tasks]
        done = [(await episode.step(reply)).done for episode, reply in zip(episodes, right, strict=True)]
        for episode in episodes:
            await episode.close()
        return done

    assert asyncio.run(beside_another()) == [True, True]


@pytest.mark.parametrize(("success_at", "success"), [(1.0, 1.0), (1.25, 0.0)])
def test_success_needs_rewards_of_success_at(stand_in: str, success_at: float, success: float):
    environment = build(stand_in, success_at=success_at)
    task = environment.tasks(Split.TRAIN)[0]
    *_, last = play(environment, task, [guess(secret(environment, task))])
    assert (last.rewards["game"], last.metrics["success"]) == (1.0, success)


@pytest.mark.parametrize(
    ("number", "error", "message"),
    [
        (-1, OpenEnvServerError, r"broken \(EXECUTION_ERROR\)"),
        (77, OpenEnvError, "the server's response to step is not one of OpenEnv's protocol"),
        (88, OpenEnvError, "the server ended the session during step"),
    ],
)
def test_an_error_of_the_server_fails_the_rollout(url: str, number: int, error: type, message: str):
    environment = build(url, num_tasks=1)
    with pytest.raises(error, match=message):
        play(environment, environment.tasks(Split.TRAIN)[0], [guess(number)])


def test_a_server_that_ignores_seeds_is_refused(either: str, monkeypatch: pytest.MonkeyPatch):
    environment = build(either)
    monkeypatch.setitem(ANSWERS, "seed", 5)
    with pytest.raises(OpenEnvError, match="gave another first observation than before"):
        play(environment, environment.tasks(Split.TRAIN)[0], [])


def test_observations_and_actions_in_one_field(stand_in: str):
    config = OpenEnvConfig(stand_in, action_field="message", observation_field="text")
    assert config.action("b \ud800") == {"message": "b ?"}
    assert config.action("") == {"message": ""}
    with pytest.raises(RecursionError):
        dataclasses.replace(config, action_field=None).action("[" * 100_000)
    assert config.show({"observation": {"text": [1, "ä"]}}) == '[1, "ä"]'
    everything = OpenEnvConfig(stand_in)
    assert everything.show({"observation": {"text": "a", "n": 1, "done": False, "reward": 0, "metadata": {}}}) == (
        '{"text": "a", "n": 1}'
    )
    with pytest.raises(OpenEnvError, match=r"no field 'message' \(observation_field\); its fields are text, tries"):
        build(stand_in, observation_field="message")


def test_a_server_that_does_not_answer_as_one_of_openenv_is_named(url: str, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(OpenEnvError, match=r"has no schema of actions .* set system_prompt"):
        build(url, system_prompt=None)
    with pytest.raises(OpenEnvError, match=r"http://127\.0\.0\.1:9 cannot be reached"):
        build("http://127.0.0.1:9")
    monkeypatch.setattr("marin_rl.environments.openenv.RESET_SECONDS", 0.05)
    with pytest.raises(OpenEnvError, match=rf"server at {url} did not answer reset\(seed=\d+\) within 0\.05 s"):
        build(url, reset={"what": "no answer"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_url": "127.0.0.1:8000"}, "must start with http://"),
        ({"reset": {"seed": 1}}, "reset has 'seed'"),
    ],
)
def test_invalid_configs_are_refused(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        OpenEnvConfig(**{"base_url": "http://127.0.0.1:8000", **changes})


@pytest.mark.skipif("MARIN_RL_OPENENV_URL" not in os.environ, reason="needs a server in MARIN_RL_OPENENV_URL")
def test_the_real_package():
    environment = build(os.environ["MARIN_RL_OPENENV_URL"], system_prompt=None, num_tasks=20)
    task = environment.tasks(Split.TRAIN)[0]
    assert '"number"' in task.messages[0]["content"]
    right = secret(environment, task)
    steps = play(environment, task, [guess((right + 1) % 10), guess("five"), "five", guess(right)])
    assert [step.done for step in steps] == [False, False, False, True]
    assert steps[-1].metrics == {"success": 1.0, "steps": 4.0, "invalid_actions": 2.0}
    with pytest.raises(OpenEnvServerError, match=r"negative numbers break this environment"):
        play(environment, task, [guess(-1)])

    async def too_many() -> None:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(5):
                stack.push_async_callback((await environment.start(task, 0)).close)

    with pytest.raises(OpenEnvServerError, match="CAPACITY_REACHED"):
        asyncio.run(too_many())
