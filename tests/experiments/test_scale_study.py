# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import json
from pathlib import Path

import pytest

from experiments.scale_study import (
    CHIP,
    TOPOLOGIES,
    Part,
    Point,
    all_points,
    main,
    on_chips,
    read_points,
    results,
    table,
    times,
    to_row,
)
from marin_rl.chips import parse_topology

EIGHT = Point(
    "8B",
    16,
    parameters=8_000_000_000,
    arguments=12 * 8e9 / 16,
    temporaries=9e9,
    microbatch=Part(flops=CHIP.flops, traffic=0.0, sent=0.5 * CHIP.interconnect, operations=1e5),
    rest=Part(flops=0.0, traffic=CHIP.memory_bandwidth, sent=0.0, operations=0.0),
)


def test_times_of_an_update():
    """A microbatch computes for 1 s and sends for 0.5 s with a latency of 0.1 s; the optimizer takes 1 s."""
    found = times(EIGHT, rollouts=64)
    assert found == pytest.approx((4 * 1.0 + 1.0, 4 * 1.6 + 1.0, 4 * 0.6))
    # With fewer rollouts than chips, one microbatch is padded.
    assert times(EIGHT, rollouts=1) == times(EIGHT, rollouts=16)


def test_point_on_more_chips_divides_only_what_is_sharded():
    more = on_chips(EIGHT, 64)
    assert (more.chips, more.compiled) == (64, False)
    assert more.arguments == EIGHT.arguments / 4
    sharded = 6 * 8e9 / 16
    assert more.temporaries == pytest.approx(EIGHT.temporaries - sharded * 3 / 4)
    assert more.microbatch.flops == EIGHT.microbatch.flops
    assert more.microbatch.sent == pytest.approx(EIGHT.microbatch.sent * (63 / 64) / (15 / 16))
    assert more.rest.traffic == EIGHT.rest.traffic / 4


def test_weights_have_at_most_as_many_parts_as_the_sharded_axis():
    small = dataclasses.replace(EIGHT, model="1B")
    assert on_chips(small, 4096).arguments == small.arguments * 16 / 2048


def test_points_are_computed_from_the_largest_compiled_one_below():
    larger = dataclasses.replace(EIGHT, chips=256, arguments=1.0)
    points = all_points([EIGHT, larger])
    assert [(point.chips, point.compiled) for point in points] == [
        (16, True),
        (64, False),
        (256, True),
        (1024, False),
        (4096, False),
    ]
    assert points[1] == on_chips(EIGHT, 64)
    assert points[4] == on_chips(larger, 4096)


def test_topologies_have_their_numbers_of_chips():
    assert [parse_topology(name).num_chips for name in TOPOLOGIES.values()] == list(TOPOLOGIES)


def test_weak_and_strong_scaling_agree_at_256_chips():
    """Where 16 rollouts per chip are 4,096 rollouts."""
    by_chips = {row["chips"]: row for row in results(all_points([EIGHT]))}
    assert by_chips[256]["weak"] == by_chips[256]["strong"]
    assert by_chips[16]["strong"]["overlapped"] > by_chips[4096]["strong"]["overlapped"]
    assert by_chips[16]["weak"]["collective_share"] == pytest.approx(16 * 0.6 / (16 * 1.6 + 1.0))


def test_table_has_no_exponents():
    """4,096 rollouts on 16 chips are 256 microbatches, of 8 s or 8.6 s, and an optimizer of 1 s."""
    slow = dataclasses.replace(EIGHT, microbatch=EIGHT.microbatch._replace(flops=8 * CHIP.flops))
    assert table(results([slow])).endswith("| 2,049 to 2,203 | 7% |")


@pytest.mark.medium
def test_command_writes_figures_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["--folder", str(tmp_path)])
    assert "compiled.jsonl has no points; compile some with --compile 1B:16" in capsys.readouterr().err
    # A point that was compiled again replaces the former one.
    rows = [to_row(dataclasses.replace(EIGHT, temporaries=1.0)), to_row(EIGHT)]
    (tmp_path / "compiled.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_points(tmp_path / "compiled.jsonl") == [EIGHT]
    assert main(["--folder", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("| 8B | 16 | compiled | ")
    assert lines[6].startswith("| 8B | 4,096 | computed | ")
    assert (tmp_path / "scale_study.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "scale_study.json").read_text()) == results(all_points([EIGHT]))
