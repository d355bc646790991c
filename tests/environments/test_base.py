# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import asyncio
import dataclasses
import json
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.config.decode import decode
from marin_rl.environments import ArithmeticConfig, EnvironmentConfig, FileConfig, Split, TextGameConfig
from marin_rl.environments.base import EpochStream, SingleTurnEnvironment, StreamState, TaskStream
from marin_rl.environments.random_reward import RandomRewardEnvironment
from marin_rl.environments.streams import CurriculumConfig, LessonConfig, MixtureConfig, MixturePartConfig
from marin_rl.rewards.grading import FormatConfig
from marin_rl.types import Message, Task
from marin_rl.user_code import UserFileError
from tests.environments.fake_environments import Cards, CardsConfig, group
from tests.one_reply import answer


def test_worked_answer_is_the_default_demonstration():
    environment = ArithmeticConfig(size=50).build()
    task = environment.tasks(Split.TRAIN)[0]
    assert environment.can_demonstrate(task)
    assert environment.demonstrate(task) == (*task.messages, Message(role="assistant", content=task.answer))
    unworked = dataclasses.replace(task, worked_answer=None)
    assert not environment.can_demonstrate(unworked)
    with pytest.raises(ValueError, match="has no worked answer to imitate"):
        environment.demonstrate(unworked)


def test_games_prefer_their_demonstration_to_the_worked_answer():
    game = TextGameConfig(id="FrozenLake-v1", num_tasks=5, held_out=0.0, validation=0.0).build()
    task = dataclasses.replace(game.tasks(Split.TRAIN)[0], worked_answer="up")
    assert len(game.demonstrate(task)) > len(task.messages) + 1


MIXTURE = MixtureConfig((MixturePartConfig(CardsConfig("a"), 3.0), MixturePartConfig(CardsConfig("b", 7)))).build()
CURRICULUM = CurriculumConfig(
    (
        LessonConfig("first", CardsConfig("a"), window=6, unlock_at=0.5, graduate_at=0.9),
        LessonConfig("second", CardsConfig("b", 7), after=("first",), window=6),
    )
).build()
STREAMS = {
    "one": Cards("a").stream(3),
    "mixture": MIXTURE.stream(3),
    "curriculum": CURRICULUM.stream(3),
}


