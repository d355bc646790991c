# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import pytest
from haliax import Axis
from levanter.models.lm_model import LmHeadModel
from safetensors.numpy import save_file

from marin_rl.models.conversion import levanter_config
from marin_rl.models.hf_config import PolicyModelError, read_hf_config
from marin_rl.models.hf_tensors import check_tensors, read_tensor_shapes, split_experts
from tests.models.hf_checkpoint import cases, fuse, record, write_checkpoint, write_config
from tests.models.hf_oracle.make_oracle import CASES, VOCAB, weights


def shapes_of(checkpoint: str) -> LmHeadModel:
    config = levanter_config(read_hf_config(checkpoint), checkpoint)
    return eqx.filter_eval_shape(config.build, Axis("vocab", VOCAB), key=jax.random.PRNGKey(0))


@pytest.mark.parametrize(
    "case",
    cases(["llama_yarn", "qwen2", "qwen3", "mixtral", "olmo2", "gemma2", "gpt2", "qwen3_moe", "qwen3_moe_dense"]),
)
def test_the_tensors_of_a_checkpoint_are_those_of_the_model(tmp_path: Path, case: str):
    assert case in CASES
    checkpoint = write_checkpoint(tmp_path, case)
    check_tensors(checkpoint, shapes_of(checkpoint))


MIXTURES = pytest.mark.parametrize("case", cases(["mixtral", "qwen3_moe", "qwen3_moe_dense"]))


@MIXTURES
def test_fused_experts_are_read_as_those_of_each_expert(tmp_path: Path, case: str):
    expected = weights(record(case)["tensors"])
    fused = dict(expected)
    fuse(fused)
    assert len(fused) < len(expected)
    checkpoint = write_checkpoint(tmp_path, case, fused)
    check_tensors(checkpoint, shapes_of(checkpoint))
    found = split_experts(fused, record(case)["config"]["model_type"])
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.parametrize(
    ("case", "name"),
    cases(
        [
            ("mixtral", "block_sparse_moe.experts.2.w3"),
            ("mixtral", "block_sparse_moe.gate"),
            ("qwen3_moe", "mlp.experts.2.up_proj"),
        ]
    ),
)
def test_experts_in_both_forms_are_rejected(tmp_path: Path, case: str, name: str):
    """Readers of one form would compute another function than those of the other."""
    twice = f"model.layers.0.{name}.weight"
    tensors = weights(record(case)["tensors"])
    separate = tensors[twice]
    fuse(tensors)
    checkpoint = write_checkpoint(tmp_path, case, {**tensors, twice: 2 * separate})
    with pytest.raises(PolicyModelError, match=rf"contain some tensors twice, .*: {re.escape(twice)}; remove one"):
        check_tensors(checkpoint, shapes_of(checkpoint))


EXPERTS = "model.layers.1.mlp.experts"
MIXTRALS = "model.layers.1.block_sparse_moe.experts"


@pytest.mark.parametrize(
    ("case", "shape", "problem"),
    cases(
        [
            ("mixtral", (3, 96, 32), rf"lack {MIXTRALS}.3.w1.weight"),
            ("mixtral", (5, 96, 32), rf"does not use {MIXTRALS}.4.w1.weight"),
            ("mixtral", (4, 97, 32), rf"are {MIXTRALS}.0.w3.weight \(49, 32\), not \(48, 32\)"),
            ("mixtral", (4, 96), rf"does not use {EXPERTS}.gate_up_proj"),
            ("mixtral", (2**40, 0, 32), rf"does not use {EXPERTS}.gate_up_proj"),
            ("qwen3_moe", (3, 48, 32), rf"lack {EXPERTS}.3.gate_proj.weight"),
            ("qwen3_moe", (4, 47, 32), rf"are {EXPERTS}.0.gate_proj.weight \(23, 32\), not \(24, 32\)"),
        ]
    ),
)
def test_error_names_wrong_fused_experts(tmp_path: Path, case: str, shape: tuple[int, ...], problem: str):
    tensors = weights(record(case)["tensors"])
    fuse(tensors)
    # Numpy's arrays cannot have every shape that a file can name.
    header = {name: {"dtype": "F32", "shape": array.shape} for name, array in tensors.items()}
    header[f"{EXPERTS}.gate_up_proj"]["shape"] = shape
    checkpoint = write_checkpoint(tmp_path, case, {})
    offset = 0
    for value in header.values():
        size = 4 * math.prod(value["shape"])
        value["data_offsets"] = (offset, offset + size)
        offset += size
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(offset))
    with pytest.raises(PolicyModelError, match=problem):
        check_tensors(checkpoint, shapes_of(checkpoint))


def add(name: str, *shape: int) -> Callable[[dict[str, np.ndarray]], None]:
    return lambda tensors: tensors.update({name: np.zeros(shape, np.float32)})


def drop(name: str) -> Callable[[dict[str, np.ndarray]], None]:
    def change(tensors: dict[str, np.ndarray]) -> None:
        del tensors[name]

    return change


