"""Which route, which sends, and what goes upstream, however a target is spelt."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sidecar.config import Address, Config, Origin, Route
from sidecar.errors import Outcome, ProblemError
from sidecar.paths import fold, normalise, readings
from sidecar.reader import read_text
from sidecar.routing import Match, Router, discriminated, discriminators

CONFIG = """
routes:
  resend:
    provider: resend
  deep:
    path: /mail/deep
    upstream: https://deep.test/api
    sends: [POST /send]
  mail:
    path: /mail
    upstream: https://mail.test
    sends:
      - POST /v1/send
      - POST /v3/{domain}/messages
      - POST /v3/{domain}/messages.mime
      - PUT /v1/send
      - POST /email/batch
      - POST /email/{id}
  hosted:
    host: ses.test
    upstream: https://ses.amazonaws.test
    sends:
      - POST / Action=SendEmail
      - POST / Action=SendRawEmail
      - GET / Action=SendEmail
  own:
    listen: 127.0.0.1:8030
    upstream: https://own.test
    sends: [POST /emails]
  rest:
    path: /
    upstream: https://rest.test/base
    sends: [POST /anything]
"""
OWN = Address("127.0.0.1", 8030)


def config(text: str = CONFIG) -> Config:
    return read_text(text, "config.yaml", {})


ROUTER = Router(config())


def match(
    target: bytes, *, method: bytes = b"POST", host: bytes | None = b"localhost:8025", listener: Address | None = None
) -> Match:
    return ROUTER.match(listener=listener, host=host, method=method, target=target)


def refusal(target: bytes, *, method: bytes = b"POST", router: Router = ROUTER) -> ProblemError:
    with pytest.raises(ProblemError) as caught:
        router.match(listener=None, host=b"localhost", method=method, target=target)
    return caught.value


def sends(found: Match) -> list[str]:
    return [send.text for send in found.sends]


@pytest.mark.parametrize(
    ("target", "route", "upstream", "path", "matching"),
    [
        # The prefix is taken off, the rest stays.
        (b"/resend/emails", "resend", b"/emails", b"/emails", ["POST /emails"]),
        (b"/resend/emails?a=b&c", "resend", b"/emails?a=b&c", b"/emails", ["POST /emails"]),
        (b"/resend/emails?", "resend", b"/emails?", b"/emails", ["POST /emails"]),
        (b"/resend/domains", "resend", b"/domains", b"/domains", []),
        (b"/resend", "resend", b"/", b"/", []),
        (b"/resend/", "resend", b"/", b"/", []),
        (b"/resend?x=/resend", "resend", b"/?x=/resend", b"/", []),
        # What SDKs do: a doubled leading slash, one trailing slash.
        (b"/resend//emails", "resend", b"//emails", b"/emails", ["POST /emails"]),
        (b"/resend/emails/", "resend", b"/emails/", b"/emails", ["POST /emails"]),
        (b"//resend/emails", "resend", b"/emails", b"/emails", ["POST /emails"]),
        # Spellings, of the prefix and of the rest.
        (b"/%72esend/emails", "resend", b"/emails", b"/emails", ["POST /emails"]),
        (b"/%72%65send/%65mails", "resend", b"/%65mails", b"/emails", ["POST /emails"]),
        (b"/x/../resend/emails", "resend", b"/emails", b"/emails", ["POST /emails"]),
        (b"/%2e/resend/./emails", "resend", b"/./emails", b"/emails", ["POST /emails"]),
        (b"/resend/x/../emails", "resend", b"/x/../emails", b"/emails", ["POST /emails"]),
        (b"/resend/%2E%2e/resend/emails", "resend", b"/emails", b"/emails", ["POST /emails"]),
        (b"/resend/emails/../../resend//emails", "resend", b"//emails", b"/emails", ["POST /emails"]),
        (b"/../resend/emails", "resend", b"/emails", b"/emails", ["POST /emails"]),
        (b"/resend/..", "rest", b"/base/resend/..", b"/", []),
        # Longest prefix, at the border of a segment.
        (b"/mail/deep/send", "deep", b"/api/send", b"/send", ["POST /send"]),
        (b"/mail/deeper/send", "mail", b"/deeper/send", b"/deeper/send", []),
        (b"/mail/v1/send", "mail", b"/v1/send", b"/v1/send", ["POST /v1/send"]),
        (b"/mailer/v1/send", "rest", b"/base/mailer/v1/send", b"/mailer/v1/send", []),
        (b"/mail%2Fdeep/send", "rest", b"/base/mail%2Fdeep/send", b"/mail%2Fdeep/send", []),
        (b"/Mail/v1/send", "rest", b"/base/Mail/v1/send", b"/Mail/v1/send", []),
        (b"/anything", "rest", b"/base/anything", b"/anything", ["POST /anything"]),
        (b"/", "rest", b"/base/", b"/", []),
        # Parameters are one whole segment; an escaped slash is none.
        (
            b"/mail/v3/a.test/messages",
            "mail",
            b"/v3/a.test/messages",
            b"/v3/a.test/messages",
            ["POST /v3/{domain}/messages"],
        ),
        (
            b"/mail/v3/a.test/messages.mime",
            "mail",
            b"/v3/a.test/messages.mime",
            b"/v3/a.test/messages.mime",
            ["POST /v3/{domain}/messages.mime"],
        ),
        (
            b"/mail/v3/a%2Fb/messages",
            "mail",
            b"/v3/a%2Fb/messages",
            b"/v3/a%2Fb/messages",
            ["POST /v3/{domain}/messages"],
        ),
        (b"/mail/v3/a/b/messages", "mail", b"/v3/a/b/messages", b"/v3/a/b/messages", []),
        (b"/mail/v3/messages", "mail", b"/v3/messages", b"/v3/messages", []),
        # The exact one first.
        (b"/mail/email/batch", "mail", b"/email/batch", b"/email/batch", ["POST /email/batch", "POST /email/{id}"]),
        (b"/mail/email/7", "mail", b"/email/7", b"/email/7", ["POST /email/{id}"]),
        # Absolute-form: path and query alone.
        (b"http://localhost/resend/emails?q", "resend", b"/emails?q", b"/emails", ["POST /emails"]),
        (b"HTTPS://evil.test:1/resend/emails", "resend", b"/emails", b"/emails", ["POST /emails"]),
        (b"http://localhost", "rest", b"/base/", b"/", []),
        (b"http://localhost?a=b", "rest", b"/base/?a=b", b"/", []),
        # Two slashes never begin an authority.
        (b"//ses.test/anything", "rest", b"/base//ses.test/anything", b"/ses.test/anything", []),
    ],
)
def test_target(target: bytes, route: str, upstream: bytes, path: bytes, matching: list[str]) -> None:
    found = match(target)
    assert found.route.name == route
    assert found.target == upstream
    assert found.path == path
    assert found.query == target.partition(b"?")[2]
    assert sends(found) == matching


@pytest.mark.parametrize(
    ("method", "matching"), [(b"PUT", ["PUT /v1/send"]), (b"GET", []), (b"post", []), (b"HEAD", [])]
)
def test_method_counts(method: bytes, matching: list[str]) -> None:
    assert sends(match(b"/mail/v1/send", method=method)) == matching


@pytest.mark.parametrize("host", [b"ses.test", b"SES.test:8025", b"ses.test.", b" ses.test "])
def test_host_comes_before_path(host: bytes) -> None:
    found = match(b"/resend/emails", host=host)
    assert (found.route.name, found.target) == ("hosted", b"/resend/emails")


def test_other_host_goes_by_path() -> None:
    assert match(b"/resend/emails", host=b"other.test").route.name == "resend"
    assert match(b"/resend/emails", host=None).route.name == "resend"
    assert match(b"/resend/emails", host=b"[::1]:8025").route.name == "resend"


def test_authority_of_an_absolute_target_counts_as_host() -> None:
    assert match(b"http://ses.test:99/x", host=b"localhost").route.name == "hosted"
    assert match(b"http://localhost/resend/x", host=b"ses.test").route.name == "resend"


def test_own_listener_comes_before_host() -> None:
    found = match(b"/resend/emails", host=b"ses.test", listener=OWN)
    assert (found.route.name, found.target) == ("own", b"/resend/emails")
    assert sends(match(b"//emails", listener=OWN)) == ["POST /emails"]


def test_route_with_a_listener_is_on_the_main_ones_too() -> None:
    found = match(b"/own/emails")
    assert (found.route.name, found.target, sends(found)) == ("own", b"/emails", ["POST /emails"])


def test_main_listener_by_its_address_is_a_main_one() -> None:
    assert match(b"/resend/emails", listener=Address("localhost", 8025)).route.name == "resend"


def test_no_route_is_a_problem() -> None:
    router = Router(config("routes:\n  resend: {provider: resend}\n"))
    for target in (b"/", b"/resen", b"/resend2/emails", b"/resend%2Femails", b"/resend/..", b"//"):
        problem = refusal(target, router=router)
        assert (problem.slug, problem.status, problem.sent) == (Outcome.NO_ROUTE, 404, "no")


@pytest.mark.parametrize(
    ("method", "target"),
    [
        (b"CONNECT", b"api.test:443"),
        (b"CONNECT", b"/resend/emails"),
        (b"POST", b"*"),
        (b"GET", b"*"),
        (b"POST", b""),
        (b"POST", b"resend/emails"),
        (b"POST", b"?a"),
        (b"POST", b"/resend/emails#x"),
        (b"POST", b"/resend/e mails"),
        (b"POST", b"/resend/e\tmails"),
        (b"POST", b"/resend/\x00"),
        (b"POST", b"/resend/\xc3\xa9"),
        (b"POST", b"/resend/emails\n"),
        (b"POST", b"ftp://localhost/resend/emails"),
        (b"POST", b"http:///resend/emails"),
        (b"POST", b"http:/resend/emails"),
        (b"POST", b"http://me:pw@localhost/resend/emails"),
    ],
)
def test_malformed_target_is_a_problem(method: bytes, target: bytes) -> None:
    problem = refusal(target, method=method)
    assert (problem.slug, problem.status, problem.sent) == (Outcome.REQUEST_MALFORMED, 400, "no")


def test_refusal_does_not_repeat_the_target() -> None:
    assert "hunter2" not in refusal(b"/resend/emails?key=hunter2#").detail


def test_options_asterisk_goes_to_the_catch_all() -> None:
    found = match(b"*", method=b"OPTIONS")
    assert (found.route.name, found.target, found.sends) == ("rest", b"*", ())
    assert match(b"*", method=b"OPTIONS", host=b"ses.test").route.name == "hosted"


def test_options_asterisk_without_a_catch_all() -> None:
    router = Router(config("routes:\n  resend: {provider: resend}\n"))
    assert refusal(b"*", method=b"OPTIONS", router=router).slug is Outcome.NO_ROUTE


# --- discriminators ---


def test_discriminator_settles_what_is_meant() -> None:
    found = match(b"/?Action=SendEmail", host=b"ses.test")
    assert discriminators(found) == {b"Action"}
    chosen = discriminated(found, {b"Action": b"SendRawEmail"})
    assert chosen is not None
    assert chosen.text == "POST / Action=SendRawEmail"
    assert discriminated(found, {b"Action": b"GetSendQuota"}) is None
    assert discriminated(found, {}) is None
    assert sends(match(b"/", host=b"ses.test", method=b"GET")) == ["GET / Action=SendEmail"]


def test_send_without_a_discriminator_is_what_remains() -> None:
    router = Router(config("routes:\n  m:\n    upstream: https://a.test\n    sends: [POST /x, POST /x Kind=special]\n"))
    found = router.match(listener=None, host=None, method=b"POST", target=b"/m/x")
    for kind, text in ((b"special", "POST /x Kind=special"), (b"other", "POST /x")):
        chosen = discriminated(found, {b"Kind": kind})
        assert chosen is not None
        assert chosen.text == text
    plain = match(b"/resend/emails")
    assert discriminators(plain) == frozenset()
    assert discriminated(plain, {}) == plain.sends[0]


# --- spellings ---


SLASHES = st.sampled_from((b"/", b"//", b"///"))
DOT = st.sampled_from((b".", b"%2e", b"%2E"))
NAMES = st.sampled_from((b"x", b"emails", b"resend", b"%2F"))
ENDS = st.sampled_from((b"", b"/", b"//", b"/.", b"/%2e/", b"/x/..", b"/x//%2E%2e/"))
# What may stand between two segments and folds away.
FILLERS = st.one_of(
    st.just(b"/"),
    SLASHES,
    st.tuples(SLASHES, DOT, SLASHES).map(b"".join),
    st.tuples(SLASHES, NAMES, SLASHES, DOT, DOT, SLASHES).map(b"".join),
)
FORMATS = st.sampled_from((b"%c", b"%%%02x", b"%%%02X"))


@st.composite
def spelt(draw: st.DrawFn, segments: tuple[bytes, ...]) -> bytes:
    """A path that the rules of the normal form make the same as these segments."""
    told = b""
    for segment in segments:
        told += draw(FILLERS) + b"".join(draw(FORMATS) % code for code in segment)
    return told + draw(ENDS)


@given(spelt((b"resend", b"emails")))
@example(b"/x/../resend/emails")
@example(b"/resend//x/..//emails//")
def test_no_spelling_leads_past_a_send(target: bytes) -> None:
    found = match(target)
    assert found.route.name == "resend"
    assert sends(found) == ["POST /emails"]
    assert found.path == b"/emails"
    assert normalise(found.target) == b"/emails", "what goes upstream means the same"
    assert target.endswith(found.target), "byte for byte"


@given(spelt((b"mail", b"v3", b"a.test", b"messages")))
def test_no_spelling_leads_past_a_template(target: bytes) -> None:
    found = match(target)
    assert sends(found) == ["POST /v3/{domain}/messages"]
    assert found.path == b"/v3/a.test/messages"


@given(spelt((b"emails",)))
def test_no_spelling_leads_past_a_send_at_the_root(target: bytes) -> None:
    found = match(target, listener=OWN)
    assert sends(found) == ["POST /emails"]
    assert found.target == target


@given(
    st.lists(st.sampled_from((b"resend", b"emails", b"..", b".", b"", b"%2e%2E", b"%65mails", b"a%2fb")), max_size=8)
)
def test_rest_is_the_end_of_the_target_and_stays_below_the_prefix(parts: list[bytes]) -> None:
    target = b"/" + b"/".join(parts)
    found = match(target)
    rest = found.target.removeprefix(found.route.upstream.path.encode())
    assert target.endswith(rest) or rest == b"/"
    assert normalise(rest) == found.path
    depth = 0
    for part in rest[1:].split(b"/"):
        if part.replace(b"%2e", b".").replace(b"%2E", b".") == b"..":
            depth -= 1
        elif part not in (b"", b"."):
            depth += 1
        assert depth >= 0 or found.route.path == "/"


@given(st.binary(max_size=60))
def test_any_target_is_matched_or_refused(target: bytes) -> None:
    try:
        found: Match | None = match(target)
    except ProblemError:
        found = None
    if found is not None:
        assert found.target.startswith(b"/")


@pytest.mark.parametrize(
    ("target", "matching"),
    [
        # nginx merges slashes before it folds dot segments; RFC 3986 does not merge at all.
        (b"/mail/v1/x//../send", ["POST /v1/send"]),
        (b"/mail/v1//../send", ["POST /v1/send"]),
        # nginx and others take an escaped slash, and some a backslash, for a slash.
        (b"/mail/v1%2Fsend", ["POST /v1/send"]),
        (b"/mail/v1%2fx%2f%2e%2e%2fsend", ["POST /v1/send"]),
        (b"/mail/v1\\send", ["POST /v1/send"]),
        (b"/mail/v1%5csend", ["POST /v1/send"]),
        # Escapes of what may stand in a segment are no difference to servers.
        (b"/mail/v3/a%40b/messages", ["POST /v3/{domain}/messages"]),
        # Decoded once only: this is another path everywhere.
        (b"/mail/v1/%2573end", []),
    ],
)
def test_what_a_server_may_read_as_a_send_is_one(target: bytes, matching: list[str]) -> None:
    assert sends(match(target)) == matching


@pytest.mark.parametrize(
    ("raw", "normal"),
    [
        (b"/", b"/"),
        (b"//", b"/"),
        (b"/a/./b/../c/", b"/a/c"),
        (b"/a/..", b"/"),
        (b"/%61%2d%5F%7e", b"/a-_~"),
        (b"/a%2fb%3f", b"/a%2Fb%3F"),
        (b"/a%zz%4", b"/a%zz%4"),
        (b"/a.b/...", b"/a.b/..."),
        (b"/a%40b:c", b"/a@b:c"),
        (b"/%252e", b"/%252e"),
    ],
)
def test_normal_form(raw: bytes, normal: bytes) -> None:
    assert normalise(raw) == normal
    assert normalise(normal) == normal


@given(st.binary(max_size=40).map(lambda data: b"/" + data.replace(b"?", b"")))
def test_normal_form_is_its_own_and_offsets_are_ends(raw: bytes) -> None:
    normal = normalise(raw)
    assert normalise(normal) == normal
    for _, end in fold(raw):
        assert end == len(raw) or raw[end : end + 1] == b"/"
    assert normal not in readings(raw)


def test_route_without_a_path_is_only_where_else_it_is_mounted() -> None:
    send = config().routes[0].sends[:1]
    route = Route(name="h", host="h.test", upstream=Origin("https", "a.test", 443), sends=send)
    router = Router(Config(routes=(route,)))
    assert refusal(b"/h/emails", router=router).slug is Outcome.NO_ROUTE
    assert router.match(listener=None, host=b"h.test", method=b"POST", target=b"/emails").sends == send
