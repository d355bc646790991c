# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The `openai` SDK against the server: results equal those of the sampler bit for bit."""

import asyncio
import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

import haliax as hax
import httpx
import jax
import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import numpy as np
import pytest
from levanter.layers.attention import AttentionMask

from marin_rl.learner.scoring import prompt_scorer
from marin_rl.sampling.config import OpenAiSamplerConfig, ReloadConfig, SamplingConfig
from marin_rl.sampling.group_sampler import GroupSampler
from marin_rl.sampling.openai_sampler import OpenAiSampler
from marin_rl.sampling.sampler import SampleRequest
from marin_rl.sampling.stops import stop_table
from marin_rl.serving.openai.protocol import NEUTRAL
from marin_rl.tokenization.load import TokenPieces
from marin_rl.types import Generation, StopReason
from marin_rl.utils.devices.setup import start_devices
from marin_rl.utils.devices.trainer_config import TrainerConfig
from marin_rl.utils.retry import RetryConfig
from marin_rl.utils.seeds import derive_seed
from tests.scripted_sampler import ScriptedSampler
from tests.serving.serving_cases import (
    CONTEXT,
    MAX_NEW,
    SLOTS,
    TIMEOUT,
    TOKENIZER,
    Serving,
    serving,
    tiny_model,
    tiny_sampler,
)

openai = pytest.importorskip("openai")

PROMPT = (5, 9, 33, 2)


@pytest.fixture(scope="module")
def bare() -> GroupSampler:
    """A sampler outside the server."""
    return tiny_sampler()


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(tiny_sampler(), key="secret") as started:
        yield started


@pytest.fixture(scope="module")
def client(server: Serving) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as opened:
        yield opened


def post(server: Serving, path: str, body: Any, **headers: str | bytes) -> httpx.Response:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {"Authorization": "Bearer secret", "Content-Type": "application/json", **headers}
    return httpx.post(f"{server.url}{path}", content=data, headers=given, timeout=TIMEOUT)


