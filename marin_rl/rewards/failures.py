# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Why a rollout has no score from a reward component: the causes, and the error that carries one."""

import enum


class RewardFailure(enum.StrEnum):
    """Why a rollout has no score; counted under these names."""

    TIMEOUT = "timeout"
    """It took longer than `wall_seconds`."""
    CPU = "cpu"
    """It used more than `cpu_seconds` of processor time."""
    MEMORY = "memory"
    """It asked for more than `memory_mb`."""
    FILE_SIZE = "file_size"
    """It wrote a file larger than `file_mb`."""
    OUTPUT = "output"
    """It printed or answered more than `output_kb`."""
    PROCESSES = "processes"
    """It had more than `processes` processes."""
    THREADS = "threads"
    """It had more than `threads` threads."""
    SIGNAL = "signal"
    """A signal ended it, a crash for instance."""
    EXITED = "exited"
    """It ended its process without an answer."""
    INVALID_ANSWER = "invalid_answer"
    """Its answer is not what a reward function answers, or holds no valid scores after every retry of a judge."""
    RAISED = "raised"
    """It raised an exception."""
    WORKER = "worker"
    """The worker process died, did not answer, or could not confine the call."""
    INVALID_SCORE = "invalid_score"
    """The function itself said that its score is not valid."""
    STEP_INDEX = "step_index"
    """A step's index names no message of the policy, or one twice."""
    REQUEST = "request"
    """A judge or another service did not answer, after every retry."""


class RewardCallError(RuntimeError):
    """A call of a reward component that brought no answer."""

    def __init__(self, cause: RewardFailure, detail: str):
        super().__init__(f"{cause.value}: {detail}")
        self.cause = cause
        """Why."""
        self.detail = detail
        """Why, in words."""
