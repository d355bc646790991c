# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Run training on TPU slices until it is complete, also through failures and preemptions.

One loop polls every queued resource and does the next missing step: request it, delete and request it again after a
preemption, install the code on its hosts, start its jobs, restart a job that failed. So the same command starts a run,
continues one that it finds half started, and follows one that is running.
"""

import dataclasses
import re
import shlex
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from marin_rl.pods.config import SlicesConfig, TpuConfig
from marin_rl.pods.gcloud import ABSENT, GcloudError, JobStatus, Slices, UnreachableError, script_digest
from marin_rl.pods.preflight import RAY_PORT, write_upload
from marin_rl.utils.errors import UserError

POLL_SECONDS = 60.0
"""Seconds between two polls of the state of slices and jobs."""
MAX_FAILED_POLLS = 10
"""Consecutive polls that may fail because hosts or Google Cloud cannot be reached, before the launch gives up."""
RESTART_WINDOW = 3600.0
"""Seconds without a failure after which restarts are counted from 0 again."""
LOG_LINES = 100
"""Lines of the logs that are shown."""
TRAIN = "train"
"""Name of the job whose end is the end of the launch."""
RAY_HEAD = "ray_head"
"""Name of the job that runs on the first host only."""
_RAY = ("../venv/bin/ray", "start", "--block", "--disable-usage-stats")


class JobError(UserError):
    """A job failed on a host, or cannot be run. The message names the host and the remedy."""


@dataclasses.dataclass
class Group:
    """The slices of a queued resource with the jobs on their hosts."""

    slices: Slices
    jobs: Callable[[str], Mapping[str, str]]
    """Scripts by name of the job, in the order of their start, given the address of the trainer's first host."""
    addresses: Sequence[str] = ()
    """Internal address of each host; empty unless the slices are ready."""
    exists: bool = False
    """Whether this launch has requested or found the queued resource, and not deleted it."""
    started: bool = False
    """Whether this launch has started the jobs on the current slices, or has found them running."""
    state: str = ""
    """State that was reported last."""

    @property
    def name(self) -> str:
        """Name of the queued resource."""
        return self.slices.name

    def is_running(self, job: str, statuses: Sequence[JobStatus]) -> bool:
        """Whether a job was started on all of its hosts, failed on none, and has not ended on all of them."""
        own = [status for status in statuses if status.job == job]
        hosts = 1 if job == RAY_HEAD else len(self.addresses)
        return len(own) >= hosts and any(s.running for s in own) and not any(s.failed for s in own)


