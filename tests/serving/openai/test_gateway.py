# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Agents written with the `openai` SDK against the gateway: what they get, and what their rollouts record."""

import asyncio
import functools
import json
import re
import socket
import sys
import threading
import urllib.parse
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import pytest

from marin_rl.environments.agent import AgentEnvironment, CommandEpisode, FunctionEpisode
from marin_rl.environments.base import AgentEpisode
from marin_rl.environments.random_reward import RANDOM, RandomRewards
from marin_rl.environments.single_turn import SingleTurnEnvironment
from marin_rl.environments.splits import Split
from marin_rl.parts.rl import make_gateway
from marin_rl.rollouts import agent_recorder
from marin_rl.rollouts.attempt import Limits
from marin_rl.rollouts.reward_functions import RewardFunctions
from marin_rl.rollouts.run_rollouts import AllRolloutsFailedError, RolloutRunner, run_tasks
from marin_rl.sampling.sampler import Sampler, SampleRequest
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import byte_tokenizer
from marin_rl.types import Rollout, RolloutGroup, RolloutStatus, Task
from marin_rl.utils.event_loop import BackgroundLoop
from tests.hostile_errors import HOSTILE_ERRORS
from tests.rollouts.rollout_cases import check_experts
from tests.scripted_sampler import ScriptedSampler, TokenSampler
from tests.serving import serving_cases

openai = pytest.importorskip("openai")

TOKENIZER = ChatTokenizer(byte_tokenizer())
[END] = TOKENIZER.stop_token_ids
TASK = Task("t", "agents", ({"role": "user", "content": "hi"},), "4")
VOCAB_SIZE = TOKENIZER.vocab_size + 6
"""The vocabulary of a model may be padded."""
LIMITS = Limits(max_length=120, max_new_tokens=8, max_turns=6, max_seconds=serving_cases.TIMEOUT)

Play = Callable[..., Any]


class Client:
    """A few calls of the SDK."""

    def __init__(self, base_url: str, api_key: str) -> None:
        # The connection is plain HTTP, and preparing TLS is slow.
        http = openai.DefaultAsyncHttpxClient(verify=False)
        self.sdk = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, http_client=http)

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.sdk.close()

    async def chat(self, *contents: str, **options: Any) -> Any:
        """Send a conversation, in which user and assistant alternate; return the response."""
        roles = ("user", "assistant")
        messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(contents)]
        return await self.sdk.chat.completions.create(model="any", messages=messages, **options)

    async def say(self, *contents: str, **options: Any) -> str:
        """Return the text of the reply."""
        return (await self.chat(*contents, **options)).choices[0].message.content


def conversation(talk: Callable[[Client], Awaitable[None]], reward: float = 1.0) -> Play:
    """An agent that talks to the policy."""

    async def play(task: dict[str, Any], base_url: str, api_key: str) -> float:
        async with Client(base_url, api_key) as client:
            await talk(client)
        return reward

    return play


def last_word(request: SampleRequest) -> Sequence[int]:
    """Reply `R` and the last user message, in capitals."""
    text = TOKENIZER.decode_reply(request.prompt_tokens, skip_special_tokens=False)
    word = text.rpartition("<|user|>")[2].partition("<|")[0]
    return (*f"R{word.upper()}".encode(), END)


def scripted(script: Callable[[SampleRequest], Sequence[int]]) -> ScriptedSampler:
    return ScriptedSampler(script, stop_token_ids=[END], version=7, experts=True)


