# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import asyncio
import functools
import itertools
import random
import types

import pytest

from experiments.tasks import self_play, tictactoe, tictactoe_self
from experiments.tasks.kuhn_exploitability import SITUATIONS, exploitability, value
from experiments.tasks.kuhn_poker import DEALS, KuhnPoker
from experiments.tasks.tictactoe_rules import free, opening_boards
from marin_rl.environments.base import Split

ROWS = [{0, 1, 2}, {3, 4, 5}, {6, 7, 8}, {0, 3, 6}, {1, 4, 7}, {2, 5, 8}, {0, 4, 8}, {2, 4, 6}]


def run(environment, task, moves, seed=0):
    """Play fixed moves; return the steps."""

    async def play():
        episode = await environment.start(task, seed)
        return [await episode.step(move) for move in moves]

    return asyncio.run(play())


@functools.cache
def expected(xs: frozenset, os: frozenset, best: bool, draw: float) -> float:
    """Return the expected score of X against the scripted opponent, with the best or with random moves."""
    empty = frozenset(range(9)) - xs - os
    scores = []
    for move in empty:
        x, left = xs | {move}, empty - {move}
        if any(row <= x for row in ROWS):
            scores.append(1.0)
        elif not left:
            scores.append(draw)
        else:
            wins = [[f for f in sorted(left) if any(row <= own | {f} for row in ROWS)] for own in (os, x)]
            answers = next((found[:1] for found in wins if found), sorted(left))
            after = [os | {answer} for answer in answers]
            scores.append(
                sum(
                    0.0
                    if any(row <= o for row in ROWS)
                    else draw
                    if len(left) == 1
                    else expected(x, frozenset(o), best, draw)
                    for o in after
                )
                / len(after)
            )
    return max(scores) if best else sum(scores) / len(scores)


def mean_over_boards(best: bool, draw: float) -> float:
    sets = [[frozenset(i for i in range(9) if board[i] == mark) for mark in "XO"] for board in opening_boards()]
    return sum(expected(xs, os, best, draw) for xs, os in sets) / len(sets)


def test_random_and_best_play_score_as_the_docstring_says():
    scores = [round(mean_over_boards(best, 0.5), 3) for best in (False, True)]
    assert scores == [0.312, 0.886]
    for figure in scores:
        assert f"{figure}" in (tictactoe.__doc__ or "")


@pytest.mark.medium
def test_random_games_have_the_expected_score():
    environment = tictactoe.make()
    task = next(task for split in Split for task in environment.tasks(split) if task.id == "." * 9)
    empty: frozenset = frozenset()
    total, games = 0.0, 4000
    generator = random.Random(1)
    for seed in range(games):
        game = asyncio.run(environment.start(task, seed))
        step = None
        while step is None or not step.done:
            board = (step.messages if step else task.messages)[0]["content"].replace("|", "")
            step = asyncio.run(game.step(str(generator.choice([i + 1 for i in range(9) if board[i] == "."]))))
        total += step.rewards["score"]
    # Five standard errors of a score in [0, 1].
    assert total / games == pytest.approx(expected(empty, empty, best=False, draw=0.5), abs=5 * 0.5 / games**0.5)


@pytest.mark.parametrize("reply", ["", "0", "10", "x", "1 ", "5", "²", "-1"])
def test_invalid_moves_lose(reply):
    environment = tictactoe.make()
    task = next(task for split in Split for task in environment.tasks(split) if task.id[4] == "X")
    (step,) = run(environment, task, [reply])
    assert step.done
    assert step.rewards == {"score": 0.0}


def test_boards_are_in_one_split_and_demonstrations_are_valid_games():
    environment = tictactoe.make()
    ids = [task.id for split in Split for task in environment.tasks(split)]
    assert sorted(ids) == opening_boards()
    assert len(ids) == 829
    for task in environment.tasks(Split.VALIDATION):
        replies = [message["content"] for message in environment.demonstrate(task) if message["role"] == "assistant"]
        steps = run(environment, task, replies, seed=0)
        assert all("reason" not in step.rollout_info for step in steps[:1])


def test_players_of_self_play_see_themselves_as_x():
    game = tictactoe_self.TicTacToe("." * 9)
    assert game.observe() == "...|...|..."
    game.move("5")
    assert (game.seat, game.observe()) == (1, "...|.O.|...")
    game.move("1")
    assert (game.seat, game.observe()) == (0, "O..|.X.|...")
    for move in "3297":
        assert game.scores is None
        game.move(move)
    assert game.scores is None
    game.move("4")
    assert game.observe().count(".") == 2


