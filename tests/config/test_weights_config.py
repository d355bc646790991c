# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import draccus
import pytest

from marin_rl.config.weights_config import TransferDtype, WeightTransferConfig
from marin_rl.distributed.weights.fetch import open_receiver
from marin_rl.distributed.weights.publish import TrainingHost, open_sender
from tests.distributed.weights.endpoints import SECRET


def test_dtype_is_selected_by_name():
    config = draccus.decode(WeightTransferConfig, {"dtype": "bfloat16", "port": 7000})
    assert config == WeightTransferConfig(dtype=TransferDtype.BFLOAT16, port=7000)
    assert config.sent_dtype == "bfloat16"
    assert WeightTransferConfig().sent_dtype is None


def test_servers_are_on_loopback_by_default():
    assert (WeightTransferConfig().host, WeightTransferConfig().port) == ("127.0.0.1", 0)


@pytest.mark.parametrize(("field", "value"), [("port", -1), ("port", 65536), ("streams", 0), ("streams", 65)])
def test_settings_out_of_range_are_rejected(field: str, value: int):
    with pytest.raises(ValueError, match=rf"weights\.{field} is {value}; it must be from"):
        WeightTransferConfig(**{field: value})


def test_host_is_required():
    with pytest.raises(ValueError, match=r"weights\.host is empty"):
        WeightTransferConfig(host="")


def test_weak_secret_opens_no_sender_or_receiver():
    with pytest.raises(ValueError, match="the secret of the weight transfer has 5 characters"):
        open_sender(WeightTransferConfig(), "short", TrainingHost.current())
    with pytest.raises(ValueError, match="the secret of the weight transfer has 5 characters"):
        open_receiver(WeightTransferConfig(), ["grpc+tls://127.0.0.1:1"], "short")


def test_receiver_requires_an_address():
    with pytest.raises(ValueError, match="at least one address"):
        open_receiver(WeightTransferConfig(), [], SECRET)
