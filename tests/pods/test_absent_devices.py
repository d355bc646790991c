# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import jax
import pytest

from marin_rl.pods import absent_devices
from marin_rl.pods.chips import TopologyError, parse_topology


def test_cpu_with_another_number_of_devices_needs_a_new_process():
    found = len(jax.devices())
    name = f"cpu:{found + 1}"
    with (
        pytest.raises(TopologyError, match=rf"jax has started with {found} devices of cpu .* so it cannot use {name}"),
        absent_devices.absent_devices(parse_topology(name)),
    ):
        pass


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5p:2x2x1", r"v5p:2x2x1 needs libtpu.*the extra tpu: pip install 'marin_rl\[tpu\]'"),
        ("h100:1", r"h100:1 needs jax's CUDA plugin.*the extra gpu: pip install 'marin_rl\[gpu\]'"),
    ],
)
def test_missing_compiler_names_the_extra(name: str, message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(absent_devices.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TopologyError, match=message), absent_devices.absent_devices(parse_topology(name)):
        pass
