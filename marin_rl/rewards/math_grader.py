# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Grading of mathematical answers, in processes with a time limit."""

import re
from typing import Any, ClassVar

from marin_rl.rewards.grading_process import NoAnswerError, ask
from marin_rl.rewards.math_worker import GroundTruthError

_PLAIN_NUMBER = re.compile(r"-?(0|[1-9]\d*)")


class MathVerifyGrader:
    """Grades with `math_verify_match` in grading processes, which are killed if a reply takes too long.

    A reply such as `9**9**9**9` makes sympy compute without end or run out of memory.
    """

    # A reply can take its whole time limit.
    blocks: ClassVar[bool] = True

    def __init__(self, timeout: float):
        self._timeout = timeout

    def check(self, answer: str) -> None:
        """Check that the answer can be parsed."""
        if _PLAIN_NUMBER.fullmatch(answer):
            return
        try:
            self._ask({"answer": answer})
        except NoAnswerError as error:
            raise GroundTruthError(
                f"math_verify cannot read the ground truth {answer!r}: {error}; correct it, or use "
                "`grader: {type: exact}`"
            ) from error

    def read(self, reply: str) -> str | None:
        """Return the final answer of a reply, or None if it has none.

        Raises:
            NoAnswerError: if the reply exceeds the time limit or the memory of a process.
        """
        return self._ask({"reply": reply})["found"]

    def grade(self, reply: str, answer: str) -> float:
        """Return 1 if reply and answer are mathematically equal, else 0.

        Raises:
            NoAnswerError: if the reply exceeds the time limit or the memory of a process.
        """
        if _PLAIN_NUMBER.fullmatch(answer) and reply == answer:
            return 1.0
        return float(self._ask({"reply": reply, "answer": answer})["match"])

    def _ask(self, request: dict[str, str]) -> dict[str, Any]:
        response = ask("marin_rl.rewards.math_worker:open_grader", request, self._timeout)
        if "ground_truth_error" in response:
            raise GroundTruthError(response["ground_truth_error"])
        return response
