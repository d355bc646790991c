# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import json

from marin_rl.training.run_state import Progress


def test_progress_is_json():
    progress = Progress(
        step=3,
        updates=6,
        tasks_drawn=12,
        task_stream={"drawn": 12, "parts": {"ones": {"drawn": 12}}},
        episodes=48,
        sampled_tokens=100,
        trained_tokens=90,
        vocab_size=264,
        evaluations={"before RL": {"eval/ones/accuracy_sampled": 0.5}},
    )
    assert Progress(**json.loads(json.dumps(dataclasses.asdict(progress)))) == progress
