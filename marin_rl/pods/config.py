# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Configs of launches on Cloud TPU. Texts that become arguments of gcloud are checked here."""

import dataclasses
import enum
import re
from typing import Annotated

from annotated_types import Ge

from marin_rl.utils.devices.slice_names import SliceName, TopologyError, parse_slice
from marin_rl.utils.settings.checks import ConfigSection, check_fields

INSTALL = """\
python3 -m pip install --quiet --user uv
python3 -m uv venv --quiet --allow-existing --python 3.11 ../venv
python3 -m uv pip install --quiet --python ../venv/bin/python --editable '.[tpu,ray]'
"""
"""Default installation: a Python of its own, because the one of the runtime versions is too old."""
_FLAG = re.compile(r"--([a-z][-a-z0-9]*)(=[^\0]*)?")
_OWN_FLAGS = {"accelerator-type", "runtime-version", "node-id", "node-count", "node-prefix", "spot", "reserved"}
_OWN_FLAGS |= {"zone", "project", "async", "command", "worker", "recurse"}
"""Flags that the launch sets itself."""


class CapacityType(enum.Enum):
    """Kind of capacity that a request is for."""

    ON_DEMAND = "on-demand"
    """Not preempted; needs on-demand quota."""
    SPOT = "spot"
    """Cheaper; may be preempted at any time."""
    RESERVED = "reserved"
    """From a reservation of the project."""


@dataclasses.dataclass(frozen=True)
class SlicesConfig(ConfigSection):
    """TPU slices."""

    tpu_type: str
    """Type of each slice, such as v5p-32 or v5e-16 (Google's name is v5litepod-16), or its topology, such as v5p:2x2x4.
    The type is requested, and Google chooses the topology;
    `gcloud compute tpus tpu-vm accelerator-types list` lists the types of a zone."""
    num_slices: Annotated[int, Ge(1)] = 1
    """Number of slices. Those of a trainer are connected by the data center's network (Multislice)."""
    capacity_type: CapacityType = CapacityType.ON_DEMAND
    """`on-demand`, `spot` (may be preempted; the slices are then requested again, and the run resumes) or
    `reserved`."""
    runtime_version: str | None = None
    """Software of the hosts; that for JAX on the generation by default."""
    create_flags: tuple[str, ...] = ()
    """Further flags of `gcloud compute tpus queued-resources create`, such as `--service-account=NAME`."""

    def __post_init__(self) -> None:
        check_fields(self)
        try:
            kind = self.kind
        except TopologyError as error:
            raise ValueError(f"tpu_type is {error}") from error
        if kind.slices != 1:
            raise ValueError(
                f"tpu_type is {self.tpu_type!r}: it is {kind.slices} slices; write the type of one, and set "
                f"num_slices: {kind.slices}"
            )
        if not (self.runtime_version or kind.generation.runtime_version):
            raise ValueError(f"tpu_type is {kind.type}, of which the runtime version is not known; set runtime_version")
        _check_text(self, "runtime_version", r"[a-z0-9][-.a-z0-9]*", "a name, such as v2-alpha-tpuv5")
        _check_flags(self, "create_flags")

    def __str__(self) -> str:
        """Number and type, such as `2 x v5p-16`."""
        return f"{self.num_slices} x {self.kind.type}"

    @property
    def kind(self) -> SliceName:
        """Generation and size of each slice."""
        return parse_slice(self.tpu_type)


@dataclasses.dataclass(frozen=True)
class CodeConfig:
    """Code and environment of the hosts."""

    folder: str = "."
    """Git work tree to copy to the hosts; commands run in the copy. Tracked and untracked files are copied; ignored
    ones and submodules are not."""
    install: str = INSTALL
    """Shell commands that install the copied code into `../venv`; run in the copy on every host before a start."""
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    """Environment variables of the hosts."""
    secrets: tuple[str, ...] = ()
    """Names of environment variables of this machine to copy to the hosts, such as HF_TOKEN or WANDB_API_KEY. Their
    values are sent in a file that only the user of the host can read; they are in no command line, log or metadata."""

    def __post_init__(self) -> None:
        wrong = [name for name in (*self.env, *self.secrets) if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII)]
        if wrong:
            raise ValueError(f"invalid name of an environment variable: {', '.join(map(repr, wrong))}")
        if both := sorted(set(self.env) & set(self.secrets)):
            raise ValueError(f"{', '.join(both)} is in both env and secrets; keep one of them")


@dataclasses.dataclass(frozen=True)
class TpuConfig(ConfigSection):
    """Training on one or several TPU slices."""

    tpu_name: str
    """Name of the queued resource and its slices, unique in the zone."""
    zone: str
    """Zone, such as us-east5-a."""
    slices: SlicesConfig
    """Slices of the trainer."""
    rollout_slices: SlicesConfig | None = None
    """Further slices whose hosts join a Ray cluster for rollout workers, with `mode: async`. Each of the `num_slices`
    is a separate request, and may be preempted without the others. Null for none."""
    project: str | None = None
    """Google Cloud project; gcloud's default if null."""
    ssh_flags: tuple[str, ...] = ()
    """Further flags of `gcloud compute tpus tpu-vm ssh` and `scp`, such as `--internal-ip`."""
    max_restarts: Annotated[int, Ge(0)] = 10
    """Maximum restarts of a run that fails; those before an hour without a failure do not count. 0 for none."""
    stop_timeout: Annotated[float, Ge(0)] = 120.0
    """Seconds that a run has to save its state and end when it is stopped, before it is killed."""
    code: CodeConfig = CodeConfig()
    """Code and environment of the hosts."""

    def __post_init__(self) -> None:
        check_fields(self)
        # With the end of a rollout slice's name at most 63 characters, the limit of Cloud TPU.
        name = "at most 50 of a-z, 0-9 and -, and begin with a letter"
        _check_text(self, "tpu_name", r"[a-z]([-a-z0-9]{0,48}[a-z0-9])?", name)
        _check_text(self, "zone", r"[a-z]+-[a-z]+[0-9]+-[a-z]", "a zone, such as us-east5-a")
        _check_text(self, "project", r"[a-z0-9][-.:a-z0-9]*", "the id of a project, such as my-project-123")
        _check_flags(self, "ssh_flags")


def _check_text(config: object, key: str, pattern: str, form: str) -> None:
    """Check that a text, unless it is None, matches a pattern."""
    if (value := getattr(config, key)) is not None and not re.fullmatch(pattern, value):
        raise ValueError(f"{key} is {value!r}; it must be {form}")


def _check_flags(config: object, key: str) -> None:
    """Check that further flags of gcloud have the form --NAME or --NAME=VALUE, and are not set by the launch."""
    for flag in getattr(config, key):
        match = _FLAG.fullmatch(flag)
        if match is None or match[1] in _OWN_FLAGS:
            raise ValueError(
                f"{key} contains {flag!r}; give further flags as --NAME=VALUE, and use the keys of this config for the "
                "others"
            )
