"""The few real things the tests stand on: an upstream that misbehaves by name, the real program, the real store.

    from harness import Upstream, answer, stall, until

Everything listens on loopback, on ports the system hands out. Nothing here is a mock.
"""

from harness.behaviours import (
    Behaviour,
    Received,
    Turn,
    answer,
    chunked,
    close_after_content,
    close_idle,
    cut_chunks,
    cut_content,
    early,
    echo,
    gate,
    interim,
    raw_answer,
    reset_after_content,
    reset_on_accept,
    slow,
    stall,
)
from harness.client import Client, NoAnswerError, Parsed, raw, raw_bytes, request, together
from harness.front import StoreProxy
from harness.program import Sidecar, StartSidecar, default_config, embedded, start_all
from harness.server import RedisServer, ReplyError
from harness.upstream import Upstream
from harness.waiting import SCALE, duration, free_port, scaled, until

__all__ = [
    "SCALE",
    "Behaviour",
    "Client",
    "NoAnswerError",
    "Parsed",
    "Received",
    "RedisServer",
    "ReplyError",
    "Sidecar",
    "StartSidecar",
    "StoreProxy",
    "Turn",
    "Upstream",
    "answer",
    "chunked",
    "close_after_content",
    "close_idle",
    "cut_chunks",
    "cut_content",
    "default_config",
    "duration",
    "early",
    "echo",
    "embedded",
    "free_port",
    "gate",
    "interim",
    "raw",
    "raw_answer",
    "raw_bytes",
    "request",
    "reset_after_content",
    "reset_on_accept",
    "scaled",
    "slow",
    "stall",
    "start_all",
    "together",
    "until",
]
