# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import itertools
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.serving.tinker import messages
from marin_rl.serving.tinker.messages import (
    MAX_PARTS,
    canonical_bytes,
    message_class,
    parse_forward_backward,
    read_forward_backward,
    write_outputs,
    write_samples,
)
from marin_rl.serving.tinker.records import LossOutputs, RequestError, Sample, SampleOutputs
from tests.serving.tinker.wire import body

CAPTURED = (
    "0a0d73657373313a747261696e3a3010011a640a100a0e0a0c010000000200000003000000121e0a077765696768747312130a0c000000000000"
    "803f0000803f180122010312300a0d7461726765745f746f6b656e73121f0a18020000000000000003000000000000000400000000000000180222"
    "01031a640a100a0e0a0c010000000200000003000000121e0a077765696768747312130a0c000000000000803f0000803f180122010312300a0d74"
    "61726765745f746f6b656e73121f0a1802000000000000000300000000000000040000000000000018022201"
    + "03220d63726f73735f656e74"
    "726f7079"
)
"""A body that the SDK 0.38.0 sent."""


def test_reads_a_body_of_the_sdk() -> None:
    request = read_forward_backward(bytes.fromhex(CAPTURED))
    assert (request.model_id, request.seq_id, request.loss_fn) == ("sess1:train:0", 1, "cross_entropy")
    assert not request.forward_only
    assert request.config == {}
    for datum in request.data:
        np.testing.assert_array_equal(datum.tokens, [1, 2, 3])
        np.testing.assert_array_equal(datum.inputs["target_tokens"], [2, 3, 4])
        np.testing.assert_array_equal(datum.inputs["weights"], np.array([0, 1, 1], np.float32))
    assert len(request.data) == 2


def message_of(**options: object) -> object:
    return parse_forward_backward(body("s:train:0", 1, [[1, 2, 3]], **options))  # type: ignore[arg-type]


def sparse(dense: np.ndarray, message: object, dtype: int) -> None:
    """Write a matrix as compressed sparse rows."""
    rows, columns = np.nonzero(dense)
    csr = message.sparse_csr
    csr.values = dense[rows, columns].tobytes()
    csr.crow_indices = np.searchsorted(rows, np.arange(len(dense) + 1)).astype("<i8").tobytes()
    csr.col_indices = columns.astype("<i8").tobytes()
    message.dtype = dtype
    del message.shape[:]
    message.shape.extend(dense.shape)


