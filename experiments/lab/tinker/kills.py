# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Run a recipe of tinker-cookbook while the server is killed again and again, and record the client's requests.

    python -m experiments.lab.tinker.kills --recipe math_rl --sdk ../tinker/bin/python --folder runs/tinker_kills
    python -m experiments.lab.tinker.replay --folder runs/tinker_kills

The recipe is not changed, and runs in the environment of the SDK. Its server is `python -m marin_rl.tinker` with a
small untrained model, behind a proxy that records and that decides when to send SIGKILL: before a request reaches the
server, while the server works on it, after its reply, which gets lost, while the server starts, and while it writes a
recovery state. The next server starts at once, with the same port and folder.

Session ids are random, and seeds of samples depend on them, so two runs of a recipe differ without any fault.
`replay` therefore computes what this client must have got: it gives every recorded request once, in the order of
`seq_id`, to a trainer without journal and HTTP, and compares all replies and the final training state bit for bit. A
request that was lost or applied twice changes all later log-probs.
"""

import argparse
import asyncio
import collections
import json
import os
import pickle
import random
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import equinox as eqx
import jax
from levanter.models.llama import LlamaConfig

from experiments.lab.tinker.replay import CONTEXT, MAX_SEQS, Recording
from marin_rl.learner.policy_model import initialize_policy, save_hf_policy
from marin_rl.serving.tinker.endpoints import PREFIX
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import byte_tokenizer
from marin_rl.utils.devices.setup import start_devices
from marin_rl.utils.devices.trainer_config import TrainerConfig
from marin_rl.utils.levanter_line import seq_len

HOST = "127.0.0.1"
STOP = "\n\nUser:"
"""What ends an answer in the format `role_colon`."""
START, STATE = "start", "state"
"""Moments without a request: some time after the start of a server, and while it writes a recovery state."""
COMMON = (
    "renderer_name=role_colon",
    "lora_rank=8",
    "eval_every=0",
    "save_every=5",
    "behavior_if_log_dir_exists=delete",
)
RECIPES = {
    "math_rl": (
        "env=arithmetic",
        "group_size=4",
        "groups_per_batch=32",
        "num_substeps=2",
        "learning_rate=2e-5",
        "max_tokens=5",
    ),
    "chat_sl": ("batch_size=16", "max_length=128", "learning_rate=1e-3"),
}
"""Arguments of recipes."""


class Moment(NamedTuple):
    """When a server is killed."""

    path: str
    """Of a request; or `START` or `STATE`."""
    phase: str = ""
    """`before`, `during` or `after` the request's way through the server."""
    count: int = 1
    """Number of the request among those of the path since the server started."""

    def __str__(self) -> str:
        return f"{self.phase} {self.path} {self.count}" if self.phase else self.path


def moments(recipe: str, kills: int, generator: random.Random) -> list[Moment]:
    """Return moments in a random order, after one at each request that begins a run."""
    paths = {"forward_backward": 4, "optim_step": 4, "save_weights": 1, "save_weights_for_sampler": 1}
    paths |= {"math_rl": {"asample": 200, "retrieve_future": 60}, "chat_sl": {"retrieve_future": 8}}[recipe]
    found = [Moment(path, phase) for path in paths for phase in ("before", "during", "after")]
    found += [Moment(START), Moment(START)]
    generator.shuffle(found)
    # After the others: a state is written when a server has run for a minute.
    found = [Moment("create_session", "after"), Moment("create_model", "during"), *found][: kills - 2]
    found = [one._replace(count=generator.randint(1, paths.get(one.path, 1))) for one in found]
    return [*found, Moment(STATE), Moment(STATE)] if kills else []


