# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The built-in byte-level tokenizer: 264 tokens, a compact chat template, no download."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.gpt2.tokenization_gpt2 import bytes_to_unicode

PAD = "<|pad|>"
END = "<|end|>"
SPECIAL_TOKENS = (
    PAD,
    END,
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    # Reserved tokens make the vocabulary a multiple of 8, divisible by meshes and kernels.
    "<|reserved_0|>",
    "<|reserved_1|>",
)
"""Special tokens in the order of their ids, from 256."""

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] -%}
{{- raise_exception("role '" + message['role'] + "' is none of system, user, assistant, tool") -}}
{%- endif -%}
{{- '<|' + message['role'] + '|>' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}
{{- message['content'] + '<|end|>' -}}
{%- endgeneration -%}
{%- else -%}
{{- message['content'] + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- endif -%}
"""
"""Role token, content, end token; the end token of a reply is inside its generation block."""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Create the byte-level tokenizer: id b is the byte b, and ids 256 to 263 are special tokens.

    Any text that UTF-8 can encode survives encoding and decoding unchanged.

    Returns:
        A new Hugging Face tokenizer of 264 tokens, with eos, pad and a chat template.

    >>> tokenizer = byte_tokenizer()
    >>> tokenizer("2+3=")["input_ids"]
    [50, 43, 51, 61]
    >>> tokenizer.apply_chat_template([{"role": "user", "content": "2+3="}], add_generation_prompt=True, tokenize=False)
    '<|user|>2+3=<|end|><|assistant|>'
    """
    vocab = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        name_or_path="the built-in byte-level tokenizer",
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[token for token in SPECIAL_TOKENS if token not in (PAD, END)],
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
