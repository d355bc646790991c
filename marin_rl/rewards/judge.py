# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""LLM judge: a language model behind an HTTP endpoint with OpenAI's chat API.

Reward functions in the sandbox have no network, so this is a separate component: trusted code that sends the
conversation to the endpoint and reads scores from the answer. The judged text is untrusted. It is sent as JSON, so that
it cannot imitate another message, and only the judge's answer is searched for a score.

The answer may repeat text of the rollouts too. It is read in linear time:

- JSON: the answer is a JSON object, or ends with one in a code block. `{"score": 0.8}` for one score,
  `{"correct": 1, "short": 0.5}` for the criteria of a rubric, `{"scores": [0.2, 1]}` for the rollouts of a group. Other
  keys, such as an explanation, are ignored.
- Text: otherwise the last line is `Score: 0.8`, `Scores: correct=1, short=0.5` or `Scores: 0.2, 1`, which means the
  same as the JSON above. Emphasis and backticks in it are ignored.

Any other answer has no verdict: a number in another line, or followed by other words, is never a score.
"""

import asyncio
import collections
import dataclasses
import functools
import json
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

import httpx
from annotated_types import Ge, Gt

from marin_rl.rewards.component import RewardComponentConfig, RewardConfigError, RewardScope, check_component_name
from marin_rl.rewards.reply_text import graded_text
from marin_rl.rewards.sandbox.functions import EvaluateResult, RewardCallError, RewardRequest
from marin_rl.rewards.sandbox.pool import Sandbox
from marin_rl.types import MAX_REWARD, RewardFailure
from marin_rl.utils.event_loop import gather_all
from marin_rl.utils.http_client import NoResponseError, open_client, post_json, without_key
from marin_rl.utils.output import replace_surrogates
from marin_rl.utils.seeds import derive_seed
from marin_rl.utils.settings.checks import ConfigSection, check_fields
from marin_rl.utils.settings.fields import check_address, read_api_key

T = TypeVar("T")

_PLACEHOLDERS = re.compile(r"\{(conversation|conversations|ground_truth|rubric)\}")
_RETRIED_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_RESERVED = ("score", "retries", "prompt_tokens", "completion_tokens")
"""Metrics of every judge."""
NOT_ASKED = "the judge was not asked"
"""Reason of the scores of `without_judge`."""


@dataclasses.dataclass(frozen=True)
class JudgeCriterion(ConfigSection):
    """A criterion of a judge's rubric."""

    name: str
    """Name in the judge's answer, and under which its scores are logged: at most 100 letters, digits and characters of
    `_-.`."""
    description: str
    """Text for the judge: the property, and which score to give when."""
    weight: Annotated[float, Gt(0)] = 1.0
    """Weight in the mean of the criteria."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_component_name(self.name)
        if self.name in _RESERVED or self.name.startswith("failed_") or len(self.name) > 100:
            raise ValueError(
                f"rewards: invalid name {self.name!r} of a criterion; use at most 100 characters, and none of the "
                f"metrics {', '.join(_RESERVED)} and failed_..."
            )
        if not self.description.strip():
            raise ValueError(f"rewards: criterion {self.name!r} has no description, so the judge cannot apply it")


@RewardComponentConfig.register_subclass("llm_judge")
@dataclasses.dataclass(frozen=True)
class LlmJudgeConfig(RewardComponentConfig):
    """Asks a language model to score a rollout, or to compare the rollouts of a group.

    The judge answers with a JSON object, or ends with a line: `{"score": 0.8}` or `Score: 0.8` for one rollout,
    `{"correct": 1, "short": 0.5}` or `Scores: correct=1, short=0.5` for a rubric, `{"scores": [0.2, 1]}` or
    `Scores: 0.2, 1` for a group, in the order shown.
    """

    base_url: str
    """URL of the endpoint without `/chat/completions`: `http://localhost:8000/v1`."""
    model: str
    """Model name at the endpoint."""
    prompt: str
    """Prompt template. `{conversation}` is replaced by the rollout's messages as JSON, `{ground_truth}` by the task's
    answer, `{rubric}` by a JSON object with the descriptions of the criteria by name. With `scope: group`,
    `{conversations}` is replaced by a JSON list of objects with `rollout` (a number from 1) and `messages`, in random
    order."""
    scope: RewardScope = RewardScope.POINTWISE
    """`pointwise`: one rollout per call. `group`: all rollouts of a group that did not fail in one call."""
    rubric: tuple[JudgeCriterion, ...] = ()
    """With `scope: pointwise`, criteria that the judge scores one by one; the score is their weighted mean."""
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
    timeout_seconds: Annotated[float, Gt(0)] = 60.0
    """Time limit in seconds for one attempt."""
    retries: Annotated[int, Ge(0)] = 4
    """Further attempts if the endpoint is busy, fails, or answers without a valid score."""
    backoff_seconds: Annotated[float, Ge(0)] = 1.0
    """Seconds before the second attempt, doubled for each further attempt up to 60. There is no pause after
    an answer without a valid score."""
    max_concurrency: Annotated[int, Ge(1)] = 16
    """Maximum number of concurrent requests."""
    max_tokens: Annotated[int, Ge(1)] = 1024
    """Maximum number of tokens in the judge's answer, reasoning included. A longer answer is invalid."""
    temperature: Annotated[float, Ge(0)] = 0.0
    """Sampling temperature of the judge."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_component_name(self.name)
        check_address(f"rewards: base_url of {self.name!r}", self.base_url, "api_key_env")
        self._check_rubric()
        self._check_prompt()
        if not -MAX_REWARD <= self.lowest < self.highest <= MAX_REWARD:
            raise ValueError(
                f"rewards: lowest of {self.name!r} must be less than highest, and both at most {MAX_REWARD:g} in "
                f"magnitude, got lowest {self.lowest} and highest {self.highest}"
            )

    def _check_prompt(self) -> None:
        if self.scope is RewardScope.BATCH:
            raise ValueError(f"rewards: scope of {self.name!r} must be pointwise or group, got batch")
        needed = {"conversations" if self.scope is RewardScope.GROUP else "conversation"}
        needed |= {"rubric"} if self.rubric else set()
        found = {*_PLACEHOLDERS.findall(self.prompt)} - {"ground_truth"}
        if found != needed:
            expected, got = (", ".join(f"{{{name}}}" for name in sorted(names)) for names in (needed, found))
            raise ValueError(
                f"rewards: the prompt of {self.name!r} must contain {expected} and no other placeholder except "
                f"{{ground_truth}}, for scope {self.scope.value} {'with' if self.rubric else 'without'} a rubric; it "
                f"contains {got or 'none'}"
            )

    def _check_rubric(self) -> None:
        if self.rubric and self.scope is not RewardScope.POINTWISE:
            raise ValueError(
                f"rewards: {self.name!r} has a rubric, which requires scope: pointwise, not {self.scope.value}"
            )
        counts = collections.Counter(criterion.name for criterion in self.rubric)
        if repeated := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"rewards: the rubric of {self.name!r} repeats {', '.join(repeated)}; use unique names")

    def build(self, sandbox: Sandbox) -> "LlmJudge":
        """Build the component; it runs no untrusted code and does not use the sandbox."""
        return LlmJudge(self)


class _RetryableError(RewardCallError):
    """A request got no usable answer, and may be repeated."""


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
        """Return one result per rollout, from one call for the group, or concurrent calls for each rollout."""
        if self._config.scope is RewardScope.GROUP:
            return await self._compare(requests)
        return await gather_all(map(self._score_rollout, requests))

    async def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _score_rollout(self, request: RewardRequest) -> EvaluateResult:
        rubric = self._config.rubric
        values = {
            "conversation": _as_json(request.messages),
            "ground_truth": request.ground_truth,
            "rubric": _as_json({criterion.name: criterion.description for criterion in rubric}),
        }

        def read(verdict: Mapping[str, Any]) -> dict[str, float]:
            names = [criterion.name for criterion in rubric] or ["score"]
            return {name: self._range.read(verdict.get(name), name) for name in names}

        scores, answer, metrics = await self._ask(values, read)
        if not rubric:
            return EvaluateResult(score=scores["score"], metrics=metrics, reason=answer)
        total = math.fsum(criterion.weight for criterion in rubric)
        mean = math.fsum(criterion.weight * scores[criterion.name] for criterion in rubric) / total
        return EvaluateResult(score=mean, metrics={**scores, **metrics}, reason=answer)

    async def _compare(self, requests: Sequence[RewardRequest]) -> list[EvaluateResult]:
        order = shown_order(requests[0].group_seed, len(requests))
        shown = [{"rollout": place + 1, "messages": requests[index].messages} for place, index in enumerate(order)]
        values = {"conversations": _as_json(shown), "ground_truth": requests[0].ground_truth}

        def read(verdict: Mapping[str, Any]) -> list[float]:
            listed = verdict.get("scores")
            if not isinstance(listed, list) or len(listed) != len(requests):
                raise VerdictError(f"the verdict is not a list of {len(requests)} scores")
            return [self._range.read(score, f"score {place}") for place, score in enumerate(listed, start=1)]

        scores, answer, metrics = await self._ask(values, read, len(requests))
        results = {
            index: EvaluateResult(score=score, metrics=metrics, reason=f"shown as rollout {place + 1}\n{answer}")
            for place, (index, score) in enumerate(zip(order, scores, strict=True))
        }
        return [results[index] for index in range(len(requests))]

    async def _ask(
        self, values: dict[str, str], read: Callable[[Mapping[str, Any]], T], rollouts: int = 1
    ) -> tuple[T, str, dict[str, float]]:
        """Query the judge until `read` accepts its verdict; return its result, the answer, and metrics."""
        usage = collections.Counter(retries=0)
        while True:
            try:
                # A pause holds no slot, so that other calls proceed.
                async with self._slots:
                    scores, answer = await self._attempt(values, read, usage)
                return scores, answer, _per_rollout(usage, rollouts)
            except RewardCallError as error:
                detail, retries = error.detail, usage["retries"]
                if isinstance(error, _RetryableError):
                    if retries < self._config.retries:
                        usage["retries"] += 1
                        # An endpoint that answered is asked again at once.
                        if error.cause is not RewardFailure.INVALID_ANSWER:
                            await asyncio.sleep(min(60.0, self._config.backoff_seconds * 2.0 ** min(retries, 64)))
                        continue
                    detail = f"no score after {retries + 1} attempts; last problem: {detail}"
                raise RewardCallError(error.cause, detail, _per_rollout(usage, rollouts)) from error

    async def _attempt(
        self, values: dict[str, str], read: Callable[[Mapping[str, Any]], T], usage: collections.Counter[str]
    ) -> tuple[T, str]:
        answer = await self._request(values, usage)
        try:
            # In a thread: an answer can have megabytes.
            return read(await asyncio.to_thread(read_verdict, answer)), answer
        except VerdictError as error:
            detail = f"{error}; the answer ends with {answer[-200:]!r}"
            raise _RetryableError(RewardFailure.INVALID_ANSWER, detail) from error

    async def _request(self, values: dict[str, str], usage: collections.Counter[str]) -> str:
        """Send one request and return the judge's answer."""
        url = f"{self._config.base_url.rstrip('/')}/chat/completions"
        seconds, tokens = self._config.timeout_seconds, self._config.max_tokens
        try:
            response = await post_json(self._connected(), url, self._body(values), seconds=seconds, tokens=tokens)
        except NoResponseError as error:
            raise _RetryableError(RewardFailure.REQUEST, str(error)) from error
        text = without_key(response.content.decode("utf-8", "replace"), self._key)
        if response.status in _RETRIED_STATUSES:
            raise _RetryableError(RewardFailure.REQUEST, f"status {response.status}: {text[:200]}")
        if response.status != 200:
            raise RewardCallError(RewardFailure.REQUEST, f"status {response.status}: {text[:500]}")
        try:
            completion = response.parse()
            _add_tokens(usage, completion)
            choice = completion["choices"][0]
            answer, is_cut = choice["message"]["content"], choice.get("finish_reason") == "length"
            # The answer is stored as the reason of the score.
            answer = without_key(answer, self._key) if isinstance(answer, str) else answer
        except (ValueError, LookupError, TypeError, AttributeError):
            answer, is_cut = None, False
        if is_cut:
            # The last line can be a part of a number, or be followed by a correction.
            raise _RetryableError(
                RewardFailure.INVALID_ANSWER,
                f"the answer was cut off at max_tokens {self._config.max_tokens}; raise it: {str(answer)[-200:]!r}",
            )
        if not isinstance(answer, str):
            raise _RetryableError(RewardFailure.REQUEST, f"no chat completion: {text[:200]!r}")
        return replace_surrogates(answer)

    def _body(self, values: dict[str, str]) -> dict[str, Any]:
        # Substitute all placeholders at once: a conversation that contains "{ground_truth}" must not receive it.
        prompt = _PLACEHOLDERS.sub(lambda match: values.get(match[1], match[0]), self._config.prompt)
        return {
            "model": self._config.model,
            "messages": [{"role": "user", "content": replace_surrogates(prompt)}],
            "temperature": self._config.temperature,
            "max_tokens": self._config.max_tokens,
        }

    def _connected(self) -> httpx.AsyncClient:
        if self._client is None:
            self._client = open_client(self._key)
        return self._client

    @functools.cached_property
    def _key(self) -> str | None:
        if self._config.api_key_env is None:
            return None
        try:
            return read_api_key(self._config.api_key_env)
        except ValueError as error:
            raise RewardConfigError(str(error)) from None


