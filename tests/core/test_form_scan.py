"""Forms: compared by decoded pairs, the order of one name's values kept, wherever the content was cut."""

from __future__ import annotations

from urllib.parse import quote, urlencode

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar import framing
from sidecar.form_scan import FormScanner
from sidecar.framing import MAX_NAMES, Names, seal


def scanned(
    content: bytes, size: int = 16384, ignore: tuple[str, ...] = (), watch: tuple[str, ...] = ()
) -> FormScanner:
    ignored = frozenset(seal(b"s", name.encode()) for name in ignore)
    scanner = FormScanner(Names(ignored, {seal(b"s", name.encode()): name for name in watch}))
    for at in range(0, len(content), size):
        for _ in scanner.feed(content[at : at + size]):
            pass
    return scanner


def sealed(content: bytes, size: int = 16384, ignore: tuple[str, ...] = ()) -> bytes | None:
    return scanned(content, size, ignore).finish()


words = st.text("ab=&%+; \u00e9\n", max_size=3)
pairs = st.lists(st.tuples(words, words), max_size=5)


def grouped(form: list[tuple[str, str]]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name, value in form:
        groups.setdefault(name, []).append(value)
    return groups


@settings(max_examples=40, deadline=None)
@given(pairs, st.integers(1, 6))
def test_one_form_has_one_digest_however_escaped_and_cut(form: list[tuple[str, str]], size: int) -> None:
    plain = urlencode(form).encode()
    escaped = "&".join(f"{every(name)}={every(value)}" for name, value in form).encode()
    percent = urlencode(form, quote_via=quote).encode()
    assert sealed(plain) is not None
    assert sealed(plain) == sealed(plain, size) == sealed(escaped, size) == sealed(percent)


def every(text: str) -> str:
    return "".join(f"%{byte:02x}" for byte in text.encode())


@settings(max_examples=40, deadline=None)
@given(pairs, pairs)
def test_forms_are_equal_exactly_when_their_groups_are(
    one: list[tuple[str, str]], other: list[tuple[str, str]]
) -> None:
    same = grouped(one) == grouped(other)
    assert (sealed(urlencode(one).encode()) == sealed(urlencode(other).encode())) == same


@settings(max_examples=40, deadline=None)
@given(st.text("%4aAg&=+", max_size=12).map(str.encode), st.integers(1, 4))
def test_broken_escapes_are_cut_anywhere(content: bytes, size: int) -> None:
    assert sealed(content, size) == sealed(content) is not None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b"a=1&b=2", b"b=2&a=1"),
        (b"to=x&a=1&to=y", b"a=1&to=x&to=y"),
        (b"a=1&&b=2&", b"a=1&b=2"),
        (b"a=%zz%4", b"a=%25zz%254"),
        (b"a=b=c", b"a=b%3Dc"),
        (b"a=x+y", b"a=x%20y"),
        (b"%61=1", b"a=1"),
        (b"a=" + b"x" * 40000, b"a=" + b"%78" * 40000),
    ],
)
def test_equal_forms(one: bytes, other: bytes) -> None:
    assert sealed(one) is not None
    assert sealed(one) == sealed(one, 7) == sealed(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b"to=x&to=y", b"to=y&to=x"),
        (b"to=x&to=y", b"to=xy"),
        (b"to=x&to=x", b"to=x"),
        (b"to=x&to=x&to=x", b"to=x&to=x"),
        (b"a=", b"a"),
        (b"a=", b""),
        (b"a", b""),
        (b"a=1", b"A=1"),
        (b"a=1&b=2", b"a=2&b=1"),
        (b"a=b", b"b=a"),
        (b"a=1;b=2", b"a=1&b=2"),
        (b"a=%2B", b"a=+"),
        (b"a=x" * 40000, b"a=x" * 39999 + b"a=y"),
        (b"a=\xe9", b"a=%C3%A9"),
    ],
)
def test_different_forms(one: bytes, other: bytes) -> None:
    assert None not in (sealed(one), sealed(other))
    assert sealed(one) != sealed(other)


def test_ignored_names_are_compared_decoded() -> None:
    assert sealed(b"v%3Atime=1&a=2", ignore=("v:time",)) == sealed(b"a=2&v:time=3&v:time=4", ignore=("v:time",))
    assert sealed(b"a=2", ignore=("v:time",)) == sealed(b"a=2&v:time", ignore=("v:time",))
    assert sealed(b"a=1", ignore=("b",)) == sealed(b"a=1")


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"k=a%20b+c&x=1", {"k": b"a b c"}),
        (b"%6B=%C3%A9", {"k": "\u00e9".encode()}),
        (b"k=1&x=2&k=3", {"k": b"1,3"}),
        (b"k=&x=1", {}),
        (b"k&x=1", {}),
        (b"K=1", {}),
        (b"k=" + b"x" * 4096, {"k": b"x" * 4096}),
    ],
)
def test_watched_values(content: bytes, found: dict[str, bytes]) -> None:
    for size in (1, 16384):
        scanner = scanned(content, size, ignore=("k",), watch=("k", "y"))
        assert scanner.finish() is not None
        assert scanner.found == found


def test_names_are_bounded() -> None:
    names = [b"n%d=1" % number for number in range(MAX_NAMES + 1)]
    assert sealed(b"&".join(names[:-1])) is not None
    irregular = scanned(b"&".join(names) + b"&k=1", watch=("n0",))
    assert irregular.finish() is None
    assert irregular.found == {}
    assert sealed(b"to=x&" * (MAX_NAMES + 9)) is not None


def test_the_last_name_may_be_one_too_many() -> None:
    assert sealed(b"&".join(b"n%d=1" % number for number in range(MAX_NAMES + 1)), 1 << 20) is None


def test_pairs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "MAX_VALUES", 50)
    assert sealed(b"to=x&" * 50) is not None
    assert sealed(b"&" * 51, 1) is None


def test_much_work_in_one_piece_yields() -> None:
    scanner = FormScanner(Names(frozenset(), {}))
    assert len(list(scanner.feed(b"to=x&" * 3000))) > 5
