"""Upstream connections as bytes see them: open and idle ones, looked at, written to, read, closed.

A `Connection` knows its transport and whether it can still be used; what the bytes mean is its reader's
affair, and where it waits for the next one its pool's (`pool.py`). It writes no byte of a request on its own account.
"""

from __future__ import annotations

import asyncio
import select
import ssl
from socket import socket
from typing import Protocol, cast

from sidecar.tls import Tls

# With addresses kept for 15 s (`resolve.py`) a name is resolved again within a minute.
MAX_AGE_S = 45.0
# What the upstream says it keeps an idle connection for, less this: our last request has to get there in time.
KEEP_MARGIN_S = 1.0
# How many loop turns an upload yields to what wants to be read; more would let a chatty upstream starve it.
LOOKS = 4
# How long the loop has to read what was there when the time was over: any turn of it will do.
OVERTIME_S = 0.01
RESCUE_BYTES = 64 * 1024


class Reader(Protocol):
    """Who uses a connection: told of everything that happens on it, in order."""

    def received(self, data: bytes) -> None:
        """Bytes have arrived."""

    def ended(self) -> None:
        """The upstream ended the connection in good order; nothing more will arrive."""

    def broke(self, exc: Exception | None) -> None:
        """The connection is gone, and not in good order."""

    def late(self) -> None:
        """The time set by `expect_by` is over."""


class Home(Protocol):
    """Where a connection is while nobody uses it."""

    keepalive_s: float

    def opened(self, connection: Connection) -> None:
        """It is open."""

    def give(self, connection: Connection, now: float) -> None:
        """It is idle from `now` on."""

    def lost(self, connection: Connection) -> None:
        """It is gone."""


