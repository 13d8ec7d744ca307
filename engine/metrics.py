"""Prometheus metrics: vLLM's names where the meaning is the same, `pagetier_*` with label `tier` for the rest.

Owns one registry of its own. Latencies are observed as requests end; the engine's counters are read from one `stats`
answer per scrape, so that a scrape shows the same figures as GET /stats.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

TTFT_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
GAP_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40)
E2E_BUCKETS_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
BREAKER_STATES = {None: 0, "closed": 0, "half-open": 1, "open": 2}


class ServerMetrics:
    """What the API process observes itself. owner: event loop thread."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._engine = _EngineCollector(model)
        self.registry.register(self._engine)
        self._ttft = self._histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token", TTFT_BUCKETS_S, model
        )
        self._gaps = self._histogram("vllm:inter_token_latency_seconds", "Between outputs", GAP_BUCKETS_S, model)
        self._e2e = self._histogram("vllm:e2e_request_latency_seconds", "Arrival to end", E2E_BUCKETS_S, model)
        self._prompt_sizes = self._histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a request", TOKEN_BUCKETS, model
        )
        self._output_sizes = self._histogram(
            "vllm:request_generation_tokens", "Generated tokens of a request", TOKEN_BUCKETS, model
        )
        self._prompt = self._counter("vllm:prompt_tokens", "Prompt tokens of ended requests", model)
        self._generated = self._counter("vllm:generation_tokens", "Generated tokens of ended requests", model)
        self._ended = Counter(
            "vllm:request_success",
            "Choices by how they ended",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._http = Counter(
            "pagetier_http_responses", "HTTP answers by route and status", ["path", "status"], registry=self.registry
        )
        self._model = model

    def request_ended(
        self,
        *,
        arrival_s: float,
        first_token_s: float | None,
        end_s: float,
        gaps_s: Iterable[float],
        prompt_tokens: int,
        completion_tokens: int,
        finish_reasons: Iterable[str],
    ) -> None:
        """Account for one API request. Times are monotonic seconds."""
        if first_token_s is not None:
            self._ttft.observe(first_token_s - arrival_s)
        for gap_s in gaps_s:
            self._gaps.observe(gap_s)
        self._e2e.observe(end_s - arrival_s)
        self._prompt_sizes.observe(prompt_tokens)
        self._output_sizes.observe(completion_tokens)
        self._prompt.inc(prompt_tokens)
        self._generated.inc(completion_tokens)
        for reason in finish_reasons:
            self._ended.labels(self._model, reason).inc()

    def answered(self, path: str, status: int) -> None:
        self._http.labels(path, str(status)).inc()

    def scrape(self, stats: Mapping[str, Any] | None) -> bytes:
        """The exposition text, with the engine's counters when it answered."""
        self._engine.stats = stats
        return generate_latest(self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], model: str) -> Histogram:
        return Histogram(name, text, ["model_name"], buckets=buckets, registry=self.registry).labels(model)

    def _counter(self, name: str, text: str, model: str) -> Counter:
        return Counter(name, text, ["model_name"], registry=self.registry).labels(model)


def _cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Prometheus's buckets: how many were at most so much."""
    ends = [*(str(float(bound)) for bound in bounds), "+Inf"]
    return list(zip(ends, map(float, accumulate(counts)), strict=True))


