"""How much a drainer may send to a broker at once: its capacity, and the messages that fail.

The size of a batch follows from how long the last one took; after a failure batches get smaller,
down to one message. A large message that fails alone three times, while the broker took other
messages or a probe in between, is refused: it would be tried for ever. Until then it goes after the
other messages of its batch, and the later messages of its ordering key go after it. A small message
is never refused for that, as its size is not the cause. An unknown error of another transport's
library counts as the fault of a message of any size in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from ...database.transaction_guard import chain_of
from ...exceptions import Undeliverable
from .batch import BUDGET_BYTES, SMALL_BYTES
from .outcome import PreparedMessage

#: Assumed speed of a connection, for the size of the first batch and the time of a large message.
BYTES_PER_SECOND = 256 * 1024
#: Attempts of a large message.
ATTEMPTS = 3


class SendBudget:
    def __init__(self, *, timeout: float) -> None:
        self.timeout = timeout
        self._limit = timeout * BYTES_PER_SECOND
        #: How often the broker has taken anything. For messages that failed alone, by task id: the
        #: number of attempts, ``_taken`` at the last one, and the broker's answer.
        self._taken = 0
        self.failed: dict[str, tuple[int, int, Exception | None]] = {}

    def in_turn(self, items: Iterable[PreparedMessage]) -> list[PreparedMessage]:
        """Put messages that failed alone last, each with the later messages of its ordering key."""
        first, last, keys = [], [], set()
        for item in items:
            key = item.row.ordering_key
            if item.row.task_id in self.failed or key in keys:
                last.append(item)
                keys |= {key} - {""}
            else:
                first.append(item)
        return first + last

    def batches(
        self,
        items: Iterable[PreparedMessage],
        *,
        alone: Callable[[PreparedMessage], bool] | None = None,
    ) -> Iterator[list[PreparedMessage]]:
        """Cut messages into batches, by the size limit that earlier batches have shown."""
        batch: list[PreparedMessage] = []
        size = 0
        for item in items:
            either = (item, *batch[:1])
            failed = self.failed and any(each.row.task_id in self.failed for each in either)
            is_alone = failed or (alone and any(map(alone, either)))
            if batch and (is_alone or size + item.size > self._limit):
                yield batch
                batch, size = [], 0
            batch.append(item)
            size += item.size
        if batch:
            yield batch

    def seconds(self, batch: list[PreparedMessage]) -> float:
        """Return how many seconds a batch may take, apart from the limit of the lease."""
        return self.timeout + (batch[0].size / BYTES_PER_SECOND if len(batch) == 1 else 0)

    def has_taken(self, batch: list[PreparedMessage], *, seconds: float) -> None:
        if not batch:
            return
        self._taken += 1
        size = sum(item.size for item in batch)
        target = self.timeout / 4
        if seconds > target:
            # At least a size that is small anywhere: for a slow broker, less would not help.
            self._limit = min(self._limit, max(size * target / seconds, SMALL_BYTES))
        elif seconds < target / 2 and size > self._limit / 2:
            self._limit = min(self._limit * 2, BUDGET_BYTES)
        for item in batch:
            self.failed.pop(item.row.task_id, None)

    def has_probed(self) -> None:
        self._taken += 1

    def has_failed(self, batch: list[PreparedMessage], answer: Exception | None = None) -> None:
        """Learn from a batch that was cut off or refused as a whole, or from an unknown error."""
        if len(batch) > 1:
            self._limit = min(self._limit, sum(item.size for item in batch)) / 4
        elif batch:
            attempts, taken, _ = self.failed.get(batch[0].row.task_id, (0, -1, None))
            attempts += taken < self._taken
            for each in chain_of(answer):
                each.__traceback__ = None  # its frames hold the batch that was read
            self.failed[batch[0].row.task_id] = attempts, self._taken, answer

    def gives_up(self, item: PreparedMessage) -> Exception | None:
        """Return an error if a message failed alone too often, and others were taken meanwhile."""
        attempts, taken, answer = self.failed.get(item.row.task_id, (0, 0, None))
        is_suspect = answer is not None or item.size > SMALL_BYTES
        if not is_suspect or attempts < ATTEMPTS or self._taken <= taken:
            return None
        del self.failed[item.row.task_id]  # it may be requeued
        return answer or Undeliverable(
            f"The broker did not take this message of {item.size:,} bytes in {ATTEMPTS} attempts, "
            "and took others in between. Pass a key instead of the data; or lengthen LEASE_SECONDS "
            "or raise the broker's limit (proto-max-bulk-len of Redis), and requeue the job."
        )


def rounds(items: Iterable[PreparedMessage], *, atomic: bool) -> list[list[PreparedMessage]]:
    """Deal messages into rounds, in order, so that no two of a round have the same ordering key.

    ``atomic``: each round is sent as one transaction, so it may hold several messages of a key that
    go to one queue: Redis then refuses all of them or none.
    """
    dealt: list[list[PreparedMessage]] = []
    newest: dict[str, tuple[int, object]] = {}
    for item in items:
        key, number = item.row.ordering_key, 0
        if key:
            message = item.message
            place = message.exchange, message.routing_key, message.priority
            number, before = newest.get(key, (-1, None))
            number += not (atomic and place == before)
            newest[key] = number, place
        if number == len(dealt):
            dealt.append([])
        dealt[number].append(item)
    return dealt
