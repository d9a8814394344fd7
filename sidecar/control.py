"""The line between the supervisor and a worker: JSON, one message a line, over a pair of sockets.

Either side tells, asks and answers. Nobody waits for long: a question has a time limit, and the end of the other
process ends the line, which is how each learns of it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, cast

from sidecar.config import Address, Config
from sidecar.errors import SidecarError

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Orders:
    """What a worker begins with: the configuration as it is in force, not as its file may be by now.

    `number`: its own, from 1. `socket_path`: of the embedded store, empty where it is another's. `places`: address,
    whether it is a route's own, and for each family the descriptors of the sockets.
    """

    number: int
    config: Config
    socket_path: str
    places: tuple[tuple[Address, bool, tuple[tuple[int, ...], ...]], ...]


def pack(value: object) -> str:
    """A value of ours, for a message."""
    return base64.b64encode(pickle.dumps(value)).decode("ascii")


def unpack(text: str) -> Any:
    """A value that `pack` packed, in the process at the other end of a pair of sockets, of the same version."""
    return pickle.loads(base64.b64decode(text))  # noqa: S301 - nobody else can write there


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
    async def open(cls, end: socket.socket, heard: Callable[[Message], None], answer: Callable[[Message], Any]) -> Self:
        """Begin to read at one end of a pair; see `__init__`."""
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_unix_connection(lambda: cls(heard, answer), sock=end)
        return channel

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The line stands."""
        self._transport = cast(asyncio.Transport, transport)

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

    async def ask(self, word: str, limit_s: float | None, **values: Any) -> Any:
        """The answer to a question, within `limit_s`, or for as long as the other process lives.

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