def run(
    play: Play | AgentEpisode,
    *,
    sampler: Sampler | None = None,
    size: int = 1,
    limits: Limits = LIMITS,
    temperature: float = 1.0,
    random_rewards: RandomRewards | None = None,
) -> tuple[RolloutGroup, list[SampleRequest]]:
    """Run an agent's attempts at one task; return their rollouts and requests."""
    sampler = scripted(last_word) if sampler is None else sampler

    def make(task: Task, seed: int) -> AgentEpisode:
        values = {"id": task.id, "messages": list(task.messages), "answer": task.answer, "seed": seed}
        return play if isinstance(play, AgentEpisode) else FunctionEpisode(play, "play of agent.py", {}, values)

    splits = {split: [TASK] if split is Split.TRAIN else [] for split in Split}
    source = SingleTurnEnvironment("agents", splits, score=None)
    environment = AgentEnvironment("agents", splits, source, make)
    connect = make_gateway(TOKENIZER, limits, VOCAB_SIZE)
    reward_functions = RewardFunctions(random_rewards=random_rewards)
    runner = RolloutRunner(environment, TOKENIZER, sampler, limits, reward_functions=reward_functions, connect=connect)
    try:
        [group] = run_tasks(runner, [TASK], group_size=size, temperature=temperature, seed_parts=(3, "training"))
    finally:
        runner.loop.close()
    for rollout in group.rollouts:
        check_experts(rollout)
    return group, sampler.requests if isinstance(sampler, ScriptedSampler) else []


def only(play: Play | AgentEpisode, **options: Any) -> Rollout:
    [rollout] = run(play, **options)[0].rollouts
    return rollout


def replies(rollout: Rollout) -> list[str]:
    return [turn.messages[-1]["content"] for turn in rollout.turns]


def test_one_conversation_is_one_sequence():
    async def play(task: dict[str, Any], base_url: str, api_key: str) -> float:
        async with Client(base_url, api_key) as client:
            first = await client.say(task["messages"][0]["content"])
            second = await client.say("hi", first, "again")
            assert (task["id"], task["answer"], first, second) == ("t", "4", "RHI", "RAGAIN")
        return 0.5

    group, requests = run(play)
    [rollout] = group.rollouts
    assert (rollout.status, dict(rollout.rewards)) == (RolloutStatus.COMPLETED, {"reward": 0.5})
    first, second = rollout.turns
    prompt = TOKENIZER.prompt_tokens(TASK.messages)
    assert (first.observation_tokens, first.starts_sequence) == (prompt, True)
    assert first.generation.token_ids == (*b"RHI", END)
    assert not second.starts_sequence
    assert (second.generation.first_version, second.generation.logprobs) == (7, (-1.0,) * 7)
    # The second prompt has the sampled tokens, and the sampler continues the conversation.
    assert requests[1].prompt_tokens == (
        *prompt,
        *first.generation.token_ids,
        *second.observation_tokens,
    )
    assert requests[0].conversation == requests[1].conversation
    assert rollout.metrics["sequences"] == 1


def test_attempts_are_reproducible_and_differ_in_their_seeds():
    @conversation
    async def play(client: Client) -> None:
        # Concurrent sub-agents: seeds do not depend on their order.
        await asyncio.gather(*(client.say(word) for word in ("a", "b", "c")))

    def seeds() -> dict[tuple[int, ...], set[int]]:
        _, requests = run(play, size=3)
        found: dict[tuple[int, ...], set[int]] = {}
        for request in requests:
            found.setdefault(request.prompt_tokens, set()).add(request.seed)
        return found

    first = seeds()
    assert [len(values) for values in first.values()] == [3, 3, 3]
    assert seeds() == first


def test_branches_sub_agents_and_rewritten_history_are_sequences():
    @conversation
    async def play(client: Client) -> None:
        await client.say("a")
        await client.say("a", "RA", "b")
        await client.say("a", "RA", "c")  # a branch
        await client.say("z")  # a sub-agent
        await client.say("a", "RA", "b", "RB", "d")  # continues the first
        await client.say("a", "changed", "e")  # rewritten history

    rollout = only(play)
    # Sequences in the order of their last replies.
    assert replies(rollout) == ["RC", "RZ", "RA", "RB", "RD", "RE"]
    assert [turn.starts_sequence for turn in rollout.turns] == [True, True, True, False, False, True]
    assert rollout.metrics["sequences"] == 4
    # The branch repeats the exact tokens of its beginning, without loss.
    branch, _, first, second = rollout.turns[:4]
    begin = first.observation_tokens + first.generation.token_ids
    assert branch.observation_tokens[: len(begin)] == begin
    assert len(branch.observation_tokens) == len(begin) + len(second.observation_tokens)
    # Each reply of the policy is one message of the transcript.
    shown = [message["content"] for message in rollout.messages if message["role"] == "assistant"]
    assert sorted(shown) == ["RA", "RA", "RB", "RC", "RD", "RE", "RZ"]


