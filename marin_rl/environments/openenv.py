# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Environments behind OpenEnv's protocol: a server with a WebSocket session for each episode."""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from marin_rl.environments.base import AbstractEnvironment, EnvironmentConfig
from marin_rl.environments.games import AbstractGameEnvironment, GameConfig, GameEpisode, Opening, Outcome
from marin_rl.types import exact_sum
from marin_rl.utils.errors import UserError
from marin_rl.utils.event_loop import run_in_thread
from marin_rl.utils.output import replace_surrogates
from marin_rl.utils.seeds import derive_seed
from marin_rl.utils.user_code import require_extra

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

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


class OpenEnvSession:
    """A session of the server: one connection with requests and responses in turn."""

    def __init__(self, connection: "ClientConnection") -> None:
        self._connection = connection

    async def request(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a request, `reset` or `step`, and return the data of its response.

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


async def connect(base_url: str) -> OpenEnvSession:
    """Open a session with a server.

    Raises:
        OpenEnvError: if the server does not accept it.
    """
    import websockets
    from websockets.asyncio.client import connect as open_connection

    address = f"{base_url.replace('http', 'ws', 1).rstrip('/')}/ws"
    try:
        # A proxy of the environment is for other hosts; rollouts.max_seconds limits the time of requests.
        connection = await open_connection(address, max_size=_MAX_MESSAGE, ping_interval=None, proxy=None)
    except (OSError, websockets.WebSocketException) as error:
        raise OpenEnvError(f"the OpenEnv server at {base_url} cannot be reached: {error}; start it first") from error
    return OpenEnvSession(connection)


async def fetch_action_schema(base_url: str) -> Any:
    """Return the server's JSON schema of actions.

    Raises:
        OpenEnvError: if the server has none.
    """
    import httpx

    address = f"{base_url.rstrip('/')}/schema"
    try:
        # Like the session, without a proxy of the environment.
        async with httpx.AsyncClient(trust_env=False) as client:
            response = await client.get(address)
            return response.raise_for_status().json()["action"]
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise OpenEnvError(
            f"{address} has no schema of actions ({type(error).__name__}: {str(error).partition(chr(10))[0]}); "
            "set system_prompt to a text that describes them"
        ) from error


@EnvironmentConfig.register_subclass("openenv")
@dataclasses.dataclass(frozen=True)
class OpenEnvConfig(GameConfig):
    """An environment behind a server of OpenEnv's protocol, which is already running.

    The package openenv is needed by the server only; it can be installed in another Python environment.

    Each task is a seed that is passed to the server's `reset`; the same seed must give the same first observation. The
    server needs as many concurrent sessions (`max_concurrent_envs`) as there are episodes at once. The default of
    `system_prompt` is the JSON schema of actions, or no message with `action_field`.
    """

    rewards_success: ClassVar[bool] = False

    base_url: str
    """Address of the server: `http://127.0.0.1:8000`."""
    action_field: str | None = None
    """Field of the action whose value is the reply; null: the reply contains the action as a JSON object."""
    observation_field: str | None = None
    """Field of the observation that is shown; null: all of them as JSON, except `done`, `reward` and `metadata`."""
    reset: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further arguments of the server's `reset`; JSON values."""
    success_at: float = 1.0
    """Sum of the server's rewards from which an episode counts as a success."""

    def __post_init__(self) -> None:
        GameConfig.__post_init__(self)
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url is {self.base_url!r}; it must start with http:// or https://")
        if "seed" in self.reset:
            raise ValueError("reset has 'seed'; each task has its own seed: use the environment's `seed` instead")

    def build(self) -> AbstractEnvironment:
        """Draw the seeds, and ask the server for the first observation of each.

        Raises:
            MissingPackageError: if the package websockets is not installed.
            OpenEnvError: if the server cannot be reached, or does not answer in time.
        """
        require_extra("openenv", "environment.type: openenv")
        splits, starts = self.split(run_in_thread(self._openings()), f"openenv server {self.base_url}")
        return OpenEnvEnvironment(self.label, splits, self, starts)

    async def _openings(self) -> list[Opening]:
        seeds = [derive_seed(self.seed, "openenv", index) % _MAX_SEED for index in range(self.num_tasks)]
        game = OpenEnvGame(self, await connect(self.base_url))
        try:
            shown = {seed: await self._first_observation(game, seed) for seed in dict.fromkeys(seeds)}
        finally:
            await game.close()
        rules = ""
        if self.action_field is None and self.system_prompt is None:
            schema = json.dumps(await fetch_action_schema(self.base_url), ensure_ascii=False)
            rules = f"Reply with an action: a JSON object of this schema.\n{schema}"
        return [Opening(f"{seed}\n{text}", text, (seed, text), rules=rules) for seed, text in shown.items()]

    async def _first_observation(self, game: "OpenEnvGame", seed: int) -> str:
        try:
            async with asyncio.timeout(RESET_SECONDS):
                return await game.reset(seed)
        except TimeoutError as error:
            raise OpenEnvError(
                f"the OpenEnv server at {self.base_url} did not answer reset(seed={seed}) within {RESET_SECONDS:g} s; "
                "check whether it hangs"
            ) from error

    def show(self, response: Mapping[str, Any]) -> str:
        """Return the observation of a response as text, without lone surrogates.

        Raises:
            OpenEnvError: if it does not have the field `observation_field`.
        """
        observation = response["observation"]
        if self.observation_field is None:
            shown = {name: part for name, part in observation.items() if name not in ("done", "reward", "metadata")}
        elif self.observation_field in observation:
            shown = observation[self.observation_field]
        else:
            raise OpenEnvError(
                f"environment {self.label!r}: the observation has no field {self.observation_field!r} "
                f"(observation_field); its fields are {', '.join(observation) or 'none'}"
            )
        return replace_surrogates(shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False))

    def action(self, text: str) -> dict[str, Any]:
        """Return the action in the text of a reply.

        Raises:
            ValueError: if the text contains no JSON object.
            RecursionError: if it is nested too deeply.
        """
        if self.action_field is not None:
            return {self.action_field: replace_surrogates(text)}
        start, end = text.find("{"), text.rfind("}")
        action = json.loads(text[start : end + 1] if start >= 0 else text)
        if not isinstance(action, dict):
            raise ValueError("the reply contains no JSON object")
        return action


