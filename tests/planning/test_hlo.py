# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import math

import jax
import jax.numpy as jnp
import pytest

from marin_rl.planning.hlo import collective_bytes, count_collectives, executions, loop_bytes, memory_traffic

PROGRAM = """\
HloModule jit_run, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[]{:T(128)} parameter(0)
  %b = f32[]{:T(128)} parameter(1)
  ROOT %sum = f32[]{:T(128)} add(%a, %b)
}

%called (x: f32[8,128]) -> f32[8,128] {
  %x = f32[8,128]{1,0:T(8,128)} parameter(0)
  ROOT %gathered = f32[8,128]{1,0:T(8,128)} all-gather(%x), replica_groups={{0,1}}, dimensions={0}
}

%updated (old: bf16[4,128], at: s32[], new: bf16[1,128]) -> bf16[4,128] {
  %old = bf16[4,128]{1,0:T(8,128)(2,1)} parameter(0)
  %at = s32[]{:T(128)} parameter(1)
  %new = bf16[1,128]{1,0:T(8,128)(2,1)} parameter(2)
  ROOT %written = bf16[4,128]{1,0:T(8,128)(2,1)} dynamic-update-slice(%old, %new, %at, %at)
}

%body (state: (s32[], bf16[4,128])) -> (s32[], bf16[4,128]) {
  %state = (s32[]{:T(128)}, bf16[4,128]{1,0:T(8,128)(2,1)}) parameter(0)
  %step = s32[]{:T(128)S(1)} get-tuple-element(%state), index=0
  %cache = bf16[4,128]{1,0:T(8,128)(2,1)} get-tuple-element(%state), index=1
  %weight = f32[8,128]{1,0:T(8,128)} fusion(), kind=kLoop, calls=%called, metadata={op_name="a(b)"}
  %slice-start = ((f32[8,128]{1,0:T(8,128)}), f32[2,128]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) slice-start(%weight)
  %slice-done = f32[2,128]{1,0:T(8,128)S(1)} slice-done(%slice-start)
  %update = bf16[1,128]{1,0:T(8,128)(2,1)} fusion(%slice-done), kind=kLoop, calls=%add
  %query = f32[2,128]{1,0:T(8,128)} copy(%slice-done)
  %scatter = bf16[4,128]{1,0:T(8,128)(2,1)} fusion(%cache, %step, %update), kind=kCustom, calls=%updated
  %read = f32[2,128]{1,0:T(8,128)} custom-call(%scatter, %query), custom_call_target="tpu_custom_call"
  %reduced = f32[1,128]{1,0:T(8,128)S(1)} all-reduce-start(%step), to_apply=%add
  ROOT %next = (s32[]{:T(128)}, bf16[4,128]{1,0:T(8,128)(2,1)}) tuple(%step, %scatter)
}

%condition (state.1: (s32[], bf16[4,128])) -> pred[] {
  %state.1 = (s32[]{:T(128)}, bf16[4,128]{1,0:T(8,128)(2,1)}) parameter(0)
  ROOT %continue = pred[]{:T(512)} constant(true)
}

ENTRY %main (cache.1: bf16[4,128]) -> bf16[4,128] {
  %cache.1 = bf16[4,128]{1,0:T(8,128)(2,1)} parameter(0)
  %moved = bf16[4,128]{1,0:T(8,128)(2,1)} collective-permute(%cache.1), source_target_pairs={{0,1}}
  %start = (s32[]{:T(128)}, bf16[4,128]{1,0:T(8,128)(2,1)}) tuple(%zero, %moved)
  %while = (s32[]{:T(128)}, bf16[4,128]{1,0:T(8,128)(2,1)}) while(%start), condition=%condition, body=%body
  ROOT %result = bf16[4,128]{1,0:T(8,128)(2,1)} get-tuple-element(%while), index=1
}
"""


def test_collectives_are_counted_inside_and_outside_loops():
    inside, outside = count_collectives(PROGRAM)
    assert inside == {"all-gather": 1, "all-reduce": 1}
    assert outside == {"collective-permute": 1}


def test_program_without_loops_has_no_collectives_inside_them():
    text = PROGRAM.replace(" while(", " call(")
    assert count_collectives(text).inside_loops == {}
    assert loop_bytes(text) == 0


def test_bytes_of_a_loop_are_those_of_the_main_memory():
    weight, update, cache = 8 * 128 * 4, 128 * 2, 4 * 128 * 2
    a_slice = 2 * 128 * 4
    written_query, kernel = a_slice, a_slice + cache + a_slice
    assert loop_bytes(PROGRAM) == weight + a_slice + written_query + update + 2 * update + kernel


def test_only_updates_are_in_place():
    product = "%product = f32[8,128]{1,0} fusion(%weight, %other), kind=kOutput, calls=%called"
    text = PROGRAM.replace("  ROOT %next", f"  %other = f32[128,128]{{1,0}} copy(%step)\n  {product}\n  ROOT %next")
    # Writing the copy; reading both operands, and writing the result.
    assert loop_bytes(text) == loop_bytes(PROGRAM) + 128 * 128 * 4 + (8 * 128 + 128 * 128 + 8 * 128) * 4


