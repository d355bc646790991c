# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Stand-in for the `gcloud` command: slices are folders, and their hosts processes of this machine.

Takes the documented arguments of the commands that a launch uses, records each call, and fails on demand. Each host of
a slice has a folder, the home of commands over ssh.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SSH = {"worker=", "zone=", "internal-ip", "ssh-flag=", "strict-host-key-checking="}
CREATE = {"accelerator-type=", "runtime-version=", "node-id=", "node-count=", "node-prefix=", "spot", "reserved"}
COMMANDS: dict[tuple[str, ...], tuple[int, set[str], set[str]]] = {
    ("compute", "tpus", "tpu-vm", "describe"): (1, {"zone="}, set()),
    ("compute", "tpus", "tpu-vm", "ssh"): (1, {"zone=", "command="}, SSH),
    ("compute", "tpus", "tpu-vm", "scp"): (2, {"zone="}, {"recurse", "compress", "scp-flag=", *SSH}),
    ("compute", "tpus", "queued-resources", "create"): (
        1,
        {"zone=", "accelerator-type=", "runtime-version="},
        {*CREATE, "network=", "service-account=", "internal-ips", "async"},
    ),
    ("compute", "tpus", "queued-resources", "describe"): (1, {"zone="}, set()),
    ("compute", "tpus", "queued-resources", "delete"): (1, {"zone="}, {"async", "force"}),
    ("storage", "ls"): (1, set(), set()),
}
"""Number of positional arguments, required flags and further flags of each command, `=` after those with a value:
https://cloud.google.com/sdk/gcloud/reference/compute/tpus and /storage."""
ALL = {"format=", "project=", "quiet", "verbosity="}
"""Flags of all commands."""
DROPPED = "ERROR: (gcloud.compute.tpus.tpu-vm.ssh) [/usr/bin/ssh] exited with return code [255]."
"""Message of a connection that broke."""


class CallError(Exception):
    """Ends the command with a message on stderr and status 1."""


