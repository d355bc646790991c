# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Weights through a folder that learner and workers share: a file system, or an object store through fsspec.

Each training host writes two files a version, `<version>-<host>-of-<hosts>-<fingerprint of the token>`: `.pieces`
first, then `.manifest`. A version is complete when the manifest of every host is there.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Generator, Sequence

import fsspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem

from marin_rl.types import WeightVersion
from marin_rl.weights.auth import check_secret, fingerprint, sign, verify
from marin_rl.weights.errors import ServerLostError, VersionGoneError, WrongTokenError
from marin_rl.weights.manifest import Chunk, Manifest
from marin_rl.weights.snapshot import Snapshot, TrainingHost

_NAME = re.compile(r"(\d{12})-(\d{5})-of-(\d{5})-([0-9a-f]{16})\.(pieces|manifest|partial)")


@dataclasses.dataclass(frozen=True, order=True)
class _File:
    """What a file's name says."""

    version: WeightVersion
    host: int
    hosts: int
    fingerprint: str

    def name(self, kind: str) -> str:
        return f"{self.version:012d}-{self.host:05d}-of-{self.hosts:05d}-{self.fingerprint}.{kind}"


class _Folder:
    """A folder of weights, on any file system."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.files, root = fsspec.core.url_to_fs(url)
        self._root = root.rstrip("/")

    def path(self, file: _File, kind: str) -> str:
        return f"{self._root}/{file.name(kind)}"

    def create(self) -> None:
        self.files.makedirs(self._root, exist_ok=True)

    def list(self) -> list[tuple[_File, str]]:
        """Every file of a transfer, with its kind; others are left alone."""
        self.files.invalidate_cache(self._root)
        try:
            paths = self.files.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        found = [match for path in paths if (match := _NAME.fullmatch(path.rsplit("/", 1)[-1]))]
        return sorted((_File(int(m[1]), int(m[2]), int(m[3]), m[4]), m[5]) for m in found)

    def remove(self, file: _File, kind: str) -> None:
        try:
            self.files.rm_file(self.path(file, kind))
        except FileNotFoundError:
            # Two senders of a new launch may clear away the same leftovers.
            return


class FolderOutlet:
    """One host's files of the folder; see [`WeightBackend`][marin_rl.weights.backend.WeightBackend]."""

    def __init__(self, *, folder: str, token: str, training_host: TrainingHost, keep: int) -> None:
        """Make the folder, and clear away what an earlier launch left in it.

        Args:
            folder: path or fsspec address.
            token: the run's secret.
            training_host: whose shards are written.
            keep: versions that are held.
        """
        check_secret(token)
        self._folder = _Folder(folder)
        self._token = token
        self._host = training_host
        self._keep = keep
        self._folder.create()
        self._clear(lambda file: self._is_own(file) or (training_host.index == 0 and file.hosts != training_host.count))

    @property
    def address(self) -> str:
        """The folder."""
        return self._folder.url

    def put(self, snapshot: Snapshot) -> None:
        """See [`WeightBackend`][marin_rl.weights.backend.WeightBackend]."""
        version = snapshot.manifest.version
        file = _File(version, self._host.index, self._host.count, fingerprint(self._token))
        with self._folder.files.open(self._folder.path(file, "pieces"), "wb") as stream:
            for data in snapshot.data:
                stream.write(data.data)
        self._write_whole(file, sign(self._token, snapshot.manifest.to_json()))
        kept = sorted({held.version for held, _ in self._folder.list() if self._is_own(held)})[-self._keep :]
        self._clear(lambda held: self._is_own(held) and held.version not in kept)

    def close(self) -> None:
        """See [`WeightBackend`][marin_rl.weights.backend.WeightBackend]; this host's files are deleted."""
        self._clear(self._is_own)

    def _is_own(self, file: _File) -> bool:
        return file.host == self._host.index and file.hosts == self._host.count

    def _write_whole(self, file: _File, content: bytes) -> None:
        """Write the manifest so that no reader sees half of it."""
        if isinstance(self._folder.files, LocalFileSystem):
            partial = self._folder.path(file, "partial")
            self._folder.files.pipe_file(partial, content)
            self._folder.files.mv(partial, self._folder.path(file, "manifest"))
        else:
            # An object appears whole.
            self._folder.files.pipe_file(self._folder.path(file, "manifest"), content)

    def _clear(self, doomed: Callable[[_File], bool]) -> None:
        # "manifest" sorts before "pieces", so a version stops to be listed before its bytes go.
        for file, kind in self._folder.list():
            if doomed(file):
                self._folder.remove(file, kind)


