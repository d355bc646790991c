# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import glob
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from marin_rl.runs.stored_rollout import as_table
from marin_rl.types import Observation, RewardResult, RolloutGroup, Task, TurnReward
from marin_rl.utils.output import escape, escape_line
from marin_rl.view import main
from tests.rollouts.rollout_cases import group_of, piece, rollout_of, turn_of, write
from tests.runs.viewer.run_cases import empty_run, small_run


@pytest.fixture
def run(tmp_path):
    return str(small_run(tmp_path / "run"))


def view(capsys, *argv):
    status = main(argv)
    captured = capsys.readouterr()
    assert (status, captured.err) == (0, "")
    return captured.out


def test_list_shows_the_newest_step(run, capsys):
    out = view(capsys, run)
    assert "3 rollouts" in out
    header, _, line, failed = (line.split() for line in out.splitlines()[:4])
    assert header == [
        *("id", "reward", "prompt", "answer", "reply", "reason"),
        *("correct", "style", "turns", "tokens", "advantage", "status", "not", "trained"),
    ]
    assert line[:6] == ["g-0", "1.5", "2+3", "—", "naïve?", "5"]
    assert failed[:5] == ["g-1", "–", "5", "failed:", "ValueError:"]
    assert "the same in all: step 3, environment sums" in out
    assert f"one in full: python -m marin_rl.view {run} --id g-0\n" in out
    assert "s2-0" not in out


def test_command_of_the_list_shows_the_rollout(tmp_path, capsys):
    run = empty_run(tmp_path / "a run")
    for step in (1, 2):
        write(run / "rollouts", step, [group_of("held", 1.0)], purpose="evaluation")
    out = view(capsys, str(run), "--evaluation", "--step", "1")
    command = shlex.split(next(line for line in out.splitlines() if line.startswith("one in full: ")))
    shown = view(capsys, *command[command.index("marin_rl.view") + 1 :])
    assert "held-0" in shown
    assert re.search(r"step +1\s", shown)


def test_groups_with_different_rewards_are_listed_first(tmp_path, capsys):
    run = empty_run(tmp_path / "run")
    groups = [group_of("a", 0.0, 0.0), group_of("b", 0.0, None), group_of("c", 1.0, 0.0, None), group_of("d", 1.0, 1.0)]
    write(run / "rollouts", 1, groups)

    def listed(*options: str) -> list[str]:
        return re.findall(r"^([abcd]-\d)", view(capsys, str(run), *options), re.MULTILINE)

    assert listed() == ["c-0", "c-1", "c-2", "a-0", "a-1", "b-0", "b-1", "d-0", "d-1"]
    # The group of a rollout has different rewards, even if the filter leaves one of them.
    assert listed("--max_reward", "0", "--limit", "2") == ["c-1", "a-0"]
    order = "first those of groups with different rewards"
    assert f"9 rollouts, {order}\n" in view(capsys, str(run))


def test_page_that_leaves_rollouts_out_says_so_on_the_console(run, tmp_path, capsys):
    page = str(tmp_path / "page.html")
    assert "The page contains" not in view(capsys, run, "--html", page)
    out = view(capsys, run, "--html", page, "--limit", "3")
    assert f"{page}: 3 rollouts\nThe page contains 3 of 7 rollouts of these steps" in out
    assert "raise --limit" in out


def test_filters_and_limit(run, capsys):
    out = view(capsys, run, "--step", "1-3", "--min_reward", "0.5", "--limit", "2")
    assert "2 of 3 rollouts" in out
    assert "held-0" in view(capsys, run, "--evaluation", "--environment", "sums")
    out = view(capsys, run, "--step", "1", "--status", "failed", "--max_reward", "1")
    assert out.strip() == "0 rollouts match the filters"


def test_one_rollout_in_full(run, capsys):
    out = view(capsys, run, "--id", "g-0", "--tokens")
    for text in (
        *("2+3 — naïve?", "wrong, try again", "equal to the answer", "TimeoutError: 3 s", "half \\u2028 right"),
        *("action", "step return 1.2", "step advantage -0.5", "episode advantage 0.25", "\\xc3", "<|end|>"),
        *("policy−learner", "0.125", "retries 1", "answer"),
    ):
        assert text in out, text
    assert "policy−learner" not in view(capsys, run, "--id", "g-0")


