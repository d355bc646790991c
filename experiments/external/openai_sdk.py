# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The `openai` SDK against the server: every reply equals the evaluation's, tokens and log-probs bit for bit.

    python experiments/external/openai_sdk.py --problems runs/external/problems.jsonl

It asks each problem as chat and as a completion, streamed and not, 64 at a time, and needs only the package `openai`.
"""

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any, NamedTuple

import openai

TEMPLATE = "<|user|>{prompt}<|end|><|assistant|>"
"""The chat template of the byte tokenizer."""


class Reply(NamedTuple):
    """A reply, joined if it was streamed."""

    text: str
    """Its text."""
    token_ids: list[int]
    """Its tokens."""
    logprobs: list[float]
    """Their log-probabilities."""


async def ask(client: openai.AsyncOpenAI, model: str, prompt: str, chat: bool, stream: bool) -> Reply:
    """Ask one problem at temperature 0."""
    options: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": 4, "stream": stream}
    options["extra_body"] = {"return_token_ids": True}
    if chat:
        response = await client.chat.completions.create(
            messages=[{"role": "user", "content": prompt}], logprobs=True, **options
        )
    else:
        response = await client.completions.create(prompt=TEMPLATE.format(prompt=prompt), logprobs=0, **options)
    parts = [chunk.choices[0] async for chunk in response] if stream else [response.choices[0]]
    tokens = [token for part in parts for token in part.token_ids]
    if chat:
        logprobs = [entry.logprob for part in parts for entry in part.logprobs.content]
        texts = [(part.delta if stream else part.message).content or "" for part in parts]
    else:
        logprobs = [value for part in parts for value in part.logprobs.token_logprobs]
        texts = [part.text for part in parts]
    return Reply("".join(texts), tokens, logprobs)


async def compare(client: openai.AsyncOpenAI, model: str, problems: list[dict[str, Any]]) -> None:
    """Ask all problems in all four ways, and print how many replies are equal."""
    slots = asyncio.Semaphore(64)

    async def is_equal(problem: dict[str, Any], chat: bool, stream: bool) -> bool:
        async with slots:
            reply = await ask(client, model, problem["prompt"], chat, stream)
        return reply == Reply(problem["reply"], problem["token_ids"], problem["logprobs"])

    for chat in (False, True):
        for stream in (False, True):
            equal = sum(await asyncio.gather(*(is_equal(problem, chat, stream) for problem in problems)))
            name = f"{'chat' if chat else 'completions'}, {'streamed' if stream else 'whole'}"
            print(f"{name}: {equal} of {len(problems)} replies equal")


async def show_errors(client: openai.AsyncOpenAI, model: str) -> None:
    """Print the errors of invalid requests."""
    create: Any = client.completions.create
    for change in ({"model": "other"}, {"top_p": 0.9}, {"max_tokens": 10**6}, {"temperature": -1}, {"prompt": ""}):
        try:
            await create(**{"model": model, "prompt": "1+1", **change})
        except openai.APIStatusError as error:
            print(f"{change}: {type(error).__name__}: {error.message}")


async def main() -> None:
    """Run all comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--problems", type=Path, required=True, help="output of experiments.external.expected")
    parser.add_argument("--base_url", default="http://127.0.0.1:8000/v1", help="address of the server")
    arguments = parser.parse_args()
    problems = [json.loads(line) for line in arguments.problems.read_text(encoding="utf-8").splitlines()]
    async with openai.AsyncOpenAI(base_url=arguments.base_url, api_key="unused", max_retries=0) as client:
        [model] = [model.id async for model in client.models.list()]
        print(f"openai {openai.__version__}, model {model}")
        await compare(client, model, problems)
        await show_errors(client, model)


if __name__ == "__main__":
    asyncio.run(main())