class Server:
    """A server that is killed at given moments and started again."""

    def __init__(self, command: Sequence[str], folder: Path, moments: Sequence[Moment], generator: random.Random):
        self._command, self._folder, self._moments, self._random = command, folder, moments, generator
        self.kills: list[str] = []
        self._counts = collections.Counter[str]()
        self._tasks = set[asyncio.Task[None]]()

    async def start(self) -> None:
        """Start a process; it listens some seconds later."""
        with (self._folder / "server.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(*self._command, stdout=log, stderr=log)
        self._counts.clear()
        for path, wait in ((START, self._starting), (STATE, self._writing_state)):
            if self.next is not None and self.next.path == path:
                self._tasks.add(asyncio.create_task(wait()))

    @property
    def next(self) -> Moment | None:
        """When this process will be killed."""
        return self._moments[len(self.kills)] if len(self.kills) < len(self._moments) else None

    def phase(self, path: str) -> str:
        """Count a request; return the phase in which the server is to be killed, empty for never."""
        self._counts[path] += 1
        moment = self.next
        return moment.phase if moment is not None and moment[::2] == (path, self._counts[path]) else ""

    async def kill(self) -> None:
        """Send SIGKILL, and start the next process."""
        assert self.next is not None
        self.kills.append(str(self.next))
        print(f"kill {len(self.kills)}: {self.kills[-1]}", flush=True)
        self.process.kill()
        await self.process.wait()
        await self.start()

    async def pause(self, seconds: float) -> None:
        """Wait for a random time up to a maximum."""
        await asyncio.sleep(self._random.uniform(0, seconds))

    async def _starting(self) -> None:
        await self.pause(8)
        await self.kill()

    async def _writing_state(self) -> None:
        def states() -> set[Path]:
            return set((self._folder / "served" / ".server").glob("state-*"))

        former = states()
        while not states() - former:
            await asyncio.sleep(0.005)
        await self.pause(0.2)
        await self.kill()


class Proxy:
    """Passes requests to a server, records them, and has the server killed. Clients lose the reply of a killed one."""

    def __init__(self, server: Server, port: int) -> None:
        self._server, self._port = server, port
        self.recording = Recording(kills=server.kills)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer a client's connection."""
        try:
            while True:
                head, body = await _read_message(reader)
                path = head.split(b" ", 2)[1].decode().removeprefix(f"{PREFIX}/")
                if (reply := await self._exchange(path, head, body)) is None:
                    break
                writer.write(b"".join(reply))
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _exchange(self, path: str, head: bytes, body: bytes) -> tuple[bytes, bytes] | None:
        """Return the reply to a request; None if the server died."""
        self.recording.requests.setdefault(path, []).append(body)
        try:
            reader, writer = await asyncio.open_connection(HOST, self._port)
            phase = self._server.phase(path)
            if phase == "before":
                return await self._server.kill()
            writer.write(head + body)
            await writer.drain()
            if phase == "during":
                await self._server.pause(0.03)
                return await self._server.kill()
            reply = await _read_message(reader)
            writer.close()
        except (OSError, asyncio.IncompleteReadError):
            return None
        if path == "retrieve_future" and b" 200 " in reply[0].splitlines()[0]:
            self.recording.results.setdefault(json.loads(body)["request_id"], []).append(reply[1])
        if phase == "after":
            return await self._server.kill()
        return reply


async def _read_message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Return head and body of an HTTP message."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"(?i)\ncontent-length: *(\d+)", head)
    return head, await reader.readexactly(int(length[1])) if length else b""


def write_model(folder: Path) -> None:
    """Write an untrained model of two layers that often samples `STOP`, so that rewards differ."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([STOP])
    chat, trainer = ChatTokenizer(tokenizer), start_devices(TrainerConfig(), rows_per_device=1, alone=True)
    sizes = {"hidden_dim": 32, "intermediate_dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    config = LlamaConfig(**seq_len(CONTEXT), **sizes, initializer_range=0.3, gradient_checkpointing=False)
    model = cast(Any, initialize_policy(config, chat, trainer, key=jax.random.key(0)))
    rows = model.lm_head.weight.array.at[tokenizer.convert_tokens_to_ids(STOP)].multiply(4)
    save_hf_policy(eqx.tree_at(lambda one: one.lm_head.weight.array, model, rows), chat, folder, trainer)


def write_conversations(file: Path, count: int) -> None:
    """Write sums as conversations."""
    with file.open("w") as stream:
        for number in range(count):
            messages = [("user", f"What is {number} + 7?"), ("assistant", str(number + 7))]
            row = {"messages": [{"role": role, "content": text} for role, text in messages]}
            stream.write(json.dumps(row) + "\n")


async def run(arguments: argparse.Namespace, folder: Path) -> Recording:
    """Run the recipe to its end."""
    model, generator = folder / "model", random.Random(arguments.seed)
    write_model(model)
    options = {"model": model, "folder": folder / "served", "port": arguments.port + 1}
    options |= {"max_context": CONTEXT, "max_seqs": MAX_SEQS}
    command = [sys.executable, "-m", "marin_rl.tinker", *(f"--{name}={value}" for name, value in options.items())]
    server = Server(command, folder, moments(arguments.recipe, arguments.kills, generator), generator)
    proxy = Proxy(server, arguments.port + 1)
    recipe = [f"tinker_cookbook.recipes.{arguments.recipe}.train", *COMMON, *RECIPES[arguments.recipe]]
    recipe += [f"model_name={model}", f"log_path={folder / 'log'}", f"max_steps={arguments.steps}"]
    if arguments.recipe == "chat_sl":
        write_conversations(folder / "sums.jsonl", 16 * arguments.steps)
        recipe += [f"dataset={folder / 'sums.jsonl'}"]
    async with await asyncio.start_server(proxy.serve, HOST, arguments.port):
        await server.start()
        with (folder / "recipe.log").open("wb") as log:
            environment = client_environment(f"http://{HOST}:{arguments.port}")
            client = await asyncio.create_subprocess_exec(
                arguments.sdk, "-m", *recipe, env=environment, stdout=log, stderr=log
            )
            status = await client.wait()
        server.process.terminate()
        await server.process.wait()
    if status:
        raise SystemExit(f"the recipe ended with status {status}; see {folder / 'recipe.log'}")
    return proxy.recording


def client_environment(url: str) -> Mapping[str, str]:
    """Return the environment variables of a client without network."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TINKER_TELEMETRY": "0"}
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**own, **offline, "TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-none"}


def main() -> None:
    """Run the recipe and write the recording."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--recipe", choices=list(RECIPES), default="math_rl")
    parser.add_argument("--sdk", required=True, help="Python with tinker and tinker-cookbook")
    parser.add_argument("--folder", type=Path, required=True, help="a new folder")
    parser.add_argument("--kills", type=int, default=20, help="number of kills")
    parser.add_argument("--steps", type=int, default=100, help="number of steps of the recipe")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--port", type=int, default=8300, help="of the proxy; the server has the next one")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True)
    folder = arguments.folder.absolute()
    recording = asyncio.run(run(arguments, folder))
    (folder / "recording.pickle").write_bytes(pickle.dumps(recording))
    if len(recording.kills) < arguments.kills:
        raise SystemExit(f"the recipe ended after {len(recording.kills)} kills; raise --steps")


if __name__ == "__main__":
    main()
