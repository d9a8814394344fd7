"""Requests that are nearly right: a seeded mutator over whole requests, and the strict reader of what comes back.

mutator = Mutator(seed)
data = mutator.mutant(number)          # the same for the same seed and number
read = answers(received)               # raises ValueError where this is no row of HTTP/1.1 answers
mutant_answer(seed, number)            # the other direction: an upstream's answer, marked with its number
foreign(received, number)              # the marks of others in it
"""

from __future__ import annotations

import functools
import hashlib
import random
import re
from collections.abc import Callable

from harness import request
from harness.wire import Field

# In Authorization and in every content: neither log nor answers of ours may repeat it.
SECRET = b"zq7-secret"
CREDENTIAL = b"Bearer " + SECRET

PIECES = (
    b"\r\n",
    b"\n",
    b"\r",
    b"\0",
    b"\x0b",
    b" ",
    b"\t",
    b":",
    b",",
    b'"',
    b"\\",
    b"%",
    b"%2f",
    b"%2e%2e/",
    b"..\\",
    b"//",
    b"/../",
    b"#",
    b"?",
    b"@evil.test",
    b"http://evil.test:81",
    b"\xff",
    b"\x80",
    b"\x7f",
    b"0",
    b"-1",
    b"+",
    b"99999999999999999999",
    b"\r\nContent-Length: 0",
    b"\r\nContent-Length: 5",
    b"\r\nTransfer-Encoding: chunked",
    b"\r\nTransfer-Encoding: identity",
    b"\r\nConnection: close",
    b"\r\nConnection: Idempotency-Key",
    b"\r\nConnection: Upgrade\r\nUpgrade: h2c",
    b"\r\nExpect: 100-continue",
    b"\r\nHost: evil.test",
    b"\r\nIdempotency-Key: other",
    b"\r\nContent-Encoding: gzip",
    b"\r\nContent-Type: multipart/form-data; boundary=b",
    b"\r\n\r\n",
    b"0\r\n\r\n",
    b"ffffffffffffffff\r\n",
    b"HTTP/1.0",
    b"HTTP/2.0",
    b"PUT ",
    b"CONNECT ",
    b"OPTIONS ",
    b"GET /mail/hidden HTTP/1.1\r\nHost: h\r\n\r\n",
)


def _json(number: int) -> bytes:
    return b'{"to":"b@example.com","n":%d,"nested":{"a":[1,2.50,null]},"text":"%b"}' % (number, SECRET)


def _post(number: int, fields: tuple[Field, ...] = (), content: bytes = b"", target: bytes = b"/mail/emails") -> bytes:
    always = ((b"Authorization", CREDENTIAL), *fields)
    return request("POST", target, always, content, key=b"fuzz-%d" % number)


def _plain(number: int) -> bytes:
    return _post(number, ((b"Content-Type", b"application/json"),), _json(number))


def _chunked(number: int) -> bytes:
    content = _json(number)
    parts = b"%x\r\n%b\r\n%x;ext=1\r\n%b\r\n0\r\nX-Trailer: 1\r\n\r\n" % (9, content[:9], len(content) - 9, content[9:])
    return _post(number, ((b"Transfer-Encoding", b"chunked"), (b"Content-Type", b"application/json"))) + parts


def _form(number: int) -> bytes:
    kind = (b"Content-Type", b"application/x-www-form-urlencoded; charset=utf-8")
    return _post(number, (kind,), b"to=b%%40example.com&n=%d&text=%b&empty=" % (number, SECRET))


def _multipart(number: int) -> bytes:
    part = b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
    content = part % (b"n", b"%d" % number) + part % (b"text", SECRET) + b"--b--\r\n"
    return _post(number, ((b"Content-Type", b"multipart/form-data; boundary=b"),), content)


def _quoted(number: int) -> bytes:
    fields = ((b"Authorization", CREDENTIAL), (b"Idempotency-Key", b'"fuzz-%d"' % number))
    return request("POST", "http://sidecar.test/mail//emails/?a=1", fields, _json(number))


def _passed(number: int) -> bytes:
    return _post(number, (), _json(number), b"/mail/other/%%2e%%2e/x?n=%d" % number)


def _read(number: int) -> bytes:
    return request("GET", b"/mail/domains?n=%d" % number, ((b"Authorization", CREDENTIAL), (b"Accept", b"*/*")))


def _two(number: int) -> bytes:
    return _plain(number) + _read(number) + _plain(number)


SEEDS: tuple[Callable[[int], bytes], ...] = (_plain, _chunked, _form, _multipart, _quoted, _passed, _read, _two)


class Mutator:
    """Mutants of `SEEDS`, one a number."""

    def __init__(self, seed: int) -> None:
        """`seed`: the whole series follows from it."""
        self.seed = seed

    def mutant(self, number: int) -> bytes:
        """A request with up to six changes; about one in ten is left as it is."""
        rng = random.Random(self.seed * 1_000_003 + number)
        data = SEEDS[number % len(SEEDS)](number)
        for _ in range(rng.choice((0, 1, 1, 1, 1, 2, 2, 3, 4, 6))):
            data = rng.choice(CHANGES)(rng, data)
        return data

    def cuts(self, number: int, data: bytes) -> list[bytes]:
        """`data` in one to four pieces: how it comes to the other side."""
        rng = random.Random(self.seed * 7_000_003 + number)
        places = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice((0, 0, 0, 1, 2, 3))))
        return [data[begin:end] for begin, end in zip((0, *places), (*places, len(data)), strict=True)]


