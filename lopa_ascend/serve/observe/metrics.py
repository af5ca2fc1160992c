"""The times of requests, and the metrics of /metrics.

Names that begin with "vllm:" are vLLM's, which its dashboards read; "lopa:" marks our own.

``inter_token_latency`` is the time between two updates of a request that made tokens visible. One update can bring many
tokens; the time per token is ``request_time_per_output_token``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lopa_ascend.serve.link.client import EngineClient
from lopa_ascend.serve.link.messages import Stepped
from lopa_ascend.types import EngineStats, Progress, Update

LABELS = ("model_name", "engine")
ENGINE = "0"
"""The label "engine" of the only engine, and of choices that ended before one of several had them."""
# Upper bounds of the buckets of histograms.
SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
TOKENS_PER_FORWARD = (0.5, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)
FINISH_REASONS = ("stop", "length", "abort", "error")


@dataclass
class Timeline:
    """The times of one choice, in seconds of ``time.monotonic``. A time is None until it is reached."""

    prompt_tokens: int
    arrived: float
    begun: float | None = None
    """When the first forward pass started."""
    prefilled: float | None = None
    """When the first forward pass ended."""
    first_token: float | None = None
    """When the first token was visible."""
    last_token: float | None = None
    """When the latest token became visible."""
    ended: float | None = None
    gaps: list[float] = field(default_factory=list)
    """Seconds between consecutive updates that made tokens visible."""
    num_forwards: int = 0
    cached_tokens: int = 0
    """Tokens of the prompt that came from the prefix cache."""
    canvas_positions: int = 0
    """Positions of the answer in the rows of all branches and forward passes."""
    seed: int | None = None
    """Seed of the sampling; None without sampling, or if nothing was computed."""
    num_text_tokens: int = 0
    finish_reason: str | None = None

    def advance(self, now: float, step_seconds: float, update: Update, progress: Progress) -> None:
        """Notes an update that was read at ``now``, at the end of the engine's step or later."""
        if self.prefilled is None and update.num_forwards:  # 0: it was ended while it waited
            self.begun, self.prefilled = max(self.arrived, now - step_seconds), now
        self.num_forwards, self.cached_tokens = update.num_forwards, update.cached_tokens
        self.canvas_positions, self.seed = update.canvas_positions, update.seed
        visible = len(progress.tokens)
        if visible > self.num_text_tokens:
            if self.first_token is None:
                self.first_token = now
            if self.last_token is not None:
                self.gaps.append(now - self.last_token)
            self.last_token = now
        self.num_text_tokens = visible
        if progress.output is not None:
            self.finish_reason, self.ended = progress.output.finish_reason, now

    def durations(self) -> dict[str, float]:
        """Seconds, by the names of metrics, of a finished choice."""
        assert self.begun is not None
        assert self.prefilled is not None
        assert self.ended is not None
        times = {
            "e2e_request_latency": self.ended - self.arrived,
            "request_queue_time": self.begun - self.arrived,
            "request_prefill_time": self.prefilled - self.begun,
            "request_decode_time": self.ended - self.prefilled,
            "request_inference_time": self.ended - self.begun,
        }
        if self.first_token is not None:
            times["time_to_first_token"] = self.first_token - self.arrived
        if self.num_text_tokens > 1:
            times["request_time_per_output_token"] = (self.ended - self.prefilled) / (self.num_text_tokens - 1)
        return times


def summary(choices: Sequence[Timeline], now: float, reason_if_unfinished: str) -> dict[str, object]:
    """The numbers of an HTTP request for the log, which ended at ``now``."""
    arrived = choices[0].arrived
    tokens = sum(choice.num_text_tokens for choice in choices)
    forwards = sum(choice.num_forwards for choice in choices)
    first = min((c.first_token for c in choices if c.first_token is not None), default=None)
    reasons = sorted({choice.finish_reason or reason_if_unfinished for choice in choices})
    seeds = [choice.seed for choice in choices if choice.seed is not None]
    return {
        "choices": len(choices),
        "prompt_tokens": sum(choice.prompt_tokens for choice in choices),
        "cached_tokens": sum(choice.cached_tokens for choice in choices),
        "completion_tokens": tokens,
        "forwards": forwards,
        "tpf": round(tokens / forwards, 3) if forwards else 0.0,
        "ttft_s": None if first is None else round(first - arrived, 4),
        "latency_s": round(now - arrived, 4),
        "finish_reason": ",".join(reasons),
        **({"seeds": seeds} if seeds else {}),
    }


