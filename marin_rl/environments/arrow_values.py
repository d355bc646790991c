# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""JSON values that Arrow has stored, in Parquet files and datasets."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

_LISTS = pa.ListType, pa.LargeListType, pa.FixedSizeListType


def parse_json(value: Any, kind: pa.DataType) -> Any:
    """Parse the JSON in a value of Arrow, as which `datasets` writes objects of different types."""
    if value is None or isinstance(kind, pa.JsonType):
        return None if value is None else json.loads(value)
    if isinstance(kind, pa.StructType):
        return {field.name: parse_json(value[field.name], field.type) for field in kind}
    return [parse_json(item, kind.value_type) for item in value] if isinstance(kind, _LISTS) else value


def undecidable(value: Any, kind: pa.DataType, path: str) -> Iterator[tuple[str, str]]:
    """Find the parts of a JSON value that Arrow may have changed.

    Yields:
        Path and description: null in an object, which is also stored for a key that other objects have; a number such
        as 3.0, which may have been 3; values of types that JSON does not have.
    """
    if isinstance(kind, pa.StructType) and isinstance(value, Mapping):
        for field in kind:
            inner = f"{path}.{field.name}"
            if value[field.name] is None:
                yield inner, "null, as which Arrow also stores a missing key"
            else:
                yield from undecidable(value[field.name], field.type, inner)
    elif isinstance(kind, _LISTS) and isinstance(value, list):
        for index, item in enumerate(value):
            if item is not None:
                yield from undecidable(item, kind.value_type, f"{path}[{index}]")
    elif pa.types.is_float64(kind):
        if value.is_integer():
            yield path, f"{value}, as which Arrow also stores the integer"
    elif not (isinstance(kind, pa.JsonType) or (type(value) in (str, int, bool) and not pa.types.is_decimal(kind))):
        yield path, f"of Arrow's type {kind}, which JSON does not have"
