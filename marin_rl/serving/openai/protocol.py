# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Requests in OpenAI's protocol and vLLM's extensions, validated. A parameter that has no exact effect is refused."""

import itertools
import json
import math
import secrets
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

import pydantic

from marin_rl.environments.tools import describe_schemas
from marin_rl.rewards.reply_text import CALL_END, CALL_START
from marin_rl.sampling.config import MIN_TEMPERATURE
from marin_rl.sampling.sampler import SampleRequest
from marin_rl.serving.bodies import ApiError, read_value, validate
from marin_rl.serving.openai.engine import EngineRequest
from marin_rl.types import Message
from marin_rl.utils.seeds import derive_seed

MAX_STOPS = 16
"""Maximum number of stop strings of a request."""
MAX_STOP_CHARACTERS = 1000
"""Maximum number of characters of a stop string."""
MAX_STOP_TOKENS = 1000
"""Maximum number of stop tokens of a request."""
MAX_TOOLS = 128
"""Maximum number of tools of a request, as in OpenAI's API."""
MAX_NAME_CHARACTERS = 256
"""Maximum number of characters of a model's name."""
_FIRST_ERROR = pydantic.FailFast()
"""Otherwise every item of a long list has an error of its own."""
_Stop = Annotated[str, pydantic.StringConstraints(min_length=1, max_length=MAX_STOP_CHARACTERS)]
_Stops = Annotated[list[_Stop], _FIRST_ERROR]
_Tokens = Annotated[list[int], _FIRST_ERROR]
_Objects = Annotated[list[dict[str, Any]], _FIRST_ERROR]


NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("add_generation_prompt", "detokenize", "parallel_tool_calls"), (True,)),
    **dict.fromkeys(("allowed_token_ids", "bad_words", "logits_processors"), ([],)),
    **dict.fromkeys(("best_of", "length_penalty", "repetition_penalty", "top_p"), (1,)),
    **dict.fromkeys(("chat_template_kwargs", "logit_bias"), ({},)),
    **dict.fromkeys(("echo", "use_beam_search"), (False,)),
    **dict.fromkeys(("frequency_penalty", "min_p", "min_tokens", "presence_penalty"), (0,)),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "top_k": (-1, 0),
}
"""Parameters that the server does not implement, with the values that have no effect."""
WITHOUT_EFFECT = frozenset(
    {
        *("cache_salt", "metadata", "priority", "prompt_cache_key", "request_id", "return_token_ids"),
        *("safety_identifier", "service_tier", "store", "user"),
    }
)
"""Parameters that never affect the reply, except where an endpoint has them."""