COUNTERS = {
    "vllm:prompt_tokens": "Prompt tokens; counted when a request ends.",
    "vllm:generation_tokens": "Visible tokens; counted when a request ends.",
    "vllm:diffusion_num_denoising_steps": "Forward passes, summed over requests.",
    "vllm:diffusion_num_committed_tokens": "Tokens that became final.",
    "vllm:diffusion_num_canvas_positions": "Positions of ended answers in the rows of all branches and forward passes.",
    "vllm:spec_decode_num_drafts": "Forward passes that checked drafted tokens.",
    "vllm:spec_decode_num_draft_tokens": "Drafted tokens that were checked.",
    "vllm:spec_decode_num_accepted_tokens": "Drafted tokens that were accepted.",
    "lopa:draft_second_choices": "Forward passes that wrote the draft's second choice where they refused the first.",
}
LABELLED = {
    "vllm:request_success": ("Choices that ended, by finish reason.", "finished_reason", FINISH_REASONS),
    "lopa:branch_wins": ('Forward passes won, by branch: a rank, or "anchor".', "branch", ()),
    "vllm:spec_decode_num_accepted_tokens_per_pos": (
        "Drafted tokens that were accepted, by their place.", "position", ("0",)
    ),
}  # fmt: skip
"""Counters with one more label, and its values that are there from the start."""
HISTOGRAMS = {
    "vllm:iteration_tokens_total": ("Tokens that became final in a step.", TOKENS),
    "lopa:forward_seconds": ("Duration of a step of the engine.", SECONDS),
    "lopa:tokens_per_forward": ("Visible tokens of a choice divided by its forward passes.", TOKENS_PER_FORWARD),
    "vllm:request_prompt_tokens": ("Tokens of a prompt.", TOKENS),
    "vllm:request_generation_tokens": ("Visible tokens of a choice.", TOKENS),
    "vllm:time_to_first_token_seconds": ("From a request's arrival to its first visible token.", SECONDS),
    "vllm:inter_token_latency_seconds": ("Between two updates that made tokens visible.", SECONDS),
    "vllm:request_time_per_output_token_seconds": (
        "Time after the first forward pass, divided by the visible tokens but one.", SECONDS
    ),
    "vllm:e2e_request_latency_seconds": ("From a request's arrival to its end.", SECONDS),
    "vllm:request_queue_time_seconds": ("From a request's arrival to the start of its first forward pass.", SECONDS),
    "vllm:request_prefill_time_seconds": (
        "Duration of the first forward pass, which computes the prompt and the first block.", SECONDS
    ),
    "vllm:request_decode_time_seconds": ("From the end of the first forward pass to the end of the request.", SECONDS),
    "vllm:request_inference_time_seconds": (
        "From the start of the first forward pass to the end of the request.", SECONDS
    ),
}  # fmt: skip


