# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The dry run: checks everything that a run needs, as far as possible without devices and weights."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import ParamSpec, TypeVar

from marin_rl.batching.attention_kernel import PLATFORMS, attention_kernel
from marin_rl.config.input_files import digest_inputs
from marin_rl.config.ray_cluster import check_engine
from marin_rl.config.reference_config import ServerReferenceConfig
from marin_rl.config.run_config import AbstractRunConfig
from marin_rl.config.sections import EvaluationConfig, Mode, WarmStartConfig
from marin_rl.config.supervised_config import AbstractSupervisedConfig
from marin_rl.config.train_config import TrainConfig
from marin_rl.environments.base import AbstractEnvironment, Split
from marin_rl.environments.dataset import DatasetConfig
from marin_rl.learner.logprobs import LOGPROB_BLOCK_SIZE
from marin_rl.learner.policy_spec import PolicySpec
from marin_rl.learner.starting_weights import check_first_policy, check_weight_files, hf_folder
from marin_rl.parts.model import Report
from marin_rl.parts.rl import RunParts
from marin_rl.rewards.component import RewardComponentConfig
from marin_rl.rewards.judge import LlmJudgeConfig
from marin_rl.rollouts.attempt import LongPrompts
from marin_rl.rollouts.reward_functions import RewardFunctions
from marin_rl.rollouts.run_rollouts import RolloutRunner
from marin_rl.runs.checkpoint import Checkpoints
from marin_rl.runs.lock import check_usable
from marin_rl.runs.run_directory import RunDirectory, require_config
from marin_rl.sampling.config import OpenAiSamplerConfig
from marin_rl.sampling.sampler import PromptTooLongError
from marin_rl.sessions.config_changes import finished_progress, plan_changes
from marin_rl.sessions.earlier_run import resolve_model
from marin_rl.sessions.step_records import check_trackers
from marin_rl.sessions.trial_rollouts import (
    TRIAL_TASKS,
    FixedReplies,
    agent_environments,
    describe_trials,
    trial_problems,
    trial_warnings,
    try_replies,
)
from marin_rl.tokenization.chat_template import ChatTemplateError
from marin_rl.training import evaluation, warm_start
from marin_rl.training.open_run import read_progress
from marin_rl.training.references import check_reference
from marin_rl.training.run_state import RUN_FILES, Progress, RunFiles, compare_on_resume
from marin_rl.training.supervised_run import describe_data, read_data
from marin_rl.types import Task
from marin_rl.utils.devices.setup import microbatch_rows
from marin_rl.utils.errors import USER_ERRORS, Closing, describe
from marin_rl.utils.event_loop import BackgroundLoop
from marin_rl.utils.output import escape_line, shorten
from marin_rl.utils.remote_path import StorageError
from marin_rl.utils.settings.fields import nested_sections
from marin_rl.utils.storage import storage_path
from marin_rl.utils.timing import notice_if_long
from marin_rl.utils.user_code import UserFileError

T = TypeVar("T")
P = ParamSpec("P")

CHECKED_DEMONSTRATIONS = 1000
"""Maximum number of worked answers that are tokenized."""
_NAMED_PROMPTS = 3
"""Maximum number of too long prompts that a message names."""
_SHOWN_PROMPT = 400
"""Maximum characters of the prompt that is shown."""
_SHOWN_COLUMNS = 500
"""Maximum characters of the names of columns that are not used."""


