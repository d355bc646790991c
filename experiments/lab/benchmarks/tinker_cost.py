# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Cost of a step over the Tinker protocol, next to a step of `marin_rl.train` on the same prompts, in alternation.

    python -m experiments.prepare_smollm2
    python -m experiments.lab.benchmarks.tinker_cost --config experiments/smollm2.yaml
    python -m experiments.lab.benchmarks.tinker_cost --config experiments/lora_smollm2.yaml

A run and a server of the same model are in memory at the same time, and one of them is stopped while the other makes a
step. The client samples for the prompts of the run's step, as many samples of as many tokens; then it calls
`forward_backward` with `importance_sampling`, `optim_step`, and `save_weights_for_sampler`, whose result is the sampler
of the next step. Steps in which programs are compiled do not count; those in which the server saves its state do.
"""

import asyncio
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import pyarrow.parquet as pq

from experiments.lab.benchmarks.measurement import (
    BenchmarkedRunError,
    benchmark_parser,
    load_config,
    make_report,
    ratios,
    say,
    spread,
)
from experiments.lab.benchmarks.watched_process import cpu_seconds
from marin_rl.config.train_config import TrainConfig
from marin_rl.serving.tinker.messages import message_class

T = TypeVar("T")
POLL_SECONDS = 0.005
Prompts = list[tuple[list[int], int]]
"""Token ids of each prompt of a step, and the number of its samples."""


class Client:
    """A training loop over the protocol."""

    def __init__(self, url: str, model: str, config: TrainConfig) -> None:
        """Begin nothing yet.

        Args:
            url: of the server.
            model: name of the base model.
            config: of the run that is compared.
        """
        self._http = httpx.AsyncClient(base_url=f"{url}/api/v1/", headers={"X-API-Key": "tml-none"}, timeout=600)
        self._base, self._config = model, config
        self._model = self._sampler = ""
        self._numbers = {"operation": 0, "sample": 0, "sampler": 0}

    async def begin(self) -> None:
        """Create the model, and a sampler of it."""
        session = (await self._post("create_session"))["session_id"]
        lora = {} if self._config.lora is None else {"lora_config": {"rank": self._config.lora.rank, "seed": 0}}
        asked = {"session_id": session, "model_seq_id": 0, "base_model": self._base, **lora}
        self._model = (await self._result(await self._post("create_model", **asked)))["model_id"]
        await self._save()

    async def step(self, prompts: Prompts, cpu: Callable[[], float]) -> dict[str, float]:
        """Take a step; return the seconds of its parts, and those of `cpu`, the CPU seconds of the server."""
        times = [(time.perf_counter(), cpu())]
        found = await asyncio.gather(*(self._sample(*prompt) for prompt in prompts))
        times.append((time.perf_counter(), cpu()))
        # Sent one after another without waiting, as clients do.
        backward = await self._send("forward_backward", self._batch(found))
        rate = {"learning_rate": 1e-6}
        optimizer = await self._post("optim_step", **self._place(), adam_params=rate)
        await asyncio.gather(self._result(backward), self._result(optimizer))
        times.append((time.perf_counter(), cpu()))
        await self._save()
        times.append((time.perf_counter(), cpu()))
        names = ("sample", "train", "save")
        wall, used = np.diff(times, axis=0).T.tolist()
        return dict(zip((*names, *(f"{name}_cpu" for name in names)), (*wall, *used), strict=True))

    def _number(self, kind: str) -> int:
        self._numbers[kind] += 1
        return self._numbers[kind]

    def _place(self) -> dict[str, Any]:
        return {"model_id": self._model, "seq_id": self._number("operation")}

    async def _save(self) -> None:
        asked = {**self._place(), "sampling_session_seq_id": self._number("sampler")}
        self._sampler = (await self._result(await self._post("save_weights_for_sampler", **asked)))[
            "sampling_session_id"
        ]

    async def _sample(self, prompt: list[int], count: int) -> tuple[list[int], list[Any]]:
        sampling = self._config.sampling
        asked = {
            "sampling_session_id": self._sampler,
            "seq_id": self._number("sample"),
            "num_samples": count,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]},
            "sampling_params": {"max_tokens": sampling.max_new_tokens, "temperature": sampling.temperature},
        }
        data = await self._result(await self._post("asample", **asked))
        return prompt, list(message_class("SampleResponse").FromString(data).sequences)

    def _batch(self, found: Sequence[tuple[list[int], list[Any]]]) -> bytes:
        """Return the body of `forward_backward` with alternating advantages, 0 in the prompts."""
        message = message_class("ForwardBackwardRequest")(loss_fn="importance_sampling", **self._place())
        for prompt, sequences in found:
            for index, sequence in enumerate(sequences):
                reply, before = np.frombuffer(sequence.tokens, "<i4"), np.zeros(len(prompt) - 1)
                tokens = np.append(prompt, reply)
                datum = message.data.add()
                datum.model_input.add().encoded_text.tokens = tokens[:-1].astype("<i4").tobytes()
                old = np.append(before, np.frombuffer(sequence.logprobs, "<f4"))
                signs = np.append(before, np.full(len(reply), (-1.0) ** index))
                for name, values, dtype, number in (
                    ("target_tokens", tokens[1:], "<i8", 2),
                    ("logprobs", old, "<f4", 1),
                    ("advantages", signs, "<f4", 1),
                ):
                    tensor = datum.loss_fn_inputs[name]
                    tensor.dense, tensor.dtype = values.astype(dtype).tobytes(), number
                    tensor.shape.append(len(values))
        return message.SerializeToString()

    async def _post(self, path: str, **values: Any) -> dict[str, Any]:
        return await self._send(path, json.dumps(values).encode(), "application/json")

    async def _send(self, path: str, content: bytes, kind: str = "application/x-protobuf") -> dict[str, Any]:
        answer = await self._http.post(path, content=content, headers={"Content-Type": kind})
        return answer.raise_for_status().json()

    async def _result(self, promise: dict[str, Any]) -> Any:
        while True:
            answer = await self._http.post("retrieve_future", json={"request_id": promise["request_id"]})
            if answer.status_code != httpx.codes.REQUEST_TIMEOUT:
                break
        answer.raise_for_status()
        if answer.headers["content-type"] != "application/json":
            return answer.content
        if "error" in (result := answer.json()):
            raise BenchmarkedRunError(result["error"])
        return result


class Program:
    """A program that is stopped, except while it makes a step."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        """Start it.

        Args:
            command: module and arguments.
            log: new file for its output.
        """
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *command], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait; raise `BenchmarkedRunError` if the program ends before."""
        while not condition():
            if self._process.poll() is not None and not condition():
                raise BenchmarkedRunError(f"the program ended:\n{self._log.read_text()[-4000:]}")
            time.sleep(POLL_SECONDS)

    def timed(self, function: Callable[[], T]) -> tuple[T, float, float]:
        """Let the program go on during a call; return its result, seconds, and CPU seconds of the program."""
        cpu, start = self.cpu_seconds(), time.perf_counter()
        os.killpg(self._process.pid, signal.SIGCONT)
        result = function()
        os.killpg(self._process.pid, signal.SIGSTOP)
        return result, time.perf_counter() - start, self.cpu_seconds() - cpu

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of the program and of the processes that it started."""
        return cpu_seconds(self._process.pid)

    def output(self) -> str:
        """Return what the program has printed."""
        return self._log.read_text()

    def end(self) -> None:
        """Kill it, with the processes that it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Run:
    """A run of `marin_rl.train`, step by step."""

    def __init__(self, folder: Path, steps: int, rest: Sequence[str]) -> None:
        """Start it.

        Args:
            folder: new folder for its files.
            steps: number of steps, of which `step` may be called for all but the last.
            rest: command line with the config.
        """
        self._folder, self._step = folder / "run", 0
        # The last step ends with a checkpoint, so it is not waited for.
        options = {"run_dir": self._folder, "num_steps": steps, "evaluation.tasks": 0}
        arguments = [f"--{name}={value}" for name, value in options.items()]
        self.program = Program(["marin_rl.train", *rest, *arguments], folder / "run.txt")

    def step(self) -> tuple[Prompts, dict[str, float]]:
        """Wait for the end of a step; return its prompts, and the seconds of its parts."""
        self._step += 1
        metrics = self._folder / "metrics.jsonl"
        # The record before the first step is that of the start.
        self.program.wait_for(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > self._step)
        record = json.loads(metrics.read_text().splitlines()[self._step])
        file = self._folder / "rollouts" / f"step-{self._step:08d}.parquet"
        self.program.wait_for(file.exists)
        counts: dict[tuple[str, tuple[int, ...]], int] = {}
        for row in pq.read_table(file, columns=["group_id", "turns"]).to_pylist():
            prompt = row["group_id"], tuple(row["turns"][0]["observation_tokens"])
            counts[prompt] = counts.get(prompt, 0) + 1
        parts = {"sample": record["seconds/sample"], "train": record["seconds/step"]}
        return [(list(tokens), count) for (_, tokens), count in counts.items()], parts


