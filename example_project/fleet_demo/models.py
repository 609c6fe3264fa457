"""What is sold: seats at shows, which everybody wants at once, and at many small desks."""

import os

from outbox_app.entities import Entity, EntityVersion, Rejected, command


class Seats(Entity):
    """Seats that are left; each answer names the server that has executed the command."""

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
    """What desks were asked."""


class Desk(Seats):
    """One of many: its commands are executed where they arrive."""

    versions = DeskVersion


class ShowVersion(EntityVersion):
    """What shows were asked."""


class Show(Seats):
    """A hot one: its commands are passed on to the server that leads it."""

    versions = ShowVersion
    routed = True