@dataclasses.dataclass(frozen=True)
class _UnaskedJudge(RewardComponentConfig):
    """Stands for an LLM judge, whose calls cost money: checks its key, and gives every rollout the score 0."""

    judge: LlmJudgeConfig

    def build(self, sandbox: Sandbox) -> "_Unasked":
        """Build the judge without its calls."""
        return _Unasked(self.judge.build(sandbox))


class _Unasked:
    waits_for_group = False

    def __init__(self, judge: LlmJudge) -> None:
        self.name, self.weight = judge.name, judge.weight
        self.scope: RewardScope | None = judge.scope
        self.check = judge.check
        self.close = judge.close

    async def score(self, requests: Sequence[RewardRequest]) -> Sequence[EvaluateResult | RewardCallError]:
        return [EvaluateResult(score=0.0, reason=NOT_ASKED) for _ in requests]


def without_judge(component: RewardComponentConfig) -> RewardComponentConfig:
    """Return a component that costs nothing in the place of an LLM judge."""
    return _UnaskedJudge(component) if isinstance(component, LlmJudgeConfig) else component


def _add_tokens(usage: collections.Counter[str], completion: Any) -> None:
    """Add the tokens that an endpoint reports in `usage`; endpoints may leave it out."""
    reported = completion.get("usage") if isinstance(completion, dict) else None
    for name in ("prompt_tokens", "completion_tokens"):
        count = reported.get(name) if isinstance(reported, dict) else None
        if type(count) is int and 0 <= count < 2**53:
            usage[name] += count


