# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The sampler with a real HTTP server on loopback."""

import contextlib
import dataclasses
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest.mock import Mock

import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from levanter.models.lm_model import LmHeadModel

from marin_rl.sampling.config import OpenAiSamplerConfig, ReloadConfig, SamplingConfig
from marin_rl.sampling.openai_sampler import OpenAiSampler
from marin_rl.sampling.policy_check import NEW_TOKENS, PROMPT_TOKENS, PROMPTS, PolicyCheck
from marin_rl.sampling.sampler import Sampler, SampleRequest, SamplerError
from marin_rl.types import Generation, StopReason
from marin_rl.utils.http_client import response_limit
from marin_rl.utils.retry import RetryConfig
from tests.sampling.completions_server import CompletionsServer, Continued, Raw, TableEngine, error, serving

LOGITS = [0.5, -1.0, 2.0, 0.0, 0.25, -0.5]
STOP = 5
QUICK = RetryConfig(first_seconds=0.001, longest_seconds=0.002, give_up_seconds=60.0)
ONCE = RetryConfig(give_up_seconds=0.0)
RELOAD = ReloadConfig(folder="weights", path="hook.py", function="reload")
REQUEST = SampleRequest((1, 2, 3), seed=7, max_new_tokens=8)


@pytest.fixture
def server() -> Iterator[CompletionsServer]:
    with serving(CompletionsServer(TableEngine(LOGITS, eos=2))) as started:
        yield started


def sampler_of(
    server: CompletionsServer,
    *,
    config: SamplingConfig | None = None,
    stop: tuple[int, ...] = (STOP,),
    context: int = 64,
    **fields: Any,
) -> OpenAiSampler:
    given = {"base_url": server.url, "model": "policy", "reload": RELOAD, "retry": ONCE, **fields}
    return OpenAiSampler(
        OpenAiSamplerConfig(**given),
        config=config or SamplingConfig(max_new_tokens=16, max_seqs=8),
        stop_token_ids=stop,
        max_context=context,
        vocab_size=len(LOGITS),
    )


def test_tokens_and_log_probs_are_those_of_the_engine(server: CompletionsServer):
    sampler = sampler_of(server)
    assert isinstance(sampler, Sampler)
    sampler.version = 3
    requests = [dataclasses.replace(REQUEST, seed=seed, temperature=0.7) for seed in range(20)]
    generations = sampler.sample(requests)
    expected = TableEngine(LOGITS).logprobs(0.7)
    for generation in generations:
        assert generation.logprobs == tuple(float(expected[token]) for token in generation.token_ids)
        assert STOP not in generation.token_ids[:-1]
        stopped = generation.token_ids[-1] == STOP
        assert generation.stop_reason is (StopReason.STOP if stopped else StopReason.LENGTH)
        assert stopped or len(generation.token_ids) == 8
        assert (generation.first_version, generation.last_version) == (3, 3)
    assert {generation.stop_reason for generation in generations} == {StopReason.STOP, StopReason.LENGTH}
    # The server treats its eos token like any other token.
    assert any(2 in generation.token_ids[:-1] for generation in generations)


def test_server_defaults_are_not_used(server: CompletionsServer):
    sampler_of(server, context=10).sample([dataclasses.replace(REQUEST, temperature=0.5, seed=2**63 - 1)])
    assert server.received == [
        {
            "model": "policy",
            "prompt": [1, 2, 3],
            "max_tokens": 7,
            "temperature": 0.5,
            "seed": 2**63 - 1,
            "logprobs": 1,
            "return_token_ids": True,
            "stop_token_ids": [STOP],
            "ignore_eos": True,
            "skip_special_tokens": False,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
        }
    ]


@pytest.mark.medium
@given(
    drawn=st.lists(
        st.tuples(
            st.lists(st.integers(0, 5), min_size=1, max_size=6).map(tuple),
            st.integers(0, 2**63 - 1),
            st.integers(1, 16),
            st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        ),
        max_size=12,
    ),
    max_seqs=st.integers(1, 4),
)
@settings(max_examples=25)
def test_generations_keep_request_order_and_do_not_depend_on_concurrency(
    served: CompletionsServer, drawn: list[tuple[tuple[int, ...], int, int, float]], max_seqs: int
):
    requests = [SampleRequest(*fields) for fields in drawn]
    sampler = sampler_of(served, config=SamplingConfig(max_new_tokens=16, max_seqs=max_seqs))
    alone = sampler_of(served)
    assert sampler.sample(requests) == [generation for request in requests for generation in alone.sample([request])]


@pytest.fixture(scope="module")
def served() -> Iterator[CompletionsServer]:
    with serving(CompletionsServer(TableEngine(LOGITS))) as started:
        yield started


