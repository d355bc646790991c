# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Every benchmark runs at a tiny size and prints the documented JSON. No test depends on a duration."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments.benchmarks import (
    benchmark_logprobs,
    benchmark_sampling,
    benchmark_serving_memory,
    benchmark_shared_prompts,
    benchmark_startup,
    benchmark_training_step,
    measurement,
)
from marin_rl.learner.policy_model import initialize_policy
from marin_rl.utils.devices.setup import start_devices
from tests.tiny_run import make_run


@pytest.fixture(autouse=True)
def compilation_cache_as_before() -> Iterator[None]:
    before = jax.config.jax_enable_compilation_cache
    yield
    jax.config.update("jax_enable_compilation_cache", before)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments that choose a tiny model and batch; the suite's compilation cache stays in use."""
    for module in (benchmark_sampling, benchmark_shared_prompts, benchmark_training_step):
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
    longer = ["--long_length", "256", "--long_rollouts", "16"]
    benchmark_training_step.main(["--steps", "2", *longer, *tiny])
    figures = printed_report(capsys, "benchmark_training_step")
    for batch in ("config", "log_normal"):
        measured = figures[batch]
        for kind in ("rloo", "rloo_unpacked", "lm_packed", "lm_unpacked"):
            assert measured[kind]["compiles_after_first_step"] == 0
            assert measured[kind]["step_seconds"]["count"] == 2
        for name, (numerator, denominator) in benchmark_training_step.RATIOS.items():
            assert {numerator, denominator} <= set(measured)
            assert 0 < measured[name]["min"] <= measured[name]["median"] <= measured[name]["max"]
        for kind in ("rloo", "lm_packed"):
            assert measured[kind]["program_bytes"]["temporaries"] > 0
    assert figures["config"]["tokens"] == 16 * 12
    efficiency = [figures["log_normal"][kind]["packing_efficiency"] for kind in ("rloo", "rloo_unpacked")]
    assert efficiency[0] >= 2 * efficiency[1]
    assert figures["log_normal"]["mean_length"] == pytest.approx(256 / 4, rel=0.01)


@pytest.mark.slow
def test_shared_prompts(capsys: pytest.CaptureFixture[str], tiny: list[str]) -> None:
    shape = ["--prompts", "9", "--answers", "3", "--group_sizes", "8", "--groups", "12", "--rounds", "2"]
    benchmark_shared_prompts.main([*shape, *tiny, "--equal", "--trainer.per_device_parallelism=1"])
    (measured,) = printed_report(capsys, "benchmark_shared_prompts").values()
    assert measured.pop("largest_difference_of_loss") < 1e-5
    assert set(measured) == set(benchmark_shared_prompts.LAYOUTS)
    assert [figures["shares"] for figures in measured.values()] == [False, False, True]
    assert measured["shared"]["tokens"] < measured["packed"]["tokens"] == measured["unpacked"]["tokens"]
    for figures in measured.values():
        assert figures["cpu_seconds"]["count"] == figures["times_faster_than_packed"]["count"] == 2


@pytest.mark.medium
def test_serving_memory(capsys: pytest.CaptureFixture[str], tiny: list[str]) -> None:
    benchmark_serving_memory.main(["--rounds", "4", "--requests", "12", "--new_tokens", "4", "--slots", "4", *tiny])
    figures = printed_report(capsys, "benchmark_serving_memory")
    assert figures["free_slots"] == [4]
    assert [state["requests"] for state in figures["states"]] == [12, 24, 36, 48]
    # Not one for each of the 36 requests after the first state.
    assert figures["open_files"][-1] < figures["open_files"][0] + 12


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


@pytest.mark.slow
def test_sampling(capsys: pytest.CaptureFixture[str], tiny: list[str]) -> None:
    longer = ["--longer_length", "70", "--longer_new_tokens", "8", "--longer_prompts", "2", "--turns_slots", "4"]
    benchmark_sampling.main(["--calls", "2", *longer, *tiny])
    figures = printed_report(capsys, "benchmark_sampling")
    assert figures["config"]["shape"] == {"prompts": 4, "group_size": 4, "prompt_tokens": 9, "new_tokens": 3}
    assert figures["longer"]["shape"] == {"prompts": 2, "group_size": 4, "prompt_tokens": 62, "new_tokens": 8}
    for name in ("config", "longer"):
        assert figures[name]["compiles_after_first_call"] == 0
        shape = figures[name]["shape"]
        assert 0 < figures[name]["tokens_per_call"]["max"] <= shape["prompts"] * shape["group_size"] * 8
        assert figures[name]["prompt_tokens_per_call"] == shape["prompts"] * (shape["prompt_tokens"] - 1)
        assert 0 < figures[name]["slots_in_use"] <= 1
    # The first turn adds its prompt but the last token, a further one the last reply's last token in exchange.
    assert figures["turns"]["prompt_tokens"] == 16 * (9 + 4 * 10)
    assert 0 < figures["turns"]["slots_in_use"] <= figures["turns"]["slots_in_use_while_queued"] * 1.5


@pytest.mark.medium
def test_logprobs(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"batch": 2, "position": 12, "embed": 8, "vocab": 2000}
    flags = [text for name, size in sizes.items() for text in (f"--{name}", str(size))]
    shares = ["--shares", "1.0", "0.25", "--shares_block_size", "2"]
    benchmark_logprobs.main([*flags, "--block_sizes", "3", "5", "--repeats", "2", *shares])
    figures = printed_report(capsys, "benchmark_logprobs")
    assert figures["full_logits_bytes"] == 4 * 2 * 12 * 2000
    assert set(figures["blockwise_by_block_size"]) == {"3", "5"}
    for blockwise in figures["blockwise_by_block_size"].values():
        assert blockwise["temporary_bytes"] < figures["materialised"]["temporary_bytes"]
        assert all(difference < 1e-5 for difference in blockwise["max_difference"].values())
    by_share = figures["loss_shares"]["by_share"]
    assert by_share["1.0"]["head_runs_on_share"] == 1
    # Blocks of two tokens, wherever they are, and of one.
    masked = benchmark_logprobs.random_mask(2, 12, 0.25).mean()
    assert by_share["0.25"]["head_runs_on_share"] == pytest.approx(masked)
    for measured in by_share.values():
        assert all(difference < 1e-5 for difference in measured["max_difference"].values())
        assert measured["times_faster"]["count"] == 2
    assert set(figures["loss_shares"]["temporary_bytes"]) == {"every_position", "where_there_is_loss"}


@pytest.mark.slow
def test_startup(capsys: pytest.CaptureFixture[str], tiny: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark_startup, "MODULES", ("json", "marin_rl"))
    shorter = ["--warm_start.max_steps=0", "--evaluation.tasks=0", "--num_steps=1"]
    benchmark_startup.main(["--repeats", "1", *tiny, *shorter])
    figures = printed_report(capsys, "benchmark_startup")
    assert set(figures["import_seconds"]) == {"json", "marin_rl"}
    assert figures["dry_run_seconds"]["count"] == 1
    assert figures["first_update"]["cold_over_warm"]["count"] == 1
    assert figures["first_update"]["programs_in_cache"]["min"] > 0
