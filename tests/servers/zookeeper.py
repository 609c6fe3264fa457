"""A private ZooKeeper server, from the jars of PySpark."""

from __future__ import annotations

from pathlib import Path

from .base import Server
from .install import MissingPackages, find_program

_SETTINGS = """
dataDir={folder}
clientPortAddress=127.0.0.1
clientPort={port}
tickTime=100
minSessionTimeout=200
admin.enableServer=false
"""
_LOG = """
rootLogger.level = info
rootLogger.appenderRef.stdout.ref = stdout
appender.stdout.type = Console
appender.stdout.name = stdout
appender.stdout.layout.type = PatternLayout
"""


class ZooKeeper(Server):
    name = "zookeeper"
    ready_text = "PrepRequestProcessor (sid:0) started"

    @property
    def url(self) -> str:
        return f"zookeeper://127.0.0.1:{self.port}"

    def _create_data(self) -> None:
        settings = _SETTINGS.format(folder=self.folder / "data", port=self.port)
        (self.folder / "zoo.cfg").write_text(settings)
        (self.folder / "log4j2.properties").write_text(_LOG)

    def _command(self) -> list[str]:
        import pyspark

        program = find_program("java")
        if program is None:
            raise MissingPackages(["openjdk-17-jre-headless"])
        return [
            *(program, "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx64m"),
            f"-Dlog4j2.configurationFile={self.folder / 'log4j2.properties'}",
            *("-cp", str(Path(pyspark.__file__).parent / "jars" / "*")),
            *("org.apache.zookeeper.server.quorum.QuorumPeerMain", str(self.folder / "zoo.cfg")),
        ]