def test_repeated_reply_keeps_its_sampled_tokens():
    """A reply that its text would not be tokenized to: an end token inside, which the text leaves out."""

    def odd(request: SampleRequest) -> Sequence[int]:
        return (*b"x", 259, *b"y", END)

    @conversation
    async def play(client: Client) -> None:
        text = await client.say("a")
        assert text == "xy"
        await client.say("a", text, "b")

    group, requests = run(play, sampler=scripted(odd))
    assert [turn.starts_sequence for turn in group.rollouts[0].turns] == [True, False]
    assert requests[1].prompt_tokens[: len(requests[0].prompt_tokens) + 4][-4:] == (120, 259, 121, END)


def test_temperature_and_seed_are_those_of_the_run_and_others_are_refused():
    @conversation
    async def play(client: Client) -> None:
        await client.say("a", temperature=0.3, seed=5, max_tokens=1000)
        with pytest.raises(openai.BadRequestError, match=r"top_p is 0\.5, but the server does not implement it"):
            await client.say("a", top_p=0.5)
        with pytest.raises(openai.BadRequestError, match="logit_bias"):
            await client.say("a", logit_bias={"5": 1})

    for temperature in (1.0, 0.0):
        group, requests = run(play, temperature=temperature)
        assert group.rollouts[0].status is RolloutStatus.COMPLETED
        [request] = requests
        assert (request.temperature, request.max_new_tokens) == (temperature, LIMITS.max_new_tokens)
        assert request.seed != 5