def score(task: Task, index: int) -> float:
    """Score of an improving policy."""
    return float((index + len(task.id)) % 4 < index // 5)


def play(stream: TaskStream, state: StreamState, rounds: range) -> tuple[list[Task], StreamState]:
    """Draw tasks and update the state in each round."""
    drawn: list[Task] = []
    for index in rounds:
        tasks, state = stream.draw(state, 1 + index % 3)
        drawn += tasks
        state = stream.learn(state, [group(task, score(task, index), 1.0) for task in tasks])
    return drawn, state


@pytest.mark.medium
@pytest.mark.parametrize("name", STREAMS)
@given(cut=st.integers(0, 40))
def test_a_resumed_stream_draws_the_same_tasks(name: str, cut: int):
    stream = STREAMS[name]
    whole, end = play(stream, {}, range(40))
    before, state = play(stream, {}, range(cut))
    # Checkpoints store the state as JSON.
    restored = json.loads(json.dumps(state))
    assert restored == state
    after, again = play(stream, restored, range(cut, 40))
    assert before + after == whole
    assert again == end
    assert stream.metrics(again) == stream.metrics(end)


@pytest.mark.parametrize("name", STREAMS)
def test_draw_and_learn_do_not_mutate_the_state(name: str):
    stream = STREAMS[name]
    _, state = play(stream, {}, range(9))
    before = json.dumps(state)
    tasks, later = stream.draw(state, 4)
    stream.learn(later, [group(task, 1.0) for task in tasks])
    assert json.dumps(state) == before
    assert stream.draw(state, 4) == (tasks, later)


def test_each_epoch_has_every_task_once_in_a_new_order():
    stream = EpochStream(Cards("a", 9), 0)
    drawn, _ = stream.draw({}, 27)
    passes = [[task.id for task in drawn[start : start + 9]] for start in (0, 9, 18)]
    everything = sorted(task.id for task in Cards("a", 9).tasks(Split.TRAIN))
    assert [sorted(one) for one in passes] == [everything] * 3
    assert len({tuple(one) for one in [*passes, everything]}) == 4
    assert EpochStream(Cards("a", 9), 1).draw({}, 27)[0] != drawn


def test_draws_are_independent_of_call_sizes():
    for stream in STREAMS.values():
        whole, end = stream.draw({}, 20)
        state: StreamState = {}
        drawn: list[Task] = []
        for count in (1, 7, 0, 12):
            tasks, state = stream.draw(state, count)
            drawn += tasks
        assert (drawn, state) == (whole, end)


def test_a_control_has_the_stream_of_its_inner_environment():
    for environment in (Cards("a"), MIXTURE, CURRICULUM):
        control = RandomRewardEnvironment(environment.name, environment, 0.5, frozenset())
        assert control.stream(3).draw({}, 20) == environment.stream(3).draw({}, 20)
        assert control.stream(3).parts == environment.stream(3).parts


TASK = Task(id="a", environment="test", messages=(Message(role="user", content="1+1="),), answer="2")


def environment(**fields) -> SingleTurnEnvironment:
    settings = {
        "name": "test",
        "splits": {Split.TRAIN: [TASK], Split.VALIDATION: [], Split.HELD_OUT: []},
        "score": lambda task, reply: float(reply == task.answer),
    }
    return SingleTurnEnvironment(**{**settings, **fields})


def test_one_reply_ends_the_episode():
    step = answer(environment(), TASK, "2")
    assert (step.rewards, step.messages, step.done) == ({"correct": 1.0}, (), True)


def test_format_is_a_separate_component():
    made = environment(format=FormatConfig(regex=r"\d+", weight=0.5))
    assert answer(made, TASK, "3").rewards == {"correct": 0.0, "format": 0.5}
    assert answer(made, TASK, "two").rewards == {"correct": 0.0, "format": 0.0}


@pytest.mark.parametrize("regex", [None, "<a>(.*?)</a>"])
def test_only_the_text_after_the_thoughts_is_scored(regex: str | None):
    made = environment(reply_regex=regex)
    right = "3" if regex is None else "<a>3</a>"
    task = made.tasks(Split.TRAIN)[0]
    scored = [
        made.rewards(dataclasses.replace(task, answer="3"), reply)["correct"]
        for reply in (right, f"<think><a>2</a></think>{right}", f"<think>{right}", f"{right}<think>")
    ]
    assert scored == [1.0, 1.0, 0.0, 0.0]


def test_reply_regex_extracts_the_scored_text():
    made = environment(reply_regex=r"<a>(.*?)</a>", format=FormatConfig(regex=r"<a>.*</a>"))
    assert answer(made, TASK, "<a>2</a>").rewards == {"correct": 1.0, "format": 1.0}
    assert answer(made, TASK, "2").rewards == {"correct": 0.0, "format": 0.0}


def test_exceptions_of_the_grader_propagate():
    def broken(task: Task, reply: str) -> float:
        raise ZeroDivisionError("in the reward")

    with pytest.raises(ZeroDivisionError, match="in the reward"):
        answer(environment(score=broken), TASK, "2")


def test_an_episode_is_used_once():
    async def play_twice() -> None:
        episode = await environment().start(TASK, 0)
        await episode.step("2")
        await episode.step("2")

    with pytest.raises(RuntimeError, match="task 'a': the episode ended"):
        asyncio.run(play_twice())


def test_a_blocking_score_runs_in_a_thread():
    threads = []

    def score(task: Task, reply: str) -> float:
        threads.append(threading.current_thread())
        return 1.0

    for blocks in (False, True):
        answer(environment(score=score, blocks=blocks), TASK, "2")
    assert threads[0] is threading.current_thread()
    assert threads[1] is not threading.current_thread()


def test_a_task_of_another_environment_is_rejected():
    with pytest.raises(ValueError, match="environment 'other' has no task 'a' of 'test'"):
        answer(environment(name="other"), TASK, "2")


FILE = '''
import dataclasses
from marin_rl.environments.arithmetic import ArithmeticConfig
from marin_rl.environments.base import AbstractEnvironment, EnvironmentConfig
from marin_rl.rewards.grading import FormatConfig

@dataclasses.dataclass(frozen=True)
class Sums(EnvironmentConfig):
    """Sums."""
    size: int = 50
    format: FormatConfig | None = None

    def build(self) -> AbstractEnvironment:
        return ArithmeticConfig(size=self.size, digits=1, name="sums", format=self.format).build()

def as_config(size):
    return Sums(size)

def as_environment(size=30):
    return Sums(size).build()

def nothing():
    return None

X = 3
'''


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    return str(file)


@pytest.mark.parametrize(
    ("name", "options", "tasks"),
    [("Sums", {}, 50), ("Sums", {"size": 40}, 40), ("as_config", {"size": 60}, 60), ("as_environment", {}, 30)],
)
def test_classes_and_functions_build_environments(path: str, name: str, options: dict, tasks: int):
    config = decode(EnvironmentConfig, {"type": "file", "path": path, "name": name, "options": options})
    assert config == FileConfig(path, name, options)
    environment = config.build()
    assert environment.name == "sums"
    assert sum(len(environment.tasks(split)) for split in Split) == tasks


def test_options_of_a_class_are_decoded_as_in_the_config(path: str):
    environment = FileConfig(path, "Sums", {"format": {"regex": "[0-9]+", "weight": 0.5}}).build()
    assert environment.format.weight == 0.5


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("X", {}, "'X' of .*mine.py is int; it must be a function"),
        ("nothing", {}, "'nothing' of .*returned NoneType, which is not an environment: extend AbstractEnvironment"),
        ("as_config", {"sise": 3}, "'as_config' of .* rejects options {'sise': 3}: TypeError"),
        ("Sums", {"sise": 3}, "'Sums' of .* rejects options {'sise': 3}: .*sise"),
        ("Sum", {}, "does not define 'Sum'; did you mean 'Sums'"),
    ],
)
def test_invalid_files_and_options_are_rejected(path: str, name: str, options: dict, message: str):
    with pytest.raises(UserFileError, match=message):
        FileConfig(path, name, options).build()
