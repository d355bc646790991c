# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The server over HTTP, with a trainer of one number."""

import datetime
import io
import json
import os
import random
import socket
import subprocess
import tarfile
import threading
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pydantic
import pytest

from marin_rl.serving.bodies import ApiError
from marin_rl.serving.tinker import requests, trainer_thread
from marin_rl.serving.tinker import service as service_module
from marin_rl.serving.tinker.checkpoints import ServedModel
from marin_rl.serving.tinker.journal import Journal
from marin_rl.serving.tinker.messages import message_class, read_forward_backward
from marin_rl.serving.tinker.records import ForwardBackward, LossOutputs, RequestError, SampleSource
from marin_rl.serving.tinker.service import Service
from marin_rl.serving.tinker.trainer_thread import Limits
from marin_rl.utils.errors import UserError
from tests.serving.tinker.fake_trainer import FakeTrainer
from tests.serving.tinker.wire import Wire, body, serving, until


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Service]]:
    with serving(tmp_path / "out") as found:
        yield found


@pytest.fixture
def wire(server: tuple[str, Service]) -> Wire:
    return Wire(server[0])


def gradient(*losses: float) -> float:
    """Return the gradient of a `FakeTrainer` after calls whose datums have these sums of tokens."""
    total = 0.0
    for loss in losses:
        total = total * 1.01 + loss
    return total


def fake_loss(tokens: list[list[int]]) -> float:
    arrays = [-0.01 * np.array(sequence).astype(np.float32) for sequence in tokens]
    return float(sum(np.sum(values, dtype=np.float64) for values in arrays))


def test_2500_datums_in_chunks_out_of_order(wire: Wire) -> None:
    model = wire.begin()
    tokens = [[number % 97, number % 89 + 1] for number in range(2500)]
    chunks = [tokens[:1024], tokens[1024:2048], tokens[2048:]]
    # The optimizer step is sent before the first chunk, too.
    step = wire.operate("optim_step", model, 4, adam_params={"learning_rate": 0.5})
    ids = {seq: wire.forward_backward(model, seq, chunks[seq - 1]).json()["request_id"] for seq in (3, 2, 1)}
    for seq, chunk in enumerate(chunks, 1):
        message = message_class("ForwardBackwardOutput").FromString(wire.result(ids[seq]))
        assert sum(record.num_datums for record in message.loss_fn_outputs) == len(chunk)
        values = np.frombuffer(message.loss_fn_outputs[0].fields["logprobs"].data, "<f4")
        np.testing.assert_array_equal(values, -0.01 * np.array(chunk, np.float32).ravel())
    expected = 0.9 * 9.0 + 0.5 * gradient(*map(fake_loss, chunks))
    assert wire.result(step)["metrics"]["weight"] == expected


def test_a_repeated_request_runs_once(server: tuple[str, Service]) -> None:
    wire = Wire(server[0])
    model = wire.begin()
    first = [wire.forward_backward(model, 1, [[5]]).json() for _ in range(3)]
    assert first == first[:1] * 3
    wire.result(first[0]["request_id"])
    assert wire.forward_backward(model, 1, [[5]]).json() == first[0]
    other = wire.forward_backward(model, 1, [[6]])
    assert other.status_code == 400
    assert wire.step(model, 2)["weight"] == 0.9 * 9 + 0.5 * gradient(fake_loss([[5]]))


def test_a_repetition_may_have_another_number_of_its_sampling_session(wire: Wire) -> None:
    """The SDK takes a new number for each try."""
    session = wire.session()
    model = wire.model(session)
    tries = [wire.operate("save_weights_for_sampler", model, 1, sampling_session_seq_id=n) for n in (0, 1)]
    assert tries[0] == tries[1]
    assert wire.result(tries[1])["sampling_session_id"] == f"{session}:sample:0"
    assert wire.weight(f"{session}:sample:0") == 9
    other = wire.ask("save_weights_for_sampler", {"model_id": model, "seq_id": 1, "path": "a"})
    assert other.status_code == 400
    # A number that the session has replaces its sampler.
    wire.post("create_sampling_session", session_id=session, sampling_session_seq_id=2, base_model="base")
    wire.result(wire.operate("save_weights_for_sampler", model, 2, sampling_session_seq_id=2))
    assert wire.weight(f"{session}:sample:2") == 9


