# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Compare what a client of `kills` got with a trainer that runs every request once.

    python -m experiments.lab.tinker.replay --folder runs/tinker_kills

The trainer is in this process, without journal, HTTP and restarts. It runs the recorded operations of the model in the
order of `seq_id`, and the samples of each version of the weights, all at once. Compared bit for bit with what the
server answered and wrote: log-probs and loss of every `forward_backward`, norm of every `optim_step`, tokens and
log-probs of every sample, and every checkpoint with its moments and its open sum of gradients. As the client's steps
are a function of these replies, the run is one of a server that was never killed. For comparison, the operations also
run with one gradient left out, and with one applied twice.
"""

import argparse
import collections
import dataclasses
import json
import pickle
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from marin_rl.runs.checkpoint import CheckpointConfig, Checkpoints
from marin_rl.serving.tinker import requests
from marin_rl.serving.tinker.messages import (
    canonical_bytes,
    message_class,
    parse_forward_backward,
    read_forward_backward,
    write_outputs,
    write_samples,
)
from marin_rl.serving.tinker.records import RequestError, SampleJob, SampleOutputs
from marin_rl.serving.tinker.trainer import JaxTrainer, open_trainer

CONTEXT, MAX_SEQS = 128, 64
"""Settings of the server."""
OPERATIONS = ("forward_backward", "optim_step", "save_weights", "save_weights_for_sampler")
_MESSAGES = {"forward_backward": "ForwardBackwardOutput", "asample": "SampleResponse"}


@dataclasses.dataclass
class Recording:
    """What a client sent and got."""

    requests: dict[str, list[bytes]] = dataclasses.field(default_factory=dict)
    """Bodies by path, in the order of arrival, repetitions included."""
    results: dict[str, list[bytes]] = dataclasses.field(default_factory=dict)
    """Content of the replies of `retrieve_future` by the id of the request, repetitions included."""
    kills: list[str] = dataclasses.field(default_factory=list)
    """Moments at which the server was killed."""

    def bodies(self, path: str) -> list[dict[str, Any]]:
        """Return the distinct JSON bodies of a path."""
        return [json.loads(body) for body in dict.fromkeys(self.requests.get(path, ()))]

    def operations(self) -> dict[int, tuple[str, Any]]:
        """Return path and body of the operations of the model by `seq_id`, in this order.

        The SDK numbers the sampling session of each try anew, so the number is left out; it is in the result.
        """
        found: dict[int, tuple[str, Any]] = {}
        messages = map(parse_forward_backward, self.requests["forward_backward"])
        for body in dict.fromkeys(map(canonical_bytes, messages)):
            _add(found, read_forward_backward(body).seq_id, ("forward_backward", body))
        for path in OPERATIONS[1:]:
            tries: list[dict[str, Any]] = [{**values, "sampling_session_seq_id": None} for values in self.bodies(path)]
            for values in {json.dumps(one, sort_keys=True): one for one in tries}.values():
                _add(found, values["seq_id"], (path, values))
        assert sorted(found) == list(range(1, len(found) + 1)), "the client left out a seq_id"
        return dict(sorted(found.items()))


def _add(operations: dict[int, Any], seq: int, operation: tuple[str, Any]) -> None:
    assert seq not in operations, f"the client sent two operations {seq}"
    operations[seq] = operation


class Samples:
    """Requests to one version of the weights, and their results; a `SampleSource`."""

    def __init__(self, bodies: Sequence[requests.SampleBody]) -> None:
        ids = [f"{body.sampling_session_id}:{body.seq_id}" for body in bodies]
        seeded = [(id, body.params(zlib.crc32(id.encode()))) for id, body in zip(ids, bodies, strict=True)]
        self._jobs = [SampleJob(id, params) for id, params in seeded]
        self.results: dict[str, bytes] = {}

    def take(self) -> Sequence[SampleJob]:
        """Return all requests, once."""
        jobs, self._jobs = self._jobs, []
        return jobs

    def finish(self, key: str, result: SampleOutputs | RequestError) -> None:
        """Keep a result."""
        assert isinstance(result, SampleOutputs), result
        self.results[key] = write_samples(result)


class Replay:
    """Runs the operations of a recording."""

    def __init__(self, recording: Recording, trainer: JaxTrainer, folder: Path) -> None:
        self._recording, self._trainer, self._folder = recording, trainer, folder
        (body,) = map(requests.CreateModel.model_validate, recording.bodies("create_model"))
        self.model = f"{body.session_id}:train:{body.model_seq_id}"
        self._spec = body.spec(seed=zlib.crc32(self.model.encode()))

    def run(self, operations: Sequence[tuple[int, tuple[str, Any]]]) -> Iterator[tuple[str, str, Any]]:
        """Yield path, id and result of each operation; that of a checkpoint is its folder."""
        self._trainer.create(self._spec)
        for seq, (path, body) in operations:
            match path:
                case "forward_backward":
                    result = write_outputs(self._trainer.forward_backward(read_forward_backward(body)))
                case "optim_step":
                    result = {"metrics": self._trainer.optim_step(requests.OptimStep(**body).params())}
                case _:
                    result = self._folder / f"{seq}"
                    (self._trainer.save if path == "save_weights" else self._trainer.save_sampler)(result)
            yield path, f"{self.model}:{seq}", result

    def sample(self, operations: Mapping[int, tuple[str, Any]]) -> Iterator[tuple[str, bytes]]:
        """Yield id and result of each sample, after `run`."""
        folders: dict[str, Path] = {}
        of_path = {}
        for seq, (path, _) in operations.items():
            if path == "save_weights_for_sampler":
                result = json.loads(self._recording.results[f"{self.model}:{seq}"][0])
                ((name, value),) = result.items()
                (of_path if name == "path" else folders)[value] = self._folder / f"{seq}"
        for body in map(
            requests.CreateSamplingSession.model_validate, self._recording.bodies("create_sampling_session")
        ):
            folders[f"{body.session_id}:sample:{body.sampling_session_seq_id}"] = of_path[str(body.model_path)]
        waiting = collections.defaultdict(list)
        for body in map(requests.SampleBody.model_validate, self._recording.bodies("asample")):
            waiting[body.sampling_session_id].append(body)
        for sampler, bodies in waiting.items():
            source = Samples(bodies)
            self._trainer.sample(folders[sampler], source)
            yield from source.results.items()


def arrays(folder: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a folder of a `Trainer`."""
    opened = Checkpoints(folder, CheckpointConfig()).open(0).open_arrays()
    return {name: array.read().result() for name, array in opened.items()}


