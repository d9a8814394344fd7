"""Configurations that are read, and every mistake with its line, column and sentence (tests/data/config)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import trustme
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sidecar import presets, tree
from sidecar.config import (
    Address,
    Concurrent,
    Config,
    Missing,
    Native,
    Origin,
    Policy,
    Retry,
    Route,
    Shape,
    Twins,
    Unknown,
)
from sidecar.errors import PROBLEMS, ConfigError, Finding
from sidecar.reader import read_file, read_text

DATA = Path(__file__).parents[1] / "data" / "config"
ENVIRON = {"SECRET": "s3cret"}
EXPECTATION = re.compile(rb"^# (expect|warn): (.+)$", re.MULTILINE)

MAIL = """
routes:
  mail:
    upstream: https://api.example.com
    sends: [POST /send]
"""


def expected(file: Path, word: bytes) -> list[str]:
    return [found[1].decode() for found in EXPECTATION.findall(file.read_bytes()) if found[0] == word]


def read(text: str, **environ: str) -> Config:
    return read_text(text, "config.yaml", environ)


def mail(more: str = "", **environ: str) -> Route:
    return read(f"{MAIL}{''.join(f'    {line}' + chr(10) for line in more.splitlines())}", **environ).routes[0]


def mistakes(text: str, **environ: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(text, **environ)
    return [f"{finding.line}:{finding.column}: {finding.message}" for finding in caught.value.findings]


MISTAKES = sorted(file for file in DATA.glob("*.yaml") if not file.name.startswith("warn-"))
WARNINGS = sorted(DATA.glob("warn-*.yaml"))


@pytest.mark.parametrize("file", MISTAKES, ids=lambda file: file.stem)
def test_mistake_is_told_with_line_and_column(file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_file(str(file), ENVIRON)
    findings = caught.value.findings
    assert {finding.path for finding in findings} == {str(file)}
    told = [f"{finding.line}:{finding.column}: {finding.message}" for finding in findings]
    if file.stem == "utf16":  # a comment in ASCII cannot stand in it
        assert told == ["1:1: this is not UTF-8: save the file as UTF-8"]
        return
    assert told == expected(file, b"expect")
    assert told, "a mistake without an expectation"


@pytest.mark.parametrize("file", WARNINGS, ids=lambda file: file.stem)
def test_what_is_rarely_meant_is_warned_of(file: Path) -> None:
    config = read_file(str(file), ENVIRON)
    assert list(config.warnings) == [f"{file}:{line}" for line in expected(file, b"warn")]
    assert config.warnings


def test_secrets_are_in_no_message() -> None:
    for file in MISTAKES:
        with pytest.raises(ConfigError) as caught:
            read_file(str(file), ENVIRON)
        assert "hunter2" not in str(caught.value)
        assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("loader", [yaml.SafeLoader, yaml.CSafeLoader])
def test_both_yaml_parsers_find_the_same(loader: type[yaml.SafeLoader], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "LOADER", loader)
    for file in MISTAKES:
        wanted = expected(file, b"expect")
        if file.stem == "utf16" or "not YAML" in wanted[0]:  # the words for a syntax error differ
            continue
        with pytest.raises(ConfigError) as caught:
            read_file(str(file), ENVIRON)
        assert [f"{f.line}:{f.column}: {f.message}" for f in caught.value.findings] == wanted, file.name


def test_missing_file_is_one_finding(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_file(str(tmp_path / "no.yaml"), {})
    assert len(caught.value.findings) == 1
    assert "no such file" in str(caught.value)


def test_directory_is_one_finding(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_file(str(tmp_path), {})
    assert len(caught.value.findings) == 1


def test_huge_file_is_refused() -> None:
    assert "at most" in mistakes("#" * (1024 * 1024 + 1))[0]


def test_byte_order_mark_is_no_mistake() -> None:
    assert read("\ufeff" + MAIL).routes


def test_mixed_line_ends_count_as_one_line_each() -> None:
    assert mistakes("a1b2: 1\r\nttl: 1h\r\n" + MAIL)[1].startswith("2:1:")


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    findings: tuple[Finding, ...] = ()
    try:
        read_text(text, "any.yaml", {})
    except ConfigError as exc:
        findings = exc.findings
    assert findings, "no text at random is a configuration"
    assert all(finding.line >= 1 and finding.column >= 1 for finding in findings)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    findings = tree.Findings("any.yaml")
    assert tree.parse(data, findings, {}) is not None or findings.found


# --- what is read ---


def test_least_route_has_the_defaults_of_config() -> None:
    config = read(MAIL)
    wanted = Config(routes=config.routes, source="config.yaml")
    assert config == wanted
    route = config.routes[0]
    assert route.path == "/mail"
    assert route.upstream == Origin("https", "api.example.com", 443)
    assert route.policy == Policy()
    assert [send.segments for send in route.sends] == [(b"send",)]
    assert route == Route(name="mail", path="/mail", upstream=route.upstream, sends=route.sends)


def test_everything_at_the_top_is_read() -> None:
    config = read(
        """
