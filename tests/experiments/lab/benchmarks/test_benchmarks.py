# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Every benchmark runs at a tiny size and prints the documented JSON. No test depends on a duration."""

import dataclasses
import importlib
import json
import math
import subprocess
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments.lab.benchmarks import benchmark_startup, benchmark_training_step, measurement
from marin_rl.learner.policy_model import initialize_policy
from marin_rl.utils.devices.setup import start_devices
from tests import fork_server
from tests.tiny_run import make_run


@pytest.fixture(autouse=True)
def compilation_cache_as_before() -> Iterator[None]:
    before = jax.config.jax_enable_compilation_cache
    yield
    jax.config.update("jax_enable_compilation_cache", before)


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """Arguments that choose a tiny model and batch."""
    return ["--config", str(make_run(tmp_path).config)]


SLOW = {
    "training_step": ["--steps=2", "--long_length=256", "--long_rollouts=16"],
    "shared_prompts": [
        *("--prompts=9", "--answers=3", "--group_sizes=8", "--groups=12", "--rounds=2", "--equal"),
        "--trainer.per_device_parallelism=1",
    ],
    "sampling": [
        *("--calls=2", "--longer_length=70", "--longer_new_tokens=8", "--longer_prompts=2", "--turns_slots=4"),
    ],
    "startup": ["--repeats=1", "--warm_start.max_steps=0", "--evaluation.tasks=0", "--num_steps=1"],
    "weight_transfer": ["--sizes_mb=1", "--servers=2", "--rounds=2", "--steps=2"],
    "workers": ["--workers=1", "--steps=3", "--skip=1", "--seconds=0.05", "--max_staleness=1"],
}
MEDIUM = {
    "serving_memory": ["--rounds=4", "--requests=12", "--new_tokens=4", "--slots=4"],
    "logprobs": [
        *("--batch=2", "--position=12", "--embed=8", "--vocab=2000", "--repeats=2", "--shares", "1.0", "0.25"),
        *("--shares_block_size=2", "--block_sizes", "3", "5"),
    ],
    "sandbox": ["--calls=3", "--rounds=2", "--characters=10", "--imports", "json"],
    "host_path": [
        *("--groups=2", "--members=3", "--prompt_tokens=4", "--sampled_tokens=5", "--row_length=16", "--rounds=1"),
        "--unpacked",
    ],
}
OWN_CONFIG = {"logprobs", "sandbox", "host_path", "workers"}
"""Benchmarks without `--config`."""
FORKED = {"startup", "serving_memory", "workers"}
"""Benchmarks that start commands of this package."""


def run(command: Sequence[str], **options: Any) -> "subprocess.CompletedProcess[str]":
    """Fork a command of this package, or run another program."""
    return (fork_server if command[1] == "-m" else subprocess).run(command, **options)


def figures(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and value of each figure."""
    if isinstance(value, dict | list):
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from figures(part, f"{path}.{name}")
    else:
        yield path, value


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
        *(pytest.param(name, marks=pytest.mark.medium) for name in MEDIUM),
    ],
)
def test_a_tiny_benchmark_has_figures(
    name: str, capsys: pytest.CaptureFixture[str], tiny: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(f"experiments.lab.benchmarks.benchmark_{name}")
    # The suite's compilation cache stays in use.
    monkeypatch.setattr(module, "without_compilation_cache", lambda: None, raising=False)
    monkeypatch.setattr(benchmark_startup, "MODULES", ("json", "marin_rl"))
    if name in FORKED:
        programs = types.SimpleNamespace(run=run, Popen=fork_server.popen, STDOUT=subprocess.STDOUT)
        monkeypatch.setattr(module, "subprocess", programs)
    module.main([*(SLOW | MEDIUM)[name], *([] if name in OWN_CONFIG else tiny)])
    report = json.loads(capsys.readouterr().out)
    assert report["benchmark"] == f"benchmark_{name}"
    assert report["command"].startswith(f"python -m experiments.lab.benchmarks.benchmark_{name}")
    assert report["machine"]["versions"]["jax"] == jax.__version__
    found = dict(figures(report["figures"]))
    numbers = {path: value for path, value in found.items() if isinstance(value, int | float)}
    assert len(numbers) > 3
    assert all(map(math.isfinite, numbers.values()))
    for path, value in numbers.items():
        if path.endswith(".median"):
            assert numbers[path.replace("median", "min")] <= value <= numbers[path.replace("median", "max")]
        if "compiles_after" in path:
            assert value == 0, path
        if "difference" in path:
            assert value < 1e-5, path


@pytest.mark.medium
def test_all_training_steps_do_the_same_work(tiny: list[str]) -> None:
    """With an advantage of 1 and a mean over tokens the RL loss is cross-entropy, so the baseline can be checked."""
    config = measurement.load_config([*tiny, "--aggregation.type=token_mean", "--trainer.per_device_parallelism=2"])
    assert config.model is not None
    trainer = start_devices(config.trainer, rows_per_device=1)
    tokenizer = config.tokenizer.build()
    lengths = benchmark_training_step.log_normal_lengths(16, config.rollouts.max_length)
    rollouts = benchmark_training_step.random_rollouts(lengths, tokenizer.vocab_size, 3, config.rollouts.max_length)
    losses, microbatches = {}, {}
    for name, (make, is_packed) in benchmark_training_step.MAKERS.items():
        # Rows of 16 positions, so that packed rollouts take several microbatches too.
        sections = dataclasses.replace(config.rollouts, row_length=16 if is_packed else None)
        shaped = dataclasses.replace(config, rollouts=sections)
        packed = benchmark_training_step.pack(shaped, trainer, rollouts, [1.0] * 16, packed=is_packed)
        model = initialize_policy(config.model, tokenizer, trainer, key=jax.random.PRNGKey(0))
        update = make(config, trainer, model, packed)
        losses[name], microbatches[name] = [update.step() for _ in range(3)], len(packed.microbatches)
    assert microbatches == {"rloo": 2, "rloo_unpacked": 8, "lm_packed": 2, "lm_unpacked": 8}
    for name, found in losses.items():
        np.testing.assert_allclose(found, losses["lm_unpacked"], rtol=1e-5, err_msg=name)
    assert losses["rloo"][2] < losses["rloo"][0]
