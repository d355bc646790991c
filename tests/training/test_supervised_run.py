# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Supervised fine-tuning: a run, its resume, its files, and RL from its weights."""

import dataclasses
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from marin_rl.data import dataset
from marin_rl.sessions.earlier_run import load_run, require_rl
from marin_rl.sessions.run_export import export_run
from marin_rl.sessions.served_policy import load_served_policy
from marin_rl.sft import main
from marin_rl.utils.errors import RunDirectoryError
from tests.fork_server import popen
from tests.tiny_run import (
    PROBLEMS,
    TINY,
    TinyRun,
    changed,
    contents,
    copy_of,
    in_this_process,
    interrupted_after,
    outcome,
    without_timings,
)
from tests.training_hosts import hosts, started

NUM_ROWS, SIZE = len(PROBLEMS), 16


class SftRun(TinyRun):
    """A run directory and its command."""

    def train(self, *more: str, curves: bool = False) -> int:
        with in_this_process(curves=curves):
            return main([*self.argv, *more])


def make(folder: Path, **changes: Any) -> SftRun:
    """Create a run that has not started, on the worked answers of the tiny run."""
    data = folder / "rows.jsonl"
    rows = [{"prompt": row["prompt"], "completion": row["worked_answer"]} for row in PROBLEMS]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    run = SftRun(folder / "run", folder / "tiny.yaml")
    shared = {key: TINY[key] for key in ("seed", "model", "trainer")}
    config = {
        **shared,
        "run_dir": str(run.path),
        "data": {"path": str(data), "held_out": 0.2},
        "batch": {"size": SIZE, "max_length": 12},
        "epochs": 3,
        "optimizer": {**TINY["optimizer"], "learning_rate": 2e-2},
        "evaluation": {"every": 4},
        "checkpoint": {"every": 3, "keep_every": 1},
    }
    settings = {name.replace("__", "."): value for name, value in changes.items()}
    run.config.write_text(yaml.safe_dump(changed(config, settings), sort_keys=False))
    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> SftRun:
    """An uninterrupted run. Tests must not change it."""
    run = make(tmp_path_factory.mktemp("sft"))
    assert run.train(curves=True) == 0
    return run


@pytest.mark.medium
def test_a_run_learns_for_whole_epochs(finished: SftRun):
    records = finished.records()
    first, last = records[0], records[-1]
    assert [record["step"] for record in records] == list(range(len(records)))
    trained = yaml.safe_load((finished.path / "config.yaml").read_text())["num_steps"]
    assert last["step"] == trained
    assert last["epoch"] == pytest.approx(3, abs=SIZE / 48)
    assert last["epoch"] >= 3
    assert last["eval/held_out/loss"] < 0.6 * first["eval/held_out/loss"]
    assert last["eval/held_out/token_accuracy"] > first["eval/held_out/token_accuracy"]
    assert [record["step"] for record in records if "eval/held_out/loss" in record] == [0, 4, 8, trained]
    assert all(record["grad_norm"] > 0 for record in records[1:])
    for name in ("curves.png", "hf/model.safetensors", "hf/tokenizer.json", "log.txt"):
        assert (finished.path / name).exists()
    assert not (finished.path / "rollouts").exists()


@pytest.mark.medium
def test_a_run_killed_within_an_epoch_equals_an_uninterrupted_one(finished: SftRun, tmp_path: Path):
    run = make(tmp_path)
    with (tmp_path / "output.txt").open("wb") as output:
        # Inside the write of the checkpoint of step 6, so that it goes on from step 3, within the first epoch.
        command = [sys.executable, "-m", "marin_rl.sft", *run.argv]
        process = popen(
            command, stdout=output, env=os.environ, kill_at=(r"os\.mkdir .*\.step-00000006\.[^/]*partial$", 3)
        )
    assert process.wait() == -signal.SIGKILL, (tmp_path / "output.txt").read_text()
    assert run.steps()[-1] == 3
    # The rows were tokenized by the killed start.
    with mock.patch.object(dataset, "encode_rows", side_effect=AssertionError):
        assert run.train() == 0
    found, expected = outcome(run), outcome(finished)
    for part in ("records", "progress", "state", "hf"):
        assert found[part] == expected[part], part


@pytest.mark.medium
def test_a_longer_run_equals_one_of_that_length(finished: SftRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    longer = SftRun(**vars(copy_of(finished, tmp_path)))
    assert longer.train() == 0
    assert "is complete after step" in capsys.readouterr().out
    assert longer.train("--num_steps", "12") == 0
    whole = make(tmp_path, num_steps=12, run_dir=str(tmp_path / "whole"))
    whole = dataclasses.replace(whole, path=tmp_path / "whole")
    assert SftRun(**vars(whole)).train() == 0
    assert outcome(longer)["state"] == outcome(whole)["state"]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("more", "key"),
    [
        (("--optimizer.learning_rate", "1e-4"), "optimizer.learning_rate"),
        (("--optimizer.weight_decay", "0.3", "--evaluation.every", "2"), "optimizer.weight_decay"),
        (("--num_steps", "9", "--epochs", "5"), "epochs"),
    ],
)
def test_a_change_that_trains_no_step_writes_nothing(
    finished: SftRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], key: str
):
    run = SftRun(**vars(copy_of(finished, tmp_path)))
    before = contents(run.path)
    assert run.train(*more) == 1
    assert key in capsys.readouterr().err
    assert contents(run.path) == before
    assert run.train() == 0
    assert contents(run.path) == before


