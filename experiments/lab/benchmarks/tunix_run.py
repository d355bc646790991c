# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A run of Tunix's `GRPOLearner` for `benchmark_end_to_end`, in an environment with Tunix and without marin_rl.

    python -m experiments.lab.benchmarks.tunix_run --problem FOLDER --output FILE --steps 8 --rows 128

Appends one JSON object per step to the output: loss, reward, gradient norm and seconds by phase. Advantages and loss
are Tunix's `rloo` and `seq-mean-token-sum`, which are those of marin_rl without a factor.

Three defaults of Tunix 0.1.7 would train on another problem: `Llama3` rotates with a base of 1,000,000 whatever the
config says, all calls of the sampler without a seed use the same random numbers, and answers lose their end token, on
which the model is then not trained. `load_model` and `Rollout` correct them.
"""

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from transformers import AutoTokenizer
from tunix.models.llama3 import model as llama
from tunix.models.llama3.params import create_model_from_safe_tensors
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import CacheConfig, RolloutConfig, RolloutOutput
from tunix.rl.rollout.vanilla_rollout import VanillaRollout
from tunix.sft.hooks import TrainingHooks

from experiments.lab.benchmarks.peer_arguments import parse_peer
from experiments.lab.benchmarks.word_reward import even_share

Reward = Callable[..., list[float]]
"""Gets `prompts`, `completions` and the other columns of the data as keyword arguments."""


class Rollout(VanillaRollout):
    """Tunix's own sampler with new random numbers in each call, and with the end token in the answers."""

    def __init__(self, rollout_actor: Any, tokenizer: Any, mesh: Any, rollout_config: RolloutConfig) -> None:
        model = rollout_actor.config
        cache = CacheConfig(rollout_config.kv_cache_size, model.num_layers, model.num_kv_heads, model.head_dim)
        super().__init__(rollout_actor, tokenizer, cache)
        self._key = rollout_config.seed
        self.seconds = 0.0
        self.lengths: list[int] = []

    def generate(self, prompts: list[str], rollout_config: RolloutConfig, **_: Any) -> RolloutOutput:
        """Sample answers, and add their time and lengths."""
        started = time.perf_counter()
        self._key, key = jax.random.split(self._key)
        output = super().generate(prompts, dataclasses.replace(rollout_config, seed=key))
        longest = rollout_config.max_tokens_to_generate
        output.tokens = [np.append(one, self.eos_id()) if len(one) < longest else one for one in output.tokens]
        self.lengths += [len(one) for one in output.tokens]
        self.seconds += time.perf_counter() - started
        return output


class AfterStep(TrainingHooks):
    """Calls a function with step, loss and gradient norm after each update of the weights."""

    def __init__(self, write: Callable[[int, float, float], None]) -> None:
        self._write = write
        self._steps = 0

    def on_train_end(self, train_ctx: Any) -> None:
        """Find out whether the minibatch was the last one of its step; means over minibatches are Tunix's own."""
        if train_ctx.train_steps > self._steps:
            self._steps = train_ctx.train_steps
            metrics = train_ctx._prev_buffered_train_metrics
            norms, mean = metrics.additional_metrics["grad_norm"]
            self._write(self._steps, float(metrics.loss), float(mean([float(norm) for norm in norms])))

    def _ignore(self, *_: Any) -> None:
        pass

    on_train_start = on_train_step_start = on_train_step_end = on_eval_step_start = on_eval_step_end = _ignore


def load_model(folder: Path) -> Any:
    """Load exported weights, in float32 and with the rotary base of their config."""
    values = json.loads((folder / "config.json").read_text())
    llama.apply_rope = functools.partial(llama.apply_rope, rope_theta=values["rope_theta"])
    config = llama.ModelConfig(
        num_layers=values["num_hidden_layers"],
        vocab_size=values["vocab_size"],
        embed_dim=values["hidden_size"],
        hidden_dim=values["intermediate_size"],
        num_heads=values["num_attention_heads"],
        head_dim=values["head_dim"],
        num_kv_heads=values["num_key_value_heads"],
        rope_theta=values["rope_theta"],
        norm_eps=values["rms_norm_eps"],
        weight_tying=values["tie_word_embeddings"],
    )
    return create_model_from_safe_tensors(str(folder), config)