def test_single_file_is_accepted(tmp_path, capsys):
    write(tmp_path, 7, [group_of("g", 1.0, 0.0)])
    file = tmp_path / "rollouts.parquet"
    (tmp_path / "step-00000007.parquet").rename(file)
    listed = view(capsys, str(file))
    assert "g-0" in listed
    assert "2 rollouts" in listed
    assert "1 rollouts" in view(capsys, str(file), "--min_reward", "1")
    assert "wrong" not in view(capsys, str(file), "--id", "g-0", "--tokens")
    page = tmp_path / "page.html"
    assert "2 rollouts" in view(capsys, str(file), "--html", str(page))
    assert '"run":"rollouts.' in page.read_text(encoding="utf-8")


CONTROLS = {
    "colour": "\x1b[31m",
    "cursor": "\x1b[2J\x1b[1;1H",
    "title": "\x1b]0;title\x07",
    "link": "\x1b]8;;https://x\x1b\\here\x1b]8;;\x1b\\",
    "clipboard": "\x1b]52;c;AAAA\x07",
    "device": "\x1bP+q544e\x1b\\\x1b[6n\x1b[>c",
    "8 bits": "\x9b31m\x9d52;c;AA\x9c\x90q\x9c\x85",
    "overwriting": "wrong\rright\b\b\x7f\x0b\x0c",
    "bidirectional": "\u202eabc\u202c\u2066d\u2069\u200f\u061c",
    "invisible": "a\u200b\u2060\ufeff\u00ad\U000e0041",
    "separators": "a\u2028b\u2029c\x1c\x1d\x1e",
    "markup": "[red]red[/red][link=https://x]y[/link]:smile:[/]",
    "zero": "a\x00b",
    "not a character": "\ufffe\U0010ffff\ue000",
}


@pytest.mark.medium
@pytest.mark.parametrize("kind", CONTROLS)
def test_no_text_of_a_run_controls_the_terminal(kind: str, tmp_path, capsys):
    """Every text of a rollout, the names of the folder and of the page, and errors."""
    evil = CONTROLS[kind]
    name = evil.replace("/", "").replace("\x00", "")
    run = empty_run(tmp_path / f"run{name}")
    task = Task(evil, evil, ({"role": "user", "content": evil},), evil)
    reply = {"role": "assistant", "content": evil}
    turn = dataclasses.replace(
        turn_of(evil, evil, action=evil, anchor_state=evil, rewards={evil: 1.0, "other": 1.0}, info={evil: [evil]}),
        messages=({"role": evil, "content": evil, "tools_in_words": evil}, reply),
    )
    result = RewardResult(evil, 1.0, 1.0, (TurnReward(0, 1.0, evil, {evil: 1.0}),), {evil: 1.0}, evil)
    rollout = dataclasses.replace(
        rollout_of("r", turns=(turn, turn), evaluations=(result,), rewards={evil: 1.0}, metrics={evil: 1.0}),
        task=task,
        info={evil: evil},
        seconds={evil: 1.0},
        last_observation=Observation(({"role": evil, "content": evil},), (65,)),
    )
    lost = dataclasses.replace(rollout_of("lost", reward=None, error=evil), task=task)
    page = str(tmp_path / f"page{name}.html")
    printed = [view(capsys, str(run))]
    write(run / "rollouts", 1, [RolloutGroup("g", [rollout, lost])])
    for options in ([], ["--id", "r", "--tokens"], ["--id", "lost"], ["--html", page]):
        printed.append(view(capsys, str(run), *options))
    for options in (["--id", evil], ["--environment", evil, "--step", "7"], ["--status", evil], [f"--{evil}"]):
        main([str(run), *options])
        printed.extend(capsys.readouterr())
    for text in printed:
        assert text == escape(text)
    assert all(escape_line(evil).replace(" ", "") in re.sub(r"\s", "", text) for text in printed[2:4])


def test_texts_of_an_edited_file_are_escaped(tmp_path, capsys):
    file = tmp_path / "edited.parquet"
    table = as_table([rollout_of("g-0")], 1, "training", {}, piece)
    [row] = table.to_pylist()
    row["turns"][0]["stop_reason"] = "\x1b[2J"
    row["turns"][0]["messages"][0]["content"] = None
    edited = pa.Table.from_pylist([row], schema=table.schema)
    pq.write_table(edited, file)
    assert "stop: \\x1b[2J" in view(capsys, str(file), "--id", "g-0")
    view(capsys, str(file), "--html", str(tmp_path / "page.html"))
    assert r"\\x1b[2J" in (tmp_path / "page.html").read_text(encoding="utf-8")
    pq.write_table(edited.replace_schema_metadata({b"marin_rl.rollouts.version": "\x1b[2J"}), file)
    assert main([str(file)]) == 1
    assert "its schema version is \\x1b[2J, this" in capsys.readouterr().err


