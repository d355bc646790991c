# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import pytest

from marin_rl.sampling.sampler import Sampler, SampleRequest
from marin_rl.types import Generation, StopReason
from tests.scripted_sampler import ScriptedSampler


def test_replies_come_from_the_mapping_and_requests_are_recorded():
    scripted = ScriptedSampler({(1,): (4, 0), (2, 3): (5, 6, 0)}, stop_token_ids=[0], logprob=-0.5, version=3)
    sampler: Sampler = scripted
    first, second = SampleRequest((2, 3), 0, 8), SampleRequest((1,), 1, 8)
    assert sampler.sample([first, second]) == [
        Generation((5, 6, 0), (-0.5, -0.5, -0.5), StopReason.STOP, 3, 3),
        Generation((4, 0), (-0.5, -0.5), StopReason.STOP, 3, 3),
    ]
    sampler.sample([first])
    assert scripted.requests == [first, second, first]


def test_script_function_receives_the_request():
    sampler = ScriptedSampler(lambda request: [request.seed] * request.max_new_tokens, stop_token_ids=[0])
    (generation,) = sampler.sample([SampleRequest((1,), 7, 3)])
    assert generation == Generation((7, 7, 7), (-1.0, -1.0, -1.0), StopReason.LENGTH, 0, 0)


def test_replies_are_cut_at_the_first_stop_token_and_at_the_limit():
    sampler = ScriptedSampler({(1,): (4, 8, 5, 9)}, stop_token_ids=[8, 9])
    cut, full = sampler.sample([SampleRequest((1,), 0, 1), SampleRequest((1,), 0, 4)])
    assert (cut.token_ids, cut.stop_reason) == ((4,), StopReason.LENGTH)
    assert (full.token_ids, full.stop_reason) == ((4, 8), StopReason.STOP)


def test_error_names_a_missing_reply():
    with pytest.raises(ValueError, match=r"no reply to prompt \(1, 2\)"):
        ScriptedSampler({}, stop_token_ids=[0]).sample([SampleRequest((1, 2), 0, 1)])


@pytest.mark.parametrize("reply", [(), (4, 5)])
def test_reply_without_stop_token_is_rejected(reply: tuple[int, ...]):
    with pytest.raises(ValueError, match="ends in no stop token"):
        ScriptedSampler({(1,): reply}, stop_token_ids=[0]).sample([SampleRequest((1,), 0, 3)])
