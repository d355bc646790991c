# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Graders: compare a reply with the correct answer, or check its format."""

import abc
import dataclasses
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import draccus
from annotated_types import Gt

from marin_rl.rewards.grading_process import GroundTruthError, NoAnswerError, ask
from marin_rl.rewards.reply_text import check_pattern, search_reply
from marin_rl.utils.settings.checks import ConfigSection, check_fields

_PLAIN_NUMBER = re.compile(r"-?(0|[1-9]\d*)")


@dataclasses.dataclass(frozen=True)
class FormatConfig(ConfigSection):
    """Reward for the format of a reply, independent of its correctness."""

    regex: str
    """Regular expression that the whole reply must match; start it with `(?s)` to let `.` cross lines."""
    weight: float = 1.0
    """Reward for a reply that matches; other replies get 0."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_pattern("format.regex", self.regex)

    def reward(self, reply: str) -> float:
        """Return the reward component `format` of a reply. Blocks while another process searches the reply.

        Raises:
            NoAnswerError: if the search exceeds a limit.

        >>> FormatConfig(regex=r"-?[0-9]+", weight=0.5).reward("46")
        0.5
        """
        return 0.0 if search_reply(self.regex, reply, whole=True) is None else self.weight


@dataclasses.dataclass(frozen=True)
class GraderConfig(ConfigSection, draccus.ChoiceRegistry):
    """A grader or its absence, chosen by `type`."""

    former_names: ClassVar[Mapping[str, str]] = {"math_verify": "math"}
    """Types of earlier versions, with their names now."""


@dataclasses.dataclass(frozen=True)
class Grader(GraderConfig, abc.ABC):
    """Compares replies with ground truths. Thread-safe."""

    blocks: ClassVar[bool]
    """Whether grading can take long and should run in a thread."""

    @abc.abstractmethod
    def check(self, answer: str) -> None:
        """Check that an answer is a usable ground truth.

        Raises:
            GroundTruthError: if it is not; the message names the answer.
        """

    @abc.abstractmethod
    def read(self, reply: str) -> str | None:
        """Return the part of a reply that is compared with the answer, or None if it has none.

        Raises:
            NoAnswerError: if that exceeds a limit.
        """

    @abc.abstractmethod
    def grade(self, reply: str, answer: str) -> float:
        """Return 1 for a correct reply, 0 for any other text.

        The reply is without its thoughts; `answer` is the ground truth.

        Raises:
            GroundTruthError: if the answer is not a usable ground truth.
            NoAnswerError: if the grading of the reply exceeds a limit.
        """


@GraderConfig.register_subclass("exact")
@dataclasses.dataclass(frozen=True)
class ExactConfig(Grader):
    """The reply must equal the answer, except for leading and trailing whitespace."""

    ignore_case: bool = False
    """Whether to ignore case, so that `Paris` equals `paris`."""

    # Comparing two strings is fast.
    blocks: ClassVar[bool] = False

    def check(self, answer: str) -> None:
        """Check that the answer is not empty."""
        if not answer.strip():
            raise GroundTruthError(f"the ground truth {answer!r} is empty; correct the answer column or drop the row")

    def read(self, reply: str) -> str:
        """Return the reply without leading and trailing whitespace."""
        return reply.strip()

    def grade(self, reply: str, answer: str) -> float:
        r"""Return 1 if the reply equals the answer, else 0.

        >>> ExactConfig().grade(" 46\n", "46"), ExactConfig().grade("046", "46")
        (1.0, 0.0)
        """
        self.check(answer)
        if self.ignore_case:
            reply, answer = reply.casefold(), answer.casefold()
        return float(reply.strip() == answer.strip())


@GraderConfig.register_subclass("none")
@dataclasses.dataclass(frozen=True)
class NoGraderConfig(GraderConfig):
    """The reply is not compared with the answer; only the reward components in `rewards` score it."""


@GraderConfig.register_subclass("math")
@dataclasses.dataclass(frozen=True)
class MathGraderConfig(Grader):
    r"""The reply's final answer, as a whole, must equal the answer mathematically (`0.5` is `\frac{1}{2}`).

    The final answer is the last `\boxed{X}`, `<answer>X</answer>`, `#### X` or `final answer is X`; else the last
    `answer is X` or `answer: X`; else the last sentence with one value.
    """

    timeout: Annotated[float, Gt(0)] = 5.0
    """Seconds of CPU time for one reply; a reply that needs more counts as wrong."""

    # A reply can take its whole time limit.
    blocks: ClassVar[bool] = True

    def check(self, answer: str) -> None:
        """Check that the answer can be parsed."""
        if _PLAIN_NUMBER.fullmatch(answer):
            return
        try:
            self._ask({"answer": answer})
        except NoAnswerError as error:
            raise GroundTruthError(
                f"the grader math cannot read the ground truth {answer!r}: {error}; correct it, or use "
                "`grader: {type: exact}`"
            ) from error

    def read(self, reply: str) -> str | None:
        """Return the final answer of a reply, or None if it has none."""
        return self._ask({"reply": reply})["found"]

    def grade(self, reply: str, answer: str) -> float:
        """Return 1 if reply and answer are mathematically equal, else 0."""
        if _PLAIN_NUMBER.fullmatch(answer) and reply == answer:
            return 1.0
        return float(self._ask({"reply": reply, "answer": answer})["match"])

    def _ask(self, request: dict[str, str]) -> dict[str, Any]:
        # In a process that is killed at the time limit: `9**9**9**9` makes sympy compute without end.
        response = ask("marin_rl.rewards.math.worker:open_grader", request, self.timeout)
        if "ground_truth_error" in response:
            raise GroundTruthError(response["ground_truth_error"])
        return response
