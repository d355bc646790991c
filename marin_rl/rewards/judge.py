# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""LLM judge: a language model behind an HTTP endpoint with OpenAI's chat API.

Reward functions in the sandbox have no network, so this is a separate component: trusted code that sends the
conversation to the endpoint and reads scores from the answer. The judged text is untrusted. It is sent as JSON, so that
it cannot imitate another message, and only the judge's answer is searched for a score.
"""

import asyncio
import dataclasses
import enum
import itertools
import json
import math
import os
import random
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import httpx

from marin_rl.config_fields import convert_enum_fields
from marin_rl.rewards.component import RewardComponentConfig, RewardConfigError, RewardScope, check_component
from marin_rl.rewards.functions import EvaluateResult, RewardCallError, RewardFailure, RewardRequest
from marin_rl.rewards.grading import check_pattern, extract_last
from marin_rl.rewards.sandbox.pool import Sandbox
from marin_rl.seeds import derive_seed
from marin_rl.types import MAX_REWARD

T = TypeVar("T")

_PLACEHOLDERS = re.compile(r"\{(conversation|conversations|ground_truth)\}")
_SCORE_REGEX = r"(?i)score\s*[:=]\s*(-?\d+(?:\.\d+)?)"
_GROUP_LINE = re.compile(r"^\W*(scores|ranking)\W*[:=]\s*(.*?)\W*$", re.IGNORECASE | re.MULTILINE)
_WORTH_ANOTHER_TRY = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})


class JudgeComparison(enum.StrEnum):
    """Format in which a judge compares the rollouts of a group; the last line in this format counts."""

    SCORES = "scores"
    """`Scores: 0.2, 1, 0.5`: one number per rollout, in the order shown."""
    RANKING = "ranking"
    """`Ranking: 2, 3, 1`: the numbers of the rollouts, best first. The best gets `highest`, the worst `lowest`, and the
    others are spaced evenly in between."""


@RewardComponentConfig.register_subclass("llm_judge")
@dataclasses.dataclass(frozen=True)
class LlmJudgeConfig(RewardComponentConfig):
    """Asks a language model to score a rollout, or to compare the rollouts of a group."""

    base_url: str
    """URL of the endpoint without `/chat/completions`: `http://localhost:8000/v1`."""
    model: str
    """Model name at the endpoint."""
    prompt: str
    """Prompt template. `{conversation}` is replaced by the rollout's messages as JSON, `{ground_truth}` by the task's
    answer. With `scope: group`, `{conversations}` is replaced by a JSON list of objects with `rollout` (a number from
    1) and `messages`, in random order."""
    scope: RewardScope = RewardScope.POINTWISE
    """`pointwise`: one rollout per call. `group`: all rollouts of a group that did not fail, in one call."""
    comparison: JudgeComparison = JudgeComparison.SCORES
    """With `scope: group`, the format of the judge's answer: `scores` or `ranking`."""
    score_regex: str = _SCORE_REGEX
    """With `scope: pointwise`, group 1 of its last match in the judge's answer is the score."""
    lowest: float = 0.0
    """Minimum valid score; an answer with a lower score is invalid."""
    highest: float = 1.0
    """Maximum valid score."""
    name: str = "llm_judge"
    """Name under which its scores are logged."""
    weight: float = 1.0
    """Factor of its scores."""
    api_key_env: str | None = None
    """Environment variable with the API key, which is sent as a bearer token; None if the endpoint needs no key."""
    timeout_seconds: float = 60.0
    """Time limit in seconds for one attempt; above 0."""
    retries: int = 4
    """Further attempts if the endpoint is busy, fails, or answers without a valid score; at least 0."""
    backoff_seconds: float = 1.0
    """Seconds before the second attempt, doubled for each further attempt up to 60; at least 0."""
    max_concurrency: int = 16
    """Maximum number of concurrent requests; at least 1."""
    max_tokens: int = 1024
    """Maximum number of tokens in the judge's answer; at least 1."""
    temperature: float = 0.0
    """Sampling temperature of the judge; at least 0."""

    def __post_init__(self) -> None:
        convert_enum_fields(self)
        check_component(self.name, self.weight)
        check_pattern("rewards: score_regex", self.score_regex, groups=1)
        if self.scope is RewardScope.BATCH:
            raise ValueError(f"rewards: scope of {self.name!r} must be pointwise or group, got batch")
        is_group = self.scope is RewardScope.GROUP
        placeholder = "{conversations}" if is_group else "{conversation}"
        if placeholder not in self.prompt:
            raise ValueError(
                f"rewards: the prompt of {self.name!r} must contain {placeholder} for scope: {self.scope.value}"
            )
        if is_group and self.score_regex != _SCORE_REGEX:
            raise ValueError(
                f"rewards: score_regex of {self.name!r} is not used with scope: group, because the judge answers with "
                f"a line `{self.comparison.value.capitalize()}: ...`; remove score_regex"
            )
        if not is_group and self.comparison is not JudgeComparison.SCORES:
            raise ValueError(
                f"rewards: comparison of {self.name!r} is {self.comparison.value}, which requires scope: group, got "
                "scope: pointwise"
            )
        if not -MAX_REWARD <= self.lowest < self.highest <= MAX_REWARD:
            raise ValueError(
                f"rewards: lowest of {self.name!r} must be less than highest, and both at most {MAX_REWARD:g} in "
                f"magnitude, got lowest {self.lowest} and highest {self.highest}"
            )
        for field, minimum in (
            ("retries", 0),
            ("backoff_seconds", 0),
            ("max_concurrency", 1),
            ("max_tokens", 1),
            ("temperature", 0),
        ):
            value = getattr(self, field)
            if not minimum <= value < math.inf:
                raise ValueError(
                    f"rewards: {field} of {self.name!r} must be finite and at least {minimum}, got {value}"
                )
        if not (self.timeout_seconds > 0 and math.isfinite(self.timeout_seconds)):
            raise ValueError(
                f"rewards: timeout_seconds of {self.name!r} must be finite and above 0, got {self.timeout_seconds}"
            )

    def build(self, sandbox: Sandbox) -> "LlmJudge":
        """Build the component; it runs no untrusted code and does not use the sandbox."""
        return LlmJudge(self)


