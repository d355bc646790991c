# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Has a vLLM server load a run's new weights: `sampler.reload: {path: experiments/reload_vllm.py, function: reload}`.

The server serves the link `current` in `sampler.reload.folder` and, with VLLM_SERVER_DEV_MODE=1, takes the two calls
that are made here. Whoever reaches its port can make them too: bind it to a network that you trust.
"""

from pathlib import Path

import httpx

TIMEOUT = 600.0
"""Seconds that loading may take."""


def reload(folder: Path, version: int, base_url: str) -> None:
    """Point `current` at the new weights, and have the server load them and forget what it cached under the old ones.

    Args:
        folder: the weights, in Hugging Face format.
        version: of the weights.
        base_url: of the server, with `/v1`.

    Raises:
        httpx.HTTPError: if the server does not answer, or refuses.
    """
    link = folder.with_name(".current.new")
    link.unlink(missing_ok=True)
    link.symlink_to(folder.name)
    link.replace(folder.with_name("current"))
    root = base_url.rstrip("/").removesuffix("/v1")
    with httpx.Client(timeout=TIMEOUT) as client:
        client.post(f"{root}/collective_rpc", json={"method": "reload_weights"}).raise_for_status()
        client.post(f"{root}/reset_prefix_cache").raise_for_status()