listen: ["[::1]:8025", "unix:/run/s.sock", "127.0.0.1:0"]
admin: {listen: off, token: abc}
store: {url: "redis://:pw@redis:6379/1", prefix: mine, timeout: 500ms, replicas: 0, strict: true, memory: 1KiB}
workers: 1
drain: 0s
log: {level: debug, format: json}
limits: {request: 1GiB, stored_response: 5, header: 2B, outstanding: 7, memory: 3MiB}
"""
        + MAIL
    )
    assert config.listen == (Address("::1", 8025), Address(unix="/run/s.sock"), Address("127.0.0.1", 0))
    assert config.admin.listen == ()
    assert config.admin.token == "abc"
    assert (config.store.url, config.store.timeout_s, config.store.strict) == ("redis://:pw@redis:6379/1", 0.5, True)
    assert (config.store.prefix, config.store.memory_bytes) == ("mine", 1024)
    assert (config.drain_s, config.log.level, config.log.format) == (0.0, "debug", "json")
    limits = config.limits
    assert (limits.request_bytes, limits.stored_response_bytes, limits.header_bytes) == (1024**3, 5, 2)
    assert (limits.outstanding, limits.memory_bytes) == (7, 3 * 1024**2)


def test_everything_in_a_route_is_read(tmp_path: Path) -> None:
    certificates = tmp_path / "ca.pem"
    trustme.CA().cert_pem.write_to_path(str(certificates))
    route = mail(
        f"""path: /
