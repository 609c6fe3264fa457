"""A process patched by gevent, of which so many greenlets commit a business row and a job each.

``python -m tests.jobs.immediate.greenlets COUNT`` under the settings of ``tests.faults.project``.
"""

from gevent import monkey, pool

monkey.patch_all()

import sys  # noqa: E402

import django  # noqa: E402
from django.db import connections, transaction  # noqa: E402


def main(count: int) -> None:
    django.setup()
    from django.contrib.auth.models import Group

    from outbox_app.aliases import outbox_alias
    from tests.faults.project import apps

    using = outbox_alias()

    def commit(number: int) -> None:
        try:
            with transaction.atomic(using=using):
                Group.objects.using(using).create(name=str(number))
                apps[0].tasks["note"].delay("", number)
        finally:
            connections[using].close()

    greenlets = pool.Pool(10)
    for _ in greenlets.imap_unordered(commit, range(count)):
        pass


if __name__ == "__main__":
    main(int(sys.argv[1]))
