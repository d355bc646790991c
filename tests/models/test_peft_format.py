# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import json
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import NamedArray
from levanter.models.lm_model import LmHeadModel
from safetensors.numpy import load_file, save_file

from marin_rl.batching.rl_example import RlExample
from marin_rl.learner.config import LoraConfig
from marin_rl.learner.logprobs import policy_activations, token_logprobs
from marin_rl.learner.policy_model import load_hf_policy, save_hf_policy
from marin_rl.models.hf_config import PolicyModelError, read_hf_config
from marin_rl.models.lora import Adapter, LoraTargetError, init_adapter, merge_adapter, with_adapter
from marin_rl.models.peft_format import (
    CONFIG,
    WEIGHTS,
    AdapterFormatError,
    check_peft_adapter,
    load_peft_adapter,
    save_peft_adapter,
    to_peft_tensors,
)
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import byte_tokenizer
from marin_rl.utils.levanter_line import IS_NEW
from tests.models.hf_checkpoint import cases, record, write_checkpoint
from tests.models.hf_oracle.make_oracle import loss_weights, token_ids
from tests.sampling.families import FAMILIES, dense_layers, mixtures, random_model

pytestmark = [
    pytest.mark.both_lines,
    pytest.mark.usefixtures("compiled_quickly"),
]

# The kernels of transformers 5 for experts do not take float64.
IN_FLOAT64 = {"attn_implementation": "eager"} | ({"experts_implementation": "eager"} if IS_NEW else {})
RANK, ALPHA = 3, 6
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
TARGETS = {
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    **dict.fromkeys(("mixtral", "qwen3_moe"), (*ATTENTION, "gate", "lm_head")),
    "qwen3": ("lm_head",),
    # PEFT with transformers 5 takes any `gate_proj` of this architecture for that of the experts.
    "qwen3_moe_dense": (*ATTENTION, "gate"),
}
"""Targets of the architectures that differ from the default; qwen3 has the default ones, too."""
ARCHITECTURES = cases(
    [
        *("gemma", "gemma2", "gpt2", "llama", "mistral", "mixtral", "olmo2", "olmo3", "qwen2", "qwen3"),
        *("qwen3_moe", "qwen3_moe_dense"),
    ]
)
FACTORS = np.pad(loss_weights(), ((0, 0), (1, 0)))


def targets_of(name: str) -> tuple[str, ...]:
    mlp = ("gate_proj", "up_proj", "down_proj")
    if name != "qwen3" and name in TARGETS:
        return TARGETS[name]
    return (*ATTENTION, *mlp, *TARGETS.get(name, ()))


def shapes_of(model: LmHeadModel) -> LmHeadModel:
    return eqx.filter_eval_shape(lambda: eqx.filter(model, eqx.is_array))


def random_adapter(model: LmHeadModel, targets: tuple[str, ...], *, seed: int = 1) -> Adapter:
    """An adapter whose A and B are drawn by numpy."""
    rng = np.random.default_rng(seed)
    like = adapter_shape(model, targets)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(scale=0.05, size=leaf.shape), leaf.dtype), like)


def adapter_shape(model: LmHeadModel, targets: tuple[str, ...], *, rank: int = RANK, alpha: float = ALPHA) -> Adapter:
    return eqx.filter_eval_shape(
        lambda: init_adapter(model, rank=rank, scale=alpha / rank, targets=targets, key=jax.random.PRNGKey(0))
    )


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    return ChatTokenizer(byte_tokenizer())


@pytest.fixture(scope="module")
def differentiate(tiny, trainer):
    """Return the log-probabilities of an adapted model, and the gradient of their weighted sum, by PEFT's names."""
    ids = token_ids()
    at = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    batch = tiny.replace_arrays(
        tiny.make_example(*ids.shape),
        input_ids=ids,
        loss_mask=at > 0,
        segment_ids=np.ones_like(ids),
        position_ids=at.copy(),
    )

    def loss(adapter: Adapter, base: LmHeadModel, batch: RlExample) -> tuple[jax.Array, NamedArray]:
        model = with_adapter(base, adapter)
        activations = policy_activations(model, batch)
        head = model.get_lm_head()
        scored = token_logprobs(activations, head, batch, temperature=1.0, block_size=ids.shape[1])[0]
        return jnp.sum(scored.array * FACTORS), scored

    def compute(base: LmHeadModel, adapter: Adapter) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        with trainer.use_device_mesh():
            run = hax.named_jit(eqx.filter_grad(loss, has_aux=True), axis_resources=trainer.compute_axis_mapping)
            gradient, scored = run(adapter, base, batch)
        named = to_peft_tensors(shapes_of(base), gradient)
        return np.asarray(scored.array)[:, 1:], {name: np.asarray(array) for name, array in named.items()}

    return compute


