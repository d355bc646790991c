# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Validation of the configs of launches, and the requests that follow from them."""

from typing import Any

import pytest

from marin_rl.pods.config import TpuConfig
from marin_rl.pods.tpu import open_launch
from marin_rl.utils.settings.decode import decode
from marin_rl.utils.settings.section_types import ConfigError
from tests.pods.test_preflight import VALID


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tpu_name": "Pod"}, "tpu_name is 'Pod'; it must be at most 50 of a-z, 0-9 and -"),
        ({"tpu_name": "a" * 51}, "at most 50 of a-z"),
        ({"zone": "us-east5"}, "zone is 'us-east5'; it must be a zone, such as us-east5-a"),
        ({"slices": {"tpu_type": "v5p"}}, "slices: tpu_type is 'v5p': it is not a slice of TPUs, such as "),
        ({"slices": {"tpu_type": "v5litpod-8"}}, "it is not a slice of TPUs, such as v5e-8"),
        ({"slices": {"tpu_type": "2xv5e-8"}}, "it is 2 slices; write the type of one, and set num_slices: 2"),
        ({"slices": {"tpu_type": "v7x-8"}}, "tpu_type is tpu7x-8, of which the runtime version is not known"),
        ({"slices": {"tpu_type": "v5p-8", "capacity_type": "cheap"}}, "it takes one of on-demand, spot, reserved"),
        ({"slices": {"tpu_type": "v5p-8", "create_flags": ["--spot"]}}, "create_flags contains '--spot'"),
    ],
)
def test_bad_configs(changes: dict[str, Any], message: str) -> None:
    decode(TpuConfig, VALID)
    with pytest.raises(ConfigError) as raised:
        decode(TpuConfig, VALID | changes)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("name", "google"), [("V5E-8", "v5litepod-8"), (" v5lite-8", "v5litepod-8"), ("v5e:2x8", "v5litepod-16")]
)
def test_the_type_of_google_is_requested(name: str, google: str) -> None:
    config = decode(TpuConfig, VALID | {"slices": {"tpu_type": name}})
    (group,) = open_launch(config, [], print).groups
    assert f"--accelerator-type={google}" in group.slices.create_arguments()
    assert str(config.slices) == f"1 x {google}"


HOSTILE = [
    *("$(touch x)", "`touch x`", "a;touch x", "a'b", 'a"b', "a\nb", "a\0b", "-x", "--", "a b", "a|b", "a&b"),
    *("a>x", "*", "~", "$HOME", "a\\b", "#a", "!a", "{a,b}", "\ud800", "\u202e", "--zone=b", "--zone=b\nc", "=a"),
    "--command=touch x",
]


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize(
    "key", ["tpu_name", "zone", "project", "ssh_flags", "tpu_type", "runtime_version", "create_flags"]
)
def test_text_for_gcloud_is_a_name_or_a_flag(key: str, text: str) -> None:
    value: Any = [text] if "flags" in key else text
    in_slices = key in ("tpu_type", "runtime_version", "create_flags")
    changes = {"slices": VALID["slices"] | {key: value}} if in_slices else {key: value}
    with pytest.raises(ConfigError, match=rf"{key} (is|contains) "):
        decode(TpuConfig, VALID | changes)


def test_requests_of_rollout_slices() -> None:
    rollouts = {"tpu_type": "v6e-8", "num_slices": 100, "capacity_type": "spot", "create_flags": ["--network=n"]}
    config = decode(TpuConfig, VALID | {"tpu_name": "a" * 50, "rollout_slices": rollouts})
    trainer, *workers = [group.slices for group in open_launch(config, [], print).groups]
    assert [slices.name for slices in workers] == [f"{trainer.name}-rollouts-{index}" for index in range(100)]
    # The limit of Cloud TPU.
    assert len(workers[-1].name) <= 63
    assert "--network=n" not in trainer.create_arguments()
    for slices in workers:
        assert {"--network=n", "--spot", f"--node-id={slices.name}"} <= set(slices.create_arguments())
