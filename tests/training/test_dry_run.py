# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A dry run finds no problem exactly if a run starts, for broken and intact inputs of every kind that a run reads."""

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny_run import PROBLEMS, TinyRun, contents, copy_of, interrupted_after, make_run

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


def server_without_key(folder: Path) -> dict[str, Any]:
    (folder / "reload.py").write_text("def load(folder, version, base_url): ...\n")
    reload = {"folder": str(folder / "weights"), "path": str(folder / "reload.py"), "function": "load"}
    server = {"type": "openai", "base_url": "http://127.0.0.1:1/v1", "model": "policy", "reload": reload}
    return {"sampler": {**server, "api_key_env": "NO_SUCH_KEY"}}


RED: dict[str, tuple[Make, str]] = {
    "data file missing": (change(environment__path="absent.jsonl"), "absent.jsonl"),
    "data file is a folder": (lambda folder: {"environment__path": str(folder)}, "is a folder"),
    "data file empty": (with_data(""), "data.jsonl"),
    "data line is not JSON": (with_data('{"prompt": "1", "answer": "1"}\n{"prompt": \n'), "data.jsonl:2"),
    "data line is not UTF-8": (with_data(b'{"prompt": "1", "answer": "1"}\n\xff\n'), "data.jsonl:2"),
    "data column missing": (with_data('{"prompt": "1", "answr": "1"}\n'), "data.jsonl:1"),
    "one problem, none to train on": (
        with_data('{"prompt": "1", "answer": "1"}\n', environment__held_out=0.999),
        "tasks",
    ),
    "no held-out tasks": (change(environment__held_out=0.0), "no held_out tasks"),
    "no validation tasks": (change(environment__validation=0.0, **WARM), "no validation tasks"),
    "no worked answers": (with_data(UNWORKED, **WARM), "no worked answers"),
    "held-out file missing": (
        change(environment__held_out_path="absent.jsonl", environment__held_out=None),
        "absent.jsonl",
    ),
    "reward file missing": (
        change(environment__rewards=[{"type": "function", "path": "absent.py", "function": "score"}]),
        "absent.py",
    ),
    "reward file with a syntax error": (with_reward("def score(:"), "own.py"),
    "reward file that raises": (with_reward("1 / 0"), "ZeroDivisionError"),
    "reward function missing": (with_reward("", "scor"), "scor"),
    "reward function without decorator": (with_reward("def score(messages, **kwargs): ..."), "score"),
    "reward function without **kwargs": (
        with_reward("@reward_function\ndef score(messages, ground_truth):\n    return 1.0"),
        "**kwargs",
    ),
    "reward function with a missing option": (
        with_reward("@reward_function\ndef score(messages, ground_truth, scale, **kwargs):\n    return 1.0"),
        "scale",
    ),
    "reward is a string": (returning("'1'"), "str"),
    "reward is NaN": (returning("float('nan')"), "score"),
    "reward is None": (returning("None"), "returned None"),
    "reward function raises": (returning("1 / 0"), "ZeroDivisionError"),
    "environment file missing": (
        change(environment={"type": "file", "path": "absent.py", "name": "Own"}),
        "absent.py",
    ),
    "environment raises when it starts": (
        with_environment("    async def start(self, task, seed):\n        raise KeyError('lost')"),
        "KeyError: 'lost'",
    ),
    "environment raises in each step": (
        with_environment("    async def step(self, reply):\n        raise KeyError('lost')"),
        "KeyError: 'lost'",
    ),
    "environment returns a wrong step": (
        with_environment("    async def step(self, reply):\n        return 1.0"),
        "must return Step",
    ),
    "environment gives a NaN reward": (
        with_environment("    async def step(self, reply):\n        return Step({'correct': float('nan')})"),
        "nan",
    ),
    "environment gives no reward": (
        with_environment("    async def step(self, reply):\n        return Step({})"),
        "no reward",
    ),
    "tokenizer folder missing": (change(tokenizer__path="./absent"), "absent"),
    "tokenizer damaged": (
        with_tokenizer(lambda folder: (folder / "tokenizer.json").write_text("{")),
        "no loadable tokenizer",
    ),
    "tokenizer without template": (
        with_tokenizer(lambda folder: (folder / "chat_template.jinja").unlink()),
        "has no chat template",
    ),
    "tracker not installed": (change(trainer__tracker=[{"type": "trackio"}]), "the package trackio is not installed"),
    "template missing": (change(tokenizer__chat_template="absent.jinja"), "absent.jinja"),
    "template is not Jinja": (template("{% for m in messages %}"), "template"),
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
    "key of an inference server not set": (server_without_key, "sampler.api_key_env"),
    "run directory is a file": (with_file("file", "", "run_dir"), "is a file"),
    "run directory in a file": (
        lambda folder: {"run_dir": with_file("file", "", "run_dir")(folder)["run_dir"] + "/run"},
        "is a file",
    ),
    "run directory with another config": (with_config(b"seed: 1\n"), "contains a config.yaml, but no run"),
    "run directory with a damaged config": (with_config(b"\xff", "checkpoints"), "cannot read"),
    "run directory not writable": (change(run_dir="/sys/run"), "/sys/run"),
}

