# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import logging
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from marin_rl.learner.policy_spec import PolicySpec
from marin_rl.runs import checkpoint as checkpoint_module
from marin_rl.runs import saved_checkpoint
from marin_rl.runs.array_files import STATE, write_arrays
from marin_rl.runs.checkpoint import Checkpoints
from marin_rl.runs.run_directory import CheckpointConfig, CheckpointError
from marin_rl.runs.saved_checkpoint import Checkpoint, DamagedCheckpointError, dump_manifest, load_manifest
from marin_rl.utils.remote_path import StorageError
from marin_rl.utils.storage import file_sizes, storage_path

pytestmark = pytest.mark.both_lines

PROGRESS = {"step": 2, "episodes": 16, "evaluations": {"before RL": {"eval/accuracy": 0.1 + 0.2}}}


@pytest.fixture(scope="module")
def state(tiny, learner):
    """A state with nonzero moments; it is never stepped, so never donated."""
    fresh = tiny.fresh_state(learner)
    return dataclasses.replace(
        fresh, opt_state=jax.tree.map(lambda leaf: leaf + jnp.asarray(1, leaf.dtype), fresh.opt_state)
    )


@pytest.fixture
def small_state(state):
    """A small state, for tests of the folders."""
    return dataclasses.replace(state, model={"weights": jnp.arange(3)}, opt_state=())