def _per_rollout(usage: collections.Counter[str], rollouts: int) -> dict[str, float]:
    return {name: total / rollouts for name, total in usage.items()}


def shown_order(group_seed: int, count: int) -> list[int]:
    """Return the order in which a judge is shown the rollouts of a group, drawn from the group's seed.

    Judges favour positions. With random permutations, over many groups every rollout index is shown at every position.
    `group_seed` is derived from the run's seed and the group.

    Returns:
        A permutation of the rollout indices.
    """
    order = list(range(count))
    random.Random(derive_seed(group_seed, "judge order")).shuffle(order)
    return order


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=1)


MAX_CHARACTERS = 2**16
"""Characters at the end of an answer that are read."""
_LINE = re.compile(r"(?:final )?(scores?)\s*[:=](.*)", re.IGNORECASE | re.DOTALL)
_NAME_END = re.compile("[=:]")


class VerdictError(Exception):
    """An answer has no valid verdict."""


class ScoreRange(NamedTuple):
    """The valid scores."""

    lowest: float
    """Minimum."""
    highest: float
    """Maximum."""

    def read(self, value: object, name: str = "score") -> float:
        """Return a score of a verdict: a number, or a text such as `0.8` or `0.8/1`.

        `value` is None if it is missing; `name` is for the message.

        Raises:
            VerdictError: if it is no number in the range, or `/` follows with another number than the highest score.

        >>> ScoreRange(0.0, 1.0).read("0.8 / 1")
        0.8
        """
        text, slash, of = value.partition("/") if isinstance(value, str) else (value, "", "")
        score = _number(text)
        if score is None:
            raise VerdictError(f"no number for {name}")
        if slash and _number(of) != self.highest:
            raise VerdictError(f"{name} {score} is one of {of.strip()[:20]!r}, but the highest score is {self.highest}")
        if not self.lowest <= score <= self.highest:
            raise VerdictError(f"{name} {score} is not between {self.lowest} and {self.highest}")
        return score


