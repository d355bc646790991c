# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A trainer of one number, and a program that serves it: a lost or doubled gradient changes the number."""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from marin_rl.serving.http_server import HttpServer, listen
from marin_rl.serving.tinker.checkpoints import ServedModel
from marin_rl.serving.tinker.endpoints import TinkerApp
from marin_rl.serving.tinker.records import (
    AdamParams,
    ForwardBackward,
    LossOutputs,
    ModelSpec,
    RequestError,
    Sample,
    SampleOutputs,
    SampleSource,
)
from marin_rl.serving.tinker.service import Service
from marin_rl.serving.tinker.trainer_thread import Limits

BASE = ServedModel(("base",), "fake-1", max_context=64)


class FakeTrainer:
    """Weight `w` and gradient `g`: a step is `w = 0.9 w + rate · g`, so that also the order of operations shows."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.log: list[tuple] = []
        self.values = {"weight": 0.0, "gradient": 0.0, "steps": 0.0}
        self.prompts: list[tuple[int, ...]] = []

    @property
    def num_programs(self) -> int:
        return 1

    def create(self, spec: ModelSpec) -> None:
        self.log.append(("create", spec.lora_rank))
        self.values = {"weight": 1.0 + spec.lora_rank, "gradient": 0.0, "steps": 0.0}

    def unload(self) -> None:
        self.log.append(("unload",))

    def forward_backward(self, request: ForwardBackward) -> LossOutputs:
        time.sleep(self.seconds)
        self.log.append(("forward" if request.forward_only else "forward_backward", request.seq_id, len(request.data)))
        logprobs = [-0.01 * datum.inputs["target_tokens"].astype(np.float32) for datum in request.data]
        loss = float(sum(np.sum(values, dtype=np.float64) for values in logprobs))
        if any(datum.tokens.max() > 10**6 for datum in request.data):
            raise RequestError("a token is not in the vocabulary")
        if any(datum.tokens.max() == 10**6 for datum in request.data):
            loss = math.inf
        if not request.forward_only:
            self.values["gradient"] = self.values["gradient"] * 1.01 + loss
        return LossOutputs(logprobs, {"loss:sum": -loss, "weight:mean": self.values["weight"]})

    def optim_step(self, params: AdamParams) -> dict[str, float]:
        time.sleep(self.seconds)
        self.log.append(("optim_step",))
        values = self.values
        if not math.isfinite(values["gradient"]):
            values["gradient"] = 0.0
            raise RequestError("the sum of the gradients is not finite, and was dropped")
        values["weight"] = 0.9 * values["weight"] + params.learning_rate * values["gradient"]
        values["gradient"], values["steps"] = 0.0, values["steps"] + 1
        return dict(values)

    def save(self, folder: Path) -> None:
        time.sleep(self.seconds)
        folder.mkdir(parents=True)
        (folder / "values.json").write_text(json.dumps(self.values))

    save_sampler = save

    def load(self, folder: Path, *, optimizer: bool) -> None:
        self.log.append(("load", folder.name, optimizer))
        self.values = json.loads((folder / "values.json").read_text())
        if not optimizer:
            self.values["steps"] = 0.0

    def sample(self, folder: Path | None, source: SampleSource) -> None:
        weight = 0.0 if folder is None else json.loads((folder / "values.json").read_text())["weight"]
        while jobs := source.take():
            time.sleep(self.seconds)
            for key, params in jobs:
                self.prompts.append(params.prompt)
                if params.top_k not in (-1, 0):
                    source.finish(key, RequestError(f"top_k is {params.top_k}; only -1 is supported"))
                    continue
                length = len(params.prompt)
                tokens = tuple((params.seed + index) % 50 for index in range(min(params.max_tokens or 4, 4)))
                samples = [Sample(tokens, (weight,) * len(tokens), True) for _ in range(params.num_samples)]
                prompt = np.array([np.nan, *[-weight] * (length - 1)], np.float32) if params.prompt_logprobs else None
                k = params.topk_prompt_logprobs
                topk = (np.ones((length, k), np.int32), np.full((length, k), -weight, np.float32)) if k else None
                source.finish(key, SampleOutputs(samples, prompt, topk))


def serve(folder: Path, port: int, limits: Limits, seconds: float) -> None:
    """Serve until a signal."""
    service = Service(FakeTrainer(seconds), folder, BASE, limits)
    app = TinkerApp(service, BASE, key=None)
    HttpServer(app.app(), 60.0).run(service, listen("127.0.0.1", port, 60.0))


def start_server(
    folder: Path, port: int, *, state_seconds: float, seconds: float, deaths: Sequence[int]
) -> subprocess.Popen[str]:
    """Start this program, whose output has the id of each process that serves."""
    options = ["--folder", str(folder), "--port", str(port), "--state-seconds", str(state_seconds)]
    options += ["--seconds", str(seconds), "--deaths", *map(str, deaths)]
    command = [sys.executable, "-m", "tests.serving.tinker.fake_trainer", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def die_at_file(number: int) -> None:
    """Make this process kill itself at an operation of the file system."""
    left = number

    def count(event: str, args: tuple) -> None:
        nonlocal left
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def main() -> None:
    """Serve until SIGTERM. With `--deaths`, processes that are killed are replaced; each prints its id."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--state-seconds", type=float, default=60.0)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--deaths", type=int, nargs="*", help="file operation at which each process dies; 0: none")
    args = parser.parse_args()
    for death in args.deaths or ():
        if child := os.fork():
            print(child, flush=True)
            if os.waitpid(child, 0)[1] != signal.SIGKILL:
                return
            continue
        if death:
            die_at_file(death)
        serve(args.folder, args.port, Limits(state=args.state_seconds), args.seconds)
        return
    if not args.deaths:
        serve(args.folder, args.port, Limits(state=args.state_seconds), args.seconds)


if __name__ == "__main__":
    main()
