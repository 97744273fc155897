"""A proxy for PostgreSQL that parses the protocol and injects network faults.

It runs in a thread of the test process. Worker processes get its address in their environment
(``start_worker(env=proxy.environment)``); the test's own process goes through it inside of
``with through(proxy)``.
"""

import asyncio
import socket
import struct
import threading
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from django.db import connection

CANCEL, SSL, GSS = 80877102, 80877103, 80877104
#: The connection is cut before the server receives the message, after the server has answered, or
#: the server receives it after the client has disconnected. HELD delays only the answer.
BEFORE, AFTER, LATE, HELD = "before", "after", "late", "held"


@dataclass(slots=True)
class Message:
    """A protocol message. ``kind`` is empty for the startup message; ``sql`` is executed."""

    kind: bytes
    data: bytes
    sql: str = ""


def commits(message):
    return message.sql.strip("; ").upper() == "COMMIT"


def says(*words):
    """Match a message whose SQL contains all these words."""
    return lambda message: all(word in message.sql for word in words)


@dataclass
class Cut:
    """A fault for the next message that matches."""

    matches: object
    when: str
    happened: threading.Event = field(default_factory=threading.Event)
    may_arrive: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: threading.Event = field(default_factory=threading.Event)


class Stream:
    """One end of a connection, read and written in messages."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer
        self._statements, self._portals = {}, {}

    async def first(self):
        size = await self.reader.readexactly(4)
        return Message(b"", size + await self.reader.readexactly(struct.unpack("!i", size)[0] - 4))

    async def next(self):
        head = await self.reader.readexactly(5)
        body = await self.reader.readexactly(struct.unpack("!i", head[1:])[0] - 4)
        return Message(head[:1], head + body, self._sql(head[:1], body))

    def _sql(self, kind, body):
        """The SQL of a simple query, or of an Execute through its Bind and Parse."""
        words = body.split(b"\0")
        if kind == b"Q":
            return words[0].decode()
        if kind == b"P":
            self._statements[words[0]] = words[1].decode()
        elif kind == b"B":
            self._portals[words[0]] = self._statements.get(words[1], "")
        elif kind == b"E":
            return self._portals.get(words[0], "")
        return ""

    async def write(self, data):
        self.writer.write(data)
        await self.writer.drain()

    def reset(self):
        """Close with RST, so that unsent data is lost."""
        sock = self.writer.get_extra_info("socket")
        if sock.family != socket.AF_UNIX and not self.writer.is_closing():
            with suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


class Link:
    """A client's connection and the server's end of it."""

    def __init__(self, client, server):
        self.client, self.server = client, server
        self.open = asyncio.Event()
        self.open.set()
        self.said = deque(maxlen=100)
        self.cut = None
        self.unasked = 0

    def has_said(self, text):
        return any(text in each for each in self.said)

    def reset(self):
        self.client.reset()
        self.server.reset()


class Proxy:
    """``with Proxy(server_address()) as proxy``."""

    host = "127.0.0.1"

    def __init__(self, upstream):
        self.upstream = upstream
        self.links = []
        #: The number of accepted connections and of forwarded statements.
        self.accepted = self.statements = 0
        #: A function that returns the delay of the next message in seconds.
        self.delay = None
        self._cuts = []
        self._is_black = False
        self._tasks = set()
        self._streams = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self):
        self._thread.start()
        self._server = self._do(asyncio.start_server, self._accept, self.host, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_):
        self._do(self._end)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def environment(self):
        """Environment variables for worker processes."""
        known = connection.settings_dict
        user = f"{known['USER']}:{known['PASSWORD']}@"
        return {"EVENTBUS_TEST_POSTGRES_URL": f"postgresql://{user}{self.host}:{self.port}/"}

    # -- faults, called from the thread of the test

    def cut(self, matches, when=AFTER):
        """Reset the connection of the next matching message. The result has events to wait for."""

        async def add():
            self._cuts.append(cut := Cut(matches, when))
            return cut

        return self._do(add)

    def let_arrive(self, cut):
        """Send the late message of this cut to the server now."""
        self._loop.call_soon_threadsafe(cut.may_arrive.set)
        assert cut.arrived.wait(10), "the server never answered the late message"

    def blackhole(self, matches=lambda link: True, *, newcomers=True):
        """Block all traffic of matching connections and of new ones."""

        async def close():
            self._is_black = newcomers
            chosen = [link for link in self.links if matches(link)]
            for link in chosen:
                link.open.clear()
            return len(chosen)

        return self._do(close)

    def heal(self, *, forget=False):
        """Forward all blocked traffic; with ``forget`` only new connections work."""

        async def reopen():
            self._is_black = False
            for link in self.links:
                if not forget:
                    link.open.set()

        self._do(reopen)

    def reset(self, matches=lambda link: True):
        async def reset():
            for link in filter(matches, list(self.links)):
                link.reset()

        self._do(reset)

    def say(self, matches, sql):
        """Send SQL in the session of the client and drop the answer."""

        async def say():
            for link in filter(matches, self.links):
                link.unasked += 1
                await link.server.write(
                    b"Q" + struct.pack("!i", len(sql) + 5) + sql.encode() + b"\0"
                )

        self._do(say)

    # -- called in the thread of the event loop

    def _do(self, function, *args):
        return asyncio.run_coroutine_threadsafe(function(*args), self._loop).result(10)

    async def _end(self):
        self._server.close()
        for _ in range(5):
            await asyncio.sleep(0)  # Pending connections are accepted first, and then closed.
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for stream in self._streams:
            stream.reset()
        closing = (stream.writer.wait_closed() for stream in self._streams)
        await asyncio.gather(*closing, return_exceptions=True)

    def _accept(self, reader, writer):
        """Accept a client. A coroutine cancelled before its first step would leak the socket."""
        self.accepted += 1
        self._streams.append(client := Stream(reader, writer))
        self._tasks.add(task := self._loop.create_task(self._welcome(client)))
        task.add_done_callback(self._tasks.discard)

    async def _welcome(self, client):
        # Either side may disconnect in the middle of a message.
        with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            try:
                await self._serve(client, await self._greet(client))
            finally:
                client.writer.transport.abort()

    async def _greet(self, client):
        """Refuse encryption, which would hide the messages, and return the startup message."""
        while True:
            message = await client.first()
            if struct.unpack("!i", message.data[4:8])[0] not in (SSL, GSS):
                return message
            await client.write(b"N")

    async def _serve(self, client, first):
        link = Link(client, await self._dial())
        self.links.append(link)
        if self._is_black:
            link.open.clear()
        try:
            await link.open.wait()
            await link.server.write(first.data)
            if struct.unpack("!i", first.data[4:8])[0] == CANCEL:
                await link.server.reader.read()
                return
            await self._carry(link)
        finally:
            self.links.remove(link)
            link.server.writer.transport.abort()

    async def _dial(self):
        host, port = self.upstream
        if host.startswith("/"):
            ends = await asyncio.open_unix_connection(f"{host}/.s.PGSQL.{port}")
        else:
            ends = await asyncio.open_connection(host, port)
        self._streams.append(server := Stream(*ends))
        return server

    async def _carry(self, link):
        ways = [
            asyncio.create_task(way(link)) for way in (self._carry_requests, self._carry_replies)
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _carry_requests(self, link):
        while True:
            message = await link.client.next()
            if message.sql:
                self.statements += 1
                link.said.append(message.sql)
            await self._take_time(link, message.kind in b"QS")
            cut = self._cut_for(message)
            if cut is not None and cut.when == HELD:
                link.open.clear()
                cut.happened.set()
            elif cut is not None:
                link.cut = cut
                if cut.when != AFTER:
                    link.client.reset()
                    cut.happened.set()
                if cut.when == BEFORE:
                    return
                if cut.when == LATE:
                    await cut.may_arrive.wait()
            await link.server.write(message.data)
            if cut is not None and cut.when == LATE:
                await asyncio.Event().wait()  # The server connection outlives the client.

    async def _carry_replies(self, link):
        while True:
            message = await link.server.next()
            await self._take_time(link, message.kind in b"ZA")
            if link.unasked:
                link.unasked -= message.kind == b"Z"
            elif link.cut is None:
                await link.client.write(message.data)
            elif message.kind == b"Z":
                link.reset()
                link.cut.happened.set()
                link.cut.arrived.set()
                return

    async def _take_time(self, link, is_last):
        """Delay each request and each answer once, not each of its messages."""
        if self.delay is not None and is_last:
            await asyncio.sleep(self.delay())
        await link.open.wait()

    def _cut_for(self, message):
        for cut in self._cuts:
            if cut.matches(message):
                self._cuts.remove(cut)
                return cut
        return None


class Pooler(Proxy):
    """A pooler in transaction mode: each transaction gets another server session.

    Every client logs in to a new session; after that all clients share all sessions.
    """

    def __init__(self, upstream):
        super().__init__(upstream)
        self._sessions = deque()
        #: How often a client got another session than in its previous transaction.
        self.swaps = 0

    async def _serve(self, client, first):
        if struct.unpack("!i", first.data[4:8])[0] == CANCEL:
            return  # The session may belong to another client by now.
        session = await self._dial()
        await session.write(first.data)
        await self._log_in(client, session)
        self._sessions.append(last := session)
        session = None
        try:
            while (message := await client.next()).kind != b"X":
                if session is None:
                    session = self._another(last)
                    self.swaps += session is not last
                await session.write(message.data)
                if message.kind in b"QS" and await self._answer(client, session):
                    self._sessions.append(last := session)
                    session = None
        finally:
            (session or self._sessions.popleft()).writer.transport.abort()

    def _another(self, last):
        """Another session than the client's last one, unless it is the only one."""
        chosen = next((each for each in self._sessions if each is not last), last)
        self._sessions.remove(chosen)
        return chosen

    @staticmethod
    async def _log_in(client, session):
        while (message := await session.next()).kind != b"Z":
            await client.write(message.data)
            if message.kind == b"R" and message.data[8] in (3, 5, 10, 11):
                await session.write((await client.next()).data)
        await client.write(message.data)

    @staticmethod
    async def _answer(client, session):
        """Forward the answer; return whether the transaction has ended."""
        while (message := await session.next()).kind != b"Z":
            await client.write(message.data)
        await client.write(message.data)
        return message.data[5:] == b"I"


def server_address():
    known = connection.settings_dict
    return known["HOST"] or "127.0.0.1", int(known["PORT"] or 5432)


@contextmanager
def through(proxy):
    """Route new connections of this process through the proxy, in every thread."""
    known = connection.settings_dict
    direct = known["HOST"], known["PORT"]
    connection.close()
    known["HOST"], known["PORT"] = proxy.host, proxy.port
    try:
        yield
    finally:
        connection.close()
        known["HOST"], known["PORT"] = direct
