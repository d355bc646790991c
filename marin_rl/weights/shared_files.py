# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Weight transfer through a shared folder: a file system, or an object store through fsspec.

Each training host writes two files per version, `<version>-<host>-of-<hosts>-<fingerprint of the secret>`: first
`.pieces`, then `.manifest`. A version is complete when the manifests of all hosts exist.
"""

import dataclasses
import hmac
import itertools
import re
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import numpy as np

from marin_rl.remote_path import RemotePath
from marin_rl.storage import StoragePath, read_range, storage_path, write_parts
from marin_rl.types import WeightVersion
from marin_rl.weights.manifest import Chunk, Manifest, check_secret
from marin_rl.weights.protocol import KEPT_VERSIONS, ServerLostError, VersionGoneError, WrongSecretError
from marin_rl.weights.publish import Snapshot, TrainingHost


def fingerprint(secret: str) -> str:
    """Return 16 hexadecimal digits that identify a secret without revealing it."""
    return hmac.digest(secret.encode(), b"marin_rl weights of this run", "sha256").hex()[:16]


_NAME = re.compile(r"(\d{12})-(\d{5})-of-(\d{5})-([0-9a-f]{16})\.(pieces|manifest|partial)")


@dataclasses.dataclass(frozen=True, order=True)
class _File:
    """Parsed file name."""

    version: WeightVersion
    host: int
    hosts: int
    fingerprint: str

    def name(self, kind: str) -> str:
        return f"{self.version:012d}-{self.host:05d}-of-{self.hosts:05d}-{self.fingerprint}.{kind}"


class _Folder:
    """A folder of weights."""

    def __init__(self, url: str) -> None:
        self.root = storage_path(url, "weights.folder")

    def path(self, file: _File, kind: str) -> StoragePath:
        return self.root / file.name(kind)

    def list(self) -> list[tuple[_File, str]]:
        """List the files of the transfer with their kinds; ignore other files."""
        try:
            names = [path.name for path in self.root.iterdir()]
        except FileNotFoundError:
            return []
        matches = [match for name in names if (match := _NAME.fullmatch(name))]
        return sorted((_File(int(m[1]), int(m[2]), int(m[3]), m[4]), m[5]) for m in matches)

    def remove(self, file: _File, kind: str) -> None:
        # Two senders of a new launch may delete the same old files.
        self.path(file, kind).unlink(missing_ok=True)


class FolderBackend:
    """Files of one training host in the folder; see [`WeightBackend`][marin_rl.weights.publish.WeightBackend]."""

    def __init__(self, *, folder: str, secret: str, training_host: TrainingHost) -> None:
        """Create the folder and delete the files of earlier launches.

        Args:
            folder: path or fsspec address.
            secret: the run's secret.
            training_host: the training host of this process.
        """
        check_secret(secret)
        self._folder = _Folder(folder)
        root = self._folder.root
        # Workers may have another working directory.
        self.address = str(root.absolute() if isinstance(root, Path) else root)
        """Absolute path or fsspec address of the folder."""
        self._secret = secret
        self._host = training_host
        self._folder.root.mkdir(parents=True, exist_ok=True)
        self._clear(lambda file: self._is_own(file) or (training_host.index == 0 and file.hosts != training_host.count))

    def put(self, snapshot: Snapshot) -> None:
        """See [`WeightBackend`][marin_rl.weights.publish.WeightBackend]."""
        version = snapshot.manifest.version
        file = _File(version, self._host.index, self._host.count, fingerprint(self._secret))
        write_parts(self._folder.path(file, "pieces"), (data.data for data in snapshot.data))
        self._write_whole(file, snapshot.manifest.sign(self._secret))
        kept = sorted({held.version for held, _ in self._folder.list() if self._is_own(held)})[-KEPT_VERSIONS:]
        self._clear(lambda held: self._is_own(held) and held.version not in kept)

    def close(self) -> None:
        """See [`WeightBackend`][marin_rl.weights.publish.WeightBackend]. Deletes the files of this host."""
        self._clear(self._is_own)

    def _is_own(self, file: _File) -> bool:
        return file.host == self._host.index and file.hosts == self._host.count

    def _write_whole(self, file: _File, content: bytes) -> None:
        """Write the manifest atomically."""
        manifest, partial = self._folder.path(file, "manifest"), self._folder.path(file, "partial")
        if isinstance(manifest, RemotePath):
            manifest.write_bytes(content)
        elif isinstance(partial, Path):
            partial.write_bytes(content)
            partial.rename(manifest)

    def _clear(self, should_delete: Callable[[_File], bool]) -> None:
        # "manifest" sorts before "pieces", so a version is unlisted before its bytes are deleted.
        for file, kind in self._folder.list():
            if should_delete(file):
                self._folder.remove(file, kind)


class FolderSource:
    """Source that reads a folder of weights; see [`WeightSource`][marin_rl.weights.fetch.WeightSource]."""

    def __init__(self, folder: str, secret: str, *, streams: int) -> None:
        """Set up the source without reading.

        Args:
            folder: path or fsspec address.
            secret: the run's secret.
            streams: concurrent reads for each training host.
        """
        check_secret(secret)
        self.streams = streams
        """See [`WeightSource`][marin_rl.weights.fetch.WeightSource]."""
        self._folder = _Folder(folder)
        self._secret = secret

    def __str__(self) -> str:
        return f"weight folder {self._folder.root}"

    def versions(self) -> list[WeightVersion]:
        """See [`WeightSource`][marin_rl.weights.fetch.WeightSource].

        Raises:
            WrongSecretError: if all files were written with another secret.
        """
        return sorted(self._complete())

    def manifests(self, version: WeightVersion) -> list[Manifest]:
        """See [`WeightSource`][marin_rl.weights.fetch.WeightSource]."""
        complete = self._complete()
        if version not in complete:
            raise VersionGoneError(
                f"{self} does not have version {version}; available versions: {sorted(complete) or 'none'}"
            )
        return [self._manifest(file) for file in complete[version]]

    def fetch(self, manifest: Manifest, chunks: Sequence[Chunk]) -> Generator[np.ndarray, None, None]:
        """See [`WeightSource`][marin_rl.weights.fetch.WeightSource]."""
        file = _File(manifest.version, manifest.host, manifest.hosts, fingerprint(self._secret))
        starts = list(itertools.accumulate((piece.num_bytes for piece in manifest.pieces), initial=0))
        for chunk in chunks:
            start, stop = (starts[chunk.piece] + offset for offset in manifest.span(chunk))
            yield np.frombuffer(self._read(file, "pieces", start, stop), np.uint8)

    def _complete(self) -> dict[WeightVersion, list[_File]]:
        """Return the manifests of every version that all hosts have written."""
        manifests = [file for file, kind in self._list() if kind == "manifest"]
        own = [file for file in manifests if file.fingerprint == fingerprint(self._secret)]
        if manifests and not own:
            raise WrongSecretError(
                f"{self} contains only weights with another secret, so of another run or an earlier launch"
            )
        by_version: dict[WeightVersion, list[_File]] = {}
        for file in own:
            by_version.setdefault(file.version, []).append(file)
        return {version: files for version, files in by_version.items() if len(files) == files[0].hosts}

    def _manifest(self, file: _File) -> Manifest:
        signed = self._read(file, "manifest", None, None)
        return Manifest.verify(signed, self._secret, f"{self}, {file.name('manifest')}")

    def _list(self) -> list[tuple[_File, str]]:
        try:
            return self._folder.list()
        except OSError as error:
            raise ServerLostError(f"{self} cannot be listed: {error}") from error

    def _read(self, file: _File, kind: str, start: int | None, stop: int | None) -> bytes:
        try:
            path = self._folder.path(file, kind)
            return path.read_bytes() if start is None or stop is None else read_range(path, start, stop)
        except FileNotFoundError as error:
            raise VersionGoneError(
                f"{self}: version {file.version} was deleted, {file.name(kind)} does not exist"
            ) from error
        except OSError as error:
            raise ServerLostError(f"{self}: {file.name(kind)} cannot be read: {error}") from error
