"""Compares the callers' answers with the executed commands, and draws which server answered."""

from collections import Counter

from .models import Desk, Show

#: Seats of each desk and each show before the first one is sold.
SEATS = 1_000_000


class Count:
    """The results of the calls.

    Args:
        stages: The calls of each stage, by its name.
        servers: The names of the servers.
    """

    def __init__(self, stages, servers):
        self.stages, self.servers = stages, servers
        calls = [each for called in stages.values() for each in called]
        self.answered = Counter((c.type, c.id, c.command_id) for c in calls if not c.error)
        self.executed, sold = Counter(), 0
        for model in (Desk, Show):
            name = model._meta.model_name
            rows = model.versions.objects.filter(command="book", rejected=False)
            self.executed.update(
                (name, id, key.partition(":")[2])
                for id, key in rows.values_list("stream", "command_id")
            )
            sold += sum(
                SEATS - state["left"] for state in model.objects.values_list("state", flat=True)
            )
        self.lost = len(self.answered.keys() - self.executed.keys())
        #: Seats that were sold beyond one for each executed command.
        self.twice = sold - len(self.executed)
        self.errors = sum(
            bool(each.error)
            for name, called in stages.items()
            if "fail-fast" not in name
            for each in called
        )

    @property
    def passed(self):
        """Whether no call that fails over got an error, and each answered call sold one seat."""
        return not (self.errors or self.lost or self.twice)

    def table(self):
        """Return the result as text."""
        lines = [f"{'':34}{''.join(f'{name:>10}' for name in self.servers)}{'errors':>9}"]
        for name, called in self.stages.items():
            by = Counter(each.server for each in called)
            counts = "".join(f"{by[server]:>10}" for server in self.servers)
            lines.append(f"{name:34}{counts}{by['']:>9}")
        lines.append(
            f"Errors of callers that fail over: {self.errors}, effects twice: {self.twice}, "
            f"answers without an effect: {self.lost}"
        )
        return "\n".join(lines)


def picture(called, servers, width=72):
    """Return the number of the server for each answer, in order, or x for an error."""
    marks = "".join(str(servers.index(each.server) + 1) if each.server else "x" for each in called)
    return "\n".join(marks[n : n + width] for n in range(0, len(marks), width))
