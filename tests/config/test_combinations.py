# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import pytest

from marin_rl.config.sections import UpdateConfig
from marin_rl.config.train_config import TrainConfig
from marin_rl.learner.critic import CriticConfig
from marin_rl.objectives import AdvantageConfig, DrGrpoConfig, GaeConfig, GigpoConfig, Normalization, RlooConfig
from marin_rl.objectives.aggregation import AggregationConfig
from marin_rl.objectives.gigpo import GigpoNormalization
from marin_rl.objectives.importance import OffPolicyCorrectionConfig
from marin_rl.objectives.kl import KlConfig, KlEstimator, LossKlConfig
from marin_rl.objectives.policy_loss import PolicyLossConfig
from marin_rl.objectives.shaping import TruncationConfig
from marin_rl.rollouts.config import FilterConfig
from marin_rl.utils.settings.section_types import ConfigError
from marin_rl.utils.settings.yaml_text import from_yaml, to_yaml
from tests.config.from_lines import from_lines

GAE = {"advantage": "{type: gae}", "critic": "{}"}
SEVERAL_TURNS = {"rollouts": "{prompts_per_step: 4, group_size: 8, max_length: 32, max_turns: 3}"}

CHOICES: dict[str, tuple[type, dict[str, dict[str, str]]]] = {
    "advantage": (
        AdvantageConfig,
        {
            **{name: {} for name in ("rloo", "grpo", "dr_grpo", "reinforce")},
            "gae": {"critic": "{}"},
            "gigpo": SEVERAL_TURNS,
        },
    ),
    "policy_loss": (
        PolicyLossConfig,
        {name: {} for name in ("reinforce", "importance", "ppo_clip", "gspo", "rloo_sequence", "cispo")},
    ),
    "kl": (KlConfig, {"none": {}, "in_reward": {"": "beta: 0.1"}, "in_loss": {"": "beta: 0.1"}}),
    "aggregation": (
        AggregationConfig,
        {**{name: {} for name in ("token_mean", "sequence_mean", "sequence_sum")}, "constant": {"": "length: 64"}},
    ),
    "off_policy_correction": (OffPolicyCorrectionConfig, {name: {} for name in ("none", "tis", "mask", "icepop")}),
    "truncation": (TruncationConfig, {name: {} for name in ("keep", "mask", "reward")}),
    "filter": (FilterConfig, {name: {} for name in ("keep", "drop", "resample")}),
}
"""Registry and choices by section. Each choice has the other sections that it needs; its own keys are under ""."""


@pytest.mark.parametrize("section", CHOICES)
def test_registry_contains_exactly_these_choices(section: str):
    registry, choices = CHOICES[section]
    assert set(registry.get_known_choices()) == set(choices)


@pytest.mark.parametrize(
    ("section", "name", "more"),
    [(section, name, more) for section, (_, choices) in CHOICES.items() for name, more in choices.items()],
)
def test_every_choice_can_be_selected_by_name(section: str, name: str, more: dict[str, str]):
    registry, _ = CHOICES[section]
    others = {other: value for other, value in more.items() if other}
    inside = f", {more['']}" if "" in more else ""
    built = from_lines(**{**others, section: f"{{type: {name}{inside}}}"})
    assert type(getattr(built, section)) is registry.get_choice_class(name)
    assert from_yaml(TrainConfig, to_yaml(built), "again") == built


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3_plus"])
def test_every_kl_estimator_can_be_selected_by_name(estimator: str):
    built = from_lines(kl=f"{{type: in_loss, beta: 0.1, estimator: {estimator}}}")
    assert isinstance(built.kl, LossKlConfig)
    assert built.kl.estimator is KlEstimator(estimator)
    assert {known.value for known in KlEstimator} == {"k1", "k2", "k3", "k3_plus"}


@pytest.mark.parametrize("advantage", ["rloo", "dr_grpo"])
@pytest.mark.parametrize("normalize", ["none", "group", "batch"])
def test_every_normalization_can_be_selected_by_name(advantage: str, normalize: str):
    built = from_lines(advantage=f"{{type: {advantage}, normalize: {normalize}}}")
    assert isinstance(built.advantage, RlooConfig | DrGrpoConfig)
    assert built.advantage.normalize is Normalization(normalize)


@pytest.mark.parametrize("normalize", ["none", "std"])
def test_every_gigpo_normalization_can_be_selected_by_name(normalize: str):
    built = from_lines(advantage=f"{{type: gigpo, normalize: {normalize}}}", **SEVERAL_TURNS)
    assert isinstance(built.advantage, GigpoConfig)
    assert built.advantage.normalize is GigpoNormalization(normalize)


def test_ppo_with_all_of_its_sections():
    built = from_lines(
        advantage="{type: gae, gamma: 0.99, lam: 0.9, whiten: false}",
        critic="{shared_trunk: false, coefficient: 0.25, clip: null}",
        policy_loss="{type: ppo_clip, clip_low: 0.1, clip_high: 0.3, dual_clip: 3.0}",
        kl="{type: in_reward, beta: 0.05}",
        updates="{epochs: 4, minibatches: 2}",
        overlong="{buffer: 4, factor: 0.5}",
        off_policy_correction="{type: tis, cap: 3.0}",
        rollouts="{prompts_per_step: 4, group_size: 1, max_length: 32}",
    )
    assert built.critic == CriticConfig(shared_trunk=False, coefficient=0.25, clip=None)
    assert built.advantage == GaeConfig(gamma=0.99, lam=0.9, whiten=False)
    assert (built.updates.per_step, built.overlong.buffer) == (8, 4)


