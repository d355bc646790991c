# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
from typing import Any

import pytest

from marin_rl.sampling.config import (
    OpenAiSamplerConfig,
    ReloadConfig,
    SamplingConfig,
)

RELOAD = {"folder": "weights", "path": "hook.py", "function": "reload"}
GOOD = OpenAiSamplerConfig(base_url="http://localhost:8000/v1", model="policy", reload=ReloadConfig(**RELOAD))


@pytest.mark.parametrize(
    ("dtype", "platform", "expected"),
    [(None, "cpu", "float32"), (None, "gpu", "bfloat16"), (None, "tpu", "bfloat16"), ("float32", "tpu", "float32")],
)
def test_cache_is_float32_on_cpu_by_default(dtype: str | None, platform: str, expected: str):
    assert SamplingConfig(kv_cache_dtype=dtype).cache_dtype(platform) == expected


@pytest.mark.parametrize(
    ("good", "fields", "problem"),
    [
        (SamplingConfig(), {"stop": ("</answer>", "")}, r"sampling.stop has an empty text"),
        (SamplingConfig(), {"top_p": 0.9}, r"sampling.top_p is 0.9.*set sampling.top_p: 1.0"),
        (SamplingConfig(), {"top_k": 50}, r"sampling.top_k is 50.*set sampling.top_k: null"),
        (SamplingConfig(), {"kv_cache_dtype": "int8"}, r"kv_cache_dtype is 'int8'; use float32, bfloat16 or null"),
        (GOOD, {"base_url": "localhost:8000/v1"}, r"sampler.base_url is 'localhost:8000/v1'; it must be an address"),
        (GOOD, {"base_url": "http://host:0/v1"}, r"sampler.base_url is 'http://host:0/v1'"),
        (GOOD, {"base_url": "http://host/v1\n"}, r"sampler.base_url is 'http://host/v1\\n'.*without spaces or line br"),
        (GOOD, {"base_url": "http://ho st/v1"}, "sampler.base_url is 'http://ho st/v1'"),
        (GOOD, {"base_url": "http://host/v1\x7f"}, "sampler.base_url is"),
        (GOOD, {"base_url": "http://host\u2028/v1"}, "sampler.base_url is"),
        (GOOD, {"base_url": "http://\u2603\u200d.com/v1"}, "sampler.base_url is"),
        (GOOD, {"base_url": f"http://host/{'a' * 70_000}"}, r"sampler.base_url is 'http://host/a{188}'; it"),
        (GOOD, {"model": ""}, r"sampler.model is empty"),
        (GOOD.reload, {"folder": ""}, r"sampler.reload.folder is empty"),
    ],
)
def test_invalid_settings_are_rejected(good: Any, fields: dict[str, Any], problem: str):
    with pytest.raises(ValueError, match=problem):
        dataclasses.replace(good, **fields)


@pytest.mark.parametrize("url", ["http://user:secret@host/v1", "http://secret@host/v1"])
def test_secret_in_the_address_is_rejected_and_not_printed(url: str):
    with pytest.raises(ValueError, match=r"sampler.base_url holds a user, a password.*api_key_env") as raised:
        dataclasses.replace(GOOD, base_url=url)
    assert "secret" not in str(raised.value)
