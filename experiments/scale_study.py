# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Updates of 1B, 8B and 70B models on 16 to 4,096 TPU v5p chips: least time, share of collectives, memory of a chip.

    pip install -e .[tpu]
    python -m experiments.scale_study --compile 1B:16 8B:16 8B:64 70B:16
    python -m experiments.scale_study

The first command compiles updates for slices of these numbers of chips, without the hardware, and appends each to the
results. The second computes all other points from the largest compiled one of the same model with fewer chips, and
writes `scale_study.json`, a plot and a table. Points name whether they were compiled.

Parameters, gradients and optimizer state are sharded over all chips; every chip has one row of a microbatch. *Weak*
scaling has 16 rollouts for each chip, *strong* 4,096 rollouts in all. Sampling is not included: with rollout workers it
runs beside the update.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jmp
import matplotlib
from levanter.models.llama import LlamaConfig

from marin_rl.chips import CHIPS, GIB, parse_topology
from marin_rl.config.device_settings import logprob_block
from marin_rl.config.sections import RolloutConfig
from marin_rl.config.train_config import TrainConfig, TrainerConfig
from marin_rl.environments import ArithmeticConfig
from marin_rl.levanter_line import seq_len
from marin_rl.planning.absent_devices import absent_devices
from marin_rl.planning.compiling import temporaries_at_peak
from marin_rl.planning.hlo import collective_bytes
from marin_rl.planning.memory_traffic import memory_traffic
from marin_rl.planning.programs import LOWER, open_shapes
from marin_rl.planning.time_model import StepSize, update_work
from marin_rl.sampling.config import SamplingConfig

VOCABULARY = 128256
MODELS = {
    "1B": LlamaConfig(
        hidden_dim=2048,
        intermediate_dim=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        tie_word_embeddings=True,
    ),
    "8B": LlamaConfig(hidden_dim=4096, intermediate_dim=14336, num_layers=32, num_heads=32, num_kv_heads=8),
    "70B": LlamaConfig(hidden_dim=8192, intermediate_dim=28672, num_layers=80, num_heads=64, num_kv_heads=8),
}
"""Llama-3.2-1B, Llama-3-8B and Llama-3-70B."""
TOPOLOGIES = {16: "v5p:2x2x4", 64: "v5p:4x4x4", 256: "v5p:4x8x8", 1024: "v5p:8x8x16", 4096: "v5p:16x16x16"}
"""Slice by number of chips."""
CHIP = CHIPS["v5p"]
PROMPT_TOKENS, ANSWER_TOKENS = 1024, 3072
ROLLOUTS = {"weak": 16, "strong": 4096}
"""Rollouts of an update: for each chip, and in all."""
HOP_SECONDS = 1e-6
"""Latency of a transfer to a neighbor chip. Source: Austin et al. 2025, How to Scale Your Model, chapter 3."""
RESULTS = Path(__file__).parents[1] / "docs" / "pages" / "scale_study"


class Part(NamedTuple):
    """Work of one chip in a part of an update."""

    flops: float
    """Floating-point operations."""
    traffic: float
    """Bytes from and to main memory."""
    sent: float
    """Bytes sent to other chips."""
    operations: float
    """Number of collective operations."""


@dataclasses.dataclass(frozen=True)
class Point:
    """An update of a model on a number of chips."""

    model: str
    """One of `MODELS`."""
    chips: int
    """One of `TOPOLOGIES`."""
    parameters: int
    """Number of parameters."""
    arguments: float
    """Bytes of weights and optimizer state on a chip."""
    temporaries: float
    """Bytes of everything else on a chip."""
    microbatch: Part
    """Work of a microbatch."""
    rest: Part
    """Work of an update besides its microbatches."""
    compiled: bool = True
    """Whether the sizes were read from a compiled program."""

    @property
    def memory(self) -> float:
        """Bytes on a chip."""
        return self.arguments + self.temporaries


class Times(NamedTuple):
    """Least seconds of an update."""

    overlapped: float
    """If compute, memory and collectives overlap completely."""
    sequential: float
    """If collectives overlap with nothing."""
    collectives: float
    """Of the collectives."""


def times(point: Point, rollouts: int) -> Times:
    """Return the least seconds of an update with a number of rollouts, one in each row."""
    count = max(rollouts / point.chips, 1)

    def seconds(part: Part) -> tuple[float, float]:
        local = max(part.flops / CHIP.flops, part.traffic / CHIP.memory_bandwidth)
        return local, part.sent / CHIP.interconnect + part.operations * HOP_SECONDS

    (local, sent), (local_rest, sent_rest) = seconds(point.microbatch), seconds(point.rest)
    collectives = count * sent + sent_rest
    return Times(
        count * max(local, sent) + max(local_rest, sent_rest), count * local + local_rest + collectives, collectives
    )


