"""Private test servers, each in a temporary folder and on free ports.

``python -m tests.servers run -- COMMAND`` runs a command with all of them. A test that kills a
server starts its own, for instance ``with Redis() as redis: ...``.
"""

from .base import PortTaken, Server, ServerFailed
from .etcd import Etcd
from .install import MissingPackages
from .mariadb import MariaDB
from .mysql import MySQL
from .ports import free_port
from .postgres import PostgreSQL
from .proxy import Proxy
from .rabbitmq import RabbitMQ
from .redis import Redis
from .zookeeper import ZooKeeper

__all__ = [
    "Etcd",
    "MariaDB",
    "MissingPackages",
    "MySQL",
    "PortTaken",
    "PostgreSQL",
    "Proxy",
    "RabbitMQ",
    "Redis",
    "Server",
    "ServerFailed",
    "ZooKeeper",
    "free_port",
]
