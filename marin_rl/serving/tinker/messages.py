# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Protocol buffers of the Tinker protocol: `forward_backward` requests, and results of training and sampling.

Arrays are little-endian bytes inside of the messages.
"""

import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from marin_rl.serving.tinker.records import (
    LOSSES,
    MAX_TOPK,
    TARGETS,
    Datum,
    ForwardBackward,
    Loss,
    LossOutputs,
    RequestError,
    SampleOutputs,
)

_MESSAGES = {
    "TopkLogprobs": "token_ids: bytes = 1, logprobs: bytes = 2, k: uint32 = 3, length: uint32 = 4",
    "SampledSequence": "stop_reason: int32 = 1, tokens: bytes = 2, logprobs: bytes = 3",
    "SampleResponse": "sequences: SampledSequence* = 1, prompt_logprobs: bytes = 2, "
    "topk_prompt_logprobs: TopkLogprobs = 3",
    "SparseCsr": "values: bytes = 1, crow_indices: bytes = 2, col_indices: bytes = 3",
    "Tensor": "dense: bytes = 1, sparse_csr: SparseCsr = 2, dtype: int32 = 3, shape: int64* = 4",
    "BatchedTensor": "data: bytes = 1, offsets: bytes = 2, dtype: int32 = 3, trailing_shape: int64* = 4",
    "ArrayRecord": "type_tag: string = 1, fields: BatchedTensor% = 2, num_datums: int64 = 3",
    "ForwardBackwardOutput": "loss_fn_output_type: string = 1, loss_fn_outputs: ArrayRecord* = 2, metrics: double% = 3",
    "EncodedTextChunk": "tokens: bytes = 1",
    "OtherChunk": "",
    "Chunk": "encoded_text: EncodedTextChunk = 1, image: OtherChunk = 2, dmel: OtherChunk = 3",
    "Datum": "model_input: Chunk* = 1, loss_fn_inputs: Tensor% = 2",
    "LossConfigValue": "number: double| = 1, text: string| = 2",
    "ForwardBackwardRequest": "model_id: string = 1, seq_id: int32 = 2, data: Datum* = 3, loss_fn: string = 4, "
    "loss_fn_config: double% = 5, forward_only: bool = 6, loss_fn_config_v2: LossConfigValue% = 7",
}
"""Fields of the messages. `*` marks repeated fields, `%` maps from texts, `|` alternatives. Enums are numbers."""
_FIELD = re.compile(r"(\w+): (\w+)([*%|]?) = (\d+)")
_FLOAT32, _INT64 = 1, 2
_DTYPES = {_FLOAT32: np.dtype("<f4"), _INT64: np.dtype("<i8")}
_STOPPED, _LENGTH = 0, 1
_UNDEFINED_LOGPROB = -99999.0
MAX_PARTS = 2**20
"""Maximum number of fields of a request, those of all messages in it together. The SDK sends fewer: up to 1,024 data
and 5 MB, of which a chunk has 3 fields and at least 16 bytes with its targets and weights."""
_DATUM_BYTES = 1400
"""Bytes in memory of a datum with three inputs, without their elements."""
MAX_SPARSE_ELEMENTS = 2**25
"""Maximum number of elements of the sparse tensors of a request, zeros included."""


def _message_classes() -> Callable[[str], type[Any]]:
    """Return a function from the name of a message to its class."""
    proto = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="tinker.proto", package="marin_rl.tinker", syntax="proto3")

    def add(owner: descriptor_pb2.DescriptorProto, name: str, kind: str, mark: str, number: str) -> None:
        field = owner.field.add(name=name, number=int(number))
        field.label = proto.LABEL_REPEATED if mark in ("*", "%") else proto.LABEL_OPTIONAL
        if mark == "%":
            entry = owner.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
            entry.options.map_entry = True
            add(entry, "key", "string", "", "1")
            add(entry, "value", kind, "", "2")
            field.type, field.type_name = proto.TYPE_MESSAGE, f".{file.package}.{owner.name}.{entry.name}"
        elif kind in _MESSAGES:
            field.type, field.type_name = proto.TYPE_MESSAGE, f".{file.package}.{kind}"
        else:
            field.type = proto.Type.Value(f"TYPE_{kind.upper()}")
        if mark == "|":
            if not owner.oneof_decl:
                owner.oneof_decl.add(name="value")
            field.oneof_index = 0

    for message, fields in _MESSAGES.items():
        owner = file.message_type.add(name=message)
        for match in _FIELD.finditer(fields):
            add(owner, *match.groups())
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return lambda name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.{name}"))


message_class = _message_classes()


def _parts_of(fields: str) -> dict[int, str]:
    """Return the kinds of the fields of a message by number; `%` marks the entries of a map."""
    return {int(number): kind + mark.strip("*|") for _, kind, mark, number in _FIELD.findall(fields)}


_PARTS = {name: _parts_of(fields) for name, fields in _MESSAGES.items()}
_PARTS |= {kind: {2: kind[:-1]} for parts in list(_PARTS.values()) for kind in parts.values() if kind.endswith("%")}
"""Kinds of the fields of messages and of entries of maps."""


def _check_parts(data: bytes) -> None:
    """Count the fields of a request without creating them: two bytes of a body are an object of 150.

    Raises:
        RequestError: if there are too many.
    """
    number, waiting = 0, [(0, len(data), "ForwardBackwardRequest")]
    while waiting:
        at, end, message = waiting.pop()
        while at < end:
            tag, at = _varint(data, at)
            kind, size = _PARTS[message].get(tag >> 3, ""), 0
            match tag & 7:
                case 0:
                    _, at = _varint(data, at)
                case 1 | 5:
                    size = 8 if tag & 7 == 1 else 4
                case 2:
                    size, at = _varint(data, at)
                    if kind in _PARTS:
                        waiting.append((at, min(at + size, end), kind))
                    elif kind not in ("", "bytes", "string"):
                        # Packed numbers.
                        number += size
                case _:
                    raise RequestError("the body has groups, which no protobuf ForwardBackwardRequest has")
            at, number = at + size, number + 1
            if number > MAX_PARTS:
                raise RequestError(f"the body has more than {MAX_PARTS} fields and sizes; send several requests")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at a position, and the position after it.

    Raises:
        IndexError: if it does not end.
    """
    value = byte = data[at]
    shift = 0
    # Longer ones are malformed.
    while byte > 127 and shift < 63:
        at, shift = at + 1, shift + 7
        byte = data[at]
        value += byte - 1 << shift
    return value, at + 1