def on_chips(point: Point, chips: int) -> Point:
    """Return a point of the same model on another number of chips, computed from a compiled one.

    Weights and optimizer state are divided by the chips, of which at most `hidden_dim` hold different parts. So are the
    sums of gradients in float32 and the weights in bfloat16, which are among the temporaries; activations and gathered
    weights stay as they are. A chip sends `(n - 1) / n` of what it gathers or reduces, by as many operations.
    """
    shrink = point.chips / min(chips, MODELS[point.model].hidden_dim)
    sharded = 6 * point.parameters / point.chips
    sent = (chips - 1) / chips / ((point.chips - 1) / point.chips)
    return dataclasses.replace(
        point,
        chips=chips,
        arguments=point.arguments * shrink,
        temporaries=point.temporaries - sharded * (1 - shrink),
        microbatch=point.microbatch._replace(sent=point.microbatch.sent * sent),
        rest=Part(
            point.rest.flops * shrink,
            point.rest.traffic * shrink,
            point.rest.sent * sent,
            point.rest.operations,
        ),
        compiled=False,
    )


def all_points(compiled: Sequence[Point]) -> list[Point]:
    """Return the points of all numbers of chips for each compiled model."""
    points = []
    for model in MODELS:
        own = {point.chips: point for point in compiled if point.model == model}
        for chips in TOPOLOGIES if own else ():
            source = own[max((size for size in own if size <= chips), default=min(own))]
            points.append(source if source.chips == chips else on_chips(source, chips))
    return points


def compile_point(model: str, chips: int) -> Point:
    """Compile an update for a slice; must run in a process of its own."""
    jax.config.update("jax_enable_compilation_cache", False)
    with absent_devices(parse_topology(TOPOLOGIES[chips])):
        run = open_shapes(_config(model, chips), VOCABULARY)
        compiled = LOWER["update"](run).compile()
        memory, text = cast(Any, compiled.memory_analysis()), compiled.as_text() or ""
        answers = ANSWER_TOKENS / (PROMPT_TOKENS + ANSWER_TOKENS) * run.layout.row_length
        blocks = max(round(answers / logprob_block(run.config, run.trainer)), 1)
        step = StepSize(1, chips, PROMPT_TOKENS, ANSWER_TOKENS, 1, 1)
        flops = float(update_work(run, step, None).flops)
        first, second = (_traffic(text, [count, blocks]) for count in (1.0, 2.0))
        arguments, temporaries = memory.argument_size_in_bytes, temporaries_at_peak(memory, "tpu")
        parameters = sum(leaf.size for leaf in jax.tree.leaves(run.policy))
    microbatch = Part(flops, *(two - one for one, two in zip(first, second, strict=True)))
    rest = Part(0.0, *(2 * one - two for one, two in zip(first, second, strict=True)))
    return Point(model, chips, parameters, arguments, temporaries, microbatch, rest)


def _traffic(text: str, trips: Sequence[float]) -> tuple[float, float, float]:
    sent = collective_bytes(text, trips)
    return float(memory_traffic(text, trips)), float(sent.interconnect), float(sent.operations)


def _config(model: str, chips: int) -> TrainConfig:
    length = PROMPT_TOKENS + ANSWER_TOKENS
    trainer = dataclasses.replace(
        TrainerConfig(), mp=jmp.get_policy("p=f32,c=bfloat16"), per_device_parallelism=1, fsdp_axis="embed"
    )
    return TrainConfig(
        environment=ArithmeticConfig(),
        run_dir=f"runs/scale-{model}",
        model=dataclasses.replace(MODELS[model], **seq_len(length)),
        rollouts=RolloutConfig(prompts_per_step=chips, group_size=8, max_length=length, share_prompts=False),
        sampling=SamplingConfig(max_new_tokens=ANSWER_TOKENS, max_seqs=chips),
        trainer=trainer,
    )


def read_points(path: Path) -> list[Point]:
    """Return the compiled points of a file; the last one of a model and number of chips counts."""
    rows = map(json.loads, path.read_text().splitlines() if path.exists() else [])
    points = [_from_row(row) for row in rows]
    return list({(point.model, point.chips): point for point in points}.values())


def _from_row(row: dict[str, Any]) -> Point:
    parts: dict[str, Any] = {name: Part(**row[name]) for name in ("microbatch", "rest")}
    return Point(**{**row, **parts})


def to_row(point: Point) -> dict[str, Any]:
    """Return a point as JSON values."""
    return dataclasses.asdict(point) | {"microbatch": point.microbatch._asdict(), "rest": point.rest._asdict()}


