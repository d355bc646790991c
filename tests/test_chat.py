# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The chat in the terminal, with input from a pipe."""

import io
import json
import math
import re
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import pytest

from marin_rl.chat import main
from marin_rl.environments.base import Step
from marin_rl.rollouts.attempt import Attempt, Limits
from marin_rl.rollouts.rollout_builder import RolloutBuilder
from marin_rl.sampling.group_sampler import GroupSampler
from marin_rl.sampling.sampler import SampledTokens, SampleRequest
from marin_rl.serving.chat import TerminalChat
from marin_rl.sessions.served_policy import load_served_policy
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import byte_tokenizer, plain_template
from marin_rl.types import Generation, Message, StopReason, Task
from marin_rl.utils.settings.yaml_text import parse_yaml
from tests.scripted_sampler import BatchSampler, ScriptedSampler
from tests.tiny_run import TinyRun
from tests.tokenization.conftest import THINKING, chatml_tokenizer

Capture = pytest.CaptureFixture[str]
BYTES = ChatTokenizer(byte_tokenizer())
END = 257


def chat_of(sampler: BatchSampler, tokenizer: ChatTokenizer = BYTES, **settings: object) -> TerminalChat:
    return TerminalChat(
        sampler, tokenizer, **{"max_context": 1000, "max_tokens": 50, "temperature": 1.0, "seed": 0, **settings}
    )


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs the command with lines of standard input."""

    def run(run: Path, *lines: str, **options: object) -> int:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        return main(["--run", str(run), *arguments])

    return run


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "give either run"),
        (["--model", "b", "--step", "3"], "only a run has steps"),
        (["--run", "a", "--temperature", "-1"], "temperature is -1"),
        (["--run", "a", "--temperature", "1e-40"], "it must be 0 (greedy) or at least"),
        (["--run", "missing"], "'missing' is not a run directory"),
        (["--model", "missing"], "--model is 'missing', which is not a folder"),
    ],
)
def test_mistakes_are_named(argv: list[str], message: str, capfd: Capture):
    assert main(argv) == 1
    assert message in capfd.readouterr().err


def test_a_closed_input_is_named(monkeypatch: pytest.MonkeyPatch, capfd: Capture):
    monkeypatch.setattr("sys.stdin", None)
    assert main(["--model", "missing"]) == 1
    assert "standard input" in capfd.readouterr().err


@pytest.fixture
def multi_turn(finished_run: TinyRun, tmp_path: Path) -> Path:
    """The finished run, as if its episodes had had up to three replies."""
    run = tmp_path / "run"
    shutil.copytree(finished_run.path, run)
    config = parse_yaml((run / "config.yaml").read_text(), "the config")
    config["rollouts"]["max_turns"] = 3
    (run / "config.yaml").write_text(json.dumps(config))
    return run


@pytest.mark.medium
def test_a_greedy_chat_equals_the_sampler(multi_turn: Path, typed: Callable[..., int], capfd: Capture):
    """Replies and their probabilities, of two turns in one context, for two steps of the run."""
    for step in (6, 1):
        policy = load_served_policy(run=str(multi_turn), step=step, max_context=16)

        def greedy(prompt: Sequence[int], policy=policy) -> Generation:
            [generation] = policy.sampler.sample([SampleRequest(tuple(prompt), 5, min(3, 16 - len(prompt)), 0.0)])
            return generation

        prompt = BYTES.prompt_tokens([Message(role="user", content="2x3")])
        first = greedy(prompt)
        history = [
            Message(role="user", content="2x3"),
            Message(role="assistant", content=BYTES.decode_reply(first.token_ids)),
        ]
        context = (*prompt, *first.token_ids)
        added, is_rewritten = BYTES.observation_tokens(history, context, [Message(role="user", content="4")])
        assert not is_rewritten
        second = greedy((*context, *added))
        lines = ("2x3", "/probs", "4", "too long", "/reset", "2x3")
        assert typed(multi_turn, *lines, step=step, temperature=0, max_context=16) == 0
        output, notes = capfd.readouterr()
        replies = [BYTES.decode_reply(generation.token_ids) for generation in (first, second)]
        shown = [line for line in output.splitlines() if not re.search(r"probability|─|0\.\d{4}|1\.0000", line)]
        assert shown == [*replies, replies[0]]
        probabilities = [float(text) for text in re.findall(r"[01]\.\d{4}", output)]
        assert probabilities == pytest.approx([math.exp(value) for value in first.logprobs], abs=1e-4)
        assert re.search(r"not sent: .* would have \d+ tokens, .* the context of 16 .*; /reset starts a new", notes)
        assert f"(step {step}, 16 tokens of context, temperature 0); /help" in notes


@pytest.mark.medium
def test_each_line_is_a_conversation_if_episodes_have_one_reply(
    finished_run: TinyRun, typed: Callable[..., int], capfd: Capture
):
    """Replies are those of the sampler to each message alone; the context never fills."""
    messages = ("2x3", "4", "2x3", "1+1")
    policy = load_served_policy(run=str(finished_run.path), max_context=16)
    prompts = [BYTES.prompt_tokens([Message(role="user", content=text)]) for text in messages]
    requests = [SampleRequest(tuple(one), 5, policy.sampling.max_new_tokens, 0.0) for one in prompts]
    replies = [BYTES.decode_reply(policy.sampler.sample([one])[0].token_ids) for one in requests]
    assert typed(finished_run.path, *messages, temperature=0, max_context=16) == 0
    output, notes = capfd.readouterr()
    assert output.splitlines() == replies
    assert "each line begins a new conversation" in notes


@pytest.mark.medium
def test_a_sampled_chat_is_repeated_by_its_seed(finished_run: TinyRun, typed: Callable[..., int], capfd: Capture):
    def replies(seed: int) -> list[str]:
        lines = ["/system", *["2x3", "/reset"] * 8, "/quit", "ignored"]
        assert typed(finished_run.path, *lines, seed=seed, temperature=4) == 0
        return capfd.readouterr().out.splitlines()

    first = replies(1)
    assert len(set(first)) > 1
    assert replies(1) == first
    assert replies(2) != first


def plain() -> ChatTokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = plain_template(tokenizer)
    return ChatTokenizer(tokenizer)


def test_a_chat_without_history_keeps_the_system_prompt_and_the_last_reply(capfd: Capture):
    sampler = ScriptedSampler(lambda request: [*b"yes", END], stop_token_ids=[END])
    chat_of(sampler, system="brief", has_history=False).run(["a", "b", "/probs", "/system long", "c", "/reset", "d"])
    expected = [
        BYTES.prompt_tokens([Message(role="system", content=system), Message(role="user", content=text)])
        for system, text in (("brief", "a"), ("brief", "b"), ("long", "c"), ("long", "d"))
    ]
    assert [request.prompt_tokens for request in sampler.requests] == expected
    assert "probability" in capfd.readouterr().out


TOKENIZERS = {
    "bytes": lambda: BYTES,
    "plain": plain,
    "chatml": lambda: ChatTokenizer(chatml_tokenizer()),
    "rewrites the history": lambda: ChatTokenizer(chatml_tokenizer(THINKING)),
}
MESSAGES = ("the quick fox", "and <|im_end|> then?", "ä hello  ")
REPLIES = ("five", "<think>\nwhat is\n</think>\n\nit is", "lazy dog and")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_tokens_are_those_of_a_rollout(name: str):
    """Also after a reply that was cut, whose end token the template adds."""
    tokenizer, max_tokens = TOKENIZERS[name](), 25
    end = tokenizer.stop_token_ids[-1]

    def script(request: SampleRequest) -> Sequence[int]:
        text = REPLIES[len(request.prompt_tokens) % len(REPLIES)]
        ids = tokenizer.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids * max_tokens if len(ids) % 2 else [*ids, end]

    sampler = ScriptedSampler(script, stop_token_ids=tokenizer.stop_token_ids)
    chat_of(sampler, tokenizer, max_tokens=max_tokens, system="be brief").run(MESSAGES)
    system, *users = (
        Message(role=role, content=text)
        for role, text in zip(("system", "user", "user", "user"), ("be brief", *MESSAGES), strict=True)
    )
    task = Task("t", "e", (system, users[0]), "")
    prompt = tokenizer.prompt_tokens(task.messages)
    start = tokenizer.reply_start(prompt)
    attempt = Attempt(task, prompt, start, group_id="g", id="r", seed=3, start_seed=4, temperature=1.0, anchor="")
    builder = RolloutBuilder(attempt, tokenizer, Limits(max_length=1000, max_new_tokens=max_tokens, max_turns=5))
    for request, following in zip(sampler.requests, (*users[1:], None), strict=True):
        expected = builder.request()
        assert request.prompt_tokens == expected.prompt_tokens
        assert request.max_new_tokens == expected.max_new_tokens
        [generation] = ScriptedSampler(script, stop_token_ids=tokenizer.stop_token_ids).sample([expected])
        builder.add_generation(generation)
        if following is not None:
            builder.add_observation(Step({}, (following,), done=False))


def test_a_reply_cannot_control_the_terminal(capfd: Capture):
    reply = "\x1b[2J\x1b]0;title\x07\r\b\u202ea\n\x9b1Aü"
    sampler = ScriptedSampler(lambda request: [*reply.encode(), END], stop_token_ids=[END])
    chat_of(sampler).run(["hello", "/probs", "/system \x1b[2Jx", "/\x1b[2J", "/temperature \x1b[1A"])
    output, notes = capfd.readouterr()
    assert {char for char in output + notes if not char.isprintable()} == {"\n"}
    assert output.startswith("\\x1b[2J\\x1b]0;title\\x07\\r\\x08\\u202ea\n\\x9b1Aü\n")


def test_a_full_context_is_named_and_changes_nothing(capfd: Capture):
    sampler = ScriptedSampler(lambda request: [65] * request.max_new_tokens, stop_token_ids=[END])
    chat = chat_of(sampler, max_context=16, max_tokens=4)
    # 7 tokens and 4 of the reply; 5 more of which the last message leaves no room, or 4.
    chat.run(["abcd"])
    context = chat.conversation.tokens
    chat.run(["x"])
    assert (len(context), chat.conversation.tokens) == (11, context)
    chat.run(["/reset", "abcdefghijklm", "abcdefghij"])
    assert [request.max_new_tokens for request in sampler.requests] == [4, 3]
    assert [len(request.prompt_tokens) for request in sampler.requests] == [7, 13]
    notes = capfd.readouterr().err.splitlines()
    refused = "would have 16 tokens, which leaves no room for a reply in the context of 16 (--max_context)"
    assert [refused in note for note in notes] == [False, True, False, True, False]
    assert (notes[0], notes[-1]) == ("[the reply has reached 4 tokens (--max_tokens)]", "[the context is full]")


class TokenSampler(BatchSampler):
    """Samples the bytes of a text, one in each call, and sends a signal after some of them."""

    def __init__(self, text: str, interrupt_after: int) -> None:
        super().__init__(1)
        self.requests: list[SampleRequest] = []
        self._reply, self._interrupt_after = (*text.encode(), END), interrupt_after
        self._sampled = 0

    def start(self, requests: Sequence[SampleRequest]) -> list[int]:
        self.requests += requests
        self._sampled = 0
        return super().start(requests)

    def advance(self) -> list[tuple[int, Generation]]:
        self._sampled += 1
        if len(self.requests) == 1 and self._sampled == self._interrupt_after:
            signal.raise_signal(signal.SIGINT)
        return super().advance() if self._sampled == len(self._reply) else []

    def end_conversation(self, conversation: str) -> None:
        self.reset()

    def answer(self, requests: Sequence[SampleRequest]) -> list[Generation]:
        return [Generation(self._reply, (-1.0,) * len(self._reply), StopReason.STOP, 0, 0)]

    def progress(self, seen: Mapping[int, int]) -> dict[int, SampledTokens]:
        [(number, count)] = seen.items()
        new = self._reply[count : self._sampled]
        return {number: SampledTokens(new, (-1.0,) * len(new), 0, 0)} if new else {}


def test_an_interrupt_ends_a_reply_and_keeps_its_tokens(capfd: Capture):
    """The next prompt continues the tokens that were sampled, half a character included."""
    sampler = TokenSampler("aäb", interrupt_after=2)
    handler = signal.getsignal(signal.SIGINT)
    chat_of(sampler).run(["go", "on", "/probs"])
    output, notes = capfd.readouterr()
    assert output.splitlines()[:2] == ["a\ufffd", "aäb"]
    assert notes == "[interrupted]\n"
    assert signal.getsignal(signal.SIGINT) is handler
    first, second = (request.prompt_tokens for request in sampler.requests)
    assert second == (
        *first,
        ord("a"),
        "ä".encode()[0],
        END,
        *BYTES.prompt_tokens([Message(role="user", content="on")]),
    )


@pytest.mark.medium
def test_the_reply_after_an_interrupt_equals_one_of_a_new_sampler(
    finished_run: TinyRun, monkeypatch: pytest.MonkeyPatch, capfd: Capture
):
    """The built-in sampler drops the rest of the reply, and continues from its tokens."""

    def load() -> GroupSampler:
        # One token in each call.
        sampler = load_served_policy(
            run=str(finished_run.path), max_context=16, max_new_tokens=9, call_seconds=1e-9
        ).sampler
        sampler.compile()
        return sampler

    calls, requests = 0, []
    start, advance = GroupSampler.start, GroupSampler.advance

    def counted(sampler: GroupSampler) -> list[tuple[int, Generation]]:
        nonlocal calls
        calls += 1
        if calls == 2:
            signal.raise_signal(signal.SIGINT)
        return advance(sampler)

    def recorded(sampler: GroupSampler, given: Sequence[SampleRequest]) -> list[int]:
        requests.extend(given)
        return start(sampler, given)

    sampler = load()
    with monkeypatch.context() as patch:
        patch.setattr(GroupSampler, "advance", counted)
        patch.setattr(GroupSampler, "start", recorded)
        # The policy is untrained at this temperature, and does not end the reply.
        chat = chat_of(sampler, max_context=16, max_tokens=9, temperature=1e6)
        chat.run(["2", "/temperature 0", "3"])
    assert "[interrupted]" in capfd.readouterr().err
    first, second = requests
    added = (END, *BYTES.prompt_tokens([Message(role="user", content="3")]))
    kept = second.prompt_tokens[len(first.prompt_tokens) : -len(added)]
    assert second.prompt_tokens == (*first.prompt_tokens, *kept, *added)
    assert len(kept) == 2
    [expected] = load().sample([second])
    assert chat.conversation.tokens == (*second.prompt_tokens, *expected.token_ids)


def test_text_appears_as_it_is_sampled(monkeypatch: pytest.MonkeyPatch):
    parts: list[str] = []

    class Parts(io.StringIO):
        def write(self, text: str) -> int:
            parts.append(text)
            return len(text)

    monkeypatch.setattr("sys.stdout", Parts())
    chat_of(TokenSampler("aäb", interrupt_after=0)).run(["go"])
    assert [part for part in parts if part] == ["a", "ä", "b", "\n"]
