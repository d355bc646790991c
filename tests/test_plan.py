# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import json
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest

from marin_rl import plan
from marin_rl.config.supervised_config import DpoConfig, SftConfig
from marin_rl.pods.absent_devices import CUDA_PLUGINS
from tests import fork_server
from tests.pods.plan_cases import SUPERVISED, TINY


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "tiny.yaml"
    file.write_text(TINY)
    return file


def run_plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    return fork_server.run([sys.executable, "-m", "marin_rl.plan", *arguments])


@pytest.mark.slow
def test_plan_of_a_cpu_mesh(config: Path, tmp_path: Path):
    file = tmp_path / "plan.json"
    mesh = ["--trainer.model_axis_size", "2", "--trainer.tensor_parallel_axes", "[heads, kv_head, mlp]"]
    kl = ["--kl", "{type: in_loss, beta: 0.1}"]
    done = run_plan("--config", str(config), "--topology", "cpu:8", "--json", str(file), "--mode", "async", *mesh, *kl)
    assert done.returncode == plan.FITS, done.stderr
    assert "mesh replica 1 x data 4 x model 2" in done.stdout
    assert done.stdout.endswith("every program compiles and fits\n")
    assert max(map(len, done.stdout.splitlines())) <= 120
    values = json.loads(file.read_text())
    names = ["initial state", "update", "score", "weight copy", "sampler weights", "prefill", "short prefill", "decode"]
    assert [program["name"] for program in values["programs"]] == names
    assert [program["place"] for program in values["programs"]] == ["trainer"] * 4 + ["worker"] * 4
    # Arrays are sharded over data (4), most of them also over model (2).
    assert values["held"]["optimizer"] == pytest.approx(2 * values["held"]["weights"], rel=0.01)
    assert 4 * values["parameters"] / 8 <= values["held"]["weights"] <= 4 * values["parameters"] / 4
    assert values["programs"][1]["memory"] > sum(values["held"].values())
    # There are no published rates of a CPU.
    assert values["workers"] is None


NEEDS_LIBTPU = pytest.mark.skipif(util.find_spec("libtpu") is None, reason="needs libtpu, from the extra tpu")
NEEDS_CUDA = pytest.mark.skipif(not any(map(util.find_spec, CUDA_PLUGINS)), reason="needs the extra gpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "where"),
    [
        pytest.param("v5e:2x2", "4 chips of 15.75 GiB on 1 host; mesh replica 1 x data 4", marks=NEEDS_LIBTPU),
        pytest.param("2xv5e:2x2", "8 chips of 15.75 GiB on 2 hosts, 2 slices; mesh", marks=NEEDS_LIBTPU),
        pytest.param("h100:1", "1 chip of 59.33 GiB on 1 host; mesh replica 1 x data 1", marks=NEEDS_CUDA),
    ],
)
def test_plan_for_absent_accelerators(topology: str, where: str, config: Path, tmp_path: Path):
    file = tmp_path / "plan.json"
    sizes = ["--json", str(file), "--model.hidden_dim", "512", "--trainer.mp", "p=f32,c=bf16"]
    sizes += ["--model.attn_backend", "null"]
    done = run_plan("--config", str(config), "--topology", topology, *sizes)
    assert done.returncode == plan.FITS, done.stdout + done.stderr
    assert where in done.stdout
    seconds = json.loads(file.read_text())["computed_seconds"]["trainer"]
    assert list(seconds) == ["update", "prefill", "decode"]
    assert min(seconds.values()) > 0
    assert "not measured" in done.stdout


@pytest.mark.medium
def test_mesh_that_does_not_divide_the_heads_is_one_sentence(config: Path):
    mesh = ["--trainer.model_axis_size", "4", "--trainer.tensor_parallel_axes", "[kv_head]"]
    done = run_plan("--config", str(config), "--topology", "cpu:4", *mesh)
    assert done.returncode == 1
    assert "error: the model's axis kv_head has 2 elements" in done.stderr
    assert "set trainer.model_axis_size to one of 1, 2" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology", "cpu:1", "--json", "/absent/plan.json"], "--json /absent/plan.json cannot be written; give a"),
        (["--topology", "v5:2x2"], "'v5:2x2': it is not a slice of TPUs, such as v5e-8"),
        (
            ["--topology", "cpu:1", "--initialize_from", "gs://bucket/weights"],
            "copies no weights from an object store; give the number of tokens with --vocab_size, or a local folder",
        ),
        (
            ["--topology", "cpu:1", "--initialize_from", "no/such_weights"],
            "initialize_from is 'no/such_weights': there is no such folder",
        ),
        (
            ["--topology", "cpu:1", "--initialize_from", "gs://bucket/weights", "--model", "null", "--vocab_size", "9"],
            "copies no weights from an object store; give a model in the config, or a local folder",
        ),
        (
            ["--topology", "v5e:4x4", "--worker_topology", "v5e:4x4", "--mode", "async"],
            "--worker_topology is v5e:4x4, which has 4 hosts, but a rollout worker has one; give v5e:2x2",
        ),
        (["--topology", "cpu:1", "--worker_topology", "cpu:1"], "mode: sync has no workers; leave it out"),
        (["--topology", "cpu:1", "--vocab_size", "0"], "--vocab_size: must be a whole number of at least 1, got '0'"),
        (
            ["--topology", "cpu:1", "--prompt_tokens", "30"],
            "30 prompt tokens and 8 answer tokens exceed rollouts.max_length",
        ),
    ],
)
def test_mistakes_are_one_sentence(
    config: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert plan.main([*arguments, "--config", str(config)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.medium
def test_plan_of_a_run_on_data(tmp_path: Path):
    """The data need not exist."""
    file = tmp_path / "sft.yaml"
    file.write_text(SUPERVISED[SftConfig])
    done = run_plan("--config", str(file), "--topology", "cpu:1")
    assert done.returncode == plan.FITS, done.stderr
    assert [line.split("  ")[0] for line in done.stdout.splitlines()[-5:-2]] == ["initial state", "update", "score"]


@pytest.mark.parametrize("option", ["worker_topology", "prompt_tokens", "answer_tokens"])
def test_options_of_rollouts_are_refused_for_data(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "dpo.yaml"
    file.write_text(SUPERVISED[DpoConfig])
    value = "cpu:1" if option == "worker_topology" else "8"
    assert plan.main(["--config", str(file), "--topology", "cpu:1", f"--{option}", value]) == 1
    assert capsys.readouterr().err == (
        f"error: --{option} is of runs of marin_rl.train, but this config is of marin_rl.dpo; leave it out\n"
    )


@pytest.mark.medium
def test_run_that_does_not_fit_has_another_exit_status(config: Path):
    done = run_plan("--config", str(config), "--topology", "cpu:1", "--sampling.max_cache_gib", "0.000001")
    assert done.returncode == plan.DOES_NOT_FIT
    assert "decode: the KV cache of 8 sequences" in done.stdout


@pytest.mark.medium
def test_mesh_that_does_not_fit_the_devices_is_an_error(config: Path):
    done = run_plan("--config", str(config), "--topology", "cpu:4", "--trainer.model_axis_size", "3")
    assert done.returncode == 1
    assert "4 devices cannot be split into trainer.model_axis_size 3" in done.stderr
