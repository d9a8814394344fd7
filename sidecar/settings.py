"""Which settings there are: one declaration, read by the reader, the presets and the JSON Schema alike.

A setting is called like the field of `config.py` it fills, without `_s` and `_bytes`; every default stands there.
"""

from __future__ import annotations

from sidecar import forms
from sidecar.config import (
    LogFormat,
    LogLevel,
    Missing,
    RecordKey,
    Shape,
    Twins,
    UpstreamHost,
)
from sidecar.errors import PROBLEMS
from sidecar.policies import POLICY, SENDS
from sidecar.tables import Named, Nested, Setting, Table
from sidecar.tree import Entries, Findings, Node
from sidecar.values import (
    Amount,
    Boolean,
    Choice,
    Duration,
    ListOf,
    Matching,
    Off,
    Only,
    Read,
    Size,
    Whole,
)

FIELD_NAME = Matching("a field name", forms.field_name, pattern=r"^[!#$%&'*+\-.^_`|~0-9A-Za-z]+$")
POINTER = Matching("a JSON pointer or the name of a form field", forms.pointer_or_name)
ANY_TEXT = Matching("a text", str)


class Listener(Matching):
    """An address to listen at."""

    def read(self, node: Node, name: str, findings: Findings) -> Read:
        """See `Kind.read`; a table here would ask for TLS."""
        if not isinstance(node, Entries):
            return super().read(node, name, findings)
        message = "this version does not have TLS on its own listeners: write the address alone"
        findings.add(node.place, f"`{name}`: {message}")
        return Read(None, node.place, failed=True)


ADDRESS = Listener("an address", forms.address, pattern=r"^(unix:.+|.+:[0-9]+)$")
LISTEN = ListOf(ADDRESS, single=True, empty=False)

NATIVE = Table(
    Setting("field", FIELD_NAME, "The field the provider reads its key from."),
    Setting("window", Duration(), "How long the provider remembers a key, from the first request."),
    Setting("max_length", Whole(1, 4096), "How many characters the provider takes."),
    Setting(
        "twins",
        Choice(Twins),
        "`guarded`: the provider refuses or joins a second request while the first still works; `unguarded`: not.",
    ),
    switch=True,
)

KEY = Table(
    Setting("field", FIELD_NAME, "The field the key is read from."),
    Setting(
        "also",
        ListOf(Matching("a field name or a JSON pointer", forms.key_source), single=True),
        "Further places to look for the key, in order: field names, or JSON pointers with a leading `/`.",
    ),
    Setting("max_length", Whole(1, 4096), "A longer key is refused with 400."),
    Setting(
        "missing",
        Choice(Missing, later={"derive": "derived keys"}),
        "What a send without a key gets: `forward`, sent without protection; `reject`, 400.",
    ),
    Setting("prefer", Only("client", "derived keys"), "Whose key counts."),
    Setting(
        "ignore",
        ListOf(Matching("a regular expression", forms.key_pattern), single=True),
        "Regular expressions; a key that one of them matches as a whole is treated as absent.",
    ),
    later={"derive": "derived keys"},
)

FINGERPRINT = Table(
    Setting(
        "ignore",
        ListOf(POINTER, single=True),
        "What may differ between two requests that are the same: JSON pointers or names of form fields.",
    ),
    Setting(
        "fields",
        ListOf(FIELD_NAME, single=True),
        "Header fields that change the mail and therefore must be the same.",
    ),
    Setting(
        "mismatch",
        Whole(400, 499),
        "The status for another request under a used key: 422, or 409 where the provider says so.",
    ),
    switch=True,
)

TIMEOUT = Table(
    Setting("receive", Duration(), "For the client's upload; then 408."),
    Setting(
        "connect",
        Duration(),
        "Until the first byte can be written to the provider; then nothing was sent.",
    ),
    Setting(
        "total",
        Duration(),
        "From the first byte written until the answer is complete; then it is lost.",
    ),
)

PRICE = Table(
    Setting("amount", Amount(), "Price of 1,000 mails."),
    Setting("currency", Matching("a currency", forms.currency, pattern="^[A-Z]{3}$"), "ISO 4217 code."),
    required=("amount", "currency"),
)