BIAS = "model.layers.1.self_attn.q_proj.bias"
NORM = "model.layers.0.input_layernorm.weight"


@pytest.mark.parametrize(
    ("case", "change", "problem"),
    [
        ("llama", add(BIAS, 32), f"the model does not use {BIAS}; use config.json"),
        (
            "llama",
            add(NORM, 31),
            rf"of another shape than in the model are {NORM} \(31,\), not \(32,\); use config.json",
        ),
        ("llama", drop(NORM), f"the files lack {NORM}; use config.json"),
        ("llama", drop("lm_head.weight"), r"the files lack lm_head.weight; use config.json"),
        ("qwen2", drop(BIAS), f"the files lack {BIAS}; use config.json"),
        ("llama", lambda tensors: tensors.clear(), "the files lack .* and 16 more; use config.json"),
    ],
)
def test_error_names_unexpected_tensors(tmp_path: Path, case: str, change, problem: str):
    tensors = weights(record(case)["tensors"])
    change(tensors)
    checkpoint = write_checkpoint(tmp_path, case, tensors)
    with pytest.raises(
        PolicyModelError, match=f"the weights in .* are not those that its config.json describes: .*{problem}"
    ):
        check_tensors(checkpoint, shapes_of(checkpoint))


def test_a_pointer_of_git_lfs_is_named_with_its_remedy(tmp_path: Path):
    checkpoint = write_checkpoint(tmp_path, "llama")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
    (tmp_path / "model.safetensors").write_text(pointer, encoding="utf-8")
    with pytest.raises(PolicyModelError, match=r"model\.safetensors: it is a pointer of Git LFS .*`git lfs pull`"):
        check_tensors(checkpoint, shapes_of(checkpoint))


def test_buffers_and_a_tied_head_are_allowed_in_the_files(tmp_path: Path):
    tensors = weights(record("llama_yarn")["tensors"])
    add("lm_head.weight", VOCAB, 32)(tensors)
    add("model.layers.0.self_attn.rotary_emb.inv_freq", 4)(tensors)
    checkpoint = write_checkpoint(tmp_path, "llama_yarn", tensors)
    check_tensors(checkpoint, shapes_of(checkpoint))


def test_every_shard_is_read(tmp_path: Path):
    tensors = weights(record("llama")["tensors"])
    checkpoint = write_checkpoint(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {name: f"model-{number}.safetensors" for number, half in enumerate((names[:9], names[9:])) for name in half}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    check_tensors(checkpoint, shapes_of(checkpoint))
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(PolicyModelError, match=r"missing or damaged: model-1.safetensors: the file does not exist$"):
        read_tensor_shapes(checkpoint)


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": 3}', "{"])
def test_error_names_a_damaged_index(tmp_path: Path, index: str):
    checkpoint = write_checkpoint(tmp_path, "llama")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(PolicyModelError, match=r"are missing or damaged: model.safetensors"):
        read_tensor_shapes(checkpoint)


@pytest.mark.parametrize(
    "place", ["../outside.safetensors", "{folder}/outside.safetensors", "a/../../outside.safetensors"]
)
def test_an_index_names_no_file_outside_of_the_folder(tmp_path: Path, place: str):
    (tmp_path / "model").mkdir()
    checkpoint = write_checkpoint(tmp_path / "model", "llama")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "outside.safetensors")
    files = dict.fromkeys(record("llama")["tensors"], place.format(folder=tmp_path))
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    with pytest.raises(PolicyModelError, match="which is not a file of the folder"):
        read_tensor_shapes(checkpoint)


@pytest.mark.parametrize("data", [b"", b"\xff" * 7, (2**60).to_bytes(8, "little") + b"{}"])
def test_error_names_a_damaged_file(tmp_path: Path, data: bytes):
    checkpoint = write_checkpoint(tmp_path, "llama")
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(PolicyModelError, match=r"are missing or damaged: model.safetensors: "):
        read_tensor_shapes(checkpoint)


def test_error_names_a_deeply_nested_index(tmp_path: Path):
    folder = write_checkpoint(tmp_path, "llama")
    (tmp_path / "model.safetensors.index.json").write_text("[" * 100_000)
    with pytest.raises(PolicyModelError, match=r"missing or damaged: .*recursion"):
        read_tensor_shapes(folder)


@pytest.mark.parametrize("dtype", [np.int8, np.int64, bool])
def test_integer_weights_are_rejected(tmp_path: Path, dtype: type):
    tensors = dict(weights(record("llama")["tensors"]))
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(dtype)
    folder = write_checkpoint(tmp_path, "llama", tensors)
    with pytest.raises(PolicyModelError, match=r"not in bfloat16, .*: model.norm.weight \((I8|I64|BOOL)\); use the"):
        read_tensor_shapes(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_pickled_weights_are_rejected_with_a_remedy(tmp_path: Path, name: str):
    folder = write_config(tmp_path, record("llama")["config"])
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(PolicyModelError, match=rf"are in {name}, PyTorch's pickle format.*save_pretrained\(NEW_FOLDER"):
        read_tensor_shapes(folder)
