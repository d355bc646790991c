# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A dry run finds no problem exactly if a run starts, for broken and intact inputs of every kind that a run reads."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import pytest
from levanter.models.llama import LlamaConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from marin_rl.config.sections import EvaluationConfig, RolloutConfig, UpdateConfig, WarmStartConfig
from marin_rl.config.train_config import TrainConfig
from marin_rl.environments.arithmetic import ArithmeticConfig
from marin_rl.learner.config import LoraConfig
from marin_rl.objectives.policy_loss import PpoClipLossConfig
from marin_rl.parts.rl import RunParts
from marin_rl.rollouts.config import ResampleGroupsConfig
from marin_rl.sampling.config import SamplingConfig
from marin_rl.sessions.dry_run import describe_run
from marin_rl.utils.levanter_line import seq_len
from marin_rl.utils.remote_path import StorageError
from tests.tiny_run import PROBLEMS, TinyRun, contents, interrupted_after, make_run

SHORT = {
    "num_steps": 1,
    "rollouts__prompts_per_step": 1,
    "rollouts__group_size": 2,
    "warm_start__max_steps": 0,
    "warm_start__check_tasks": 2,
    "evaluation": {"every": 0, "tasks": 1, "samples": 1, "greedy": False},
    "checkpoint__every": 0,
    "sandbox": {"workers": 1, "require": "none"},
}

Make = Callable[[Path], dict[str, Any]]
"""Writes the files of a case into a folder, and returns the changes of the config."""


def with_data(text: str | bytes, **changes: Any) -> Make:
    def make(folder: Path) -> dict[str, Any]:
        data = text if isinstance(text, bytes) else text.encode()
        (folder / "data.jsonl").write_bytes(data)
        return {"environment__path": str(folder / "data.jsonl"), **changes}

    return make


def with_reward(body: str, function: str = "score", **changes: Any) -> Make:
    def make(folder: Path) -> dict[str, Any]:
        (folder / "own.py").write_text(f"from marin_rl.rewards import reward_function\n{body}\n")
        reward = {"type": "function", "path": str(folder / "own.py"), "function": function}
        return {"environment__rewards": [reward], **changes}

    return make


def returning(value: str) -> Make:
    return with_reward(f"@reward_function\ndef score(messages, ground_truth, **kwargs):\n    return {value}")


def with_file(name: str, text: str, key: str) -> Make:
    def make(folder: Path) -> dict[str, Any]:
        (folder / name).write_text(text)
        return {key: str(folder / name)}

    return make


def with_environment(body: str) -> Make:
    code = f"""
from marin_rl.environments.base import AbstractEnvironment, Step

from marin_rl.types import Message, Task


class Own(AbstractEnvironment):
    name = "own"

    def tasks(self, split):
        return [Task(f"{{split}}{{n}}", "own", (Message(role="user", content=f"{{n}}"),), "1") for n in range(4)]

    async def start(self, task, seed):
        return self

    async def step(self, reply):
        return Step({{"correct": float(len(reply) % 2)}})

    async def close(self):
        pass

{body}
"""

    def make(folder: Path) -> dict[str, Any]:
        (folder / "own.py").write_text(code)
        return {"environment": {"type": "file", "path": str(folder / "own.py"), "name": "Own"}}

    return make


def with_tokenizer(change: Callable[[Path], None] = lambda folder: None, **changes: Any) -> Make:
    """A tokenizer that can only write digits and `x`."""

    def make(folder: Path) -> dict[str, Any]:
        characters = "0123456789x"
        tokenizer = Tokenizer(models.BPE(vocab={character: id for id, character in enumerate(characters)}, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(["<|end|>"])
        saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=GENERATION)
        saved.save_pretrained(folder / "tokenizer")
        change(folder / "tokenizer")
        return {"tokenizer__path": str(folder / "tokenizer"), **changes}

    return make


GENERATION = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + eos_token }}"
    "{% endgeneration %}{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}"
LONG = "".join(
    f"{json.dumps({'prompt': '9' * (number % 20 + 1) + str(number), 'answer': '1'})}\n" for number in range(40)
)
ALL_LONG = "".join(f"{json.dumps({'prompt': '9' * 20 + str(number), 'answer': '1'})}\n" for number in range(40))
UNWORKED = "".join(f"{json.dumps({'prompt': problem['prompt'], 'answer': '1'})}\n" for problem in PROBLEMS)
WARM = {"warm_start__max_steps": 1}


