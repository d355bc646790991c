# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Tiny checkpoints in Hugging Face format, made from the records in `hf_oracle`."""

import functools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from marin_rl.utils.levanter_line import line_problem
from tests.models.hf_oracle.make_oracle import FOLDER, weights


def cases(parameters: Iterable[Any]) -> list[Any]:
    """Return parameters of a test, each a record or a tuple that begins with one.

    The test skips records that the installed line of levanter cannot read.
    """
    marked = []
    for values in parameters:
        values = values if isinstance(values, tuple) else (values,)
        problem = line_problem(record(values[0])["config"]["model_type"])
        marks = () if problem is None else pytest.mark.skip(reason=problem)
        marked.append(pytest.param(*values, marks=marks))
    return marked


@functools.cache
def record(case: str) -> dict[str, Any]:
    """Return the record of a case: `config`, `config_version5`, `tensors` (shapes), and outputs of transformers."""
    return json.loads((FOLDER / f"{case}.json").read_text())


def write_config(folder: Path, config: Mapping[str, Any]) -> str:
    """Create a folder with this config.json and without weights."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def write_checkpoint(folder: Path, case: str, tensors: Mapping[str, np.ndarray] | None = None, **changes: Any) -> str:
    """Create a folder with the config and weights of a case.

    Args:
        folder: created if it does not exist.
        case: name of the record.
        tensors: replaces the recorded tensors of the case.
        changes: changes of keys in config.json.
    """
    save_file(
        dict(weights(record(case)["tensors"]) if tensors is None else tensors),
        write_config(folder, {**record(case)["config"], **changes}) + "/model.safetensors",
    )
    return str(folder)


def fuse(tensors: dict[str, np.ndarray]) -> None:
    """Give the four experts of the layers of a mixture the form of transformers 5."""
    routers = [name for name in tensors if name.endswith((".block_sparse_moe.gate.weight", ".mlp.gate.weight"))]
    for old in (name.removesuffix(".gate.weight") for name in routers):
        new = f"{old.rpartition('.')[0]}.mlp"
        gate, up, down = ("w1", "w3", "w2") if old != new else ("gate_proj", "up_proj", "down_proj")

        def take(weight: str, old: str = old) -> np.ndarray:
            return np.stack([tensors.pop(f"{old}.experts.{expert}.{weight}.weight") for expert in range(4)])

        tensors[f"{new}.gate.weight"] = tensors.pop(f"{old}.gate.weight")
        tensors[f"{new}.experts.gate_up_proj"] = np.concatenate([take(gate), take(up)], axis=1)
        tensors[f"{new}.experts.down_proj"] = take(down)
