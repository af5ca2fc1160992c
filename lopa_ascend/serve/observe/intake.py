"""Metrics of the bodies that the server is taking in: how many wait, and how long."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from lopa_ascend.serve.api.intake import Intake
from lopa_ascend.serve.api.workers import Lane


class IntakeState(Collector):
    """Metrics that are read from the intake at the moment of the request for /metrics.

    Args:
        intake: takes in the bodies of requests.
        labels: labels of every sample, by name.
    """

    def __init__(self, intake: Intake, labels: Mapping[str, str]):
        self._intake, self._labels = intake, labels

    def collect(self) -> Iterable[Metric]:
        names, values = list(self._labels), list(self._labels.values())
        held = GaugeMetricFamily("lopa:body_bytes", "Bytes of the bodies above 64 KiB that are held.", labels=names)
        held.add_metric(values, self._intake.memory.used)
        yield held
        gauges: tuple[tuple[str, str, Callable[[Lane], float]], ...] = (
            ("waiting", "Bodies that wait to be parsed and tokenized.", lambda lane: lane.num_waiting),
            ("running", "Bodies that are being parsed or tokenized.", lambda lane: lane.num_running),
            ("oldest_wait_seconds", "How long the oldest waiting body has waited.", Lane.longest_wait),
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(f"lopa:bodies_{name}", text, labels=[*names, "size"])
            for lane in self._intake.workers.lanes:
                gauge.add_metric([*values, lane.kind], value(lane))
            yield gauge
        names.append("size")
        refused = CounterMetricFamily(
            "lopa:bodies_refused", "Bodies for which there was no room, in memory or in the queue.", labels=names
        )
        waits = SummaryMetricFamily("lopa:body_wait_seconds", "How long bodies waited.", labels=names)
        for lane in self._intake.workers.lanes:
            refused.add_metric([*values, lane.kind], lane.num_refused)
            waits.add_metric([*values, lane.kind], lane.num_begun, lane.seconds_waited)
        yield refused
        yield waits
