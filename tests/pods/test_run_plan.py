# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
from pathlib import Path
from typing import cast

import equinox as eqx
import jax
import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import pytest
from levanter.models.lm_model import LmConfig

from marin_rl.config.supervised_config import DpoConfig, SftConfig
from marin_rl.learner.policy_model import save_hf_policy
from marin_rl.learner.policy_spec import PolicySpec
from marin_rl.learner.starting_weights import first_policy
from marin_rl.parts.model import Lengths
from marin_rl.parts.rl import longest_rollout
from marin_rl.pods import run_plan
from marin_rl.pods.chips import GIB, Number, Topology, parse_topology
from marin_rl.pods.compiling import CompileFailure, ProgramMemory
from marin_rl.pods.programs import RunShapes
from marin_rl.pods.report import describe
from marin_rl.pods.run_plan import Plan, make_plan
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import byte_tokenizer
from marin_rl.utils.devices.setup import start_devices
from marin_rl.utils.devices.trainer_config import TrainerConfig
from tests.pods.plan_cases import tiny_config, tiny_supervised


@pytest.mark.parametrize(
    ("overrides", "lengths"),
    [
        ([], Lengths(24, 8)),
        (["--rollouts.max_prompt_length", "10"], Lengths(10, 8)),
        (["--rollouts.max_turns", "3"], Lengths(8, 24)),
        (["--rollouts.max_turns", "9"], Lengths(1, 31)),
        (["--rollouts.max_turns", "3", "--rollouts.max_tokens", "20"], Lengths(12, 20)),
    ],
)
def test_longest_rollouts_fill_the_context(overrides: list[str], lengths: Lengths):
    assert longest_rollout(tiny_config(*overrides)) == lengths


def cpu(memory: float | None = None) -> Topology:
    topology = parse_topology(f"cpu:{len(jax.devices())}")
    if memory is None:
        return topology
    return dataclasses.replace(topology, chip=dataclasses.replace(topology.chip, memory=memory))


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> dict[str, ProgramMemory | CompileFailure]:
    """Results of programs by name, which are not compiled; the others need no memory."""
    results: dict[str, ProgramMemory | CompileFailure] = {}

    def compile_program(name: str, run: RunShapes) -> ProgramMemory | CompileFailure:
        return results.get(name, ProgramMemory(0, 0, 0, 0))

    monkeypatch.setattr(run_plan, "compile_program", compile_program)
    return results


def plan_tiny(*overrides: str, topology: Topology | None = None) -> Plan:
    return make_plan(tiny_config(*overrides), topology or cpu(), vocab_size=128)


def others(plan: Plan) -> dict[str, Number]:
    return {program.name: program.others for program in plan.programs}


@pytest.mark.medium
def test_arrays_that_stay_allocated_count_once(results: dict[str, ProgramMemory | CompileFailure]):
    plan = plan_tiny("--mode", "async", "--kl", "{type: in_loss, beta: 0.1}")
    held = plan.held
    # Adam has two moments for each weight, in float32 like the weights.
    assert held["optimizer"] == pytest.approx(2 * held["weights"], rel=0.01)
    assert held["reference"] == held["copy for workers"] == held["weights"]
    everything = sum(held.values())
    assert others(plan)["update"] == everything
    assert others(plan)["initial state"] == held["weights"]
    assert others(plan)["weight copy"] == everything - held["copy for workers"]
    # All weights and moments, and the whole reference, are arguments.
    for name in ("update", "score", "initial state"):
        results[name] = ProgramMemory(GIB, 0, 0, 0)
    plan = plan_tiny("--mode", "async", "--kl", "{type: in_loss, beta: 0.1}")
    assert others(plan)["update"] == held["reference"] + held["copy for workers"]
    assert others(plan)["score"] == everything - held["reference"]
    assert others(plan)["initial state"] == 0


@pytest.mark.medium
def test_memory_of_a_teacher_is_that_of_its_own_architecture(
    results: dict[str, ProgramMemory | CompileFailure], tmp_path: Path
):
    """One layer instead of two, in bfloat16."""
    model = tiny_config("--model.num_layers", "1").model
    trainer = start_devices(TrainerConfig(), rows_per_device=1)
    tokenizer = ChatTokenizer(byte_tokenizer())
    save_hf_policy(first_policy(None, model, tokenizer, trainer, 0), tokenizer, tmp_path, trainer)
    reference = f"{{type: checkpoint, path: {tmp_path}}}"
    plan = plan_tiny("--reference", reference, "--distillation", "{}", "--trainer.mp", "p=f32,c=bf16")
    parameters = PolicySpec(model, tokenizer.vocab_size, trainer).num_parameters
    assert plan.held["reference"] == 2 * parameters
    exact = "--kl", "{type: exact, beta: 0.1}"
    both = plan_tiny("--reference", reference, "--distillation", "{}", "--trainer.mp", "p=f32,c=bf16", *exact)
    assert both.held == plan.held
    average = plan_tiny("--reference", "{type: policy, weights: average}", "--distillation", "{}").held
    assert average["reference"] == 0
    assert average["optimizer"] == pytest.approx(3 * average["weights"], rel=0.01)