class Connection(asyncio.Protocol):
    """One connection to an upstream: at any time idle, or used by exactly one reader."""

    __slots__ = (
        "_age_limit",
        "_expected_by",
        "_home",
        "_loop",
        "_overtime",
        "_poll",
        "_reader",
        "_secured",
        "_socket",
        "_timer",
        "_tls",
        "_transport",
        "_writable",
        "gone",
        "idle_until",
        "reading_paused",
        "writing_paused",
    )

    def __init__(self, home: Home, sock: socket, tls: Tls | None) -> None:
        """`sock`: connected; the transport owns it. `tls`: new, or None for a plain connection."""
        self._loop = asyncio.get_running_loop()
        self._home = home
        self._socket = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)  # FIN, RST and unread bytes: all of them show
        self._transport: asyncio.Transport
        self._tls = tls
        self._secured: asyncio.Future[None] | None = None  # done when the handshake is
        self._reader: Reader | None = None
        self.gone = False  # the transport has closed its socket, or does so next
        self.reading_paused = False  # the reader wants no more bytes for now
        self.writing_paused = False  # the upstream does not take what was written
        self._writable: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._expected_by = 0.0
        self._overtime = 0.0  # the `_expected_by` that was stretched already
        self._age_limit = self._loop.time() + MAX_AGE_S
        self.idle_until = self._age_limit

    async def ready(self) -> None:
        """Wait until it can be written to: under TLS, until the upstream has shown who it is.

        Raises: OSError (`ssl.SSLError`); the connection is to be closed then, as it is where this is cancelled.
        """
        if self._secured is not None:
            await self._secured

    @property
    def _shaking(self) -> bool:
        return self._secured is not None and not self._secured.done()

    # Is it fit for a request?

    @property
    def closing(self) -> bool:
        """Whether it is closed, or about to be."""
        return self._transport.is_closing()

    @property
    def silent(self) -> bool:
        """Whether the socket has nothing to tell: no bytes, no end, no reset. One system call."""
        return not self._poll.poll(0)

    def fit_when_new(self) -> bool:
        """Whether a connection just opened can be written to.

        A proxy that has no upstream of its own accepts and hangs up: seen here, nothing was sent. Under TLS
        1.3 the server's tickets may lie unread: there only the transport's word counts.
        """
        return not self.closing and (self._tls is not None or self.silent)

    def fit(self, now: float) -> bool:
        """Whether this idle connection can be written to at `now` (loop time).

        Between this look and the write no loop turn may pass. What the network still carries is not seen.
        """
        return now < self.idle_until and not self.closing and self.silent

    # Use

    def begin(self, reader: Reader, first: bytes) -> None:
        """Hand `first` to the transport. From then on, whatever happens, bytes may have left.

        Raises: ssl.SSLError, before that.
        """
        first = self._sealed(first)
        self._reader = reader
        self._transport.write(first)

    def write(self, data: bytes) -> None:
        """Write more, if anything. The caller has awaited `ready_for_more` and is still the reader.

        Raises: ssl.SSLError.
        """
        if data:
            self._transport.write(self._sealed(data))

    def _sealed(self, data: bytes) -> bytes:
        if self._tls is None:
            return data
        self._tls.encrypt(data)
        return self._tls.pending()

    async def ready_for_more(self) -> None:
        """Wait until the transport takes more bytes, and let the loop read first what has arrived.

        An upstream that refuses early answers, closes and resets: the next write would fail and take the answer
        with it, unread.
        """
        if self.writing_paused:
            self._writable = self._loop.create_future()
            try:
                await self._writable
            finally:
                self._writable = None
        for _ in range(LOOKS):
            await asyncio.sleep(0)
            if self.reading_paused or self.closing or self.silent:
                return

    def pause_reading(self) -> None:
        """Take no more bytes from the network until `resume_reading`."""
        if not self.reading_paused and not self.closing:
            self.reading_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again."""
        if self.reading_paused:
            self.reading_paused = False
            if not self.closing:
                self._transport.resume_reading()

    def expect_by(self, when: float) -> None:
        """Call `late` at `when` (loop time), unless moved on by then.

        One timer serves many requests: each only moves the time on, so it is never earlier than the one
        before.
        """
        self._expected_by = when
        if self._timer is None:
            self._timer = self._loop.call_at(when, self._time_is_up)

    def _time_is_up(self) -> None:
        self._timer = None
        if self._reader is None:
            return
        if self._loop.time() < self._expected_by:
            self.expect_by(self._expected_by)
        elif self._overtime != self._expected_by and not (self.reading_paused or self.closing or self.silent):
            # Something has arrived and is unread: not the upstream is late but this process, frozen or busy. The
            # answer that lies in the socket decides an outcome; once, the loop gets to read it.
            self._overtime = self._expected_by
            self._timer = self._loop.call_later(OVERTIME_S, self._time_is_up)
        else:
            self._reader.late()

    def free(self, *, keep: bool, keep_s: float | None) -> None:
        """The reader has its whole answer. `keep`: nothing speaks against another request.

        `keep_s`: how long the upstream says it keeps an idle connection, where it says so.
        """
        self._reader = None
        self.resume_reading()
        now = self._loop.time()
        own_s = self._home.keepalive_s
        idle_s = own_s if keep_s is None else min(own_s, keep_s - KEEP_MARGIN_S)
        self.idle_until = min(now + idle_s, self._age_limit)
        if keep and now < self.idle_until and not self._transport.get_write_buffer_size():
            self._home.give(self, now)
        else:
            self.close()

    def close(self) -> None:
        """End in good order, TLS with a good-bye; at once where the upstream does not take what was written."""
        if self._transport.get_write_buffer_size():
            self.abort()
            return
        self._reader = None
        if self._tls is not None and not self.closing:
            self._tls.good_bye()
            self._flush(self._tls)
        self._transport.close()

    def abort(self) -> None:
        """End at once. Whatever still arrives reaches nobody."""
        self._reader = None
        self._transport.abort()

    def drop(self) -> None:
        """End at once, in use or not; its reader is told."""
        self._break(None)

    # What the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """TCP stands; TLS begins."""
        self._transport = cast(asyncio.Transport, transport)
        self._home.opened(self)
        if self._tls is not None:
            self._secured = self._loop.create_future()
            self._shake(self._tls, self._secured, b"")

    def data_received(self, data: bytes) -> None:
        """Bytes from the network."""
        if self._tls is None:
            self._hand_on(data)
        elif self._secured is not None and not self._secured.done():
            self._shake(self._tls, self._secured, data)
        else:
            self._unseal(self._tls, data)

    def _shake(self, tls: Tls, secured: asyncio.Future[None], data: bytes) -> None:
        try:
            done = tls.shake(data)
        except ssl.SSLError as exc:
            self._flush(tls)
            _fail(secured, exc)
            return
        self._flush(tls)
        if done:
            secured.set_result(None)
            self._unseal(tls, b"")  # what came with the last step: tickets, or an end already

    def _unseal(self, tls: Tls, data: bytes) -> None:
        plain = tls.decrypt(data)
        self._flush(tls)
        if plain:
            self._hand_on(plain)
        if tls.failed is not None:
            self._break(tls.failed)
        elif tls.ended:
            self._end()

    def _flush(self, tls: Tls) -> None:
        if (pending := tls.pending()) and not self.closing:
            self._transport.write(pending)

    def _hand_on(self, data: bytes) -> None:
        if self._reader is None:
            self.abort()  # an answer nobody asked for
        else:
            self._reader.received(data)

    def _end(self) -> None:
        if self._reader is None:
            self.close()
        else:
            self._reader.ended()

    def _break(self, exc: Exception | None) -> None:
        """Nothing more can come of it: the reader is told, and ends it."""
        if self._reader is None:
            self.abort()
        else:
            self._reader.broke(exc)

    def eof_received(self) -> None:
        """FIN; the transport closes itself after this.

        RFC 8446 section 6.1: under TLS, without close_notify before it, it may be an attacker's.
        """
        if self._tls is None:
            self._end()
        elif not self._tls.ended:
            self._break(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone, for whatever reason."""
        self.gone = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if exc is not None:
            self._rescue()
        if self._secured is not None and not self._secured.done():
            _fail(self._secured, exc or ConnectionResetError())
        if self._reader is not None:
            self._reader.broke(exc)
            self._reader = None
        self._home.lost(self)

    def _rescue(self) -> None:
        """Read what the upstream said before a write failed: an early refusal, still in the socket.

        Both loops call `connection_lost` while the socket is open.
        """
        while self._reader is not None or self._shaking:
            try:
                data = self._socket.recv(RESCUE_BYTES)
            except OSError:
                return
            if not data:
                return
            self.data_received(data)

    def pause_writing(self) -> None:
        """The transport holds enough."""
        self.writing_paused = True

    def resume_writing(self) -> None:
        """The transport takes more."""
        self.writing_paused = False
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)


def _fail(future: asyncio.Future[None], exc: Exception) -> None:
    future.set_exception(exc)
    future.exception()  # whoever opened the connection may have given up; that is no fault to be logged
