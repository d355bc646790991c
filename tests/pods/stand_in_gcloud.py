# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Stand-in for the `gcloud` command, with the documented arguments of the commands that a launch uses.

Keeps the state of queued resources and objects in a folder, which has a folder for each host of a slice, the home of
commands over ssh. Records each call, and fails on demand. Uses the standard library only, so that it starts fast.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WIDE = {"account", "billing-project", "configuration", "flags-file", "flatten", "format", "impersonate-service-account"}
WIDE |= {"project", "verbosity"}
WIDE_SWITCHES = {"quiet", "help", "log-http", "no-user-output-enabled"}
"""Flags of all commands: https://cloud.google.com/sdk/gcloud/reference."""
SSH = {"ssh-key-file", "strict-host-key-checking", "worker", "zone", "ssh-key-expiration", "ssh-key-expire-after"}
SSH_SWITCHES = {"dry-run", "force-key-file-overwrite", "internal-ip", "plain"}
CREATE = {"accelerator-type", "boot-disk", "data-disk", "description", "labels", "metadata", "metadata-from-file"}
CREATE |= {"network", "node-count", "node-id", "node-prefix", "range", "runtime-version", "scopes", "service-account"}
CREATE |= {"subnetwork", "tags", "topology", "type", "valid-after-duration", "valid-after-time", "zone"}
CREATE |= {"valid-until-duration", "valid-until-time", "reservation-host-folder", "reservation-host-organization"}
CREATE |= {"reservation-host-project"}
CREATE_SWITCHES = {"async", "guaranteed", "internal-ips", "reserved", "shielded-secure-boot", "spot"}
COMMANDS: dict[tuple[str, ...], tuple[int, int, set[str], set[str], set[str]]] = {
    ("compute", "tpus", "tpu-vm", "describe"): (1, 1, {"zone"}, set(), {"zone"}),
    ("compute", "tpus", "tpu-vm", "ssh"): (
        1,
        1,
        {"command", "output-directory", "ssh-flag", *SSH},
        SSH_SWITCHES,
        {"zone"},
    ),
    ("compute", "tpus", "tpu-vm", "scp"): (
        2,
        99,
        {"scp-flag", *SSH},
        {"compress", "recurse", *SSH_SWITCHES},
        {"zone"},
    ),
    ("compute", "tpus", "queued-resources", "create"): (
        1,
        1,
        CREATE,
        CREATE_SWITCHES,
        {"zone", "accelerator-type", "runtime-version"},
    ),
    ("compute", "tpus", "queued-resources", "describe"): (1, 1, {"zone"}, set(), {"zone"}),
    ("compute", "tpus", "queued-resources", "delete"): (1, 1, {"zone"}, {"async", "force"}, {"zone"}),
    ("storage", "ls"): (0, 99, {"exclude-managed-folders"}, {"long", "recursive", "json"}, set()),
}
"""Least and most positional arguments, flags with a value, flags without, and required flags of each command:
https://cloud.google.com/sdk/gcloud/reference/compute/tpus and /storage."""


class CallError(Exception):
    """Ends the command with a message on stderr and status 1."""