class DryRun:
    """Results of the checks so far."""

    def __init__(self, report: Report) -> None:
        """Start without results.

        Args:
            report: called with each line or table of results.
        """
        self.problems: list[str] = []
        """The reasons for which the run cannot start."""
        self.warnings: list[str] = []
        """Signs of mistakes with which the run can start."""
        self.report = report

    def attempt(self, check: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T | None:
        """Return the result of a check; None if it raises an error, which becomes a problem."""
        try:
            return check(*arguments, **keywords)
        except USER_ERRORS as error:
            if str(error) not in self.problems:
                self.problems.append(str(error))
            return None

    def line(self, name: str, value: str) -> None:
        """Report a quantity."""
        self.report(f"{name:<18}  {value}")

    def conclude(self, state: "_DirectoryState | None") -> list[str]:
        """Report the warnings, and what the run would do first if it can start; return the problems."""
        for warning in self.warnings:
            self.report(f"warning: {warning}")
        if state is not None and not self.problems:
            self.report(f"no problems found: {state.outlook}")
        return self.problems


def dry_run(
    config: TrainConfig, report: Report, *, accept_changes: bool = False, named: Collection[str] = ()
) -> list[str]:
    """Check everything that a run needs: files, tokenizer, prompts, rewards, trackers and run directory.

    The parts are built by the functions that a run uses. The run directory is not changed, no weights are loaded, and
    no device other than a CPU is used. Devices, servers, judges and agents are not checked.

    Args:
        config: training config.
        report: called with each line or table of results.
        accept_changes: whether a resume may continue with changed files.
        named: dotted keys that the command line gave, which a resume may change.

    Returns:
        The problems, one for each reason for which the run cannot start; empty if it can.
    """
    found = DryRun(report)
    resolved = found.attempt(resolve_model, config)
    config = resolved or config
    with contextlib.ExitStack() as opened:
        parts = RunParts(config, config.trainer, opened, report, asks_judges=False)
        state = found.attempt(_directory_state, config, accept_changes=accept_changes, named=named)
        found.attempt(check_weight_files, config.initialize_from, config.run_dir, config.tokenizer.path)
        found.attempt(check_trackers, config.trainer.tracker)
        found.attempt(check_engine, config.mode, config.workers)
        tokenizer = found.attempt(lambda: parts.tokenizer)
        environment = found.attempt(lambda: parts.environment)
        vocab_size = None
        # A model that differs from the starting weights has been reported.
        if tokenizer is not None and resolved is not None and config.model is not None:
            # A run with a checkpoint does not need the starting weights.
            vocab_size = state.progress.vocab_size if state is not None and state.progress is not None else None
            if vocab_size is None:
                weights = config.initialize_from, config.model
                vocab_size = found.attempt(check_first_policy, *weights, tokenizer, config.trainer)
                if vocab_size is not None:
                    found.attempt(parts.policy_spec(vocab_size).check_adapter)
            found.attempt(parts.check_sampler, vocab_size or tokenizer.vocab_size)
        if None not in (tokenizer, environment, config.model) and (reference := found.attempt(check_reference, parts)):
            found.line("reference model", reference)
        for key, section in nested_sections(config.environment, "environment"):
            if isinstance(section, DatasetConfig) and environment is not None and (unused := section.unused_columns()):
                report(f"columns not used: {_shown_columns(unused)} ({key})")
        if environment is None:
            found.attempt(_check_reward_files, config)
        else:
            _check_environment(found, parts, vocab_size)
        if (unchecked := found.attempt(_unchecked, parts, state)) is not None:
            found.line("not checked", "; ".join(unchecked))
    return found.conclude(state)


def dry_run_supervised(
    config: AbstractSupervisedConfig,
    report: Report,
    *,
    accept_changes: bool = False,
    named: Collection[str] = (),
) -> list[str]:
    """Check everything that a run on data needs: files, tokenizer, all rows, trackers and run directory.

    Args:
        config: config of the run.
        report: as for `dry_run`.
        accept_changes: as for `dry_run`.
        named: as for `dry_run`.

    Returns:
        The problems, one for each reason for which the run cannot start; empty if it can.
    """
    found = DryRun(report)
    found.attempt(check_trackers, config.trainer.tracker)
    if (resolved := found.attempt(resolve_model, config)) is None:
        return found.problems
    found.attempt(check_weight_files, resolved.initialize_from, resolved.run_dir, resolved.tokenizer.path)
    tokenizer = found.attempt(resolved.tokenizer.build)
    if tokenizer is None or (read := found.attempt(read_data, resolved)) is None:
        return found.problems
    config, data = read
    described, warnings = describe_data(data)
    found.line("data", described)
    if data.train.unused:
        report(f"columns not used: {_shown_columns(data.train.unused)}")
    found.warnings += warnings
    weights = config.initialize_from, config.model
    vocab_size = found.attempt(check_first_policy, *weights, tokenizer, config.trainer)
    if vocab_size is not None and config.model is not None:
        spec = PolicySpec(config.model, vocab_size, config.trainer, lora=config.lora)
        for name, value in _describe_policy(spec):
            found.line(name, value)
        found.attempt(spec.check_adapter)
    noun = "pairs" if config.trains_on_pairs else "rows"
    found.line("the run", f"{config.num_steps:,} steps of {config.batch.size:,} {noun}")
    return found.conclude(found.attempt(_directory_state, config, accept_changes=accept_changes, named=named))


@dataclasses.dataclass(frozen=True)
class _DirectoryState:
    """What a run directory contains."""

    outlook: str
    """What the run would do first."""
    progress: Progress | None = None
    """Progress of the run; None if it has not started."""
    unreachable: str | None = None
    """Why an object store could not be read."""


def _directory_state(config: AbstractRunConfig, *, accept_changes: bool, named: Collection[str]) -> _DirectoryState:
    """Check that the run can start or resume in its directory."""
    directory = RunDirectory(storage_path(config.run_dir, "run_dir"))
    outlook = f"the run is finished: it has done all {config.num_steps} steps"
    try:
        progress = finished_progress(config, directory, named, accept_changes=accept_changes)
        if progress is not None:
            return _DirectoryState(outlook, progress)
        check_usable(directory)
        require_config(directory)
        plan_changes(directory, config, named)
        checkpoints = Checkpoints(directory.checkpoints, config.checkpoint)
        loaded = checkpoints.restore_newest(
            lambda saved: (read_progress(saved), RunFiles.decode(saved.read(RUN_FILES)), saved)
        )
        if loaded is None:
            return _DirectoryState(f"the run starts from the beginning, in {directory.path}")
        progress, files, checkpoint = loaded
        compare_on_resume(files, checkpoint.path, digest_inputs(config), accept=accept_changes)
        if config.needs_initial_policy:
            checkpoints.open(0)
    except StorageError as error:
        # A machine without access to the store can check the config of a run on other machines.
        return _DirectoryState("the run can start if its run directory is new or fits this config", None, str(error))
    if progress.step < config.num_steps:
        outlook = f"the run resumes after step {progress.step} of {config.num_steps}"
    return _DirectoryState(outlook, progress)


def _check_reward_files(config: TrainConfig) -> None:
    """Check the reward functions of an environment that cannot be built, as `RunParts` does."""
    sections = nested_sections(config.environment, "environment")
    components = {key: (one,) for key, one in sections if isinstance(one, RewardComponentConfig)}
    loop = BackgroundLoop()
    with Closing(loop.close):
        RewardFunctions(components, config.sandbox.build(), loop, asks_judges=False).close()


def _check_environment(found: DryRun, parts: RunParts, vocab_size: int | None) -> None:
    """Check tasks, prompts and rewards; report the sizes of the run. Without a policy there is no vocabulary size."""
    config, environment = parts.config, parts.environment
    if found.attempt(_count_tasks, environment) is None:
        return
    if config.evaluation.tasks:
        found.attempt(evaluation.require_tasks, environment, environment.tasks(Split.HELD_OUT), split=Split.HELD_OUT)
    if config.warm_start.max_steps:
        found.attempt(warm_start.require_tasks, environment)
    with _without_warnings():
        rewards = found.attempt(lambda: parts.reward_functions)
        if vocab_size is None:
            return
        sampler = FixedReplies()
        runner = found.attempt(parts.make_runner, sampler, vocab_size, rewards or RewardFunctions())
        if runner is None:
            return
        _check_prompts(found, parts, runner, vocab_size)
        if rewards is not None:
            found.attempt(_check_rewards, found, config, runner, sampler)


def _count_tasks(environment: AbstractEnvironment) -> int:
    with _explained(f"environment {environment.name!r}: its tasks cannot be read:"):
        return sum(len(environment.tasks(split)) for split in Split)


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Suppress warnings of skipped prompts and failed rollouts, which the dry run counts."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _check_prompts(found: DryRun, parts: RunParts, runner: RolloutRunner, vocab_size: int) -> None:
    """Tokenize the prompts and worked answers that the run uses; report their numbers and the sizes of the run."""
    warm_up, environment = parts.config.warm_start, runner.environment
    train = environment.tasks(Split.TRAIN)
    used: dict[Split, Sequence[Task]] = {Split.TRAIN: train}
    counts = {Split.HELD_OUT: parts.config.evaluation.tasks}
    if warm_up.max_steps:
        counts[Split.VALIDATION] = warm_up.check_tasks
    with notice_if_long(found.report, "tokenizing all prompts ..."):
        for split, count in counts.items():
            tasks = environment.tasks(split) if count else ()
            used[split] = found.attempt(evaluation.first_of_each, tasks, count, runner) or ()
        held_out = len(used[Split.HELD_OUT])
        for name, value in describe_run(parts, vocab_size, train_tasks=len(train), held_out_tasks=held_out):
            found.line(name, value)
        for split, tasks in used.items():
            if tasks and (described := found.attempt(_describe_prompts, split, tasks, runner)) is not None:
                found.line(f"{split.value.replace('_', '-')} prompts", described)
    found.warnings += found.attempt(evaluation.small_split_warnings, parts.config, runner) or ()
    # A template that rejects it has been reported.
    with contextlib.suppress(ChatTemplateError):
        for task in train[:1]:
            found.line("first prompt", _shown_prompt(task, runner))
    if Split.VALIDATION in counts and (worked := found.attempt(_describe_worked, runner)) is not None:
        found.line("worked answers", worked)


def _describe_prompts(split: Split, tasks: Sequence[Task], runner: RolloutRunner) -> str:
    """Describe the lengths of prompts.

    Raises:
        PromptTooLongError: if the run would end with this error.
        ChatTemplateError: if the template rejects a prompt; the message names the task.
    """
    limits = runner.limits
    lengths = [_prompt_length(task, runner) for task in tasks]
    long = [(task, length) for task, length in zip(tasks, lengths, strict=True) if length > limits.longest_prompt]
    if long and limits.long_prompts is LongPrompts.ERROR:
        names = ", ".join(f"{task.id!r} ({length:,} tokens)" for task, length in long[:_NAMED_PROMPTS])
        more = ", ..." if len(long) > _NAMED_PROMPTS else ""
        raise PromptTooLongError(
            f"{len(long):,} of {len(tasks):,} {split.value} prompts do not fit, {names}{more}: "
            f"{limits.prompt_setting} allows {limits.longest_prompt:,} tokens; raise it, remove these tasks, or set "
            "rollouts.long_prompts: skip"
        )
    if len(long) == len(tasks):
        raise PromptTooLongError(
            f"all {len(tasks):,} {split.value} prompts have more than {limits.longest_prompt:,} tokens, and "
            f"rollouts.long_prompts: skip skips them; raise {limits.prompt_setting}"
        )
    shortest, longest = min(lengths), max(lengths)
    notes = [f"{len(tasks):,}, of {f'{shortest:,} to ' if shortest < longest else ''}{longest:,} tokens"]
    if long:
        notes.append(f"{len(long):,} exceed {limits.longest_prompt:,} (rollouts.long_prompts: {limits.long_prompts})")
    room = limits.max_length - min(longest, limits.longest_prompt)
    if room < limits.max_new_tokens:
        notes.append(f"the longest leaves room for {room:,} of sampling.max_new_tokens {limits.max_new_tokens:,}")
    return "; ".join(notes)


def _prompt_length(task: Task, runner: RolloutRunner) -> int:
    try:
        return len(runner.tokenizer.prompt_tokens(task.messages))
    except ChatTemplateError as error:
        raise ChatTemplateError(f"task {task.id!r} of environment {task.environment!r}: {error}") from error


def _shown_prompt(task: Task, runner: RolloutRunner) -> str:
    """Return the text of a prompt as the policy reads it."""
    tokens = runner.tokenizer.prompt_tokens(task.messages)
    text = runner.tokenizer.tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False)
    line = escape_line(text)
    shown = line if len(line) <= _SHOWN_PROMPT else f"{line[: _SHOWN_PROMPT // 2]} ... {line[-_SHOWN_PROMPT // 2 :]}"
    return f"{len(tokens):,} tokens: {shown}"


