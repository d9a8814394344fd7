"""Counters, gauges and histograms, declared once. Counting is an addition; prometheus-client renders at a scrape."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

# Seconds. From a replay out of the embedded store to the longest time-out.
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(slots=True)
class Histogram:
    """Durations in seconds, per route."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    total_s: float = 0.0

    def add(self, duration_s: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(BUCKETS_S, duration_s)] += 1
        self.total_s += duration_s


# name -> (help, labels); the README's table is held to this.
COUNTERS = {
    "sidecar_requests": ("Requests by route and outcome.", ("route", "outcome")),
    "sidecar_answers": ("Answers of the upstream by route and class: final, free, lost.", ("route", "class")),
    "sidecar_resends": ("Attempts after an unknown one, with or without a provider key.", ("route", "native")),
    "sidecar_passed_with_key": (
        "Requests with a key that no entry of `sends` names: nothing protects them.",
        ("route",),
    ),
    "sidecar_leases_lost": ("Attempts whose record had another owner, or none, at their last word.", ("route",)),
    "sidecar_records_unreadable": ("Records of a foreign version, or corrupt.", ("route",)),
    "sidecar_store_errors": ("Commands the store did not answer as asked, by script.", ("script",)),
}
HISTOGRAMS = {
    "sidecar_request_seconds": ("Whole request as the client sees it, by route.", ("route",)),
    "sidecar_upstream_seconds": ("From the exchange's start to the upstream's whole answer, by route.", ("route",)),
    "sidecar_store_seconds": ("One command to the store, by script.", ("script",)),
}
GAUGES = {
    "sidecar_outstanding": "Requests under way.",
    "sidecar_unsettled": "Exchanges whose last word the store has not taken yet.",
    "sidecar_waiting": "Arrivals that wait for the first request under their key.",
    "sidecar_content_bytes": "Content held in memory.",
    "sidecar_store_restarts": "Restarts of the embedded store's server since this process began.",
    "sidecar_workers": "Workers that serve, where there is more than one.",
    "sidecar_worker_restarts": "Restarts of workers since the sidecar began, where there is more than one.",
    "sidecar_store_up": "Whether the store serves: 1 or 0.",
    "sidecar_ready": "Whether this sidecar is ready: 1 or 0.",
}


class Metrics:
    """What this process counted since its start."""

    def __init__(self) -> None:
        """Everything at zero; gauges are read when somebody asks."""
        self.counters: dict[str, Counter[tuple[str, ...]]] = {name: Counter() for name in COUNTERS}
        self.histograms: dict[str, dict[str, Histogram]] = {name: {} for name in HISTOGRAMS}
        self.gauges: dict[str, Callable[[], float]] = {}

    def count(self, name: str, *labels: str) -> None:
        """Add one to the counter `name`.

        Raises: KeyError for a name that is not declared.
        """
        self.counters[name][labels] += 1

    def observe(self, name: str, label: str, duration_s: float) -> None:
        """Add a duration in seconds to the histogram `name`.

        Raises: KeyError for a name that is not declared.
        """
        family = self.histograms[name]
        histogram = family.get(label)
        if histogram is None:
            histogram = family[label] = Histogram()
        histogram.add(duration_s)

    def totals(self) -> dict[str, dict[str, int]]:
        """Requests by route and outcome, for `sidecar stats`."""
        totals: dict[str, dict[str, int]] = {}
        for (route, outcome), number in self.counters["sidecar_requests"].items():
            totals.setdefault(route, {})[outcome] = number
        return totals

    # Over several processes.

    def snapshot(self) -> dict[str, Any]:
        """Counters and histograms as JSON takes them, for `add` in another process.

        Durations are whole microseconds: sums of floats may come out smaller when they are added in another order,
        and a counter that goes back by a hair counts as one that began anew.
        """
        return {
            "counters": {name: [[*labels, number] for labels, number in one.items()] for name, one in self._counted()},
            "histograms": {
                name: {label: [round(one.total_s * 1e6), *one.counts] for label, one in family.items()}
                for name, family in self.histograms.items()
            },
        }

    def _counted(self) -> Iterator[tuple[str, Counter[tuple[str, ...]]]]:
        return ((name, counter) for name, counter in self.counters.items() if counter)

    def add(self, snapshot: Mapping[str, Any]) -> None:
        """Add what another process of the same version has counted.

        Raises: KeyError for a name that is not declared.
        """
        for name, rows in snapshot["counters"].items():
            for *labels, number in rows:
                self.counters[name][tuple(labels)] += number
        for name, family in snapshot["histograms"].items():
            for label, (total_us, *counts) in family.items():
                histogram = self.histograms[name].setdefault(label, Histogram())
                histogram.counts = [mine + more for mine, more in zip(histogram.counts, counts, strict=True)]
                histogram.total_s = (round(histogram.total_s * 1e6) + total_us) / 1e6

    # For a scrape.

    def render(self) -> bytes:
        """The text exposition of all metrics."""
        # Imported at the first scrape: it costs a quarter of the time to start.
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        """The families of prometheus-client for one scrape."""
        from prometheus_client.metrics_core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        for name, (text, labels) in COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=labels)
            for values, number in sorted(self.counters[name].items()):
                counter.add_metric(values, number)
            yield counter
        for name, (text, labels) in HISTOGRAMS.items():
            family = HistogramMetricFamily(name, text, labels=labels)
            for label, histogram in sorted(self.histograms[name].items()):
                family.add_metric((label,), _cumulative(histogram), histogram.total_s)
            yield family
        for name, text in GAUGES.items():
            if name in self.gauges:
                yield GaugeMetricFamily(name, text, value=self.gauges[name]())


def _cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    bounds = [str(bound) for bound in BUCKETS_S] + ["+Inf"]
    total = 0
    rows: list[tuple[str, float]] = []
    for bound, number in zip(bounds, histogram.counts, strict=True):
        total += number
        rows.append((bound, total))
    return rows