def test_program_above_the_memory_is_refused_with_a_remedy(results: dict[str, ProgramMemory | CompileFailure]):
    results["update"] = ProgramMemory(0, 0, 0, 3 * GIB)
    plan = plan_tiny("--model.gradient_checkpointing", "true", topology=cpu(memory=2 * GIB))
    assert [program.name for program in plan.programs if program.problem] == ["update"]
    assert not plan.fits
    [problem] = [program.problem for program in plan.programs if program.problem]
    assert problem.problem == "needs 3.00 of 2.00 GiB"
    assert problem.remedy.startswith("set trainer.per_device_parallelism to 2 ")
    assert plan_tiny(topology=cpu(memory=4 * GIB)).fits


def test_problems_of_workers_name_their_own_keys(results: dict[str, ProgramMemory | CompileFailure]):
    with pytest.raises(
        ValueError, match=r"^rollout workers: .* cannot be split into workers\.mesh\.model_axis_size 3 x"
    ):
        plan_tiny("--mode", "async", "--workers.mesh.model_axis_size", "3")
    results["decode"] = CompileFailure(
        "too large", "raise trainer.model_axis_size with trainer.tensor_parallel_axes: [mlp]"
    )
    [decode] = [program for program in plan_tiny("--mode", "async").programs if program.name == "decode"]
    assert decode.problem == CompileFailure(
        "too large", "raise workers.mesh.model_axis_size with workers.mesh.tensor_parallel_axes: [mlp]"
    )


def test_worker_has_its_own_precision(results: dict[str, ProgramMemory | CompileFailure]):
    halved = plan_tiny("--mode", "async", "--workers.precision", "p=bf16,c=bf16", "--weights.dtype", "bfloat16")
    whole = plan_tiny("--mode", "async")
    assert whole.worker_topology == cpu()
    assert 2 * others(halved)["decode"] == others(whole)["decode"] > 0
    assert 2 * halved.held["copy for workers"] == whole.held["copy for workers"]


@pytest.mark.parametrize(
    ("kind", "overrides", "programs", "step"),
    [
        (SftConfig, [], ["update", "score"], "8 rows of 32 tokens, all with loss"),
        (SftConfig, ["--data.held_out", "0"], ["update"], "8 rows of 32 tokens, all with loss"),
        (DpoConfig, ["--preferences.held_out", "0"], ["update", "score"], "8 pairs of 2 x 32 tokens, all with loss"),
    ],
)
def test_run_on_data_has_no_programs_of_a_sampler(
    results: dict[str, ProgramMemory | CompileFailure],
    kind: type[SftConfig | DpoConfig],
    overrides: list[str],
    programs: list[str],
    step: str,
):
    """Held-out rows are scored, and all pairs by the reference, which is the policy itself before the first step."""
    plan = make_plan(tiny_supervised(kind, *overrides), cpu(), vocab_size=128)
    assert [program.name for program in plan.programs] == ["initial state", *programs]
    assert list(plan.held) == ["weights", "optimizer"]
    assert plan.held["optimizer"] == pytest.approx(2 * plan.held["weights"], rel=0.01)
    results["update"] = ProgramMemory(GIB, 0, 0, 0)
    assert others(make_plan(tiny_supervised(kind, *overrides), cpu(), vocab_size=128))["update"] == 0
    assert step in describe(plan)


@pytest.mark.medium
def test_adapter_that_trains_on_pairs_holds_the_base_once(
    results: dict[str, ProgramMemory | CompileFailure], tmp_path: Path
):
    trainer, tokenizer = start_devices(TrainerConfig(), rows_per_device=1), ChatTokenizer(byte_tokenizer())
    model = cast(LmConfig, tiny_supervised(DpoConfig).model)
    policy = first_policy(None, model, tokenizer, trainer, 0)
    save_hf_policy(policy, tokenizer, tmp_path, trainer)
    start = ["--initialize_from", str(tmp_path), "--lora", "{rank: 2}", "--trainer.mp", "p=f32,c=bf16"]
    config = tiny_supervised(DpoConfig, *start)
    plan = make_plan(config, cpu(), vocab_size=policy.vocab_size)
    assert list(plan.held) == ["base", "weights", "optimizer"]
    size = sum(leaf.size for leaf in jax.tree.leaves(policy) if eqx.is_array(leaf))
    assert plan.parameters == size
    # In bfloat16; small arrays are not sharded.
    assert plan.held["base"] == pytest.approx(2 * size / cpu().num_chips, rel=0.2)
    # A and B of rank 2, for the matrices of two layers: in + out of q, k, v, o, gate, up and down.
    assert plan.adapter == 2 * 2 * (64 + 48 + 48 + 64 + 96 + 96 + 96)
    assert others(plan)["score"] == sum(plan.held.values())
    results["score"] = ProgramMemory(GIB, 0, 0, 0)
    scored = make_plan(config, cpu(), vocab_size=policy.vocab_size)
    assert others(scored)["score"] == plan.held["optimizer"]
