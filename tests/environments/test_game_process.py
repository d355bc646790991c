# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from marin_rl.environments.game_process import GameError, GameServer, GameServerError, call_each

FAKE = "tests.environments.fake_games:FakeGame"


@pytest.fixture(scope="module")
def server() -> Iterator[GameServer]:
    server = GameServer(FAKE, "one", "{two: 2}")
    yield server
    server.close()


def has_ended(pid: int) -> bool:
    """Wait until a process has ended."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


def test_a_game_keeps_its_state_and_shares_nothing(server: GameServer):
    async def play() -> tuple[list[int], set[int]]:
        games = [await server.start() for _ in range(3)]
        counts = [await game.call("add", number=index) for _ in range(2) for index, game in enumerate(games)]
        pids = {(await game.call("processes"))[0] for game in games}
        for game in games:
            game.close()
        return counts, pids

    counts, pids = asyncio.run(play())
    assert counts == [0, 1, 2, 0, 2, 4]
    assert len(pids) == 3
    assert os.getpid() not in pids
    assert all(map(has_ended, pids))


def test_the_global_random_state_belongs_to_one_game(server: GameServer):
    async def play(others: int) -> list[float]:
        games = [await server.start() for _ in range(others + 1)]
        for seed, game in enumerate(games):
            await game.call("seed", seed=seed)
        drawn = []
        for _ in range(3):
            drawn.append(await games[0].call("draw"))
            await asyncio.gather(*(game.call("draw") for game in games[1:]))
        for game in games:
            game.close()
        return drawn

    assert asyncio.run(play(0)) == asyncio.run(play(3))
    # The order of sets is the same in every server.
    with contextlib.closing(GameServer(FAKE)) as other:
        assert call_each(server, "order", [{}]) == call_each(other, "order", [{}])


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("fail", r"^KeyError: 'missing'\n  \S+:\d+, in "),
        ("leave", r"^SystemExit: 3\n  \S+:\d+, in "),
        ("jump", "AttributeError: .* has no attribute 'jump'"),
        ("crash", "the game's process ended during crash"),
        ("unserializable", "TypeError: Object of type object is not JSON serializable"),
    ],
)
def test_an_error_names_its_cause_and_other_games_continue(server: GameServer, method: str, message: str):
    async def play() -> int:
        one, other = await server.start(), await server.start()
        with pytest.raises(GameError, match=message):
            await one.call(method)
        count = await other.call("add", number=5)
        one.close()
        other.close()
        return count

    assert asyncio.run(play()) == 5


def test_a_game_that_hangs_is_killed(server: GameServer):
    async def play() -> tuple[int, int]:
        one, other = await server.start(), await server.start()
        pid, _ = await one.call("processes")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(one.call("hang"), timeout=0.05)
        one.close()
        count = await other.call("add", number=5)
        other.close()
        return pid, count

    pid, count = asyncio.run(play())
    assert count == 5
    assert has_ended(pid)


def test_a_game_that_is_closed_can_clean_up(server: GameServer, tmp_path: Path):
    async def play() -> int:
        game = await server.start()
        pid, _ = await game.call("processes")
        playing = asyncio.ensure_future(game.call("clean_up", folder=str(tmp_path)))
        while not (tmp_path / "started").exists():
            await asyncio.sleep(0.01)
        playing.cancel()
        game.close()

        return pid

    assert has_ended(asyncio.run(play()))
    assert not (tmp_path / "started").exists()


async def close_deaf_game(server: GameServer) -> int:
    """Close a game that hangs and ignores SIGTERM; return the id of its process."""
    game = await server.start()
    pid, _ = await game.call("processes")
    await game.call("ignore_end")
    hanging = asyncio.ensure_future(game.call("hang"))
    await asyncio.sleep(0)
    hanging.cancel()
    game.close()
    return pid


@pytest.mark.medium
def test_a_game_that_does_not_end_is_killed_and_delays_no_other(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("marin_rl.environments.game_process.GRACE_SECONDS", 600.0)
    server = GameServer(FAKE)
    pid = asyncio.run(close_deaf_game(server))
    assert call_each(server, "add", [{"number": 5}]) == [5]
    os.kill(pid, signal.SIGKILL)
    server.close()
    monkeypatch.setattr("marin_rl.environments.game_process.GRACE_SECONDS", 0.05)
    assert has_ended(asyncio.run(close_deaf_game(server)))
    server.close()


def test_a_cancelled_start_leaves_other_games_alone(server: GameServer):
    async def play() -> int:
        game, ended = await server.start(), await server.start()
        # The start waits for this lock in a thread, and is cancelled there.
        with server._lock:
            starting = asyncio.ensure_future(server.start())
            await asyncio.sleep(0)
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            # Closing a game does not wait for the lock, which another thread holds while it starts a server.
            ended.close()
        other = await server.start()
        count = await game.call("add", number=5)
        other.close()
        game.close()
        return count

    assert asyncio.run(play()) == 5


def test_calls_are_answered_in_order_also_within_an_event_loop(server: GameServer):
    assert call_each(server, "arguments", [{}]) == [["one", "{two: 2}"]]
    assert call_each(server, "text", [{}]) == ["line\none \ud800"]
    arguments = [{"number": number} for number in range(5)]
    assert call_each(server, "add", arguments) == list(range(5))

    async def inside() -> list[int]:
        return call_each(server, "add", arguments)

    assert asyncio.run(inside()) == list(range(5))
    with pytest.raises(GameError, match="KeyError: 'missing'"):
        call_each(server, "fail", [{}, {}])


@pytest.mark.medium
def test_a_server_that_was_killed_is_replaced():
    server = GameServer(FAKE)

    async def play() -> int:
        first = await server.start()
        _, pid = await first.call("processes")
        os.kill(pid, signal.SIGKILL)
        while True:
            # A game that the dying server was asked for fails.
            second = await server.start()
            try:
                return await second.call("add", number=5)
            except GameError:
                pass
            finally:
                second.close()
                first.close()

    assert asyncio.run(play()) == 5
    server.close()


def test_closing_a_server_ends_its_games():
    server = GameServer(FAKE)

    async def play() -> tuple[int, int]:
        game = await server.start()
        pids = await game.call("processes")
        server.close()
        with pytest.raises(GameError, match="ended"):
            await game.call("draw")
        game.close()
        return tuple(pids)

    assert all(map(has_ended, asyncio.run(play())))


@pytest.mark.medium
def test_a_class_that_cannot_be_imported_is_an_error():
    for name, message in {
        "tests.environments.no_games:Game": "ModuleNotFoundError: No module named 'tests.environments.no_games'",
        "tests.environments.fake_games:Game": "AttributeError: .* has no attribute 'Game'",
    }.items():
        with pytest.raises(GameServerError, match=message):
            call_each(GameServer(name), "add", [{}])
    with pytest.raises(GameError, match="RuntimeError: no board"):
        call_each(GameServer("tests.environments.fake_games:BrokenGame"), "add", [{"number": 1}])
