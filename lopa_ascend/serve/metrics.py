"""The times of requests, and the metrics of /metrics.

Names that begin with "vllm:" are vLLM's, which its dashboards read; "lopa:" marks our own.

``inter_token_latency`` is the time between two updates of a request that made tokens visible. One update can bring many
tokens; the time per token is ``request_time_per_output_token``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lopa_ascend.serve.link.client import EngineClient
from lopa_ascend.serve.link.messages import Stepped
from lopa_ascend.types import EngineStats, GraphStats, Progress, Update

LABELS = ("model_name", "engine")
ENGINE = "0"
"""Value of the label "engine" of the only engine, and of choices that ended before one of several had them."""
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
    """When the HTTP request arrived."""
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
    """Visible tokens."""
    finish_reason: str | None = None

    def advance(self, now: float, step_seconds: float, update: Update, progress: Progress) -> None:
        """Notes an update.

        Args:
            now: when the update was read, at the end of the engine's step or later.
            step_seconds: duration of that step.
            update: what the step did.
            progress: what is final now.
        """
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
        """The times of a finished choice, by names in ``TIMES``."""
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
    """The numbers of an HTTP request for the log.

    Args:
        choices: all that it asked for.
        now: the end of the request.
        reason_if_unfinished: finish reason of choices that never finished.
    """
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


class Metrics:
    """Counts what the engine and its requests do.

    ``observe_step`` must be called for every message from the engine, ``observe_end`` at the end of every request that
    reached the engine.

    Args:
        client: the engine.
        model_name: value of the label "model_name".
    """

    def __init__(self, client: EngineClient, model_name: str):
        self._model_name = model_name
        self.registry = CollectorRegistry()
        self.registry.register(_EngineState(client, model_name))
        self._prompt = self._counter("vllm:prompt_tokens", "Prompt tokens; counted when a request ends.")
        self._generated = self._counter("vllm:generation_tokens", "Visible tokens; counted when a request ends.")
        self._success = self._labelled(
            "vllm:request_success", "Choices that ended, by finish reason.", "finished_reason"
        )
        self._denoising = self._counter("vllm:diffusion_num_denoising_steps", "Forward passes, summed over requests.")
        self._committed = self._counter("vllm:diffusion_num_committed_tokens", "Tokens that became final.")
        self._canvas = self._counter(
            "vllm:diffusion_num_canvas_positions",
            "Positions of answers in the rows of all branches and forward passes; counted when a request ends.",
        )
        self._wins = self._labelled("lopa:branch_wins", 'Forward passes won, by branch: a rank, or "anchor".', "branch")
        self._drafts = self._counter("vllm:spec_decode_num_drafts", "Forward passes that checked drafted tokens.")
        self._drafted = self._counter("vllm:spec_decode_num_draft_tokens", "Drafted tokens that were checked.")
        self._accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.")
        self._accepted_at = self._labelled(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens that were accepted, by their place.",
            "position",
        )
        self._seconds = self._counter(
            "lopa:draft_second_choices",
            "Forward passes that wrote the draft's second choice where they refused the first.",
        )
        self._iteration = self._histogram("vllm:iteration_tokens_total", "Tokens that became final in a step.", TOKENS)
        self._forward = self._histogram("lopa:forward_seconds", "Duration of a step of the engine.", SECONDS)
        self._tpf = self._histogram(
            "lopa:tokens_per_forward", "Visible tokens of a choice divided by its forward passes.", TOKENS_PER_FORWARD
        )
        self._times = {name: self._histogram(f"vllm:{name}_seconds", text, SECONDS) for name, text in TIMES.items()}
        self._prompt_sizes = self._histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self._answer_sizes = self._histogram("vllm:request_generation_tokens", "Visible tokens of a choice.", TOKENS)
        self._steps_seen = {engine: stats.num_steps for engine, stats in client.engines.items()}
        self._show_zeros()

    def _show_zeros(self) -> None:
        """Makes the series of the only engine before anything has happened."""
        labels = self._labels("")
        for reason in FINISH_REASONS:
            self._success.labels(*labels, reason)
        self._accepted_at.labels(*labels, "0")
        counters = (
            self._prompt, self._generated, self._denoising, self._committed, self._canvas,
            self._drafts, self._drafted, self._accepted, self._seconds,
        )  # fmt: skip
        histograms = (self._iteration, self._forward, self._tpf, self._prompt_sizes, self._answer_sizes)
        for metric in (*counters, *histograms, *self._times.values()):
            metric.labels(*labels)

    def _labels(self, engine: str) -> tuple[str, str]:
        return self._model_name, engine or ENGINE

    def observe_step(self, message: Stepped) -> None:
        """Counts what a message from the engine reports."""
        labels, stats = self._labels(message.engine), message.stats
        tokens = sum(len(update.tokens) for update in message.updates)
        if stats.num_steps != self._steps_seen.get(message.engine, 0):  # else a heartbeat, or more of the same step
            self._steps_seen[message.engine] = stats.num_steps
            self._forward.labels(*labels).observe(stats.step_seconds)
            if not message.engine:  # one of several sends the updates of a step in several messages
                self._iteration.labels(*labels).observe(tokens)
        self._committed.labels(*labels).inc(tokens)
        for update in message.updates:
            if update.winner is not None:
                self._denoising.labels(*labels).inc()
                self._wins.labels(*labels, str(update.winner or "anchor")).inc()
            if update.num_drafted:
                self._drafts.labels(*labels).inc()
                self._drafted.labels(*labels).inc(update.num_drafted)
                self._accepted.labels(*labels).inc(update.num_accepted)
                self._seconds.labels(*labels).inc(update.second_was_right)
                for place in range(update.num_accepted):
                    self._accepted_at.labels(*labels, str(place)).inc()

    def observe_end(self, choices: Sequence[Timeline], reason_if_unfinished: str, engines: Sequence[str]) -> None:
        """Counts the choices of a request that has ended.

        Args:
            choices: their times.
            reason_if_unfinished: finish reason of choices that never finished.
            engines: for each choice which of several engines had it.
        """
        for choice, engine in zip(choices, engines, strict=True):
            self._observe_choice(choice, choice.finish_reason or reason_if_unfinished, self._labels(engine))

    def _observe_choice(self, choice: Timeline, reason: str, labels: tuple[str, str]) -> None:
        self._success.labels(*labels, reason).inc()
        if choice.begun is None or choice.prefilled is None:
            return
        self._prompt.labels(*labels).inc(choice.prompt_tokens)
        self._generated.labels(*labels).inc(choice.num_text_tokens)
        self._canvas.labels(*labels).inc(choice.canvas_positions)
        if choice.finish_reason is None:
            return
        self._prompt_sizes.labels(*labels).observe(choice.prompt_tokens)
        self._answer_sizes.labels(*labels).observe(choice.num_text_tokens)
        if choice.num_forwards:
            self._tpf.labels(*labels).observe(choice.num_text_tokens / choice.num_forwards)
        for name, seconds in choice.durations().items():
            self._times[name].labels(*labels).observe(seconds)
        for gap in choice.gaps:
            self._times["inter_token_latency"].labels(*labels).observe(gap)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, LABELS, registry=self.registry)

    def _labelled(self, name: str, text: str, label: str) -> Counter:
        return Counter(name, text, (*LABELS, label), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, LABELS, buckets=buckets, registry=self.registry)


class _Merged(Collector):
    """The families of several collectors, each of which is there once with the samples of all."""

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
    """The metrics of all models, and others, in Prometheus' text format."""
    return generate_latest(_Merged([*(model.registry for model in models), *others]))


