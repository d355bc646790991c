# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Environments of the package verifiers: its tasks, harnesses and rewards, with the policy served to its agent.

```
run ── gateway ◄── requests ── harness of verifiers ─┐
 └──── control socket ── game server ── one process per episode
```
"""

import asyncio
import contextlib
import dataclasses
import importlib
import json
import math
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

from annotated_types import Ge

from marin_rl.environments.base import (
    AbstractEnvironment,
    AbstractSplitEnvironment,
    AgentConnection,
    AgentEpisode,
    AgentResult,
    EnvironmentConfig,
    SplitConfig,
)
from marin_rl.environments.game_process import GameError, GameServer
from marin_rl.environments.splits import Problem, problem_id, without_duplicates
from marin_rl.types import Message, Task
from marin_rl.utils.event_loop import run_in_thread
from marin_rl.utils.settings.fields import LOCAL_PATH, NAMES_FILES
from marin_rl.utils.user_code import require_extra

_KEY_VARIABLE = "MARIN_RL_EPISODE_API_KEY"
_TASKS_PER_CALL = 64


@EnvironmentConfig.register_subclass("verifiers")
@dataclasses.dataclass(frozen=True)
class VerifiersConfig(SplitConfig):
    """A taskset of verifiers (version 1 of its API), with its harness and its rewards.

    The harness requests the policy's replies from the run, which records their tokens. Each episode runs in a separate
    process, without isolation. Only environments with one agent are supported.
    """

    runs_agents: ClassVar[bool] = True

    taskset: str
    """Id of the taskset: the name of an installed package, or of a module in `folder`."""
    folder: str | None = dataclasses.field(default=None, metadata=LOCAL_PATH)
    """Folder that is added to Python's module search path, relative to the working directory."""
    env: dict[str, Any] = dataclasses.field(default_factory=dict, metadata=NAMES_FILES)
    """Further options of the environment, those that `vf-eval` takes as `--env.…`:
    `{agent: {harness: {id: "null"}, runtime: {type: subprocess}}}`. By default an agent runs in a runtime that needs an
    account."""
    client: dict[str, Any] = dataclasses.field(default_factory=dict, metadata=NAMES_FILES)
    """Further options of verifiers' client, those that `vf-eval` takes as `--client.…`. With `{type: train,
    renderer_model_name: FOLDER}` verifiers tokenizes the conversations itself and sends tokens. Default: it sends
    messages."""
    num_tasks: Annotated[int, Ge(1)] | None = None
    """Number of tasks to use, the first ones of the taskset, over all splits; null: all. Required for infinite
    tasksets."""
    success_at: float = 1.0
    """Sum of rewards from which an episode counts as a success."""
    name: str | None = None
    """Name for metrics; default: the id of the taskset."""

    def __post_init__(self) -> None:
        SplitConfig.__post_init__(self)
        if not self.taskset:
            raise ValueError("taskset is empty; give the id of a taskset")
        if "taskset" in self.env and "id" in self.env["taskset"]:
            raise ValueError("env.taskset has 'id'; give it as taskset")
        if reserved := sorted({"base_url", "api_key_var"} & self.client.keys()):
            raise ValueError(f"client has {', '.join(reserved)}, which differ between episodes; remove them")
        if self.client.get("type") == "train" and not self.client.get("renderer_model_name"):
            raise ValueError("client.type is 'train', which needs the tokenizer: set client.renderer_model_name")

    def build(self) -> AbstractEnvironment:
        """Import the taskset and load its tasks, in a separate process.

        Raises:
            MissingPackageError: if the package verifiers is not installed.
            GameServerError: if verifiers does not have the taskset, or rejects the options.
            ValueError: if the tasks cannot be loaded.
        """
        require_extra("verifiers", "environment.type: verifiers")
        env = {**self.env, "taskset": {**self.env.get("taskset", {}), "id": self.taskset}}
        folder = "" if self.folder is None else os.path.abspath(os.path.expanduser(self.folder))
        options = json.dumps(env), json.dumps(self.client), folder
        server = GameServer("marin_rl.environments.verifiers:VerifiersGame", *options)
        source = f"verifiers taskset {self.taskset!r}"
        try:
            loaded = run_in_thread(_load_tasks(server, self.num_tasks))
        except GameError as error:
            raise ValueError(f"{source}: {error}") from error
        data: dict[str, Mapping[str, Any]] = {}
        problems = without_duplicates(self._problems(loaded, data), source)
        splits = self.divide(problems, source)
        return VerifiersEnvironment(problems[0].task.environment, splits, self, data, server)

    def _problems(self, loaded: list[Mapping[str, Any]], data: dict[str, Mapping[str, Any]]) -> Iterator[Problem]:
        """Yield the problems, and add the data of their tasks to `data` by task id."""
        for index, values in enumerate(loaded):
            # The position in the taskset does not identify a problem.
            text = json.dumps({name: value for name, value in values["data"].items() if name != "idx"}, sort_keys=True)
            id = problem_id(text)
            data.setdefault(id, values["data"])
            answer, worked_answer = values["data"].get("answer"), values["data"].get("worked_answer")
            task = Task(
                id=id,
                environment=self.taskset if self.name is None else self.name,
                messages=tuple(Message(role=role, content=content) for role, content in values["messages"]),
                answer=answer if isinstance(answer, str) else "",
                worked_answer=worked_answer if isinstance(worked_answer, str) else None,
            )
            yield Problem(text, task, where=f"task {index}")


