# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import importlib.util
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from marin_rl.environments.base import Split
from marin_rl.environments.textarena import (
    FileOpponentConfig,
    SelfOpponentConfig,
    TextArenaConfig,
    TextArenaEnvironment,
    random_move,
)
from marin_rl.parts.rl import make_gateway
from marin_rl.rollouts.attempt import Limits
from marin_rl.rollouts.run_rollouts import RolloutRunner, run_tasks
from marin_rl.sampling.sampler import SampleRequest
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import byte_tokenizer
from marin_rl.types import RolloutGroup, RolloutStatus
from tests.environments.episodes import play
from tests.scripted_sampler import ScriptedSampler

TOKENIZER = ChatTokenizer(byte_tokenizer())
INSTALLED = importlib.util.find_spec("textarena") is not None
real = pytest.mark.skipif(not INSTALLED, reason="needs the extra textarena")

STAND_INS = str(Path(__file__).with_name("stand_ins"))

OPPONENT = """
def first_free(observation, random):
    board = observation.rpartition("Available Moves:")[2]
    return board.split("'")[1] + " \\ud800 \\x1b[31m" + "x" * 1000


def fail_or_hang(observation, random):
    free = observation.rpartition("Available Moves:")[2]
    while "[5]" not in free:
        pass
    if "[6]" not in free:
        raise OSError("no network")
    return "[8]"


def one(observation, random):
    return "[1]"
"""


