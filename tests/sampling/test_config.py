# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
from typing import Any

import draccus
import pytest

from marin_rl.sampling.config import (
    LevanterSamplerConfig,
    OpenAiSamplerConfig,
    ReloadConfig,
    SamplerConfig,
    SamplingConfig,
)

RELOAD = {"folder": "weights", "path": "hook.py", "function": "reload"}
GOOD = OpenAiSamplerConfig(base_url="http://localhost:8000/v1", model="policy", reload=ReloadConfig(**RELOAD))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"stop": ("</answer>", "")}, r"sampling.stop has an empty text"),
        ({"top_p": 0.9}, r"sampling.top_p is 0.9.*set sampling.top_p: 1.0"),
        ({"top_k": 50}, r"sampling.top_k is 50.*set sampling.top_k: null"),
        ({"kv_cache_dtype": "int8"}, r"sampling.kv_cache_dtype is 'int8'; use float32, bfloat16 or null"),
    ],
)
def test_invalid_sampling_settings_are_rejected(fields: dict[str, Any], problem: str):
    with pytest.raises(ValueError, match=problem):
        SamplingConfig(**fields)


@pytest.mark.parametrize(
    ("dtype", "platform", "expected"),
    [(None, "cpu", "float32"), (None, "gpu", "bfloat16"), (None, "tpu", "bfloat16"), ("float32", "tpu", "float32")],
)
def test_cache_is_float32_on_cpu_by_default(dtype: str | None, platform: str, expected: str):
    assert SamplingConfig(kv_cache_dtype=dtype).cache_dtype(platform) == expected


def test_sampler_is_selected_by_type():
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
    ],
)
def test_invalid_settings_are_rejected(fields: dict[str, Any], problem: str):
    with pytest.raises(ValueError, match=problem):
        dataclasses.replace(GOOD, **fields)


@pytest.mark.parametrize("url", ["http://user:secret@host/v1", "http://secret@host/v1"])
def test_secret_in_the_address_is_rejected_and_not_printed(url: str):
    with pytest.raises(ValueError, match=r"sampler.base_url holds a user, a password.*api_key_env") as raised:
        dataclasses.replace(GOOD, base_url=url)
    assert "secret" not in str(raised.value)


def test_empty_folder_is_rejected():
    with pytest.raises(ValueError, match=r"sampler.reload.folder is empty"):
        ReloadConfig(**{**RELOAD, "folder": ""})