class OpenEnvGame:
    """One episode, in a session of the server."""

    def __init__(self, config: OpenEnvConfig, session: OpenEnvSession) -> None:
        self._config = config
        self._session = session
        self._rewards: list[float] = []

    async def reset(self, seed: int) -> str:
        """Start an episode, and return its first observation."""
        return self._config.show(await self._session.request("reset", {**self._config.reset, "seed": seed}))

    async def step(self, action: str) -> Outcome:
        """Send the action in a text; if it is not valid, the policy receives a notice.

        Raises:
            OpenEnvServerError: if the server reports another error, such as an exception of its environment.
        """
        try:
            sent = self._config.action(action)
            response = await self._session.request("step", sent)
        except (ValueError, RecursionError, OpenEnvServerError) as error:
            if isinstance(error, OpenEnvServerError) and error.code != "VALIDATION_ERROR":
                raise
            notice = f"The reply is not a valid action: {error}"
            return Outcome(observation="", action=None, notice=notice, success=self._is_success())
        reward = float(response.get("reward") or 0.0)
        self._rewards.append(reward)
        return Outcome(
            observation=self._config.show(response),
            action=json.dumps(sent),
            reward=reward,
            done=bool(response.get("done")),
            success=self._is_success(),
        )

    def _is_success(self) -> bool:
        return exact_sum(self._rewards) >= self._config.success_at

    async def close(self) -> None:
        """End the session."""
        await self._session.close()


@dataclasses.dataclass(frozen=True)
class OpenEnvEnvironment(AbstractGameEnvironment):
    """Tasks and episodes of an OpenEnv server."""

    config: OpenEnvConfig

    async def begin(self, start: tuple[int, str], seed: int) -> GameEpisode:
        """Open a session and reset it with the task's seed; `seed` is unused, because the server has only one.

        Raises:
            OpenEnvError: if the server does not accept another session, or repeats the task with another observation.
        """
        game = OpenEnvGame(self.config, await connect(self.config.base_url))
        try:
            number, first = start
            if await game.reset(number) != first:
                raise OpenEnvError(
                    f"environment {self.name!r}: reset(seed={number}) of {self.config.base_url} gave another first "
                    "observation than before, so attempts at this task cannot be compared; use a server that "
                    "depends on the seed only"
                )
        except BaseException:
            await game.close()
            raise
        return GameEpisode(self.config, game, self.config.max_steps)