class _RetryableError(RewardCallError):
    """An attempt got no usable answer."""


class LlmJudge:
    """Scores rollouts with a language model. Used from one event loop."""

    def __init__(self, config: LlmJudgeConfig):
        self.name = config.name
        self.weight = config.weight
        self.scope: RewardScope | None = config.scope
        self.waits_for_group = False
        self._config = config
        self._slots = asyncio.Semaphore(config.max_concurrency)
        self._client: httpx.AsyncClient | None = None

    async def check(self) -> None:
        """Check that the API key is set; the endpoint may still be starting."""
        self._headers()

    async def score(self, requests: Sequence[RewardRequest]) -> list[EvaluateResult]:
        """Return one result per rollout, from concurrent calls for each rollout or one call for the group."""
        if self._config.scope is RewardScope.GROUP:
            return await self._compare(requests)
        return list(await asyncio.gather(*(self._score_rollout(request) for request in requests)))

    async def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _score_rollout(self, request: RewardRequest) -> EvaluateResult:
        values = {"conversation": _as_json(request.messages), "ground_truth": request.ground_truth}
        score, answer = await self._ask(values, lambda answer: _read_score(answer, self._config))
        return EvaluateResult(score=score, reason=answer)

    async def _compare(self, requests: Sequence[RewardRequest]) -> list[EvaluateResult]:
        order = shown_order(requests[0].group_seed, len(requests))
        shown = [{"rollout": place + 1, "messages": requests[index].messages} for place, index in enumerate(order)]
        values = {"conversations": _as_json(shown), "ground_truth": requests[0].ground_truth}
        scores, answer = await self._ask(values, lambda answer: _read_comparison(answer, len(requests), self._config))
        results = {
            index: EvaluateResult(score=score, reason=f"shown as rollout {place + 1}\n{answer}")
            for place, (index, score) in enumerate(zip(order, scores, strict=True))
        }
        return [results[index] for index in range(len(requests))]

    async def _ask(self, values: dict[str, str], read: Callable[[str], T]) -> tuple[T, str]:
        """Query the judge until `read` succeeds; returns its result and the judge's answer."""
        attempts = 1 + self._config.retries
        async with self._slots:
            for attempt in itertools.count(1):
                try:
                    answer = await self._attempt(values)
                    return read(answer), answer
                except _RetryableError as error:
                    if attempt == attempts:
                        detail = f"no score after {attempts} attempts; last problem: {error.detail}"
                        raise RewardCallError(error.cause, detail) from error
                await asyncio.sleep(min(60.0, self._config.backoff_seconds * 2 ** (attempt - 1)))
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _attempt(self, values: dict[str, str]) -> str:
        """Send one request and return the judge's answer."""
        try:
            response = await self._connected().post(
                f"{self._config.base_url.rstrip('/')}/chat/completions", json=self._body(values)
            )
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise _RetryableError(RewardFailure.REQUEST, f"{type(error).__name__}: {error}") from error
        if response.status_code in _WORTH_ANOTHER_TRY:
            raise _RetryableError(RewardFailure.REQUEST, f"status {response.status_code}: {response.text[:200]}")
        if response.status_code != 200:
            raise RewardCallError(RewardFailure.REQUEST, f"status {response.status_code}: {response.text[:500]}")
        try:
            answer = response.json()["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError):
            answer = None
        if not isinstance(answer, str):
            raise _RetryableError(RewardFailure.REQUEST, f"no chat completion: {response.text[:200]!r}")
        return answer

    def _body(self, values: dict[str, str]) -> dict[str, Any]:
        # Substitute all placeholders at once: a conversation that contains "{ground_truth}" must not receive it.
        prompt = _PLACEHOLDERS.sub(lambda match: values.get(match[1], match[0]), self._config.prompt)
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
            raise RewardConfigError(
                f"reward {self.name!r}: the environment variable {variable} is not set; set it to the key"
            )
        return {"Authorization": f"Bearer {os.environ[variable]}"}


def shown_order(group_seed: int, count: int) -> list[int]:
    """Return the order in which a judge is shown the rollouts of a group, drawn from the group's seed.

    Judges favour positions. With random permutations, over many groups every rollout index is shown at every position.

    Args:
        group_seed: seed derived from the run's seed and the group.
        count: number of rollouts.

    Returns:
        A permutation of the rollout indices.
    """
    order = list(range(count))
    random.Random(derive_seed(group_seed, "judge order")).shuffle(order)
    return order


def _read_score(answer: str, config: LlmJudgeConfig) -> float:
    match = extract_last(config.score_regex, answer)
    score = None if match is None else _number(match)
    if score is None:
        raise _RetryableError(RewardFailure.INVALID_ANSWER, f"no score in {answer[-200:]!r}")
    _check_range([score], config)
    return score


def _read_comparison(answer: str, count: int, config: LlmJudgeConfig) -> list[float]:
    lines = [match[2] for match in _GROUP_LINE.finditer(answer) if match[1].lower() == config.comparison.value]
    if not lines:
        form = config.comparison.value.capitalize()
        raise _RetryableError(RewardFailure.INVALID_ANSWER, f"no line `{form}: ...` in {answer[-200:]!r}")
    numbers = [_number(part) for part in re.split(r"[\s,>]+", lines[-1].lstrip("[(*` \t"))]
    values = [number for number in numbers if number is not None]
    if len(values) != len(numbers) or len(values) != count:
        raise _RetryableError(RewardFailure.INVALID_ANSWER, f"{lines[-1][:200]!r} is not {count} numbers")
    if config.comparison is JudgeComparison.SCORES:
        _check_range(values, config)
        return values
    if sorted(values) != list(range(1, count + 1)):
        problem = f"{lines[-1][:200]!r} does not rank each of 1 to {count} once"
        raise _RetryableError(RewardFailure.INVALID_ANSWER, problem)
    ranks = {int(number): rank for rank, number in enumerate(values)}
    step = (config.highest - config.lowest) / max(count - 1, 1)
    return [config.highest - ranks[number] * step for number in range(1, count + 1)]


def _check_range(scores: Sequence[float], config: LlmJudgeConfig) -> None:
    for score in scores:
        if not config.lowest <= score <= config.highest:
            problem = f"score {score} is not between {config.lowest} and {config.highest}"
            raise _RetryableError(RewardFailure.INVALID_ANSWER, problem)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=1)