class Cloud:
    """State of the stand-in, for the command and for tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def prepare(self, *, num_hosts: int = 2, waits: int = 1) -> None:
        """Create an empty project with the bucket `gs://bucket`.

        Args:
            num_hosts: hosts of each slice.
            waits: number of descriptions until a request is granted.
        """
        self.folder.mkdir(parents=True)
        state = {"resources": {}, "faults": [], "num_hosts": num_hosts, "waits": waits}
        # Number of descriptions of a slice in which a host has no address yet.
        self._write({**state, "without_addresses": {}})

    @contextlib.contextmanager
    def change(self) -> Iterator[dict[str, Any]]:
        """Read the state, and write it at the end of the block."""
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            state = json.loads((self.folder / "state.json").read_text())
            yield state
            self._write(state)

    def fail(self, words: str, stderr: str, *, times: int = 1) -> None:
        """Let the next commands that contain some words fail."""
        with self.change() as state:
            state["faults"].append({"words": words.split(), "stderr": stderr, "times": times})

    def preempt(self, name: str) -> None:
        """Preempt the slices of a queued resource."""
        with self.change() as state:
            state["resources"][name]["state"] = "SUSPENDED"
            self._end_hosts(state["resources"][name])

    @property
    def calls(self) -> list[list[str]]:
        """Arguments of all calls."""
        return [json.loads(line) for line in (self.folder / "calls.jsonl").read_text().splitlines()]

    def called(self, *words: str) -> list[list[str]]:
        """Calls that contain some words."""
        return [call for call in self.calls if set(words) <= set(call)]

    @property
    def resources(self) -> dict[str, Any]:
        """Queued resources by name."""
        with self.change() as state:
            return state["resources"]

    def host(self, node: str, worker: int) -> Path:
        """Home folder of a host."""
        return self.folder / "hosts" / node / str(worker)

    def close(self) -> None:
        """End all processes of all hosts."""
        with self.change() as state:
            for resource in state["resources"].values():
                self._end_hosts(resource)

    def _write(self, state: dict[str, Any]) -> None:
        partial = self.folder / "state.partial"
        partial.write_text(json.dumps(state))
        partial.replace(self.folder / "state.json")

    def _end_hosts(self, resource: dict[str, Any]) -> None:
        for node in resource["nodes"]:
            for file in self.folder.glob(f"hosts/{node}/*/marin_rl_launch/*/jobs/*/pids"):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(int(file.read_text().split()[0]), signal.SIGKILL)
            shutil.rmtree(self.folder / "hosts" / node, ignore_errors=True)

    # The command.

    def run(self, arguments: list[str]) -> int:
        """Execute a command; returns its exit status."""
        with (self.folder / "calls.jsonl").open("a") as file:
            file.write(json.dumps(arguments) + "\n")
        command, places, flags = parse(arguments)
        with self.change() as state:
            for fault in state["faults"]:
                if fault["times"] and set(fault["words"]) <= set(arguments):
                    fault["times"] -= 1
                    print(fault["stderr"], file=sys.stderr)
                    return 1
            if command[-1] not in ("ssh", "scp"):
                print(self._answer(command, places, flags, state))
                return 0
        return self._ssh(places, flags) if command[-1] == "ssh" else self._scp(places, flags)

    def _answer(self, command: tuple[str, ...], places: list[str], flags: dict[str, str], state: dict[str, Any]) -> str:
        match command:
            case ("storage", "ls"):
                if places != ["gs://bucket"]:
                    raise CallError(f"(gcloud.storage.ls) HTTPError 403: someone has no access to {places}")
                return ""
            case (*_, "tpu-vm", "describe"):
                return self._describe_node(places[0], state)
        name = places[0]
        known = state["resources"]
        if command[-1] == "create":
            if name in known:
                raise CallError(f"({'.'.join(command)}) ALREADY_EXISTS: Resource '{name}' already exists")
            known[name] = self._create(name, flags, state["waits"])
            return ""
        if name not in known:
            place = f"projects/p/locations/{flags['zone']}/queuedResources/{name}"
            raise CallError(f"({'.'.join(command)}) NOT_FOUND: Resource '{place}' was not found")
        if command[-1] == "delete":
            if "force" not in flags and known[name]["state"] == "ACTIVE":
                raise CallError(f"({'.'.join(command)}) FAILED_PRECONDITION: {name} has nodes")
            self._end_hosts(known.pop(name))
            return ""
        return self._describe(known[name])

    def _create(self, name: str, flags: dict[str, str], waits: int) -> dict[str, Any]:
        if ("node-id" in flags) == ("node-count" in flags):
            raise CallError("exactly one of --node-id and --node-count is required")
        count = int(flags.get("node-count", 1))
        nodes = (
            [flags["node-id"]] if "node-id" in flags else [f"{flags['node-prefix']}-{index}" for index in range(count)]
        )
        return {"flags": flags, "nodes": nodes, "waits": waits, "state": "ACCEPTED"}

    def _describe(self, resource: dict[str, Any]) -> str:
        if resource["state"] in ("ACCEPTED", "WAITING_FOR_RESOURCES"):
            resource["state"] = "WAITING_FOR_RESOURCES" if resource["waits"] else "ACTIVE"
            resource["waits"] -= 1
        node: dict[str, Any] = {"node": {"acceleratorType": resource["flags"]["accelerator-type"]}}
        if len(resource["nodes"]) > 1:
            node["multisliceParams"] = {"nodeCount": len(resource["nodes"])}
        state = {"state": resource["state"]}
        if "error" in resource:
            state["failedData"] = {"error": {"message": resource["error"]}}
        return json.dumps({"state": state, "tpu": {"nodeSpec": [node]}})

    def _describe_node(self, name: str, state: dict[str, Any]) -> str:
        for index, resource in enumerate(state["resources"].values()):
            if name in resource["nodes"] and resource["state"] == "ACTIVE":
                place = 16 * index + resource["nodes"].index(name)
                endpoints = [{"ipAddress": f"10.0.{place}.{host}"} for host in range(state["num_hosts"])]
                if state["without_addresses"].get(name, 0) > 0:
                    state["without_addresses"][name] -= 1
                    return json.dumps({"state": "CREATING", "networkEndpoints": [*endpoints[1:], {}]})
                return json.dumps({"state": "READY", "networkEndpoints": endpoints})
        raise CallError(f"(gcloud.compute.tpus.tpu-vm.describe) NOT_FOUND: Resource '{name}' was not found")

    def _hosts(self, node: str, worker: str) -> list[Path]:
        with self.change() as state:
            self._describe_node(node, state)
            hosts = [self.host(node, index) for index in range(state["num_hosts"])]
        for host in hosts:
            host.mkdir(parents=True, exist_ok=True)
        return hosts if worker == "all" else [hosts[int(worker)]]

    def _ssh(self, places: list[str], flags: dict[str, str]) -> int:
        result = 0
        hosts = self._hosts(places[0], flags.get("worker", "0"))
        running = [
            subprocess.Popen(
                ["bash", "-c", flags["command"]],
                cwd=host,
                env={**os.environ, "HOME": str(host)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
            )
            for host in hosts
        ]
        for index, process in enumerate(running):
            output, _ = process.communicate()
            print(output, end="", flush=True)
            if process.returncode:
                result = process.returncode
                print(f"##### Command execution on worker {index} failed with exit status {result}.", file=sys.stderr)
        return result

    def _scp(self, places: list[str], flags: dict[str, str]) -> int:
        *sources, target = places
        node, _, folder = target.partition(":")
        for host in self._hosts(node, flags.get("worker", "0")):
            for source in sources:
                if not (host / folder).is_dir():
                    raise CallError(f"scp: {folder}: No such file or directory")
                shutil.copytree(source, host / folder / Path(source).name, dirs_exist_ok=True)
        return 0


def parse(arguments: list[str]) -> tuple[tuple[str, ...], list[str], dict[str, str]]:
    """Check a command against the documented arguments; returns its name, positional arguments and flags."""
    command = next((name for name in COMMANDS if tuple(arguments[: len(name)]) == name), None)
    if command is None:
        raise CallError(f"(gcloud) Invalid choice: {' '.join(arguments)}")
    least, most, valued, switches, required = COMMANDS[command]
    places: list[str] = []
    flags: dict[str, str] = {}
    for argument in arguments[len(command) :]:
        if argument == "-" or not argument.startswith("--"):
            places.append(argument)
            continue
        name, equals, value = argument[2:].partition("=")
        if name not in (valued | WIDE if equals else switches | WIDE_SWITCHES):
            raise CallError(f"({'.'.join(command)}) unrecognized arguments: {argument}")
        if name in flags:
            raise CallError(f"({'.'.join(command)}) {argument} is given twice")
        flags[name] = value
    if not least <= len(places) <= most or required - set(flags):
        raise CallError(f"({'.'.join(command)}) argument {sorted(required - set(flags))}: Must be specified.")
    return command, places, flags


if __name__ == "__main__":
    try:
        sys.exit(Cloud(Path(os.environ["STAND_IN_GCLOUD"])).run(sys.argv[1:]))
    except CallError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        sys.exit(1)
