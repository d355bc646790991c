# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Programs in XLA's text form."""

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