GREEN: dict[str, Make] = {
    "nothing changed": change(),
    "reward function": returning("float(len(messages[-1]['content']))"),
    "reward function that raises for some replies": returning("1 / len(messages[-1]['content'])"),
    "template without generation blocks, which only a warm start needs": template(PLAIN),
    "some prompts skipped": with_data(LONG, rollouts__long_prompts="skip"),
    "other tokenizer with a stop text": with_tokenizer(sampling__stop=["7"]),
    "own environment": with_environment(""),
}


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marin_rl.runs.curves.plot_curves", lambda metrics, curves: None)


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


@pytest.mark.parametrize(
    ("break_it", "changes"),
    [
        (lambda folder: (folder / "config.json").unlink(), {"model": None}),
        (lambda folder: None, {"model.num_layers": 2}),
    ],
)
def test_one_mistake_in_the_starting_weights_is_one_error(
    break_it: Callable[[Path], None],
    changes: dict[str, Any],
    finished_run: TinyRun,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
):
    folder = weights(finished_run, tmp_path)
    break_it(folder)
    assert make_run(tmp_path, **SHORT, initialize_from=str(folder), **changes).train("--dry_run") == 1
    assert capfd.readouterr().err.count("error: ") == 1


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


def test_changed_files_are_accepted_with_the_flag(interrupted: TinyRun, capfd: pytest.CaptureFixture[str]):
    cut_metrics(interrupted)
    assert interrupted.train("--dry_run", "--accept_changes") == 0
    assert "the run resumes after step 4 of 6" in capfd.readouterr().out


def test_changed_files_do_not_matter_to_a_finished_run(
    finished_run: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    run = copy_of(finished_run, tmp_path)
    cut_metrics(run)
    before = contents(run.path)
    assert run.train("--dry_run") == 0
    assert "the run is finished" in capfd.readouterr().out.splitlines()[-1]
    assert run.train() == 0
    assert contents(run.path) == before


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


def test_unreachable_store_is_not_waited_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    from marin_rl.training import dry_run

    released = threading.Event()
    monkeypatch.setattr(dry_run, "STORE_SECONDS", 0.01)
    monkeypatch.setattr(dry_run, "check_usable", lambda directory: released.wait())
    run = make_run(tmp_path, **SHORT, run_dir="memory://unreachable/run")
    try:
        assert run.train("--dry_run") == 0
    finally:
        released.set()
    lines = capfd.readouterr().out.splitlines()
    [unchecked] = [line for line in lines if line.startswith("not checked")]
    assert "the run directory (memory://unreachable/run: no result after 0.01 s" in unchecked
    assert lines[-1] == "no problems found: the run can start if its run directory is new or fits this config"
