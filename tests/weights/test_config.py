# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import draccus
import pytest

from marin_rl.weights.config import (
    ArrowFlightConfig,
    SharedFilesConfig,
    TransferDtype,
    WeightTransferConfig,
)
from marin_rl.weights.publish import TrainingHost
from tests.weights.endpoints import SECRET


def decode(fields: dict[str, object]) -> WeightTransferConfig:
    return draccus.decode(WeightTransferConfig, fields)


def test_transfer_is_selected_by_type():
    assert decode({"type": "arrow_flight", "dtype": "bfloat16", "port": 7000}) == ArrowFlightConfig(
        dtype=TransferDtype.BFLOAT16, port=7000
    )
    assert decode({"type": "shared_files", "folder": "w", "retry": {"give_up_seconds": 5.0}}).retry.give_up_seconds == 5


def test_servers_are_on_loopback_by_default():
    assert (ArrowFlightConfig().host, ArrowFlightConfig().port) == ("127.0.0.1", 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", -1),
        ("port", 65536),
        ("streams", 0),
        ("streams", 65),
        ("chunk_mb", 0),
        ("chunk_mb", 65),
    ],
)
def test_invalid_arrow_flight_settings_are_rejected(field: str, value: int):
    with pytest.raises(ValueError, match=rf"weights\.{field} is {value}"):
        ArrowFlightConfig(**{field: value})


@pytest.mark.parametrize(("field", "value"), [("streams", 0), ("chunk_mb", 65)])
def test_invalid_shared_files_settings_are_rejected(field: str, value: int):
    with pytest.raises(ValueError, match=rf"weights\.{field} is {value}"):
        SharedFilesConfig(folder="w", **{field: value})


def test_required_settings_are_checked():
    with pytest.raises(ValueError, match=r"weights\.folder is empty"):
        SharedFilesConfig()
    with pytest.raises(ValueError, match=r"weights\.host is empty"):
        ArrowFlightConfig(host="")


def test_shared_files_receiver_requires_equal_addresses():
    config = SharedFilesConfig(folder="w")
    config.open_receiver(["w", "w"], SECRET)
    for addresses in ([], ["w", "v"]):
        with pytest.raises(ValueError, match="all senders of this type must have the same address"):
            config.open_receiver(addresses, SECRET)


@pytest.mark.parametrize("config", [ArrowFlightConfig(), SharedFilesConfig(folder="w")])
def test_weak_secret_opens_no_sender_or_receiver(config: WeightTransferConfig, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="the secret of the weight transfer has 5 characters"):
        config.open_sender("short", TrainingHost.current())
    with pytest.raises(ValueError, match="the secret of the weight transfer has 5 characters"):
        config.open_receiver(["grpc+tls://127.0.0.1:1"], "short")
    assert list(tmp_path.iterdir()) == []


def test_receiver_requires_an_address():
    with pytest.raises(ValueError, match="at least one address"):
        ArrowFlightConfig().open_receiver([], SECRET)


def test_unsupported_kind_of_address_is_refused() -> None:
    with pytest.raises(ValueError, match=r"weights\.folder is 'gss://bucket/w', but the protocol gss:// is unknown"):
        SharedFilesConfig(folder="gss://bucket/w")
