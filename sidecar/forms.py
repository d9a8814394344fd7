"""The settings that have a form of their own: addresses, origins, paths, `sends`, statuses, field names.

Each function reads one text and raises ValueError with what to do instead; no message quotes the text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_address

from sidecar.address import parse
from sidecar.config import STATUSES_2XX, Address, Origin
from sidecar.paths import normalise
from sidecar.values import TOKEN

# RFC 1123 section 2.1, and the underscore that container networks allow in names.
LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
HOST = re.compile(rf"(?=.{{1,253}}\Z){LABEL}(?:\.{LABEL})*")
ORIGIN = re.compile(r"(https?)://(\[[0-9A-Fa-f:.]+\]|[^\[\]:/?#@]+)(?::(\d{1,5}))?(/[^?#]*)?", re.IGNORECASE)
VISIBLE = re.compile(r"[!-~]+")
# `sun_path` has 108 bytes on Linux, one of them for the NUL at its end.
MAX_SOCKET_PATH_BYTES = 107


@dataclass(frozen=True, slots=True)
class Template:
    """An entry of `sends` without its policies; the fields are those of `config.Send`."""

    text: str
    method: bytes
    segments: tuple[bytes | None, ...]
    discriminator: tuple[bytes, bytes] | None


def address(text: str) -> Address:
    """`host:port`, `[::1]:port` or `unix:/path`. Port 0 is any free one."""
    if text.startswith("unix:"):
        return Address(unix=_socket_path(text.removeprefix("unix:")))
    host, colon, port = text.rpartition(":")
    if not colon or not host or not re.fullmatch(r"\d{1,5}", port, re.ASCII):
        raise ValueError("is not an address: write host:port, [::1]:port or unix:/path")
    return Address(host=_host(host), port=_port(port, least=0))


def _socket_path(path: str) -> str:
    if not path:
        raise ValueError("has no path after `unix:`")
    if len(path.encode()) > MAX_SOCKET_PATH_BYTES:
        raise ValueError(f"is too long for a socket: at most {MAX_SOCKET_PATH_BYTES} bytes")
    return path


def _port(text: str, *, least: int) -> int:
    if not least <= int(text) <= 65535:
        raise ValueError(f"has a port out of range: write {least} to 65535")
    return int(text)


def _host(text: str) -> str:
    """A name or an address, in lower case and without brackets."""
    if text.startswith("[") and text.endswith("]"):
        try:
            return str(ip_address(text[1:-1]))
        except ValueError:
            raise ValueError("has no IPv6 address in its brackets") from None
    if ":" in text:
        raise ValueError("has an IPv6 address: write it in brackets, [::1]:port")
    return host(text)


def host(text: str) -> str:
    """A host name or IPv4 address, without a port, in lower case."""
    if not HOST.fullmatch(text):
        raise ValueError("is not a host name: write letters, digits, `-` and `.` alone")
    return text.lower()


def origin(text: str) -> Origin:
    """`https://host[:port][/path]`."""
    match = ORIGIN.fullmatch(text)
    if not match:
        raise ValueError(_no_origin(text))
    scheme, name, port, path = match.groups()
    default = {"http": 80, "https": 443}[scheme.lower()]
    return Origin(
        scheme=scheme.lower(),
        host=_host(name),
        port=_port(port, least=1) if port else default,
        path="" if path in (None, "/") else mount(path),
    )


def _no_origin(text: str) -> str:
    authority = text.partition("://")[2].partition("/")[0]
    if "@" in authority:
        return "holds a user or a password: the client sends the credential, so leave it out"
    if "?" in text or "#" in text:
        return "has a query or a fragment: leave it out"
    return "is not an origin: write https://host, https://host:port or https://host/path"


def mount(text: str) -> str:
    """A path prefix in its normalised form: `/` or `/a/b`."""
    if not VISIBLE.fullmatch(text) or not text.startswith("/"):
        raise ValueError("is not a path: begin with `/` and use visible ASCII")
    if "?" in text or "#" in text:
        raise ValueError("has a query or a fragment: leave it out")
    normal = normalise(text.encode()).decode()
    if normal != text:
        raise ValueError(f"is not in its plain form: write {normal}")
    return text


def template(text: str) -> Template:
    """`METHOD /path/{parameter}`, and `name=value` of a form or query field where one tells sends apart."""
    parts = text.split()
    if len(parts) not in (2, 3):
        raise ValueError("is not a method and a path, such as `POST /v1/send`")
    method, path = parts[:2]
    if not re.fullmatch(r"[A-Z][A-Z-]*", method) or method == "CONNECT":
        raise ValueError("does not begin with a method in capitals, such as POST")
    segments = tuple(_segment(part) for part in mount(path)[1:].split("/") if part)
    told = _discriminator(parts[2]) if len(parts) == 3 else None
    return Template(" ".join(parts), method.encode(), segments, told)


def _segment(part: str) -> bytes | None:
    if re.fullmatch(r"\{[A-Za-z_][A-Za-z0-9_]*\}", part):
        return None
    if "{" in part or "}" in part:
        raise ValueError("has a parameter that is not a whole segment: write /{name}/")
    return part.encode()


def _discriminator(text: str) -> tuple[bytes, bytes]:
    name, equals, value = text.partition("=")
    if not (name and equals and value and VISIBLE.fullmatch(text)):
        raise ValueError("ends in something that is not name=value of a form or query field")
    return name.encode(), value.encode()


def statuses(text: str) -> frozenset[int]:
    """One final status, `422`, or a class of them, `2xx`."""
    if re.fullmatch(r"[2-5]xx", text):
        first = int(text[0]) * 100
        return frozenset(range(first, first + 100))
    if re.fullmatch(r"[2-5]\d\d", text, re.ASCII):
        return frozenset((int(text),))
    raise ValueError("is not a status: write a number from 200 to 599, or a class such as 2xx")


def lost_statuses(text: str) -> frozenset[int]:
    """As `statuses`, but no 2xx."""
    found = statuses(text)
    if found & STATUSES_2XX:
        raise ValueError("cannot be lost: a complete 2xx always counts as final")
    return found


def field_name(text: str) -> str:
    """A field name of RFC 9110 section 5.1."""
    if not TOKEN.fullmatch(text):
        raise ValueError("is not a field name")
    return text


def pointer_or_name(text: str) -> str:
    """With a leading `/` a JSON pointer of RFC 6901 section 3; else any name of a form field."""
    if text.startswith("/") and re.search(r"~(?![01])", text):
        raise ValueError("is not a JSON pointer: write `~` as ~0 and a `/` inside a name as ~1")
    return text


def key_source(text: str) -> str:
    """A field name, or a JSON pointer with its leading `/`."""
    if text.startswith("/"):
        return pointer_or_name(text)
    if not TOKEN.fullmatch(text):
        raise ValueError("is neither a field name nor a JSON pointer with a leading `/`")
    return text


def scope_part(text: str) -> str:
    """`credential`, `route` or `field:<name>`."""
    if text in ("credential", "route"):
        return text
    if text.startswith("field:") and TOKEN.fullmatch(text.removeprefix("field:")):
        return text
    raise ValueError("is not known here: write `credential`, `route` or `field:<name>`")


def key_pattern(text: str) -> str:
    """A regular expression that a whole key matches."""
    try:
        re.compile(text.encode("ascii"))
    except (re.error, UnicodeEncodeError):
        raise ValueError("is not a regular expression of ASCII characters") from None
    return text


def store_url(text: str) -> str:
    """`embedded:DIR`, or the URL of a store that others run (`address.py`)."""
    scheme, _, rest = text.partition(":")
    if scheme == "embedded":
        if not rest:
            raise ValueError("has no directory after `embedded:`")
        return text
    parse(text)
    return text


def visible(text: str) -> str:
    """A text that can stand in a field: visible ASCII."""
    if not VISIBLE.fullmatch(text):
        raise ValueError("holds blanks or characters beyond visible ASCII")
    return text


def prefix(text: str) -> str:
    """What the names of records begin with in the store."""
    # A brace would begin a hash tag and move records and their index to different slots of a cluster.
    if not re.fullmatch(r"[A-Za-z0-9._:-]{1,64}", text):
        raise ValueError("is not 1 to 64 of letters, digits and `.`, `_`, `:`, `-`")
    return text


def currency(text: str) -> str:
    """An ISO 4217 code."""
    if not re.fullmatch(r"[A-Z]{3}", text):
        raise ValueError("is not three capital letters, such as USD")
    return text


def region(text: str) -> str:
    """A region of a provider, such as eu-west-1."""
    if not re.fullmatch(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?", text):
        raise ValueError("is not a region: write small letters, digits and `-`, such as eu-west-1")
    return text
