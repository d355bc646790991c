# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Descriptions of config fields, read from the source of their classes.

The first of these is used: the docstring below the field, the comment on its line, the comment directly above it
(unless further fields follow without a blank line), the `Args` of the class's docstring, the same of its base classes,
and, for fields that levanter does not describe, `LEVANTER_FIELD_DOCS`.

Draccus' `get_attribute_docstring` is not used because it is based on lines: it misses fields with defaults on several
lines, cuts comments at `#`, takes headings of several fields for descriptions, and does not read `Args`.
"""

import ast
import functools
import inspect
import io
import itertools
import re
import textwrap
import tokenize
import typing
from typing import Any

from marin_rl.utils.levanter_line import field_of_key


def field_doc(section: Any, name: str) -> str:
    """Description of a field as one paragraph; empty if the field is not described.

    Args:
        section: the dataclass.
        name: key of the field.
    """
    plain = typing.get_origin(section) or section
    field = field_of_key(plain, name)
    for ancestor in plain.__mro__:
        doc = _field_docs(ancestor).get(field) or _args_of(ancestor).get(field)
        if doc:
            return doc
    return LEVANTER_FIELD_DOCS.get(name, "") if plain.__module__.split(".")[0] in ("levanter", "haliax") else ""


def section_doc(section: Any) -> str:
    """First paragraph of a class's docstring; empty if it is the one that `dataclass` generates."""
    plain = typing.get_origin(section) or section
    text = inspect.cleandoc(plain.__dict__.get("__doc__") or "")
    return "" if text.startswith(f"{plain.__name__}(") else _paragraph(text.split("\n\n")[0])


@functools.cache
def _field_docs(cls: type) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):
        # Built-in classes, and classes defined interactively.
        return {}
    lines, comments = source.splitlines(), _comments(source)
    body = typing.cast(ast.ClassDef, ast.parse(source).body[0]).body
    docs: dict[str, str] = {}
    for node, following in itertools.zip_longest(body, body[1:]):
        match node, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                docs[name] = _paragraph(doc)
            case ast.AnnAssign(target=ast.Name(id=name), lineno=first, end_lineno=int(last)), _:
                inline = " ".join(comments[line] for line in range(first, last + 1) if line in comments)
                is_followed = last < len(lines) and lines[last].strip()
                docs[name] = _paragraph(inline or ("" if is_followed else _comment_above(first, lines, comments)))
    return docs


def _comments(source: str) -> dict[int, str]:
    """Comments by line number, starting at 1."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {
        token.start[0]: token.string.lstrip("# ").strip()
        for token in tokens
        if token.type == tokenize.COMMENT and not token.string.lstrip("# ").startswith(("noqa", "type:"))
    }


def _comment_above(line: int, lines: list[str], comments: dict[int, str]) -> str:
    first = line
    while first > 1 and lines[first - 2].strip().startswith("#"):
        first -= 1
    return " ".join(comments[number] for number in range(first, line) if number in comments)


_ARGUMENT = re.compile(r"^(\w+)(?: \([^)]*\))?: *(.*)$")


@functools.cache
def _args_of(cls: type) -> dict[str, str]:
    """Descriptions in the `Args` section of a class's docstring, by name."""
    _, _, text = inspect.cleandoc(cls.__dict__.get("__doc__") or "").partition("Args:\n")
    parts_by_name: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in textwrap.dedent(text).splitlines():
        match = _ARGUMENT.match(line)
        if match:
            current = parts_by_name.setdefault(match[1], [match[2]])
        elif current is not None and line.startswith(" "):
            current.append(line)
        else:
            current = None
    return {name: _paragraph(" ".join(parts)) for name, parts in parts_by_name.items()}


def _paragraph(text: str) -> str:
    return " ".join(text.split())


