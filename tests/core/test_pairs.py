"""A pair of a form is found however it is spelt, and nothing else is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.pairs import Pair

PAIR = Pair(b"Action", b"Send Email")


def stands(*pieces: bytes) -> bool:
    return any(PAIR.stands_in(pieces))


@pytest.mark.parametrize(
    "content",
    [
        b"Action=Send Email",
        b"Action=Send+Email",
        b"%41ction=Send%20Emai%6c",
        b"a=1&Action=Send+Email&b=2",
        b"x=1;Action=Send+Email",
        b"Action=Get&Action=Send+Email",
        b"Action=Send+Email&Action=Get",
        b"\r\nAction=Send+Email\r\n",
    ],
)
def test_a_pair_is_found_however_it_is_spelt(content: bytes) -> None:
    assert stands(content)
    assert stands(*(content[at : at + 1] for at in range(len(content))))


@pytest.mark.parametrize(
    "content",
    [b"", b"Action=", b"XAction=Send+Email", b"Action=Send+Emails", b"Action%3DSend+Email", b"action=Send+Email"],
)
def test_another_pair_is_not_it(content: bytes) -> None:
    assert not stands(content)


@given(st.binary(max_size=40), st.binary(max_size=40), st.data())
def test_where_the_content_is_cut_does_not_matter(before: bytes, behind: bytes, data: st.DataObject) -> None:
    content = before + b"&Action=Send%20Email&" + behind
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=5)))
    pieces = [content[a:b] for a, b in zip([0, *cuts], [*cuts, len(content)], strict=True)]
    assert stands(*pieces)
