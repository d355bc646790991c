# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The agent tutorial's environment, written for `verifiers`: the digit in the middle of three, with a second try.

`vf-eval` evaluates it, and `environment: {type: verifiers}` trains on it (`experiments/external/verifiers.yaml`).
"""

import itertools
import json
import os
from pathlib import Path

import httpx
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

__all__ = ["DigitTaskset", "TwoTries"]

REWARDS = {1: 1.0, 2: 0.5}
"""Reward of a right reply by its number."""


class DigitData(vf.TaskData):
    """A problem."""

    answer: str
    """The reply that is right."""
    worked_answer: str
    """The reply that a warm start imitates."""


class DigitTask(vf.Task[DigitData]):
    """Scores the replies."""

    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        """Return 1 if the first reply is right, 0.5 if the second is."""
        return REWARDS.get(trace.num_turns, 0.0) * (trace.last_reply == self.data.answer)

    @vf.metric
    async def replies(self, trace: vf.Trace) -> float:
        """Return the number of replies."""
        return float(trace.num_turns)


async def record(trace: vf.Trace) -> float:
    """Append the tokens, masks and log-probs of a trace to the file in TRACES; return the number of branches."""
    names = ("token_ids", "sampled_mask", "logprobs")
    branches = [{name: getattr(branch, name) for name in names} for branch in trace.branches]
    with Path(os.environ["TRACES"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(branches) + "\n")
    return float(len(branches))


class DigitTaskset(vf.Taskset[DigitTask, vf.TasksetConfig]):
    """All triples of digits."""

    def load(self) -> list[DigitTask]:
        """Return all problems."""
        triples = itertools.product("0123456789", repeat=3)
        return [
            DigitTask(DigitData(prompt="".join(one), answer=one[1], worked_answer=one[1]), self.config.task)
            for one in triples
        ]


class TwoTries(vf.Harness[vf.HarnessConfig]):
    """Asks in this process, without a program, and once more if the reply is wrong."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> ProgramResult:
        """Play an episode."""
        messages = [{"role": "user", "content": str(data.prompt)}]
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {secret}"}, timeout=None, verify=False) as http:
            for _ in REWARDS:
                body = {"model": ctx.model, "messages": messages}
                response = await http.post(f"{endpoint}/chat/completions", json=body)
                if response.is_error:
                    return ProgramResult(1, "", response.text)
                reply = response.json()["choices"][0]["message"]["content"] or ""
                if reply == getattr(data, "answer", None):
                    break
                messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "no"}]
        return ProgramResult(0, "", "")