@pytest.mark.medium
@pytest.mark.parametrize("name", FAMILIES)
def test_export_and_import_are_exact(name: str, tiny, trainer, tmp_path: Path) -> None:
    base = shapes_of(random_model(FAMILIES[name]))
    targets = tuple(target for target in targets_of(name) if (name, target) != ("llama", "lm_head"))
    adapter = random_adapter(base, targets)
    save_peft_adapter(base, adapter, tmp_path, "BASE")
    found = load_peft_adapter(str(tmp_path), base, shapes_of(adapter), trainer)
    assert jax.tree.structure(found) == jax.tree.structure(adapter)
    tiny.assert_same_bits(found, adapter)


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_tensors_have_the_names_of_transformers_modules(case: str, chat, trainer, tmp_path: Path) -> None:
    base = load_hf_policy(write_checkpoint(tmp_path / "base", case), chat, trainer, None)
    tensors = to_peft_tensors(shapes_of(base), random_adapter(base, targets_of(case)))
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    expected = {}
    for name, shape in record(case)["tensors"].items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets_of(case) and name.endswith(".weight"):
            outputs, inputs = reversed(shape) if case == "gpt2" else shape
            expected[f"base_model.model.{module}.lora_A.weight"] = [RANK, inputs]
            expected[f"base_model.model.{module}.lora_B.weight"] = [outputs, RANK]
    assert expected
    assert shapes == expected


