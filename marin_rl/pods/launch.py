# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The launches of training, from their command line: on this machine, and the actions for Cloud TPU."""

import functools
import shlex
from collections.abc import Iterable, Sequence

from marin_rl.config.command_line import parse_config
from marin_rl.pods.config import TpuConfig
from marin_rl.pods.gcloud import run_gcloud
from marin_rl.pods.local import LocalConfig, run_together, training_processes
from marin_rl.pods.preflight import check_training
from marin_rl.pods.tpu import LOG_LINES, Launch, open_launch
from marin_rl.sessions.command import TRAIN_FLAGS, check_command_line
from marin_rl.utils.errors import nearest
from marin_rl.utils.output import escape, go_on_without_output
from marin_rl.utils.settings.section_types import ConfigError

ACTIONS = {
    "start": {
        "dry_run": "Check the training arguments and the files to copy, print the requests, and stop.",
        "autodelete": "Delete the slices when the run is complete or was stopped.",
    },
    "status": {},
    "logs": {"follow": "Continue with new lines until this command is interrupted."},
    "stop": {},
    "delete": {},
}
"""Flags of each action of `tpu`."""
HELP = {"-h", "--help"}


def launch_local(own: Sequence[str], passed: Sequence[str]) -> int:
    """Train in processes of this machine; returns their exit status.

    `own` are the options of the launch, and `passed` those of the training.
    """
    _require_training(own, passed, ())
    config = parse_config(LocalConfig, own).config
    # Each process would report the same mistake.
    check_command_line(passed, TRAIN_FLAGS)
    commands, environment = training_processes(config, passed)
    go_on_without_output()
    return run_together(commands, environment, config.stop_timeout, functools.partial(print, end="", flush=True))


def launch_tpu(own: Sequence[str], passed: Sequence[str]) -> int:
    """Do an action for training on TPU slices; arguments and result as of `launch_local`."""
    action, *options = own or [""]
    if action in HELP:
        action, options = "start", ["--help", *options]
    if action not in ACTIONS:
        raise ConfigError(f"unknown action {action!r} of tpu; {nearest(action, ACTIONS)}")
    if action == "start":
        _require_training(options, passed, ACTIONS[action])
    elif passed:
        raise ConfigError(f"{action} takes no training arguments; remove -- and what follows")
    parsed = parse_config(TpuConfig, options, ACTIONS[action])
    launch = open_launch(parsed.config, passed, _report)
    if action == "start":
        return _start(launch, options, passed, parsed.flags)
    if action == "logs":
        return launch.groups[0].slices.logs(LOG_LINES, follow="follow" in parsed.flags)
    {"status": launch.show_status, "stop": launch.stop, "delete": launch.delete}[action]()
    return 0


def _require_training(own: Sequence[str], passed: Sequence[str], flags: Iterable[str]) -> None:
    """Check that training arguments are after `--`, and flags of the launch before it.

    The keys of one config would otherwise be reported as unknown keys of the other.
    """
    if not passed and not HELP & set(own):
        raise ConfigError("no training arguments; give those of marin_rl.train after --, such as -- --config FILE")
    if misplaced := [name for name in flags if f"--{name}" in passed]:
        raise ConfigError(f"--{misplaced[0]} is a flag of the launch, but comes after --; write it before --")


def _start(launch: Launch, options: Sequence[str], passed: Sequence[str], flags: frozenset[str]) -> int:
    run_dir = check_training(launch.config, passed, _report)
    if "dry_run" in flags:
        for group in launch.groups:
            create = shlex.join(["gcloud", *group.slices.create_arguments()])
            _report(f"the arguments and files are valid; the request would be `{create}`")
        return 0
    if run_dir.startswith("gs://"):
        run_gcloud("storage", "ls", "/".join(run_dir.split("/")[:3]), project=launch.config.project)
    else:
        _report(f"run_dir {run_dir} is not in Cloud Storage, and is not checked before the request")
    go_on_without_output()
    try:
        launch.run()
        if "autodelete" in flags:
            launch.delete()
        return 0
    except KeyboardInterrupt:
        state = "the run continues without it" if launch.groups[0].started else "the run has not started"
        _report(f"interrupted; {state}; the same command continues")
        return 130
    finally:
        if existing := [group.name for group in launch.groups if group.exists]:
            own = [option for option in options if option not in {f"--{flag}" for flag in ACTIONS["start"]}]
            delete = shlex.join(["python", "-m", "marin_rl.launch", "tpu", "delete", *own])
            _report(f"{', '.join(existing)} still exists, and its slices are billed; delete with `{delete}`")


def _report(text: str) -> None:
    print(escape(text), flush=True)
