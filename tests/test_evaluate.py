# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import json
import re
from pathlib import Path

import haliax as hax
import jax
import jax.numpy as jnp
import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import numpy as np
import pytest
from levanter.layers.attention import AttentionMask

from marin_rl.config.train_config import TrainConfig
from marin_rl.environments.base import Split
from marin_rl.environments.dataset import JsonlConfig
from marin_rl.evaluate import EvaluateConfig, main, run_evaluation
from marin_rl.parts.rl import RunParts
from marin_rl.runs.checkpoint import Checkpoints
from marin_rl.utils.devices.setup import start_devices
from marin_rl.utils.settings.yaml_text import from_yaml
from tests.tiny_run import TinyRun, contents, copy_of, without_losses

Capture = pytest.CaptureFixture[str]


def evaluations(record: dict) -> dict[str, float]:
    return {name: value for name, value in record.items() if name.startswith("eval/")}


@pytest.mark.medium
def test_newest_checkpoint_is_evaluated_without_side_effects(finished_run: TinyRun, capfd: Capture):
    before = contents(finished_run.path)
    assert main(["--run", str(finished_run.path), "--json"]) == 0
    expected = evaluations(finished_run.records()[-1])
    found = json.loads(capfd.readouterr().out)
    own = {"split": "held_out", "environment": None}
    assert without_losses(found) == {"run": str(finished_run.path), "step": 6, **own, **expected}
    assert contents(finished_run.path) == before


@pytest.mark.medium
def test_run_of_other_devices_is_evaluated_on_these(finished_run: TinyRun, tmp_path: Path, capfd: Capture):
    run = copy_of(finished_run, tmp_path / "copy").path
    config = run / "config.yaml"
    text = config.read_text()
    for old, new in (("model_axis_size: 1", "model_axis_size: 16"), ("_accelerator: false", "_accelerator: true")):
        assert text.count(old) == 1
        text = text.replace(old, new)
    config.write_text(text)
    assert main(["--run", str(run), "--json"]) == 0
    found, warning = capfd.readouterr()
    expected = evaluations(finished_run.records()[-1])
    own = {"split": "held_out", "environment": None}
    assert without_losses(json.loads(found)) == {"run": str(run), "step": 6, **own, **expected}
    assert "The run had other devices" in warning


def test_run_without_a_cache_of_programs_is_evaluated_without_the_users(finished_run: TinyRun, tmp_path: Path):
    run = copy_of(finished_run, tmp_path / "copy").path
    config = run / "config.yaml"
    text, changes = re.subn("jax_compilation_cache_dir: .*", "jax_compilation_cache_dir: null", config.read_text())
    assert changes == 1
    config.write_text(text)
    former = jax.config.values["jax_compilation_cache_dir"]
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        assert main(["--run", str(run), "--json"]) == 0
        assert jax.config.values["jax_compilation_cache_dir"] is None
    finally:
        jax.config.update("jax_compilation_cache_dir", former)


def test_text_output(finished_run: TinyRun, capfd: Capture):
    assert main(["--run", str(finished_run.path), "--step", "3"]) == 0
    title, *lines = capfd.readouterr().out.splitlines()
    assert title == f"{finished_run.path}, after step 3"
    found = {line.split()[0]: float(line.split()[1]) for line in lines}
    assert min(found["eval/ones/loss"], found["eval/ones/loss_tokens"]) > 0
    assert without_losses(found) == pytest.approx(evaluations(finished_run.records()[3]), rel=1e-5)


@pytest.mark.medium
def test_evaluation_settings_override(finished_run: TinyRun, capfd: Capture):
    argv = ["--run", str(finished_run.path), "--json", "--evaluation", "{tasks: 5, samples: 4, pass_at: [1, 2, 4]}"]
    assert main(argv) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["eval/ones/tasks"] == 5.0
    passes = [found[f"eval/ones/pass@{k}"] for k in (1, 2, 4)]
    assert passes == sorted(passes)


SHARES = ["--environment.held_out", "0.5", "--environment.validation", "0.0"]


def sums(folder: Path) -> Path:
    """Write problems to another file, all but one with a worked answer."""
    rows = [{"prompt": f"{a}x{a}", "answer": "1", "worked_answer": str(a * a)} for a in range(2, 22)]
    del rows[0]["worked_answer"]
    path = folder / "squares.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.medium
