# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Sampling and recording for one agent: requests of any number of conversations become sequences of one rollout."""

import asyncio
import collections
import contextlib
import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from marin_rl.environments.agent import named_rewards
from marin_rl.environments.base import AgentResult
from marin_rl.rollouts.attempt import Attempt, Limits, keep_new_experts
from marin_rl.rollouts.request_batcher import RequestBatcher
from marin_rl.rollouts.rollout_builder import RolloutBuilder
from marin_rl.sampling.sampler import SampledTokens, SampleRequest
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.types import Generation, Message, RolloutStatus, StopReason, Turn
from marin_rl.utils.seeds import derive_seed

_LEAVING = 8
"""Iterations of the event loop in which the end of a client's connection cancels its request: the loop reads the end,
closes the connection, wakes the task that watches it, and that task cancels the request."""


class AgentLimitError(ValueError):
    """A limit of the rollout allows no further request; the message names it."""


class EpisodeEndedError(RuntimeError):
    """The episode has ended; it accepts no further requests or rewards."""


class Served(NamedTuple):
    """The part of a generation that a response contains."""

    num_tokens: int
    """Number of tokens, up to the end of the reply."""
    has_stopped: bool
    """Whether a stop token or stop text ended the reply, also one of the request, as opposed to its length."""
    contents: tuple[str, ...]
    """The content with which the agent may repeat the reply in its next request, in each possible form."""


@dataclasses.dataclass(eq=False)
class _Sequence:
    """Turns that continue each other token by token."""

    tokens: tuple[int, ...] = ()
    """All tokens, observations and replies."""
    turns: list[Turn] = dataclasses.field(default_factory=list)
    """The messages of a turn are those of its whole prompt, and the reply."""
    numbers: list[int] = dataclasses.field(default_factory=list)
    """Number of each turn, in the order in which the episode's replies were recorded."""
    is_trained: bool = True
    """Whether its replies are part of the rollout."""
    is_busy: bool = False
    """Whether a request is in progress."""
    conversation: str | None = None
    """Conversation of the sampler that holds a slot for the next turn."""


class _RecordedReply(NamedTuple):
    """A served reply, which later conversations may repeat."""

    request: Sequence[Message]
    """Messages of the request, as the agent sent them."""
    contents: tuple[str, ...]
    """See `Served`."""
    messages: Sequence[Message]
    """Messages of the request with the replies as they were sampled, and the reply."""
    sequence: _Sequence
    """The sequence that begins with the tokens of the prompt and the reply."""
    num_tokens: int
    """Number of these tokens."""
    response: str
    """Id of the response."""