PROBLEM_NAME = Table(
    Setting("status", Whole(400, 599), "The status the provider uses."),
    Setting("name", ANY_TEXT, "The name the provider's clients know."),
    required=("status", "name"),
)
NAMES = Named(Nested(PROBLEM_NAME), "problem", f"(?:{'|'.join(PROBLEMS)})", hint="use the slug of a problem")

ROUTE_LATER = {
    "derive": "derived keys",
    "egress": "an egress proxy",
}

ROUTE_SETTINGS = (
    Setting(
        "provider",
        ANY_TEXT,
        "The preset the route begins with; `sidecar providers` lists them. `generic` knows nothing.",
    ),
    Setting(
        "path",
        Matching("a path", forms.mount, pattern="^/"),
        "Where the route is mounted on the main listeners; taken off before forwarding. Default: /<name>.",
    ),
    Setting(
        "host",
        Matching("a host name", forms.host),
        "A Host name that belongs to this route as a whole.",
    ),
    Setting("listen", LISTEN, "Listeners of the route's own, where it is mounted at `/`."),
    Setting(
        "upstream",
        Matching("an origin", forms.origin, pattern=r"^[Hh][Tt][Tt][Pp][Ss]?://"),
        "The provider: https://host, with a port or a path where it has one. Default: the preset's.",
    ),
    Setting(
        "region",
        Matching("a region", forms.region, pattern="^[a-z0-9-]+$"),
        "Which of the preset's regional hosts; without meaning beside `upstream`.",
    ),
    Setting(
        "upstream_host",
        Choice(UpstreamHost),
        "The Host field that goes upstream: `route`, the upstream's own; `preserve`, the client's.",
    ),
    Setting(
        "sends",
        ListOf(SENDS, empty=False),
        "What sends mail. Only these are protected; everything else passes through unchanged.",
    ),
    Setting(
        "credential",
        ListOf(FIELD_NAME, single=True, empty=False),
        "The fields that identify the account. Two credentials never share a record.",
    ),
    Setting("native", NATIVE, "The provider's own idempotency, or `off`."),
    Setting("key", KEY, "Where the idempotency key is, and what is a key."),
    Setting(
        "record_key",
        Choice(RecordKey),
        "Whether the record keeps the key's text for the operator, or its digest alone.",
    ),
    Setting(
        "scope",
        ListOf(Matching("a part of the scope", forms.scope_part), single=True, empty=False),
        "Within what a key is one: `credential`, `route`, `field:<name>`.",
    ),
    Setting("fingerprint", FINGERPRINT, "What must be equal for two requests to be the same, or `off`."),
    *POLICY,
    Setting("timeout", TIMEOUT, "How long things may take."),
    Setting(
        "upstream_keepalive",
        Duration(zero=True),
        "How long an idle upstream connection is kept; below what the upstream itself keeps. 0s: not at all.",
    ),
    Setting(
        "problems",
        Choice(Shape),
        "The form of our own errors: `problem+json`, or that which the provider's SDKs parse.",
    ),
    Setting("names", NAMES, "The provider's own words for our errors: status and name by slug."),
    Setting(
        "ca",
        Matching("a file", str, empty=True),
        "A file of certificates (PEM) to trust instead of the system's. Empty: the system's.",
    ),
    Setting("sign", Only("none", "signing"), "Who signs requests."),
    Setting("approval", Only("none", "approvals"), "Whether a person approves each mail."),
    Setting(
        "replay_field",
        Off(FIELD_NAME, ""),
        "The field that marks a replay (its value is `true`), or `off`.",
    ),
    Setting(
        "accepted",
        Whole(200, 299),
        "The status of an accepted mail: what a retry gets of a key that the operator settled as sent.",
    ),
    Setting("price_per_1000", Nested(PRICE), "What 1,000 mails cost, for the money not spent twice."),
)

SENDS.table.elsewhere = dict.fromkeys(
    (setting.name for setting in ROUTE_SETTINGS if setting not in POLICY),
    "is a setting of the whole route, not of one entry of `sends`",
)

ROOT_ELSEWHERE = dict.fromkeys(
    (setting.name for setting in ROUTE_SETTINGS if setting.name != "listen"),
    "is a setting of a route: write it under `defaults:` or under a route",
)

