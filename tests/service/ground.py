"""Where requests try to lead elsewhere: routes that refuse sends without a key, an upstream for each, a canary.

The fixtures stand in `ground_fixtures.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness import Parsed, Upstream, request
from harness.wire import Pairs
from pair import Pair


@dataclass(frozen=True, slots=True)
class Ground:
    """A sidecar whose routes refuse sends without a key, and the upstream of each."""

    pair: Pair
    upstreams: dict[str, Upstream]
    canary: Upstream

    def seen(self) -> list[tuple[str, bytes]]:
        """Route and target of what has arrived anywhere."""
        return [(name, one.target) for name, far in self.upstreams.items() for one in far.begun]

    async def ask(self, method: str, target: str | bytes, fields: Pairs = (), content: bytes = b"") -> Parsed:
        return await self.pair.ask(request(method, target, fields, content))