def test_streams_choices_stop_strings_and_tokens():
    @conversation
    async def play(client: Client) -> None:
        stream = await client.chat("abc", stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "RABC"
        assert await client.say("word", stop=["O"]) == "RW"
        two = await client.chat("n", n=2)
        assert [choice.message.content for choice in two.choices] == ["RN", "RN"]
        done = await client.sdk.completions.create(model="any", prompt=[1, 2, 3], max_tokens=2)
        assert done.choices[0].finish_reason == "length"
        assert [card.id async for card in await client.sdk.models.list()] == ["policy"]

    rollout = only(play)
    assert replies(rollout) == ["RABC", "RWO", "RN", "RN", "R" + chr(1)]
    assert rollout.turns[1].generation.token_ids == tuple(b"RWO")
    assert rollout.turns[4].observation_tokens == (1, 2, 3)


def test_posted_rewards():
    async def play(task: Any, base_url: str, api_key: str) -> dict[str, float]:
        url = base_url.removesuffix("/v1") + "/reward"
        headers = {"Authorization": f"Bearer {api_key}"}
        async with Client(base_url, api_key) as client, httpx.AsyncClient(headers=headers) as http:
            reply = await client.chat("a")
            await client.say("a", "RA", "b")

            async def post(**body: Any) -> httpx.Response:
                return await http.post(url, json=body)

            assert (await post(reward=9.0, completion_id=reply.id)).status_code == 200
            assert (await post(reward=0.25, completion_id=reply.id)).status_code == 200  # replaces it
            assert (await post(reward={"style": 0.5})).status_code == 200
            for body in ({"reward": "x"}, {"reward": 1.0, "completion_id": "?"}, {"reward": {"a b": 1.0}}, {}):
                assert (await post(**body)).status_code == 400
            assert (await http.post(url, json={"reward": 1}, headers={"Authorization": "no"})).status_code == 401
            assert (await http.post(url.replace("training", "other"), json={"reward": 1.0})).status_code == 404
        return {"reward": 1.0}

    rollout = only(play)
    assert dict(rollout.rewards) == {"reward": 1.25, "style": 0.5}
    assert [turn.reward for turn in rollout.turns] == [0.25, None]


async def _ask(base_url: str, api_key: str) -> None:
    async with Client(base_url, api_key) as client:
        await client.say("a")


async def raises(task: Any, base_url: str, api_key: str) -> float:
    await _ask(base_url, api_key)
    raise KeyError("missing")


async def hangs(task: Any, base_url: str, api_key: str) -> float:
    await _ask(base_url, api_key)
    await asyncio.Event().wait()
    return 1.0


_late = threading.Event()


def blocks(task: Any, base_url: str, api_key: str) -> float:
    _late.wait()
    return 1.0


async def silent(task: Any, base_url: str, api_key: str) -> float:
    return 1.0


async def nan(task: Any, base_url: str, api_key: str) -> float:
    await _ask(base_url, api_key)
    return float("nan")


async def exits(task: Any, base_url: str, api_key: str) -> float:
    sys.exit(3)


async def exits_in_a_callback(task: Any, base_url: str, api_key: str) -> float:
    asyncio.get_running_loop().call_soon(sys.exit, 4)
    await asyncio.Event().wait()
    return 1.0


async def stops_its_loop(task: Any, base_url: str, api_key: str) -> float:
    asyncio.get_running_loop().stop()
    await asyncio.Event().wait()
    return 1.0


async def cancels_itself(task: Any, base_url: str, api_key: str) -> float:
    for one in asyncio.all_tasks():
        one.cancel()
    await asyncio.sleep(0)
    return 1.0


async def many(task: Any, base_url: str, api_key: str) -> dict[str, float]:
    return {f"r{index}": 1.0 for index in range(100_000)}


class Hostile(Mapping[str, float]):
    """Rewards whose reading raises."""

    def __len__(self) -> int:
        raise KeyboardInterrupt

    __getitem__ = __iter__ = __len__  # type: ignore[assignment]


def hostile(task: Any, base_url: str, api_key: str) -> Mapping[str, float]:
    return Hostile()


def raising(error: BaseException, is_async: bool) -> Play:
    def fails(task: Any, base_url: str, api_key: str) -> float:
        raise error

    async def fails_later(task: Any, base_url: str, api_key: str) -> float:
        raise error

    return fails_later if is_async else fails


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (raises, r"play of agent.py raised KeyError: 'missing'\n  \S+test_gateway.py:\d+, in raises: raise KeyError"),
        (silent, "the agent got no reply of the policy"),
        (nan, "returned an invalid reward: reward 'reward' is nan"),
        (exits, "play of agent.py raised SystemExit: 3"),
        (exits_in_a_callback, "play of agent.py raised SystemExit: 4"),
        (stops_its_loop, "RuntimeError: Event loop stopped before Future completed"),
        (cancels_itself, "raised CancelledError"),
        (many, "there are 100000 rewards; give at most 64"),
        (hostile, "returned an invalid reward: KeyboardInterrupt"),
        *(
            pytest.param(raising(error, is_async), re.escape(text), id=f"{name}-{is_async}")
            for name, (error, text) in HOSTILE_ERRORS.items()
            for is_async in (False, True)
        ),
    ],
)
def test_bad_agent_costs_only_its_rollout(bad: Play, message: str):
    turns: Iterator[int] = iter(range(2))

    def play(task: Any, base_url: str, api_key: str) -> Any:
        if next(turns) == 0:
            return bad(task, base_url, api_key)

        async def good() -> float:
            await _ask(base_url, api_key)
            return 1.0

        return good()

    group, _ = run(play, size=2)
    by_status = {rollout.status: rollout for rollout in group.rollouts}
    assert set(by_status) == {RolloutStatus.FAILED, RolloutStatus.COMPLETED}
    assert re.search(message, str(by_status[RolloutStatus.FAILED].error))


