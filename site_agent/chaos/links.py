"""The sites' ways to the coordinator: an HTTP proxy each, which breaks what passes when it is told to."""

import asyncio
import math
import threading
from collections.abc import Collection, Coroutine
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar

from site_agent.chaos.messages import Message, flipped
from site_agent.chaos.schedule import ANSWER_KINDS, REQUEST_KINDS, Fault, Kind

__all__ = ["Link", "Links"]

_BROKEN = (OSError, asyncio.IncompleteReadError)
T = TypeVar("T")


class Link:
    """One proxy. Everything here runs in one event loop.

    Attributes:
        struck: numbers of the faults that have happened.
    """

    def __init__(self, upstream: int) -> None:
        self.struck: set[int] = set()
        self._upstream = upstream
        self._armed: list[Fault] = []
        self._late: list[Message] = []
        """Requests that arrive after the next one."""
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._cut_until = self._slow_until = self._delay_s = 0.0

    async def start(self) -> int:
        """The port at which sites find the coordinator."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        self._server.close()
        self._cut_until = math.inf
        self._break_all()
        await asyncio.gather(*self._tasks)

    async def arm(self, fault: Fault) -> None:
        """Cuts and slows at once; everything else happens to the next request or answer that it can happen to."""
        now = asyncio.get_running_loop().time()
        if fault.kind is Kind.CUT:
            self._cut_until = now + fault.seconds
            self._break_all()
        elif fault.kind is Kind.SLOW:
            self._slow_until, self._delay_s = now + fault.seconds, 0.1 + fault.place
        else:
            self._armed.append(fault)
            return
        self.struck.add(fault.number)

    async def relax(self) -> None:
        """What has waited for a request of a step takes any."""
        self._armed = [replace(fault, in_round=False) for fault in self._armed]

    def _is_cut(self) -> bool:
        return asyncio.get_running_loop().time() < self._cut_until

    def _break_all(self) -> None:
        for writer in self._open:
            writer.transport.abort()

    # --- what passes --------------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._open.add(writer)
        try:
            goes_on = not self._is_cut()
            while goes_on and (request := await Message.read(reader)) is not None:
                data, goes_on = await self._pass_on(request)
                writer.write(data)
                await writer.drain()
        except _BROKEN:
            pass  # of a site or the coordinator: the other one learns of it in the same way
        finally:
            self._open.discard(writer)
            self._tasks.discard(task)
            writer.close()

    async def _pass_on(self, request: Message) -> tuple[bytes, bool]:
        """What the site gets, and whether its connection goes on after that."""
        fault = self._take(REQUEST_KINDS, request) if request.body else None
        if fault is None:
            return self._given_back(request, await self._ask(request))
        match fault.kind:
            case Kind.LOSE:
                await self._ask(request)
            case Kind.REORDER:
                self._late.append(request)
            case Kind.TRUNCATE_REQUEST:
                await self._send_part(request, int(fault.place * len(request.body)))
            case Kind.DUPLICATE:
                answer, _ = await asyncio.gather(self._ask(request), self._ask(request))
                return answer.data, True
            case Kind.CORRUPT_REQUEST:
                changed = request.with_body(flipped(request.body, fault.place))
                return (await self._ask(changed)).data, True
        return b"", False

    def _given_back(self, request: Message, answer: Message) -> tuple[bytes, bool]:
        late, self._late = self._late, []
        for message in late:
            task = asyncio.create_task(self._arrive(message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        fault = self._take(ANSWER_KINDS, request) if answer.body else None
        if fault is None:
            return answer.data, True
        if fault.kind is Kind.CORRUPT_ANSWER:
            return answer.with_body(flipped(answer.body, fault.place)).data, True
        return answer.head + answer.body[: int(fault.place * len(answer.body))], False

    def _take(self, kinds: Collection[Kind], request: Message) -> Fault | None:
        for fault in self._armed:
            if fault.kind in kinds and (not fault.in_round or b"/steps/" in request.target):
                self._armed.remove(fault)
                self.struck.add(fault.number)
                return fault
        return None

    # --- the coordinator's side ---------------------------------------------------------------------------------------

    async def _ask(self, request: Message) -> Message:
        if asyncio.get_running_loop().time() < self._slow_until:
            await asyncio.sleep(self._delay_s)
        if self._is_cut():
            raise ConnectionResetError("the link is cut")
        reader, writer = await asyncio.open_connection("127.0.0.1", self._upstream)
        self._open.add(writer)
        try:
            writer.write(request.data)
            await writer.drain()
            answer = await Message.read(reader, bodyless=request.head.startswith(b"HEAD "))
            if answer is None:
                raise ConnectionResetError("no answer")
            return answer
        finally:
            self._open.discard(writer)
            writer.close()

    async def _arrive(self, request: Message) -> None:
        with suppress(*_BROKEN):
            await self._ask(request)

    async def _send_part(self, request: Message, size: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", self._upstream)
        writer.write(request.head + request.body[:size])
        await writer.drain()
        writer.close()


class Links:
    """One link per site, in a thread of their own."""

    def __init__(self, sites: Collection[str], upstream: int) -> None:
        self.ports: dict[str, int] = {}
        self._links = {site: Link(upstream) for site in sites}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="links", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self.ports = {site: self._run(link.start()) for site, link in self._links.items()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for link in self._links.values():
            self._run(link.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def arm(self, fault: Fault) -> None:
        self._run(self._links[fault.site].arm(fault))

    def relax(self) -> None:
        for link in self._links.values():
            self._run(link.relax())

    @property
    def struck(self) -> set[int]:
        return set().union(*(link.struck for link in self._links.values()))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)
