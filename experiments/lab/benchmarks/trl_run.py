# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A run of TRL's `GRPOTrainer` for `benchmark_end_to_end`, in an environment with TRL and without marin_rl.

    python -m experiments.lab.benchmarks.trl_run --problem FOLDER --output FILE --steps 8 --rows 32

Appends one JSON object per step to the output: loss, reward, gradient norm and seconds by phase.

With `scale_rewards="none"` the advantage is the reward minus the mean of the group, which is RLOO's up to the constant
G / (G - 1), and with answers of equal length the default loss is proportional to the mean over answers of summed
log-probabilities. Adam does not depend on constant factors of the gradient. `RLOOTrainer` would compute the same with
one more forward pass.
"""

import collections
import json
import os
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.extras import profiling

from experiments.lab.benchmarks.peer_arguments import parse_peer
from experiments.lab.benchmarks.word_reward import even_share


def reward(completions: list[str], **_: Any) -> list[float]:
    """Score completions."""
    return [even_share(completion) for completion in completions]


class StepWriter(TrainerCallback):
    """Appends the log of each step to a file, with the seconds of TRL's own profiling contexts."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._seconds: dict[str, float] = collections.defaultdict(float)

    def add_seconds(self, context: profiling.ProfilingContext, seconds: float) -> None:
        """Add the duration of a profiling context."""
        self._seconds[context.name] += seconds

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write one line; the summary at the end of training has no loss."""
        logs: dict[str, float] = kwargs["logs"]
        if "loss" not in logs:
            return
        seconds = {name.removeprefix("GRPOTrainer."): value for name, value in self._seconds.items()}
        self._seconds.clear()
        line = {
            "step": state.global_step,
            "loss": logs["loss"],
            "reward": logs["reward"],
            "grad_norm": logs["grad_norm"],
            "new_tokens": logs["completions/mean_length"],
            "phases": {
                "sample": seconds["transformers.generate"],
                "reward": seconds["reward"],
                "prepare": seconds["_prepare_inputs"] - seconds["transformers.generate"] - seconds["reward"],
            },
        }
        with self._output.open("a") as file:
            file.write(json.dumps(line) + "\n")


def trainer_config(settings: dict[str, Any], folder: Path, steps: int, rows: int, **changes: Any) -> GRPOConfig:
    """Return TRL's settings of the problem; `rows` are those of a forward and backward pass."""
    rollouts = settings["prompts"] * settings["group_size"]
    values = {
        "output_dir": str(folder / "trl"),
        "max_steps": steps,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": rollouts // rows,
        "num_generations": settings["group_size"],
        "max_completion_length": settings["new_tokens"],
        "temperature": 1.0,
        "beta": 0.0,
        "scale_rewards": "none",
        "learning_rate": settings["learning_rate"],
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "adam_beta1": settings["beta1"],
        "adam_beta2": settings["beta2"],
        "adam_epsilon": settings["epsilon"],
        "max_grad_norm": settings["max_grad_norm"],
        "bf16": False,
        "gradient_checkpointing": False,
        "shuffle_dataset": False,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": settings["seed"],
    }
    return GRPOConfig(**(values | changes))


def main() -> None:
    """Train for some steps."""
    arguments = parse_peer("TRL's side of benchmark_end_to_end", steps=True)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    settings = json.loads((arguments.problem / "problem.json").read_text())
    prompts = json.loads((arguments.problem / "prompts.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(arguments.problem / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(arguments.problem / "model")
    writer = StepWriter(arguments.output)
    profiling.ProfilingContext._log_metrics = lambda context, seconds: writer.add_seconds(context, seconds)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=trainer_config(settings, arguments.problem, arguments.steps, arguments.rows),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        callbacks=[writer],
    )
    trainer.train()


if __name__ == "__main__":
    main()
