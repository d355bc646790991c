# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The trainer behind the Tinker API: an open sum of gradients, Adam with settings of every step, and samplers.

`forward_backward` runs a compiled program on each microbatch, which adds its gradient to the sum.
"""

import collections
import dataclasses
import functools
import itertools
import logging
import math
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import equinox as eqx
import haliax as hax
import jax
import jmp
import numpy as np
import optax
from jaxtyping import Int64
from levanter.models.lm_model import LmConfig, LmHeadModel

from marin_rl.batching.packing import GroupRow
from marin_rl.batching.rows import Rows, find_prompts
from marin_rl.batching.target_example import PackedTargets, TargetExample, pack_targets
from marin_rl.learner.base_weights import fingerprint
from marin_rl.learner.config import LoraConfig
from marin_rl.learner.logprobs import LOGPROB_BLOCK_SIZE
from marin_rl.learner.policy_model import load_hf_policy, read_hf_architecture
from marin_rl.learner.policy_spec import PolicySpec
from marin_rl.learner.train_step import AccumulatedState, Frozen, Learner, Loss, StepwiseAdamW, zero_gradient
from marin_rl.models.lora import RANK, Adapter, merge_adapter, with_adapter
from marin_rl.models.mixture import mixture_shape
from marin_rl.runs.checkpoint import CheckpointConfig, Checkpoints
from marin_rl.runs.run_directory import CheckpointError
from marin_rl.sampling.config import SamplingConfig
from marin_rl.sampling.group_sampler import GroupSampler
from marin_rl.serving.options import CALL_SECONDS, choose_context
from marin_rl.serving.tinker.losses import TargetLoss, TopTokens, read_settings
from marin_rl.serving.tinker.records import (
    LOSSES,
    TARGETS,
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
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.config import TokenizerConfig
from marin_rl.utils.devices.setup import start_devices
from marin_rl.utils.devices.trainer_config import TrainerConfig
from marin_rl.utils.levanter_line import max_positions

logger = logging.getLogger(__name__)

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


MODEL = "state/model"
"""Path of the trained weights in a folder."""
FORMAT = 2
"""Version of the state's layout in a folder; 1 had the averages of an Adam of its own."""


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
        self._rows = Rows.of(cast(LmConfig, self._base.config), trainer)
        self._kernel = self._rows.kernel
        self._block_size = LOGPROB_BLOCK_SIZE[self._rows.platform]
        self.vocab_size = self._base.vocab_size
        """Number of tokens of the model."""
        self._spec: ModelSpec | None = None
        self._state: AccumulatedState | None = None
        self._learner = Learner(trainer, StepwiseAdamW(), None, num_updates=0)
        self._adapter_learner = Learner(trainer, StepwiseAdamW(), None, num_updates=0, frozen=Frozen(self._base))
        self._compiled: set[tuple[str | int | GroupRow, ...]] = set()
        """Purpose, weights, rows, row length, targets of a position, and group of each program that has run."""
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
        return len(self._compiled)

    def _policy_spec(self, spec: ModelSpec) -> PolicySpec:
        lora = self._lora(spec) if spec.lora_rank else None
        return PolicySpec(cast(LmConfig, self._base.config), self.vocab_size, self._trainer, lora=lora)

    def _lora(self, spec: ModelSpec) -> LoraConfig:
        if spec.train_mlp and mixture_shape(cast(LmConfig, self._base.config)) is not None:
            raise RequestError(
                "train_mlp is true, but the experts of a mixture cannot be adapted; set it to false, or train all "
                "weights with rank 0"
            )
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
        self._spec, self._state = spec, self._new_state(trained)

    def unload(self) -> None:
        """Drop the trained weights."""
        self._spec = self._state = None

    def forward_backward(self, request: ForwardBackward) -> LossOutputs:
        """Compute log-probs and loss, and add the gradient; see `Trainer.forward_backward`."""
        self._require_model()
        self._check(request.data)
        # Training needs the memory of its weights and cache, which further samples use again.
        self._sampler.reset()
        loss = TargetLoss(read_settings(request), self._kernel, self._block_size)
        results, losses = [np.zeros(0, np.float32)] * len(request.data), []
        for indices, packed in self._pack(request.data, request.loss_fn):
            logprobs = []
            for batch in packed.microbatches:
                state = cast(AccumulatedState, self._state)
                learner = self._learner_of(state.state.model)
                if request.forward_only:
                    self._count("scoring", state.state.model, batch)
                    value, report = learner.forward(state.state.model, batch, loss)
                else:
                    self._count("training", state.state.model, batch)
                    # Its sum is donated, so the old state must not be used if the program fails.
                    self._state = None
                    self._state, value, report = learner.forward_backward(state, batch, loss)
                logprobs.append(report[0])
                losses.append(value)
            for index, found in zip(indices, packed.unpack([*map(np.asarray, logprobs)]), strict=True):
                targets = request.data[index].inputs[TARGETS]
                results[index] = np.ascontiguousarray(found[:, : targets[0].size].reshape(targets.shape))
        return LossOutputs(results, {"loss:sum": float(sum(map(float, losses)))})

    def optim_step(self, params: AdamParams) -> dict[str, float]:
        """Apply the sum of the gradients; see `Learner.step`.

        Raises:
            RequestError: if a setting is out of range, or the new weights overflow: nothing changes; also if the sum
                is not finite, which drops it.
        """
        state, params = self._require_model(), params.in_float32()
        rate, beta1, beta2, *rest = map(float, params)
        self._state = None
        self._state, metrics = self._learner_of(state.state.model).step(state, rate, (beta1, beta2), *rest)
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

    def _require_model(self) -> AccumulatedState:
        if self._state is None:
            raise RequestError("no model is trained; call create_model first")
        return self._state

    def _new_state(self, trained: Any) -> AccumulatedState:
        return self._learner_of(trained).start(trained)

    def _learner_of(self, trained: Any) -> Learner:
        """Return the learner of whole models, or of adapters of the base."""
        return self._adapter_learner if isinstance(trained, Adapter) else self._learner

    def _check(self, data: Sequence[Datum]) -> None:
        """Check data, whose form `forward_backward_of` has checked, against the sizes of the model."""
        for index, datum in enumerate(data):
            if len(datum.tokens) > self.max_context:
                raise RequestError(
                    f"datum {index} has {len(datum.tokens)} tokens; the server takes at most {self.max_context} "
                    "(--max_context)"
                )
            for name, tokens in (("model_input", datum.tokens), (TARGETS, datum.inputs[TARGETS])):
                if tokens.max() >= self.vocab_size:
                    raise RequestError(
                        f"datum {index}: {name} has token {tokens.max()}; the model's vocabulary has {self.vocab_size} "
                        "tokens"
                    )

    def _pack(self, data: Sequence[Datum], loss_fn: str) -> Iterator[tuple[list[int], PackedTargets]]:
        """Put data into microbatches, those with equal numbers of targets together; yield their indices, too."""
        loss, of_width = LOSSES[loss_fn], dict[int, list[int]]()
        for index, datum in enumerate(data):
            of_width.setdefault(datum.inputs[TARGETS][0].size, []).append(index)
        names = {TARGETS: "targets", loss.factor: "advantages", "logprobs": "policy_logprobs"}
        for members in of_width.values():
            prompts = find_prompts([_without_loss(data[index], loss_fn) for index in members])
            lengths = [len(data[index].tokens) for index in members]
            for placed in self._rows.of_call(lengths, prompts, self.max_context):
                indices = [members[index] for index in placed.indices]
                values = {
                    name: [_matrix(data[index], given) for index in indices]
                    for given, name in names.items()
                    if any(given in data[index].inputs for index in indices)
                }
                tokens = [data[index].tokens for index in indices]
                yield indices, pack_targets(tokens, values, placed.layout, placed.slots, self._tokenizer.pad_token_id)

    def _count(self, purpose: str, trained: Any, batch: TargetExample) -> None:
        """Count the programs, and report one that is compiled."""
        kind = "all weights"
        if isinstance(trained, Adapter):
            kind = f"an adapter of rank {next(iter(trained.layers.values())).a.axis_size(RANK)}"
        elif trained is self._base:
            kind = "the base"
        sizes = (batch.targets.axis_size(name) for name in ("batch", "position", "target"))
        key = purpose, kind, *sizes, batch.group or "no shared prompts"
        if key not in self._compiled:
            number = len(self._compiled) + 1
            logger.info("compiling program %d: %s %s, %d rows of %d positions with %d targets, %s", number, *key)
            self._compiled.add(key)

    # Folders.

    def save(self, folder: Path) -> None:
        """Write the state; see `Trainer.save`."""
        state = self._require_model()
        with self._trainer.use_device_mesh():
            norm = float(_norm(state.gradient))
        if not math.isfinite(norm):
            raise RequestError(
                f"the sum of the gradients has the norm {norm}, and cannot be saved; call optim_step, which drops it, "
                "or load a checkpoint"
            )
        self._write(folder, state, secrets.token_hex(16))

    def save_sampler(self, folder: Path) -> None:
        """Write the trained weights; see `Trainer.save_sampler`."""
        state = self._require_model().state
        # The folder may be renamed, and another one may have its name later.
        id = secrets.token_hex(16)
        self._write(folder, AccumulatedState(dataclasses.replace(cast(Any, state), opt_state=None), None), id)
        self._keep(id, state.model)

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Read a state; see `Trainer.load`."""
        self._require_model()
        self._sampler.reset()
        spec = cast(ModelSpec, self._spec)
        checkpoint = self._open(folder)
        shape = self._policy_spec(spec).trained_policy
        try:
            if optimizer:
                learner = self._learner_of(shape)
                of_state = learner.state_shape(shape)
                loaded = checkpoint.restore(
                    AccumulatedState(of_state, eqx.filter_eval_shape(zero_gradient, of_state.model)), self._trainer
                )
            else:
                loaded = self._new_state(checkpoint.restore(shape, self._trainer, MODEL))
        except CheckpointError as error:
            raise RequestError(f"{folder.name} cannot be loaded into this model: {error}") from error
        self._state = loaded

    def _write(self, folder: Path, tree: Any, id: str) -> None:
        spec = dataclasses.asdict(cast(ModelSpec, self._spec))
        progress = {"id": id, "spec": spec, "base": self.base_fingerprint, "format": FORMAT}
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
        if checkpoint.progress.get("format") != FORMAT:
            raise RequestError(
                f"{folder.name} was saved by another version of marin_rl, in a form that this one does not read; use "
                "that version, or train it again"
            )
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
                trained = checkpoint.restore(shape, self._trainer, MODEL)
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
            self._sampler.update_weights(self._base if trained is None else self._merge(trained), self._version)
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

    def _merge(self, trained: Any) -> LmHeadModel:
        """Return the whole model of trained weights in compute precision."""
        mp = self._trainer.mp
        with self._trainer.use_device_mesh(), hax.axis_mapping(self._trainer.parameter_axis_mapping):
            if not isinstance(trained, Adapter):
                return mp.cast_to_compute(trained)
            return _merge(with_adapter(self._base, mp.cast_to_compute(trained)), mp)

    def _evaluate(self, trained: Any, purpose: str, prompts: Sequence[Sequence[int]], loss: Loss) -> list[Any]:
        """Return the arrays that a loss reports of each prompt, under trained weights or, for None, the base."""
        weights = self._base if trained is None else trained
        reported: list[Any] = [None] * len(prompts)
        for indices, packed in self._pack([_prompt_datum(prompt) for prompt in prompts], "cross_entropy"):
            found = []
            for batch in packed.microbatches:
                self._count(purpose, weights, batch)
                _, report = self._learner_of(weights).forward(weights, batch, loss)
                found.append(map(np.asarray, report))
            parts = [packed.unpack(arrays) for arrays in zip(*found, strict=True)]
            for place, index in enumerate(indices):
                reported[index] = [part[place] for part in parts]
        return reported

    def _score_prompts(self, trained: Any, prompts: Sequence[tuple[int, ...]]) -> Iterator[np.ndarray]:
        """Yield the log-probs of the tokens of each prompt, NaN for the first."""
        settings = read_settings(ForwardBackward("", 0, (), "cross_entropy", {}, True))
        loss = TargetLoss(settings, self._kernel, self._block_size)
        for (logprobs,) in self._evaluate(trained, "scoring", prompts, loss):
            yield np.append(np.float32(np.nan), logprobs[:-1, 0])

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
            top = TopTokens(count, self._kernel, self._block_size)
            prompts = [job.params.prompt for job in own]
            for job, values in zip(
                own, self._evaluate(trained, f"the {count} likeliest tokens of", prompts, top), strict=True
            ):
                ids, logprobs = (_after_first(each[:-1, : job.params.topk_prompt_logprobs]) for each in values)
                found[job.key] = ids, logprobs
        return found


# Compiled once, and not in every call.
_norm = jax.jit(optax.tree.norm)


@eqx.filter_jit
def _merge(model: LmHeadModel, mp: jmp.Policy) -> LmHeadModel:
    """Return a model with its adapter merged into it, in compute precision."""
    return mp.cast_to_compute(merge_adapter(model))


def _matrix(datum: Datum, name: str) -> np.ndarray:
    """Return an input as `[length, target]`; zeros for weights that are absent from a datum that is only scored."""
    found = datum.inputs.get(name)
    return (np.zeros_like(datum.inputs[TARGETS]) if found is None else found).reshape(len(datum.tokens), -1)


def _without_loss(datum: Datum, loss_fn: str) -> Int64[np.ndarray, "start values"]:
    """Return token and targets of each position before the first one with a term in the loss.

    So what data share adds nothing to the loss, and its log-probs are those of each of the data.
    """
    loss, length = LOSSES[loss_fn], len(datum.tokens)
    if "beta" in loss.settings:
        # A penalty, which positions without advantage have, too.
        length = 0
    elif loss.factor in datum.inputs:
        with_loss = datum.inputs[loss.factor].reshape(length, -1).any(axis=1)
        length = int(np.argmax(np.append(with_loss, True)))
    targets = datum.inputs[TARGETS].reshape(len(datum.tokens), -1)
    return np.column_stack([datum.tokens, targets])[:length].astype(np.int64)


def _prompt_datum(prompt: Sequence[int]) -> Datum:
    """Return a prompt as a datum whose targets are the next tokens."""
    tokens = np.array(prompt, np.int32)
    return Datum(tokens, {TARGETS: np.append(tokens[1:], 0).astype(np.int64)})


def _after_first(rows: np.ndarray) -> np.ndarray:
    """Return the predictions of all tokens after the first, with a row of zeros for that one."""
    return np.pad(rows, ((1, 0), (0, 0)))
