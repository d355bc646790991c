# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Launch training on Cloud TPU, or in several processes of this machine: `python -m marin_rl.launch --help`."""

import shlex
import sys
import time
from collections.abc import Callable, Sequence

from marin_rl.config.command_line import RESUME_FLAGS, check_command_line, parse_config, run_command
from marin_rl.config.section_types import ConfigError
from marin_rl.errors import USER_ERRORS, nearest
from marin_rl.escaping import escape
from marin_rl.launch.gcloud import check_login, check_tpu_types, check_writable
from marin_rl.launch.jobs import Launch
from marin_rl.launch.local import LocalConfig, run_together, training_processes
from marin_rl.launch.supervise import SupervisorConfig, supervise
from marin_rl.launch.tpu import NO_ARGUMENTS, TpuConfig, open_launch, training_run
from marin_rl.output import go_on_without_output

USAGE = """\
usage: python -m marin_rl.launch COMMAND [ACTION] [--config FILE] [--KEY VALUE ...] [--help] [-- ARGUMENTS]

Commands:
  local       run N training processes on this machine, connected by jax.distributed
  tpu ACTION  train on one or several TPU slices
  ray ACTION  train on TPU slices, with rollout workers on further slices (rollout_slices)
  supervise   run the command in ARGUMENTS, and restart it after a failure

Actions of tpu and ray:
  start       request slices or reuse existing ones, install the code, start or resume the run, and follow it
              until it is complete; slices that are lost meanwhile are requested again
  status      print the state of slices and hosts
  logs        print the end of the logs
  stop        stop the run with a checkpoint; the slices remain
  delete      delete the slices

ARGUMENTS of local and start are those of python -m marin_rl.train, such as --config experiments/rloo.yaml.
COMMAND [ACTION] --help describes the keys of a command.
"""
DRY_RUN = {"dry_run": "Print every command and file, and stop."}
ACTIONS = {
    "start": {
        **DRY_RUN,
        "detach": "Return when the run has started. Nothing then requests slices again that are lost.",
        "autodelete": "Delete the slices when the run is complete or was stopped.",
    },
    "status": DRY_RUN,
    "logs": {**DRY_RUN, "follow": "Continue with new lines until this command is interrupted."},
    "stop": DRY_RUN,
    "delete": DRY_RUN,
}
"""Flags of each action."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name; None for the arguments of the process.

    Returns:
        Exit status: 0, 1 after an error, or 130 after an interrupt; of `local` and `supervise` that of the command.
    """
    return run_command(_run, argv)


