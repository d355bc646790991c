# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import logging

import pytest

from marin_rl.utils.errors import RunDirectoryError
from marin_rl.utils.logs import log_to, warnings_to_stderr, without_message
from marin_rl.utils.remote_path import RemotePath
from tests.gcs_emulator import Fault, Gcs


def test_log_is_appended_and_closed(tmp_path):
    file = tmp_path / "log.txt"
    logger = logging.getLogger("marin_rl.somewhere")
    for message in ("first", "second"):
        with log_to(file):
            logger.info(message)
            logger.debug("not kept")
    logger.warning("after")
    lines = file.read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == [
        "INFO marin_rl.somewhere: first",
        "INFO marin_rl.somewhere: second",
    ]
    assert logging.getLogger("marin_rl").handlers == []


def test_modules_can_have_separate_levels(tmp_path):
    file = tmp_path / "log.txt"
    modules = {
        "marin_rl.rollouts": logging.DEBUG,
        "marin_rl.runs.rollout_store": logging.ERROR,
        "marin_rl.view": logging.ERROR,
    }
    names = ("marin_rl.rollouts.rollout_builder", "marin_rl.runs.rollout_store", "marin_rl.view", "marin_rl.somewhere")
    with log_to(file, logging.INFO, modules):
        for name in names:
            for level in (logging.DEBUG, logging.INFO, logging.ERROR):
                logging.getLogger(name).log(level, "said")
    kept = [line.split(" ", 2)[2].removesuffix(": said") for line in file.read_text().splitlines()]
    assert kept == [
        *(f"{level} marin_rl.rollouts.rollout_builder" for level in ("DEBUG", "INFO", "ERROR")),
        "ERROR marin_rl.runs.rollout_store",
        "ERROR marin_rl.view",
        *(f"{level} marin_rl.somewhere" for level in ("INFO", "ERROR")),
    ]
    # The former levels are restored.
    assert [logging.getLogger(name).level for name in ("marin_rl", *modules)] == [logging.NOTSET] * 4


def test_text_cannot_imitate_a_log_line(tmp_path, monkeypatch):
    # Pytest would send the record to another process, which cannot encode half of a surrogate pair.
    monkeypatch.setattr(logging.getLogger("marin_rl"), "propagate", False)
    file = tmp_path / "log.txt"
    with log_to(file):
        logging.getLogger("marin_rl.somewhere").warning(
            "task %s", "\x1b[31m1\n2026-01-01 INFO marin_rl: forged\r2\ud800"
        )
    [line, rest] = file.read_text(encoding="utf-8").splitlines()
    assert line.endswith(r"task \x1b[31m1")
    assert rest == r"    2026-01-01 INFO marin_rl: forged\r2\ud800"


def test_full_disk_of_the_log_is_reported_once_and_hides_no_error(tmp_path, monkeypatch, capfd):
    file = tmp_path / "log.txt"
    file.symlink_to("/dev/full")
    logger = logging.getLogger("marin_rl.somewhere")

    def run() -> None:
        with log_to(file):
            logger.error("first")
            logger.error("second")
            logger.error("%d", "no number")
            raise ValueError("the run's own")

    # Pytest's handler would raise the error of the invalid call.
    monkeypatch.setattr(logging.getLogger("marin_rl"), "propagate", False)
    with pytest.raises(ValueError, match="the run's own"):
        run()
    output, other = capfd.readouterr().err.split("--- Logging error ---")
    assert "TypeError" in other
    assert output.count("cannot be written") == 1
    assert f"warning: {file} cannot be written ([Errno 28] No space left on device); lines are miss" in output
    assert "Traceback" not in output
    assert logging.getLogger("marin_rl").handlers == []


def test_warnings_before_the_log_opens_are_formatted_on_stderr(tmp_path, monkeypatch, capfd):
    # Pytest's handlers receive the records too.
    monkeypatch.setattr(logging.getLogger("marin_rl"), "propagate", False)
    logger = logging.getLogger("marin_rl.somewhere")
    with warnings_to_stderr():
        logger.info("hidden")
        logger.warning("early \x1b[31m\nforged")
        with log_to(tmp_path / "log.txt"):
            logger.warning("in the file")
    first, second = capfd.readouterr().err.splitlines()
    assert first.endswith(r"WARNING marin_rl.somewhere: early \x1b[31m")
    assert second == "    forged"
    assert (tmp_path / "log.txt").read_text().splitlines()[0].endswith("WARNING marin_rl.somewhere: in the file")
    assert logging.getLogger("marin_rl").handlers == []


def test_log_that_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(RunDirectoryError, match=f"cannot write '{tmp_path}'"), log_to(tmp_path):
        pass


def test_log_in_an_object_store_continues_and_reports_a_failed_upload(gcs: Gcs, capsys) -> None:
    for text in ("first", "second", "lost"):
        with log_to(RemotePath("gs://bucket/run/log.txt")):
            logging.getLogger("marin_rl.x").info("%s", text)
            gcs.faults += [Fault("POST", 403)] if text == "lost" else []
    lines = gcs.read("run/log.txt").decode().splitlines()
    assert [line.partition(" INFO ")[2] for line in lines] == ["marin_rl.x: first", "marin_rl.x: second"]
    warning = "warning: gs://bucket/run/log.txt cannot be written (gs://bucket/run/log.txt: permission denied"
    assert capsys.readouterr().err.count(warning) == 1


def test_one_message_of_a_library_is_dropped_in_the_block_only(caplog):
    logger = logging.getLogger("library.module")
    with without_message("library.module", "We know"):
        logger.warning("We know %s", "this")
        logger.warning("This is new, and not what we know")
    logger.warning("We know this, later")
    assert caplog.messages == ["This is new, and not what we know", "We know this, later"]