@pytest.mark.parametrize(
    ("moves", "scores"),
    [("14253", (1.0, 0.0)), ("7192", None), ("512846379", (0.5, 0.5)), ("719253", (0.0, 1.0)), ("11", (1.0, 0.0))],
)
def test_scores_of_self_play(moves, scores):
    game = tictactoe_self.TicTacToe("." * 9)
    for move in moves:
        game.move(move)
    assert game.scores == scores


def test_held_out_games_of_self_play_are_those_of_the_scripted_opponent():
    environment = tictactoe.make()
    for seed, task in enumerate(environment.tasks(Split.HELD_OUT)):
        moves = random.Random(seed)
        game = asyncio.run(environment.start(task, seed))
        same = tictactoe_self.TicTacToe(task.id, random.Random(seed))
        step = None
        while step is None or not step.done:
            # Now and then an invalid move.
            move = str(moves.choice([*free(same.board), 9]) + 1)
            step = asyncio.run(game.step(move))
            same.move(move)
            assert same.board == game.board
        assert same.scores == (step.rewards["score"], 1 - step.rewards["score"])


@pytest.mark.parametrize("split", [Split.TRAIN, Split.HELD_OUT])
def test_the_opponent_is_scripted_from_held_out_boards_only(monkeypatch, split):
    games = []

    async def play_game(game, seat, *_):
        games.append((game, seat))
        return 0.5

    monkeypatch.setattr(tictactoe_self, "self_play", play_game)
    board = tictactoe.make().tasks(split)[0].id
    for seed in range(20):
        asyncio.run(tictactoe_self.play({"id": board, "seed": seed}, "", ""))
    assert {game.opponent is not None for game, _ in games} == {split is Split.HELD_OUT}
    assert {seat for _, seat in games} == ({0} if split is Split.HELD_OUT else {0, 1})


def test_gains_of_kuhn_poker():
    # The pot, by hand: an ante of 1 each, and 1 more for each bet and call.
    gains = {"pp": (1, -1), "bp": (1, 1), "pbp": (-1, -1), "bb": (2, -2), "pbb": (2, -2)}
    for deal, (moves, (high, low)) in itertools.product(DEALS, gains.items()):
        game = KuhnPoker(deal)
        for move in moves:
            assert game.scores is None
            game.move(move)
        gain = high if "JQK".index(deal[0]) > "JQK".index(deal[1]) else low
        assert game.scores == (gain, -gain)


def test_exploitability_of_known_policies():
    assert exploitability(dict.fromkeys(SITUATIONS, 0.5)) == pytest.approx(11 / 24)
    for alpha in (0.0, 0.1, 1 / 3):
        first = {"J": alpha, "Q": 0.0, "K": 3 * alpha, "Jpb": 0.0, "Qpb": alpha + 1 / 3, "Kpb": 1.0}
        second = {"Jp": 1 / 3, "Qp": 0.0, "Kp": 1.0, "Jb": 0.0, "Qb": 1 / 3, "Kb": 1.0}
        bets = first | second
        assert exploitability(bets) == pytest.approx(0.0, abs=1e-12)
        assert value(lambda _, situation: bets[situation]) == pytest.approx(-1 / 18)  # noqa: B023


def test_self_play_trains_one_seat_and_keeps_the_seats_apart(monkeypatch):
    requests = []

    class Client:
        def __init__(self, base_url, **_):
            self.base_url = base_url
            self.chat = types.SimpleNamespace(completions=self)

        async def __aenter__(self):
            return self

        async def __aexit__(self, *_):
            pass

        def with_options(self, base_url):
            return Client(base_url)

        async def create(self, *, messages, model):
            requests.append((self.base_url, [message["content"] for message in messages]))
            reply = "p" if len(requests) == 1 else "b"
            return types.SimpleNamespace(choices=[types.SimpleNamespace(message=types.SimpleNamespace(content=reply))])

    monkeypatch.setattr(self_play.openai, "AsyncOpenAI", Client)
    score = asyncio.run(self_play.self_play(KuhnPoker("QK"), 1, "http://x/1/v1", "key"))
    trained, untrained = "http://x/1/v1", "http://x/1/untrained/v1"
    assert score == 2.0
    assert requests == [(untrained, ["Q:"]), (trained, ["K:p"]), (untrained, ["Q:", "p", "b"])]
