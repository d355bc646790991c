# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A completions server in front of the built-in sampler, which serves a tiny run's exported weights."""

import dataclasses
from pathlib import Path

from haliax import Axis  # noqa: F401  before marin_rl: see tests/tiny_run.py

from marin_rl.config.command_line import parse_config
from marin_rl.config.train_config import TrainConfig
from marin_rl.learner.policy_model import load_hf_policy
from marin_rl.parts.rl import RunParts
from marin_rl.sampling.group_sampler import GroupSampler
from marin_rl.utils.devices.setup import start_devices
from tests.sampling.completions_server import CompletionsServer, SamplerEngine
from tests.tiny_run import TinyRun

RELOAD = Path(__file__).parents[2] / "experiments" / "reload_vllm.py"


def config_of(run: TinyRun) -> TrainConfig:
    """The run's config, as the command line reads it."""
    return parse_config(TrainConfig, run.argv).config


def served_by(server: CompletionsServer, folder: Path) -> dict[str, object]:
    """The `sampler` section of a run that has this server sample."""
    reload = {"folder": str(folder), "path": str(RELOAD), "function": "reload"}
    return {
        "type": "openai",
        "base_url": server.url,
        "model": server.model,
        "reload": reload,
        "retry": {"give_up_seconds": 0.0},
    }


@dataclasses.dataclass
class Loader:
    """Loads what the link `current` points to, as a server started on that path does."""

    config: TrainConfig
    """Model, tokenizer and sizes."""
    current: Path
    """The link."""
    loaded: list[str] = dataclasses.field(default_factory=list)
    """Names of the folders that were loaded."""
    sampler: GroupSampler | None = None
    """The engine."""

    def __call__(self) -> SamplerEngine:
        config = self.config
        trainer = start_devices(config.trainer, rows_per_device=config.rollouts.sizes.rows_per_device)
        tokenizer = config.tokenizer.build()
        model = load_hf_policy(str(self.current), tokenizer, trainer, config.model)
        self.loaded.append(self.current.resolve().name)
        if self.sampler is None:
            self.sampler = RunParts(config, trainer).open_group_sampler(model, 0)
        else:
            self.sampler.update_weights(model, 0)
        stop_token_ids = sorted(tokenizer.stop_token_ids)
        return SamplerEngine(self.sampler, model.vocab_size, config.rollouts.max_length, stop_token_ids)
