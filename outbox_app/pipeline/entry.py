"""An entry of a manifest: which files hold which batches of the log, and nothing else counts.

An entry is a JSON file with its own checksum. It names each Parquet file by its hash, so that what
rots on disk or is cut is told from what was written.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..exceptions import DamagedCursor
from .offset import Offset

MANIFEST = "_manifest"
#: What is being written.
INCOMING = "_incoming"
#: What other files are in the stead of, for those who are reading it.
REPLACED = "_replaced"
DATA = "data"

#: What is raised where a file of a manifest makes no sense.
NONSENSE = (ValueError, LookupError, TypeError, AttributeError, DamagedCursor)

_DATA_FILE = re.compile(rf"{DATA}/date=[\d-]+/(?:\d+-)?(\d+)-[0-9a-f]{{12}}\.parquet", re.ASCII)


@dataclass(frozen=True, slots=True)
class File:
    """A Parquet file."""

    name: str
    rows: int
    bytes: int
    sha256: str
    #: First and last position in it.
    first: int
    last: int

    @property
    def base(self) -> str:
        """Its name without folders, which no other file has."""
        return self.name.rpartition("/")[2]

    @property
    def incoming(self) -> str:
        """Where it was written."""
        return f"{INCOMING}/{self.base}"


@dataclass(frozen=True, slots=True)
class Entry:
    """Batches of the log, one after the other."""

    #: Numbers of the first and the last batch.
    first: int
    last: int
    start: Offset
    end: Offset
    files: Sequence[File]
    #: When it was compared with the log, row by row: seconds since 1970.
    verified: float
    rows: int = field(init=False)

    def __post_init__(self) -> None:
        """Count."""
        object.__setattr__(self, "rows", sum(file.rows for file in self.files))

    @property
    def name(self) -> str:
        """Its file."""
        return f"{MANIFEST}/{self.first:08d}-{self.last:08d}.json"

    def dump(self) -> bytes:
        """Return what its file holds."""
        values = asdict(self)
        return json.dumps({"sha256": _digest(values), **values}, indent=1).encode()

    @classmethod
    def load(cls, content: bytes) -> Entry:
        """Return the entry of a file. Raises one of ``NONSENSE``."""
        values = json.loads(content)
        if values.pop("sha256") != _digest(values):
            raise ValueError("its checksum does not fit")
        del values["rows"]
        values |= {name: Offset.load(values[name]) for name in ("start", "end")}
        files = tuple(File(**each) for each in values["files"])
        for file in files:
            if last_batch(file.name) is None:  # others could lie outside the archive
                raise ValueError(f"{file.name!r:.100} is no name of a file of an archive")
        return cls(**{**values, "files": files})


def last_batch(name: str) -> int | None:
    """Return the last batch in a file of ``data``, as its name says; None: it is not ours."""
    match = _DATA_FILE.fullmatch(name)
    return int(match[1]) if match else None


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
