# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Tokens per second of supervised fine-tuning, next to TRL's SFTTrainer on the same rows, in alternating pairs.

```
python -m experiments.lab.benchmarks.sft_and_trl --pairs 3
```

Needs torch and trl. Both train the same random llama in float32 on the same conversations with loss on the replies, in
batches of the same rows; TRL pads each batch to its longest row, its default. The first steps, in which programs are
compiled, do not count.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import yaml

WORDS = ("two", "plus", "three", "five", "hello", "world", "answer", "think")
WARM_UP = 3
"""Steps that do not count."""
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_rows(count: int, longest: int) -> list[dict[str, Any]]:
    """Return conversations of one turn, whose questions and replies have up to `longest` words."""
    rng = np.random.default_rng(0)
    texts = [[" ".join(rng.choice(WORDS, rng.integers(1, longest))) for _ in range(2)] for _ in range(count)]
    roles = ("user", "assistant")
    return [{"messages": [{"role": r, "content": t} for r, t in zip(roles, pair, strict=True)]} for pair in texts]


def save_policy(folder: Path, hidden: int, layers: int) -> None:
    """Write a random llama with the byte-level tokenizer."""
    from levanter.models.llama import LlamaConfig

    from marin_rl.learner.policy_model import initialize_policy, save_hf_policy
    from marin_rl.tokenization.chat import ChatTokenizer
    from marin_rl.tokenization.load import byte_tokenizer
    from marin_rl.utils.devices.setup import start_devices
    from marin_rl.utils.devices.trainer_config import TrainerConfig
    from marin_rl.utils.levanter_line import seq_len

    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    chat = ChatTokenizer(tokenizer)
    heads = hidden // 32
    config = LlamaConfig(
        **seq_len(512),
        hidden_dim=hidden,
        intermediate_dim=3 * hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
    )
    trainer = start_devices(TrainerConfig(), rows_per_device=1)
    save_hf_policy(initialize_policy(config, chat, trainer, key=jax.random.PRNGKey(0)), chat, folder, trainer)


def ours(folder: Path, weights: Path, data: Path, steps: int, size: int) -> float:
    """Return the tokens per second of marin_rl, prompts included, as it logs them."""
    from marin_rl.sft import main

    run = Path(tempfile.mkdtemp(dir=folder))
    config = {
        "run_dir": str(run / "run"),
        "initialize_from": str(weights),
        "num_steps": steps,
        "data": {"path": str(data)},
        "batch": {"size": size, "max_length": 512},
        "optimizer": {"type": "adam", "learning_rate": 1e-4, "lr_schedule": "constant", "warmup": 0},
        "checkpoint": {"every": 0},
    }
    (run / "sft.yaml").write_text(yaml.safe_dump(config))
    assert main(["--config", str(run / "sft.yaml")]) == 0
    records = [json.loads(line) for line in (run / "run" / "metrics.jsonl").read_text().splitlines()][1 + WARM_UP :]
    tokens = [record["tokens/processed_per_second"] * record["seconds/step"] for record in records]
    return sum(tokens) / sum(record["seconds/total"] for record in records)


def theirs(folder: Path, weights: Path, rows: list[dict[str, Any]], steps: int, size: int) -> float:
    """Return the tokens per second of TRL without padding, over the steps after the first ones."""
    import datasets
    import transformers
    import trl

    counts: list[tuple[float, int]] = []

    class Timed(trl.SFTTrainer):
        def training_step(self, model: Any, inputs: Any, *arguments: Any) -> Any:
            counts.append((time.perf_counter(), int(inputs["attention_mask"].sum())))
            return super().training_step(model, inputs, *arguments)

    trainer = Timed(
        model=transformers.AutoModelForCausalLM.from_pretrained(weights),
        processing_class=transformers.AutoTokenizer.from_pretrained(weights),
        train_dataset=datasets.Dataset.from_list(rows),
        args=trl.SFTConfig(
            output_dir=tempfile.mkdtemp(dir=folder),
            assistant_only_loss=True,
            per_device_train_batch_size=size,
            max_steps=steps,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
    )
    trainer.train()
    counts.append((time.perf_counter(), 0))
    return sum(tokens for _, tokens in counts[WARM_UP:]) / (counts[-1][0] - counts[WARM_UP][0])


def main() -> None:
    """Measure pairs, and print the rates and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--size", type=int, default=16, help="rows of a batch")
    parser.add_argument("--words", type=int, default=20, help="most words of a message")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        weights, data, rows = folder / "model", folder / "rows.jsonl", make_rows(400, given.words)
        data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        save_policy(weights, given.hidden, given.layers)
        ratios = []
        for _ in range(given.pairs):
            own = ours(folder, weights, data, given.steps, given.size)
            other = theirs(folder, weights, rows, given.steps, given.size)
            ratios.append(own / other)
            print(json.dumps({"marin_rl": round(own), "trl": round(other), "ratio": round(own / other, 2)}), flush=True)
        print(json.dumps({"median_ratio": round(statistics.median(ratios), 2)}))


if __name__ == "__main__":
    main()
