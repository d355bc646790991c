# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The sizes from which `rows.py` chooses the shapes of a run's rows; without levanter, for configs."""

from typing import Any, NamedTuple

ROW_MULTIPLE = 128
"""The default length of a packed row is rounded up to a multiple of this."""
TOKENS_PER_MICROBATCH = {"cpu": 768, "gpu": 8192, "tpu": 8192}
"""Positions of a microbatch on each device, by platform, if the config does not set the number of rows. On a CPU the
activations of a small microbatch stay in the cache; an accelerator needs a large one to be busy."""


class RowSizes(NamedTuple):
    """Sizes of the sequences of a step, and settings of their rows."""

    section: str
    """Name of the section of the config, for messages."""
    max_length: int
    """Maximum tokens of a sequence."""
    sequences: int
    """Number of sequences that a step trains on."""
    packing: bool | None = True
    """Whether a row holds several sequences; None: chosen for each batch."""
    row_length: int | None = None
    """Positions of a row; None: from `max_length`."""
    sequences_per_item: int = 1
    """Number of sequences of an item of the batch that must be in one microbatch."""

    def positions(self, kernel: Any) -> int:
        """Positions of a batch row that an `AttentionKernel` processes.

        Raises:
            ValueError: if the kernel does not support the configured `row_length`.

        >>> from levanter.layers.attention import AttentionBackend
        >>> from marin_rl.batching.attention_kernel import AttentionKernel
        >>> flash, splash = AttentionKernel(AttentionBackend.JAX_FLASH), AttentionKernel(AttentionBackend.SPLASH)
        >>> [RowSizes("rollouts", 200, 512, packing).positions(flash) for packing in (True, False)]
        [256, 200]
        >>> [RowSizes("rollouts", 1100, 512).positions(kernel) for kernel in (flash, splash)]
        [1280, 1536]
        """
        if self.row_length is None:
            return kernel.fit(self._shortest_row)
        if not kernel.supports_length(self.row_length):
            raise ValueError(
                f"{self.section}.row_length is {self.row_length}, but {kernel.backend.value} attention "
                "(model.attn_backend) does not support rows of that length; set "
                f"{self.section}.row_length: {kernel.fit(self.row_length)}, or null"
            )
        return self.row_length

    def rows_per_device(self, platform: str, devices: int = 1) -> int:
        """Return the default rows per microbatch on each device: about `TOKENS_PER_MICROBATCH` tokens.

        They are at most those of a step, and divide a step of full rows into microbatches of about equal size.
        `platform` is `cpu`, `gpu` or `tpu`, and `devices` the number of data-parallel devices.

        >>> [RowSizes("rollouts", 96, 512, packing).rows_per_device("cpu") for packing in (True, False)]
        [6, 8]
        >>> RowSizes("rollouts", 96, 128, packing=False).rows_per_device("gpu")
        64
        """
        most = max(TOKENS_PER_MICROBATCH[platform] // self._shortest_row, -(-self.sequences_per_item // devices))
        rows = -(-self.sequences // devices)
        return -(-rows // -(-rows // most))

    @property
    def _shortest_row(self) -> int:
        if self.row_length is not None:
            return self.row_length
        return self.max_length if self.packing is False else -(-self.max_length // ROW_MULTIPLE) * ROW_MULTIPLE
