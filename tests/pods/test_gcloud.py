# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Messages of gcloud as errors with a cause and a remedy."""

import re
from pathlib import Path

import pytest

from marin_rl.pods.gcloud import GcloudError, NotFoundError, UnreachableError, run_gcloud

DESCRIBE = ["compute", "tpus", "queued-resources", "describe", "a"]
SSH = ["compute", "tpus", "tpu-vm", "ssh", "a", "--command=true"]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program `gcloud` on PATH that prints the file `stderr`, and fails."""
    path = tmp_path / "gcloud"
    path.write_text(f"#!/bin/sh\n/bin/cat {tmp_path}/stderr >&2\nexit 1\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return path


@pytest.mark.parametrize(
    ("command", "stderr", "kind", "message"),
    [
        (DESCRIBE, "ERROR: (x) Quota limit 'TPUV5' has been exceeded. Limit: 0", GcloudError, "has no quota"),
        (DESCRIBE, "ERROR: (x) RESOURCE_EXHAUSTED: no", GcloudError, "the project has no quota"),
        (DESCRIBE, "ERROR: (x) Run:\n\n  $ gcloud auth login\n", GcloudError, "ERROR: (x) Run: $ gcloud auth login"),
        (DESCRIBE, "ERROR: (x) PERMISSION_DENIED: tpu.create", GcloudError, "your account lacks a permission"),
        (DESCRIBE, "ERROR: (x) NOT_FOUND: Resource 'a' was not found", NotFoundError, "there is no such resource"),
        (DESCRIBE, "ERROR: (x) Unable to find the server at tpu", UnreachableError, "Google Cloud cannot be reached"),
        (DESCRIBE, "WARNING: a\nERROR: (x) odd \x1b[31m\nb", GcloudError, r"--quiet`: ERROR: (x) odd \x1b[31m b"),
        (DESCRIBE, "", GcloudError, "the command failed: `gcloud compute tpus queued-resources describe a --pr"),
        # Output of hosts is no message of gcloud.
        (SSH, "bash: quota: command was not found; PERMISSION_DENIED", GcloudError, "the command failed: "),
        (SSH, "[/usr/bin/ssh] exited with return code [255].", UnreachableError, "a host or Google Cloud cannot be"),
        (SSH, "##### Command execution on worker 3 failed with exit status 255. ...", UnreachableError, "worker 3"),
    ],
)
def test_causes(program: Path, command: list[str], stderr: str, kind: type[GcloudError], message: str) -> None:
    (program.parent / "stderr").write_text(stderr)
    with pytest.raises(GcloudError, match=re.escape(message)) as raised:
        run_gcloud(*command, project="my-project")
    assert type(raised.value) is kind
    assert f"`gcloud {' '.join(command)} --project=my-project --quiet`: " in str(raised.value)


def test_slow_commands_are_killed(program: Path) -> None:
    program.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    with pytest.raises(UnreachableError, match=r"did not end within 0\.1 s"):
        run_gcloud("auth", "list", project=None, timeout=0.1)