@given(st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_sparse_rows_equal_the_matrix(k: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    weights = (generator.random((3, k)) * (generator.random((3, k)) < 0.4)).astype("<f4")
    targets = (generator.integers(0, 9, (3, k)) * (weights > 0)).astype("<i8")
    message = message_of()
    inputs = message.data[0].loss_fn_inputs
    sparse(targets, inputs["target_tokens"], 2)
    sparse(weights, inputs["weights"], 1)
    datum = read_forward_backward(message.SerializeToString()).data[0]
    np.testing.assert_array_equal(datum.inputs["target_tokens"], targets)
    np.testing.assert_array_equal(datum.inputs["weights"], weights)


def _set(message: object, name: str, **values: object) -> None:
    tensor = message.data[0].loss_fn_inputs[name]
    for key, value in values.items():
        if key == "shape":
            del tensor.shape[:]
            tensor.shape.extend(value)
        else:
            setattr(tensor, key, value)


def with_loss(message: Any, loss: str) -> Any:
    """Change the loss of a message, with its inputs; return its settings."""
    inputs = message.data[0].loss_fn_inputs
    for name in ("advantages", "logprobs"):
        inputs[name].CopyFrom(inputs["weights"])
    del inputs["weights"]
    message.loss_fn = loss
    return message.loss_fn_config


def test_losses_with_ratios_are_read() -> None:
    message = message_of()
    with_loss(message, "dro").update({"beta": 0.5})
    assert read_forward_backward(message.SerializeToString()).config == {"beta": 0.5}


WRONG = {
    "loss": lambda m: setattr(m, "loss_fn", "gspo"),
    "no data": lambda m: m.ClearField("data"),
    "config": lambda m: m.loss_fn_config.update({"clip_low_threshold": 0.5}),
    "text config": lambda m: m.loss_fn_config_v2["beta"].__setattr__("text", "x"),
    "image": lambda m: m.data[0].model_input.add().image.SetInParent(),
    "dmel": lambda m: m.data[0].model_input.add().dmel.SetInParent(),
    "no tokens": lambda m: m.data[0].ClearField("model_input"),
    "negative token": lambda m: m.data[0].model_input.add().encoded_text.__setattr__("tokens", b"\xff" * 4),
    "part of a token": lambda m: m.data[0].model_input.add().encoded_text.__setattr__("tokens", b"\0" * 3),
    "unknown input": lambda m: _set(m, "mask", dense=b"\0" * 12, dtype=1, shape=[3]),
    "no targets": lambda m: m.data[0].loss_fn_inputs.__delitem__("target_tokens"),
    "dtype": lambda m: _set(m, "weights", dtype=4),
    "float targets": lambda m: _set(m, "target_tokens", dense=b"\0" * 12, dtype=1),
    "negative target": lambda m: _set(m, "target_tokens", dense=b"\xff" * 24),
    "length": lambda m: _set(m, "weights", dense=b"\0" * 8, shape=[2]),
    "shape": lambda m: _set(m, "weights", shape=[4]),
    "negative shape": lambda m: _set(m, "weights", shape=[-1, -3]),
    "rank": lambda m: _set(m, "weights", shape=[3, 1, 1]),
    "k differs": lambda m: _set(m, "weights", dense=b"\0" * 24, shape=[3, 2]),
    "many targets": lambda m: (
        _set(m, "target_tokens", dense=b"\0" * 3 * 129 * 8, shape=[3, 129]),
        _set(m, "weights", dense=b"\0" * 3 * 129 * 4, shape=[3, 129]),
    ),
    "setting beyond float32": lambda m: with_loss(m, "ppo").update({"clip_high_threshold": 1e300}),
    "infinite setting": lambda m: with_loss(m, "dro").update({"beta": np.inf}),
    "no beta": lambda m: with_loss(m, "dro"),
    "not finite": lambda m: _set(m, "weights", dense=np.array([0, np.nan, 1], "<f4").tobytes()),
}


@pytest.mark.parametrize("name", WRONG)
def test_refuses_what_it_does_not_have(name: str) -> None:
    message = message_of()
    WRONG[name](message)
    with pytest.raises(RequestError):
        read_forward_backward(message.SerializeToString())


@pytest.mark.parametrize(
    ("rows", "columns", "shape"),
    [
        ([0, 1, 2], [0, 0], [3, 2]),
        ([0, 1, 0, 1], [0], [3, 2]),
        ([0, 0, 0, 1], [2], [3, 2]),
        ([0, 0, 0, 1], [-1], [3, 2]),
        ([0, 0, 0, 2], [0], [3, 2]),
        ([0, 0, 0, 1], [0], [3, 2**40]),
        ([0, 0, 0, 1], [0], [-3, -2]),
        ([0, 0, 0, 1], [0], [6]),
    ],
)
def test_refuses_sparse_rows_that_do_not_fit(rows: list[int], columns: list[int], shape: list[int]) -> None:
    message = message_of()
    tensor = message.data[0].loss_fn_inputs["weights"]
    tensor.sparse_csr.values = np.ones(len(columns), "<f4").tobytes()
    tensor.sparse_csr.crow_indices = np.array(rows, "<i8").tobytes()
    tensor.sparse_csr.col_indices = np.array(columns, "<i8").tobytes()
    del tensor.shape[:]
    tensor.shape.extend(shape)
    with pytest.raises(RequestError):
        read_forward_backward(message.SerializeToString())


@pytest.mark.parametrize("shape", [[3, 2**40], [-3, -(2**40)], [2**62, 2**62, 2**62]])
def test_sparse_tensors_of_too_many_elements_are_refused_before_they_are_built(shape: list[int]) -> None:
    message = message_of()
    weights = message.data[0].loss_fn_inputs["weights"]
    sparse(np.ones((3, 2), np.float32), weights, 1)
    _set(message, "weights", shape=shape)
    with pytest.raises(RequestError, match="sparse tensors"):
        read_forward_backward(message.SerializeToString())


def test_only_some_losses_take_several_targets() -> None:
    for loss, is_allowed in (("importance_sampling", True), ("ppo", False), ("cispo", False), ("dro", False)):
        message = message_of(loss=loss, inputs={"logprobs": -1.0, "advantages": 1.0})
        for tensor in message.data[0].loss_fn_inputs.values():
            tensor.shape.append(1)
        if is_allowed:
            assert read_forward_backward(message.SerializeToString()).data[0].inputs["logprobs"].shape == (3, 1)
        else:
            with pytest.raises(RequestError):
                read_forward_backward(message.SerializeToString())


@pytest.mark.parametrize("index", [0, 1])
def test_weights_are_needed_to_train(index: int) -> None:
    message = parse_forward_backward(body("m", 1, [[1, 2], [3]]))
    del message.data[index].loss_fn_inputs["weights"]
    with pytest.raises(RequestError):
        read_forward_backward(message.SerializeToString())
    message.forward_only = True
    assert "weights" not in read_forward_backward(message.SerializeToString()).data[index].inputs


def field(number: int, content: bytes) -> bytes:
    """Return a field with a length, as protobuf writes it."""
    size = len(content)
    head = bytes([number << 3 | 2])
    while size > 127:
        head, size = head + bytes([size & 127 | 128]), size >> 7
    return head + bytes([size]) + content


HEAD = body("s:train:0", 1, [])
TARGETS = field(1, b"target_tokens")
MANY = 1001
"""More than the parts that the tests of bombs allow."""
BOMBS = {
    "datums": HEAD + field(3, b"") * MANY,
    "datums with a chunk": HEAD + field(3, field(1, b"")) * MANY,
    "chunks": HEAD + field(3, field(1, b"") * MANY),
    "chunks with a text": HEAD + field(3, field(1, field(1, b"")) * MANY),
    "texts of a chunk": HEAD + field(3, field(1, field(1, b"") * MANY)),
    "inputs": HEAD + field(3, b"".join(field(2, field(1, b"%d" % index)) for index in range(MANY))),
    "one input again and again": HEAD + field(3, field(2, TARGETS) * MANY),
    "tensors of an input": HEAD + field(3, field(2, TARGETS + field(2, b"") * MANY)),
    "sparse tensors": HEAD + field(3, field(2, TARGETS + field(2, field(2, b"") * MANY))),
    "packed shape": HEAD + field(3, field(2, TARGETS + field(2, field(4, b"\x01" * MANY)))),
    "shape": HEAD + field(3, field(2, TARGETS + field(2, b"\x20\x01" * MANY))),
    "shape of large numbers": HEAD + field(3, field(2, TARGETS + field(2, (b"\x20" + b"\xff" * 8 + b"\x7f") * MANY))),
    "settings": HEAD + b"".join(field(5, field(1, b"%d" % index)) for index in range(MANY)),
    "newer settings": HEAD + b"".join(field(7, field(1, b"%d" % index) + field(2, b"")) for index in range(MANY)),
    "unknown numbers": HEAD + b"\x78\x01" * MANY,
    "unknown numbers in a chunk": HEAD + field(3, field(1, b"\x78\x01" * MANY)),
    "unknown fixed numbers": HEAD + (b"\x79" + b"\0" * 8 + b"\x7d" + b"\0" * 4) * MANY,
    "groups": HEAD + b"\x7b\x7c" * MANY,
    "chunks before an end within a number": HEAD + field(3, field(1, b"") * MANY) + field(3, b"\xff"),
    "nested groups": HEAD + b"\x7b" * MANY,
}


@pytest.mark.parametrize("name", BOMBS)
def test_bodies_of_too_many_parts_are_refused_before_they_are_built(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(kind: str) -> object:
        raise AssertionError(f"a {kind} is built")

    monkeypatch.setattr(messages, "MAX_PARTS", MANY - 1)
    monkeypatch.setattr(messages, "message_class", build)
    with pytest.raises(RequestError):
        parse_forward_backward(BOMBS[name])


@pytest.mark.parametrize("end", [b"\xff" * MANY, b"\x1a\xff\xff\xff\xff\x0f" + b"\0" * MANY, field(3, b"\xff" * MANY)])
def test_large_bodies_of_other_bytes_are_refused(end: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_PARTS", MANY - 1)
    with pytest.raises(RequestError):
        parse_forward_backward(HEAD + end)


def test_large_bodies_of_few_parts_are_read() -> None:
    tokens = [list(range(MAX_PARTS // 8)), *[[7]] * 1024]
    data = body("s:train:0", 1, tokens)
    assert len(data) > MAX_PARTS
    read = read_forward_backward(data).data
    assert [datum.tokens.tolist() for datum in read] == tokens
    assert [datum.inputs["target_tokens"].tolist() for datum in read] == tokens


@pytest.mark.parametrize(("chunks", "size"), [(40, 5), (305, 1)])
def test_the_largest_requests_of_the_sdk_are_read(chunks: int, size: int) -> None:
    tokens = list(range(chunks * size))
    message = message_class("ForwardBackwardRequest")()
    message.ParseFromString(body("s:train:0", 1, [tokens]))
    [datum] = message.data
    del datum.model_input[:]
    for start in range(0, len(tokens), size):
        datum.model_input.add().encoded_text.tokens = np.array(tokens[start : start + size], "<i4").tobytes()
    # Of a token, with its target and weight, the SDK counts 16 bytes.
    assert 1024 * 16 * len(tokens) < 5_000_000
    read = parse_forward_backward(HEAD + field(3, datum.SerializeToString()) * 1024).data
    assert len(read) == 1024
    assert [len(datum.model_input) for datum in read] == [chunks] * 1024


@pytest.mark.parametrize("sizes", [[3, 1, 1], [2**62] * 1000, [1] * 100_000])
def test_shapes_of_many_sizes_are_refused(sizes: list[int]) -> None:
    message = message_of()
    _set(message, "weights", shape=sizes)
    with pytest.raises(RequestError, match=rf"weights has {len(sizes)} sizes"):
        read_forward_backward(message.SerializeToString())


@pytest.mark.parametrize("length", [1, 2000])
def test_the_size_of_a_request_is_its_memory(length: int) -> None:
    data = body("m", 1, [[7] * length] * 200, loss="ppo", inputs={"logprobs": -1.0, "advantages": 1.0})
    read_forward_backward(data)
    tracemalloc.start()
    try:
        request = read_forward_backward(data)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0.7 * request.size < held < 1.1 * request.size


def test_prefers_the_newer_config() -> None:
    message = message_of(loss="ppo", inputs={"logprobs": -1.0, "advantages": 1.0}, config={"clip_low_threshold": 0.1})
    message.loss_fn_config_v2["clip_high_threshold"].number = 0.0
    assert read_forward_backward(message.SerializeToString()).config == {"clip_high_threshold": 0.0}


@given(st.integers(0, len(CAPTURED) * 4 - 1), st.integers(0, len(CAPTURED) // 2))
def test_damaged_bytes_are_read_or_refused(bit: int, length: int) -> None:
    data = bytearray.fromhex(CAPTURED)
    data[bit // 8] ^= 1 << bit % 8
    for damaged in (bytes(data), bytes(data[:length])):
        try:
            request = read_forward_backward(damaged)
        except RequestError:
            continue
        for datum in request.data:
            assert all(len(values) == len(datum.tokens) for values in datum.inputs.values())


def test_equal_messages_have_equal_bytes() -> None:
    message = message_of(loss="ppo", inputs={"logprobs": -1.0, "advantages": 1.0})
    other = message_of(loss="ppo", inputs={"advantages": 1.0, "logprobs": -1.0})
    assert canonical_bytes(message) == canonical_bytes(other)


@given(st.lists(st.tuples(st.integers(1, 5), st.sampled_from([(), (1,), (3,)])), max_size=8))
def test_outputs_can_be_read_record_by_record(shapes: list[tuple[int, tuple[int, ...]]]) -> None:
    logprobs = [np.random.default_rng(i).normal(size=(n, *k)).astype(np.float32) for i, (n, k) in enumerate(shapes)]
    data = write_outputs(LossOutputs(logprobs, {"loss:sum": 1.5}))
    message, found = message_class("ForwardBackwardOutput").FromString(data), []
    for record in message.loss_fn_outputs:
        # As the SDK does.
        field = record.fields["logprobs"]
        offsets = np.frombuffer(field.offsets, np.int64)
        assert len(offsets) == record.num_datums + 1
        buffer, trailing = np.frombuffer(field.data, np.float32), tuple(field.trailing_shape)
        for start, end in itertools.pairwise(offsets):
            found.append(buffer[start // 4 : end // 4].reshape((-1, *trailing)))
    assert dict(message.metrics) == {"loss:sum": 1.5}
    assert len(found) == len(logprobs)
    for one, expected in zip(found, logprobs, strict=True):
        np.testing.assert_array_equal(one, expected)


def test_samples() -> None:
    topk = np.arange(4, dtype=np.int32).reshape(2, 2), -np.ones((2, 2), np.float32)
    data = write_samples(
        SampleOutputs(
            [Sample((7, 8), (-0.5, -1.5), True), Sample((9,), (-2.0,), False)], np.array([np.nan, -3], np.float32), topk
        )
    )
    message = message_class("SampleResponse").FromString(data)
    assert [one.stop_reason for one in message.sequences] == [0, 1]
    assert np.frombuffer(message.sequences[0].tokens, "<i4").tolist() == [7, 8]
    assert np.frombuffer(message.sequences[1].logprobs, "<f4").tolist() == [-2.0]
    assert np.isnan(np.frombuffer(message.prompt_logprobs, "<f4")).tolist() == [True, False]
    assert np.frombuffer(message.topk_prompt_logprobs.token_ids, "<i4").tolist() == [0, 0, 2, 3]
    assert np.frombuffer(message.topk_prompt_logprobs.logprobs, "<f4").tolist() == [-99999.0, -99999.0, -1.0, -1.0]
