# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Algorithms by name in files and on command lines; `tests/training/test_algorithms.py` has their gradients."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from marin_rl.config.algorithms import NAMES, algorithms
from marin_rl.config.command_line import merge_layers, parse_config
from marin_rl.config.supervised_config import SftConfig
from marin_rl.config.train_config import TrainConfig
from marin_rl.objectives.aggregation import ConstantConfig, SequenceMeanConfig
from marin_rl.objectives.kl import KlEstimator, LossKlConfig, NoKlConfig, RewardKlConfig
from marin_rl.objectives.policy_loss import PpoClipLossConfig
from marin_rl.rollouts.config import ResampleGroupsConfig
from marin_rl.runs.run_directory import RunDirectory, create_or_open
from marin_rl.sessions.command import TRAIN_FLAGS, check_command_line
from marin_rl.sessions.config_changes import plan_changes, read_config
from marin_rl.sessions.job import Job, run_job
from marin_rl.sessions.session import run_parsed
from marin_rl.utils.errors import RunDirectoryError
from marin_rl.utils.settings.decode import decode
from marin_rl.utils.settings.help import all_keys, help_text
from marin_rl.utils.settings.section_types import ConfigError
from marin_rl.utils.settings.yaml_text import to_yaml
from tests.config.mistakes import BASE

NEEDED = {
    "gigpo": ["--rollouts.max_turns", "2"],
    "opd": ["--reference", "{type: server, base_url: http://localhost/v1, model: teacher}"],
}
"""What a config of an algorithm needs besides its name."""


@pytest.fixture
def base(tmp_path: Path) -> str:
    path = tmp_path / "base.yaml"
    path.write_text(BASE)
    return str(path)


def written(base: str, name: str, text: str) -> str:
    path = Path(base).parent / name
    path.write_text(text)
    return str(path)


def parsed(*argv: str) -> TrainConfig:
    """Parse a command line as a run does, in two parts, with and without levanter."""
    return check_command_line(argv, TRAIN_FLAGS).complete().config


