# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import math

import pytest

from marin_rl.config.decode import ConfigError, decode
from marin_rl.config.sections import Refresh, WorkersConfig


def test_refresh_modes_are_selected_by_name() -> None:
    assert decode(WorkersConfig, {}).refresh is Refresh.BETWEEN_GROUPS
    assert decode(WorkersConfig, {"refresh": "in_flight"}).refresh is Refresh.IN_FLIGHT
    with pytest.raises(ConfigError, match="between_groups, in_flight"):
        decode(WorkersConfig, {"refresh": "sometimes"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_workers": 0}, "workers.num_workers is 0; it must be at least 1"),
        ({"decode_steps_per_weight_poll": 0}, "workers.decode_steps_per_weight_poll is 0; it must be at least 1"),
        ({"gpus_per_worker": -1.0}, "workers.gpus_per_worker is -1.0; it must be at least 0"),
        ({"gpus_per_worker": math.nan}, "workers.gpus_per_worker is nan"),
        ({"heartbeat_timeout": 0.0}, "workers.heartbeat_timeout is 0.0; it must be a number of seconds above 0"),
        (
            {"no_progress_timeout": math.inf},
            "workers.no_progress_timeout is inf; it must be a number of seconds above 0",
        ),
    ],
)
def test_invalid_settings_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WorkersConfig(**changes)