class _EngineCollector(Collector):
    """The core's `stats` as metrics; nothing while the engine does not answer."""

    def __init__(self, model: str) -> None:
        self._model, self._block_size = model, 0
        self.stats: Mapping[str, Any] | None = None

    def collect(self) -> Iterable[Metric]:
        if self.stats is None:
            return
        self._block_size = self.stats["block_size"]
        yield from self._requests(self.stats.get("requests", {}))
        yield from self._waiting(self.stats["waiting"])
        yield from self._lookups(self.stats["lookup"])
        yield from self._preemptions(self.stats["preemptions"], self.stats["resumptions"])
        yield from self._tiers(self.stats["tiers"])
        yield from self._verify(self.stats["verify"])
        yield from self._residency(self.stats["residency"])
        yield self._count("pagetier_harmful_hits", "Loads slower than recompute", self.stats["harmful_hits"])
        yield self._count("pagetier_given_up_loads", "Loads without an answer in time", self.stats["given_up_loads"])

    def _requests(self, requests: Mapping[str, int]) -> Iterable[Metric]:
        waiting = requests.get("waiting", 0) + requests.get("loading", 0)
        yield self._gauge("vllm:num_requests_running", "Sequences in the running batch", requests.get("running", 0))
        yield self._gauge("vllm:num_requests_waiting", "Sequences queued or loading their prefix", waiting)

    def _waiting(self, waiting: Mapping[str, int]) -> Iterable[Metric]:
        yield self._gauge("vllm:num_requests_swapped", "Sequences swapped out to lower tiers", waiting["swapped"])
        by_reason = GaugeMetricFamily("pagetier_requests_waiting", "Sequences by what they wait for", labels=["reason"])
        for reason, count in waiting.items():
            by_reason.add_metric([reason], count)
        yield by_reason

    def _lookups(self, lookup: Mapping[str, Any]) -> Iterable[Metric]:
        yield self._count("vllm:prefix_cache_queries", "Prompt tokens looked up", lookup["lookup_tokens"])
        yield self._count("vllm:prefix_cache_hits", "Prompt tokens served by any tier", lookup["hit_tokens"])

    def _preemptions(self, preemptions: Mapping[str, int], resumptions: Mapping[str, int]) -> Iterable[Metric]:
        yield self._count("vllm:num_preemptions", "Preemptions of any kind", sum(preemptions.values()))
        by_mode = CounterMetricFamily("pagetier_preemptions", "Preemptions by mode", labels=["mode"])
        for mode, count in preemptions.items():
            by_mode.add_metric([mode], count)
        yield by_mode
        yield self._count(
            "pagetier_recomputed_tokens",
            "Tokens computed again after a preemption",
            resumptions["recomputed_tokens"],
        )
        swapped = CounterMetricFamily("pagetier_swapped_bytes", "KV bytes of preempted sequences", labels=["direction"])
        for direction in ("out", "in"):
            swapped.add_metric([direction], resumptions[f"swapped_{direction}_bytes"])
        yield swapped

    def _verify(self, verify: Mapping[str, int]) -> Iterable[Metric]:
        for name, field, text in (
            ("pagetier_shadow_checked_blocks", "checked", "Loaded blocks that were computed anew and compared"),
            ("pagetier_shadow_differing_blocks", "differing", "Those that were not what was loaded"),
            ("pagetier_shadow_skipped_blocks", "skipped", "Those chosen for it when no block was free"),
        ):
            yield self._count(name, text, verify[field])

    def _tiers(self, tiers: Mapping[str, Mapping[str, Any]]) -> Iterable[Metric]:
        device = tiers.get("device", {})
        capacity = device.get("capacity_blocks", 0)
        usage = device.get("referenced_blocks", 0) / capacity if capacity else 0.0
        config = GaugeMetricFamily(
            "vllm:cache_config_info", "What the device pool is made of", labels=["block_size", "num_gpu_blocks"]
        )
        config.add_metric([str(self._block_size), str(capacity)], 1)
        yield config
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the device pool that requests hold, 0 to 1", usage)
        for name, field, text in (
            ("pagetier_tier_hit_tokens", "hit_tokens", "Prompt tokens served by the tier"),
            ("pagetier_tier_hit_blocks", "hit_blocks", "Blocks served by the tier"),
            ("pagetier_tier_evictions", "evictions", "Blocks evicted"),
            ("pagetier_tier_errors", "errors", "Failed operations"),
            ("pagetier_tier_corrupt", "corrupt", "Entries that did not verify"),
            ("pagetier_tier_quarantined", "quarantined", "Damaged entries kept for a look"),
            ("pagetier_tier_scrubbed_bytes", "scrubbed_bytes", "Bytes re-read only to check them"),
            ("pagetier_tier_read_bytes", "read_bytes", "Bytes of blocks read from it"),
            ("pagetier_tier_written_bytes", "written_bytes", "Bytes of blocks written to it"),
            ("pagetier_tier_dropped_puts", "dropped_puts", "Blocks not written, because too many waited"),
            ("pagetier_tier_warmed_blocks", "warmed_blocks", "Blocks that warm-up brought after the start"),
        ):
            counter = CounterMetricFamily(name, text, labels=["tier"])
            for tier, values in tiers.items():
                counter.add_metric([tier], values.get(field, 0))
            yield counter
        for name, field, text in (
            ("pagetier_tier_blocks", "blocks", "Blocks held"),
            ("pagetier_tier_bytes", "bytes", "Bytes held"),
            ("pagetier_tier_capacity_bytes", "capacity_bytes", "Bytes it may hold"),
            ("pagetier_tier_queued_put_bytes", "queued_put_bytes", "Bytes that wait to be written"),
            ("pagetier_tier_hit_rate", "hit_rate", "Its hit tokens over all lookup tokens"),
        ):
            gauge = GaugeMetricFamily(name, text, labels=["tier"])
            for tier, values in tiers.items():
                gauge.add_metric([tier], values.get(field, 0))
            yield gauge
        for name, field, text in (
            ("pagetier_tier_block_lifetime_seconds", "lifetime", "From being stored to leaving the tier"),
            ("pagetier_tier_block_idle_before_evict_seconds", "idle_before_evict", "From the last use to leaving it"),
            ("pagetier_tier_block_reuse_gap_seconds", "reuse_gap", "From the last use to a load from it"),
        ):
            histogram = HistogramMetricFamily(name, text, labels=["tier"])
            for tier, values in tiers.items():
                if "residency" in values:
                    told = values["residency"][field]
                    histogram.add_metric([tier], _cumulative(told["bounds"], told["counts"]), told["sum"])
            yield histogram
        breaker = GaugeMetricFamily("pagetier_tier_breaker", "0 closed, 1 half open, 2 open", labels=["tier"])
        for tier, values in tiers.items():
            breaker.add_metric([tier], BREAKER_STATES.get(values.get("breaker"), 2))
        yield breaker

    def _residency(self, residency: Mapping[str, Any]) -> Iterable[Metric]:
        for field, text in (
            ("lifetime", "From entering the device pool's index to leaving it"),
            ("idle_before_evict", "From a device block's last use to its leaving"),
            ("reuse_gap", "Between two uses of a device block"),
        ):
            told = residency[field]
            family = HistogramMetricFamily(f"vllm:kv_block_{field}_seconds", text, labels=["model_name"])
            family.add_metric([self._model], _cumulative(told["bounds"], told["counts"]), told["sum"])
            yield family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _count(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family
