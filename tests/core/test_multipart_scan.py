"""Multipart forms: compared part by part whatever the boundary; what parsers could read in two ways is told."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar import framing
from sidecar.framing import MAX_NAMES, Names, seal
from sidecar.multipart_scan import MAX_HEADER_BYTES, MultipartScanner, boundary


def scanned(
    content: bytes,
    mark: bytes = b"AAA",
    size: int = 16384,
    ignore: tuple[str, ...] = (),
    watch: tuple[str, ...] = (),
) -> MultipartScanner:
    ignored = frozenset(seal(b"s", name.encode()) for name in ignore)
    names = Names(ignored, {seal(b"s", name.encode()): name for name in watch})
    scanner = MultipartScanner(names, mark)
    for at in range(0, len(content), size):
        for _ in scanner.feed(content[at : at + size]):
            pass
    return scanner


def sealed(content: bytes, mark: bytes = b"AAA", size: int = 16384, ignore: tuple[str, ...] = ()) -> bytes | None:
    return scanned(content, mark, size, ignore).finish()


def part(value: bytes, disposition: bytes = b'form-data; name="a"', *more: bytes) -> bytes:
    return b"\r\n".join((b"Content-Disposition: " + disposition, *more, b"", value))


def form(*parts: bytes, mark: bytes = b"AAA") -> bytes:
    return b"".join(b"--" + mark + b"\r\n" + one + b"\r\n" for one in parts) + b"--" + mark + b"--\r\n"


PLAIN = part(b"hello")
NAMED = part(b"hello", b'form-data; name="b"')
FILE = part(b"abc", b'form-data; name="attachment"; filename="a.txt"', b"Content-Type: text/plain")

marks = st.text("ABab09'()+_,-./:=? ", min_size=1, max_size=70).map(lambda text: (text.rstrip() or "x").encode())
bodies = st.lists(
    st.tuples(st.sampled_from([b"a", b"b"]), st.booleans(), st.text("A-\r\n x", max_size=12).map(str.encode)),
    max_size=5,
)


def build(body: list[tuple[bytes, bool, bytes]], mark: bytes) -> bytes:
    return form(
        *(
            part(value, b'form-data; name="%b"%b' % (name, b'; filename="f"' if file else b""))
            for name, file, value in body
        ),
        mark=mark,
    )


@settings(max_examples=40, deadline=None)
@given(bodies, marks, marks, st.integers(1, 40))
def test_one_form_has_one_digest_whatever_boundary_and_cut(
    body: list[tuple[bytes, bool, bytes]], one: bytes, other: bytes, size: int
) -> None:
    # A boundary must not occur in the parts (RFC 2046 section 5.1.1); so senders draw random ones.
    one, other = b"Z" + one[:69], other[:69] + b"Z"
    expected = sealed(build(body, one), one)
    assert expected is not None
    assert expected == sealed(build(body, other), other, size)


@settings(max_examples=40, deadline=None)
@given(bodies, bodies)
def test_forms_are_equal_exactly_when_their_groups_are(
    one: list[tuple[bytes, bool, bytes]], other: list[tuple[bytes, bool, bytes]]
) -> None:
    def grouped(body: list[tuple[bytes, bool, bytes]]) -> dict[bytes, list[tuple[bool, bytes]]]:
        groups: dict[bytes, list[tuple[bool, bytes]]] = {}
        for name, file, value in body:
            groups.setdefault(name, []).append((file, value))
        return groups

    same = grouped(one) == grouped(other)
    assert (sealed(build(one, b"ZZ"), b"ZZ") == sealed(build(other, b"Z"), b"Z")) == same


@pytest.mark.parametrize(
    "other",
    [
        form(NAMED, PLAIN, FILE),
        form(PLAIN, NAMED, FILE).replace(b"AAA", b"B-B.B"),
        b"preamble\r\nof two lines\r\n" + form(PLAIN, NAMED, FILE) + b"epilogue\r\n--AAA\r\n",
        form(PLAIN, NAMED, FILE).removesuffix(b"\r\n"),
        form(PLAIN, NAMED, FILE).removesuffix(b"\r\n") + b" \t",
        form(PLAIN, NAMED, FILE).replace(b"--AAA\r\n", b"--AAA \t \r\n"),
        form(part(b"hello", b"FORM-DATA ; NAME = a"), NAMED, FILE),
        form(PLAIN.replace(b"Content-Disposition: ", b"content-disposition:\t"), NAMED, FILE),
        form(part(b"hello", b'form-data; name="\\a"'), NAMED, FILE),
        form(part(b"hello", b'form-data; name="a"', b"Content-Length: 5", b"X-Trace: 1"), NAMED, FILE),
        form(part(b"hello", b'form-data; name="a"', b"Content-Transfer-Encoding: BINARY"), NAMED, FILE),
        form(PLAIN, NAMED, FILE.replace(b"text/plain", b"Text/PLAIN ")),
    ],
)
def test_equal_forms(other: bytes) -> None:
    mark = b"B-B.B" if b"B-B.B" in other else b"AAA"
    expected = sealed(form(PLAIN, NAMED, FILE))
    assert expected is not None
    assert {expected} == {sealed(other, mark, size) for size in (1, 5, 16384)}


DIFFERENT = [
    form(),
    form(PLAIN),
    form(PLAIN, PLAIN),
    form(PLAIN, PLAIN, PLAIN),
    form(part(b"")),
    form(part(b"hellp")),
    form(part(b"hello\r\n")),
    form(part(b"\r\nhello")),
    form(part(b"hello\n")),
    form(part(b"hello--AAA")),
    form(PLAIN, part(b"b")),
    form(part(b"b"), PLAIN),
    form(NAMED),
    form(part(b"hello", b'form-data; name="A"')),
    form(part(b"hello", b'form-data; name=""')),
    form(part(b"hello", b'form-data; name="a%22"')),
    form(part(b"hello", b'form-data; name="a\\""')),
    form(part(b"hello", b'form-data; name="a"; filename=""')),
    form(part(b"hello", b'form-data; name="a"; filename="a"')),
    form(part(b"hello", b'form-data; name="a"; filename="b"')),
    form(part(b"hello", b"form-data; name=\"a\"; filename*=UTF-8''a")),
    form(part(b"hello", b"form-data; name=\"a\"; filename=a; filename*=UTF-8''a")),
    form(part(b"hello", b'form-data; name="a"', b"Content-Type: text/plain")),
    form(part(b"hello", b'form-data; name="a"', b"Content-Type: text/html")),
    form(part(b"hello", b'form-data; name="a"', b"Content-Type: text/html; charset=utf-8")),
    form(part(b"hello", b'form-data; name="a"', b"Content-Type:")),
    form(part(b"hello", b'form-data; name="a"', b"Content-Transfer-Encoding: base64")),
    form(part(b"x" * 40000)),
    form(part(b"x" * 39999 + b"y")),
    form(PLAIN, NAMED, FILE),
    form(PLAIN, NAMED, FILE.replace(b"abc", b"abd")),
    form(PLAIN, NAMED, FILE.replace(b"a.txt", b"b.txt")),
    form(PLAIN, NAMED, FILE, FILE),
    form(FILE),
]


def test_forms_that_differ_in_name_file_name_type_order_or_bytes_all_differ() -> None:
    digests = [sealed(content) for content in DIFFERENT]
    assert None not in digests
    assert len(set(digests)) == len(DIFFERENT)


IRREGULAR = {
    "nothing": b"",
    "another boundary": form(PLAIN, mark=b"BBB"),
    "never closed": form(PLAIN).removesuffix(b"--\r\n"),
    "half closed": form(PLAIN).removesuffix(b"-\r\n"),
    "cut in a part": form(PLAIN)[:-20],
    "bare line feeds": form(PLAIN).replace(b"\r\n", b"\n"),
    "bare line feeds in the header": form(part(b"x", b'form-data; name="a"', b"A: b\nC: d")),
    "no empty line": b"--AAA\r\nContent-Disposition: form-data; name=a\r\n--AAA--\r\n",
    "no content": b"--AAA\r\nContent-Disposition: form-data; name=a\r\n\r\n--AAA--\r\n",
    "no header": b"--AAA\r\n\r\nhello\r\n--AAA--\r\n",
    "no disposition": form(b"Content-Type: text/plain\r\n\r\nx"),
    "not form-data": form(part(b"x", b'attachment; name="a"')),
    "no name": form(part(b"x", b"form-data")),
    "encoded name": form(part(b"x", b"form-data; name*=UTF-8''a")),
    "two names": form(part(b"x", b'form-data; name="a"; name="b"')),
    "two dispositions": form(part(b"x", b'form-data; name="a"', b'Content-Disposition: form-data; name="b"')),
    "two types": form(part(b"x", b'form-data; name="a"', b"Content-Type: a/b", b"content-type: c/d")),
    "further parameter": form(part(b"x", b'form-data; name="a"; size=3')),
    "quotes not closed": form(part(b"x", b'form-data; name="a')),
    "text behind quotes": form(part(b"x", b'form-data; name="a"b')),
    "trailing semicolon": form(part(b"x", b'form-data; name="a";')),
    "folded line": form(part(b"x", b'form-data;\r\n name="a"')),
    "space before the colon of nothing": form(part(b"x", b'form-data; name="a"', b" : x")),
    "line without a colon": form(part(b"x", b'form-data; name="a"', b"nothing")),
    "line that begins with the delimiter": form(part(b"hello\r\n--AAAB\r\nx")),
    "closing delimiter and more": form(PLAIN).removesuffix(b"\r\n") + b"x\r\n",
    "closing delimiter and half a line end": form(PLAIN).removesuffix(b"\n"),
    "header too long": form(part(b"x", b'form-data; name="a"', b"X: " + b"y" * MAX_HEADER_BYTES)),
    "endless header": b"--AAA\r\nX: " + b"y" * 3 * MAX_HEADER_BYTES,
    "endless padding": b"--AAA" + b" " * 2000 + b"\r\n" + form(PLAIN),
    "too many names": form(*(part(b"x", b"form-data; name=n%d" % number) for number in range(MAX_NAMES + 1))),
}


@pytest.mark.parametrize("content", IRREGULAR.values(), ids=IRREGULAR.keys())
def test_irregular_content_has_no_digest(content: bytes) -> None:
    for size in (16384, 61, 1) if len(content) < 60000 else (16384, 5003):
        scanner = scanned(content, size=size, watch=("a", "n0"))
        assert scanner.finish() is None
        assert scanner.irregular
        assert scanner.found == {}


def test_header_at_the_limit_is_read_however_cut() -> None:
    header = part(b"x", b'form-data; name="a"', b"X: ")
    long = header.replace(b"X: ", b"X: " + b"y" * (MAX_HEADER_BYTES - len(header) + 5))
    assert sealed(form(long)) == sealed(form(long), size=997) == sealed(form(part(b"x")))
    assert sealed(form(long.replace(b"X:", b"XX:"))) is None
    assert sealed(form(long.replace(b"X:", b"XX:")), size=997) is None


def test_a_header_line_may_not_hide_a_delimiter() -> None:
    hidden = b'--A:A\r\nContent-Disposition: form-data; name="a"\r\n--A:A\r\n\r\nx\r\n--A:A--\r\n'
    assert sealed(hidden, b"A:A") is None


@pytest.mark.parametrize(
    ("content_type", "found"),
    [
        (b"multipart/form-data; boundary=AAA", b"AAA"),
        (b"multipart/form-data;BOUNDARY=AAA;charset=utf-8", b"AAA"),
        (b'multipart/form-data; charset=utf-8; boundary="A A:\\A"', b"A A:A"),
        (b"multipart/form-data; boundary====8126==", b"===8126=="),
        (b"multipart/form-data; boundary=" + b"x" * 70, b"x" * 70),
        (b"multipart/form-data; boundary=" + b"x" * 71, None),
        (b"multipart/form-data", None),
        (b"multipart/form-data; boundary=", None),
        (b'multipart/form-data; boundary=""', None),
        (b'multipart/form-data; boundary="A "', None),
        (b"multipart/form-data; boundary=A*", None),
        (b"multipart/form-data; boundary=A; boundary=B", None),
        (b'multipart/form-data; boundary="A', None),
    ],
)
def test_boundary(content_type: bytes, found: bytes | None) -> None:
    assert boundary(content_type) == found


def test_without_a_boundary_nothing_is_read() -> None:
    scanner = MultipartScanner(Names(frozenset(), {}), None)
    assert not list(scanner.feed(form(PLAIN)))
    assert scanner.finish() is None


def test_ignored_and_watched_names_mean_no_files() -> None:
    timed = part(b"1", b'form-data; name="time"')
    later = part(b"2", b'form-data; name="time"')
    file = part(b"1", b'form-data; name="time"; filename="t"')
    ignore = ("time",)
    assert sealed(form(PLAIN, timed), ignore=ignore) == sealed(form(later, PLAIN, later), ignore=ignore)
    assert sealed(form(PLAIN, timed), ignore=ignore) == sealed(form(PLAIN)) != sealed(form(PLAIN, timed))
    assert sealed(form(PLAIN, file), ignore=ignore) != sealed(form(PLAIN))
    assert sealed(form(PLAIN, file), ignore=ignore) == sealed(form(PLAIN, file))
    for size in (1, 16384):
        scanner = scanned(form(file, timed, PLAIN, later), size=size, ignore=ignore, watch=("time", "a", "b"))
        assert scanner.finish() is not None
        assert scanner.found == {"time": b"1,2", "a": b"hello"}


def test_parts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "MAX_VALUES", 5)
    assert sealed(form(*[PLAIN] * 5)) is not None
    assert sealed(form(*[PLAIN] * 6)) is None


def test_much_work_in_one_piece_yields() -> None:
    scanner = MultipartScanner(Names(frozenset(), {}), b"A")
    assert len(list(scanner.feed(form(*[part(b"")] * 250, mark=b"A")))) > 3
