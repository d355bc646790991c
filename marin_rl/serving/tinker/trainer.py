# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The trainer behind the Tinker API: an open sum of gradients, Adam with settings of every step, and samplers.

`forward_backward` runs a compiled program on each microbatch, which adds its gradient to the sum.
"""

import collections
import dataclasses
import functools
import itertools
import math
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import equinox as eqx
import jax
import numpy as np
from levanter.models.lm_model import LmConfig, LmHeadModel

from marin_rl.batching.rows import TOKENS_PER_MICROBATCH
from marin_rl.learner.attention_kernel import attention_kernel
from marin_rl.learner.base_weights import fingerprint
from marin_rl.learner.config import LoraConfig
from marin_rl.learner.policy_model import load_hf_policy, read_hf_architecture
from marin_rl.learner.policy_spec import PolicySpec
from marin_rl.models.lora import Adapter
from marin_rl.runs.checkpoint import CheckpointConfig, Checkpoints
from marin_rl.runs.run_directory import CheckpointError
from marin_rl.sampling.config import SamplingConfig
from marin_rl.sampling.group_sampler import GroupSampler
from marin_rl.serving.options import CALL_SECONDS, choose_context
from marin_rl.serving.tinker.adam import TrainState, new_state
from marin_rl.serving.tinker.losses import TARGETS, check_datum, read_settings
from marin_rl.serving.tinker.programs import Programs
from marin_rl.serving.tinker.records import (
    AdamParams,
    Datum,
    ForwardBackward,
    LossOutputs,
    ModelSpec,
    RequestError,
    SampleJob,
    SampleSource,
    TopK,
)
from marin_rl.serving.tinker.replies import Replies, check_sample
from marin_rl.serving.tinker.rows import Rows
from marin_rl.serving.tinker.token_batch import Piece, pack_data
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.config import TokenizerConfig
from marin_rl.utils.devices.setup import platform_of, start_devices
from marin_rl.utils.devices.trainer_config import TrainerConfig
from marin_rl.utils.levanter_line import max_positions

LORA_ALPHA = 32.0
"""The API has no alpha: an adapter's product is multiplied by `LORA_ALPHA / rank`, as in other servers."""
_TARGETS = {
    "train_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "train_mlp": ("gate_proj", "up_proj", "down_proj"),
    "train_unembed": ("lm_head",),
}
"""Modules of an adapter by the option of the client."""
SAMPLERS_IN_MEMORY = 2
"""Versions of the weights that are kept in memory for sampling, beside the trained ones."""


class _SamplerWeights(eqx.Module):
    """Weights of a sampler, with the same path as in `TrainState`."""

    trained: Any


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
    context = choose_context(max_context, max_positions(read_hf_architecture(model)))
    return JaxTrainer(
        model,
        TokenizerConfig(path=model).build(),
        start_devices(TrainerConfig(), rows_per_device=1, alone=True),
        max_context=context,
        max_seqs=max_seqs,
        call_seconds=CALL_SECONDS,
    )