# Answers, and whose they are.

MARK = re.compile(rb"(?=([0-9a-f]{16}))")


@functools.cache
def mark(number: int) -> bytes:
    """What says whose a content is: no change of one makes another."""
    made = hashlib.blake2b(b"%d" % number, digest_size=8).hexdigest().encode()
    _marks[made] = number
    return made


_marks: dict[bytes, int] = {}


def foreign(data: bytes, *own: int) -> list[int]:
    """The numbers whose marks are in `data`, those in `own` left out."""
    found = {_marks[given] for given in MARK.findall(data) if given in _marks}
    return sorted(found - set(own))


def _length(content: bytes) -> bytes:
    fields = b"Content-Type: application/json\r\nX-Request-Id: 7\r\nSet-Cookie: a=1"
    return b"HTTP/1.1 200 OK\r\n%b\r\nContent-Length: %d\r\n\r\n%b" % (fields, len(content), content)


def _chunks_of(content: bytes) -> bytes:
    chunks = b"%x\r\n%b\r\n%x;a=b\r\n%b\r\n0\r\nX-Trailer: 1\r\n\r\n" % (
        5,
        content[:5],
        len(content) - 5,
        content[5:],
    )
    return b"HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks


def _to_the_end(content: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: text/plain\r\n\r\n" + content


def _interim(content: bytes) -> bytes:
    return b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + _length(content)


def _refusal(content: bytes) -> bytes:
    return b"HTTP/1.1 422 Unprocessable Content\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content)


ANSWERS: tuple[Callable[[bytes], bytes], ...] = (
    _length,
    _length,
    _chunks_of,
    _chunks_of,
    _to_the_end,
    _interim,
    _refusal,
)


def mutant_answer(seed: int, number: int) -> bytes:
    """An answer with `mark(number)` in it and up to four changes, always the same for the same arguments."""
    rng = random.Random(seed * 3_000_017 + number)
    data = rng.choice(ANSWERS)(b'{"id":"%b"}' % mark(number))
    for _ in range(rng.choice((0, 0, 1, 1, 1, 2, 3, 4))):
        data = rng.choice(CHANGES)(rng, data)
    return data


def _place(rng: random.Random, data: bytes) -> int:
    """Anywhere, but in the head more often than its length deserves."""
    head = data.find(b"\r\n\r\n")
    return rng.randrange((head if head > 0 and rng.random() < 0.7 else len(data)) + 1)


def _flip(rng: random.Random, data: bytes) -> bytes:
    at = _place(rng, data)
    return data[:at] + bytes((rng.randrange(256),)) + data[at + 1 :]


def _insert(rng: random.Random, data: bytes) -> bytes:
    at = _place(rng, data)
    return data[:at] + rng.choice(PIECES) + data[at:]


def _field(rng: random.Random, data: bytes) -> bytes:
    """A piece at the end of a line, where most of the interesting ones belong."""
    ends = [match.start() for match in re.finditer(rb"\r\n", data)] or [0]
    at = rng.choice(ends)
    return data[:at] + rng.choice(PIECES) + data[at:]


def _drop(rng: random.Random, data: bytes) -> bytes:
    at = _place(rng, data)
    return data[:at] + data[at + rng.choice((1, 1, 2, 8, 30)) :]


def _double(rng: random.Random, data: bytes) -> bytes:
    at = _place(rng, data)
    part = data[at : at + rng.choice((1, 4, 40, 4000))]
    return data[:at] + part + data[at:]


def _double_line(rng: random.Random, data: bytes) -> bytes:
    lines = data.split(b"\r\n")
    at = rng.randrange(len(lines))
    lines.insert(rng.randrange(len(lines)), lines[at])
    return b"\r\n".join(lines)


def _swap_lines(rng: random.Random, data: bytes) -> bytes:
    lines = data.split(b"\r\n")
    one, two = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[one], lines[two] = lines[two], lines[one]
    return b"\r\n".join(lines)


def _digit(rng: random.Random, data: bytes) -> bytes:
    places = [match.start() for match in re.finditer(rb"[0-9]", data)] or [0]
    at = rng.choice(places)
    return data[:at] + rng.choice((b"0", b"9", b"-", b"%d" % rng.randrange(3000), b"")) + data[at + 1 :]


def _long(rng: random.Random, data: bytes) -> bytes:
    at = _place(rng, data)
    return data[:at] + bytes((rng.randrange(33, 127),)) * rng.choice((300, 9000, 70_000)) + data[at:]


def _cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(1, len(data) + 1)]


CHANGES: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    _flip,
    _flip,
    _insert,
    _insert,
    _field,
    _field,
    _field,
    _drop,
    _double,
    _double_line,
    _swap_lines,
    _digit,
    _digit,
    _long,
    _cut,
)
