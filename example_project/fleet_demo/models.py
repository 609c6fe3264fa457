"""Entities that sell seats: many small desks, and shows that all callers want at once."""

import os

from outbox_app.entities import Entity, EntityVersion, Rejected, command


class Seats(Entity):
    """The seats that are left. Each answer names the server that has executed the command."""

    class Meta:
        abstract = True

    @command(creates=True)
    def open(self, seats):
        self.state = {"left": seats}

    @command()
    def book(self):
        if not self.state["left"]:
            raise Rejected("There is no seat left.", code="sold_out")
        self.state["left"] -= 1
        return {"server": os.environ["SERVER"]}


class DeskVersion(EntityVersion):
    """The commands to desks."""


class Desk(Seats):
    """One desk of many. The server that receives a command executes it."""

    versions = DeskVersion


class ShowVersion(EntityVersion):
    """The commands to shows."""


class Show(Seats):
    """A hot entity: servers forward its commands to the server that leads it."""

    versions = ShowVersion
    routed = True