def error_of(response: httpx.Response) -> tuple[int, str, str | None]:
    """Status, message and parameter of an error in OpenAI's format."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return response.status_code, error["message"], error["param"]


def expected(bare: GroupSampler, prompt: tuple[int, ...], seed: int, length: int, temperature: float) -> Generation:
    [generation] = bare.sample([SampleRequest(prompt, seed, length, temperature)])
    return generation


def completion(choice: Any) -> tuple[tuple[int, ...], tuple[float, ...], str]:
    return tuple(choice.token_ids), tuple(choice.logprobs.token_logprobs), choice.finish_reason


def as_completion(generation: Generation) -> tuple[tuple[int, ...], tuple[float, ...], str]:
    reason = "stop" if generation.stop_reason is StopReason.STOP else "length"
    return generation.token_ids, generation.logprobs, reason


def test_models(client: Any):
    [card] = client.models.list().data
    assert (card.id, card.max_model_len) == ("policy", CONTEXT)
    assert client.models.retrieve("policy").id == "policy"


@pytest.mark.medium
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("streamed", [False, True])
def test_completions_equal_the_sampler(client: Any, bare: GroupSampler, temperature: float, streamed: bool):
    wanted = expected(bare, PROMPT, 3, 100, temperature)
    options = {"model": "policy", "prompt": list(PROMPT), "seed": 3, "max_tokens": 100, "temperature": temperature}
    extra = {"extra_body": {"return_token_ids": True}, "logprobs": 0}
    if not streamed:
        response = client.completions.create(**options, **extra)
        [choice] = response.choices
        assert completion(choice) == as_completion(wanted)
        assert choice.text == TOKENIZER.decode_reply(wanted.token_ids)
        assert choice.prompt_token_ids == list(PROMPT)
        assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (4, len(wanted.token_ids))
        return
    chunks = list(client.completions.create(**options, **extra, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(wanted.token_ids)
    parts = [chunk.choices[0] for chunk in chunks[:-1]]
    assert len(parts) > 2
    assert [getattr(part, "prompt_token_ids", None) for part in parts] == [list(PROMPT)] + [None] * (len(parts) - 1)
    assert tuple(token for part in parts for token in part.token_ids) == wanted.token_ids
    assert tuple(value for part in parts for value in part.logprobs.token_logprobs) == wanted.logprobs
    assert "".join(part.text for part in parts) == TOKENIZER.decode_reply(wanted.token_ids)
    assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [as_completion(wanted)[2]]


@pytest.mark.medium
def test_chat_equals_the_sampler_streamed_or_not(client: Any, bare: GroupSampler):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "2+3="}]},
    ]
    prompt = TOKENIZER.prompt_tokens([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3="}])
    wanted = [expected(bare, prompt, seed, 60, 1.0) for seed in (11, derive_seed(11, 1))]
    options = {
        "model": "policy",
        "messages": messages,
        "seed": 11,
        "max_completion_tokens": 60,
        "n": 2,
        "logprobs": True,
    }
    response = client.chat.completions.create(**options, extra_body={"return_token_ids": True})
    assert response.prompt_token_ids == list(prompt)
    for choice, generation in zip(response.choices, wanted, strict=True):
        assert not hasattr(choice, "prompt_token_ids")
        assert tuple(choice.token_ids) == generation.token_ids
        assert tuple(entry.logprob for entry in choice.logprobs.content) == generation.logprobs
        assert bytes(byte for entry in choice.logprobs.content for byte in entry.bytes).startswith(
            choice.message.content.encode() if "\ufffd" not in choice.message.content else b""
        )
        assert choice.message.content == TOKENIZER.decode_reply(generation.token_ids)
    texts, tokens = ["", ""], [[], []]
    for chunk in client.chat.completions.create(**options, stream=True, extra_body={"return_token_ids": True}):
        [choice] = chunk.choices
        assert getattr(chunk, "prompt_token_ids", None) == (None if tokens[choice.index] else list(prompt))
        assert not hasattr(choice, "prompt_token_ids")
        texts[choice.index] += choice.delta.content or ""
        tokens[choice.index] += choice.token_ids
    assert texts == [choice.message.content for choice in response.choices]
    assert [tuple(ids) for ids in tokens] == [generation.token_ids for generation in wanted]


@pytest.mark.medium
def test_concurrent_requests_equal_the_sampler(server: Serving, bare: GroupSampler):
    """Sixty-four requests, every other one streamed."""
    samples = [SampleRequest((*PROMPT, seed), seed, 20 + seed, (0.0, 1.0)[seed % 3 > 0]) for seed in range(64)]

    async def ask(client: Any, sample: SampleRequest) -> tuple[tuple[int, ...], tuple[float, ...]]:
        response = await client.completions.create(
            model="policy",
            prompt=list(sample.prompt_tokens),
            seed=sample.seed,
            max_tokens=sample.max_new_tokens,
            temperature=sample.temperature,
            logprobs=0,
            stream=sample.seed % 2 == 0,
            extra_body={"return_token_ids": True},
        )
        parts = [chunk.choices[0] async for chunk in response] if sample.seed % 2 == 0 else [response.choices[0]]
        tokens = tuple(token for part in parts for token in part.token_ids)
        return tokens, tuple(value for part in parts for value in part.logprobs.token_logprobs)

    async def ask_all() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, sample) for sample in samples))

    wanted = [(generation.token_ids, generation.logprobs) for generation in bare.sample(samples)]
    assert asyncio.run(ask_all()) == wanted
    assert server.engine.in_progress == 0


@pytest.mark.medium
@pytest.mark.parametrize("stop", [(), ("e", "\n", "12")])
def test_a_run_can_sample_from_the_server(
    server: Serving, bare: GroupSampler, monkeypatch: pytest.MonkeyPatch, stop: tuple[str, ...]
):
    """`sampler: {type: openai}` gets the generations of the built-in sampler."""
    monkeypatch.setenv("POLICY_KEY", "secret")
    sampling = SamplingConfig(max_new_tokens=MAX_NEW, max_seqs=SLOTS, stop=stop)
    piece = TokenPieces(TOKENIZER.tokenizer).in_text
    reload = ReloadConfig(folder="weights", path="reload.py", function="reload")
    config = OpenAiSamplerConfig(
        f"{server.url}/v1", "policy", "POLICY_KEY", reload=reload, retry=RetryConfig(give_up_seconds=0.0)
    )
    client = OpenAiSampler(
        config,
        config=sampling,
        stop_token_ids=TOKENIZER.stop_token_ids,
        max_context=CONTEXT,
        vocab_size=TOKENIZER.vocab_size,
        token_bytes=piece,
    )
    requests = [SampleRequest((*PROMPT, seed), seed, 10 + seed, (0.0, 0.8)[seed % 2]) for seed in range(20)]
    table = stop_table(TOKENIZER.vocab_size, TOKENIZER.stop_token_ids, stop, piece)
    whole = bare.sample(requests)
    ends = [table.first_end(one.token_ids) for one in whole]
    assert client.sample(requests) == [
        one
        if end is None
        else dataclasses.replace(
            one, token_ids=one.token_ids[:end], logprobs=one.logprobs[:end], stop_reason=StopReason.STOP
        )
        for one, end in zip(whole, ends, strict=True)
    ]
    assert (len({*ends}) > 3) == bool(stop)


@pytest.mark.medium
def test_stop_strings_end_a_reply(client: Any, bare: GroupSampler):
    """Tokens and text end at the first stop string, streamed or not."""
    whole = expected(bare, PROMPT, 5, MAX_NEW, 1.0)
    text = TOKENIZER.decode_reply(whole.token_ids)
    stop = next(text[start : start + 2] for start in range(20, len(text)) if text[start : start + 2].isascii())
    options = {"model": "policy", "prompt": list(PROMPT), "seed": 5, "max_tokens": MAX_NEW, "stop": ["never", stop]}
    extra = {"return_token_ids": True}
    [choice] = client.completions.create(**options, extra_body=extra).choices
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (text[: text.index(stop)], "stop", stop)
    assert tuple(choice.token_ids) == whole.token_ids[: len(choice.token_ids)]
    assert stop in TOKENIZER.decode_reply(choice.token_ids)
    assert stop not in TOKENIZER.decode_reply(choice.token_ids[:-1])
    parts = [chunk.choices[0] for chunk in client.completions.create(**options, stream=True, extra_body=extra)]
    assert "".join(part.text for part in parts) == choice.text
    assert [token for part in parts for token in part.token_ids] == choice.token_ids


def test_generate_takes_and_returns_tokens(server: Serving, bare: GroupSampler):
    """The body of `renderers.client.generate`, with `detokenize` as in vLLM's examples."""
    wanted = expected(bare, PROMPT, 9, 12, 1.0)
    params = {
        "max_tokens": 12,
        "seed": 9,
        "top_p": 1.0,
        "stop_token_ids": [257],
        "logprobs": 1,
        "skip_special_tokens": False,
        "detokenize": False,
    }
    body = {"model": "policy", "token_ids": list(PROMPT), "sampling_params": params, "cache_salt": "7"}
    answer = post(server, "/inference/v1/generate", body).json()
    [choice] = answer["choices"]
    assert tuple(choice["token_ids"]) == wanted.token_ids
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in wanted.token_ids]
    assert tuple(entry["logprob"] for entry in content) == wanted.logprobs


