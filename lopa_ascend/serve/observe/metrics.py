"""/metrics: the names that vLLM's dashboards and benchmarks read, and ours.

A gap between tokens is the time between two updates of a request that made tokens visible, each of which can bring
many: divide by the tokens of an update, or read ``request_time_per_output_token_seconds``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lopa_ascend.serve.engine.client import EngineClient
from lopa_ascend.serve.observe.timeline import ChoiceTimeline, Timeline
from lopa_ascend.types import EngineStats, GraphStats, Update

LABELS = ("model_name", "engine")
ENGINE = "0"
SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
TOKENS_PER_FORWARD = (0.5, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)
FINISH_REASONS = ("stop", "length", "abort", "error")


class Metrics:
    """``observe_step`` is for ``EngineClient.observers``, ``observe_end`` for every request that reached the engine."""

    def __init__(self, client: EngineClient, model_name: str):
        self._labels = (model_name, ENGINE)
        self._registry = CollectorRegistry()
        self._registry.register(_EngineState(client, self._labels))
        self._prompt = self._counter("vllm:prompt_tokens", "Prompt tokens; counted when a request ends.")
        self._generated = self._counter("vllm:generation_tokens", "Visible tokens; counted when a request ends.")
        self._success = self._labelled("vllm:request_success", "Choices that ended, by reason.", "finished_reason")
        self._denoising = self._counter("vllm:diffusion_num_denoising_steps", "Forward passes, summed over requests.")
        self._committed = self._counter("vllm:diffusion_num_committed_tokens", "Tokens that became final.")
        self._canvas = self._counter(
            "vllm:diffusion_num_canvas_positions",
            "Positions of answers that were computed, in all branches and passes; counted when a request ends.",
        )
        self._wins = self._labelled("lopa:branch_wins", 'Passes won, by rank; "anchor": no lookahead.', "branch")
        self._iteration = self._histogram("vllm:iteration_tokens_total", "Tokens that became final in a step.", TOKENS)
        self._forward = self._histogram("lopa:forward_seconds", "Duration of a step of the engine.", SECONDS)
        self._tpf = self._histogram(
            "lopa:tokens_per_forward", "Visible tokens by forward passes of a finished choice.", TOKENS_PER_FORWARD
        )
        self._times = {name: self._histogram(f"vllm:{name}_seconds", text, SECONDS) for name, text in TIMES.items()}
        self._prompt_sizes = self._histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self._answer_sizes = self._histogram("vllm:request_generation_tokens", "Visible tokens of a choice.", TOKENS)
        self._steps_seen = client.stats.num_steps
        for reason in FINISH_REASONS:
            self._success.labels(*self._labels, reason)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def observe_step(self, updates: Sequence[Update], stats: EngineStats) -> None:
        if stats.num_steps == self._steps_seen:  # a heartbeat
            return
        self._steps_seen = stats.num_steps
        tokens = sum(len(update.token_ids) for update in updates)
        self._forward.observe(stats.forward_seconds)
        self._iteration.observe(tokens)
        self._committed.inc(tokens)
        for update in updates:
            if update.winner is not None:
                self._denoising.inc()
                self._wins.labels(*self._labels, str(update.winner or "anchor")).inc()

    def observe_end(self, timeline: Timeline, trouble: str | None) -> None:
        """``trouble``: the finish reason of choices without an output."""
        for choice in timeline.choices:
            self._observe_choice(choice, choice.finish_reason or trouble or "abort")

    def _observe_choice(self, choice: ChoiceTimeline, reason: str) -> None:
        self._success.labels(*self._labels, reason).inc()
        if choice.begun is None or choice.prefilled is None:
            return
        self._prompt.inc(choice.prompt_tokens)
        self._generated.inc(choice.num_text_tokens)
        self._canvas.inc(choice.canvas_positions)
        if choice.finish_reason is None:
            return
        self._prompt_sizes.observe(choice.prompt_tokens)
        self._answer_sizes.observe(choice.num_text_tokens)
        if choice.num_forwards:
            self._tpf.observe(choice.num_text_tokens / choice.num_forwards)
        for name, seconds in _durations(choice).items():
            self._times[name].observe(seconds)
        for gap in choice.gaps:
            self._times["inter_token_latency"].observe(gap)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, LABELS, registry=self._registry).labels(*self._labels)

    def _labelled(self, name: str, text: str, label: str) -> Counter:
        return Counter(name, text, (*LABELS, label), registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, LABELS, buckets=buckets, registry=self._registry).labels(*self._labels)


TIMES = {
    "time_to_first_token": "From a request's arrival to its first visible token.",
    "inter_token_latency": "Between two updates that made tokens visible.",
    "request_time_per_output_token": "Decoding time by visible tokens after the first pass.",
    "e2e_request_latency": "From a request's arrival to its end.",
    "request_queue_time": "From a request's arrival to the start of its first forward pass.",
    "request_prefill_time": "Of the first forward pass, which computes the prompt and the first block.",
    "request_decode_time": "From the end of the first forward pass to the end.",
    "request_inference_time": "From the start of the first forward pass to the end.",
}


def _durations(choice: ChoiceTimeline) -> dict[str, float]:
    assert choice.begun is not None
    assert choice.prefilled is not None
    assert choice.ended is not None
    end = choice.ended
    times = {
        "e2e_request_latency": end - choice.arrived,
        "request_queue_time": choice.begun - choice.arrived,
        "request_prefill_time": choice.prefilled - choice.begun,
        "request_decode_time": end - choice.prefilled,
        "request_inference_time": end - choice.begun,
    }
    if choice.first_token is not None:
        times["time_to_first_token"] = choice.first_token - choice.arrived
    if choice.num_text_tokens > 1:
        times["request_time_per_output_token"] = (end - choice.prefilled) / (choice.num_text_tokens - 1)
    return times


class _EngineState(Collector):
    """Read from the engine's latest stats whenever someone asks."""

    def __init__(self, client: EngineClient, labels: tuple[str, str]):
        self._client, self._labels = client, labels

    def collect(self) -> Iterable[Metric]:
        client, stats = self._client, self._client.stats
        usage = stats.pages_in_use / stats.num_pages if stats.num_pages else 0.0
        yield self._gauge("vllm:num_requests_running", "Choices that the engine has begun.", client.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Choices that wait for a seat.", client.num_waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of KV pages that requests hold; 1 is all.", usage)
        yield self._gauge("lopa:pages_in_use", "KV pages that requests hold.", stats.pages_in_use)
        yield self._gauge("lopa:pages_cached", "KV pages that the prefix cache alone holds.", stats.pages_cached)
        yield self._total("vllm:num_preemptions", "Always 0: a request that was begun is never put back.", 0)
        yield self._total("vllm:prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_queries)
        yield self._total("vllm:prefix_cache_hits", "Prompt tokens found.", stats.prefix_hits)
        yield self._total("lopa:gathered_bytes", "Keys and values that attention copied.", stats.gathered_bytes)
        yield self._total("lopa:copied_positions", "Positions copied between pages.", stats.copied_positions)
        yield self._total("lopa:branch_rows", "Branches evaluated, on all ranks.", stats.num_rows)
        yield self._total("lopa:idle_rows", "Branches that would have fitted in beside them.", stats.idle_rows)
        yield self._total("lopa:steps", "Steps of the engine, by which to divide what is counted.", stats.num_steps)
        yield self._by_purpose("lopa:collective_calls", "Collectives of rank 0.", [t.calls for t in stats.traffic])
        bytes_sent = [t.num_bytes for t in stats.traffic]
        yield self._by_purpose("lopa:collective_bytes", "Bytes that rank 0 contributed to them.", bytes_sent)
        if stats.graphs is not None:
            yield from self._graphs(stats.graphs)

    def _graphs(self, stats: GraphStats) -> Iterable[Metric]:
        yield self._gauge("lopa:graphs", "Compiled buckets.", stats.num_buckets)
        late = "Compilations after the start, which are refused: always 0, or something is wrong."
        yield self._total("lopa:late_compilations", late, stats.num_late)
        yield self._total("lopa:graph_steps", "Launches of graphs.", stats.num_steps)
        yield self._total("lopa:graph_tokens", "Positions that graphs computed.", stats.tokens)
        yield self._total("lopa:graph_padded_tokens", "Of these what no branch needed.", stats.padded_tokens)
        wasted = "Steps that graphs computed for choices that had ended."
        yield self._total("lopa:graph_wasted_steps", wasted, stats.wasted_steps)
        text = "Steps of choices without a graph, by the field that no graph can do."
        yield self._labelled("lopa:eager_steps", text, "reason", stats.eager_steps)

    def _by_purpose(self, name: str, text: str, values: Sequence[float]) -> Metric:
        purposes = (traffic.purpose for traffic in self._client.stats.traffic)
        return self._labelled(name, text, "purpose", dict(zip(purposes, values, strict=True)))

    def _labelled(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(name, text, labels=(*LABELS, label))
        for key, value in values.items():
            family.add_metric((*self._labels, key), value)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _total(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family
