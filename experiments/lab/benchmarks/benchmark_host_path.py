# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""CPU time of a step outside the devices: records, group codec, advantages, packing and rollout store.

    python -m experiments.lab.benchmarks.benchmark_host_path
    python -m experiments.lab.benchmarks.benchmark_host_path --groups 1024 --prompt_tokens 32 --sampled_tokens 96

Both have 1,048,576 tokens: 128 groups of 8 rollouts with 1,024 tokens each, and 1,024 groups with 128 tokens each.
"""

import gc
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lab.benchmarks.measurement import benchmark_parser, load_config, make_report, say, spread
from marin_rl.batching.packing import RowLayout
from marin_rl.batching.rollout_batch import RolloutBatch
from marin_rl.learner.scoring import Scores
from marin_rl.parts.rl import RunParts
from marin_rl.rollouts.group_codec import decode_group, encode_group
from marin_rl.runs.rollout_store import RolloutStore, RolloutStoreConfig, as_parquet
from marin_rl.runs.stored_rollout import as_table
from marin_rl.sampling.sampler import SampleRequest
from marin_rl.sampling.slots import AcceptedRequest, SlotTable
from marin_rl.sampling.stops import ENDED
from marin_rl.training.batch_builder import BatchBuilder
from marin_rl.types import Generation, Rollout, RolloutGroup, RolloutStatus, Task, Turn
from marin_rl.utils.timing import PhaseTimer

PAD = 0
VOCABULARY = 32_000
CHARACTERS_PER_TOKEN = 4
SLOTS = 256
"""Sequences that the sampler decodes together."""
STEPS = 16
"""Tokens of each sequence in one call of `decode`."""


class SampledStep:
    """The rollouts of one step as arrays on the host, `[group, position]` and `[rollout, position]`."""

    def __init__(self, groups: int, members: int, prompt_tokens: int, sampled_tokens: int) -> None:
        """Draw random tokens, log-probs and rewards.

        Args:
            groups: number of groups.
            members: rollouts of each group.
            prompt_tokens: tokens of each prompt.
            sampled_tokens: tokens of each reply.
        """
        rng = np.random.default_rng(0)
        letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz ", np.uint8)
        text = bytes(
            rng.choice(letters, CHARACTERS_PER_TOKEN * max(VOCABULARY, prompt_tokens, sampled_tokens))
        ).decode()
        self.members = members
        self.prompts = rng.integers(1, VOCABULARY, (groups, prompt_tokens), np.int32)
        # Frequencies like those of words: few tokens make up most of a text.
        ranks = np.minimum(rng.zipf(1.3, (groups * members, sampled_tokens)), VOCABULARY - 1)
        self.tokens = ranks.astype(np.int32)
        self.logprobs = -rng.exponential(size=self.tokens.shape).astype(np.float32)
        self.rewards = rng.integers(0, 2, groups * members).astype(float).tolist()
        self.prompt_text = text[: CHARACTERS_PER_TOKEN * prompt_tokens]
        self.reply_text = text[: CHARACTERS_PER_TOKEN * sampled_tokens]
        starts = range(0, CHARACTERS_PER_TOKEN * VOCABULARY, CHARACTERS_PER_TOKEN)
        self._pieces = [text[start : start + 1 + start % 7].encode() for start in starts]

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token."""
        return self._pieces[token]

    def records(self) -> list[RolloutGroup]:
        """Convert the output of the sampler's programs to validated records."""
        replies = self._generations()
        return [self._group(number, tuple(prompt), replies) for number, prompt in enumerate(self.prompts.tolist())]

    def _generations(self) -> Iterator[Generation]:
        """Yield what the sampler makes of the output of `decode`, in calls of `STEPS` tokens for each slot."""
        prompts = [tuple(prompt) for prompt in self.prompts.tolist() for _ in range(self.members)]
        count, length = self.tokens.shape
        for first in range(0, count, SLOTS):
            rows = range(first, min(first + SLOTS, count))
            table = SlotTable(len(rows), length)
            for slot, row in enumerate(rows):
                table.assign(slot, AcceptedRequest(row, SampleRequest(prompts[row], row, length), length))
            for step in range(0, length, STEPS):
                steps = slice(step, step + STEPS)
                table.decode_inputs(STEPS)
                table.add(
                    self.tokens[rows.start : rows.stop, steps].T, self.logprobs[rows.start : rows.stop, steps].T, 3
                )
            yield from (generation for _, _, generation in table.end(np.full(len(rows), ENDED)))

    def _group(self, number: int, prompt: tuple[int, ...], replies: Iterator[Generation]) -> RolloutGroup:
        question, answer = (
            {"role": "user", "content": self.prompt_text},
            {"role": "assistant", "content": self.reply_text},
        )
        task, id = Task(f"task-{number}", "sums", (question,), "5"), f"step-1/{number}"
        rollouts = []
        for member in range(self.members):
            rewards = {"correct": self.rewards[number * self.members + member]}
            turn = Turn(prompt, next(replies), (question, answer), rewards, starts_sequence=True)
            rollouts.append(Rollout(f"{id}/{member}", id, task, (turn,), RolloutStatus.COMPLETED, rewards))
        return RolloutGroup(id, rollouts)


