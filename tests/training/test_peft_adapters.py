# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Adapters of runs in the format of PEFT: exported, and as the start of another run."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from marin_rl.export import main as export
from marin_rl.models.peft_format import CONFIG, WEIGHTS
from tests.tiny_run import TinyRun, contents, make_run
from tests.training.test_supervised_run import make as make_sft_run

pytestmark = pytest.mark.medium

SETTINGS: dict[str, Any] = {
    "model": None,
    "lora": {"rank": 2, "alpha": 3, "targets": ["q_proj", "o_proj", "up_proj"]},
    "warm_start__max_steps": 0,
    "num_steps": 2,
    "kl": {"type": "in_loss", "beta": 0.1},
    "optimizer__learning_rate": 5e-2,
    "evaluation__every": 2,
    "checkpoint": {"every": 1, "keep_every": 1},
}


@pytest.fixture(scope="module")
def base(finished_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of a finished run, in a folder of their own."""
    return Path(shutil.copytree(finished_run.path / "hf", tmp_path_factory.mktemp("base") / "hf"))


@pytest.fixture(scope="module")
def lora_run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A finished run with an adapter. Tests must not change it."""
    run = make_run(tmp_path_factory.mktemp("lora"), initialize_from=str(base), **SETTINGS)
    assert run.train() == 0
    return run


@pytest.fixture(scope="module")
def adapter(lora_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The exported adapter of the run. Tests must not change it."""
    folder = tmp_path_factory.mktemp("exported") / "adapter"
    assert export(["--run", str(lora_run.path), "--output", str(folder), "--adapter"]) == 0
    return folder


def saved_adapter(run: TinyRun, step: int) -> dict[str, np.ndarray]:
    """The arrays of the model in a checkpoint, by name."""
    manifest = json.loads((run.checkpoint(step) / "manifest.json").read_text())
    arrays = {}
    for name, array in manifest["arrays"].items():
        if name.startswith(".model"):
            (file,) = (
                run.checkpoint(step) / path for path in manifest["files"] if path.startswith(f"{array['prefix']}-")
            )
            arrays[name] = np.frombuffer(file.read_bytes(), np.float32)
    return arrays


def test_the_export_has_the_adapter_alone_and_names_its_base(
    base: Path, lora_run: TinyRun, adapter: Path, tmp_path: Path
) -> None:
    settings = json.loads((adapter / CONFIG).read_text())
    assert settings["base_model_name_or_path"] == str(base)
    assert (settings["r"], settings["lora_alpha"]) == (2, 3)
    assert settings["target_modules"] == ["o_proj", "q_proj", "up_proj"]
    tensors = load_file(adapter / WEIGHTS)
    assert len(tensors) == 2 * 3
    whole, of_base = (load_file(folder / "model.safetensors") for folder in (lora_run.path / "hf", base))
    changed = {name for name in whole if not np.array_equal(whole[name], of_base[name])}
    assert changed == {
        f"{name.removeprefix('base_model.model.').removesuffix('.lora_A.weight')}.weight"
        for name in tensors
        if name.endswith(".lora_A.weight")
    }
    for name in changed:
        a, b = (tensors[f"base_model.model.{name.removesuffix('.weight')}.lora_{each}.weight"] for each in "AB")
        expected = of_base[name] + 1.5 * np.float64(b) @ np.float64(a)
        np.testing.assert_allclose(whole[name], expected, rtol=0, atol=1e-6)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (adapter / name).read_bytes() == (lora_run.path / "hf" / name).read_bytes()
    assert json.loads((adapter / "training_step.json").read_text()) == {"step": 2}


def test_step_and_type_are_options(lora_run: TinyRun, adapter: Path, tmp_path: Path) -> None:
    argv = ["--run", str(lora_run.path), "--output", str(tmp_path / "first"), "--adapter", "--step", "0"]
    assert export([*argv, "--export.dtype", "bfloat16"]) == 0
    first, last = load_file(tmp_path / "first" / WEIGHTS), load_file(adapter / WEIGHTS)
    assert first.keys() == last.keys()
    for name, tensor in first.items():
        assert tensor.dtype.name == "bfloat16"
        assert bool(tensor.any()) == ("lora_A" in name)
        assert last[name].any()


def test_the_merged_export_is_the_model_of_the_run(
    lora_run: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = ["--run", str(lora_run.path), "--output", str(tmp_path / "merged"), "--merged"]
    assert export([*argv, "--adapter"]) == 1
    assert capfd.readouterr().err == (
        "error: --adapter and --merged exclude each other: write the adapter alone or the whole model; give one\n"
    )
    assert export(argv) == 0
    found, expected = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "merged", lora_run.path / "hf")
    )
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.torch
def test_peft_computes_the_same_as_the_merged_export(base: Path, lora_run: TinyRun, adapter: Path) -> None:
    torch, peft, transformers = (
        pytest.importorskip(name, reason="needs the extra test-torch") for name in ("torch", "peft", "transformers")
    )
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 250, (4, 16)))

    def logprobs(model: Any) -> np.ndarray:
        with torch.no_grad():
            return torch.log_softmax(model.double().eval()(ids).logits, -1).numpy()

    load = transformers.AutoModelForCausalLM.from_pretrained
    found = logprobs(peft.PeftModel.from_pretrained(load(base), adapter))
    np.testing.assert_allclose(found, logprobs(load(lora_run.path / "hf")), rtol=0, atol=1e-5)
    assert np.abs(found - logprobs(load(base))).max() > 0.01
    # The base that the export names is found without being told.
    automatic = peft.AutoPeftModelForCausalLM.from_pretrained(adapter)
    np.testing.assert_array_equal(logprobs(automatic), found)
    tokenizer = transformers.AutoTokenizer.from_pretrained(adapter)
    assert tokenizer("2x3")["input_ids"] == transformers.AutoTokenizer.from_pretrained(base)("2x3")["input_ids"]


def test_a_run_continues_from_an_exported_adapter(
    base: Path, lora_run: TinyRun, adapter: Path, new_run: Callable[..., TinyRun]
) -> None:
    settings = {**SETTINGS, "lora": {**SETTINGS["lora"], "adapter": str(adapter)}, "num_steps": 1}
    run = new_run(initialize_from=str(base), **settings)
    assert run.train() == 0
    expected, found = saved_adapter(lora_run, 2), saved_adapter(run, 0)
    assert found.keys() == expected.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
    first, last = run.records()[0], lora_run.records()[-1]
    measured = [name for name in first if name.startswith("eval/")]
    assert measured
    assert {name: first[name] for name in measured} == {name: last[name] for name in measured}
    # The reference is the base with the adapter that was read: no distance but rounding, unlike from the base alone.
    assert abs(run.records()[1]["loss/kl_avg"]) < 1e-6
    assert last["loss/kl_avg"] > 1e-4


def test_supervised_training_continues_from_an_exported_adapter(
    base: Path, lora_run: TinyRun, adapter: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {name: SETTINGS[name] for name in ("model", "checkpoint")}
    section = {**SETTINGS["lora"], "adapter": str(adapter)}
    run = make_sft_run(tmp_path, initialize_from=str(base), lora=section, epochs=1, **settings)
    assert run.train("--dry_run") == 0
    assert re.search(
        r"trained +an adapter of rank 2 and alpha 3, .* = 1.5: \d+ parameters, .* of q_proj, o_proj, up_proj",
        capfd.readouterr().out,
    )
    assert run.train("--dry_run", "--lora.rank", "3") == 1
    assert "set lora.rank: 2 and lora.alpha: 3.0" in capfd.readouterr().err
    assert run.train() == 0
    expected, first, last = saved_adapter(lora_run, 2), saved_adapter(run, 0), saved_adapter(run, 3)
    assert first.keys() == last.keys() == expected.keys()
    for name, array in first.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
        assert not np.array_equal(last[name], array)
    assert export(["--run", str(run.path), "--output", str(tmp_path / "adapter"), "--adapter"]) == 0
    found = load_file(tmp_path / "adapter" / WEIGHTS)
    assert {array.size for array in found.values()} == {array.size for array in last.values()}
    assert sorted(map(np.sum, found.values())) == pytest.approx(sorted(map(np.sum, last.values())), abs=1e-4)


def test_an_adapter_is_exported_without_its_base(lora_run: TinyRun, adapter: Path, base: Path, tmp_path: Path) -> None:
    """The run uses the built-in tokenizer; only the weights are missing."""
    for file in base.iterdir():
        shutil.move(file, tmp_path / file.name)
    try:
        argv = ["--run", str(lora_run.path), "--output"]
        assert export([*argv, str(tmp_path / "adapter"), "--adapter"]) == 0
        assert export([*argv, str(tmp_path / "whole")]) == 1
    finally:
        for file in tmp_path.iterdir():
            if file.is_file():
                shutil.move(file, base / file.name)
    assert contents(tmp_path / "adapter") == contents(adapter)
    assert not (tmp_path / "whole").exists()


def test_a_run_of_whole_models_has_no_adapter(
    finished_run: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for flag in ("--adapter", "--merged"):
        assert export(["--run", str(finished_run.path), "--output", str(tmp_path / "adapter"), flag]) == 1
        assert f"{flag}: the run '{finished_run.path}' trains no adapter (lora is null)" in capfd.readouterr().err
    assert not (tmp_path / "adapter").exists()


def without_the_last_tensor(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors.popitem()
    save_file(tensors, folder / WEIGHTS)


def with_nan(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file({name: np.full_like(tensor, np.nan) for name, tensor in tensors.items()}, folder / WEIGHTS)


@pytest.mark.parametrize(
    ("lora", "damage", "message"),
    [
        ({"rank": 4}, None, "has rank 2 and factor 1.5, but lora.rank is 4"),
        ({"alpha": 4.0}, None, "set lora.rank: 2 and lora.alpha: 3.0"),
        ({"targets": ["q_proj", "up_proj"]}, None, "lora.targets or the model lack base_model.model.model.layers"),
        ({"targets": ["q_proj", "o_proj", "up_proj", "v_proj"]}, None, "the files lack base_model.model.model.layers"),
        ({"targets": ["q_prj"]}, None, "'q_prj' names no linear layer"),
        ({"adapter": "absent"}, None, "adapter_config.json of the adapter in 'absent' cannot be read"),
        ({}, lambda folder: (folder / WEIGHTS).unlink(), "is missing or damaged: the file does not exist"),
        ({}, without_the_last_tensor, "the files lack"),
    ],
)  # fmt: skip
def test_a_bad_adapter_is_refused_before_the_first_step(
    lora: dict[str, Any],
    damage: Callable[[Path], None] | None,
    message: str,
    base: Path,
    adapter: Path,
    new_run: Callable[..., TinyRun],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = Path(shutil.copytree(adapter, tmp_path / "adapter"))
    if damage is not None:
        damage(folder)
    section = {**SETTINGS["lora"], "adapter": str(folder), **lora}
    run = new_run(initialize_from=str(base), **{**SETTINGS, "lora": section})
    for arguments in (("--dry_run",), ()):
        assert not run.path.exists()
        assert run.train(*arguments) == 1
        written = capfd.readouterr()
        assert message in " ".join((written.out + written.err).split())
        assert "Traceback" not in written.err
    assert not run.steps()


def test_numbers_that_are_not_finite_are_refused(
    base: Path, adapter: Path, new_run: Callable[..., TinyRun], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(adapter, tmp_path / "adapter"))
    with_nan(folder)
    run = new_run(initialize_from=str(base), **{**SETTINGS, "lora": {**SETTINGS["lora"], "adapter": str(folder)}})
    assert run.train() == 1
    assert "has numbers that are not finite in base_model.model" in " ".join(capfd.readouterr().err.split())
    assert not run.steps()
