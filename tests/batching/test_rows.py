# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Rows of calls with any data: what data share, and how many shapes there are."""

import collections
import itertools
from typing import NamedTuple

import numpy as np
import pytest
from levanter.layers.attention import AttentionBackend
from levanter.models.llama import LlamaConfig

from marin_rl.batching.attention_kernel import AttentionKernel
from marin_rl.batching.rows import Placed, Rows, find_prompts
from marin_rl.batching.target_example import pack_targets

PAD = 9


class Datum(NamedTuple):
    """A sequence with the next tokens as targets."""

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray

    def start(self) -> np.ndarray:
        """Return tokens and targets before the first weight."""
        length = int(np.argmax(np.append(self.weights != 0, True)))
        return np.column_stack([self.tokens, self.targets])[:length].astype(np.int64)


def place(data: list[Datum], longest: int = 512) -> list[Placed]:
    kernel = AttentionKernel(AttentionBackend.JAX_FLASH)
    model = LlamaConfig(hidden_dim=576, num_heads=9, num_kv_heads=3)
    prompts = find_prompts([datum.start() for datum in data])
    return Rows(kernel, model, "cpu", 1).of_call([len(datum.tokens) for datum in data], prompts, longest)


def make_datum(tokens: np.ndarray, prompt: int, factor: float = 1.0) -> Datum:
    """Return a datum with a factor at the positions that predict what follows its prompt."""
    factors = np.where(np.arange(len(tokens)) < prompt - 1, 0, factor).astype(np.float32)
    return Datum(tokens.astype(np.int32), np.append(tokens[1:], 0), factors)


def random_groups(
    rng: np.random.Generator, groups: int, size: int, prompt: int, answer: int, common: int = 0
) -> list[Datum]:
    """Return samples of prompts, which begin with the same tokens; one of each group has no advantage."""
    data = []
    system = rng.integers(0, 8, common)
    for _ in range(groups):
        own = np.append(system, rng.integers(0, 8, int(rng.integers(prompt // 2, prompt + 1))))
        for sample in range(size):
            tokens = np.append(own, rng.integers(0, 8, int(rng.integers(1, answer))))
            data.append(make_datum(tokens, len(own), float(sample)))
    return data


def unpacked(placed: Placed, data: list[Datum]) -> None:
    """Check that the microbatches have every datum once, with nothing of another in its places."""
    own = [data[index] for index in placed.indices]
    values = {"targets": [one.targets[:, None] for one in own], "advantages": [one.weights[:, None] for one in own]}
    packed = pack_targets([one.tokens for one in own], values, placed.layout, placed.slots, PAD)
    taken: dict[int, set[tuple[int, ...]]] = {}
    shape = len(packed.microbatches), placed.layout.rows_per_microbatch, placed.layout.tokens_per_row
    for name, wanted in (
        ("input_ids", [one.tokens for one in own]),
        ("targets", values["targets"]),
        ("advantages", values["advantages"]),
        ("position_ids", [np.arange(len(one.tokens)) for one in own]),
    ):
        arrays = [getattr(batch, name).array for batch in packed.microbatches]
        assert np.shape(arrays)[:3] == shape
        for found, expected in zip(packed.unpack(arrays), wanted, strict=True):
            np.testing.assert_array_equal(found, expected)
    for datum, at in zip(own, np.split(packed.places, np.cumsum(packed.lengths)[:-1]), strict=True):
        for place, position in enumerate(at.tolist()):
            taken.setdefault(position, set()).add((place, *datum.tokens[: place + 1].tolist()))
    held = np.stack([batch.loss_mask.array for batch in packed.microbatches]).reshape(-1)
    assert set(np.flatnonzero(held).tolist()) == taken.keys()
    ids = np.stack([batch.input_ids.array for batch in packed.microbatches]).reshape(-1)
    assert (ids[~held] == PAD).all()
    # A position is shared by data with the same tokens up to it.
    assert all(len(beginnings) == 1 for beginnings in taken.values())


@pytest.mark.parametrize("common", [0, 5, 40])
def test_samples_share_their_prompts_in_fewer_positions(common: int):
    for seed in range(5):
        data = random_groups(np.random.default_rng(seed), 8, 4, 60, 6, common)
        placed = place(data)
        assert sorted(index for part in placed for index in part.indices) == [*range(len(data))]
        for part in placed:
            unpacked(part, data)
        # Half of the tokens that the data have, although prompts and answers have different lengths.
        positions = sum(
            part.layout.row_length * part.layout.rows_per_microbatch * (1 + max(s.microbatch_index for s in part.slots))
            for part in placed
        )
        assert positions < sum(len(datum.tokens) for datum in data) / 2


def test_shared_beginnings_have_no_loss_and_save_most_positions():
    rng = np.random.default_rng(0)
    for _ in range(100):
        data = [
            make_datum(rng.integers(0, 2, int(rng.integers(1, 9))), int(rng.integers(0, 9)), float(rng.integers(0, 2)))
            for _ in range(int(rng.integers(1, 8)))
        ]
        starts = []
        for datum in data:
            pairs = zip(datum.tokens.tolist(), datum.targets.tolist(), strict=True)
            free = itertools.takewhile(lambda pair: not pair[1], zip(pairs, datum.weights, strict=True))
            starts.append([pair for pair, _ in free])
        saved, of_prompt = 0, collections.defaultdict(list)
        for start, prompt in zip(starts, find_prompts([datum.start() for datum in data]), strict=True):
            of_prompt[prompt].append(start[: prompt.length])
        for prompt, shared in of_prompt.items():
            if prompt.length:
                assert len(shared) > 1
                assert all(start == shared[0] and len(start) == prompt.length for start in shared)
                saved += prompt.length * (len(shared) - 1)
        assert saved == most_saved(sorted(starts))


def most_saved(starts: list[list[object]]) -> int:
    """Return the most positions that neighbours can share, of all ways to split them."""

    def common(part: list[list[object]]) -> int:
        positions = zip(*part, strict=False)
        return len(list(itertools.takewhile(lambda values: values.count(values[0]) == len(values), positions)))

    found = []
    for count in range(len(starts)):
        for cuts in itertools.combinations(range(1, len(starts)), count):
            parts = [starts[a:b] for a, b in itertools.pairwise([0, *cuts, len(starts)])]
            found.append(sum(common(part) * (len(part) - 1) for part in parts))
    return max(found)


def test_calls_of_a_loop_have_few_shapes():
    rng, shapes = np.random.default_rng(0), set()
    for _ in range(100):
        data = random_groups(rng, int(rng.integers(1, 17)), 4, 60, 6)
        for part in place(data):
            shapes.add((part.layout.row_length, part.layout.rows_per_microbatch, part.layout.group))
    assert len(shapes) <= 25, shapes


def test_a_long_datum_does_not_prevent_others_from_sharing():
    rng = np.random.default_rng(0)
    data = [*random_groups(rng, 8, 4, 60, 6), make_datum(rng.integers(0, 8, 500), 20)]
    placed = place(data)
    assert [part.layout.group is None for part in placed] == [False, True]
    for part in placed:
        unpacked(part, data)
