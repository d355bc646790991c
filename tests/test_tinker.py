# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import contextlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import numpy as np
import pytest

from marin_rl.sampling.sampler import SampleRequest
from marin_rl.serving.tinker.messages import message_class
from marin_rl.sessions.run_export import export_once
from marin_rl.sessions.served_policy import load_served_policy
from marin_rl.tinker import main
from marin_rl.utils.errors import UserError
from tests.fork_server import first_line, popen
from tests.serving.tinker.wire import Wire
from tests.tiny_run import TinyRun, contents, copy_of

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "give either run"),
        (["--run", "a", "--model", "b"], "give either run"),
        (["--model", "b", "--step", "3"], "only a run has steps"),
        (["--model", "missing", "--port", "0"], "--model is 'missing', which is not a folder"),
        (["--run", "missing", "--port", "0"], "'missing' is not a run directory"),
        (["--run", "a", "--host", "0.0.0.0"], "but MARIN_RL_TINKER_KEY is not set; set it to a secret key"),
    ],
)
def test_mistakes_are_named(
    argv: list[str], message: str, tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("MARIN_RL_TINKER_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 1
    error = capfd.readouterr().err.removeprefix("loading the weights of missing\n")
    assert error.startswith("error: ")
    assert message in error


def test_the_export_of_a_base_stays_while_its_run_goes_on(finished_run: TinyRun, tmp_path: Path):
    run, base = copy_of(finished_run, tmp_path / "run"), tmp_path / "server" / "base"
    shutil.move(run.checkpoint(6), tmp_path / "later")
    assert export_once(str(run.path), None, base) == 5
    before = contents(base)
    shutil.move(tmp_path / "later", run.checkpoint(6))
    shutil.rmtree(run.checkpoint(5))
    for step in (None, 5):
        assert export_once(str(run.path), step, base) == 5
    for path, step in ((run.path, 6), (finished_run.path, None)):
        with pytest.raises(UserError):
            export_once(str(path), step, base)
    assert contents(base) == before


@contextlib.contextmanager
def started(*options: str) -> Iterator[str]:
    """Start the command; yield the line that it prints when it serves. It is killed at the end."""
    command = [sys.executable, "-m", "marin_rl.tinker", "--port", "0", *options]
    with tempfile.NamedTemporaryFile("r") as output, open(os.devnull, "wb") as errors:
        process = popen(command, stdout=output, stderr=errors, env=os.environ)
        try:
            yield first_line(process, output)
        finally:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_a_run_is_the_base_of_a_server_and_of_its_restart(finished_run: TinyRun, tmp_path: Path, capfd: Capture):
    options = "--folder", str(tmp_path / "server"), "--max_context", "12"
    prompt, (run, folder) = (50, 120, 51), (str(finished_run.path), str(tmp_path / "server" / "base"))
    policy = load_served_policy(run=run)
    [wanted] = policy.sampler.sample([SampleRequest(prompt, 7, 3)])
    with started("--run", run, *options) as line:
        match = re.fullmatch(rf"serving step 6 of {run} to clients of Tinker at (http:\S+) \(.*\)\n", line)
        assert match is not None, line
        wire = Wire(match[1])
        session = wire.session()
        for number, name in enumerate((run, folder)):
            asked = {"session_id": session, "sampling_session_seq_id": number, "base_model": name}
            sampler = wire.post("create_sampling_session", **asked)["sampling_session_id"]
            chunk = {"type": "encoded_text", "tokens": list(prompt)}
            params = {"prompt": {"chunks": [chunk]}, "sampling_params": {"seed": 7, "max_tokens": 3}}
            [found] = message_class("SampleResponse").FromString(wire.result(wire.sample(sampler, **params))).sequences
            assert np.frombuffer(found.tokens, "<i4").tolist() == list(wanted.token_ids)
            np.testing.assert_allclose(np.frombuffer(found.logprobs, "<f4"), wanted.logprobs, atol=1e-5)
        created = wire.post("create_model", session_id=session, model_seq_id=0, base_model=run, lora_config={"rank": 2})
        model = wire.result(created["request_id"])["model_id"]
        assert wire.post("get_info", model_id=model)["model_data"]["tokenizer_id"] == folder
        wire.result(wire.forward_backward(model, 1, [[5, 6, 7]]).json()["request_id"])
    assert "compiling program 1: training an adapter of rank 2, " in (tmp_path / "server" / "log.txt").read_text()
    with started("--run", run, *options) as line:
        match = re.fullmatch(rf"serving step 6 of {run} to clients of Tinker at (http:\S+) \(.*\)\n", line)
        assert match is not None, line
        assert Wire(match[1]).step(model, 2)["grad_norm"] > 0
    export_once(run, 3, tmp_path / "other")
    assert main(["--model", str(tmp_path / "other"), "--port", "0", *options]) == 1
    assert "belongs to another base model" in capfd.readouterr().err
