"""Content codings: undone in small steps and within bounds; which a client accepts; answers without them."""

from __future__ import annotations

import gzip
import importlib
import zlib
from collections.abc import Callable
from itertools import islice

import pytest

from sidecar.coding import KNOWN, MAX_MEMBERS, STEP_BYTES, CodingError, Unfolding, acceptable, codings, decoded
from sidecar.message import Fields

PLAIN = bytes(range(256)) * 300 + b"the end"


def raw_deflate(content: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(content) + packer.flush()


def by_module(name: str, *modules: str) -> Callable[[bytes], bytes]:
    def pack(content: bytes) -> bytes:
        for module in modules:
            try:
                packed: bytes = importlib.import_module(module).compress(content)
            except ImportError:
                continue
            return packed
        raise AssertionError(f"{name} is known, and no module for it is there")

    return pack


PACK: dict[str, tuple[bytes, Callable[[bytes], bytes]]] = {
    "gzip": (b"gzip", gzip.compress),
    "gzip in members": (b"gzip", lambda content: b"".join(map(gzip.compress, (content[:9], b"", content[9:])))),
    "zlib": (b"deflate", zlib.compress),
    "stored": (b"deflate", lambda content: zlib.compress(content, 0)),
    "bare deflate": (b"deflate", raw_deflate),
}
# Only where their modules are installed; nothing here depends on them.
if b"br" in KNOWN:
    PACK["br"] = (b"br", by_module("br", "brotli"))
if b"zstd" in KNOWN:
    PACK["zstd"] = (b"zstd", by_module("zstd", "compression.zstd", "backports.zstd"))

ways = pytest.mark.parametrize(("name", "pack"), PACK.values(), ids=PACK.keys())


def unfolded(names: tuple[bytes, ...], content: bytes, size: int = STEP_BYTES, limit_bytes: int = 1 << 20) -> bytes:
    unfolding = Unfolding(names, limit_bytes)
    plain: list[bytes] = []
    for at in range(0, len(content), size):
        plain += unfolding.feed(content[at : at + size])
    unfolding.finish()
    assert max(map(len, plain), default=0) <= 2 * STEP_BYTES
    return b"".join(plain)


@ways
def test_codings_are_undone_however_cut(name: bytes, pack: Callable[[bytes], bytes]) -> None:
    for content in (PLAIN, b"x", b""):
        packed = pack(content)
        assert unfolded((name,), packed) == unfolded((name,), packed, 1) == content


def test_several_codings_are_undone_from_the_last_on() -> None:
    packed = gzip.compress(zlib.compress(gzip.compress(PLAIN)))
    assert unfolded((b"gzip", b"deflate", b"gzip"), packed) == PLAIN
    with pytest.raises(CodingError):
        unfolded((b"gzip", b"gzip", b"deflate"), packed)


@ways
def test_cut_content_is_an_error(name: bytes, pack: Callable[[bytes], bytes]) -> None:
    packed = pack(PLAIN)
    for cut in (0, 1, 2, len(packed) // 2, len(packed) - 1):
        with pytest.raises(CodingError):
            unfolded((name,), packed[:cut])


@ways
def test_broken_content_is_an_error(name: bytes, pack: Callable[[bytes], bytes]) -> None:
    packed = pack(PLAIN)
    for content in (b"\xff" * 40, packed + b"\xff\xff", b"\xff" + packed):
        for size in (STEP_BYTES, len(packed)):
            with pytest.raises(CodingError):
                unfolded((name,), content, size)


def test_a_wrong_checksum_is_an_error() -> None:
    packed = bytearray(gzip.compress(PLAIN))
    packed[-8] ^= 1
    with pytest.raises(CodingError):
        unfolded((b"gzip",), bytes(packed))


@ways
def test_unfolding_stops_at_the_limit_after_few_steps(name: bytes, pack: Callable[[bytes], bytes]) -> None:
    packed = pack(b"\x00" * 3_000_000)
    with pytest.raises(CodingError):
        unfolded((name,), packed, limit_bytes=2_999_999)
    assert len(unfolded((name,), packed, limit_bytes=3_000_000)) == 3_000_000
    unfolding = Unfolding((name,), 100_000)
    steps = (step for at in range(0, len(packed), STEP_BYTES) for step in unfolding.feed(packed[at : at + STEP_BYTES]))
    with pytest.raises(CodingError):
        list(islice(steps, 10))


def test_the_limit_holds_between_two_codings() -> None:
    packed = gzip.compress(gzip.compress(b"\x00" * 9_000_000))
    with pytest.raises(CodingError):
        unfolded((b"gzip", b"gzip"), packed, limit_bytes=5_000)


def test_empty_gzip_members_are_bounded() -> None:
    assert unfolded((b"gzip",), gzip.compress(b"") * 30) == b""
    with pytest.raises(CodingError):
        unfolded((b"gzip",), gzip.compress(b"") * (MAX_MEMBERS + 1))


@pytest.mark.parametrize("names", [(b"compress",), (b"gzip", b"rot13"), (b"gzip",) * 5, (b"*",)])
def test_unknown_and_too_many_codings_are_an_error(names: tuple[bytes, ...]) -> None:
    with pytest.raises(CodingError):
        Unfolding(names, 1000)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ((), ()),
        (((b"Content-Encoding", b"gzip"),), (b"gzip",)),
        (
            ((b"content-encoding", b" X-GZip , identity,,Deflate"), (b"CONTENT-ENCODING", b"br")),
            (b"gzip", b"deflate", b"br"),
        ),
        (((b"Content-Encoding", b"identity"),), ()),
        (((b"Content-Encoding", b""),), ()),
    ],
)
def test_codings_of_fields(fields: Fields, names: tuple[bytes, ...]) -> None:
    assert codings(fields) == names


