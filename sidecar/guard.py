"""Who may ask the admin interface: whoever has the token; and no web page of another site, whatever a browser sends."""

from __future__ import annotations

import hmac
import re
from ipaddress import ip_address

from aiohttp import web

from sidecar.errors import OperatorError, Refusal


class Guard:
    """Lets requests of operators through."""

    def __init__(self, *, token: str, everywhere: bool) -> None:
        """`everywhere`: the listener can be reached from beyond this host; then nothing goes without a token."""
        self._token = token.encode()
        self._everywhere = everywhere

    @property
    def has_token(self) -> bool:
        """Whether `admin.token` is set."""
        return bool(self._token)

    def admit(self, request: web.BaseRequest) -> None:
        """Let a request through that reads.

        Raises: OperatorError.
        """
        # RFC 9112 section 3.2.2: the authority of an absolute-form target goes before the Host field.
        target = request.raw_path
        host = (
            request.headers.get("Host", "") if target.startswith("/") else target.partition("://")[2].partition("/")[0]
        )
        if not self._everywhere and not _is_here(host):
            # A name of somebody else's that leads here would make its pages this site's own (DNS rebinding).
            raise OperatorError(Refusal.HOST_FOREIGN, "Ask for localhost, or for the address of admin.listen.")
        if not self._token:
            if self._everywhere:
                detail = "Set admin.token: this listener can be reached from beyond this host."
                raise OperatorError(Refusal.TOKEN_UNSET, detail)
            return
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        right = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), self._token)
        if scheme.lower() != "bearer" or not right:
            raise OperatorError(Refusal.TOKEN_MISSING, "Send `Authorization: Bearer TOKEN`, the token of admin.token.")

    def admit_change(self, request: web.BaseRequest) -> None:
        """Let a request through that changes something: not from another site, and not a form's.

        Raises: OperatorError.
        """
        self.admit(request)
        # Fetch Metadata: `none` is a person's own doing. A page on another port of this host is `same-site`.
        site = request.headers.get("Sec-Fetch-Site", "none")
        origin = request.headers.get("Origin")
        own = f"{request.scheme}://{request.headers.get('Host', '')}"
        if site not in ("same-origin", "none") or (origin is not None and origin.lower() != own.lower()):
            raise OperatorError(Refusal.ORIGIN_FOREIGN, "A page of another site may not do this.")
        # A form can send no JSON, and a script of another site has to ask first.
        if request.content_type != "application/json":
            raise OperatorError(Refusal.CONTENT_NOT_JSON, "Send JSON, with `Content-Type: application/json`.")


# RFC 3986 section 3.2.2: an address in brackets, or a name; then perhaps a port, and nothing else.
HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9.-]+))(?::[0-9]*)?")


def _is_here(host: str) -> bool:
    """Whether a Host field names this machine itself, whatever the port."""
    match = HOST.fullmatch(host)
    if match is None:
        return False
    name = match[1] or match[2]
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name.lower() == "localhost"