def test_configured_number_of_requests_is_concurrent(server: CompletionsServer):
    # Each response waits for two others: fewer concurrent requests would never finish, and more are detected.
    server.hold = threading.Barrier(3, timeout=300)
    sampler = sampler_of(server, config=SamplingConfig(max_new_tokens=16, max_seqs=3))
    assert sampler.batch_size == 3
    assert len(sampler.sample([dataclasses.replace(REQUEST, seed=seed) for seed in range(12)])) == 12
    assert server.most_at_once == 3


# Requests that are rejected before sending.


# Retried failures.

LOST = [
    (error(500, "engine is busy"), "status 500: .*engine is busy"),
    (error(503, "loading"), "status 503: .*loading"),
    (error(429, "slow down"), "status 429: .*slow down"),
    (Raw(0, b""), "does not respond .RemoteProtocolError"),
    (Raw(200, b'{"choices": [', 4000), "does not respond .RemoteProtocolError: peer closed connection"),
    (Raw(200, b'{"choices": ['), "is not JSON"),
    (Raw(200, b"<html>\xff"), "is not JSON: '<html>"),
    (Raw(200, b"[" * 100_000), "is not JSON: '\\[\\["),
    (Raw(200, b'{"choices": %s}' % (b"1" * 10_000)), "is not JSON"),
    # Three tokens of prompt, and eight new ones.
    (Raw(200, b" " * (response_limit(3 + 8) + 1)), f"does not respond .a response of more than {2**20 + 11 * 2**10} b"),
]


@pytest.mark.medium
@pytest.mark.parametrize(("reply", "problem"), LOST)
def test_transient_failures_are_retried(server: CompletionsServer, reply: Raw, problem: str):
    [expected] = sampler_of(server).sample([REQUEST])
    server.received.clear()
    server.fault = lambda count, body: reply if count < 4 else None
    assert sampler_of(server, retry=QUICK).sample([REQUEST]) == [expected]
    assert len(server.received) == 4
    server.received.clear()
    server.fault = lambda count, body: reply
    with pytest.raises(SamplerError, match=f"request 0: .*{problem}"):
        sampler_of(server).sample([REQUEST])
    assert len(server.received) == 1


def test_lost_response_does_not_affect_other_requests(server: CompletionsServer):
    requests = [dataclasses.replace(REQUEST, seed=seed) for seed in range(8)]
    expected = sampler_of(server).sample(requests)
    lost: set[int] = set()

    def once(count: int, body: dict[str, Any]) -> Raw | None:
        if body["seed"] in lost:
            return None
        lost.add(body["seed"])
        return error(503, "loading")

    server.fault = once
    assert sampler_of(server, retry=QUICK).sample(requests) == expected


def test_missing_response_times_out(server: CompletionsServer):
    server.hold = threading.Barrier(2)
    with pytest.raises(SamplerError, match=r"does not respond \(no complete response within 0\.2 s\).*sampler.timeout"):
        sampler_of(server, timeout=0.2).sample([REQUEST])
    server.hold.abort()


# Failures without retry.


@pytest.mark.parametrize(
    ("status", "remedy"),
    [
        (400, "raise the server's limits"),
        (404, "correct sampler.model, or sampler.base_url"),
        (302, "see the server's log"),
    ],
)
def test_rejected_request_is_not_retried(server: CompletionsServer, status: int, remedy: str):
    server.fault = lambda count, body: error(status, "I would rather not")
    with pytest.raises(SamplerError, match=f"rejected it with status {status}: .*I would rather not.*; {remedy}"):
        sampler_of(server, retry=QUICK).sample([REQUEST])
    assert len(server.received) == 1


def test_one_rejection_ends_the_call(server: CompletionsServer):
    """Other requests that would be retried for a minute are cancelled."""
    server.fault = lambda count, body: error(400, "no") if body["seed"] == 3 else error(503, "loading")
    requests = [dataclasses.replace(REQUEST, seed=seed) for seed in range(8)]
    with pytest.raises(SamplerError, match=r"request 3: .*status 400"):
        sampler_of(server, retry=QUICK).sample(requests)


