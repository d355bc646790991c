# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The attention kernel of training and scoring: which one a platform uses and why, and which rows it takes.

| platform | kernel (`model.attn_backend`) | row lengths |
|---|---|---|
| TPU | `splash`, jax's kernel | multiples of 128 |
| GPU | `pallas`, jax's kernel; with a cap or a window, which it lacks, XLA in blocks of queries | multiples of 64 |
| CPU; GPT-2 on GPU, too | `jax_flash`, levanter's blocks in plain JAX | up to a block, then multiples |
| CPU, with a cap of the logits | `vanilla`; the gradient of `jax_flash` lacks the derivative of the cap | all |

Levanter's own choice on GPU, Transformer Engine, materializes a `[position, position]` mask and ignores segment ids.
A model selects another with `attn_backend`, or `vanilla` with `use_flash_attention: false`. `attention_layers.py`
runs the kernels that are not levanter's, and rows that levanter's do not support; `flash_attention.py` has their code.
"""

import dataclasses
import enum
import itertools
from typing import Any, cast

from levanter.layers.attention import AttentionBackend
from levanter.models.gpt2 import Gpt2Config
from levanter.models.lm_model import LmConfig

from marin_rl.batching.packing import GroupRow
from marin_rl.models.attention_windows import windows_within
from marin_rl.models.model_settings import attention_problems

PLATFORMS = ("cpu", "gpu", "tpu")
"""Supported platforms."""
LANES = 128
"""Block and row lengths of the kernels are multiples of this number."""
FLASH_BLOCK = 1024
"""Positions in a block of `jax_flash` if the model does not set `flash_attention_block_size`."""
SHORTEST_FLASH_BLOCK = 512
"""Shortest block that `fit` chooses; with shorter blocks the loop overhead of `jax_flash` dominates."""
SPLASH_BLOCK = 512
"""Positions in a block of `splash` if the model does not set `flash_attention_block_size`."""
LARGEST_TILE = 64
"""Rows of `pallas` are multiples of this number of positions, which is that of a tile, or half of it."""


class GpuBackend(enum.Enum):
    """Values of `model.attn_backend` that levanter does not know, which selects `jax_flash` for them."""

    PALLAS = "pallas"
    """`flash_attention.pallas_attention`."""


@dataclasses.dataclass(frozen=True)
class AttentionKernel:
    """The attention kernel of training and scoring. Of all kernels, only `vanilla` has a `[position, position]` array.

    Raises:
        ValueError: if the kernel cannot work with the block size.
    """

    backend: AttentionBackend | GpuBackend
    """Levanter's kernel, or the one for GPUs."""
    block_size: int | None = None
    """The model's `flash_attention_block_size`, in positions; None if it does not set one."""
    context_shards: int = 1
    """Number of devices over which the positions of a row are split."""

    def __post_init__(self) -> None:
        if self.block_size is not None and self.block_size < 1:
            raise ValueError(f"model.flash_attention_block_size is {self.block_size}; it must be at least 1, or null")
        if self.backend is AttentionBackend.SPLASH and self.block_size is not None and self.block_size % LANES:
            raise ValueError(
                f"model.flash_attention_block_size is {self.block_size}, but splash attention takes multiples of "
                f"{LANES}; set {round_up(self.block_size, LANES)}, or null for the kernel's own"
            )

    def supports_shared_prompts(self, model: LmConfig | None, group: GroupRow | None = None) -> bool:
        """Return whether a model can be trained on rows of a prompt and several answers.

        `attention_layers.py` computes their attention. GPT-2 has an attention module of its own; `splash` reads
        only the segment ids of its mask. The windows of `splash` are distances in a row, and `pallas` has none. `group`
        is None for rows without windows.

        >>> splash = AttentionKernel(AttentionBackend.SPLASH)
        >>> [splash.supports_shared_prompts(model) for model in (None, Gpt2Config())]
        [True, False]
        """
        is_splash = self.backend is AttentionBackend.SPLASH
        if self.context_shards > 1 or (is_splash and isinstance(model, Gpt2Config)):
            return False
        lacks_windows = is_splash or self.backend is GpuBackend.PALLAS
        return not (lacks_windows and model is not None and group and windows_within(model, group.longest))

    def fit_group(self, prompt: int, answer: int) -> tuple[int, int] | None:
        """Return the shortest supported places of a prompt and of an answer in rows that share prompts.

        XLA has all scores of an answer in memory, so without a kernel a sequence may have at most 1,024 positions. The
        blocks of `splash` have at least half the largest size. Both have at least the given positions. None if they are
        too many.

        >>> kernels = [AttentionKernel(AttentionBackend(name)) for name in ("jax_flash", "splash")]
        >>> [kernel.fit_group(500, 512) for kernel in [*kernels, AttentionKernel(GpuBackend.PALLAS)]]
        [(500, 512), (512, 512), (512, 512)]
        """
        match self.backend:
            case AttentionBackend.SPLASH:
                most = self.block_size or SPLASH_BLOCK

                def fits(length: int) -> bool:
                    return splash_block(length, most) >= min(length, most // 2)

                answer = next(size for size in itertools.count(round_up(answer, LANES), LANES) if fits(size))
                prompts = itertools.count(round_up(prompt, LANES), LANES)
                return next(size for size in prompts if fits(size) and fits(size + answer)), answer
            case GpuBackend.PALLAS:
                return round_up(prompt, LARGEST_TILE), round_up(answer, LARGEST_TILE)
            case _:
                return (prompt, answer) if prompt + answer <= FLASH_BLOCK else None

    def attention_pairs(self, row_length: int, group: GroupRow | None = None) -> float:
        """Return the pairs of a query and a key in a row for which products are computed, on average.

        `splash` and `pallas` skip blocks of keys after all queries of a block. `pallas` also has the queries of the
        prompt for each answer, with zeros.

        >>> group = GroupRow(prompt_length=512, answers=8, answer_length=512)
        >>> kernels = [AttentionKernel(AttentionBackend(name)) for name in ("jax_flash", "splash")]
        >>> [kernel.attention_pairs(4608, group) / 2**17 for kernel in [*kernels, AttentionKernel(GpuBackend.PALLAS)]]
        [34.0, 25.0, 33.0]
        """
        if group is None:
            skips = self.backend in (AttentionBackend.SPLASH, GpuBackend.PALLAS)
            return row_length**2 * (0.5 if skips else 1.0)
        prompt, answers, answer = group
        match self.backend:
            case AttentionBackend.SPLASH:
                return group.attention_pairs
            case GpuBackend.PALLAS:
                return (prompt**2 + answers * (prompt + answer) ** 2) / 2
            case _:
                return float(prompt**2 + answers * answer * (prompt + answer))

    def row_cost(self, row_length: int, hidden: int, group: GroupRow | None = None) -> float:
        """Return the cost of a row of R positions and P computed pairs of a query and a key: `R + P / (6 · hidden)`.

        The second term is attention, relative to the flops of the linear layers of a transformer. `hidden` is the
        hidden size of the model.

        >>> AttentionKernel(AttentionBackend.JAX_FLASH).row_cost(600, hidden=100)
        1200.0
        """
        return row_length + self.attention_pairs(row_length, group) / (6 * hidden)

    def supports_length(self, row_length: int) -> bool:
        """Return whether the kernel supports rows of this many positions, in blocks of its size.

        >>> flash, splash = AttentionKernel(AttentionBackend.JAX_FLASH), AttentionKernel(AttentionBackend.SPLASH)
        >>> [flash.supports_length(length) for length in (1000, 1100, 1152)]
        [True, False, True]
        >>> [splash.supports_length(length) for length in (100, 384, 640, 1536)]
        [False, True, False, True]
        """
        if self.context_shards > 1:
            is_splash = self.backend is AttentionBackend.SPLASH
            own, rest = divmod(row_length, self.context_shards)
            one_device = dataclasses.replace(self, context_shards=1)
            return rest == 0 and (not is_splash or all(map(one_device.supports_length, (own, row_length))))
        match self.backend:
            case AttentionBackend.VANILLA:
                return True
            case AttentionBackend.SPLASH:
                block = self.block_size or SPLASH_BLOCK
                return row_length % LANES == 0 and (row_length <= block or row_length % block == 0)
            case GpuBackend.PALLAS:
                return row_length % LARGEST_TILE == 0
            case _:
                return row_length <= (self.block_size or FLASH_BLOCK) or row_length % (self.block_size or LANES) == 0

    def block(self, row_length: int) -> int | None:
        """Return the model's `flash_attention_block_size` for rows of this many positions.

        The block size changes results only by rounding.

        Returns:
            The configured size. Without one: for `jax_flash` rows above 1,024 positions, the largest multiple of 128 up
            to 1,024 that divides them; otherwise None, the kernel's default.

        >>> [AttentionKernel(AttentionBackend.JAX_FLASH).block(length) for length in (1024, 1536, 2560)]
        [None, 768, 640]
        """
        chosen = self.backend is AttentionBackend.JAX_FLASH and row_length > FLASH_BLOCK
        if self.block_size is not None or not chosen:
            return self.block_size
        return next((size for size in range(FLASH_BLOCK, 0, -LANES) if row_length % size == 0), None)

    def fit(self, length: int) -> int:
        """Return the shortest supported row length of at least `length` positions with an efficient block size.

        >>> [AttentionKernel(AttentionBackend.JAX_FLASH).fit(length) for length in (200, 1100, 1536, 2560)]
        [200, 1280, 1536, 2560]
        >>> [AttentionKernel(AttentionBackend.SPLASH).fit(length) for length in (200, 1100, 1536, 2560)]
        [256, 1536, 1536, 2560]
        """
        rows = filter(self.supports_length, itertools.count(length))
        if self.block_size is not None:
            return next(rows)
        return next(row for row in rows if (self.block(row) or FLASH_BLOCK) >= SHORTEST_FLASH_BLOCK)

    def configure(self, model: LmConfig, row_length: int) -> LmConfig:
        """Return the model configuration with the settings that select this kernel for rows of this many positions."""
        changes: dict[str, object] = {}
        if (block := self.block(row_length)) != self.block_size:
            changes["flash_attention_block_size"] = block
        if hasattr(model, "attn_backend"):
            # Levanter would choose by this machine's devices, and silently use another kernel if that one fails.
            changes["attn_backend"] = self.backend
        if self.backend is AttentionBackend.VANILLA and getattr(model, "use_flash_attention", None) is not None:
            # Most architectures ignore this field; the others reject `true` together with `vanilla`.
            changes["use_flash_attention"] = None
        return dataclasses.replace(cast(Any, model), **changes) if changes else model


def attention_kernel(model: LmConfig | None, platform: str, context_shards: int = 1) -> AttentionKernel:
    """Select the kernel that trains a model, by the table above.

    Args:
        model: the architecture; None if it has no attention settings.
        platform: `cpu`, `gpu` or `tpu`.
        context_shards: number of devices over which the positions of a row are split.

    Raises:
        ValueError: if the model sets `attn_backend: nvte`, or the kernel cannot work with its
            `flash_attention_block_size`, `use_flash_attention` or `attn_logit_softcapping`.

    >>> attention_kernel(None, "tpu").backend.value
    'splash'
    """
    for problem in attention_problems(model):
        raise ValueError(problem)
    backend = cast(AttentionBackend | GpuBackend | None, getattr(model, "attn_backend", None))
    if backend in (None, AttentionBackend.DEFAULT):
        backend = _default_backend(model, platform)
    return AttentionKernel(backend, getattr(model, "flash_attention_block_size", None), context_shards)


def _default_backend(model: LmConfig | None, platform: str) -> AttentionBackend | GpuBackend:
    if getattr(model, "use_flash_attention", None) is False:
        return AttentionBackend.VANILLA
    if platform == "tpu":
        return AttentionBackend.SPLASH
    # GPT-2 has an attention module of its own.
    if platform == "gpu" and not isinstance(model, Gpt2Config):
        return GpuBackend.PALLAS
    is_capped = getattr(model, "attn_logit_softcapping", None) is not None
    return AttentionBackend.VANILLA if is_capped else AttentionBackend.JAX_FLASH


def splash_block(length: int, most: int) -> int:
    """Return the largest block of `splash`, a multiple of 128 up to `most`, that divides a length.

    >>> [splash_block(length, 512) for length in (384, 640, 768, 1024)]
    [384, 128, 384, 512]
    """
    return next(size for size in range(most, 0, -LANES) if length % size == 0)


def round_up(length: int, multiple: int) -> int:
    """Round `length` up to a multiple of `multiple`."""
    return -(-length // multiple) * multiple
