"""Counters and histograms as a scrape sees them, read back by prometheus-client's own parser."""

from __future__ import annotations

import subprocess
import sys

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from sidecar.metrics import BUCKETS_S, COUNTERS, GAUGES, HISTOGRAMS, Metrics


def scraped(metrics: Metrics) -> dict[str, Metric]:
    families = {family.name: family for family in text_string_to_metric_families(metrics.render().decode())}
    assert all(family.documentation for family in families.values())
    return families


def samples(metrics: Metrics, family: str) -> dict[tuple[str, ...], float]:
    """Name and label values (by the label's name) of each sample, and its value."""
    return {(s.name, *s.labels.values()): s.value for s in scraped(metrics)[family].samples}


def test_every_declared_name_is_scraped_from_the_start() -> None:
    metrics = Metrics()
    metrics.gauges = dict.fromkeys(GAUGES, lambda: 0.0)
    families = scraped(metrics)
    assert set(families) == {*COUNTERS, *HISTOGRAMS, *GAUGES}
    assert {families[name].type for name in COUNTERS} == {"counter"}
    assert {families[name].type for name in HISTOGRAMS} == {"histogram"}
    assert {families[name].type for name in GAUGES} == {"gauge"}


def test_counter_adds_up_by_its_labels() -> None:
    metrics = Metrics()
    for _ in range(3):
        metrics.count("sidecar_requests", "mail", "forwarded")
    metrics.count("sidecar_requests", "mail", "replayed")
    metrics.count("sidecar_leases_lost", "mail")
    assert samples(metrics, "sidecar_requests") == {
        ("sidecar_requests_total", "forwarded", "mail"): 3,
        ("sidecar_requests_total", "replayed", "mail"): 1,
    }
    (sample,) = [s for s in scraped(metrics)["sidecar_requests"].samples if s.labels["outcome"] == "replayed"]
    assert sample.labels == {"route": "mail", "outcome": "replayed"}
    assert samples(metrics, "sidecar_leases_lost") == {("sidecar_leases_lost_total", "mail"): 1}
    assert metrics.totals() == {"mail": {"forwarded": 3, "replayed": 1}}


def test_label_values_are_escaped() -> None:
    metrics = Metrics()
    odd = 'a"b\\c\nd{}='
    metrics.count("sidecar_requests", odd, "forwarded")
    assert samples(metrics, "sidecar_requests") == {("sidecar_requests_total", "forwarded", odd): 1}


def test_histogram_counts_each_duration_once_and_adds_it_up() -> None:
    metrics = Metrics()
    durations = [0.0005, *BUCKETS_S, 0.3, 61.0]
    for duration_s in durations:
        metrics.observe("sidecar_store_seconds", "reserve", duration_s)
    metrics.observe("sidecar_store_seconds", "renew", 0.002)
    got = samples(metrics, "sidecar_store_seconds")
    assert got["sidecar_store_seconds_count", "reserve"] == len(durations)
    assert got["sidecar_store_seconds_sum", "reserve"] == pytest.approx(sum(durations))
    assert got["sidecar_store_seconds_sum", "renew"] == pytest.approx(0.002)
    for bound in (*BUCKETS_S, float("inf")):
        (count,) = [
            s.value
            for s in scraped(metrics)["sidecar_store_seconds"].samples
            if s.labels.get("script") == "reserve" and float(s.labels.get("le", "nan")) == bound
        ]
        # A bound belongs to its bucket: `le` is "less or equal".
        assert count == sum(duration_s <= bound for duration_s in durations)


def test_gauge_is_read_when_somebody_asks() -> None:
    metrics = Metrics()
    values = [1.0]
    metrics.gauges["sidecar_outstanding"] = lambda: values[0]
    assert samples(metrics, "sidecar_outstanding") == {("sidecar_outstanding",): 1}
    values[0] = 7
    assert samples(metrics, "sidecar_outstanding") == {("sidecar_outstanding",): 7}


def test_undeclared_name_raises() -> None:
    metrics = Metrics()
    with pytest.raises(KeyError):
        metrics.count("sidecar_request", "mail", "forwarded")
    with pytest.raises(KeyError):
        metrics.observe("sidecar_seconds", "mail", 1.0)
    assert "sidecar_request" not in metrics.counters


def test_names_follow_the_conventions_of_prometheus() -> None:
    assert all(name.startswith("sidecar_") for name in (*COUNTERS, *HISTOGRAMS, *GAUGES))
    assert all(name.endswith("_seconds") for name in HISTOGRAMS)
    assert list(BUCKETS_S) == sorted(set(BUCKETS_S))


def test_counting_does_not_import_what_only_a_scrape_needs() -> None:
    script = (
        "import sys; from sidecar.metrics import Metrics; Metrics().count('sidecar_leases_lost', 'mail');"
        " sys.exit('prometheus_client' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