def error(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parsed(*argv)
    return str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_gives_the_same_config_as_its_sections(base, name):
    sections = written(base, "sections.yaml", json.dumps(algorithms(8)[name]))
    config = parsed("--config", base, "--algorithm", name, *NEEDED.get(name, []))
    assert config == parsed("--config", base, "--config", sections, *NEEDED.get(name, []))


def test_dapo_samples_further_groups(base):
    # A gradient does not show where the groups come from.
    assert isinstance(parsed("--config", base, "--algorithm", "dapo").filter, ResampleGroupsConfig)


def test_distillation_needs_one_rollout_for_a_prompt(base):
    one = parsed("--config", base, "--algorithm", "opd", *NEEDED["opd"], "--rollouts.group_size", "1")
    assert one.rollouts.group_size == 1


def test_a_file_and_the_command_line_name_an_algorithm_and_the_last_one_counts(base):
    grpo, dapo = written(base, "a.yaml", "algorithm: grpo"), written(base, "b.yaml", "algorithm: dapo")
    assert parsed("--config", base, "--config", grpo) == parsed("--config", base, "--algorithm=grpo")
    both = parsed("--config", base, "--config", grpo, "--config", dapo)
    assert both == parsed("--config", base, "--algorithm", "dapo")
    # Nothing of the others is left, whether their sections are also those of the last one or not.
    last = parsed("--config", base, "--config", dapo, "--algorithm", "ppo", "--algorithm", "maxrl")
    assert last == parsed("--config", base, "--algorithm", "maxrl")
    assert last.critic is None
    assert last.overlong.buffer == 0
    assert parsed("--config", base, "--config", dapo, "--algorithm", "null") == parsed("--config", base)


def test_given_keys_have_precedence_wherever_they_are(base):
    own = "kl: {type: none}\npolicy_loss: {clip_high: 0.3}\n"
    with_name = written(base, "with_name.yaml", f"algorithm: grpo\n{own}")
    config = parsed("--config", base, "--config", with_name)
    assert config.kl == NoKlConfig()
    assert config.policy_loss == PpoClipLossConfig(0.2, 0.3)
    assert config.aggregation == SequenceMeanConfig()
    assert parsed("--config", base, "--algorithm", "grpo", "--kl.type", "none", "--policy_loss.clip_high=0.3") == config
    # Another key of the same type is added to those of the algorithm, and another type replaces them.
    beta = parsed("--config", base, "--algorithm", "grpo", "--kl.beta", "0.1")
    assert beta.kl == LossKlConfig(0.1, KlEstimator.K3)
    reward = parsed("--config", base, "--algorithm", "grpo", "--kl", "{type: in_reward, beta: 0.2}")
    assert reward.kl == RewardKlConfig(0.2)
    assert "advantage.normalize" in error("--config", base, "--algorithm", "grpo", "--advantage.normalize", "batch")


def test_lengths_follow_the_longest_answer(base):
    longer = ["--config", base, "--sampling.max_new_tokens", "20"]
    assert parsed(*longer, "--algorithm", "dr_grpo").aggregation == ConstantConfig(20)
    assert parsed(*longer, "--algorithm", "dapo").overlong.buffer == 4
    # The default of the key counts if it is not set.
    bare = {key: value for key, value in yaml.safe_load(BASE).items() if key != "sampling"}
    default = decode(TrainConfig, merge_layers(TrainConfig, [bare, {"algorithm": "dr_grpo"}]))
    assert default.aggregation == ConstantConfig(default.sampling.max_new_tokens)
    for wrong in ("x", "0", "true", "1.5", "null"):
        text = error("--config", base, "--algorithm", "dr_grpo", "--sampling.max_new_tokens", wrong)
        assert text.startswith("sampling.max_new_tokens is ")
        assert "\n" not in text


def test_the_name_replaces_the_objective_of_files_below_it(base):
    own = "kl: {type: in_reward, beta: 0.25}\nfilter: {type: resample}\ndistillation: {coefficient: 2.0}\nseed: 9"
    ppo = (
        "advantage: {type: gae, lam: 0.5}\ncritic: {shared_trunk: true}\npolicy_loss: {type: ppo_clip, dual_clip: 3.0}"
    )
    below = written(base, "below.yaml", f"{own}\n{ppo}")
    config = parsed("--config", base, "--config", below, "--algorithm", "grpo")
    assert config == parsed("--config", base, "--algorithm", "grpo", "--seed", "9")
    # What is above the name stays.
    name = written(base, "name.yaml", "algorithm: grpo")
    above = parsed("--config", base, "--config", name, "--config", below, "--advantage.lam", "0.75")
    assert (above.kl, above.seed) == (RewardKlConfig(0.25), 9)
    assert above.critic is not None
    # Without a name nothing is replaced.
    assert parsed("--config", base, "--config", below, "--algorithm", "null") == parsed(
        "--config", base, "--config", below
    )


@pytest.mark.parametrize("value", ["grp", "", "[grpo]", "{type: x}", "3.0", "true", "GRPO"])
def test_an_unknown_name_is_one_sentence_with_the_names(base, value):
    text = error("--config", base, "--algorithm", value)
    assert text.startswith("algorithm is ")
    assert text.endswith(f"Valid here: {', '.join(NAMES)}")
    assert "\n" not in text
    assert "Written" not in text
    assert ("did you mean 'grpo'" in text) == ("grp" in value.lower())


def test_other_mistakes_name_the_key(base):
    assert "did you mean algorithm?" in error("--config", base, "--algoritm", "grpo")
    nested = written(base, "nested.yaml", "rollouts: {algorithm: grpo}")
    assert "unknown key rollouts.algorithm; did you mean algorithm?" in error("--config", base, "--config", nested)
    assert "needs a teacher" in error("--config", base, "--algorithm", "opd")
    assert "rollouts.max_turns" in error("--config", base, "--algorithm", "gigpo")
    ppo = error("--config", base, "--algorithm", "ppo", "--critic", "null")
    assert "needs a critic" in ppo


def test_only_configs_of_rl_have_the_key(tmp_path):
    sft = tmp_path / "sft.yaml"
    sft.write_text("run_dir: runs/x\ndata: {type: jsonl, path: x.jsonl}\nalgorithm: grpo\n")
    with pytest.raises(ConfigError, match="unknown key algorithm; Valid here: run_dir"):
        parse_config(SftConfig, ["--config", str(sft)])
    assert "algorithm" not in all_keys(SftConfig, {})
    assert merge_layers(dict[str, Any], [{"algorithm": "x"}]) == {"algorithm": "x"}


def test_the_help_lists_the_names(capsys):
    with contextlib.suppress(SystemExit):
        check_command_line(["--help"], TRAIN_FLAGS)
    overview = capsys.readouterr().out.partition("Most important keys")[2].partition("environment")[0]
    assert set(NAMES) <= set(overview.replace(",", " ").replace(".", " ").split())
    section = help_text(TrainConfig, section="algorithm")
    assert section.startswith("  algorithm (")
    assert all(name in section for name in NAMES)
    with pytest.raises(ConfigError, match="did you mean algorithm"):
        help_text(TrainConfig, section="algorithms")


def test_print_config_and_the_file_of_a_run_have_the_sections(base):
    checked = check_command_line(["--config", base, "--algorithm", "cispo", "--print_config"], TRAIN_FLAGS)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert run_parsed(checked.complete(), 0.0) == 0
    values = yaml.safe_load(output.getvalue())
    assert "algorithm" not in values
    assert values["policy_loss"] == {"type": "cispo", "clip_low": 1.0, "clip_high": 4.0}
    assert decode(TrainConfig, values) == checked.complete().config


def test_a_job_has_an_algorithm(tmp_path, monkeypatch):
    started: list[TrainConfig] = []
    monkeypatch.setattr("marin_rl.sessions.session.run_session", lambda config, _: started.append(config))
    values = {**yaml.safe_load(BASE), "run_dir": str(tmp_path / "run")}
    run_job(Job({**values, "algorithm": "gspo"}, values["run_dir"]), io.StringIO())
    assert started == [decode(TrainConfig, {**values, **algorithms(8)["gspo"]})]


# Runs that resume.


@pytest.fixture
def begun(base, tmp_path) -> RunDirectory:
    """A run that was started with an algorithm and a key of the user."""
    directory = create_or_open(
        tmp_path / "run", to_yaml(parsed("--config", base, "--algorithm", "grpo", "--kl.beta", "0.1"))
    )
    directory.metrics.write_text("")
    (directory.checkpoints / "step-00000012").mkdir()
    return directory


SECTIONS = {
    **{"advantage": {"type": "grpo"}, "policy_loss": {"type": "ppo_clip"}, "aggregation": {"type": "sequence_mean"}},
    "kl": {"type": "in_loss", "beta": 0.1, "estimator": "k3"},
}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--algorithm", "grpo", "--kl.beta", "0.1"],
        [text for key, value in SECTIONS.items() for text in (f"--{key}", json.dumps(value))],
    ],
    ids=["name", "sections"],
)
def test_a_run_resumes_with_its_algorithm_or_its_sections(base, begun, arguments):
    checked = check_command_line(["--config", base, *arguments, "--num_steps", "400"], TRAIN_FLAGS).complete()
    changes = plan_changes(begun, checked.config, checked.named)
    assert [str(change) for change in changes] == ["num_steps 200 -> 400"]


def test_the_file_of_a_run_resumes_it_with_or_without_the_name(base, begun):
    for arguments in ([], ["--algorithm", "grpo", "--kl.beta", "0.1"]):
        checked = check_command_line(["--config", str(begun.config), *arguments], TRAIN_FLAGS).complete()
        assert checked.config == read_config(begun)


def test_another_algorithm_is_refused_with_the_keys_of_its_sections(base, begun):
    checked = check_command_line(["--config", base, "--algorithm", "dapo"], TRAIN_FLAGS).complete()
    with pytest.raises(RunDirectoryError) as caught:
        plan_changes(begun, checked.config, checked.named)
    text = str(caught.value)
    assert '  kl.type: "in_loss" there, "none" now\n' in text
    assert "  policy_loss.clip_high: 0.2 there, 0.28 now\n" in text
    assert "cannot change in a run" in text
