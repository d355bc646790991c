# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Exports have the files that levanter and safetensors write for a whole model; tests/learner/test_distributed.py
exports from several processes.
"""

import dataclasses
import gc
import weakref
from pathlib import Path

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from levanter.compat import hf_checkpoints
from levanter.compat.hf_checkpoints import HFCheckpointConverter
from levanter.models.lm_model import LmHeadModel
from safetensors.numpy import load_file

from marin_rl.learner import hf_export
from marin_rl.learner.hf_export import DeviceWeights, SavedWeights, write_weights
from marin_rl.learner.policy_model import load_hf_policy
from marin_rl.models.conversion import to_hf_config
from marin_rl.runs import array_files
from marin_rl.runs.array_files import STATE, copy_to_host, write_arrays
from marin_rl.runs.saved_checkpoint import Checkpoint, DamagedCheckpointError
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import byte_tokenizer
from marin_rl.utils.devices.trainer_config import TrainerConfig
from tests.models.hf_checkpoint import cases, write_checkpoint

pytestmark = pytest.mark.both_lines


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    return ChatTokenizer(byte_tokenizer())


def weight_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name.startswith("model")}


def export_with_levanter(
    model: LmHeadModel, chat: ChatTokenizer, folder: Path, trainer: TrainerConfig, shard_bytes: int
) -> dict[str, bytes]:
    hf_config = to_hf_config(model.config, model.vocab_size)
    hf_config.save_pretrained(folder)
    converter = HFCheckpointConverter(type(model.config), str(folder), type(hf_config), chat.tokenizer)
    with trainer.use_device_mesh(), hax.axis_mapping(trainer.parameter_axis_mapping):
        converter.save_pretrained(
            model, str(folder), save_reference_code=False, save_tokenizer=False, max_shard_size=shard_bytes
        )
    return weight_files(folder)


def save(model: LmHeadModel, folder: Path) -> Checkpoint:
    """Write the arrays of a model as a checkpoint does."""
    (folder / STATE).mkdir(parents=True)
    copied = copy_to_host(model)
    arrays = {name: array for name, (array, _) in copied.items()}
    return Checkpoint(folder, 0, {}, "", arrays, write_arrays(folder, copied))


@pytest.mark.medium
@pytest.mark.parametrize("case", cases(["gpt2", "mixtral", "qwen3", "qwen3_moe", "qwen3_moe_dense"]))
def test_files_are_those_of_levanter(trainer, chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    shard_bytes = 10**9 if case == "gpt2" else 4000
    model = load_hf_policy(write_checkpoint(tmp_path, case), chat, trainer, None)
    if case == "mixtral":
        # Levanter's new line fuses the experts; its writer gets the tensors of the checkpoint.
        source = load_file(tmp_path / "model.safetensors")
        monkeypatch.setattr(hf_checkpoints, "to_state_dict", lambda model: jax.tree.map(jnp.asarray, source))
    expected = export_with_levanter(model, chat, tmp_path / "levanter", trainer, shard_bytes)
    assert (hf_export.INDEX in expected) == (shard_bytes < 10**9)
    on_devices = DeviceWeights(model, trainer)
    saved = SavedWeights(on_devices.shape, save(model, tmp_path / "checkpoint"))
    for name, weights in (("devices", on_devices), ("saved", saved)):
        (tmp_path / name).mkdir()
        write_weights(weights, tmp_path / name, shard_bytes)
        assert weight_files(tmp_path / name) == expected, name


def test_bfloat16_is_rounded_to_nearest(tiny, trainer, tmp_path: Path) -> None:
    model = tiny.make_model(trainer, tiny.LLAMA)
    for name, dtype in (("whole", None), ("half", jnp.dtype("bfloat16"))):
        (tmp_path / name).mkdir()
        write_weights(DeviceWeights(model, trainer, dtype), tmp_path / name)
    whole, half = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "half"))
    assert whole.keys() == half.keys()
    for name, array in whole.items():
        assert half[name].dtype == jnp.bfloat16
        np.testing.assert_array_equal(half[name], array.astype(jnp.bfloat16))


def test_an_export_from_files_holds_one_part_at_a_time(
    tiny, trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Chunks of one layer, and no room for more of them than are read.
    monkeypatch.setattr(array_files, "CHUNK_BYTES", 2000)
    monkeypatch.setattr(array_files, "_CACHE_BYTES", 0)
    layers = 24
    model = tiny.make_model(trainer, dataclasses.replace(tiny.LLAMA, num_layers=layers))
    shape = DeviceWeights(model, trainer).shape
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
    stacked = sum(leaf.nbytes for leaf in jax.tree.leaves(model.transformer.layers))
    weights = SavedWeights(shape, save(model, tmp_path / "checkpoint"))
    del model
    before = sum(array.nbytes for array in jax.live_arrays())
    held = [0]
    peaks: list[int] = []
    with_rows = hf_export._with_rows

    def read(like: object, rows: object) -> object:
        if isinstance(rows, np.ndarray):
            held[0] += rows.nbytes
            weakref.finalize(rows, lambda size=rows.nbytes: held.__setitem__(0, held[0] - size))
            peaks.append(held[0] + sum(array.nbytes for array in jax.live_arrays()) - before)
        return with_rows(like, rows)

    monkeypatch.setattr(hf_export, "_with_rows", read)
    write_weights(weights, tmp_path)
    # What is outside all layers, and of two layers the files that are read and their conversion.
    part = max(stacked // layers, total - stacked)
    assert max(peaks) <= 2 * part
    assert total > 5 * part
    assert (tmp_path / "model.safetensors").stat().st_size > total


def test_an_export_reads_each_file_twice(tiny, trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First all files to verify them, then each of them for all layers that it holds."""
    model = tiny.make_model(trainer, dataclasses.replace(tiny.LLAMA, num_layers=6))
    saved = save(model, tmp_path / "checkpoint")
    reads: list[str] = []
    read_bytes = Path.read_bytes

    def read(path: Path) -> bytes:
        reads.append(path.name)
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", read)
    weights = SavedWeights(DeviceWeights(model, trainer).shape, saved)
    names = sorted(Path(file).name for file in saved.files)
    assert sorted(reads) == names
    reads.clear()
    write_weights(weights, tmp_path)
    assert sorted(reads) == names


def test_damaged_files_are_found_before_anything_is_written(tiny, trainer, tmp_path: Path) -> None:
    model = tiny.make_model(trainer, tiny.LLAMA)
    shape = DeviceWeights(model, trainer).shape
    saved = save(model, tmp_path)
    for file in saved.files:
        content = (tmp_path / file).read_bytes()
        for damaged in (bytes([content[0] ^ 1]) + content[1:], content[:-1]):
            (tmp_path / file).write_bytes(damaged)
            with pytest.raises(DamagedCheckpointError, match=f"{file} differs from what was written"):
                SavedWeights(shape, saved)
        (tmp_path / file).unlink()
        with pytest.raises(DamagedCheckpointError, match=f"{file} is missing"):
            SavedWeights(shape, saved)
        (tmp_path / file).write_bytes(content)


def test_an_export_keeps_no_weights(trainer, chat, tmp_path: Path) -> None:
    model = load_hf_policy(write_checkpoint(tmp_path, "gpt2"), chat, trainer, None)
    arrays = [weakref.ref(leaf) for leaf in jax.tree.leaves(model) if isinstance(leaf, jax.Array)]
    assert arrays
    write_weights(DeviceWeights(model, trainer), tmp_path)
    del model
    gc.collect()
    assert not [array for array in arrays if array() is not None]
