# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""State of a run on the host, and digests of the files that it reads and has written; saved in every checkpoint.

Inputs are the files of [`input_files`][marin_rl.config.input_files]. Outputs are `metrics.jsonl` up to the step of the
checkpoint, and the files in `rollouts/`; a resume compares both.
"""

import contextlib
import dataclasses
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from levanter.trainer_state import TrainerState

from marin_rl.config.input_files import NAMED, Inputs, input_changes
from marin_rl.config.sections import ReplayConfig
from marin_rl.distributed.replay_buffer import ReplayBuffer
from marin_rl.distributed.scheduler import RolloutScheduler, StalenessLimits
from marin_rl.runs.checkpoint import Checkpoints
from marin_rl.runs.metrics_file import first_odd_line
from marin_rl.runs.saved_checkpoint import Checkpoint
from marin_rl.types import RolloutGroup, WeightVersion
from marin_rl.utils import multihost
from marin_rl.utils.errors import RunDirectoryError
from marin_rl.utils.host_status import StopRequestedError, software_versions
from marin_rl.utils.storage import FileDigest, StoragePath, digest_of, file_sizes

logger = logging.getLogger(__name__)

RUN_FILES = "run_files.json"
"""File of the digests in a checkpoint."""

_READERS = 16

NO_RECORDS = digest_of(b"")
"""Digest of the records of a new run."""


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """Files of a run at a step, and the software that ran it."""

    inputs: Inputs
    """Checksums of the inputs."""
    software: Mapping[str, str | None] = dataclasses.field(default_factory=software_versions)
    """Versions of packages."""
    metrics: FileDigest | None = NO_RECORDS
    """The records of the steps so far, with which `metrics.jsonl` begins; None if they are not known."""
    rollouts: Mapping[str, FileDigest] = dataclasses.field(default_factory=dict)
    """Rollout files by name."""
    accepted: Sequence[Mapping[str, Any]] = ()
    """Accepted changes: the checkpoint before them, and a line for each change."""

    def encode(self) -> bytes:
        """Serialize as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1).encode()

    @staticmethod
    def decode(data: bytes) -> "RunFiles":
        """Parse the result of `encode`."""
        values: dict[str, Any] = json.loads(data)
        rollouts = {name: FileDigest(*digest) for name, digest in values["rollouts"].items()}
        metrics = values["metrics"] and FileDigest(*values["metrics"])
        return RunFiles(values["inputs"], values["software"], metrics, rollouts, values["accepted"])


def compare_on_resume(
    saved: RunFiles, checkpoint: StoragePath, inputs: Inputs, *, accept: bool
) -> tuple[RunFiles, list[str]]:
    """Compare the files of a run with those at its checkpoint; call it in the main process.

    `saved` are the files at the checkpoint, `inputs` the checksums now. `accept` continues with changed files. Returns
    the files from which the run continues, and messages for the user.

    Raises:
        RunDirectoryError: if a file was changed and `accept` is false; the message names all changed files.
    """
    folder = checkpoint.parent.parent
    rollouts, altered, absent = _compare_rollouts(folder / "rollouts", saved.rollouts)
    records = metrics_change(folder / "metrics.jsonl", saved.metrics)
    changes = [*input_changes(saved.inputs, inputs), *([] if records is None else [records]), *altered]
    if changes and not accept:
        omitted = "" if records is None else ", without the lines of metrics.jsonl that are not records"
        raise RunDirectoryError(
            f"files of the run were changed since {checkpoint} was written:\n"
            + "\n".join(f"  {line}" for line in changes)
            + "\nrestore them, or choose another run_dir. --accept_changes resumes the run with the files as "
            f"they are{omitted}, and records the changes in log.txt and in all further checkpoints"
        )
    messages = [f"changed file accepted: {line}" for line in changes]
    if absent:
        messages.append(f"{len(absent)} rollout files of former steps were removed, the last is {absent[-1]}")
    software = software_versions()
    messages += [
        f"{name} is {software[name] or 'not installed'}, and was {saved.software.get(name) or 'not installed'}"
        for name in software
        if software[name] != saved.software.get(name)
    ]
    accepted = [*saved.accepted, *([{"checkpoint": checkpoint.name, "changes": changes}] if changes else [])]
    metrics = saved.metrics if records is None else None
    # A named file that was absent at the start may be an output, which would differ at every resume.
    named = {path: digest for path, digest in inputs.get(NAMED, {}).items() if path in saved.inputs.get(NAMED, {})}
    return RunFiles({**inputs, NAMED: named}, software, metrics, rollouts, accepted), messages


