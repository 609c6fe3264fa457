"""The folder of an archive: on this machine, or in an object store that pyarrow and delta-rs know.

A file appears as a whole or not at all, and is on disk before a commit names it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urlsplit
from uuid import uuid4

from pyarrow import fs

from ..text import one_line, without_passwords
from .exceptions import ArchiveRefused, Unreachable

#: Characters of a path that delta-rs does not take literally.
_UNFIT = re.compile(r"[?#\\\x00-\x1f]|%[0-9A-Fa-f]{2}")
#: Colour codes in messages of delta-rs.
_COLOURS = re.compile(r"\x1b\[[\d;]*m")
#: Words in these messages when a request has failed, or its answer was cut off.
_FAILED = re.compile("Error performing|HTTP error")
#: The answer of the store itself. The rest of a message may hold a token.
_ANSWER = re.compile(r"<Code>(.*?)</Code>\s*<Message>(.*?)</Message>", re.DOTALL)


class Store:
    """Files below a folder, by names with slashes.

    ``folder`` is a path or an address. Raises ``ArchiveRefused`` if it is neither, or contains a
    password or parameters. Each method raises ``Unreachable`` if an object store does not answer.
    """

    def __init__(self, folder: str) -> None:
        url = urlsplit(folder) if re.match(r"[\w+.-]{2,}:/", folder) else None
        is_open = without_passwords(folder) != folder
        if url and (is_open or url.password is not None or url.query):
            raise ArchiveRefused(
                "The address of the archive holds a password or parameters, which would be shown "
                "in logs. Leave them out, and give them to each process in its environment: "
                "AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL …"
            )
        self.is_local = url is None or url.scheme == "file"
        path = unquote(url.path) if url else folder
        #: The folder in a form that means the same in all processes.
        self.folder = (os.path.abspath(path) if self.is_local else folder).rstrip("/")
        if self.is_local and (unfit := _UNFIT.search(self.folder)):
            raise ArchiveRefused(
                f"{self.folder!r} cannot hold an archive: delta-rs, which writes its table, would "
                f"take {unfit[0]!r} for a part of an address. Name another folder."
            )
        self.system, self.root = fs.LocalFileSystem(), self.folder
        if not self.is_local:
            try:
                if url and not url.netloc:  # "s3:", without slashes, would be a local folder
                    raise ValueError("it names no bucket")
                self.system, self.root = fs.FileSystem.from_uri(self.folder)
            except (ValueError, NotImplementedError, ImportError, OSError) as error:
                if "AWS Error" in str(error):  # from its request for the bucket's region
                    self.require_reached(error)
                raise ArchiveRefused(
                    f"{self.folder} cannot be opened: {error}. Expected a path, or the address of "
                    "a folder that pyarrow and delta-rs know: file:///…, s3://bucket/…, "
                    "gs://…, abfs://…."
                ) from error

    def list(self) -> dict[str, int]:
        selector = fs.FileSelector(self.root, recursive=True, allow_not_found=True)
        with self._reached():
            found = self.system.get_file_info(selector)
        start = len(self.root) + 1
        return {info.path[start:]: info.size for info in found if info.type == fs.FileType.File}

    def read(self, name: str) -> bytes:
        with self._reached(), self.open(name) as file:
            return bytes(file.read())

    def open(self, name: str) -> Any:
        with self._reached():
            return self.system.open_input_file(self._path(name))

    def write(self, name: str, content: bytes) -> None:
        path = self._path(name)
        if not self.is_local:
            with self._reached(), self.system.open_output_stream(path) as stream:
                stream.write(content)
            return
        os.makedirs(os.path.dirname(path), exist_ok=True)
        write_whole(path, content)
        self.sync(name)

    def sync(self, name: str) -> None:
        """Flush a file to disk, and its name, and the name of its folder."""
        if self.is_local:
            path = self._path(name)
            for each in (path, os.path.dirname(path), self.folder):
                number = os.open(each, os.O_RDONLY)
                try:
                    os.fsync(number)
                finally:
                    os.close(number)

    def delete(self, name: str) -> None:
        with self._reached():
            self.system.delete_file(self._path(name))

    def require_reached(self, error: Exception) -> None:
        """Raise ``Unreachable`` for a failure of an object store, and a disk's error as it is."""
        text = str(error)
        failed = isinstance(error, OSError) or _FAILED.search(text)
        missing = isinstance(error, FileNotFoundError) or "404 Not Found" in text
        if failed and not missing and not self.is_local:
            raise Unreachable(
                f"Access to {self.folder} failed: {message_of(error)}. Each process needs valid "
                "credentials and a way to the store. The rows in the archive's table are "
                "archived; run the command again."
            ) from error
        if isinstance(error, OSError):
            if error.errno is None:  # delta-rs has raised it, in several lines
                raise OSError(f"{self.folder}: {message_of(error)}") from error
            raise error

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.require_reached(error)

    def _path(self, name: str) -> str:
        path, root = f"{self.root}/{name}", os.path.realpath(self.root)
        if self.is_local and not os.path.realpath(path).startswith(f"{root}/"):
            raise ArchiveRefused(
                f"The archive {self.folder} is damaged: {name!r:.100} leads out of it, by a "
                "symbolic link or by its name. Archives have no links: replace it with a folder."
            )
        return path


def write_whole(path: str, content: bytes) -> None:
    """Write a local file. A reader sees either the old content or the new one."""
    beside = f"{path}.{uuid4().hex[:8]}.tmp"
    try:
        with open(beside, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(beside)
        raise


def message_of(error: Exception) -> str:
    """Return the message of a store, or of delta-rs, in one line."""
    text = _COLOURS.sub("", str(error))
    answer = _ANSWER.search(text)
    return one_line(": ".join(answer.groups()) if answer else text, 300).rstrip(".")
