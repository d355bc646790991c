# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Mistakes of users in configs and command lines, with the text that must be reported for each."""

import contextlib
import dataclasses
import importlib
import io
import json
import os
import sys
from pathlib import Path

BASE = """\
run_dir: runs/test
environment: {type: arithmetic}
model: {type: llama, seq_len: 64, hidden_dim: 16, intermediate_dim: 32, num_layers: 1, num_heads: 2, num_kv_heads: 2}
rollouts: {prompts_per_step: 4, group_size: 8, max_length: 32}
sampling: {max_new_tokens: 8}
"""


OWN_ADVANTAGE = """\
import dataclasses
from marin_rl.objectives import AdvantageConfig

@AdvantageConfig.register_subclass("mistaken")
@dataclasses.dataclass(frozen=True)
class Mistaken(AdvantageConfig):
    scale: float = 1.0

    def compute(self, groups):
        return []
"""


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A command line and what it must print."""

    arguments: str | tuple[str, ...]
    """Arguments after `--config base.yaml`, separated by spaces, or all arguments."""
    texts: tuple[str, ...]
    """Parts of the message: key, value and remedy."""
    lines: int = 1
    """Number of problems."""
    only_early: bool = False
    """Whether the complete check of `parse_config` does not report it, or with other words."""
    program: str = "train"
    """Module of the command."""

    @property
    def argv(self) -> list[str]:
        """All arguments."""
        given = self.arguments
        return ["--config", "base.yaml", *given.split()] if isinstance(given, str) else list(given)


def _file(name: str, *texts: str, lines: int = 1) -> Mistake:
    return Mistake(("--config", name), (name, *texts), lines)


FILES: dict[str, str | bytes] = {
    "base.yaml": BASE,
    "empty.yaml": "# nothing yet\n",
    "list.yaml": "- seed: 1\n",
    "no_space.yaml": "seed:1\n",
    "tabs.yaml": "rollouts:\n\tgroup_size: 4\n",
    "conflict.yaml": "seed: 1\n<<<<<<< HEAD\nnum_steps: 1\n=======\nnum_steps: 2\n>>>>>>> other\n",
    "twice.yaml": "seed: 1\nseed: 2\n",
    "open.yaml": "model: {type: llama\nseed: 1\n",
    "colon.yaml": "run_dir: a: b\n",
    "indent.yaml": "seed: 1\n  num_steps: 2\n",
    "quote.yaml": 'run_dir: "runs\n',
    "alias.yaml": "run_dir: *runs\n",
    "documents.yaml": "seed: 1\n---\nseed: 2\n",
    "utf16.yaml": "seed: 1\n".encode("utf-16"),
    "zero.yaml": "seed: 1\0\n",
    "bom.yaml": b"\xef\xbb\xbf" + (BASE + "sede: 1\n").encode(),
    "several.yaml": BASE
    + "sede: 1\nnum_steps: -1\nkl: {coef: 0.1}\nadvantage: {type: grop}\n"
    + "optimizer: {type: adam, learning_rat: 1}\nupdates: {epochs: 0, minibatches: 0}\nreplay: {max_stalenes: 2}\n",
    "begun/config.yaml": BASE,
    "run/config.yaml": BASE,
    "run/checkpoints/step-00000002/manifest.json": "{}",
    "old/config.yaml": BASE + "former_key: 1\n",
    "old/checkpoints/step-00000002/manifest.json": "{}",
    "own.py": OWN_ADVANTAGE,
    "open.py": "def compute(groups\n",
    "rows.jsonl": '{"prompt": "1+1=", "answer": "2"}\n',
}
"""Files in the working directory by name; there is also a folder `data`."""

MISTAKES: dict[str, Mistake] = {
    # Keys.
    "top key": Mistake("--sede 1", ("unknown key sede", "did you mean 'seed'?")),
    "nested key": Mistake("--rollouts.group_sise 4", ("unknown key rollouts.group_sise", "'group_size'")),
    "key of another section": Mistake("--max_new_tokens 4", ("max_new_tokens", "sampling.max_new_tokens")),
    "key of another name": Mistake("--kl.coef 0.1", ("kl.coef", "kl.beta (of in_loss and in_reward)")),
    "key of another type": Mistake("--kl.beta 0.1", ("kl.beta", "belongs to kl.type in_loss or in_reward", "is none")),
    "nested model key": Mistake("--model.hiden_dim 32", ("model.hiden_dim", "'hidden_dim'")),
    "model key of another type": Mistake("--model.embed_pdrop 0", ("model.embed_pdrop", "model.type gpt2", "is llama")),
    "optimizer key": Mistake("--optimizer.learning_rat 1e-3", ("optimizer.learning_rat", "'learning_rate'")),
    "trainer key": Mistake("--trainer.tensor_parallel_axis [mlp]", ("trainer.tensor_parallel_axis", "_axes'")),
    "tracker key": Mistake(
        ("--config", "base.yaml", "--trainer.tracker", "{type: wandb, projct: x}"),
        ("trainer.tracker.projct", "'project'"),
    ),
    "no space after a colon": Mistake("--model {type:gpt2}", ("model.type:gpt2", "a space after the colon")),
    "environment key": Mistake("--environment.digit 2", ("environment.digit",)),
    # Types of values.
    "text for a number": Mistake("--seed one", ("seed is 'one'", "an integer")),
    "fraction for an integer": Mistake("--num_steps 1.5", ("num_steps is 1.5 (float)", "an integer")),
    "exponent for an integer": Mistake("--num_steps 1e3", ("num_steps is 1000.0", "write 1000")),
    "text for a switch": Mistake("--rollouts.packing maybe", ("rollouts.packing is 'maybe'", "true or false")),
    "number for a model size": Mistake("--model.num_layers two", ("model.num_layers is 'two'", "an integer")),
    "text for a learning rate": Mistake("--optimizer.learning_rate 1-e4", ("optimizer.learning_rate is '1-e4'",)),
    "value for a section": Mistake("--rollouts 8", ("rollouts is 8", "a section with prompts_per_step")),
    "name for a section": Mistake("--advantage grpo", ("advantage is 'grpo'", "write {type: grpo}")),
    "null": Mistake("--seed null", ("seed is None (null)", "an integer")),
    "missing": Mistake(("--run_dir", "x"), ("environment is missing", "model"), lines=2),
    # Choices.
    "advantage": Mistake("--advantage.type grop", ("advantage.type is 'grop'", "did you mean 'grpo'")),
    "model": Mistake("--model.type lama", ("model.type is 'lama'", "'llama'")),
    "model without support": Mistake("--model.type qwen", ("model.type 'qwen' is not supported", "use qwen2")),
    "optimizer": Mistake("--optimizer.type adamw", ("optimizer.type is 'adamw'", "'adam'")),
    "optimizer without support": Mistake("--optimizer.type scion", ("optimizer.type is 'scion'", "use one of adam")),
    "environment": Mistake("--environment.type json", ("environment.type is 'json'", "'jsonl'")),
    "enum": Mistake("--mode asynchronous", ("mode is 'asynchronous'", "one of sync, async")),
    "levanter's enum": Mistake("--model.attn_backend flash", ("model.attn_backend is 'flash'", "splash")),
    "precision": Mistake("--trainer.mp fp7", ("trainer.mp is 'fp7'",)),
    "no precision": Mistake("--trainer.mp null", ("trainer.mp is None (null)",)),
    "model without a context": Mistake("--model.type whisper", ("model.type 'whisper' is not supported",)),
    "schedule": Mistake("--optimizer.lr_schedule cosin", ("optimizer.lr_schedule is 'cosin'", "'cosine'")),
    "name for a tracker": Mistake(
        "--trainer.tracker wandb", ("trainer.tracker is 'wandb'", "write {type: wandb}"), only_early=True
    ),
    "rope": Mistake("--model.rope.type yarn", ("model.rope.type is 'yarn'", "use hf_yarn")),
    "upper case": Mistake("--environment.type JSONL", ("environment.type is 'JSONL'", "did you mean 'jsonl'")),
    "attention": Mistake("--model.attn_backend nvte", ("model.attn_backend is nvte", "set it to null")),
    # Files.
    # Ranges.
    "warmup": Mistake("--optimizer.warmup -1", ("optimizer.warmup is -1", "from 0 to 1, or a whole number")),
    "part of an update": Mistake("--optimizer.decay 1.5", ("optimizer.decay is 1.5", "from 0 to 1")),
    "clipping": Mistake("--optimizer.max_grad_norm -1", ("optimizer.max_grad_norm is -1", "at least 0")),
    "momentum": Mistake("--optimizer.beta2 1", ("optimizer.beta2 is 1", "below 1")),
    "pass@k": Mistake("--evaluation.pass_at [0,2,1]", ("evaluation.pass_at contains k = 0, 2",)),
    "rows and sequences": Mistake(
        "--rollouts.max_length 0 --rollouts.row_length 0",
        ("rollouts.max_length is 0", "rollouts.row_length is 0"),
        lines=2,
    ),
    "gemma": Mistake(
        ("--config", "base.yaml", "--model", "{type: gemma, seq_len: 64, hidden_dim: 16, num_heads: 2}"),
        ("model.head_dim is 256", "set it to 8"),
    ),
    "window": Mistake(
        ("--config", "base.yaml", "--model.type", "mixtral", "--model.seq_len", "64", "--model.sliding_window", "16"),
        ("rollouts.max_length 32", "model.sliding_window is 16", "to null"),
    ),
    "below the minimum": Mistake("--rollouts.group_size 0", ("rollouts.group_size is 0", "at least 1")),
    "negative": Mistake("--num_steps -3", ("num_steps is -3", "at least 0")),
    "temperature": Mistake("--sampling.temperature -1", ("sampling.temperature is -1",)),
    "learning rate": Mistake("--optimizer.learning_rate .inf", ("optimizer.learning_rate is inf", "must be finite")),
    "heads": Mistake("--model.num_heads 3", ("num_heads is 3", "num_kv_heads is 2", "one of 1, 3"), 2, only_early=True),
    "axis": Mistake("--trainer.model_axis_size 0", ("trainer.model_axis_size is 0", "at least 1")),
    "model size": Mistake("--model.num_layers 0", ("model.num_layers is 0", "at least 1")),
    "dropout": Mistake(
        (
            "--config",
            "base.yaml",
            "--model",
            "{type: gpt2, seq_len: 64, embed_pdrop: 0.1, resid_pdrop: 0, attn_pdrop: 0}",
        ),
        ("model.embed_pdrop to 0 (it is 0.1)",),
    ),
    "log level": Mistake("--logging {marin_rl:loud}", ("logging", "loud")),
    # Combinations.
    "group of one": Mistake("--rollouts.group_size 1", ("rollouts.group_size is 1", "type: reinforce")),
    "critic missing": Mistake("--advantage.type gae", ("'gae' needs a critic", "critic: {shared_trunk: true}")),
    "context": Mistake("--rollouts.max_length 128", ("rollouts.max_length is 128", "model.seq_len")),
    "async and batch": Mistake("--updates.epochs 2", ("updates sets 2 updates", "ppo_clip")),
    "without effect": Mistake("--trainer.num_train_steps 7", ("trainer.num_train_steps is 7", "set num_steps")),
    "in two fields": Mistake("--rollouts.max_prompt_length 40", ("rollouts.max_prompt_length is 40", "which is 32")),
    # Files.
    "config missing": Mistake(("--config", "bas.yaml"), ("'bas.yaml' does not exist", "did you mean 'base.yaml'")),
    "config is a folder": Mistake(("--config", "data"), ("'data' is a folder", "a YAML file")),
    "data missing": Mistake(
        "--environment.type jsonl --environment.path row.jsonl",
        ("environment.path is 'row.jsonl'", "'rows.jsonl'"),
        only_early=True,
    ),
    "data is a folder": Mistake(
        "--environment.type jsonl --environment.path data",
        ("environment.path is 'data', which is a folder", "a file"),
        only_early=True,
    ),
    "reward is a folder": Mistake(
        (
            "--config",
            "base.yaml",
            "--environment",
            "{type: jsonl, path: rows.jsonl, rewards: [{type: function, path: data, function: f}]}",
        ),
        ("environment.rewards.0.path is 'data', which is a folder",),
        only_early=True,
    ),
    "import missing": Mistake(
        "--imports [x.py] --sede 1",
        ("imports: file 'x.py' does not exist", "unknown key sede"),
        lines=2,
        only_early=True,
    ),
    "import of a folder": Mistake("--imports [data/]", ("imports: 'data/' is a folder", "name a Python file")),
    "import of a module": Mistake("--imports [no_such.module]", ("there is no module 'no_such.module'",)),
    "import of text": Mistake("--imports [rows.jsonl]", ("rows.jsonl is not a Python file", "end with .py")),
    "import of an address": Mistake("--imports ['gs://a/x.py']", ("imports", "gs://a/x.py")),
    "template missing": Mistake(
        "--tokenizer.chat_template x.jinja", ("tokenizer.chat_template is 'x.jinja'", "not exist"), only_early=True
    ),
    "weights missing": Mistake(
        "--initialize_from /no/such/folder", ("initialize_from is '/no/such", "no such folder"), only_early=True
    ),
    # YAML.
    "empty": _file("empty.yaml", "is empty"),
    "list": _file("list.yaml", "contains a list", "a mapping of keys to values"),
    "no space": _file("no_space.yaml", "with a space after the colon"),
    "tabs": _file("tabs.yaml", "tabs.yaml:2:1", "spaces instead of tabs"),
    "conflict": _file("conflict.yaml", "conflict.yaml:2: '<<<<<<< HEAD'", "resolve it"),
    "key given twice": _file("twice.yaml", "twice.yaml:2:1", "'seed' is given twice", "line 1"),
    "open bracket": _file("open.yaml", "open.yaml:2:", "close the bracket"),
    "colon in text": _file("colon.yaml", "colon.yaml:1:", "quote text that contains a colon"),
    "indentation": _file("indent.yaml", "indent.yaml:2:", "check the indentation"),
    "open quote": _file("quote.yaml", "quote.yaml:2:1", "close the quote"),
    "star": _file("alias.yaml", "alias.yaml:1:", "quote text that begins with *"),
    "documents": _file("documents.yaml", "documents.yaml:2:", "a file of its own"),
    "UTF-16": _file("utf16.yaml", "not UTF-8 text: byte 0xff", "save it as UTF-8"),
    "zero byte": _file("zero.yaml", "position 7 is not allowed", "remove it"),
    "byte order mark": Mistake(("--config", "bom.yaml"), ("unknown key sede", "'seed'")),
    # Command lines.
    "file without option": Mistake(("base.yaml",), ("'base.yaml'", "--config base.yaml")),
    "option without value": Mistake("--seed", ("--seed needs a value", "--seed VALUE")),
    "unknown flag": Mistake("--dryrun", ("--dryrun needs a value", "did you mean --dry_run?")),
    "no config": Mistake((), ("no config", "--config FILE"), only_early=True),
    "open list": Mistake("--evaluation.pass_at [1", ("--evaluation.pass_at: '[1' is not valid YAML",)),
    "dots": Mistake("--rollouts..group_size 1", ("--rollouts..group_size is not a key",)),
    # Types of the user. The complete check comes later: a process imports a file once.
    "broken file of rewards": Mistake(
        ("--config", "base.yaml", "--environment.rewards", "[{type: function, path: open.py, function: compute}]"),
        ("environment.rewards.0.path is 'open.py'", "SyntaxError", "open.py:1: def compute"),
        lines=2,
        only_early=True,
    ),
    "broken file of types": Mistake(
        "--imports [open.py] --advantage.type x", ("open.py:1: def compute",), lines=2, only_early=True
    ),
    "key of an own type": Mistake(
        "--imports [own.py] --advantage.type mistaken --advantage.scle 2", ("'scale'",), only_early=True
    ),
    "value of an own type": Mistake(
        (
            "--config",
            "base.yaml",
            "--imports",
            "[own.py]",
            "--advantage",
            "{type: mistaken, scale: two}",
            "--sede",
            "1",
        ),
        ("advantage.scale is 'two'", "unknown key sede"),
        lines=2,
        only_early=True,
    ),
    "name of an own type": Mistake(
        "--imports [own.py] --advantage.type mistakn", ("did you mean 'mistaken'",), only_early=True
    ),
    # Several at once.
    "several": Mistake(
        ("--config", "several.yaml"),
        (
            *("unknown key sede", "num_steps is -1", "unknown key kl.coef", "advantage.type is 'grop'"),
            *("unknown key optimizer.learning_rat", "updates.epochs is 0", "updates.minibatches is 0"),
            "unknown key replay.max_stalenes",
        ),
        lines=8,
    ),
    "several combinations": Mistake(
        "--rollouts.group_size 1 --updates.epochs 2 --critic {} --trainer.profiler_num_steps 0",
        ("rollouts.group_size is 1", "updates sets 2 updates", "critic is set", "trainer.profiler_num_steps is 0"),
        lines=4,
    ),
    "the same twice": Mistake("--rollouts.group_sise 4 --rollouts.group_sise 5", ("rollouts.group_sise",)),
}


def _of(program: str, arguments: str, *texts: str, lines: int = 1) -> Mistake:
    return Mistake(tuple(arguments.split()), texts, lines, only_early=True, program=program)


OTHER_COMMANDS: dict[str, Mistake] = {
    "evaluate: no run": _of("evaluate", "", "run is missing", "give it with --run"),
    "evaluate: key": _of("evaluate", "--run run --stepp 2", "unknown key stepp", "'step'"),
    "evaluate: nested key": _of("evaluate", "--run run --evaluation.taks 2", "evaluation.taks", "'tasks'"),
    "evaluate: value": _of("evaluate", "--run run --step two", "step is 'two'", "an integer"),
    "evaluate: range": _of("evaluate", "--run run --temperature -1", "temperature is -1", "at least 1e-30"),
    "evaluate: environment": _of("evaluate", "--run run --environment.type json", "environment.type", "'jsonl'"),
    "evaluate: processes": _of("evaluate", "--run run --distributed.num_proceses 2", "distributed.num_proceses"),
    "evaluate: several": _of("evaluate", "--rn run --step x --evaluation.samples 0", "rn", "step", "samples", lines=3),
    "evaluate: no folder": _of("evaluate", "--run no", "'no' is not a run directory", "does not exist"),
    "evaluate: not a run": _of("evaluate", "--run data", "'data' is not a run directory", "no config.yaml"),
    "evaluate: no checkpoint": _of("evaluate", "--run begun", "run 'begun' has no checkpoint yet"),
    "evaluate: other step": _of("evaluate", "--run run --step 3", "no checkpoint of step 3", "it has [2]"),
    "evaluate: config missing": _of("evaluate", "--run run --config bas.yaml", "'bas.yaml' does not exist"),
    "evaluate: imports missing": _of("evaluate", "--run run --imports [x.py]", "imports", "'x.py' does not exist"),
    "serve: no policy": _of("serve", "", "give either run", "or model"),
    "serve: key": _of("serve", "--run run --prot 80", "unknown key prot", "'port'"),
    "serve: value": _of("serve", "--run run --port http", "port is 'http'", "an integer"),
    "serve: range": _of("serve", "--run run --port 70000", "port is 70000", "from 0 to 65535"),
    "serve: no folder": _of("serve", "--run no --port 0", "'no' is not a run directory"),
    "serve: no checkpoint": _of("serve", "--run begun --port 0", "run 'begun' has no checkpoint yet"),
    "serve: no model": _of("serve", "--model no --port 0", "--model is 'no', which is not a folder"),
    "serve: public address": _of("serve", "--run run --host 0.0.0.0", "host is '0.0.0.0'", "MARIN_RL_API_KEY"),
    "export: nothing": _of("export", "", "run is missing", "output is missing", lines=2),
    "export: key": _of("export", "--run run --output x --stp 2", "unknown key stp", "'step'"),
    "export: type": _of("export", "--run run --output x --export.dtype int8", "export.dtype is 'int8'"),
    "export: no folder": _of("export", "--run no --output x", "'no' is not a run directory"),
    "export: other step": _of("export", "--run run --output x --step 3", "no checkpoint of step 3"),
    "export: output exists": _of("export", "--run run --output begun", "output 'begun' exists"),
    "replay: nothing": _of("replay", "", "give --run DIR and --step N", "--fake SHAPE"),
    "replay: no folder": _of("replay", "--run no --step 1", "'no' is not a run directory"),
    "replay: no checkpoint": _of("replay", "--run begun --step 1", "run 'begun' has no checkpoint yet"),
    "replay: value of step": _of("replay", "--run run --step two", "--step", "'two'"),
    "replay: key": _of("replay", "--run run --step 1 --rollouts.group_sise 4", "rollouts.group_sise", "'group_size'"),
    "replay: combination": _of("replay", "--run run --step 1 --rollouts.group_size 1", "rollouts.group_size is 1"),
    "replay: of an older run": _of("replay", "--run old --step 1 --sede 1", "unknown key sede"),
    "replay: synthetic without config": _of("replay", "--fake prompt=8,completion=8", "no config", "--config FILE"),
    "replay: synthetic": _of("replay", "--fake prompt=8,completion=8 --config base.yaml --sede 1", "unknown key sede"),
    "plan: no topology": _of("plan", "--config base.yaml", "--topology"),
    "plan: topology": _of("plan", "--config base.yaml --topology v5q-8", "v5q-8"),
    "plan: key": _of("plan", "--config base.yaml --topology cpu:1 --sede 1", "unknown key sede"),
    "view: nothing": _of("view", "", "RUN", "--help"),
    "view: no folder": _of("view", "no", "'no' is not a run directory"),
    "view: option": _of("view", "run --stp 1", "--stp"),
    "view: value": _of("view", "run --step two", "--step", "'two'"),
    "view: range": _of("view", "run --steps 5-x", "'5-x' is not a range of steps", "10-20"),
    "view: sort": _of("view", "run --sort rewrd", "--sort", "'rewrd'"),
    "view: no id": _of("view", "run --id x", "'x'"),
    "launch: command": _of("launch", "locl", "unknown command 'locl'", "'local'"),
    "launch: action": _of("launch", "tpu strt", "unknown action 'strt'", "'start'"),
    "launch: key": _of("launch", "local --num_proceses 2 -- --config base.yaml", "num_proceses"),
    "launch: value": _of("launch", "local --num_processes two -- --config base.yaml", "'two'", "an integer"),
    "launch: training key": _of("launch", "local -- --config base.yaml --sede 1", "unknown key sede"),
    "launch: no arguments": _of("launch", "local", "no training arguments", "after --"),
    "launch: slice": _of(
        "launch", "tpu start --tpu_name a --zone b --slices.tpu_type v5q-8 -- --config base.yaml", "v5q-8"
    ),
}
"""Mistakes in command lines of the other commands."""


def write_files(folder: Path) -> None:
    """Write `FILES` to a folder."""
    (folder / "data").mkdir()
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    results = {}
    for case, mistake in (MISTAKES | OTHER_COMMANDS).items():
        main = importlib.import_module(f"marin_rl.{mistake.program}").main
        with contextlib.redirect_stderr(io.StringIO()) as output, contextlib.redirect_stdout(output):
            status = main(mistake.argv)
        results[case] = status, output.getvalue(), "levanter" in sys.modules
    print(json.dumps(results))