def change(**changes: Any) -> Make:
    return lambda folder: changes


def template(text: str, **changes: Any) -> Make:
    return lambda folder: {**with_file("chat.jinja", text, "tokenizer__chat_template")(folder), **changes}


def with_config(text: bytes, *folders: str) -> Make:
    def make(folder: Path) -> dict[str, Any]:
        for name in ("", *folders):
            (folder / "mine" / name).mkdir(parents=True, exist_ok=True)
        (folder / "mine" / "config.yaml").write_bytes(text)
        return {"run_dir": str(folder / "mine")}

    return make


RED: dict[str, tuple[Make, str]] = {
    "data file missing": (change(environment__path="absent.jsonl"), "absent.jsonl"),
    "data line is not JSON": (with_data('{"prompt": "1", "answer": "1"}\n{"prompt": \n'), "data.jsonl:2"),
    "data column missing": (with_data('{"prompt": "1", "answr": "1"}\n'), "data.jsonl:1"),
    "no held-out tasks": (change(environment__held_out=0.0), "no held_out tasks"),
    "no validation tasks": (change(environment__validation=0.0, **WARM), "no validation tasks"),
    "no worked answers": (with_data(UNWORKED, **WARM), "no worked answers"),
    "reward file missing": (
        change(environment__rewards=[{"type": "function", "path": "absent.py", "function": "score"}]),
        "absent.py",
    ),
    "reward file that raises": (with_reward("1 / 0"), "ZeroDivisionError"),
    "reward function without **kwargs": (
        with_reward("@reward_function\ndef score(messages, ground_truth):\n    return 1.0"),
        "**kwargs",
    ),
    "reward is NaN": (returning("float('nan')"), "score"),
    "reward function raises": (returning("1 / 0"), "ZeroDivisionError"),
    "environment file missing": (
        change(environment={"type": "file", "path": "absent.py", "name": "Own"}),
        "absent.py",
    ),
    "environment raises in each step": (
        with_environment("    async def step(self, reply):\n        raise KeyError('lost')"),
        "KeyError: 'lost'",
    ),
    "environment gives no reward": (
        with_environment("    async def step(self, reply):\n        return Step({})"),
        "no reward",
    ),
    "tokenizer damaged": (
        with_tokenizer(lambda folder: (folder / "tokenizer.json").write_text("{")),
        "no loadable tokenizer",
    ),
    "tokenizer without template": (
        with_tokenizer(lambda folder: (folder / "chat_template.jinja").unlink()),
        "has no chat template",
    ),
    "tracker not installed": (change(trainer__tracker=[{"type": "trackio"}]), "the package trackio is not installed"),
    "template rejects the prompts": (template("{{ raise_exception('no users') }}"), "no users"),
    "template without generation blocks": (template(PLAIN, **WARM), "generation"),
    "prompts too long": (with_data(LONG), "prompts do not fit"),
    "all prompts too long to skip": (with_data(ALL_LONG, rollouts__long_prompts="skip"), "all "),
    "stop text that the tokenizer cannot write": (with_tokenizer(sampling__stop=["END"]), "'END'"),
    "learning-rate schedule longer than the run": (
        change(optimizer={"type": "adam", "warmup": 10}),
        "optimizer.warmup is 10, but the run has 1 updates",
    ),
    "program of an agent missing": (
        lambda folder: {
            "environment": {"type": "agent", "command": ["no_such_program"], "tasks": {"type": "arithmetic"}}
        },
        "no program 'no_such_program'",
    ),
    "run directory is a file": (with_file("file", "", "run_dir"), "is a file"),
    "run directory with another config": (with_config(b"seed: 1\n"), "contains a config.yaml, but no run"),
    "run directory not writable": (change(run_dir="/sys/run"), "/sys/run"),
}

GREEN: dict[str, Make] = {
    "nothing changed": change(),
    "reward function that raises for some replies": returning("1 / len(messages[-1]['content'])"),
    "template without generation blocks, which only a warm start needs": template(PLAIN),
    "some prompts skipped": with_data(LONG, rollouts__long_prompts="skip"),
    "other tokenizer with a stop text": with_tokenizer(sampling__stop=["7"]),
    "own environment": with_environment(""),
}


