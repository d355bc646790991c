# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""RL post-training for language models: trainers for scripts and notebooks, and the parts of training loops.

The names below are public; see the page on the API for what is promised of them. They are imported when they are used.
"""

import importlib
import importlib.util
import logging
import os
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from marin_rl.batching.rl_example import RlExample as RlExample
    from marin_rl.batching.rl_example import pack_batch as pack_batch
    from marin_rl.batching.rollout_batch import batch_rollouts as batch_rollouts
    from marin_rl.batching.rows import row_layout as row_layout
    from marin_rl.config.supervised_config import DpoConfig as DpoConfig
    from marin_rl.config.supervised_config import SftConfig as SftConfig
    from marin_rl.config.train_config import TrainConfig as TrainConfig
    from marin_rl.environments.base import AbstractEnvironment as AbstractEnvironment
    from marin_rl.environments.base import Episode as Episode
    from marin_rl.environments.base import Step as Step
    from marin_rl.learner.logprobs import learner_logprobs as learner_logprobs
    from marin_rl.learner.loss import RlLoss as RlLoss
    from marin_rl.learner.starting_weights import load_policy as load_policy
    from marin_rl.learner.train_step import Learner as Learner
    from marin_rl.rewards.sandbox.functions import EvaluateResult as EvaluateResult
    from marin_rl.rewards.sandbox.functions import reward_function as reward_function
    from marin_rl.rollouts.attempt import Limits as Limits
    from marin_rl.rollouts.run_rollouts import RolloutRunner as RolloutRunner
    from marin_rl.rollouts.run_rollouts import run_tasks as run_tasks
    from marin_rl.sampling.config import SamplingConfig as SamplingConfig
    from marin_rl.sampling.group_sampler import GroupSampler as GroupSampler
    from marin_rl.trainers import DPOTrainer as DPOTrainer
    from marin_rl.trainers import RLTrainer as RLTrainer
    from marin_rl.trainers import SFTTrainer as SFTTrainer
    from marin_rl.types import Generation as Generation
    from marin_rl.types import Rollout as Rollout
    from marin_rl.types import RolloutGroup as RolloutGroup
    from marin_rl.types import Task as Task
    from marin_rl.types import Turn as Turn
    from marin_rl.utils.devices.setup import start_devices as start_devices

__version__ = "0.1.0"

_MODULES = {
    "batching.rl_example": ("RlExample", "pack_batch"),
    "batching.rollout_batch": ("batch_rollouts",),
    "batching.rows": ("row_layout",),
    "config.supervised_config": ("DpoConfig", "SftConfig"),
    "config.train_config": ("TrainConfig",),
    "environments.base": ("AbstractEnvironment", "Episode", "Step"),
    "learner.logprobs": ("learner_logprobs",),
    "learner.loss": ("RlLoss",),
    "learner.starting_weights": ("load_policy",),
    "learner.train_step": ("Learner",),
    "rewards.sandbox.functions": ("EvaluateResult", "reward_function"),
    "rollouts.attempt": ("Limits",),
    "rollouts.run_rollouts": ("RolloutRunner", "run_tasks"),
    "sampling.config": ("SamplingConfig",),
    "sampling.group_sampler": ("GroupSampler",),
    "trainers": ("DPOTrainer", "RLTrainer", "SFTTrainer"),
    "types": ("Generation", "Rollout", "RolloutGroup", "Task", "Turn"),
    "utils.devices.setup": ("start_devices",),
}
_PUBLIC = {name: f"marin_rl.{module}" for module, names in _MODULES.items() for name in names}
__all__ = sorted(_PUBLIC)

# Equinox's runtime checks are host callbacks, and programs with host callbacks are not kept in the compilation cache.
os.environ.setdefault("EQX_ON_ERROR", "off")

# XLA's alarm about compilations of more than two minutes is logged as an error, and only the level of the log hides it.
# Without a plugin for accelerators nothing is lost: errors are exceptions in Python, or fatal, which is logged.
if not any(map(importlib.util.find_spec, ("jax_plugins", "libtpu"))):
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

# Transformers 5 says so when it is imported; models here need no PyTorch.
logging.getLogger("transformers").addFilter(lambda record: not record.getMessage().startswith("PyTorch was not found"))
# In notebooks without ipywidgets, which nothing here needs.
logging.getLogger("ray.widgets.util").addFilter(lambda record: not record.getMessage().startswith("Missing packages"))
warnings.filterwarnings("ignore", "IProgress not found")


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'marin_rl' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_PUBLIC[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