def parse_forward_backward(data: bytes) -> Any:
    """Parse the message of a request without checking its data.

    Raises:
        RequestError: if the bytes are not such a message, or it has too many parts or no number.
    """
    if len(data) > MAX_PARTS:
        try:
            _check_parts(data)
        except IndexError as error:
            raise RequestError("the body is not a protobuf ForwardBackwardRequest: it ends within a number") from error
    message = message_class("ForwardBackwardRequest")()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise RequestError(f"the body is not a protobuf ForwardBackwardRequest: {error}") from error
    if message.seq_id < 1:
        raise RequestError(f"seq_id is {message.seq_id}; it must be at least 1")
    return message


def canonical_bytes(message: Any) -> bytes:
    """Return a message as bytes that are equal for equal messages; an encoder may write maps in any order."""
    return message.SerializeToString(deterministic=True)


def read_forward_backward(data: bytes) -> ForwardBackward:
    """Read the body of a request of `forward_backward` or `forward`.

    Raises:
        RequestError: if it is malformed, or asks for something that the server does not have.
    """
    return forward_backward_of(parse_forward_backward(data))


def forward_backward_of(message: Any) -> ForwardBackward:
    """Return the request in a parsed message.

    Raises:
        RequestError: if a value is invalid, or not supported.
    """
    if (loss := LOSSES.get(message.loss_fn)) is None:
        raise RequestError(
            f"loss_fn is {message.loss_fn!r:.100}, which this server does not have; use one of {list(LOSSES)}"
        )
    if not message.data:
        raise RequestError("data is empty; send at least one datum")
    tensors = (tensor for datum in message.data for tensor in datum.loss_fn_inputs.values())
    # A few bytes may be many elements.
    if sum(abs(math.prod(each.shape[:2])) for each in tensors if each.HasField("sparse_csr")) > MAX_SPARSE_ELEMENTS:
        raise RequestError(f"the sparse tensors of data have more than {MAX_SPARSE_ELEMENTS} elements; send less data")
    config = _config(message, loss)
    # Without weights a datum is only scored.
    optional = {"weights"} if message.forward_only else set()
    data = tuple(_datum(datum, loss, optional, f"data[{index}]") for index, datum in enumerate(message.data))
    arrays = itertools.chain.from_iterable((tokens, *inputs.values()) for tokens, inputs in data)
    size = _DATUM_BYTES * len(data) + sum(array.nbytes for array in arrays)
    return ForwardBackward(message.model_id, message.seq_id, data, message.loss_fn, config, message.forward_only, size)


