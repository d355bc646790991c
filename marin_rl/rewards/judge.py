# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A language model as the judge, behind an HTTP endpoint that speaks OpenAI's chat protocol.

With `scope: pointwise` it scores one rollout a call, with `scope: group` it compares all rollouts of a group in one.

Reward functions in the sandbox have no network, so this is a component of its own: trusted code that sends the
conversation away and reads one number from the answer. The judged text is untrusted: it is sent as JSON, so that it
cannot pose as another message, and nothing but the judge's own answer is searched for a score.
"""

import asyncio
import dataclasses
import enum
import json
import math
import os
import random
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import httpx

from marin_rl.enum_fields import convert_enum_fields
from marin_rl.rewards.component import RewardComponentConfig, RewardConfigError, RewardScope, check_component
from marin_rl.rewards.failures import RewardCallError, RewardFailure
from marin_rl.rewards.functions import EvaluateResult, RewardRequest
from marin_rl.rewards.patterns import check_pattern, extract_last
from marin_rl.rewards.sandbox.pool import Sandbox
from marin_rl.seeds import derive_seed
from marin_rl.types import MAX_REWARD

T = TypeVar("T")

_PLACES = re.compile(r"\{(conversation|conversations|ground_truth)\}")
_SCORE_REGEX = r"(?i)score\s*[:=]\s*(-?\d+(?:\.\d+)?)"
_GROUP_LINE = re.compile(r"^\W*(scores|ranking)\W*[:=]\s*(.*?)\W*$", re.IGNORECASE | re.MULTILINE)
_WORTH_ANOTHER_TRY = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})


class JudgeComparison(enum.StrEnum):
    """The form in which a judge compares the rollouts of a group; the last line of that form counts."""

    SCORES = "scores"
    """`Scores: 0.2, 1, 0.5`: one number for each rollout, in the order shown."""
    RANKING = "ranking"
    """`Ranking: 2, 3, 1`: the numbers of the rollouts, the best first. The best gets `highest`, the worst `lowest`, and
    the others lie evenly between."""


@RewardComponentConfig.register_subclass("llm_judge")
@dataclasses.dataclass(frozen=True)
class LlmJudgeConfig(RewardComponentConfig):
    """Asks a language model for a score, or to compare the rollouts of a group."""

    base_url: str
    """Where the endpoint is, `/chat/completions` left out: `http://localhost:8000/v1`."""
    model: str
    """The judge's name there."""
    prompt: str
    """What it is asked; `{conversation}` becomes the rollout's messages as JSON, `{ground_truth}` the task's answer.
    With `scope: group`, `{conversations}` becomes a JSON list of objects with `rollout` (a number from 1) and
    `messages`, in a random order."""
    scope: RewardScope = RewardScope.POINTWISE
    """`pointwise`: one rollout a call. `group`: all rollouts of a group that ended without failing, in one call."""
    comparison: JudgeComparison = JudgeComparison.SCORES
    """With `scope: group`, the form of the judge's answer: `scores` or `ranking`."""
    score_regex: str = _SCORE_REGEX
    """With `scope: pointwise`, group 1 of its last match in the judge's answer is the score."""
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
        convert_enum_fields(self)
        check_component(self.name, self.weight)
        check_pattern("rewards: score_regex", self.score_regex, groups=1)
        if self.scope is RewardScope.BATCH:
            raise ValueError(f"rewards: scope of {self.name!r} is batch; a judge takes pointwise or group")
        is_group = self.scope is RewardScope.GROUP
        place = "{conversations}" if is_group else "{conversation}"
        if place not in self.prompt:
            raise ValueError(
                f"rewards: the prompt of {self.name!r} lacks {place}, which scope: {self.scope.value} fills in"
            )
        if is_group and self.score_regex != _SCORE_REGEX:
            raise ValueError(
                f"rewards: score_regex of {self.name!r} is given, but with scope: group the judge answers a line "
                f"`{self.comparison.value.capitalize()}: ...`; remove score_regex"
            )
        if not is_group and self.comparison is not JudgeComparison.SCORES:
            raise ValueError(
                f"rewards: comparison of {self.name!r} is {self.comparison.value}, but with scope: pointwise nothing "
                "is compared; set scope: group"
            )
        if not -MAX_REWARD <= self.lowest < self.highest <= MAX_REWARD:
            raise ValueError(
                f"rewards: lowest of {self.name!r} is {self.lowest} and highest {self.highest}; lowest must be less, "
                f"and both at most {MAX_REWARD:g} in magnitude"
            )
        for field, least in (("retries", 0), ("backoff_seconds", 0), ("max_concurrency", 1), ("max_tokens", 1)):
            if not least <= getattr(self, field) < math.inf:
                raise ValueError(
                    f"rewards: {field} of {self.name!r} is {getattr(self, field)}; it is finite and at least {least}"
                )
        if not (self.timeout_seconds > 0 and math.isfinite(self.timeout_seconds)):
            raise ValueError(f"rewards: timeout_seconds of {self.name!r} is {self.timeout_seconds}; it is above 0")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(
                f"rewards: temperature of {self.name!r} is {self.temperature}; it is finite and at least 0"
            )

    def build(self, sandbox: Sandbox) -> "LlmJudge":
        """Make the component; it runs no code that is not the trainer's, so the sandbox plays no part."""
        return LlmJudge(self)


class _Refusal(NamedTuple):
    """An attempt without a usable answer; another attempt may help."""

    cause: RewardFailure
    problem: str


