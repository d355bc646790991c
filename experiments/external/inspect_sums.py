# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A task of inspect-ai on the problems of `experiments.external.expected`.

    MARIN_BASE_URL=http://127.0.0.1:8000/v1 MARIN_API_KEY=unused PROBLEMS=runs/external/problems.jsonl \
        inspect eval experiments/external/inspect_sums.py --model openai-api/marin/external --temperature 0

inspect-ai reads the address and the key of the provider `marin` from the environment.
"""

import os

from inspect_ai import Task, task
from inspect_ai.dataset import FieldSpec, json_dataset
from inspect_ai.scorer import exact
from inspect_ai.solver import generate


@task
def sums() -> Task:
    """Sums, right if the reply is the answer."""
    problems = json_dataset(os.environ["PROBLEMS"], FieldSpec(input="prompt", target="answer"))
    return Task(dataset=problems, solver=generate(), scorer=exact())