def changed_choice(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    def change(answer: dict[str, Any]) -> dict[str, Any]:
        return {**answer, "choices": [{**answer["choices"][0], **fields}]}

    return change


TWO = {"token_logprobs": [-1.0, -1.0]}


def logprobs(values: Any) -> Callable[[dict[str, Any]], Any]:
    return changed_choice(token_ids=[1, 5], logprobs={"token_logprobs": values})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda answer: {"object": "error"}, "returned {'object': 'error'}, which is not one completion"),
        (changed_choice(token_ids=None), "token_ids is None .*must honour return_token_ids"),
        (changed_choice(token_ids=[True]), "returned token True, which"),
        (
            changed_choice(prompt_token_ids=[0, 1, 2, 3]),
            r"read the prompt as \[0, 1, 2, 3\], but the request has \[1, 2",
        ),
        (changed_choice(logprobs=None), "token_logprobs is None .*must honour logprobs, with one number for each"),
        (logprobs([-1.0, math.nan]), "log-probability nan; .*Check the weights for NaN"),
        (logprobs([-1.0, True]), "log-probability True"),
        (changed_choice(token_ids=[1, 1], logprobs=TWO), "returned 2 tokens without a final stop token"),
        (changed_choice(token_ids=[5, 5], logprobs=TWO), "continued after stop token 5"),
    ],
)
def test_invalid_response_is_rejected(server: CompletionsServer, change: Callable[[dict[str, Any]], Any], problem: str):
    server.change = change
    with pytest.raises(SamplerError, match=f"request 0: .*{problem}"):
        sampler_of(server, retry=QUICK).sample([REQUEST])
    assert len(server.received) == 1


# The API key.


def test_api_key_is_sent_and_never_logged(
    server: CompletionsServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.DEBUG)
    server.key = "key-1"
    for value in (None, ""):
        monkeypatch.delenv("ENGINE_KEY", raising=False)
        if value is not None:
            monkeypatch.setenv("ENGINE_KEY", value)
        with pytest.raises(ValueError, match=r"sampler.api_key_env: the environment variable ENGINE_KEY is not set"):
            sampler_of(server, api_key_env="ENGINE_KEY")
    monkeypatch.setenv("ENGINE_KEY", "key-1")
    assert len(sampler_of(server, api_key_env="ENGINE_KEY").sample([REQUEST])) == 1
    monkeypatch.setenv("ENGINE_KEY", "wrong-key")
    with pytest.raises(SamplerError, match=r"status 401: .*Unauthorized: Bearer \*\*\*.*sampler.api_key_env"):
        sampler_of(server, api_key_env="ENGINE_KEY").sample([REQUEST])
    # The server's message is cut to 500 characters, within this key.
    monkeypatch.setenv("ENGINE_KEY", "wrong-key" * 100)
    with pytest.raises(SamplerError, match=r"Bearer \*\*\*") as raised:
        sampler_of(server, api_key_env="ENGINE_KEY").sample([REQUEST])
    assert "wrong-key" not in str(raised.value)
    assert "key-1" not in caplog.text
    assert "wrong-key" not in caplog.text


# The check after a reload.


class Policy(NamedTuple):
    """Logits of the next token after each token."""

    logits: np.ndarray

    def logprobs(self, tokens: Sequence[int], temperature: float, dtype: Any = np.float64) -> list[float]:
        """Return the log-probs of the tokens after the first, with logits of a type."""
        logits = self.logits.astype(dtype).astype(float)[[*tokens[:-1]]] / temperature
        chosen = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return chosen[np.arange(len(tokens) - 1), [*tokens[1:]]].tolist()


def learner(model: Any, sequences: Sequence[tuple[int, ...]], temperature: float, dtype: str) -> Any:
    kind = BFLOAT16 if dtype == "bfloat16" else np.float64
    return [model.policy.logprobs(tokens, temperature, kind) for tokens in sequences]


BFLOAT16 = ml_dtypes.bfloat16
NORMAL = np.random.default_rng(3).normal(size=(2, 6, 6)) * 2
OLD, NEW = Policy(NORMAL[0]), Policy(NORMAL[0] + 0.05 * NORMAL[1])
PART = Policy(np.where(np.arange(6) < 3, OLD.logits, NEW.logits))
"""New weights with half of the old head."""


@dataclasses.dataclass
class PolicyEngine:
    """Serves a policy; its faults are those of real servers."""

    policy: Policy
    dtype: Any = np.float32
    raw: bool = False
    shift: int = 0
    vocab_size: int = 6
    max_model_len: int = 64

    def complete(self, body: Any) -> Continued:
        rng, tokens = np.random.default_rng(body["seed"]), [*body["prompt"]]
        for _ in range(body["max_tokens"]):
            row = [self.policy.logprobs([tokens[-1], token], body["temperature"]) for token in range(6)]
            tokens.append(int(rng.choice(5, p=np.exp(row)[:5, 0] / np.exp(row)[:5, 0].sum())))
        told = self.policy.logprobs(tokens, 1.0 if self.raw else body["temperature"], self.dtype)
        new = tokens[len(body["prompt"]) :]
        return Continued(new, np.roll(told[-len(new) :], self.shift).tolist(), [{} for _ in new])


