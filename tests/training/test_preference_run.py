# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Runs of `marin_rl.dpo` on pairs of sums, which compile the same programs."""

import dataclasses
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from marin_rl.learner.policy_model import load_hf_policy
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import byte_tokenizer
from tests.tiny_run import TINY, TinyRun, changed, in_this_process, interrupted_after, outcome, without_timings
from tests.training_hosts import hosts, started

PAIRS = [
    {"prompt": f"{a}+{b}", "chosen": str(a + b), "rejected": str(a + b + (-1) ** a * (b + 1))}
    for a in range(4, 8)
    for b in range(3)
]
SHARED = ("seed", "model", "optimizer", "trainer")


def make_run(folder: Path, **changes: Any) -> TinyRun:
    """Create a run that has not started; `changes` are values by dotted key, with `__` for dots."""
    folder.mkdir(exist_ok=True)
    (folder / "pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in PAIRS))
    run = TinyRun(folder / "run", folder / "tiny.yaml")
    settings = {
        **{name: TINY[name] for name in SHARED},
        "run_dir": str(run.path),
        "preferences": {"path": str(folder / "pairs.jsonl"), "held_out_path": str(folder / "pairs.jsonl")},
        "batch": {"size": 5, "max_length": 12},
        "loss": {"beta": 0.5, "label_smoothing": 0.1},
        "num_steps": 6,
        "evaluation": {"every": 1},
        "checkpoint": {"every": 1, "keep_every": 1},
    }
    config = changed(settings, {name.replace("__", "."): value for name, value in changes.items()})
    run.config.write_text(yaml.safe_dump(config, sort_keys=False))
    return run


def train(run: TinyRun, *more: str, curves: bool = False) -> int:
    """Run the command in this process."""
    from marin_rl.dpo import main

    with in_this_process(curves=curves):
        return main([*run.argv, *more])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    run = make_run(tmp_path_factory.mktemp("dpo") / "finished")
    assert train(run, curves=True) == 0
    return run


@pytest.mark.medium
def test_first_loss_is_log_2(finished: TinyRun) -> None:
    start, first, *_ = finished.records()
    assert start["eval/held_out/loss/dpo"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["loss/dpo"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["loss/total"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-5)


@pytest.mark.medium
def test_margins_rise_and_the_loss_falls(finished: TinyRun) -> None:
    last = finished.records()[-1]
    assert last["eval/held_out/loss/dpo"] < math.log(2) - 0.02
    assert last["eval/held_out/rewards/margins"] > 0.05
    assert last["eval/held_out/rewards/margins"] == pytest.approx(
        last["eval/held_out/rewards/chosen"] - last["eval/held_out/rewards/rejected"], abs=1e-6
    )
    assert last["eval/held_out/rewards/accuracies"] > 0.5


@pytest.mark.medium
def test_held_out_metrics_are_those_of_the_next_update(tmp_path: Path) -> None:
    """The held-out pairs are the batch of every update, which is measured with the weights before it."""
    run = make_run(tmp_path / "whole", batch__size=len(PAIRS), num_steps=3)
    assert train(run) == 0
    names = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen")
    for before, after in zip(run.records()[1:], run.records()[2:], strict=False):
        assert before["eval/held_out/loss/dpo"] == pytest.approx(after["loss/dpo"], abs=1e-5)
        for name in (*names, "logps/rejected"):
            assert before[f"eval/held_out/{name}"] == pytest.approx(after[name], abs=1e-4), name


@pytest.mark.medium
def test_every_pair_is_used_once_per_epoch(tmp_path: Path) -> None:
    run = make_run(tmp_path / "epochs", num_steps=0, epochs=1.5, evaluation__every=0)
    assert train(run) == 0
    assert [record["epoch"] for record in run.records()[1:]] == [5 / 12, 10 / 12, 15 / 12, 20 / 12]
    assert yaml.safe_load((run.path / "config.yaml").read_text())["num_steps"] == 4


@pytest.mark.medium
@pytest.mark.parametrize("step", [0, 4])
def test_resumed_run_is_bit_equal(finished: TinyRun, tmp_path: Path, step: int) -> None:
    """tests/training/test_supervised_run.py kills a run, whose loop is the same."""
    resumed = interrupted_after(finished, step, tmp_path / "copy")
    assert train(resumed) == 0
    assert outcome(resumed) == outcome(finished)


@pytest.mark.medium
def test_reference_is_kept_with_the_first_checkpoint_only(finished: TinyRun, tmp_path: Path) -> None:
    run = make_run(tmp_path / "kept", checkpoint__keep_every=0, checkpoint__every=2)
    assert train(run) == 0
    assert run.steps() == [0, 4, 6]
    with (
        np.load(run.checkpoint(0) / "reference_logprobs.npz") as stored,
        np.load(finished.checkpoint(0) / "reference_logprobs.npz") as expected,
    ):
        assert stored["logprobs"].tobytes() == expected["logprobs"].tobytes()
    assert not (run.checkpoint(6) / "reference_logprobs.npz").exists()


@pytest.fixture(scope="module")
def from_base(finished: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyRun]:
    """Runs from the weights of another run, of all weights and of an adapter."""
    folder, base = tmp_path_factory.mktemp("base"), {"model": None, "initialize_from": str(finished.path)}
    runs = {
        "all": make_run(folder / "all", **base, num_steps=1),
        "adapter": make_run(folder / "adapter", **base, lora={"rank": 2, "alpha": 4}, optimizer__learning_rate=5e-2),
    }
    assert [train(run) for run in runs.values()] == [0, 0]
    return runs


@pytest.mark.medium
def test_the_base_of_an_adapter_is_the_reference(from_base: dict[str, TinyRun]) -> None:
    files = [(run.checkpoint(0) / "reference_logprobs.npz").read_bytes() for run in from_base.values()]
    assert files[0] == files[1]
    _, first, *_, last = from_base["adapter"].records()
    assert first["loss/dpo"] == pytest.approx(math.log(2), abs=1e-6)
    assert last["eval/held_out/rewards/margins"] > 0.05


@pytest.mark.medium
def test_resumed_run_of_an_adapter_is_bit_equal(from_base: dict[str, TinyRun], tmp_path: Path) -> None:
    resumed = interrupted_after(from_base["adapter"], 2, tmp_path / "copy")
    assert train(resumed) == 0
    assert outcome(resumed) == outcome(from_base["adapter"])


@pytest.mark.slow
def test_two_processes_train_like_one(tmp_path: Path) -> None:
    """Each process scores the reference and packs the batches itself, and feeds its rows."""
    runs = {
        count: make_run(tmp_path / str(count), num_steps=3, trainer__per_device_parallelism=8 // devices)
        for count, devices in ((1, 1), (2, 4))
    }
    assert train(runs[1]) == 0
    processes = [dataclasses.replace(host, program="marin_rl.dpo") for host in hosts(runs[2], 2)]
    with started(processes):
        assert [host.end() for host in processes] == [0, 0], [host.output.read_text() for host in processes]
    for found, expected in zip(runs[2].records(), runs[1].records(), strict=True):
        for name, value in without_timings(expected).items():
            if not name.endswith("accuracies"):  # ties before the first update
                assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name


def test_dry_run_reads_the_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "dry")
    assert train(run, "--dry_run") == 0
    printed = capsys.readouterr().out
    assert "12 pairs with 193 tokens, 49 with loss; 12 pairs are held out" in printed
    assert re.search(r"the run +\d+ steps of \d+ pairs\n", printed)
    assert "columns not used" not in printed
    assert "the run starts from the beginning" in printed
    assert not run.path.exists()
    rows = [{**pair, "source": "sums", "score": 1} for pair in PAIRS]
    (tmp_path / "dry" / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert train(run, "--dry_run") == 0
    assert "\ncolumns not used: source, score\n" in capsys.readouterr().out


@pytest.mark.medium
@pytest.mark.parametrize("lost", ["", "reference_logprobs.npz", "manifest.json"])
def test_a_lost_reference_is_computed_again(
    finished: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], lost: str
) -> None:
    resumed = interrupted_after(finished, 4, tmp_path / "copy")
    path = resumed.checkpoint(0) / lost
    path.unlink() if lost else shutil.rmtree(path)
    assert train(resumed, "--dry_run") == 0
    assert train(resumed) == 0
    assert "computed again from the initial weights of the config" in capsys.readouterr().out
    expected, found = outcome(finished), outcome(resumed)
    for part in ("records", "progress", "state", "hf"):
        assert found[part] == expected[part], part


@pytest.mark.medium
def test_accepted_pairs_have_a_reference_of_their_own(
    finished: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that resumes before its first step with other pairs equals a new run on these."""
    resumed = interrupted_after(finished, 0, tmp_path / "copy")
    pairs = finished.path.parent / "pairs.jsonl"
    text = pairs.read_text()
    new = make_run(tmp_path / "new")
    try:
        for file in pairs, tmp_path / "new" / "pairs.jsonl":
            file.write_text(text.replace('"chosen": "4"', '"chosen": "6"', 1))
        assert train(resumed) == 1
        assert "files of the run were changed" in capsys.readouterr().err
        assert train(resumed, "--accept_changes") == 0
    finally:
        pairs.write_text(text)
    assert train(new) == 0
    expected, found = outcome(new), outcome(resumed)
    assert found["records"][1:] == expected["records"][1:] != outcome(finished)["records"][1:]
    assert found["state"] == expected["state"]


@pytest.mark.medium
def test_packing_does_not_change_a_run(finished: TinyRun, tmp_path: Path) -> None:
    run = make_run(tmp_path / "packed", batch__packing=True, trainer__per_device_parallelism=2)
    assert train(run) == 0
    for found, expected in zip(run.records()[1:], finished.records()[1:], strict=True):
        for name in ("loss/dpo", "rewards/margins", "logps/chosen", "eval/held_out/loss/dpo"):
            assert found[name] == pytest.approx(expected[name], abs=1e-4), name


@pytest.mark.medium
def test_export_holds_the_trained_weights(tiny, trainer, finished: TinyRun) -> None:
    policy = load_hf_policy(str(finished.path / "hf"), ChatTokenizer(byte_tokenizer()), trainer, None)
    norms = {path: float(np.abs(array).sum()) for path, array in tiny.arrays_by_path(policy).items()}
    assert norms
    assert (finished.path / "curves.png").is_file()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch__long_sequences": "truncate"}, "batch.long_sequences is truncate, but a cut answer"),
        ({"trainer__per_device_parallelism": 1, "batch__packing": False}, "both answers of a pair must fit"),
        ({"batch__max_length": 7}, "pairs.jsonl:1: a sequence has at least 8 tokens"),
        ({"loss__beta": 0}, "loss.beta"),
        ({"loss__label_smoothing": 0.5}, "loss.label_smoothing"),
        ({"preferences__path": "absent.jsonl"}, "preferences.path is 'absent.jsonl', which does not exist"),
    ],
)
def test_mistakes_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    assert train(make_run(tmp_path / "run", **changes)) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert message in "".join(lines)
    assert len(lines) == 1
