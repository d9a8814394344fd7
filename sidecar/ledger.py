"""What the operator asks the store and tells it: one typed method per script. Knows no route's settings.

None of it is on the way of a mail, and all of it goes over a connection of its own.
"""

from __future__ import annotations

from typing import Any, Literal

from sidecar.message import Answer, RecordId
from sidecar.record import Settled, Settlement, Shown, pack_fields, shown
from sidecar.store import Claim, Store

# The two lists of a route and a tag: of what is unsettled, and of what is settled.
Part = Literal["open", "done"]
PARTS: tuple[Part, ...] = ("open", "done")


class Ledger:
    """The records of a store, as the operator handles them."""

    def __init__(self, store: Store) -> None:
        """`store`: where they are."""
        self._store = store

    async def show(self, record: RecordId, *, content: bool = False) -> Shown | None:
        """One record; None where there is none. `content`: with its answer. Raises: StoreError."""
        return shown(record, await self._store.operate("show", nobody(record), int(content)))

    async def newest(
        self, tag: str, route: str, part: Part, *, most_ms: int | None, least_ms: int, skip: int, count: int
    ) -> list[tuple[int, RecordId]]:
        """Up to `count` entries of one list, the latest first, without the first `skip`: each with its time.

        That is when it leaves the list, in ms; only those from `least_ms` to `most_ms`. Raises: StoreError.
        """
        most = "+inf" if most_ms is None else most_ms
        words = (most, least_ms, "WITHSCORES", "LIMIT", skip, count)
        reply = await self._store.read("ZREVRANGEBYSCORE", tag, f"{route}:{part}", *words)
        pairs = zip(reply[1::2], reply[::2], strict=True)
        return [(int(float(score)), RecordId(name.decode("ascii", "replace"))) for score, name in pairs]

    async def holds(self, record: RecordId, route: str) -> bool:
        """Whether the record stands in a list of this route. Raises: StoreError."""
        for part in PARTS:
            if await self._store.read("ZSCORE", record[:2], f"{route}:{part}", record) is not None:
                return True
        return False

    async def find(
        self, tag: str, route: str, part: Part, text: bytes, *, skip: int, count: int
    ) -> tuple[int, list[RecordId]]:
        """How many entries of a list were looked at, and those whose key is `text`. Raises: StoreError."""
        claim = nobody(RecordId(tag), route=route, key_text=text)
        number = 2 + PARTS.index(part)
        reply = await self._store.operate("find", claim, number, skip, count, self._store.begins(tag))
        return reply[1], [RecordId(name.decode("ascii", "replace")) for name in reply[2:]]

    async def sent(
        self, claim: Claim, answer: Answer | None, *, status: int, provider_id: str, ttl_s: float, forced: bool
    ) -> Settled:
        """Settle an unknown outcome as sent. `answer`: what retries get; without one `status` and a problem.

        Raises: StoreError.
        """
        given = Answer(status, b"", (), provider_id.encode("ascii")) if answer is None else answer
        told = (given.status, given.reason, pack_fields(given.fields), 2 if answer is None else 1, given.content)
        more = ("sent", round(ttl_s * 1000), 0, int(forced), *told, provider_id)
        return _settled(await self._store.operate("resolve", claim, *more))

    async def not_sent(self, claim: Claim, *, quiet_s: float, forced: bool) -> Settled:
        """Settle an unknown outcome as not sent. `quiet_s`: refused before that long after the last attempt's end.

        Raises: StoreError.
        """
        more = ("not-sent", 0, round(quiet_s * 1000), int(forced), 0, "", "", 0, "", "")
        return _settled(await self._store.operate("resolve", claim, *more))

    async def forget(self, claim: Claim) -> Settled:
        """Free the key, whatever is known of it. Raises: StoreError."""
        return _settled(await self._store.operate("forget", claim))


def nobody(
    record: RecordId,
    *,
    route: str = "",
    token: bytes = b"",
    key_text: bytes = b"",
    lease_s: float = 0.0,
    hold_for_s: float = 0.0,
) -> Claim:
    """The claim of somebody who sends nothing. Its record would fit every request."""
    return Claim(
        record=record,
        route=route,
        token=token,
        fingerprint=b"",
        algorithm=b"off",
        lease_s=lease_s,
        hold_for_s=hold_for_s,
        key_text=key_text,
    )


def _settled(reply: list[Any]) -> Settled:
    left_ms = reply[1] if len(reply) > 1 and isinstance(reply[1], int) else 0
    return Settled(Settlement(reply[0].decode("ascii")), left_ms)