def assert_red(run: TinyRun, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Check that the dry run names a problem, changes nothing, and that the run would not start."""
    before = contents(run.path)
    assert run.train("--dry_run") == 1, capfd.readouterr().out
    error = capfd.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert contents(run.path) == before
    assert run.train() == 1
    capfd.readouterr()


def assert_green(run: TinyRun, capfd: pytest.CaptureFixture[str], outlook: str, step: int = 1) -> None:
    """Check that the dry run finds no problem, changes nothing, and that the run starts."""
    before = contents(run.path)
    assert run.train("--dry_run") == 0, capfd.readouterr().err
    printed = capfd.readouterr()
    assert printed.out.splitlines()[-1].startswith(f"no problems found: {outlook}")
    assert contents(run.path) == before
    assert run.train() == 0, capfd.readouterr().err
    assert run.records()[-1]["step"] == step


@pytest.mark.medium
@pytest.mark.parametrize("name", RED)
def test_red(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    make, message = RED[name]
    assert_red(make_run(tmp_path, **SHORT | make(tmp_path)), message, capfd)


@pytest.mark.medium
@pytest.mark.parametrize("name", GREEN)
def test_green(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert_green(make_run(tmp_path, **SHORT | GREEN[name](tmp_path)), capfd, "the run starts from the beginning")


def weights(finished: TinyRun, folder: Path) -> Path:
    return shutil.copytree(finished.path / "hf", folder / "weights")


def without_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def damaged(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"cut off")


def other_shape(folder: Path) -> None:
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, "intermediate_size": 64}))


def smaller_vocabulary(folder: Path) -> None:
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, "vocab_size": 128}))


@pytest.mark.parametrize(
    ("break_it", "changes", "message"),
    [
        (without_file, {}, "model.safetensors"),
        (damaged, {}, "missing or damaged: model.safetensors"),
        (other_shape, {}, "not those that its config.json describes"),
        (smaller_vocabulary, {}, "the tokenizer has 264 tokens"),
        (shutil.rmtree, {}, "there is no such folder"),
        (lambda folder: None, {"model.num_layers": 2}, "another model"),
        (lambda folder: None, {"model.hidden_dim": 32}, "another model"),
    ],
)
def test_broken_weights(
    break_it: Callable[[Path], None],
    changes: dict[str, Any],
    message: str,
    finished_run: TinyRun,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
):
    folder = weights(finished_run, tmp_path)
    break_it(folder)
    model = {} if changes else {"model": None}
    assert_red(make_run(tmp_path, **SHORT, initialize_from=str(folder), **model, **changes), message, capfd)


@pytest.mark.medium
def test_intact_weights(finished_run: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    run = make_run(tmp_path, **SHORT, initialize_from=str(weights(finished_run, tmp_path)), model=None)
    assert_green(run, capfd, "the run starts from the beginning")
    # The weights are not needed any more, but the tokenizer is.
    (tmp_path / "weights" / "model.safetensors").unlink()
    assert run.train("--dry_run") == 0
    assert "the run is finished: it has done all 1 steps" in capfd.readouterr().out


@pytest.fixture
def interrupted(finished_run: TinyRun, tmp_path: Path) -> TinyRun:
    """A run of which four of six steps are done."""
    return interrupted_after(finished_run, 4, tmp_path / "copy")


@pytest.mark.medium
def test_run_with_a_checkpoint_resumes(interrupted: TinyRun, capfd: pytest.CaptureFixture[str]):
    assert_green(interrupted, capfd, "the run resumes after step 4 of 6", step=6)


def change_seed(run: TinyRun) -> None:
    run.config.write_text(run.config.read_text().replace("seed: 3", "seed: 4"))


def remove_config(run: TinyRun) -> None:
    (run.path / "config.yaml").unlink()


def damage_config(run: TinyRun) -> None:
    (run.path / "config.yaml").write_bytes(b"\xff")


def damage_checkpoints(run: TinyRun) -> None:
    for path in run.checkpoints.iterdir():
        (path / "manifest.json").write_text("{")


def cut_metrics(run: TinyRun) -> None:
    (run.path / "metrics.jsonl").write_text("")


def change_rollouts(run: TinyRun) -> None:
    file = min((run.path / "rollouts").iterdir())
    file.write_bytes(file.read_bytes()[:-1])


def replace_folder(run: TinyRun) -> None:
    shutil.rmtree(run.path / "rollouts")
    (run.path / "rollouts").write_text("")


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (change_seed, "seed: 3 there, 4 now"),
        (remove_config, "without config.yaml"),
        (damage_config, "config.yaml"),
        (damage_checkpoints, "every checkpoint"),
        (cut_metrics, "metrics.jsonl is empty"),
        (change_rollouts, "was changed"),
        (replace_folder, "is a file, not a folder"),
    ],
)
def test_broken_run_directory(
    break_it: Callable[[TinyRun], None], message: str, interrupted: TinyRun, capfd: pytest.CaptureFixture[str]
):
    break_it(interrupted)
    assert_red(interrupted, message, capfd)


def test_unused_columns_are_listed_in_one_short_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    rows = [
        {**problem, "so\nurce": "sums", **{f"{index}_{'x' * 50}": index for index in range(99)}} for problem in PROBLEMS
    ]
    data = with_data("".join(f"{json.dumps(row)}\n" for row in rows))(tmp_path)
    assert make_run(tmp_path, **SHORT, **data).train("--dry_run") == 0
    [line] = [line for line in capfd.readouterr().out.splitlines() if line.startswith("columns not used")]
    assert line.startswith("columns not used: so\\nurce, 0_xx")
    assert line.endswith("(environment)")
    assert len(line) < 600


def test_locked_run_directory(interrupted: TinyRun, capfd: pytest.CaptureFixture[str]):
    from marin_rl.runs.lock import lock
    from marin_rl.runs.run_directory import RunDirectory

    with lock(RunDirectory(interrupted.path)):
        assert_red(interrupted, "is in use by process", capfd)
    assert interrupted.train("--dry_run") == 0


def test_all_problems_are_reported_at_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").write_text("")
    absent = {"type": "function", "path": "absent.py", "function": "score"}
    run = make_run(
        tmp_path,
        **SHORT,
        environment__path="absent.jsonl",
        environment__rewards=[absent, {**absent, "path": "lost.py", "name": "second"}],
        tokenizer__path="./no-tokenizer",
        run_dir=str(tmp_path / "file"),
    )
    assert run.train("--dry_run") == 1
    error = capfd.readouterr().err
    for name in ("absent.jsonl", "absent.py", "lost.py", "no-tokenizer"):
        assert name in error
    (tmp_path / "absent.jsonl").write_text("{")
    for name in ("absent.py", "lost.py"):
        (tmp_path / name).write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    assert run.train("--dry_run", "--tokenizer.path", "null") == 1
    error = capfd.readouterr().err
    for name in ("absent.jsonl:1", "absent.py", "lost.py", "is a file, not a folder"):
        assert name in error


@pytest.mark.parametrize(
    ("body", "changes", "message"),
    [
        (
            "    def tasks(self, split):\n        raise KeyError('lost')",
            {},
            "its tasks cannot be read: KeyError: 'lost'",
        ),
        (
            "    def demonstrate(self, task):\n        raise KeyError('lost')\n"
            "    def can_demonstrate(self, task):\n        return True",
            WARM,
            "a demonstration raised KeyError: 'lost'",
        ),
    ],
)
def test_errors_of_own_environments_are_sentences(
    body: str, changes: dict[str, Any], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    run = make_run(tmp_path, **{**SHORT, **with_environment(body)(tmp_path), **changes})
    assert run.train("--dry_run") == 1
    error = capfd.readouterr().err
    assert message in error
    assert "Traceback" not in error
    # Only a warm start needs demonstrations.
    if changes:
        assert run.train("--dry_run", "--warm_start.max_steps", "0") == 0


def test_unreachable_store_is_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    from marin_rl.sessions import dry_run

    def fail(directory: object) -> None:
        raise StorageError("no answer", "memory://unreachable/run", "check the connection")

    monkeypatch.setattr(dry_run, "check_usable", fail)
    run = make_run(tmp_path, **SHORT, run_dir="memory://unreachable/run")
    assert run.train("--dry_run") == 0
    lines = capfd.readouterr().out.splitlines()
    [unchecked] = [line for line in lines if line.startswith("not checked")]
    assert "the run directory (memory://unreachable/run: no answer" in unchecked
    assert lines[-1] == "no problems found: the run can start if its run directory is new or fits this config"


CONFIG = TrainConfig(
    environment=ArithmeticConfig(),
    run_dir="runs/test",
    model=LlamaConfig(**seq_len(64), hidden_dim=16, intermediate_dim=32, num_layers=2, num_heads=2, num_kv_heads=2),
    num_steps=100,
    rollouts=RolloutConfig(prompts_per_step=8, group_size=4, max_length=50, max_turns=3),
    sampling=SamplingConfig(max_new_tokens=6),
    evaluation=EvaluationConfig(every=25, tasks=20),
    logprob_block_size=16,
)


def lines(config: TrainConfig, vocab_size: int = 264, held_out_tasks: int = 20) -> dict[str, str]:
    parts = RunParts(config, config.trainer)
    return dict(describe_run(parts, vocab_size, train_tasks=400, held_out_tasks=held_out_tasks))


def test_counts_of_a_run():
    found = lines(CONFIG)
    # Embedding and head 264 x 16 each; a layer has 4 x 16 x 16 of attention, 3 x 16 x 32 of MLP and two norms of 16;
    # one more norm at the end.
    parameters = 2 * 264 * 16 + 2 * (4 * 256 + 3 * 512 + 32) + 16
    assert found["parameters"] == f"{parameters:,}, vocabulary 264"
    assert found["trained"] == "all parameters"
    adapted = lines(dataclasses.replace(CONFIG, initialize_from="weights", lora=LoraConfig(rank=2)))
    # A and B of rank 2: 16 + 16 numbers for each of 4 matrices of attention, 16 + 32 for each of 3 of the MLP.
    trained = 2 * 2 * (4 * 32 + 3 * 48)
    assert adapted["parameters"] == found["parameters"]
    assert adapted["trained"] == (
        f"an adapter of rank 2 and alpha 32, so of scale alpha / rank = 16: {trained:,} parameters, "
        f"{trained / parameters:.2%} of the model's, of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"
    )
    assert found["one step"] == "8 prompts x 4 attempts = 32 rollouts"
    assert found["sampled per step"] == "at most 576 tokens"
    assert found["updates per step"].startswith("1 = 1 x 1 ")
    # Rows of 50 tokens are rounded up to 128 positions; 6 rows have 768. A step has 32 rollouts.
    assert found["one microbatch"] == (
        "6 rows x 128 positions = 768 tokens on each data-parallel device, one or several sequences in a row; "
        "32 x 128 on gpu; 32 x 128 on tpu"
    )
    assert found["the run"] == "100 steps, 100 updates, 3,200 rollouts, each of 400 training tasks 2.00 times"
    assert found["logits at a time"].startswith("16 tokens x 264 floats")
    assert found["critic"] == "none"


def test_counts_with_several_updates_and_resampling():
    found = lines(
        dataclasses.replace(
            CONFIG,
            updates=UpdateConfig(epochs=2, minibatches=4),
            policy_loss=PpoClipLossConfig(),
            filter=ResampleGroupsConfig(max_batches=3),
        )
    )
    assert found["updates per step"].startswith("8 = 2 x 4 ")
    assert found["the run"].startswith("100 steps, 800 updates, 3,200 rollouts")
    assert found["sampled per step"] == "at most 576 tokens, 3 times that with resampling"


def test_number_of_evaluations():
    def count(**changes) -> str:
        return lines(dataclasses.replace(CONFIG, **changes))["evaluations"].split(",")[0]

    # Before RL, after 25, 50 and 75 updates, and at the end.
    assert count() == "5"
    assert count(warm_start=WarmStartConfig(max_steps=10)) == "6"
    assert count(evaluation=EvaluationConfig(every=0)) == "2"
    assert count(evaluation=EvaluationConfig(every=30)) == "5"
    assert count(num_steps=0) == "1"
    # Not `evaluation.tasks`, of which there may be fewer.
    assert lines(CONFIG, held_out_tasks=7)["evaluations"] == "5, of 7 held-out tasks"
