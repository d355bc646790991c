# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""One of two training hosts is killed, with its weight server."""

from pathlib import Path

import pytest

from experiments.soak import kill_in_transfer, whole_and_once
from experiments.soak_train import hold_transfers
from tests.faults.live_run import all_end, async_settings, each_of_one_version, verifiable_versions
from tests.tiny_run import make_run
from tests.training_hosts import hosts, started

STEPS = 8
EXPLAINED = "Run the same command on all hosts to resume from the last checkpoint."
JAX_ENDS = "This most likely indicates that another task died; see the other task logs for more details"


@pytest.mark.slow
@pytest.mark.parametrize("killed", [pytest.param(0, id="the main host"), pytest.param(1, id="another host")])
def test_dead_training_host_ends_the_run_which_resumes(killed: int, tmp_path: Path) -> None:
    settings = verifiable_versions(tmp_path / "problems.jsonl")
    run = make_run(tmp_path, **async_settings(**settings, num_steps=STEPS, checkpoint__every=2))
    training = hosts(run, 2)
    main, left = training[0], training[1 - killed]
    hold = training[killed].hold = tmp_path / "hold"
    # Step 4 publishes this version, so it is trained and saved, and the run cannot end without the version.
    hold_transfers(hold, 4)
    with started(training):
        main.wait_until(lambda: main.saved_steps >= 4, "the checkpoint of step 4")
        children = main.children() | training[1].children()
        kill_in_transfer(training[killed])
        assert left.end() != 0
        all_end([child for child in children if child.name.startswith(("ray::Worker", "ray::Coordinator"))])
    said = left.output.read_text()
    # Jax may end the other process before its collective operation fails.
    assert EXPLAINED in said or (killed == 0 and JAX_ENDS in said), said
    saved = main.saved_steps
    assert saved < STEPS
    training = hosts(run, 2)
    with started(training):
        # Ray's helper processes check their node once a minute.
        all_end(children)
        assert [host.end() for host in training] == [0, 0], [host.output.read_text() for host in training]
    log = (run.path / "log.txt").read_text()
    assert f"resuming after step {saved}, from " in log
    assert "damaged" not in log
    assert whole_and_once(main, groups=4, members=4, staleness=1) == STEPS
    each_of_one_version(main)
