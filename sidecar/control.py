"""The line between the supervisor and a worker: JSON, one message a line, over a pair of sockets.

Either side tells, asks and answers. Nobody waits for long: a question has a time limit, and the end of the other
process ends the line, which is how each learns of it.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any, Self

from sidecar.errors import SidecarError

Message = dict[str, Any]


class ControlError(SidecarError):
    """No answer: it did not come in time, or the other process is gone."""


class Channel(asyncio.Protocol):
    """One end of the line."""

    def __init__(self, heard: Callable[[Message], None], answer: Callable[[Message], Any]) -> None:
        """`heard` takes what the other side tells, `answer` gives the value for a question. Neither may raise."""
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._heard = heard
        self._answer = answer
        self._rest = bytearray()
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def open(
        cls, end: socket.socket, heard: Callable[[Message], None], answer: Callable[[Message], Any]
    ) -> Self:
        """Begin to read at one end of a pair; see `__init__`."""
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_unix_connection(lambda: cls(heard, answer), sock=end)
        return channel

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The line stands."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Take whole lines; keep the rest."""
        *lines, rest = data.split(b"\n")
        for line in lines:
            self._rest += line
            message, self._rest = json.loads(self._rest), bytearray()
            self._take(message)
        self._rest += rest

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - why makes no difference
        """The other side is gone, or we closed."""
        self._transport = None
        for question in self._questions.values():
            if not question.done():
                question.set_exception(ControlError("the process is gone"))
        self._questions.clear()
        if not self.gone.done():
            self.gone.set_result(None)

    def _take(self, message: Message) -> None:
        if "answer" in message:
            question = self._questions.pop(message["number"], None)
            if question is not None and not question.done():
                question.set_result(message["answer"])
        elif "ask" in message:
            self._write({"answer": self._answer(message), "number": message["number"]})
        else:
            self._heard(message)

    # What we say.

    def _write(self, message: Message) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(json.dumps(message).encode("ascii") + b"\n")

    def tell(self, word: str, **values: Any) -> None:
        """Say something, in order with everything else said; lost where the other process is gone."""
        self._write({"tell": word, **values})

    async def ask(self, word: str, limit_s: float, **values: Any) -> Any:
        """The answer to a question, within `limit_s`.

        Raises: ControlError.
        """
        if self._transport is None:
            raise ControlError("the process is gone")
        self._number += 1
        number = self._number
        question = self._questions[number] = asyncio.get_running_loop().create_future()
        self._write({"ask": word, "number": number, **values})
        try:
            async with asyncio.timeout(limit_s):
                return await question
        except TimeoutError as exc:
            raise ControlError("no answer in time") from exc
        finally:
            self._questions.pop(number, None)

    def close(self) -> None:
        """Say no more; what was said still arrives."""
        if self._transport is not None:
            self._transport.close()
