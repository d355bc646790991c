# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

from importlib import util
from pathlib import Path
from typing import Any

import pytest

from experiments.lab.benchmarks import compile_tpu


def make_row(chip: str, program: str = "decode", error: str | None = None) -> dict[str, Any]:
    layers = {
        str(count): {
            "arguments": (1 + count) * 2**30,
            "temporaries": 2**29,
            "outputs": 0,
        }
        for count in (1, 2)
    }
    cell = {"chip": chip, "model": "1B", "length": 8192, "program": program}
    return {**cell, "layers": {} if error else layers, "error": error}


def test_table_computes_the_whole_model_from_two_layers():
    table = compile_tpu.table([make_row("v6e"), make_row("v5e"), make_row("v5p", error="RESOURCE_EXHAUSTED:\n a | b")])
    first, second, third = table.splitlines()[2:]
    sizes = "| 1B | 8192 | decode | 17.00 | 0.50 | 0.00 |"
    assert first == f"| v5e {sizes} yes, but needs 17.5 of 15.8 GiB |"
    assert second == "| v5p | 1B | 8192 | decode |  |  |  | no: RESOURCE_EXHAUSTED: a / b |"
    assert third == f"| v6e {sizes} yes |"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The cells that were compiled, which takes no time."""
    cells: list[tuple[Any, ...]] = []

    def compile_cell(cell: tuple[Any, ...], keep: Path | None, timeout: float) -> dict[str, Any]:
        cells.append(cell)
        return {**make_row(cell[0]), **dict(zip(compile_tpu.FIELDS, cell, strict=True))}

    monkeypatch.setattr(compile_tpu, "compile_cell", compile_cell)
    monkeypatch.setattr(compile_tpu.util, "find_spec", lambda name: None if name == "libtpu" else name)
    return cells


def test_selected_cells_are_compiled_and_kept(
    compiled: list, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(compile_tpu.util, "find_spec", lambda name: name == "libtpu")
    monkeypatch.setattr(compile_tpu.metadata, "version", lambda name: "1.0")
    chosen = ["--chips", "v5e", "v6e", "--models", "8B", "--lengths", "2048", "--programs", "learner", "decode"]
    for _ in range(2):
        compile_tpu.main([*chosen, "--results", str(tmp_path / "results.jsonl")])
    expected = [(chip, "8B", 2048, program) for chip in ("v5e", "v6e") for program in ("learner", "decode")]
    assert compiled == expected
    assert set(compile_tpu.read_results(tmp_path / "results.jsonl")) == set(expected)
    assert "libtpu 1.0" in capsys.readouterr().out


CELL = ("v5e", "0.6B", 2048, "decode")


@pytest.mark.slow
@pytest.mark.skipif(util.find_spec("libtpu") is None, reason="needs libtpu, from the extra tpu")
def test_decode_compiles_without_copies_of_the_cache():
    row = compile_tpu.compile_cell(CELL, None, 900)
    assert row["error"] is None
    two = row["layers"]["2"]
    assert two["temporaries"] < 0.1 * two["outputs"]
