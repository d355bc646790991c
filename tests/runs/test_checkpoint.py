# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import json
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
from marin_rl.runs.array_files import STATE, write_arrays
from marin_rl.runs.checkpoint import CheckpointConfig, Checkpoints
from marin_rl.runs.checkpoint_folders import CheckpointError
from marin_rl.runs.saved_checkpoint import (
    Checkpoint,
    DamagedCheckpointError,
    dump_manifest,
    load_manifest,
    open_checkpoint,
)
from marin_rl.utils.remote_path import StorageError
from marin_rl.utils.storage import file_sizes, storage_path

PROGRESS = {"step": 2, "episodes": 16, "evaluations": {"before RL": {"eval/accuracy": 0.1 + 0.2}}}


@pytest.fixture(scope="module")
def state(tiny, learner):
    """A state with nonzero moments; it is never stepped, so never donated."""
    fresh = tiny.fresh_state(learner)
    return dataclasses.replace(
        fresh, opt_state=jax.tree.map(lambda leaf: leaf + jnp.asarray(1, leaf.dtype), fresh.opt_state)
    )


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


def save(checkpoints: Checkpoints, state, step: int, progress: dict | None = None, files: dict | None = None) -> Path:
    """Save and wait until the files are written."""
    path = checkpoints.save(state, step, progress or {}, files)
    checkpoints.flush()
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_saved_state_is_restored_bit_for_bit(tiny, learner, state, saved: Checkpoints) -> None:
    checkpoint = saved.newest_good()
    assert checkpoint is not None
    assert checkpoint.step == 2
    assert checkpoint.progress == PROGRESS
    like = learner.state_shape(state.model)
    restored = checkpoint.restore(like, learner.trainer)
    tiny.assert_same_bits(restored, state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)


def test_restore_of_a_model_restores_only_weights(tiny, learner, state, saved: Checkpoints) -> None:
    like = tiny.PolicySpec(tiny.LLAMA, tiny.VOCAB, learner.trainer).policy
    model = saved.open(1).restore(like, learner.trainer, "model")
    tiny.assert_same_bits(model, state.model)


@pytest.mark.medium
def test_restored_state_continues_bit_for_bit_without_compiling(tiny, learner, tmp_path: Path) -> None:
    state = tiny.fresh_state(learner)
    for seed in range(2):
        state, _ = learner.step(state, [tiny.make_example(seed=seed)])
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    save(checkpoints, state, 2, {})
    restored = learner.place(checkpoints.open(2).restore(learner.state_shape(state.model), learner.trainer))
    assert tiny.placements(restored) == tiny.placements(state)
    for seed in range(2, 4):
        microbatches = [tiny.make_example(seed=seed), tiny.make_example(seed=seed + 10)]
        state, measured = learner.step(state, microbatches)
        with tiny.counted_compiles() as compiled:
            restored, again = learner.step(restored, microbatches)
        assert compiled == []
        assert again.keys() == measured.keys()
        for name, metric in measured.items():
            assert float(again[name]) == float(metric), name
    tiny.assert_same_bits(restored, state)


def test_newest_good_is_none_without_checkpoints(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "nowhere", CheckpointConfig())
    assert checkpoints.newest_good() is None
    assert checkpoints.steps() == []


@pytest.fixture
def small_state(state):
    """A small state, for tests of the folders."""
    return dataclasses.replace(state, model={"weights": jnp.arange(3)}, opt_state=())


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
    for step in range(8):
        save(checkpoints, small_state, step, {})
        assert step in checkpoints.steps()
    assert checkpoints.steps() == kept
    assert [checkpoints.open(step).step for step in kept] == kept


def test_damaged_later_checkpoint_does_not_count_as_kept(small_state, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep_last=2))
    for step in (10, 20, 30):
        save(checkpoints, small_state, step, {})
    largest_file(tmp_path / "step-00000030").write_text("damaged")
    good = checkpoints.newest_good()
    assert good is not None
    assert good.step == 20
    save(checkpoints, small_state, 25, {})
    assert checkpoints.steps() == [20, 25]


