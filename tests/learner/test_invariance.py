# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The layout of rollouts changes neither loss nor gradient, to 1e-5, under every objective."""

import dataclasses
import os
import sys
from pathlib import Path

import haliax as hax
import numpy as np
import pytest

from marin_rl.batching.rl_example import RlExample
from tests import fork_server
from tests.cpu_host import cpu_host
from tests.learner.invariance_cases import (
    AGGREGATIONS,
    ARRANGEMENTS,
    BASE,
    COMBINATIONS,
    KLS,
    MESHES,
    OBJECTIVES,
    OF_LLAMA,
    ON_MESHES,
    ONE_SEQUENCE,
    ONE_SEQUENCE_SHARED,
    SCATTERED,
    SCATTERED_SHARED,
    TERMS,
    Matrix,
    Update,
    assert_same,
    make_actor_critic,
    make_prefix_mean,
)

pytestmark = pytest.mark.usefixtures("compiled_quickly")


@pytest.fixture(scope="module")
def matrix(trainer) -> Matrix:
    return Matrix(trainer, make_prefix_mean(trainer))


@pytest.fixture(scope="module")
def llama(trainer) -> Matrix:
    return Matrix(trainer, make_actor_critic(trainer))


@pytest.mark.medium
@pytest.mark.parametrize(("aggregation", "term", "kl"), COMBINATIONS)
def test_arrangements_do_not_change_an_update(matrix: Matrix, aggregation: str, term: str, kl: str) -> None:
    expected = matrix.update(BASE, aggregation, term, kl)
    for name, arrangement in ARRANGEMENTS.items():
        assert_same(matrix.update(arrangement, aggregation, term, kl), expected, name)


@pytest.mark.medium
@pytest.mark.parametrize(("aggregation", "term", "kl"), COMBINATIONS)
def test_arrangements_do_not_change_an_update_of_a_llama_with_critic(
    llama: Matrix, aggregation: str, term: str, kl: str
) -> None:
    expected = llama.update(ARRANGEMENTS["two passes"], aggregation, term, kl)
    for name in OF_LLAMA:
        assert_same(llama.update(ARRANGEMENTS[name], aggregation, term, kl), expected, name)


@pytest.mark.parametrize(("aggregation", "term", "kl"), COMBINATIONS)
def test_rollouts_without_ratio_per_rollout_may_span_microbatches(
    matrix: Matrix, aggregation: str, term: str, kl: str
) -> None:
    expected, found = (matrix.update(how, aggregation, term, kl) for how in (BASE, SCATTERED))
    if TERMS[term].is_sequence_level:
        assert largest_difference(found, expected) > 1e-3
    else:
        assert_same(found, expected, "scattered")
        assert_same(matrix.update(SCATTERED_SHARED, aggregation, term, kl), expected, "scattered, shared prompts")


@pytest.mark.parametrize(("aggregation", "term", "kl"), COMBINATIONS)
def test_shared_prompts_do_not_change_an_update(matrix: Matrix, aggregation: str, term: str, kl: str) -> None:
    found, expected = (matrix.update(how, aggregation, term, kl) for how in (ONE_SEQUENCE_SHARED, ONE_SEQUENCE))
    assert_same(found, expected, "shared prompts")