@pytest.mark.parametrize("bad", [hangs, blocks])
def test_late_agent_is_timed_out(bad: Play, monkeypatch: pytest.MonkeyPatch):
    _late.clear()
    # The same limit would end the run if the event loop was slow to respond.
    responds = BackgroundLoop.responds
    monkeypatch.setattr(BackgroundLoop, "responds", lambda loop, seconds: responds(loop, serving_cases.TIMEOUT))
    limits = Limits(max_length=120, max_new_tokens=8, max_turns=6, max_seconds=0.3)
    with pytest.raises(AllRolloutsFailedError, match=r"took longer than 0\.3 s \(rollouts\.max_seconds\)"):
        run(bad, limits=limits)
    _late.set()


@pytest.mark.parametrize("handles", [True, False])
def test_limits_truncate_the_rollout(handles: bool):
    @functools.partial(conversation, reward=0.5)
    async def play(client: Client) -> None:
        await client.say("a")
        await client.say("b")
        if not handles:
            await client.say("c")
        with pytest.raises(openai.BadRequestError, match=r"maximum of 2 replies \(rollouts\.max_turns\)"):
            await client.say("c")

    limits = Limits(max_length=120, max_new_tokens=8, max_turns=2)
    rollout = only(play, limits=limits)
    assert (rollout.status, len(rollout.turns)) == (RolloutStatus.TRUNCATED, 2)
    assert dict(rollout.rewards) == ({"reward": 0.5} if handles else {"truncated": 0.0})


