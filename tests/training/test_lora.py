# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Runs that train an adapter, from another run's weights to their export."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from marin_rl.distributed.coordinator import Announcement
from marin_rl.distributed.weight_sender import WeightSender
from marin_rl.learner.base_weights import OtherBaseError
from marin_rl.runs.run_directory import RunDirectory
from marin_rl.sessions.replay import replay_step
from marin_rl.sessions.run_export import export_once
from marin_rl.training.worker import WorkerPolicy
from tests.distributed.thread_workers import thread_workers
from tests.faults.test_resume import Moment, kill_at
from tests.tiny_run import TinyRun, interrupted_after, make_run, outcome, without_timings
from tests.training.reopened_run import config_of

pytestmark = pytest.mark.medium

SETTINGS: dict[str, Any] = {
    "model": None,
    "lora": {"rank": 2, "alpha": 4},
    "warm_start__max_steps": 0,
    "num_steps": 3,
    "optimizer__learning_rate": 5e-2,
    "kl": {"type": "in_loss", "beta": 0.1},
    "checkpoint": {"every": 1, "keep_every": 1},
}


@pytest.fixture(scope="module")
def lora_run(finished_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """An uninterrupted run with an adapter. Tests must not change it."""
    run = make_run(tmp_path_factory.mktemp("lora"), initialize_from=str(finished_run.path), **SETTINGS)
    assert run.train() == 0
    return run


def manifest(run: TinyRun, step: int) -> dict[str, Any]:
    return json.loads((run.checkpoint(step) / "manifest.json").read_text())


def test_training_starts_with_the_function_of_the_base(finished_run: TinyRun, lora_run: TinyRun) -> None:
    """The same answers with the same log-probs, and no distance from the reference before the first update."""
    first, base = lora_run.records()[0], finished_run.records()[-1]
    shared = [name for name in first if name.startswith("eval/")]
    assert shared
    assert {name: first[name] for name in shared} == {name: base[name] for name in shared}
    records = lora_run.records()
    # The programs of scorer and learner round log-probs differently in the last bit.
    assert 0 <= records[1]["loss/kl_avg"] < 1e-12
    assert records[2]["loss/kl_avg"] > 1e-5
    assert records[-1]["train/rewards"] > 0


def test_checkpoints_hold_only_the_adapter_and_the_fingerprint_of_the_base(lora_run: TinyRun) -> None:
    saved = manifest(lora_run, 3)
    assert len(saved["progress"]["base"]) == 64
    models = [name for name in saved["arrays"] if name.startswith(".model")]
    assert len(models) == 2 * 7
    assert all(".layers['transformer.layers.stacked." in name and name[-2:] in (".a", ".b") for name in models)
    moments = [name for name in saved["arrays"] if ".mu" in name]
    assert len(moments) == len(models)


def test_the_export_is_the_base_plus_the_product(finished_run: TinyRun, lora_run: TinyRun) -> None:
    base = load_file(finished_run.path / "hf" / "model.safetensors")
    found = load_file(lora_run.path / "hf" / "model.safetensors")
    assert found.keys() == base.keys()
    model = adapter_of(lora_run, 3)
    adapted = 0
    for name, tensor in found.items():
        assert tensor.dtype == np.float32
        path = name.removeprefix("model.layers.0.").removesuffix(".weight")
        layer = model.get(f"transformer.layers.stacked.{path}")
        if layer is None:
            np.testing.assert_array_equal(tensor, base[name])
            continue
        adapted += 1
        a, b = layer.a.array[0].reshape(2, -1), layer.b.array[0].reshape(-1, 2)
        np.testing.assert_allclose(tensor, base[name] + 2.0 * np.float64(b) @ np.float64(a), atol=1e-6, err_msg=name)
        assert np.abs(tensor - base[name]).max() > 1e-3
    assert adapted == 7


def adapter_of(run: TinyRun, step: int) -> Any:
    from marin_rl.parts.rl import RunParts
    from marin_rl.runs.checkpoint import Checkpoints

    config = config_of(run)
    parts = RunParts.start(config)
    checkpoint = Checkpoints(RunDirectory(run.path).checkpoints, config.checkpoint).open(step)
    return parts.policy_spec(checkpoint.vocab_size).restore_policy(checkpoint).layers


def test_an_interrupted_run_resumes_bit_for_bit(lora_run: TinyRun, tmp_path: Path) -> None:
    run = interrupted_after(lora_run, 1, tmp_path / "resumed")
    assert run.train() == 0
    assert outcome(run) == outcome(lora_run)


@pytest.mark.slow
def test_a_killed_run_equals_an_uninterrupted_one(finished_run: TinyRun, lora_run: TinyRun, tmp_path: Path) -> None:
    run = make_run(tmp_path, initialize_from=str(finished_run.path), **SETTINGS)
    kill_at(run, "inside the write of checkpoint 2", Moment(r"os\.mkdir .*\.step-00000002\.[^/]*partial$", 3))
    assert run.train() == 0
    found, expected = outcome(run), outcome(lora_run)
    for part in ("records", "progress", "state", "rollouts", "hf"):
        assert found[part] == expected[part], part


def test_every_command_reads_the_run(lora_run: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from marin_rl.evaluate import main as evaluate
    from marin_rl.export import main as export

    assert export(["--run", str(lora_run.path), "--output", str(tmp_path / "hf")]) == 0
    for name in ("model.safetensors", "tokenizer.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (lora_run.path / "hf" / name).read_bytes()
    # As for the base of a server.
    assert export_once(str(lora_run.path), None, tmp_path / "base") == 3
    name = "model.safetensors"
    assert (tmp_path / "base" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()
    capfd.readouterr()
    assert evaluate(["--run", str(lora_run.path), "--json"]) == 0
    measured = json.loads(capfd.readouterr().out)
    last = lora_run.records()[-1]
    assert measured.items() >= {name: last[name] for name in last if name.startswith("eval/")}.items()
    replayed = replay_step(RunDirectory(lora_run.path), config_of(lora_run), 2)
    assert replayed.weight_difference == 0


def test_a_changed_base_is_refused(finished_run: TinyRun, lora_run: TinyRun, tmp_path: Path, capfd: Any) -> None:
    from marin_rl.evaluate import main as evaluate
    from marin_rl.export import main as export

    run = interrupted_after(lora_run, 2, tmp_path / "run")
    shutil.copytree(finished_run.path / "hf", tmp_path / "base")
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    tensors["model.norm.weight"][3] = np.nextafter(tensors["model.norm.weight"][3], np.float32(np.inf))
    save_file(tensors, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    for file in (run.config, run.path / "config.yaml"):
        text = file.read_text()
        assert str(finished_run.path) in text
        file.write_text(text.replace(str(finished_run.path), str(tmp_path / "base")))
    before = outcome_files(run)
    for command in (
        run.train,
        lambda: evaluate(["--run", str(run.path)]),
        lambda: export(["--run", str(run.path), "--output", str(tmp_path / "hf")]),
    ):
        assert command() == 1
        message = capfd.readouterr().err
        assert f"initialize_from {str(tmp_path / 'base')!r} has other weights" in message
        assert "start another run with --run_dir NEW" in message
    assert outcome_files(run) == before


def test_a_worker_with_another_base_ends_with_an_error(lora_run: TinyRun) -> None:
    config, announced = config_of(lora_run), lambda: Announcement(0, ())
    saved = manifest(lora_run, 0)["progress"]
    WorkerPolicy(config, saved["vocab_size"], saved["base"], "secret", announced).close()
    with pytest.raises(OtherBaseError, match=r"has other weights \(fingerprint .* was trained \(0000"):
        WorkerPolicy(config, saved["vocab_size"], "0" * 64, "secret", announced)


def outcome_files(run: TinyRun) -> list[str]:
    return sorted(str(path) for path in (run.path / "checkpoints").rglob("*"))


def test_workers_load_the_base_and_receive_the_adapter(
    finished_run: TinyRun, lora_run: TinyRun, new_run: Callable[..., TinyRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    publish = WeightSender.publish

    def watch(sender: WeightSender, weights: Any, version: int) -> None:
        sent.append(jax.tree.map(lambda array: array.shape, weights))
        publish(sender, weights, version)

    monkeypatch.setattr(WeightSender, "publish", watch)
    monkeypatch.setattr("marin_rl.distributed.ray_workers.ray_workers", thread_workers)
    run = new_run(mode="async", replay__max_staleness=0, initialize_from=str(finished_run.path), **SETTINGS)
    assert run.train() == 0
    found, expected = outcome(run), outcome(lora_run)
    for part in ("state", "rollouts", "hf"):
        assert found[part] == expected[part], part
    assert len(sent) == 4
    assert all(len(jax.tree.leaves(weights, is_leaf=lambda leaf: isinstance(leaf, tuple))) == 14 for weights in sent)


def test_a_warm_start_trains_the_adapter(finished_run: TinyRun, new_run: Callable[..., TinyRun]) -> None:
    settings = {**SETTINGS, "warm_start__max_steps": 2, "warm_start__target_accuracy": 1.0, "num_steps": 1}
    run = new_run(initialize_from=str(finished_run.path), critic={}, advantage={"type": "gae"}, **settings)
    assert run.train() == 0
    b = adapter_of(run, 0)["transformer.layers.stacked.mlp.up_proj"].b.array
    assert np.abs(b).max() > 0
    assert without_timings(run.records()[1])["loss/value_avg"] > 0
