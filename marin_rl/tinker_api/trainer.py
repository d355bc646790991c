# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The trainer behind the Tinker API: an open sum of gradients, Adam with settings of every step, and samplers.

`forward_backward` runs a compiled program on each microbatch, which adds its gradient to the sum. Every loss is the
same program. Microbatches have a few row lengths (128, 256, … and the context), so that the number of programs is
bounded whatever clients send; `Programs.compiled` counts them.
"""

import collections
import dataclasses
import functools
import itertools
import logging
import math
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32
from levanter.models.lm_model import LmConfig, LmHeadModel

from marin_rl.batching.packing import RowLayout, choose_layout, count_microbatches
from marin_rl.config.train_config import TrainerConfig
from marin_rl.learner.attention_kernel import AttentionKernel, attention_kernel
from marin_rl.learner.attention_layers import context_shards
from marin_rl.learner.base_weights import fingerprint
from marin_rl.learner.blocks import head_arrays, shards_of
from marin_rl.learner.config import LoraConfig
from marin_rl.learner.critic import assemble
from marin_rl.learner.logprobs import blockwise_logprobs, policy_activations
from marin_rl.learner.placement import place
from marin_rl.learner.policy_model import load_hf_policy, read_hf_architecture
from marin_rl.learner.policy_spec import PolicySpec, with_config
from marin_rl.learner.train_step import compiler_options
from marin_rl.models.lora import RANK, Adapter, merge_adapter
from marin_rl.runs.checkpoint import CheckpointConfig, Checkpoints
from marin_rl.runs.run_directory import CheckpointError
from marin_rl.sampling.config import SamplingConfig
from marin_rl.sampling.group_sampler import GroupSampler
from marin_rl.sampling.sampler import SampleRequest
from marin_rl.serving.engine import CALL_SECONDS
from marin_rl.serving.text import ReplyReader
from marin_rl.tinker_api.losses import TARGETS, LossSettings, check_datum, read_settings, token_terms
from marin_rl.tinker_api.records import (
    AdamParams,
    Datum,
    ForwardBackward,
    LossOutputs,
    ModelSpec,
    RequestError,
    Sample,
    SampleJob,
    SampleOutputs,
    SampleParams,
    SampleSource,
)
from marin_rl.tinker_api.token_batch import Piece, TokenBatch, pack_data, row_length
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.config import TokenizerConfig
from marin_rl.types import Generation, StopReason
from marin_rl.utils.devices.setup import platform_of, start_devices
from marin_rl.utils.devices.trainer_config import AbstractTrainerConfig
from marin_rl.utils.errors import UserError
from marin_rl.utils.levanter_line import max_positions, shard

logger = logging.getLogger(__name__)

_DEFAULT_CONTEXT = 4096
LORA_ALPHA = 32.0
"""The API has no alpha: an adapter's product is multiplied by `LORA_ALPHA / rank`, as in other servers."""
SHORTEST_ROW = 128
"""Positions of the shortest rows."""
TOKENS_PER_MICROBATCH = {"cpu": 1024, "gpu": 8192, "tpu": 8192}
"""Positions of a microbatch on each data-parallel device, by platform, unless one row has more."""
LOGPROB_BLOCK_SIZE = {"cpu": 256, "gpu": 1024, "tpu": 1024}
"""Positions on each device whose logits are in memory at once, by platform."""
_TARGETS = {
    "train_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "train_mlp": ("gate_proj", "up_proj", "down_proj"),
    "train_unembed": ("lm_head",),
}
"""Modules of an adapter by the option of the client."""


class TrainState(eqx.Module):
    """What a training client changes."""

    trained: LmHeadModel | Adapter
    """Weights, or adapter, in the type of parameters."""
    mean: Any
    """Adam's moving average of the gradient."""
    square: Any
    """Adam's moving average of its square."""
    steps: jax.Array
    """int32, number of steps that these averages contain."""
    gradient: Any
    """float32, sum of the gradients since the last step."""


class AdamArguments(NamedTuple):
    """`AdamParams` as arguments of a compiled program, so that no value compiles another."""

    learning_rate: np.float32
    beta1: np.float32
    beta2: np.float32
    eps: np.float32
    weight_decay: np.float32
    grad_clip_norm: np.float32


