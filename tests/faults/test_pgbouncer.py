"""pgbouncer in transaction pooling: all works but LISTEN, and the drainer notices that."""

from __future__ import annotations

import os
import pwd
import socket
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from django.db import connections

from outbox_app.models import Process, StagedJob
from tests.patience import patience
from tests.servers import free_port, processes
from tests.servers.install import find_program
from tests.servers.ports import make_folder

from .tools import assert_handed_back, eventually, on

pytestmark = pytest.mark.django_db(transaction=True)

CONFIG = """\
[databases]
* = host={host} port={port} user={user}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {listen}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 3
max_client_conn = 50
ignore_startup_parameters = extra_float_digits,options
"""


@pytest.fixture(scope="module")
def pooler():
    """The port of a pgbouncer with three connections to the shared PostgreSQL."""
    if "POSTGRES_URL" not in os.environ:
        pytest.skip("no PostgreSQL")
    with pooling(os.environ["POSTGRES_URL"]) as port:
        yield port


@contextmanager
def pooling(url):
    """Run a pgbouncer before a server, and yield its port."""
    program = find_program("pgbouncer")
    if program is None:
        pytest.skip("no pgbouncer")
    server = urlsplit(url)
    user = "postgres" if os.geteuid() == 0 else None  # it does not run as root
    if user and user not in {entry.pw_name for entry in pwd.getpwall()}:
        user = "nobody"
    folder = make_folder("pgbouncer", user)
    processes.guard_folder(folder)
    port = free_port()
    config = folder / "pgbouncer.ini"
    config.write_text(
        CONFIG.format(host=server.hostname, port=server.port, user=server.username, listen=port)
    )
    config.chmod(0o644)
    process = processes.spawn(
        [program, str(config)],
        log=Path(folder, "log"),
        folder=folder,
        environment=dict(os.environ),
        user=user,
    )

    def listens():
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        eventually(listens, "pgbouncer listens")
        yield port
    finally:
        processes.kill_trees([process.pid])
        process.wait()
        processes.forget_process(process.pid)


@on("postgres")
def test_everything_works(
    alias, pooler, environment, redis_url, make_named_app, start_drainer, book
):
    server = urlsplit(environment(alias)["POSTGRES_URL"])
    url = server._replace(netloc=f"{server.username}@127.0.0.1:{pooler}").geturl()
    app, jobs = make_named_app(redis_url), book(alias)
    # More drainers, each with a listener, than the pooler has connections.
    drainers = [start_drainer(alias, app, POSTGRES_URL=url) for _ in range(2)]
    eventually(lambda: Process.objects.using(alias).count() == 2, "both run")
    for drainer in drainers:
        drainer.says("LISTEN does not work, polling instead")
        assert "is there a pooler in transaction mode?" in drainer.output
    for i in range(5):
        jobs.stage(app, 100, key=f"{i}")
    eventually(lambda: not StagedJob.objects.using(alias).exists(), "drained")
    assert [drainer.stop() for drainer in drainers] == [0, 0]
    jobs.receive(app)
    jobs.assert_exact()
    assert_handed_back(alias)
    assert "Unavailable" not in drainers[0].output + drainers[1].output


@on("postgres")
def test_staging_through_it(alias, pooler, redis_url, make_named_app, book):
    """A wake-up after the commit goes through it too, as any other statement."""
    app, jobs = make_named_app(redis_url), book(alias)
    settings = connections.settings[alias]
    before = settings["HOST"], settings["PORT"]
    connections[alias].close()
    settings.update(HOST="127.0.0.1", PORT=str(pooler), DISABLE_SERVER_SIDE_CURSORS=True)
    try:
        listener = connections.create_connection(alias)
        listener.settings_dict = {**settings, "HOST": before[0], "PORT": before[1]}
        with listener.cursor() as cursor:
            cursor.execute("LISTEN outbox_jobs")
        jobs.stage(app, 3)
        assert [
            n.payload for n in listener.connection.notifies(timeout=patience(20), stop_after=1)
        ] == [""]
        listener.close()
    finally:
        connections[alias].close()
        settings.update(HOST=before[0], PORT=before[1], DISABLE_SERVER_SIDE_CURSORS=False)