@pytest.mark.parametrize(("limit", "times"), [(4000, 1), (1000, 2)])
def test_requests_are_parsed_once_while_there_is_memory(
    limit: int, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = []

    def read(data: bytes) -> ForwardBackward:
        again.append(data)
        return read_forward_backward(data)

    monkeypatch.setattr(service_module, "MAX_WAITING_BYTES", limit)
    monkeypatch.setattr(trainer_thread, "read_forward_backward", read)
    with serving(tmp_path) as (url, _):
        wire = Wire(url)
        model = wire.begin()
        for first in range(1, 11, 2):
            # Two wait at the same time, and give back their memory.
            for seq in (first + 1, first):
                assert wire.forward_backward(model, seq, [[seq]]).status_code == 200
            wire.result(f"{model}:{first + 1}")
        losses = [fake_loss([[seq]]) for seq in range(1, 11)]
        assert wire.step(model, 11)["weight"] == 0.9 * 9 + 0.5 * gradient(*losses)
    assert len(again) == 10 * (times - 1)


def test_forward_leaves_the_gradient(wire: Wire) -> None:
    model = wire.begin()
    wire.result(wire.forward_backward(model, 1, [[5]], forward_only=True).json()["request_id"])
    assert wire.step(model, 2)["weight"] == 0.9 * 9


def test_a_refused_operation_uses_up_its_number(wire: Wire) -> None:
    model = wire.begin()
    assert wire.forward_backward(model, 1, [[1]], loss="gspo").status_code == 400
    assert wire.ask("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {"beta1": 5}}).status_code == 422
    dimuon = {"model_id": model, "seq_id": 3, "optimizer_params": {"type": "dimuon", "learning_rate": 1.0}}
    assert wire.ask("optim_step", dimuon).status_code == 400
    assert wire.ask("save_weights_external", {"model_id": model, "seq_id": 4, "path": "x"}).status_code == 400
    assert wire.ask("save_weights", {"model_id": model, "seq_id": 5, "path": "../x"}).status_code == 400
    # The trainer refuses this one.
    failed = wire.result(wire.forward_backward(model, 6, [[2_000_000]]).json()["request_id"])
    assert failed["category"] == "user"
    assert "vocabulary" in failed["error"]
    assert wire.step(model, 7)["weight"] == 0.9 * 9


def test_damaged_bodies_are_refused_or_fail(wire: Wire) -> None:
    session = wire.session()
    model, generator, accepted = wire.model(session), random.Random(0), set()
    for seq in range(1, 151):
        data = bytearray(body(model, seq, [[1, 2, 3]]))
        for _ in range(generator.choice([1, 1, 3])):
            data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        response = wire.ask("forward_backward", bytes(data[: generator.choice([len(data), generator.randrange(99)])]))
        assert response.status_code in (200, 400, 404), response.text
        accepted |= {response.json()["request_id"]} if response.is_success else set()
    wire.post(f"sessions/{session}/finish")
    assert len(accepted) > 5
    for id in accepted:
        wire.result(id)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Wire, str]]:
    with serving(tmp_path_factory.mktemp("shared")) as (url, _):
        wire = Wire(url)
        yield wire, wire.begin()


@pytest.mark.parametrize(
    ("path", "content", "status"),
    [
        ("create_model", b"{", 400),
        ("create_model", b"[]", 400),
        ("create_model", b'{"session_id": 1}', 422),
        ("optim_step", b"\xff\xfe", 400),
        ("retrieve_future", b'{"request_id": "nope"}', 404),
        ("retrieve_future", b'{"request_id": 7}', 422),
        ("get_info", b'{"model_id": "nope"}', 404),
        ("asample", b'{"sampling_session_id": "x", "seq_id": 0, "prompt": {"chunks": []}}', 404),
        ("create_custom_loss", b"{}", 400),
        ("nothing", b"{}", 404),
    ],
)
def test_statuses(shared: tuple[Wire, str], path: str, content: bytes, status: int) -> None:
    response = shared[0].send("POST", path, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == status, response.text
    assert response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body_class", "name", "value"),
    [
        (requests.SampleBody, "prompt", {"chunks": [1] * 10_000}),
        (requests.SampleBody, "prompt", {"chunks": [{"tokens": [-1] * 10_000}]}),
        (requests.SampleBody, "prompt", {"chunks": [{"tokens": ["a"] * 10_000}]}),
        (requests.SampleBody, "sampling_params", {"stop": [None] * 10_000}),
        (requests.SampleBody, "sampling_params", {"stop": [1] * 10_000}),
        (requests.SampleBody, "sampling_params", {"stop": ["a"] * 10_000}),
        (requests.CreateSession, "tags", [1] * 10_000),
    ],
)
def test_long_lists_have_few_errors(body_class: type[requests.Body], name: str, value: object) -> None:
    valid = {"sampling_session_id": "a", "seq_id": 1, "prompt": {"chunks": []}}
    with pytest.raises(ApiError, match=name) as refused:
        requests.parse_body(body_class, {**valid, name: value})
    assert isinstance(refused.value.__cause__, pydantic.ValidationError)
    assert refused.value.__cause__.error_count() <= 3


