# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import jax.numpy as jnp
import levanter.tracker

from marin_rl.learner.capture import CapturingTracker, CapturingTrackerConfig


def test_keeps_scalars_until_asked() -> None:
    tracker = CapturingTrackerConfig().init(None)
    tracker.log({"train/a": jnp.float32(1.5)}, step=1)
    tracker.log({"train/b": 2}, step=1, commit=True)
    assert tracker.pop() == {"train/a": 1.5, "train/b": 2.0}
    assert tracker.pop() == {}


def test_takes_levanters_log_calls_while_current() -> None:
    tracker = CapturingTracker()
    with levanter.tracker.current_tracker(tracker):
        levanter.tracker.log({"x": 3.0}, step=1)
        levanter.tracker.log_summary({"ignored": 1.0})
        levanter.tracker.log_hyperparameters({"ignored": 1.0})
    tracker.log_artifact("nowhere")
    tracker.finish()
    assert tracker.pop() == {"x": 3.0}


def test_two_trackers_do_not_share() -> None:
    config = CapturingTrackerConfig()
    first, second = config.init(None), config.init(None)
    first.log({"x": 1.0}, step=None)
    assert second.pop() == {}