def new_state(trained: Any) -> TrainState:
    """Return the state before the first step."""

    def zeros(dtype: Any = None) -> Any:
        return jax.tree.map(lambda leaf: jnp.zeros_like(leaf, dtype), trained)

    return TrainState(trained, zeros(), zeros(), jnp.zeros((), jnp.int32), zeros(jnp.float32))


def adam_step(state: TrainState, params: AdamArguments) -> tuple[TrainState, dict[str, jax.Array]]:
    """Apply the sum of the gradients `g` to the weights `p`, and zero it.

    ```
    g ← g · min(1, clip / |g|)     if clip > 0
    m ← β1 m + (1 - β1) g,   v ← β2 v + (1 - β2) g²
    p ← p - lr · wd · p - lr · m / (1 - β1ᵗ) / (√(v / (1 - β2ᵗ)) + ε)
    ```

    This is AdamW of torch (Loshchilov & Hutter 2019). If `g` has NaN or infinity, nothing changes.
    """
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(state.gradient)))
    clip = jnp.where(params.grad_clip_norm > 0, params.grad_clip_norm, jnp.inf)
    factor = jnp.where(norm > clip, clip / norm, 1.0)
    steps = state.steps + 1
    first, second = (1 - beta ** steps.astype(jnp.float32) for beta in (params.beta1, params.beta2))
    finite = jnp.isfinite(norm)

    def update(weight: Array, mean: Array, square: Array, gradient: Array) -> tuple[Array, ...]:
        scaled = gradient * factor
        new_mean = params.beta1 * mean + (1 - params.beta1) * scaled
        new_square = params.beta2 * square + (1 - params.beta2) * jnp.square(scaled)
        change = new_mean / first / (jnp.sqrt(new_square / second) + params.eps) + params.weight_decay * weight
        new = (weight - params.learning_rate * change, new_mean, new_square)
        old = (weight, mean, square)
        return tuple(jnp.where(finite, a, b).astype(b.dtype) for a, b in zip(new, old, strict=True))

    trees = (state.trained, state.mean, state.square, state.gradient)
    leaves = [jax.tree.leaves(tree) for tree in trees]
    updated = zip(*(update(*of_leaf) for of_leaf in zip(*leaves, strict=True)), strict=True)
    trained, mean, square = (
        jax.tree.unflatten(jax.tree.structure(tree), list(new)) for tree, new in zip(trees, updated, strict=False)
    )
    gradient = jax.tree.map(lambda leaf: jnp.where(finite, 0.0, leaf), state.gradient)
    new_state = TrainState(trained, mean, square, jnp.where(finite, steps, state.steps), gradient)
    return new_state, {"grad_norm": norm}


def target_logprobs(
    model: LmHeadModel, batch: TokenBatch, trains: Bool[Array, "batch position target"], block_size: int
) -> Float32[Array, "batch position target"]:
    """Compute the log-probs of the targets at temperature 1, 0 off `batch.scored`; the head runs once for every target.

    Args:
        model: the model, in compute precision.
        batch: tokens and targets.
        trains: targets whose log-probs have a gradient.
        block_size: positions whose logits are in memory at once.
    """
    Batch, Pos, Target = batch.targets.axes
    activations, lm_head = head_arrays(policy_activations(model, batch), model.get_lm_head(), (Batch, Pos))
    flat = (Batch.size, Pos.size * Target.size)

    def score(activations: Array, lm_head: Array, mask: Array) -> Array:
        logprobs, _ = blockwise_logprobs(
            activations,
            lm_head,
            batch.targets.array.reshape(flat),
            mask.reshape(flat),
            temperature=1.0,
            block_size=block_size,
            shards=shards_of(Batch),
            position_shards=context_shards(),
        )
        return logprobs.reshape(batch.targets.array.shape)

    if Target.size > 1:
        activations = jnp.repeat(activations, Target.size, axis=1)
    constant = score(*jax.lax.stop_gradient((activations, lm_head)), batch.scored.array & ~trains)
    return score(activations, lm_head, trains) + constant