class CpuTimes:
    """CPU milliseconds of all threads of this process, by name."""

    def __init__(self) -> None:
        self.milliseconds: dict[str, list[float]] = {}

    def take(self, name: str, work: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function, add its CPU time to a series and return its result."""
        gc.collect()
        start = time.process_time()
        result = work(*arguments)
        self.milliseconds.setdefault(name, []).append(1000 * (time.process_time() - start))
        return result


def unscored(model: Any, batch: RolloutBatch) -> Scores:
    """Return zeros; a step without reference, critic and correction computes no scores."""
    zeros = np.zeros(batch.input_ids.shape, np.float32)
    return Scores(zeros, zeros)


def measure(step: SampledStep, layout: RowLayout, rounds: int, folder: Path) -> dict[str, Any]:
    """Return the CPU time of each part.

    Args:
        step: the rollouts.
        layout: shape of a microbatch.
        rounds: number of measurements.
        folder: empty folder for rollout files.
    """
    length = str(step.prompts.shape[1] + step.tokens.shape[1])
    config = load_config(["--model.seq_len", length, "--rollouts.max_length", length])
    parts = RunParts(config, config.trainer)
    vars(parts)["layout"] = layout
    builder = BatchBuilder(parts, unscored, None)
    store, times = RolloutStore(folder, RolloutStoreConfig(), step.piece), CpuTimes()
    groups = step.records()

    def write(groups: Sequence[RolloutGroup], batch: Any) -> None:
        store.write(1, groups, batch.stored)
        store.flush()

    for _ in range(rounds):
        times.take("records", step.records)
        encoded = times.take("encode_groups", lambda groups: [encode_group(group) for group in groups], groups)
        times.take("decode_groups", lambda encoded: [decode_group(data) for data in encoded], encoded)
        batch = times.take("advantages", builder.build, groups, None, 1, PhaseTimer())
        times.take("packing", lambda batch: list(builder.minibatches(batch.rollouts, 1)), batch)
        times.take("store", write, groups, batch)
        # The parts of the store: the first holds the interpreter lock for most of its time, the second does not.
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        table = times.take("store_table", as_table, rollouts, 1, "training", batch.stored, step.piece)
        times.take("store_parquet", as_parquet, table)
        say(", ".join(f"{name} {values[-1]:.0f}" for name, values in times.milliseconds.items()) + " ms")
    store.close()
    return {f"{name}_cpu_milliseconds": spread(values) for name, values in times.milliseconds.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print one JSON object."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = benchmark_parser("CPU time of a step outside the devices")
    parser.add_argument("--groups", type=int, default=128, help="groups of the step")
    parser.add_argument("--members", type=int, default=8, help="rollouts of each group")
    parser.add_argument("--prompt_tokens", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--sampled_tokens", type=int, default=768, help="tokens of each reply")
    parser.add_argument("--row_length", type=int, default=1024, help="positions of a row")
    parser.add_argument("--rows", type=int, default=8, help="rows of a microbatch")
    parser.add_argument("--unpacked", action="store_true", help="one sequence in each row")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each part")
    arguments = parser.parse_args(argv)
    step = SampledStep(arguments.groups, arguments.members, arguments.prompt_tokens, arguments.sampled_tokens)
    layout = RowLayout(arguments.row_length, arguments.rows, packed=not arguments.unpacked)
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(step, layout, arguments.rounds, Path(folder))
    print(make_report("benchmark_host_path", argv, vars(arguments), figures))


if __name__ == "__main__":
    main()
