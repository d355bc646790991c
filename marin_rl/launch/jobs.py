# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Run jobs on the slices of queued resources until the first job is complete, also through preemptions.

One loop looks at every queued resource and does the next missing step: request it, delete and request it again after a
preemption, install the code on its hosts, start its jobs. So the same command starts a run, continues one that it
finds half started, and follows one that is running.
"""

import contextlib
import dataclasses
import re
import shlex
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from marin_rl.config_fields import check_at_least
from marin_rl.errors import UserError
from marin_rl.launch import queued_resource
from marin_rl.launch.gcloud import Gcloud, GcloudError, UnreachableError
from marin_rl.launch.hosts import Hosts, JobStatus
from marin_rl.launch.queued_resource import QueuedResource, Stage
from marin_rl.launch.upload import CodeConfig, code_files, show_upload, write_upload
from marin_rl.slice_names import chips_of

LOG_LINES = 50
"""Lines of the logs after a failure."""


class JobError(UserError):
    """A job failed on a host, or cannot be run. The message names the host and the remedy."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A command that runs on the hosts of a queued resource."""

    name: str
    """Name of its folder on the hosts."""
    command: tuple[str, ...]
    """The supervised command with the supervisor's own arguments."""
    worker: str = "all"
    """`all`, or the index of the host of the first slice that runs it."""

    main: bool = False
    """Whether the launch is complete when this job is."""

    @property
    def supervised(self) -> tuple[str, ...]:
        """The command without the supervisor."""
        return self.command[self.command.index("--") + 1 :]


@dataclasses.dataclass
class Group:
    """A queued resource with the jobs on its hosts."""

    resource: QueuedResource
    """The requested slices."""
    jobs: Callable[[str], Sequence[Job]]
    """Jobs in the order of their start, given the internal address of the first host of the first group."""
    hosts: Hosts
    """Access to the hosts."""
    slices: Sequence[Sequence[str]] = ()
    """Internal addresses of the hosts of each slice, none of a slice that is being created or repaired; empty if the
    slices do not exist."""
    started: bool = False
    """Whether this launch has started the jobs on the current slices."""
    requested: bool = False
    """Whether this launch has requested the slices, and they have not existed yet."""
    recreations: int = 0
    """Number of losses of the slices."""
    shown: str = ""
    """State that was printed last."""

    @property
    def name(self) -> str:
        """Name of the queued resource."""
        return self.resource.name

    @property
    def addresses(self) -> list[str]:
        """Internal address of each host."""
        return [address for addresses in self.slices for address in addresses]


@dataclasses.dataclass(frozen=True)
class JobsConfig:
    """Waiting for slices, and reactions to their loss."""

    poll_seconds: float = 60.0
    """Seconds between two polls of the state of slices and jobs."""
    max_recreations: int = 100
    """Maximum number of times that lost slices, such as preempted ones, are requested again."""
    max_failed_polls: int = 10
    """Consecutive polls that may fail because hosts or Google Cloud cannot be reached, before the launch gives up. The
    run continues without it."""

    def __post_init__(self) -> None:
        check_at_least(self, "jobs", poll_seconds=0, max_recreations=0, max_failed_polls=1)