@pytest.fixture(scope="module")
def opponents(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("opponents") / "opponents.py"
    path.write_text(OPPONENT)
    return str(path)


@pytest.fixture(scope="module")
def against_first_free(opponents: str) -> Iterator[TextArenaEnvironment]:
    environment = tic_tac_toe(opponent=FileOpponentConfig(opponents, "first_free"), seat=0, max_characters=600)
    yield environment
    environment.server.close()


def tic_tac_toe(**changes) -> TextArenaEnvironment:
    fields = {"id": "TicTacToe-v0", "num_tasks": 6, "held_out": 0.0, "validation": 0.0, **changes}
    environment = TextArenaConfig(**fields).build()
    assert isinstance(environment, TextArenaEnvironment)
    return environment


def roll_out(
    environment: TextArenaEnvironment, reply: Callable[[SampleRequest], list[int]], limits: Limits, group_size: int = 1
) -> tuple[list[RolloutGroup], ScriptedSampler]:
    """Return the rollouts of all training tasks, whose replies a function gives, and its sampler."""
    sampler = ScriptedSampler(reply, stop_token_ids=TOKENIZER.stop_token_ids)
    connect = make_gateway(TOKENIZER, limits, TOKENIZER.vocab_size)
    runner = RolloutRunner(environment, TOKENIZER, sampler, limits, connect=connect)
    tasks = environment.tasks(Split.TRAIN)
    groups = list(run_tasks(runner, tasks, group_size=group_size, temperature=1.0, seed_parts=(0,)))
    runner.loop.close()
    environment.server.close()
    return groups, sampler


@real
def test_opponent_moves_are_part_of_the_observations(against_first_free: TextArenaEnvironment):
    task = against_first_free.tasks(Split.TRAIN)[0]
    assert task.messages[0]["content"].startswith("You are Player 0 in Tic Tac Toe.")
    steps = play(against_first_free, task, ["<think>[0]</think> I take [4].", "[2]", "[6]"])
    # O plays 4, 2 and 6; the opponent plays the first free cells 0 and 1.
    assert [step.action for step in steps] == ["I take [4].", "[2]", "[6]"]
    assert [dict(step.rewards) for step in steps] == [{"game": 0.0}, {"game": 0.0}, {"game": 1.0}]
    assert [step.done for step in steps] == [False, False, True]
    assert steps[-1].metrics == {"steps": 3.0, "invalid_actions": 0.0, "success": 1.0, "draw": 0.0}
    assert steps[-1].rollout_info == {"reason": "Player 0 has won!"}
    shown = steps[0].messages[0]["content"]
    assert "I take" not in shown
    assert "[Player 1] '[0]'" not in shown
    assert "[Player 1] [0] ? \x1b[31mxxx" in shown
    assert shown.endswith("more characters]")


@real
def test_anchor_state_is_the_board(against_first_free: TextArenaEnvironment):
    task = against_first_free.tasks(Split.TRAIN)[0]
    assert task.anchor_state == {"player": 0, "state": {"board": [[""] * 3] * 3}}
    one = play(against_first_free, task, ["[4]", "[8]"])[-1]
    other = play(against_first_free, task, ["[8]", "[4]"])[-1]
    assert one.anchor_state == other.anchor_state
    assert one.messages != other.messages
    # A move that is not possible changes nothing, and loses at the second time.
    first, second = play(against_first_free, task, ["I do not know", "[99]"])
    assert first.anchor_state == task.anchor_state
    assert (first.done, second.done, second.rewards["game"]) == (False, True, -1.0)
    assert [step.action for step in (first, second)] == [None, None]
    assert (second.metrics["invalid_actions"], second.metrics["success"]) == (2.0, 0.0)


@real
def test_equal_tasks_and_seeds_give_equal_games_in_other_processes():
    program = (
        "import asyncio\n"
        "from marin_rl.environments.base import Split\n"
        "from marin_rl.environments.textarena import TextArenaConfig\n"
        "environment = TextArenaConfig('KuhnPoker-v0', num_tasks=4, held_out=0.0, validation=0.0).build()\n"
        "async def play():\n"
        "    for task in environment.tasks(Split.TRAIN):\n"
        "        episode = await environment.start(task, 3)\n"
        "        print([await episode.step('[check]') for _ in range(2)], task)\n"
        "        await episode.close()\n"
        "asyncio.run(play())\n"
    )
    command = [sys.executable, "-c", program]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    one, other = (run.communicate()[0] for run in runs)
    assert one.count("KuhnPoker") >= 4
    assert one == other


@real
def test_seats_and_players():
    second = tic_tac_toe(seat=1, num_tasks=30)
    openings = [task.messages[0]["content"] for task in second.tasks(Split.TRAIN)]
    assert (len(openings), len(set(openings)) > 5) == (30, True)
    assert all("Player 0 placed their symbol (O)" in text for text in openings)
    alone = tic_tac_toe(id="Mastermind-v0", num_players=1, num_tasks=3)
    task = alone.tasks(Split.TRAIN)[0]
    code = " ".join(map(str, task.anchor_state["state"]["secret_code"]))
    [step] = play(alone, task, [f"[{code}]"])
    assert (step.done, step.rewards["game"], step.metrics["success"]) == (True, 1.0, 1.0)
    for environment in (second, alone):
        environment.server.close()
    for changes, message in (
        ({"num_players": 3, "seat": 0}, "number of players"),
        ({"id": "Nim-v0", "seat": 1}, "lists no moves for the random opponent .* use an opponent of type file"),
    ):
        with pytest.raises(ValueError, match=message):
            tic_tac_toe(**changes, num_tasks=1)


@real
@pytest.mark.medium
def test_an_opponent_that_raises_or_hangs_costs_its_own_rollout(opponents: str):
    environment = tic_tac_toe(opponent=FileOpponentConfig(opponents, "fail_or_hang"), seat=0, num_tasks=1)
    moves = iter(["[5]", "[6]", "[0]", "[1]"])

    def reply(request: SampleRequest) -> list[int]:
        return [*next(moves).encode(), *TOKENIZER.stop_token_ids[:1]]

    limits = Limits(max_length=100_000, max_new_tokens=16, max_turns=1, max_seconds=4.0)
    [group], _ = roll_out(environment, reply, limits, group_size=4)
    errors = {rollout.messages[-2 if rollout.error is None else -1]["content"]: rollout for rollout in group.rollouts}
    assert errors["[5]"].status is RolloutStatus.TIMED_OUT
    assert errors["[6]"].status is RolloutStatus.FAILED
    assert str(errors["[6]"].error).startswith("GameError: OSError: no network\n")
    for move in ("[0]", "[1]"):
        assert errors[move].status is RolloutStatus.TRUNCATED


@real
def test_self_play_trains_on_one_seat():
    environment = tic_tac_toe(opponent=SelfOpponentConfig(), num_tasks=4)

    # Player 0 wins with the left column.
    def reply(request: SampleRequest) -> list[int]:
        text = TOKENIZER.decode_reply(request.prompt_tokens, skip_special_tokens=False)
        player = int(text.partition("You are Player ")[2][0])
        move = ([0, 3, 6], [1, 4])[player][text.count("<|assistant|>") - 1]
        return [*f"[{move}]".encode(), *TOKENIZER.stop_token_ids[:1]]

    limits = Limits(max_length=100_000, max_new_tokens=16, max_turns=3, max_tokens=12, max_seconds=600.0)
    tasks = environment.tasks(Split.TRAIN)
    seats = [environment.starts[task.id]["seat"] for task in tasks]
    groups, sampler = roll_out(environment, reply, limits)
    assert set(seats) == {0, 1}
    assert len(sampler.requests) == 5 * len(tasks)
    for seat, [rollout] in zip(seats, (group.rollouts for group in groups), strict=True):
        replies = [turn.messages[-1]["content"] for turn in rollout.turns]
        assert replies == (["[0]", "[3]", "[6]"], ["[1]", "[4]"])[seat]
        assert [turn.starts_sequence for turn in rollout.turns] == [True] + [False] * (len(replies) - 1)
        assert (rollout.status, dict(rollout.rewards)) == (RolloutStatus.COMPLETED, {"game": (1.0, -1.0)[seat]})
        assert dict(rollout.metrics) == {
            "steps": len(replies),
            "success": 1.0 - seat,
            "draw": 0.0,
            "invalid_actions": 0.0,
            "sequences": 1.0,
        }
        # The other player's moves are observations.
        assert all("Player" in turn.messages[0]["content"] for turn in rollout.turns)


@real
def test_a_self_opponent_beyond_the_context_truncates_the_rollout():
    environment = tic_tac_toe(opponent=SelfOpponentConfig(), num_tasks=1, seat=0)
    tasks = environment.tasks(Split.TRAIN)
    # The opponent's first prompt also has the move.
    length = len(TOKENIZER.prompt_tokens(tasks[0].messages)) + 5
    limits = Limits(max_length=length, max_new_tokens=4, max_turns=9, max_seconds=600.0)
    [group], _ = roll_out(environment, lambda request: [*b"[4]", TOKENIZER.stop_token_ids[0]], limits)
    [rollout] = group.rollouts
    assert (rollout.status, dict(rollout.rewards)) == (RolloutStatus.TRUNCATED, {"truncated": 0.0})
    assert [turn.messages[-1]["content"] for turn in rollout.turns] == ["[4]"]


@pytest.fixture(scope="module")
def nim(opponents: str) -> Iterator[TextArenaEnvironment]:
    """A game of a stand-in for the package, against an opponent who takes one coin."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(STAND_INS)
        opponent = FileOpponentConfig(opponents, "one")
        environment = tic_tac_toe(id="Nim-v0", opponent=opponent, seat=0, num_tasks=2, invalid_reward=-0.5)
        yield environment
        environment.server.close()


@pytest.mark.parametrize(
    ("moves", "rewards", "invalid", "reason"),
    [
        (["[1]", "[1]"], [0.0, 1.0], 0.0, "Player 0 won"),
        (["[2]"], [-1.0], 0.0, "Player 1 won"),
        (["[3]", "[1]", "[1]"], [0.0, 0.0, 1.0], 1.0, "Player 0 won"),
        (["[1]", "five", ""], [0.0, 0.0, -1.0], 2.0, "invalid"),
    ],
)
def test_a_stand_in_of_the_package(
    nim: TextArenaEnvironment, moves: list[str], rewards: list[float], invalid: float, reason: str
):
    task = nim.tasks(Split.TRAIN)[0]
    assert task.messages == ({"role": "user", "content": "You are Player 0. Available moves: '[1]', '[2]'"},)
    assert task.anchor_state == {"player": 0, "state": {"coins": 3}}
    steps = play(nim, task, moves)
    assert [step.rewards["game"] for step in steps] == rewards
    refused = [step.action is None for step in steps]
    assert [step.rewards["format"] for step in steps] == [-0.5 if one else 0.0 for one in refused]
    assert [step.done for step in steps] == [False] * (len(moves) - 1) + [True]
    won = float(rewards[-1] == 1.0)
    assert steps[-1].metrics == {"success": won, "steps": len(moves), "invalid_actions": invalid, "draw": 0.0}
    assert steps[-1].rollout_info == {"reason": reason}
    # The opponent's move is shown, the policy's own is not.
    if moves[0] == "[1]":
        assert steps[0].messages[0]["content"] == "[Player 1] [1]"
        assert steps[0].anchor_state == {"player": 0, "state": {"coins": 1}}


def test_a_stand_in_refuses_unknown_games_and_options(nim: TextArenaEnvironment):
    for changes, message in (
        ({"id": "Nimm-v0"}, "no game 'Nimm-v0'; did you mean 'Nim-v0'"),
        ({"id": "Nim-v0", "options": {"size": 4}}, "unexpected keyword argument 'size'"),
        ({"id": "Nim-v0", "options": {"coins": 1}, "seat": 1}, "ended before the first move of seat 1"),
    ):
        with pytest.raises(ValueError, match=message):
            tic_tac_toe(**changes, num_tasks=1)


def test_random_opponents_choose_from_the_last_list():
    text = "Available Moves: '[0]', '[1]'\nPlayer 0 chose [0].\nAvailable moves: '[1]'\nMake a valid move."
    assert {random_move(text, random.Random(seed)) for seed in range(10)} == {"[1]"}
    with pytest.raises(ValueError, match=r"lists no moves .* use an opponent of type file"):
        random_move("Current pile: [3]", random.Random(0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seat": 2}, "seat is 2; with num_players 2 it is 0 to 1"),
        (
            {"opponent": SelfOpponentConfig(), "max_steps": 3, "step_reward": -1.0},
            r"self does not support max_steps, step_reward; .* rollouts\.max_turns",
        ),
    ],
)
def test_invalid_configs_are_refused(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        TextArenaConfig("TicTacToe-v0", **changes)