def test_few_held_out_rows_are_a_warning(finished: SftRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert "warning: only" in (finished.path / "log.txt").read_text()
    assert make(tmp_path, data__held_out=0.5).train("--dry_run") == 0
    enough = capsys.readouterr().out
    assert make(tmp_path, data__held_out=0.1).train("--dry_run") == 0
    few = capsys.readouterr().out
    rows = int(re.search(r"(\d+) rows are held out", few)[1])
    assert f"only {rows} held-out rows decide" in few
    assert f"up to {0.5 / rows**0.5:.2f}" in few
    assert "warning" not in enough


def test_changed_data_is_refused(finished: SftRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = SftRun(**vars(copy_of(finished, tmp_path)))
    data = finished.path.parent / "rows.jsonl"
    text = data.read_text()
    try:
        data.write_text(text + text.splitlines(keepends=True)[0])
        assert run.train("--num_steps", "12") == 1
    finally:
        data.write_text(text)
    assert "rows.jsonl was changed" in capsys.readouterr().err


def test_served_exported_and_continued(finished: SftRun, tmp_path: Path):
    policy = load_served_policy(run=str(finished.path))
    assert policy.max_context == TINY["model"]["seq_len"]
    export_run(str(finished.path), tmp_path / "weights")
    exported = (tmp_path / "weights" / "model.safetensors").read_bytes()
    assert exported == (finished.path / "hf" / "model.safetensors").read_bytes()
    config, _ = load_run(str(finished.path), None)
    with pytest.raises(RunDirectoryError, match=r"is a run of marin_rl\.sft, which has no environment"):
        require_rl(config, str(finished.path), "it cannot be evaluated on tasks")


@pytest.mark.medium
def test_an_adapter_is_trained_resumed_and_merged(finished: SftRun, tmp_path: Path):
    settings: dict[str, Any] = {"lora": {"rank": 2}, "initialize_from": str(finished.path), "num_steps": 4}
    run = make(tmp_path, **settings, checkpoint__every=2)
    assert run.train() == 0
    before, after = (record["eval/held_out/loss"] for record in (run.records()[0], run.records()[-1]))
    # B is 0 at first, so that the first loss is that of the base.
    assert before == pytest.approx(finished.records()[-1]["eval/held_out/loss"], rel=1e-6)
    assert after < before
    resumed = interrupted_after(run, 2, tmp_path / "resumed")
    assert SftRun(**vars(resumed)).train() == 0
    for part in ("records", "state", "hf"):
        assert outcome(resumed)[part] == outcome(run)[part], part
    base, merged = (load_file(each.path / "hf" / "model.safetensors") for each in (finished, run))
    changed_weights = {name.split(".")[-2] for name in base if not np.array_equal(base[name], merged[name])}
    assert changed_weights == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.slow
def test_two_processes_train_like_one(tmp_path: Path):
    """Each process packs the batches itself, and feeds its rows."""
    runs = {}
    for count, devices in ((1, 1), (2, 4)):
        folder = tmp_path / str(count)
        folder.mkdir()
        runs[count] = make(folder, num_steps=3, trainer__per_device_parallelism=8 // devices)
    assert runs[1].train() == 0
    processes = [dataclasses.replace(host, program="marin_rl.sft") for host in hosts(runs[2], 2)]
    with started(processes):
        assert [host.end() for host in processes] == [0, 0], [host.output.read_text() for host in processes]
    for found, expected in zip(runs[2].records(), runs[1].records(), strict=True):
        for name, value in without_timings(expected).items():
            assert found[name] == pytest.approx(value, rel=1e-5), name
    weights = load_file(runs[2].path / "hf" / "model.safetensors")
    for name, array in load_file(runs[1].path / "hf" / "model.safetensors").items():
        np.testing.assert_allclose(weights[name], array, atol=1e-5, err_msg=name)


@pytest.mark.medium
def test_packed_rows_and_microbatches_do_not_change_the_run(finished: SftRun, tmp_path: Path):
    for name, changes in {
        "separate": {"batch__packing": False},
        "one row": {"trainer__per_device_parallelism": 1},
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        run = make(folder, num_steps=3, evaluation__every=0, **changes)
        assert run.train() == 0
        for step, (found, expected) in enumerate(zip(run.records(), finished.records()[:4], strict=True)):
            for metric in ("loss/ce_avg", "grad_norm"):
                if metric in found:
                    # Later losses also differ by the rounding of Adam's steps.
                    rtol = 1e-6 if step == 1 else 1e-5
                    np.testing.assert_allclose(found[metric], expected[metric], rtol=rtol)
    shutil.rmtree(tmp_path)