def _config(message: Any, loss: Loss) -> dict[str, float]:
    config = dict(message.loss_fn_config)
    if message.loss_fn_config_v2:
        config = {}
        for name, value in message.loss_fn_config_v2.items():
            if value.WhichOneof("value") != "number":
                raise RequestError(f"loss_fn_config[{name!r:.100}] is no number; this server has no settings of texts")
            config[name] = value.number
    for name, value in config.items():
        if name not in loss.settings:
            raise RequestError(
                f"loss_fn_config[{name!r:.100}] is unknown for {message.loss_fn}; it has {sorted(loss.settings)}"
            )
        if not abs(value) <= float(np.finfo(np.float32).max):
            raise RequestError(f"loss_fn_config[{name!r}] is {value}; it must be finite in float32")
    for name, default in loss.settings.items():
        if default is None and name not in config:
            raise RequestError(f"{message.loss_fn} needs loss_fn_config[{name!r}]")
    return config


def _datum(message: Any, loss: Loss, optional: set[str], what: str) -> Datum:
    for chunk in message.model_input:
        for kind in ("image", "dmel"):
            if chunk.HasField(kind):
                raise RequestError(f"{what}: a chunk of kind {kind!r} is not supported; send text tokens only")
    raw = b"".join(chunk.encoded_text.tokens for chunk in message.model_input)
    tokens = _array(raw, np.dtype("<i4"), f"{what}.model_input")
    if not len(tokens) or tokens.min() < 0:
        raise RequestError(f"{what}.model_input must have at least one token, and no negative ones")
    given = set(message.loss_fn_inputs)
    if unknown := sorted(given - loss.inputs):
        raise RequestError(f"{what}: the loss has no input {unknown[0]!r:.100}; its inputs are {sorted(loss.inputs)}")
    if missing := sorted(loss.inputs - given - optional):
        raise RequestError(f"{what}: the loss needs the input {missing[0]!r}")
    inputs = {
        name: _tensor(message.loss_fn_inputs[name], name, f"{what}.{name}", len(tokens)) for name in sorted(given)
    }
    shape = inputs[TARGETS].shape
    if len(shape) == 2 and not (loss.takes_top_k and shape[1] <= MAX_TOPK):
        most = f"at most {MAX_TOPK} targets" if loss.takes_top_k else "one target"
        raise RequestError(f"{what}: {TARGETS} has shape {shape}; the loss takes {most} per position")
    for name, values in inputs.items():
        if values.shape != shape:
            raise RequestError(f"{what}: {name} has shape {values.shape}, but {TARGETS} has {shape}")
    return Datum(tokens, inputs)


