"""Makes a replay of a stored answer: unchanged, but for what belongs to the moment. Pure."""

from __future__ import annotations

from sidecar.coding import acceptable, codings, decoded
from sidecar.config import Route
from sidecar.message import Answer, Field, Fields
from sidecar.record import Completed


def replay(
    completed: Completed, route: Route, *, accept_encoding: bytes | None, date: bytes, limit_bytes: int
) -> Answer:
    """The stored answer as this retry gets it.

    `accept_encoding`: the retry's field, None where it has none. `date`: the Date of now (RFC 9110 section 6.6.1).
    `limit_bytes`: how far a content coding may unfold.
    """
    fields, content = _coded(completed, accept_encoding, limit_bytes)
    made: list[Field] = []
    mark = route.replay_field.encode("ascii")
    marked = not mark
    for name, value in fields:
        low = name.lower()
        if low == b"date":
            # An AWS SDK sets its signing clock by this field: an old one would spoil the client's next request.
            made.append((name, date))
        elif low == b"set-cookie" and "credential" not in route.scope:
            continue  # only the credential in the scope says that this client is the one the cookie was for
        elif mark and low == mark.lower():
            # The upstream has a field of this name: the replay's is in its place.
            if not marked:
                made.append((mark, b"true"))
                marked = True
        else:
            made.append((name, value))
    if not marked:
        made.append((mark, b"true"))
    return Answer(completed.answer.status, completed.answer.reason, tuple(made), content)


def _coded(completed: Completed, accept_encoding: bytes | None, limit_bytes: int) -> tuple[Fields, bytes]:
    """The content in a coding the retry takes. One we cannot undo stays: bytes are better than none."""
    answer = completed.answer
    names = codings(answer.fields)
    if not names or (accept_encoding or b"") == completed.accept_encoding:
        return answer.fields, answer.content
    if all(acceptable(accept_encoding, name) for name in names):
        return answer.fields, answer.content
    undone = decoded(answer.fields, answer.content, limit_bytes)
    return (answer.fields, answer.content) if undone is None else undone