class LlmJudge:
    """RewardScorer with a language model. Used from one event loop."""

    def __init__(self, config: LlmJudgeConfig):
        self.name = config.name
        self.weight = config.weight
        self.scope = config.scope
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
        """One result for each rollout: from a call for each at the same time, or from one call for the group.

        Raises:
            RewardCallError: if a call got no valid answer after every retry.
        """
        if self._config.scope is RewardScope.GROUP:
            return await self._compare(requests)
        return list(await asyncio.gather(*(self._judge_one(request) for request in requests)))

    async def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _judge_one(self, request: RewardRequest) -> EvaluateResult:
        values = {"conversation": _as_json(_plain(request)), "ground_truth": request.ground_truth}
        score, said = await self._ask(values, lambda said: _read_score(said, self._config))
        return EvaluateResult(score=score, reason=said)

    async def _compare(self, requests: Sequence[RewardRequest]) -> list[EvaluateResult]:
        order = shown_order(requests[0].group_seed, len(requests))
        shown = [{"rollout": place + 1, "messages": _plain(requests[index])} for place, index in enumerate(order)]
        values = {"conversations": _as_json(shown), "ground_truth": requests[0].ground_truth}
        scores, said = await self._ask(values, lambda said: _read_comparison(said, len(requests), self._config))
        by_index = dict(zip(order, scores, strict=True))
        places = {index: place + 1 for place, index in enumerate(order)}
        return [
            EvaluateResult(score=by_index[index], reason=f"shown as rollout {places[index]}\n{said}")
            for index in range(len(requests))
        ]

    async def _ask(self, values: dict[str, str], read: Callable[[str], T | _Refusal]) -> tuple[T, str]:
        """Ask until `read` finds what it looks for in the judge's answer; that, and the answer."""
        refusal = _Refusal(RewardFailure.REQUEST, "")
        async with self._slots:
            for attempt in range(1 + self._config.retries):
                if attempt:
                    await asyncio.sleep(min(60.0, self._config.backoff_seconds * 2 ** (attempt - 1)))
                said = await self._attempt(values)
                found = read(said) if isinstance(said, str) else said
                if not isinstance(found, _Refusal):
                    assert isinstance(said, str)
                    return found, said
                refusal = found
        attempts = 1 + self._config.retries
        raise RewardCallError(refusal.cause, f"no score after {attempts} attempts; the last: {refusal.problem}")

    async def _attempt(self, values: dict[str, str]) -> str | _Refusal:
        """The judge's answer, or why there is none and another attempt may help."""
        try:
            response = await self._connected().post(
                f"{self._config.base_url.rstrip('/')}/chat/completions", json=self._body(values)
            )
        except (httpx.TransportError, httpx.DecodingError) as error:
            return _Refusal(RewardFailure.REQUEST, f"{type(error).__name__}: {error}")
        if response.status_code in _WORTH_ANOTHER_TRY:
            return _Refusal(RewardFailure.REQUEST, f"status {response.status_code}: {response.text[:200]}")
        if response.status_code != 200:
            raise RewardCallError(RewardFailure.REQUEST, f"status {response.status_code}: {response.text[:500]}")
        try:
            said = response.json()["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError):
            said = None
        if not isinstance(said, str):
            return _Refusal(RewardFailure.REQUEST, f"no chat completion: {response.text[:200]!r}")
        return said

    def _body(self, values: dict[str, str]) -> dict[str, Any]:
        # In one pass: a conversation that says {ground_truth} is not given it.
        prompt = _PLACES.sub(lambda place: values.get(place[1], place[0]), self._config.prompt)
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


def shown_order(group_seed: int, count: int) -> list[int]:
    """The order in which a judge is shown the rollouts of a group: a permutation drawn from the group's seed.

    RewardScorer favour positions; over many groups every rollout index is shown at every place.

    Args:
        group_seed: seed derived from the run's seed and the group.
        count: number of rollouts.
    """
    order = list(range(count))
    random.Random(derive_seed(group_seed, "judge order")).shuffle(order)
    return order


def _read_score(said: str, config: LlmJudgeConfig) -> float | _Refusal:
    found = extract_last(config.score_regex, said)
    score = None if found is None else _number(found)
    if score is None:
        return _Refusal(RewardFailure.INVALID_ANSWER, f"no score in {said[-200:]!r}")
    return _within([score], config) or score


def _read_comparison(said: str, count: int, config: LlmJudgeConfig) -> list[float] | _Refusal:
    lines = [match[2] for match in _GROUP_LINE.finditer(said) if match[1].lower() == config.comparison.value]
    if not lines:
        form = config.comparison.value.capitalize()
        return _Refusal(RewardFailure.INVALID_ANSWER, f"no line `{form}: ...` in {said[-200:]!r}")
    numbers = [_number(part) for part in re.split(r"[\s,>]+", lines[-1].lstrip("[(*` \t"))]
    values = [number for number in numbers if number is not None]
    if len(values) != len(numbers) or len(values) != count:
        return _Refusal(RewardFailure.INVALID_ANSWER, f"{lines[-1][:200]!r} is not {count} numbers")
    if config.comparison is JudgeComparison.SCORES:
        return _within(values, config) or values
    if sorted(values) != list(range(1, count + 1)):
        return _Refusal(RewardFailure.INVALID_ANSWER, f"{lines[-1][:200]!r} does not rank each of 1 to {count} once")
    ranks = {int(number): rank for rank, number in enumerate(values)}
    step = (config.highest - config.lowest) / max(count - 1, 1)
    return [config.highest - ranks[number] * step for number in range(1, count + 1)]


def _within(scores: Sequence[float], config: LlmJudgeConfig) -> _Refusal | None:
    for score in scores:
        if not config.lowest <= score <= config.highest:
            problem = f"score {score} is not between {config.lowest} and {config.highest}"
            return _Refusal(RewardFailure.INVALID_ANSWER, problem)
    return None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _plain(request: RewardRequest) -> list[dict[str, Any]]:
    return [dict(message) for message in request.messages]


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=1)