@pytest.mark.parametrize(("stream", "lengths"), [(False, [5, 5, 2]), (True, [5, 5, 2]), (False, [8, 4])])
def test_concurrent_requests_together_keep_the_token_limit(stream: bool, lengths: list[int]):
    texts = {length: "x" * (length - 2) for length in lengths}

    async def ask(client: Client, text: str) -> str:
        if not stream:
            return await client.say(text)
        chunks = await client.chat(text, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async def play(task: Any, base_url: str, api_key: str) -> float:
        async with Client(base_url, api_key) as client:
            asked = [ask(client, texts[lengths[0]]) for _ in range(4)]
            results = await asyncio.gather(*asked, return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        assert len(errors) == 4 - len(lengths)
        assert all(isinstance(error, openai.APIError) for error in errors)
        assert all("maximum of 12 tokens (rollouts.max_tokens)" in str(error) for error in errors)
        return 0.5

    rollout = only(play, limits=Limits(max_length=120, max_new_tokens=8, max_turns=6, max_tokens=12))
    assert [len(turn.generation.token_ids) for turn in rollout.turns] == lengths
    assert (rollout.status, dict(rollout.rewards)) == (RolloutStatus.TRUNCATED, {"reward": 0.5})


@pytest.mark.parametrize("stream", [False, True])
def test_choices_of_a_failed_response_are_not_recorded(stream: bool):
    received: list[int] = []

    async def ask(client: Client) -> None:
        response = await client.chat("a", "RA", "xxx", n=3, stream=stream)
        async for chunk in response:
            received.append(chunk.choices[0].index)

    @functools.partial(conversation, reward=0.5)
    async def play(client: Client) -> None:
        await client.say("a")
        # The first two choices take the 9 tokens that are left.
        with pytest.raises(openai.APIError, match=r"maximum of 12 tokens \(rollouts\.max_tokens\)"):
            await ask(client)
        await client.say("a", "RA", "bcd")

    group, requests = run(play, limits=Limits(max_length=120, max_new_tokens=8, max_turns=6, max_tokens=12))
    [rollout] = group.rollouts
    assert received == ([0, 1] if stream else [])
    assert replies(rollout) == ["RA", "RBCD"]
    assert [turn.starts_sequence for turn in rollout.turns] == [True, False]
    assert (rollout.status, dict(rollout.rewards)) == (RolloutStatus.TRUNCATED, {"reward": 0.5})
    # The sampler does not continue the first choice.
    assert requests[1].conversation != requests[-1].conversation


def test_replies_of_disconnected_clients_do_not_count():
    @conversation
    async def play(client: Client) -> None:
        complete = client.sdk.completions.create
        for _ in range(3):
            asked = asyncio.ensure_future(complete(model="any", prompt=[65]))
            await asyncio.to_thread(serving_cases.until, lambda: not sampler.is_idle)
            asked.cancel()
            await asyncio.to_thread(serving_cases.until, lambda: sampler.is_idle)
        for _ in range(2):
            assert (await complete(model="any", prompt=[65], stop=["D"])).choices[0].text == "ABC"
        with pytest.raises(openai.BadRequestError, match=r"maximum of 2 replies"):
            await complete(model="any", prompt=[65], stop=["D"])

    limits = Limits(max_length=120, max_new_tokens=8, max_turns=2, max_seconds=serving_cases.TIMEOUT)
    sampler = TokenSampler(length=10**9)  # It would sample without an end.
    assert replies(only(play, sampler=sampler, limits=limits)) == ["ABCD", "ABCD"]


def abandon(base_url: str, api_key: str, stream: bool) -> None:
    """Send a request, and close the connection before the reply can arrive."""
    address = urllib.parse.urlsplit(base_url)
    body = json.dumps({"model": "any", "prompt": [65], "stream": stream}).encode()
    head = f"POST {address.path}/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {api_key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((address.hostname, address.port)) as client:
        client.sendall(head.encode() + body)


@pytest.mark.parametrize("stream", [False, True])
def test_abandoned_requests_do_not_use_up_the_turns(stream: bool, monkeypatch: pytest.MonkeyPatch):
    """The sampler replies at once, so that only the recorder's look at the connection can find that it is closed."""
    has_left = threading.Event()
    notice = agent_recorder.notice_leaving

    async def notice_later() -> None:
        while not has_left.is_set():
            await asyncio.sleep(0.001)
        await notice()

    monkeypatch.setattr(agent_recorder, "notice_leaving", notice_later)

    async def play(task: Any, base_url: str, api_key: str) -> float:
        for _ in range(5):
            has_left.clear()
            await asyncio.to_thread(abandon, base_url, api_key, stream)
            has_left.set()
        async with Client(base_url, api_key) as client:
            assert [await client.say("a"), await client.say("b")] == ["RA", "RB"]
        return 1.0

    rollout = only(play, limits=Limits(max_length=120, max_new_tokens=8, max_turns=2))
    assert (rollout.status, replies(rollout)) == (RolloutStatus.COMPLETED, ["RA", "RB"])


HALF = "a\ud83d"


CALLS = [{"function": {"name": "f", "arguments": '{"x": "\\ud800"}'}}]
UNSENDABLE: list[tuple[str, dict[str, Any]]] = [
    *(
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], **body})
        for body in (
            {"model": HALF},
            {"messages": [{"role": "user", "content": HALF}]},
            {"messages": [{"role": HALF, "content": "a"}]},
            {"messages": [{"role": "user", "content": "a", HALF: 1}]},
            {"tools": [{"type": "function", "function": {"name": HALF}}]},
            {"metadata": {HALF: "a"}},
            {"stop": [HALF]},
            {HALF: 1},
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": CALLS}]},
        )
    ),
    ("completions", {"prompt": HALF}),
    ("completions", {"prompt": ["b", HALF]}),
]


def test_a_request_with_text_that_cannot_be_sent_is_refused_before_it_is_sampled():
    async def play(task: Any, base_url: str, api_key: str) -> float:
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        async with httpx.AsyncClient(headers=headers) as http, Client(base_url, api_key) as client:
            for path, body in UNSENDABLE:
                response = await http.post(f"{base_url}/{path}", content=json.dumps({"model": "any", **body}))
                assert response.status_code == 400
                assert "a lone surrogate is half a character" in response.json()["error"]["message"]
            await client.say("b")
        return 1.0

    group, requests = run(play)
    assert replies(group.rollouts[0]) == ["RB"]
    assert len(requests) == 1


