# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Evaluation of a checkpoint, without levanter until it starts."""

import contextlib
import dataclasses
import functools
import logging
from typing import Annotated

from annotated_types import Ge

import marin_rl.rewards.pipeline  # noqa: F401  registers the rewards of environments
from marin_rl.config.sections import EvaluationConfig, Mode
from marin_rl.environments.base import EnvironmentConfig, Split
from marin_rl.runs.run_directory import open_with_checkpoint
from marin_rl.sampling.config import MIN_TEMPERATURE, LevanterSamplerConfig
from marin_rl.utils.devices.trainer_config import DistributedConfig, TrainerConfig
from marin_rl.utils.settings.checks import ConfigSection, check_fields
from marin_rl.utils.settings.decode import encode
from marin_rl.utils.settings.fields import LOCAL_PATH
from marin_rl.utils.settings.imports import IMPORTS
from marin_rl.utils.storage import storage_path

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class EvaluateConfig(ConfigSection):
    """Evaluation of a checkpoint."""

    run: str
    """Run directory, a path or an address such as `gs://bucket/run`; evaluation changes no file in it."""
    step: int | None = None
    """Step of the checkpoint; the newest valid checkpoint by default."""
    split: Split = Split.HELD_OUT
    """Tasks to evaluate on: `held_out`, `validation` or `train`."""
    temperature: (
        Annotated[float, Ge(MIN_TEMPERATURE), "or use evaluation.greedy for attempts at temperature 0"] | None
    ) = None
    """Temperature of the sampled attempts; the run's temperature by default."""
    evaluation: EvaluationConfig | None = None
    """Tasks, samples and pass@k; null: those of the run. If any key is given, the others have their defaults, not the
    values of the run."""
    environment: EnvironmentConfig | None = None
    """Environment to evaluate on instead of the run's, as in a training config:
    `--environment.type jsonl --environment.path FILE`, or a section of a file (`--config FILE`)."""
    imports: tuple[str, ...] = dataclasses.field(default=(), metadata=LOCAL_PATH)
    """Python files or modules that register the type of `environment`, as in a training config. Those of the run are
    imported too."""
    distributed: DistributedConfig = DistributedConfig()
    """Several processes that evaluate together, like `trainer.distributed` of a training run; one by default. All of
    them need access to the run directory."""

    def __post_init__(self) -> None:
        check_fields(self)
        storage_path(self.run, "run")


def run_evaluation(config: EvaluateConfig) -> tuple[int, dict[str, float]]:
    """Evaluate a checkpoint. With several processes, each runs a share of the attempts.

    Returns:
        The step of the checkpoint, and the metrics of `marin_rl.training.evaluation.evaluate` and `reference_loss`.

    Raises:
        RunDirectoryError: if the run does not exist.
        CheckpointError: if the run has no checkpoint of this step, or no valid checkpoint.
    """
    if not config.distributed.initialize_jax_distributed:
        open_with_checkpoint(config.run, config.step)
    # Imported here because levanter takes seconds to import, and most mistakes can be reported without it.
    from marin_rl.utils import multihost
    from marin_rl.utils.devices.setup import join_processes
    from marin_rl.utils.host_status import exit_on_error, explain_errors, require_same_software

    # First, so that an error of one process ends the others, too.
    join_processes(TrainerConfig(jax_compilation_cache_dir=None, distributed=config.distributed))
    with exit_on_error(), explain_errors(), contextlib.ExitStack() as opened:
        require_same_software()
        settings = {**encode(config), "run": None, "distributed": None}
        multihost.require_equal({"settings": repr(settings).encode()}, "the evaluation")
        return _evaluate(config, opened)


def _evaluate(config: EvaluateConfig, opened: contextlib.ExitStack) -> tuple[int, dict[str, float]]:
    from marin_rl.config.input_files import NAMED, digest_inputs
    from marin_rl.learner.scoring import Scorer
    from marin_rl.parts.rl import RunParts
    from marin_rl.rollouts.metrics import FailureReports
    from marin_rl.sessions.earlier_run import load_run, require_rl, restore_checkpoint
    from marin_rl.training.evaluation import evaluate, first_of_each, reference_loss
    from marin_rl.training.open_run import restore_policy
    from marin_rl.training.shared_run import check_shared_sampling, require_same_tasks

    given, checkpoints = load_run(config.run, config.step)
    run = require_rl(given, config.run, "it cannot be evaluated on tasks")
    run = dataclasses.replace(
        run,
        environment=config.environment or run.environment,
        # The processes divide the groups among themselves, as in a synchronous run.
        mode=Mode.SYNC,
        sampler=LevanterSamplerConfig(),
        trainer=dataclasses.replace(run.trainer, distributed=config.distributed),
    )
    check_shared_sampling(run.sampler, run.batch_scoped_rewards())
    sections = ("tokenizer",) if config.environment is not None else ("tokenizer", "environment", IMPORTS, NAMED)
    evaluation = config.evaluation or run.evaluation
    parts = RunParts.start(run, of_other_machine=True, resources=opened)
    step, model = restore_checkpoint(
        checkpoints,
        config.step,
        digest_inputs(run, sections),
        functools.partial(restore_policy, parts),
    )
    sampler = parts.open_group_sampler(model, step)
    require_same_tasks(parts.environment)
    runner = parts.make_runner(sampler, model.vocab_size)
    metrics, groups = evaluate(
        runner,
        evaluation,
        temperature=config.temperature or run.sampling.temperature,
        seed=run.seed,
        split=config.split,
    )
    FailureReports(logger.warning).add("evaluation", groups, "count as wrong")
    scorer = Scorer(
        parts.trainer,
        parts.layout,
        pad_token_id=parts.tokenizer.pad_token_id,
        temperature=1.0,
        block_size=parts.logprob_block,
    )
    tasks = first_of_each(parts.environment.tasks(config.split), evaluation.tasks, runner)
    return step, metrics | reference_loss(runner, tasks, lambda batch: scorer.score(model, batch))
