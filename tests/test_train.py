# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from marin_rl.train import main
from tests.tiny_run import TinyRun, contents

Capture = pytest.CaptureFixture[str]


def test_print_config_prints_all_defaults_and_nothing_else(new_run: Callable[..., TinyRun], capfd: Capture):
    run = new_run()
    assert run.train("--print_config", "--rollouts.group_size", "8") == 0
    config = yaml.safe_load(capfd.readouterr().out)
    assert (config["rollouts"]["group_size"], config["rollouts"]["max_seconds"]) == (8, 120.0)
    assert config["advantage"]["type"] == "rloo"
    assert not run.path.exists()


def test_print_config_prints_the_config_that_a_run_writes(finished_run: TinyRun, capfd: Capture):
    assert finished_run.train("--print_config") == 0
    written = (finished_run.path / "config.yaml").read_text()
    assert capfd.readouterr().out == written
    assert main(["--config", str(finished_run.path / "config.yaml"), "--print_config"]) == 0
    assert capfd.readouterr().out == written


def test_help_fits_a_screen_and_does_not_import_jax():
    script = (
        "import sys\n"
        "from marin_rl.train import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as ended:\n    print(ended.code, 'levanter' in sys.modules)\n"
    )
    finished = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    *lines, status = finished.stdout.splitlines()
    assert status == "0 False"
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    for name in ("--dry_run", "rollouts.group_size", "--help optimizer", "--help all", "off_policy_correction"):
        assert name in finished.stdout


@pytest.mark.medium
def test_training_starts_from_the_weights_of_a_finished_run(finished_run: TinyRun, new_run: Callable[..., TinyRun]):
    run = new_run(
        initialize_from=str(finished_run.path),
        model=None,
        warm_start={"max_steps": 0},
        num_steps=0,
        evaluation__every=0,
    )
    assert run.train() == 0
    before = contents(finished_run.path / "hf")["model.safetensors"]
    assert contents(run.path / "hf")["model.safetensors"] == before
    # The evaluation equals the last one of the finished run.
    last = {name: value for name, value in finished_run.records()[-1].items() if name.startswith("eval/")}
    assert run.records() == [{"step": 0, **last}]


def test_interrupt_before_the_first_update_exits_with_130(
    new_run: Callable[..., TinyRun], monkeypatch: pytest.MonkeyPatch, capfd: Capture
):
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("marin_rl.sessions.session.run_session", interrupted)
    assert new_run().train() == 130
    assert "run the same command again" in capfd.readouterr().err


def test_errors_are_escaped(new_run: Callable[..., TinyRun], monkeypatch: pytest.MonkeyPatch, capfd: Capture):
    def failed(*arguments: object, **options: object) -> None:
        raise ValueError("task \x1b[2J\nis wrong")

    monkeypatch.setattr("marin_rl.sessions.session.run_session", failed)
    assert new_run().train() == 1
    assert capfd.readouterr().err.startswith("error: task \\x1b[2J\nis wrong\n")
    assert main(["--x\x1b[2J", "3"]) == 1
    assert "\x1b" not in capfd.readouterr().err


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_early_warnings_have_the_format_of_the_log(
    new_run: Callable[..., TinyRun], monkeypatch: pytest.MonkeyPatch, capfd: Capture, command: str
):
    from marin_rl import evaluate

    def warn(*arguments: object, **options: bool) -> None:
        logging.getLogger("marin_rl.models").warning("key \x1b[2J is ignored")
        raise ValueError("stopped")

    # As in a process without pytest's handlers.
    monkeypatch.setattr(logging.getLogger("marin_rl"), "propagate", False)
    monkeypatch.setattr("marin_rl.sessions.session.run_session", warn)
    monkeypatch.setattr(evaluate, "run_evaluation", warn)
    assert (new_run().train() if command == "train" else evaluate.main(["--run", "r"])) == 1
    # The function of this test counts as the user's code, whose frames follow.
    warning, error, _ = capfd.readouterr().err.splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d [\d:,]+ WARNING marin_rl\.models: key \\x1b\[2J is ignored", warning)
    assert error == "error: stopped"


def test_internal_errors_keep_their_traceback(new_run: Callable[..., TinyRun], monkeypatch: pytest.MonkeyPatch):
    # A builtin has no frame, so no code of a user is on the way to the error.
    monkeypatch.setattr("marin_rl.sessions.session.run_session", divmod)
    with pytest.raises(TypeError, match="divmod"):
        new_run().train()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--config", "absent.yaml"], "config file 'absent.yaml' does not exist; "),
        (["--config", "broken.yaml"], "broken.yaml:2:1: not valid YAML"),
        (["--config", "present.yaml"], "unknown key enviroment; did you mean 'environment'?"),
        (["--num_step", "3"], "unknown key num_step; did you mean 'num_steps'?\n"),
        (["--confg", "present.yaml"], "unknown key confg; did you mean 'config'?"),
        ([], "no config; give its file with --config FILE"),
        (["--config"], "--config needs a value"),
    ],
)
def test_command_line_errors_are_reported_without_importing_levanter(
    arguments: list[str], problem: str, tmp_path: Path
):
    (tmp_path / "present.yaml").write_text("enviroment: {type: arithmetic}\n")
    (tmp_path / "broken.yaml").write_text("a: [\n")
    script = (
        "import sys\n"
        "from marin_rl.train import main\n"
        f"status = main({arguments!r})\n"
        "print(status, sorted({'levanter', 'haliax', 'transformers'} & set(sys.modules)))\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", script],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
    )
    assert finished.stdout == "1 []\n", finished.stderr
    assert problem in finished.stderr