@dataclasses.dataclass
class Launch:
    """Training on the slices of a trainer, and rollout workers on those of further groups."""

    config: TpuConfig
    groups: Sequence[Group]
    """The trainer's group first."""
    report: Callable[[str], None]
    """Prints a message."""
    follows: bool = False
    """Whether the trainer was running already, with workers that must then be kept."""
    restarts: int = 0
    last_failure: float = -RESTART_WINDOW
    """Time of the last restart, as of `time.monotonic`."""

    def run(self) -> None:
        """Run the jobs until the training is complete.

        Raises:
            GcloudError: if a command fails.
            JobError: if a job fails too often.
        """
        with tempfile.TemporaryDirectory(prefix="marin_rl-") as folder:
            # Written once, so that slices that are requested later get the same code.
            upload = Path(folder) / "upload"
            upload.mkdir(mode=0o700)
            write_upload(upload, self.config.code)
            failed = 0
            while True:
                try:
                    if self._poll(upload):
                        return self._finish()
                    failed = 0
                except GcloudError as error:
                    failed += 1
                    # Commands on hosts that are lost or under repair fail in many ways.
                    is_passing = isinstance(error, UnreachableError) or self._has_lost_hosts()
                    if not is_passing or failed >= MAX_FAILED_POLLS:
                        raise
                    self.report(f"{error}; poll {failed} of {MAX_FAILED_POLLS} failed")
                time.sleep(POLL_SECONDS)

    def show_status(self) -> None:
        """Print the state of queued resources and jobs."""
        for group in self.groups:
            found = group.slices.describe()
            self.report(f"{group.name}: {found.state}{f': {found.error}' if found.error else ''}")
            statuses = group.slices.statuses() if found.state == "ACTIVE" else []
            for status in sorted(statuses, key=lambda status: (status.job, status.host)):
                text = status.state if status.state.isalpha() else f"ended with status {status.state}"
                self.report(f"  {status.job} on {status.host}: {text}")

    def stop(self) -> None:
        """Stop all jobs, those of the trainer first."""
        for group in self.groups:
            state = group.slices.describe().state
            statuses = group.slices.statuses() if state == "ACTIVE" else []
            stopped = self._stop_running(group, statuses)
            self.report(f"{group.name}: {state}, {f'stopped {stopped}' if stopped else 'no job runs'}")

    def delete(self) -> None:
        """Delete all queued resources with their slices."""
        place = f"zone {self.config.zone} of {self.config.project or 'the default project'}"
        for group in self.groups:
            deleted, group.exists = group.slices.delete(), False
            self.report(f"{group.name}: {'deleted' if deleted else f'nothing of this name exists in {place}'}")

    def _poll(self, upload: Path) -> bool:
        """Do the next missing steps; returns whether the training is complete."""
        for group in self.groups:
            self._update(group)
        trainer = self.groups[0]
        return bool(trainer.addresses) and any(
            self._keep_running(group, upload) for group in self.groups if group.addresses
        )

    def _has_lost_hosts(self) -> bool:
        try:
            return not all(group.slices.addresses() for group in self.groups if group.addresses)
        except UnreachableError:
            return True

    def _update(self, group: Group) -> None:
        """Find the slices of a group; request them if there are none, or replace them if they are lost."""
        found, slices, group.addresses = group.slices.describe(), group.slices.config, ()
        if found.state != group.state:
            group.state = found.state
            self.report(f"{group.name}: {found.state}")
        existed, group.exists = group.exists, found.state != ABSENT
        if found.state == ABSENT:
            if existed:
                raise JobError(f"{group.name} was deleted, but not by this command; rerun it to request slices again")
            chips = _count(slices.num_slices * slices.kind.chips, "chip")
            self.report(f"{group.name}: requesting {slices}, {chips}")
            group.slices.create()
            group.exists = True
        elif found.slices not in ("", str(slices)):
            raise JobError(
                f"{group.name} exists with {found.slices} instead of {slices}; delete it first, or choose another "
                "tpu_name"
            )
        elif found.state == "FAILED":
            group.slices.delete()
            group.exists = False
            raise JobError(
                f"the request for {group.name} failed and was deleted: {found.error or 'no reason given'}. Correct the "
                "cause, or choose another zone, tpu_type or capacity_type, and rerun the same command"
            )
        elif found.state == "SUSPENDED":
            self._replace(group)
        elif found.state == "ACTIVE":
            addresses = group.slices.addresses()
            group.addresses = addresses or ()
            # What another command deletes must not be requested again; the next poll finds that it is absent.
            if addresses is None and group.slices.describe().state not in (ABSENT, "DELETING"):
                self._replace(group)

    def _replace(self, group: Group) -> None:
        self.report(f"{group.name}: its slices are lost; deleting it, to request it again")
        # Rollout workers must join the next trainer, which has another address.
        for restarted in self.groups if group is self.groups[0] else (group,):
            restarted.started = False
        group.slices.delete()
        group.exists = False

    def _keep_running(self, group: Group, upload: Path) -> bool:
        """Start the jobs of a group that do not run; returns whether the training is complete."""
        jobs, statuses = group.jobs(self.groups[0].addresses[0]), group.slices.statuses()
        if not group.started:
            self._find_or_start(group, jobs, statuses, upload)
            group.started = True
            return False
        train = [status for status in statuses if status.job == TRAIN]
        if len(train) == len(group.addresses) and not any(status.running or status.failed for status in train):
            return TRAIN in jobs
        for job in jobs:
            if not group.is_running(job, statuses):
                self._restart(group, job, statuses)
        return False

    def _find_or_start(
        self, group: Group, jobs: Mapping[str, str], statuses: Sequence[JobStatus], upload: Path
    ) -> None:
        """Keep the jobs if all run with the same commands; otherwise install the code and start them."""
        others = {s.job for s in statuses if s.running and s.digest != script_digest(jobs.get(s.job, ""))}
        if TRAIN in others:
            raise JobError(
                f"{group.name} runs training with other arguments, or with another version of marin_rl.launch; run "
                "`python -m marin_rl.launch tpu stop` with the same options first, or choose another tpu_name"
            )
        is_kept = not others and all(group.is_running(job, statuses) for job in jobs)
        if group is self.groups[0]:
            self.follows = is_kept
        if is_kept and self.follows:
            self.report(f"{group.name}: {', '.join(jobs)} is running already")
            return
        self._stop_running(group, statuses)
        self.report(f"{group.name}: installing the code on {_count(len(group.addresses), 'host')}")
        for name, text in jobs.items():
            (upload / f"{name}.sh").write_text(text, encoding="utf-8")
        group.slices.upload(upload)
        group.slices.setup()
        for job in jobs:
            self.report(f"{group.name}: starting {job}")
            group.slices.start(job, on_all=job != RAY_HEAD)

    def _restart(self, group: Group, job: str, statuses: Sequence[JobStatus]) -> None:
        """Restart a job on all of its hosts.

        Raises:
            JobError: if it was restarted too often; the log of the first host where it failed is printed before.
        """
        failed = next((status for status in statuses if status.job == job and status.failed), None)
        text = "ended" if failed is None else f"failed on host {failed.host} with exit status {failed.state}"
        now = time.monotonic()
        self.restarts = 0 if now - self.last_failure > RESTART_WINDOW else self.restarts
        if self.restarts >= self.config.max_restarts:
            # Names of the hosts of a slice end with their index.
            index = None if failed is None else re.search(r"-w-(\d+)$", failed.host)
            group.slices.logs(LOG_LINES, worker=index[1] if index else "all")
            raise JobError(
                f"{job} {text} on {group.name}, after {_count(self.restarts, 'restart')}; the log is above. "
                "Correct the cause and rerun the same command"
            )
        self.restarts, self.last_failure = self.restarts + 1, now
        self.report(f"{group.name}: {job} {text}; restart {self.restarts} of {self.config.max_restarts}")
        group.slices.stop(job, self.config.stop_timeout)
        group.slices.start(job, on_all=job != RAY_HEAD)

    def _stop_running(self, group: Group, statuses: Sequence[JobStatus]) -> str:
        """Stop the jobs that run; returns their names."""
        running = {status.job for status in statuses if status.running}
        # Training first: it cannot save its state without Ray.
        for job in sorted(running, key=lambda name: name != TRAIN):
            group.slices.stop(job, self.config.stop_timeout)
        return ", ".join(sorted(running))

    def _finish(self) -> None:
        """Stop the jobs that serve the complete one, such as Ray."""
        self.report("the run is complete, or was stopped")
        for group in self.groups:
            if group.addresses:
                self._stop_running(group, group.slices.statuses())


