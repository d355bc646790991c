# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The results page: its runs, and its tables and plots from the records that they leave.

python -m experiments.lab.results                        # tables of comparisons.md and the plots, from the records
python -m experiments.lab.results --quick [NAME ...]     # a small version of each task, against its recorded band
python -m experiments.lab.results --run NAME [NAME ...]  # all runs of a result that have no record yet
"""

import argparse
import shutil
import sys
from collections.abc import Iterable

from experiments.lab.results import page
from experiments.lab.results.runs import ROOT, Run, add, execute, read
from experiments.lab.results.tasks import COMPARED, FIRST_RUN, README_RUN, TASKS, compared_runs


def planned(name: str) -> Iterable[Run]:
    """Return all runs of a result."""
    if name == FIRST_RUN:
        return [README_RUN]
    return TASKS[name].runs() if name in TASKS else compared_runs(COMPARED[name])


def run_all(name: str) -> None:
    """Execute the runs of a result that have no record, and add their records."""
    for run in planned(name):
        if all((run.label, run.seed) != (record.label, record.seed) for record in read(name)):
            add(name, execute(run))


def quick(name: str) -> bool:
    """Execute the quick version of a task; print its score, and return whether it is in the band of the records."""
    task = TASKS[name]
    low, high = task.band(read(name))
    run = task.run(1, task.quick_steps)
    # A finished run would not be repeated.
    shutil.rmtree(ROOT / run.directory, ignore_errors=True)
    sampled = execute(run).sampled
    is_within = low <= sampled[-1] <= high
    where = f"{'within' if is_within else 'OUTSIDE'} {low:.3f} to {high:.3f}"
    print(f"{name}: {sampled[0]:.3f} -> {sampled[-1]:.3f} after {task.quick_steps} steps, {where}")
    return is_within


def main() -> int:
    """Return 1 if a quick version is outside its band, otherwise 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--quick", action="store_true")
    how.add_argument("--run", action="store_true")
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], FIRST_RUN, *TASKS, *COMPARED])
    arguments = parser.parse_args()
    if arguments.run:
        for name in arguments.names or [FIRST_RUN, *TASKS, *COMPARED]:
            run_all(name)
    elif arguments.quick:
        if compared := [name for name in arguments.names if name not in TASKS]:
            parser.error(f"{', '.join(compared)} has no quick version; choose from {', '.join(TASKS)}")
        # A list, because all of them run.
        right = [quick(name) for name in arguments.names or TASKS]
        return int(not all(right))
    page.update()
    return 0


if __name__ == "__main__":
    sys.exit(main())
