"""A TCP proxy that can fail in chosen ways, in its own thread.

``mode`` may be changed at any time. It applies to open connections, too, from the next bytes on:
"pass"          forwards both ways.
"delay"         forwards both ways, each chunk ``delay`` seconds late.
"blackhole"     accepts and drops all bytes; neither side notices even that the other closes.
"drop_reply"    forwards to the server, and drops its replies and its closing of the connection.
"cut_on_reply"  forwards to the server, and cuts the connection instead of forwarding its reply.
"refuse"        cuts new connections at once; open ones pass. (``cut`` closes open ones.)
In every mode ``bytes_per_second`` limits the bytes from each client; 0 means no limit. Dropped
bytes are lost, so a connection is of no use after a mode that drops bytes.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Literal, get_args

from .ports import free_port

Mode = Literal["pass", "delay", "blackhole", "drop_reply", "cut_on_reply", "refuse"]


class Proxy:
    def __init__(
        self, target_host: str, target_port: int, *, mode: Mode = "pass", delay: float = 0.0
    ) -> None:
        self.target = (target_host, target_port)
        self.port = 0
        self.delay = delay
        self.bytes_per_second = 0
        self.accepted = 0
        self.mode = mode
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def mode(self) -> Mode:
        return self._mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"unknown mode: {mode}")
        self._mode: Mode = mode

    def cut(self) -> None:
        """Close all open connections, and wait until they are closed."""
        asyncio.run_coroutine_threadsafe(self._cut_all(), self._loop).result()

    def __enter__(self) -> Proxy:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        return self

    def __exit__(self, *exception: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self) -> None:
        self.port = free_port()
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", self.port)

    async def _connect(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self._writers.add(to_client)
        writers = {to_client}
        try:
            if self.mode == "refuse":
                return
            server, to_server = await asyncio.open_connection(*self.target)
            self._writers.add(to_server)
            writers.add(to_server)
            pumps = {
                asyncio.ensure_future(self._pump(client, to_server, is_reply=False)),
                asyncio.ensure_future(self._pump(server, to_client, is_reply=True)),
            }
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._abort(writers)

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, is_reply: bool
    ) -> None:
        try:
            while data := await source.read(65536):
                if self.bytes_per_second and not is_reply:
                    await asyncio.sleep(len(data) / self.bytes_per_second)
                if self.mode == "delay":
                    await asyncio.sleep(self.delay)
                if is_reply and self.mode == "cut_on_reply":
                    return
                if not self._is_swallowing(is_reply):
                    sink.write(data)
                    await sink.drain()
        except OSError:
            pass
        while self._is_swallowing(is_reply):
            await asyncio.sleep(0.02)

    def _is_swallowing(self, is_reply: bool) -> bool:
        return self.mode == "blackhole" or (is_reply and self.mode == "drop_reply")

    def _abort(self, writers: set[asyncio.StreamWriter]) -> None:
        for writer in writers:
            writer.transport.abort()
        self._writers -= writers

    async def _cut_all(self) -> None:
        self._abort(set(self._writers))

    async def _end(self) -> None:
        self._server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._cut_all()
