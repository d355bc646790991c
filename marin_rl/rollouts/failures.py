# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Messages about failed rollouts: how many failed, why, and an example."""

import collections
import logging
from collections.abc import Callable, Sequence

from marin_rl.types import Rollout, RolloutGroup

logger = logging.getLogger(__name__)


class FailureReports:
    """Reports each kind of failure once with an example, and again if most rollouts fail; logs the other numbers.

    Failures are of one kind if the same reward component failed for the same cause, or an environment with the same
    type of error.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        """Create it without any failure.

        Args:
            report: called with each message for the user; the message has further lines for the user's own frames.
        """
        self._report = report
        self._known: set[tuple[str, bool]] = set()

    def add(self, when: str, groups: Sequence[RolloutGroup], consequence: str = "are not trained on") -> None:
        """Report the failed rollouts of a step or an evaluation.

        Args:
            when: beginning of the messages.
            groups: all rollouts.
            consequence: what happens to failed rollouts.
        """
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        kinds: dict[str, list[Rollout]] = collections.defaultdict(list)
        for rollout in rollouts:
            if not rollout.status.is_graded:
                kinds[_kind(rollout)].append(rollout)
        for kind, failed in kinds.items():
            numbers = f"{when}: {len(failed)} of {len(rollouts)} rollouts failed"
            key = kind, 2 * len(failed) > len(rollouts)
            if key in self._known:
                logger.info("%s (%s)", numbers, kind)
                continue
            self._known.add(key)
            first = failed[0]
            example = f"{first.id} of environment {first.task.environment!r}: {first.error}"
            self._report(f"{numbers} and {consequence}, such as {example}")


def _kind(rollout: Rollout) -> str:
    for result in rollout.evaluations:
        if result.failure is not None:
            return f"reward {result.component!r}: {result.failure}"
    # Errors of environments begin with their type.
    return f"environment {rollout.task.environment!r}: {(rollout.error or rollout.status.value).split(':')[0]:.100}"