class AgentRecorder:
    """Samples replies for one agent, and records them as turns of a rollout.

    A prompt that begins with all tokens of a sequence continues this sequence; any other prompt starts one. If a chat
    begins with the messages of an earlier request and its reply, their recorded tokens are used. The chat then
    continues the sequence, and the reply is not tokenized again.

    All methods but `chat_prompt` belong to the event loop of the episodes.
    """

    def __init__(
        self,
        attempt: Attempt,
        builder: RolloutBuilder,
        tokenizer: ChatTokenizer,
        batcher: RequestBatcher,
        limits: Limits,
    ) -> None:
        """Start without requests."""
        self.rollout_id = attempt.id
        self.on_wait: Callable[[bool], None] = lambda waits: None
        """Called when the first of concurrent requests begins (True), and when the last one ends (False)."""
        self._attempt, self._builder, self._tokenizer = attempt, builder, tokenizer
        self._batcher, self._limits = batcher, limits
        self._sequences: list[_Sequence] = []
        self._numbers = itertools.count()
        self._replies: list[_RecordedReply] = []
        self._prompts: dict[str, tuple[Sequence[Message], Sequence[Message]]] = {}
        """Messages of tokenized chats, as sent and with the replies as sampled, by the digest of their tokens."""
        self._seen: collections.Counter[str] = collections.Counter()
        """Requests by the digest of their prompt."""
        self._turns: dict[str, list[tuple[_Sequence, int]]] = {}
        """Turns of each response, by its id."""
        self._rewards: dict[str, float] = {}
        self._in_progress: set[asyncio.Future[Generation]] = set()
        self._num_requests = self._num_conversations = self._num_tokens = 0
        self._reserved: dict[asyncio.Future[Generation], int] = {}
        """Maximum number of tokens of each trained request in progress."""
        self._hit_limit = self._is_closed = False

    @property
    def temperature(self) -> float:
        """Sampling temperature of all replies; 0 is greedy."""
        return self._attempt.temperature

    def chat_prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Tokenize a conversation; repeated replies keep the tokens that were sampled. Thread-safe.

        Raises:
            ChatTemplateError: if the template rejects the conversation.
        """
        repeated = [reply for reply in tuple(self._replies) if _repeats(messages, reply)]
        if repeated:
            # The newest of equal ones.
            last = max(reversed(repeated), key=lambda reply: len(reply.request))
            further = messages[len(last.messages) :]
            shown = (*last.messages, *further)
            before = last.sequence.tokens[: last.num_tokens]
            tokens, is_rewritten = self._tokenizer.observation_tokens(last.messages, before, further)
            tokens = tokens if is_rewritten else before + tokens
        else:
            shown = tuple(messages)
            tokens = self._tokenizer.prompt_tokens(messages)
        self._prompts[_digest(tokens)] = messages, shown
        return tokens

    async def admit(self, sequences: int) -> None:
        """Check that the limits of the rollout allow further replies, and count them.

        Replies that are not recorded, for example because the client disconnected, are subtracted later.

        Raises:
            AgentLimitError: if they do not; the rollout then counts as truncated.
            EpisodeEndedError: if the episode has ended.
        """
        # Requests of clients that have left do not count.
        await notice_leaving()
        self._check_open()
        if self._num_requests + sequences > self._limits.max_turns:
            self.mark_truncated()
            raise AgentLimitError(
                f"the episode has its maximum of {self._limits.max_turns} replies (rollouts.max_turns)"
            )
        self._check_tokens()
        self._num_requests += sequences

    def mark_truncated(self) -> None:
        """Note that a limit of the rollout refused a request, which makes its status `truncated`."""
        self._hit_limit = True

    async def sample(
        self,
        prompt: tuple[int, ...],
        max_new_tokens: int,
        serve: Callable[[Generation], Served],
        response: str,
        ends: Callable[[SampledTokens], bool] | None = None,
        is_trained: bool = True,
    ) -> None:
        """Sample a reply and record it as a turn. A reply that the agent does not wait for is not recorded.

        While trained requests in progress may need the rest of `rollouts.max_tokens`, the reply waits for them to end.

        Args:
            prompt: tokens of the prompt, which fit into the limits.
            max_new_tokens: maximum number of new tokens; reduced to what `rollouts.max_tokens` leaves.
            serve: called with the generation before it is recorded; returns the part that the agent receives.
            response: id of the response.
            ends: called with the next tokens while the reply is sampled; returns whether the reply ends with them.
            is_trained: whether the reply is part of the rollout and counts for its limits.

        Raises:
            AgentLimitError: if `rollouts.max_tokens` leaves no token.
            EpisodeEndedError: if the episode has ended.
        """
        with self._counted(is_trained):
            self._check_open()
            if is_trained:
                max_new_tokens = await self._allowed_tokens(max_new_tokens)
            sequence = self._take_sequence(prompt, is_trained)
            generation = await self._generate(sequence, self._request(sequence, prompt, max_new_tokens), ends)
            self._check_open()
            self._record(sequence, prompt, generation, serve(generation), response)

    async def _generate(
        self, sequence: _Sequence, request: SampleRequest, ends: Callable[[SampledTokens], bool] | None
    ) -> Generation:
        parts: list[SampledTokens] = []
        has_ended = is_wanted = False

        def add(part: SampledTokens) -> None:
            nonlocal has_ended
            parts.append(part)
            if ends is not None and ends(part):
                has_ended = True
                sampling.set_result(_join(parts))

        sampling = self._batcher.submit(request, None if ends is None else add)
        if not self._in_progress:
            self.on_wait(True)
        self._in_progress.add(sampling)
        if sequence.is_trained:
            self._reserved[sampling] = request.max_new_tokens
        try:
            generation = await sampling
            # If the client has left, this cancels the request before its reply is recorded.
            await notice_leaving()
            is_wanted = True
            return generation
        except asyncio.CancelledError:
            if self._is_closed and not is_cancelled():
                raise EpisodeEndedError("the episode has ended") from None
            raise
        finally:
            self._in_progress.discard(sampling)
            self._reserved.pop(sampling, None)
            sequence.is_busy = False
            # A conversation keeps its slot only while the episode waits for no other slot.
            if self._in_progress or has_ended or not is_wanted:
                self._end_conversation(sequence)
            sampling.cancel()
            if not self._in_progress:
                self.on_wait(False)

    def discard(self, response: str, received: int) -> None:
        """Remove the turns of a response that the agent does not receive; the first `received` of them stay.

        Turns that a request has continued stay, too.
        """
        turns = self._turns.pop(response, [])
        if received:
            self._turns[response] = turns[:received]
        for sequence, index in turns[received:]:
            if not sequence.is_busy and index == len(sequence.turns) - 1:
                turn = sequence.turns.pop()
                sequence.numbers.pop()
                dropped = (response, sequence, len(sequence.tokens))
                self._replies = [
                    reply for reply in self._replies if (reply.response, reply.sequence, reply.num_tokens) != dropped
                ]
                num_sampled = len(turn.generation.token_ids)
                self._num_tokens -= num_sampled
                self._num_requests -= 1
                sequence.tokens = sequence.tokens[: -len(turn.observation_tokens) - num_sampled]
                self._end_conversation(sequence)

    def post_reward(self, reward: float | Mapping[str, float], response: str | None) -> None:
        """Set rewards of the episode, or of one reply; they replace earlier ones of the same names.

        Args:
            reward: the reward, or rewards by component name.
            response: id of the response with the rewarded reply; None for the whole episode.

        Raises:
            ValueError: if a reward or the id is invalid.
            EpisodeEndedError: if the episode has ended.
        """
        self._check_open()
        rewards = named_rewards(reward)
        if response is None:
            self._rewards = named_rewards(self._rewards | rewards)
            return
        turns = self._turns.get(response, [])
        if len(turns) != 1:
            problem = f"has {len(turns)} choices" if turns else "is not the id of a response of this episode"
            raise ValueError(f"completion_id {response!r:.100} {problem}; give the id of a response with one choice")
        [(sequence, index)] = turns
        turn = sequence.turns[index]
        sequence.turns[index] = dataclasses.replace(turn, rewards=named_rewards({**turn.rewards, **rewards}))

    def close(self) -> None:
        """Drop the requests in progress and end all conversations."""
        self._is_closed = True
        for sampling in self._in_progress:
            sampling.cancel()
        for sequence in self._sequences:
            self._end_conversation(sequence)

    def finish(self, result: AgentResult) -> None:
        """Add turns and rewards to the builder; the sequence with the agent's last reply comes last.

        Reward functions look for an agent's answer in the last message.

        Raises:
            EnvironmentFault: if the agent got no reply, or a value of the result is invalid.
        """
        trained = [sequence for sequence in self._sequences if sequence.is_trained and sequence.turns]
        trained.sort(key=lambda sequence: sequence.numbers[-1])
        turns = [turn for sequence in trained for turn in sequence.turns]
        turns = [*turns[:1], *map(_without_repetition, turns[1:])]
        metrics = {"sequences": float(len(trained)), **result.metrics}
        result = dataclasses.replace(result, metrics=metrics)
        self._builder.add_agent_turns(turns, result, self._rewards, hit_limit=self._hit_limit)

    @property
    def is_truncated(self) -> bool:
        """Whether a limit of the rollout refused a request after the first reply."""
        return self._hit_limit and self._has_turns()

    def _has_turns(self) -> bool:
        return any(sequence.turns for sequence in self._sequences if sequence.is_trained)

    def _check_open(self) -> None:
        if self._is_closed:
            raise EpisodeEndedError("the episode has ended")

    def _check_tokens(self) -> None:
        if self._limits.max_tokens is not None and self._num_tokens >= self._limits.max_tokens:
            self.mark_truncated()
            raise AgentLimitError(
                f"the replies of the episode have its maximum of {self._limits.max_tokens} tokens (rollouts.max_tokens)"
            )

    @contextlib.contextmanager
    def _counted(self, is_trained: bool) -> Iterator[None]:
        """Subtract an admitted reply from the count if it is not recorded."""
        try:
            yield
        except BaseException:
            self._num_requests -= is_trained
            raise

    async def _allowed_tokens(self, wanted: int) -> int:
        """Wait until trained requests leave `wanted` tokens or have ended; return what is left, at least 1."""
        if self._limits.max_tokens is None:
            return wanted
        while self._reserved and self._unreserved_tokens(self._limits.max_tokens) < wanted:
            await asyncio.wait(self._reserved, return_when=asyncio.FIRST_COMPLETED)
            self._check_open()
        self._check_tokens()
        return min(wanted, self._unreserved_tokens(self._limits.max_tokens))

    def _unreserved_tokens(self, max_tokens: int) -> int:
        return max_tokens - self._num_tokens - sum(self._reserved.values())

    def _take_sequence(self, prompt: tuple[int, ...], is_trained: bool) -> _Sequence:
        """Return the longest sequence that the prompt continues, or a new one."""
        continued = [
            one
            for one in self._sequences
            if not one.is_busy
            and one.is_trained is is_trained
            and one.turns
            and len(one.tokens) < len(prompt)
            and prompt[: len(one.tokens)] == one.tokens
        ]
        sequence = max(continued, key=lambda one: len(one.tokens), default=None)
        if sequence is None:
            sequence = _Sequence(is_trained=is_trained)
            self._sequences.append(sequence)
        sequence.is_busy = True
        return sequence

    def _request(self, sequence: _Sequence, prompt: tuple[int, ...], max_new_tokens: int) -> SampleRequest:
        for other in self._sequences:
            if not other.is_busy:
                self._end_conversation(other)
        if sequence.conversation is None:
            self._num_conversations += 1
            sequence.conversation = f"{self.rollout_id}/{self._num_conversations}"
        # The seed does not depend on the order of concurrent requests.
        digest = _digest(prompt)
        self._seen[digest] += 1
        return SampleRequest(
            prompt_tokens=prompt,
            seed=derive_seed(self._attempt.seed, digest, self._seen[digest]),
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            conversation=sequence.conversation,
        )

    def _record(
        self, sequence: _Sequence, prompt: tuple[int, ...], generation: Generation, served: Served, response: str
    ) -> None:
        observation = prompt[len(sequence.tokens) :]
        generation = keep_new_experts(self.rollout_id, generation, len(sequence.tokens), len(observation))
        if served.has_stopped:
            experts, dropped = generation.experts, len(generation.token_ids) - served.num_tokens
            generation = dataclasses.replace(
                generation,
                token_ids=generation.token_ids[: served.num_tokens],
                logprobs=generation.logprobs[: served.num_tokens],
                stop_reason=StopReason.STOP,
                experts=None if experts is None else experts[: len(experts) - dropped],
            )
        reply = Message(role="assistant", content=self._tokenizer.decode_reply(generation.token_ids))
        tokens = prompt + generation.token_ids
        if (chat := self._prompts.get(_digest(prompt))) is not None:
            request, shown = chat
            self._replies.append(
                _RecordedReply(request, served.contents, (*shown, reply), sequence, len(tokens), response)
            )
        else:
            text = self._tokenizer.decode_reply(observation, skip_special_tokens=False)
            shown = (Message(role="user", content=text),)
        turn = Turn(
            observation_tokens=observation,
            generation=generation,
            messages=(*shown, reply),
            starts_sequence=not sequence.tokens,
        )
        if sequence.is_trained:
            self._turns.setdefault(response, []).append((sequence, len(sequence.turns)))
            self._num_tokens += len(generation.token_ids)
        sequence.turns.append(turn)
        sequence.numbers.append(next(self._numbers))
        sequence.tokens = tokens
        if generation.stop_reason is StopReason.ABORT:
            self._builder.fail(RolloutStatus.ABORTED, "the engine aborted a generation of the agent")

    def _end_conversation(self, sequence: _Sequence) -> None:
        if sequence.conversation is not None:
            self._batcher.end(sequence.conversation)
            sequence.conversation = None


def _digest(tokens: Sequence[int]) -> str:
    """Return a short name of a prompt, which is kept instead of its tokens."""
    return hashlib.sha256(np.array(tokens, np.int32).tobytes()).hexdigest()


def _repeats(messages: Sequence[Message], reply: _RecordedReply) -> bool:
    """Whether messages are those of an earlier request, its reply, and further ones."""
    count = len(reply.request)
    if len(messages) <= count + 1 or messages[count]["role"] != "assistant":
        return False
    return messages[count]["content"] in reply.contents and list(messages[:count]) == list(reply.request)


def _without_repetition(turn: Turn) -> Turn:
    """Return the turn without the messages up to the previous reply, so that each reply is in the transcript once."""
    replies = [index for index, message in enumerate(turn.messages[:-1]) if message["role"] == "assistant"]
    return dataclasses.replace(turn, messages=turn.messages[replies[-1] + 1 :]) if replies else turn


def _join(parts: Sequence[SampledTokens]) -> Generation:
    """Return a generation that ended with these parts."""
    experts = [part.experts for part in parts if part.experts is not None]
    return Generation(
        token_ids=tuple(token for part in parts for token in part.token_ids),
        logprobs=tuple(logprob for part in parts for logprob in part.logprobs),
        stop_reason=StopReason.STOP,
        first_version=parts[0].first_version,
        last_version=parts[-1].last_version,
        experts=np.concatenate(experts) if experts else None,
    )


async def notice_leaving() -> None:
    """Wait until the event loop has cancelled the requests whose clients have closed their connection."""
    for _ in range(_LEAVING):
        await asyncio.sleep(0)


def is_cancelled() -> bool:
    """Return whether the current task is cancelled, as opposed to a `CancelledError` of another task."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