@pytest.mark.parametrize(
    ("path", "kind"),
    [("create_session", "json"), ("asample", "json"), ("telemetry", "json"), ("forward_backward", "x-protobuf")],
)
def test_a_client_that_leaves_within_a_body_is_one_line_of_log(
    shared: tuple[Wire, str], path: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = shared[0]
    address = urllib.parse.urlsplit(client.url)
    head = f"POST /api/v1/{path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/{kind}\r\n"
    with socket.create_connection((address.hostname, address.port)) as leaving:
        leaving.sendall(f"{head}Content-Length: 1000\r\n\r\n{{".encode())
    counted = f'marin_rl_requests_total{{path="/api/v1/{path}",status="499"}} 1.0'
    until(lambda: counted in httpx.get(f"http://{address.netloc}/metrics").text)
    assert [(record.levelname, record.exc_info) for record in caplog.records] == [("WARNING", None)]
    assert f"/api/v1/{path}" in caplog.text


def test_compressed_and_large_bodies(shared: tuple[Wire, str]) -> None:
    headers = {"Content-Type": "application/x-protobuf"}
    zstd = shared[0].send("POST", "forward_backward", content=b"x", headers=headers | {"Content-Encoding": "zstd"})
    assert zstd.status_code == 415
    large = shared[0].send(
        "POST", "telemetry", content=b" " * (5 * 2**20), headers={"Content-Type": "application/json"}
    )
    assert large.status_code == 413


@pytest.mark.medium
def test_one_client_trains_until_it_ends(tmp_path: Path) -> None:
    with serving(tmp_path, limits=Limits(session=1.0)) as (url, service):
        wire = Wire(url)
        first, second = wire.session(), wire.session(display_name="two")
        model = wire.model(first)
        wire.result(wire.forward_backward(model, 1, [[5]]).json()["request_id"])
        create = {"session_id": second, "model_seq_id": 0, "base_model": "base", "lora_config": {"rank": 4}}
        # Asked again, because the first client may be dead; refused when it is not.
        for _ in range(2):
            refused = wire.ask("create_model", create)
            assert refused.status_code == 409
            assert model in refused.text
        wire.post("session_heartbeat", session_id=first)
        assert wire.ask("create_model", create).status_code == 400
        assert wire.ask("create_model", create).status_code == 409
        wire.post(f"sessions/{first}/finish", reason={"type": "success"})
        other = wire.model(second, rank=4)
        assert wire.step(other, 1)["weight"] == 0.9 * 5
        # The former model is gone; nothing answers with the wrong one.
        assert wire.forward_backward(model, 2, [[5]]).status_code == 404
        assert wire.ask("session_heartbeat", {"session_id": first}).status_code == 410
        # A silent session gives way, too, but only to another client.
        time.sleep(1.1)
        assert wire.step(other, 2)["weight"] == 0.9 * (0.9 * 5)
        time.sleep(1.1)
        third = wire.session()
        assert wire.model(third) == f"{third}:train:0"
        assert wire.ask("session_heartbeat", {"session_id": second}).status_code == 410
        assert service.counts()["waiting_operations"] == 0
        # The same session may begin another model.
        assert wire.step(wire.model(third, 1, rank=2), 1)["weight"] == 0.9 * 3


def test_rank_0_trains_all_weights(wire: Wire) -> None:
    session = wire.session()
    info = wire.post("get_info", model_id=wire.model(session, rank=0))
    assert (info["is_lora"], info["lora_rank"]) == (False, None)
    asked = {"session_id": session, "model_seq_id": 1, "base_model": "base"}
    refused = wire.ask("create_model", {**asked, "lora_config": {"rank": 0, "train_mlp": False}})
    assert refused.status_code == 400


def test_unload(wire: Wire) -> None:
    session = wire.session()
    model = wire.model(session)
    assert wire.result(wire.post("unload_model", model_id=model)["request_id"]) == {"model_id": model}
    assert wire.model(wire.session()).endswith(":train:0")


def test_a_client_that_dies_amid_chunks_blocks_nobody(tmp_path: Path) -> None:
    with serving(tmp_path, limits=Limits(session=0.3)) as (url, _):
        wire = Wire(url)
        model = wire.begin()
        held = [wire.forward_backward(model, seq, [[9]]).json()["request_id"] for seq in (3, 2)]
        time.sleep(0.4)
        other = wire.begin()
        assert wire.step(other, 1)["weight"] == 0.9 * 9
        for id in held:
            assert "operation 1" in wire.result(id)["error"]


def test_operations_do_not_wait_forever_for_a_lost_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_thread, "_SWEEP_SECONDS", 0.05)
    with serving(tmp_path, limits=Limits(gap=0.3)) as (url, _):
        wire = Wire(url)
        model = wire.begin()
        assert wire.forward_backward(model, 2, [[9]], loss="gspo").status_code == 400
        id = wire.forward_backward(model, 3, [[9]]).json()["request_id"]
        assert "operation 1" in wire.result(id)["error"]
        assert wire.step(model, 4)["weight"] == 0.9 * 9


def test_samplers_are_frozen(wire: Wire) -> None:
    session = wire.session()
    model = wire.model(session)
    sampler = wire.result(wire.operate("save_weights_for_sampler", model, 1, sampling_session_seq_id=0))
    first = sampler["sampling_session_id"]
    named = wire.result(wire.operate("save_weights_for_sampler", model, 2, path="s1"))["path"]
    base = wire.post("create_sampling_session", session_id=session, sampling_session_seq_id=1, base_model="base")
    before = wire.step(model, 3)["weight"]
    second = wire.result(wire.operate("save_weights_for_sampler", model, 4, sampling_session_seq_id=2))
    wire.step(model, 5)
    made = wire.post("create_sampling_session", session_id=session, sampling_session_seq_id=3, model_path=named)
    assert wire.weight(first) == 9
    assert wire.weight(made["sampling_session_id"]) == 9
    assert wire.weight(second["sampling_session_id"]) == np.float32(before)
    assert wire.weight(base["sampling_session_id"]) == 0
    found = wire.send("GET", f"samplers/{made['sampling_session_id']}").json()
    assert found == {"sampler_id": made["sampling_session_id"], "base_model": "base", "model_path": named}


