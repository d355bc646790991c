# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Rows of the Tinker trainer: what data share, and how many shapes there are."""

import collections
import itertools

import numpy as np
import pytest
from levanter.layers.attention import AttentionBackend
from levanter.models.llama import LlamaConfig

from marin_rl.learner.attention_kernel import AttentionKernel
from marin_rl.serving.tinker.records import Datum
from marin_rl.serving.tinker.rows import Placed, Rows, find_prompts
from marin_rl.serving.tinker.token_batch import pack_data

PAD = 9


def make_rows(tokens: int = 768, longest: int = 512) -> Rows:
    kernel = AttentionKernel(AttentionBackend.JAX_FLASH)
    return Rows(
        kernel, LlamaConfig(hidden_dim=576, num_heads=9, num_kv_heads=3), longest=longest, tokens=tokens, shards=1
    )


def make_datum(tokens: np.ndarray, prompt: int, factor: float = 1.0) -> Datum:
    """Return a datum with a factor at the positions that predict what follows its prompt."""
    factors = np.where(np.arange(len(tokens)) < prompt - 1, 0, factor).astype(np.float32)
    return Datum(tokens.astype(np.int32), {"target_tokens": np.append(tokens[1:], 0), "weights": factors})


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
    taken: dict[tuple[int, int, int], set[tuple[int, ...]]] = {}
    seen = []
    for number, piece in enumerate(pack_data(data, "cross_entropy", placed, PAD)):
        batch = piece.batch
        for index, row, at in piece.places:
            seen.append(index)
            datum = data[index]
            np.testing.assert_array_equal(batch.input_ids.array[row, at], datum.tokens)
            np.testing.assert_array_equal(batch.targets.array[row, at, 0], datum.inputs["target_tokens"])
            np.testing.assert_array_equal(batch.factors.array[row, at, 0], datum.inputs["weights"])
            np.testing.assert_array_equal(batch.position_ids.array[row, at], np.arange(len(at)))
            for place, position in enumerate(at.tolist()):
                taken.setdefault((number, row, position), set()).add((place, *datum.tokens[: place + 1].tolist()))
        held = {place for place in taken if place[0] == number}
        np.testing.assert_array_equal(np.count_nonzero(batch.scored.array), len(held))
    assert sorted(seen) == sorted(placed.indices)
    # A position is shared by data with the same tokens up to it.
    assert all(len(beginnings) == 1 for beginnings in taken.values())


@pytest.mark.parametrize("common", [0, 5, 40])
def test_samples_share_their_prompts_in_fewer_positions(common: int):
    for seed in range(5):
        data = random_groups(np.random.default_rng(seed), 8, 4, 60, 6, common)
        placed = make_rows().place(data, range(len(data)), "cross_entropy")
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
            pairs = zip(datum.tokens.tolist(), datum.inputs["target_tokens"].tolist(), strict=True)
            free = itertools.takewhile(lambda pair: not pair[1], zip(pairs, datum.inputs["weights"], strict=True))
            starts.append([pair for pair, _ in free])
        saved, of_prompt = 0, collections.defaultdict(list)
        for start, prompt in zip(starts, find_prompts(data, "cross_entropy"), strict=True):
            of_prompt[prompt].append(start[: prompt.length])
        for prompt, shared in of_prompt.items():
            if prompt.length:
                assert len(shared) > 1
                assert all(start == shared[0] and len(start) == prompt.length for start in shared)
                saved += prompt.length * (len(shared) - 1)
        assert saved == most_saved(sorted(starts))
        assert not any(prompt.length for prompt in find_prompts(data, "dro"))


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
        for part in make_rows().place(data, range(len(data)), "cross_entropy"):
            shapes.add((part.layout.row_length, part.layout.rows_per_microbatch, part.layout.group))
    assert len(shapes) <= 25, shapes


def test_a_long_datum_does_not_prevent_others_from_sharing():
    rng = np.random.default_rng(0)
    data = [*random_groups(rng, 8, 4, 60, 6), make_datum(rng.integers(0, 8, 500), 20)]
    placed = make_rows().place(data, range(len(data)), "cross_entropy")
    assert [part.layout.group is None for part in placed] == [False, True]
    for part in placed:
        unpacked(part, data)
