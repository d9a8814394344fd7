"""What the store's account may do, what the server promises, what its URL says, and records that cannot be read."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest
from harness import Parsed, duration, gate, reset_after_content, until
from lab import LEASE_S, Lab, Settings, busy, elapsed, fresh, stored, times, unknown

pytest_plugins = ("lab_fixtures",)

USER, PASSWORD = "sidecar", "secret"


def account(lab: Lab, *rules: str) -> Settings:
    """`store:` with an account of all rights, changed by `rules`."""
    lab.store.command("ACL", "SETUSER", USER, "on", f">{PASSWORD}", "~*", "&*", "+@all", *rules)
    return {"url": f"redis://{USER}:{PASSWORD}@{lab.store.host}:{lab.store.port}/0"}


async def notes(lab: Lab) -> str:
    """What `/readyz` says beside the reasons, once the store was looked at."""
    return str((await lab.one.ask_admin("/readyz")).json()["notes"])


async def one_mail_and_its_replay(lab: Lab, target: str = "/mail/emails") -> None:
    key = fresh()
    first = await lab.one.send(key, target=target)
    assert first.status == 200
    stored(first, await lab.one.send(key, target=target))
    assert lab.count(key) == 1


# Rights.


@pytest.mark.case("C194")
@pytest.mark.parametrize("rules", [("-config",), ("-info",), ("-config", "-info"), ("-client",), ("-script",)], ids=str)
async def test_account_without_a_right_that_is_not_needed_works_and_says_what_it_cannot_read(
    lab: Lab, rules: tuple[str, ...]
) -> None:
    await lab.sidecar(store=account(lab, *rules))
    await one_mail_and_its_replay(lab)
    if rules == ("-config", "-info"):
        await until(lambda: "cannot be read" in lab.one.log())
    lab.store.command("SCRIPT", "FLUSH")
    await one_mail_and_its_replay(lab)


@pytest.mark.case("C194")
@pytest.mark.parametrize("rules", [("-@scripting",), ("-eval", "-evalsha")], ids=str)
async def test_account_that_may_not_run_scripts_ends_the_start_and_names_the_right(
    lab: Lab, rules: tuple[str, ...]
) -> None:
    one = await lab.sidecar(store=account(lab, *rules), ready=False)
    assert await one.wait_exit() == 1
    assert "may not run scripts" in one.log()
    assert "Traceback" not in one.log()
    assert PASSWORD not in one.log()


@pytest.mark.case("C194")
async def test_account_without_time_keeps_every_promise_by_expiries_alone(lab: Lab) -> None:
    window = {"field": "Idempotency-Key", "window": duration(60), "twins": "guarded"}
    routes = {
        "mail": lab.route(timeout=times(total_s=8)),
        "after": lab.route(unknown="resend", native={**window, "twins": "unguarded"}, resend_after=duration(1.0)),
        "guarded": lab.route(native=window),
        "brief": lab.route(native={**window, "window": duration(LEASE_S + 1.2)}),
    }
    store = account(lab, "-time")
    await asyncio.gather(lab.sidecar(routes, store=store), lab.sidecar(routes, store=store))
    await one_mail_and_its_replay(lab)
    # The lease.
    key, opened = fresh(), asyncio.Event()
    lab.upstream.script(gate(opened))
    asked = asyncio.create_task(lab.one.send(key))
    await until(lambda: lab.count(key) == 1)
    begin_s = time.monotonic()
    await elapsed(begin_s, 1.2 * LEASE_S)
    busy(await lab.two.send(key))
    lab.one.pause()
    unknown(await lab.retry(lab.two, lambda one: one.status != 409, key))
    lab.one.resume()
    opened.set()
    stored(await asked, await lab.two.send(key))
    # A further attempt: with the first one's key, not before its time, not after the provider's window.
    for target, status in (("/guarded/emails", 200), ("/after/emails", 409), ("/brief/emails", 504)):
        key = fresh()
        lab.upstream.script(reset_after_content())
        unknown(await lab.one.send(key, target=target))
        given = await lab.two.send(key, target=target)
        assert given.status == status, target
        if status == 409:
            assert (await lab.retry(lab.two, lambda one: one.status != 409, key, target=target)).status == 200
        assert lab.count(key) == (1 if status == 504 else 2)


@pytest.mark.case("C194")
async def test_wrong_password_is_a_reason_and_no_secret_is_told(lab: Lab) -> None:
    store = account(lab)
    store["url"] = store["url"].replace(PASSWORD, "wr0ng-one")
    one = await lab.sidecar(store=store, ready=False)

    async def told() -> bool:
        with contextlib.suppress(OSError):
            given = await one.ask_admin("/readyz")
            return given.status == 503 and "password" in str(given.json()["reasons"])
        return False

    await until(told)
    given = await one.send(fresh())
    assert (given.status, given.slug) == (503, "store-unavailable")
    assert "wr0ng-one" not in one.log()
    assert lab.upstream.count == 0


# What the server promises.


@pytest.mark.case("C195")
async def test_evicting_store_is_named_at_the_start_and_in_readyz(lab: Lab) -> None:
    lab.store.command("CONFIG", "SET", "maxmemory-policy", "volatile-lru")
    await lab.sidecar()
    await until(lambda: "volatile-lru" in lab.one.log())
    assert "volatile-lru" in await notes(lab)
    await one_mail_and_its_replay(lab)


@pytest.mark.case("C195")
@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("maxmemory-policy", "allkeys-lru", "allkeys-lru"),
        ("appendonly", "no", "persisted"),
        ("appendfsync", "no", "appendfsync"),
    ],
)
async def test_strict_store_that_is_unsafe_ends_the_start(lab: Lab, name: str, value: str, told: str) -> None:
    lab.store.command("CONFIG", "SET", name, value)
    one = await lab.sidecar(store={"strict": True}, ready=False)
    assert await one.wait_exit() == 1
    assert told in one.log()
    assert "Traceback" not in one.log()


@pytest.mark.case("C195")
async def test_strict_store_that_is_safe_starts(lab: Lab) -> None:
    lab.store.command("CONFIG", "SET", "appendfsync", "always")
    await lab.sidecar(store={"strict": True})
    assert await notes(lab) == "[]"
    await one_mail_and_its_replay(lab)


# What its URL says.


@pytest.mark.case("C196")
@pytest.mark.parametrize(
    "form", ["unix://{path}", "redis://{host}:{port}", "redis://{host}:{port}/3", "unix://{path}?db=2"]
)
async def test_each_form_of_url_reaches_the_store(lab: Lab, form: str) -> None:
    url = form.format(path=lab.store.path, host=lab.store.host, port=lab.store.port)
    await lab.sidecar(store={"url": url})
    await one_mail_and_its_replay(lab)


@pytest.mark.case("C196")
async def test_url_that_asks_for_decoded_replies_is_refused_at_the_start(lab: Lab) -> None:
    one = await lab.sidecar(store={"url": f"{lab.store.url}?decode_responses=true"}, ready=False)
    assert await one.wait_exit() == 2
    assert "store.url" in one.log()
    assert "Traceback" not in one.log()


@pytest.mark.case("C196")
async def test_lease_of_exactly_three_store_timeouts_is_accepted(lab: Lab) -> None:
    for timeout_s in (0.4, 0.7):
        routes = {"mail": lab.route(lease=duration(3 * timeout_s))}
        one = await lab.sidecar(routes, store={"timeout": duration(timeout_s)}, ready=False)
        await one.ready()
        await one.close()


@pytest.mark.case("C196")
async def test_two_prefixes_on_one_store_are_two_systems(lab: Lab) -> None:
    await asyncio.gather(lab.sidecar(store={"prefix": "a"}), lab.sidecar(store={"prefix": "b"}))
    key = fresh()
    assert not (await lab.one.send(key)).replayed
    assert not (await lab.two.send(key)).replayed
    assert (await lab.one.send(key)).replayed
    assert lab.count(key) == 2
    assert {name.split(":")[0] for name in lab.names()} == {"a", "b"}


# Records that cannot be read.


# Each a list of commands; NAME stands for the record's name. A key that is made anew has no expiry.
SPOILT: dict[str, list[tuple[str, ...]]] = {
    "string": [("DEL", "NAME"), ("SET", "NAME", "garbage")],
    "list": [("DEL", "NAME"), ("RPUSH", "NAME", "garbage")],
    "set": [("DEL", "NAME"), ("SADD", "NAME", "garbage")],
    "foreign": [("DEL", "NAME"), ("HSET", "NAME", "v", "99", "state", "completed")],
    "empty": [("DEL", "NAME"), ("HSET", "NAME", "x", "")],
    "state": [("HSET", "NAME", "state", "odd")],
    "version": [("HSET", "NAME", "v", "2")],
    "status": [("HSET", "NAME", "status", "two hundred")],
    "fields": [("HSET", "NAME", "fields", "no colon here\r\n")],
    "numbers": [("HSET", "NAME", "lease", "soon")],
    "missing": [("HDEL", "NAME", "fp", "owner")],
    "persist": [("HSET", "NAME", "v", "2"), ("PERSIST", "NAME")],
}


def spoil(lab: Lab, name: str, how: str) -> None:
    """Replace or break the record `name`."""
    for command in SPOILT[how]:
        lab.store.command(*(name if word == "NAME" else word for word in command))


@pytest.mark.case("C197")
async def test_record_that_cannot_be_read_is_unknown_and_nothing_is_sent(lab: Lab) -> None:
    await lab.sidecar({"mail": lab.route(), "resend": lab.route("resend")})
    for number, how in enumerate(SPOILT, 1):
        for target in ("/mail/emails", "/resend/emails"):
            key = fresh()
            assert (await lab.one.send(key, target=target)).status == 200
            name = lab.name(key)
            spoil(lab, name, how)
            for _ in range(2):
                unknown(await lab.one.send(key, target=target))
            assert lab.count(key) == 1, how
            assert lab.left_ms(name) > 0, how
        assert await lab.one.metric("sidecar_records_unreadable_total", route="mail") == 2 * number
    warned = lab.one.log_lines(event="record-unreadable")
    assert len(warned) == 4 * len(SPOILT)
    assert {line["level"] for line in warned} == {"warning"}


@pytest.mark.case("C197")
async def test_record_spoilt_during_a_flight_costs_no_second_mail_and_the_client_its_answer(lab: Lab) -> None:
    await lab.sidecar({"mail": lab.route(timeout=times(total_s=8))})
    for how in ("string", "version", "missing"):
        key, opened = fresh(), asyncio.Event()
        lab.upstream.script(gate(opened))
        asked: asyncio.Task[Parsed] = asyncio.create_task(lab.one.send(key))
        await lab.arrived(key)
        spoil(lab, lab.name(key), how)
        busy(await lab.one.send(key))
        opened.set()
        assert (await asked).status == 200
        unknown(await lab.one.send(key))
        assert lab.count(key) == 1
