"""What each form of `store.url` means, and that no mistake in one is told with its text."""

from __future__ import annotations

import pytest

from sidecar.address import Account, Kind, StoreAddress, parse
from sidecar.config import Address

H6379 = (Address("h", 6379),)

READ = [
    ("redis://h", StoreAddress(Kind.SERVER, H6379)),
    ("redis://h:1/2", StoreAddress(Kind.SERVER, (Address("h", 1),), database=2)),
    ("redis://:pw@h/", StoreAddress(Kind.SERVER, H6379, account=Account("", "pw"))),
    ("redis://u:a%40b:c@[::1]:7", StoreAddress(Kind.SERVER, (Address("::1", 7),), account=Account("u", "a@b:c"))),
    ("rediss://h/1", StoreAddress(Kind.SERVER, H6379, tls=True, database=1)),
    ("unix:///a%20b?db=3", StoreAddress(Kind.SERVER, (Address(unix="/a b"),), database=3)),
    ("unix://u:pw@/a", StoreAddress(Kind.SERVER, (Address(unix="/a"),), account=Account("u", "pw"))),
    (
        "redis+sentinel://u:pw@a:1,b,[::1]/main/4?sentinel_user=s&sentinel_password=x%26y",
        StoreAddress(
            Kind.SENTINEL,
            (Address("a", 1), Address("b", 26379), Address("::1", 26379)),
            account=Account("u", "pw"),
            asked=Account("s", "x&y"),
            name="main",
            database=4,
        ),
    ),
    ("rediss+sentinel://a/m%2Fn", StoreAddress(Kind.SENTINEL, (Address("a", 26379),), tls=True, name="m/n")),
    ("redis+cluster://a:1,b/0", StoreAddress(Kind.CLUSTER, (Address("a", 1), Address("b", 6379)))),
    ("rediss+cluster://:pw@a", StoreAddress(Kind.CLUSTER, (Address("a", 6379),), tls=True, account=Account("", "pw"))),
]

REFUSED = [
    "redis://",
    "redis://:hunter2@",
    "redis://:hunter2@h:x",
    "redis://:hunter2@h:0",
    "redis://:hunter2@h:65536",
    "redis://:hunter2@a,b",
    "redis://:hunter2@h/0?decode_responses=true",
    "redis://:hunter2@h/name",
    "unix://:hunter2@",
    "unix://:hunter2@/a?db=x",
    "redis+sentinel://:hunter2@a",
    "redis+sentinel://:hunter2@a/",
    "redis+sentinel://:hunter2@a,/main",
    "redis+sentinel://:hunter2@a/main/x",
    "redis+sentinel://a/main?password=hunter2",
    "redis+sentinel://a/main?sentinel_password=hunter2&sentinel_password=hunter2",
    "redis+cluster://:hunter2@a/1",
    "redis+cluster://:hunter2@a?x=1",
    "redis+other://:hunter2@a",
    "redisx://:hunter2@a",
    "http://:hunter2@a",
    "hunter2",
]


@pytest.mark.parametrize(("url", "meant"), READ, ids=[url for url, _ in READ])
def test_url_is_read(url: str, meant: StoreAddress) -> None:
    assert parse(url) == meant


@pytest.mark.parametrize("url", REFUSED)
def test_url_that_says_nothing_sensible_is_refused_without_its_text(url: str) -> None:
    with pytest.raises(ValueError, match=r"^(is not|may have|has) ") as caught:
        parse(url)
    assert "hunter2" not in str(caught.value)


def test_passwords_are_not_shown() -> None:
    assert "hunter2" not in repr(parse("redis+sentinel://:hunter2@a/m?sentinel_password=hunter2"))
