"""`python -m storm`: one run; prints figures and seed, exits 1 where the judge finds anything."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from storm.broken import BROKEN
from storm.builds import build
from storm.mix import Mix
from storm.report import text
from storm.run import Storm


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one storm; the exit code."""
    parser = argparse.ArgumentParser(prog="storm", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000), help="what the choices are drawn from")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long, before the quiet (default 60)")
    parser.add_argument("--keep", type=Path, help="a new folder for the logs of sidecars and store")
    parser.add_argument("--broken", choices=BROKEN, help="a build that breaks the promise, until that is found")
    chosen = parser.parse_args(arguments)
    if chosen.keep is not None:
        chosen.keep.mkdir(parents=True)
    print(f"storm: seed {chosen.seed}, {chosen.seconds:g} s", flush=True)
    broken = BROKEN.get(chosen.broken)
    with build(chosen.broken or "", broken.patches if broken else ()) as env:
        storm = Storm(chosen.seed, broken.mix if broken else Mix(), env, chosen.keep)
        result = asyncio.run(storm.run(chosen.seconds, until_finding=broken is not None))
    print(text(result))
    return 1 if result.findings else 0


if __name__ == "__main__":
    sys.exit(main())