def metrics_change(path: StoragePath, saved: FileDigest | None) -> str | None:
    """Return how `metrics.jsonl` differs from the records up to a checkpoint, which later records may follow."""
    data = path.read_bytes() if path.exists() else b""
    if saved is None or digest_of(data[: saved.size]) == saved:
        return None
    if not data:
        return f"metrics.jsonl {'is empty' if path.exists() else 'is missing'}"
    line = first_odd_line(data[: saved.size])
    if line is None and len(data) < saved.size:
        return f"metrics.jsonl was cut off: it has {len(data)} of {saved.size} bytes"
    return f"metrics.jsonl was changed{'' if line is None else f', at line {line}'}"


def _compare_rollouts(
    folder: StoragePath, saved: Mapping[str, FileDigest]
) -> tuple[dict[str, FileDigest], list[str], list[str]]:
    """Return the unchanged files, a line for each changed one, and the names of removed ones."""
    sizes = file_sizes(folder)
    present = [name for name in sorted(saved) if name in sizes]
    with ThreadPoolExecutor(_READERS) as readers:
        same = [name for name in present if sizes[name] == saved[name].size]
        found = dict(zip(same, readers.map(lambda name: digest_of(folder / name), same), strict=True))
    unchanged = {name: saved[name] for name in present if found.get(name) == saved[name]}
    lines = [
        f"rollouts/{name} was changed"
        + ("" if name in found else f": it has {sizes[name]} of {saved[name].size} bytes")
        for name in present
        if name not in unchanged
    ]
    # Not an error: old files are removed for rollout_store.max_mb, and users may delete them.
    return unchanged, lines, [name for name in sorted(saved) if name not in sizes]


def warn_of_changed_inputs(checkpoint: Checkpoint, inputs: Inputs) -> None:
    """Log a warning for each input of a run that differs from that of its checkpoint.

    `inputs` are the checksums now, of the sections that the command reads.
    """
    saved = RunFiles.decode(checkpoint.read(RUN_FILES)).inputs
    before = {section: files for section, files in saved.items() if section in inputs}
    for line in input_changes(before, inputs):
        logger.warning("%s since %s was written; the results are those of the file as it is now", line, checkpoint.path)


REPLAY = "replay.bin"
"""File of the replay buffer in a checkpoint."""


@dataclasses.dataclass
class Progress:
    """Counters and small state of a run, saved as JSON in every checkpoint."""

    step: int = 0
    """Completed steps."""
    updates: int = 0
    """Completed weight updates; a step has several with epochs or minibatches."""
    tasks_drawn: int = 0
    """Training tasks drawn, without skipped ones."""
    prompts_skipped: int = 0
    """Training tasks skipped because their prompt is too long."""
    task_stream: dict[str, Any] = dataclasses.field(default_factory=dict)
    """State of the task stream: position in each environment and curriculum statistics."""
    episodes: int = 0
    """Rollouts sampled for training."""
    scheduler: dict[str, Any] = dataclasses.field(default_factory=dict)
    """State of the rollout scheduler: requested groups that are not complete."""
    worker_counts: dict[str, int] = dataclasses.field(default_factory=dict)
    """Counters of rollout workers and their groups, accumulated over restarts."""
    sampled_tokens: int = 0
    """Tokens sampled for training."""
    trained_tokens: int = 0
    """Tokens trained on; each epoch counts a token again."""
    vocab_size: int = 0
    """Vocabulary size of the model, which may exceed the tokenizer's."""
    base: str = ""
    """Fingerprint of the weights that an adapter changes; empty if whole models are trained."""
    evaluations: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    """Held-out metrics by milestone: `before warm start`, `before RL` and the latest `after RL`."""
    unrecorded: dict[str, float] = dataclasses.field(default_factory=dict)
    """Metrics of step `step` if the run was stopped during its evaluation; empty if the step is recorded."""