@pytest.fixture(scope="module")
def saved_folder(state, tmp_path_factory) -> Path:
    """Checkpoints of steps 1 and 2; copy them before modifying them."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    checkpoints = Checkpoints(folder, CheckpointConfig())
    save(checkpoints, state, 1, {"step": 1}, {"more": b"more"})
    assert save(checkpoints, state, 2, PROGRESS, {"more": b"more"}) == folder / "step-00000002"
    return folder


@pytest.fixture
def saved(saved_folder: Path, tmp_path: Path) -> Checkpoints:
    shutil.copytree(saved_folder, tmp_path / "checkpoints")
    return Checkpoints(tmp_path / "checkpoints", CheckpointConfig())


def save(checkpoints: Checkpoints, state, step: int, progress: dict | None = None, files: dict | None = None):
    """Save and wait until the files are written."""
    path = checkpoints.save(state, step, progress or {}, files)
    checkpoints.flush()
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def newest(checkpoints: Checkpoints) -> Checkpoint:
    found = checkpoints.restore_newest(lambda checkpoint: checkpoint)
    assert found is not None
    return found


def test_saved_state_is_restored_bit_for_bit(tiny, learner, state, saved: Checkpoints) -> None:
    checkpoint = newest(saved)
    assert (checkpoint.step, checkpoint.progress) == (2, PROGRESS)
    restored = checkpoint.restore(learner.state_shape(state.model), learner.trainer)
    tiny.assert_same_bits(restored, state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    # Of a part, only its files are read.
    for file in (checkpoint.path / STATE).glob("opt_state*"):
        file.unlink()
    like = tiny.PolicySpec(tiny.LLAMA, tiny.VOCAB, learner.trainer).policy
    tiny.assert_same_bits(checkpoint.restore(like, learner.trainer, "model"), state.model)


def test_a_state_that_is_written_at_once_is_the_same(state, saved: Checkpoints, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "now", CheckpointConfig())
    checkpoints.save_now(state, 2, PROGRESS)
    written, former = checkpoints.open(2), newest(saved)
    assert (written.progress, written.arrays) == (former.progress, former.arrays)
    state_files = {name: file for name, file in former.files.items() if name.startswith(STATE)}
    assert {name: file for name, file in written.files.items() if name.startswith(STATE)} == state_files


@pytest.mark.medium
def test_restored_state_continues_bit_for_bit_without_compiling(tiny, learner, tmp_path: Path) -> None:
    state = tiny.fresh_state(learner)
    for seed in range(2):
        state, _ = learner.update(state, [tiny.make_example(seed=seed)])
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    save(checkpoints, state, 2, {})
    restored = learner.place(checkpoints.open(2).restore(learner.state_shape(state.model), learner.trainer))
    assert tiny.placements(restored) == tiny.placements(state)
    for seed in range(2, 4):
        microbatches = [tiny.make_example(seed=seed), tiny.make_example(seed=seed + 10)]
        state, measured = learner.update(state, microbatches)
        with tiny.counted_compiles() as compiled:
            restored, again = learner.update(restored, microbatches)
        assert compiled == []
        assert again.keys() == measured.keys()
        for name, metric in measured.items():
            assert float(again[name]) == float(metric), name
    tiny.assert_same_bits(restored, state)


@pytest.mark.parametrize(
    ("config", "keep_first", "kept"),
    [
        (CheckpointConfig(keep_last=2), False, [6, 7]),
        (CheckpointConfig(keep_last=3), False, [5, 6, 7]),
        (CheckpointConfig(keep_last=2), True, [0, 6, 7]),
        (CheckpointConfig(keep_last=2, keep_every=3), False, [0, 3, 6, 7]),
        (CheckpointConfig(keep_last=2, keep_every=4), True, [0, 4, 6, 7]),
    ],
)
def test_retention(small_state, tmp_path: Path, config: CheckpointConfig, keep_first: bool, kept: list[int]) -> None:
    checkpoints = Checkpoints(tmp_path, config, keep_first=keep_first)
    assert checkpoints.restore_newest(lambda checkpoint: checkpoint) is None
    for step in range(8):
        save(checkpoints, small_state, step, {})
        assert step in checkpoints.steps()
    assert checkpoints.steps() == kept
    assert [checkpoints.open(step).step for step in kept] == kept


# Leftovers and odd entries of the folder.


def test_damaged_later_checkpoint_does_not_count_as_kept(small_state, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep_last=2))
    for step in (10, 20, 30):
        save(checkpoints, small_state, step, {})
    largest_file(tmp_path / "step-00000030").write_text("damaged")
    assert newest(checkpoints).step == 20
    save(checkpoints, small_state, 25, {})
    assert checkpoints.steps() == [20, 25]


ODD_NAMES = ["step-3", "step--0000003", "step-+0000003", "step-0000000\u0663", "step-x"]


def test_leftovers_are_removed_and_folders_with_other_names_are_ignored(saved: Checkpoints, small_state, caplog):
    leftover = saved.folder / ".step-00000003.0123.partial"
    shutil.copytree(saved.folder / "step-00000001", leftover)
    (leftover / "manifest.json").unlink()
    for name in ODD_NAMES:
        (saved.folder / name).mkdir()
    with caplog.at_level(logging.WARNING):
        assert newest(saved).step == 2
    for name in ODD_NAMES:
        assert f"{saved.folder / name} is ignored: checkpoints are folders named like step-00000001" in caplog.text
    save(saved, small_state, 3, {})
    assert {path.name for path in saved.folder.iterdir()} == {"step-00000002", "step-00000003", *ODD_NAMES}


def test_a_save_replaces_files_and_links_and_removes_only_the_link_to_a_checkpoint(
    saved: Checkpoints, small_state, tmp_path: Path
) -> None:
    archived, path = tmp_path / "archived", saved.folder / "step-00000001"
    path.rename(archived)
    path.symlink_to(archived)
    assert saved.open(1).step == 1
    (saved.folder / "step-00000000").write_text("a file")
    (saved.folder / "step-00000003").write_text("a file")
    (saved.folder / "step-00000004").symlink_to(tmp_path / "gone")
    for step in (3, 4):
        save(saved, small_state, step, {})
        assert saved.open(step).step == step
    assert sorted(path.name for path in saved.folder.iterdir()) == ["step-00000003", "step-00000004"]
    assert (archived / "manifest.json").exists()


@pytest.mark.parametrize("folder", ["memory://bucket/checkpoints", None])
def test_an_interrupted_second_save_of_a_step_keeps_the_first(
    small_state, tmp_path: Path, monkeypatch, folder: str | None
) -> None:
    place = tmp_path / "checkpoints" if folder is None else storage_path(folder)
    place.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(place, CheckpointConfig())
    for content in (b"first", b"second"):
        save(checkpoints, small_state, 1, {}, {"groups": content})
        assert checkpoints.open(1).read("groups") == content
    assert len(file_sizes(place)) == len(checkpoints.open(1).files) + 1

    def fail(*_: object) -> str:
        raise OSError("the power failed")

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "manifest", fail)
        with pytest.raises(CheckpointError, match="the power failed"):
            save(checkpoints, small_state, 1, {}, {"groups": b"third"})
    assert newest(Checkpoints(place, CheckpointConfig())).read("groups") == b"second"


# Damage.


def largest_file(folder: Path) -> Path:
    return max((folder / STATE).iterdir(), key=lambda path: path.stat().st_size)


def flipped(data: bytes, at: float = 0.5) -> bytes:
    """Flip a bit."""
    place = int(len(data) * at)
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def resealed(change: Callable[[dict], object]) -> Callable[[bytes], bytes]:
    """Change the entries of a manifest and update its checksum."""

    def edit(data: bytes) -> bytes:
        manifest = load_manifest(data.decode())
        change(manifest)
        return dump_manifest(manifest).encode()

    return edit


def without_file(name: str) -> Callable[[bytes], bytes]:
    return resealed(lambda manifest: manifest["files"].pop(f"{STATE}/{name}"))


def edit(folder: Path, file: str, change: Callable[[bytes], bytes | None]) -> str:
    """Change or remove a file of a checkpoint, `state` for the largest of its arrays; return its name."""
    path = largest_file(folder) if file == STATE else folder / file
    content = change(path.read_bytes())
    path.unlink() if content is None else path.write_bytes(content)
    return str(path.relative_to(folder))


DIFFERS, UNREADABLE = "{} differs from what was written", "has no readable {}"
DAMAGES: list[tuple[str, Callable[[bytes], bytes | None], str]] = [
    (STATE, lambda data: data[:-1], DIFFERS),
    (STATE, flipped, DIFFERS),
    (STATE, lambda data: None, "{} is missing"),
    ("more", flipped, DIFFERS),
    ("manifest.json", lambda data: None, UNREADABLE),
    ("manifest.json", lambda data: b"", UNREADABLE),
    ("manifest.json", lambda data: b"{}", UNREADABLE),
    ("manifest.json", lambda data: b"[" * 100_000, UNREADABLE),
    # The flipped bit leaves valid JSON.
    ("manifest.json", lambda data: data.replace(b'"episodes": 16', b'"episodes": 17'), f"{UNREADABLE}: its checksum"),
    ("manifest.json", without_file("training_key-0.bin"), "is incomplete: state/training_key-0.bin was not written"),
    (
        "manifest.json",
        without_file("model.lm_head.weight-0.0.bin"),
        "is incomplete: state/model.lm_head.weight-0.0.bin",
    ),
    ("manifest.json", resealed(lambda manifest: manifest.update(step=1)), "holds step 1, so its folder should be"),
    ("manifest.json", resealed(lambda manifest: manifest.update(step=-1)), "holds step -1, so its folder should be"),
]


@pytest.fixture
def load(learner, state) -> Callable[[Checkpoint], tuple[int, object]]:
    """Reads every file of a checkpoint."""

    def load(checkpoint: Checkpoint) -> tuple[int, object]:
        assert checkpoint.read("more") == b"more"
        return checkpoint.step, checkpoint.restore(learner.state_shape(state.model), learner.trainer)

    return load


@pytest.mark.parametrize(("file", "change", "complaint"), DAMAGES)
def test_damaged_checkpoint_is_skipped_with_a_warning(
    tiny, state, saved: Checkpoints, load, caplog, file: str, change, complaint: str
) -> None:
    folder = saved.folder / "step-00000002"
    complaint = complaint.format(edit(folder, file, change))
    with caplog.at_level(logging.WARNING):
        step, restored = saved.restore_newest(load)
    assert step == 1
    tiny.assert_same_bits(restored, state)
    (warning,) = [record.getMessage() for record in caplog.records if record.name == checkpoint_module.__name__]
    assert str(folder) in warning
    assert complaint in warning
    with pytest.raises(DamagedCheckpointError):
        load(saved.open(2))
    first = edit(saved.folder / "step-00000001", STATE, lambda data: None)
    with pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged.*Restore their files") as caught:
        saved.restore_newest(load)
    assert first in str(caught.value)
    assert complaint in str(caught.value)


def test_a_flipped_bit_is_detected_in_any_file(saved: Checkpoints, load, state) -> None:
    checkpoint = saved.open(2)
    for number, file in enumerate(sorted(checkpoint.files)):
        path = checkpoint.path / file
        original = path.read_bytes()
        path.write_bytes(flipped(original, (number % 7) / 7))
        with pytest.raises(DamagedCheckpointError, match=rf"damaged: {re.escape(file)} differs from what") as caught:
            load(checkpoint) if file == "more" else checkpoint.verify_arrays()
        assert str(checkpoint.path) in str(caught.value)
        path.write_bytes(original)
    path = checkpoint.path / "manifest.json"
    original = path.read_bytes()
    for part in range(40):
        path.write_bytes(flipped(original, part / 40))
        # A flipped space between values does not change the content.
        if b"".join(path.read_bytes().split()) != b"".join(original.split()):
            with pytest.raises(CheckpointError, match=r"step-00000002"):
                saved.open(2)
        path.write_bytes(original)
    load(saved.open(2))


def test_each_file_is_read_once_and_errors_are_told_apart(saved: Checkpoints, load, monkeypatch) -> None:
    checkpoint = saved.open(2)
    reads: list[str] = []
    read_bytes = Path.read_bytes

    def read(path: Path) -> bytes:
        reads.append(str(path.relative_to(checkpoint.path)))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", read)
    load(checkpoint)
    assert sorted(reads) == sorted(checkpoint.files)

    def failing(error: OSError) -> Callable[[Path], bytes]:
        def fail(path: Path) -> bytes:
            if path.suffix == ".bin":
                raise error
            return read_bytes(path)

        return fail

    monkeypatch.setattr(Path, "read_bytes", failing(OSError(5, "Input/output error")))
    with pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged: .*Input/output error.*00000001"):
        saved.restore_newest(load)
    # A store that fails is not damage, so that no older checkpoint is used.
    monkeypatch.setattr(Path, "read_bytes", failing(StorageError("the store failed", "gs://bucket/x", "try again")))
    with pytest.raises(StorageError, match=r"gs://bucket/x: the store failed; try again"):
        saved.restore_newest(load)


DAMAGED, STORE = "DamagedCheckpointError state/a is missing", "StorageError gs://x: refused"


@pytest.mark.parametrize(
    ("own", "other", "kind", "message"),
    [
        (None, DAMAGED, DamagedCheckpointError, "training process 1: state/a is missing"),
        (DamagedCheckpointError("state/b is missing"), "", DamagedCheckpointError, "state/b is missing"),
        (DamagedCheckpointError("state/b is missing"), STORE, StorageError, "process 1: gs://x: refused"),
        (StorageError("refused", "gs://y", "try"), DAMAGED, StorageError, "gs://y: refused"),
    ],
)
def test_a_failure_of_one_process_is_raised_in_all(
    monkeypatch: pytest.MonkeyPatch, own: Exception | None, other: str, kind: type[Exception], message: str
) -> None:
    """A store that fails in one process is not damage in another: all must do the same."""
    monkeypatch.setattr(saved_checkpoint.multihost, "gather_texts", lambda text: (text, other))

    def read() -> None:
        if own is not None:
            raise own

    with pytest.raises(kind, match=message):
        saved_checkpoint._agree(read)


def test_another_format_is_not_damage(saved: Checkpoints) -> None:
    edit(saved.folder / "step-00000002", "manifest.json", resealed(lambda manifest: manifest.update(format=99)))
    with pytest.raises(CheckpointError, match="has format 99, this version reads 4: another version") as caught:
        saved.restore_newest(lambda checkpoint: checkpoint)
    assert not isinstance(caught.value, DamagedCheckpointError)


# Saves that fail.


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def without_files(folder: Path, arrays: dict) -> dict:
    """Write no file, as if another host wrote it to its local disk."""
    written = write_arrays(folder, arrays)
    for file in (folder / STATE).iterdir():
        file.unlink()
    return written


def without_an_array(folder: Path, arrays: dict) -> dict:
    """Write some arrays only, as if another process answered without its shards."""
    return write_arrays(folder, {name: array for name, array in arrays.items() if name != ".step"})


def full(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


ABSENT = (
    "step-00000003 is incomplete: {} files of its arrays are absent, the first is {}. .* put run_dir on a file system"
)


@pytest.mark.parametrize(
    ("call", "replacement", "message"),
    [
        ("write_arrays", full, "No space left on device.*Earlier checkpoints are untouched; free disk space"),
        ("replace_folder", full, r"could not write .*step-00000003: .*No space left on device"),
        ("write_arrays", without_files, ABSENT.format(r"\d+", r"state/\S+\.bin")),
        ("write_arrays", without_an_array, ABSENT.format(1, r"state/step-0\.bin")),
        (None, None, r"could not write .*step-00000003.*Earlier checkpoints are untouched"),
    ],
)
def test_a_save_that_fails_keeps_earlier_checkpoints(
    saved: Checkpoints, state, monkeypatch, call: str | None, replacement, message: str
) -> None:
    before = contents(saved.folder)
    with monkeypatch.context() as patch:
        if call is not None:
            patch.setattr(checkpoint_module, call, replacement)
        limit = files_no_larger_than(500) if call is None else patch.context()
        with limit, pytest.raises(CheckpointError, match=message):
            save(saved, state, 3, {})
    assert contents(saved.folder) == before
    assert [path.name for path in sorted(saved.folder.iterdir())] == ["step-00000001", "step-00000002"]
    assert newest(saved).step == 2
    save(saved, state, 3, {})
    assert saved.steps() == [2, 3]


def test_error_names_an_old_checkpoint_that_cannot_be_deleted(saved: Checkpoints, small_state, monkeypatch) -> None:
    def fail(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(checkpoint_module, "remove", fail)
    problem = r"of step 3 is complete, but the old checkpoint .*step-00000001 could not be deleted: .*Permission denied"
    with pytest.raises(CheckpointError, match=rf"{problem}.* Fix its permissions"):
        save(saved, small_state, 3, {})
    assert saved.open(3).step == 3


def test_error_names_a_folder_that_cannot_be_created(small_state, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"could not write checkpoint .*file/checkpoints/step-00000001"):
        save(Checkpoints(tmp_path / "file" / "checkpoints", CheckpointConfig()), small_state, 1, {})


# Another model.


def changed(tiny, **change: object):
    return dataclasses.replace(tiny.LLAMA, **change), tiny.VOCAB


@pytest.mark.parametrize(
    ("other", "complaint"),
    [
        (
            lambda tiny: changed(tiny, hidden_dim=32),
            r"q_proj.weight is float32\[1, 4, 1, 4, 16\] in the checkpoint and float32\[1, 4, 1, 8, 32\]",
        ),
        (lambda tiny: changed(tiny, num_layers=2), r"is float32\[1, .*\] in the checkpoint and float32\[2, "),
        (
            lambda tiny: changed(tiny, tie_word_embeddings=True),
            r"lm_head.weight is float32\[264, 16\] in the checkpoint and absent as configured",
        ),
        (lambda tiny: (tiny.LLAMA, 128), r"float32\[264, 16\] in .* and float32\[128, 16\]"),
        (
            lambda tiny: (dataclasses.replace(tiny.QWEN3, num_layers=1, num_kv_heads=4), tiny.VOCAB),
            r"q_norm.weight is absent in the checkpoint",
        ),
    ],
)
def test_another_model_does_not_fit(tiny, learner, saved: Checkpoints, other, complaint: str) -> None:
    shape = PolicySpec(*other(tiny), learner.trainer).policy
    for like, subpath in ((learner.state_shape(shape), ""), (shape, "model")):
        with pytest.raises(CheckpointError, match=r"does not fit the configured model and optimizer: .*" + complaint):
            saved.open(2).restore(like, learner.trainer, subpath)


def test_another_optimizer_does_not_fit(tiny, trainer, state, saved: Checkpoints) -> None:
    other = tiny.make_learner(trainer, optimizer=tiny.SgdConfig())
    with pytest.raises(CheckpointError, match=r"does not fit the configured model and optimizer: \.opt_state"):
        saved.open(2).restore(other.state_shape(state.model), other.trainer)
