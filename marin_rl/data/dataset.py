# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Read supervised data, and return the batch of each step."""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from marin_rl.batching.rollout_batch import NO_TURN, RolloutBatch, make_batch
from marin_rl.data.config import DataConfig, LongSequences
from marin_rl.data.pairs import encode_pair
from marin_rl.data.rows import ROW_FORMS, Example, Form, encode_row, form_of, make_example
from marin_rl.data.token_file import Data, Encoded, digest_rows, read_tokens
from marin_rl.environments.base import epoch_order
from marin_rl.environments.row_columns import Row, unused_columns
from marin_rl.environments.row_files import read_dataset, read_jsonl, read_parquet
from marin_rl.environments.splits import Split, split_of
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.utils.storage import StoragePath

T = TypeVar("T")


def read_rows(config: DataConfig, key: str) -> tuple[list[Row], list[Row]]:
    """Read the rows of a source; return those to train on and those that are held out.

    Args:
        config: the source.
        key: its section in the config, for messages.

    Raises:
        ValueError: if a source does not exist or cannot be read.
    """
    rows = list(_read(config, config.path, config.split, f"{key}.path"))
    if config.held_out_path is not None:
        held_out = list(_read(config, config.held_out_path, config.split, f"{key}.held_out_path"))
    elif config.held_out_split is not None:
        held_out = list(_read(config, config.path, config.held_out_split, f"{key}.path"))
    else:
        splits = [split_of(json.dumps(row.values, default=str), config.held_out, 0.0) for row in rows]
        held_out = [row for row, split in zip(rows, splits, strict=True) if split is Split.HELD_OUT]
        rows = [row for row, split in zip(rows, splits, strict=True) if split is Split.TRAIN]
    return rows, held_out


def _check_division(rows: Sequence[Row], held_out: Sequence[Row], config: DataConfig, key: str) -> None:
    """Check that there are rows to train on, and to hold out."""
    both = [*rows, *held_out]
    if config.held_out and len(both) > 1 and all(row.values == both[0].values for row in both):
        raise ValueError(
            f"all {len(both):,} rows of {key} are identical, so {key}.held_out {config.held_out} cannot divide them; "
            f"add other rows, or set {key}.held_out to 0"
        )
    if not rows:
        share = f", with {key}.held_out {config.held_out}" if held_out else ""
        raise ValueError(f"{key}.path {config.path!r} has no rows to train on{share}")
    if not held_out and config.holds_out:
        raise ValueError(f"no row of {key} is held out; raise {key}.held_out, or correct the source of held-out rows")


def _read(config: DataConfig, path: str, split: str, key: str) -> Iterator[Row]:
    file = Path(path).expanduser()
    if file.suffix == ".parquet" and file.is_file():
        return read_parquet(file, path)
    if file.is_file():
        return read_jsonl(file, path, "row as one JSON object on a line of its own, with the columns of its form")
    if not file.exists() and file.suffix in (".jsonl", ".json", ".gz", ".parquet"):
        raise ValueError(f"{key} is {path!r}, which does not exist; correct it")
    return read_dataset(path, key, config.subset, split, config.revision)


def read_examples(
    config: DataConfig,
    tokenizer: ChatTokenizer,
    max_length: int,
    long_sequences: LongSequences = LongSequences.ERROR,
    *,
    key: str = "data",
    pairs: bool = False,
    stored: StoragePath | None = None,
) -> Data:
    """Read and tokenize the rows of a source, unless a file has their tokens.

    Args:
        config: the source.
        tokenizer: chat tokenizer.
        max_length: maximum number of tokens of a sequence.
        long_sequences: handling of longer ones.
        key: section of the source in the config, for messages.
        pairs: whether the rows are pairs of answers.
        stored: the file with the tokens of an earlier start; one of other rows or settings is not used.

    Raises:
        ValueError: if a row is invalid, or no row fits, is left to train on or is held out; the message names the row.
    """
    forms = (Form.PAIR,) if pairs else ROW_FORMS
    parts = read_rows(config, key)
    digest = digest_rows(parts, tokenizer, max_length, long_sequences, forms)
    if stored is not None and (found := read_tokens(stored, digest)) is not None:
        return found
    train, held_out = (encode_rows(rows, tokenizer, max_length, long_sequences, forms) for rows in parts)
    # After the rows, whose own errors are more helpful.
    _check_division(*parts, config, key)
    unused = unused_columns(parts[0], form_of(parts[0][0], forms).used)
    data = Data(train._replace(unused=tuple(unused)), held_out, digest)
    for rows, name in zip(data[:2], ("to train on", "held out"), strict=True):
        if rows.skipped and not rows.examples:
            raise ValueError(
                f"none of the {rows.skipped} rows of {key} that are {name} fits into batch.max_length, "
                f"{max_length} tokens; raise it"
            )
    return data


def describe(data: Data) -> str:
    """Describe tokenized data in one line."""
    train, held_out = data.train, data.held_out
    examples, noun = train.examples, "pairs" if train.examples[0].chosen else "rows"
    counts = {"skipped": train.skipped + held_out.skipped, "truncated": train.truncated + held_out.truncated}
    return (
        f"{len(examples):,} {noun} with {sum(example.input_ids.size for example in examples):,} tokens, "
        f"{sum(np.count_nonzero(example.loss_mask) for example in examples):,} with loss"
        + "".join(f"; {count:,} longer {noun} are {name}" for name, count in counts.items() if count)
        + (f"; {len(held_out.examples):,} {noun} are held out" if held_out.examples else "")
    )