@pytest.mark.slow
def test_meshes_do_not_change_an_update(matrix: Matrix, tmp_path: Path) -> None:
    """All combinations on 8 devices: rows split eight ways, and four ways with the model split in two."""
    command = [sys.executable, "-m", "tests.learner.invariance_cases", str(tmp_path)]
    done = fork_server.run(command, {**os.environ, **cpu_host(8)})
    assert done.returncode == 0, done.stderr[-4000:]
    for mesh, model_axis in MESHES.items():
        found = dict(np.load(tmp_path / f"{mesh}.npz"))
        assert (found.pop("mesh data"), found.pop("mesh model")) == (8 // model_axis, model_axis)
        assert found.pop("mesh replica") == 1
        assert found.pop("shards") == 8  # parameters are split over all devices
        losses, clipped = found.pop("loss"), found.pop("clipped")
        for index, combination in enumerate(COMBINATIONS):
            gradient = {name: array[index] for name, array in found.items()}
            update = Update(losses[index], clipped[index], gradient)
            assert_same(update, matrix.update(BASE, *combination), f"{mesh}, {combination}")
    assert_same(matrix.update(ON_MESHES, *COMBINATIONS[0]), matrix.update(BASE, *COMBINATIONS[0]), "one device")


# These tests verify that the tests above can fail.


def largest_difference(found: Update, expected: Update) -> float:
    return max(float(np.abs(found.gradient[name] - array).max()) for name, array in expected.gradient.items())


def test_objectives_differ_pairwise(matrix: Matrix) -> None:
    updates = [matrix.update(BASE, *combination) for combination in COMBINATIONS]
    # Compare the loss too: k3_plus has the gradient of k2.
    flat = np.stack([np.concatenate([[u.loss], *(array.ravel() for array in u.gradient.values())]) for u in updates])
    for index, combination in enumerate(COMBINATIONS):
        apart = np.abs(flat - flat[index]).max(axis=1)
        apart[index] = np.inf
        other = int(apart.argmin())
        assert apart[other] > 1e-4, (combination, COMBINATIONS[other])
    assert len(COMBINATIONS) == len(AGGREGATIONS) * len(TERMS) * len(KLS) == 4 * 6 * 6


def test_ratio_bounds_apply_to_some_tokens_only(matrix: Matrix) -> None:
    tokens = matrix.pack(BASE, "token_mean", False).num_loss_tokens
    for term in TERMS:
        clipped = matrix.update(BASE, "token_mean", term, "none").clipped
        assert (0 < clipped < tokens) if term not in ("reinforce", "importance") else clipped == 0, (term, clipped)


def change(example: RlExample, **arrays: np.ndarray) -> RlExample:
    named = {name: hax.named(array, example.input_ids.axes) for name, array in arrays.items()}
    return dataclasses.replace(example, **named)


def one_segment(example: RlExample) -> RlExample:
    return change(example, segment_ids=np.minimum(np.asarray(example.segment_ids.array), 1))


def running_positions(example: RlExample) -> RlExample:
    segments = np.asarray(example.segment_ids.array)
    return change(example, position_ids=np.where(segments > 0, np.arange(segments.shape[1]), 0).astype(np.int32))


def weights_of_its_own(example: RlExample) -> RlExample:
    weights = np.asarray(example.loss_weights.array)
    return change(example, loss_weights=weights / weights.sum())


def one_rollout(example: RlExample) -> RlExample:
    return change(example, rollout_ids=np.minimum(np.asarray(example.rollout_ids.array), 0))


def no_prompts(example: RlExample) -> RlExample:
    return change(example, prompt_segment_ids=np.asarray(example.segment_ids.array))


def test_arrangements_with_shared_prompts_share_some(matrix: Matrix) -> None:
    for arrangement in (ONE_SEQUENCE_SHARED, SCATTERED_SHARED):
        packed = matrix.pack(arrangement, "token_mean", False)
        assert sum(slot.prompt_length > 0 for own in packed.slots for slot in own) >= 6
        right, wrong = matrix.step(packed.microbatches), matrix.step([no_prompts(e) for e in packed.microbatches])
        for found, expected, objective in zip(wrong, right, OBJECTIVES, strict=True):
            assert largest_difference(found, expected) > 1e-3, objective


@pytest.mark.parametrize("mistake", [one_segment, running_positions, weights_of_its_own])
def test_layout_errors_are_detected_under_every_objective(matrix: Matrix, mistake) -> None:
    packed = matrix.pack(ARRANGEMENTS["packed, two passes"], "token_mean", False)
    right, wrong = matrix.step(packed.microbatches), matrix.step([mistake(example) for example in packed.microbatches])
    for found, expected, objective in zip(wrong, right, OBJECTIVES, strict=True):
        assert largest_difference(found, expected) > 1e-3, objective


@pytest.mark.medium
def test_swapped_rollouts_are_detected_with_ratios_per_rollout(matrix: Matrix) -> None:
    packed = matrix.pack(ARRANGEMENTS["packed"], "token_mean", False)
    right, wrong = (
        matrix.step(packed.microbatches),
        matrix.step([one_rollout(example) for example in packed.microbatches]),
    )
    for found, expected, (term, kl) in zip(wrong, right, OBJECTIVES, strict=True):
        assert (largest_difference(found, expected) > 1e-3) == TERMS[term].is_sequence_level, (term, kl)