def open_launch(config: TpuConfig, arguments: Sequence[str], report: Callable[[str], None]) -> Launch:
    """Build the launch of a training run."""

    def slices(name: str, requested: SlicesConfig) -> Slices:
        return Slices(config.zone, config.project, name, requested, config.ssh_flags)

    def trainer_jobs(head: str) -> dict[str, str]:
        train = ["../venv/bin/python", "-u", "-m", "marin_rl.train", *arguments]
        train += ["--trainer.distributed.initialize_jax_distributed", "true"]
        if config.rollout_slices is None:
            return {TRAIN: job_script(train)}
        # No CPUs and TPUs of this host for Ray: they are the trainer's, and workers must not be placed here.
        ray = [*_RAY, "--head", f"--port={RAY_PORT}", "--num-cpus=0", '--resources={"TPU": 0}']
        return {RAY_HEAD: job_script(ray), TRAIN: job_script([*train, "--ray_address", f"{head}:{RAY_PORT}"])}

    def worker_jobs(head: str) -> dict[str, str]:
        return {"ray_worker": job_script([*_RAY, f"--address={head}:{RAY_PORT}"])}

    groups = [Group(slices(config.tpu_name, config.slices), trainer_jobs)]
    if config.rollout_slices is not None:
        one = dataclasses.replace(config.rollout_slices, num_slices=1)
        for index in range(config.rollout_slices.num_slices):
            groups.append(Group(slices(f"{config.tpu_name}-rollouts-{index}", one), worker_jobs))
    return Launch(config, groups, report)


def job_script(command: Sequence[str]) -> str:
    """Shell script that is replaced by a command."""
    return f"exec {shlex.join(command)}\n"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