def test_only_the_samplers_in_use_keep_their_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_thread, "EPHEMERAL_SAMPLERS", 2)
    with serving(tmp_path) as (url, _):
        wire = Wire(url)
        model = wire.begin()
        samplers = []
        for number in range(4):
            saved = wire.operate("save_weights_for_sampler", model, number + 1, sampling_session_seq_id=number)
            samplers.append(wire.result(saved)["sampling_session_id"])
            # The first one is the reference that every step uses.
            wire.weight(samplers[0], number)
        assert len(list(tmp_path.glob("*/sampler_weights/.ephemeral-*"))) == 2
        assert wire.weight(samplers[0], 9) == wire.weight(samplers[3]) == 9
        request = {"sampling_session_id": samplers[1], "seq_id": 0, "prompt": {"chunks": [{"tokens": [1]}]}}
        assert wire.ask("asample", request).status_code == 404


def test_samples_are_idempotent_and_seeded(wire: Wire) -> None:
    session = wire.session()
    made = wire.post("create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model="base")
    sampler = made["sampling_session_id"]
    ids = {wire.sample(sampler, 0) for _ in range(3)}
    assert ids == {f"{sampler}:0"}
    assert wire.result(f"{sampler}:0") == wire.result(f"{sampler}:0")
    request = {"sampling_session_id": sampler, "seq_id": 1, "num_samples": 3}
    request["prompt"] = {"chunks": [{"type": "encoded_text", "tokens": [4]}, {"tokens": [5, 6]}]}
    promise = wire.post("asample", **request)
    assert promise["sample_sequence_ids"] == [f"{sampler}:1:{index}" for index in range(3)]
    assert len(message_class("SampleResponse").FromString(wire.result(promise["request_id"])).sequences) == 3
    for field in ({"topk_sample_logprobs": 2}, {"prompt_alt_tokens_k": 1}, {"prompt_logprobs_last_n": 1}):
        assert wire.ask("asample", {**request, "seq_id": 2, **field}).status_code == 400
    image = {"chunks": [{"type": "image", "data": "x"}]}
    assert wire.ask("asample", {**request, "seq_id": 2, "prompt": image}).status_code == 400
    failed = wire.result(wire.sample(sampler, 3, sampling_params={"top_k": 5}))
    assert "top_k" in failed["error"]


class Gated(FakeTrainer):
    """Samples one round of requests each time the gate opens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Semaphore(0)
        self.rounds: list[int] = []

    def sample(self, folder: Path | None, source: SampleSource) -> None:
        outer = self

        class Counted:
            def take(self) -> object:
                outer.gate.acquire()
                jobs = source.take()
                outer.rounds.append(len(jobs))
                if jobs:
                    outer.log.append(("sample", len(jobs)))
                return jobs

            finish = staticmethod(source.finish)

        super().sample(folder, Counted())  # type: ignore[arg-type]


def test_training_and_sampling_alternate(tmp_path: Path) -> None:
    trainer = Gated()
    with serving(tmp_path, trainer) as (url, _):
        wire = Wire(url)
        session = wire.session()
        made = wire.post("create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model="base")
        sampler, model = made["sampling_session_id"], wire.model(session)
        trainer.gate.release()
        wire.result(wire.sample(sampler, 0))
        # The trainer is about to ask for more samples. Three of them arrive, and two operations.
        for seq in (1, 2, 3):
            wire.sample(sampler, seq)
        steps = [wire.operate("optim_step", model, seq) for seq in (1, 2)]
        trainer.gate.release(20)
        for id in (*steps, *(f"{sampler}:{seq}" for seq in range(4))):
            wire.result(id)
    assert [entry for entry in trainer.log if entry[0] in ("sample", "optim_step")] == [
        ("sample", 1),
        ("optim_step",),
        ("sample", 3),
        ("optim_step",),
    ]


def test_too_many_waiting_samples_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "MAX_WAITING_SAMPLES", 2)
    trainer = Gated()
    with serving(tmp_path, trainer) as (url, _service):
        wire = Wire(url)
        made = wire.post(
            "create_sampling_session", session_id=wire.session(), sampling_session_seq_id=0, base_model="base"
        )
        sampler = made["sampling_session_id"]
        request = {"sampling_session_id": sampler, "prompt": {"chunks": [{"tokens": [1]}]}}
        statuses = [wire.ask("asample", {**request, "seq_id": seq}).status_code for seq in range(5)]
        assert statuses[:2] == [200, 200]
        assert statuses[-1] == 429
        # Those that were accepted are answered, and repeated ones are not refused.
        assert wire.ask("asample", {**request, "seq_id": 0}).status_code == 200
        trainer.gate.release(50)
        for seq, status in enumerate(statuses):
            if status == 200:
                wire.result(f"{sampler}:{seq}")


def test_checkpoints(tmp_path: Path) -> None:
    with serving(tmp_path) as (url, _):
        wire = Wire(url)
        session = wire.session(user_metadata={"a": "b"}, display_name="name")
        model = wire.model(session)
        wire.forward_backward(model, 1, [[7]])
        before = wire.step(model, 2)
        saved = wire.result(wire.operate("save_weights", model, 3, path="one", user_metadata={"k": 1}))
        assert saved == {"path": f"tinker://{model}/weights/one"}
        wire.result(wire.operate("save_weights_for_sampler", model, 4, path="one"))
        taken = wire.result(wire.operate("save_weights", model, 5, path="one"))
        assert taken["category"] == "user"
        after = wire.step(model, 6)
        assert wire.result(wire.operate("save_weights", model, 7, path="one", overwrite=True)) == saved
        assert wire.result(wire.operate("load_weights", model, 8, path=saved["path"], optimizer=True))["model_id"]
        assert wire.step(model, 9) == {"weight": 0.9 * after["weight"], "gradient": 0.0, "steps": 3.0}
        wire.result(wire.operate("load_weights", model, 10, path=saved["path"], optimizer=False))
        assert wire.step(model, 11)["steps"] == 1.0
        missing = wire.result(wire.operate("load_weights", model, 12, path=saved["path"] + "2", optimizer=False))
        assert "no checkpoint" in missing["error"]
        assert before["weight"] != after["weight"]

        info = wire.post("weights_info", tinker_path=saved["path"])
        assert (info["base_model"], info["is_lora"], info["lora_rank"]) == ("base", True, 8)
        listed = wire.send("GET", f"training_runs/{model}/checkpoints").json()["checkpoints"]
        assert {one["checkpoint_id"] for one in listed} == {"weights/one", "sampler_weights/one"}
        everything = wire.send("GET", "checkpoints", params={"limit": 1, "offset": 1}).json()
        assert everything["cursor"] == {"offset": 1, "limit": 1, "total_count": 2}
        run = wire.send("GET", f"training_runs/{model}").json()
        assert run["last_checkpoint"]["tinker_path"] == saved["path"]
        assert [one["training_run_id"] for one in wire.send("GET", "training_runs").json()["training_runs"]] == [model]
        assert wire.send("GET", f"sessions/{session}").json() == {
            "training_run_ids": [model],
            "sampler_ids": [],
            "user_metadata": {"a": "b"},
            "display_name": "name",
        }

        archive = wire.send("GET", f"training_runs/{model}/checkpoints/weights/one/archive")
        assert archive.status_code == 302
        content = httpx.get(archive.headers["location"]).content
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            assert sorted(tar.getnames()) == ["info.json", "values.json"]
            assert json.load(tar.extractfile("values.json"))["weight"] == after["weight"]
        assert httpx.get(archive.headers["location"][:-1] + "x").status_code == 403

        create = {"session_id": session, "model_seq_id": 1, "path": saved["path"], "optimizer": True}
        promise = wire.post("load_weights", **create)
        assert wire.result(promise["request_id"])["model_id"] == f"{session}:train:1"
        assert wire.post("get_info", model_id=f"{session}:train:1")["lora_rank"] == 8
        assert wire.step(f"{session}:train:1", 1)["steps"] == 3.0

        assert wire.send("DELETE", f"training_runs/{model}/checkpoints/weights/one").status_code == 204
        assert wire.send("DELETE", f"training_runs/{model}/checkpoints/weights/one").status_code == 404
        assert wire.ask("weights_info", {"tinker_path": saved["path"]}).status_code == 404


def test_checkpoints_expire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_thread, "_SWEEP_SECONDS", 0.05)
    with serving(tmp_path) as (url, _):
        wire = Wire(url)
        model = wire.begin()
        path = wire.result(wire.operate("save_weights", model, 1, path="a", ttl_seconds=3600))["path"]
        kept = wire.result(wire.operate("save_weights", model, 2, path="b", ttl_seconds=3600))["path"]
        invalid = {"model_id": model, "seq_id": 3, "path": "c", "ttl_seconds": 5}
        assert wire.ask("save_weights", invalid).status_code == 422
        assert wire.send(
            "PUT", f"training_runs/{model}/checkpoints/weights/b/ttl", json={"ttl_seconds": None}
        ).is_success
        file = tmp_path / model / "weights/a/info.json"
        info = json.loads(file.read_text())
        left = datetime.datetime.fromisoformat(info["expires_at"]) - datetime.datetime.now(datetime.UTC)
        assert 3500 < left.total_seconds() <= 3600
        info["expires_at"] = datetime.datetime.now(datetime.UTC).isoformat()
        file.write_text(json.dumps(info))
        assert wire.ask("weights_info", {"tinker_path": path}).status_code == 404
        until(lambda: not file.parent.exists())
        assert wire.post("weights_info", tinker_path=kept)["base_model"] == "base"


@pytest.mark.parametrize(
    "path",
    [
        "../../secret",
        "tinker://{model}/weights/../../secret",
        "tinker://{model}/weights/..",
        "tinker://{model}/weights/a/b",
        "tinker://{model}/weights/.hidden",
        "tinker://{model}/weights/a%2f..",
        "tinker://{model}/weights/",
        "tinker://../weights/a",
        "tinker://{model}/.server/journal",
        "tinker://{model}/weights/a\x00",
        "/etc/passwd",
        "tinker://{model}/external_weights/a",
    ],
)
def test_paths_stay_in_the_folder(shared: tuple[Wire, str], path: str) -> None:
    wire, model = shared
    path = path.format(model=model)
    assert wire.ask("weights_info", {"tinker_path": path}).status_code == 404
    request = {"session_id": model.partition(":")[0], "sampling_session_seq_id": 5, "model_path": path}
    assert wire.ask("create_sampling_session", request).status_code == 404
    load = {"session_id": model.partition(":")[0], "model_seq_id": 9, "path": path, "optimizer": True}
    assert wire.ask("load_weights", load).status_code == 400


def test_the_key_is_needed(tmp_path: Path) -> None:
    with serving(tmp_path, key="tml-secret") as (url, _):
        assert Wire(url, "tml-wrong").send("GET", "healthz").status_code == 401
        assert Wire(url, "tml-secret").send("GET", "healthz").json() == {"status": "ok"}
        assert httpx.get(f"{url}/metrics").status_code == 401
    with serving(tmp_path) as (url, _):
        assert httpx.get(f"{url}/api/v1/healthz", headers={"Host": "example.com"}).status_code == 403
        assert "marin_rl_tinker_journal_bytes" in httpx.get(f"{url}/metrics").text


def test_another_base_model_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path) as (url, _):
        Wire(url).begin()
    with pytest.raises(UserError, match="fake-1"):
        Service(FakeTrainer(), tmp_path, ServedModel(("base",), "fake-2"))


class Failing(FakeTrainer):
    """Its first step fails, as by a lack of memory."""

    failures = 1

    def optim_step(self, params: object) -> dict[str, float]:
        if Failing.failures:
            Failing.failures -= 1
            self.values["weight"] = float("nan")
            raise RuntimeError("out of memory")
        return super().optim_step(params)  # type: ignore[arg-type]


def test_a_failed_operation_changes_nothing_after_a_restart(tmp_path: Path) -> None:
    with serving(tmp_path, Failing(), fails=True) as (url, first):
        wire = Wire(url)
        model = wire.begin()
        id = wire.forward_backward(model, 1, [[5]]).json()["request_id"]
        wire.result(id)
        step = wire.operate("optim_step", model, 2)
        until(lambda: first.failure is not None)
    with serving(tmp_path, Failing()) as (url, _):
        wire = Wire(url)
        assert wire.result(step)["category"] == "server"
        assert wire.step(model, 3)["weight"] == 0.9 * 9 + 0.5 * gradient(fake_loss([[5]]))


@pytest.mark.parametrize("state_seconds", [0.0, 60.0])
def test_a_dropped_sum_stays_dropped_after_a_restart(tmp_path: Path, state_seconds: float) -> None:
    with serving(tmp_path, limits=Limits(state=state_seconds)) as (url, service):
        wire = Wire(url)
        lines: list[str] = []
        service.thread.on_step = lines.append
        model = wire.begin()
        assert wire.step(model, 1)["weight"] == 0.9 * 9
        wire.result(wire.forward_backward(model, 2, [[10**6]]).json()["request_id"])
        refused = wire.result(wire.operate("optim_step", model, 3, adam_params={}))
        assert refused["category"] == "user"
        wire.result(wire.forward_backward(model, 4, [[5]]).json()["request_id"])
        # Refused steps are not among them.
        assert len(lines) == 1
        assert f"{model}:1: optim_step, weight 8.1," in lines[0]
    with serving(tmp_path) as (url, _):
        wire = Wire(url)
        assert wire.result(f"{model}:3") == refused
        assert wire.step(model, 5)["weight"] == 0.9 * (0.9 * 9) + 0.5 * gradient(fake_loss([[5]]))


class Unreadable(FakeTrainer):
    """Cannot read the weights of checkpoints, which it notices before it takes a request."""

    tries = 0

    def sample(self, folder: Path | None, source: SampleSource) -> None:
        if folder is not None:
            self.tries += 1
            raise RequestError(f"{folder.name} is damaged")
        super().sample(folder, source)


def test_samples_of_unreadable_weights_fail_once(tmp_path: Path) -> None:
    trainer = Unreadable()
    with serving(tmp_path, trainer) as (url, _):
        wire = Wire(url)
        session = wire.session()
        model = wire.model(session)
        path = wire.result(wire.operate("save_weights_for_sampler", model, 1, path="a"))["path"]
        damaged, base = (
            wire.post("create_sampling_session", session_id=session, sampling_session_seq_id=number, **of)[
                "sampling_session_id"
            ]
            for number, of in enumerate(({"model_path": path}, {"base_model": "base"}))
        )
        for seq in range(3):
            failed = wire.result(wire.sample(damaged, seq))
            assert failed["category"] == "user"
            assert "damaged" in failed["error"]
        # Neither the other samplers nor the training wait for it.
        assert wire.weight(base) == 0
        assert wire.step(model, 2)["weight"] == 0.9 * 9
        assert trainer.tries == 3


class Short(FakeTrainer):
    """Accepts data up to a length, as a server with `--max_context`."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def forward_backward(self, request: ForwardBackward) -> LossOutputs:
        if max(len(datum.tokens) for datum in request.data) > self.most:
            raise RequestError(f"the server takes at most {self.most} tokens")
        return super().forward_backward(request)


def test_a_restart_that_would_lose_a_gradient_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path, Short(8)) as (url, _):
        wire = Wire(url)
        model = wire.begin()
        refused = wire.result(wire.forward_backward(model, 1, [[5] * 9]).json()["request_id"])
        wire.result(wire.forward_backward(model, 2, [[5] * 6]).json()["request_id"])
    with serving(tmp_path, Short(4), fails=True) as (_, service):
        until(lambda: service.failure is not None)
        assert isinstance(service.failure, UserError)
        assert f"{model}:2" in str(service.failure)
    with serving(tmp_path, Short(8)) as (url, _):
        wire = Wire(url)
        assert wire.result(f"{model}:1") == refused
        assert wire.step(model, 3)["weight"] == 0.9 * 9 + 0.5 * gradient(fake_loss([[5] * 6]))