def _describe_worked(runner: RolloutRunner) -> str:
    """Tokenize worked answers as the warm start does, and count those that fit."""
    tasks = warm_start.worked_tasks(runner.environment)
    checked = tasks[:CHECKED_DEMONSTRATIONS]
    with _explained(f"environment {runner.environment.name!r}: a demonstration raised"):
        examples = [warm_start.worked_example(task, runner) for task in checked]
    fitting = len(warm_start.require_fitting(examples, runner))
    number = "all" if fitting == len(checked) else f"{fitting:,}"
    return f"{len(tasks):,}; {number} of {len(checked):,} checked ones fit into {runner.limits.max_length:,} tokens"


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Convert errors of a user's code, except those that explain themselves, to errors that begin with `what`."""
    try:
        yield
    except USER_ERRORS:
        raise
    except Exception as error:
        raise UserFileError(f"{what} {describe(error)}") from error


def _check_rewards(found: DryRun, config: TrainConfig, runner: RolloutRunner, sampler: FixedReplies) -> None:
    """Score garbage and right replies, and report the rewards."""
    count = TRIAL_TASKS if runner.limits.max_turns == 1 else 1
    agents = agent_environments(config.environment, runner.environment)
    fitting: dict[str, list[Task]] = {}
    for task in runner.environment.tasks(Split.TRAIN):
        of_environment = fitting.setdefault(task.environment, [])
        if task.environment not in agents and len(of_environment) < count and _fits(task, runner):
            of_environment.append(task)
    tasks = [task for of_environment in fitting.values() for task in of_environment]
    with notice_if_long(found.report, "scoring trial rollouts ..."):
        trials = try_replies(runner, sampler, tasks, config.seed)
    for name in (name for name, of_environment in fitting.items() if of_environment):
        of_environment = [of_task for of_task in trials if of_task[0].rollout.task.environment == name]
        found.report(describe_trials(of_environment[0]))
        found.problems += trial_problems(of_environment)
        found.warnings += trial_warnings(config.environment, config.sampling.max_new_tokens, of_environment)


