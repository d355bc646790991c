# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Objectives: advantages, policy terms, KL penalties, off-policy corrections, shaping and aggregation.

Pure functions of arrays, each next to the config that selects it. The host-side names are imported eagerly and do not
load jax; the device-side names (KL, importance weights, policy, value and preference terms) are imported on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from marin_rl.objectives.advantage_inputs import (
    AdvantageConfig,
    AdvantageInputs,
    TokenAdvantages,
    TurnAdvantages,
    centered,
    discounted_returns,
    sample_variance,
    standardized,
    uniform_advantages,
)
from marin_rl.objectives.advantages import (
    DrGrpoConfig,
    GrpoConfig,
    MaxRlConfig,
    Normalization,
    ReinforceConfig,
    RlooConfig,
    dr_grpo_advantages,
    grpo_advantages,
    maxrl_advantages,
    reinforce_advantages,
    rloo_advantages,
    turn_returns,
)
from marin_rl.objectives.aggregation import (
    AggregationConfig,
    ConstantConfig,
    SequenceMeanConfig,
    SequenceSumConfig,
    TokenMeanConfig,
    constant_weights,
    sequence_mean_weights,
    sequence_sum_weights,
    token_mean_weights,
)
from marin_rl.objectives.gae import GaeConfig, gae_advantages, token_rewards, whitened
from marin_rl.objectives.gigpo import GigpoConfig, GigpoNormalization, step_advantages
from marin_rl.objectives.pass_at_k import pass_at_k
from marin_rl.objectives.shaping import (
    KeepTruncatedConfig,
    MaskTruncatedConfig,
    OverlongConfig,
    RewardTruncatedConfig,
    TruncationConfig,
    soft_overlong_penalty,
)

if TYPE_CHECKING:
    from marin_rl.objectives.distillation import DistillationConfig, distillation_advantages
    from marin_rl.objectives.divergence import Divergence, divergence_terms
    from marin_rl.objectives.importance import (
        IcepopConfig,
        LogRatioStatistics,
        MaskMismatchConfig,
        NoCorrectionConfig,
        OffPolicyCorrectionConfig,
        TisConfig,
        icepop_weights,
        log_ratio_statistics,
        log_weight_statistics,
        mask_weights,
        mismatch_metrics,
        tis_weights,
    )
    from marin_rl.objectives.kl import (
        ExactKlConfig,
        KlConfig,
        KlEstimator,
        LossKlConfig,
        NoKlConfig,
        RewardKlConfig,
        kl_k1,
        kl_k2,
        kl_k3,
        kl_k3_plus,
    )
    from marin_rl.objectives.policy_loss import (
        CispoLossConfig,
        GspoLossConfig,
        ImportanceLossConfig,
        PolicyLossConfig,
        PolicyTerms,
        PpoClipLossConfig,
        ReinforceLossConfig,
        RlooSequenceLossConfig,
        TokenBatch,
        cispo_terms,
        gspo_terms,
        importance_terms,
        policy_ratio,
        ppo_clip_terms,
        reinforce_terms,
        rloo_sequence_terms,
        sequence_log_ratios,
        unclipped,
    )
    from marin_rl.objectives.preference import (
        PairSums,
        PreferenceLossConfig,
        pair_sums,
        preference_loss,
        preference_metrics,
    )
    from marin_rl.objectives.value_loss import ValueTerms, explained_variance, value_loss_terms

_DEVICE_MODULES = ("distillation", "divergence", "importance", "kl", "policy_loss", "preference", "value_loss")


def __getattr__(name: str) -> Any:
    for module in () if name.startswith("_") else _DEVICE_MODULES:
        value = vars(importlib.import_module(f"{__name__}.{module}")).get(name)
        if getattr(value, "__module__", None) == f"{__name__}.{module}":
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
