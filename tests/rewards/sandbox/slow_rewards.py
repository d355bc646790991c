# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Reward functions with a duration that the test chooses."""

import os
import time

from marin_rl.rewards import EvaluateResult, reward_function


@reward_function
def waits(messages, ground_truth, seconds, **kwargs):
    time.sleep(seconds)
    return EvaluateResult(score=1.0, reason=str(os.getpid()))
