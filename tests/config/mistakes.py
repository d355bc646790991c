# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Refused configs and command lines, with the texts that must be printed for each: key, value and remedy."""

import contextlib
import dataclasses
import importlib
import io
import json
import os
import shlex
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

    argv: list[str]
    texts: tuple[str, ...]
    """Parts of the message."""
    lines: int = 1
    """Number of problems."""
    program: str = "train"
    """Module of the command."""


def _of(arguments: str, *texts: str, lines: int = 1) -> Mistake:
    """A mistake in arguments after a valid config."""
    return Mistake(["--config", "base.yaml", *shlex.split(arguments)], texts, lines)


def _line(arguments: str, *texts: str, lines: int = 1, program: str = "train") -> Mistake:
    """A mistake in a whole command line."""
    return Mistake(shlex.split(arguments), texts, lines, program)


SERVER = (
    '{type: openai, base_url: "http://localhost:8000/v1", model: policy, '
    "reload: {folder: served, path: own.py, function: reload}}"
)


FILES: dict[str, str | bytes] = {
    "base.yaml": BASE,
    "sft.yaml": "run_dir: runs/sft\nmodel: {type: llama}\ndata: {path: rows.jsonl}\n",
    "empty.yaml": "# nothing yet\n",
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

SETTINGS: dict[str, Mistake] = {
    # Keys.
    "top key": _of("--sede 1", "unknown key sede", "did you mean 'seed'?"),
    "nested key": _of("--rollouts.group_sise 4", "unknown key rollouts.group_sise", "'group_size'"),
    "trainer key": _of("--trainer.tensor_parallel_axis [mlp]", "trainer.tensor_parallel_axis", "_axes'"),
    "without effect": _of("--trainer.num_train_steps 7", "trainer.num_train_steps is 7", "set num_steps"),
    # Types of values.
    "text for a number": _of("--seed one", "seed is 'one'", "an integer"),
    "exponent for an integer": _of("--num_steps 1e3", "num_steps is 1000.0", "write 1000"),
    "text for a switch": _of("--rollouts.packing maybe", "rollouts.packing is 'maybe'", "true or false"),
    "value for a section": _of("--rollouts 8", "rollouts is 8", "a section with prompts_per_step"),
    "name for a section": _of("--advantage grpo", "advantage is 'grpo'", "write {type: grpo}"),
    "null": _of("--seed null", "seed is None (null)", "an integer"),
    "missing": _line("--run_dir x", "environment is missing", "--environment"),
    "precision": _of("--trainer.mp fp7", "trainer.mp is 'fp7'"),
    # Choices.
    "advantage": _of("--advantage.type grop", "advantage.type is 'grop'", "did you mean 'grpo'"),
    "environment": _of("--environment.type JSONL", "environment.type is 'JSONL'", "did you mean 'jsonl'"),
    "enum": _of("--mode asynchronous", "mode is 'asynchronous'", "one of sync, async"),
    "log level": _of("--log_level loud", "log_level is 'loud'", "debug, info, warning, error"),
    "level of a module": _of(
        "--logging '{marin_rl.rollouts: loud}'", "logging.marin_rl.rollouts is 'loud'", "debug, info"
    ),
    "module of levels": _of("--logging '{marin_rl.rolouts: debug}'", "logging.marin_rl.rolouts does not name a module"),
    # Ranges.
    "below the minimum": _of("--rollouts.group_size 0", "rollouts.group_size is 0", "at least 1"),
    "pass@k": _of("--evaluation.pass_at [0,2,1]", "evaluation.pass_at contains k = 0, 2"),
    # One section.
    "prompt": _of("--rollouts.max_prompt_length 32", "max_prompt_length is 32; it must be below", "which is 32"),
    "row": _of("--rollouts.row_length 31", "row_length is 31, but", "raise row_length or lower max_length"),
    "uses": _of("--replay.max_uses 3", "replay.max_uses is 3", "from 1 to 2"),
    "no host": _of("--weights.host ''", "weights.host is empty", "127.0.0.1"),
    "microbatch": _of("--trainer.per_device_parallelism 0", "per_device_parallelism is 0", "at least 1, or -1"),
    "jax": _of("--trainer.jax_config.jax_enable_x46 true", "has 'jax_enable_x46'", "jax_enable_x64"),
    "mesh axis": _of("--trainer.axis_resources.mlp modle", "axis_resources.mlp is 'modle'", "replica, data"),
    "float16": _of("--trainer.mp p=f32,c=f16", "trainer.mp is", "c=f16", "use bfloat16, such as p=f32,c=bf16"),
    "resource below 0": _of("--workers.resources.GPU -1", "workers.resources.GPU is -1", "at least 0"),
    "part of a resource": _of("--workers.resources.CPU 1.5", "workers.resources.CPU is 1.5", "whole if above 1"),
    "chips": _of("--workers.resources.TPU 3", "workers.resources.TPU is 3; a worker uses 1, 2, 4 or 8 chips"),
    "name of a resource": _of("--workers.resources.tpu 4", "workers.resources has 'tpu', which Ray calls 'TPU'"),
    "several slices": _of("--workers.tpu_slice 2xv5e-8", "'2xv5e-8': it is the kind of one slice"),
    "slice and chips": _of(
        "--workers '{tpu_slice: \"v6e:2x2\", resources: {TPU: 4}}'", "workers.resources has TPU, but workers.tpu_slice"
    ),
    "hosts of slices": _of(
        "--workers '{tpu_slice: \"v5e:4x4\", num_workers: 6}'", "is 6, but a slice", "4 hosts", "such as 8"
    ),
    # Combinations.
    "group of one": _of("--rollouts.group_size 1", "group_size is 1, but advantage 'rloo'", "type: reinforce"),
    "filter": _of(
        "--rollouts.group_size 1 --advantage.type gae --critic {} --filter.type drop",
        *("filter 'drop' drops groups with equal rewards", "use filter: {type: keep}"),
    ),
    "critic missing": _of("--advantage.type gae", "'gae' needs a critic", "critic: {shared_trunk: true}"),
    "critic": _of("--critic {}", "critic is set, but advantage 'rloo'", "advantage: {type: gae}, or critic: null"),
    "penalty and mean": _of(
        "--advantage.type maxrl --kl '{type: in_reward, beta: 0.1}'",
        *("kl.type is in_reward, which can make returns negative, but advantage 'maxrl'", "{type: in_loss", "dr_grpo"),
    ),
    "overlong and mean": _of(
        "--advantage.type maxrl --overlong.buffer 1", "overlong.buffer is 1, which can make", "overlong.buffer: 0"
    ),
    "truncation and mean": _of(
        "--advantage.type maxrl --truncation '{type: reward, reward: -1}'", "truncation.reward is -1.0, which can make"
    ),
    "turns": _of("--advantage.type gigpo", "'gigpo' compares the turns", "advantage: {type: rloo}"),
    "observations": _of(
        "--observation_loss.coefficient 0.1", "observation_loss is set, but rollouts.max_turns is 1", "loss: null"
    ),
    "teacher in the update": _of(
        "--kl '{type: exact, beta: 0.1}' --reference '{type: policy, weights: average}'",
        *("kl.type is exact", "reference.type is 'policy'", "set reference: {type: checkpoint}"),
    ),
    "updates": _of("--updates '{epochs: 2, minibatches: 4}'", "updates sets 8 updates per step", "ppo_clip"),
    "minibatches": _of(
        "--updates.minibatches 33 --policy_loss.type ppo_clip", "minibatches is 33, but a step has only 32 rollouts"
    ),
    "weights of tokens": _of(
        "--policy_loss.type gspo --off_policy_correction.type tis",
        *("'tis' weights single tokens, but policy_loss 'gspo'", "off_policy_correction: {type: mask}"),
    ),
    "advantages of tokens": _of(
        "--policy_loss.type rloo_sequence --advantage '{type: reinforce, gamma: 0.9}'",
        *("advantage 'reinforce' differs between the tokens", "policy_loss: {type: ppo_clip}"),
    ),
    "reference of nothing": _of(
        "--reference '{type: checkpoint, path: base}'",
        "reference is set, but nothing uses it",
        "kl: {type: none, watch",
    ),
    "reference without context": _of(
        "--reference.type policy --distillation {}", "weights is live and context is null", "set context"
    ),
    "empty context": _of(
        "--reference '{type: policy, context: {}}' --distillation {}", "reference.context is empty", "context: null"
    ),
    "several averages": _of(
        "--reference '{type: by_environment, references: {a: {type: policy, weights: average}, b: {type: policy, "
        "weights: average, decay: 0.5}}}' --distillation {}",
        *("several values of decay", "use one"),
    ),
    "nested environments": _of(
        "--distillation {} --reference "
        "'{type: by_environment, references: {a: {type: by_environment, references: {a: {type: initial}}}}}'",
        "reference.references contains by_environment",
    ),
    "no environments": _of(
        "--reference '{type: by_environment, references: {}}' --distillation {}", "reference.references is empty"
    ),
    "address of a teacher": _of(
        "--reference '{type: server, base_url: localhost, model: t}' --distillation {}",
        *("reference.base_url is 'localhost'", "http://localhost:8000/v1"),
    ),
    "temperature of a teacher": _of(
        "--reference '{type: server, base_url: \"http://a\", model: t}' --distillation {} --sampling.temperature 0.5",
        *("sampling.temperature is 0.5, but servers", "temperature: 1.0, or load the teacher"),
    ),
    "distillation of sequences": _of(
        "--distillation {} --policy_loss.type gspo", "distillation gives every token", "policy_loss: {type: ppo_clip}"
    ),
    "distillation with a filter": _of(
        "--distillation.alone true --filter.type drop", "with distillation.alone rewards teach", "filter: {type: keep}"
    ),
    "distillation with a penalty in the reward": _of(
        "--distillation.alone true --kl.type in_reward --kl.beta 0.1",
        "kl.type is in_reward, but distillation.alone replaces",
        "kl: {type: none}",
    ),
    "distillation with a critic": _of(
        "--distillation.alone true --advantage.type gae --critic {}", "distillation.alone replaces", "critic: null"
    ),
    "overlong": _of("--overlong.buffer 65", "overlong.buffer is 65, but an answer has at most", "= 8 tokens"),
    "positions": _of("--trainer.tensor_parallel_axes [position,mlp]", "'position' can be split over", "only alone"),
    "cluster": _of("--ray_address ray://head:10001", "ray_address is 'ray://head:10001'", "`auto`, or `host:port`"),
    "loopback": _of(
        "--mode async --ray_address 10.0.0.1:6379",
        *("weights.host is 127.0.0.1", "ray_address '10.0.0.1:6379'", "set weights.host to an address"),
    ),
    "loopback by name": _of(
        "--mode async --ray_address auto --weights.host localhost",
        *("weights.host is localhost", "set ray_address: 127.0.0.1:PORT"),
    ),
    "server and workers": _of(
        f"--mode async --sampler '{SERVER}' --workers.num_workers 2", "num_workers is 2", "set workers.num_workers: 1"
    ),
    "server in flight": _of(
        f"--mode async --sampler '{SERVER}' --workers.refresh in_flight", "refresh is in_flight", "between_groups"
    ),
    "server without reload": _of("--sampler '{type: openai, base_url: \"http://a\", model: b}'", "sampler", "reload"),
    "resource of no machine": _of("--mode async --workers.resources.spot 1", "'spot', but ray_address is not set"),
    "slice of no cluster": _of("--mode async --workers.tpu_slice v6e:2x2", "v6e:2x2, but ray_address is not set"),
    "cluster of two engines": _of(
        "--mode async --workers.engine iris --ray_address h:1 --weights.host 0.0.0.0",
        "ray_address is 'h:1', but workers.engine is iris",
    ),
    "GPU of Iris": _of("--mode async --workers '{engine: iris, resources: {GPU: 1}}'", "'GPU', but Iris reserves CPU"),
    "dtype of workers": _of(
        "--mode async --workers.precision p=bf16,c=bf16",
        *("workers.precision has parameters in bfloat16", "trainer.mp, float32; set weights.dtype: bfloat16"),
    ),
    "scope": _of(
        "--mode async --environment.rewards '[{type: code}, {type: function, path: f.py, function: f, scope: batch}]'",
        *("environment.rewards.1 has scope: batch", "use scope: group, or mode: sync"),
    ),
    "scope in a mixture": _of(
        "--mode async --environment '{type: mixture, parts: [{environment: {type: arithmetic, rewards: "
        "[{type: function, path: f.py, function: f, scope: batch}]}}]}'",
        "environment.parts.0.environment.rewards.0 has scope: batch",
    ),
    **{
        f"agents of {part} with {advantage}": _of(
            f"--environment '{{type: mixture, parts: [{{environment: {part}}}]}}' --rollouts.max_turns 2 {advantage}",
            f"environment.parts.0.environment{key} runs agents",
        )
        for part, key in (
            ("{type: agent, command: [x], tasks: {type: arithmetic}}", ""),
            ("{type: verifiers, taskset: x}", ""),
            ("{type: textarena, id: x, opponent: {type: self}}", ".opponent"),
        )
        for advantage in ("--advantage.type gigpo", "--advantage.type gae --critic {}")
    },
    "several combinations": _of(
        "--rollouts.group_size 1 --updates.epochs 2 --critic {}",
        *("rollouts.group_size is 1", "updates sets 2 updates", "critic is set"),
        lines=3,
    ),
    # Files.
    "config missing": _line("--config bas.yaml", "'bas.yaml' does not exist", "did you mean 'base.yaml'"),
    "config is a folder": _line("--config data", "'data' is a folder", "a YAML file"),
    "data missing": _of(
        "--environment '{type: jsonl, path: row.jsonl}'", "environment.path is 'row.jsonl'", "'rows.jsonl'"
    ),
    "data is a folder": _of(
        "--environment '{type: jsonl, path: data}'", "environment.path is 'data', which is a folder", "a file"
    ),
    "broken file of rewards": _of(
        "--environment.rewards '[{type: function, path: open.py, function: f}]'",
        *("environment.rewards.0.path is 'open.py'", "SyntaxError", "open.py:1: def compute"),
        lines=2,
    ),
    "template missing": _of("--tokenizer.chat_template x.jinja", "chat_template is 'x.jinja'", "not exist"),
    "template as text": _of(f"--tokenizer.chat_template {'x' * 300}", "not a path", "write it into a file"),
    "weights missing": _of("--initialize_from /no/such/folder", "initialize_from is '/no/such", "no such folder"),
    "import missing": _of("--imports [x.py]", "imports: file 'x.py' does not exist"),
    "import of a folder": _of("--imports [data/]", "imports: 'data/' is a folder", "name a Python file"),
    "import of text": _of("--imports [rows.jsonl]", "rows.jsonl is not a Python file", "end with .py"),
    "import of a module": _of("--imports [no_such.module]", "there is no module 'no_such.module'"),
    "import of an address": _of("--imports '[\"gs://a/x.py\"]'", "imports is 'gs://a/x.py'", "a mounted file system"),
    "broken import": _of("--imports [open.py] --advantage.type x", "open.py:1: def compute", lines=2),
    "key of an own type": _of("--imports [own.py] --advantage.type mistaken --advantage.scle 2", "'scale'"),
    "value of an own type": _of(
        "--imports [own.py] --advantage '{type: mistaken, scale: two}' --sede 1",
        *("advantage.scale is 'two'", "unknown key sede"),
        lines=2,
    ),
    "name of an own type": _of("--imports [own.py] --advantage.type mistakn", "did you mean 'mistaken'"),
    # Addresses in place of paths.
    "protocol": _of("--run_dir gss://runs/rloo", "run_dir is 'gss://runs/rloo', but the protocol gss:// is unknown"),
    "protocol of weights": _of("--initialize_from s4://a/b", "initialize_from is 's4://a/b', but the protocol s4://"),
    "address of data": _of(
        "--environment '{type: jsonl, path: \"gs://a/b.jsonl\"}'",
        *("environment.path is 'gs://a/b.jsonl'", "a path on a mounted file system: gs:// is not supported here"),
    ),
    "address in a mixture": _of(
        "--environment '{type: mixture, parts: [{environment: {type: jsonl, path: a, held_out_path: \"b://c\"}}]}'",
        "environment.parts.0.environment.held_out_path is 'b://c'",
    ),
    "address of a cache": _of(
        "--trainer.jax_compilation_cache_dir memory://cache", "is 'memory://cache', but jax supports only gs:// and s3"
    ),
    # YAML.
    "empty": _line("--config empty.yaml", "empty.yaml", "is empty"),
    "no space": _line("--config no_space.yaml", "with a space after the colon"),
    "tabs": _line("--config tabs.yaml", "tabs.yaml:2:1", "spaces instead of tabs"),
    "conflict": _line("--config conflict.yaml", "conflict.yaml:2: '<<<<<<< HEAD'", "resolve it"),
    "key given twice": _line("--config twice.yaml", "twice.yaml:2:1", "'seed' is given twice", "line 1"),
    "open bracket": _line("--config open.yaml", "open.yaml:2:", "close the bracket"),
    "colon in text": _line("--config colon.yaml", "colon.yaml:1:", "quote text that contains a colon"),
    "indentation": _line("--config indent.yaml", "indent.yaml:2:", "check the indentation"),
    "open quote": _line("--config quote.yaml", "quote.yaml:2:1", "close the quote"),
    "star": _line("--config alias.yaml", "alias.yaml:1:", "quote text that begins with *"),
    "documents": _line("--config documents.yaml", "documents.yaml:2:", "a file of its own"),
    "UTF-16": _line("--config utf16.yaml", "not UTF-8 text: byte 0xff", "save it as UTF-8"),
    "zero byte": _line("--config zero.yaml", "position 7 is not allowed", "remove it"),
    "byte order mark": _line("--config bom.yaml", "unknown key sede", "'seed'"),
    # Command lines.
    "file without option": _line("base.yaml", "'base.yaml'", "--config base.yaml"),
    "option without value": _of("--seed", "--seed needs a value", "--seed VALUE"),
    "unknown flag": _of("--dryrun", "--dryrun needs a value", "did you mean --dry_run?"),
    "no config": _line("", "no config", "--config FILE"),
    "open list": _of("--evaluation.pass_at [1", "--evaluation.pass_at: '[1' is not valid YAML"),
    "dots": _of("--rollouts..group_size 1", "--rollouts..group_size is not a key"),
}
"""Mistakes in the settings of marin_rl, which are reported without importing levanter."""

LEVANTER: dict[str, Mistake] = {
    "long context": _of(
        "--reference '{type: policy, context: {answer: true, max_tokens: 33}}' --distillation {}",
        *("reference.context.max_tokens is 33 and rollouts.max_length 32", "64 tokens", "raise model.seq_len"),
    ),
    "model key": _of("--model.hiden_dim 32", "model.hiden_dim", "'hidden_dim'"),
    "model key of another type": _of("--model.embed_pdrop 0", "model.embed_pdrop", "model.type gpt2", "is llama"),
    "optimizer key": _of("--optimizer.learning_rat 1e-3", "optimizer.learning_rat", "'learning_rate'"),
    "tracker key": _of("--trainer.tracker '{type: wandb, projct: x}'", "trainer.tracker.projct", "'project'"),
    "key of another section": _of("--learning_rate 4", "learning_rate", "did you mean", "optimizer.learning_rate"),
    "key of another own type": _of("--kl.beta 0.1", "belongs to kl.type exact or in_loss or in_reward", "is none"),
    "no space after a colon": _of("--model '{type:gpt2}'", "model.type:gpt2", "a space after the colon"),
    "text for a learning rate": _of("--optimizer.learning_rate 1-e4", "optimizer.learning_rate is '1-e4'"),
    "several": _line(
        "--config several.yaml",
        *(
            "unknown key sede",
            "num_steps is -1",
            "kl.beta (of exact and in_loss and in_reward)",
            "advantage.type is 'grop'",
        ),
        *(
            "updates.epochs is 0",
            "updates.minibatches is 0",
            "unknown key replay.max_stalenes",
            "unknown key optimizer.learning_rat",
        ),
        lines=8,
    ),
    "no model": _line(
        "--environment.type arithmetic --run_dir x", "neither model nor initialize_from is set", "model: {type: llama"
    ),
    "adapter without weights": _of("--lora.rank 4", "lora is set, but initialize_from is not", "or lora: null"),
    "rank": _of("--lora.rank 0 --initialize_from .", "lora.rank is 0", "at least 1"),
    "rank above the hidden size": _of(
        "--lora.rank 4096 --initialize_from .",
        "lora.rank is 4096, but the model has a hidden size of",
        "lower lora.rank",
    ),
    "no targets": _of("--lora.targets [] --initialize_from .", "lora.targets is empty", "[q_proj, v_proj]"),
    "target": _of(
        "--lora.targets [q_proj,k_prj] --initialize_from .", "'k_prj' names no linear layer", "did you mean 'k_proj'"
    ),
    "target that is an embedding": _of(
        "--lora.targets [embed_tokens] --initialize_from .", "'embed_tokens' names no linear layer"
    ),
    "separate critic of an adapter": _of(
        "--lora.rank 4 --initialize_from . --advantage.type gae --critic.shared_trunk false",
        *("critic.shared_trunk is false", "set critic.shared_trunk: true, or lora: null"),
    ),
    "model": _of("--model.type lama", "model.type is 'lama'", "'llama'"),
    "model without support": _of("--model.type qwen", "model.type 'qwen' is not supported", "use qwen2"),
    "attention": _of("--model.attn_backend nvte", "model.attn_backend is nvte", "set it to null"),
    "levanter's enum": _of("--model.attn_backend flash", "model.attn_backend is 'flash'", "splash"),
    "rope": _of("--model.rope.type yarn", "model.rope.type is 'yarn'", "use hf_yarn"),
    "bias": _of("--model.use_bias true", "model.use_bias: True (Hugging Face: False)"),
    "scan": _of("--model.scan_layers false", "model.scan_layers is false"),
    "gemma": _of("--model '{type: gemma, hidden_dim: 16, num_heads: 2}'", "model.head_dim is 256", "set it to 8"),
    "window": _of(
        "--model.type mixtral --model.sliding_window 16",
        *("rollouts.max_length 32", "model.sliding_window is 16", "to null"),
    ),
    "experts": _of(
        "--model.type mixtral --trainer.tensor_parallel_axes [mlp,experts]",
        "trainer splits experts and mlp over the mesh axis model",
    ),
    "experts over rows": _of(
        "--model.type mixtral --trainer.axis_resources '{experts: data}'",
        "trainer splits experts and batch over the mesh axis data",
    ),
    "positions of gpt2": _of(
        "--model '{type: gpt2, embed_pdrop: 0, resid_pdrop: 0, attn_pdrop: 0}' "
        "--trainer.tensor_parallel_axes [position]",
        "the positions of a gpt2 model cannot be split",
    ),
    "heads": _of("--model.num_heads 3", "model: num_heads=3 not divisible by num_kv_heads=2"),
    "dropout": _of(
        "--model '{type: gpt2, embed_pdrop: 0.1, resid_pdrop: 0, attn_pdrop: 0}'", "model.embed_pdrop to 0 (it is 0.1)"
    ),
    "context": _of("--rollouts.max_length 128", "rollouts.max_length is 128", "model.seq_len"),
    "row of no kernel": _of(
        "--model.seq_len 2048 --rollouts.max_length 1100 --rollouts.row_length 1300",
        *("rollouts.row_length is 1300", "set rollouts.row_length: 1536, or null"),
    ),
    "optimizer": _of("--optimizer.type adamw", "optimizer.type is 'adamw'", "'adam'"),
    "optimizer without support": _of("--optimizer.type scion", "optimizer.type is 'scion'", "use one of adam"),
    "clipping in mars": _of("--optimizer.type mars", "max_grad_norm is 1.0", "set optimizer.max_grad_norm: null"),
    "schedule": _of("--optimizer.lr_schedule cosin", "optimizer.lr_schedule is 'cosin'", "'cosine'"),
    "cycle": _of(
        "--num_steps 5 --optimizer.cycle_length 0", "cycle_length is 0, but the run has 5 updates", "such as 0.1"
    ),
    "name for a tracker": _of("--trainer.tracker wandb", "trainer.tracker is 'wandb'", "write {type: wandb}"),
    "warmup": _of("--optimizer.warmup -1", "optimizer.warmup is -1", "from 0 to 1, or a whole number"),
    "learning rate": _of("--optimizer.learning_rate -1", "optimizer.learning_rate is -1", "at least 0"),
    "sft: window": _line(
        "--config sft.yaml --model.type mixtral --model.sliding_window 16 --batch.max_length 32",
        *("model.sliding_window is 16 and batch.max_length 32", "or to batch.max_length or more"),
        program="sft",
    ),
    "replay: key": _line("--run run --step 1 --seed x", "seed is 'x'", "an integer", program="replay"),
    "replay: combination": _line("--run run --step 1 --rollouts.group_size 1", "group_size is 1", program="replay"),
    "replay: older run": _line("--run old --step 1", "old/config.yaml", "former_key", lines=2, program="replay"),
}
"""Mistakes that are found with levanter's classes."""


def _by_command(commands: dict[str, dict[str, Mistake]]) -> dict[str, Mistake]:
    return {
        f"{program}: {case}": dataclasses.replace(mistake, program=program)
        for program, mistakes in commands.items()
        for case, mistake in mistakes.items()
    }


OTHER_COMMANDS = _by_command(
    {
        "evaluate": {
            "no run": _line("", "run is missing", "give it with --run"),
            "key": _line("--run run --stepp 2", "unknown key stepp", "'step'"),
            "range": _line("--run run --temperature -1", "temperature is -1", "at least 1e-30"),
            "environment": _line("--run run --environment.type json", "environment.type", "'jsonl'"),
            "several": _line("--rn run --step x --evaluation.samples 0", "rn", "step", "samples", lines=3),
            "not a run": _line("--run data", "'data' is not a run directory", "no config.yaml"),
            "no checkpoint": _line("--run begun", "run 'begun' has no checkpoint yet"),
            "other step": _line("--run run --step 3", "no checkpoint of step 3", "it has [2]"),
            "imports missing": _line("--run run --imports [x.py]", "imports", "'x.py' does not exist"),
        },
        "serve": {
            "no policy": _line("", "give either run", "or model"),
            "key": _line("--run run --prot 80", "unknown key prot", "'port'"),
            "range": _line("--run run --port 70000", "port is 70000", "from 0 to 65535"),
            "no model": _line("--model no --port 0", "--model is 'no', which is not a folder"),
            "public address": _line("--run run --host 0.0.0.0", "host is '0.0.0.0'", "MARIN_RL_API_KEY"),
        },
        "sft": {
            "nothing": _line("", "no config", "--config FILE"),
            "no data": _line("--run_dir x --model.type llama", "data is missing", "--data"),
            "config of RL": _line("--config base.yaml", "a config of marin_rl.train", "environment"),
            "key": _line("--config sft.yaml --batch.sze 4", "unknown key batch.sze", "'size'"),
            "choice": _line(
                "--config sft.yaml --batch.long_sequences cut", "batch.long_sequences is 'cut'", "truncate"
            ),
            "held out twice": _line(
                "--config sft.yaml --data '{held_out: 0.1, held_out_path: b}'", "held_out_path 'b' exclude each other"
            ),
            "row length": _line("--config sft.yaml --batch '{max_length: 9, row_length: 8}'", "batch.row_length is 8"),
        },
        "export": {
            "nothing": _line("", "run is missing", "output is missing", lines=2),
            "type": _line("--run run --output x --export.dtype int8", "export.dtype is 'int8'"),
            "output exists": _line("--run run --output begun", "output is 'begun', which exists"),
        },
        "replay": {
            "nothing": _line("", "give --run DIR and --step N", "--fake SHAPE"),
            "value of step": _line("--run run --step two", "--step", "'two'"),
            "synthetic without config": _line("--fake prompt=8,completion=8", "no config", "--config FILE"),
        },
        "plan": {
            "no topology": _line("--config base.yaml", "--topology"),
            "topology": _line("--config base.yaml --topology v5q-8", "v5q-8"),
            "prompts of data": _line(
                "--config sft.yaml --topology cpu:8 --prompt_tokens 4", "--prompt_tokens", "config is of marin_rl.sft"
            ),
        },
        "view": {
            "nothing": _line("", "RUN", "--help"),
            "option": _line("run --stp 1", "--stp"),
            "range": _line("run --step 5-x", "'5-x' is not a range of steps", "10-20"),
            "no id": _line("run --id x", "'x'"),
        },
        "launch": {
            "no command": _line("--local --slice v5p-8", "no command", "after --"),
            "key": _line("--local --zon us-east5-a -- train --config base.yaml", "zon", "'zone'"),
            "slice": _line("--local --slice v5q-8 -- train --config base.yaml", "v5q-8"),
            "several slices": _line("--local --slice 2xv5p-8 -- train --config base.yaml", "'2xv5p-8'", "one slice"),
            "no cluster": _line("-- train --config base.yaml", "no cluster", "--cluster", "--local"),
            "two clusters": _line("--local --cluster marin -- train --config base.yaml", "both --cluster and --local"),
        },
    }
)
"""Mistakes in command lines of the other commands, which are reported without importing levanter."""

MISTAKES = SETTINGS | OTHER_COMMANDS | LEVANTER


def write_files(folder: Path) -> None:
    """Write `FILES` to a folder."""
    (folder / "data").mkdir()
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    results = {}
    for case, mistake in MISTAKES.items():
        main = importlib.import_module(f"marin_rl.{mistake.program}").main
        with contextlib.redirect_stderr(io.StringIO()) as output, contextlib.redirect_stdout(output):
            status = main(mistake.argv)
        results[case] = status, output.getvalue(), "levanter" in sys.modules
    print(json.dumps(results))