def checked(
    server: CompletionsServer, *engines: PolicyEngine, temperature: float = 1.0, first: Policy | None = None
) -> None:
    """Serve an engine after each reload, of the first weights (the old ones) and then always of the new ones."""
    left = iter(engines)

    def load(model: Any, version: int) -> None:
        server.engine = next(left)

    sampler = OpenAiSampler(
        OpenAiSamplerConfig(base_url=server.url, model="policy", reload=RELOAD, retry=ONCE),
        config=SamplingConfig(max_new_tokens=16, max_seqs=8, temperature=temperature),
        stop_token_ids=(STOP,),
        max_context=64,
        vocab_size=6,
        load_weights=load,
        learner=learner,
    )
    for version in range(len(engines)):
        sampler.update_weights(Mock(spec=LmHeadModel, policy=NEW if version else first or OLD), version)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16])
def test_a_server_that_rounds_passes(server: CompletionsServer, dtype: Any, temperature: float):
    engines = [PolicyEngine(policy, dtype) for policy in (OLD, NEW, NEW)]
    checked(server, *engines, temperature=temperature)
    assert len(server.received) == 3 * PROMPTS
    assert all(body["max_tokens"] <= NEW_TOKENS and len(body["prompt"]) == PROMPT_TOKENS for body in server.received)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16])
@pytest.mark.parametrize("scale", [1e-3, 40.0])
def test_a_first_policy_without_rounding_does_not_tell_the_type(server: CompletionsServer, dtype: Any, scale: float):
    first = Policy(np.array([2.0, 1.0, -1.0, 0.0, -2.0, -3.0]) * np.ones((6, 1)) * scale)
    checked(server, *(PolicyEngine(policy, dtype) for policy in (first, NEW, NEW)), first=first)


def test_an_aborted_generation_is_no_difference(server: CompletionsServer):
    def abort(body: Any) -> Any:
        if body["choices"][0]["token_ids"][0] == 0:
            aborted = changed_choice(token_ids=[], finish_reason="abort", logprobs={"token_logprobs": []})
            return aborted(body)
        return body

    server.change = abort
    checked(server, PolicyEngine(OLD), PolicyEngine(NEW))


@pytest.mark.parametrize(("difference", "passes"), [(0.03, True), (0.05, False)])
def test_few_tokens_that_round_little_by_chance_do_not_lower_the_bound(difference: float, passes: bool):
    rounding = 0.01

    def learner(model: Any, sequences: Sequence[tuple[int, ...]], temperature: float, dtype: str) -> Any:
        return [[-1.0 - (rounding if dtype == "bfloat16" else 0.0)] * PROMPT_TOKENS] * PROMPTS

    check = PolicyCheck(learner, 1.0, "http://localhost")
    requests = check.requests(6, 64, 1)

    def compare(version: int, off: float) -> None:
        told = [Generation((1,), (-1.0 - off,), StopReason.LENGTH, version, version)] * PROMPTS
        check.compare(Mock(spec=LmHeadModel), version, requests, told)

    compare(0, 0.01)
    rounding = 0.001
    with contextlib.nullcontext() if passes else pytest.raises(SamplerError):
        compare(1, difference)


FAULTS = {
    "another model at the start": ([PolicyEngine(NEW)], "it serves another model"),
    "the weights of the last version": ([PolicyEngine(OLD), PolicyEngine(OLD)], "its answers are those of version 0"),
    "a part of the weights": ([PolicyEngine(OLD), PolicyEngine(PART)], "it loaded a part of the weights: with tied"),
    "the version before the last": (
        [PolicyEngine(OLD), PolicyEngine(NEW), PolicyEngine(OLD)],
        "it loaded a part of the weights",
    ),
    "log-probs of another token": ([PolicyEngine(OLD, shift=1)], "those of the token before or after"),
    "log-probs of another token, before": ([PolicyEngine(OLD, shift=-1)], "those of the token before or after"),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_a_server_with_another_policy_is_refused(server: CompletionsServer, name: str, temperature: float):
    engines, cause = FAULTS[name]
    checked(server, *engines[:-1], temperature=temperature)
    with pytest.raises(SamplerError, match=rf"{server.url} does not sample from version .*{cause}"):
        checked(server, *engines, temperature=temperature)


@pytest.mark.parametrize("temperature", [0.6, 1.5])
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
def test_log_probs_at_temperature_1_are_refused(server: CompletionsServer, dtype: Any, temperature: float):
    with pytest.raises(SamplerError, match=f"temperature is {temperature}; .*--logprobs-mode processed_logprobs"):
        checked(server, PolicyEngine(OLD, dtype, raw=True), temperature=temperature)
    checked(server, PolicyEngine(OLD, dtype, raw=True))


@pytest.mark.parametrize(
    ("value", "problem"), [([math.nan] * NEW_TOKENS, "Check the weights for NaN"), (None, "must honour logprobs")]
)
def test_a_check_without_log_probs_is_refused(server: CompletionsServer, value: Any, problem: str):
    server.change = changed_choice(logprobs={"token_logprobs": value})
    with pytest.raises(SamplerError, match=problem):
        checked(server, PolicyEngine(OLD))
