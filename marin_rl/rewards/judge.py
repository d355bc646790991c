# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""LLM judge: a language model behind an HTTP endpoint with OpenAI's chat API.

Reward functions in the sandbox have no network, so this is a separate component: trusted code that sends the
conversation to the endpoint and reads scores from the answer. The judged text is untrusted. It is sent as JSON, so that
it cannot imitate another message, and only the judge's answer is searched for a score.
"""

import asyncio
import collections
import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import httpx

from marin_rl.config_fields import check_address, convert_enum_fields, read_api_key
from marin_rl.event_loop import gather_all
from marin_rl.rewards.component import RewardComponentConfig, RewardConfigError, RewardScope, check_component
from marin_rl.rewards.functions import EvaluateResult, RewardCallError, RewardFailure, RewardRequest
from marin_rl.rewards.judge_answers import (
    SCORE_REGEX,
    JudgeComparison,
    JudgeCriterion,
    RetryableError,
    ScoreRange,
    draw_pairs,
    pair_results,
    read_comparison,
    read_criteria,
    read_score,
    read_winner,
    shown_order,
    verdict_text,
)
from marin_rl.rewards.reply_text import check_pattern
from marin_rl.rewards.sandbox.pool import Sandbox
from marin_rl.types import MAX_REWARD

T = TypeVar("T")

_PLACEHOLDERS = re.compile(r"\{(conversation|conversations|ground_truth|rubric)\}")
MAX_RESPONSE = 2**22
"""Maximum number of bytes of a response after decompression. A few compressed kilobytes can be gigabytes."""
_RETRIED_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})


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
    answer, `{rubric}` by a JSON object with the descriptions of the criteria by name. With `scope: group`,
    `{conversations}` is replaced by a JSON list of objects with `rollout` (a number from 1, in pairs `A` or `B`) and
    `messages`, in random order."""
    scope: RewardScope = RewardScope.POINTWISE
    """`pointwise`: one rollout per call. `group`: compares the rollouts of a group that did not fail."""
    comparison: JudgeComparison = JudgeComparison.SCORES
    """With `scope: group`, the format of the judge's answer: `scores` or `ranking` of all rollouts in one call, or
    `pairwise`."""
    opponents: int | None = None
    """With `comparison: pairwise`, the number of other rollouts that each rollout is compared with, at least 1; null:
    all. A group of n rollouts then takes n · `opponents` calls (one more per rollout if both are odd)."""
    rubric: tuple[JudgeCriterion, ...] = ()
    """With `scope: pointwise`, criteria that the judge scores one by one; the score is their weighted mean."""
    separate_criteria: bool = False
    """One call per criterion instead of one call for the whole rubric."""
    score_regex: str = SCORE_REGEX
    """With `scope: pointwise` and no rubric, group 1 of its last match in the judge's answer is the score. By default
    `score` of a JSON object, or the last line that starts with `Score: <number>` or `Final score: <number>`, in
    Markdown or plain. Thoughts of the judge (`<think>...</think>`) are not read."""
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
    """Seconds before the second attempt, doubled for each further attempt up to 60; at least 0. There is no pause after
    an answer without a valid score."""
    max_concurrency: int = 16
    """Maximum number of concurrent requests; at least 1."""
    max_tokens: int = 1024
    """Maximum number of tokens in the judge's answer, reasoning included; at least 1. A longer answer is invalid."""
    temperature: float = 0.0
    """Sampling temperature of the judge; at least 0."""
    prompt_price: float = 0.0
    """Price of a million prompt tokens, in any currency; at least 0. The cost is logged if it or `completion_price` is
    above 0."""
    completion_price: float = 0.0
    """Price of a million completion tokens, like `prompt_price`."""

    def __post_init__(self) -> None:
        convert_enum_fields(self)
        check_component(self.name, self.weight)
        check_address(f"rewards: base_url of {self.name!r}", self.base_url, "api_key_env")
        check_pattern("rewards: score_regex", self.score_regex, groups=1)
        self._check_scope()
        self._check_rubric()
        if not -MAX_REWARD <= self.lowest < self.highest <= MAX_REWARD:
            raise ValueError(
                f"rewards: lowest of {self.name!r} must be less than highest, and both at most {MAX_REWARD:g} in "
                f"magnitude, got lowest {self.lowest} and highest {self.highest}"
            )
        self._check_numbers()

    def _check_scope(self) -> None:
        if self.scope is RewardScope.BATCH:
            raise ValueError(f"rewards: scope of {self.name!r} must be pointwise or group, got batch")
        is_group = self.scope is RewardScope.GROUP
        placeholder, unused = ("{conversations}", "{conversation}")[:: 1 if is_group else -1]
        if placeholder not in self.prompt:
            raise ValueError(
                f"rewards: the prompt of {self.name!r} must contain {placeholder} for scope: {self.scope.value}"
            )
        if unused in self.prompt:
            raise ValueError(
                f"rewards: the prompt of {self.name!r} contains {unused}, which is not replaced with scope: "
                f"{self.scope.value}; use {placeholder}"
            )
        if is_group and self.score_regex != SCORE_REGEX:
            form = "Winner" if self.comparison is JudgeComparison.PAIRWISE else self.comparison.value.capitalize()
            raise ValueError(
                f"rewards: score_regex of {self.name!r} is not used with scope: group, because the judge answers with "
                f"a line `{form}: ...`; remove score_regex"
            )
        if not is_group and self.comparison is not JudgeComparison.SCORES:
            raise ValueError(
                f"rewards: comparison of {self.name!r} is {self.comparison.value}, which requires scope: group, got "
                "scope: pointwise"
            )
        if self.opponents is not None and self.comparison is not JudgeComparison.PAIRWISE:
            raise ValueError(
                f"rewards: opponents of {self.name!r} requires comparison: pairwise, got {self.comparison.value}"
            )

    def _check_rubric(self) -> None:
        if not self.rubric:
            if self.separate_criteria or "{rubric}" in self.prompt:
                wanted = "separate_criteria" if self.separate_criteria else "{rubric} in the prompt"
                raise ValueError(f"rewards: {wanted} of {self.name!r} requires a rubric, but rubric is empty")
            return
        if self.scope is not RewardScope.POINTWISE or self.score_regex != SCORE_REGEX:
            found = "score_regex" if self.scope is RewardScope.POINTWISE else f"scope: {self.scope.value}"
            raise ValueError(
                f"rewards: {self.name!r} has a rubric, whose criteria are read from a line `Scores: NAME=NUMBER, ...` "
                f"for each rollout; remove {found}, or the rubric"
            )
        if "{rubric}" not in self.prompt:
            raise ValueError(f"rewards: the prompt of {self.name!r} must contain {{rubric}}, because it has a rubric")
        counts = collections.Counter(criterion.name for criterion in self.rubric)
        if repeated := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"rewards: the rubric of {self.name!r} repeats {', '.join(repeated)}; use unique names")

    def _check_numbers(self) -> None:
        for field, minimum in (
            ("retries", 0),
            ("backoff_seconds", 0),
            ("max_concurrency", 1),
            ("max_tokens", 1),
            ("temperature", 0),
            ("prompt_price", 0),
            ("completion_price", 0),
            ("opponents", 1),
        ):
            value = getattr(self, field)
            if value is not None and not minimum <= value < math.inf:
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


