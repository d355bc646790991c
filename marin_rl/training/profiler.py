# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Traces of the devices and the host during some steps of a run."""

import contextlib
import functools
import logging
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from marin_rl.utils.devices.trainer_config import AbstractTrainerConfig
from marin_rl.utils.errors import Closing, writing
from marin_rl.utils.remote_path import RemotePath
from marin_rl.utils.storage import StoragePath, remove

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def open_profiler(config: AbstractTrainerConfig, folder: StoragePath) -> Iterator[Callable[[int], None]]:
    """Trace the steps `profiler_start_step` to `profiler_start_step + profiler_num_steps - 1`, if `profiler` is set.

    A trace is written when its last step or the run ends. TensorBoard's profile plugin shows it, and Perfetto
    `perfetto_trace.json.gz`. The phases of a step are in it by name. A process that resumes after the first of these
    steps traces none.

    Args:
        config: the trainer section.
        folder: folder of the trace of this process.

    Yields:
        A function that must be called with the number of each step before it begins.

    Raises:
        RunDirectoryError: if the trace cannot be written.
    """
    first, last = config.profiler_start_step, config.profiler_start_step + config.profiler_num_steps - 1
    with contextlib.ExitStack() as trace:

        def before_step(step: int) -> None:
            if config.profiler and step == first:
                # The profiler writes to local folders only.
                local = folder if isinstance(folder, Path) else Path(tempfile.mkdtemp())
                options = jax.profiler.ProfileOptions()
                # Tracing every Python call makes the host several times slower, and hides the devices' idle time.
                options.python_tracer_level = 0
                jax.profiler.start_trace(local, create_perfetto_trace=True, profiler_options=options)
                trace.enter_context(Closing(functools.partial(_write_trace, folder, local)))
            if step == last + 1:
                trace.close()

        yield before_step


def _write_trace(folder: StoragePath, local: Path) -> None:
    """End the trace, which jax writes to the local folder, and upload it if the run is in an object store."""
    with writing(folder):
        jax.profiler.stop_trace()
        if isinstance(folder, RemotePath):
            for file in sorted(path for path in local.rglob("*") if path.is_file()):
                (folder / file.relative_to(local).as_posix()).upload(file)
            remove(local)
    logger.info("the trace is in %s", folder)