class Metrics:
    """Counts what the engine and its requests do: ``observe_step`` must be called for every message from the engine,
    ``observe_end`` at the end of every request that reached it."""

    def __init__(self, client: EngineClient, model_name: str):
        self.client, self.model_name = client, model_name
        self.registry = CollectorRegistry()
        self.registry.register(_EngineState(client, model_name))
        self._metrics: dict[str, Counter | Histogram] = {}
        for name, text in COUNTERS.items():
            self._metrics[name] = Counter(name, text, LABELS, registry=self.registry)
        for name, (text, label, _) in LABELLED.items():
            self._metrics[name] = Counter(name, text, (*LABELS, label), registry=self.registry)
        for name, (text, bounds) in HISTOGRAMS.items():
            self._metrics[name] = Histogram(name, text, LABELS, buckets=bounds, registry=self.registry)
        self._steps_seen = {engine: stats.num_steps for engine, stats in client.engines.items()}
        for name in (*COUNTERS, *HISTOGRAMS):  # the series of the only engine, before anything has happened
            self._metrics[name].labels(model_name, ENGINE)
        for name, (_, _, values) in LABELLED.items():
            for value in values:
                self._metrics[name].labels(model_name, ENGINE, value)

    def _add(self, engine: str, name: str, amount: float = 1, *label: str) -> None:
        """Adds to a counter, or an observation to a histogram."""
        series = self._metrics[name].labels(self.model_name, engine or ENGINE, *label)
        if isinstance(series, Histogram):
            series.observe(amount)
        else:
            series.inc(amount)

    def observe_step(self, message: Stepped) -> None:
        add, stats = partial(self._add, message.engine), message.stats
        tokens = sum(len(update.tokens) for update in message.updates)
        if stats.num_steps != self._steps_seen.get(message.engine, 0):  # else a heartbeat, or more of the same step
            self._steps_seen[message.engine] = stats.num_steps
            add("lopa:forward_seconds", stats.step_seconds)
            if not message.engine:  # one of several sends the updates of a step in several messages
                add("vllm:iteration_tokens_total", tokens)
        add("vllm:diffusion_num_committed_tokens", tokens)
        for update in message.updates:
            if update.winner is not None:
                add("vllm:diffusion_num_denoising_steps")
                add("lopa:branch_wins", 1, str(update.winner or "anchor"))
            if update.num_drafted:
                add("vllm:spec_decode_num_drafts")
                add("vllm:spec_decode_num_draft_tokens", update.num_drafted)
                add("vllm:spec_decode_num_accepted_tokens", update.num_accepted)
                add("lopa:draft_second_choices", update.second_was_right)
                for place in range(update.num_accepted):
                    add("vllm:spec_decode_num_accepted_tokens_per_pos", 1, str(place))

    def observe_end(self, choices: Sequence[Timeline], reason_if_unfinished: str, engines: Sequence[str]) -> None:
        """Counts the choices of a request that has ended; each had one of ``engines``."""
        for choice, engine in zip(choices, engines, strict=True):
            self._observe_choice(choice, choice.finish_reason or reason_if_unfinished, engine)

    def _observe_choice(self, choice: Timeline, reason: str, engine: str) -> None:
        add = partial(self._add, engine)
        add("vllm:request_success", 1, reason)
        if choice.begun is None or choice.prefilled is None:
            return
        add("vllm:prompt_tokens", choice.prompt_tokens)
        add("vllm:generation_tokens", choice.num_text_tokens)
        add("vllm:diffusion_num_canvas_positions", choice.canvas_positions)
        if choice.finish_reason is None:
            return
        add("vllm:request_prompt_tokens", choice.prompt_tokens)
        add("vllm:request_generation_tokens", choice.num_text_tokens)
        if choice.num_forwards:
            add("lopa:tokens_per_forward", choice.num_text_tokens / choice.num_forwards)
        for name, seconds in choice.durations().items():
            add(f"vllm:{name}_seconds", seconds)
        for gap in choice.gaps:
            add("vllm:inter_token_latency_seconds", gap)


class _Merged(Collector):
    """The families of several collectors, each once with the samples of all."""

    def __init__(self, parts: Iterable[Collector]):
        self._parts = parts

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for part in self._parts:
            for family in part.collect():
                merged = families.setdefault(family.name, family)
                if merged is not family:
                    merged.samples += family.samples
        return families.values()


def metrics_text(models: Sequence[Metrics], *others: Collector) -> bytes:
    """In Prometheus' text format."""
    return generate_latest(_Merged([*(model.registry for model in models), *others]))


class _EngineState(Collector):
    """Reads the engines' latest stats at the moment of the request for /metrics."""

    def __init__(self, client: EngineClient, model_name: str):
        self._client, self._model_name = client, model_name

    def collect(self) -> Iterable[Metric]:
        client, name = self._client, self._model_name
        if not client.engines.keys() - {""}:
            only = replace(client.stats, num_running=client.num_running, num_waiting=client.num_waiting)
            return _OneEngine((name, ENGINE), only).collect()
        engines = [_OneEngine((name, engine), stats) for engine, stats in client.engines.items()]
        return [*_Merged(engines).collect(), *self._of_all()]

    def _of_all(self) -> Iterable[Metric]:
        count = GaugeMetricFamily("lopa:engines", "Engines that take requests.", labels=["model_name"])
        count.add_metric([self._model_name], len(self._client.engines))
        yield count
        text = 'Choices that lost their engine, by outcome: "retried" on another one, or "failed".'
        lost = CounterMetricFamily("lopa:lost_choices", text, labels=[*LABELS, "outcome"])
        for (engine, outcome), number in self._client.lost.items():
            lost.add_metric([self._model_name, engine or ENGINE, outcome], number)
        yield lost


