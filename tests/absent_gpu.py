# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Absent devices for programs that are lowered without them."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import jax

H100 = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
"""Value of `abstract_device` of a mesh: from jax 0.11 on, Triton kernels are lowered for a kind of GPU."""


@contextlib.contextmanager
def absent_mesh(platform: str, shape: tuple[int, int]) -> Iterator[None]:
    """Set a mesh of absent devices with the axes `data` and `model`."""
    automatic, device = (jax.sharding.AxisType.Auto,) * 2, H100 if platform == "gpu" else None
    mesh = jax.sharding.AbstractMesh(shape, ("data", "model"), axis_types=automatic, abstract_device=device)
    # Levanter computes the angles of rotary embeddings eagerly, which needs devices.
    with mock.patch("jax.ensure_compile_time_eval", contextlib.nullcontext), jax.sharding.use_abstract_mesh(mesh):
        yield