@dataclasses.dataclass(frozen=True)
class Launch:
    """Queued resources with jobs, of which the last job of the first group decides when the launch is complete."""

    gcloud: Gcloud
    groups: Sequence[Group]
    code: CodeConfig
    config: JobsConfig
    stop_timeout: float
    """Seconds that jobs have to end."""
    command: str
    """Command of `marin_rl.launch` with these jobs, for messages."""

    def run(self, *, detach: bool) -> None:
        """Run the jobs.

        Args:
            detach: return when all jobs have started. Nothing then requests lost slices again.

        Raises:
            GcloudError: if a command fails. Requests of this launch that were not granted yet are deleted.
            JobError: if a job fails.
        """
        names = code_files(Path(self.code.folder))
        failed = 0
        try:
            while True:
                try:
                    if self._advance(names, detach=detach):
                        return
                    failed = 0
                except UnreachableError as error:
                    failed += 1
                    if failed >= self.config.max_failed_polls:
                        raise
                    self.gcloud.report(f"{error}; poll {failed} of {self.config.max_failed_polls} failed")
                time.sleep(self.config.poll_seconds)
        except UserError:
            self._delete_requested()
            raise

    def existing(self) -> list[str]:
        """Names of the queued resources that this launch has requested or found, and that are not deleted."""
        return [group.name for group in self.groups if group.requested or group.addresses]

    def dry_run(self) -> None:
        """Print every command and file of a launch that finds nothing."""
        names = code_files(Path(self.code.folder))
        shown: dict[str, str] = {}
        for group in self.groups:
            queued_resource.describe(self.gcloud, group.name)
            queued_resource.create(self.gcloud, group.resource)
        for group in self.groups:
            jobs = group.jobs("HOST_ADDRESS")
            files = show_upload(self.code, names, {job.name: job.command for job in jobs})
            # Rollout slices differ in their names only.
            self.gcloud.report(f"# upload: as for {shown[files]}" if files in shown else files)
            shown.setdefault(files, group.name)
            for node in group.resource.nodes:
                queued_resource.describe_node(self.gcloud, node)
            group.hosts.upload(Path("upload"))
            group.hosts.setup()
            for job in jobs:
                group.hosts.start(job.name, job.worker)

    def stop(self) -> None:
        """Stop all jobs, those of the first group first.

        Raises:
            GcloudError: if a host cannot be reached.
        """
        for group in self.groups:
            found = queued_resource.describe(self.gcloud, group.name)
            if found.stage is Stage.ACTIVE or self.gcloud.dry_run:
                for job in reversed(group.jobs("")):
                    group.hosts.stop(job.name, self.stop_timeout)
                self._report_done(f"{group.name}: jobs stopped; its slices still exist")
            elif found.stage is Stage.ABSENT:
                self._report_absent(group, "stopped")
            else:
                self._report_done(f"{group.name}: {found.state}, so no job runs; delete ends the request")

    def delete(self) -> None:
        """Delete all queued resources with their slices.

        Raises:
            GcloudError: if one cannot be deleted.
        """
        for group in self.groups:
            if queued_resource.delete(self.gcloud, group.name):
                self._report_done(f"{group.name}: deleted")
            else:
                self._report_absent(group, "deleted")

    def show_status(self) -> None:
        """Print the state of queued resources and jobs.

        Raises:
            GcloudError: if a host cannot be reached.
        """
        for group in self.groups:
            found = queued_resource.describe(self.gcloud, group.name)
            error = f": {found.error}" if found.error else ""
            self._report_done(f"{group.name}: {found.state}{error}")
            if found.stage is Stage.ACTIVE:
                for status in sorted(group.hosts.statuses(), key=lambda status: (status.job, status.host)):
                    self.gcloud.report(f"  {_sentence(status)}")

    def _report_absent(self, group: Group, done: str) -> None:
        project = self.gcloud.project or "gcloud's default project"
        self._report_done(
            f"{group.name}: there are no slices of this name in zone {self.gcloud.zone} of {project}, so nothing was "
            f"{done}; slices elsewhere need their tpu_name, zone and project"
        )

    def _report_done(self, text: str) -> None:
        if not self.gcloud.dry_run:
            self.gcloud.report(text)

    def _advance(self, names: Sequence[str], *, detach: bool) -> bool:
        """Do the next missing steps; returns whether the launch is complete."""
        active = [group for group in self.groups if self._is_active(group)]
        first = self.groups[0]
        if first not in active:
            return False
        head, unreachable = first.addresses[0], None
        for group in active:
            try:
                if self._keep_running(group, head, names):
                    self._finish()
                    return True
            except GcloudError as error:
                unreachable = self._after_failure(group, error) or unreachable
        if unreachable is not None:
            raise unreachable
        return detach and all(group.started for group in self.groups)

    def _is_active(self, group: Group) -> bool:
        """Request slices if there are none; returns whether all exist."""
        found = queued_resource.describe(self.gcloud, group.name)
        if found.state != group.shown:
            group.shown = found.state
            self.gcloud.report(f"{group.name}: {found.state}")
        if found.stage is Stage.FAILED and (group.requested or group.recreations):
            group.requested = False
            queued_resource.delete(self.gcloud, group.name)
            raise GcloudError(
                f"the request for {group.name} failed and was deleted: {found.error or 'no reason given'}"
            )
        if found.stage is Stage.ABSENT:
            if group.addresses:
                group.slices = ()
                raise JobError(f"{group.name} was deleted, but not by this command")
            self._request(group)
            return False
        queued_resource.check_same(group.resource, found)
        if found.stage in (Stage.SUSPENDED, Stage.FAILED):
            self._delete_lost_resource(group)
            return False
        if found.stage is not Stage.ACTIVE:
            return False
        group.requested = False
        if not (group.slices and all(group.slices)):
            nodes = [queued_resource.describe_node(self.gcloud, node) for node in group.resource.nodes]
            group.slices = [node.addresses for node in nodes]
        return bool(group.addresses)

    def _request(self, group: Group) -> None:
        resource, slices = group.resource, group.resource.slices
        chips = slices.num_slices * chips_of(slices.tpu_type)
        self.gcloud.report(f"{group.name}: requesting {slices.num_slices} x {slices.tpu_type}, {_count(chips, 'chip')}")
        try:
            queued_resource.create(self.gcloud, resource)
        except UnreachableError:
            # The request may have arrived.
            group.requested = True
            raise
        group.requested = True

    def _keep_running(self, group: Group, head: str, names: Sequence[str]) -> bool:
        """Start the jobs of a group that do not run; returns whether its main job is complete."""
        jobs, statuses = group.jobs(head), group.hosts.statuses()
        if group.started and any(job.main and _is_complete(job, statuses, group) for job in jobs):
            return True
        missing = [job for job in jobs if self._is_missing(group, job, statuses)]
        if not missing:
            if not group.started:
                self.gcloud.report(f"{group.name}: {', '.join(job.name for job in jobs)} is running already")
            group.started = True
            return False
        # Not the statuses above: jobs with another command were stopped since.
        running = {status.job for status in group.hosts.statuses() if status.running}
        if running:
            kept = ", ".join(sorted(running))
            self.gcloud.report(f"{group.name}: the code on its hosts is not replaced, because {kept} runs there")
        else:
            self.gcloud.report(f"{group.name}: installing the code on {_count(len(group.addresses), 'host')}")
        with tempfile.TemporaryDirectory(prefix="marin_rl-") as folder:
            upload = Path(folder) / "upload"
            upload.mkdir(mode=0o700)
            write_upload(upload, self.code, names, {job.name: job.command for job in jobs})
            group.hosts.upload(upload)
        if not running:
            group.hosts.setup()
        for job in missing:
            self.gcloud.report(f"{group.name}: starting {job.name}")
            group.hosts.start(job.name, job.worker)
        group.started = True
        return False

    def _is_missing(self, group: Group, job: Job, statuses: Sequence[JobStatus]) -> bool:
        """Whether a job does not run on all of its hosts; stops it if it runs with another command."""
        own = [status for status in statuses if status.job == job.name]
        if group.started:
            self._raise_failure(group, job, statuses)
        running = [status for status in own if status.running]
        if any(status.command not in ((), job.supervised) for status in running):
            if job.main:
                raise JobError(
                    f"{group.name} runs another command: {shlex.join(running[0].command)}. Stop it first, or choose "
                    "another tpu_name"
                )
            group.hosts.stop(job.name, self.stop_timeout)
            return True
        # Hosts end the main job at slightly different times; those that have ended must not start it again.
        ended = [status for status in own if not status.running and status.state == "exited"]
        count = len(running) + (len(ended) if job.main and (group.started or running) else 0)
        return count < (len(group.addresses) if job.worker == "all" else 1)

    def _raise_failure(self, group: Group, job: Job, statuses: Sequence[JobStatus]) -> None:
        """Raise an error for the first host whose supervisor gave the job up, after printing the logs."""
        for status in statuses:
            if status.job != job.name or status.running or not status.exit_status or status.state != "exited":
                continue
            # Names of the hosts of a slice end with their index.
            index = re.search(r"-w-(\d+)$", status.host)
            group.hosts.logs(index[1] if index else "all", LOG_LINES, follow=False)
            # The code is not replaced on hosts where a job runs.
            jobs_run = any(other.running for other in statuses) or any(
                other.started for other in self.groups if other is not group
            )
            command = f"python -m marin_rl.launch {self.command} stop"
            stop = f", run `{command}` with the same options, because jobs still run," if jobs_run else ""
            raise JobError(
                f"{status.job} failed on host {status.host} of {group.name} with exit status {status.exit_status} "
                f"after {status.restarts} restarts; the log is above. Correct the cause{stop} and "
                "rerun the same command"
            )

    def _after_failure(self, group: Group, error: GcloudError) -> UnreachableError | None:
        """Delete a queued resource if a command failed because its slices are lost; they may be lost at any time.

        Returns:
            None if it is deleted, by this or another command, or the error if the next poll may succeed.

        Raises:
            GcloudError: the error, if the slices exist.
        """
        states = [queued_resource.describe_node(self.gcloud, node).state for node in group.resource.nodes]
        if any(state in ("PREEMPTED", "TERMINATED", "STOPPED", "ABSENT") for state in states):
            found = queued_resource.describe(self.gcloud, group.name)
            # What another command deletes must not be requested again; the next polls report that it is absent.
            if found.stage is not Stage.ABSENT and found.state != "DELETING":
                self._delete_lost_resource(group)
            return None
        if isinstance(error, UnreachableError):
            return error
        if any(state != "READY" for state in states):
            return UnreachableError(f"a slice of {group.name} is {', '.join(states)}: {error}")
        raise error

    def _delete_lost_resource(self, group: Group) -> None:
        group.recreations += 1
        if group.recreations > self.config.max_recreations:
            raise GcloudError(f"{group.name} was lost {group.recreations} times, more than max_recreations")
        self.gcloud.report(f"{group.name}: its slices are lost; deleting it, to request it again")
        group.slices, group.started = (), False
        queued_resource.delete(self.gcloud, group.name)

    def _finish(self) -> None:
        """Stop the jobs that serve the complete one, such as Ray."""
        self.gcloud.report("the run is complete, or was stopped")
        for group in self.groups:
            for job in group.jobs(""):
                if not job.main:
                    group.hosts.stop(job.name, self.stop_timeout)

    def _delete_requested(self) -> None:
        for group in self.groups:
            if group.requested:
                self.gcloud.report(f"{group.name}: deleting the request, which was not granted yet")
                with contextlib.suppress(UserError):
                    queued_resource.delete(self.gcloud, group.name)
                    group.requested = False


def _is_complete(job: Job, statuses: Sequence[JobStatus], group: Group) -> bool:
    own = [status for status in statuses if status.job == job.name]
    return len(own) == len(group.addresses) and all(
        not status.running and status.state == "exited" and status.exit_status == 0 for status in own
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _sentence(status: JobStatus) -> str:
    if not status.host:
        return f"{status.job}: starting" if status.running else f"{status.job}: not started"
    state = "running" if status.running else status.state
    if state == "running" and not status.running:
        state = "its supervisor was killed"
    ended = "" if status.exit_status is None else f", last exit status {status.exit_status}"
    return f"{status.job} on {status.host}: {state}, {status.restarts} restarts{ended}"