def start_server(folder: Path, config: TrainConfig, model: str) -> tuple[Program, str]:
    """Start a server with the sizes of a run; return it and its URL."""
    sizes = {"max_context": config.rollouts.max_length, "max_seqs": config.sampling.max_seqs}
    options = {"model": model, "folder": folder / "tinker", "port": 0, **sizes}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    server = Program(["marin_rl.tinker", *arguments], folder / "server.txt")
    server.wait_for(lambda: "serving" in server.output())
    return server, next(word for word in server.output().split() if word.startswith("http://"))


def measure(folder: Path, rest: Sequence[str], skip: int, rounds: int) -> dict[str, Any]:
    """Let a run and a server make steps in alternation; return seconds, CPU seconds, and their ratios."""
    config = load_config(rest)
    model = str(Path(str(config.initialize_from)).absolute())
    run = Run(folder, skip + rounds + 1, rest)
    server = None
    seconds: dict[str, dict[str, list[float]]] = {"train": {}, "tinker": {}}
    try:
        first = run.program.timed(run.step)[0]
        server, url = start_server(folder, config, model)
        with asyncio.Runner() as runner:
            client = Client(url, model, config)
            runner.run(client.begin())
            for number in range(1 - skip, rounds + 1):
                (prompts, parts), *own = run.program.timed(run.step)
                step = functools.partial(client.step, prompts, server.cpu_seconds)
                served_parts, *served = server.timed(lambda step=step: runner.run(step()))
                for name, values, of_parts in (("train", own, parts), ("tinker", served, served_parts)):
                    shown = ", ".join(f"{part} {value:.2f}" for part, value in of_parts.items())
                    say(f"{name} {number}: {values[0]:.2f} s, {values[1]:.2f} CPU s, {shown}")
                    if number > 0:
                        for part, value in {"step": values[0], "cpu": values[1], **of_parts}.items():
                            seconds[name].setdefault(part, []).append(value)
    finally:
        for program in filter(None, (run.program, server)):
            program.end()
    figures: dict[str, Any] = {
        f"{name}_seconds": {part: spread(values) for part, values in of_name.items()}
        for name, of_name in seconds.items()
    }
    figures["prompts"] = len(first[0])
    # In all steps of the server, those before the first round included.
    figures["saved_states"] = max([0, *(int(state.name[6:]) for state in folder.glob("tinker/.server/state-*"))])
    figures["tinker_over_train"] = {
        part: ratios(seconds["tinker"][part], seconds["train"][part]) for part in ("step", "cpu")
    }
    return figures


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print one JSON object."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = benchmark_parser("A step over the Tinker protocol and one of marin_rl.train")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each that count")
    parser.add_argument("--skip", type=int, default=3, help="steps before, in which programs are compiled")
    arguments, rest = parser.parse_known_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), rest, arguments.skip, arguments.rounds)
    print(make_report("tinker_cost", argv, vars(arguments), figures))


if __name__ == "__main__":
    main()