class JaxTrainer:
    """Trains one model at a time, and samples from its versions and from the base; a `Trainer`."""

    def __init__(
        self,
        model: str,
        tokenizer: ChatTokenizer,
        trainer: TrainerConfig,
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
        self._rows = Rows(
            self._kernel,
            cast(LmConfig, self._base.config),
            longest=max_context,
            tokens=TOKENS_PER_MICROBATCH[platform_of(trainer)],
            shards=trainer.data_axis_size,
        )
        self.vocab_size = self._base.vocab_size
        """Number of tokens of the model."""
        self._spec: ModelSpec | None = None
        self._state: TrainState | None = None
        self._programs = Programs(trainer, self._kernel)
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
        self._sampled: str | None = None
        """Id of the weights in the sampler; None for the base."""
        self._version = 0

    @functools.cached_property
    def base_fingerprint(self) -> str:
        """Fingerprint of the base."""
        return fingerprint(self._base, self._trainer)

    @property
    def num_programs(self) -> int:
        """Number of programs of `forward_backward` and of the log-probs of prompts that have been compiled."""
        return len(self._programs.compiled)

    def _policy_spec(self, spec: ModelSpec) -> PolicySpec:
        lora = self._lora(spec) if spec.lora_rank else None
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
        self._sampler.reset()
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
        # Training needs the memory of its weights and cache, which further samples use again.
        self._sampler.reset()
        scored: list[tuple[Piece, jax.Array, jax.Array]] = []
        for piece in self._pieces(request.data, request.loss_fn):
            state = cast(TrainState, self._state)
            base = self._base_of(state.trained)
            if request.forward_only:
                logprobs, loss = self._programs.score(state.trained, base, piece.batch, settings)
            else:
                # Its sum is donated, so the old state must not be used if the program fails.
                self._state = None
                self._state, logprobs, loss = self._programs.add_gradient(state, base, piece.batch, settings)
            scored.append((piece, logprobs, loss))
        of_data = self._unpack(request.data, [(piece, logprobs) for piece, logprobs, _ in scored])
        return LossOutputs(of_data, {"loss:sum": float(sum(float(loss) for *_, loss in scored))})

    def optim_step(self, params: AdamParams) -> dict[str, float]:
        """Apply the sum of the gradients; see `adam_step`.

        Raises:
            RequestError: if a setting is out of range, or the new weights overflow: nothing changes; also if the sum
                is not finite, which drops it.
        """
        state, params = self._require_model(), params.in_float32()
        self._state = None
        self._state, metrics = self._programs.step(state, params)
        norm = float(metrics["grad_norm"])
        if not math.isfinite(norm):
            raise RequestError(
                f"the sum of the gradients has the norm {norm}, so that no step is possible; the sum was dropped, and "
                "the weights are as before. Check the weights, advantages and logprobs of the last data"
            )
        if not bool(metrics["fits"]):
            given = ", ".join(f"{name} {value:g}" for name, value in params._asdict().items())
            raise RequestError(
                f"a step with {given} makes weights that are not finite; nothing was changed. Use a smaller "
                "learning_rate or weight_decay, or a larger eps"
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
        """Put data into microbatches, those with equal numbers of targets together."""
        of_width: dict[int, list[int]] = {}
        for index, datum in enumerate(data):
            of_width.setdefault(datum.inputs[TARGETS][0].size, []).append(index)
        pieces = []
        for indices in of_width.values():
            for placed in self._rows.place(data, indices, loss_fn):
                pieces += pack_data(data, loss_fn, placed, self._tokenizer.pad_token_id)
        return pieces

    @staticmethod
    def _unpack(data: Sequence[Datum], scored: Sequence[tuple[Piece, jax.Array]]) -> list[np.ndarray]:
        """Return the log-probs of the targets of each datum."""
        results = [np.zeros(0, np.float32)] * len(data)
        for piece, logprobs in scored:
            values = np.asarray(logprobs)
            for index, row, at in piece.places:
                targets = data[index].inputs[TARGETS]
                found = values[row, at, : targets[0].size]
                results[index] = np.ascontiguousarray(found.reshape(targets.shape))
        return results

    # Folders.

    def save(self, folder: Path) -> None:
        """Write the state; see `Trainer.save`."""
        state = self._require_model()
        if not math.isfinite(norm := self._programs.gradient_norm(state)):
            raise RequestError(
                f"the sum of the gradients has the norm {norm}, and cannot be saved; call optim_step, which drops it, "
                "or load a checkpoint"
            )
        self._write(folder, state, secrets.token_hex(16))

    def save_sampler(self, folder: Path) -> None:
        """Write the trained weights; see `Trainer.save_sampler`."""
        trained = self._require_model().trained
        # The folder may be renamed, and another one may have its name later.
        id = secrets.token_hex(16)
        self._write(folder, _SamplerWeights(trained), id)
        self._keep(id, trained)

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Read a state; see `Trainer.load`."""
        self._require_model()
        self._sampler.reset()
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
        spec = dataclasses.asdict(cast(ModelSpec, self._spec))
        progress = {"id": id, "spec": spec, "base": self.base_fingerprint}
        try:
            Checkpoints(folder, CheckpointConfig()).save_now(tree, 0, progress)
        except CheckpointError as error:
            # Such as a full disk: nothing has changed, and training can go on.
            if isinstance(cause := error.__cause__, OSError) and cause.errno is not None:
                raise OSError(cause.errno, cause.strerror, str(folder)) from error
            raise OSError(str(error)) from error

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
            shape = self._policy_spec(ModelSpec(**checkpoint.progress["spec"])).trained_policy
            try:
                trained = checkpoint.restore(shape, self._trainer, "trained")
            except CheckpointError as error:
                raise RequestError(f"the weights {folder.name!r} cannot be read: {error}") from error
            self._keep(id, trained)
        self._loaded.move_to_end(id)
        return id, self._loaded[id]

    # Sampling.

    def sample(self, folder: Path | None, source: SampleSource) -> None:
        """Answer requests until none waits; see `Trainer.sample`."""
        id, trained = self._weights(folder)
        if self._sampled != id:
            self._version += 1
            model = self._base if trained is None else self._programs.merge(trained, self._base_of(trained))
            self._sampler.update_weights(model, self._version)
            self._sampled = id
        replies = Replies(self._sampler, self._tokenizer, source, self.max_context)
        try:
            while True:
                arrived = [job for job in source.take() if self._accept(job, source)]
                scores = self._score_prompts(
                    trained, [job.params.prompt for job in arrived if job.params.prompt_logprobs]
                )
                tops = self._top_of_prompts(trained, arrived)
                for job in arrived:
                    replies.start(job, next(scores) if job.params.prompt_logprobs else None, tops.get(job.key))
                if not replies.advance():
                    return
        except BaseException:
            self._sampler.reset()
            raise

    def _accept(self, job: SampleJob, source: SampleSource) -> bool:
        """Check a request, and answer it if it is not valid."""
        try:
            check_sample(job.params, self.max_context, self.vocab_size)
        except RequestError as error:
            source.finish(job.key, error)
            return False
        return True

    def _score_prompts(self, trained: Any, prompts: Sequence[tuple[int, ...]]) -> Any:
        """Yield the log-probs of the tokens of each prompt, NaN for the first."""
        data = [_prompt_datum(prompt) for prompt in prompts]
        settings = read_settings(ForwardBackward("", 0, (), "cross_entropy", {}, True))
        base = self._base_of(trained)
        pieces = self._pieces(data, "cross_entropy")
        scored = [(piece, self._programs.score(trained, base, piece.batch, settings)[0]) for piece in pieces]
        for logprobs in self._unpack(data, scored):
            yield np.append(np.float32(np.nan), logprobs[:-1])

    def _top_of_prompts(self, trained: Any, jobs: Sequence[SampleJob]) -> dict[str, TopK]:
        """Return the likeliest tokens at every position of the prompts of requests that ask for them, by their keys."""
        of_count: dict[int, list[SampleJob]] = {}
        for job in jobs:
            if wanted := job.params.topk_prompt_logprobs:
                # Few programs, whatever clients ask for.
                count = min(1 << (wanted - 1).bit_length(), self.vocab_size)
                of_count.setdefault(count, []).append(job)
        found: dict[str, TopK] = {}
        for count, own in of_count.items():
            for piece in self._pieces([_prompt_datum(job.params.prompt) for job in own], "cross_entropy"):
                top = self._programs.top(trained, self._base_of(trained), piece.batch, count)
                ids, logprobs = map(np.asarray, top)
                for index, row, at in piece.places:
                    where = row, at[:-1], slice(own[index].params.topk_prompt_logprobs)
                    found[own[index].key] = _after_first(ids[where]), _after_first(logprobs[where])
        return found


def _prompt_datum(prompt: Sequence[int]) -> Datum:
    """Return a prompt as a datum whose targets are the next tokens."""
    tokens = np.array(prompt, np.int32)
    return Datum(tokens, {TARGETS: np.append(tokens[1:], 0).astype(np.int64)})


def _after_first(rows: np.ndarray) -> np.ndarray:
    """Return the predictions of all tokens after the first, with a row of zeros for that one."""
    return np.pad(rows, ((1, 0), (0, 0)))