def different_arrays(left: Path, right: Path) -> list[str]:
    """Return the names of arrays that are not equal bit for bit."""
    one, other = arrays(left), arrays(right)
    return [name for name in one | other if one[name].tobytes() != other[name].tobytes()]


def is_equal(path: str, own: Any, given: bytes) -> bool:
    """Whether a result equals that of the server."""
    if path in _MESSAGES:
        own, given = (message_class(_MESSAGES[path]).FromString(one) for one in (own, given))
        return own == given
    return own == json.loads(given)


def compare(recording: Recording, trainer: JaxTrainer, served: Path, folder: Path) -> None:
    """Print how many results, samples and checkpoints are equal."""
    replay, operations = Replay(recording, trainer, folder), recording.operations()
    counts: dict[str, collections.Counter[bool]] = collections.defaultdict(collections.Counter)
    newest = Path()
    for path, id, result in replay.run(list(operations.items())):
        name = operations[int(id.rpartition(":")[2])][1]
        if not isinstance(result, Path):
            counts[path][is_equal(path, result, recording.results[id][0])] += 1
        elif name.get("path") is not None:
            kind = "weights" if path == "save_weights" else "sampler_weights"
            written = served / replay.model / kind / name["path"]
            counts[f"checkpoints in {kind}"][not different_arrays(result, written)] += 1
            newest = result if kind == "weights" else newest
    for id, result in replay.sample(operations):
        counts["asample"][is_equal("asample", result, recording.results[id][0])] += 1
    for name, count in counts.items():
        print(f"{name}: {count[True]} of {count.total()} equal")
    gradients = [item for item in operations.items() if item[1][0] == "forward_backward"]
    middle = gradients[len(gradients) // 2]
    for title, times in (("left out", 0), ("applied twice", 2)):
        changed = [one for item in operations.items() for one in [item] * (times if item == middle else 1)]
        other = Replay(recording, trainer, folder / title)
        *_, last = (result for path, _, result in other.run(changed) if path == "save_weights")
        different, total = different_arrays(newest, last), len(arrays(newest))
        print(
            f"with the gradient of operation {middle[0]} {title}: {len(different)} of {total} arrays differ at the end"
        )


def main() -> None:
    """Replay a recording."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--folder", type=Path, required=True, help="folder that `kills` wrote")
    folder = parser.parse_args().folder
    recording: Recording = pickle.loads((folder / "recording.pickle").read_bytes())
    print(f"{len(recording.kills)} kills: {', '.join(recording.kills)}")
    counts = collections.Counter(path for path, _ in recording.operations().values())
    counts |= {path: len(recording.bodies(path)) for path in ("create_session", "create_model", "asample")}
    for path, count in counts.items():
        print(f"{path}: {count}, in {len(recording.requests.get(path, []))} requests")
    repeated = [results for results in recording.results.values() if len(results) > 1]
    print(f"{len(recording.results)} results, {len(repeated)} of them read again")
    assert all(len(set(results)) == 1 for results in repeated), "a result changed"
    steps = [json.loads(line)["step"] for line in (folder / "log" / "metrics.jsonl").read_text().splitlines()]
    print(f"the recipe logged {len(steps)} steps")
    assert steps == list(range(len(steps))), steps
    trainer = open_trainer(str(folder / "model"), max_context=CONTEXT, max_seqs=MAX_SEQS)
    with tempfile.TemporaryDirectory() as own:
        compare(recording, trainer, folder / "served", Path(own))


if __name__ == "__main__":
    main()
