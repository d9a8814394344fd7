"""Keys, credentials, recipients and content: in no log line at any level, in no metric, in no name in the store."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import (
    Client,
    RedisServer,
    answer,
    close_after_content,
    cut_content,
    duration,
    raw_bytes,
    request,
    reset_after_content,
    slow,
    until,
)
from pair import Pair, post, running

KEY = "key-SECRET-77"
SECRETS = {
    "credential": b"re_SECRET_123",
    "key": KEY.encode(),
    "recipient": b"b@ex.test",
    "subject": b"s3cret-subject",
    "field": b"s3cret-field",
    "cookie": b"s3cret-cookie",
    "query": b"s3cret-query",
    "other credential": b"c3JlZDpzZWNyZXQ",
    "answer": b"s3cret-answer",
}
MAIL = b'{"to":"b@ex.test","subject":"s3cret-subject"}'
FIELDS = [
    ("Authorization", "Bearer re_SECRET_123"),
    ("X-Other", "s3cret-field"),
    ("Cookie", "s3cret-cookie"),
    ("Proxy-Authorization", "Basic c3JlZDpzZWNyZXQ"),
    ("Content-Type", "application/json"),
]


def secret(key: str | None = KEY, content: bytes = MAIL, target: str = "/mail/emails?q=s3cret-query") -> bytes:
    return post(key, content, target, FIELDS)


def values(store: RedisServer, name: bytes) -> bytes:
    """All that the store holds under a name, as one text."""
    kind = store.command("TYPE", name)
    if kind == b"hash":
        found = store.command("HGETALL", name)
    elif kind == b"zset":
        found = store.command("ZRANGE", name, 0, -1)
    else:
        found = store.command("GET", name)
    return b"\n".join(one for one in (found if isinstance(found, list) else [found]) if isinstance(one, bytes))


async def everything(pair: Pair, store: RedisServer) -> None:
    """One request for each way to end."""
    pair.upstream.script(answer(200, [("X-Id", "1")]))
    assert (await pair.ask(secret())).status == 200
    assert (await pair.ask(secret())).replayed
    assert (await pair.ask(secret(content=b'{"to":"b@ex.test"}'))).slug == "key-reused"
    for number, fault in enumerate((close_after_content(), reset_after_content(), cut_content())):
        pair.upstream.script(fault)
        assert (await pair.ask(secret(f"{KEY}-{number}"))).slug == "outcome-unknown"
        assert (await pair.ask(secret(f"{KEY}-{number}"))).slug == "outcome-unknown"
    pair.upstream.script(answer(500, [], b"s3cret-answer"), answer(504, [], b"s3cret-answer"))
    assert (await pair.ask(secret(f"{KEY}-500"))).status == 500
    assert (await pair.ask(secret(f"{KEY}-504"))).status == 504
    await pair.ask(secret(None))
    await pair.ask(secret(None, target="/mail/other?q=s3cret-query"))
    await pair.ask(secret(target="/s3cret-query/b@ex.test"))
    await pair.ask(secret(f"{KEY},{KEY}"))
    await pair.ask(secret(f"{KEY}\xe9"))
    await pair.ask(secret(KEY * 50))
    for bad in (b"Content-Length: s3cret-field\r\n", b"s3cret-field\r\n", b"X: " + b"s3cret-field" * 9000 + b"\r\n"):
        await raw_bytes(pair.sidecar.base, secret().replace(b"Host:", bad + b"Host:", 1))
    pair.upstream.script(slow(0.4))
    count = pair.count
    async with await pair.client() as client:
        await client.send(secret(f"{KEY}-busy"))
        await pair.upstream.reached(count + 1)
        assert (await pair.ask(secret(f"{KEY}-busy"))).slug == "request-outstanding"
    left = await Client.open(pair.sidecar.base)
    await left.send(secret(f"{KEY}-left")[:-10])
    left.abort()
    await pair.upstream.refuse()
    assert (await pair.ask(secret(f"{KEY}-refused"))).slug == "upstream-unreachable"
    assert (await pair.ask(secret(None))).slug == "upstream-unreachable"


def assert_clean(what: str, text: bytes, *, but: tuple[str, ...] = ()) -> None:
    found = [name for name, word in SECRETS.items() if name not in but and word in text]
    assert found == [], f"{what} holds {found}"


@pytest.mark.case("C285")
@pytest.mark.parametrize("record_key", ["text", "digest"])
async def test_nothing_private_is_logged_counted_or_named(
    tmp_path: Path, private_store: RedisServer, record_key: str
) -> None:
    parts = {
        "log": {"level": "debug", "format": "json"},
        "store": {"url": private_store.url, "timeout": duration(0.5)},
    }
    async with running(tmp_path, private_store.url, parts, record_key=record_key) as pair:
        await everything(pair, private_store)
        metrics = (await pair.sidecar.ask_admin("/metrics")).content
        stats = (await pair.sidecar.ask_admin("/v1/stats")).content
        names = private_store.keys()
        assert names
        # What is stored: the answer and, where the route says so, the key's text; never what was sent.
        but = ("answer", "key") if record_key == "text" else ("answer",)
        for name in names:
            assert_clean("a name in the store", name)
            assert_clean("a record", values(private_store, name), but=but)
        held = b"".join(values(private_store, name) for name in names)
        assert (KEY.encode() in held) == (record_key == "text")
        private_store.stop()
        assert (await pair.ask(secret())).slug == "store-unavailable"
        ready = (await pair.sidecar.ask_admin("/readyz")).content
        await until(lambda: pair.sidecar.log_lines(outcome="store-unavailable"))
        await pair.sidecar.stop()
        for what, text in (("metrics", metrics), ("stats", stats), ("readyz", ready)):
            assert_clean(what, text)
        assert_clean("the log", pair.sidecar.log().encode())
        assert "Traceback" not in pair.sidecar.log()


@pytest.mark.case("C285")
async def test_no_problem_repeats_what_was_sent(tmp_path: Path, store: RedisServer) -> None:
    async with running(tmp_path, store.url) as pair:
        pair.upstream.script(answer(), close_after_content())
        asked = [
            secret(),
            secret(content=b'{"to":"b@ex.test","x":1}'),
            secret(f"{KEY}-lost"),
            secret(f"{KEY},{KEY}"),
            secret(target="/s3cret-query/b@ex.test"),
            secret().replace(b"Host:", b"s3cret-field\r\nHost:", 1),
        ]
        answers = [await pair.ask(data) for data in asked]
        await pair.upstream.refuse()
        answers.append(await pair.ask(secret(f"{KEY}-refused")))
        assert [one.slug for one in answers] == [
            "",
            "key-reused",
            "outcome-unknown",
            "key-malformed",
            "no-route",
            "request-malformed",
            "upstream-unreachable",
        ]
        for one in answers:
            assert_clean("an answer of ours", one.head + one.content)


@pytest.mark.case("C285")
async def test_password_of_the_store_is_in_no_line(tmp_path: Path, private_store: RedisServer) -> None:
    private_store.command("CONFIG", "SET", "requirepass", "p4ss-SECRET")
    url = f"redis://:wrong-SECRET@127.0.0.1:{private_store.port}/0"
    async with running(tmp_path, url, {"log": {"level": "debug", "format": "json"}}, ready=False) as pair:
        await until(lambda: pair.sidecar.log_lines(event="serving"), 10)
        assert (await pair.ask(secret())).slug == "store-unavailable"
        ready = await pair.sidecar.ask_admin("/readyz")
        assert ready.status == 503
        assert b"SECRET" not in ready.content
        assert "SECRET" not in pair.sidecar.log()


@pytest.mark.case("C285")
async def test_environment_of_the_store_server_holds_none_of_ours(tmp_path: Path) -> None:
    env = {"PROVIDER_SECRET": "re_SECRET_123"}
    async with running(tmp_path, f"embedded:{tmp_path / 'data'}", env=env) as pair:
        servers = [pid for pid in pair.sidecar.processes() if pid != pair.sidecar.pid]
        servers += [
            int(entry.parent.name)
            for entry in Path("/proc").glob("[0-9]*/stat")
            if _parent(entry) == pair.sidecar.pid and int(entry.parent.name) not in servers
        ]
        assert servers
        for pid in servers:
            assert b"SECRET" not in Path(f"/proc/{pid}/environ").read_bytes()
        assert (await pair.ask(request("GET", "/mail/x"))).status == 200


def _parent(stat: Path) -> int:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1
