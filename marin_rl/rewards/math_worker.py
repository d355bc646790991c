# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Mathematical equality of a reply and an answer, and the process that decides it under a limit.

Run as a script this is the worker behind [`MathVerifyGrader`][marin_rl.rewards.grading.MathVerifyGrader]:
JSON requests on standard input, JSON answers on standard output. It imports nothing else of marin_rl.
"""

import functools
import json
import logging
import os
import signal
import sys
from typing import Any, TextIO

MEMORY_LIMIT = 4 * 2**30
"""Bytes of address space that the worker may take: `9**9**9` asks for more than any machine has."""


class GroundTruthError(ValueError):
    """An answer that no reply can be compared with; the message names it."""


def math_verify_match(reply: str, answer: str) -> bool:
    r"""Whether a reply ends in the same mathematical object as the answer, as math-verify sees it.

    The reply may hold any text; the last expression in it counts, boxed ones first. Expressions are
    simplified, so the text `12+34` equals 46: give tasks that *are* an expression to `exact_match`.

    math-verify's own time limit uses signals, which work only in the main thread and cannot interrupt
    a single large power, so it is switched off here: this function works in any thread, and may run
    for as long as sympy likes. `MathVerifyGrader` runs it in a process that is ended at a limit.

    Args:
        reply: the model's text, whatever it is.
        answer: the ground truth, in LaTeX or plain: `42`, `\frac{1}{2}`, `(1, 2)`.

    Returns:
        True where both are equal; False also where the reply holds nothing that can be parsed.

    Raises:
        GroundTruthError: if the answer cannot be parsed.

    References:
        Kydlíček, math-verify 0.9.0, `parser.parse` and `grader.verify`.
    """
    from math_verify import parse, verify

    gold = parse_answer(answer)
    if reply.strip() == answer.strip():
        # A word is no expression to math-verify, not even where it is the answer.
        return True
    return verify(list(gold), parse(reply, parsing_timeout=_NO_TIMEOUT), timeout_seconds=_NO_TIMEOUT)


# 0 switches math-verify's timeout off, as None does, and fits the declared type.
_NO_TIMEOUT = 0


@functools.lru_cache(maxsize=4096)
def parse_answer(answer: str) -> tuple[Any, ...]:
    """The ground truth as math-verify's expressions, at least one of them truly parsed.

    Raises:
        GroundTruthError: if it cannot be parsed.
    """
    from math_verify import parse

    # math-verify warns that its timeout is off, and then at every reply it cannot parse.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # Without an anchor math-verify takes only plain numbers; a bare `\sqrt{2}` needs its dollars.
    anchored = answer if "$" in answer or "\\boxed" in answer else f"${answer}$"
    found = parse(anchored, parsing_timeout=_NO_TIMEOUT)
    if all(isinstance(value, str) for value in found):
        raise GroundTruthError(
            f"math_verify cannot parse the ground truth {answer!r}; mend the answer column, give `answer_regex` "
            "so that only the result is taken, or use `grader: {type: exact}`"
        )
    return tuple(found)


def _answer(request: dict[str, str]) -> dict[str, Any]:
    try:
        if "reply" in request:
            return {"match": math_verify_match(request["reply"], request["answer"])}
        parse_answer(request["answer"])
        return {"match": True}
    except GroundTruthError as error:
        return {"ground_truth_error": str(error)}


def _serve(requests: TextIO, answers: TextIO, seconds: float) -> None:
    import math_verify  # noqa: F401  # imported before "ready", so that its second does not count against a reply

    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    answers.write("ready\n")
    answers.flush()
    for line in requests:
        # SIGPROF is not handled: the kernel ends the process, however deep in C it is. It counts the
        # process's own time, so a busy machine does not change a grade.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        answer = json.dumps(_answer(json.loads(line)))
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        answers.write(answer + "\n")
        answers.flush()


if __name__ == "__main__":
    _pipe = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    # Whatever sympy prints must not land between the answers.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    _serve(sys.stdin, _pipe, float(sys.argv[1]))