def _fits(task: Task, runner: RolloutRunner) -> bool:
    try:
        return bool(runner.limits.prompt_tokens(task, runner.tokenizer))
    except (PromptTooLongError, ChatTemplateError):
        return False


def _shown_columns(columns: Sequence[str]) -> str:
    return escape_line(shorten(", ".join(columns), _SHOWN_COLUMNS))


def _unchecked(parts: RunParts, state: _DirectoryState | None) -> list[str]:
    """Return what only the run itself can check."""
    config = parts.config
    unchecked = ["the devices (their number, mesh and memory)"]
    is_new = state is not None and state.progress is None
    if config.initialize_from is not None and is_new and not Path(hf_folder(config.initialize_from)).is_dir():
        unchecked.append(f"the weight files of {config.initialize_from}, which are not on this machine")
    for key, section in nested_sections(config.environment, "environment"):
        if isinstance(section, LlmJudgeConfig):
            unchecked.append(f"{key}, the judge at {section.base_url}")
        if getattr(section, "runs_agents", False):
            unchecked.append(f"{key}, whose episodes are agents")
    for part in config.reference.parts:
        if isinstance(part, ServerReferenceConfig):
            unchecked.append(f"the teacher at {part.base_url}")
    if isinstance(config.sampler, OpenAiSamplerConfig):
        unchecked.append(f"the inference server at {config.sampler.base_url}")
    if config.mode is Mode.ASYNC:
        unchecked.append(f"the Ray cluster{'' if config.ray_address is None else f' at {config.ray_address}'}")
    if state is not None and state.unreachable is not None:
        unchecked.append(f"the run directory ({state.unreachable})")
    return unchecked


