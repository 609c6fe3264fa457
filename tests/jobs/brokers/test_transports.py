"""Any other kombu transport: plain publishes, one by one, without a word about the broker."""

from __future__ import annotations

import pytest

import example_project.celery  # noqa: F401  # makes embedded:// a broker URL
from tests.faults.tools import drain, on

pytestmark = [
    pytest.mark.django_db(transaction=True),
    on("default"),
    pytest.mark.usefixtures("quick"),
]


def options(transport, folder):
    (folder / "in").mkdir()
    files = {"data_folder_in": "in", "data_folder_out": "in", "control_folder": "control"}
    return {
        "memory": {},
        "filesystem": {name: folder / each for name, each in files.items()},
        "embedded": {"folder": folder},
    }[transport]


@pytest.mark.parametrize("transport", ["memory", "filesystem", "embedded"])
def test_delivers(alias, transport, tmp_path, make_named_app, book):
    app, jobs = make_named_app(f"{transport}://"), book(alias)
    app.conf.broker_transport_options = options(transport, tmp_path)
    jobs.stage(app, 200)
    jobs.stage(app, 20, key="k")

    assert drain(alias, batch_size=50).published == 220

    jobs.receive(app)
    jobs.assert_exact()
    keyed = [i for key, i in jobs.bodies if key == "k"]
    if transport == "filesystem":  # it has no order within a millisecond
        keyed.sort()
    assert keyed == list(range(20))
