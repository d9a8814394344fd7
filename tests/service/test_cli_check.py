"""The command line as a program: what it prints, on which stream, and its exit codes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from sidecar import __version__, presets

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "config.example.yaml"
MISTAKES = ROOT / "tests" / "data" / "config" / "many-mistakes.yaml"
RESEND = "routes:\n  resend: {provider: resend}\n"


def sidecar(*arguments: str, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "SIDECAR_CONFIG"}
    return subprocess.run(
        [sys.executable, "-m", "sidecar", *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        cwd=cwd or ROOT,
        env={**environment, "PYTHONPATH": str(ROOT), **environ},
    )


@contextmanager
def answering(answer: Callable[[bytes], bytes]) -> Iterator[int]:
    """A server on loopback: each piece that arrives is answered, an empty answer closes. Yields its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, suppress(ConnectionError):  # whoever is content leaves without a word
                while (piece := connection.recv(65536)) and (reply := answer(piece)):
                    connection.sendall(reply)
                    if reply.startswith(b"HTTP"):
                        break

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def config(directory: Path, text: str) -> str:
    file = directory / "config.yaml"
    file.write_text(text)
    return str(file)


def test_version() -> None:
    done = sidecar("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"sidecar {__version__}\n", "")


def test_check_prints_the_effective_routes() -> None:
    done = sidecar("check", "-c", str(EXAMPLE))
    assert (done.returncode, done.stderr) == (0, "")
    for part in (
        "2 routes",
        "route resend (provider: resend)",
        "localhost:8025/resend",
        "https://api.resend.com",
        "POST /emails/batch",
        "resend: a retry is sent again",
        "POST /v1/batch/{id}  (final: 2xx 400)",
        "not protected on resend, mail",
        "docker stop --time 70",
    ):
        assert part in done.stdout


def test_check_tells_every_mistake_with_its_place_and_exits_2() -> None:
    done = sidecar("check", "-c", str(MISTAKES))
    assert (done.returncode, done.stdout) == (2, "")
    lines = done.stderr.splitlines()
    assert len(lines) > 4
    assert all(line.startswith(f"{MISTAKES}:") for line in lines)


def test_check_prints_warnings_on_stderr_and_exits_0(tmp_path: Path) -> None:
    path = config(tmp_path, RESEND.replace("resend}", "resend, scope: route}"))
    done = sidecar("check", "-c", path)
    assert done.returncode == 0
    assert done.stderr.startswith(f"warning: {path}:2:")
    assert len(done.stderr.splitlines()) == 1


def test_check_never_prints_a_password(tmp_path: Path) -> None:
    text = 'admin: {token: hunter2}\nstore: {url: "redis://:hunter2@127.0.0.1:1/0"}\n' + RESEND
    done = sidecar("check", "-c", config(tmp_path, text))
    assert done.returncode == 0
    assert "hunter2" not in done.stdout + done.stderr


def test_missing_file_is_one_line_and_exits_2(tmp_path: Path) -> None:
    done = sidecar("check", "-c", str(tmp_path / "no.yaml"))
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["check", "--nonsense"], ["check", "too", "many"], ["-c"]])
def test_bad_usage_exits_2_without_a_traceback(arguments: list[str]) -> None:
    done = sidecar(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["serve", "check", "stats", "healthcheck"])
def test_bad_configuration_exits_2(command: str) -> None:
    done = sidecar(command, "-c", str(MISTAKES))
    assert done.returncode == 2
    assert "did you mean" in done.stderr


def test_configuration_is_found_by_option_then_environment_then_directory(tmp_path: Path) -> None:
    here, named, given = (tmp_path / name for name in ("here", "named", "given"))
    for directory in (here, named, given):
        directory.mkdir()
        config(directory, RESEND.replace("resend:", f"{directory.name}:"))
    environ = {"SIDECAR_CONFIG": str(named / "config.yaml")}
    assert "route here" in sidecar("check", cwd=here).stdout
    assert "route named" in sidecar("check", cwd=here, **environ).stdout
    assert "route given" in sidecar("check", "-c", str(given / "config.yaml"), cwd=here, **environ).stdout
    assert sidecar("check", cwd=tmp_path).returncode == 2


def test_providers_lists_the_catalogue() -> None:
    done = sidecar("providers")
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(presets.presets())


def test_one_provider_is_printed_as_it_is_written() -> None:
    done = sidecar("providers", "rovela")
    assert (done.returncode, done.stdout) == (0, presets.shown("rovela"))


def test_unknown_provider_exits_2() -> None:
    done = sidecar("providers", "resent")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)


