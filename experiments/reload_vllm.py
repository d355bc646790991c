# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Load new weights in a vLLM server: `sampler.reload: {path: experiments/reload_vllm.py, function: reload}`.

The server serves the link `current` in `sampler.reload.folder` and, with VLLM_SERVER_DEV_MODE=1, accepts the two calls
of this function. Any client of its port can make them too: bind it to a trusted network.
"""

from pathlib import Path

import httpx

TIMEOUT = 600.0
"""Timeout of a call in seconds."""


def reload(folder: Path, version: int, base_url: str) -> None:
    """Point `current` to the new weights, reload the server's weights and clear its prefix cache.

    Args:
        folder: new weights in Hugging Face format.
        version: version of the weights.
        base_url: address of the server, ending in `/v1`.

    Raises:
        httpx.HTTPError: if the server does not respond or rejects a call.
    """
    link = folder.with_name(".current.new")
    link.unlink(missing_ok=True)
    link.symlink_to(folder.name)
    link.replace(folder.with_name("current"))
    root = base_url.rstrip("/").removesuffix("/v1")
    with httpx.Client(timeout=TIMEOUT) as client:
        client.post(f"{root}/collective_rpc", json={"method": "reload_weights"}).raise_for_status()
        client.post(f"{root}/reset_prefix_cache").raise_for_status()