def _tensor(message: Any, name: str, what: str, length: int) -> np.ndarray:
    """Return an input of the loss, checked against the length of its sequence."""
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise RequestError(f"{what} has dtype number {message.dtype}; use float32 (1) or int64 (2)")
    if message.HasField("sparse_csr"):
        values = _from_csr(message, dtype, what, length)
    else:
        values = _array(message.dense, dtype, what)
        if len(message.shape) > 2:
            raise RequestError(f"{what} has {len(message.shape)} sizes; it must have at most 2")
        shape = tuple(message.shape) or values.shape
        if min(shape) < 1 or math.prod(shape) != len(values):
            raise RequestError(f"{what} has shape {list(shape)}, but {len(values)} values")
        values = values.reshape(shape)
    if len(values) != length:
        raise RequestError(f"{what} has shape {list(values.shape)}; the first size must be {length}")
    if name == TARGETS:
        if message.dtype != _INT64 or values.min() < 0:
            raise RequestError(f"{what} must be int64 token ids, none of them negative")
        return values
    if not np.isfinite(values).all():
        raise RequestError(f"{what} has values that are not finite")
    return values.astype(np.float32, copy=False)


def _from_csr(message: Any, dtype: np.dtype, what: str, length: int) -> np.ndarray:
    """Return a matrix in compressed sparse rows with its zeros."""
    shape, csr = tuple(message.shape), message.sparse_csr
    if len(shape) != 2 or shape[0] != length or shape[1] < 1:
        raise RequestError(f"{what} is sparse and has shape {list(shape[:3])}; it must be [{length}, k]")
    values = _array(csr.values, dtype, what)
    starts, columns = (_array(part, np.dtype("<i8"), what) for part in (csr.crow_indices, csr.col_indices))
    is_valid = (
        len(starts) == length + 1
        and starts[0] == 0
        and starts[-1] == len(values) == len(columns)
        and bool((np.diff(starts) >= 0).all())
        and bool(((columns >= 0) & (columns < shape[1])).all())
    )
    if not is_valid:
        raise RequestError(f"{what}: the indices of its sparse rows do not fit its shape {list(shape)} and values")
    dense = np.zeros(shape, dtype)
    dense[np.repeat(np.arange(length), np.diff(starts)), columns] = values
    return dense


def _array(data: bytes, dtype: np.dtype, what: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise RequestError(f"{what} has {len(data)} bytes, no multiple of the {dtype.itemsize} of an element")
    return np.frombuffer(data, dtype)


def write_outputs(outputs: LossOutputs) -> bytes:
    """Return a `ForwardBackwardOutput`. Neighbouring datums with equal `k` share a record."""
    message = message_class("ForwardBackwardOutput")(loss_fn_output_type="ArrayRecord")
    for name, value in outputs.metrics.items():
        message.metrics[name] = value
    arrays = [np.asarray(values, "<f4") for values in outputs.logprobs]
    for trailing, group in itertools.groupby(arrays, lambda values: values.shape[1:]):
        members = list(group)
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(members))
        field = record.fields["logprobs"]
        field.data = b"".join(values.tobytes() for values in members)
        field.offsets = np.cumsum([0, *(values.nbytes for values in members)], dtype="<i8").tobytes()
        field.dtype = _FLOAT32
        field.trailing_shape.extend(trailing)
    return message.SerializeToString()


def write_samples(outputs: SampleOutputs) -> bytes:
    """Return a `SampleResponse`."""
    message = message_class("SampleResponse")()
    for sample in outputs.samples:
        message.sequences.add(
            stop_reason=_STOPPED if sample.stopped else _LENGTH,
            tokens=_bytes(sample.tokens, "<i4"),
            logprobs=_bytes(sample.logprobs, "<f4"),
        )
    if outputs.prompt_logprobs is not None:
        message.prompt_logprobs = _bytes(outputs.prompt_logprobs, "<f4")
    if outputs.topk is not None:
        ids, logprobs = (np.array(values) for values in outputs.topk)
        ids[:1], logprobs[:1] = 0, _UNDEFINED_LOGPROB
        top = message.topk_prompt_logprobs
        top.length, top.k = ids.shape
        top.token_ids, top.logprobs = _bytes(ids, "<i4"), _bytes(logprobs, "<f4")
    return message.SerializeToString()


def _bytes(values: Sequence[int] | Sequence[float] | np.ndarray, dtype: str) -> bytes:
    return np.asarray(values, dtype).tobytes()