def _describe_policy(spec: PolicySpec) -> list[tuple[str, str]]:
    trained = "all parameters"
    if spec.lora is not None:
        share = spec.num_trained / spec.num_parameters
        trained = (
            f"an adapter of rank {spec.lora.rank} and alpha {spec.lora.alpha:g}, so of scale alpha / rank = "
            f"{spec.lora.scale:g}: {spec.num_trained:,} parameters, {share:.2%} of the model's, of "
            f"{', '.join(spec.lora.targets)}"
        )
    return [("parameters", f"{spec.num_parameters:,}, vocabulary {spec.vocab_size:,}"), ("trained", trained)]


def describe_run(parts: RunParts, vocab_size: int, *, train_tasks: int, held_out_tasks: int) -> list[tuple[str, str]]:
    """Describe the token and step counts of a run.

    Args:
        parts: parts of the run, without devices.
        vocab_size: vocabulary size of the policy.
        train_tasks: number of distinct training tasks.
        held_out_tasks: number of tasks of each evaluation; may be less than `evaluation.tasks`.

    Returns:
        Name and value of each quantity.
    """
    config = parts.config
    assert config.model is not None
    rollouts, limits = config.rollouts, config.sampling
    spec = PolicySpec(config.model, vocab_size, config.trainer, lora=config.lora)
    per_step, updates = rollouts.rollouts_per_step, config.updates
    evaluations = _count_evaluations(config.evaluation, config.warm_start, config.num_steps)
    microbatches: dict[str, tuple[int, int]] = {}
    for name in PLATFORMS:
        # Config validation has already rejected a row length that no platform supports.
        with contextlib.suppress(ValueError):
            row_length = rollouts.sizes.positions(attention_kernel(config.model, name))
            microbatches[name] = (microbatch_rows(config.trainer, rollouts.sizes.rows_per_device(name)), row_length)
    (platform, (rows, positions)), *others = microbatches.items()
    elsewhere = "".join(f"; {count:,} x {length:,} on {name}" for name, (count, length) in others)
    share = {True: "several sequences", False: "one sequence", None: "one or several sequences"}[rollouts.packing]
    block = min(config.logprob_block_size or LOGPROB_BLOCK_SIZE[platform], rows * positions)
    prompts = rollouts.prompts_per_step * config.num_steps
    resampling = f", {config.filter.max_batches} times that with resampling" if config.filter.max_batches > 1 else ""
    critic = "none"
    if config.critic is not None:
        critic = "one output on the policy's trunk" if config.critic.shared_trunk else "a separate trunk"
    return [
        *_describe_policy(spec),
        (
            "one step",
            f"{rollouts.prompts_per_step:,} prompts x {rollouts.group_size} attempts = {per_step:,} rollouts",
        ),
        ("sampled per step", f"at most {per_step * rollouts.max_turns * limits.max_new_tokens:,} tokens{resampling}"),
        (
            "updates per step",
            f"{updates.per_step:,} = {updates.epochs:,} x {updates.minibatches:,} (epochs x minibatches)",
        ),
        (
            "one microbatch",
            f"{rows:,} rows x {positions:,} positions = {rows * positions:,} tokens on each data-parallel device, "
            f"{share} in a row{elsewhere}",
        ),
        (
            "the run",
            f"{config.num_steps:,} steps, {updates.per_step * config.num_steps:,} updates, "
            f"{per_step * config.num_steps:,} rollouts, each of {train_tasks:,} training tasks "
            f"{prompts / train_tasks:.2f} times",
        ),
        (
            "logits at a time",
            f"{block:,} tokens x {vocab_size:,} floats on each data-parallel device",
        ),
        ("evaluations", f"{evaluations:,}, of {held_out_tasks:,} held-out tasks"),
        ("critic", critic),
    ]


def _count_evaluations(evaluation: EvaluationConfig, warm_start: WarmStartConfig, num_steps: int) -> int:
    if evaluation.tasks == 0:
        return 0
    before = 2 if warm_start.max_steps else 1
    during = max(num_steps - 1, 0) // evaluation.every if evaluation.every else 0
    return before + during + (1 if num_steps else 0)
