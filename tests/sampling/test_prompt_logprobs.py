# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import copy
import math
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from marin_rl.config.reference_config import ServerReferenceConfig
from marin_rl.sampling.client import CompletionsClient, ServerLostError
from marin_rl.sampling.prompt_logprobs import MAX_TOKENS, PromptScorer, divide
from marin_rl.sampling.sampler import SamplerError
from marin_rl.tokenization.load import byte_tokenizer
from marin_rl.utils.retry import RetryConfig
from tests.free_port import free_port

SEQUENCES = [[1, 2, 3], [4, 5], [6]] * 11
Change = Callable[[dict[str, Any]], Any]


class StubClient(CompletionsClient):
    """Answers as vLLM does: the log-prob of token t is -t/10."""

    def __init__(self, change: Change = lambda answer: answer) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._change = change

    def open(self) -> httpx.AsyncClient:
        return httpx.AsyncClient()

    async def post(self, client: httpx.AsyncClient, index: int, body: dict[str, Any]) -> object:
        self.bodies.append(body)
        prompts = [list(p.encode()) if isinstance(p, str) else p for p in body["prompt"]]
        choices = [
            {
                "index": number,
                "text": "",
                "prompt_token_ids": list(prompt),
                "token_ids": [],
                "logprobs": {"token_logprobs": [None, *(-token / 10 for token in prompt[1:])]},
            }
            for number, prompt in enumerate(prompts)
        ]
        return self._change({"choices": choices})


def test_log_probs_are_in_the_order_of_the_tokens():
    client = StubClient()
    found = PromptScorer(client, "teacher").score(SEQUENCES)
    assert found == [value for one in SEQUENCES for value in (0.0, *(-token / 10 for token in one[1:]))]
    assert [len(body["prompt"]) for body in client.bodies] == [16, 16, 1]
    assert client.bodies[2] == {
        "model": "teacher",
        "prompt": [[6]],
        "max_tokens": 0,
        "echo": True,
        "logprobs": 0,
        "return_token_ids": True,
        "temperature": 1.0,
    }


def test_requests_have_a_limit_of_tokens():
    long = [0] * (MAX_TOKENS // 2)
    assert [len(part) for part in divide([long, long, [1], [0] * 2 * MAX_TOKENS, [1]])] == [2, 1, 1, 1]


def in_first(change: Callable[[dict[str, Any]], Any]) -> Change:
    def changed(answer: dict[str, Any]) -> Any:
        answer = copy.deepcopy(answer)
        change(answer["choices"][0])
        return answer

    return changed


def with_logprobs(*values: Any) -> Change:
    return in_first(lambda choice: choice["logprobs"].update(token_logprobs=list(values)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda answer: {"choices": answer["choices"][:-1]}, "not one completion for each of the 16 prompts"),
        (lambda answer: "no", "not one completion for each"),
        (lambda answer: {"choices": answer["choices"][::-1]}, "not in the order of the prompts"),
        (in_first(lambda choice: choice.pop("prompt_token_ids")), "must honour return_token_ids"),
        (in_first(lambda choice: choice.update(prompt_token_ids=[1, 2, 9])), "log-probs of other tokens"),
        (in_first(lambda choice: choice.pop("logprobs")), "token_logprobs is None"),
        (with_logprobs(None, -0.1), r"token_logprobs is \[-0.1\] .* each of the 2 tokens"),
        # One number too many, as from a server that shifts them.
        (with_logprobs(None, -0.1, -0.2, -0.3), "each of the 2 tokens"),
        (with_logprobs(None, None, -0.2), "log-probability None"),
        (with_logprobs(None, 0.5, -0.2), r"log-probability 0\.5; it must be finite and at most 0"),
        (with_logprobs(None, math.nan, -0.2), "log-probability nan"),
        (with_logprobs(None, -math.inf, -0.2), "log-probability -inf"),
        (with_logprobs(None, -9999.0, -0.2), r"log-probability -9999\.0"),
        (with_logprobs(None, "-0.1", -0.2), "log-probability '-0.1'"),
    ],
)
def test_a_wrong_response_is_refused(change: Change, message: str):
    with pytest.raises(SamplerError, match=message):
        PromptScorer(StubClient(change), "teacher").score(SEQUENCES[:16])


def test_another_tokenizer_is_refused():
    tokenizer, asked = byte_tokenizer(), []

    def answer_as(of_server: Callable[[str], list[int]]) -> Change:
        def changed(answer: dict[str, Any]) -> Any:
            for choice in answer["choices"]:
                asked.append(bytes(choice["prompt_token_ids"]).decode())
                tokens = of_server(asked[-1])
                values = [None, *[-1.0] * (len(tokens) - 1)]
                choice |= {"prompt_token_ids": tokens, "logprobs": {"token_logprobs": values}}
            return answer

        return changed

    same = PromptScorer(StubClient(answer_as(lambda text: tokenizer(text)["input_ids"])), "teacher")
    same.check_tokenizer(tokenizer, 12)
    assert {" 東京", "<|assistant|>"} <= set(asked)
    # The limit is that of the rollouts, which the server's context may equal.
    assert max(len(tokenizer(text)["input_ids"]) for text in asked) <= 12
    # The same bytes, without the added tokens.
    other = PromptScorer(StubClient(answer_as(lambda text: list(text.encode()))), "teacher")
    with pytest.raises(SamplerError, match=r"divides '<\|pad\|>' into the tokens \[60, .* tokenizer into \[256\]"):
        other.check_tokenizer(tokenizer, 12)


def test_a_dead_server_is_named():
    base_url = f"http://127.0.0.1:{free_port()}/v1"
    server = ServerReferenceConfig(base_url, "teacher", timeout=5.0, retry=RetryConfig(give_up_seconds=0.0))
    client = CompletionsClient(server)
    with pytest.raises(ServerLostError, match=rf"{base_url} does not respond .*check reference\.base_url"):
        PromptScorer(client, "teacher").score([[1, 2]])
