"""TLS to the store: whom it trusts, and what start-up says of whom it does not."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import RedisServer, StartSidecar, Upstream, default_config, free_port, until
from harness.fetched import fetched
from harness.servers import Authority, TlsFront
from harness.stores import HOLD, OK, claim, connected, rival

from sidecar import config
from sidecar.errors import StartError
from sidecar.record import Completed, Reserved
from sidecar.store import Store


async def round_trip(url: str, ca: Path | None) -> None:
    """Reserve, complete and replay."""
    async with connected(url, ca=str(ca or "")) as records:
        one = claim()
        found = await records.reserve(one, HOLD)
        assert isinstance(found, Reserved)
        await records.complete(one.owned(found), OK, kept=True, refusal=False, ttl_s=60, age_s=1)
        assert await records.reserve(rival(one), HOLD) == Completed(OK, True, b"gzip")


async def trouble(url: str, ca: Path | None) -> str:
    """Why a store cannot be reached."""
    store = Store(
        config.Store(url=url, ca=str(ca or "")), wall_ms=lambda: 0, report=print, observe=lambda _name, _took_s: None
    )
    store.start()
    try:
        await until(lambda: store.trouble not in ("", "not connected yet"))
        return store.trouble
    finally:
        await store.close()


async def test_private_authority_is_trusted_by_its_file(store: RedisServer, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with TlsFront(store, authority) as front:
        await round_trip(f"rediss://127.0.0.1:{front.port}/0", authority.ca)
        await round_trip(f"rediss://localhost:{front.port}/0", authority.ca)


@pytest.mark.parametrize("trusted", ["another", "system"])
async def test_certificate_of_another_authority_is_named(store: RedisServer, tmp_path: Path, trusted: str) -> None:
    authority, another = Authority(tmp_path / "one"), Authority(tmp_path / "two")
    with TlsFront(store, authority) as front:
        told = await trouble(
            f"rediss://:hunter2@127.0.0.1:{front.port}/0", another.ca if trusted == "another" else None
        )
    assert "certificate verify failed" in told
    assert f"127.0.0.1:{front.port}" in told
    assert "hunter2" not in told


async def test_certificate_for_another_host_is_named(store: RedisServer, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with TlsFront(store, authority) as front:
        told = await trouble(f"rediss://127.0.0.2:{front.port}/0", authority.ca)
    assert "refused" in told.lower() or "127.0.0.2" in told


async def test_server_without_tls_is_named(store: RedisServer, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    told = await trouble(f"rediss://127.0.0.1:{store.port}/0", authority.ca)
    assert str(store.port) in told


def test_file_without_certificates_is_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nothing")
    for name in ("ca.pem", "absent.pem"):
        settings = config.Store(url="rediss://127.0.0.1/0", ca=str(tmp_path / name))
        with pytest.raises(StartError, match=r"store\.ca"):
            Store(settings, wall_ms=lambda: 0, report=print, observe=lambda _name, _took_s: None)


async def test_sidecar_over_tls_sends_and_replays_and_with_another_authority_says_why_not(
    sidecar: StartSidecar, upstream: Upstream, store: RedisServer, tmp_path: Path
) -> None:
    authority, another = Authority(tmp_path / "one"), Authority(tmp_path / "two")
    with TlsFront(store, authority) as front:
        settings = default_config(upstream, f"rediss://127.0.0.1:{front.port}/0")
        settings["store"]["ca"] = str(authority.ca)
        one = await sidecar(settings)
        first, again = await one.send("K1"), await one.send("K1")
        assert (first.status, again.replayed, upstream.count) == (200, True, 1)
        settings["store"]["ca"] = str(another.ca)
        other = await sidecar(settings, ready=False)

        async def told() -> bool:
            return b"certificate verify failed" in (await other.ask_admin("/readyz")).content

        await until(lambda: "serving" in other.log())
        await until(told)
        assert (await other.send("K2")).slug == "store-unavailable"
        await until(lambda: "certificate verify failed" in other.log())
        assert upstream.count == 1


@pytest.mark.slow
@pytest.mark.timeout(360)
async def test_server_with_tls_of_its_own_serves(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    port = free_port()
    options = {
        "tls-port": str(port),
        "tls-cert-file": str(authority.cert),
        "tls-key-file": str(authority.key),
        "tls-ca-cert-file": str(authority.ca),
        "tls-auth-clients": "no",
    }
    server = RedisServer(options, executable=fetched("redis-7.0")).start()
    try:
        await round_trip(f"rediss://127.0.0.1:{port}/0", authority.ca)
        assert "certificate verify failed" in await trouble(f"rediss://127.0.0.1:{port}/0", None)
    finally:
        server.remove()