@pytest.mark.parametrize(
    ("accept_encoding", "coding", "accepted"),
    [
        (None, b"gzip", False),
        (None, b"identity", True),
        (None, b"", True),
        (b"", b"gzip", False),
        (b"", b"", True),
        (b"gzip", b"gzip", True),
        (b"GZIP", b"gzip", True),
        (b"gzip", b"X-Gzip", True),
        (b"x-gzip", b"gzip", True),
        (b"gzip, deflate, br", b"br", True),
        (b"gzip, deflate, br", b"zstd", False),
        (b"gzip;q=0", b"gzip", False),
        (b"gzip;q=0.000", b"gzip", False),
        (b"gzip;q=0.001", b"gzip", True),
        (b"gzip ; Q=0.5", b"gzip", True),
        (b"gzip;q=1.000", b"gzip", True),
        (b"gzip;q=2", b"gzip", False),
        (b"gzip;level=9", b"gzip", False),
        (b"*", b"br", True),
        (b"*;q=0", b"br", False),
        (b"gzip;q=0, *", b"gzip", False),
        (b"gzip;q=0, *", b"br", True),
        (b"gzip, *;q=0", b"gzip", True),
        (b"gzip, *;q=0", b"", False),
        (b"gzip, *;q=0, identity", b"", True),
        (b"identity;q=0", b"identity", False),
        (b"identity;q=0, *", b"", False),
        (b"gzip", b"identity", True),
        (b"gzip, deflate", b"deflate, gzip", True),
        (b"gzip", b"deflate, gzip", False),
        (b" , gzip,", b"gzip", True),
    ],
)
def test_acceptable(accept_encoding: bytes | None, coding: bytes, accepted: bool) -> None:
    assert acceptable(accept_encoding, coding) is accepted


FIELDS: Fields = (
    (b"Date", b"today"),
    (b"Content-Encoding", b"gzip"),
    (b"Content-Type", b"application/json"),
    (b"Content-Length", b"23"),
    (b"ETag", b'"v1"'),
    (b"Content-MD5", b"x"),
    (b"Digest", b"x"),
    (b"Content-Digest", b"x"),
    (b"Repr-Digest", b"x"),
    (b"Set-Cookie", b"a=1"),
    (b"Set-Cookie", b"b=2"),
)


def test_decoded_answer_loses_what_speaks_of_the_coding() -> None:
    assert decoded(FIELDS, gzip.compress(PLAIN), len(PLAIN)) == (
        (
            (b"Date", b"today"),
            (b"Content-Type", b"application/json"),
            (b"ETag", b'W/"v1"'),
            (b"Set-Cookie", b"a=1"),
            (b"Set-Cookie", b"b=2"),
        ),
        PLAIN,
    )


def test_a_weak_etag_stays() -> None:
    fields: Fields = ((b"Content-Encoding", b"gzip"), (b"etag", b'W/"v1"'))
    assert decoded(fields, gzip.compress(b"x"), 9) == (((b"etag", b'W/"v1"'),), b"x")


@pytest.mark.parametrize(
    ("coding", "content", "limit_bytes"),
    [
        (b"gzip, unheard-of", gzip.compress(PLAIN), 1 << 20),
        (b"gzip", gzip.compress(PLAIN)[:-1], 1 << 20),
        (b"gzip", b"{}", 1 << 20),
        (b"gzip", gzip.compress(PLAIN), len(PLAIN) - 1),
    ],
)
def test_an_answer_that_cannot_be_decoded_is_none(coding: bytes, content: bytes, limit_bytes: int) -> None:
    assert decoded(((b"Content-Encoding", coding),), content, limit_bytes) is None


@pytest.mark.parametrize("fields", [(), ((b"Content-Encoding", b"identity"), (b"ETag", b'"v1"'))])
def test_an_answer_without_coding_stays_as_it_is(fields: Fields) -> None:
    assert decoded(fields, PLAIN, 10) == (fields, PLAIN)


def test_an_answer_without_content_stays_as_it_is() -> None:
    assert decoded(FIELDS, b"", 10) == (FIELDS, b"")