def test_a_full_disk_ends_neither_training_nor_sampling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_thread, "_SWEEP_SECONDS", 0.05)
    full = OSError(28, "No space left on device")

    def fail(*_: object, **__: object) -> None:
        raise full

    with serving(tmp_path, limits=Limits(state=0.0)) as (url, service):
        wire = Wire(url)
        session = wire.session()
        model = wire.model(session)
        before = wire.step(model, 1)
        with monkeypatch.context() as patched:
            # Recovery states, shorter journals, descriptions of runs, and the deletion of old weights.
            patched.setattr(Journal, "prune", fail)
            patched.setattr(service.checkpoints, "write_run", fail)
            patched.setattr(service.checkpoints, "delete_ephemeral", fail)
            assert wire.step(model, 2)["weight"] == 0.9 * before["weight"]
            new = wire.post(
                "create_model", session_id=session, model_seq_id=1, base_model="base", lora_config={"rank": 2}
            )
            assert wire.result(new["request_id"])["category"] == "server"
            until(lambda: wire.ask("get_info", {"model_id": model}).status_code == 404)
            base = {"session_id": session, "sampling_session_seq_id": 7, "base_model": "base"}
            assert wire.weight(wire.post("create_sampling_session", **base)["sampling_session_id"]) == 0
        assert wire.step(wire.model(session, 2, rank=4), 1)["weight"] == 0.9 * 5
    with serving(tmp_path) as (url, _):
        assert Wire(url).step(f"{session}:train:2", 2)["weight"] == 0.9 * (0.9 * 5)