def test_saving_a_step_again_replaces_it(small_state, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    save(checkpoints, small_state, 1, {"try": 1})
    save(checkpoints, small_state, 1, {"try": 2})
    assert checkpoints.open(1).progress == {"try": 2}


def test_half_written_leftovers_are_ignored_and_removed(small_state, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    save(checkpoints, small_state, 1, {})
    leftover = tmp_path / ".step-00000002.0123.partial"
    shutil.copytree(tmp_path / "step-00000001", leftover)
    (leftover / "manifest.json").unlink()
    (tmp_path / "step-notes.txt").write_text("not a checkpoint")
    assert checkpoints.steps() == [1]
    good = checkpoints.newest_good()
    assert good is not None
    assert good.step == 1
    save(checkpoints, small_state, 2, {})
    assert not leftover.exists()
    assert checkpoints.steps() == [1, 2]


def largest_file(folder: Path) -> Path:
    return max((path for path in (folder / "state").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip_a_bit(path: Path, at: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 1
    path.write_bytes(data)


def truncate(folder: Path) -> str:
    path = largest_file(folder)
    path.write_bytes(path.read_bytes()[:-1])
    return f"{path.relative_to(folder)} differs from what was written"


def flip(folder: Path) -> str:
    path = largest_file(folder)
    flip_a_bit(path)
    return f"{path.relative_to(folder)} differs from what was written"


def remove(folder: Path) -> str:
    path = largest_file(folder)
    path.unlink()
    return f"{path.relative_to(folder)} is missing"


def remove_manifest(folder: Path) -> str:
    (folder / "manifest.json").unlink()
    return "has no readable manifest.json"


def empty_manifest(folder: Path) -> str:
    (folder / "manifest.json").write_text("")
    return "has no readable manifest.json"


def alter_progress(folder: Path) -> str:
    """Flip a bit so that the manifest is still valid JSON: 16 episodes become 17."""
    path = folder / "manifest.json"
    assert '"episodes": 16' in path.read_text()
    path.write_text(path.read_text().replace('"episodes": 16', '"episodes": 17'))
    return "has no readable manifest.json: its checksum does not match"


def nest_manifest(folder: Path) -> str:
    (folder / "manifest.json").write_text("[" * 100_000)
    return "has no readable manifest.json"


def flip_extra_file(folder: Path) -> str:
    flip_a_bit(folder / "more")
    return "more differs from what was written"


DAMAGES: list[Callable[[Path], str]] = [
    *(truncate, flip, remove, remove_manifest, empty_manifest, alter_progress, nest_manifest, flip_extra_file)
]


@pytest.fixture
def load(learner, state) -> Callable[[Checkpoint], tuple[int, object]]:
    """Reads every file of a checkpoint."""

    def load(checkpoint: Checkpoint) -> tuple[int, object]:
        assert checkpoint.read("more") == b"more"
        return checkpoint.step, checkpoint.restore(learner.state_shape(state.model), learner.trainer)

    return load


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_skipped_with_a_warning(tiny, state, saved: Checkpoints, load, caplog, damage) -> None:
    folder = saved.folder / "step-00000002"
    complaint = damage(folder)
    with caplog.at_level(logging.WARNING):
        step, restored = saved.restore_newest(load)
    assert step == 1
    tiny.assert_same_bits(restored, state)
    (warning,) = [record.getMessage() for record in caplog.records if record.name == checkpoint_module.__name__]
    assert str(folder) in warning
    assert complaint in warning
    with pytest.raises(DamagedCheckpointError):
        load(saved.open(2))


def failing_read(error: OSError) -> Callable[..., bytes]:
    def read(path: Path) -> bytes:
        raise error

    return read


def test_unreadable_file_falls_back(saved: Checkpoints, load, monkeypatch) -> None:
    monkeypatch.setattr(Path, "read_bytes", failing_read(OSError(5, "Input/output error")))
    with pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged: .*Input/output error.*00000001"):
        saved.restore_newest(load)


def test_failing_store_does_not_fall_back(saved: Checkpoints, load, monkeypatch) -> None:
    error = StorageError("the store failed", "gs://bucket/x", "try again")
    checkpoint = saved.open(2)
    monkeypatch.setattr(Path, "read_bytes", failing_read(error))
    monkeypatch.setattr(Checkpoint, "read", lambda self, name: b"more")
    monkeypatch.setattr(saved, "open", lambda step: checkpoint)
    with pytest.raises(StorageError, match=r"gs://bucket/x: the store failed; try again"):
        saved.restore_newest(load)


def test_each_file_is_read_once(saved: Checkpoints, load, monkeypatch) -> None:
    checkpoint = saved.open(2)
    reads: list[str] = []
    read_bytes = Path.read_bytes

    def read(path: Path) -> bytes:
        reads.append(str(path.relative_to(checkpoint.path)))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", read)
    load(checkpoint)
    assert sorted(reads) == sorted(checkpoint.saved.files)


@pytest.mark.parametrize("name", ["training_key-0.bin", "model.lm_head.weight-0.0.bin"])
def test_manifest_that_does_not_list_all_files_of_arrays_is_rejected(saved: Checkpoints, name: str) -> None:
    folder = saved.folder / "step-00000002"
    manifest = load_manifest((folder / "manifest.json").read_text())
    del manifest["files"][f"state/{name}"]
    (folder / "manifest.json").write_text(dump_manifest(manifest))
    with pytest.raises(CheckpointError, match=rf"is incomplete: state/{re.escape(name)} was not written completely"):
        saved.open(2)
    good = saved.newest_good()
    assert good is not None
    assert good.step == 1


def without_files(folder: Path, arrays: dict) -> dict:
    """Write no file, as if another host wrote it to its local disk."""
    written = write_arrays(folder, arrays)
    for file in (folder / STATE).iterdir():
        file.unlink()
    return written


def without_an_array(folder: Path, arrays: dict) -> dict:
    """Write some arrays only, as if another process answered without its shards."""
    return write_arrays(folder, {name: array for name, array in arrays.items() if name != ".step"})


@pytest.mark.parametrize(
    ("write", "number", "first"), [(without_files, 3, r"state/\S+\.bin"), (without_an_array, 1, r"state/step-0\.bin")]
)
def test_save_fails_if_a_shard_is_missing(
    small_state, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write, number: int, first: str
) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    save(checkpoints, small_state, 1, {})
    monkeypatch.setattr(checkpoint_module, "write_arrays", write)
    with pytest.raises(
        CheckpointError,
        match=f"step-00000002 is incomplete: {number} files of its arrays are absent, the first is {first}. .* put "
        "run_dir on a file system that all training hosts share",
    ):
        save(checkpoints, small_state, 2, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_flipped_bit_in_the_manifest_is_detected(saved: Checkpoints) -> None:
    path = saved.folder / "step-00000002" / "manifest.json"
    original = path.read_bytes()
    for part in range(40):
        flip_a_bit(path, part / 40)
        unharmed = b"".join(path.read_bytes().split()) == b"".join(original.split())
        if not unharmed:  # a flipped space between values does not change the content
            with pytest.raises(CheckpointError, match=r"step-00000002"):
                saved.open(2)
        path.write_bytes(original)
    assert saved.open(2).step == 2


def test_error_names_all_damaged_checkpoints(saved: Checkpoints) -> None:
    complaints = [truncate(saved.folder / "step-00000001"), remove(saved.folder / "step-00000002")]
    with pytest.raises(
        CheckpointError, match=r"every checkpoint in .* is damaged.*Restore their files from a copy"
    ) as caught:
        saved.newest_good()
    assert all(complaint in str(caught.value) for complaint in complaints)


def reseal(folder: Path, /, **changes: object) -> None:
    """Change entries of a manifest (None removes one) and update its checksum."""
    manifest = load_manifest((folder / "manifest.json").read_text()) | changes
    present = {name: value for name, value in manifest.items() if value is not None}
    (folder / "manifest.json").write_text(dump_manifest(present))


@pytest.mark.parametrize("name", ["step", "progress", "folder", "arrays", "files"])
def test_manifest_without_an_entry_is_rejected(saved: Checkpoints, name: str) -> None:
    reseal(saved.folder / "step-00000002", **{name: None})
    with pytest.raises(CheckpointError, match=rf"step-00000002: manifest\.json has no valid '{name}'"):
        saved.open(2)


@pytest.mark.parametrize("step", [-1, 1])
def test_manifest_of_another_step_is_rejected(saved: Checkpoints, step: int) -> None:
    reseal(saved.folder / "step-00000002", step=step)
    with pytest.raises(CheckpointError, match=rf"step-00000002 holds step {step}, so its folder should be called"):
        saved.open(2)


@pytest.mark.parametrize("name", ["step-3", "step--0000003", "step-+0000003", "step-0000000\u0663", "step-x"])
def test_folders_with_other_names_are_ignored_with_a_warning(
    saved: Checkpoints, small_state, caplog, name: str
) -> None:
    (saved.folder / name).mkdir()
    with caplog.at_level(logging.WARNING):
        assert saved.newest_good().step == 2
    assert f"{saved.folder / name} is ignored: checkpoints are folders named like step-00000001" in caplog.text
    save(saved, small_state, 3, {})
    assert saved.steps() == [2, 3]
    assert (saved.folder / name).is_dir()


def test_a_checkpoint_that_is_a_symbolic_link_is_read_and_only_its_link_removed(
    saved: Checkpoints, small_state, tmp_path_factory
) -> None:
    elsewhere = tmp_path_factory.mktemp("archive") / "step-00000001"
    path = saved.folder / "step-00000001"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert saved.open(1).step == 1
    save(saved, small_state, 3, {})
    assert saved.steps() == [2, 3]
    assert not path.is_symlink()
    assert (elsewhere / "manifest.json").exists()


def test_a_save_replaces_a_link_to_nothing(small_state, tmp_path: Path) -> None:
    (tmp_path / "step-00000001").symlink_to(tmp_path / "gone")
    save(Checkpoints(tmp_path, CheckpointConfig()), small_state, 1, {})
    assert Checkpoints(tmp_path, CheckpointConfig()).open(1).step == 1


def test_a_save_replaces_and_prunes_files_with_names_of_checkpoints(small_state, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep_last=2))
    for step in (1, 2):
        (tmp_path / f"step-{step:08d}").write_text("")
    for step in (2, 3):
        save(checkpoints, small_state, step, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_unknown_format_is_rejected(saved: Checkpoints) -> None:
    path = saved.folder / "step-00000002" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest.pop("sha256")
    path.write_text(dump_manifest({**manifest, "format": 99}))
    with pytest.raises(CheckpointError, match="has format 99, this version reads 4: another version") as caught:
        open_checkpoint(path.parent)
    assert not isinstance(caught.value, DamagedCheckpointError)


def test_error_names_a_missing_checkpoint(saved: Checkpoints) -> None:
    with pytest.raises(CheckpointError, match=r"step-00000007 has no readable manifest.json"):
        saved.open(7)


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def assert_untouched_and_able_to_go_on(saved: Checkpoints, before: dict[str, bytes], state) -> None:
    assert contents(saved.folder).items() >= before.items()
    assert saved.steps() == [1, 2]
    save(saved, state, 3, {})
    assert saved.steps() == [2, 3]
    assert saved.open(3).step == 3


def test_truncated_write_keeps_earlier_checkpoints(saved: Checkpoints, state) -> None:
    before = contents(saved.folder)
    with (
        files_no_larger_than(500),
        pytest.raises(CheckpointError, match=r"could not write .*step-00000003.*Earlier checkpoints are untouched"),
    ):
        save(saved, state, 3, {})
    assert_untouched_and_able_to_go_on(saved, before, state)


@pytest.mark.parametrize("call", ["write_arrays", "replace_folder"])
def test_full_disk_keeps_earlier_checkpoints(saved: Checkpoints, state, monkeypatch, call: str) -> None:
    before = contents(saved.folder)

    def fail(*_, **__) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, call, fail)
        with pytest.raises(CheckpointError, match=r"No space left on device.*free disk space"):
            save(saved, state, 3, {})
    assert contents(saved.folder) == before
    assert_untouched_and_able_to_go_on(saved, before, state)


def test_error_names_an_old_checkpoint_that_cannot_be_deleted(saved: Checkpoints, state, monkeypatch) -> None:
    def fail(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(checkpoint_module, "remove", fail)
    problem = r"of step 3 is complete, but the old checkpoint .*step-00000001 could not be deleted: .*Permission denied"
    with pytest.raises(CheckpointError, match=rf"{problem}.* Fix its permissions"):
        save(saved, state, 3, {})
    assert saved.open(3).step == 3


@pytest.mark.parametrize("folder", ["memory://bucket/checkpoints", None])
def test_an_interrupted_second_save_of_a_step_keeps_the_first(state, tmp_path: Path, monkeypatch, folder) -> None:
    place = tmp_path / "checkpoints" if folder is None else storage_path(folder)
    place.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(place, CheckpointConfig())
    for content in (b"first", b"second"):
        checkpoints.save(state, 1, {}, {"groups": content})
        checkpoints.flush()
        assert checkpoints.open(1).read("groups") == content
    assert len(file_sizes(place)) == len(checkpoints.open(1).saved.files) + 1

    def fail(*_: object) -> str:
        raise OSError("the power failed")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module.Manifest, "dumps", fail)
        checkpoints.save(state, 1, {}, {"groups": b"third"})
        with pytest.raises(CheckpointError, match="the power failed"):
            checkpoints.flush()
    found = Checkpoints(place, CheckpointConfig()).newest_good()
    assert found is not None
    assert found.read("groups") == b"second"


def test_error_names_a_folder_that_cannot_be_created(state, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"could not write checkpoint .*file/checkpoints/step-00000001"):
        save(Checkpoints(tmp_path / "file" / "checkpoints", CheckpointConfig()), state, 1, {})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            {"hidden_dim": 32},
            r"q_proj.weight is float32\[1, 4, 1, 4, 16\] in the checkpoint and float32\[1, 4, 1, 8, 32\]",
        ),
        ({"num_layers": 2}, r"is float32\[1, .*\] in the checkpoint and float32\[2, "),
        (
            {"tie_word_embeddings": True},
            r"lm_head.weight is float32\[264, 16\] in the checkpoint and absent as configured",
        ),
    ],
)
def test_another_model_does_not_fit(tiny, learner, saved: Checkpoints, change: dict, complaint: str) -> None:
    config = dataclasses.replace(tiny.LLAMA, **change)
    assert_does_not_fit(tiny, learner, saved, config, tiny.VOCAB, complaint)


def test_another_vocabulary_does_not_fit(tiny, learner, saved: Checkpoints) -> None:
    assert_does_not_fit(tiny, learner, saved, tiny.LLAMA, 128, r"float32\[264, 16\] in .* and float32\[128, 16\]")


def test_another_architecture_does_not_fit(tiny, learner, saved: Checkpoints) -> None:
    config = dataclasses.replace(tiny.QWEN3, num_layers=1, num_kv_heads=4)
    assert_does_not_fit(tiny, learner, saved, config, tiny.VOCAB, r"q_norm.weight is absent in the checkpoint")


def assert_does_not_fit(tiny, learner, saved: Checkpoints, config, vocab: int, complaint: str) -> None:
    shape = PolicySpec(config, vocab, learner.trainer).policy
    trainer = learner.trainer
    with pytest.raises(CheckpointError, match=r"does not fit the configured model and optimizer: .*" + complaint):
        saved.open(2).restore(learner.state_shape(shape), trainer)
    with pytest.raises(CheckpointError, match=r"does not fit the configured model and optimizer: .*" + complaint):
        saved.open(2).restore(shape, trainer, "model")


def test_another_optimizer_does_not_fit(tiny, trainer, state, saved: Checkpoints) -> None:
    other = tiny.make_learner(trainer, optimizer=tiny.SgdConfig())
    with pytest.raises(CheckpointError, match=r"does not fit the configured model and optimizer: \.opt_state"):
        saved.open(2).restore(other.state_shape(state.model), other.trainer)