def test_schema_is_json() -> None:
    done = sidecar("schema")
    assert done.returncode == 0
    assert json.loads(done.stdout)["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_closed_pipe_is_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "sidecar", "schema"],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=30,
            cwd=ROOT,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


# --- check --connect ---


def connect(directory: Path, store: str, upstream: int) -> subprocess.CompletedProcess[str]:
    text = f"""
store: {{url: "{store}"}}
routes:
  a: {{upstream: "http://127.0.0.1:{upstream}", sends: [POST /x], timeout: {{connect: 1s}}}}
"""
    return sidecar("check", "--connect", "-c", config(directory, text))


def redis(piece: bytes) -> bytes:
    if b"AUTH" in piece:
        return b"+OK\r\n" if b"right" in piece else b"-WRONGPASS wrong password\r\n"
    return b"+PONG\r\n"


def test_connect_reaches_upstream_and_store(tmp_path: Path) -> None:
    with answering(redis) as port:
        done = connect(tmp_path, f"redis://me:right@127.0.0.1:{port}/0", port)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count(": reached") == 2


def test_connect_fails_for_a_wrong_password(tmp_path: Path) -> None:
    with answering(redis) as port:
        done = connect(tmp_path, f"redis://:hunter2@127.0.0.1:{port}", port)
    assert (done.returncode, done.stderr) == (1, "store: refused with WRONGPASS\n")


def test_connect_fails_where_nobody_listens(tmp_path: Path) -> None:
    done = connect(tmp_path, "embedded:./data", free_port())
    assert done.returncode == 1
    assert "connection refused" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_connect_speaks_tls_to_an_https_upstream(tmp_path: Path) -> None:
    with answering(lambda _: b"this is not TLS\r\n") as port:
        text = f'routes:\n  a: {{upstream: "https://127.0.0.1:{port}", sends: [POST /x]}}\n'
        done = sidecar("check", "--connect", "-c", config(tmp_path, text))
    assert done.returncode == 1
    assert done.stderr.startswith(f"upstream https://127.0.0.1:{port} of route a: ")
    assert len(done.stderr.splitlines()) == 1


# --- stats and healthcheck ---


def admin(directory: Path, listen: str, token: str = "") -> str:
    return config(directory, f"admin: {{listen: {listen}, token: '{token}'}}\n" + RESEND)


def test_healthcheck_of_a_living_sidecar(tmp_path: Path) -> None:
    asked: list[bytes] = []

    def answer(piece: bytes) -> bytes:
        asked.append(piece)
        return b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok\n"

    with answering(answer) as port:
        path = admin(tmp_path, f"localhost:{port}")
        live, ready = sidecar("healthcheck", "-c", path), sidecar("healthcheck", "--ready", "-c", path)
    assert (live.returncode, live.stdout, live.stderr) == (0, "", "")
    assert ready.returncode == 0
    assert [piece.split()[1] for piece in asked] == [b"/livez", b"/readyz"]


def test_healthcheck_says_why_not(tmp_path: Path) -> None:
    refusal = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 16\r\n\r\nstore:\n loading\n"
    with answering(lambda _: refusal) as port:
        done = sidecar("healthcheck", "--ready", "-c", admin(tmp_path, f"127.0.0.1:{port}"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"sidecar: 127.0.0.1:{port}/readyz: 503 store: loading\n"


def test_healthcheck_without_a_sidecar_is_one_line(tmp_path: Path) -> None:
    done = sidecar("healthcheck", "-c", admin(tmp_path, f"localhost:{free_port()}"))
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)


def test_healthcheck_of_a_stalled_sidecar_ends_in_time(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        done = sidecar("healthcheck", "-c", admin(tmp_path, f"127.0.0.1:{listener.getsockname()[1]}"))
    assert done.returncode == 1
    assert "no answer in time" in done.stderr


def test_healthcheck_over_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert sidecar("healthcheck", "-c", admin(tmp_path, f"unix:{path}")).returncode == 0
    finally:
        thread.join(10)
        listener.close()


def test_healthcheck_without_an_admin_listener(tmp_path: Path) -> None:
    done = sidecar("healthcheck", "-c", admin(tmp_path, "off"))
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)


def test_healthcheck_imports_neither_server_nor_store() -> None:
    code = (
        "import sys; from sidecar.cli import run; run(['healthcheck', '-c', 'config.example.yaml']); "
        "print([name for name in ('aiohttp', 'redis', 'asyncio', 'ssl', 'uvloop') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, cwd=ROOT)
    assert done.stdout == "[]\n"


def test_stats_prints_a_table_or_json(tmp_path: Path) -> None:
    asked: list[bytes] = []
    found = {"outcomes": {"resend": {"forwarded": 3, "replayed": 2}}, "outstanding": 1}
    content = json.dumps(found).encode()

    def answer(piece: bytes) -> bytes:
        asked.append(piece)
        return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content)

    with answering(answer) as port:
        path = admin(tmp_path, f"127.0.0.1:{port}", token="t0ken")
        table, as_json = sidecar("stats", "-c", path), sidecar("stats", "--json", "-c", path)
    assert b"Authorization: Bearer t0ken\r\n" in asked[0]
    words = [line.split() for line in table.stdout.splitlines()]
    assert ["resend", "forwarded", "3"] in words
    assert ["outstanding", "1"] in words
    assert json.loads(as_json.stdout) == found


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 401 Unauthorized\r\n\r\n", "admin.token"),
        (b"HTTP/1.1 500 Oh\r\n\r\n", "status 500"),
        (b"HTTP/1.1 200 OK\r\n\r\n{", "not JSON"),
        (b"HTTP/1.1 200 OK\r\n\r\n[]", "not an object"),
        (b"HTTPgarbage", "not HTTP"),
    ],
)
def test_stats_that_cannot_be_read_are_one_line(tmp_path: Path, answer: bytes, said: str) -> None:
    with answering(lambda _: answer) as port:
        done = sidecar("stats", "-c", admin(tmp_path, f"127.0.0.1:{port}"))
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert said in done.stderr


def test_stand_in_refuses_what_it_does_not_know() -> None:
    for arguments in (["--mode", "nonsense"], ["--delay", "15"], ["--port", "70000"]):
        done = sidecar("stand-in", *arguments)
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
