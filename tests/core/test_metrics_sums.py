"""What several processes counted, added up: nothing is lost through JSON, and no order makes a sum smaller."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.metrics import Metrics


def counted(durations: list[float], outcome: str = "forwarded") -> Metrics:
    metrics = Metrics()
    for duration_s in durations:
        metrics.count("sidecar_requests", "mail", outcome)
        metrics.observe("sidecar_request_seconds", "mail", duration_s)
    return metrics


def summed(*parts: Metrics) -> Metrics:
    total = Metrics()
    for part in parts:
        total.add(json.loads(json.dumps(part.snapshot())))
    return total


def test_sum_has_every_label_and_every_bucket() -> None:
    total = summed(counted([0.002, 70.0]), counted([0.002], "replayed"), Metrics())
    assert total.totals() == {"mail": {"forwarded": 2, "replayed": 1}}
    histogram = total.histograms["sidecar_request_seconds"]["mail"]
    assert (sum(histogram.counts), histogram.counts[-1]) == (3, 1)
    assert histogram.total_s == pytest.approx(70.004)
    assert b'sidecar_requests_total{outcome="replayed",route="mail"} 1.0' in total.render()


def test_sum_of_sums_is_the_sum() -> None:
    parts = [counted([0.1 * number]) for number in range(1, 5)]
    assert summed(summed(*parts[:2]), summed(*parts[2:])).snapshot() == summed(*parts).snapshot()


@given(st.lists(st.lists(st.floats(0, 100), max_size=5), min_size=1, max_size=4))
def test_duration_summed_in_any_order_is_the_same_to_the_last_bit(parts: list[list[float]]) -> None:
    metrics = [counted(part) for part in parts]
    texts = {summed(*some).render() for some in itertools.islice(itertools.permutations(metrics), 24)}
    assert len({tuple(sorted(text.splitlines())) for text in texts}) == 1


def test_counter_that_is_not_declared_is_an_error() -> None:
    with pytest.raises(KeyError):
        Metrics().add({"counters": {"sidecar_nothing": [["mail", 1]]}, "histograms": {}})
