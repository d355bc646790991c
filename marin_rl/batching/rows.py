# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The shape of batch rows, chosen from the sizes of sequences and the attention kernel."""

ROW_MULTIPLE = 128
"""The default length of a packed row is rounded up to a multiple of this."""
TOKENS_PER_MICROBATCH = {"cpu": 768, "gpu": 8192, "tpu": 8192}
"""Positions of a microbatch on each device, by platform, if the config does not set the number of rows. On a CPU the
activations of a small microbatch stay in the cache; an accelerator needs a large one to be busy."""