ADMIN = Table(
    Setting("listen", Off(LISTEN, ()), "Where the admin interface listens, or `off`."),
    Setting(
        "token",
        Matching("a token", forms.visible, secret=True, empty=True),
        "Needed for everything but livez, readyz and metrics, once set.",
    ),
)

STORE = Table(
    Setting(
        "url",
        Matching("a store", forms.store_url, secret=True, pattern=r"^(embedded|unix|rediss?(\+sentinel|\+cluster)?):"),
        "`embedded:DIR`, a private server of this sidecar alone; or `redis://...`, `rediss://...`, `unix://...`, "
        "`redis+sentinel://...`, `redis+cluster://...`.",
    ),
    Setting(
        "prefix",
        Matching("a prefix", forms.prefix, pattern="^[A-Za-z0-9._:-]{1,64}$"),
        "What the names of our records begin with. Applications that share a store need one each.",
    ),
    Setting("timeout", Duration(), "For one command, a repeat included."),
    Setting("replicas", Whole(0, 16), "How many replicas hold a reservation before anything is sent."),
    Setting("strict", Boolean(), "Refuse to start on an unsafe Redis (eviction, no persistence)."),
    Setting("memory", Size(), "Bound of the embedded server."),
    Setting(
        "ca",
        Matching("a file", str, empty=True),
        "For rediss: a file of certificates (PEM) to trust instead of the system's. Empty: the system's.",
    ),
    later={
        "encryption_keys": "encryption of records",
    },
)

LOG = Table(
    Setting("level", Choice(LogLevel), "The least level that is logged."),
    Setting("format", Choice(LogFormat), "`auto`: text on a terminal, JSON otherwise."),
)

LIMITS = Table(
    Setting("request", Size(), "The largest content of a request; above it 413."),
    Setting("stored_response", Size(), "The largest content of an answer that is kept for replays."),
    Setting("header", Size(), "The request line and all fields together; above it 431."),
    Setting("outstanding", Whole(1, 1_000_000), "How many sends run at once; above it 503."),
    Setting("memory", Size(), "How much content is held in memory; above it 503."),
)

ROOT_SETTINGS = (
    Setting(
        "listen",
        LISTEN,
        "Where clients connect: host:port (localhost is both families), [::1]:port, unix:/path, or a list.",
    ),
    Setting("admin", ADMIN, "The admin interface."),
    Setting("store", STORE, "Where records are kept."),
    Setting("workers", Whole(1, 64), "How many processes serve: about one for each core."),
    Setting(
        "drain",
        Duration(zero=True),
        "After SIGTERM: how long new requests are still served while readiness is already false.",
    ),
    Setting("log", LOG, "The log."),
    Setting("limits", LIMITS, "Bounds of this process."),
)


def _route_table() -> Table:
    elsewhere = {
        setting.name: "stands at the top level of the file, not in a route"
        for setting in ROOT_SETTINGS
        if setting.name != "listen"
    }
    return Table(*ROUTE_SETTINGS, later=ROUTE_LATER, elsewhere=elsewhere)


ROUTE = _route_table()

ROUTE_NAME = "[A-Za-z0-9][A-Za-z0-9_-]{0,63}"

ROOT = Table(
    *ROOT_SETTINGS,
    Setting(
        "defaults",
        Nested(ROUTE, "route"),
        "Any setting of a route, for all routes that do not say otherwise.",
    ),
    Setting(
        "routes",
        Named(Nested(ROUTE, "route"), "route", ROUTE_NAME, empty=False),
        "One provider account each, by name.",
    ),
    later={"egress": "an egress proxy"},
    elsewhere=ROOT_ELSEWHERE,
    required=("routes",),
)

# What a preset says beside the settings of a route.
PRESET = Table(
    *ROUTE_SETTINGS,
    Setting("title", ANY_TEXT, "The provider's name, for people."),
    Setting("source", ANY_TEXT, "Where the facts come from."),
    Setting("sdk", ListOf(ANY_TEXT), "How clients are pointed at the sidecar: one line per SDK."),
    Setting(
        "hosts",
        Named(Matching("an origin", str), "region", r"(?:[a-z0-9-]+|\*)"),
        "Origins by region: `default` without one, `*` with `{region}` in it for any.",
    ),
    required=("title", "source"),
)

PRESETS = Named(Nested(PRESET), "preset", ROUTE_NAME)
