# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The oracle of both forms is what transformers 4 reads and transformers 5 has written, see `hf_oracle`."""

import json
from pathlib import Path
from typing import Any

import pytest

from marin_rl.models.conversion import levanter_config, to_hf_config
from marin_rl.models.hf_config import read_hf_config
from marin_rl.models.hf_rope import canonical_scaling, read_rope, write_rope
from marin_rl.models.rotary import LinearRotaryConfig
from tests.models.hf_checkpoint import cases, record, write_config
from tests.models.hf_oracle.make_oracle import CASES

ROTARY = sorted(CASES.keys() - {"gpt2"})
NEW, OLD = "rope_parameters", ("rope_theta", "rope_scaling")


def read(folder: Path, config: dict[str, Any]) -> Any:
    checkpoint = write_config(folder, config)
    return levanter_config(read_hf_config(checkpoint), checkpoint)


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


@pytest.mark.parametrize("case", cases(ROTARY))
def test_an_export_has_the_settings_that_each_transformers_reads(tmp_path: Path, case: str):
    config = read(tmp_path, record(case)["config"])
    written = write_rope(to_hf_config(config, 264).to_diff_dict())
    # Yarn's defaults are written out.
    model_type, positions = written["model_type"], written["max_position_embeddings"]
    expected = dict(record(case)["config_version5"][NEW])
    theta, kind = expected.pop("rope_theta"), expected["rope_type"]
    scaling = canonical_scaling(expected, model_type, positions)

    of_5 = dict(written[NEW])
    assert (of_5.pop("rope_theta"), of_5["rope_type"]) == (theta, kind)
    assert canonical_scaling(of_5, model_type, positions) == scaling
    assert written["rope_theta"] == theta
    assert canonical_scaling(written["rope_scaling"], model_type, positions) == scaling
    assert written["rope_scaling"] is None or "rope_theta" not in written["rope_scaling"]


@pytest.mark.parametrize("case", cases(CASES))
def test_each_form_alone_describes_the_exported_model(tmp_path: Path, case: str):
    config = read(tmp_path, record(case)["config"])
    written = json.loads(json.dumps(write_rope(to_hf_config(config, 264).to_diff_dict())))
    for form in (written, without(written, NEW), without(written, *OLD)):
        assert read(tmp_path, form) == config
    assert write_rope(written) == written


def test_each_form_of_linear_scaling_describes_an_olmo3(tmp_path: Path):
    """The config class of transformers 4 reads no `type`, the name that other classes read."""
    linear = {"rope_theta": 500.0, "rope_type": "linear", "factor": 2.0}
    config = read(tmp_path, {**without(record("olmo3")["config_version5"], *OLD), NEW: linear})
    assert config.rope == LinearRotaryConfig(500.0, 2.0)
    written = write_rope(to_hf_config(config, 264).to_diff_dict())
    for form in (written, without(written, NEW), without(written, *OLD)):
        assert read(tmp_path, form) == config


def test_forms_with_one_meaning_agree():
    linear = {"rope_theta": 500.0, "rope_type": "linear", "factor": 2.0}
    for kind in ("type", "rope_type"):
        both = {NEW: linear, "rope_theta": 500, "rope_scaling": {kind: "linear", "factor": 2.0}}
        assert read_rope(both)["rope_theta"] == 500
    plain = {NEW: {"rope_theta": 500.0}, "rope_scaling": {"rope_type": "default"}}
    assert read_rope(plain)["rope_theta"] == 500
    with pytest.raises(ValueError, match=r"contradicts rope_scaling .*'factor': 3.0.*; remove one of the two"):
        read_rope({NEW: linear, "rope_scaling": {"type": "linear", "factor": 3.0}})
    with pytest.raises(ValueError, match="rope_type 'default' and type 'yarn'; remove one of the two"):
        canonical_scaling({"rope_type": "default", "type": "yarn", "factor": 2.0}, "llama", 64)


def test_settings_without_rotary_embeddings_stay():
    assert write_rope({"n_embd": 32}) == {"n_embd": 32}