LEVANTER_FIELD_DOCS = {
    # Models
    "seq_len": "Maximum positions in a sequence.",
    "hidden_dim": "Width of the residual stream.",
    "num_layers": "Transformer layers.",
    "num_heads": "Query heads; num_kv_heads must divide it.",
    "head_dim": "Width of an attention head; null means hidden_dim / num_heads.",
    "initializer_range": "Standard deviation of the initial weights.",
    "layer_norm_epsilon": "Added to the variance in normalisations.",
    "activation_function": "Nonlinearity of the feed-forward layer.",
    "embed_pdrop": "Dropout after the embedding, a share in [0, 1); RL wants 0.",
    "resid_pdrop": "Dropout on the residual stream, a share in [0, 1); RL wants 0.",
    "attn_pdrop": "Dropout on attention weights, a share in [0, 1); RL wants 0.",
    "attention_dropout": "Dropout on attention weights, a share in [0, 1); RL wants 0.",
    "attention_bias": "Whether the attention projections have biases.",
    "scale_attn_by_inverse_layer_idx": "Whether attention logits are divided by the layer's number.",
    "upcast_attn": "Whether attention logits are always computed in float32, regardless of trainer.mp.",
    "use_bias": "Whether linear layers have biases.",
    "use_flash_attention": "Deprecated by levanter; use attn_backend.",
    "attn_backend": "Attention kernel; null: that of the device (splash on TPU, Pallas on GPU, jax_flash on CPU).",
    "flash_attention_block_size": "Positions in a block of flash attention; null: the kernel's default.",
    "tie_word_embeddings": "Whether the output layer shares the embedding's weights.",
    "gradient_checkpointing": "Recompute activations in the backward pass to save memory: true, false or a policy.",
    "gradient_checkpointing_block_size": "Layers between two saved activations.",
    "scan_layers": "Whether layers are compiled once and scanned over, which reduces compile time.",
    "use_layer_norm_weight": "Whether normalisations have a learned scale.",
    "rope": "Rotary position embedding.",
    "theta": "Base of the rotary frequencies.",
    "reference_checkpoint": "Hugging Face checkpoint that defines the format of exports.",
    "tokenizer": "Hugging Face tokenizer of the reference checkpoint.",
    "vocab_size": "Size of the vocabulary.",
    "input_embedding_norm": "Whether embeddings are normalised before the first layer.",
    "query_pre_attn_scalar": "Attention logits are divided by the square root of this value.",
    "final_logit_softcapping": "Soft cap of output logits, through tanh; null: no cap.",
    "attn_logit_softcapping": "Soft cap of attention logits, through tanh; null: no cap.",
    "use_sliding_window": "Whether some layers attend only to a window of recent positions.",
    "sliding_window": "Positions in the sliding window.",
    "layer_types": "`sliding_attention` or `full_attention` for each layer; null: every fourth layer is full.",
    # Optimizers
    "learning_rate": "Peak learning rate.",
    "lr": "Learning rate of the parameters for which this optimizer is designed.",
    "weight_decay": "Decoupled weight decay, multiplied by the learning rate.",
    "beta1": "Decay of the running mean of gradients.",
    "beta2": "Decay of the running mean of squared gradients.",
    "epsilon": "Added to the denominator of the update.",
    "eps": "Added to the denominator of the update.",
    "max_grad_norm": "Gradients are scaled down to this global norm; null: no clipping.",
    "nesterov": "Whether to use Nesterov momentum.",
    "momentum": "Decay of the running mean of gradients.",
    "rolling_interval_length": "Updates in the history of which mean and standard deviation are computed.",
    "sigma_factor": "Threshold in standard deviations above the mean.",
    # Trackers
    "logdir": "Folder of the event files.",
    "comment": "Suffix of the folder's name.",
    "purge_step": "Events from this step on are dropped when a run is resumed.",
    "max_queue": "Maximum events waiting to be written.",
    "flush_secs": "Seconds between two writes.",
    "filename_suffix": "Suffix of the names of event files.",
    "write_to_disk": "Whether event files are written.",
    "project": "Project of the run.",
    "logger_name": "Python logger of the messages.",
    "level": "Level of the messages, as a number of Python's logging.",
}
"""Descriptions of fields that levanter does not describe, by field name."""