def test_a_full_disk_is_one_sentence_with_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = FakeTrainer()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "/some/file")

    with serving(tmp_path, trainer) as (url, service):
        wire = Wire(url)
        session = wire.session()
        model = wire.model(session)
        step, sampler = {"model_id": model, "seq_id": 1}, {"sampling_session_seq_id": 9, "base_model": "base"}
        with monkeypatch.context() as patched:
            patched.setattr(Journal, "append", full)
            requests = [
                ("create_session", {}),
                ("create_sampling_session", {"session_id": session, **sampler}),
                ("forward_backward", body(model, 1, [[5]])),
                ("optim_step", step),
                ("optim_step", {**step, "adam_params": {"beta1": 9}}),
                ("save_weights", {**step, "path": "a"}),
                ("unload_model", {"model_id": model}),
                (f"sessions/{session}/finish", {}),
            ]
            for path, content in requests:
                response = wire.ask(path, content)
                assert response.status_code == 507, path
                assert "'/some/file'" in response.json()["error"]["message"]
        with monkeypatch.context() as patched:
            patched.setattr(trainer, "save", full)
            patched.setattr(trainer, "save_sampler", full)
            patched.setattr(service.checkpoints, "write_run", full)
            for seq, (kind, names) in enumerate(
                [
                    ("save_weights", {"path": "a"}),
                    ("save_weights_for_sampler", {"path": "a"}),
                    ("save_weights_for_sampler", {"sampling_session_seq_id": 1}),
                ],
                start=1,
            ):
                failed = wire.result(wire.operate(kind, model, seq, **names))
                assert failed["category"] == "server"
                assert "'/some/file'" in failed["error"]
        # Everything can be sent again.
        assert wire.step(model, 4)["weight"] == 0.9 * 9
        assert len([record for record in caplog.records if "'/some/file'" in record.getMessage()]) == len(requests) + 3
        assert not any(record.exc_info for record in caplog.records)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("only root can mount a small file system")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_small_disk_that_grows(small_disk: Path) -> None:
    tokens = [[5] * 3000]
    with serving(small_disk) as (url, _):
        wire = Wire(url)
        model, seq = wire.begin(), 1
        while (response := wire.forward_backward(model, seq, tokens)).is_success:
            seq += 1
        assert response.status_code == 507
        assert f"'{small_disk}/.server/journal'" in response.json()["error"]["message"]
        subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
        # The refused number is still free.
        step = wire.step(model, seq)
        assert step["weight"] == 0.9 * 9 + 0.5 * gradient(*[fake_loss(tokens)] * (seq - 1))
    with serving(small_disk) as (url, _):
        wire = Wire(url)
        assert wire.result(f"{model}:{seq}")["metrics"] == step
        assert wire.step(model, seq + 1)["weight"] == 0.9 * step["weight"]


