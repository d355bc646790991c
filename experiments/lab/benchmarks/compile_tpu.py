# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Compiles the programs of learner and sampler for TPUs, without a TPU: memory of each program.

    pip install -e .[tpu]
    python -m experiments.lab.benchmarks.compile_tpu
    python -m experiments.lab.benchmarks.compile_tpu --chips v5p --models 8B --lengths 8192 --programs decode

Each program is compiled with one and with two layers. The difference is the cost of a layer, from which the table
computes the arguments and outputs of the whole model. Each cell runs in its own process. Finished cells are appended to
the results file and not repeated, so an interrupted run continues where it stopped. No weights are allocated.
"""

import itertools
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata, util
from pathlib import Path
from typing import Any

from experiments.lab.benchmarks.measurement import PACKAGES, benchmark_parser, say
from marin_rl.pods.chips import CHIPS, GIB
from marin_rl.utils.levanter_line import distribution_of

MODEL_LAYERS = {"0.6B": 28, "1B": 16, "8B": 36}
"""Number of layers of each model."""
TPUS = [name for name, chip in CHIPS.items() if chip.platform == "tpu"]
LENGTHS = (2048, 8192, 32768)
PROGRAMS = ("learner", "reference", "prefill", "decode")
FIELDS = ("chip", "model", "length", "program")
"""The fields that identify a cell."""

Row = Mapping[str, Any]


def read_results(path: Path) -> dict[tuple[Any, ...], Row]:
    """Return the rows of a results file by their cell; the last row of a cell counts."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {cell_of(row): row for row in map(json.loads, lines)}


def cell_of(row: Row) -> tuple[Any, ...]:
    """Return the cell of a row."""
    return tuple(row[field] for field in FIELDS)


def compile_cell(cell: tuple[Any, ...], keep: Path | None, timeout: float) -> Row:
    """Compile a program in a separate process.

    Args:
        cell: chip, model, length and program.
        keep: folder for the optimized programs; None discards them.
        timeout: seconds after which the process is ended.

    Returns:
        The row of the cell; if the process fails, with the reason in `error`.
    """
    command = [sys.executable, "-m", "experiments.lab.benchmarks.compile_cell", *map(str, cell)]
    if keep is not None:
        command += ["--keep", str(keep / str(cell[0]))]
    failed = {**dict(zip(FIELDS, cell, strict=True)), "layers": {}}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return {**failed, "error": f"not finished after {timeout:.0f} s"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {**failed, "error": f"exit status {done.returncode}: {last}"}
    return json.loads(lines[-1])


def whole_model(row: Row, field: str) -> float | None:
    """Return a quantity of the whole model, computed from one and two layers; None if either is absent.

    >>> layers = {"1": {"arguments": 5}, "2": {"arguments": 7}}
    >>> whole_model({"model": "1B", "layers": layers}, "arguments")
    35
    """
    one, two = (row["layers"].get(count, {}).get(field) for count in ("1", "2"))
    return None if one is None or two is None else one + (MODEL_LAYERS[row["model"]] - 1) * (two - one)


def table(rows: Iterable[Row]) -> str:
    """Return the rows as a Markdown table."""
    header = (
        "| chip | model | tokens | program | arguments | temporaries | output | compiles |\n"
        "|---|---|--:|---|--:|--:|--:|---|"
    )
    return "\n".join([header, *map(_line, sorted(rows, key=_order))])


def _order(row: Row) -> tuple[int, ...]:
    places = (TPUS, list(MODEL_LAYERS), LENGTHS, PROGRAMS)
    return tuple(place.index(value) for place, value in zip(places, cell_of(row), strict=True))


def _line(row: Row) -> str:
    # Temporaries are those of two layers: a single layer is not scanned, so their difference is not a layer's.
    temporaries = row["layers"].get("2", {}).get("temporaries")
    sizes = [whole_model(row, "arguments"), temporaries, whole_model(row, "outputs")]
    cells = [
        *map(str, cell_of(row)),
        *("" if size is None else f"{size / 2**30:.2f}" for size in sizes),
        _verdict(row, sizes),
    ]
    return f"| {' | '.join(cells)} |"


def _verdict(row: Row, sizes: Sequence[float | None]) -> str:
    if row["error"] is not None:
        reason = " ".join(row["error"].split())
        return f"no: {reason[:160]}".replace("|", "/")
    # The output of these programs replaces an argument.
    needed, memory = sum(size or 0 for size in sizes[:2]), CHIPS[row["chip"]].memory
    return "yes" if needed <= memory else f"yes, but needs {needed / GIB:.1f} of {memory / GIB:.1f} GiB"


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile the selected cells that have no result, then print the table of all results."""
    parser = benchmark_parser("Compile the programs of learner and sampler for TPUs, without a TPU.")
    parser.add_argument("--chips", nargs="+", choices=TPUS, default=TPUS)
    parser.add_argument("--models", nargs="+", choices=MODEL_LAYERS, default=list(MODEL_LAYERS))
    parser.add_argument("--lengths", nargs="+", type=int, choices=LENGTHS, default=list(LENGTHS))
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--results", type=Path, default=Path("compile_tpu.jsonl"), help="JSON, one cell a line")
    parser.add_argument("--keep", type=Path, help="folder for the optimized programs, in XLA's text form")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one cell")
    parser.add_argument("--table", action="store_true", help="print the table of the results without compiling")
    chosen = parser.parse_args(arguments)
    finished = read_results(chosen.results)
    cells = list(itertools.product(chosen.chips, chosen.models, chosen.lengths, chosen.programs))
    missing = [] if chosen.table else [cell for cell in cells if cell not in finished]
    if missing and util.find_spec("libtpu") is None:
        parser.error("libtpu is not installed; install marin_rl with the extra tpu: pip install -e .[tpu]")
    for number, cell in enumerate(missing, 1):
        say(f"{number} of {len(missing)}: {' '.join(map(str, cell))}")
        finished[cell] = row = compile_cell(cell, chosen.keep, chosen.timeout)
        with chosen.results.open("a") as file:
            file.write(json.dumps(row) + "\n")
    print(table(finished[cell] for cell in cells if cell in finished))
    packages = [*PACKAGES, *(["libtpu"] if util.find_spec("libtpu") else [])]
    print("\n" + ", ".join(f"{name} {metadata.version(distribution_of(name))}" for name in packages))


if __name__ == "__main__":
    main()
