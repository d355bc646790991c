# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import jax
import jax.numpy as jnp
import pytest

from marin_rl.planning.memory_traffic import loop_bytes, memory_traffic
from tests.planning.hlo_texts import PROGRAM, ROWS, loops


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


def test_memory_traffic_counts_loops_and_not_fused_computations():
    # The body gathers, slices and adds a constant; the condition compares two numbers as often.
    in_body, in_condition, in_entry = 5 * ROWS + 2 * ROWS + 3 * 4, 1 + 4 + 4, 2 * ROWS
    assert memory_traffic(loops(), [1]) == 3 * (in_body + in_condition) + in_entry


FUSIONS = """\
%slices (stack: bf16[36,8,128], at: s32[], x: bf16[8,128]) -> bf16[8,128] {
  %stack = bf16[36,8,128]{2,1,0} parameter(0)
  %at = s32[] parameter(1)
  %cast = bf16[36,1024]{1,0} bitcast(%stack)
  %one = bf16[1,1024]{1,0} dynamic-slice(%cast, %at, %at), dynamic_slice_sizes={1,1024}
  %same = bf16[8,128]{1,0} bitcast(%one)
  %x = bf16[8,128]{1,0} parameter(2)
  ROOT %sum = bf16[8,128]{1,0} add(%same, %x)
}

%nested (stack.1: bf16[36,8,128], at.1: s32[], x.1: bf16[8,128]) -> (bf16[8,128], bf16[36,8,128]) {
  %stack.1 = bf16[36,8,128]{2,1,0} parameter(0)
  %at.1 = s32[] parameter(1)
  %x.1 = bf16[8,128]{1,0} parameter(2)
  %sum.1 = bf16[8,128]{1,0} fusion(%stack.1, %at.1, %x.1), kind=kLoop, calls=%slices
  %new = bf16[1,8,128]{2,1,0} bitcast(%sum.1)
  %written = bf16[36,8,128]{2,1,0} dynamic-update-slice(%stack.1, %new, %at.1, %at.1, %at.1)
  ROOT %both = (bf16[8,128]{1,0}, bf16[36,8,128]{2,1,0}) tuple(%sum.1, %written)
}

%viewed (stack.4: bf16[36,8,128]) -> bf16[36,1024] {
  %stack.4 = bf16[36,8,128]{2,1,0} parameter(0)
  ROOT %view = bf16[36,1024]{1,0} bitcast(%stack.4)
}

%product (stack.5: bf16[36,8,128], x.5: bf16[8,128]) -> bf16[8,36] {
  %stack.5 = bf16[36,8,128]{2,1,0} parameter(0)
  %view.5 = bf16[36,1024]{1,0} fusion(%stack.5), kind=kLoop, calls=%viewed
  %x.5 = bf16[8,128]{1,0} parameter(1)
  ROOT %dot = bf16[8,36]{1,0} convolution(%x.5, %view.5), dim_labels=bf_oi->bf
}

%added (stack.2: bf16[36,8,128], x.2: bf16[8,128]) -> bf16[36,8,128] {
  %stack.2 = bf16[36,8,128]{2,1,0} parameter(0)
  %x.2 = bf16[8,128]{1,0} parameter(1)
  %wide = bf16[36,8,128]{2,1,0} broadcast(%x.2), dimensions={1,2}
  ROOT %all = bf16[36,8,128]{2,1,0} add(%stack.2, %wide)
}

ENTRY %main (stack.3: bf16[36,8,128], at.3: s32[], x.3: bf16[8,128]) -> bf16[8,128] {
  %stack.3 = bf16[36,8,128]{2,1,0} parameter(0)
  %at.3 = s32[]{:T(128)S(6)} parameter(1)
  %x.3 = bf16[8,128]{1,0} parameter(2)
  ROOT %out = TYPE INSTRUCTION
}
"""
PART, STACK = 8 * 128 * 2, 36 * 8 * 128 * 2
BOTH = "(bf16[8,128]{1,0}, bf16[36,8,128]{2,1,0})"


@pytest.mark.parametrize(
    ("type_", "instruction", "moved"),
    [
        ("bf16[1,8,128]{2,1,0}", "dynamic-slice(%stack.3, %at.3, %at.3, %at.3)", 2 * PART),
        ("bf16[1,8,128]{2,1,0}", "gather(%stack.3, %at.3)", 2 * PART),
        ("bf16[36,8,128]{2,1,0}", "dynamic-update-slice(%stack.3, %x.3, %at.3, %at.3, %at.3)", 2 * PART),
        # A sum reads the old values, too.
        ("bf16[36,8,128]{2,1,0}", "scatter(%stack.3, %at.3, %x.3)", 3 * PART),
        ("bf16[8,128]{1,0}", "fusion(%stack.3, %at.3, %x.3), kind=kLoop, calls=%slices", 3 * PART),
        (BOTH, "fusion(%stack.3, %at.3, %x.3), kind=kLoop, calls=%nested", 4 * PART),
        (BOTH.replace("2,1,0}", "2,1,0:S(1)}"), "fusion(%stack.3, %at.3, %x.3), kind=kLoop, calls=%nested", 3 * PART),
        ("bf16[36,8,128]{2,1,0}", "fusion(%stack.3, %x.3), kind=kLoop, calls=%added", 2 * STACK + PART),
        ("bf16[8,36]{1,0}", "fusion(%stack.3, %x.3), kind=kOutput, calls=%product", STACK + PART + 8 * 36 * 2),
    ],
)
def test_slices_and_updates_in_place_move_only_their_part(type_: str, instruction: str, moved: int):
    assert memory_traffic(FUSIONS.replace("TYPE", type_).replace("INSTRUCTION", instruction), [1]) == moved


def test_an_array_is_read_at_most_once_by_a_fusion():
    sums = "\n".join(f"  %s{index} = bf16[8,128]{{1,0}} multiply(%x, %x)" for index in range(3))
    text = FUSIONS.replace("  ROOT %sum =", f"{sums}\n  ROOT %sum =").replace("TYPE", "bf16[8,128]{1,0}")
    assert memory_traffic(text.replace("INSTRUCTION", "fusion(%stack.3, %at.3, %x.3), calls=%slices"), [1]) == 3 * PART


def test_traffic_of_layers_is_proportional_to_their_number():
    """The backward pass of each layer reads its own part of the activations of all layers."""

    def traffic(layers: int) -> float:
        def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
            return jax.lax.scan(lambda carry, weight: (jnp.sin(carry @ weight), None), x, weights)[0].sum()

        shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((layers, 64, 64), (256, 64))]
        return float(memory_traffic(jax.jit(jax.grad(loss)).lower(*shapes).compile().as_text() or "", [1]))

    of_8, of_16, of_24 = map(traffic, (8, 16, 24))
    assert of_24 - of_16 == pytest.approx(of_16 - of_8, rel=1e-3)