def test_results_that_were_read_make_room_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path) as (url, service):
        wire = Wire(url)
        session = wire.session()
        model = wire.model(session)
        base = {"session_id": session, "sampling_session_seq_id": 7, "base_model": "base"}
        sampler = wire.post("create_sampling_session", **base)["sampling_session_id"]
        for seq in range(20):
            wire.result(wire.sample(sampler, seq))
        unread = wire.forward_backward(model, 1, [[5]] * 100).json()["request_id"]
        until(lambda: service.counts()["waiting_operations"] == 0)
        monkeypatch.setattr(service_module, "MAX_RESULT_BYTES", service.counts()["result_bytes"] - 1)
        wire.result(wire.sample(sampler, 20))
        statuses = [wire.ask("retrieve_future", {"request_id": f"{sampler}:{seq}"}).status_code for seq in range(20)]
        # The oldest are dropped, and no more than needed.
        assert statuses == sorted(statuses, reverse=True)
        assert statuses[0] == 404
        # They are sampled again for a client that asks again.
        assert wire.result(wire.sample(sampler, 0))
        assert wire.result(unread)
        # Those that nobody has read are kept, so that the server refuses further requests.
        again = wire.forward_backward(model, 2, [[5]] * 100).json()["request_id"]
        until(lambda: service.counts()["waiting_operations"] == 0)
        monkeypatch.setattr(service_module, "MAX_RESULT_BYTES", 1)
        refused = {"sampling_session_id": sampler, "seq_id": 21, "prompt": {"chunks": [{"tokens": [1]}]}}
        assert wire.ask("asample", refused).status_code == 429
        assert wire.result(again)


