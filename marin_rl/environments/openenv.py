# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Environments behind OpenEnv's protocol: a server with a WebSocket session for each episode."""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from marin_rl.config_fields import check_finite
from marin_rl.environments.base import (
    FORMAT,
    AbstractEnvironment,
    AbstractSplitEnvironment,
    EnvironmentConfig,
    Episode,
    Step,
    check_invalid_reward,
)
from marin_rl.environments.external import bounded_text, run_in_thread
from marin_rl.environments.splits import Problem, check_shares, split_problems, without_duplicates
from marin_rl.errors import UserError
from marin_rl.extras import require_extra
from marin_rl.rewards.reply_text import graded_text
from marin_rl.seeds import derive_seed
from marin_rl.types import Message, Task, exact_sum

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

OPENENV = "openenv"
"""Reward component: the server's reward."""

_MAX_SEED = 2**31
_MAX_MESSAGE = 2**24
"""Maximum number of bytes of a response."""
RESET_SECONDS = 300.0
"""Maximum seconds of a `reset` before the run; later ones are limited by `rollouts.max_seconds`."""


class OpenEnvError(UserError):
    """The server cannot be reached, or does not give the same episode for the same seed."""


class OpenEnvServerError(RuntimeError):
    """The server reports an error; the message has its text and code."""

    def __init__(self, text: str, code: str) -> None:
        super().__init__(f"{text} ({code})")
        self.code = code
        """Error code of the protocol."""


