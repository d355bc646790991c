# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Objectives: advantages, policy terms, KL penalties, off-policy corrections, shaping and aggregation.

Pure functions of arrays, each next to the config that selects it. The host-side names are imported eagerly and do not
load jax; the device-side names (KL, importance weights, policy and value terms) are imported on first use.
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
    Normalization,
    ReinforceConfig,
    RlooConfig,
    dr_grpo_advantages,
    grpo_advantages,
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
from marin_rl.objectives.gigpo import GigpoConfig, GigpoNormalization, anchor_of, step_advantages
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
    )
    from marin_rl.objectives.value_loss import ValueTerms, explained_variance, value_loss_terms

__all__ = [
    "AdvantageConfig",
    "AdvantageInputs",
    "AggregationConfig",
    "CispoLossConfig",
    "ConstantConfig",
    "DrGrpoConfig",
    "GaeConfig",
    "GigpoConfig",
    "GigpoNormalization",
    "GrpoConfig",
    "GspoLossConfig",
    "IcepopConfig",
    "ImportanceLossConfig",
    "KeepTruncatedConfig",
    "KlConfig",
    "KlEstimator",
    "LogRatioStatistics",
    "LossKlConfig",
    "MaskMismatchConfig",
    "MaskTruncatedConfig",
    "NoCorrectionConfig",
    "NoKlConfig",
    "Normalization",
    "OffPolicyCorrectionConfig",
    "OverlongConfig",
    "PolicyLossConfig",
    "PolicyTerms",
    "PpoClipLossConfig",
    "ReinforceConfig",
    "ReinforceLossConfig",
    "RewardKlConfig",
    "RewardTruncatedConfig",
    "RlooConfig",
    "RlooSequenceLossConfig",
    "SequenceMeanConfig",
    "SequenceSumConfig",
    "TisConfig",
    "TokenAdvantages",
    "TokenBatch",
    "TokenMeanConfig",
    "TruncationConfig",
    "TurnAdvantages",
    "ValueTerms",
    "anchor_of",
    "centered",
    "cispo_terms",
    "constant_weights",
    "discounted_returns",
    "dr_grpo_advantages",
    "explained_variance",
    "gae_advantages",
    "grpo_advantages",
    "gspo_terms",
    "icepop_weights",
    "importance_terms",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kl_k3_plus",
    "log_ratio_statistics",
    "log_weight_statistics",
    "mask_weights",
    "mismatch_metrics",
    "pass_at_k",
    "policy_ratio",
    "ppo_clip_terms",
    "reinforce_advantages",
    "reinforce_terms",
    "rloo_advantages",
    "rloo_sequence_terms",
    "sample_variance",
    "sequence_log_ratios",
    "sequence_mean_weights",
    "sequence_sum_weights",
    "soft_overlong_penalty",
    "standardized",
    "step_advantages",
    "tis_weights",
    "token_mean_weights",
    "token_rewards",
    "turn_returns",
    "uniform_advantages",
    "value_loss_terms",
    "whitened",
]

_DEVICE_MODULES = ("importance", "kl", "policy_loss", "value_loss")


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in _DEVICE_MODULES:
            namespace = vars(importlib.import_module(f"{__name__}.{module}"))
            if name in namespace:
                return namespace[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