# Combinations that are refused; messages contain a remedy.

GSPO, RLOO_SEQUENCE = "{type: gspo}", "{type: rloo_sequence}"


@pytest.mark.parametrize(
    ("sections", "problem", "remedy"),
    [
        (
            {"advantage": "{type: gae}"},
            "advantage 'gae' needs a critic; ",
            r"add critic: {shared_trunk: true}, or use an advantage .* advantage: {type: rloo}",
        ),
        (
            {"critic": "{}"},
            "critic is set, but advantage 'rloo' does not use it",
            "set advantage: {type: gae}, or critic: null",
        ),
        (
            {"policy_loss": GSPO, "off_policy_correction": "{type: tis}"},
            "off_policy_correction 'tis' weights single tokens, but policy_loss 'gspo' has one ratio per rollout",
            "use off_policy_correction: {type: mask}",
        ),
        (
            {"policy_loss": GSPO, "advantage": "{type: gae}", "critic": "{shared_trunk: true}"},
            "advantage 'gae' differs between the tokens of a rollout, but policy_loss 'gspo' has one ratio",
            r"set policy_loss: \{type: ppo_clip\}",
        ),
        (
            {"policy_loss": RLOO_SEQUENCE, "advantage": "{type: reinforce, gamma: 0.9}"},
            "advantage 'reinforce' differs between the tokens of a rollout",
            r"set policy_loss: \{type: ppo_clip\}",
        ),
        (
            {"policy_loss": GSPO, "off_policy_correction": "{type: icepop}"},
            "'icepop' weights single tokens, but policy_loss 'gspo' has one ratio per rollout",
            "use off_policy_correction: {type: mask}",
        ),
        (
            {"policy_loss": RLOO_SEQUENCE, "off_policy_correction": "{type: tis}"},
            "off_policy_correction 'tis' weights single tokens, but policy_loss 'rloo_sequence'",
            "use off_policy_correction: {type: mask}",
        ),
        (
            {"policy_loss": RLOO_SEQUENCE, "off_policy_correction": "{type: icepop}"},
            "off_policy_correction 'icepop' weights single tokens, but policy_loss 'rloo_sequence'",
            "use off_policy_correction: {type: mask}",
        ),
        (
            {"updates": "{epochs: 2}"},
            "updates sets 2 updates per step, but policy_loss 'reinforce' does not correct for changes",
            "use policy_loss: {type: ppo_clip}, or one update",
        ),
        (
            {"updates": "{epochs: 2, minibatches: 4}"},
            "updates sets 8 updates per step, but policy_loss 'reinforce'",
            "use policy_loss: {type: ppo_clip}, or one update",
        ),
        (
            {"updates": "{minibatches: 33}", "policy_loss": "{type: ppo_clip}"},
            "updates.minibatches is 33, but a step has only 32 rollouts",
            "lower it",
        ),
        (
            {"advantage": "{type: gigpo}"},
            "advantage 'gigpo' compares the turns of a rollout, but rollouts.max_turns is 1",
            r"raise it .* or use advantage: {type: rloo}",
        ),
        (
            {"filter": "{type: drop}", "rollouts": "{group_size: 1, max_length: 32}", **GAE},
            "filter 'drop' drops groups with equal rewards, which is every group if rollouts.group_size is 1",
            "raise it, or use filter: {type: keep}",
        ),
        (
            {"filter": "{type: resample}", "rollouts": "{group_size: 1, max_length: 32}", **GAE},
            "filter 'resample' drops groups with equal rewards",
            "raise it, or use filter: {type: keep}",
        ),
        (
            {"overlong": "{buffer: 65}"},
            "overlong.buffer is 65, but an answer has at most sampling.max_new_tokens = 64 tokens",
            "lower overlong.buffer or raise sampling.max_new_tokens",
        ),
    ],
)
def test_invalid_combinations_of_objectives_are_refused_with_a_remedy(
    sections: dict[str, str], problem: str, remedy: str
):
    with pytest.raises(ConfigError, match=f"(?s){problem}.*{remedy}"):
        from_lines(**sections)


@pytest.mark.parametrize(
    "sections",
    [
        {"policy_loss": GSPO, "off_policy_correction": "{type: mask}"},
        {
            "policy_loss": RLOO_SEQUENCE,
            "off_policy_correction": "{type: mask}",
            "updates": "{epochs: 2, minibatches: 4}",
        },
        {"policy_loss": "{type: cispo}", "off_policy_correction": "{type: icepop}", "updates": "{minibatches: 32}"},
        {"policy_loss": "{type: importance}", "updates": "{epochs: 2}", "filter": "{type: drop}"},
        {**GAE, "rollouts": "{group_size: 1, max_length: 32}", "policy_loss": "{type: ppo_clip}"},
        {"sampling": "{top_p: 1.0, top_k: null}"},
    ],
)
def test_valid_combinations_of_objectives_are_accepted(sections: dict[str, str]):
    assert from_lines(**sections).run_dir == "runs/test"


def test_updates_per_step():
    assert UpdateConfig(epochs=3, minibatches=4).per_step == 12