class Programs:
    """The compiled programs of a model: one for each row length, number of targets, and purpose."""

    def __init__(self, trainer: AbstractTrainerConfig, kernel: AttentionKernel, spec: PolicySpec) -> None:
        """Compile nothing yet.

        Args:
            trainer: mesh, precision and sharding.
            kernel: attention kernel.
            spec: shapes of base and trained weights.
        """
        self._trainer, self._kernel, self._spec = trainer, kernel, spec
        self._block_size = LOGPROB_BLOCK_SIZE[platform_of(trainer)]
        self.compiled: set[tuple[str | int, ...]] = set()
        """Purpose, weights, rows, row length, and targets of a position of each program that has run."""
        options = {"axis_resources": trainer.parameter_axis_mapping}
        compiled = functools.partial(hax.named_jit, compiler_options=compiler_options(trainer.device_mesh), **options)
        self._add = cast(Any, compiled)(self._add_gradient, donate_args=(True, False, False, False))
        self._score = cast(Any, compiled)(self._compute_loss)
        self._step = cast(Any, compiled)(adam_step, donate_args=(True, False))
        self._new = cast(Any, compiled)(new_state)
        self._merge = cast(Any, compiled)(self._merge_weights)

    def new_state(self, trained: Any) -> TrainState:
        """Return the state before the first step; see `new_state`."""
        with self._trainer.use_device_mesh():
            return self._new(trained)

    def add_gradient(
        self, state: TrainState, base: LmHeadModel | None, batch: TokenBatch, settings: LossSettings
    ) -> tuple[TrainState, jax.Array, jax.Array]:
        """Add the gradient of a microbatch to a state, which is donated; also return its log-probs and its loss."""
        self._count("training", state.trained, batch)
        with self._trainer.use_device_mesh():
            return self._add(state, base, self._place(batch), settings)

    def score(
        self, trained: Any, base: LmHeadModel | None, batch: TokenBatch, settings: LossSettings
    ) -> tuple[jax.Array, jax.Array]:
        """Return log-probs and loss of a microbatch."""
        self._count("scoring", trained, batch)
        with self._trainer.use_device_mesh():
            loss, logprobs = self._score(trained, base, self._place(batch), settings)
        return logprobs, loss

    def step(self, state: TrainState, params: AdamArguments) -> tuple[TrainState, dict[str, jax.Array]]:
        """Apply the sum of the gradients of a state, which is donated; see `adam_step`."""
        with self._trainer.use_device_mesh():
            return self._step(state, params)

    def merge(self, trained: Any, base: LmHeadModel | None) -> LmHeadModel:
        """Return the whole model in compute precision."""
        with self._trainer.use_device_mesh():
            return self._merge(trained, base)

    def _count(self, purpose: str, trained: Any, batch: TokenBatch) -> None:
        kind = "the base"
        if isinstance(trained, Adapter):
            kind = f"an adapter of rank {next(iter(trained.layers.values())).a.axis_size(RANK)}"
        elif trained is not None:
            kind = "all weights"
        key = purpose, kind, *(batch.targets.axis_size(name) for name in ("batch", "position", "target"))
        if key not in self.compiled:
            number = len(self.compiled) + 1
            logger.info("compiling program %d: %s %s, %d rows of %d positions with %d targets", number, *key)
            self.compiled.add(key)

    def _place(self, batch: TokenBatch) -> TokenBatch:
        return place(batch, self._trainer.device_mesh, self._trainer.compute_axis_mapping)

    def _merge_weights(self, trained: Any, base: LmHeadModel | None) -> LmHeadModel:
        cast_to_compute = self._trainer.mp.cast_to_compute
        whole = base if trained is None else merge_adapter(assemble(cast_to_compute(trained), base))
        return cast_to_compute(whole)

    def _add_gradient(
        self, state: TrainState, base: LmHeadModel | None, batch: TokenBatch, settings: LossSettings
    ) -> tuple[TrainState, jax.Array, jax.Array]:
        (loss, logprobs), gradient = eqx.filter_value_and_grad(self._compute_loss, has_aux=True)(
            state.trained, base, batch, settings
        )
        gradient = shard(gradient, self._trainer.parameter_axis_mapping)
        total = jax.tree.map(lambda old, new: old + new.astype(jnp.float32), state.gradient, gradient)
        return dataclasses.replace(state, gradient=total), logprobs, loss

    def _compute_loss(
        self, trained: Any, base: LmHeadModel | None, batch: TokenBatch, settings: LossSettings
    ) -> tuple[jax.Array, jax.Array]:
        """Return the loss of a microbatch, and the log-probs of its targets."""
        with hax.axis_mapping(self._trainer.compute_axis_mapping):
            # Parameters of an adapter have no attention kernel.
            trained, length = self._trainer.mp.cast_to_compute(trained), batch.input_ids.axis_size("position")
            whole = self._with_rows(trained if base is None else base, length)
            model = whole if trained is None or base is None else assemble(trained, whole)
            # The penalty of `dro` has a gradient also where the advantage is 0.
            trains = batch.scored.array & ((batch.factors.array != 0) | (settings.beta != 0))
            logprobs = target_logprobs(model, batch, trains, self._block_size)
            terms = token_terms(settings, logprobs, batch.factors.array, batch.old_logprobs.array)
            return jnp.sum(jnp.where(batch.scored.array, terms, 0.0)), logprobs

    def _with_rows(self, model: LmHeadModel, length: int) -> LmHeadModel:
        """Return a model with the attention kernel of rows of a length."""
        config = self._kernel.configure(cast(LmConfig, model.config), length)
        return with_config(model, config, self._trainer)


