# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import math
from typing import Any

import draccus
import pytest

from marin_rl.sampling.config import LevanterSamplerConfig, OpenAiSamplerConfig, ReloadConfig, SamplerConfig

RELOAD = {"folder": "weights", "path": "hook.py", "function": "reload"}
GOOD = OpenAiSamplerConfig(base_url="http://localhost:8000/v1", model="policy", reload=ReloadConfig(**RELOAD))


def test_an_engine_is_chosen_by_type():
    assert draccus.decode(SamplerConfig, {"type": "levanter"}) == LevanterSamplerConfig()
    fields = {"base_url": GOOD.base_url, "model": "policy", "reload": RELOAD}
    assert draccus.decode(SamplerConfig, {"type": "openai", **fields}) == GOOD
    named = draccus.decode(SamplerConfig, {"type": "openai", **fields, "retry": {"give_up_seconds": 5.0}})
    assert named.retry.give_up_seconds == 5.0


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"base_url": "localhost:8000/v1"}, r"sampler.base_url is 'localhost:8000/v1'; it must be an address such as"),
        ({"base_url": "ftp://host/v1"}, r"sampler.base_url is 'ftp://host/v1'"),
        ({"base_url": "http:///v1"}, r"sampler.base_url is 'http:///v1'"),
        ({"base_url": "http://:8000/v1"}, r"sampler.base_url is 'http://:8000/v1'"),
        ({"base_url": "http://host:http/v1"}, r"sampler.base_url is 'http://host:http/v1'"),
        ({"base_url": "http://host:70000/v1"}, r"sampler.base_url is 'http://host:70000/v1'"),
        ({"base_url": "http://host:0/v1"}, r"sampler.base_url is 'http://host:0/v1'"),
        ({"base_url": ""}, r"sampler.base_url is ''"),
        ({"model": ""}, r"sampler.model is empty"),
        ({"timeout": 0.0}, r"sampler.timeout is 0.0"),
        ({"timeout": math.nan}, r"sampler.timeout is nan"),
        ({"timeout": math.inf}, r"sampler.timeout is inf"),
    ],
)
def test_impossible_settings_are_refused(fields: dict[str, Any], problem: str):
    with pytest.raises(ValueError, match=problem):
        dataclasses.replace(GOOD, **fields)


@pytest.mark.parametrize("url", ["http://user:secret@host/v1", "http://secret@host/v1"])
def test_a_secret_in_the_address_is_refused_and_not_repeated(url: str):
    with pytest.raises(ValueError, match=r"sampler.base_url holds a user or a password.*api_key_env") as raised:
        dataclasses.replace(GOOD, base_url=url)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [({"folder": ""}, r"sampler.reload.folder is empty"), ({"keep": 0}, r"sampler.reload.keep is 0")],
)
def test_impossible_folders_are_refused(fields: dict[str, Any], problem: str):
    with pytest.raises(ValueError, match=problem):
        ReloadConfig(**{**RELOAD, **fields})
