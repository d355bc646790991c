# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Load new weights in a vLLM server: `sampler.reload: {path: experiments/reload_vllm.py, function: reload}`.

The server serves the link `current` in `sampler.reload.folder` and, with VLLM_SERVER_DEV_MODE=1, accepts the two calls
of this function. Any client of its port can make them too: bind it to a trusted network. Before the server starts,
write the link, with the run's initial weights:

    python -m experiments.reload_vllm models/start served

A model with tied embeddings is served with a head of its own. vLLM reloads the tensors of the folder, layer by layer.
The head of a tied model has none there, and on a CPU vLLM multiplies with a packed copy of the head, which then keeps
the old embedding ("ParallelLMHead: Failed to load weights").

Of a run with `lora`, the server loads the adapter alone, if it serves the base with --enable-lora and
VLLM_ALLOW_RUNTIME_LORA_UPDATING=1.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import httpx

TIMEOUT = 600.0
"""Timeout of a call in seconds."""
ADAPTER = "policy"
"""Name of the adapter on the server, which is `sampler.model` of a run with `lora`; each version replaces the last."""
HEAD_FILE = "lm_head.safetensors"
INDEX_FILE = "model.safetensors.index.json"
EMBEDDINGS = "model.embed_tokens.weight", "transformer.wte.weight", "wte.weight"
"""Names of the token embedding."""
HEADLESS = "gemma2"
"""Type of model for which vLLM has no head: it multiplies with the embedding, which is reloaded."""


def reload(folder: Path, version: int, base_url: str) -> None:
    """Load weights or an adapter, and clear the server's prefix cache.

    Args:
        folder: new weights in Hugging Face format, or an adapter in the format of PEFT.
        version: version of the weights.
        base_url: address of the server, ending in `/v1`.

    Raises:
        httpx.HTTPError: if the server does not respond or rejects a call.
    """
    root = base_url.rstrip("/").removesuffix("/v1")
    with httpx.Client(timeout=TIMEOUT) as client:
        if (folder / "adapter_config.json").exists():
            adapter = {"lora_name": ADAPTER, "lora_path": str(folder), "load_inplace": True}
            client.post(f"{root}/v1/load_lora_adapter", json=adapter).raise_for_status()
        else:
            untie_head(folder)
            point_to(folder)
            client.post(f"{root}/collective_rpc", json={"method": "reload_weights"}).raise_for_status()
        client.post(f"{root}/reset_prefix_cache").raise_for_status()


def point_to(folder: Path) -> None:
    """Make the link `current` beside a folder point to it, atomically."""
    link = folder.with_name(".current.new")
    link.unlink(missing_ok=True)
    link.symlink_to(folder.name)
    link.replace(folder.with_name("current"))


def untie_head(folder: Path) -> None:
    """Add a copy of a tied embedding as the head; a model without tied embeddings stays as it is.

    Raises:
        ValueError: if no file has the embedding.
    """
    config = json.loads((folder / "config.json").read_text())
    if not config.get("tie_word_embeddings") or config["model_type"] == HEADLESS:
        return
    header, data = _embedding(folder)
    described = json.dumps({"lm_head.weight": {**header, "data_offsets": [0, len(data)]}}).encode()
    # Bytes of any type, without a library that must know it.
    (folder / HEAD_FILE).write_bytes(len(described).to_bytes(8, "little") + described + data)
    index = folder / INDEX_FILE
    if index.exists():
        listed = json.loads(index.read_text())
        listed["weight_map"]["lm_head.weight"] = HEAD_FILE
        index.write_text(json.dumps(listed))
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}, indent=2))


def _embedding(folder: Path) -> tuple[dict[str, Any], bytes]:
    """Return type and shape of the token embedding, and its bytes."""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            tensors = json.loads(file.read(length))
            for name in EMBEDDINGS:
                if name in tensors:
                    start, end = tensors[name].pop("data_offsets")
                    file.seek(8 + length + start)
                    return tensors[name], file.read(end - start)
    raise ValueError(f"no safetensors file of {folder} has one of {', '.join(EMBEDDINGS)}")


def main(argv: list[str] | None = None) -> None:
    """Write the folder that the server loads at its start."""
    parser = argparse.ArgumentParser(description="Write the folder that vLLM loads at its start.")
    parser.add_argument("model", type=Path, help="folder with the run's initial weights, in Hugging Face format")
    parser.add_argument("served", type=Path, help="sampler.reload.folder of the run")
    arguments = parser.parse_args(argv)
    folder = arguments.served / "start"
    shutil.copytree(arguments.model, folder)
    untie_head(folder)
    point_to(folder)


if __name__ == "__main__":
    main()
