# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Supervised fine-tuning, RL from its result, an evaluation and an export, as plain calls in one file.

    python -m experiments.pipeline

A complete stage is skipped and an interrupted one is resumed, so the same command continues the pipeline after a kill.
Stages with other configs need another folder.
"""

import dataclasses
import json
import sys
from pathlib import Path

from levanter.optim.config import AdamConfig

from experiments.rloo_in_code import rloo
from marin_rl.config.run_config import AbstractRunConfig
from marin_rl.config.supervised_config import BatchConfig, LossEvaluationConfig, SftConfig
from marin_rl.config.train_config import TrainConfig
from marin_rl.data.config import DataConfig
from marin_rl.runs.run_directory import write_atomically
from marin_rl.sessions.evaluate_checkpoint import EvaluateConfig, run_evaluation
from marin_rl.sessions.run_export import export_once
from marin_rl.sessions.session import run_session


def sft(folder: Path) -> SftConfig:
    """Return the config of experiments/sft.yaml."""
    optimizer = AdamConfig(
        learning_rate=1e-3, lr_schedule="cosine", min_lr_ratio=0.1, warmup=20, weight_decay=0.0, max_grad_norm=1.0
    )
    return SftConfig(
        run_dir=str(folder / "sft"),
        data=DataConfig("experiments/data/sums.jsonl", held_out=0.1),
        model=rloo().model,
        epochs=8,
        batch=BatchConfig(size=64, max_length=16),
        optimizer=optimizer,
        evaluation=LossEvaluationConfig(every=50),
    )


def rl(folder: Path) -> TrainConfig:
    """Return the config of experiments/rloo.yaml from the result of fine-tuning."""
    plain = rloo()
    return dataclasses.replace(
        plain,
        run_dir=str(folder / "rl"),
        initialize_from=str(folder / "sft"),
        warm_start=dataclasses.replace(plain.warm_start, max_steps=0),
        optimizer=dataclasses.replace(plain.optimizer, learning_rate=1e-4),
    )


def run(config: AbstractRunConfig) -> str:
    """Start, resume or skip a run; return its directory."""
    if not run_session(config, sys.stdout):
        sys.exit("interrupted; the same command resumes the run")
    return config.run_dir


def pipeline(sft: SftConfig, rl: TrainConfig, folder: Path) -> dict[str, float]:
    """Run all stages.

    Args:
        sft: config of the first stage.
        rl: config of the second stage; `initialize_from` is the directory of the first one.
        folder: folder of `evaluation.json` and of the export `model`.

    Returns:
        The metrics of the evaluation.
    """
    run(sft)
    trained = run(rl)
    evaluation = folder / "evaluation.json"
    if not evaluation.exists():
        step, metrics = run_evaluation(EvaluateConfig(trained))
        write_atomically(evaluation, json.dumps({"step": step, **metrics}))
    export_once(trained, None, folder / "model")
    return json.loads(evaluation.read_bytes())


if __name__ == "__main__":
    FOLDER = Path("runs/pipeline")
    print(pipeline(sft(FOLDER), rl(FOLDER), FOLDER))
