# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Run a command of this package in a task of an Iris job: `python -m marin_rl.pods.task '["train", "--seed", "1"]'`.

Iris starts a task again that ends with another status than 0, whichever it is. A mistake would only be repeated, so the
task then fails the job itself.
"""

import contextlib
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence

import jax
from iris.client.client import iris_ctx
from iris.cluster.client.job_info import get_job_info
from iris.jax.compile_cache import configure_jax_compilation_cache
from iris.jax.init import initialize_jax

from marin_rl.utils import multihost
from marin_rl.utils.errors import brief
from marin_rl.utils.iris_hosts import set_secrets

MISTAKES = 1, 2
"""Exit statuses of commands after which another attempt would end with the same, unless the error may be temporary."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the only argument names, a JSON list with the arguments of the command.

    Exit status: that of the command, or 75 (`EX_TEMPFAIL`) if SIGTERM stopped it, or another process of the job.
    """
    [given] = sys.argv[1:] if argv is None else argv
    command, *arguments = json.loads(given)
    set_secrets()
    _join_gang()
    with _received_signals() as received:
        status = importlib.import_module(f"marin_rl.{command}").main(arguments)
        if status == 0:
            # All processes of a gang must be started again, or those that are would wait for the others.
            return os.EX_TEMPFAIL if multihost.any_process(signal.SIGTERM in received()) else 0
    error = getattr(sys, "last_exc", None)
    if status in MISTAKES and not _may_be_temporary(error):
        client, attempt = iris_ctx().client, iris_ctx().task_attempt
        assert client is not None
        assert attempt is not None
        reason = f"marin_rl.{command} ended with status {status}; see the log" if error is None else brief(str(error))
        client.fail_tasks((attempt,), reason=reason)
    return status


def _join_gang() -> None:
    """Connect the processes of a job with several tasks; set where compiled programs are kept."""
    info = get_job_info()
    if info is None or info.num_tasks == 1:
        configure_jax_compilation_cache()
        return
    # Its handler would replace the command's own and only log SIGTERM.
    jax.config.update("jax_enable_preemption_service", False)
    initialize_jax()


@contextlib.contextmanager
def _received_signals() -> Iterator[Callable[[], bytes]]:
    """Yield a function that returns the numbers of the signals that handlers of Python have received in the block."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    os.set_blocking(read, False)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def received() -> bytes:
        with contextlib.suppress(BlockingIOError):
            return os.read(read, 4096)
        return b""

    try:
        yield received
    finally:
        signal.set_wakeup_fd(before)
        os.close(read)
        os.close(write)


def _may_be_temporary(error: BaseException | None) -> bool:
    from marin_rl.sessions.job import may_be_temporary

    return error is not None and may_be_temporary(error)


if __name__ == "__main__":
    sys.exit(main())
