# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""experiments/rloo.yaml as code: the same config, built from dataclasses.

    python -m experiments.rloo_in_code

Use this form if an experiment computes its settings, sweeps over them, or is part of a larger code base.
"""

import sys

from levanter.models.llama import LlamaConfig
from levanter.optim.config import AdamConfig

from marin_rl.config.sections import EvaluationConfig, RolloutConfig, WarmStartConfig
from marin_rl.config.train_config import TrainConfig
from marin_rl.environments import ReasoningGymConfig
from marin_rl.sampling.config import SamplingConfig
from marin_rl.sessions.session import run_session
from marin_rl.utils.levanter_line import seq_len


def rloo(seed: int = 0) -> TrainConfig:
    """Return the config of RLOO on verified two-term sums, from scratch.

    Args:
        seed: seed of weights, task order and sampling; each has a separate run directory.
    """
    return TrainConfig(
        run_dir="runs/rloo" if seed == 0 else f"runs/rloo-seed{seed}",
        seed=seed,
        environment=ReasoningGymConfig(
            task="basic_arithmetic",
            options={
                "min_terms": 2,
                "max_terms": 2,
                "min_digits": 1,
                "max_digits": 2,
                "operators": ["+"],
                "allow_parentheses": False,
                "allow_negation": False,
            },
            size=20_000,
            prompt_regex=r"Calculate (.*)\.",
            remove_whitespace=True,
            reverse_answer=True,
            exact_answer=True,
        ),
        model=LlamaConfig(
            **seq_len(16),
            hidden_dim=128,
            intermediate_dim=384,
            num_layers=3,
            num_heads=4,
            num_kv_heads=4,
            gradient_checkpointing=False,
        ),
        warm_start=WarmStartConfig(max_steps=800, target_accuracy=0.25, check_every=20),
        num_steps=150,
        rollouts=RolloutConfig(prompts_per_step=64, group_size=8, max_length=12),
        sampling=SamplingConfig(max_new_tokens=4, max_seqs=512),
        optimizer=AdamConfig(learning_rate=3e-4, lr_schedule="constant", warmup=0, weight_decay=0.0, max_grad_norm=1.0),
        evaluation=EvaluationConfig(every=50, tasks=512),
    )


if __name__ == "__main__":
    run_session(rloo(), sys.stdout)
