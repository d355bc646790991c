# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Fake of Ray."""

from types import SimpleNamespace
from typing import Any

from ray.actor import ActorHandle


class Actor(ActorHandle):
    """Fake actor handle; a call returns its method and arguments."""

    def __init__(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments, **named: (name, *arguments))

    def __del__(self) -> None:
        pass


class Cluster:
    """Fake of Ray with prepared responses, of which the last is repeated."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.nodes = [{"NodeID": "here" * 8, "Alive": True}, {"NodeID": "there" * 8, "Alive": True}]
        self.questions: list[Any] = []
        self.timeouts: list[float | None] = []

    def get(self, question: Any, timeout: float | None = None) -> Any:
        self.questions.append(question)
        self.timeouts.append(timeout)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer
