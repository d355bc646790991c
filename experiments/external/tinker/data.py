# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Write the data of the Tinker recipes, sums of two numbers: `python experiments/external/tinker/data.py`.

The recipes load datasets by their names on a hub. In a working directory that has folders of these names, `datasets`
reads the folders. `sums.jsonl` is for `start.yaml`: SmolLM2-135M cannot add, and rewards alone teach it nothing.
`many_sums.jsonl` and `tokenizer`, bytes and the special tokens of the renderer `qwen3_instruct`, are for `small.yaml`.
"""

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from marin_rl.tokenization.load import byte_tokenizer

FOLDER = Path("runs/external/tinker")
BOXED = " Provide a numerical answer without units, written inside \\boxed{}."
"""What `rl_loop` adds to a question."""


def draw_sums(seed: int, count: int) -> Iterator[tuple[str, int]]:
    """Yield questions and their answers."""
    numbers = random.Random(seed)
    for _ in range(count):
        a, b = numbers.randint(0, 100), numbers.randint(0, 100)
        yield f"What is {a} + {b}?", a + b


def conversation(*texts: str) -> list[dict[str, str]]:
    """Return the messages of a conversation, the user's first."""
    return [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(texts)]


def preference(question: str, answer: int, wrong: int) -> dict[str, str]:
    """Return a pair in the format of hh-rlhf: the right answer, and a wrong one."""
    prompt = f"\n\nHuman: {question}\n\nAssistant: "
    return {"chosen": f"{prompt}{answer}", "rejected": f"{prompt}{wrong}"}


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def write_dataset(name: str, config: str, **splits: Iterable[dict[str, Any]]) -> None:
    """Write a folder that `datasets.load_dataset(name)` reads."""
    files = ""
    for split, rows in splits.items():
        write(FOLDER / name / f"{split}.jsonl", rows)
        files += f"  - split: {split}\n    path: {split}.jsonl\n"
    (FOLDER / name / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n")


def main() -> None:
    """Write all files."""
    shot = "What is 4 + 5?", "9"
    write(
        FOLDER / "sums.jsonl",
        ({"messages": conversation(*shot, question, str(answer))} for question, answer in draw_sums(0, 1000)),
    )
    write(
        FOLDER / "many_sums.jsonl",
        ({"messages": conversation(*shot, question, str(answer))} for question, answer in draw_sums(6, 20000)),
    )
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"], "eos_token": "<|im_end|>"})
    tokenizer.chat_template = Path(__file__).with_name("chatml.jinja").read_text()
    tokenizer.save_pretrained(FOLDER / "tokenizer")
    boxed = "How many r's are in strawberry?" + BOXED, "\\boxed{3}"
    write_dataset(
        "HuggingFaceH4/no_robots",
        "default",
        train=(
            {"messages": conversation(*boxed, question + BOXED, f"\\boxed{{{answer}}}")}
            for question, answer in draw_sums(1, 1000)
        ),
    )
    write_dataset(
        "openai/gsm8k",
        "main",
        train=({"question": question, "answer": f"#### {answer}"} for question, answer in draw_sums(2, 2000)),
    )
    errors = random.Random(4)
    pairs = [
        preference(question, answer, answer + errors.choice((-10, -1, 1, 10)))
        for question, answer in draw_sums(3, 1040)
    ]
    write_dataset("Anthropic/hh-rlhf", "default", train=pairs[:1000], test=pairs[1000:])
    questions = ({"question": question} for question, _ in draw_sums(5, 2000))
    write_dataset("zwhe99/DeepMath-103K", "default", train=questions)


if __name__ == "__main__":
    main()
