# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Turns with tools, with templates that rewrite history: exactly the sampled tokens carry loss."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marin_rl.batching.processed_rollout import process_rollout
from marin_rl.environments import ArithmeticConfig, Split, ToolUseConfig
from marin_rl.environments.tool_use import ToolDescription
from marin_rl.rollouts.attempt import Limits
from marin_rl.rollouts.run_rollouts import RolloutRunner, run_tasks
from marin_rl.sampling.sampler import SampleRequest
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import byte_tokenizer
from marin_rl.types import Rollout
from tests.rollouts.rollout_cases import check_experts
from tests.scripted_sampler import ScriptedSampler
from tests.tokenization.conftest import CHATML, THINKING, chatml_tokenizer, llama_tokenizer
from tests.tokenization.tool_templates import QWEN3, SILENT

# Tool results have the role of the user, and thoughts are removed from all replies except the last.
STRIPPING = """\
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set ns.last_user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- elif message.role == 'assistant' and '</think>' in message.content and not loop.last %}
{{- '<|im_start|>assistant\\n' + message.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

TOKENIZERS = {
    "bytes": ChatTokenizer(byte_tokenizer()),
    "chatml": ChatTokenizer(chatml_tokenizer(CHATML)),
    "thinking": ChatTokenizer(chatml_tokenizer(THINKING)),
    "stripping": ChatTokenizer(chatml_tokenizer(STRIPPING)),
    "qwen3": ChatTokenizer(chatml_tokenizer(QWEN3)),
    "llama": ChatTokenizer(llama_tokenizer()),
    "silent": ChatTokenizer(chatml_tokenizer(SILENT)),
}
ENVIRONMENTS = {
    described: ToolUseConfig(questions=ArithmeticConfig(size=100), describe=described).build()
    for described in ToolDescription
}
LENGTH = 6000


def tool_call(expression: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'calculator', 'arguments': {'expression': expression}})}\n</tool_call>"


# A call after thoughts that do not end is none, and would end the conversation; tests of the calls cover it.
thoughts = st.text("ab \n<think>", max_size=8).filter(lambda text: "<think>" not in text)
calls = st.lists(
    st.sampled_from(["1+1", "2*3", "1/0", "what", "<|im_end|>", "</tool_call>", "<think>", "</think>"]),
    min_size=1,
    max_size=2,
).map(lambda expressions: "\n".join(map(tool_call, expressions))) | st.sampled_from(
    ["<tool_call>", "<tool_call>{}</tool_call>", "<tool_call>\nnot json\n</tool_call>"]
)
# In Llama's form the whole reply is the call.
bare_calls = st.sampled_from(["1+1", "1/0", "<|eot_id|>"]).map(
    lambda expression: json.dumps({"name": "calculator", "parameters": {"expression": expression}})
)


@st.composite
def replies(draw: st.DrawFn) -> list[str]:
    """The replies of a conversation: some tool calls, with and without thinking, and a final reply."""
    before = st.tuples(thoughts, calls).map("".join) | bare_calls
    rounds = draw(
        st.lists(st.tuples(st.sampled_from(["", "<think>a</think>", "<think>\na\n</think>\n\n"]), before), max_size=3)
    )
    calling = [thought + call for thought, call in rounds]
    return [*calling, draw(st.sampled_from(["46", "<think>\nhm\n</think>\n\n46", " so: 46 ", ""]))]


def run(
    tokenizer: ChatTokenizer,
    policy_replies: Sequence[str],
    stops: Sequence[bool],
    described: ToolDescription = ToolDescription.MESSAGE,
) -> tuple[Rollout, list[SampleRequest]]:
    """Run one rollout with these replies; if `stops` is false, a reply is cut before its stop token."""
    environment = ENVIRONMENTS[described]
    following = iter(zip(policy_replies, stops, strict=False))
    stop = tokenizer.stop_token_ids[-1]
    requests: list[SampleRequest] = []

    def script(request: SampleRequest) -> Sequence[int]:
        requests.append(request)
        text, ends = next(following)
        tokens = tokenizer.tokenizer(text, add_special_tokens=False)["input_ids"]
        # Texts may contain control tokens, which would end a reply; other tests cover them.
        tokens = [token for token in tokens if token not in tokenizer.stop_token_ids]
        # A cut reply uses all its tokens; spaces do not change JSON.
        [filler] = tokenizer.tokenizer(" " if text.endswith("}") else "x", add_special_tokens=False)["input_ids"]
        return (*tokens, stop) if ends else (*tokens, *[filler] * request.max_new_tokens)

    limits = Limits(LENGTH, 200, len(policy_replies))
    sampler = ScriptedSampler(script, stop_token_ids=list(tokenizer.stop_token_ids), experts=True)
    runner = RolloutRunner(environment, tokenizer, sampler, limits)
    [group] = run_tasks(
        runner, environment.tasks(Split.TRAIN)[:1], group_size=1, temperature=1.0, seed_parts=(0, "train", 1)
    )
    return group.rollouts[0], requests


@pytest.mark.medium
@pytest.mark.parametrize("name", TOKENIZERS)
@given(
    policy_replies=replies(),
    stops=st.lists(st.booleans(), min_size=4, max_size=4),
    described=st.sampled_from(ToolDescription),
)
@settings(max_examples=60, deadline=None)
def test_only_sampled_tokens_carry_loss_each_in_its_sampling_context(
    name: str, policy_replies: list[str], stops: list[bool], described: ToolDescription
):
    tokenizer = TOKENIZERS[name]
    rollout, requests = run(tokenizer, policy_replies, stops, described)
    assert rollout.error is None
    assert len(rollout.turns) == len(requests) == len(policy_replies)
    arrays = process_rollout(rollout, length=LENGTH, pad_token_id=tokenizer.pad_token_id)
    # Exactly the sampled tokens carry loss, in order.
    sampled = [token for turn in rollout.turns for token in turn.generation.token_ids]
    assert arrays.input_ids[arrays.loss_mask].tolist() == sampled
    # The tokens before a turn in its row are exactly the prompt of its sample request.
    for index, (turn, request) in enumerate(zip(rollout.turns, requests, strict=True)):
        [row] = {int(row) for row, _ in zip(*(arrays.turn_ids == index).nonzero(), strict=True)}
        first = int((arrays.turn_ids[row] == index).nonzero()[0][0])
        assert tuple(arrays.input_ids[row, :first].tolist()) == request.prompt_tokens
        length = len(turn.generation.token_ids)
        assert tuple(arrays.input_ids[row, first : first + length].tolist()) == turn.generation.token_ids
    # A row starts exactly at the turns with a rewritten history.
    starts = [turn.starts_sequence for turn in rollout.turns]
    assert arrays.input_ids.shape[0] == sum(starts)
    assert starts[0]
    check_experts(rollout)


def test_only_templates_that_strip_thinking_split_the_rollout():
    policy_replies = [f"<think>a</think>{tool_call('1+1')}", f"<think>b</think>{tool_call('2+2')}", "46"]
    rows = {
        name: sum(turn.starts_sequence for turn in run(tokenizer, policy_replies, [True] * 3)[0].turns)
        for name, tokenizer in TOKENIZERS.items()
    }
    assert rows["bytes"] == rows["chatml"] == 1
    assert rows["stripping"] == rows["qwen3"] == 3
    # Qwen3's template keeps thoughts after the last question if they have its layout.
    laid_out = [reply.replace("<think>", "<think>\n").replace("</think>", "\n</think>\n\n") for reply in policy_replies]
    rollout, _ = run(TOKENIZERS["qwen3"], laid_out, [True] * 3)
    assert [turn.starts_sequence for turn in rollout.turns] == [True, False, False]


def test_tool_calls_and_results_in_the_form_of_llama():
    tokenizer = TOKENIZERS["llama"]
    policy_replies = [json.dumps({"name": "calculator", "parameters": {"expression": "6*7"}}), "42"]
    rollout, requests = run(tokenizer, policy_replies, [True, True], ToolDescription.TEMPLATE)
    first, second = (tokenizer.tokenizer.decode(request.prompt_tokens) for request in requests)
    assert first.startswith("<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\n")
    assert 'Respond in the format {"name": function name, "parameters"' in first
    assert "<tool_call>" not in first
    assert second == (
        f'{first}{policy_replies[0]}<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n"42"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert rollout.metrics["tool_calls"] == 1.0
    assert [turn.starts_sequence for turn in rollout.turns] == [True, False]
