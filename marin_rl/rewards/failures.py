# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Causes of failed reward calls, and their error."""

import enum


class RewardFailure(enum.StrEnum):
    """Cause for which a rollout has no score; failures are counted under these names."""

    TIMEOUT = "timeout"
    """The call took longer than `wall_seconds`."""
    CPU = "cpu"
    """It used more than `cpu_seconds` of CPU time."""
    MEMORY = "memory"
    """It requested more memory than `memory_mb`."""
    FILE_SIZE = "file_size"
    """It wrote a file larger than `file_mb`."""
    OUTPUT = "output"
    """It printed or returned more than `output_kb`."""
    PROCESSES = "processes"
    """It had more than `processes` processes."""
    THREADS = "threads"
    """It had more than `threads` threads."""
    SIGNAL = "signal"
    """A signal terminated it, for example after a crash."""
    EXITED = "exited"
    """Its process exited without an answer."""
    INVALID_ANSWER = "invalid_answer"
    """Its answer is not a valid result, or an LLM judge's answer holds no valid scores after all retries."""
    RAISED = "raised"
    """It raised an exception."""
    WORKER = "worker"
    """The worker process died, did not answer, or could not confine the call."""
    INVALID_SCORE = "invalid_score"
    """The function returned `is_score_valid=False`."""
    STEP_INDEX = "step_index"
    """A step index does not refer to a message of the policy, or is repeated."""
    REQUEST = "request"
    """An LLM judge or another service did not answer after all retries."""


class RewardCallError(RuntimeError):
    """A call of a reward component failed."""

    def __init__(self, cause: RewardFailure, detail: str):
        super().__init__(f"{cause.value}: {detail}")
        self.cause = cause
        """Category of the failure."""
        self.detail = detail
        """Description of the failure."""
