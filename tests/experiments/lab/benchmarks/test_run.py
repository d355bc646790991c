# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The suite with fake benchmarks: arguments, order, failures, table and JSON."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from experiments.lab.benchmarks import run
from experiments.lab.benchmarks.run import Finished

MACHINE = {"devices": 1, "device_kind": "cpu", "cpu_cores": 2, "python": "3.11.7", "versions": {"jax": "0.10.2"}}


def report(name: str) -> str:
    figures = {
        "warm": {"step_seconds": {"median": 0.51234, "min": 0.5, "max": 12345.6, "count": 3}},
        "device_peak_bytes": None,
        "losses": [1.0, 2.0],
    }
    return json.dumps(
        {"benchmark": f"benchmark_{name}", "command": f"run {name}", "machine": MACHINE} | {"figures": figures}
    )


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """Replaces the processes; `sandbox` fails."""
    made: list[tuple[str, list[str]]] = []

    def fake(name: str, arguments: Sequence[str]) -> Finished:
        made.append((name, list(arguments)))
        return Finished(3, "") if name == "sandbox" else Finished(0, report(name))

    monkeypatch.setattr(run, "run_benchmark", fake)
    return made


def test_a_failed_benchmark_does_not_stop_the_others(
    calls: list[tuple[str, list[str]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "all.json"
    assert run.main(["sandbox", "startup", "--output", str(output)]) == 1
    written = json.loads(output.read_text())["benchmarks"]
    assert written["sandbox"]["error"] == "ended with status 3"
    assert written["startup"]["figures"]["losses"] == [1.0, 2.0]
    assert len(written["startup"]["load"]) == 2
    printed = capsys.readouterr().out
    assert "failed: ended with status 3" in printed
    assert "| `warm.step_seconds` | 0.5123 | 0.5 | 12,346 |" in printed
    assert "| `device_peak_bytes` |  |  |  |" in printed
    assert "1 x cpu, 2 cores" in printed
    assert "jax 0.10.2" in printed
    assert "losses" not in printed


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["samplings"], "unknown benchmark samplings; choose from coordinator, end_to_end"),
        (["sampling", "--against", "trl"], "--against trl needs the benchmark end_to_end"),
        (["--", "--calls", "3"], "name exactly one"),
    ],
)
def test_mistakes(argv: list[str], message: str, calls: list, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(argv)
    assert message in capsys.readouterr().err
    assert calls == []
