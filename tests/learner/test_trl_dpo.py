# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Loss, metrics and gradient of DPO against TRL's trainer with torch, on an exported llama."""

import dataclasses

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from marin_rl.batching.packing import RowLayout
from marin_rl.batching.rl_example import pack_batch
from marin_rl.batching.rollout_batch import RolloutBatch, join_batches, make_batch
from marin_rl.learner.policy_model import save_hf_policy
from marin_rl.learner.preference_loss import PreferenceLoss
from marin_rl.learner.scoring import Scorer
from marin_rl.learner.train_step import Learner
from marin_rl.objectives.aggregation import SequenceMeanConfig
from marin_rl.objectives.preference import PreferenceLossConfig
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import byte_tokenizer

pytestmark = pytest.mark.medium

ROWS = [
    {"prompt": "1+1=", "chosen": "2", "rejected": "11"},
    {"prompt": "3*5=", "chosen": "15!", "rejected": "8"},
    {"prompt": "7-9=", "chosen": "-2", "rejected": "2, or so"},
]
LAYOUT = RowLayout(16, 8, packed=True)


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    return ChatTokenizer(byte_tokenizer())


@pytest.fixture(scope="module")
def exported(tiny, trainer, chat, tmp_path_factory):
    """Folders of a policy and of a reference."""
    folders = []
    for seed in (0, 1):
        folders.append(tmp_path_factory.mktemp("model") / str(seed))
        save_hf_policy(tiny.make_model(trainer, seed=seed), chat, folders[-1], trainer)
    return folders


class Theirs:
    """TRL's trainer of a loss."""

    def __init__(self, exported, folder, **settings):
        trl = pytest.importorskip("trl", reason="needs the extra test-torch")
        datasets = pytest.importorskip("datasets")
        transformers = pytest.importorskip("transformers")
        policy, reference = map(transformers.AutoModelForCausalLM.from_pretrained, exported)
        settings = {"report_to": [], "use_cpu": True, "bf16": False, "gradient_checkpointing": False, **settings}
        self.trainer = trl.DPOTrainer(
            policy,
            reference,
            trl.DPOConfig(str(folder), **settings),
            train_dataset=datasets.Dataset.from_list(ROWS),
            processing_class=transformers.AutoTokenizer.from_pretrained(exported[0]),
        )

    @property
    def rows(self):
        """Tokenized rows."""
        return list(self.trainer.train_dataset)

    def loss_and_gradient(self, rows):
        """Also return the metrics."""
        model = self.trainer.model
        model.train()
        model.zero_grad()
        loss = self.trainer._compute_loss(model, self.trainer.data_collator(rows), return_outputs=False)
        loss.backward()
        metrics = {name: values[-1] for name, values in self.trainer._metrics["train"].items()}
        return loss.item(), metrics, {name: weight.grad.numpy() for name, weight in model.named_parameters()}


def make_pair(row: dict, length_normalized: bool) -> RolloutBatch:
    sequences = [[*row["prompt_ids"], *row[side]] for side in ("chosen_ids", "rejected_ids")]
    prompt = len(row["prompt_ids"])
    signs = [
        [0.0] * prompt + [sign / (len(ids) - prompt if length_normalized else 1)] * (len(ids) - prompt)
        for sign, ids in zip((1.0, -1.0), sequences, strict=True)
    ]
    return make_batch(
        [str(row["prompt_ids"])],
        [[*map(len, sequences)]],
        input_ids=np.concatenate(sequences).astype(np.int32),
        turn_ids=np.where(np.concatenate(signs) == 0, -1, 0).astype(np.int32),
        advantages=np.concatenate(signs),
    )


def ours(tiny, trainer, chat, config: PreferenceLossConfig, rows, folder):
    """Return metrics and the gradient in Hugging Face format."""
    scorer = Scorer(trainer, LAYOUT, pad_token_id=chat.pad_token_id, temperature=1.0, block_size=8)
    batch = join_batches([make_pair(row, config.length_normalized) for row in rows])
    reference = scorer.score(tiny.make_model(trainer, seed=1), batch).logprobs
    batch = dataclasses.replace(batch, reference_logprobs=reference)
    learner = Learner(trainer, tiny.SgdConfig(), PreferenceLoss(config, block_size=8), num_updates=1)
    packed = pack_batch(batch, SequenceMeanConfig(), LAYOUT, pad_token_id=chat.pad_token_id)
    state, metrics = learner.update(tiny.fresh_state(learner), packed.microbatches)
    gradient = jax.tree.map(lambda before, after: before - after, tiny.make_model(trainer), state.model)
    save_hf_policy(gradient, chat, folder, trainer)
    return {name: float(value) for name, value in metrics.items()}, load_file(folder / "model.safetensors")


METRICS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)


def assert_same(found, loss, metrics, gradient):
    ours, our_gradient = found
    assert ours["loss/dpo"] == pytest.approx(loss, abs=1e-6)
    for name in METRICS:
        assert ours[name] == pytest.approx(metrics[name], abs=1e-4), name
    assert our_gradient.keys() == gradient.keys()
    for name, array in gradient.items():
        np.testing.assert_allclose(our_gradient[name], array, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("loss_type", "config"),
    [
        ("sigmoid", PreferenceLossConfig(beta=0.2)),
        ("sigmoid_norm", PreferenceLossConfig(beta=2.0, length_normalized=True)),
    ],
)
def test_update_matches_trl(tiny, trainer, chat, exported, tmp_path, loss_type, config):
    theirs = Theirs(exported, tmp_path, loss_type=loss_type, beta=config.beta)
    rows = theirs.rows
    assert_same(ours(tiny, trainer, chat, config, rows, tmp_path / "ours"), *theirs.loss_and_gradient(rows))


@pytest.mark.torch
def test_smoothed_update_matches_trl(tiny, trainer, chat, exported, tmp_path):
    """TRL smooths labels in `aot_unpaired` only, which is the loss of DPO for a batch of one pair."""
    theirs = Theirs(exported, tmp_path, loss_type="aot_unpaired", beta=0.2, label_smoothing=0.3)
    rows = theirs.rows
    each = [theirs.loss_and_gradient([row]) for row in rows]
    metrics = {name: np.mean([metrics[name] for _, metrics, _ in each]) for name in METRICS}
    gradient = {name: np.mean([gradient[name] for *_, gradient in each], axis=0) for name in each[0][2]}
    config = PreferenceLossConfig(beta=0.2, label_smoothing=0.3)
    found = ours(tiny, trainer, chat, config, rows, tmp_path / "ours")
    assert_same(found, np.mean([loss for loss, *_ in each]), metrics, gradient)
