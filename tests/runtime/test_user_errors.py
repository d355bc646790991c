# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""No error that the package has a name for ends a command with a traceback, but for those that never get so far."""

import importlib
import inspect
import pkgutil

import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py

import marin_rl
from marin_rl.runtime.user_errors import USER_ERRORS

INSIDE = {
    "ToolError": "is told to the policy",
    "ToolTimeoutError": "is told to the policy",
    "EnvironmentFault": "fails a rollout",
    "RewardCallError": "loses a reward",
    "WorkerLostError": "has the sandbox start another worker",
    "RewardFunctionError": "is raised in the worker that loads the user's file, which tells of it",
    "StopRequestedError": "ends the step that waits for its groups; the training loop saves and stops",
    "RolloutStoreError": "is raised by reading rollouts, which marin_rl.view alone does",
}
"""What becomes of the others."""


def errors_of_the_package() -> dict[str, type[BaseException]]:
    found = {}
    for module in pkgutil.walk_packages(marin_rl.__path__, "marin_rl."):
        for name, kind in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if issubclass(kind, BaseException) and kind.__module__ == module.name:
                found[f"{module.name}.{name}"] = kind
    return found


def test_errors_whose_message_says_what_to_do_are_printed_as_one_line() -> None:
    found = errors_of_the_package()
    assert len(found) > 30
    printed = {name for name, kind in found.items() if issubclass(kind, USER_ERRORS)}
    assert {name.rpartition(".")[2] for name in found.keys() - printed} == set(INSIDE)
