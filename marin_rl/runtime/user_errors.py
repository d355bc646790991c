# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Errors that the command lines print as one line, without a traceback."""

from marin_rl.learner.checkpoint import CheckpointError
from marin_rl.learner.train_step import NonFiniteUpdateError
from marin_rl.processes import MainProcessError, ProcessesDifferError
from marin_rl.rewards.sandbox.pool import IsolationError
from marin_rl.rollouts.run_rollouts import AllRolloutsFailedError, BlockedEventLoopError
from marin_rl.runtime.ray_node import RayStartError
from marin_rl.runtime.ray_workers import NoClusterError, RayLostError
from marin_rl.runtime.run_directory import RunDirectoryError
from marin_rl.runtime.worker_pool import NoWorkersError, WorkerFailedError
from marin_rl.sampling.sampler import SamplerError
from marin_rl.weights.errors import WeightTransferError

USER_ERRORS = (
    ValueError,
    OSError,
    RunDirectoryError,
    CheckpointError,
    SamplerError,
    NonFiniteUpdateError,
    AllRolloutsFailedError,
    BlockedEventLoopError,
    IsolationError,
    NoClusterError,
    NoWorkersError,
    RayLostError,
    RayStartError,
    WorkerFailedError,
    MainProcessError,
    ProcessesDifferError,
    WeightTransferError,
)
"""Errors with a message that names the remedy; a traceback would hide it."""
