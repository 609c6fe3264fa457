"""Histories: what processes did to an outbox, and a judge who compares that with the promises.

A soak, or a test with kills, writes one line for each thing that was done, and asks the judge
afterwards. Neither needs Django, a database or the outbox.
"""

from .judge import PROMISES, Verdict, judge
from .record import DamagedHistory, Record, Writer, read

__all__ = ["PROMISES", "DamagedHistory", "Record", "Verdict", "Writer", "judge", "read"]
