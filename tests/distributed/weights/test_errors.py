# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import inspect

import pytest

from marin_rl.distributed.weights import errors
from marin_rl.distributed.weights.errors import WeightTransferError
from marin_rl.utils.errors import USER_ERRORS

ERRORS = [error for _, error in inspect.getmembers(errors, inspect.isclass) if issubclass(error, WeightTransferError)]


@pytest.mark.parametrize("error", ERRORS)
def test_every_error_is_reported_as_one_line(error: type[WeightTransferError]) -> None:
    assert isinstance(error("the reason"), USER_ERRORS)
    assert not issubclass(error, ValueError | OSError)
    assert str(error("the reason")) == "the reason"


def test_no_error_of_one_cause_is_caught_as_another() -> None:
    specific = [error for error in ERRORS if error is not WeightTransferError]
    assert len(specific) == 6
    assert all(error.__bases__ == (WeightTransferError,) for error in specific)