async def _load_tasks(server: GameServer, limit: int | None) -> list[Mapping[str, Any]]:
    with contextlib.closing(await server.start()) as game:
        count = await game.call("load", limit=limit)
        pages = [
            await game.call("tasks", start=start, stop=start + _TASKS_PER_CALL)
            for start in range(0, count, _TASKS_PER_CALL)
        ]
    return [task for page in pages for task in page]


@dataclasses.dataclass(frozen=True)
class VerifiersEpisode(AgentEpisode):
    """An episode of verifiers, in a separate process."""

    config: VerifiersConfig
    server: GameServer
    data: Mapping[str, Any]
    """Data of the task, as JSON values."""

    async def play(self, connection: AgentConnection) -> AgentResult:
        """Run the episode.

        Raises:
            GameError: if the harness, the task or its scoring failed.
        """
        with contextlib.closing(await self.server.start()) as game:
            result = await game.call("play", data=self.data, base_url=connection.base_url, api_key=connection.api_key)
        success = float(math.fsum(result["rewards"].values()) >= self.config.success_at)
        return AgentResult(result["rewards"], {**result["metrics"], "success": success}, result["info"])


@dataclasses.dataclass(frozen=True)
class VerifiersEnvironment(AbstractSplitEnvironment):
    """Tasks and episodes of a taskset of verifiers."""

    config: VerifiersConfig
    data: Mapping[str, Mapping[str, Any]]
    """Data of the tasks by id."""
    server: GameServer
    """Runs the episodes."""

    async def start(self, task: Task, seed: int) -> AgentEpisode:
        """Start an episode; the seed is unused, because verifiers has none.

        Raises:
            ValueError: if the task belongs to another environment.
        """
        self.require_own(task, self.data)
        return VerifiersEpisode(self.config, self.server, self.data[task.id])