def test_empty_run_explains_missing_rollouts(tmp_path, capsys):
    run = empty_run(tmp_path / "run")
    assert "has no stored rollouts yet: its first step has not finished" in view(capsys, str(run))
    assert "has no stored evaluation rollouts yet" in view(capsys, str(run), "--evaluation")


@pytest.mark.parametrize("more", [[], ["--id", "x"], ["--step", "1"], ["--html", "page.html"]])
@pytest.mark.parametrize(("key", "kind"), [("data", "sft"), ("preferences", "dpo")])
def test_run_on_data_names_the_files_with_its_metrics(tmp_path, capsys, key, kind, more):
    run = empty_run(tmp_path / "run")
    (run / "config.yaml").write_text(f"seed: 0\n{key}: {{path: rows.jsonl}}\n")
    assert main([str(run), *more]) == 1
    assert capsys.readouterr().err == (
        f"error: '{run}' is a run of marin_rl.{kind}, which trains on data and stores no rollouts; see its "
        "metrics.jsonl or curves.png\n"
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["{tmp}"], "is not a run directory: it has no config.yaml"),
        (["{tmp}/nowhere"], "is not a run directory: it does not exist"),
        (["gss://bucket/run"], "RUN is 'gss://bucket/run', but the protocol gss:// is unknown"),
        (["{run}/config.yaml"], "is neither a run directory nor a file of rollouts"),
        (["{run}", "--id", "x"], "no stored rollout has the id 'x'"),
        (["{run}", "--step", "abc"], "'abc' is not a range of steps; write 12, 10-20"),
        (["{run}", "--step", "99"], "the selected steps have no stored rollouts of training; steps "),
        (["{run}", "{run}"], "/run' is given twice; give each run once"),
        (["{run}", "{run}/rollouts/step-00000003.parquet"], "is not a run directory"),
        (["{run}", "--limit", "0"], "--limit: must be a whole number of at least 1, got '0'; see --help"),
        (["{run}", "--stpe", "3"], "unrecognized arguments: --stpe 3; see --help"),
        (["{run}", "--status", "odd"], "--status: invalid choice: 'odd' (choose from 'completed', 'truncated', "),
    ],
)
def test_errors_are_one_line(run, tmp_path, capsys, argv, message):
    assert main([part.format(tmp=tmp_path, run=run) for part in argv]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", ["run/config.yaml", "run/curves.png", "notes.html", "link.html"])
def test_a_page_replaces_only_a_page(run, name, tmp_path, capsys):
    other = str(empty_run(tmp_path / "other"))
    (tmp_path / "run" / "checkpoints").mkdir()
    (tmp_path / "notes.html").write_text("<!DOCTYPE html>")
    (tmp_path / "link.html").symlink_to("absent")
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for runs in ([run], [run, other]):
        assert main([*runs, "--html", str(tmp_path / name)]) == 1
        assert f"--html is '{tmp_path / name}', " in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files
    page = tmp_path / "run" / "page.html"
    view(capsys, run, "--html", str(page))
    before = page.read_bytes()
    view(capsys, run, other, "--html", str(page))
    assert page.read_bytes() != before


def shown_commands():
    page = (Path(__file__).parents[1] / "docs" / "pages" / "viewing.md").read_text(encoding="utf-8")
    return re.findall(r"^python -m marin_rl\.view ([^#\n]*)", page, re.MULTILINE)


@pytest.mark.parametrize("command", shown_commands())
def test_commands_of_the_docs_page_work(command, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # More runs than a command needs, because the shell replaces `*` by their names.
    others = ("rloo-seed1", "rloo-seed2", "grpo-seed1", "grpo-seed2", "a", "b", "c")
    run, *_ = (empty_run(tmp_path / "runs" / name) for name in ("rloo", *others))
    group = [rollout_of(f"train-12-0-{index}", "train-12-0") for index in range(5)]
    write(run / "rollouts", 12, [RolloutGroup("train-12-0", group)])
    write(run / "rollouts", 12, [RolloutGroup("train-12-0", group)], purpose="evaluation")
    words = shlex.split(command)
    assert view(capsys, *(name for word in words for name in (sorted(glob.glob(word)) if "*" in word else [word])))


def test_view_does_not_import_jax_or_transformers(run, tmp_path):
    other = str(empty_run(tmp_path / "other"))
    code = (
        "import sys; from marin_rl.view import main; status = main(sys.argv[1:2]) + main(sys.argv[1:]); "
        "print(status, sorted({'jax', 'levanter', 'transformers', 'haliax'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, run, other], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("0 []\n")
