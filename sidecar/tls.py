"""The client's side of TLS on bytes: ciphertext in, plaintext out, and the reverse. Does no I/O; OpenSSL works.

The event loops bring TLS of their own. It hides two things that decide an outcome: whether the upstream ended in
good order (asyncio tells a bare FIN and close_notify apart for nobody), and what it said before a write failed.
"""

from __future__ import annotations

import functools
import ssl

# The most plaintext a record holds (RFC 8446 section 5.1): OpenSSL hands out, and takes, one at a time.
RECORD_BYTES = 16 * 1024


@functools.cache
def client_context(ca: str) -> ssl.SSLContext:
    """Verifies chain and host name, against the system's authorities or those in the file `ca` alone.

    Reading the system's takes tens of milliseconds: once per process, not per route.

    Raises: OSError where `ca` cannot be read as certificates.
    """
    context = ssl.create_default_context(cafile=ca or None)
    context.set_alpn_protocols(["http/1.1"])
    # A handshake in the middle of a request would make a write wait for a read; TLS 1.3 has none any more.
    context.options |= ssl.OP_NO_RENEGOTIATION
    return context


class Tls:
    """The TLS state of one connection. After each call, `pending()` has to be written to the network."""

    __slots__ = ("_arrived", "_leaving", "_object", "ended", "failed")

    def __init__(self, context: ssl.SSLContext, server_name: str) -> None:
        """`server_name`: what the certificate must be for; sent as SNI unless it is an address."""
        self.ended = False  # close_notify has come: the upstream will send nothing more, and says so
        self.failed: ssl.SSLError | None = None  # an alert, or bytes that are no record of this session
        self._arrived = ssl.MemoryBIO()
        self._leaving = ssl.MemoryBIO()
        self._object = context.wrap_bio(self._arrived, self._leaving, server_hostname=server_name)

    def shake(self, data: bytes) -> bool:
        """Go on with the handshake, with `data` from the network; whether it is done.

        Raises: ssl.SSLError, `SSLCertVerificationError` where the upstream is not who it should be.
        """
        self._arrived.write(data)
        try:
            self._object.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def decrypt(self, data: bytes) -> bytes:
        """All plaintext that `data` from the network completes; what comes behind it sets `ended` or `failed`."""
        self._arrived.write(data)
        parts = []
        try:
            while part := self._object.read(RECORD_BYTES):
                parts.append(part)
            self.ended = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:  # close_notify, after our own
            self.ended = True
        except ssl.SSLError as exc:
            self.failed = exc
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def encrypt(self, data: bytes) -> None:
        """Put `data` into records.

        Raises: ssl.SSLError.
        """
        written = self._object.write(data)
        if written < len(data):
            rest = memoryview(data)[written:]
            while rest:
                rest = rest[self._object.write(rest) :]

    def good_bye(self) -> None:
        """Say close_notify. RFC 8446 section 6.1: before our side is closed, and without waiting for the answer."""
        try:
            self._object.unwrap()
        except ssl.SSLError:
            pass  # the answer is not there yet, or the session is beyond all manners

    def pending(self) -> bytes:
        """What has to be written to the network now: records, alerts, steps of the handshake; mostly nothing."""
        return self._leaving.read() if self._leaving.pending else b""