REFUSED_REWARDS: dict[str, str] = {
    "many names": json.dumps({"reward": {f"r{index}": 1.0 for index in range(100_000)}}),
    "values": json.dumps({"reward": {f"r{index}": 1.0 for index in range(200_000)}}),
    "long name": json.dumps({"reward": {"r" * 129: 1.0}}),
    "name": json.dumps({"reward": {"a/b": 1.0}}),
    "half a character": json.dumps({"reward": {HALF: 1.0}}),
    "escape": json.dumps({"reward": {"\x1b[2J": 1.0}}),
    "nan": '{"reward": NaN}',
    "infinity": '{"reward": {"a": Infinity}}',
    "overflow": '{"reward": 1e999}',
    "large": '{"reward": -1.1e30}',
    "bool": '{"reward": true}',
    "text": '{"reward": "1"}',
    "nested": '{"reward": {"a": {"b": 1.0}}}',
    "other field": '{"reward": 1.0, "rewards": 2.0}',
    "id": json.dumps({"reward": 1.0, "completion_id": "c" * 100_000}),
    "no json": "reward=1",
}


def test_invalid_rewards_are_refused_by_name():
    statuses: dict[str, tuple[int, int]] = {}

    async def play(task: Any, base_url: str, api_key: str) -> None:
        url = base_url.removesuffix("/v1") + "/reward"
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        async with httpx.AsyncClient(headers=headers, timeout=serving_cases.TIMEOUT) as http:
            await _ask(base_url, api_key)
            for name, content in REFUSED_REWARDS.items():
                response = await http.post(url, content=content)
                statuses[name] = response.status_code, len(response.json()["error"]["message"])
            # Several posts together keep the limit, too.
            for start, stop, status in ((0, 40, 200), (40, 64, 200), (63, 65, 400), (0, 64, 200)):
                rewards = {f"r{index}": 0.5 for index in range(start, stop)}
                assert (await http.post(url, json={"reward": rewards})).status_code == status

    rollout = only(play)
    assert {status for status, _ in statuses.values()} == {400, 413}
    assert max(length for _, length in statuses.values()) < 1100
    assert dict(rollout.rewards) == {f"r{index}": 0.5 for index in range(64)}


def test_untrained_replies_are_no_part_of_the_rollout():
    async def play(task: Any, base_url: str, api_key: str) -> float:
        other = base_url.removesuffix("/v1") + "/untrained/v1"
        async with Client(base_url, api_key) as client, Client(other, api_key) as opponent:
            first = await client.say("a")
            replies = [await opponent.say("a", first, word) for word in ("b", "c")]
            assert replies == ["RB", "RC"]
            # A reply of the opponent is an observation, also if its conversation is continued.
            assert await client.say("a", first, "c", replies[1], "d") == "RD"
            # One beyond the context does not truncate the rollout.
            with pytest.raises(openai.BadRequestError, match="maximum context length is 120 tokens"):
                await opponent.say("a" * 200)
            reply = await opponent.chat("e")
            async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}) as http:
                body = {"reward": 1.0, "completion_id": reply.id}
                posted = await http.post(base_url.removesuffix("/v1") + "/reward", json=body)
            assert "is not the id of a response of this episode" in posted.text
        async with Client(other, "other") as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.say("a")
        return 1.0

    rollout = only(play, limits=Limits(max_length=120, max_new_tokens=8, max_turns=2, max_tokens=7))
    assert (rollout.status, rollout.metrics["sequences"]) == (RolloutStatus.COMPLETED, 1)
    assert replies(rollout) == ["RA", "RD"]
    _, second = rollout.turns
    assert b"RC" in bytes(token for token in second.observation_tokens if token < 256)


def test_prompt_beyond_the_context_truncates_the_rollout():
    @functools.partial(conversation, reward=0.5)
    async def play(client: Client) -> None:
        await client.say("a")
        with pytest.raises(openai.BadRequestError, match="maximum context length is 120 tokens"):
            await client.say("a" * 200)

    assert only(play).status is RolloutStatus.TRUNCATED

    async def at_once(task: Any, base_url: str, api_key: str) -> float:
        async with Client(base_url, api_key) as client:
            await client.say("a" * 200)
        return 0.5

    with pytest.raises(AllRolloutsFailedError, match="maximum context length is 120 tokens"):
        run(at_once)


