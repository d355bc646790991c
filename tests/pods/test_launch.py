# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Command line of `marin_rl.launch`: usage, commands and actions."""

import pytest

from marin_rl.launch import main
from marin_rl.pods.launch import ACTIONS

POD = ["--tpu_name", "pod", "--zone", "us-east5-a", "--slices.tpu_type", "v5p-16"]


@pytest.mark.parametrize(("argv", "status"), [([], 1), (["--help"], 0), (["-h"], 0)])
def test_usage(argv: list[str], status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == status
    output = capsys.readouterr().out
    assert all(f"\n  {name} " in output for name in ("local", "tpu", *ACTIONS))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["lokal"], "unknown command 'lokal'; did you mean 'local'?"),
        (["tpu"], "unknown action '' of tpu; Valid here: start, status, logs, stop, delete"),
        (["tpu", "starts"], "unknown action 'starts' of tpu; did you mean 'start'"),
        (["tpu", "status", "--autodelete", *POD], "--autodelete needs a value"),
        (["tpu", "start", *POD, "--config", "experiments/rloo.yaml"], "no training arguments; give those of marin_rl."),
        (["tpu", "start", *POD, "--", "--seed", "1", "--dry_run"], "--dry_run is a flag of the launch, but comes af"),
        (["tpu", "stop", *POD, "--", "--seed", "1"], "stop takes no training arguments; remove -- and what follows"),
        (["local", "--config", "a.yaml"], "no training arguments; give those of marin_rl.train after --"),
        (["local", "--", "--config", "absent.yaml"], "config file 'absent.yaml' does not exist"),
        (["local", "--num_processes", "0", "--", "--seed", "1"], "num_processes is 0; it must be at least 1"),
    ],
)
def test_mistakes(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


@pytest.mark.parametrize(
    ("argv", "key"),
    [
        (["local", "--help"], "num_processes (an integer of at least 1; default: 2)"),
        (["tpu", "--help"], "--autodelete"),
        (["tpu", "logs", "--help"], "--follow"),
        (["tpu", "start", "--help", "code"], "code.secrets"),
    ],
)
def test_help(argv: list[str], key: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(argv)
    assert raised.value.code == 0
    assert key in capsys.readouterr().out
