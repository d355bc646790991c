# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Small tokenizers similar to those of real models, trained on a few sentences."""

from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import byte_tokenizer
from tests.tokenization.tool_templates import LLAMA

SENTENCES = [
    "the quick brown fox jumps over the lazy dog",
    "user asks and assistant answers: what is two plus three? it is five",
    "system tool hello world, hello there; think and answer the answer",
] * 4

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}
{{- message.content + '<|im_end|>' }}
{%- endgeneration %}
{{- '\\n' }}
{%- else %}
{{- message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# Like Qwen3: replies after the last user message keep their thinking, in one layout; earlier replies do not.
THINKING = """\
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set ns.last_user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- set thoughts = '' %}
{%- set content = message.content %}
{%- if message.role == 'assistant' and '</think>' in content %}
{%- set thoughts = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{%- if message.role == 'assistant' and loop.index0 > ns.last_user and (loop.last or thoughts) %}
{{- '<think>\\n' + thoughts + '\\n</think>\\n\\n' }}
{%- endif %}
{{- content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# Like Phi-3: the end token absorbs the newline after it.
PHI = """\
{%- for message in messages %}
{{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}
"""

# Like Mistral: the end token of a reply is eos, and turns are delimited by plain text.
INSTRUCT = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- ' ' + message.content + eos_token }}
{%- else %}
{{- '[INST] ' + message.content + ' [/INST]' }}
{%- endif %}
{%- endfor %}
"""


def template_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]], **options: Any) -> list[int]:
    """The ids of a conversation according to Hugging Face."""
    return tokenizer.apply_chat_template(list(messages), return_dict=True, **options)["input_ids"]


def _trained(special: list[AddedToken], byte_level: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token=None if byte_level else "<unk>"))
    if byte_level:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
        alphabet = [chr(code) for code in range(33, 127)]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def _special(*texts: str, rstrip: bool = False) -> list[AddedToken]:
    return [AddedToken(text, special=True, normalized=False, rstrip=rstrip) for text in texts]


def chatml_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    """A tokenizer like Qwen's: eos does not end a turn, and thinking tags are ordinary added tokens."""
    backend = _trained(_special("<|endoftext|>", "<|im_start|>", "<|im_end|>"), byte_level=True)
    # As in GPT-2's family; trimmed offsets would exclude tokens of spaces from the mask.
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=template,
    )
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<think>", "</think>")])
    return tokenizer


def llama_tokenizer(template: str = LLAMA) -> PreTrainedTokenizerFast:
    """A tokenizer like Llama 3's: bos in the template, headers of special tokens, and an end of turn that is eos."""
    special = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    return PreTrainedTokenizerFast(
        tokenizer_object=_trained(_special(*special), byte_level=True),
        bos_token="<|begin_of_text|>",
        eos_token="<|eot_id|>",
        additional_special_tokens=["<|start_header_id|>", "<|end_header_id|>"],
        chat_template=template,
    )


def phi_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer like Phi's: special tokens absorb the space after them."""
    special = ("<|user|>", "<|assistant|>", "<|tool|>", "<|system|>", "<|end|>")
    backend = _trained(_special("<|endoftext|>") + _special(*special, rstrip=True), byte_level=True)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", chat_template=PHI)


def instruct_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer like Mistral's and Llama 2's: spaces as a letter, with a leading space, bos, eos, no pad."""
    backend = _trained(_special("<unk>", "<s>", "</s>"), byte_level=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=INSTRUCT
    )


def prepending_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer like those of Llama 2 and Mistral 7B in their first format, which puts a space after added tokens."""
    vocab = {text: index for index, text in enumerate(["<unk>", "<s>", "</s>"])}
    characters = ["\u2581", *map(chr, range(33, 127))]
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), *characters, "\u2581a", "an", "\u2581an"]
    vocab |= {piece: len(vocab) + index for index, piece in enumerate(pieces)}
    merges = [("a", "n"), ("\u2581", "an"), ("\u2581", "a"), ("\u2581a", "n")]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(_special("<unk>", "<s>", "</s>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=INSTRUCT
    )


@pytest.fixture(scope="session")
def prepending() -> ChatTokenizer:
    return ChatTokenizer(prepending_tokenizer())


@pytest.fixture(scope="session")
def byte_chat() -> ChatTokenizer:
    return ChatTokenizer(byte_tokenizer())


@pytest.fixture(scope="session")
def chatml() -> ChatTokenizer:
    return ChatTokenizer(chatml_tokenizer())


@pytest.fixture(scope="session")
def thinking() -> ChatTokenizer:
    return ChatTokenizer(chatml_tokenizer(THINKING))


@pytest.fixture(scope="session")
def phi() -> ChatTokenizer:
    return ChatTokenizer(phi_tokenizer())


@pytest.fixture(scope="session")
def instruct() -> ChatTokenizer:
    return ChatTokenizer(instruct_tokenizer())


@pytest.fixture(params=["byte_chat", "chatml", "thinking", "phi", "instruct"])
def any_chat(request: pytest.FixtureRequest) -> ChatTokenizer:
    return request.getfixturevalue(request.param)