def test_greedy_samples_have_top_logprobs(client: Any):
    options = {"model": "policy", "temperature": 0, "max_tokens": 4}
    [choice] = client.completions.create(prompt="a", logprobs=1, **options).choices
    assert [list(top.values()) for top in choice.logprobs.top_logprobs] == [[v] for v in choice.logprobs.token_logprobs]
    [choice] = client.chat.completions.create(
        messages=[{"role": "user", "content": "a"}], logprobs=True, top_logprobs=1, **options
    ).choices
    assert all(entry.top_logprobs[0].logprob == entry.logprob for entry in choice.logprobs.content)


BODY = {"model": "policy", "prompt": "a"}
CHAT = {"model": "policy", "messages": [{"role": "user", "content": "a"}]}


def assistant(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": None, **fields}]}


REFUSED: list[tuple[dict[str, Any], str | None, str]] = [
    ({"top_p": 0.9}, "top_p", "top_p is 0.9, but the server does not implement it"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "logit_bias is"),
    ({"logprobs": 5}, "logprobs", "logprobs: Input should be less than or equal to 1"),
    ({"guided_regex": "a"}, "guided_regex", "guided_regex: it is not a parameter of this server"),
    ({"prompt": ""}, "prompt", "the prompt is empty"),
    ({"prompt": [264]}, "prompt", "prompt token 264 is not in the vocabulary of 264"),
    ({"prompt": [-1]}, "prompt", "prompt token -1 is not in the vocabulary"),
    ({"prompt": []}, "prompt", "the prompt is empty"),
    ({"prompt": "a" * CONTEXT}, "prompt", "the prompt has 256 tokens, but this model's maximum context"),
    ({"prompt": "a" * 200, "max_tokens": 57}, "max_tokens", "the prompt has 200 tokens and max_tokens is 57"),
    ({"max_tokens": MAX_NEW + 1}, "max_tokens", "max_tokens is 129; the server allows at most 128"),
    ({"temperature": 1e-31}, "temperature", "temperature: must be 0 (greedy) or at least 1e-30"),
    ({"stop": ["a", ""]}, "stop.1", "stop.1: String should have at least 1 character"),
    ({"ignore_eos": True}, "ignore_eos", "ignore_eos: the server's stop tokens [257] end every reply"),
    ({"stream_options": {"include_usage": True}}, None, "stream_options needs stream: true"),
    *(
        ({"messages": [{"role": role, "content": "a"}]}, "messages", f"messages[0].role is {role!r}; use system, user")
        for role in (None, "robot", ["user"])
    ),
    ({"messages": [{"role": "user"}]}, "messages", "messages[0].content must be a text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages",
        "messages[0].content has a part that is not text",
    ),
    (assistant(function_call={"name": "f"}), "messages", "messages[0].function_call is not read by the server"),
    (assistant(tool_calls=[{}]), "messages", "a call without a function name"),
    (assistant(tool_calls="f"), "messages", "must be a text or a list of text parts"),
    (assistant(tool_calls=[{"function": {"name": "f", "arguments": "{"}}]), "messages", "tool_calls is not valid JSON"),
    (CHAT | {"tools": [{"type": "function"}]}, "tools", "tools[0] must have type function"),
    (CHAT | {"logprobs": True, "top_logprobs": 1}, None, "top_logprobs: 1 needs"),
]
"""Changes of requests, with the parameter and the message of the error."""


def test_invalid_requests_are_named(client: Any):
    for change, param, message in REFUSED:
        create, body = (
            (client.chat.completions.create, CHAT) if "messages" in change else (client.completions.create, BODY)
        )
        with pytest.raises(openai.BadRequestError) as raised:
            create(**body, extra_body=change)
        assert (raised.value.type, raised.value.param) == ("invalid_request_error", param), change
        assert message in raised.value.body["message"]


def test_neutral_values_pass(server: Serving):
    neutral = {name: values[0] for name, values in NEUTRAL.items()} | {"user": "me", "logprobs": None}
    assert post(server, "/v1/completions", {**BODY, "max_tokens": 1, **neutral}).status_code == 200


@pytest.mark.parametrize(
    ("body", "headers", "status", "message"),
    [
        (b"{", {}, 400, "the body is not valid JSON"),
        (b"[]", {}, 400, "the body is a JSON list; it must be an object"),
        (b"{}", {"Content-Type": "text/plain"}, 415, "the content type must be application/json"),
        (b" " * 100_001, {}, 413, "the body exceeds 100000 bytes"),
        (b"{}", {"Content-Encoding": "gzip"}, 415, "the content encoding is 'gzip'"),
        (b"{}", {"Authorization": "Bearer wrong"}, 401, "the API key is missing or wrong"),
        (b"{}", {"Authorization": ""}, 401, "the API key is missing or wrong"),
        (b"{}", {"Authorization": b"Bearer s\xe9cret"}, 401, "the API key is missing or wrong"),
    ],
)
def test_malformed_bodies_and_keys(server: Serving, body: bytes, headers: dict, status: int, message: str):
    found = error_of(post(server, "/v1/completions", body, **headers))
    assert found[0] == status
    assert message in found[1]


def test_deeply_nested_bodies_are_refused(server: Serving):
    def body(depth: int) -> bytes:
        tool = b'{"type":"function","function":{"name":"f","parameters":%b}}' % (b"[" * depth + b"]" * depth)
        return b'{"model":"policy","messages":[{"role":"user","content":"a"}],"tools":[%b]}' % tool

    # Bodies near the limit can be read; the prompt that they make is too long here.
    found = [error_of(post(server, "/v1/chat/completions", body(depth))) for depth in (150, 190, 200, 40_000)]
    assert {status for status, *_ in found} == {400}
    assert ["recursion limit exceeded" in message for _, message, _ in found] == [False, False, True, True]


def test_sdk_raises_its_own_errors(server: Serving, client: Any):
    with pytest.raises(openai.NotFoundError, match="the model 'gpt' does not exist; the server has 'policy'") as raised:
        client.completions.create(model="gpt", prompt="a")
    assert (raised.value.param, raised.value.code) == ("model", "model_not_found")
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_health_needs_no_key_and_metrics_do(server: Serving):
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok", "model": "policy"}
    assert httpx.get(f"{server.url}/metrics").status_code == 401
    assert post(server, "/v1/completions", {**BODY, "max_tokens": 1}).status_code == 200
    text = httpx.get(f"{server.url}/metrics", headers={"Authorization": "Bearer secret"}).text
    assert "marin_rl_slots 16.0" in text
    assert "marin_rl_sequences 0.0" in text
    counts = [re.search(rf"^marin_rl_{kind}_tokens_total (\S+)", text, re.MULTILINE) for kind in ("prompt", "sampled")]
    assert all(count is not None and float(count[1]) >= 1 for count in counts)
    assert 'marin_rl_requests_total{path="/health",status="200"}' in text


def test_without_a_key_only_this_machine_is_served():
    """A web page with a host name of its own that resolves to 127.0.0.1 is refused."""
    with serving(ScriptedSampler({}, stop_token_ids=[257])) as keyless:
        for host, status in (
            ("localhost:1", 200),
            ("127.0.0.1", 200),
            ("[::1]:8000", 200),
            ("[::1", 403),
            ("evil.example", 403),
        ):
            response = httpx.get(f"{keyless.url}/v1/models", headers={"Host": host})
            assert response.status_code == status
        assert error_of(response)[1].startswith("the host 'evil.example' is not this machine")


# Log-probabilities of prompts.


@pytest.fixture(scope="module")
def scoring() -> Iterator[Serving]:
    """A server that scores prompts."""
    model, trainer = tiny_model(), start_devices(TrainerConfig(), rows_per_device=1, alone=True)
    score = prompt_scorer(model, trainer, CONTEXT, TOKENIZER.pad_token_id)
    with serving(tiny_sampler(), key="secret", score=score) as started:
        yield started


ECHO = {"model": "policy", "echo": True, "max_tokens": 0, "logprobs": 0, "return_token_ids": True}


@pytest.mark.medium
def test_echo_returns_the_log_probs_of_prompts(scoring: Serving):
    """Against levanter's forward pass; the longest prompt has the length of the context."""
    longest = np.random.default_rng(0).integers(0, 256, CONTEXT).tolist()
    logits = tiny_model()(hax.named(np.array(longest, np.int32), "position"), attn_mask=AttentionMask.causal()).array
    expected = np.asarray(jax.nn.log_softmax(logits))[np.arange(CONTEXT - 1), longest[1:]]
    prompts = [longest[:size] for size in (1, 2, 30, CONTEXT)]
    body = post(scoring, "/v1/completions", {**ECHO, "prompt": prompts, "temperature": 0.3}).json()
    assert body["usage"] == {"prompt_tokens": 289, "completion_tokens": 0, "total_tokens": 289}
    for index, (prompt, choice) in enumerate(zip(prompts, body["choices"], strict=True)):
        assert (choice["index"], choice["prompt_token_ids"], choice["token_ids"]) == (index, prompt, [])
        first, *rest = choice["logprobs"]["token_logprobs"]
        assert first is None
        np.testing.assert_allclose(rest, expected[: len(rest)], atol=2e-5)


def test_echo_of_a_text(scoring: Serving):
    with openai.OpenAI(base_url=f"{scoring.url}/v1", api_key="secret", max_retries=0) as client:
        [choice] = client.completions.create(model="policy", prompt="2+3=", max_tokens=0, echo=True, logprobs=1).choices
    assert choice.text == "2+3="
    assert choice.logprobs.tokens == ["2", "+", "3", "="]
    assert choice.logprobs.text_offset == [0, 1, 2, 3]
    assert choice.finish_reason == "length"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 1}, "echo: true needs max_tokens: 0"),
        ({"logprobs": None}, "echo: true needs max_tokens: 0 and logprobs"),
        ({"n": 2}, "n: 1"),
        ({"stream": True}, "no stream"),
        ({"echo": False}, "max_tokens must be at least 1, or 0 with echo"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [5, 264]}, "prompt token 264 is not in the vocabulary of 264"),
        ({"prompt": [5] * (CONTEXT + 1)}, f"maximum context length is {CONTEXT}"),
        ({"prompt": "a" * (CONTEXT + 1)}, f"maximum context length is {CONTEXT}"),
        ({"prompt": [[1]] * 65}, "a request has between 1 and 64"),
    ],
)
def test_invalid_echo_is_refused(scoring: Serving, changes: dict[str, Any], message: str):
    response = post(scoring, "/v1/completions", {**ECHO, "prompt": [1, 2], **changes})
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


def test_a_server_without_scores_refuses_echo(server: Serving):
    response = post(server, "/v1/completions", {**ECHO, "prompt": [1, 2]})
    assert error_of(response)[0] == 400
    assert "start it with --score_prompts true" in error_of(response)[1]


def test_scored_sequences_count_while_they_wait():
    with serving(tiny_sampler(), key="secret", score=lambda prompts: [], max_sequences=2) as started:
        response = post(started, "/v1/completions", {**ECHO, "prompt": [[1, 2]] * 3})
        assert response.status_code == 429
