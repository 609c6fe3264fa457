"""A folder of an archive: on this machine, or wherever pyarrow has a file system for.

A file appears whole or not at all, and is on disk before an entry names it. A lock lets one process
write to a local folder at a time; elsewhere there is none, so run one process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl, urlsplit
from uuid import uuid4

from pyarrow import fs

from ..exceptions import ArchiveRefused


class Store:
    """Files below a folder, by names with slashes.

    Args:
        folder: A path, or a URI: ``file:///…``, ``s3://bucket/…``, ``gs://…``, ``hdfs://…``.

    Raises:
        ArchiveRefused: It is no such URI, or one that holds a password.
    """

    def __init__(self, folder: str) -> None:
        #: Means the same in all processes, wherever they run.
        self.folder = folder if "://" in folder else os.path.abspath(folder)
        system, root = _opened(folder) if "://" in folder else (fs.LocalFileSystem(), self.folder)
        self.system = system
        self.root = root.rstrip("/")
        self.is_local = isinstance(system, fs.LocalFileSystem)

    def list(self, name: str = "") -> dict[str, int]:
        selector = fs.FileSelector(self._path(name), recursive=True, allow_not_found=True)
        found = self.system.get_file_info(selector)
        start = len(self.root) + 1
        return {info.path[start:]: info.size for info in found if info.type == fs.FileType.File}

    def read(self, name: str) -> bytes:
        with self.system.open_input_stream(self._path(name)) as stream:
            return bytes(stream.read())

    def open(self, name: str) -> Any:
        return self.system.open_input_file(self._path(name))

    def create(self, name: str) -> Any:
        path = self._path(name)
        self.system.create_dir(path.rpartition("/")[0], recursive=True)
        return open(path, "xb") if self.is_local else self.system.open_output_stream(path)

    def write(self, name: str, content: bytes) -> None:
        """Write a file as a whole; one of that name is replaced."""
        beside = f"{name}.{uuid4().hex[:8]}.tmp"
        try:
            with self.create(beside) as stream:
                stream.write(content)
                self.sync(stream)
            self.move(beside, name)
        except BaseException:
            with contextlib.suppress(OSError):
                self.delete(beside)
            raise

    def sync(self, stream: Any) -> None:
        """Have what was written on disk."""
        if self.is_local:
            stream.flush()
            os.fsync(stream.fileno())

    def move(self, name: str, to: str) -> None:
        target = self._path(to)
        self.system.create_dir(target.rpartition("/")[0], recursive=True)
        self.system.move(self._path(name), target)
        if self.is_local:
            folder = os.open(os.path.dirname(target), os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def delete(self, name: str) -> None:
        self.system.delete_file(self._path(name))

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes of this machine from writing. Raises ``ArchiveRefused``."""
        if not self.is_local:
            yield
            return
        os.makedirs(self.root, exist_ok=True)
        with open(self._path("_lock"), "a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ArchiveRefused(
                    f"Another process is writing to {self.folder}. Wait for it, or stop it."
                ) from error
            yield

    def _path(self, name: str) -> str:
        if not name:
            return self.root
        path, root = f"{self.root}/{name}", os.path.realpath(self.root)
        if self.is_local and not os.path.realpath(path).startswith(f"{root}/"):
            raise ArchiveRefused(
                f"The archive {self.folder} is damaged: {name!r:.100} leads out of it, by a "
                "symbolic link or by its name. Archives hold no links; put a folder in its place."
            )
        return path


#: In the names of parameters that are secret.
_SECRET = re.compile("key|secret|token|password|sas", re.IGNORECASE)


def _opened(uri: str) -> tuple[Any, str]:
    said = urlsplit(uri)
    if said.password is not None or any(_SECRET.search(name) for name, _ in parse_qsl(said.query)):
        raise ArchiveRefused(
            "The address of the archive holds a password, which would be shown in logs. Leave it "
            "out, and give it to each process as the store's own tools take it: in its "
            "environment, or in a file."
        )
    try:
        # Hadoop calls S3 s3a.
        opened: tuple[Any, str] = fs.FileSystem.from_uri(uri.replace("s3a://", "s3://", 1))
    except (ValueError, NotImplementedError, ImportError, OSError) as error:
        raise ArchiveRefused(
            f"{uri} cannot be opened: {error}. Expected a path, or the address of a folder that "
            "pyarrow has a file system for: file:///…, s3://bucket/…, gs://…, hdfs://…."
        ) from error
    return opened
