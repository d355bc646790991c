# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import jax
import pytest

from marin_rl.chips import Number, parse_topology
from marin_rl.planning.compiling import Failure, Measured
from marin_rl.planning.hlo import CollectiveBytes
from marin_rl.planning.programs import LOWER
from marin_rl.planning.run_plan import Lengths, default_lengths, make_plan
from tests.planning.plan_cases import tiny_config


@pytest.mark.parametrize(
    ("overrides", "lengths"),
    [
        ([], Lengths(24, 8)),
        (["--rollouts.max_prompt_length", "10"], Lengths(10, 8)),
        (["--rollouts.max_turns", "3"], Lengths(8, 24)),
        (["--rollouts.max_turns", "9"], Lengths(1, 31)),
        (["--rollouts.max_turns", "3", "--rollouts.max_tokens", "20"], Lengths(12, 20)),
    ],
)
def test_longest_rollouts_fill_the_context(overrides: list[str], lengths: Lengths):
    assert default_lengths(tiny_config(*overrides)) == lengths


PROGRAM = Measured(0, 0, 0, 0, 0, CollectiveBytes(0, 0, 0))


def test_problems_of_workers_name_their_own_keys():
    topology = parse_topology(f"cpu:{len(jax.devices())}")
    mesh = ["--workers.mesh.model_axis_size", "3"]
    with pytest.raises(
        ValueError, match=r"^rollout workers: .* cannot be split into workers\.mesh\.model_axis_size 3 x"
    ):
        make_plan(tiny_config("--mode", "async", *mesh), topology, vocab_size=128, known=dict.fromkeys(LOWER, PROGRAM))
    config = tiny_config("--mode", "async", "--sampling.max_cache_gib", "0.000001")
    failure = Failure("too large", "raise trainer.model_axis_size with trainer.tensor_parallel_axes: [mlp]")
    plan = make_plan(config, topology, vocab_size=128, known={**dict.fromkeys(LOWER, PROGRAM), "decode": failure})
    [decode] = [phase for phase in plan.phases if phase.name == "decode"]
    assert decode.problem == Failure(
        "too large", "raise workers.mesh.model_axis_size with workers.mesh.tensor_parallel_axes: [mlp]"
    )


def test_worker_has_its_own_precision():
    def weights_of_worker(*overrides: str) -> Number:
        config, topology = tiny_config("--mode", "async", *overrides), parse_topology(f"cpu:{len(jax.devices())}")
        plan = make_plan(config, topology, vocab_size=128, known=dict.fromkeys(LOWER, PROGRAM))
        assert plan.worker_topology == topology
        return next(phase.others for phase in plan.phases if phase.name == "decode")

    halved = weights_of_worker("--workers.precision", "p=bf16,c=bf16", "--weights.dtype", "bfloat16")
    assert 2 * halved == weights_of_worker() > 0