def _run(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if arguments else 1
    command, *rest = arguments
    split = rest.index("--") if "--" in rest else len(rest)
    own, passed = rest[:split], rest[split + 1 :]
    commands: dict[str, Callable[[], int]] = {
        "local": lambda: _local(own, passed),
        "tpu": lambda: _tpu(command, own, passed),
        "ray": lambda: _tpu(command, own, passed),
        "supervise": lambda: _supervise(own, passed),
    }
    if command not in commands:
        raise ConfigError(f"unknown command {command!r}; {nearest(command, commands)}")
    return commands[command]()


def _local(own: Sequence[str], passed: Sequence[str]) -> int:
    if not passed and not {"-h", "--help"} & set(own):
        raise ConfigError(NO_ARGUMENTS)
    parsed = parse_config(LocalConfig, own, DRY_RUN)
    # Each process would report the same mistake.
    checked = check_command_line(passed, {"dry_run": "", "print_config": "", **RESUME_FLAGS})
    if pipes := [path for path in checked.config_paths if path.exists() and not path.is_file()]:
        raise ConfigError(f"--config is {str(pipes[0])!r}, a pipe, which only one process can read; give it a file")
    processes = training_processes(parsed.config, passed)
    if "dry_run" in parsed.flags:
        print(escape("\n".join(map(str, processes))))
        return 0
    go_on_without_output()
    return run_together(processes, parsed.config.stop_timeout, _write)


def _supervise(own: Sequence[str], passed: Sequence[str]) -> int:
    config = parse_config(SupervisorConfig, own).config
    if not passed:
        raise ConfigError("no command; give it after --, such as -- python -m marin_rl.train --config FILE")
    go_on_without_output()
    return supervise(config, passed, lambda text: _write(f"{time.strftime('%F %T')} [supervisor] {text}\n"))


def _tpu(command: str, own: Sequence[str], passed: Sequence[str]) -> int:
    action, *options = own or [""]
    if action in ("-h", "--help"):
        action, options = "start", ["--help", *options]
    if action not in ACTIONS:
        raise ConfigError(f"unknown action {action!r} of {command}; {nearest(action, ACTIONS)}")
    _check_division(action, options, passed)
    parsed = parse_config(TpuConfig, options, ACTIONS[action])
    config, flags = parsed.config, parsed.flags
    if config.rollout_slices is None and command == "ray":
        raise ConfigError("rollout_slices is missing; set it, such as {tpu_type: v5p-8}, or use `launch tpu`")
    if config.rollout_slices is not None and command == "tpu":
        raise ConfigError("rollout_slices is set, but `launch tpu` has none; use `launch ray`, or remove it")
    launch = open_launch(config, passed, _report, dry_run="dry_run" in flags)
    if action == "start":
        return _start(launch, config, command, options, passed, flags)
    if passed:
        raise ConfigError(f"{action} takes no training arguments; remove -- and what follows")
    if action == "logs":
        group = launch.groups[0]
        return group.hosts.logs(config.worker, config.log_lines, follow="follow" in flags)
    {"status": launch.show_status, "stop": launch.stop, "delete": launch.delete}[action]()
    return 0


def _check_division(action: str, options: Sequence[str], passed: Sequence[str]) -> None:
    """Check that training arguments are after `--`, and flags of the launch before it.

    The keys of one config would otherwise be reported as unknown keys of the other.
    """
    if action == "start" and not passed and not {"-h", "--help"} & set(options):
        raise ConfigError(NO_ARGUMENTS)
    if misplaced := [name for name in ACTIONS[action] if f"--{name}" in passed]:
        raise ConfigError(f"--{misplaced[0]} is a flag of the launch, but comes after --; write it before --")


def _start(
    launch: Launch,
    config: TpuConfig,
    command: str,
    options: Sequence[str],
    passed: Sequence[str],
    flags: frozenset[str],
) -> int:
    if {"detach", "autodelete"} <= flags:
        raise ConfigError("--autodelete waits for the end of the run, but --detach does not; remove one of them")
    run_dir = training_run(config, passed, _report)
    rollouts = config.rollout_slices
    check_login(launch.gcloud)
    check_tpu_types(launch.gcloud, [config.slices.tpu_type, *([] if rollouts is None else [rollouts.tpu_type])])
    if run_dir.startswith("gs://"):
        check_writable(launch.gcloud, run_dir)
    else:
        _report(f"run_dir {run_dir} is not in Cloud Storage, and is not checked before the request")
    if "dry_run" in flags:
        launch.dry_run()
        return 0
    own = [option for option in options if option not in {f"--{flag}" for flag in ACTIONS["start"]}]

    def same(action: str) -> str:
        return shlex.join(["python", "-m", "marin_rl.launch", command, action, *own])

    go_on_without_output()
    try:
        launch.run(detach="detach" in flags)
    except KeyboardInterrupt:
        if launch.groups[0].started:
            _report(f"interrupted; the run continues without it. Logs: `{same('logs')}`")
        else:
            _report("interrupted before it has started the run; run the same command again to continue")
        _name_existing(launch, same)
        return 130
    except USER_ERRORS:
        _name_existing(launch, same)
        raise
    if "autodelete" in flags:
        launch.delete()
    else:
        _name_existing(launch, same)
    return 0


def _name_existing(launch: Launch, same: Callable[[str], str]) -> None:
    if existing := launch.existing():
        _report(f"{', '.join(existing)} still exists, and its slices are billed; delete with `{same('delete')}`")


def _report(text: str) -> None:
    _write(f"{escape(text)}\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
