"""A writer to be killed: a business row and a job in one transaction, told what to do by its input.

``python -m tests.faults.writer NAME`` under the settings of ``tests.faults.project``. It says
``written`` when both rows are written, and then waits for a line on its standard input to commit.
"""

from __future__ import annotations

import sys

import django
from django.db import transaction


def main(name: str) -> None:
    django.setup()
    from django.contrib.auth.models import Group

    from outbox_app.aliases import outbox_alias
    from tests.faults.project import apps

    using = outbox_alias()
    with transaction.atomic(using=using):
        Group.objects.using(using).create(name=name)
        apps[0].tasks["note"].delay(name, 0)
        print("written", flush=True)
        sys.stdin.readline()
    print("committed", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