def test_environment_override(finished_run: TinyRun, tmp_path: Path, capfd: Capture):
    path = sums(tmp_path)
    before = contents(finished_run.path)
    given = ["--environment.type", "jsonl", "--environment.path", str(path), *SHARES]
    assert main(["--run", str(finished_run.path), "--json", *given]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["environment"]["type"] == "jsonl"
    assert (found["environment"]["path"], found["environment"]["held_out"]) == (str(path), 0.5)
    assert found["eval/squares/tasks"] > 1
    assert not any(name.startswith("eval/ones/") for name in found)
    # The same environment from a file, with text output.
    (tmp_path / "other.yaml").write_text(
        f"environment: {{type: jsonl, path: {path}, held_out: 0.5, validation: 0.0}}\n"
    )
    assert main(["--run", str(finished_run.path), "--config", str(tmp_path / "other.yaml")]) == 0
    shown = capfd.readouterr().out
    assert json.dumps(found["environment"]) in shown
    assert re.search(r"eval/squares/tasks +\d", shown)
    assert contents(finished_run.path) == before


@pytest.mark.medium
def test_loss_of_worked_answers(finished_run: TinyRun, tmp_path: Path):
    environment = JsonlConfig(str(sums(tmp_path)), held_out=0.5, validation=0.0)
    _, found = run_evaluation(EvaluateConfig(str(finished_run.path), environment=environment))
    config = from_yaml(TrainConfig, (finished_run.path / "config.yaml").read_text(), "the run")
    trainer = start_devices(config.trainer, rows_per_device=config.rollouts.sizes.rows_per_device, alone=True)
    checkpoint = Checkpoints(finished_run.path / "checkpoints", config.checkpoint).open(6)
    model = RunParts(config, trainer).policy_spec(checkpoint.vocab_size).restore_policy(checkpoint)
    tokenizer = config.tokenizer.build()
    losses = []
    for task in environment.build().tasks(Split.HELD_OUT):
        if task.worked_answer is None:
            continue
        ids, mask = tokenizer.encode_conversation(
            [*task.messages, {"role": "assistant", "content": task.worked_answer}]
        )
        Pos = hax.Axis("position", len(ids))
        with trainer.use_device_mesh():
            trunk = model.activations(hax.named(jnp.array(ids), Pos), AttentionMask.causal())
            logits = hax.dot(trunk, model.get_lm_head(), axis=model.Embed).rearrange((Pos, ...)).array
        full = np.asarray(logits, np.float64)
        logprobs = (
            full
            - np.log(np.exp(full - full.max(-1, keepdims=True)).sum(-1, keepdims=True))
            - full.max(-1, keepdims=True)
        )
        losses += [-logprobs[place - 1, ids[place]] for place in range(1, len(ids)) if mask[place]]
    assert found["eval/squares/loss_tokens"] == len(losses) > 4
    assert found["eval/squares/loss"] == pytest.approx(np.mean(losses), rel=1e-4)


@pytest.mark.medium
def test_temperature_and_split_change_results(finished_run: TinyRun):
    config = EvaluateConfig(str(finished_run.path), step=0)
    _, own = run_evaluation(config)
    _, hot = run_evaluation(dataclasses.replace(config, temperature=50.0))
    _, validation = run_evaluation(dataclasses.replace(config, split=Split.VALIDATION))
    # At this temperature sampled replies are noise; greedy replies do not depend on it.
    assert hot["eval/ones/accuracy_sampled"] < own["eval/ones/accuracy_sampled"]
    assert hot["eval/ones/accuracy_greedy"] == own["eval/ones/accuracy_greedy"]
    assert validation["eval/ones/tasks"] != own["eval/ones/tasks"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--step", "9"], "has no checkpoint of step 9; it has [0, 1, 2, 3, 4, 5, 6]"),
        (["--temperature", "1e-37"], "temperature is 1e-37; it must be at least 1e-30"),
        (["--stpe", "3"], "did you mean 'step'?"),
        (["--evaluation", "{samples: 2, pass_at: [4]}"], "k = 4 with evaluation.samples = 2"),
    ],
)
def test_invalid_arguments(finished_run: TinyRun, capfd: Capture, argv: list[str], message: str):
    assert main(["--run", str(finished_run.path), *argv]) == 1
    assert message in capfd.readouterr().err


def test_run_without_checkpoint(finished_run: TinyRun, tmp_path: Path, capfd: Capture):
    (tmp_path / "config.yaml").write_text((finished_run.path / "config.yaml").read_text())
    (tmp_path / "checkpoints").mkdir()
    assert main(["--run", str(tmp_path)]) == 1
    assert "has no checkpoint yet" in capfd.readouterr().err


def test_damaged_checkpoint_is_skipped_unless_selected(finished_run: TinyRun, tmp_path: Path, capfd: Capture):
    copied = copy_of(finished_run, tmp_path / "copy")
    (copied.checkpoint(6) / "manifest.json").unlink()
    assert main(["--run", str(copied.path), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["step"] == 5
    assert main(["--run", str(copied.path), "--step", "6"]) == 1
    assert "step-00000006" in capfd.readouterr().err
