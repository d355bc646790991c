# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The teacher in `reference.path`, checked without its weights."""

import dataclasses

import jmp

from marin_rl.config.reference_config import InitialReferenceConfig
from marin_rl.learner.policy_model import read_hf_architecture
from marin_rl.learner.policy_spec import PolicySpec
from marin_rl.learner.starting_weights import hf_folder, is_hub_name, tokenizer_of
from marin_rl.models.hf_config import PolicyModelError, read_hf_config
from marin_rl.parts.rl import RunParts
from marin_rl.tokenization.load import BYTES, load_tokenizer, other_tokens
from marin_rl.utils.hub import check_source
from marin_rl.utils.levanter_line import max_positions

PATH = "reference.path"


def find_teacher(parts: RunParts, path: str) -> tuple[RunParts, str]:
    """Check a teacher without its weights.

    `path` is a run directory, or a folder or hub name in Hugging Face format.

    Returns:
        Parts of the run with the architecture of the teacher and its weights in compute precision, and the folder or
        hub name of the weights.

    Raises:
        PolicyModelError: if it cannot be loaded, has fewer positions than rollouts have tokens, or another tokenizer
            than the policy.
        ValueError: if it is the directory of an unfinished run.
    """
    config, folder = parts.config, hf_folder(path, PATH)
    if is_hub_name(folder, PATH):
        check_source(folder, PATH)
    check_tokenizer(config.tokenizer.path, path)
    architecture = read_hf_architecture(folder)
    if (positions := max_positions(architecture)) < config.rollouts.max_length:
        raise PolicyModelError(
            f"{PATH} is {path!r}, a model of {positions} positions, but rollouts have up to rollouts.max_length = "
            f"{config.rollouts.max_length} tokens; lower it, or use another teacher"
        )
    precision, kind = parts.trainer.mp, parts.trainer.mp.compute_dtype
    trainer = dataclasses.replace(parts.trainer, mp=jmp.Policy(kind, kind, precision.output_dtype))
    alone = {"lora": None, "routing_replay": None, "reference": InitialReferenceConfig()}
    own = dataclasses.replace(config, model=architecture, **alone)
    return dataclasses.replace(parts, config=own, trainer=trainer), folder


def teacher_spec(parts: RunParts, path: str) -> PolicySpec:
    """Return the shapes of the weights of a teacher; the arguments and errors are those of `find_teacher`."""
    own, folder = find_teacher(parts, path)
    return own.policy_spec(read_hf_config(folder).vocab_size)


def check_tokenizer(policy: str | None, path: str) -> None:
    """Check that every token of the policy's tokenizer, added tokens included, is the same one of the teacher's.

    `policy` is the policy's `tokenizer.path`, and `path` the teacher.

    Raises:
        PolicyModelError: if a token differs; names the first one.
    """
    of_teacher = tokenizer_of(path, PATH)
    if (policy or BYTES) == of_teacher:
        return
    others = other_tokens(load_tokenizer(policy or BYTES), load_tokenizer(of_teacher), added=True)
    for index, (token, of_teacher) in others.items():
        raise PolicyModelError(
            f"{PATH} is {path!r}, whose tokenizer differs from the policy's in {len(others):,} tokens: the first is id "
            f"{index}, {token!r} of the policy and {of_teacher!r} of the teacher; a teacher scores the tokens of the "
            "policy, so use one with the same tokenizer"
        )