def read_verdict(answer: str) -> dict[str, Any]:
    r"""Return the verdict of an answer in its JSON form. Thoughts of the judge are not read.

    Raises:
        VerdictError: if it has no verdict.

    >>> read_verdict("<think>Score: 1?</think>Too long.\n**Score:** 0.5")
    {'score': '0.5'}
    >>> read_verdict("Scores: correct=1, short=0.5"), read_verdict("Scores: 0.2, 1")
    ({'correct': '1', 'short': '0.5'}, {'scores': ['0.2', '1']})
    """
    text = graded_text(answer)
    if text is None:
        raise VerdictError("the answer has a <think> that is not closed, and so no verdict; raise max_tokens")
    text = text.rstrip()
    if len(text) > MAX_CHARACTERS:
        # A part of the first line could be another verdict.
        text = text[-MAX_CHARACTERS:].partition("\n")[2]
    verdict = _json_object(text)
    if verdict is None:
        verdict = _last_line(text)
    if verdict is None:
        raise VerdictError("the answer is no JSON object, and its last line is not `Score: ...` or `Scores: ...`")
    return verdict


def _json_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object that an answer is, or with which it ends in a code block; None if there is none."""
    if text.endswith("\n```"):
        # Both fences begin a line; in a quotation they do not.
        text = f"\n{text[:-4]}".rpartition("\n```")[2].partition("\n")[2]
    if not text.lstrip().startswith("{"):
        return None
    try:
        return json.loads(text, object_pairs_hook=_without_repeats, strict=False)
    except (ValueError, RecursionError):
        return None


def _last_line(text: str) -> dict[str, Any] | None:
    line = text.rpartition("\n")[2]
    match = _LINE.fullmatch(line.replace("*", " ").replace("`", " ").lstrip(" \t#-"))
    if match is None:
        return None
    value = match[2].rstrip(" \t.").strip(" \t[]")
    if match[1].lower() == "score":
        return {"score": value}
    parts = [part.strip() for part in value.split(",")]
    if _NAME_END.search(value) is None:
        return {"scores": parts}
    named = (_NAME_END.split(part, maxsplit=1) for part in parts)
    return _without_repeats([(name.strip(), "".join(score).strip()) for name, *score in named])


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise VerdictError("the verdict repeats a name")
    return values


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None
