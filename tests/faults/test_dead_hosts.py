# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""One of two training hosts is killed, with its weight server."""

from pathlib import Path

import pytest

from experiments.lab.soak import Child, kill_in_transfer, whole_and_once
from experiments.lab.soak_train import hold_transfers
from tests.faults.live_run import all_end, async_settings, verifiable_versions
from tests.tiny_run import TinyRun, make_run
from tests.training.sampled_versions import each_of_one_version
from tests.training_hosts import hosts, started

STEPS = 12
ACTORS = ("RayWorker", "Coordinator")
"""Classes of the processes that Ray starts for a run."""
EXPLAINED = "Run the same command on all hosts to resume from the last checkpoint"
JAX_ENDS = "This most likely indicates that another task died; see the other task logs for more details"


def kill_in_transfer_of(version: int, killed: int, run: TinyRun) -> set[Child]:
    """Start both hosts, and kill one while a worker fetches the version from it; the other must end.

    Args:
        version: version, and step of a checkpoint.
        killed: index of the host; 0 is the main host.
        run: the run.

    Returns:
        The processes that the hosts had started.
    """
    training = hosts(run, 2)
    main, left = training[0], training[1 - killed]
    hold = training[killed].hold = run.path.parent / "hold"
    # The step of this number publishes the version, so it is trained and saved, and the run cannot end without it.
    hold_transfers(hold, version)
    with started(training):
        main.wait_until(lambda: main.saved_steps >= version, f"the checkpoint of step {version}")
        children = main.children() | training[1].children()
        kill_in_transfer(training[killed])
        assert left.end() != 0
        actors = {name: [child for child in children if child.name.startswith(f"ray::{name}")] for name in ACTORS}
        assert all(actors.values()), children
        all_end([child for of_name in actors.values() for child in of_name])
    # Jax may end the other process before its collective operation fails.
    assert EXPLAINED in left.said or JAX_ENDS in left.said, left.said
    assert main.saved_steps < STEPS
    return children


@pytest.mark.slow
def test_dead_training_host_ends_the_run_which_resumes(tmp_path: Path) -> None:
    """First the other host is killed, then the main host, each with its weight server."""
    settings = verifiable_versions(tmp_path / "problems.jsonl")
    changes = {"num_steps": STEPS, "workers__num_workers": 1}
    run = make_run(tmp_path, **async_settings(**settings, **changes))
    saved, children = [], set[Child]()
    for version, killed in ((4, 1), (8, 0)):
        children |= kill_in_transfer_of(version, killed, run)
        saved.append(hosts(run, 2)[0].saved_steps)
    training = hosts(run, 2)
    with started(training):
        assert [host.end() for host in training] == [0, 0], [host.said for host in training]
    # Ray's helper processes check their node once a minute.
    all_end(children)
    log = (run.path / "log.txt").read_text()
    for step in saved:
        assert f"resuming after step {step}, from " in log
    assert "damaged" not in log
    assert whole_and_once(training[0], groups=4, members=4, staleness=1) == STEPS
    each_of_one_version(training[0].run_dir, max_staleness=1)
