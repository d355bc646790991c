# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A program that takes one step with each loss, with the SDK of Tinker and in torch with float64; writes both.

The models of both are those of a folder in Hugging Face format. The formulas are those of the SDK's documentation.
"""

import copy
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tinker
import torch
from tinker import types
from transformers import AutoModelForCausalLM

CONTEXT = 16
STEP = {"learning_rate": 0.5, "beta1": 0.9, "beta2": 0.95, "eps": 1.0}
"""With such an epsilon, the step depends on the size of the gradient, and not on its sign alone."""
BETA, PAIRS = 0.3, 700
"""Of DPO: the pairs are more data than a chunk of the SDK has, and the two of a pair are in different ones."""
Inputs = Mapping[str, torch.Tensor]
Sequences = Sequence[Inputs]
"""Per datum its `tokens` and the inputs of the loss."""


def make_data(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Return sequences with any targets."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, CONTEXT + 1, count)
    return [{name: torch.tensor(rng.integers(0, 264, length)) for name in ("tokens", "targets")} for length in lengths]


def score(model: Any, data: Sequences) -> list[torch.Tensor]:
    """Return the log-probs of the targets of each datum."""
    tokens, targets = (
        torch.nn.utils.rnn.pad_sequence([one[name] for one in data], batch_first=True) for name in ("tokens", "targets")
    )
    logprobs = torch.log_softmax(model(tokens).logits, -1).gather(-1, targets[..., None])[..., 0]
    return [row[: len(one["tokens"])] for row, one in zip(logprobs, data, strict=True)]


def term(name: str, logprobs: torch.Tensor, one: Inputs, config: Mapping[str, float]) -> torch.Tensor:
    """Return the loss of a datum."""
    if name == "cross_entropy":
        return -(logprobs * one["weights"]).sum()
    advantages, old = one["advantages"], one["logprobs"]
    ratio = torch.exp(logprobs - old)
    if name == "dro":
        return -(logprobs * advantages - 0.5 * config["beta"] * (logprobs - old) ** 2).sum()
    if name == "importance_sampling":
        return -(ratio * advantages).sum()
    low, high = config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
    if name == "cispo":
        low, high = config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", 4.0)
    clipped = torch.clamp(ratio, low, high)
    if name == "cispo":
        return -(clipped.detach() * logprobs * advantages).sum()
    return -torch.minimum(ratio * advantages, clipped * advantages).sum()


def dpo(data: Sequence[Any], logprobs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    """Compute DPO's loss; the first half of the data are the chosen ones, with a reference of log-probs of -5."""
    rewards = torch.stack([BETA * (one + 5).sum() for one in logprobs])
    margins = rewards[:PAIRS] - rewards[PAIRS:]
    return -torch.nn.functional.logsigmoid(margins).sum() / 4, {"margin": margins.mean().item()}


def quadratic(data: Sequence[Any], logprobs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    """Compute the squared distance of log-probs from -5, and the product of two neighbouring ones."""
    loss = sum((one + 5).square().sum() / 20 + (one[1:] * one[:-1]).sum() / 50 for one in logprobs)
    assert isinstance(loss, torch.Tensor)
    return loss, {"square": loss.item()}


class Steps:
    """Takes steps from the same start, here and on the server."""

    def __init__(self, folder: str) -> None:
        self.start = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").double()
        # Otherwise the embedding of the padding token has no gradient.
        self.start.get_input_embeddings().padding_idx = None
        self.service, self.found = tinker.ServiceClient(), dict[str, Any]()

    def take(self, name: str, data: Sequences, ask: Callable[..., Any], loss: Callable[..., Any]) -> None:
        """Take a step with a loss; keep log-probs, loss, metrics and new weights."""
        client = self.service.create_lora_training_client(base_model="base", rank=0)
        sent = [
            types.Datum(
                model_input=types.ModelInput.from_ints(one["tokens"].tolist()),
                loss_fn_inputs={
                    {"targets": "target_tokens"}.get(key, key): values for key, values in one.items() if key != "tokens"
                },
            )
            for one in data
        ]
        result = ask(client, sent).result()
        client.optim_step(types.AdamParams(**STEP)).result()
        path = client.save_state(name.replace(" ", "-")).result().path

        model = copy.deepcopy(self.start)
        logprobs = score(model, data)
        expected, metrics = loss(logprobs)
        expected.backward()
        options = {"lr": STEP["learning_rate"], "betas": (STEP["beta1"], STEP["beta2"]), "eps": STEP["eps"]}
        torch.optim.AdamW(model.parameters(), weight_decay=0, **options).step()
        given = {key: value for key, value in result.metrics.items() if key in metrics}
        self.found |= {
            f"{name}/path": path,
            f"{name}/metrics": [[given[key], value] for key, value in metrics.items()],
            f"{name}/logprobs": [
                torch.cat([torch.tensor(one["logprobs"].data) for one in result.loss_fn_outputs]).numpy(),
                torch.cat(logprobs).detach().numpy(),
            ],
            **{f"{name}/weights/{key}": weight.detach().numpy() for key, weight in model.named_parameters()},
            **{f"{name}/start/{key}": weight.detach().numpy() for key, weight in self.start.named_parameters()},
        }

    def take_built_in(self, title: str, **config: float) -> None:
        """Take a step with a loss of the server."""
        name, data = title.split()[0], make_data(30, seed=1)
        generator = torch.Generator().manual_seed(0)
        for one, logprobs in zip(data, score(self.start, data), strict=True):
            # Of both signs and zeros; ratios within, below and above all thresholds.
            factors, noise = torch.randn(2, len(logprobs), generator=generator)
            factors = torch.where(factors < -1, 0, factors) / 2
            old = logprobs.detach().float() + noise
            one |= {"weights": factors} if name == "cross_entropy" else {"advantages": factors, "logprobs": old}

        def loss(logprobs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
            total = torch.stack([term(name, one, of, config) for one, of in zip(logprobs, data, strict=True)]).sum()
            return total, {"loss:sum": total.item()}

        self.take(title, data, lambda client, sent: client.forward_backward(sent, name, config or None), loss)

    def take_custom(self, loss: Callable[..., Any], data: Sequences) -> None:
        """Take a step with a loss that the SDK computes."""
        ask = lambda client, sent: client.forward_backward_custom(sent, loss)  # noqa: E731
        self.take(loss.__name__, data, ask, lambda logprobs: loss(data, logprobs))


def main(folder: str, output: str) -> None:
    """Take all steps."""
    steps = Steps(folder)
    for name in ("cross_entropy", "importance_sampling", "ppo", "cispo"):
        steps.take_built_in(name)
    steps.take_built_in("dro", beta=0.3)
    steps.take_built_in("ppo thresholds", clip_low_threshold=0.6, clip_high_threshold=1.7)
    steps.take_built_in("cispo thresholds", clip_low_threshold=0.6, clip_high_threshold=1.7)
    steps.take_custom(quadratic, make_data(30, seed=2))
    steps.take_custom(dpo, make_data(2 * PAIRS, seed=3))
    np.savez(output, **steps.found)


if __name__ == "__main__":
    main(*sys.argv[1:])
    # Threads of the SDK can abort an interpreter that ends.
    os._exit(0)