@dataclasses.dataclass
class _Usage:
    """Requests and tokens of the calls for one rollout or one group."""

    retries: int = 0
    tokens: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def add(self, answer: Any) -> None:
        """Add the tokens that an endpoint reports in `usage`; endpoints may leave it out."""
        reported = answer.get("usage") if isinstance(answer, dict) else None
        for name in ("prompt_tokens", "completion_tokens"):
            count = reported.get(name) if isinstance(reported, dict) else None
            if type(count) is int and 0 <= count < 2**53:
                self.tokens[name] += count

    def metrics(self, rollouts: int, config: LlmJudgeConfig) -> dict[str, float]:
        """Return the metrics of each of a number of rollouts, which share the calls equally."""
        totals: dict[str, float] = {"retries": self.retries, **self.tokens}
        if self.tokens and (config.prompt_price or config.completion_price):
            prices = {"prompt_tokens": config.prompt_price, "completion_tokens": config.completion_price}
            totals["cost"] = sum(prices[name] * count / 1e6 for name, count in self.tokens.items())
        return {name: total / rollouts for name, total in totals.items()}


class LlmJudge:
    """Scores rollouts with a language model. Used from one event loop."""

    def __init__(self, config: LlmJudgeConfig):
        self.name = config.name
        self.weight = config.weight
        self.scope: RewardScope | None = config.scope
        self.waits_for_group = False
        self._config = config
        self._range = ScoreRange(config.lowest, config.highest)
        self._slots = asyncio.Semaphore(config.max_concurrency)
        self._client: httpx.AsyncClient | None = None

    async def check(self) -> None:
        """Check that the API key is set; the endpoint may still be starting."""
        _ = self._key

    async def score(self, requests: Sequence[RewardRequest]) -> list[EvaluateResult]:
        """Return one result per rollout, from concurrent calls for each rollout, each pair, or one for the group."""
        if self._config.scope is RewardScope.GROUP:
            pairwise = self._config.comparison is JudgeComparison.PAIRWISE
            return await self._metered(requests, self._compare_pairs if pairwise else self._compare)
        results = await gather_all(self._metered([request], self._score_rollout) for request in requests)
        return [result for [result] in results]

    async def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _metered(
        self,
        requests: Sequence[RewardRequest],
        score: Callable[[Sequence[RewardRequest], _Usage], Coroutine[Any, Any, list[EvaluateResult]]],
    ) -> list[EvaluateResult]:
        """Score rollouts, and add the tokens of the calls to the metrics of their results or of the failure."""
        usage = _Usage()
        try:
            results = await score(requests, usage)
        except RewardCallError as error:
            raise RewardCallError(error.cause, error.detail, usage.metrics(len(requests), self._config)) from error
        metrics = usage.metrics(len(requests), self._config)
        return [result.model_copy(update={"metrics": {**result.metrics, **metrics}}) for result in results]

    async def _score_rollout(self, requests: Sequence[RewardRequest], usage: _Usage) -> list[EvaluateResult]:
        [request] = requests
        values = {"conversation": _as_json(request.messages), "ground_truth": request.ground_truth}
        rubric = self._config.rubric
        if not rubric:
            score, answer = await self._ask(
                values, lambda answer: read_score(answer, self._config.score_regex, self._range), usage
            )
            return [EvaluateResult(score=score, reason=answer)]

        async def apply(criteria: Sequence[JudgeCriterion]) -> tuple[dict[str, float], str]:
            names = [criterion.name for criterion in criteria]
            described = _as_json({criterion.name: criterion.description for criterion in criteria})
            read = functools.partial(read_criteria, names=names, valid=self._range)
            return await self._ask({**values, "rubric": described}, read, usage)

        parts = [[criterion] for criterion in rubric] if self._config.separate_criteria else [rubric]
        answers = await gather_all(apply(part) for part in parts)
        scores = {name: score for part, _ in answers for name, score in part.items()}
        total = math.fsum(criterion.weight for criterion in rubric)
        mean = math.fsum(criterion.weight * scores[criterion.name] for criterion in rubric) / total
        return [EvaluateResult(score=mean, metrics=scores, reason="\n\n".join(answer for _, answer in answers))]

    async def _compare(self, requests: Sequence[RewardRequest], usage: _Usage) -> list[EvaluateResult]:
        order = shown_order(requests[0].group_seed, len(requests))
        shown = [{"rollout": place + 1, "messages": requests[index].messages} for place, index in enumerate(order)]
        scores, answer = await self._ask(
            {"conversations": _as_json(shown), "ground_truth": requests[0].ground_truth},
            lambda answer: read_comparison(answer, len(requests), self._config.comparison, self._range),
            usage,
        )
        results = {
            index: EvaluateResult(score=score, reason=f"shown as rollout {place + 1}\n{answer}")
            for place, (index, score) in enumerate(zip(order, scores, strict=True))
        }
        return [results[index] for index in range(len(requests))]

    async def _compare_pairs(self, requests: Sequence[RewardRequest], usage: _Usage) -> list[EvaluateResult]:
        pairs = draw_pairs(requests[0].group_seed, len(requests), self._config.opponents)

        async def first_wins(first: int, second: int) -> float:
            both = (("A", first), ("B", second))
            shown = [{"rollout": label, "messages": requests[index].messages} for label, index in both]
            values = {"conversations": _as_json(shown), "ground_truth": requests[0].ground_truth}
            points, _ = await self._ask(values, read_winner, usage)
            return points

        shown_twice = [pair for first, second in pairs for pair in ((first, second), (second, first))]
        points = await gather_all(first_wins(*pair) for pair in shown_twice)
        by_pair = {
            pair: (as_first, 1 - as_second)
            for pair, as_first, as_second in zip(pairs, points[::2], points[1::2], strict=True)
        }
        spread = self._range.highest - self._range.lowest
        return [
            EvaluateResult(
                score=min(self._range.lowest + result.win_rate * spread, self._range.highest),
                metrics={"position_consistency": result.consistency},
                reason="; ".join(
                    f"{points:g} against {requests[opponent].rollout_id}" for opponent, points in result.points.items()
                ),
            )
            for result in pair_results(len(requests), by_pair)
        ]

    async def _ask(self, values: dict[str, str], read: Callable[[str], T], usage: _Usage) -> tuple[T, str]:
        """Query the judge until `read` succeeds; returns its result and the judge's answer."""
        attempt = 0
        while True:
            async with self._slots:
                is_answered = True
                while is_answered:
                    attempt += 1
                    try:
                        answer = await self._attempt(values, usage)
                        # In a thread: the pattern of a config is searched for in another process.
                        return await asyncio.to_thread(lambda text: read(verdict_text(text)), answer), answer
                    except RetryableError as error:
                        if attempt > self._config.retries:
                            detail = f"no score after {attempt} attempts; last problem: {error.detail}"
                            raise RewardCallError(error.cause, detail) from error
                        # An endpoint that answered is asked again at once and in the same slot, so that a judge without
                        # valid scores fails the group before its other calls are made.
                        is_answered = error.cause is RewardFailure.INVALID_ANSWER
                    usage.retries += 1
            # The pause holds no slot, so that other calls proceed.
            await asyncio.sleep(min(60.0, self._config.backoff_seconds * 2 ** (attempt - 1)))

    async def _attempt(self, values: dict[str, str], usage: _Usage) -> str:
        """Send one request and return the judge's answer."""
        try:
            # httpx limits each read only, and an endpoint may send a little now and then.
            async with asyncio.timeout(self._config.timeout_seconds):
                url = f"{self._config.base_url.rstrip('/')}/chat/completions"
                async with self._connected().stream("POST", url, json=self._body(values)) as response:
                    content = await _read_content(response)
        except TimeoutError as error:
            detail = f"no answer within {self._config.timeout_seconds:g} s"
            raise RetryableError(RewardFailure.REQUEST, detail) from error
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise RetryableError(RewardFailure.REQUEST, f"{type(error).__name__}: {error}") from error
        text = content.decode("utf-8", "replace")
        if self._key is not None:
            text = text.replace(self._key, "***")
        if response.status_code in _RETRIED_STATUSES:
            raise RetryableError(RewardFailure.REQUEST, f"status {response.status_code}: {text[:200]}")
        if response.status_code != 200:
            raise RewardCallError(RewardFailure.REQUEST, f"status {response.status_code}: {text[:500]}")
        try:
            completion = json.loads(content)
            usage.add(completion)
            choice = completion["choices"][0]
            answer, is_cut = choice["message"]["content"], choice.get("finish_reason") == "length"
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            answer, is_cut = None, False
        if is_cut:
            # The last line can be a part of a number, or be followed by a correction.
            raise RetryableError(
                RewardFailure.INVALID_ANSWER,
                f"the answer was cut off at max_tokens {self._config.max_tokens}; raise it: {str(answer)[-200:]!r}",
            )
        if not isinstance(answer, str):
            raise RetryableError(RewardFailure.REQUEST, f"no chat completion: {text[:200]!r}")
        return _without_surrogates(answer)

    def _body(self, values: dict[str, str]) -> dict[str, Any]:
        # Substitute all placeholders at once: a conversation that contains "{ground_truth}" must not receive it.
        prompt = _PLACEHOLDERS.sub(lambda match: values.get(match[1], match[0]), self._config.prompt)
        return {
            "model": self._config.model,
            "messages": [{"role": "user", "content": _without_surrogates(prompt)}],
            "temperature": self._config.temperature,
            "max_tokens": self._config.max_tokens,
        }

    def _connected(self) -> httpx.AsyncClient:
        if self._client is None:
            headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
            # The judge limits time and concurrency.
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
            self._client = httpx.AsyncClient(timeout=None, limits=limits, headers=headers)
        return self._client

    @functools.cached_property
    def _key(self) -> str | None:
        if self._config.api_key_env is None:
            return None
        try:
            return read_api_key(self._config.api_key_env)
        except ValueError as error:
            raise RewardConfigError(str(error)) from None


async def _read_content(response: httpx.Response) -> bytes:
    """Return the decompressed content of a response.

    Raises:
        RetryableError: if it is longer than `MAX_RESPONSE`; the rest is not read.
    """
    content = bytearray()
    async for part in response.aiter_bytes():
        content += part
        if len(content) > MAX_RESPONSE:
            raise RetryableError(RewardFailure.REQUEST, f"a response of more than {MAX_RESPONSE} bytes")
    return bytes(content)


def _without_surrogates(text: str) -> str:
    """Replace lone surrogates, which neither a request nor a result can hold."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=1)