def make_learner(
    settings: dict[str, Any], folder: Path, rows: int, prompt_tokens: int, reward: Reward
) -> tuple[GRPOLearner, RolloutConfig]:
    """Return the learner of a problem and its sampling settings.

    Args:
        settings: optimizer, numbers of prompts, answers, tokens and steps, and the seed.
        folder: exported weights and tokenizer.
        rows: rollouts of a forward and backward pass. All rollouts of a step are sampled together.
        prompt_tokens: length to which prompts are padded.
        reward: scores answers.
    """
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(-1, 1), ("fsdp", "tp"))
    prompts = settings["prompts"]
    betas = settings["beta1"], settings["beta2"]
    optimizer = optax.chain(
        optax.clip_by_global_norm(settings["max_grad_norm"]),
        optax.adamw(settings["learning_rate"], *betas, eps=settings["epsilon"], weight_decay=0.0),
    )
    training = RLTrainingConfig(
        eval_every_n_steps=settings["steps"] + 1,
        max_steps=settings["steps"],
        actor_optimizer=optimizer,
        mini_batch_size=prompts,
        train_micro_batch_size=rows // settings["group_size"],
        rollout_micro_batch_size=prompts,
        compute_logps_micro_batch_size=prompts,
    )
    sampling = RolloutConfig(
        max_tokens_to_generate=settings["new_tokens"],
        temperature=1.0,
        max_prompt_length=prompt_tokens,
        kv_cache_size=prompt_tokens + settings["new_tokens"],
        seed=jax.random.PRNGKey(settings["seed"]),
    )
    cluster = RLCluster(
        actor=load_model(folder),
        tokenizer=AutoTokenizer.from_pretrained(folder),
        cluster_config=ClusterConfig(
            role_to_mesh=dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh),
            rollout_engine=Rollout,
            training_config=training,
            rollout_config=sampling,
        ),
    )
    config = GRPOConfig(
        advantage_estimator="rloo",
        loss_agg_mode="seq-mean-token-sum",
        num_generations=settings["group_size"],
        beta=0.0,
    )
    return GRPOLearner(cluster, config, reward), sampling


def batches(columns: dict[str, Sequence[Any]], prompts: int, steps: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield the prompts of each step and their other columns, from the start again after the last one."""
    arrays = {name: np.array(column) for name, column in columns.items()}
    for step in range(steps):
        yield {name: np.take(array, np.arange(prompts) + step * prompts, mode="wrap") for name, array in arrays.items()}


def main() -> None:
    """Train for some steps."""
    arguments = parse_peer("Tunix's side of benchmark_end_to_end", steps=True)
    settings = json.loads((arguments.problem / "problem.json").read_text()) | {"steps": arguments.steps}
    prompts = json.loads((arguments.problem / "prompts.json").read_text())
    rewards: list[float] = []
    seconds = {"reward": 0.0}

    def reward(completions: list[str], **_: Any) -> list[float]:
        started = time.perf_counter()
        rewards[:] = [even_share(completion) for completion in completions]
        seconds["reward"] = time.perf_counter() - started
        return rewards

    def write(step: int, loss: float, grad_norm: float) -> None:
        phases = {"sample": rollout.seconds, **seconds}
        line = {"step": step, "loss": loss, "reward": float(np.mean(rewards)), "grad_norm": grad_norm}
        line |= {"new_tokens": float(np.mean(rollout.lengths)), "phases": phases}
        rollout.seconds, rollout.lengths = 0.0, []
        with arguments.output.open("a") as file:
            file.write(json.dumps(line) + "\n")

    learner, _ = make_learner(settings, arguments.problem / "model", arguments.rows, settings["prompt_tokens"], reward)
    rollout = learner.rl_cluster.rollout
    learner.rl_cluster.actor_trainer.with_training_hooks(AfterStep(write))
    learner.train(batches({"prompts": prompts}, settings["prompts"], arguments.steps))


if __name__ == "__main__":
    main()
