# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The loops to copy and the commands on small models; a program, because the tests compile other programs.

    python -m tests.experiments.loop_cases FOLDER RUN

RUN is a finished run. Prints, by loop, what it printed, and the records of the command with the same settings; then
what the loop prints with each change of `docs/pages/change_the_algorithm.md`, by heading.
"""

import contextlib
import io
import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.tiny_run import TinyRun, make_run
from tests.training.test_preference_run import make_run as make_dpo_run
from tests.training.test_preference_run import train as train_dpo
from tests.training.test_supervised_run import make as make_sft_run

ROOT = Path(__file__).parents[2]
STEPS = 5
SIZES = {"prompts": 4, "group_size": 4, "max_length": 12, "max_new_tokens": 3}
"""Sizes of the tiny run."""


def output_of(function: Callable[..., object], *arguments: Any, **more: Any) -> str:
    """What a function prints."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        function(*arguments, **more)
    return output.getvalue()


def config_of(run: TinyRun) -> Any:
    """The config of a run that has started."""
    from marin_rl.runs.run_directory import RunDirectory
    from marin_rl.sessions.earlier_run import read_config

    return read_config(RunDirectory(run.path))


def rl(folder: Path, start: str) -> str:
    from experiments import loop

    started = {"initialize_from": start, "warm_start__max_steps": 0, "model": None}
    run = make_run(folder, seed=loop.SEED, num_steps=STEPS, evaluation={"greedy": True}, **started)
    output_of(run.train)
    config = config_of(run)
    return output_of(loop.main, start, config.environment, config.optimizer, num_steps=STEPS, **SIZES)


def sft(folder: Path, start: str) -> str:
    from experiments import sft_loop

    run = make_sft_run(folder, seed=0)
    output_of(run.train)
    config = config_of(run)
    sizes = {"batch_size": config.batch.size, "max_length": config.batch.max_length}
    return output_of(sft_loop.main, config.model, config.data, config.optimizer, epochs=config.epochs, **sizes)


def dpo(folder: Path, start: str) -> str:
    from experiments import dpo_loop

    run = make_dpo_run(folder, initialize_from=start, model=None, num_steps=STEPS, loss={"beta": dpo_loop.BETA}, seed=0)
    output_of(train_dpo, run)
    config = config_of(run)
    sizes = {"batch_size": config.batch.size, "max_length": config.batch.max_length}
    return output_of(dpo_loop.main, start, config.preferences, config.optimizer, epochs=2, **sizes)


def changed_loops() -> dict[str, str]:
    """The text of the loop with the changes of each section of the page, by heading."""
    page = (ROOT / "docs" / "pages" / "change_the_algorithm.md").read_text(encoding="utf-8")
    changed = {}
    for section in page.split("\n## ")[1:]:
        text = (ROOT / "experiments" / "loop.py").read_text(encoding="utf-8")
        for change in re.findall(r"```diff\n(.*?)```", section, re.DOTALL):
            lines = change.splitlines(keepends=True)
            before = "".join(line[1:] for line in lines if line[0] != "+")
            assert text.count(before) == 1, f"the loop has not these lines once:\n{before}"
            text = text.replace(before, "".join(line[1:] for line in lines if line[0] != "-"))
        changed[section.splitlines()[0]] = text
    return changed


def run_changed(folder: Path, text: str, start: str) -> str:
    (folder / "my_loop.py").write_text(text, encoding="utf-8")
    config = config_of(TinyRun(Path(start), folder))
    main = runpy.run_path(str(folder / "my_loop.py"))["main"]
    return output_of(main, start, config.environment, config.optimizer, num_steps=2, **SIZES)


if __name__ == "__main__":
    results: dict[str, Any] = {}
    for case in (rl, sft, dpo):
        folder = Path(sys.argv[1]) / case.__name__
        folder.mkdir()
        printed = case(folder, sys.argv[2])
        records = (folder / "run" / "metrics.jsonl").read_text().splitlines()
        results[case.__name__] = {"printed": printed, "records": [json.loads(record) for record in records]}
    changes = {title: run_changed(Path(sys.argv[1]), text, sys.argv[2]) for title, text in changed_loops().items()}
    print(json.dumps({**results, "changes": changes}))
