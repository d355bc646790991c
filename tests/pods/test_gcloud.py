# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Messages of gcloud as errors with a cause and a remedy, and the stand-in's check of documented arguments."""

import re

import pytest

from marin_rl.pods.gcloud import Gcloud, GcloudError, NotFoundError, UnreachableError
from tests.pods.stand_in_gcloud import CallError, Cloud, parse

CREATE = ["compute", "tpus", "queued-resources", "create", "a", "--accelerator-type=v5p-8", "--zone=us-east5-a"]


GCLOUD = Gcloud("us-east5-a", "my-project")


@pytest.mark.parametrize(
    ("stderr", "kind", "message"),
    [
        ("ERROR: (x) Quota limit 'TPUV5' has been exceeded. Limit: 0", GcloudError, "the project has no quota"),
        ("ERROR: (x) RESOURCE_EXHAUSTED: no", GcloudError, "the project has no quota"),
        (
            "ERROR: (x) Please run:\n\n  $ gcloud auth login\n",
            GcloudError,
            "ERROR: (x) Please run: $ gcloud auth login",
        ),
        ("ERROR: (x) PERMISSION_DENIED: tpu.nodes.create", GcloudError, "your account lacks a permission"),
        ("ERROR: (x) NOT_FOUND: Resource 'a' was not found", NotFoundError, "found no such resource"),
        ("ERROR: (x) Unable to find the server at tpu", UnreachableError, "cannot reach Google Cloud"),
        ("WARNING: old\nERROR: (x) odd \x1b[31m\nmore", GcloudError, r"failed: ERROR: (x) odd \x1b[31m more"),
        ("", GcloudError, "failed: no message"),
    ],
)
def test_causes(cloud: Cloud, stderr: str, kind: type[GcloudError], message: str) -> None:
    cloud.fail("describe", stderr)
    with pytest.raises(GcloudError, match=re.escape(message)) as raised:
        GCLOUD.tpus("queued-resources", "describe", "a")
    assert type(raised.value) is kind
    assert "queued-resources describe a --zone=us-east5-a --project=my-project --quiet" in str(raised.value)


@pytest.mark.parametrize(
    ("stderr", "kind"),
    [
        ("bash: quota: command was not found; PERMISSION_DENIED", GcloudError),
        ("[/usr/bin/ssh] exited with return code [255].", UnreachableError),
        ("##### Command execution on worker 3 failed with exit status 255. Continuing.", UnreachableError),
    ],
)
def test_output_of_hosts_is_not_a_message_of_gcloud(cloud: Cloud, stderr: str, kind: type[GcloudError]) -> None:
    cloud.fail("ssh", stderr)
    with pytest.raises(GcloudError, match=re.escape(stderr)) as raised:
        GCLOUD.tpus("tpu-vm", "ssh", "a", "--command=true")
    assert type(raised.value) is kind


def test_slow_commands_are_killed(cloud: Cloud, tmp_path_factory: pytest.TempPathFactory) -> None:
    program = cloud.folder.parent / "programs" / "gcloud"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(UnreachableError, match=r"did not end within 0\.1 s"):
        GCLOUD.run("auth", "list", timeout=0.1)


@pytest.mark.parametrize(
    "arguments",
    [
        [*CREATE],
        [*CREATE, "--runtime-version=x", "--provisioning-model=spot"],
        [*CREATE, "--runtime-version=x", "--spot=true"],
        [*CREATE, "--runtime-version"],
        [*CREATE, "b", "--runtime-version=x"],
        ["compute", "tpus", "queued-resources", "resize", "a"],
        ["compute", "tpus", "tpu-vm", "ssh", "a", "--zone=z", "--node=all"],
    ],
)
def test_stand_in_rejects_undocumented_arguments(arguments: list[str]) -> None:
    parse([*CREATE, "--runtime-version=x", "--spot", "--quiet", "--project=p"])
    with pytest.raises(CallError):
        parse(arguments)
