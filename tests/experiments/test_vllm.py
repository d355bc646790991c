# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Whole runs against a real vLLM, if the command `vllm` is in PATH or VLLM names it; serving.md has its installation.

VLLM=/path/to/environment/bin/vllm pytest -m vllm
"""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from haliax import Axis  # noqa: F401  before marin_rl: see tests/tiny_run.py

from experiments.reload_vllm import main as write_start
from experiments.reload_vllm import reload
from marin_rl.export import main as export
from marin_rl.rewards.functions import RewardCallError, RewardFailure
from marin_rl.rewards.judge import LlmJudge, LlmJudgeConfig
from tests.distributed.thread_workers import thread_workers
from tests.free_port import free_port
from tests.tiny_run import TinyRun, make_run

VLLM = shutil.which(os.environ.get("VLLM", "vllm"))
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(VLLM is None, reason="vllm is not installed"),
]
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "2",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
FLAGS = {
    "host": "127.0.0.1",
    "served-model-name": "start",
    "dtype": "float32",
    "max-model-len": "512",
    "generation-config": "vllm",
    "logprobs-mode": "processed_logprobs",
    "max-lora-rank": "8",
}
MODEL = {
    "type": "llama",
    "seq_len": 512,
    "hidden_dim": 64,
    "intermediate_dim": 128,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 2,
    "initializer_range": 0.3,
    "tie_word_embeddings": True,
    "gradient_checkpointing": False,
    "attn_backend": "VANILLA",
}
"""Heads have 32 dimensions, the least that vLLM's attention on a CPU supports."""
SHORT = {
    "model": MODEL,
    "num_steps": 3,
    "warm_start__max_steps": 0,
    "evaluation__every": 0,
    "checkpoint__every": 0,
    "sampling__temperature": 0.8,
}


class Served(NamedTuple):
    url: str
    start: Path
    """The initial weights."""
    folder: Path
    """The served folder."""


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("vllm")
    first = make_run(folder, **{**SHORT, "num_steps": 1})
    assert first.train() == 0
    start, served, port = folder / "start", folder / "served", free_port()
    assert export(["--run", str(first.path), "--output", str(start)]) == 0
    write_start([str(start), str(served)])
    flags = [part for name, value in FLAGS.items() for part in (f"--{name}", value)]
    command = [str(VLLM), "serve", str(served / "current"), *flags, "--enforce-eager", "--enable-lora", "--port"]
    path = f"{Path(str(VLLM)).parent}:{os.environ['PATH']}"
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [*command, str(port)], env={**bare, **ENVIRONMENT, "PATH": path}, stdout=log, stderr=log
        )
    try:
        with httpx.Client(transport=httpx.HTTPTransport(retries=600)) as client:
            assert client.get(f"http://127.0.0.1:{port}/health", timeout=600).status_code == 200
        yield Served(f"http://127.0.0.1:{port}/v1", start, served)
    finally:
        server.terminate()
        server.wait()


def sampler_of(vllm: Served, model: str, *, adapter: bool = False) -> dict[str, Any]:
    function = {"path": "experiments/reload_vllm.py", "function": "reload"}
    return {
        "type": "openai",
        "base_url": vllm.url,
        "model": model,
        "reload": {"folder": str(vllm.folder), "adapter": adapter, **function},
    }


def differences(run: TinyRun) -> list[float]:
    """Largest difference between sampler and learner of each step."""
    return [
        record["mismatch/logprob_difference_max"]
        for record in run.records()
        if "mismatch/logprob_difference_max" in record
    ]


@pytest.mark.parametrize("adapter", [False, True])
def test_log_probs_are_those_of_the_learner_after_every_reload(vllm: Served, tmp_path: Path, adapter: bool):
    # The base of the adapter.
    reload(vllm.folder / "start", 0, vllm.url)
    settings = {"lora": {"rank": 4, "alpha": 8}} if adapter else {}
    sampler = sampler_of(vllm, "policy" if adapter else "start", adapter=adapter)
    run = make_run(tmp_path, initialize_from=str(vllm.start), sampler=sampler, **SHORT, **settings)
    assert run.train() == 0
    found = differences(run)
    assert len(found) == 3
    assert max(found) < 1e-4
    names = {path.name for path in (vllm.folder / "version-3").iterdir()}
    assert ("adapter_model.safetensors" in names) == adapter
    assert ("model.safetensors" in names) != adapter


def test_a_worker_samples_with_it(vllm: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("marin_rl.distributed.ray_workers.ray_workers", thread_workers)
    start = {"initialize_from": str(vllm.start), **SHORT}
    run = make_run(tmp_path, mode="async", sampler=sampler_of(vllm, "start"), **start)
    assert run.train() == 0
    assert len(differences(run)) == 3


def test_it_teaches(vllm: Served, tmp_path: Path):
    """The teacher has the weights at the start, so the first divergence is that of rounding."""
    reload(vllm.folder / "start", 0, vllm.url)
    server = {"type": "server", "base_url": vllm.url, "model": "start"}
    start = {**SHORT, "sampling__temperature": 1.0}
    kl = {"type": "in_loss", "beta": 0.1}
    run = make_run(tmp_path, initialize_from=str(vllm.start), reference=server, kl=kl, **start)
    assert run.train() == 0
    found = [record["kl/k3"] for record in run.records() if "kl/k3" in record]
    assert len(found) == 3
    assert abs(found[0]) < 1e-6 < found[2]


def test_it_judges(vllm: Served, request_of: Any):
    """An untrained model answers, but not with a score."""
    judge = LlmJudge(LlmJudgeConfig(base_url=vllm.url, model="start", prompt="{conversation}", max_tokens=4, retries=0))

    async def score() -> Any:
        try:
            return await judge.score([request_of("46")])
        finally:
            await judge.close()

    with pytest.raises(RewardCallError) as raised:
        asyncio.run(score())
    assert raised.value.cause is RewardFailure.INVALID_ANSWER
    assert raised.value.metrics["completion_tokens"] == 4
