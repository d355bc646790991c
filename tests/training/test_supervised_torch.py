# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Loss and gradient of supervised fine-tuning against transformers in torch, for three chat templates, with tools.

The oracle renders the conversation with transformers, finds the replies in the text, and has no packing.
"""

import dataclasses
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from marin_rl.batching.packing import RowLayout
from marin_rl.batching.rl_example import pack_batch
from marin_rl.data.dataset import join_examples
from marin_rl.data.rows import Form, encode_row
from marin_rl.environments.row_format import Row
from marin_rl.learner.loss import cross_entropy_loss
from marin_rl.learner.policy_model import initialize_policy, save_hf_policy
from marin_rl.objectives.aggregation import TokenMeanConfig
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.utils.levanter_line import seq_len
from tests import tiny_learner
from tests.tokenization.conftest import chatml_tokenizer, llama_tokenizer
from tests.tokenization.tool_templates import LLAMA, QWEN3

LONG = dataclasses.replace(tiny_learner.LLAMA, **seq_len(1024))
SCHEMA = {"type": "function", "function": {"name": "tool", "description": "a tool", "parameters": {}}}
CALLED = '<tool_call>\n{"name": "tool", "arguments": {"text": "hello"}}\n</tool_call>'
CHATS = {
    "chatml": (chatml_tokenizer, (), "<|im_end|>"),
    "qwen3": (lambda: chatml_tokenizer(QWEN3), (QWEN3,), "<|im_end|>"),
    "llama": (lambda: llama_tokenizer(LLAMA), (LLAMA,), "<|eot_id|>"),
}


def conversations(*, tools: bool) -> list[dict[str, Any]]:
    """Return two rows, the second with a call of a tool."""
    asked, said = {"role": "user", "content": "two plus three?"}, {"role": "assistant", "content": "five"}
    again, second = {"role": "user", "content": "and the answer?"}, {"role": "assistant", "content": "hello world"}
    rows: list[dict[str, Any]] = [{"messages": [asked, said, again, second]}]
    if tools:
        call = {"type": "function", "function": {"name": "tool", "arguments": '{"text": "hello"}'}}
        calling = {"role": "assistant", "content": None, "tool_calls": [call]}
        answered = {"role": "tool", "content": "there", "tool_call_id": "1"}
        rows.append({"messages": [asked, calling, answered, second], "tools": [SCHEMA]})
    return rows


def reference(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, end: str) -> tuple[list[int], list[int]]:
    """Tokenize a row with transformers: ids, and labels that are -100 outside the replies and their end tokens."""
    plain = []
    for message in row["messages"]:
        content = CALLED if message.get("tool_calls") else message["content"]
        plain.append({"role": message["role"], "content": content})
    text = tokenizer.apply_chat_template(plain, tools=row.get("tools"), tokenize=False)
    # Qwen's template adds empty thoughts to the last reply, which no policy samples.
    text = text.replace("<think>\n\n</think>\n\n", "")
    text = text[: text.rindex(end) + len(end)]
    spans, start = [], 0
    for message in plain:
        start = text.index(message["content"], start)
        stop = start + len(message["content"])
        if message["role"] == "assistant":
            spans.append((start, stop + len(end)))
        start = stop
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    labels = [
        token if any(first <= a < last for first, last in spans) else -100
        for token, (a, _) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    ]
    return encoded["input_ids"], labels


@pytest.mark.medium
@pytest.mark.torch
@pytest.mark.parametrize("name", CHATS)
def test_loss_and_gradient_equal_those_of_torch(name: str, trainer, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs the extra test-torch")
    make, has_tools, end = CHATS[name]
    tokenizer = make()
    chat, rows = ChatTokenizer(tokenizer), conversations(tools=bool(has_tools))
    model = initialize_policy(LONG, chat, trainer, key=jax.random.PRNGKey(0))
    save_hf_policy(model, chat, tmp_path / "model", trainer)

    batch = join_examples([encode_row(Row(row, f"row {index}"), Form.MESSAGES, chat) for index, row in enumerate(rows)])
    layout = RowLayout(row_length=1024, rows_per_microbatch=1, packed=True)
    packed = pack_batch(batch, TokenMeanConfig(), layout, pad_token_id=0, ce_mask=batch.loss_mask)
    assert len(packed.microbatches) == 1
    with trainer.use_device_mesh():
        (loss, _), gradient = eqx.filter_jit(eqx.filter_value_and_grad(cross_entropy_loss(64), has_aux=True))(
            model, packed.microbatches[0]
        )
    save_hf_policy(gradient, chat, tmp_path / "gradient", trainer)

    # In float64, because the rounding of a sum over many tokens in float32 depends on the number of threads.
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager").double()
    # Otherwise the embedding of the padding token, which may end replies, has no gradient.
    theirs.get_input_embeddings().padding_idx = None
    expected, count = torch.zeros((), dtype=torch.float64), 0
    for row in rows:
        ids, labels = reference(row, tokenizer, end)
        count += sum(label != -100 for label in labels)
        logits = theirs(torch.tensor([ids])).logits[0, :-1]
        expected = expected + torch.nn.functional.cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum")
    expected = expected / count
    expected.backward()
    assert count == batch.loss_mask.sum()
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-6)
    found = load_file(tmp_path / "gradient" / "model.safetensors")
    for key, parameter in theirs.named_parameters():
        np.testing.assert_allclose(found[key], parameter.grad.numpy(), atol=2e-6, err_msg=key)
