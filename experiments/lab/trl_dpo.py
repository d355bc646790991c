# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Compares the first steps of `marin_rl.dpo` with those of TRL's `DPOTrainer` on the same pairs, in the same order.

    python -m experiments.lab.trl_dpo --config experiments/dpo.yaml --steps 20

Needs torch and trl. Rows must have a text prompt and text answers. Prints, for every step, the loss and the reward
margin of both, and at last the largest difference of each metric.
"""

import argparse
import importlib.metadata
import json
import tempfile
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import trl
from levanter.optim.config import AdamConfig

from marin_rl import dpo
from marin_rl.config.supervised_config import DpoConfig
from marin_rl.data.dataset import Batches, read_rows
from marin_rl.learner.starting_weights import hf_folder
from marin_rl.utils.settings.yaml_text import from_yaml

METRICS = ("loss/dpo", *(f"rewards/{name}" for name in ("chosen", "rejected", "margins", "accuracies")))


def ours(config: Path, folder: Path, steps: int) -> list[dict[str, float]]:
    """Run the command; return the records of its steps."""
    more = ["--num_steps", str(steps), "--evaluation.every", "0", "--run_dir", str(folder)]
    if status := dpo.main(["--config", str(config), *more]):
        raise SystemExit(status)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][1:]


def theirs(config: DpoConfig, folder: Path, steps: int) -> list[dict[str, float]]:
    """Run TRL's trainer on the pairs of each step; return the metrics of its steps."""
    rows = read_rows(config.preferences, "preferences")[0]
    batches = Batches(rows, config.batch.size, config.seed)
    pairs = [
        {
            "prompt": [{"role": "user", "content": row.values["prompt"]}],
            **{side: [{"role": "assistant", "content": row.values[side]}] for side in ("chosen", "rejected")},
        }
        for step in range(1, steps + 1)
        for row in batches.of_step(step)
    ]
    optimizer, model = config.optimizer, hf_folder(str(config.initialize_from))
    assert isinstance(optimizer, AdamConfig)
    settings = trl.DPOConfig(
        str(folder),
        loss_type="sigmoid_norm" if config.loss.length_normalized else "sigmoid",
        beta=config.loss.beta,
        max_steps=steps,
        per_device_train_batch_size=config.batch.size,
        learning_rate=optimizer.learning_rate,
        lr_scheduler_type="constant",
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        adam_epsilon=optimizer.epsilon,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    trainer = trl.DPOTrainer(
        transformers.AutoModelForCausalLM.from_pretrained(model),
        transformers.AutoModelForCausalLM.from_pretrained(model),
        settings,
        train_dataset=datasets.Dataset.from_list(pairs),
        processing_class=transformers.AutoTokenizer.from_pretrained(model),
    )
    losses: list[float] = []
    compute = trainer._compute_loss

    def recorded(*arguments: Any, **options: Any) -> Any:
        loss = compute(*arguments, **options)
        losses.append(loss.item())
        return loss

    # Its log rounds losses to four digits.
    trainer._compute_loss = recorded
    trainer._get_train_sampler = torch.utils.data.SequentialSampler
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "rewards/margins" in entry]
    return [{**entry, "loss/dpo": loss} for entry, loss in zip(logs, losses, strict=True)]


def main() -> None:
    """Run both, and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", type=Path, required=True, help="config of marin_rl.dpo, without label smoothing")
    parser.add_argument("--steps", type=int, default=20, help="number of steps")
    arguments = parser.parse_args()
    config = from_yaml(DpoConfig, arguments.config.read_text(encoding="utf-8"), str(arguments.config))
    with tempfile.TemporaryDirectory() as folder:
        found = ours(arguments.config, Path(folder) / "ours", arguments.steps)
        expected = theirs(config, Path(folder) / "theirs", arguments.steps)
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("trl", "torch", "transformers", "jax")))
    for step, (own, other) in enumerate(zip(found, expected, strict=True), start=1):
        pairs = (f"{name} {own[name]:.6f} {other[name]:.6f}" for name in ("loss/dpo", "rewards/margins"))
        print(f"step {step:3}", *pairs, sep="   ")
    for name in METRICS:
        # Before the first update all rewards are rounding errors.
        differences = (abs(own[name] - other[name]) for own, other in zip(found[1:], expected[1:], strict=True))
        print(f"largest difference of {name} from step 2 on: {max(differences):.2g}")


if __name__ == "__main__":
    main()