@EnvironmentConfig.register_subclass("openenv")
@dataclasses.dataclass(frozen=True)
class OpenEnvConfig(EnvironmentConfig):
    """An environment behind a server of OpenEnv's protocol, which is already running.

    The package openenv is needed by the server only; it can be installed in another Python environment.

    Each task is a seed that is passed to the server's `reset`; the same seed must give the same first observation. The
    server needs as many concurrent sessions (`max_concurrent_envs`) as there are episodes at once.
    """

    base_url: str
    """Address of the server: `http://127.0.0.1:8000`."""
    action_field: str | None = None
    """Field of the action whose value is the reply; null: the reply contains the action as a JSON object."""
    observation_field: str | None = None
    """Field of the observation that is shown; null: all of them as JSON, except `done`, `reward` and `metadata`."""
    reset: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further arguments of the server's `reset`; JSON values."""
    system_prompt: str | None = None
    """System message before the first observation; an empty text omits it. Default: the JSON schema of actions if
    `action_field` is null, no message otherwise."""
    num_tasks: int = 200
    """Number of seeds to draw, over all splits, repetitions included."""
    seed: int = 0
    """Seed of the tasks' seeds. The split of a task does not depend on it."""
    success_at: float = 1.0
    """Sum of rewards from which an episode counts as a success."""
    invalid_reward: float = 0.0
    """Reward of a reply that is not a valid action (component `format`); at most 0."""
    max_characters: int = 8000
    """Maximum number of characters of an observation; the rest is replaced by a notice."""
    held_out: float = 0.1
    """Share of seeds that are held out, by hash of seed and first observation; in [0, 1)."""
    validation: float = 0.05
    """Share of seeds for validation, by hash of seed and first observation; in [0, 1)."""
    name: str = "openenv"
    """Name for metrics."""

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://", "ws://", "wss://")):
            raise ValueError(f"base_url is {self.base_url!r}; it must start with http://, https://, ws:// or wss://")
        for field in ("num_tasks", "max_characters"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")
        if "seed" in self.reset:
            raise ValueError("reset has 'seed'; each task has its own seed: use the environment's `seed` instead")
        check_finite(self, "success_at", "invalid_reward")
        check_invalid_reward(self.invalid_reward)
        check_shares(self.held_out, self.validation)

    def build(self) -> AbstractEnvironment:
        """Draw the seeds, and ask the server for the first observation of each.

        Raises:
            MissingPackageError: if the package websockets is not installed.
            OpenEnvError: if the server cannot be reached, or does not answer in time.
        """
        require_extra("openenv", "environment.type: openenv")
        schema, observations = run_in_thread(self._first_observations())
        source = f"openenv server {self.base_url}"
        problems = without_duplicates(self._problems(self._opening(schema), observations), source)
        splits = split_problems(problems, self.held_out, self.validation, source)
        return OpenEnvEnvironment(self.name, splits, self)

    async def _first_observations(self) -> tuple[Any, dict[int, str]]:
        """Return the schema of actions, and the first observation by seed."""
        draws = (derive_seed(self.seed, "openenv", index) % _MAX_SEED for index in range(self.num_tasks))
        session = await connect(self.base_url)
        try:
            observations = {seed: await self._first_observation(session, seed) for seed in dict.fromkeys(draws)}
        finally:
            await session.close()
        if self.action_field is not None or self.system_prompt is not None:
            return None, observations
        import httpx

        address = self.base_url.replace("ws", "http", 1) if self.base_url.startswith("ws") else self.base_url
        try:
            # Like the session, without a proxy of the environment.
            async with httpx.AsyncClient(trust_env=False) as client:
                response = await client.get(f"{address.rstrip('/')}/schema")
                return response.raise_for_status().json()["action"], observations
        except (httpx.HTTPError, ValueError, LookupError) as error:
            raise OpenEnvError(
                f"environment {self.name!r}: {address}/schema has no schema of actions ({type(error).__name__}: "
                f"{str(error).partition(chr(10))[0]}); set system_prompt to a text that describes them"
            ) from error

    async def _first_observation(self, session: "Session", seed: int) -> str:
        try:
            async with asyncio.timeout(RESET_SECONDS):
                return self.show(await session.request("reset", {**self.reset, "seed": seed}))
        except TimeoutError as error:
            raise OpenEnvError(
                f"the OpenEnv server at {self.base_url} did not answer reset(seed={seed}) within {RESET_SECONDS:g} s; "
                "check whether it hangs"
            ) from error

    def _opening(self, schema: Any) -> tuple[Message, ...]:
        """Return the messages before the first observation."""
        text = self.system_prompt
        if text is None and self.action_field is None:
            text = f"Reply with an action: a JSON object of this schema.\n{json.dumps(schema, ensure_ascii=False)}"
        return (Message(role="system", content=text),) if text else ()

    def _problems(self, opening: tuple[Message, ...], observations: Mapping[int, str]) -> Iterator[Problem]:
        for seed, text in observations.items():
            messages = (*opening, Message(role="user", content=text))
            task = Task(id=str(seed), environment=self.name, messages=messages, answer="")
            yield Problem(f"{seed}\n{text}", task, where=f"seed {seed}")

    def show(self, response: Mapping[str, Any]) -> str:
        """Return the observation of a response as text.

        Raises:
            OpenEnvError: if it does not have the field `observation_field`.
        """
        observation = response["observation"]
        if self.observation_field is None:
            shown = {name: part for name, part in observation.items() if name not in ("done", "reward", "metadata")}
            return bounded_text(json.dumps(shown, ensure_ascii=False), self.max_characters)
        if self.observation_field not in observation:
            raise OpenEnvError(
                f"environment {self.name!r}: the observation has no field {self.observation_field!r} "
                f"(observation_field); its fields are {', '.join(observation) or 'none'}"
            )
        part = observation[self.observation_field]
        text = part if isinstance(part, str) else json.dumps(part, ensure_ascii=False)
        return bounded_text(text, self.max_characters)

    def action(self, reply: str) -> dict[str, Any]:
        """Return the action in a reply.

        Raises:
            ValueError: if the reply contains no JSON object.
            RecursionError: if it is nested too deeply.
        """
        answer = graded_text(reply) or ""
        if self.action_field is not None:
            return {self.action_field: bounded_text(answer.strip(), len(answer))}
        start, end = answer.find("{"), answer.rfind("}")
        action = json.loads(answer[start : end + 1] if start >= 0 else answer)
        if not isinstance(action, dict):
            raise ValueError("the reply contains no JSON object")
        return action


class Session:
    """A session of the server: one connection with requests and responses in turn."""

    def __init__(self, connection: "ClientConnection") -> None:
        self._connection = connection

    async def request(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a request and return the data of its response.

        Args:
            kind: `reset` or `step`.
            data: arguments of the reset, or the action.

        Raises:
            OpenEnvServerError: if the server reports an error.
            OpenEnvError: if the response is not one of the protocol, or the server ended the session.
        """
        from websockets import ConnectionClosed

        try:
            # A server without a free session sends an error and ends the session before the request.
            with contextlib.suppress(ConnectionClosed):
                await self._connection.send(json.dumps({"type": kind, "data": data}))
            text = await self._connection.recv()
        except ConnectionClosed as error:
            raise OpenEnvError(f"the server ended the session during {kind}: {error}") from error
        try:
            response = json.loads(text)
            content = response["data"]
            if response["type"] == "error":
                raise OpenEnvServerError(str(content.get("message")), str(content.get("code")))
            content["observation"].items()
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise OpenEnvError(
                f"the server's response to {kind} is not one of OpenEnv's protocol: {text[:200]!r} "
                f"({type(error).__name__}: {error})"
            ) from error
        return content

    async def close(self) -> None:
        """End the session."""
        await self._connection.close()


async def connect(base_url: str) -> Session:
    """Open a session with a server.

    Raises:
        OpenEnvError: if the server does not accept it.
    """
    import websockets
    from websockets.asyncio.client import connect as open_connection

    address = base_url.replace("http", "ws", 1) if base_url.startswith("http") else base_url
    try:
        # A proxy of the environment is for other hosts; rollouts.max_seconds limits the time of requests.
        connection = await open_connection(
            f"{address.rstrip('/')}/ws", max_size=_MAX_MESSAGE, ping_interval=None, proxy=None
        )
    except (OSError, websockets.WebSocketException) as error:
        raise OpenEnvError(f"the OpenEnv server at {base_url} cannot be reached: {error}; start it first") from error
    return Session(connection)


@dataclasses.dataclass
class OpenEnvEpisode:
    """One session of the server."""

    config: OpenEnvConfig
    session: Session
    rewards: list[float] = dataclasses.field(default_factory=list)
    """The server's rewards of all steps."""
    steps: int = 0
    """Number of replies."""
    invalid: int = 0
    """Number of replies that are not a valid action."""

    async def step(self, reply: str) -> Step:
        """Send the action in a reply; if it is not valid, the policy receives a notice.

        Raises:
            OpenEnvServerError: if the server reports another error, such as an exception of its environment.
        """
        self.steps += 1
        try:
            action = self.config.action(reply)
        except (ValueError, RecursionError) as error:
            return self._invalid(str(error))
        try:
            response = await self.session.request("step", action)
        except OpenEnvServerError as error:
            if error.code != "VALIDATION_ERROR":
                raise
            return self._invalid(str(error))
        reward, done = float(response.get("reward") or 0.0), bool(response.get("done"))
        self.rewards.append(reward)
        messages = (Message(role="user", content=self.config.show(response)),)
        return Step(rewards=self._rewards(reward, 0.0), messages=messages, done=done, metrics=self._metrics())

    async def close(self) -> None:
        """End the session."""
        await self.session.close()

    def _invalid(self, problem: str) -> Step:
        self.invalid += 1
        notice = bounded_text(f"The reply is not a valid action: {problem}", self.config.max_characters)
        return Step(
            rewards=self._rewards(0.0, self.config.invalid_reward),
            messages=(Message(role="user", content=notice),),
            done=False,
            metrics=self._metrics(),
        )

    def _rewards(self, reward: float, format_reward: float) -> dict[str, float]:
        return {OPENENV: reward} | ({FORMAT: format_reward} if self.config.invalid_reward else {})

    def _metrics(self) -> dict[str, float]:
        success = float(exact_sum(self.rewards) >= self.config.success_at)
        return {"success": success, "steps": float(self.steps), "invalid_actions": float(self.invalid)}


@dataclasses.dataclass(frozen=True)
class OpenEnvEnvironment(AbstractSplitEnvironment):
    """Tasks and episodes of an OpenEnv server."""

    config: OpenEnvConfig

    async def start(self, task: Task, seed: int) -> Episode:
        """Open a session and reset it with the task's seed; `seed` is unused, because the server has only one.

        Raises:
            OpenEnvError: if the server does not accept another session, or repeats the task with another observation.
        """
        self.require_own(task)
        session = await connect(self.config.base_url)
        try:
            shown = self.config.show(await session.request("reset", {**self.config.reset, "seed": int(task.id)}))
            if shown != task.messages[-1]["content"]:
                raise OpenEnvError(
                    f"environment {self.name!r}: reset(seed={task.id}) of {self.config.base_url} gave another first "
                    "observation than before, so attempts at this task cannot be compared; use a server that "
                    "depends on the seed only"
                )
        except BaseException:
            await session.close()
            raise
        return OpenEnvEpisode(self.config, session)
