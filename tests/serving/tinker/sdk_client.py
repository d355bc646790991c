# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A program that uses the SDK of Tinker, which may be installed in another environment; prints JSON."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any


def datums(types: Any, tokens: Sequence[Sequence[int]], **inputs: float) -> list[Any]:
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(list(sequence)),
            loss_fn_inputs={
                "target_tokens": list(sequence),
                **{name: [value] * len(sequence) for name, value in (inputs or {"weights": 1.0}).items()},
            },
        )
        for sequence in tokens
    ]


def session(tinker: Any) -> dict[str, Any]:
    """Use most of what the server has."""
    types, found = tinker.types, {}
    service = tinker.ServiceClient(user_metadata={"a": "b"})
    found["models"] = [one.model_name for one in service.get_server_capabilities().supported_models]
    client = service.create_lora_training_client(base_model="base", rank=8, user_metadata={"renderer_name": "r"})
    found["info"] = client.get_info().model_data.model_name
    first = client.forward_backward(datums(types, [[1, 2, 3], [4]]), "cross_entropy")
    step = client.optim_step(types.AdamParams(learning_rate=0.5))
    found["outputs"] = [one["logprobs"].tolist() for one in first.result().loss_fn_outputs]
    found["loss"] = first.result().metrics["loss:sum"]
    found["step"] = step.result().metrics
    ratio = {"logprobs": -1.0, "advantages": 0.5}
    config = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    client.forward(datums(types, [[5, 6]], **ratio), "ppo", config).result()
    # Chunks, of which the SDK sends the first one last.
    many = client.forward_backward(datums(types, [[n % 97, n % 89] for n in range(2500)]), "cross_entropy")
    many_step = client.optim_step(types.AdamParams(learning_rate=0.5))
    found["many"] = [one["logprobs"].tolist() for one in many.result().loss_fn_outputs]
    found["many_step"] = many_step.result().metrics
    nowhere, prompt = "tinker://x:train:0/weights/a", types.ModelInput.from_ints([1, 2, 3])
    for name, call in (
        ("refused", lambda: client.forward_backward(datums(types, [[1]], **ratio), "gspo").result()),
        ("failed", lambda: client.forward_backward(datums(types, [[2_000_000]]), "cross_entropy").result()),
        ("missing", lambda: service.create_sampling_client(model_path=nowhere).compute_logprobs(prompt).result()),
    ):
        try:
            call()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"

    path = client.save_state("one").result().path
    sampler_path = client.save_weights_for_sampler("one", ttl_seconds=3600).result().path
    sampler = client.save_weights_and_get_sampling_client()
    client.optim_step(types.AdamParams(learning_rate=0.5)).result()

    async def many_samples() -> list[float]:
        parameters = types.SamplingParams(max_tokens=2, stop=["x"])
        results = await asyncio.gather(*(sampler.sample_async(prompt, 2, parameters) for _ in range(60)))
        return [sequence.logprobs[0] for one in results for sequence in one.sequences]

    found["samples"] = asyncio.run(many_samples())
    found["prompt"] = sampler.compute_logprobs(prompt).result()
    named = service.create_sampling_client(model_path=sampler_path)
    top = named.sample(prompt, 1, types.SamplingParams(stop=[7]), include_prompt_logprobs=True, topk_prompt_logprobs=2)
    found["topk"] = top.result().topk_prompt_logprobs
    base = service.create_sampling_client(base_model="base")
    found["base"] = base.sample(prompt, 1, types.SamplingParams(max_tokens=1)).result().sequences[0].logprobs

    client.load_state_with_optimizer(path).result()
    found["loaded"] = client.optim_step(types.AdamParams(learning_rate=0.5)).result().metrics
    other = service.create_training_client_from_state_with_optimizer(path)
    found["again"] = other.optim_step(types.AdamParams(learning_rate=0.5)).result().metrics

    rest = service.create_rest_client()
    run = path.split("/")[2]
    found["run"] = rest.get_training_run(run).result().user_metadata
    found["runs"] = len(rest.list_training_runs().result().training_runs)
    found["checkpoints"] = sorted(one.checkpoint_id for one in rest.list_checkpoints(run).result().checkpoints)
    rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result()
    expiring = [one.expires_at is not None for one in rest.list_user_checkpoints().result().checkpoints]
    found["expiring"] = expiring
    rest.delete_checkpoint_from_tinker_path(path).result()
    found["left"] = [one.checkpoint_id for one in rest.list_checkpoints(run).result().checkpoints]
    found["session"] = len(rest.get_session(run.split(":")[0]).result().training_run_ids)
    with contextlib.suppress(AttributeError):
        service.close("success").result()
    return found


def likeliest(tinker: Any) -> list[Any]:
    """Ask for the likeliest tokens at the positions of a prompt, and for the log-probs of its tokens."""
    types = tinker.types
    base = tinker.ServiceClient().create_sampling_client(base_model="base")
    prompt, parameters = types.ModelInput.from_ints([70, 71, 72, 73]), types.SamplingParams(max_tokens=1)
    answer = base.sample(prompt, 1, parameters, include_prompt_logprobs=True, topk_prompt_logprobs=5).result()
    return [answer.topk_prompt_logprobs, answer.prompt_logprobs]


def steps(tinker: Any) -> dict[str, Any]:
    """Take ten steps; print the metrics of each one."""
    types = tinker.types
    client = tinker.ServiceClient().create_lora_training_client(base_model="base", rank=8)
    metrics: dict[str, Any] = {}
    for number in range(10):
        if metrics:
            print(json.dumps(metrics), flush=True)
        client.forward_backward(datums(types, [[number + 1, number + 2]]), "cross_entropy")
        metrics = client.optim_step(types.AdamParams(learning_rate=0.5)).result().metrics
    return metrics


if __name__ == "__main__":
    import tinker

    print(json.dumps({"session": session, "likeliest": likeliest, "steps": steps}[sys.argv[1]](tinker)), flush=True)
    # Threads of the SDK can abort an interpreter that ends.
    os._exit(0)
