# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import draccus
import pytest

from marin_rl.weights.config import (
    ArrowFlightConfig,
    SharedFilesConfig,
    TransferDtype,
    WeightTransferConfig,
    one_address,
)
from marin_rl.weights.snapshot import TrainingHost
from tests.weights.ends import TOKEN


def decode(fields: dict[str, object]) -> WeightTransferConfig:
    return draccus.decode(WeightTransferConfig, fields)


def test_a_way_is_chosen_by_type():
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
        ("keep", 0),
        ("call_seconds", 0.0),
        ("call_seconds", float("nan")),
    ],
)
def test_impossible_settings_of_servers_are_refused(field: str, value: float):
    with pytest.raises(ValueError, match=rf"weights\.{field} is {value}"):
        ArrowFlightConfig(**{field: value})


@pytest.mark.parametrize(("field", "value"), [("streams", 0), ("chunk_mb", 65), ("keep", 0)])
def test_impossible_settings_of_a_folder_are_refused(field: str, value: int):
    with pytest.raises(ValueError, match=rf"weights\.{field} is {value}"):
        SharedFilesConfig(folder="w", **{field: value})


def test_what_must_be_named_is_asked_for():
    with pytest.raises(ValueError, match=r"weights\.folder is empty"):
        SharedFilesConfig()
    with pytest.raises(ValueError, match=r"weights\.host is empty"):
        ArrowFlightConfig(host="")


def test_senders_of_one_place_have_one_address():
    assert one_address(["a", "a"]) == "a"
    for addresses in ([], ["a", "b"]):
        with pytest.raises(ValueError, match="all senders of this type have the same address"):
            one_address(addresses)


@pytest.mark.parametrize("config", [ArrowFlightConfig(), SharedFilesConfig(folder="w")])
def test_a_weak_token_opens_nothing(config: WeightTransferConfig, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="the token of the weight transfer has 5 characters"):
        config.open_sender("short", TrainingHost.current())
    with pytest.raises(ValueError, match="the token of the weight transfer has 5 characters"):
        config.open_receiver(["grpc+tls://127.0.0.1:1"], "short")
    assert list(tmp_path.iterdir()) == []


def test_a_receiver_needs_an_address():
    with pytest.raises(ValueError, match="at least one address"):
        ArrowFlightConfig().open_receiver([], TOKEN)
