# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A complete training run of a few seconds, and functions that compare its results.

The policy is hardly larger than its vocabulary, but the task is easy: after a warm start on numbers, a reply is correct
if it contains a 1. So rewards differ within groups, and every update changes the weights and the accuracy.
"""

import contextlib
import copy
import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

# Jaxtyping's import hook recompiles modules that are first imported by a module that it checks, slowly and with
# warnings. So the imports of marin_rl come first.
import levanter.compat.hf_checkpoints
import levanter.inference.engine
import levanter.trainer  # noqa: F401
import matplotlib.figure  # noqa: F401
import pytest
import yaml

TINY: dict[str, Any] = {
    "seed": 3,
    "environment": {
        "type": "jsonl",
        "name": "ones",
        "reply_regex": "(1)",
        "held_out": 0.3,
        "validation": 0.2,
        "format": {"regex": "[0-9]+", "weight": 0.25},
    },
    "model": {
        "type": "llama",
        "seq_len": 16,
        "hidden_dim": 16,
        "intermediate_dim": 32,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 2,
        "initializer_range": 0.3,
        "gradient_checkpointing": False,
        "attn_backend": "VANILLA",
    },
    "num_steps": 6,
    "rollouts": {"prompts_per_step": 4, "group_size": 4, "max_length": 12},
    "sampling": {"max_new_tokens": 3, "max_seqs": 16},
    "warm_start": {
        "max_steps": 30,
        "batch_size": 8,
        "learning_rate": 1e-2,
        "target_accuracy": 1.0,
        "check_every": 10,
        "check_tasks": 4,
    },
    "evaluation": {"every": 3, "tasks": 16, "samples": 2, "pass_at": [1, 2]},
    "checkpoint": {"every": 2},
    "optimizer": {
        "type": "adam",
        "learning_rate": 5e-3,
        "lr_schedule": "constant",
        "warmup": 0,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
    },
    "trainer": {"jax_compilation_cache_dir": os.environ.get("JAX_COMPILATION_CACHE_DIR")},
}
"""The config as in a YAML file, without `run_dir` and `environment.path`."""

MIXTURE: dict[str, Any] = {
    "model": {**TINY["model"], "type": "mixtral", "n_routed_experts": 4, "num_experts_per_tok": 2},
    "routing_replay": "rollout",
    "rollout_store": {"experts": True},
}
"""A mixture of experts; the experts that sampled every token are stored."""

PROBLEMS = [
    {"prompt": f"{a}x{b}", "answer": "1", "worked_answer": str(a * b)} for a in range(2, 10) for b in range(2, 10)
]
"""Problems for training and evaluation of the tiny run."""

TIMINGS = re.compile(r"eps|mfu|seconds/.*|tokens/(.*_)?per_second")
"""Names of the metrics that differ between equal runs."""


def changed(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a config and set some dotted keys."""
    result = copy.deepcopy(dict(values))
    for name, value in changes.items():
        *sections, leaf = name.split(".")
        place = result
        for section in sections:
            place = place.setdefault(section, {})
        place[leaf] = value
    return result


