# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A kind of GPU for programs that are lowered without one: from jax 0.11 on, Triton kernels are lowered for a kind."""

import jax

H100 = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
"""Value of `abstract_device` of a mesh."""