def encode_rows(
    rows: Iterable[Row],
    tokenizer: ChatTokenizer,
    max_length: int,
    long_sequences: LongSequences,
    forms: Sequence[Form] = ROW_FORMS,
) -> Encoded:
    """Tokenize rows of one form.

    Args:
        rows: at least one.
        tokenizer: chat tokenizer.
        max_length: maximum number of tokens of a sequence.
        long_sequences: handling of longer ones.
        forms: forms that a row may have.

    Raises:
        ValueError: if a row is invalid, too long, or of another form than the first; the message names the row.
    """
    encoded, skipped, truncated, first = list[Example](), 0, 0, None
    for row in rows:
        form = form_of(row, forms)
        first = first or (form, row.where)
        if form is not first[0]:
            raise ValueError(
                f"{row.where}: the row has {' and '.join(form.value)}, but {first[1]} has "
                f"{' and '.join(first[0].value)}; all rows must have the same form"
            )
        # One token more than fits shows that the row is too long.
        limit = max_length + 1
        is_pair = form is Form.PAIR
        example = encode_pair(row, tokenizer, limit) if is_pair else encode_row(row, form, tokenizer, limit)
        if max(example.lengths) > max_length:
            if long_sequences is LongSequences.ERROR:
                others = "skip" if is_pair else "skip or truncate"
                raise ValueError(
                    f"{row.where}: a sequence has at least {max(example.lengths)} tokens, more than batch.max_length, "
                    f"{max_length}; raise it, or set batch.long_sequences to {others}"
                )
            cut = truncate(example, max_length) if long_sequences is LongSequences.TRUNCATE else None
            skipped, truncated = skipped + (cut is None), truncated + (cut is not None)
            if cut is None:
                continue
            example = cut
        encoded.append(example)
    return Encoded(encoded, skipped, truncated)


def truncate(example: Example, max_length: int) -> Example | None:
    """Cut the sequences of an example after `max_length` tokens; None if no token with loss remains."""
    cut = [(ids[:max_length], mask[:max_length]) for ids, mask in example.sequences()]
    kept = [(ids, mask) for ids, mask in cut if mask.any()]
    return make_example(example.where, kept) if kept else None


@dataclasses.dataclass(frozen=True)
class Batches(Generic[T]):
    """The batch of each step: a part of the items in the order of their epochs, without a state.

    The batch of step s (from 1 on) are the items (s - 1)·B to s·B - 1 of an endless sequence: one permutation of all
    items after another, each drawn with the seed and the number of its epoch. A batch may cross epochs.
    """

    items: Sequence[T]
    """All items, at least one."""
    size: int
    """B, number of items of a batch."""
    seed: int
    """Seed of the permutations."""

    def of_step(self, step: int) -> list[T]:
        """Return the items of a step, from 1 on.

        >>> batches = Batches("abcde", size=2, seed=0)
        >>> sorted("".join("".join(batches.of_step(step)) for step in range(1, 6)))
        ['a', 'a', 'b', 'b', 'c', 'c', 'd', 'd', 'e', 'e']
        """
        places = (divmod(index, len(self.items)) for index in range((step - 1) * self.size, step * self.size))
        return [self.items[epoch_order(self.seed, epoch, len(self.items))[place]] for epoch, place in places]

    def steps(self, epochs: float) -> int:
        """Return the number of steps that see every item `epochs` times; the last batch may begin another epoch."""
        return max(-(-round(epochs * len(self.items)) // self.size), 1)

    def epochs(self, step: int) -> float:
        """Return the number of epochs until the end of a step."""
        return step * self.size / len(self.items)


def join_examples(examples: Sequence[Example]) -> RolloutBatch:
    """Make a batch of examples, each one rollout."""
    mask = np.concatenate([example.loss_mask for example in examples])
    return make_batch(
        [example.where for example in examples],
        [example.lengths for example in examples],
        input_ids=np.concatenate([example.input_ids for example in examples]),
        turn_ids=np.where(mask, 0, NO_TURN).astype(np.int32),
    )


def join_pairs(pairs: Sequence[Example], *, length_normalized: bool = False) -> RolloutBatch:
    """Make a batch of pairs, each one rollout, whose advantages are the signs of the tokens in the margin.

    With `length_normalized`, the sign of a token is divided by the number of tokens of its answer. The reference's
    log-probabilities of a pair that was not scored are 0.
    """
    signs, batch = [], join_examples(pairs)
    for pair in pairs:
        is_chosen = (np.arange(pair.input_ids.size) < sum(pair.lengths[: pair.chosen]))[pair.loss_mask]
        lengths = np.where(is_chosen, is_chosen.sum(), (~is_chosen).sum()) if length_normalized else 1
        signs.append(np.where(is_chosen, 1.0, -1.0) / lengths)
    scored = [0.0 if pair.reference is None else pair.reference for pair in pairs]
    reference = batch.from_actions("reference log-probabilities", scored)
    return dataclasses.replace(
        batch, advantages=batch.from_actions("signs", signs), reference_logprobs=reference.astype(np.float32)
    )
