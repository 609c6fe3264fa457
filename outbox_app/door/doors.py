"""What the door adds to the core: peers whose clocks are wrong.

A wrong clock makes the door, or its peer, refuse messages. The offsets are read from the table of
statistics, where every process finds them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext_lazy

from ..capability import WARNING, Doors, Problem, ProblemKind, Section, Subject
from ..monitoring.diagnosis import problem_of
from ..monitoring.status import Question
from .clocks import PEER_CLOCK, wrong_clocks
from .conf import DoorSettings
from .models import Peer

# fmt: off
KINDS = {
    "peer_clock": ProblemKind(
        190, WARNING, ngettext_lazy(
        "The clock of %(count)s peer is wrong by more than a minute.",
        "The clocks of %(count)s peers are wrong by more than a minute.", "n"),
        _("Set the clock of the peer, or of this host: requests and answers are refused."),
        place=("outbox_door.peer", {})),
}
# fmt: on


@dataclass(frozen=True, slots=True)
class DoorSection(Section):
    #: Peers whose clocks are wrong by more than a minute, and by how many seconds.
    clocks: dict[str, int]

    def problems(self, on: str) -> Iterator[Problem]:
        yield problem_of(
            "peer_clock", [Subject(n, f"{off:+d} s") for n, off in self.clocks.items()]
        )


class PeerDoors(Doors):
    name = "door"
    rank = 40
    settings = DoorSettings
    counters = (PEER_CLOCK,)
    kinds = KINDS

    def parts(self) -> Mapping[str, Any]:
        return {"peers": [Peer]}

    def read(self, question: Question) -> DoorSection | None:
        if not question.wants("peers"):
            return None
        return DoorSection(wrong_clocks(using=question.database))


DOORS = PeerDoors()
