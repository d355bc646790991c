# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The suite with fake benchmarks: arguments, order, failures, table and JSON; and comparisons with a commit."""

import json
import signal
import subprocess
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
        (["sampling", "--compare_to", "HEAD", "--pairs", "0"], "--pairs is 0; it must be at least 1"),
    ],
)
def test_mistakes(argv: list[str], message: str, calls: list, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(argv)
    assert message in capsys.readouterr().err
    assert calls == []


def fake_benchmark(seconds: float) -> str:
    """Source of a benchmark that adds its arguments and the folder of its package to a file."""
    figures = {"phase_seconds": {"sample": seconds, "reward": 0.0}, "step_seconds": {"median": 2 * seconds}, "steps": 3}
    figures["step_seconds"] |= {"min": 0.1, "max": 9.0, "count": 3}
    report = {"machine": MACHINE, "figures": figures}
    return f"""import sys, pathlib, package
with open({RUNS!r}.format(root=sys.argv[1]), "a") as file:
    print(package.TREE, *sys.argv[2:], file=file)
print({json.dumps(report)!r})
"""


RUNS = "{root}/runs.txt"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The suite's source tree: its commit has a benchmark in another folder, which takes twice as long."""
    root = tmp_path / "repository"
    for folder, tree, seconds in (("experiments/old", "commit", 2.0), ("experiments/lab", "current", 1.0)):
        for path in root.glob("experiments/**/*.py"):
            path.unlink()
        (root / folder).mkdir(parents=True)
        (root / folder / "benchmark_startup.py").write_text(fake_benchmark(seconds))
        (root / "package.py").write_text(f"TREE = {tree!r}\n")
        if tree == "commit":
            author = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
            for command in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "Start"]):
                subprocess.run(["git", *command], cwd=root, check=True)
    monkeypatch.setattr(run, "ROOT", root)
    monkeypatch.setenv("PYTHONPATH", str(root))
    return root


def compare(root: Path, name: str = "startup", commit: str = "HEAD") -> int:
    arguments = ["--compare_to", commit, "--pairs", "2", "--output", str(root.parent / "all.json")]
    return run.main([name, *arguments, "--", str(root.parent), "--calls", "3"])


def test_a_commit_and_this_tree_run_in_turn(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(repository) == 0
    runs = (repository.parent / "runs.txt").read_text().splitlines()
    assert runs == [f"{tree} --calls 3" for tree in ("commit", "current", "current", "commit")]
    figures = json.loads((repository.parent / "all.json").read_text())["benchmarks"]["startup"]["figures"]
    # Without a time of 0, and without counts.
    assert figures["ratio"].keys() == {"phase_seconds.sample", "step_seconds"}
    assert figures["ratio"]["phase_seconds.sample"] == {"median": 0.5, "min": 0.5, "max": 0.5, "count": 2}
    assert figures["before"]["step_seconds"]["median"] == 4.0
    assert figures["now"]["step_seconds"]["median"] == 2.0
    assert "| `ratio.step_seconds` | 0.5 | 0.5 | 0.5 |" in capsys.readouterr().out
    trees = subprocess.run(["git", "worktree", "list"], cwd=repository, capture_output=True, text=True, check=True)
    assert len(trees.stdout.splitlines()) == 1


def test_a_comparison_without_the_commit_or_its_benchmark_fails(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(repository, commit="missing") == 1
    assert "--compare_to missing: fatal: invalid reference: missing" in capsys.readouterr().err
    assert compare(repository, name="sampling") == 1
    assert "has no benchmark sampling" in capsys.readouterr().err


def test_a_signal_removes_the_checkout(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trees = []

    def stop(name: str, arguments: Sequence[str], tree: Path) -> Finished:
        trees.append(tree)
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("the signal has not ended the comparison")

    monkeypatch.setattr(run, "run_benchmark", stop)
    previous = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt):
            compare(repository)
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert not trees[0].exists()
    listed = subprocess.run(["git", "worktree", "list"], cwd=repository, capture_output=True, text=True, check=True)
    assert len(listed.stdout.splitlines()) == 1
