# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Mistakes of users in configs and command lines, with the text that must be reported for each."""

import contextlib
import dataclasses
import io
import json
import os
import sys
from pathlib import Path

from marin_rl.train import main

BASE = """\
run_dir: runs/test
environment: {type: arithmetic}
model: {type: llama, seq_len: 64, hidden_dim: 16, intermediate_dim: 32, num_layers: 1, num_heads: 2, num_kv_heads: 2}
rollouts: {prompts_per_step: 4, group_size: 8, max_length: 32}
sampling: {max_new_tokens: 8}
"""


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A command line of `marin_rl.train` and what it must print."""

    arguments: str | tuple[str, ...]
    """Arguments after `--config base.yaml`, separated by spaces, or all arguments."""
    texts: tuple[str, ...]
    """Parts of the message: key, value and remedy."""
    lines: int = 1
    """Number of problems."""
    only_early: bool = False
    """Whether the complete check of `parse_config` does not report it, or with other words."""

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
    "optimizer without support": Mistake("--optimizer.type kron", ("optimizer.type is 'kron'", "use one of adam")),
    "environment": Mistake("--environment.type json", ("environment.type is 'json'", "'jsonl'")),
    "enum": Mistake("--mode asynchronous", ("mode is 'asynchronous'", "one of sync, async")),
    "levanter's enum": Mistake("--model.attn_backend flash", ("model.attn_backend is 'flash'", "splash")),
    "precision": Mistake("--trainer.mp fp7", ("trainer.mp is 'fp7'",)),
    "model without a context": Mistake("--model.type whisper", ("model.type 'whisper' is not supported",)),
    "schedule": Mistake("--optimizer.lr_schedule cosin", ("optimizer.lr_schedule is 'cosin'", "'cosine'")),
    "name for a tracker": Mistake(
        "--trainer.tracker wandb", ("trainer.tracker is 'wandb'", "write {type: wandb}"), only_early=True
    ),
    "rope": Mistake("--model.rope.type yarn", ("model.rope.type is 'yarn'", "use hf_yarn")),
    "upper case": Mistake("--environment.type JSONL", ("environment.type is 'JSONL'", "did you mean 'jsonl'")),
    "attention": Mistake("--model.attn_backend nvte", ("model.attn_backend is nvte", "set it to null")),
    # Ranges.
    "below the minimum": Mistake("--rollouts.group_size 0", ("rollouts.group_size is 0", "at least 1")),
    "negative": Mistake("--num_steps -3", ("num_steps is -3", "at least 0")),
    "temperature": Mistake("--sampling.temperature -1", ("sampling.temperature is -1",)),
    "learning rate": Mistake("--optimizer.learning_rate .inf", ("optimizer.learning_rate is inf", "finite number")),
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


def write_files(folder: Path) -> None:
    """Write `FILES` to a folder."""
    (folder / "data").mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    results = {}
    for case, mistake in MISTAKES.items():
        with contextlib.redirect_stderr(io.StringIO()) as output:
            status = main(mistake.argv)
        results[case] = status, output.getvalue(), "levanter" in sys.modules
    print(json.dumps(results))