class Dropped(NamedTuple):
    """Groups that were dropped because they exceeded the maximum staleness."""

    count: int
    """Number of dropped groups, including those that earlier steps trained on."""
    untrained: list[RolloutGroup]
    """Dropped groups that no step trained on."""


@dataclasses.dataclass
class RunState:
    """State of a run that changes with every step, without weights and optimizer state."""

    progress: Progress
    """Counters, task stream and evaluations."""
    scheduler: RolloutScheduler
    """Tracks requested groups that are not complete."""
    replay: ReplayBuffer
    """Holds finished groups that wait for training."""

    @classmethod
    def create(
        cls, progress: Progress, replay: ReplayConfig, *, groups_per_step: int, max_batches: int, last_step: int
    ) -> "RunState":
        """Make the state of a run with this progress, and an empty replay buffer.

        Args:
            progress: progress of the run; new for a new run.
            replay: staleness limits.
            groups_per_step: number of groups in the batch of a step.
            max_batches: maximum number of batches of groups that are sampled for a step to replace dropped groups.
            last_step: last step of the run.
        """
        replacements = (max_batches - 1) * groups_per_step
        limits = StalenessLimits(groups_per_step, replay.max_staleness, replay.max_uses, replacements, last_step)
        buffer = ReplayBuffer(max_staleness=replay.max_staleness, max_uses=replay.max_uses)
        return cls(progress, RolloutScheduler(limits, progress.scheduler), buffer)

    def drop_stale(self, version: WeightVersion) -> Dropped:
        """Drop waiting groups that are too old, and request those again that were never trained on.

        `version` is that of the weights to be updated.
        """
        stale = self.replay.expire(version)
        untrained = [entry for entry in stale if entry.uses_left == self.scheduler.limits.max_uses]
        self.scheduler.retry(entry.task for entry in untrained)
        return Dropped(len(stale), [entry.group for entry in untrained])

    @contextlib.contextmanager
    def rolled_back_on_stop(self) -> Iterator[None]:
        """Restore scheduler, replay buffer and task stream if the block raises `StopRequestedError`.

        A checkpoint saved afterwards then holds the state after the last finished step.
        """
        progress, scheduler, replay = self.progress, self.scheduler.state, self.replay.copy()
        tasks_drawn, task_stream = progress.tasks_drawn, progress.task_stream
        prompts_skipped = progress.prompts_skipped
        try:
            yield
        except StopRequestedError:
            progress.tasks_drawn, progress.task_stream = tasks_drawn, task_stream
            progress.prompts_skipped = prompts_skipped
            self.scheduler, self.replay = RolloutScheduler(self.scheduler.limits, scheduler), replay
            raise

    def save(
        self,
        checkpoints: Checkpoints,
        trainer_state: TrainerState,
        worker_counts: dict[str, int],
        run_files: RunFiles,
    ) -> StoragePath:
        """Start to write a checkpoint with the complete state of the run.

        `worker_counts` are the counters of the rollout source. The returned folder is complete when its files are
        written in the background.
        """
        self.progress.scheduler = self.scheduler.state
        self.progress.worker_counts = worker_counts
        return checkpoints.save(
            trainer_state,
            self.progress.step,
            dataclasses.asdict(self.progress),
            {REPLAY: self.replay.encode(), RUN_FILES: run_files.encode()} if multihost.is_main() else {},
        )
