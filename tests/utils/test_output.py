# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.utils.output import escape, escape_line, shown_bytes

PROGRAM = """
import os, sys
from pathlib import Path
from marin_rl.config.command_line import run_command
from marin_rl.utils.settings.option_parser import HelpShown
from marin_rl.utils.output import go_on_without_output, report_lost_output

def command(argv):
    kind, file = argv
    if kind == "works":
        go_on_without_output()
    if kind == "help":
        sys.stdout.write("usage")
        raise HelpShown(0)
    if kind == "fails":
        raise ValueError("wrong argument")
    with open(file, "w") as other:
        for line in range(100_000):
            print("line", line)
        report_lost_output()
        other.write("finished")
    return 0

sys.exit(run_command(command, sys.argv[1:]))
"""

CLOSED, FULL, READ, SILENT = ">&-", "> /dev/full", "| head -1", "2>&-"
IS_CLOSED = "standard output cannot be written: it is closed"
IS_FULL = "standard output cannot be written: No space left on device"


def run(kind: str, redirection: str, file: Path, *options: str) -> tuple[int, str]:
    """Return the command's exit status and its standard error."""
    shell = f'("$@"; echo $? > {file}.status) {redirection}'
    command = [sys.executable, *options, "-c", PROGRAM, kind, str(file)]
    done = subprocess.run(["bash", "-c", shell, "bash", *command], capture_output=True, text=True, check=False)
    return int(file.with_suffix(".status").read_text()), done.stderr


@pytest.mark.parametrize(
    ("kind", "redirection", "status", "message"),
    [
        *(("prints", READ, 141, ""), ("prints", CLOSED, 1, f"error: {IS_CLOSED}"), ("prints", FULL, 1, IS_FULL)),
        *(("prints", f"{FULL} {SILENT}", 1, ""), ("prints", f"{CLOSED} 2> /dev/full", 1, "")),
        *(("help", "| (exec <&-)", 141, ""), ("help", CLOSED, 1, IS_CLOSED), ("help", FULL, 1, IS_FULL)),
        *(("help", "", 0, ""), ("fails", CLOSED, 1, "error: wrong argument"), ("fails", SILENT, 1, "")),
    ],
)
def test_command_that_only_prints_ends_like_a_unix_tool(tmp_path, kind, redirection, status, message):
    code, errors = run(kind, redirection, tmp_path / "file")
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors
    assert message in errors
    assert bool(errors) == bool(message)
    assert code == status
    assert not (tmp_path / "file").exists() or not (tmp_path / "file").read_text()


@pytest.mark.parametrize(
    ("redirection", "options"),
    [
        *((CLOSED, ()), (FULL, ("-u",)), (READ, ()), (READ, ("-u",))),
        *((f"{CLOSED} {SILENT} <&-", ()), (f"{FULL} 2> /dev/full", ()), ("2>&1 | head -1", ())),
    ],
)
def test_command_that_works_goes_on_and_writes_only_into_its_own_files(tmp_path, redirection, options):
    code, errors = run("works", redirection, tmp_path / "file", *options)
    assert code == 0
    # With a closed descriptor 1, the next file that a process opens would receive what it prints.
    assert (tmp_path / "file").read_text() == "finished"
    assert errors.count("the command goes on without it") == ("2>" not in redirection)


def test_output_that_cannot_be_encoded_is_escaped():
    program = (
        "import sys\nfrom marin_rl.config.command_line import run_command\n"
        "sys.exit(run_command(lambda argv: print('a\\u2192\\ud800'), []))"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "a\\u2192\\ud800\n", "")


@pytest.mark.medium
def test_slow_reader_of_a_non_blocking_pipe_receives_everything(tmp_path):
    # A page, which is smaller than the buffer that the command writes.
    program = f"import fcntl, os\nos.set_blocking(1, False)\nfcntl.fcntl(1, fcntl.F_SETPIPE_SZ, 4096)\n{PROGRAM}"
    command = [sys.executable, "-c", program, "prints", tmp_path / "file"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.count("\n"), done.stderr) == (0, 100_000, "")


@given(st.text(st.characters()), st.binary())
def test_escaped_text_has_no_control_characters(text, piece):
    assert all(character == "\n" or unicodedata.category(character)[0] != "C" for character in escape(text))
    assert "\n" not in escape_line(text) + shown_bytes(piece)
    escape(text).encode("utf-8")


@given(st.text(st.characters(categories=["L", "N", "P", "S", "Zs"])))
def test_visible_characters_are_unchanged(text):
    assert escape(text) == shown_bytes(text.encode()) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]8;;https://example.org\x1b\\here", "\\x1b]8;;https://example.org\\x1b\\here"),
        ("\x9b2J", "\\x9b2J"),
        ("a\u202eb\u2066c\u200bd", "a\\u202eb\\u2066c\\u200bd"),
        ("over\rwritten\b", "over\\rwritten\\x08"),
        ("line\u2028end", "line\\u2028end"),
    ],
)
def test_escape_sequences_are_escaped(text, shown):
    assert escape(text) == shown