@pytest.mark.parametrize("max_turns", [2, 1])
def test_random_control_replaces_returned_and_posted_rewards(max_turns: int):
    async def play(task: Any, base_url: str, api_key: str) -> float:
        url = base_url.removesuffix("/v1") + "/reward"
        async with Client(base_url, api_key) as client, httpx.AsyncClient() as http:
            reply = await client.chat("a")
            for body in ({"reward": 3.0, "completion_id": reply.id}, {"reward": 5.0}):
                await http.post(url, json=body, headers={"Authorization": f"Bearer {api_key}"})
            # With one turn, the limit of the run ends the episode here.
            await client.chat("b")
        return 7.0

    limits = Limits(max_length=120, max_new_tokens=8, max_turns=max_turns)
    group, _ = run(play, size=8, random_rewards=RandomRewards(0.5, frozenset([("agents", "t")])), limits=limits)
    rewards = [dict(rollout.rewards) for rollout in group.rollouts]
    assert {tuple(each) for each in rewards} == {(RANDOM,)}
    assert {each[RANDOM] for each in rewards} == {0.0, 1.0}


@pytest.mark.medium
def test_program_of_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET", "x")
    page = Path(__file__).parents[3] / "docs" / "pages" / "environments.md"
    [program] = re.findall(r"```python title=\"agent.py\"\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    file = tmp_path / "agent.py"
    file.write_text(f"{program}\nassert 'SECRET' not in os.environ\n")
    values = {"id": "t", "messages": list(TASK.messages), "answer": "RHI", "seed": 1}
    rollout = only(CommandEpisode([sys.executable, str(file)], ("PATH",), values))
    assert (rollout.error, dict(rollout.rewards)) == (None, {"reward": 1.0})


def test_program_and_its_children_end_at_the_time_limit(tmp_path: Path):
    pids = tmp_path / "pids"
    script = f"sleep 600 & echo $$ $! > {pids}; wait"
    started: list[int] = []
    # The start of the program may take longer than the first limit.
    for seconds in (1.0, 10.0, 100.0):
        limits = Limits(max_length=120, max_new_tokens=8, max_turns=6, max_seconds=seconds)
        with pytest.raises(AllRolloutsFailedError, match=f"took longer than {seconds:g} s"):
            run(CommandEpisode(["/bin/sh", "-c", script], (), {}), limits=limits)
        started = [int(pid) for pid in pids.read_text().split()] if pids.exists() else []
        if len(started) == 2:
            break
    assert len(started) == 2
    serving_cases.until(lambda: all(serving_cases.has_ended(pid) for pid in started))
    with pytest.raises(AllRolloutsFailedError, match=r"ended with exit status 3\nno luck"):
        run(CommandEpisode(["/bin/sh", "-c", "echo no luck; exit 3"], (), {}))
    with pytest.raises(AllRolloutsFailedError, match="cannot start '/no/such/program'"):
        run(CommandEpisode(["/no/such/program"], (), {}))


def test_tool_calls_continue_their_sequence():
    call = {"name": "add", "arguments": {"a": 1}}
    reply = f"<tool_call>{json.dumps(call)}</tool_call>"

    def script(request: SampleRequest) -> Sequence[int]:
        return (*(reply.encode() if 262 not in request.prompt_tokens[-20:] else b"ok"), END)

    @conversation
    async def play(client: Client) -> None:
        messages: list[Any] = [{"role": "user", "content": "1?"}]
        tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
        options = {"model": "m", "tools": tools}
        answer = (await client.sdk.chat.completions.create(messages=messages, **options)).choices[0].message
        [made] = answer.tool_calls
        messages += [answer.model_dump(exclude_none=True)]
        messages += [{"role": "tool", "tool_call_id": made.id, "content": "2"}]
        await client.sdk.chat.completions.create(messages=messages, **options)

    limits = Limits(max_length=2000, max_new_tokens=80, max_turns=6)
    rollout = only(play, sampler=scripted(script), limits=limits)
    assert [turn.starts_sequence for turn in rollout.turns] == [True, False]
