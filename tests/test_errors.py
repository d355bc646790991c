# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Every error class of the package is printed as one line, except errors that no command raises."""

import importlib
import inspect
import pkgutil

import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py

import marin_rl
from marin_rl.errors import USER_ERRORS

INTERNAL = {
    "ToolError": "reported to the policy",
    "ToolTimeoutError": "reported to the policy",
    "EnvironmentFault": "fails a rollout",
    "RewardCallError": "fails a reward",
    "_RetryableError": "makes a judge ask again",
    "WorkerLostError": "makes the sandbox start another worker",
    "RewardFunctionError": "reported by the sandbox worker that loads the user's file",
    "StopRequestedError": "ends the step; the training loop saves and stops",
}
"""Errors that are handled before they reach the command line."""


def errors_of_the_package() -> dict[str, type[BaseException]]:
    classes = {}
    for module in pkgutil.walk_packages(marin_rl.__path__, "marin_rl."):
        for name, kind in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if issubclass(kind, BaseException) and kind.__module__ == module.name:
                classes[f"{module.name}.{name}"] = kind
    return classes


def test_all_other_errors_are_printed_as_one_line() -> None:
    classes = errors_of_the_package()
    assert len(classes) > 30
    printed = {name for name, kind in classes.items() if issubclass(kind, USER_ERRORS)}
    assert {name.rpartition(".")[2] for name in classes.keys() - printed} == set(INTERNAL)
