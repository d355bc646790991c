# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Client of OpenEnv's protocol: sessions with a server, as WebSocket connections."""

import contextlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from marin_rl.utils.errors import UserError

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

_MAX_MESSAGE = 2**24
"""Maximum number of bytes of a response."""


class OpenEnvError(UserError):
    """The server cannot be reached, or does not give the same episode for the same seed."""


class OpenEnvServerError(RuntimeError):
    """The server reports an error; the message has its text and code."""

    def __init__(self, text: str, code: str) -> None:
        super().__init__(f"{text} ({code})")
        self.code = code
        """Error code of the protocol."""


class Session:
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


async def fetch_action_schema(base_url: str) -> Any:
    """Return the server's JSON schema of actions.

    Raises:
        OpenEnvError: if the server has none.
    """
    import httpx

    address = base_url.replace("ws", "http", 1) if base_url.startswith("ws") else base_url
    try:
        # Like the session, without a proxy of the environment.
        async with httpx.AsyncClient(trust_env=False) as client:
            response = await client.get(f"{address.rstrip('/')}/schema")
            return response.raise_for_status().json()["action"]
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise OpenEnvError(
            f"{address}/schema has no schema of actions ({type(error).__name__}: {str(error).partition(chr(10))[0]}); "
            "set system_prompt to a text that describes them"
        ) from error