LOOPS = """\
HloModule jit_run, num_partitions=4

%body (state: (u32[], u32[], f32[8,64])) -> (u32[], u32[], f32[8,64]) {
  %state = (u32[], u32[], f32[8,64]{1,0}) parameter(0)
  %two = u32[] constant(2)
  %index = u32[] get-tuple-element(%state), index=0
  %limit = u32[] get-tuple-element(%state), index=1
  %rows = f32[8,64]{1,0} get-tuple-element(%state), index=2
  %next = u32[] add(%index, %two)
  %gathered = f32[32,64]{1,0} all-gather(%rows), channel_id=1, replica_groups=GROUPS, dimensions={0}
  %kept = f32[8,64]{1,0} slice(%gathered), slice={[0:8], [0:64]}
  ROOT %out = (u32[], u32[], f32[8,64]{1,0}) tuple(%next, %limit, %kept)
}

%condition (state.1: (u32[], u32[], f32[8,64])) -> pred[] {
  %state.1 = (u32[], u32[], f32[8,64]{1,0}) parameter(0)
  %index.1 = u32[] get-tuple-element(%state.1), index=0
  %limit.1 = u32[] get-tuple-element(%state.1), index=1
  ROOT %less = pred[] compare(%index.1, %limit.1), direction=LT
}

ENTRY %main (rows.1: f32[8,64]) -> f32[8,64] {
  %rows.1 = f32[8,64]{1,0} parameter(0)
  %zero = u32[] constant(0)
  %bound = u32[] BOUND
  %start = (u32[], u32[], f32[8,64]{1,0}) tuple(%zero, %bound, %rows.1)
  %while = (u32[], u32[], f32[8,64]{1,0}) while(%start), condition=%condition, body=%body
  %sums = f32[8,64]{1,0} all-reduce(%rows.1), channel_id=2, replica_groups={{0,1},{2,3}}, to_apply=%add
  ROOT %result = f32[8,64]{1,0} get-tuple-element(%while), index=2
}
"""
GROUPS = (
    "{{0,1,2,3}}",
    "[1,4]<=[4]",
    "mesh['a'=1,'b'=4] {'b'}",
    "mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}",
    "mesh['a'=2,'b'=8] {'a','b':(1)2}",
    "{}",
)
ROWS = 8 * 64 * 4


def loops(bound: str = "constant(6)", groups: str = GROUPS[0]) -> str:
    return LOOPS.replace("BOUND", bound).replace("GROUPS", groups)


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


TRANSFER = """\
%while_body (x: f32[8,64]) -> f32[8,64] {
  %x = f32[8,64]{1,0:T(8,128)} parameter(0)
  %token = token[] after-all()
  %send = (f32[8,64]{1,0:T(8,128)}, u32[], token[]) send(%x, %token), channel_id=2, is_host_transfer=true, ATTRIBUTES
  %recv = (RESULT{1,0:T(8,128)}, u32[], token[]) recv(%token), channel_id=1, is_host_transfer=true, ATTRIBUTES
  %sent = token[] send-done(%send), channel_id=2, is_host_transfer=true, frontend_attributes={HANDLER}
  %received = (RESULT{1,0:T(8,128)}, token[]) recv-done(%recv), channel_id=1, frontend_attributes={HANDLER}
  %sums = f32[8,64]{1,0} all-reduce(%x), channel_id=2, replica_groups={{0,1},{2,3}}, to_apply=%add
  ROOT %out = f32[8,64]{1,0:T(8,128)} copy(%x)
}

%while_condition (x.1: f32[8,64]) -> pred[] {
  %x.1 = f32[8,64]{1,0:T(8,128)} parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (x.2: f32[8,64]) -> f32[8,64] {
  %x.2 = f32[8,64]{1,0:T(8,128)} parameter(0)
  ROOT %while = f32[8,64]{1,0:T(8,128)} while(%x.2), condition=%while_condition, body=%while_body
}
"""
"""A transfer to other slices, in the form of libtpu 0.0.42.1."""
HANDLER = '_xla_host_transfer_handler_name="xla_megascale_runtime"'
PAIRS = "{{100000->200000},{200000->100000}}"


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


def test_memory_traffic_counts_loops_and_not_fused_computations():
    # The body gathers, slices and adds a constant; the condition compares two numbers as often.
    in_body, in_condition, in_entry = 5 * ROWS + 5 * ROWS + 3 * 4, 1 + 4 + 4, 2 * ROWS
    assert memory_traffic(loops(), [1]) == 3 * (in_body + in_condition) + in_entry


def test_compiled_loops_have_their_iterations():
    def run(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda carry, _: (jnp.sin(carry) @ carry, None), x, None, length=5)[0]

    text = jax.jit(run).lower(jnp.ones((64, 64))).compile().as_text() or ""
    assert max(executions(text, [100.0]).values()) == 5
    assert 5 * 2 * 64 * 64 * 4 <= memory_traffic(text, [100.0]) <= 40 * 64 * 64 * 4
