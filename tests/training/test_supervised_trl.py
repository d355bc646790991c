# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The loss curve of supervised fine-tuning against TRL's SFTTrainer, on the same conversations in the same order."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from marin_rl.batching.row_sizes import ROW_MULTIPLE
from marin_rl.data.dataset import Batches
from marin_rl.learner.policy_model import initialize_policy, save_hf_policy
from marin_rl.sft import main
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.utils.levanter_line import seq_len
from tests import tiny_learner
from tests.tokenization.conftest import chatml_tokenizer

STEPS, SIZE, SEED = 20, 4, 3
LEARNING_RATE = 1e-2


def conversations() -> list[dict[str, Any]]:
    """Return rows of one and two turns with different lengths."""
    words = ("two", "plus", "three", "five", "hello", "world", "answer", "think")
    rng = np.random.default_rng(0)

    def turn() -> list[dict[str, str]]:
        asked, said = (" ".join(rng.choice(words, rng.integers(1, 5))) for _ in range(2))
        return [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]

    return [{"messages": [*turn(), *(turn() if number % 3 == 0 else [])]} for number in range(30)]


@pytest.mark.torch
@pytest.mark.medium
def test_loss_curve_equals_that_of_trl(trainer, tmp_path: Path) -> None:
    torch, trl = (pytest.importorskip(name, reason="needs the extra test-torch") for name in ("torch", "trl"))
    datasets = pytest.importorskip("datasets")
    rows = conversations()
    data, weights = tmp_path / "rows.jsonl", tmp_path / "model"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    chat = ChatTokenizer(chatml_tokenizer())
    shape = dataclasses.replace(tiny_learner.LLAMA, **seq_len(ROW_MULTIPLE))
    save_hf_policy(initialize_policy(shape, chat, trainer, key=jax.random.PRNGKey(0)), chat, weights, trainer)

    optimizer = {"type": "adam", "learning_rate": LEARNING_RATE, "beta2": 0.999, "weight_decay": 0.0}
    config = {
        "run_dir": str(tmp_path / "run"),
        "initialize_from": str(weights),
        "seed": SEED,
        "num_steps": STEPS,
        "data": {"path": str(data)},
        "batch": {"size": SIZE, "max_length": 100},
        "optimizer": {**optimizer, "lr_schedule": "constant", "warmup": 0, "max_grad_norm": None},
        "checkpoint": {"every": 0},
    }
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(config))
    assert main(["--config", str(tmp_path / "sft.yaml")]) == 0
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]

    losses = []

    class SequentialTrainer(trl.SFTTrainer):
        def _get_train_sampler(self, dataset=None):
            return torch.utils.data.SequentialSampler(self.train_dataset if dataset is None else dataset)

        def compute_loss(self, *arguments, **keywords):
            result = super().compute_loss(*arguments, **keywords)
            losses.append(float((result[0] if isinstance(result, tuple) else result).detach()))
            return result

    batches = Batches(rows, SIZE, SEED)
    drawn = [row for step in range(1, STEPS + 1) for row in batches.of_step(step)]
    theirs = SequentialTrainer(
        model=AutoModelForCausalLM.from_pretrained(weights),
        processing_class=AutoTokenizer.from_pretrained(weights),
        train_dataset=datasets.Dataset.from_list(drawn),
        args=trl.SFTConfig(
            output_dir=str(tmp_path / "trl"),
            assistant_only_loss=True,
            per_device_train_batch_size=SIZE,
            max_steps=STEPS,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=0.0,
            adam_beta1=0.9,
            adam_beta2=0.999,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
    )
    theirs.train()
    found = [record["loss/ce_avg"] for record in records[1:]]
    np.testing.assert_allclose(found, losses, atol=1e-4)
    assert found[-1] < 0.7 * found[0]
