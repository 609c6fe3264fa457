"""A broker made of files, for trying things out: a kombu transport that needs no server.

A message is one file in the folder of its queue. The producer writes it to ``aside/`` and renames
it into the queue; a consumer claims it by another rename. So no consumer reads half a message, and
no two consumers take the same one. An acknowledged message is deleted. A published message survives
a SIGKILL of any process: the next consumer that looks puts the claims of a dead one back in their
old place (a lock file is free as soon as the kernel has ended the consumer and its forks).

Messages leave in the order of their names, which is the order of publishing by this machine's
clock. Not offered: fanout (so no ``celery inspect``), priorities, several machines, protection from
a power cut (nothing is fsynced), Windows. A producer killed while writing leaves a file in
``aside/`` that no consumer reads; such a message was never published.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import time
import uuid
from collections import defaultdict, deque
from contextlib import suppress
from itertools import count
from pathlib import Path
from queue import Empty
from urllib.parse import quote

from kombu.exceptions import ChannelError
from kombu.transport import virtual
from kombu.utils.json import dumps, loads

#: Names read from a queue's folder at once. An older message that is put back waits for the next.
LISTING = 500
#: Seconds between two searches for dead consumers.
RESTORE_INTERVAL = 5.0
#: Suffix of a message's name: it was claimed before, and a consumer may have seen it.
AGAIN = ".again"


class Channel(virtual.Channel):
    """A producer or consumer. A message's delivery tag is its path below the folder of claims."""

    _names = count()

    def __init__(self, connection, **kwargs):
        super().__init__(connection, **kwargs)
        self._root = connection.folder
        self._claims = None
        self._claimed_queues = set()
        self._restored_at = None
        self._listed = defaultdict(deque)
        self._no_ack = set()

    # Publishing

    def _put(self, queue, message, **kwargs):
        name = f"{time.time_ns():020d}-{os.getpid():07d}-{next(self._names):09d}"
        aside = self._root / "aside" / name
        aside.write_text(dumps(message), encoding="utf-8")
        folder = self._folder(queue)
        try:
            aside.rename(folder / name)
        except FileNotFoundError:
            folder.mkdir(parents=True, exist_ok=True)
            aside.rename(folder / name)

    # Consuming

    def _get(self, queue, timeout=None):
        self._restore_claims_of_the_dead()
        claim = self._claim_first(self._folder(queue))
        message = loads(claim.read_text(encoding="utf-8"))
        properties = message["properties"]
        properties["delivery_tag"] = str(claim.relative_to(self._root / "claims"))
        properties["delivery_info"]["redelivered"] = claim.name.endswith(AGAIN)
        if queue in self._no_ack:
            claim.unlink()
        return message

    def _claim_first(self, folder):
        """Move the first message of a queue to this consumer's claims, or raise Empty."""
        listed = self._listed[folder]
        if not listed:
            listed.extend(self._list(folder))
        while listed:
            claim = self._own_claims(folder.name) / listed[0]
            # If two consumers want the same name, rename() succeeds for only one of them.
            with suppress(FileNotFoundError):
                return (folder / listed.popleft()).rename(claim)
        raise Empty

    def _own_claims(self, queue_name):
        """Return the folder for this consumer's claims on a queue."""
        if self._claims is None:
            self._claims = self._root / "claims" / uuid.uuid4().hex
            self._claims.mkdir()
            self._lock = self._announce(self._claims)
        if queue_name not in self._claimed_queues:
            (self._claims / queue_name).mkdir()
            self._claimed_queues.add(queue_name)
        return self._claims / queue_name

    def _announce(self, claims):
        """Create the lock file of the claims. It stays locked as long as the consumer lives."""
        aside = self._root / "aside" / f"{claims.name}.lock"
        lock = aside.open("x")
        # Lock it before others can see it: a visible lock file that is free means a dead consumer.
        fcntl.flock(lock, fcntl.LOCK_EX)
        aside.rename(claims.with_suffix(".lock"))
        return lock

    # Acknowledging. The delivery tag holds the file's path, so any thread may acknowledge.

    def basic_ack(self, delivery_tag, multiple=False):
        super().basic_ack(delivery_tag, multiple=multiple)
        (self._root / "claims" / delivery_tag).unlink(missing_ok=True)

    def basic_reject(self, delivery_tag, requeue=False):
        super().basic_reject(delivery_tag, requeue=requeue)
        if not requeue:
            (self._root / "claims" / delivery_tag).unlink(missing_ok=True)

    def _restore(self, message):
        self._put_back(self._root / "claims" / message.delivery_tag)

    def _put_back(self, claim):
        queue = self._root / "queues" / claim.parent.name
        queue.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):  # acknowledged in the meantime
            claim.rename(queue / (claim.name.removesuffix(AGAIN) + AGAIN))

    def _restore_claims_of_the_dead(self):
        now = time.monotonic()
        if self._restored_at is not None and now - self._restored_at < RESTORE_INTERVAL:
            return
        self._restored_at = now
        for path in (self._root / "claims").glob("*.lock"):
            with suppress(FileNotFoundError, BlockingIOError), path.open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._end_claims(path.with_suffix(""))

    def _end_claims(self, claims):
        """Put every claim back, then remove the folder of claims, and its lock file last."""
        if claims.is_dir():
            for folder in claims.iterdir():
                for claim in folder.iterdir():
                    self._put_back(claim)
                folder.rmdir()
            claims.rmdir()
        claims.with_suffix(".lock").unlink(missing_ok=True)

    # Kombu's interface of a channel

    def basic_consume(self, queue, no_ack, *args, **kwargs):
        if no_ack:
            self._no_ack.add(queue)
        return super().basic_consume(queue, no_ack, *args, **kwargs)

    def basic_get(self, queue, no_ack=False, **kwargs):
        message = super().basic_get(queue, no_ack=no_ack, **kwargs)
        if message is not None and no_ack:
            self.basic_ack(message.delivery_tag)
        return message

    def close(self):
        super().close()
        if self._claims is not None:
            with self._lock:
                self._end_claims(self._claims)
            self._claims = None

    def _new_queue(self, queue, **kwargs):
        self._folder(queue).mkdir(parents=True, exist_ok=True)

    def _has_queue(self, queue, **kwargs):
        return self._folder(queue).is_dir()

    def _size(self, queue):
        with suppress(FileNotFoundError):
            return len(os.listdir(self._folder(queue)))
        return 0

    def _purge(self, queue):
        purged = 0
        with suppress(FileNotFoundError):
            for name in os.listdir(self._folder(queue)):
                with suppress(FileNotFoundError):
                    (self._folder(queue) / name).unlink()
                    purged += 1
        return purged

    def _delete(self, queue, *args, **kwargs):
        self._purge(queue)
        with suppress(OSError):  # the folder stays if a message has arrived in the meantime
            self._folder(queue).rmdir()

    def _folder(self, queue):
        name = quote(queue, safe="").replace(".", "%2E")
        if not name or len(name) > 255:
            raise ChannelError(f"The embedded broker cannot hold a queue of the name {queue!r}.")
        return self._root / "queues" / name

    @staticmethod
    def _list(folder):
        with suppress(FileNotFoundError):
            return heapq.nsmallest(LISTING, os.listdir(folder))
        return []


class Transport(virtual.Transport):
    """The embedded broker. ``transport_options["folder"]`` is the folder of its files."""

    Channel = Channel
    driver_type = "embedded"
    driver_name = "files"
    default_port = 0
    #: Seconds between two polls of an empty queue. A poll lists one folder.
    polling_interval = 0.02

    def __init__(self, client, **kwargs):
        super().__init__(client, **kwargs)
        folder = client.transport_options.get("folder")
        if not folder:
            raise ChannelError("The embedded broker needs transport_options = {'folder': …}.")
        self.folder = Path(folder)
        for name in ("aside", "queues", "claims"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    @property
    def default_connection_params(self):
        return {}

    def driver_version(self):
        return "1"