def test_a_restart_goes_on(tmp_path: Path) -> None:
    trainer = FakeTrainer()
    with serving(tmp_path, trainer, Limits(state=0.0)) as (url, _):
        wire = Wire(url)
        session = wire.session()
        model = wire.model(session)
        first = wire.forward_backward(model, 1, [[5]]).json()["request_id"]
        expected = wire.result(first)
        wire.step(model, 2)
        sampler = wire.result(wire.operate("save_weights_for_sampler", model, 3, sampling_session_seq_id=0))
        sampled = wire.result(wire.sample(sampler["sampling_session_id"], 0))
        wire.forward_backward(model, 4, [[6]])
        held = wire.forward_backward(model, 6, [[8]]).json()["request_id"]
        wire.result(f"{model}:4")
    trainer = FakeTrainer()
    with serving(tmp_path, trainer, Limits(state=0.0)) as (url, _):
        wire = Wire(url)
        # Results are kept, repeated requests are recognised, and operations after the state run once.
        assert wire.result(first) == expected
        assert wire.forward_backward(model, 1, [[5]]).json()["request_id"] == first
        assert wire.forward_backward(model, 1, [[6]]).status_code == 400
        assert wire.result(f"{sampler['sampling_session_id']}:0") == sampled
        weight = 0.9 * 9 + 0.5 * gradient(fake_loss([[5]]))
        assert wire.weight(sampler["sampling_session_id"], 1) == np.float32(weight)
        wire.forward_backward(model, 5, [[7]])
        wire.result(held)
        expected_weight = 0.9 * weight + 0.5 * gradient(*(fake_loss([[n]]) for n in (6, 7, 8)))
        assert wire.step(model, 7)["weight"] == expected_weight
        assert [entry for entry in trainer.log if entry[0] != "optim_step"] == [
            ("create", 8),
            ("load", trainer.log[1][1], True),
            ("forward_backward", 4, 1),
            ("forward_backward", 5, 1),
            ("forward_backward", 6, 1),
        ]
        # The same key begins the same session.
        heads = [wire.send("POST", "create_session", json={}, headers={"x-idempotency-key": "k"}).json() for _ in "ab"]
        assert heads[0] == heads[1]


def test_results_are_dropped_after_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_thread, "_SWEEP_SECONDS", 0.05)
    with serving(tmp_path, limits=Limits(retained=0.5, state=0.0)) as (url, service):
        wire = Wire(url)
        session = wire.session()
        model = wire.model(session)
        wire.step(model, 1)
        assert wire.result(f"{model}:1")
        until(lambda: wire.ask("retrieve_future", {"request_id": f"{model}:1"}).status_code == 404 or time.sleep(0.7))
        # A repetition after this is refused, and does not run again.
        assert wire.ask("optim_step", {"model_id": model, "seq_id": 1}).status_code == 400
        create = {"session_id": session, "model_seq_id": 0, "base_model": "base", "lora_config": {"rank": 8}}
        assert wire.ask("create_model", create).status_code == 400
        wire.step(model, 2)
        until(lambda: service.counts()["waiting_operations"] == 0)
    journal = Journal(tmp_path / ".server/journal")
    assert f"{model}:1" not in {header["id"] for header, _ in journal.records()}
    journal.close()
