# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Compares the replies of other programs with those of the evaluation, problem by problem.

    python experiments/external/compare.py runs/external

The folder has `problems.jsonl` from `experiments.external.expected` and the output of each program.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Reply = tuple[str, str, bool]
"""Prompt, reply, and whether the program counts it as right."""


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def of_lm_eval(folder: Path) -> Iterator[Reply]:
    """Read the samples that lm-eval logs."""
    for path in folder.rglob("samples_*.jsonl"):
        for sample in read_lines(path):
            yield sample["doc"]["prompt"], sample["resps"][0][0], sample["exact_match"] == 1.0


def of_inspect(folder: Path) -> Iterator[Reply]:
    """Read the log of inspect-ai."""
    for path in folder.glob("*.json"):
        for sample in json.loads(path.read_text(encoding="utf-8"))["samples"]:
            yield sample["input"], sample["output"]["choices"][0]["message"]["content"], _score(sample) == "C"


def _score(sample: dict[str, Any]) -> str:
    [score] = sample["scores"].values()
    return score["value"]


def of_verifiers(folder: Path) -> Iterator[Reply]:
    """Read the traces of vf-eval."""
    for path in folder.rglob("traces.jsonl"):
        for episode in read_lines(path):
            [trace] = episode["traces"]
            prompt, reply = (node["message"]["content"] for node in trace["nodes"])
            yield prompt, reply, trace["rewards"]["is_right"]["score"] == 1.0


READERS = {
    "lm-eval, completions": ("lm_eval_completions", of_lm_eval),
    "lm-eval, chat": ("lm_eval_chat", of_lm_eval),
    "inspect-ai": ("inspect", of_inspect),
    "vf-eval": ("verifiers", of_verifiers),
}


def main(folder: Path) -> int:
    """Print a line for each program; return 1 if a reply or score differs, or a program has none."""
    expected = {one["prompt"]: (one["reply"], one["correct"]) for one in read_lines(folder / "problems.jsonl")}
    has_difference = False
    for name, (output, read) in READERS.items():
        found = {prompt: (reply, correct) for prompt, reply, correct in read(folder / output)}
        differing = [prompt for prompt, values in found.items() if expected[prompt] != values]
        has_difference |= bool(differing) or not found
        right = sum(correct for _, correct in found.values())
        print(f"{name}: {len(found)} problems, {right} right, {len(differing)} differ from the evaluation")
        for prompt in differing[:3]:
            print(f"  {prompt!r}: {found[prompt]} instead of {expected[prompt]}")
    return int(has_difference)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
