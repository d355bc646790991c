# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

from marin_rl.runtime.policy_sampler import PolicySampler
from marin_rl.sampling.levanter_sampler import LevanterSampler
from marin_rl.sampling.sampler import PromptTooLongError, Sampler
from marin_rl.sampling.scripted import ScriptedSampler


def test_every_sampler_offers_the_protocol_and_other_things_do_not():
    for kind in (LevanterSampler, PolicySampler):
        assert {"batch_size", "sample"} <= set(dir(kind))
    assert isinstance(ScriptedSampler({}, stop_token_ids=[0]), Sampler)
    assert not isinstance({}, Sampler)


def test_a_prompt_that_is_too_long_is_bad_input():
    assert issubclass(PromptTooLongError, ValueError)