def results(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Return memory, times and share of collectives of each point, for weak and strong scaling."""
    rows = []
    for point in points:
        row: dict[str, Any] = {"model": point.model, "chips": point.chips, "compiled": point.compiled}
        row["memory_gib"] = point.memory / GIB
        for kind, rollouts in ROLLOUTS.items():
            found = times(point, rollouts * point.chips if kind == "weak" else rollouts)
            row[kind] = found._asdict() | {"collective_share": found.collectives / found.sequential}
        rows.append(row)
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the results as a Markdown table."""
    lines = [
        "| model | chips | point | GiB on a chip | weak: seconds | collectives | strong: seconds | collectives |",
        "|---|--:|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        cells = [row["model"], f"{row['chips']:,}", "compiled" if row["compiled"] else "computed"]
        cells.append(f"{row['memory_gib']:.1f}")
        for kind in ROLLOUTS:
            part = row[kind]
            low, high = (_number(part[name]) for name in ("overlapped", "sequential"))
            cells += [f"{low} to {high}", f"{part['collective_share']:.0%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw time, share of collectives and memory over chips; compiled points are filled."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(2, 2, figsize=(11, 8), layout="constrained")
    weak, strong, shares, memory = grid.flat
    for model, color in zip(MODELS, ("tab:blue", "tab:orange", "tab:green"), strict=True):
        own = [row for row in rows if row["model"] == model]
        if not own:
            continue
        chips = [row["chips"] for row in own]
        for axes, kind in ((weak, "weak"), (strong, "strong")):
            low, high = ([row[kind][name] for row in own] for name in ("overlapped", "sequential"))
            axes.fill_between(chips, low, high, color=color, alpha=0.15, linewidth=0)
            _line(axes, own, low, color, model)
        _line(shares, own, [100 * row["weak"]["collective_share"] for row in own], color, model)
        _line(memory, own, [row["memory_gib"] for row in own], color, model)
    memory.axhline(CHIP.memory / GIB, color="gray", linestyle=":", label="memory of v5p")
    for axes, title, scale in (
        (weak, "Weak scaling: seconds of an update, 16 rollouts per chip", "log"),
        (strong, "Strong scaling: seconds of an update, 4,096 rollouts", "log"),
        (shares, "Collectives, % of the time if nothing overlaps (weak)", "linear"),
        (memory, "GiB on a chip", "log"),
    ):
        axes.set(title=title, xscale="log", yscale=scale, xlabel="chips")
        axes.set_xticks(list(TOPOLOGIES), [f"{chips:,}" for chips in TOPOLOGIES])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    shares.set_ylim(0, 100)
    shares.legend(title="filled: compiled, open: computed")
    memory.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _line(axes: Any, own: Sequence[Mapping[str, Any]], values: Sequence[float], color: str, label: str) -> None:
    chips = [row["chips"] for row in own]
    axes.plot(chips, values, color=color, linewidth=1, linestyle="--")
    for row, value in zip(own, values, strict=True):
        axes.plot(row["chips"], value, "o", color=color, markerfacecolor=color if row["compiled"] else "white")
    axes.plot([], [], "o-", color=color, label=label)


def _compile_all(names: Sequence[str], file: Path) -> int:
    known = {(point.model, point.chips) for point in read_points(file)}
    failed = 0
    for name in names:
        model, _, chips = name.partition(":")
        if (model, int(chips)) in known:
            continue
        # A process of its own, because a failure of libtpu ends it.
        command = [sys.executable, "-m", "experiments.scale_study", "--one", name, "--folder", str(file.parent)]
        failed += subprocess.run(command, check=False).returncode != 0
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    names = [f"{model}:{chips}" for model in MODELS for chips in TOPOLOGIES]
    parser = argparse.ArgumentParser(description="Scale an update from 16 to 4,096 chips.", allow_abbrev=False)
    parser.add_argument("--compile", nargs="+", choices=names, metavar="MODEL:CHIPS", help="compile these points")
    parser.add_argument("--one", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, default=RESULTS, help="folder of the results")
    chosen = parser.parse_args(arguments)
    compiled_file = chosen.folder / "compiled.jsonl"
    chosen.folder.mkdir(parents=True, exist_ok=True)
    if chosen.one:
        model, _, chips = chosen.one.partition(":")
        row = to_row(compile_point(model, int(chips)))
        with compiled_file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        return 0
    if chosen.compile:
        return 1 if _compile_all(chosen.compile, compiled_file) else 0
    rows = results(all_points(read_points(compiled_file)))
    if not rows:
        parser.error(f"{compiled_file} has no points; compile some with --compile {names[0]}")
    (chosen.folder / "scale_study.json").write_text(json.dumps(rows, indent=1) + "\n")
    plot(rows, chosen.folder / "scale_study.png")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