def open_trainer(model: str, *, max_context: int | None, max_seqs: int) -> "JaxTrainer":
    """Start the devices of this process and load the base.

    Args:
        model: folder in Hugging Face format.
        max_context: maximum number of tokens of a sequence; None for the positions of the model, up to 4,096.
        max_seqs: number of samples that are decoded together.

    Raises:
        DeviceError: if a device is missing.
        PolicyModelError: if the model cannot be loaded.
        UserError: if `max_context` exceeds the number of the model's positions.
    """
    positions = max_positions(read_hf_architecture(model))
    if max_context is not None and max_context > positions:
        raise UserError(f"max_context is {max_context}, but the model has {positions} positions; lower it")
    return JaxTrainer(
        model,
        TokenizerConfig(path=model).build(),
        start_devices(TrainerConfig(), rows_per_device=1, alone=True),
        max_context=max_context or min(positions, _DEFAULT_CONTEXT),
        max_seqs=max_seqs,
        call_seconds=CALL_SECONDS,
    )


class JaxTrainer:
    """Trains one model at a time, and samples from its versions and from the base; a `Trainer`."""

    def __init__(
        self,
        model: str,
        tokenizer: ChatTokenizer,
        trainer: AbstractTrainerConfig,
        *,
        max_context: int,
        max_seqs: int,
        call_seconds: float,
    ) -> None:
        """Load the base.

        Args:
            model: folder in Hugging Face format.
            tokenizer: its tokenizer.
            trainer: mesh, precision and sharding, as returned by `start_devices`.
            max_context: maximum number of tokens of a datum or of a sample with its prompt.
            max_seqs: number of samples that are decoded together.
            call_seconds: aimed duration of a call of the sampler.

        Raises:
            PolicyModelError: if the model cannot be loaded.
        """
        self._model, self._tokenizer, self._trainer = model, tokenizer, trainer
        self.max_context = max_context
        """Maximum number of tokens of a datum or of a sample with its prompt."""
        self._base = load_hf_policy(model, tokenizer, trainer, None, trainer.mp.compute_dtype)
        self._kernel = attention_kernel(self._base.config, platform_of(trainer))
        self._longest_row = self._kernel.fit(max_context)
        self.vocab_size = self._base.vocab_size
        """Number of tokens of the model."""
        self._spec: ModelSpec | None = None
        self._state: TrainState | None = None
        self._programs = self._make_programs(None)
        self._loaded: collections.OrderedDict[str, Any] = collections.OrderedDict()
        """Weights of samplers in memory, the last used last, by the id in their checkpoint."""
        self._sampler = GroupSampler(
            self._base,
            config=SamplingConfig(max_new_tokens=max_context - 1, max_seqs=max_seqs),
            stop_token_ids=tokenizer.stop_token_ids,
            max_context=max_context,
            trainer=trainer,
            call_seconds=call_seconds,
        )
        self._sampled: str | None = ""
        """Id of the weights in the sampler; None for the base, and empty at the start."""
        self._version = 0

    @functools.cached_property
    def base_fingerprint(self) -> str:
        """Fingerprint of the base."""
        return fingerprint(self._base, self._trainer)

    @property
    def num_programs(self) -> int:
        """Number of programs of `forward_backward` that have been compiled for the current model."""
        return len(self._programs.compiled)

    def _make_programs(self, spec: ModelSpec | None) -> Programs:
        return Programs(self._trainer, self._kernel, self._policy_spec(spec))

    def _policy_spec(self, spec: ModelSpec | None) -> PolicySpec:
        lora = None if spec is None or not spec.lora_rank else self._lora(spec)
        return PolicySpec(cast(LmConfig, self._base.config), self.vocab_size, self._trainer, lora=lora)

    def _lora(self, spec: ModelSpec) -> LoraConfig:
        options = {name: modules for name, modules in _TARGETS.items() if getattr(spec, name)}
        if getattr(self._base.config, "tie_word_embeddings", False):
            # The head is the embedding, and has no weights of its own.
            options.pop("train_unembed", None)
        targets = tuple(itertools.chain.from_iterable(options.values()))
        if not targets:
            raise RequestError(
                "lora_config trains nothing: train_attn and train_mlp are false, and train_unembed needs a model whose "
                "head is not its embedding; set one of them"
            )
        return LoraConfig(rank=spec.lora_rank, alpha=LORA_ALPHA, targets=targets)

    # Training.

    def create(self, spec: ModelSpec) -> None:
        """Begin training; see `Trainer.create`."""
        shapes = self._policy_spec(spec)
        self._state = None
        if spec.lora_rank:
            trained = shapes.new_adapter(jax.random.PRNGKey(spec.seed % 2**32))
        else:
            trained = load_hf_policy(self._model, self._tokenizer, self._trainer, None)
        self._spec, self._state = spec, self._programs.new_state(trained)

    def unload(self) -> None:
        """Drop the trained weights."""
        self._spec = self._state = None

    def forward_backward(self, request: ForwardBackward) -> LossOutputs:
        """Compute log-probs and loss, and add the gradient; see `Trainer.forward_backward`."""
        self._require_model()
        settings = read_settings(request)
        for index, datum in enumerate(request.data):
            check_datum(datum, index, request, self.vocab_size)
            if len(datum.tokens) > self.max_context:
                raise RequestError(
                    f"datum {index} has {len(datum.tokens)} tokens; the server takes at most {self.max_context} "
                    "(--max_context)"
                )
        scored: list[tuple[Piece, jax.Array, jax.Array]] = []
        for piece in self._pieces(request.data, request.loss_fn):
            state = cast(TrainState, self._state)
            base = self._base_of(state.trained)
            if request.forward_only:
                logprobs, loss = self._programs.score(state.trained, base, piece.batch, settings)
            else:
                # The state is donated, and the old one must not be used if the program fails.
                self._state = None
                self._state, logprobs, loss = self._programs.add_gradient(state, base, piece.batch, settings)
            scored.append((piece, logprobs, loss))
        of_data = self._unpack(request.data, [(piece, logprobs) for piece, logprobs, _ in scored])
        return LossOutputs(of_data, {"loss:sum": float(sum(float(loss) for *_, loss in scored))})

    def optim_step(self, params: AdamParams) -> dict[str, float]:
        """Apply the sum of the gradients; see `adam_step`.

        Raises:
            RequestError: if a setting is out of range, or the gradient is not finite; nothing changes.
        """
        state = self._require_model()
        bounds = {"learning_rate": (0, math.inf), "beta1": (0, 1), "beta2": (0, 1), "eps": (0, math.inf)}
        for name, value in dataclasses.asdict(params).items():
            low, high = bounds.get(name, (-math.inf, math.inf))
            if not (math.isfinite(value) and low <= value < high):
                raise RequestError(f"adam_params.{name} is {value}; it must be finite, at least {low}, below {high}")
        self._state = None
        arguments = AdamArguments(*map(np.float32, dataclasses.astuple(params)))
        self._state, metrics = self._programs.step(state, arguments)
        norm = float(metrics["grad_norm"])
        if not math.isfinite(norm):
            raise RequestError(
                f"the sum of the gradients has the norm {norm}, so that no step is possible; nothing was changed. Load "
                "a checkpoint, which drops the sum"
            )
        return {"grad_norm": norm}

    def _require_model(self) -> TrainState:
        if self._state is None:
            raise RequestError("no model is trained; call create_model first")
        return self._state

    def _base_of(self, trained: Any) -> LmHeadModel | None:
        """Return the base that trained weights need: None for a whole model."""
        return self._base if trained is None or isinstance(trained, Adapter) else None

    def _pieces(self, data: Sequence[Datum], loss_fn: str) -> list[Piece]:
        """Pack data into microbatches, those with equal numbers of targets together."""
        if not data:
            return []
        longest = max(len(datum.tokens) for datum in data)
        length = self._kernel.fit(row_length(longest, SHORTEST_ROW, self._longest_row))
        of_width: dict[int, list[int]] = {}
        for index, datum in enumerate(data):
            of_width.setdefault(datum.inputs[TARGETS][0].size, []).append(index)
        pieces, pad = [], self._tokenizer.pad_token_id
        for indices in of_width.values():
            own = [data[index] for index in indices]
            layout = RowLayout(length, self._rows(own, length), packed=True)
            pieces += pack_data(own, loss_fn, indices, layout, pad)
        return pieces

    def _rows(self, data: Sequence[Datum], length: int) -> int:
        """Return the rows of a microbatch: those that the data fill, rounded up to a power of two, within the limit."""
        shards = self._trainer.data_axis_size
        most = max(TOKENS_PER_MICROBATCH[platform_of(self._trainer)] // length, 1)
        _, slots = choose_layout([[len(datum.tokens)] for datum in data], RowLayout(length, shards, packed=True))
        return min(1 << (count_microbatches(slots) - 1).bit_length(), most) * shards

    @staticmethod
    def _unpack(data: Sequence[Datum], scored: Sequence[tuple[Piece, jax.Array]]) -> list[np.ndarray]:
        """Return the log-probs of the targets of each datum."""
        results = [np.zeros(0, np.float32)] * len(data)
        for piece, logprobs in scored:
            values = np.asarray(logprobs)
            for index, row, start in piece.places:
                targets = data[index].inputs[TARGETS]
                found = values[row, start : start + len(targets), : targets[0].size]
                results[index] = np.ascontiguousarray(found.reshape(targets.shape))
        return results

    # Folders.

    def save(self, folder: Path) -> None:
        """Write the state; see `Trainer.save`."""
        self._write(folder, self._require_model(), secrets.token_hex(16))

    def save_sampler(self, folder: Path) -> None:
        """Write the trained weights; see `Trainer.save_sampler`."""
        # A copy, because the next step donates them.
        trained = jax.tree.map(jnp.copy, self._require_model().trained)
        # The folder may be renamed, and another one may have its name later.
        id = secrets.token_hex(16)
        self._write(folder, _SamplerWeights(trained), id)
        self._keep(id, trained)

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Read a state; see `Trainer.load`."""
        self._require_model()
        spec = cast(ModelSpec, self._spec)
        checkpoint = self._open(folder)
        shape = self._policy_spec(spec).trained_policy
        try:
            if optimizer:
                state = eqx.filter_eval_shape(new_state, shape)
                loaded = checkpoint.restore(state, self._trainer)
            else:
                loaded = self._programs.new_state(checkpoint.restore(shape, self._trainer, "trained"))
        except CheckpointError as error:
            raise RequestError(f"{folder.name} cannot be loaded into this model: {error}") from error
        self._state = loaded

    def _write(self, folder: Path, tree: Any, id: str) -> None:
        checkpoints = Checkpoints(folder, CheckpointConfig())
        spec = dataclasses.asdict(cast(ModelSpec, self._spec))
        try:
            checkpoints.save(tree, 0, {"id": id, "spec": spec, "base": self.base_fingerprint})
        finally:
            checkpoints.close()

    def _open(self, folder: Path) -> Any:
        try:
            checkpoint = Checkpoints(folder, CheckpointConfig()).open(0)
        except CheckpointError as error:
            raise RequestError(str(error)) from error
        if checkpoint.progress["base"] != self.base_fingerprint:
            raise RequestError(f"{folder.name} was trained on another base model than {self._model}")
        return checkpoint

    def _keep(self, id: str, trained: Any) -> None:
        """Keep weights of a sampler in memory, the last few."""
        self._loaded[id] = trained
        self._loaded.move_to_end(id)
        while len(self._loaded) > SAMPLERS_IN_MEMORY:
            self._loaded.popitem(last=False)

    def _weights(self, folder: Path | None) -> tuple[str | None, Any]:
        """Return id and trained weights of a sampler; None and None for the base."""
        if folder is None:
            return None, None
        checkpoint = self._open(folder)
        id = checkpoint.progress["id"]
        if id not in self._loaded:
            spec = ModelSpec(**checkpoint.progress["spec"])
            self._keep(id, checkpoint.restore(self._policy_spec(spec).trained_policy, self._trainer, "trained"))
        self._loaded.move_to_end(id)
        return id, self._loaded[id]

    # Sampling.

    def sample(self, folder: Path | None, source: SampleSource) -> None:
        """Answer requests until none waits; see `Trainer.sample`."""
        id, trained = self._weights(folder)
        if self._sampled != id:
            self._version += 1
            self._sampler.update_weights(self._programs.merge(trained, self._base_of(trained)), self._version)
            self._sampled = id
        replies = _Replies(self._sampler, self._tokenizer, source)
        try:
            while True:
                arrived = [job for job in source.take() if self._accept(job, source)]
                scores = self._score_prompts(
                    trained, [job.params.prompt for job in arrived if job.params.prompt_logprobs]
                )
                for job in arrived:
                    replies.start(job, next(scores) if job.params.prompt_logprobs else None)
                if not replies.advance():
                    return
        finally:
            self._sampler.reset()

    def _accept(self, job: SampleJob, source: SampleSource) -> bool:
        """Check a request, and answer it if it is not valid."""
        try:
            self._check_sample(job.params)
        except RequestError as error:
            source.finish(job.key, error)
            return False
        return True

    def _check_sample(self, params: SampleParams) -> None:
        room = self.max_context - len(params.prompt)
        if not params.prompt:
            raise RequestError("the prompt is empty; it must have at least one token")
        if min(params.prompt) < 0 or max(params.prompt) >= self.vocab_size:
            raise RequestError(f"the prompt has a token outside the vocabulary of {self.vocab_size}")
        if room < 1:
            raise RequestError(
                f"the prompt has {len(params.prompt)} tokens, which leaves no room in the context of "
                f"{self.max_context} (--max_context)"
            )
        if params.max_tokens is not None and params.max_tokens < 1:
            raise RequestError(f"max_tokens is {params.max_tokens}; it must be at least 1")
        if params.num_samples < 1:
            raise RequestError(f"num_samples is {params.num_samples}; it must be at least 1")
        if not math.isfinite(params.temperature) or params.temperature < 0:
            raise RequestError(f"temperature is {params.temperature}; it must be finite and at least 0")
        if params.top_k != -1 or params.top_p != 1:
            raise RequestError(
                f"top_k is {params.top_k} and top_p {params.top_p}; the server samples from the whole distribution: "
                "set top_k=-1 and top_p=1"
            )
        if params.stop is not None and not params.stop:
            raise RequestError("stop is empty; the server always ends a sample at the tokenizer's end tokens")
        if params.topk_prompt_logprobs:
            raise RequestError("topk_prompt_logprobs is not supported; set it to 0")

    def _score_prompts(self, trained: Any, prompts: Sequence[tuple[int, ...]]) -> Any:
        """Yield the log-probs of the tokens of each prompt, NaN for the first."""
        data = []
        for prompt in prompts:
            tokens = np.array(prompt, np.int32)
            data.append(Datum(tokens, {TARGETS: np.append(tokens[1:], 0).astype(np.int64)}))
        settings = read_settings(ForwardBackward("", 0, (), "cross_entropy", {}, True))
        base = self._base_of(trained)
        pieces = self._pieces(data, "cross_entropy")
        scored = [(piece, self._programs.score(trained, base, piece.batch, settings)[0]) for piece in pieces]
        for logprobs in self._unpack(data, scored):
            yield np.append(np.float32(np.nan), logprobs[:-1])


SAMPLERS_IN_MEMORY = 2
"""Versions of the weights that are kept in memory for sampling, beside the trained ones."""


class _SamplerWeights(eqx.Module):
    """Weights of a sampler, with the same path as in `TrainState`."""

    trained: Any


class _Reply:
    """A sample in progress."""

    def __init__(self, key: str, reader: ReplyReader | None, conversation: str | None) -> None:
        self.key, self.reader, self.conversation = key, reader, conversation
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.seen = 0


class _Replies:
    """The samples of one version of the weights that are in progress."""

    def __init__(self, sampler: GroupSampler, tokenizer: ChatTokenizer, source: SampleSource) -> None:
        self._sampler, self._tokenizer, self._source = sampler, tokenizer, source
        self._running: dict[int, tuple[_Reply, int]] = {}
        """Reply, and its index among the samples of its request, by number in the sampler."""
        self._results: dict[str, tuple[list[Sample | None], np.ndarray | None]] = {}

    def start(self, job: SampleJob, prompt_logprobs: np.ndarray | None) -> None:
        """Start the samples of a request."""
        params = job.params
        ends = params.stop or ()
        texts = tuple(end for end in ends if isinstance(end, str))
        tokens = tuple(end for end in ends if not isinstance(end, str))
        self._results[job.key] = [None] * params.num_samples, prompt_logprobs
        for index in range(params.num_samples):
            conversation = f"{job.key}/{index}" if ends else None
            request = SampleRequest(
                params.prompt,
                (params.seed + index) % 2**63,
                2**31 - 1 if params.max_tokens is None else params.max_tokens,
                params.temperature,
                conversation,
            )
            reader = ReplyReader(lambda ids: self._tokenizer.decode_reply(ids, False), texts, tokens) if ends else None
            (number,) = self._sampler.start([request])
            self._running[number] = _Reply(job.key, reader, conversation), index

    def advance(self) -> bool:
        """Sample some tokens; return whether samples are in progress."""
        if not self._running:
            return False
        for number, generation in self._sampler.advance():
            reply, _ = self._running[number]
            self._end(number, self._rest(reply, generation))
        watched = {number: reply.seen for number, (reply, _) in self._running.items() if reply.reader is not None}
        for number, part in self._sampler.progress(watched).items() if watched else ():
            reply, _ = self._running[number]
            self._add(reply, part.token_ids, part.logprobs, None)
            if cast(ReplyReader, reply.reader).finish_reason is not None:
                self._end(number, Sample(tuple(reply.tokens), tuple(reply.logprobs), True))
        return True

    def _rest(self, reply: _Reply, generation: Generation) -> Sample:
        """Return the sample of a generation that has ended."""
        stopped = generation.stop_reason is StopReason.STOP
        if reply.reader is None:
            return Sample(tuple(generation.token_ids), tuple(generation.logprobs), stopped)
        rest = generation.token_ids[reply.seen :], generation.logprobs[reply.seen :]
        self._add(reply, *rest, generation.stop_reason)
        return Sample(tuple(reply.tokens), tuple(reply.logprobs), reply.reader.finish_reason == "stop")

    @staticmethod
    def _add(reply: _Reply, tokens: Sequence[int], logprobs: Sequence[float], end: StopReason | None) -> None:
        assert reply.reader is not None
        part = reply.reader.push(tokens, logprobs, end)
        reply.seen += len(tokens)
        reply.tokens += part.token_ids
        reply.logprobs += part.logprobs

    def _end(self, number: int, sample: Sample) -> None:
        reply, index = self._running.pop(number)
        if reply.conversation is not None:
            self._sampler.end_conversation(reply.conversation)
        samples, prompt_logprobs = self._results[reply.key]
        samples[index] = sample
        if all(samples):
            del self._results[reply.key]
            self._source.finish(reply.key, SampleOutputs(cast(list[Sample], samples), prompt_logprobs, None))