host: Mail.Example.COM
listen: unix:/run/mail.sock
upstream_host: preserve
credential: [Authorization, On-Behalf-Of]
native: {{field: X-Key, window: 30m, max_length: 36, twins: guarded}}
key: {{field: X-Key, also: [/meta/key, X-Other], max_length: 36, missing: reject, ignore: "[0-9a-f]{{64}}"}}
record_key: digest
scope: [credential, "field:X-App"]
fingerprint: {{ignore: [/a, b], fields: [x-mode], mismatch: 409}}
ttl: 2d
lease: 30s
final: [2xx, 3xx, 400]
lost: [503]
unknown: hold
hold_for: 40d
resend_after: 0s
store_unavailable: forward
concurrent: wait
wait_limit: 5s
retry: {{attempts: 2, backoff: 0s}}
timeout: {{receive: 1s, connect: 2s, total: 3s}}
upstream_keepalive: 0s
problems: resend
names: {{key-reused: {{status: 422, name: reused}}}}
ca: {certificates}
sign: none
approval: none
replay_field: off
price_per_1000: {{amount: 1.5, currency: EUR}}"""
    )
    assert (route.path, route.host, route.listen) == ("/", "mail.example.com", (Address(unix="/run/mail.sock"),))
    assert route.credential == ("Authorization", "On-Behalf-Of")
    assert route.native == Native("X-Key", 1800.0, 36, Twins.GUARDED)
    assert route.key.also == ("/meta/key", "X-Other")
    assert (route.key.missing, route.key.ignore) == (Missing.REJECT, ("[0-9a-f]{64}",))
    assert route.scope == ("credential", "field:X-App")
    assert (route.fingerprint.ignore, route.fingerprint.fields) == (("/a", "b"), ("x-mode",))
    assert route.policy.final == frozenset(range(200, 400)) | {400}
    assert route.policy.lost == {503}
    assert (route.policy.ttl_s, route.policy.hold_for_s, route.policy.lease_s) == (172800.0, 3456000.0, 30.0)
    assert route.policy.retry == Retry(2, 0.0)
    assert (route.timeout.receive_s, route.timeout.connect_s, route.timeout.total_s) == (1.0, 2.0, 3.0)
    assert route.names.names == (("key-reused", 409, "reused"),), "fingerprint.mismatch decides the status"
    assert (route.replay_field, route.price_per_1000, route.ca) == ("", (1.5, "EUR"), str(certificates))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1ms", 0.001), ("500ms", 0.5), ("15s", 15.0), ("2m", 120.0), ("1h", 3600.0), ("30d", 2592000.0)],
)
def test_durations(text: str, seconds: float) -> None:
    assert mail(f"upstream_keepalive: {text}").upstream_keepalive_s == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("https://API.example.com", Origin("https", "api.example.com", 443)),
        ("HTTPS://api.example.com/", Origin("https", "api.example.com", 443)),
        ("https://api.example.com/v1/x", Origin("https", "api.example.com", 443, "/v1/x")),
        ("http://127.0.0.1:9000", Origin("http", "127.0.0.1", 9000)),
        ("http://[::1]:9000", Origin("http", "::1", 9000)),
        ("http://localhost", Origin("http", "localhost", 80)),
    ],
)
def test_upstreams(text: str, origin: Origin) -> None:
    assert read(MAIL.replace("https://api.example.com", text)).routes[0].upstream == origin


def test_send_with_a_discriminator_and_parameters() -> None:
    text = MAIL.replace("[POST /send]", "[POST / Action=SendEmail, 'PUT /v3/{domain}/messages']")
    first, second = read(text).routes[0].sends
    assert (first.method, first.segments, first.discriminator) == (b"POST", (), (b"Action", b"SendEmail"))
    assert (second.method, second.segments) == (b"PUT", (b"v3", None, b"messages"))
    assert second.discriminator is None


# --- variables ---


def test_variables_stand_in_any_scalar() -> None:
    route = mail('ttl: ${TTL}\nkey: {max_length: "${MAX:-99}", also: ["${ALSO}"]}', TTL="3h", ALSO="/k")
    assert (route.policy.ttl_s, route.key.max_length, route.key.also) == (10800.0, 99, ("/k",))


def test_default_stands_in_for_an_empty_variable() -> None:
    assert mail("ttl: ${TTL:-4h}", TTL="").policy.ttl_s == 14400.0


def test_variables_within_a_text() -> None:
    text = MAIL.replace("https://api.example.com", "https://${HOST}:${PORT:-444}/v1")
    assert read(text, HOST="a.test").routes[0].upstream == Origin("https", "a.test", 444, "/v1")


def test_doubled_dollar_is_a_literal() -> None:
    assert read("admin: {token: '$${X}'}\n" + MAIL).admin.token == "${X}"


def test_value_of_a_variable_is_not_looked_into_again() -> None:
    assert read("admin: {token: '${A}'}\n" + MAIL, A="${B}").admin.token == "${B}"


def test_empty_token_is_no_token() -> None:
    assert read("admin: {token: '${TOKEN:-}'}\n" + MAIL).admin.token == ""


# --- layers ---


def test_layers_win_from_preset_to_send() -> None:
    config = read(
        """
defaults: {ttl: 3d, timeout: {total: 20s, connect: 2s}, key: {missing: reject}}
routes:
  resend:
    provider: resend
    timeout: {total: 30s}
    final: [2xx, 422]
    sends:
      - POST /emails
      - {match: POST /other, ttl: 4d, retry: {backoff: 1s}}
