# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A language model as the judge, behind an HTTP endpoint that speaks OpenAI's chat protocol.

Reward functions in the sandbox have no network, so this is a component of its own: trusted code that sends the
conversation away and reads one number from the answer. The judged text is untrusted: it is sent as JSON, so that it
cannot pose as another message, and nothing but the judge's own answer is searched for a score.
"""

import asyncio
import dataclasses
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from marin_rl.rewards.component import RewardComponentConfig, RewardConfigError, RewardScope, check_component
from marin_rl.rewards.functions import EvaluateResult, RewardRequest
from marin_rl.rewards.losses import CallLostError, LossCause
from marin_rl.rewards.patterns import check_pattern, extract_last
from marin_rl.rewards.sandbox.pool import Sandbox

_PLACES = re.compile(r"\{(conversation|ground_truth)\}")
_WORTH_ANOTHER_TRY = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})


@RewardComponentConfig.register_subclass("llm_judge")
@dataclasses.dataclass(frozen=True)
class LlmJudgeConfig(RewardComponentConfig):
    """Asks a language model for a score."""

    base_url: str
    """Where the endpoint is, `/chat/completions` left out: `http://localhost:8000/v1`."""
    model: str
    """The judge's name there."""
    prompt: str
    """What it is asked; `{conversation}` becomes the rollout's messages as JSON, `{ground_truth}` the task's answer."""
    score_regex: str = r"(?i)score\s*[:=]\s*(-?\d+(?:\.\d+)?)"
    """Group 1 of its last match in the judge's answer is the score."""
    lowest: float = 0.0
    """Least score that is believed; with another the rollout has none."""
    highest: float = 1.0
    """Greatest score that is believed."""
    name: str = "llm_judge"
    """Under which its scores are logged."""
    weight: float = 1.0
    """What its scores are multiplied by."""
    api_key_env: str | None = None
    """Environment variable that holds the key, sent as a bearer token; None for an endpoint without keys."""
    timeout_seconds: float = 60.0
    """Seconds for one attempt; above 0."""
    retries: int = 4
    """Further attempts where the endpoint is busy, fails, or answers without a score; at least 0."""
    backoff_seconds: float = 1.0
    """Seconds before the second attempt, doubled for each further one, at most 60; at least 0."""
    max_concurrency: int = 16
    """Requests at the same time; at least 1."""
    max_tokens: int = 1024
    """Most tokens of the judge's answer; at least 1."""
    temperature: float = 0.0
    """The judge's sampling temperature; at least 0."""

    def __post_init__(self) -> None:
        check_component(self.name, self.weight)
        check_pattern("rewards: score_regex", self.score_regex, groups=1)
        if "{conversation}" not in self.prompt:
            raise ValueError(f"rewards: the prompt of {self.name!r} lacks {{conversation}}, what it has to judge")
        if not self.lowest < self.highest:
            raise ValueError(
                f"rewards: lowest of {self.name!r} is {self.lowest} and highest {self.highest}; lowest must be less"
            )
        for field, least in (("retries", 0), ("backoff_seconds", 0), ("max_concurrency", 1), ("max_tokens", 1)):
            if getattr(self, field) < least:
                raise ValueError(f"rewards: {field} of {self.name!r} is {getattr(self, field)}; at least {least}")
        if not (self.timeout_seconds > 0 and math.isfinite(self.timeout_seconds)):
            raise ValueError(f"rewards: timeout_seconds of {self.name!r} is {self.timeout_seconds}; it is above 0")
        if not self.temperature >= 0:
            raise ValueError(f"rewards: temperature of {self.name!r} is {self.temperature}; at least 0")

    def build(self, sandbox: Sandbox) -> "LlmJudge":
        """Make the component; it runs no code that is not the trainer's, so the sandbox plays no part."""
        return LlmJudge(self)


class LlmJudge:
    """Judges with a language model. Used from one event loop."""

    def __init__(self, config: LlmJudgeConfig):
        self.name = config.name
        self.weight = config.weight
        self.scope = RewardScope.POINTWISE
        self._config = config
        self._slots = asyncio.Semaphore(config.max_concurrency)
        self._client: httpx.AsyncClient | None = None

    async def check(self) -> None:
        """See whether the key is there; the endpoint may still be starting.

        Raises:
            RewardConfigError: if it is not.
        """
        self._headers()

    async def judge(self, requests: Sequence[RewardRequest]) -> list[EvaluateResult]:
        """One result for each rollout, asked for at the same time.

        Raises:
            CallLostError: if one got no score after every retry.
        """
        return list(await asyncio.gather(*(self._judge_one(request) for request in requests)))

    async def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _judge_one(self, request: RewardRequest) -> EvaluateResult:
        problem = ""
        async with self._slots:
            for attempt in range(1 + self._config.retries):
                if attempt:
                    await asyncio.sleep(min(60.0, self._config.backoff_seconds * 2 ** (attempt - 1)))
                found = await self._attempt(request)
                if isinstance(found, EvaluateResult):
                    return found
                problem = found
        attempts = 1 + self._config.retries
        raise CallLostError(LossCause.REQUEST, f"no score after {attempts} attempts; the last: {problem}")

    async def _attempt(self, request: RewardRequest) -> EvaluateResult | str:
        """The judge's word, or why there is none and another attempt may help."""
        try:
            response = await self._connected().post(
                f"{self._config.base_url.rstrip('/')}/chat/completions", json=self._body(request)
            )
        except (httpx.TransportError, httpx.DecodingError) as error:
            return f"{type(error).__name__}: {error}"
        if response.status_code in _WORTH_ANOTHER_TRY:
            return f"status {response.status_code}: {response.text[:200]}"
        if response.status_code != 200:
            raise CallLostError(LossCause.REQUEST, f"status {response.status_code}: {response.text[:500]}")
        try:
            said = response.json()["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError):
            said = None
        if not isinstance(said, str):
            return f"no chat completion: {response.text[:200]!r}"
        return self._score(said)

    def _score(self, said: str) -> EvaluateResult | str:
        found = extract_last(self._config.score_regex, said)
        try:
            score = float(found) if found is not None else None
        except ValueError:
            score = None
        if score is None:
            return f"no score in {said[-200:]!r}"
        if not self._config.lowest <= score <= self._config.highest:
            return f"score {score} is not between {self._config.lowest} and {self._config.highest}"
        return EvaluateResult(score=score, reason=said)

    def _body(self, request: RewardRequest) -> dict[str, Any]:
        values: Mapping[str, str] = {
            "conversation": json.dumps([dict(message) for message in request.messages], ensure_ascii=False, indent=1),
            "ground_truth": request.ground_truth,
        }
        # In one pass: a conversation that says {ground_truth} is not given it.
        prompt = _PLACES.sub(lambda place: values[place[1]], self._config.prompt)
        return {
            "model": self._config.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": self._config.temperature,
            "max_tokens": self._config.max_tokens,
        }

    def _connected(self) -> httpx.AsyncClient:
        if self._client is None:
            self._client = httpx.AsyncClient(timeout=self._config.timeout_seconds, headers=self._headers())
        return self._client

    def _headers(self) -> dict[str, str]:
        variable = self._config.api_key_env
        if variable is None:
            return {}
        if not os.environ.get(variable):
            raise RewardConfigError(f"reward {self.name!r}: the environment variable {variable} holds no key; set it")
        return {"Authorization": f"Bearer {os.environ[variable]}"}
