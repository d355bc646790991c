# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Rotary settings of Hugging Face configs, in the forms of transformers 4 and 5.

Transformers 4 has `rope_theta` and `rope_scaling`. Transformers 5 has `rope_parameters`, which contains both and is
ignored by transformers 4. Both forms are read, whichever transformers is installed, and files are written with both.
"""

from collections.abc import Mapping
from typing import Any

from marin_rl.models.rotary import yarn_attention_factor


def read_rope(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Translate `rope_parameters` in the settings of a `config.json`, if any, to `rope_theta` and `rope_scaling`.

    Raises:
        ValueError: if the settings cannot be translated, or contradict one another; the message names them.
    """
    values = dict(settings)
    parameters = values.pop("rope_parameters", None)
    if parameters is None:
        return values
    if not isinstance(parameters, dict) or not isinstance(parameters.get("rope_theta"), int | float):
        raise ValueError(f"rope_parameters is {parameters!r}; it must hold a number rope_theta for all layers")
    kind, scaling = _split_type(parameters)
    theta = scaling.pop("rope_theta")
    if (partial := scaling.pop("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError(f"rope_parameters sets partial_rotary_factor to {partial!r}; only 1.0 is supported")
    old_theta, old_scaling = values.get("rope_theta"), values.get("rope_scaling")
    if old_theta not in (None, theta):
        raise ValueError(f"rope_parameters contradicts rope_theta {old_theta!r}; remove one of the two")
    if old_scaling is not None and not (isinstance(old_scaling, dict) and _split_type(old_scaling) == (kind, scaling)):
        raise ValueError(f"rope_parameters contradicts rope_scaling {old_scaling!r}; remove one of the two")
    return {**values, "rope_theta": theta, "rope_scaling": _join_type(kind, scaling, values.get("model_type"))}


def _split_type(scaling: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the type of a `rope_scaling`, and its other settings."""
    kind, older = scaling.get("rope_type"), scaling.get("type")
    if kind and older and kind != older:
        # Transformers 4 uses the older name, and transformers 5 the other one.
        raise ValueError(f"rope_scaling has rope_type {kind!r} and type {older!r}; remove one of the two")
    return kind or older or "default", {
        name: value for name, value in scaling.items() if name not in ("rope_type", "type")
    }


def _join_type(kind: str, scaling: Mapping[str, Any], model_type: str | None) -> dict[str, Any] | None:
    """Return the `rope_scaling` of transformers 4."""
    if kind == "default":
        return None
    # `type` is the older name. In transformers 4, OLMo 2's config class accepts no other, and OLMo 3's ignores it.
    return {"type" if kind == "linear" and model_type != "olmo3" else "rope_type": kind, **scaling}


def write_rope(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a `config.json` with the rotary settings in both forms."""
    values = read_rope(settings)
    if "rope_theta" not in values:
        return values
    theta, (kind, scaling) = values["rope_theta"], _split_type(values.get("rope_scaling") or {})
    parameters = {"rope_theta": theta, "rope_type": kind, **scaling}
    old_scaling = _join_type(kind, scaling, values.get("model_type"))
    return {**values, "rope_scaling": old_scaling, "rope_parameters": parameters}


def rope_settings(hf_config: Any) -> tuple[float | None, dict[str, Any] | None]:
    """Return `rope_theta` and `rope_scaling` of a config of either transformers; None if it has none.

    Transformers 5 returns `rope_parameters` for `rope_scaling`.
    """
    scaling = dict(getattr(hf_config, "rope_scaling", None) or {})
    theta = scaling.pop("rope_theta", getattr(hf_config, "rope_theta", None))
    return theta, scaling or None


def canonical_scaling(
    scaling: Mapping[str, Any] | None, model_type: str, max_position_embeddings: int
) -> dict[str, Any] | None:
    """Return `rope_scaling` with transformers' defaults filled in; None if there is no scaling.

    `max_position_embeddings` is the context of the model, in tokens.

    Raises:
        ValueError: if the scaling is not supported; the message names the setting and the remedy.
    """
    if scaling is None:
        return None
    if not (scaling.get("rope_type") or scaling.get("type")):
        raise ValueError(f"rope_scaling is {scaling!r}, without a rope_type; add it to a copy of config.json")
    kind, given = _split_type(scaling)
    canonical: dict[str, Any]
    match kind:
        case "default":
            return None
        case "linear":
            canonical = {"factor": float(_required(given, kind, "factor"))}
        case "llama3" | "yarn" if model_type == "olmo2":
            raise ValueError(
                f"rope_scaling of type {kind!r} is not supported for olmo2, because transformers 4 cannot read it; "
                "supported are default and linear"
            )
        case "llama3":
            names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
            canonical = {name: _required(given, kind, name) for name in names}
        case "yarn":
            canonical = _canonical_yarn(given, max_position_embeddings)
        case _:
            raise ValueError(
                f"rope_scaling of type {kind!r} is not supported; supported are default, linear, llama3 and yarn"
            )
    # Both are resolved into the attention factor.
    if unknown := sorted(given.keys() - canonical.keys() - {"mscale", "mscale_all_dim"}):
        raise ValueError(f"rope_scaling of type {kind!r} has settings that are not supported: {unknown}")
    return {"rope_type": kind, **canonical}


def _required(scaling: Mapping[str, Any], kind: str, name: str) -> Any:
    if scaling.get(name) is None:
        raise ValueError(f"rope_scaling of type {kind!r} lacks {name}; add it to a copy of config.json")
    return scaling[name]


def _canonical_yarn(given: Mapping[str, Any], max_position_embeddings: int) -> dict[str, Any]:
    factor = float(_required(given, "yarn", "factor"))
    attention_factor = given.get("attention_factor")
    if attention_factor is None:
        attention_factor = yarn_attention_factor(factor, given.get("mscale"), given.get("mscale_all_dim"))
    return {
        "factor": factor,
        "attention_factor": float(attention_factor),
        "beta_fast": float(given.get("beta_fast") or 32),
        "beta_slow": float(given.get("beta_slow") or 1),
        "original_max_position_embeddings": given.get("original_max_position_embeddings") or max_position_embeddings,
        "truncate": given.get("truncate", True),
    }