"""
    )
    route = config.routes[0]
    assert (route.timeout.total_s, route.timeout.connect_s, route.timeout.receive_s) == (30.0, 2.0, 60.0)
    assert (route.key.missing, route.key.field) == (Missing.REJECT, "Idempotency-Key")
    assert 422 in route.policy.final
    assert [send.policy.ttl_s for send in route.sends] == [3 * 86400.0, 4 * 86400.0]
    assert route.sends[1].policy.retry == Retry(1, 1.0)
    assert route.sends[0].policy == route.policy


def test_unknown_is_resent_only_where_twins_are_guarded() -> None:
    native = "native: {field: Idempotency-Key, window: 24h, twins: %s}"
    assert mail(native % "guarded").policy.unknown is Unknown.RESEND
    assert mail(native % "unguarded").policy.unknown is Unknown.HOLD
    assert mail().policy.unknown is Unknown.HOLD


def test_lost_is_all_5xx_where_unknown_is_resent() -> None:
    assert mail("unknown: resend").policy.lost == frozenset(range(500, 600))
    assert mail("unknown: resend\nlost: [502]").policy.lost == {502}
    assert mail("unknown: resend\nfinal: [500]").policy.lost == frozenset(range(501, 600))


def test_what_is_written_of_final_and_lost_is_taken_from_the_other_default() -> None:
    assert 502 not in mail("final: [502]").policy.lost
    assert 422 not in mail("lost: [422, 502]").policy.final


def test_2xx_is_always_final() -> None:
    assert mail("final: []").policy.final == frozenset(range(200, 300))


def test_native_and_fingerprint_can_be_switched_off() -> None:
    route = read("routes:\n  r:\n    provider: resend\n    native: off\n    fingerprint: off\n").routes[0]
    assert route.native is None
    assert route.policy.unknown is Unknown.HOLD
    assert not route.fingerprint.enabled


def test_table_switches_on_what_defaults_switch_off() -> None:
    text = "defaults: {fingerprint: off}\n" + MAIL + "    fingerprint: {ignore: [/x]}\n"
    assert read(text).routes[0].fingerprint.enabled


def test_contradiction_through_defaults_is_told_once() -> None:
    text = "defaults: {ttl: 10s}\nroutes:\n  a: {provider: resend}\n  b: {provider: rovela}\n"
    assert len(mistakes(text)) == 1


# --- presets ---


def test_catalogue_is_complete_and_reads_without_a_warning() -> None:
    assert list(presets.presets()) == ["generic", "resend", "rovela", "sendhq"]
    for name, preset in presets.presets().items():
        assert preset.source
        assert preset.title
        if name != "generic":
            assert read(f"routes:\n  r: {{provider: {name}}}\n").warnings == ()


def test_resend_answers_in_its_own_words() -> None:
    route = read("routes:\n  resend: {provider: resend}\n").routes[0]
    assert route.upstream == Origin("https", "api.resend.com", 443)
    assert route.problems is Shape.RESEND
    names = {slug: (status, name) for slug, status, name in route.names.names}
    assert names["request-outstanding"] == (409, "concurrent_idempotent_requests")
    assert names["key-reused"] == (409, "invalid_idempotent_request")
    assert names["key-malformed"] == (400, "invalid_idempotency_key")
    assert set(names) <= {str(slug) for slug in PROBLEMS}
    assert route.fingerprint.fields == ("x-batch-validation",)
    assert route.policy.final == frozenset(range(200, 300))
    by_text = {send.text: send.policy.unknown for send in route.sends}
    assert by_text["POST /emails"] is by_text["POST /emails/batch"] is Unknown.RESEND
    assert by_text["POST /broadcasts/{broadcast}/send"] is Unknown.HOLD


def test_rovela_holds_and_its_twins_wait() -> None:
    route = read("routes:\n  r: {provider: rovela}\n").routes[0]
    assert route.policy.unknown is Unknown.HOLD
    assert route.policy.concurrent is Concurrent.WAIT
    assert route.policy.final == frozenset(range(200, 300))


def test_sendhq_keeps_refusals_and_resends() -> None:
    route = read("routes:\n  r: {provider: sendhq}\n").routes[0]
    assert {400, 422} <= route.policy.final
    assert route.policy.unknown is Unknown.RESEND
    assert route.policy.concurrent is Concurrent.REJECT
    assert route.fingerprint.mismatch == 409


REGIONS = """
far:
  title: Far
  source: nowhere
  hosts: {default: https://far.test, eu: https://eu.far.test, "*": "https://{region}.far.test/v1"}
  sends: [POST /x]
"""


@pytest.mark.parametrize(
    ("line", "upstream"),
    [
        ("", "https://far.test"),
        ("region: eu", "https://eu.far.test"),
        ("region: us-east-1", "https://us-east-1.far.test/v1"),
        ("region: us-east-1\n    upstream: https://own.test", "https://own.test"),
    ],
)
def test_preset_with_regions(line: str, upstream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    catalogue = presets.read(REGIONS)
    monkeypatch.setattr("sidecar.reader.presets", lambda: catalogue)
    text = f"routes:\n  r:\n    provider: far\n    {line}\n"
    assert str(read(text).routes[0].upstream) == upstream


def test_damaged_catalogue_names_its_line() -> None:
    with pytest.raises(ConfigError, match=r"presets\.yaml:2:3: there is no setting `titel`; did you mean `title`"):
        presets.read("far:\n  titel: Far\n  source: x\n")


def test_shown_preset_is_its_part_of_the_file() -> None:
    shown = presets.shown("resend")
    assert shown.startswith("resend:\n")
    assert "rovela" not in shown
    assert "# Resend remembers successes alone" in shown


def test_findings_come_in_the_order_of_the_file() -> None:
    with pytest.raises(ConfigError) as caught:
        read_file(str(DATA / "many-mistakes.yaml"), {})
    findings: tuple[Finding, ...] = caught.value.findings
    assert list(findings) == sorted(findings)
    assert len(findings) > 4
