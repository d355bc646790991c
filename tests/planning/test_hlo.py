# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import math

import jax
import jax.numpy as jnp
import pytest

from marin_rl.planning.hlo import collective_bytes, count_collectives, executions
from marin_rl.planning.memory_traffic import loop_bytes, memory_traffic
from tests.planning.hlo_texts import GROUPS, HANDLER, PAIRS, PROGRAM, ROWS, TRANSFER, loops


def test_collectives_are_counted_inside_and_outside_loops():
    inside, outside = count_collectives(PROGRAM)
    assert inside == {"all-gather": 1, "all-reduce": 1}
    assert outside == {"collective-permute": 1}


def test_program_without_loops_has_no_collectives_inside_them():
    text = PROGRAM.replace(" while(", " call(")
    assert count_collectives(text).inside_loops == {}
    assert loop_bytes(text) == 0


@pytest.mark.parametrize("groups", GROUPS)
def test_sent_bytes_count_each_iteration_of_a_loop(groups: str):
    gathered, reduced = 3 * ROWS, 2 * ROWS / 2
    sent = collective_bytes(loops(groups=groups), [1])
    assert sent == (3 * gathered + reduced, 0, 4)  # From 0 to 6 in steps of 2.


def test_loop_without_constant_bound_has_the_given_iterations():
    assert executions(loops("parameter(1)"), [10.0])["body"] == 10
    assert collective_bytes(loops("parameter(1)"), [10.0]).operations == 11


def test_trip_count_that_xla_states_is_used():
    text = loops("parameter(1)").replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"7"}}')
    assert executions(text, [1.0])["body"] == 7


@pytest.mark.parametrize(
    ("kind", "result", "chips", "sent"),
    [
        ("ALL_GATHER", "f32[24,64]", '"{1,2,3}x{0:3}"', 2 * ROWS),
        ("ALL_REDUCE", "f32[8,64]", '"{1,2}x{0:3}"', ROWS),
        ("REDUCE_SCATTER", "f32[4,64]", '"{1,2}x{0:3}"', ROWS / 2),
        ("ALL_TO_ALL", "f32[8,64]", "{{100000,200000},{100001,200001}}", ROWS / 2),
        ("ONE_TO_ONE", "f32[8,64]", PAIRS, ROWS),
    ],
)
def test_transfers_between_slices_use_the_network(kind: str, result: str, chips: str, sent: float):
    attributes = f'{HANDLER},_xla_megascale_target={chips},_xla_megascale_transfer_type="{kind}"'
    text = TRANSFER.replace("ATTRIBUTES", f"frontend_attributes={{{attributes}}}").replace("RESULT", result)
    assert collective_bytes(text, [5.0]) == (5 * ROWS, 5 * sent, 10)
    # The chip reads what it sends and writes what it receives.
    others = memory_traffic(TRANSFER.replace(" send(", " send-done(").replace(" recv(", " recv-done("), [1.0])
    received = math.prod(map(int, result[4:-1].split(","))) * 4
    assert memory_traffic(text, [1.0]) == others + ROWS + received


@pytest.mark.parametrize(
    ("line", "sent"),
    [
        ("f32[2,64]{1,0} reduce-scatter(%x), replica_groups=[1,4]<=[4], dimensions={0}", 3 * 2 * 64 * 4),
        ("f32[8,64]{1,0} all-to-all(%x), replica_groups=[2,2]<=[2,2]T(1,0)", ROWS / 2),
        ("f32[8,64]{1,0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}", ROWS),
        ("(f32[8,64]{1,0}, f32[32,64]{1,0}) all-gather-start(%x), replica_groups={{0,1,2,3}}", 3 * ROWS),
    ],
)
def test_bytes_that_each_kind_of_collective_sends(line: str, sent: float):
    text = f"ENTRY %main (x: f32[8,64]) -> f32[8,64] {{\n  %x = f32[8,64]{{1,0}} parameter(0)\n  ROOT %y = {line}\n}}\n"
    assert collective_bytes(text, [1]).interconnect == sent


def test_parts_of_one_asynchronous_collective_count_once():
    text = loops().replace(
        "ROOT %result", "%again = f32[8,64]{1,0} all-reduce-done(%sums), channel_id=2\n  ROOT %result"
    )
    assert collective_bytes(text, [1]) == collective_bytes(loops(), [1])


def test_compiled_loops_have_their_iterations():
    def run(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda carry, _: (jnp.sin(carry) @ carry, None), x, None, length=5)[0]

    text = jax.jit(run).lower(jnp.ones((64, 64))).compile().as_text() or ""
    assert max(executions(text, [100.0]).values()) == 5
    assert 5 * 2 * 64 * 64 * 4 <= memory_traffic(text, [100.0]) <= 40 * 64 * 64 * 4