class VerifiersGame:
    """A taskset of verifiers and its environment. Runs in a separate process."""

    _env: ClassVar[Any] = None
    """The environment, which `prepare` creates for all processes."""
    _client: ClassVar[Any] = None
    """Config of the client, without address and key."""

    @classmethod
    def prepare(cls, env: str, client: str, folder: str) -> None:
        """Import verifiers and the taskset, create the environment, and load the tokenizer of a train client.

        Both configs are JSON. `folder` is added to the module search path, unless it is empty.

        Raises:
            ValueError: if the environment does not have exactly one agent, or repeats a failed attempt.
        """
        if folder:
            sys.path.insert(0, folder)
        import verifiers.v1 as vf
        from pydantic import TypeAdapter
        from verifiers.v1.clients.train import ElasticRendererPool
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils import loaders, version

        # Otherwise every episode would import these, and start git.
        for name in ("verifiers.v1.clients.eval", "httpcore", "anyio._backends._asyncio"):
            importlib.import_module(name)
        version.verifiers_commit()
        config = loaders.resolve_env_config(json.loads(env))
        agents = list(agent_config_fields(config))
        if len(agents) != 1:
            raise ValueError(f"the environment has the agents {', '.join(agents)}; only one agent can be trained")
        retries = getattr(config, agents[0]).retries
        if retries.max_retries or retries.rules:
            raise ValueError(f"env.{agents[0]}.retries is set; remove it: a rollout would contain failed attempts")
        cls._env = loaders.load_environment(config)
        options = {"type": "eval", **json.loads(client), "api_key_var": _KEY_VARIABLE}
        cls._client = TypeAdapter(vf.ClientConfig).validate_python(options)
        if isinstance(cls._client, vf.TrainClientConfig):
            # Threads of the tokenizer would not exist in the processes of the episodes.
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
            tokenizer, renderer = cls._client.renderer_model_name, cls._client.renderer
            assert tokenizer is not None  # VerifiersConfig requires it.
            asyncio.run(ElasticRendererPool(tokenizer, renderer, multiplex=cls._client.multiplex).grow())

    def load(self, limit: int | None) -> int:
        """Load the first `limit` tasks, or all; return their number.

        Raises:
            ValueError: if the taskset is infinite and `limit` is None.
        """
        taskset = self._env.taskset if limit is None else self._env.taskset.take(limit)
        if not taskset.bounded:
            raise ValueError("the taskset is infinite; set num_tasks")
        self._tasks = list(taskset)
        return len(self._tasks)

    def tasks(self, start: int, stop: int) -> list[dict[str, Any]]:
        """Return some of the loaded tasks: their `data` and, as role and content, the `messages` before a reply."""
        return [
            {"data": task.data.model_dump(mode="json", exclude_none=True), "messages": _messages(task.data)}
            for task in self._tasks[start:stop]
        ]

    def play(self, data: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
        """Run an episode; SIGTERM cancels it, so that verifiers ends the programs and containers of its runtime.

        `base_url` and `api_key` are those of the policy. Returns `rewards` with their weights and `metrics` by name,
        and `info`.

        Raises:
            RuntimeError: if the episode failed; the message has verifiers' first error.
        """
        os.environ[_KEY_VARIABLE] = api_key
        return asyncio.run(self._play(data, base_url))

    async def _play(self, data: dict[str, Any], base_url: str) -> dict[str, Any]:
        from verifiers.v1 import ModelContext

        running = asyncio.current_task()
        assert running is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
        task_type = type(self._env.taskset).task_type()
        # `tasks` leaves out null fields, which need not have a default.
        fields = {**dict.fromkeys(task_type.data_type().model_fields), **data}
        task = task_type(task_type.data_type().model_validate(fields), self._env.config.taskset.task)
        context = ModelContext("policy", self._client.model_copy(update={"base_url": base_url}))
        async with self._env.serving():
            episode = await self._env.run_episode(task, context)
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError(f"{errors[0].type}: {errors[0].message}" if errors else "the episode did not complete")
        if len(episode.traces) != 1:
            raise RuntimeError(
                f"the environment ran its agent {len(episode.traces)} times; only one run can be trained"
            )
        [trace] = episode.traces
        if missing := [name for name, reward in trace.rewards.items() if reward is None]:
            raise RuntimeError(f"verifiers has not computed the reward {missing[0]!r}")
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        return {
            "rewards": {_metric_name(name): reward.value for name, reward in trace.rewards.items()},
            "metrics": {_metric_name(name): value for name, value in metrics.items()},
            "info": {"stop_condition": trace.stop_condition},
        }


def _messages(data: Any) -> list[tuple[str, str]]:
    """Return role and content of the messages before the first reply; the task's name if the user's is not known."""
    from verifiers.v1.types import content_text

    prompt = data.prompt if data.prompt is not None else data.name or data.id or ""
    if isinstance(prompt, str):
        messages = [("user", prompt)]
    else:
        messages = [(message.role, content_text(message.content)) for message in prompt]
    return [("system", data.system_prompt), *messages] if data.system_prompt else messages


def _metric_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name)