# fmt: off
OF_ENGINE = (
    (GaugeMetricFamily, "vllm:num_requests_running", "num_running", "Choices that the engine has begun."),
    (GaugeMetricFamily, "vllm:num_requests_waiting", "num_waiting", "Choices that wait until the engine has room."),
    (GaugeMetricFamily, "vllm:kv_cache_usage_perc", "kv_usage", "Fraction of the KV pages that requests hold, 0 to 1."),
    (GaugeMetricFamily, "lopa:pages_in_use", "pages_in_use", "KV pages that requests hold."),
    (GaugeMetricFamily, "lopa:pages_cached", "pages_cached", "KV pages that only the prefix cache holds."),
    (CounterMetricFamily, "vllm:num_preemptions", "num_preempted", "Always 0: a running request is never preempted."),
    (CounterMetricFamily, "vllm:prefix_cache_queries", "prefix_queries", "Prompt tokens looked for in the cache."),
    (CounterMetricFamily, "vllm:prefix_cache_hits", "prefix_hits", "Prompt tokens found in the cache."),
    (CounterMetricFamily, "lopa:gathered_bytes", "gathered_bytes", "Bytes of keys and values that attention copied."),
    (CounterMetricFamily, "lopa:copied_positions", "copied_positions", "Positions whose keys and values were copied."),
    (CounterMetricFamily, "lopa:branch_rows", "num_rows", "Branches evaluated, on all ranks."),
    (CounterMetricFamily, "lopa:idle_rows", "idle_rows", "Rows left empty on all ranks."),
    (CounterMetricFamily, "lopa:steps", "num_steps", "Steps of the engine."),
)
"""From ``EngineStats``: kind, name, attribute, text."""
OF_GRAPHS = (
    (GaugeMetricFamily, "lopa:graphs", "num_buckets", "Compiled buckets."),
    (CounterMetricFamily, "lopa:late_compilations", "num_late",
     "Compilations asked for after the start, which are refused; other than 0: an error in the engine."),
    (CounterMetricFamily, "lopa:graph_steps", "num_steps", "Launches of compiled steps."),
    (CounterMetricFamily, "lopa:graph_tokens", "tokens", "Positions that compiled steps computed."),
    (CounterMetricFamily, "lopa:graph_padded_tokens", "padded_tokens",
     "Positions that compiled steps computed and no branch needed."),
    (CounterMetricFamily, "lopa:graph_wasted_steps", "wasted_steps",
     "Compiled steps of choices that had already ended."),
)
"""From ``GraphStats``."""
# fmt: on
EAGER = "Eager steps of choices on a server with graphs, by reason: a decoding parameter, or graph_window_blocks."


class _OneEngine(Collector):
    def __init__(self, labels: tuple[str, str], stats: EngineStats):
        self._labels, self._stats = labels, stats

    def collect(self) -> Iterable[Metric]:
        stats, graphs = self._stats, self._stats.graphs
        rows: list[tuple[object, tuple[Any, ...]]] = [(stats, row) for row in OF_ENGINE]
        rows += [(graphs, row) for row in OF_GRAPHS if graphs is not None]
        for source, (kind, name, attribute, text) in rows:
            yield self._family(kind, name, text, {"": getattr(source, attribute)})
        calls = {traffic.purpose: traffic.calls for traffic in stats.traffic}
        sent = {traffic.purpose: traffic.num_bytes for traffic in stats.traffic}
        total = CounterMetricFamily
        yield self._family(total, "lopa:collective_calls", "Collectives of rank 0, by purpose.", calls, "purpose")
        text = "Bytes that rank 0 contributed to collectives, by purpose."
        yield self._family(total, "lopa:collective_bytes", text, sent, "purpose")
        if graphs is not None:
            text = "A step of each bucket at start, with the most keys."
            times = {bucket: milliseconds / 1000 for bucket, milliseconds in graphs.replay_milliseconds.items()}
            yield self._family(GaugeMetricFamily, "lopa:graph_replay_seconds", text, times, "bucket")
            yield self._family(total, "lopa:eager_steps", EAGER, graphs.eager_steps, "reason")

    def _family(
        self,
        kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
        name: str,
        text: str,
        values: Mapping[str, float],
        *label: str,
    ) -> Metric:
        """``values``: by value of the label, if there is one."""
        family = kind(name, text, labels=(*LABELS, *label))
        for key, value in values.items():
            family.add_metric((*self._labels, key)[: len(LABELS) + len(label)], value)
        return family