class Cloud:
    """A project with the bucket `gs://bucket`, and slices of two hosts; granted at the second description."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls: list[list[str]] = []
        self.resources: dict[str, dict[str, Any]] = {}
        """Queued resources by name."""
        self.waits = 1
        """Number of descriptions until a request is granted."""
        self.without_addresses = Counter[str]()
        """Number of descriptions of a slice in which a host has no address yet."""
        self._faults: list[list[Any]] = []
        self._count = 0
        self._lock = threading.RLock()

    def fail(self, words: str, stderr: str, *, times: int = 1) -> None:
        """Let the next commands that contain some words fail."""
        self._faults.append([set(words.split()), stderr, times])

    def add(self, name: str, kind: str, state: str = "ACCEPTED", nodes: Sequence[str] = ()) -> None:
        """Add a queued resource."""
        self._count += 1
        values = {"kind": kind, "nodes": [*(nodes or [name])], "waits": self.waits, "state": state}
        self.resources[name] = {**values, "number": self._count}

    def preempt(self, name: str) -> None:
        """Preempt the slices of a queued resource."""
        with self._lock:
            self.resources[name]["state"] = "SUSPENDED"
            self._end_hosts(self.resources[name])

    def called(self, *words: str) -> list[list[str]]:
        """Calls that contain some words."""
        return [call for call in self.calls if set(words) <= set(call)]

    def host(self, node: str, worker: int) -> Path:
        """Home folder of a host."""
        return self.folder / "hosts" / node / str(worker)

    def close(self) -> None:
        """End all processes of all hosts."""
        for resource in self.resources.values():
            self._end_hosts(resource)

    def _end_hosts(self, resource: dict[str, Any]) -> None:
        for node in resource["nodes"]:
            for file in self.folder.glob(f"hosts/{node}/*/marin_rl_launch/*/jobs/*/pids"):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(int(file.read_text().split()[0]), signal.SIGKILL)
            shutil.rmtree(self.folder / "hosts" / node, ignore_errors=True)

    # The command.

    def run(self, command: Sequence[str], *, capture_output: bool = False, **_: Any) -> Any:
        """Execute a command, with the interface of `subprocess.run`."""
        try:
            status, output, errors = self._execute(list(command[1:]))
        except CallError as error:
            status, output, errors = 1, "", str(error)
        if not capture_output:
            sys.stdout.write(output)
        return subprocess.CompletedProcess(command, status, output, errors)

    def _execute(self, arguments: list[str]) -> tuple[int, str, str]:
        self.calls.append(arguments)
        command, places, flags = parse(arguments)
        with self._lock:
            for fault in self._faults:
                if fault[2] and fault[0] <= set(arguments):
                    fault[2] -= 1
                    raise CallError(fault[1])
            if command[-1] not in ("ssh", "scp"):
                return 0, self._answer(command, places[0], flags), ""
        return self._ssh(places[0], flags) if command[-1] == "ssh" else self._scp(places)

    def _answer(self, command: tuple[str, ...], name: str, flags: dict[str, str]) -> str:
        if command == ("storage", "ls"):
            if name != "gs://bucket":
                raise CallError(f"ERROR: (gcloud.storage.ls) HTTPError 403: someone has no access to {name}")
            return ""
        if "tpu-vm" in command:
            return json.dumps(self._describe_node(name))
        if command[-1] == "create":
            if name in self.resources or ("node-id" in flags) == ("node-count" in flags):
                raise CallError(f"ERROR: ALREADY_EXISTS: '{name}', or not exactly one of --node-id and --node-count")
            nodes = [f"{flags.get('node-prefix')}-{index}" for index in range(int(flags.get("node-count", 0)))]
            self.add(name, flags["accelerator-type"], nodes=nodes or [flags["node-id"]])
            return ""
        if name not in self.resources:
            raise CallError(f"ERROR: ({'.'.join(command)}) NOT_FOUND: Resource '{name}' was not found")
        resource = self.resources[name]
        if command[-1] == "delete":
            if "force" not in flags and resource["state"] == "ACTIVE":
                raise CallError(f"ERROR: ({'.'.join(command)}) FAILED_PRECONDITION: {name} has nodes")
            self._end_hosts(self.resources.pop(name))
            return ""
        if resource["state"] in ("ACCEPTED", "WAITING_FOR_RESOURCES"):
            resource["state"] = "WAITING_FOR_RESOURCES" if resource["waits"] else "ACTIVE"
            resource["waits"] -= 1
        node = {"node": {"acceleratorType": resource["kind"]}}
        if len(resource["nodes"]) > 1:
            node["multisliceParams"] = {"nodeCount": len(resource["nodes"])}
        state = {"state": resource["state"]}
        if "error" in resource:
            state["failedData"] = {"error": {"message": resource["error"]}}
        return json.dumps({"state": state, "tpu": {"nodeSpec": [node]}})

    def _describe_node(self, name: str) -> dict[str, Any]:
        for resource in self.resources.values():
            if name in resource["nodes"] and resource["state"] == "ACTIVE":
                place = 16 * (resource["number"] - 1) + resource["nodes"].index(name)
                endpoints = [{"ipAddress": f"10.0.{place}.{host}"} for host in range(2)]
                if self.without_addresses[name]:
                    self.without_addresses[name] -= 1
                    return {"state": "CREATING", "networkEndpoints": [*endpoints[1:], {}]}
                return {"state": "READY", "networkEndpoints": endpoints}
        raise CallError(f"ERROR: (gcloud.compute.tpus.tpu-vm.describe) NOT_FOUND: Resource '{name}' was not found")

    def _hosts(self, node: str, worker: str) -> list[Path]:
        with self._lock:
            self._describe_node(node)
        hosts = [self.host(node, index) for index in range(2)]
        for host in hosts:
            host.mkdir(parents=True, exist_ok=True)
        return hosts if worker == "all" else [hosts[int(worker)]]

    def _ssh(self, node: str, flags: dict[str, str]) -> tuple[int, str, str]:
        command, environment = ["bash", "-c", flags["command"]], dict(os.environ)
        running = [
            subprocess.Popen(
                command,
                cwd=host,
                env={**environment, "HOME": str(host)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for host in self._hosts(node, flags.get("worker", "0"))
        ]
        outputs, errors, result = "", "", 0
        for index, process in enumerate(running):
            output, error = process.communicate()
            outputs, errors = outputs + output, errors + error
            if process.returncode:
                result = process.returncode
                errors += f"##### Command execution on worker {index} failed with exit status {result}.\n"
        return result, outputs, errors

    def _scp(self, places: list[str]) -> tuple[int, str, str]:
        node, _, folder = places[1].partition(":")
        for host in self._hosts(node, "all"):
            if not (host / folder).is_dir():
                raise CallError(f"scp: {folder}: No such file or directory")
            shutil.copytree(places[0], host / folder / Path(places[0]).name, dirs_exist_ok=True)
        return 0, "", ""


def parse(arguments: Sequence[str]) -> tuple[tuple[str, ...], list[str], dict[str, str]]:
    """Check a command against the documented arguments; returns its name, positional arguments and flags."""
    command = next((name for name in COMMANDS if tuple(arguments[: len(name)]) == name), ())
    number, required, further = COMMANDS.get(command, (0, set(), set()))
    others = arguments[len(command) :]
    places = [argument for argument in others if not argument.startswith("--")]
    flags = [argument[2:].partition("=") for argument in others if argument.startswith("--")]
    names = [name + equals for name, equals, _ in flags]
    unknown = set(names) - required - further - ALL
    if not command or len(places) != number or unknown or required - set(names) or len(set(names)) < len(names):
        raise CallError(f"ERROR: (gcloud) unrecognized, missing or repeated arguments: {' '.join(arguments)}")
    return command, places, {name: value for name, _, value in flags}
