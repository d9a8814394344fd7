"""The JSON Schema of the configuration, for editors; made from the declaration the reader uses."""

from __future__ import annotations

from sidecar.settings import ROOT, ROUTE
from sidecar.values import JsonSchema


def schema() -> JsonSchema:
    """JSON Schema 2020-12 of a configuration file, with a description of every setting.

    It knows forms, not contradictions: `sidecar check` knows both.
    """
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Configuration of the sidecar",
        "description": "Checked in full, contradictions included, by `sidecar check`.",
        **ROOT.schema(),
        "$defs": {
            "route": ROUTE.schema(),
            "variable": {
                "description": "A value from the environment: ${NAME} or ${NAME:-default}.",
                "type": "string",
                "pattern": r"\$\{",
            },
        },
    }
