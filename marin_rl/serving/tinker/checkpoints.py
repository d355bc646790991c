# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Folders of checkpoints, their `info.json`, and the `tinker://` paths that name them."""

import dataclasses
import datetime
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from marin_rl.serving.tinker.records import ModelSpec, RequestError
from marin_rl.utils.storage import open_atomically, sync

KINDS: Mapping[str, str] = {"weights": "training", "sampler_weights": "sampler"}
"""The protocol's type of a checkpoint by its folder."""
_MODEL = re.compile(r"[A-Za-z0-9_-]{1,100}:train:[0-9]{1,19}")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]{0,199}")
_EPHEMERAL = ".ephemeral-"
_SCHEME = "tinker://"


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """The base model of a server."""

    names: tuple[str, ...]
    """Names that clients may give it; answers contain the first."""
    fingerprint: str
    """Identifies its weights."""
    max_context: int | None = None
    """Maximum number of tokens of a sequence."""
    tokenizer: str | None = None
    """Folder or name from which clients load the tokenizer; None: the name of the model."""

    def check_name(self, name: str) -> None:
        """Raise `RequestError` if a client means another model."""
        if name not in self.names:
            raise RequestError(f"base_model is {name!r:.200}; this server has {', '.join(map(repr, self.names))}")


class Checkpoints:
    """Checkpoints of all models: `<folder>/<model>/{weights,sampler_weights}/<name>`.

    A checkpoint is written to a hidden folder, `info.json` last, and then renamed. So a folder without a dot at its
    start is complete.
    """

    def __init__(self, folder: Path, base: ServedModel) -> None:
        """Use the folder of all models; incomplete checkpoints of earlier processes are deleted."""
        self._folder, self._base = folder, base
        for partial in folder.glob("*/*/.*.partial"):
            shutil.rmtree(partial)

    def locate(self, path: str, kinds: tuple[str, ...]) -> Path:
        """Return the folder that a `tinker://` path names, whether it exists or not.

        Raises:
            RequestError: if it is no such path, or of another kind.
        """
        model, kind, name = (*path.removeprefix(_SCHEME).split("/"), "", "", "")[:3]
        is_path = path.startswith(_SCHEME) and path.count("/") == 4
        if not (is_path and _MODEL.fullmatch(model) and kind in kinds and _NAME.fullmatch(name)):
            raise RequestError(f"the path {path!r:.200} is not of the form {_SCHEME}MODEL/{'|'.join(kinds)}/NAME")
        return self._folder / model / kind / name

    def named(self, model: str, kind: str, name: str) -> Path:
        """Return the folder of a model's checkpoint. Raise `RequestError` if the name is invalid."""
        if not _NAME.fullmatch(name):
            raise RequestError(
                f"the checkpoint name {name!r:.200} is invalid; use letters, digits, '_', '.', '=', '+' and '-', at "
                "most 200, and begin with a letter, digit or '_'"
            )
        return self._folder / model / kind / name

    def ephemeral(self, model: str, number: int) -> Path:
        """Return the folder of the weights of a sampling session without a name."""
        return self._folder / model / "sampler_weights" / f"{_EPHEMERAL}{number}"

    def path_of(self, folder: Path) -> str:
        """Return the `tinker://` path of a checkpoint."""
        return _SCHEME + str(folder.relative_to(self._folder))

    def existing(self, path: str, kinds: tuple[str, ...] = tuple(KINDS)) -> Path:
        """Return the folder of a checkpoint of this base model.

        Raises:
            RequestError: if there is none.
        """
        folder = self.locate(path, kinds)
        if self.info(folder).get("fingerprint") != self._base.fingerprint:
            raise RequestError(f"the checkpoint {path!r} belongs to another base model; start the server with that one")
        return folder

    def info(self, folder: Path) -> dict[str, Any]:
        """Return the content of a checkpoint's `info.json`.

        Raises:
            RequestError: if there is no such checkpoint, or it has expired.
        """
        if (info := _read_info(folder)) is None or _has_expired(info):
            when = f"; it expired at {info['expires_at']}" if info else ""
            raise RequestError(f"there is no checkpoint {self.path_of(folder)!r:.300}{when}")
        return info

    def write(
        self,
        folder: Path,
        request_id: str,
        save: Callable[[Path], None],
        spec: ModelSpec,
        *,
        base_model: str,
        ttl: int | None = None,
        user_metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
    ) -> None:
        """Write a checkpoint. Nothing happens if the same request has written it before.

        Args:
            folder: of the checkpoint.
            request_id: identifies the request.
            save: writes the weights to a new folder.
            spec: of the model.
            base_model: name that the client gave the base model.
            ttl: seconds until it expires; None for never.
            user_metadata: stored with it.
            overwrite: whether to replace a checkpoint of another request.

        Raises:
            RequestError: if it exists.
            OSError: if it cannot be written.
        """
        former = _read_info(folder)
        if former is not None and not _has_expired(former):
            if former["request_id"] == request_id:
                return
            if not overwrite:
                raise RequestError(
                    f"the checkpoint {self.path_of(folder)!r} exists; choose another name, or overwrite a training "
                    "checkpoint with overwrite=True"
                )
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.parent.mkdir(parents=True, exist_ok=True)
        try:
            save(partial)
            info = {
                "request_id": request_id,
                "base_model": base_model,
                "fingerprint": self._base.fingerprint,
                "spec": dataclasses.asdict(spec),
                "time": now_text(),
                "expires_at": _expiry(ttl),
                "user_metadata": user_metadata,
                "size_bytes": sync_folder(partial),
            }
            _write_json(partial / "info.json", info)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        for parent in (folder.parent, folder.parent.parent, self._folder):
            sync(parent)

    def write_run(self, model: str, run: Mapping[str, Any]) -> None:
        """Write the description of a model that is trained."""
        folder = self._folder / model
        folder.mkdir(parents=True, exist_ok=True)
        _write_json(folder / "run.json", run)

    def runs(self) -> dict[str, dict[str, Any]]:
        """Return the descriptions of all models, the newest first."""
        found = {file.parent.name: json.loads(file.read_bytes()) for file in self._folder.glob("*/run.json")}
        return dict(sorted(found.items(), key=lambda item: item[1]["time"], reverse=True))

    def list(self, model: str | None = None) -> list[dict[str, Any]]:
        """Return the protocol's descriptions of the checkpoints of one or all models, the newest first."""
        if model is not None and not _MODEL.fullmatch(model):
            raise RequestError(f"the training run {model!r:.200} is not of the form SESSION:train:NUMBER")
        found = [self._describe(folder) for folder in self._folders(model or "*")]
        return sorted((one for one in found if one is not None), key=lambda one: one["time"], reverse=True)

    def delete(self, folder: Path) -> None:
        """Delete a checkpoint. Raise `RequestError` if there is none."""
        self.info(folder)
        self._remove(folder)

    def set_ttl(self, folder: Path, ttl: int | None) -> None:
        """Let a checkpoint expire `ttl` seconds from now, or never. Raise `RequestError` if there is none."""
        _write_json(folder / "info.json", {**self.info(folder), "expires_at": _expiry(ttl)})

    def delete_expired(self) -> None:
        """Delete checkpoints after their time."""
        for folder in list(self._folders("*")):
            if (info := _read_info(folder)) is not None and _has_expired(info):
                self._remove(folder)

    def delete_ephemeral(self, used: set[Path]) -> None:
        """Delete the weights of sampling sessions except `used`."""
        for folder in self._folder.glob(f"*/sampler_weights/{_EPHEMERAL}*"):
            if folder not in used:
                self._remove(folder)

    def _folders(self, model: str) -> Iterator[Path]:
        for kind in KINDS:
            for info in self._folder.glob(f"{model}/{kind}/*/info.json"):
                if not info.parent.name.startswith("."):
                    yield info.parent

    def _describe(self, folder: Path) -> dict[str, Any] | None:
        """Return the protocol's description of a checkpoint; None if it has expired."""
        if (info := _read_info(folder)) is None or _has_expired(info):
            return None
        return {
            "checkpoint_id": f"{folder.parent.name}/{folder.name}",
            "checkpoint_type": KINDS[folder.parent.name],
            "time": info["time"],
            "tinker_path": self.path_of(folder),
            "size_bytes": info["size_bytes"],
            "public": False,
            "user_metadata": texts(info["user_metadata"]),
            "expires_at": info["expires_at"],
        }

    def _remove(self, folder: Path) -> None:
        # Renamed first: a half deleted folder must not look complete.
        trash = folder.with_name(f".{folder.name.removeprefix('.')}.partial")
        shutil.rmtree(trash, ignore_errors=True)
        folder.rename(trash)
        shutil.rmtree(trash)


def spec_of(info: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a checkpoint's `info.json` describes."""
    return ModelSpec(**info["spec"])


def texts(metadata: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Return metadata as the protocol's texts."""
    return None if metadata is None else {key: str(value) for key, value in metadata.items()}


def _read_info(folder: Path) -> dict[str, Any] | None:
    """Return the content of `info.json`; None if there is none, or if something else damaged it."""
    try:
        return json.loads((folder / "info.json").read_bytes())
    except (OSError, ValueError):
        return None


def _has_expired(info: Mapping[str, Any]) -> bool:
    return info["expires_at"] is not None and datetime.datetime.fromisoformat(info["expires_at"]) <= _now()


def sync_folder(folder: Path) -> int:
    """Write the files of a folder to the disk; return their size in bytes."""
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            file = Path(parent, name)
            size += file.stat().st_size
            sync(file)
        sync(Path(parent))
    return size


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    with open_atomically(file) as opened:
        opened.write(json.dumps(value).encode())


def _expiry(ttl: int | None) -> str | None:
    return None if ttl is None else (_now() + datetime.timedelta(seconds=ttl)).isoformat()


def now_text() -> str:
    """Return the time in ISO format."""
    return _now().isoformat()


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