TIMES = {
    "time_to_first_token": "From a request's arrival to its first visible token.",
    "inter_token_latency": "Between two updates that made tokens visible.",
    "request_time_per_output_token": "Time after the first forward pass, divided by the visible tokens but one.",
    "e2e_request_latency": "From a request's arrival to its end.",
    "request_queue_time": "From a request's arrival to the start of its first forward pass.",
    "request_prefill_time": "Duration of the first forward pass, which computes the prompt and the first block.",
    "request_decode_time": "From the end of the first forward pass to the end of the request.",
    "request_inference_time": "From the start of the first forward pass to the end of the request.",
}
"""Histograms of seconds, without the prefix "vllm:" and the suffix "_seconds"."""


class _EngineState(Collector):
    """Metrics that are read from the engines' latest stats at the moment of the request for /metrics."""

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


class _OneEngine(Collector):
    """The metrics of an engine's stats."""

    def __init__(self, labels: tuple[str, str], stats: EngineStats):
        self._labels, self._stats = labels, stats

    def collect(self) -> Iterable[Metric]:
        stats = self._stats
        usage = stats.pages_in_use / stats.num_pages if stats.num_pages else 0.0
        yield from self._gauges(
            ("vllm:num_requests_running", "Choices that the engine has begun.", stats.num_running),
            ("vllm:num_requests_waiting", "Choices that wait until the engine has room.", stats.num_waiting),
            ("vllm:kv_cache_usage_perc", "Fraction of the KV pages that requests hold, 0 to 1.", usage),
            ("lopa:pages_in_use", "KV pages that requests hold.", stats.pages_in_use),
            ("lopa:pages_cached", "KV pages that only the prefix cache holds.", stats.pages_cached),
        )
        yield from self._totals(
            ("vllm:num_preemptions", "Always 0: a running request is never preempted.", 0),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_queries),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_hits),
            ("lopa:gathered_bytes", "Bytes of keys and values that attention copied.", stats.gathered_bytes),
            ("lopa:copied_positions", "Positions whose keys and values were copied.", stats.copied_positions),
            ("lopa:branch_rows", "Branches evaluated, on all ranks.", stats.num_rows),
            ("lopa:idle_rows", "Rows left empty on all ranks.", stats.idle_rows),
            ("lopa:steps", "Steps of the engine.", stats.num_steps),
        )
        calls = {traffic.purpose: traffic.calls for traffic in stats.traffic}
        sent = {traffic.purpose: traffic.num_bytes for traffic in stats.traffic}
        yield self._family("lopa:collective_calls", "Collectives of rank 0, by purpose.", "purpose", calls)
        text = "Bytes that rank 0 contributed to collectives, by purpose."
        yield self._family("lopa:collective_bytes", text, "purpose", sent)
        if stats.graphs is not None:
            yield from self._graphs(stats.graphs)

    def _graphs(self, stats: GraphStats) -> Iterable[Metric]:
        yield from self._gauges(("lopa:graphs", "Compiled buckets.", stats.num_buckets))
        late = "Compilations asked for after the start, which are refused; other than 0: an error in the engine."
        padded = "Positions that compiled steps computed and no branch needed."
        yield from self._totals(
            ("lopa:late_compilations", late, stats.num_late),
            ("lopa:graph_steps", "Launches of compiled steps.", stats.num_steps),
            ("lopa:graph_tokens", "Positions that compiled steps computed.", stats.tokens),
            ("lopa:graph_padded_tokens", padded, stats.padded_tokens),
            ("lopa:graph_wasted_steps", "Compiled steps of choices that had already ended.", stats.wasted_steps),
        )
        replays = GaugeMetricFamily(
            "lopa:graph_replay_seconds",
            "A step of each bucket at start, with the most keys.",
            labels=(*LABELS, "bucket"),
        )
        for bucket, milliseconds in stats.replay_milliseconds.items():
            replays.add_metric((*self._labels, bucket), milliseconds / 1000)
        yield replays
        text = (
            "Eager steps of choices on a server with graphs, by reason: a decoding parameter, or graph_window_blocks."
        )
        yield self._family("lopa:eager_steps", text, "reason", stats.eager_steps)

    def _family(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(name, text, labels=(*LABELS, label))
        for key, value in values.items():
            family.add_metric((*self._labels, key), value)
        return family

    def _gauges(self, *values: tuple[str, str, float]) -> Iterable[Metric]:
        for name, text, value in values:
            family = GaugeMetricFamily(name, text, labels=LABELS)
            family.add_metric(self._labels, value)
            yield family

    def _totals(self, *values: tuple[str, str, float]) -> Iterable[Metric]:
        for name, text, value in values:
            family = CounterMetricFamily(name, text, labels=LABELS)
            family.add_metric(self._labels, value)
            yield family
