# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Every benchmark runs at a tiny size and prints the JSON that the docs describe. Nothing here looks at a duration."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benchmarks import (
    benchmark_logprobs,
    benchmark_sampling,
    benchmark_startup,
    benchmark_training_step,
    measurement,
)
from marin_rl.learner.policy_model import initialize_policy
from marin_rl.runtime.devices import start_devices
from tests.tiny_run import make_run


@pytest.fixture(autouse=True)
def compilation_cache_as_before() -> Iterator[None]:
    before = jax.config.jax_enable_compilation_cache
    yield
    jax.config.update("jax_enable_compilation_cache", before)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments that choose a tiny model and batch; the suite's compilation cache stays in use."""
    for module in (benchmark_sampling, benchmark_training_step):
        monkeypatch.setattr(module, "without_compilation_cache", lambda: None)
    return ["--config", str(make_run(tmp_path).config)]


def printed_report(capsys: pytest.CaptureFixture[str], name: str) -> dict[str, Any]:
    report = json.loads(capsys.readouterr().out)
    assert report["benchmark"] == name
    assert report["command"].startswith(f"python -m experiments.benchmarks.{name}")
    assert report["machine"]["versions"]["jax"] == jax.__version__
    return report["figures"]


@pytest.mark.slow
def test_training_step(capsys: pytest.CaptureFixture[str], tiny: list[str]) -> None:
    benchmark_training_step.main(["--steps", "3", *tiny])
    figures = printed_report(capsys, "benchmark_training_step")
    for kind in ("rloo", "lm"):
        assert figures[kind]["compiles_after_first_step"] == 0
        assert figures[kind]["step_seconds"]["count"] == 3
        assert figures[kind]["step_program_bytes"]["temporaries"] > 0
    assert figures["rloo_over_lm"]["min"] <= figures["rloo_over_lm"]["median"] <= figures["rloo_over_lm"]["max"]


def test_both_training_steps_do_the_same_work(tiny: list[str]) -> None:
    """With an advantage of 1 and a mean over tokens the RL loss is cross-entropy, so the baseline can be checked."""
    config = measurement.load_config([*tiny, "--aggregation.type=token_mean"])
    assert config.model is not None
    trainer = start_devices(config.trainer_config(), rows=config.rollouts.rollouts_per_step)
    tokenizer = config.tokenizer.build()
    batch = benchmark_training_step.random_batch(config, tokenizer.vocab_size)
    ones = np.asarray(batch.loss_mask.array).astype(np.float32)
    batch = dataclasses.replace(batch, advantages=hax.named(ones, batch.loss_mask.axes))
    losses = []
    for kind in (benchmark_training_step.RlooStep, benchmark_training_step.LmStep):
        model = initialize_policy(config.model, tokenizer, trainer, key=jax.random.PRNGKey(0))
        stepper = kind(config, trainer, model, batch)
        losses.append([stepper.step() for _ in range(3)])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    assert losses[0][2] < losses[0][0]


@pytest.mark.slow
def test_sampling(capsys: pytest.CaptureFixture[str], tiny: list[str]) -> None:
    longer = ["--longer_length", "24", "--longer_new_tokens", "8", "--longer_prompts", "2"]
    benchmark_sampling.main(["--calls", "2", *longer, *tiny])
    figures = printed_report(capsys, "benchmark_sampling")
    assert figures["config"]["shape"] == {"requests": 16, "prompt_tokens": 9, "new_tokens": 3}
    assert figures["longer"]["shape"] == {"requests": 8, "prompt_tokens": 16, "new_tokens": 8}
    for name in ("config", "longer"):
        assert figures[name]["compiles_after_first_call"] == 0
        assert 0 < figures[name]["tokens_per_call"]["max"] <= figures[name]["shape"]["requests"] * 8


def test_logprobs(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"batch": 2, "position": 12, "embed": 8, "vocab": 2000}
    flags = [text for name, size in sizes.items() for text in (f"--{name}", str(size))]
    benchmark_logprobs.main([*flags, "--block_sizes", "3", "5", "--repeats", "2"])
    figures = printed_report(capsys, "benchmark_logprobs")
    assert figures["full_logits_bytes"] == 4 * 2 * 12 * 2000
    assert set(figures["blockwise_by_block_size"]) == {"3", "5"}
    for blockwise in figures["blockwise_by_block_size"].values():
        assert blockwise["temporary_bytes"] < figures["materialised"]["temporary_bytes"]
        assert all(difference < 1e-5 for difference in blockwise["max_difference"].values())


@pytest.mark.slow
def test_startup(capsys: pytest.CaptureFixture[str], tiny: list[str]) -> None:
    benchmark_startup.main(["--repeats", "1", *tiny])
    figures = printed_report(capsys, "benchmark_startup")
    assert set(figures["import_seconds"]) == set(benchmark_startup.MODULES)
    assert figures["dry_run_seconds"]["count"] == 1
    assert figures["first_update"]["cold_over_warm"]["count"] == 1
    assert figures["first_update"]["programs_in_cache"]["min"] > 0


def test_a_run_that_fails_is_an_error_with_its_output(tmp_path: Path) -> None:
    with pytest.raises(benchmark_startup.BenchmarkedRunError, match="num_stepz"):
        benchmark_startup.measure_first_update(["--num_stepz=1", *measurement.config_arguments([])], 1)


def test_compiles_are_counted_inside_the_block_alone() -> None:
    square = jax.jit(lambda value: value * value + 3)
    with measurement.counted_compiles() as first:
        square(jnp.ones(3))
    with measurement.counted_compiles() as again:
        square(jnp.ones(3))
    with measurement.counted_compiles() as other_shape:
        square(np.ones(5, np.float32))
    assert first.programs >= 1
    assert again.programs == 0
    assert other_shape.programs >= 1


def test_the_default_config_is_the_main_experiment() -> None:
    config = measurement.load_config(["--seed", "5"])
    assert config.seed == 5
    assert config.rollouts.rollouts_per_step == 512