def peft_outputs(base: Path, adapter: Path) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return log-probabilities and gradients of PEFT in float64."""
    torch, peft, transformers = (pytest.importorskip(name) for name in ("torch", "peft", "transformers"))
    model = transformers.AutoModelForCausalLM.from_pretrained(base, **IN_FLOAT64)
    with warnings.catch_warnings():
        # A tensor without a place in the model would be a warning.
        warnings.simplefilter("error")
        adapted = peft.PeftModel.from_pretrained(model, adapter, is_trainable=True).double().eval()
    ids = torch.from_numpy(token_ids()).long()
    logs = torch.log_softmax(adapted(ids).logits[:, :-1], -1)
    logprobs = torch.gather(logs, -1, ids[:, 1:, None])[..., 0]
    (logprobs * torch.from_numpy(loss_weights()).double()).sum().backward()
    gradients = {
        name.replace(".default.", "."): parameter.grad.numpy()
        for name, parameter in adapted.named_parameters()
        if parameter.requires_grad
    }
    return logprobs.detach().numpy(), gradients


@pytest.mark.torch
@pytest.mark.medium
@pytest.mark.parametrize("case", ARCHITECTURES)
def test_peft_computes_the_same_with_an_export(case: str, chat, trainer, differentiate, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="needs the extra test-torch")
    folder = write_checkpoint(tmp_path / "base", case)
    base = load_hf_policy(folder, chat, trainer, None)
    adapter = random_adapter(base, targets_of(case))
    (tmp_path / "adapter").mkdir()
    save_peft_adapter(shapes_of(base), adapter, tmp_path / "adapter", folder)
    logprobs, gradients = differentiate(base, adapter)
    expected, of_peft = peft_outputs(tmp_path / "base", tmp_path / "adapter")
    assert np.abs(logprobs - record(case)["logprobs"]).max() > 0.1
    np.testing.assert_allclose(logprobs, expected, rtol=0, atol=1e-5)
    if IS_NEW:
        # Transformers 5 has renamed the module of the router, and reads the older name in files.
        gradients = {name.replace(".block_sparse_moe.", ".mlp."): array for name, array in gradients.items()}
    assert gradients.keys() == of_peft.keys()
    for name, gradient in of_peft.items():
        assert np.linalg.norm(gradients[name] - gradient) <= 1e-5 * np.linalg.norm(gradient), name


@pytest.mark.torch
@pytest.mark.medium
@pytest.mark.parametrize(("case", "options"), [
    ("llama", {"target_modules": "all-linear", "exclude_modules": None}),
    ("qwen3", {"target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj", "lm_head"], "use_rslora": True}),
    ("gemma", {"target_modules": r".*\.(q_proj|down_proj)", "lora_dropout": 0.1}),
    ("gpt2", {"target_modules": ["attn.c_proj", "c_attn"]}),
])  # fmt: skip
def test_an_adapter_of_peft_computes_the_same(
    case: str, options: dict[str, Any], chat, trainer, differentiate, tmp_path: Path
) -> None:
    torch, peft, transformers = (
        pytest.importorskip(name, reason="needs the extra test-torch") for name in ("torch", "peft", "transformers")
    )
    folder = write_checkpoint(tmp_path / "base", case)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    config = peft.LoraConfig(r=4, lora_alpha=5, init_lora_weights=False, task_type="CAUSAL_LM", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(model, config)
        # By default PEFT also writes the weight of an adapted head.
        adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    base = load_hf_policy(folder, chat, trainer, None)
    targets = {"llama": targets_of("llama"), "qwen3": targets_of("qwen3"), "gemma": ("q_proj", "down_proj")}
    like = adapter_shape(
        base,
        targets.get(case, ("attn.c_proj", "c_attn")),
        rank=4,
        alpha=5 * (2 if "use_rslora" in options else 1),
    )
    adapter = load_peft_adapter(str(tmp_path / "adapter"), shapes_of(base), like, trainer)
    found = differentiate(base, adapter)[0]
    assert np.abs(found - record(case)["logprobs"]).max() > 0.1
    np.testing.assert_allclose(found, peft_outputs(tmp_path / "base", tmp_path / "adapter")[0], rtol=0, atol=1e-5)


@pytest.mark.torch
@pytest.mark.parametrize("case", ["gpt2", "llama", "qwen3", "gemma2"])
def test_all_linear_is_that_of_peft(case: str, chat, trainer, tmp_path: Path) -> None:
    peft, transformers = (
        pytest.importorskip(name, reason="needs the extra test-torch") for name in ("peft", "transformers")
    )
    folder = write_checkpoint(tmp_path / "base", case)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.get_peft_model(
            model, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
        ).save_pretrained(tmp_path / "adapter")
    base = shapes_of(load_hf_policy(folder, chat, trainer, None))
    expected = {name: list(array.shape) for name, array in load_file(tmp_path / "adapter" / WEIGHTS).items()}
    like = adapter_shape(base, LoraConfig(targets="all-linear").targets)
    found = eqx.filter_eval_shape(to_peft_tensors, base, like)
    assert {name: list(tensor.shape) for name, tensor in found.items()} == expected
    # PEFT writes the names of the modules; other programs write the word.
    set_config(target_modules="All-Linear")(tmp_path / "adapter")
    check_peft_adapter(str(tmp_path / "adapter"), base, like)


@pytest.mark.medium
@pytest.mark.torch
def test_the_remedy_for_a_replaced_weight_works(chat, trainer, tmp_path: Path) -> None:
    peft, transformers = (
        pytest.importorskip(name, reason="needs the extra test-torch") for name in ("peft", "transformers")
    )
    folder = write_checkpoint(tmp_path / "base", "llama")
    base = load_hf_policy(folder, chat, trainer, None)
    adapter = random_adapter(shapes_of(base), ("q_proj", "v_proj"))
    (tmp_path / "adapter").mkdir()
    save_peft_adapter(shapes_of(base), adapter, tmp_path / "adapter", folder)
    weight = load_file(tmp_path / "base" / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    set_tensors(lambda tensors: tensors.update({f"{LAYER}.q_proj.base_layer.weight": weight + 1}))(tmp_path / "adapter")
    with pytest.raises(AdapterFormatError, match=r"q_proj.base_layer.weight replaces .* PEFT's merge_and_unload"):
        check_peft_adapter(str(tmp_path / "adapter"), shapes_of(base), shapes_of(adapter))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    merged = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    found = load_hf_policy(str(tmp_path / "merged"), chat, trainer, None)
    expected = merge_adapter(with_adapter(base, adapter))
    now, before = (each.transformer.layers.stacked.self_attn.q_proj.weight for each in (found, expected))
    change = now - before
    np.testing.assert_allclose(change["layer", 0].array, 1.0, atol=1e-5)
    np.testing.assert_allclose(change["layer", 1].array, 0.0, atol=1e-5)


@pytest.mark.parametrize("name", ["mixtral", *mixtures()])
def test_all_linear_of_a_mixture_is_refused_with_targets_that_work(name: str) -> None:
    base = shapes_of(random_model(FAMILIES[name]))
    with pytest.raises(LoraTargetError, match=r"includes the experts .*: \[q_proj, k_proj, v_proj, o_proj\]"):
        adapter_shape(base, ("all-linear",))
    assert len(adapter_shape(base, ATTENTION).layers) == 4


@pytest.mark.torch
@pytest.mark.medium
@pytest.mark.parametrize("case", cases(["gpt2", "qwen3", "qwen3_moe_dense"]))
def test_transformers_computes_the_same_with_a_merged_export(case: str, chat, trainer, tmp_path: Path) -> None:
    torch, transformers = (
        pytest.importorskip(name, reason="needs the extra test-torch") for name in ("torch", "transformers")
    )
    folder = write_checkpoint(tmp_path / "base", case)
    base = load_hf_policy(folder, chat, trainer, None)
    adapter = random_adapter(base, targets_of(case))
    (tmp_path / "adapter").mkdir()
    save_peft_adapter(shapes_of(base), adapter, tmp_path / "adapter", folder)
    save_hf_policy(merge_adapter(with_adapter(base, adapter)), chat, tmp_path / "merged", trainer)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", **IN_FLOAT64).double()
    ids = torch.from_numpy(token_ids()).long()
    with torch.no_grad():
        logs = torch.log_softmax(model(ids).logits[:, :-1], -1)
    found = torch.gather(logs, -1, ids[:, 1:, None])[..., 0].numpy()
    np.testing.assert_allclose(found, peft_outputs(tmp_path / "base", tmp_path / "adapter")[0], rtol=0, atol=1e-5)


def set_config(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        settings = json.loads((folder / CONFIG).read_text()) | values
        (folder / CONFIG).write_text(json.dumps(settings))

    return change


def write_config_text(text: str | bytes) -> Callable[[Path], None]:
    data = text if isinstance(text, bytes) else text.encode()
    return lambda folder: (folder / CONFIG).write_bytes(data) and None


def set_tensors(change: Callable[[dict[str, np.ndarray]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / WEIGHTS)

    return apply


LAYER = "base_model.model.model.layers.0.self_attn"
Q = f"{LAYER}.q_proj.lora_A.weight"


def rename_file(name: str, new: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).rename(folder / new) and None


def cut(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-9])


def add_tensor(name: str) -> Callable[[Path], None]:
    return set_tensors(lambda tensors: tensors.update({name: np.zeros((4, 4))}))


def replace_q(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path], None]:
    return set_tensors(lambda tensors: tensors.update({Q: change(tensors[Q])}))


def replace_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()


def replace_config(make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def replace(folder: Path) -> None:
        (folder / CONFIG).unlink()
        make(folder / CONFIG)

    return replace


BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (lambda folder: (folder / CONFIG).unlink(), r"cannot be read: .*; set lora.adapter to a folder"),
    "config is endless": (replace_config(lambda file: file.symlink_to("/dev/zero")), r"be read: .*is a device"),
    "config is a pipe": (replace_config(os.mkfifo), r"cannot be read: .*is a device, a pipe or a socket"),
    "config is a folder": (replace_config(Path.mkdir), r"cannot be read: .*Is a directory"),
    "config is a loop": (replace_config(lambda file: file.symlink_to(CONFIG)), r"cannot be read: .*symbolic links"),
    "config is no JSON": (write_config_text("{"), r"adapter_config.json of .* cannot be read: Expecting"),
    "config is no text": (write_config_text(b"\xff\xfe"), r"cannot be read: 'utf-8' codec"),
    "config is empty": (write_config_text(""), r"cannot be read: Expecting value"),
    "config is nested": (write_config_text("[" * 100_000), r"cannot be read: maximum recursion"),
    "config has a long number": (write_config_text(f'{{"r": {"9" * 5000}}}'), r"cannot be read: Exceeds the limit"),
    "config is a list": (write_config_text("[]"), r"cannot be read: it is not a JSON object"),
    "other method": (set_config(peft_type="IA3"), r'peft_type is "IA3" \(supported: LORA\)'),
    "other task": (set_config(task_type="SEQ_CLS"), r'task_type is "SEQ_CLS" \(supported: CAUSAL_LM\)'),
    "no rank": (set_config(r=None), r"r is null \(supported: a positive integer\)"),
    "rank 0": (set_config(r=0), r"r is 0 \(supported: a positive integer\)"),
    "rank is true": (set_config(r=True), r"r is true \(supported: a positive integer\)"),
    "rank is huge": (set_config(r=10**400), r"r is 1000\d+ \(supported: a positive integer\)"),
    "alpha 0": (set_config(lora_alpha=0), r"lora_alpha is 0 \(supported: a positive number\)"),
    "alpha is not a number": (set_config(lora_alpha=float("nan")), r"lora_alpha is NaN \(supported: a positive"),
    "alpha is huge": (set_config(lora_alpha=10**400), r"lora_alpha is 1000\d+ \(supported: a positive number\)"),
    "alpha is a text": (set_config(lora_alpha="16"), r'lora_alpha is "16" \(supported: a positive number\)'),
    "targets are null": (set_config(target_modules=None), r"target_modules is null \(supported: a list of names"),
    "rslora is a text": (set_config(use_rslora="no"), r'use_rslora is "no" \(supported: true or false\)'),
    "rslora": (set_config(use_rslora=True), r"has rank 3 and factor 3.4641, .* lora.rank: 3 and lora.alpha: 10.39"),
    "other rank": (set_config(r=4), r"has rank 4 and factor 1.5, but lora.rank is 3 .* is 2; set lora.rank: 4"),
    "other alpha": (set_config(lora_alpha=16), r"set lora.rank: 3 and lora.alpha: 16.0$"),
    "DoRA": (set_config(use_dora=True), r"not supported: use_dora is true \(supported: false\); merge the adapter"),
    "bias": (set_config(bias="lora_only"), r'not supported: bias is "lora_only" \(supported: none\)'),
    "bias of B": (set_config(lora_bias=True), r"not supported: lora_bias is true"),
    "modules to save": (set_config(modules_to_save=["lm_head"]), r'not supported: modules_to_save is \["lm_head"\]'),
    "ranks by module": (set_config(rank_pattern={"q_proj": 2}), r'not supported: rank_pattern is {"q_proj": 2}'),
    "alphas by module": (set_config(alpha_pattern={"q_proj": 2}), r"not supported: alpha_pattern"),
    "some layers": (set_config(layers_to_transform=[0]), r"not supported: layers_to_transform is \[0\]"),
    "repeated layers": (set_config(layer_replication=[[0, 1], [0, 2]]), r"not supported: layer_replication"),
    "new tokens": (set_config(trainable_token_indices=[1]), r"not supported: trainable_token_indices"),
    "a later option": (set_config(use_a_new_method=True), r"not supported: use_a_new_method is true"),
    "changed base": (set_config(init_lora_weights="pissa"), r'not supported: init_lora_weights is "pissa"'),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), r"safetensors of .* damaged: the file does not exist"),
    "pickle": (rename_file(WEIGHTS, "adapter_model.bin"), r"the file does not exist; write it with PEFT"),
    "weights are a folder": (replace_weights, r"is missing or damaged: the file does not exist"),
    "weights are cut": (cut, r"is missing or damaged: "),
    "weights are a pointer": (
        lambda folder: (folder / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\n"),
        r"missing or damaged: it is a pointer of Git LFS",
    ),
    "weights are empty": (set_tensors(dict.clear), r"is missing or damaged: it has no tensors"),
    "a tensor is missing": (set_tensors(lambda tensors: tensors.pop(Q)), rf"the files lack {Q}; "),
    "a layer is missing": (
        set_tensors(lambda tensors: [tensors.pop(name) for name in list(tensors) if ".layers.1." in name]),
        r"the files lack base_model.model.model.layers.1.*target_modules in adapter_config.json differs",
    ),
    "an embedding": (
        add_tensor("base_model.model.model.embed_tokens.lora_embedding_A"),
        r"lora.targets or the model lack base_model.model.model.embed_tokens.lora_embedding_A",
    ),
    "a weight of the base": (
        add_tensor("base_model.model.lm_head.base_layer.weight"),
        r"lora.targets or the model lack .*lm_head.base_layer.weight.*save_embedding_layers=False",
    ),
    "other names": (
        set_tensors(lambda tensors: tensors.update({Q.removeprefix("base_model."): tensors.pop(Q)})),
        r"the files lack base_model\.model.*; lora.targets or the model lack model\.model",
    ),
    "a transposed tensor": (replace_q(lambda array: array.T), r"\(32, 3\), not \(3, 32\)"),
    "tensors of another rank": (replace_q(lambda array: array[:2]), r"\(2, 32\), not \(3, 32"),
    "integers": (replace_q(lambda array: array.astype(np.int32)), r"F32, F64: .*q_proj.lora_A.weight \(I32\)"),
    "not a number": (replace_q(lambda array: np.where(array == array.max(), np.nan, array)), rf"not finite in {Q};"),
    "infinity": (replace_q(lambda array: np.where(array == array.max(), -np.inf, array)), rf"not finite in {Q}"),
    "a weight under an adapted layer": (
        add_tensor(f"{LAYER}.q_proj.base_layer.weight"),
        r"lack .*q_proj.base_layer.weight; use .*; base_model.*q_proj.base_layer.weight replaces .*merge_and_unload",
    ),
    "a bias under an adapted layer": (
        add_tensor(f"{LAYER}.q_proj.base_layer.bias"), r"q_proj.base_layer.bias replaces .*merge_and_unload"
    ),
    "a tensor of DoRA": (add_tensor(f"{LAYER}.q_proj.lora_magnitude_vector"), r"lack .*q_proj.lora_magnitude_vector;"),
    "a bias of B": (add_tensor(f"{LAYER}.q_proj.lora_B.bias"), r"lora.targets or the model lack .*q_proj.lora_B.bias;"),
    "a norm": (add_tensor("base_model.model.model.norm.weight"), r"model.norm.weight replaces .*merge_and_unload"),
    "excluded modules": (set_config(exclude_modules=["o_proj"]), r'not supported: exclude_modules is \["o_proj"\]'),
    "parameters": (set_config(target_parameters=["w"]), r'not supported: target_parameters is \["w"\]'),
    "other changed base": (set_config(init_lora_weights="olora"), r'not supported: init_lora_weights is "olora"'),
    "quantized base": (set_config(init_lora_weights="loftq"), r'not supported: init_lora_weights is "loftq"'),
    "all linear layers": (set_config(target_modules="all-linear"), r"differs from the tensors in .*down_proj"),
    "targets lack a module": (set_config(target_modules=["k_proj", "up_proj"]), r"differs from the tensors in model"),
    "targets have one more": (
        set_config(target_modules=["k_proj", "q_proj", "up_proj", "o_proj"]),
        r"differs from the tensors in model.layers.0.self_attn.o_proj, model.layers.1.self_attn.o_proj; use the",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def bad_base() -> LmHeadModel:
    return shapes_of(random_model(FAMILIES["qwen3"]))


BAD_TARGETS = ("q_proj", "k_proj", "up_proj")


@pytest.fixture(scope="module")
def good_adapter(bad_base, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    save_peft_adapter(bad_base, random_adapter(bad_base, BAD_TARGETS), folder, "BASE")
    return folder


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_folder_is_one_sentence(kind: str, good_adapter, bad_base, trainer, tmp_path: Path) -> None:
    change, message = BAD[kind]
    for file in good_adapter.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    like = adapter_shape(bad_base, BAD_TARGETS)
    check_peft_adapter(str(tmp_path), bad_base, like)
    change(tmp_path)
    with pytest.raises(AdapterFormatError, match=message) as caught:
        load_peft_adapter(str(tmp_path), bad_base, like, trainer)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("base", "targets", "message"),
    [
        ("qwen3", ("q_proj", "k_proj"), r"lora.targets or the model lack .*up_proj.* lora.targets: \[k_proj, q_proj"),
        ("qwen3", (*BAD_TARGETS, "o_proj"), r"the files lack .*o_proj"),
        ("llama", BAD_TARGETS, r"q_proj.lora_B.weight \(64, 3\), not \(32, 3\)"),
        ("gpt2", ("c_attn",), r"the files lack base_model.model.transformer.h.0.attn.c_attn.lora_A.weight"),
    ],
)  # fmt: skip
def test_an_adapter_of_another_model_is_refused(base: str, targets, message: str, good_adapter) -> None:
    shapes = shapes_of(random_model(FAMILIES[base]))
    with pytest.raises(AdapterFormatError, match=re.compile(message)):
        check_peft_adapter(str(good_adapter), shapes, adapter_shape(shapes, targets))


def test_an_adapter_is_not_taken_for_a_model(good_adapter) -> None:
    with pytest.raises(PolicyModelError, match=r"is an adapter without its base; set lora.adapter to it, and init"):
        read_hf_config(str(good_adapter))


def test_other_numbers_of_layers_are_refused(good_adapter) -> None:
    config = FAMILIES["qwen3"]
    shapes = shapes_of(random_model(dataclasses.replace(config, num_layers=3)))
    with pytest.raises(AdapterFormatError, match=r"the files lack base_model.model.model.layers.2"):
        check_peft_adapter(str(good_adapter), shapes, adapter_shape(shapes, BAD_TARGETS))


@pytest.mark.parametrize(
    ("name", "targets", "expected"),
    [
        ("gpt2", ("c_proj",), ["c_proj"]),
        ("gpt2", ("attn.c_proj",), ["attn.c_proj"]),
        ("qwen3", ("self_attn.q_proj", "lm_head"), ["lm_head", "q_proj"]),
        ("mixtral", ("gate", "q_proj"), ["gate", "q_proj"]),
        # The experts have a `gate_proj`, too.
        *((name, ("gate_proj", "gate"), ["gate", "mlp.gate_proj"]) for name in dense_layers()),
        ("llama", ("stacked.self_attn.q_proj",), ["q_proj"]),
    ],
)
def test_the_written_targets_are_the_shortest_names_of_transformers(name: str, targets, expected, tmp_path) -> None:
    base = shapes_of(random_model((FAMILIES | dense_layers())[name]))
    save_peft_adapter(base, random_adapter(base, targets), tmp_path, "BASE")
    settings = json.loads((tmp_path / CONFIG).read_text())
    assert settings["target_modules"] == expected
    assert (settings["r"], settings["lora_alpha"], settings["base_model_name_or_path"]) == (RANK, ALPHA, "BASE")
    assert settings["fan_in_fan_out"] == (name == "gpt2")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float16])
def test_the_type_of_the_tensors_is_an_option(dtype, bad_base, trainer, tmp_path: Path) -> None:
    adapter = random_adapter(bad_base, BAD_TARGETS)
    save_peft_adapter(bad_base, adapter, tmp_path, "BASE", jnp.dtype(dtype))
    assert {array.dtype for array in load_file(tmp_path / WEIGHTS).values()} == {jnp.dtype(dtype)}
    found = load_peft_adapter(str(tmp_path), bad_base, shapes_of(adapter), trainer)
    for array, given in zip(jax.tree.leaves(found), jax.tree.leaves(adapter), strict=True):
        assert array.dtype == jnp.float32
        np.testing.assert_array_equal(array, given.astype(dtype).astype(jnp.float32))