@dataclasses.dataclass(frozen=True)
class TinyRun:
    """A run directory and its command."""

    path: Path
    """The run directory."""
    config: Path
    """The YAML file."""

    @property
    def argv(self) -> list[str]:
        return ["--config", str(self.config)]

    def train(self, *more: str, curves: bool = False) -> int:
        """Run the command in this process."""
        from marin_rl.train import main

        with in_this_process(curves=curves):
            return main([*self.argv, *more])

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps of all complete checkpoints."""
        return sorted(int(path.name.removeprefix("step-")) for path in self.checkpoints.glob("step-*"))

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]


@contextlib.contextmanager
def in_this_process(*, curves: bool = False) -> Iterator[None]:
    """Train in this process without what takes longer than the steps of a tiny run.

    Runs with equal settings share a learner, and so its compiled programs. Plots are drawn only if `curves` is true.
    """
    # Imported late, because pytest imports this file before it installs jaxtyping's import hook.
    from marin_rl.parts import rl, supervised
    from marin_rl.training import loop, supervised_updates

    with contextlib.ExitStack() as patches:
        for module in (rl, supervised):
            patches.enter_context(mock.patch.object(module, "Learner", _learner))
        for module in (loop, supervised_updates):
            # They would visit the objects of all tests so far, at every tenth step.
            patches.enter_context(mock.patch.object(module, "collect_garbage"))
        if not curves:
            patches.enter_context(mock.patch("marin_rl.runs.curves.plot_curves"))
        yield


_learners: dict[str, Any] = {}


def _learner(trainer: Any, optimizer: Any, *more: Any, **sizes: Any) -> Any:
    """Return the learner of an earlier run in this process with the same settings, or build one."""
    from marin_rl.learner.train_step import Learner

    if sizes.get("frozen") is not None:
        return Learner(trainer, optimizer, *more, **sizes)
    settings = trainer, optimizer, more, sizes
    if (optimizer.lr_schedule, optimizer.warmup) == ("constant", 0):
        # Then the number of updates has no effect.
        settings = *settings[:-1], {**sizes, "num_updates": None}
    key = repr(settings)
    if key not in _learners:
        _learners[key] = Learner(trainer, optimizer, *more, **sizes)
    return _learners[key]


def make_run(folder: Path, **changes: Any) -> TinyRun:
    """Create a run that has not started.

    Args:
        folder: an existing folder.
        changes: config values by dotted key, with `__` for dots.

    Returns:
        The run.
    """
    problems = folder / "problems.jsonl"
    problems.write_text("".join(f"{json.dumps(problem)}\n" for problem in PROBLEMS))
    run = TinyRun(folder / "run", folder / "tiny.yaml")
    settings = {name.replace("__", "."): value for name, value in changes.items()}
    config = changed(TINY, {"run_dir": str(run.path), "environment.path": str(problems), **settings})
    run.config.write_text(yaml.safe_dump(config, sort_keys=False))
    return run


def set_num_steps(run: TinyRun, steps: int) -> None:
    """Change `num_steps` of a run that has started."""
    for file in (run.config, run.path / "config.yaml"):
        file.write_text(re.sub(r"(?m)^num_steps: .*$", f"num_steps: {steps}", file.read_text()))


def copy_of(run: TinyRun, folder: Path) -> TinyRun:
    """Copy a run to another folder; its config.yaml contains the new path."""
    folder.mkdir(exist_ok=True)
    copied = TinyRun(folder / "run", folder / "tiny.yaml")
    shutil.copytree(run.path, copied.path)
    for config in (run.config, run.path / "config.yaml"):
        target = copied.config if config == run.config else copied.path / "config.yaml"
        target.write_text(config.read_text().replace(str(run.path), str(copied.path)))
    return copied


def interrupted_after(run: TinyRun, step: int, folder: Path) -> TinyRun:
    """Copy a run in the state of a process that died right after it saved update `step`."""
    copied = copy_of(run, folder)
    shutil.rmtree(copied.path / "hf")
    for later in copied.steps():
        if later > step:
            shutil.rmtree(copied.checkpoint(later))
    lines = (copied.path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copied.path / "metrics.jsonl").write_text("".join(lines[: step + 1]))
    return copied


def without_timings(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if not TIMINGS.fullmatch(name)}


def without_losses(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics of `marin_rl.evaluate` without the loss on reference answers, which a training run does not measure."""
    losses = [name for name in metrics if name.startswith("eval/") and name.endswith(("/loss", "/loss_tokens"))]
    assert losses
    return {name: value for name, value in metrics.items() if name not in losses}


def outcome(run: TinyRun) -> dict[str, Any]:
    """Results of a run that must not depend on interruptions."""
    newest = run.checkpoint(run.steps()[-1])
    manifest = json.loads((newest / "manifest.json").read_text())
    files = manifest["files"]
    return {
        "records": [without_timings(record) for record in run.records()],
        "steps": run.steps(),
        "progress": manifest["progress"],
        "state": {
            name: [array, *(files[file] for file in sorted(files) if file.startswith(f"{array['prefix']}-"))]
            for name, array in manifest["arrays"].items()
        },
        # The checksums of files depend on timings.
        "other files": {
            name: files[name] for name in files if not name.startswith("state/") and name != "run_files.json"
        },
        "rollouts": stored(run.path / "rollouts"),
        "hf": {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted((run.path / "hf").iterdir())
        },
    }


def stored(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The rows of all rollout files without timings; fails if the folder has other files."""
    from marin_rl.runs.rollout_store import list_files, read_file

    files = list_files(folder)
    present = folder.iterdir() if folder.exists() else ()
    assert sorted(path.name for path in present) == sorted(file.path.name for file in files)
    tables = {file.path.name: read_file(file.path) for file in files}
    return {name: table.drop_columns("seconds").to_pylist() for name, table in tables.items() if table is not None}


def contents(folder: Path) -> dict[str, bytes]:
    """Contents of all files of a folder, by path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """An uninterrupted run that keeps all checkpoints. Tests must not change it."""
    run = make_run(tmp_path_factory.mktemp("finished"), checkpoint__keep_every=1, checkpoint__every=1)
    assert run.train(curves=True) == 0
    return run


@pytest.fixture
def new_run(tmp_path: Path) -> Callable[..., TinyRun]:
    """Creates runs that have not started; config changes have `__` for dots."""
    count = 0

    def make(**changes: Any) -> TinyRun:
        nonlocal count
        count += 1
        folder = tmp_path / f"tiny{count}"
        folder.mkdir()
        return make_run(folder, **changes)

    return make