class FolderSource:
    """A folder of weights; see [`WeightSource`][marin_rl.weights.source.WeightSource]."""

    def __init__(self, folder: str, token: str, *, streams: int) -> None:
        """Read nothing yet.

        Args:
            folder: path or fsspec address.
            token: the run's secret.
            streams: how many files are read at the same time for each training host.
        """
        check_secret(token)
        self._folder = _Folder(folder)
        self._token = token
        self._streams = streams

    def __str__(self) -> str:
        return f"weight folder {self._folder.url}"

    @property
    def streams(self) -> int:
        """See [`WeightSource`][marin_rl.weights.source.WeightSource]."""
        return self._streams

    def versions(self) -> list[WeightVersion]:
        """See [`WeightSource`][marin_rl.weights.source.WeightSource].

        Raises:
            WrongTokenError: if all that is there was written with another token.
        """
        return sorted(self._complete())

    def manifests(self, version: WeightVersion) -> list[Manifest]:
        """See [`WeightSource`][marin_rl.weights.source.WeightSource]."""
        complete = self._complete()
        if version not in complete:
            raise VersionGoneError(f"{self} does not hold version {version}; it holds {sorted(complete) or 'none'}")
        return [self._manifest(file) for file in complete[version]]

    def fetch(self, manifest: Manifest, chunks: Sequence[Chunk]) -> Generator[np.ndarray, None, None]:
        """See [`WeightSource`][marin_rl.weights.source.WeightSource]."""
        file = _File(manifest.version, manifest.host, manifest.hosts, fingerprint(self._token))
        starts = list(itertools.accumulate((piece.num_bytes for piece in manifest.pieces), initial=0))
        for chunk in chunks:
            start, stop = (starts[chunk.piece] + offset for offset in manifest.span(chunk))
            yield np.frombuffer(self._read(file, "pieces", start, stop), np.uint8)

    def _complete(self) -> dict[WeightVersion, list[_File]]:
        """The files of every version that all its hosts have written."""
        manifests = [file for file, kind in self._list() if kind == "manifest"]
        own = [file for file in manifests if file.fingerprint == fingerprint(self._token)]
        if manifests and not own:
            raise WrongTokenError(f"{self} holds weights of another token alone, so of another run or launch")
        by_version: dict[WeightVersion, list[_File]] = {}
        for file in own:
            by_version.setdefault(file.version, []).append(file)
        return {version: files for version, files in by_version.items() if len(files) == files[0].hosts}

    def _manifest(self, file: _File) -> Manifest:
        sealed = self._read(file, "manifest", None, None)
        return Manifest.from_json(verify(self._token, sealed, f"{self}, {file.name('manifest')}"))

    def _list(self) -> list[tuple[_File, str]]:
        try:
            return self._folder.list()
        except OSError as error:
            raise ServerLostError(f"{self} cannot be listed: {error}") from error

    def _read(self, file: _File, kind: str, start: int | None, stop: int | None) -> bytes:
        try:
            return self._folder.files.cat_file(self._folder.path(file, kind), start=start, end=stop)
        except FileNotFoundError as error:
            raise VersionGoneError(f"{self}: version {file.version} was deleted, {file.name(kind)} is gone") from error
        except OSError as error:
            raise ServerLostError(f"{self}: {file.name(kind)} cannot be read: {error}") from error
