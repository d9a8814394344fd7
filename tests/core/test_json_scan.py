"""JSON: equal values meet however they are written and cut, different ones never do, what is no JSON is told."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sidecar import framing, json_scan
from sidecar.json_frames import RUN, Node
from sidecar.json_scan import MAX_DEPTH, MAX_NUMBER, JsonScanner


def pieces(content: bytes, size: int) -> Iterator[bytes]:
    return (content[at : at + size] for at in range(0, len(content), size))


def scanned(content: bytes, size: int = 16384, root: Node | None = None) -> JsonScanner:
    scanner = JsonScanner(root)
    for piece in pieces(content, size):
        for _ in scanner.feed(piece):
            pass
    return scanner


def sealed(text: str | bytes, size: int = 16384, root: Node | None = None) -> bytes | None:
    return scanned(text if isinstance(text, bytes) else text.encode(), size, root).finish()


def pointers(ignore: tuple[str, ...] = (), watch: tuple[str, ...] = ()) -> Node:
    root = Node()
    for pointer in ignore:
        root.at(pointer).ignored = True
    for pointer in watch:
        root.at(pointer).watched = pointer
    return root


# Few letters and small numbers, so that near misses are common.
leaves = (
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from([0.0, 1.0, 1e22, 10**30])
    | st.text(st.sampled_from('ab"\\/\n\u00e9\u4e2d\U0001f600\ud83d\x7f'), max_size=70)
)  # fmt: skip
anything = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("ab\u00e9", max_size=2), inner, max_size=4),
    max_leaves=12,
)


def shuffled(value: object, chance: random.Random) -> object:
    if isinstance(value, dict):
        members = [(name, shuffled(member, chance)) for name, member in value.items()]
        chance.shuffle(members)
        return dict(members)
    if isinstance(value, list):
        return [shuffled(element, chance) for element in value]
    return value


@settings(max_examples=40, deadline=None)
@given(anything, st.randoms(use_true_random=False), st.integers(1, 9), st.sampled_from([None, 1, "\t"]))
def test_one_value_has_one_digest_however_written_and_cut(
    value: object, chance: random.Random, size: int, indent: int | str | None
) -> None:
    plain = json.dumps(value, separators=(",", ":"))
    other = json.dumps(shuffled(value, chance), indent=indent, ensure_ascii=False)
    try:
        written = other.encode()
    except UnicodeEncodeError:  # a lone surrogate has no UTF-8, only its escape
        written = json.dumps(shuffled(value, chance), indent=indent).encode()
    assert sealed(plain) is not None
    assert sealed(plain) == sealed(written) == sealed(written, size) == sealed(plain.replace("/", "\\/"), size)


@settings(max_examples=50, deadline=None)
@given(anything, anything)
def test_two_values_never_have_one_digest(one: object, other: object) -> None:
    one_text, other_text = (json.dumps(value, sort_keys=True) for value in (one, other))
    assume(one_text != other_text)
    assert sealed(one_text) != sealed(other_text)


@settings(max_examples=70, deadline=None)
@given(anything, st.integers(0, 10**6), st.sampled_from(list('{}[],:"\\ue0-1.\x00\x1f \u00e9')), st.integers(1, 5))
def test_reads_what_the_standard_library_reads_and_nothing_else(value: object, at: int, mark: str, size: int) -> None:
    text = json.dumps(value)
    at %= len(text) + 1
    text = text[:at] + mark + text[at + at % 2 :]
    try:
        json.loads(text, parse_constant=lambda name: 1 / 0)
        legal = True
    except (ValueError, ZeroDivisionError):
        legal = False
    found = sealed(text)
    assert (found is not None) <= legal
    assert found == sealed(text, size)
    if legal and found is None:  # then it is a name that came twice
        pairs: list[list[str]] = []
        json.loads(text, object_pairs_hook=lambda members: pairs.append([name for name, _ in members]))
        assert any(len(set(names)) < len(names) for names in pairs)


IRREGULAR = {
    "nothing": "",
    "white space": " \n",
    "trailing comma in an object": '{"a":1,}',
    "trailing comma in an array": "[1,]",
    "leading comma": "[,1]",
    "no comma": "[1 2]",
    "no colon": '{"a" 1}',
    "two colons": '{"a"::1}',
    "no name": "{:1}",
    "bare name": "{a:1}",
    "number as name": "{1:1}",
    "single quotes": "{'a':1}",
    "comma for colon": '{"a",1}',
    "wrong closer": '{"a":1]',
    "other wrong closer": "[1}",
    "not closed": '{"a":1',
    "string not closed": '"abc',
    "content behind": "{} {}",
    "closer behind": "1]",
    "comma behind": "1,",
    "NaN": "NaN",
    "infinity": "[Infinity]",
    "negative infinity": "[-Infinity]",
    "leading zero": "[01]",
    "negative leading zero": "-01",
    "plus": "+1",
    "no integer part": ".5",
    "no fraction": "[1.]",
    "no exponent": "1e",
    "signed nothing": "[1e+]",
    "hexadecimal": "0x10",
    "lone minus": "-",
    "two numbers in one": "1.2.3",
    "Arabic digits": "[\u0661]",
    "literal in capitals": "True",
    "literal cut": "tru",
    "literal and more": "[truee]",
    "comment": "[1/*x*/]",
    "control in a string": '"a\nb"',
    "NUL in a string": '"a\x00b"',
    "tab in a string": '["a\tb"]',
    "tab in a name": '{"a\tb":1}',
    "unknown escape": r'"\x41"',
    "escaped quote of the other kind": r'"\'"',
    "short escape": r'["\u12"]',
    "odd digit in an escape": r'"\u12g4"',
    "sign in an escape": r'"\u+123"',
    "byte order mark": "\ufeff{}",
    "no-break space": "[\u00a01]",
    "form feed": "[\f1]",
    "name twice": '{"a":1,"a":1}',
    "name twice, once escaped": '{"a":1,"\\u0061":2}',
    "name twice, deeper": '[{"x":{"a":1,"b":2,"a":3}}]',
    "number too long": "1" * (MAX_NUMBER + 1),
}


@pytest.mark.parametrize("text", IRREGULAR.values(), ids=IRREGULAR.keys())
def test_irregular_text_has_no_digest(text: str) -> None:
    for size in (1, 3, 16384):
        scanner = scanned(text.encode(), size, pointers(watch=("/a",)))
        assert scanner.finish() is None
        assert scanner.irregular
        assert scanner.found == {}


@pytest.mark.parametrize(
    "content",
    [
        b'"\xff"',
        b'"\xc3"',
        b'"\xc0\xaf"',
        b'"\xed\xa0\x80"',
        b'"\xf4\x90\x80\x80"',
        b'"\xc3\xa9',
        b"\xc3",
        b'{"\xe9":1}',
    ],
)
def test_invalid_utf8_is_irregular(content: bytes) -> None:
    assert sealed(content, 1) is None
    assert sealed(content) is None


DIFFERENT = [
    "1", "1.0", "1e0", "1E0", "10e-1", '"1"', "null", '"null"', "true", '"true"', "false", "0", "-0", '""', "[]",
    "{}", "[[]]", "[{}]", "[null]", '{"a":null}', '{"a":1}', '{"a":1.0}', '{"a":"1"}', '{"b":1}', '[{"a":1}]',
    '{"a":{"a":1}}', '["a",1]', '["a"]', '"a"', '["ab"]', '["a","b"]', '["b","a"]', '{"a":"b","c":"d"}',
    '{"a":"d","c":"b"}', "123456789012345678901", "123456789012345678902", "1.00000000000000000001",
    "1.00000000000000000002", '["a","b",[]]', '["a",["b"]]', '[["a"],"b"]', '"\\u0000"', '"\\\\u0000"',
    '"\\ud83d"', '"\\ude00"', '"\\ude00\\ud83d"', '"\\ud83d\\ude00"', '"e\\u0301"', '"\\u00e9"',
    '"' + "x" * 64 + '"', '"' + "x" * 65 + '"', '"' + "x" * 70000 + '"', '"' + "x" * 70001 + '"',
    '["' + "x" * 70001 + '"]', "1" * 64, "1" * 65, f"[{'1,' * 300}1]", f"[{'1,' * 301}1]",
]  # fmt: skip


def test_values_that_differ_in_type_order_place_or_digits_all_differ() -> None:
    digests = [sealed(text) for text in DIFFERENT]
    assert None not in digests
    assert len(set(digests)) == len(DIFFERENT)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"to":"b@ex.test","subject":"s"}', '{ "subject":"s", "to":"b@ex.test" }'),
        ('{"a":{"c":[1,{"e":1,"f":2}],"d":2}}', '{"a":{"d":2,"c":[1,{"f":2,"e":1}]}}'),
        ('{"a":[1,2]}', '\r\n{\t"a" : [ 1 , 2 ] }\n'),
        ('"A\u00e9\u4e2d\U0001f600/"', r'"\u0041\u00E9\u4e2D\uD83D\uDe00\/"'),
        (r'{"\u0061":"\b\f\n\r\t\"\\"}', r'{"a":"\u0008\u000c\u000a\u000d\u0009\u0022\u005c"}'),
        ("42", " 42 "),
        (r'"\\ud83d\ude00"', r'"\u005cud83d\ude00"'),
    ],
)
def test_the_same_text_written_otherwise_is_the_same(one: str, other: str) -> None:
    assert sealed(one) is not None
    assert {sealed(one)} == {sealed(other, size) for size in (1, 2, 7, 16384)}


def test_surrogate_pairs_and_escaped_backslashes_are_cut_anywhere() -> None:
    text = r'"' + r"\\\ud83d\ude00\\\\ud83d\ud83d\ud83d\ude00\ude00\/\n\"" * 9 + r'"'
    expected = sealed(json.dumps(json.loads(text)))
    assert expected is not None
    assert {expected} == {sealed(text, size) for size in range(1, 14)}


@pytest.mark.parametrize("length", [31, 32, 33, 63, 64, 65, 16380, 16384, 16385, 40000])
def test_length_of_a_string_decides_its_encoding_and_not_its_way(length: int) -> None:
    for unit in ("a", "\u00e9", "\n"):
        value = {"x": unit * length}
        compact, escaped = json.dumps(value, ensure_ascii=False), json.dumps(value, indent=9)
        assert sealed(compact) is not None
        assert sealed(compact) == sealed(escaped) == sealed(compact, 4097) == sealed(escaped, 1001)


def test_depth_is_bounded() -> None:
    assert sealed("[" * MAX_DEPTH + "]" * MAX_DEPTH) is not None
    assert sealed("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)) is None
    assert sealed('{"a":' * MAX_DEPTH + "1" + "}" * MAX_DEPTH) is not None


def test_number_at_the_limit_is_read_however_cut() -> None:
    assert sealed("1" * MAX_NUMBER) == sealed("1" * MAX_NUMBER, 5) is not None


@pytest.mark.parametrize("count", [RUN - 1, RUN, RUN + 1, 3 * RUN, 3000])
def test_large_objects_are_sorted_in_runs(count: int) -> None:
    members = [f'"name{number * 7919 % 1000003}":{number}' for number in range(count)]
    first = sealed("[{" + ",".join(members) + "},1]")
    assert first is not None
    assert first == sealed("[ {" + ", ".join(reversed(members)) + "}, 1]", 1000)
    members[count // 2] += "0"
    assert first != sealed("[{" + ",".join(members) + "},1]")


def test_a_name_that_comes_again_a_thousand_members_later_is_found() -> None:
    members = [f'"{number}":0' for number in range(2 * RUN)]
    assert sealed("{" + ",".join(members) + "}") is not None
    assert sealed("{" + ",".join([*members, '"0":0']) + "}") is None


def test_members_waiting_are_bounded_and_those_sorted_wait_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    assert json_scan.MAX_RETAINED == 100_000
    monkeypatch.setattr(json_scan, "MAX_RETAINED", 3 * RUN)
    three, five = ("{" + ",".join(f'"{number}":0' for number in range(count * RUN)) + "}" for count in (3, 5))
    assert sealed(five) is None
    assert sealed("[" + ",".join([three] * 4) + "]") is not None


def test_values_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_scan, "MAX_VALUES", 100)
    assert framing.MAX_VALUES > 100_000
    assert sealed("[" + "0," * 98 + "0]") is not None
    assert sealed("[" + "0," * 99 + "0]") is None


def test_much_work_in_one_piece_yields() -> None:
    scanner = JsonScanner(None)
    assert len(list(scanner.feed(b"[" + b"0," * 8000))) > 5
    assert not list(JsonScanner(None).feed(json.dumps({"to": ["a@example.com"], "text": "x" * 9000}).encode()))


# Pointers


@pytest.mark.parametrize(
    ("pointer", "one", "other"),
    [
        ("/sent_at", '{"a":1,"sent_at":1}', '{"sent_at":{"x":[2]},"a":1}'),
        ("/sent_at", '{"a":1,"sent_at":1}', '{"a":1}'),
        ("/a/b", '{"a":{"b":1,"c":2}}', '{"a":{"c":2}}'),
        ("/a/1/b", '{"a":[0,{"b":1,"c":2}]}', '{"a":[0,{"b":9,"c":2}]}'),
        ("/a/0", '{"a":["x","y"]}', '{"a":["z","y"]}'),
        ("/a~1b", '{"a/b":1}', '{"a/b":2}'),
        ("/m~0n", '{"m~n":1}', '{"m~n":2}'),
        ("/~01", '{"~1":1}', '{"~1":2}'),
        ("/", '{"":1}', '{"":2}'),
        ("/caf\u00e9", '{"caf\u00e9":1}', r'{"caf\u00E9":2}'),
        ("/" + "n" * 100, '{"' + "n" * 100 + '":1}', '{"' + "n" * 100 + '":2}'),
        ("/a", '{"a":"' + "x" * 20000 + '"}', '{"a":true}'),
    ],
)
def test_an_ignored_value_counts_as_absent(pointer: str, one: str, other: str) -> None:
    rules = pointers(ignore=(pointer,))
    assert sealed(one, root=rules) is not None
    assert sealed(one, root=rules) == sealed(one, 3, rules) == sealed(other, root=rules)
    assert sealed(one) != sealed(other)


@pytest.mark.parametrize("pointer", ["/b", "/a/b", "/x/a", "/0", "/a/00", "/c/01", "/c/-", "/a~0", "/A"])
def test_a_pointer_that_leads_nowhere_changes_nothing(pointer: str) -> None:
    text = '{"a":"b","c":[1,2],"d":{"a":"b"}}'
    assert sealed(text, root=pointers(ignore=(pointer,))) == sealed(text)


@pytest.mark.parametrize("text", ['{"a":1,}', '{"a":1,"a":2}', '{"a":[1,]}', '{"a":{"b":1,"b":1}}', '{"a":"\x01"}'])
def test_an_ignored_value_must_still_be_regular(text: str) -> None:
    assert sealed(text, root=pointers(ignore=("/a",))) is None


WATCHED = {
    '{"k":"a b"}': b"a b",
    r'{"k":"\u00e9\ud83d\ude00\n"}': "\u00e9\U0001f600\n".encode(),
    '{"k":"\u00e9"}': "\u00e9".encode(),
    '{"k":1.50}': b"1.50",
    '{"k":-0e1}': b"-0e1",
    '{"k":true}': b"true",
    '{"k":false}': b"false",
    '{"k":null}': None,
    '{"k":"null"}': b"null",
    '{"k":""}': None,
    '{"k":{"k":"x"}}': None,
    '{"k":["x"]}': None,
    '{"j":"x"}': None,
    '[{"k":"x"}]': None,
    '"k"': None,
    '{"k":"' + "x" * 4096 + '"}': b"x" * 4096,
}


@pytest.mark.parametrize(("text", "value"), WATCHED.items())
@pytest.mark.parametrize("ignore", [(), ("/k",)])
def test_watched_values(text: str, value: bytes | None, ignore: tuple[str, ...]) -> None:
    for size in (1, 16384):
        scanner = scanned(text.encode(), size, pointers(ignore=ignore, watch=("/k",)))
        assert scanner.finish() is not None
        assert scanner.found == ({} if value is None else {"/k": value})


def test_long_watched_values_are_cut_but_never_look_alike() -> None:
    found = set()
    for end in "ab":
        for size in (100, 16384):
            scanner = scanned(b'{"k":"' + b"x" * 9000 + end.encode() + b'"}', size, pointers(watch=("/k",)))
            assert scanner.finish() is not None
            found.add(scanner.found["/k"])
    assert len(found) == 2
    assert {len(value) for value in found} == {4096 + 64}


def test_watched_values_deep_in_arrays() -> None:
    scanner = scanned(
        b'{"to":[{"email":"a"},{"email":"b"}]}', 16384, pointers(watch=("/to/1/email", "/to/0/email", "/to/2"))
    )
    assert scanner.finish() is not None
    assert scanner.found == {"/to/0/email": b"a", "/to/1/email": b"b"}
