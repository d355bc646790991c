# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Config of a launch."""

import dataclasses
import re
from typing import Annotated

from annotated_types import Ge, Gt

from marin_rl.utils.devices.slice_names import SliceName, TopologyError, parse_slice
from marin_rl.utils.settings.checks import ConfigSection, check_fields


@dataclasses.dataclass(frozen=True)
class LaunchConfig(ConfigSection):
    """A command of this package as a job of an Iris cluster."""

    cluster: str | None = None
    """The cluster: its name, as `iris cluster list` prints it, its YAML file, or the address of its controller."""
    slice: str | None = None
    """TPU slice with a process on every host: its type, `v5p-32`, or topology, `v5p:2x2x4`; null: one CPU host."""
    zone: str | None = None
    """Zone of the hosts, such as us-east5-a; null: any zone of the cluster."""
    cpu: Annotated[float, Gt(0)] | None = None
    """CPUs of each host for the job; null: 4, on a TPU host 8 for each chip."""
    memory_gb: Annotated[int, Ge(1)] | None = None
    """Memory of each host for the job in GB; null: 16, on a TPU host 32 for each chip."""
    disk_gb: Annotated[int, Ge(1)] = 64
    """Disk of each host for the job in GB."""
    max_retries: Annotated[int, Ge(0)] = 10
    """Maximum starts after failures, such as a killed process; preemptions do not count. A mistake ends the job."""
    extras: tuple[str, ...] = ("iris",)
    """Extras of the project in this folder to install on the hosts, in addition to `tpu` on TPU hosts."""
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    """Environment variables of the job. They can be read by all users of the cluster."""
    secrets: tuple[str, ...] = ()
    """Names of environment variables of this machine that the job also gets, such as WANDB_API_KEY. Their values are
    sent apart from the job, and are in no command line, log or metadata."""

    def __post_init__(self) -> None:
        check_fields(self)
        try:
            kind = self.kind
        except TopologyError as error:
            raise ValueError(f"slice is {error}") from error
        if kind is not None and kind.slices > 1:
            raise ValueError(
                f"slice is {self.slice!r}: Iris places the processes of a job on one slice; remove the number"
            )
        wrong = [name for name in (*self.env, *self.secrets) if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII)]
        if wrong:
            raise ValueError(f"invalid name of an environment variable: {', '.join(map(repr, wrong))}")
        if both := sorted(set(self.env) & set(self.secrets)):
            raise ValueError(f"{', '.join(both)} is in both env and secrets; keep one of them")
        if zeros := [name for name, value in self.env.items() if "\0" in value]:
            raise ValueError(f"env.{zeros[0]} has a zero byte, which no environment variable can have; remove it")

    @property
    def kind(self) -> SliceName | None:
        """Generation and size of the slice; None for a CPU host."""
        return None if self.slice is None else parse_slice(self.slice)
