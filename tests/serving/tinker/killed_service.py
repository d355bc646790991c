# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A service without HTTP that kills itself while it writes its journal.

For each line of the input, the JSON arguments of `mortal`, the program forks a process and prints how it ended. The
process connects to the socket in the folder, sends the id of its model, and answers with a line `SEQ` each request
`SEQ KIND BODY` that it has accepted.
"""

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from marin_rl.serving.tinker.journal import Journal
from marin_rl.serving.tinker.records import ModelSpec
from marin_rl.serving.tinker.service import Service
from marin_rl.serving.tinker.trainer_thread import Limits
from tests.serving.tinker.fake_trainer import BASE, FakeTrainer

SPEC = ModelSpec(8, 0, True, True, True)
SOCKET = "socket"


def mortal(name: str, number: int, seconds: float) -> Callable[[str], None]:
    """Return a function that kills this process some seconds after a number of calls with a name; 0 for never."""
    left = number

    def kill() -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    def note(event: str) -> None:
        nonlocal left
        left -= event == name
        if event == name and left == 0:
            threading.Thread(target=kill).start()

    return note


async def serve(folder: Path, note: Callable[[str], None]) -> None:
    """Answer the requests of one client until it leaves; `note` each `append` and `answer`."""
    append = Journal.append

    def noted(*args: Any, **options: Any) -> int:
        note("append")
        return append(*args, **options)

    Journal.append = noted  # type: ignore[method-assign]
    reader, writer = await asyncio.open_unix_connection(folder / SOCKET, limit=2**24)
    # No recovery states, so that the journal keeps all operations.
    service = Service(FakeTrainer(), folder, BASE, Limits(state=1e9))
    service.start()
    session = service.create_session("key", None, None)
    create = service.create_model(session.id, 0, "create_model", {}, "base", SPEC)
    await service.sync()
    writer.write(f"{create.id.removesuffix(':0')}\n".encode())

    async def answer(seq: int, kind: str, body: bytes) -> None:
        promise = service.operate(create.id.removesuffix(":0"), seq, kind, body)
        await service.sync(promise)
        writer.write(f"{seq}\n".encode())
        note("answer")
        if kind == "optim_step":
            await service.retrieve(promise.id, 30.0)
            writer.write(promise.result + b"\n")

    async with asyncio.TaskGroup() as tasks:
        while line := await reader.readline():
            seq, kind, body = line.split()
            tasks.create_task(answer(int(seq), kind.decode(), bytes.fromhex(body.decode())))
    service.close()


def main() -> None:
    """Run one process for each line of the input."""
    folder = Path(sys.argv[1])
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            asyncio.run(serve(folder, mortal(*json.loads(line))))
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