class StreamOptions(pydantic.BaseModel):
    """Options of a streamed response."""

    model_config = pydantic.ConfigDict(strict=True, extra="forbid")
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class SamplingParams(pydantic.BaseModel):
    """Parameters that all endpoints have."""

    model_config = pydantic.ConfigDict(strict=True, extra="forbid")
    default_tokens: ClassVar[float] = 16
    """Maximum number of new tokens without `max_tokens`, as in OpenAI's completions and in vLLM."""
    max_tokens: int | None = pydantic.Field(None, ge=1, lt=2**31)
    temperature: float = pydantic.Field(1.0, ge=0, allow_inf_nan=False)
    seed: int | None = pydantic.Field(None, ge=0, lt=2**63)
    n: int = pydantic.Field(1, ge=1, lt=2**31)
    stop: _Stops = pydantic.Field(default_factory=list, max_length=MAX_STOPS)
    include_stop_str_in_output: bool = False
    stop_token_ids: _Tokens = pydantic.Field(default_factory=list, max_length=MAX_STOP_TOKENS)
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    @pydantic.field_validator("temperature")
    @classmethod
    def _check_temperature(cls, value: float) -> float:
        if 0 < value < MIN_TEMPERATURE:
            raise ValueError(f"must be 0 (greedy) or at least {MIN_TEMPERATURE}")
        return value

    @pydantic.field_validator("stop", mode="before")
    @classmethod
    def _list_stop(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @property
    def new_tokens(self) -> int | None:
        """Maximum number of new tokens; None for the default."""
        return self.max_tokens


class TextParams(SamplingParams):
    """Parameters of the endpoints that return text."""

    model: str = pydantic.Field(max_length=MAX_NAME_CHARACTERS)
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    @pydantic.model_validator(mode="after")
    def _check_stream_options(self) -> "TextParams":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self


class CompletionRequest(TextParams):
    """Body of `/v1/completions`."""

    prompt: Any
    max_tokens: int | None = pydantic.Field(None, ge=0, lt=2**31)
    logprobs: int | None = pydantic.Field(None, ge=0, le=1)
    echo: bool = False
    """Whether the response is the prompt with its log-probabilities at temperature 1, without new tokens."""

    @pydantic.model_validator(mode="after")
    def _check_echo(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens must be at least 1, or 0 with echo: true for the log-probs of the prompt")
        if self.echo and (self.max_tokens != 0 or self.logprobs is None or self.n != 1 or self.stream):
            raise ValueError("echo: true needs max_tokens: 0 and logprobs, n: 1 and no stream; omit it for replies")
        return self

    @pydantic.field_validator("prompt")
    @classmethod
    def _check_prompt(cls, value: object) -> object:
        # A union of types would report an error for each item and type.
        parts: list[Any] = value if isinstance(value, list) else [value]
        kinds = set(map(type, parts))
        if kinds == {str}:
            return value
        tokens = set(map(type, itertools.chain.from_iterable(parts))) if kinds == {list} else kinds
        if isinstance(value, list) and tokens <= {int}:
            return value
        raise ValueError("it must be a text or a list of token ids, or a list of several of one kind")

    def prompts(self, limits: "RequestLimits") -> Sequence[str | Sequence[int]]:
        """Return the text or the tokens of each prompt.

        Raises:
            ApiError: if there are too many, or one is certainly too long.
        """
        given: Any = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        if not given or isinstance(given[0], int):
            given = [given]
        limits.check_choices(len(given), self)
        for part in given:
            limits.check_length("prompt", part)
        return given


class ChatRequest(TextParams):
    """Body of `/v1/chat/completions`."""

    default_tokens: ClassVar[float] = math.inf
    messages: _Objects = pydantic.Field(min_length=1)
    max_completion_tokens: int | None = pydantic.Field(None, ge=1, lt=2**31)
    logprobs: bool = False
    top_logprobs: int = pydantic.Field(0, ge=0, le=1)
    tools: _Objects = pydantic.Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: Literal["auto", "none"] = "auto"

    @pydantic.model_validator(mode="after")
    def _check_logprobs(self) -> "ChatRequest":
        if self.top_logprobs and (self.temperature > 0 or not self.logprobs):
            raise ValueError("top_logprobs: 1 needs logprobs: true and temperature: 0")
        return self

    @property
    def new_tokens(self) -> int | None:
        """Maximum number of new tokens; None for all that fit."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def calls_tools(self) -> bool:
        """Whether tool calls in the reply are returned as such."""
        return bool(self.tools) and self.tool_choice == "auto"

    def conversation(self, limits: "RequestLimits") -> list[Message]:
        """Return the messages in the form of chat templates, tools included.

        Raises:
            ApiError: if a message is invalid, there are too many choices, or the text is certainly too long.
        """
        limits.check_choices(1, self)
        limits.check_length("messages", self.messages)
        messages = self._shown()
        text = "".join(message["content"] + message.get("tools_in_words", "") for message in messages)
        limits.check_length("messages", text)
        return messages

    def _shown(self) -> list[Message]:
        messages = [read_message(index, message) for index, message in enumerate(self.messages)]
        messages = [messages[index] for index in _in_order_of_calls(self.messages)]
        if not self.calls_tools:
            return messages
        for index, tool in enumerate(self.tools):
            if tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
                raise ApiError(f"tools[{index}] must have type function, and a function", param="tools")
        has_system = messages[0]["role"] == "system"
        text = messages[0]["content"] if has_system else ""
        words = describe_schemas(self.tools)
        shown = Message(role="system", content=text, tools=self.tools, tools_in_words=words)
        return [shown, *messages[has_system:]]


class GenerateParams(SamplingParams):
    """`sampling_params` of vLLM's generate endpoint."""

    detokenize: bool = True
    """No effect: the response has no text."""
    logprobs: int | None = pydantic.Field(None, ge=0, le=1)


class GenerateRequest(pydantic.BaseModel):
    """Body of vLLM's `/inference/v1/generate`: tokens in, tokens out."""

    model_config = pydantic.ConfigDict(strict=True, extra="forbid")
    token_ids: _Tokens
    sampling_params: GenerateParams
    model: str | None = pydantic.Field(None, max_length=MAX_NAME_CHARACTERS)
    stream: Literal[False] = False

    def prompts(self, limits: "RequestLimits") -> Sequence[Sequence[int]]:
        """Return the tokens of the prompt.

        Raises:
            ApiError: if there are too many choices, or it is certainly too long.
        """
        limits.check_choices(1, self.sampling_params)
        limits.check_length("token_ids", self.token_ids)
        return [self.token_ids]


AnyRequest = CompletionRequest | ChatRequest | GenerateRequest
BodyT = TypeVar("BodyT", bound=pydantic.BaseModel)


def parse_body(body_class: type[BodyT], body: Mapping[str, Any]) -> BodyT:
    """Validate the body of a request. Values of null count as absent.

    Raises:
        ApiError: if a parameter is invalid, unknown, or not implemented; names the first one.
    """
    values = _known(body, body_class, "")
    for name, part_class in (("sampling_params", GenerateParams), ("stream_options", StreamOptions)):
        if isinstance(part := values.get(name), Mapping):
            values[name] = _known(part, part_class, f"{name}.")
    return validate(body_class, values)


def _known(body: Mapping[str, Any], body_class: type[pydantic.BaseModel], prefix: str) -> dict[str, Any]:
    """Return the parameters that have an effect; the first unknown one is an error, however many there are."""
    values: dict[str, Any] = {}
    for name, value in body.items():
        if value is None or (name in WITHOUT_EFFECT and name not in body_class.model_fields):
            continue
        if name in body_class.model_fields:
            values[name] = value
        elif name not in NEUTRAL:
            raise ApiError(f"{prefix}{name}: it is not a parameter of this server", param=f"{prefix}{name}")
        elif value not in NEUTRAL[name]:
            raise ApiError(
                f"{prefix}{name} is {json.dumps(value)[:100]}, but the server does not implement it, so that replies "
                f"are exact samples of the policy; omit it (neutral: {json.dumps(NEUTRAL[name][0])})",
                param=f"{prefix}{name}",
                code="unsupported_parameter",
            )
    return values


_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def read_message(index: int, message: Mapping[str, Any]) -> Message:
    """Convert a message of OpenAI's format to that of chat templates; tool calls become text.

    Raises:
        ApiError: if it is invalid; names the message by its index.
    """
    where = f"messages[{index}]"
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in _ROLES:
        raise ApiError(f"{where}.role is {role!r:.100}; use system, user, assistant or tool", param="messages")
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else {} for part in content]
        if any(part.get("type") != "text" or not isinstance(part.get("text"), str) for part in parts):
            raise ApiError(f"{where}.content has a part that is not text; the server reads text only", param="messages")
        content = "".join(part["text"] for part in parts)
    calls = message.get("tool_calls") or []
    if message.get("function_call") is not None:
        raise ApiError(f"{where}.function_call is not read by the server; use tool_calls", param="messages")
    if content is None and (calls or role == "assistant"):
        content = ""
    if not isinstance(content, str) or not isinstance(calls, list):
        raise ApiError(f"{where}.content must be a text or a list of text parts", param="messages")
    lines = [content, *(_call_text(where, call) for call in calls)]
    return Message(role=_ROLES[role], content="\n".join(line for line in lines if line))


def _in_order_of_calls(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the order of valid messages in which consecutive results have the order of their tool calls.

    Chat templates show results without ids. Results keep their order if one of them has no id.
    """
    order: list[int] = []
    caller, places = None, dict[str, int]()
    for is_result, group in itertools.groupby(range(len(messages)), lambda index: messages[index]["role"] == "tool"):
        indices = list(group)
        if is_result:
            ids = {index: messages[index].get("tool_call_id") for index in indices}
            for index, id in ids.items():
                if id is not None and not (isinstance(id, str) and id in places):
                    known = f"messages[{caller}] has {list(places)!r:.300}"
                    known = "there is no earlier assistant message" if caller is None else known
                    raise ApiError(
                        f"messages[{index}].tool_call_id is {id!r:.200}, which is not the id of a tool call: {known}; "
                        "use the id of a call of the assistant message before it, or omit it",
                        param="messages",
                    )
            if None not in ids.values():
                indices.sort(key=lambda index: places[str(ids[index])])
        elif callers := [index for index in indices if messages[index]["role"] == "assistant"]:
            caller = callers[-1]
            calls = [call.get("id") for call in messages[caller].get("tool_calls") or []]
            places = {id: place for place, id in enumerate(calls) if isinstance(id, str)}
        order += indices
    return order


def _call_text(where: str, call: object) -> str:
    """Return a tool call of an earlier reply as the policy writes it."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(f"{where}.tool_calls has a call without a function name", param="messages")
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        raise ApiError(f"{where}.tool_calls has arguments that are not a text of JSON", param="messages")
    arguments = read_value(arguments.encode(), f"the text of arguments in {where}.tool_calls", "messages")
    text = json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)
    return f"{CALL_START}\n{text}\n{CALL_END}"


class RequestLimits(NamedTuple):
    """Limits of requests."""

    max_context: int
    """Maximum number of prompt and new tokens of a sequence."""
    max_new_tokens: int
    """Maximum number of new tokens of a sequence."""
    max_choices: int
    """Maximum number of sequences of a request: prompts times `n`."""
    vocab_size: int
    """Vocabulary size of the model."""
    stop_token_ids: frozenset[int]
    """Tokens that end every reply."""
    longest_token: int = sys.maxsize
    """Maximum number of characters of a token: longer texts than that times `max_context` are not tokenized."""
    has_stop_texts: bool = False
    """Whether texts of the run's config end every reply."""
    reduces_max_tokens: bool = False
    """Whether larger values of `max_tokens` are reduced to the limits instead of refused."""

    def check_choices(self, num_prompts: int, params: "SamplingParams") -> None:
        """Check the number of sequences of a request.

        Raises:
            ApiError: if it is not between 1 and `max_choices`.
        """
        if not 1 <= num_prompts * params.n <= self.max_choices:
            raise ApiError(
                f"{num_prompts} prompts with n: {params.n} are {num_prompts * params.n} sequences; a request has "
                f"between 1 and {self.max_choices}: send the others in further requests",
                param="n",
            )

    def check_length(self, param: str, items: str | Sequence[object]) -> None:
        """Check that a text, or a list of tokens or messages, is not certainly longer than the context.

        Items of a list have at least one token each.

        Raises:
            ApiError: if it is longer.
        """
        is_text = isinstance(items, str)
        least = -(-len(items) // self.longest_token) if is_text else len(items)
        if least > self.max_context:
            unit = "characters" if is_text else "messages" if param == "messages" else "tokens"
            raise ApiError(
                f"{param} has {len(items)} {unit}, at least {least} tokens, but this model's maximum context length is "
                f"{self.max_context} tokens, prompt and reply together",
                param=param,
                code="context_length_exceeded",
            )


def engine_requests(
    prompts: Sequence[tuple[int, ...]], body: AnyRequest, limits: RequestLimits, response_id: str
) -> list[EngineRequest]:
    """Return the requests of all choices, prompt by prompt, each `n` times with different seeds.

    Choice 0 of each prompt has the seed itself, choice i the seed `derive_seed(seed, i)`.

    Raises:
        ApiError: if a request exceeds a limit or is invalid.
    """
    params: SamplingParams = body.sampling_params if isinstance(body, GenerateRequest) else body
    own = frozenset(params.stop_token_ids)
    if params.ignore_eos and (limits.has_stop_texts or not limits.stop_token_ids <= own):
        raise ApiError(
            f"ignore_eos: the server's stop tokens {sorted(limits.stop_token_ids)} end every reply; omit ignore_eos, "
            "or list them in stop_token_ids",
            param="ignore_eos",
            code="unsupported_parameter",
        )
    seed = secrets.randbits(63) if params.seed is None else params.seed
    stop, stop_token_ids = tuple(params.stop), own - limits.stop_token_ids
    requests = []
    for prompt in prompts:
        allowed = _allowed(prompt, params, limits)
        for index in range(params.n):
            sample = SampleRequest(prompt, derive_seed(seed, index) if index else seed, allowed, params.temperature)
            requests.append(
                EngineRequest(
                    sample,
                    stop=stop,
                    keeps_stop=params.include_stop_str_in_output,
                    stop_token_ids=stop_token_ids,
                    skip_special_tokens=params.skip_special_tokens,
                    response_id=response_id,
                )
            )
    return requests


def _allowed(prompt: tuple[int, ...], params: SamplingParams, limits: RequestLimits) -> int:
    max_tokens = params.new_tokens
    check_tokens(prompt, limits)
    room = limits.max_context - len(prompt)
    if max_tokens is not None and limits.reduces_max_tokens:
        max_tokens = min(max_tokens, max(room, 1), limits.max_new_tokens)
    if room < 1 or (max_tokens is not None and max_tokens > room):
        wanted = "" if max_tokens is None else f" and max_tokens is {max_tokens}"
        raise ApiError(
            f"the prompt has {len(prompt)} tokens{wanted}, but this model's maximum context length is "
            f"{limits.max_context} tokens, prompt and reply together",
            param="max_tokens" if room >= 1 else "prompt",
            code="context_length_exceeded",
        )
    if max_tokens is not None and max_tokens > limits.max_new_tokens:
        raise ApiError(
            f"max_tokens is {max_tokens}; the server allows at most {limits.max_new_tokens} new tokens",
            param="max_tokens",
        )
    return int(min(room, limits.max_new_tokens, params.default_tokens)) if max_tokens is None else max_tokens


def check_tokens(prompt: tuple[int, ...], limits: RequestLimits) -> None:
    """Check that a prompt has tokens, all of them of the vocabulary.

    Raises:
        ApiError: if it does not.
    """
    if not prompt:
        raise ApiError("the prompt is empty; it needs at least one token", param="prompt")
    if (invalid := min(prompt)) < 0 or (invalid := max(prompt)) >= limits.vocab_size:
        raise ApiError(f"prompt token {invalid} is not in the vocabulary of {limits.vocab_size}", param="prompt")
