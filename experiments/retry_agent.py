# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""An agent written with the `openai` SDK."""

import openai


async def play(task, base_url, api_key):
    """Ask for the answer, and ask once more if the reply is wrong."""
    # The connection is plain HTTP on this machine; preparing TLS would take most of the agent's time.
    http = openai.DefaultAsyncHttpxClient(verify=False)
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http) as client:
        messages = list(task["messages"])
        for reward in (1.0, 0.5):
            response = await client.chat.completions.create(model="policy", messages=messages)
            reply = response.choices[0].message.content
            if reply == task["answer"]:
                return {"correct": reward}
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "no"}]
    return {"correct": 0.0}
