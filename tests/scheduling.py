"""Which worker runs what: groups stay together, and what a dead worker had left goes to the next.

That of pytest-xdist 3.8 runs the test again that killed its worker, which kills the next one; it
gives tests to a worker that has not collected them yet, and waits for one that got none, or that
got one test and waits for the next.
"""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadGroupScheduling


class Scheduling(LoadGroupScheduling):
    def remove_node(self, node: Any) -> str | None:
        """Return the test during which the worker ended, which counts as done."""
        work = self.assigned_work[node]
        left = [(unit, test) for unit in work.values() for test, done in unit.items() if not done]
        for unit, test in left[:1]:
            unit[test] = True
        for scope in [scope for scope, unit in work.items() if all(unit.values())]:
            del work[scope]
        super().remove_node(node)
        return left[0][1] if left else None

    def _reschedule(self, node: Any) -> None:
        if node in self.registered_collections:
            super()._reschedule(node)
            # A worker begins a test when it has the next one, or is told that there is none.
            if self._pending_of(self.assigned_work[node]) == 1 and not node.shutting_down:
                super()._reschedule(node)
