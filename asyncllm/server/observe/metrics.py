"""Instruments: the metrics of one service, for Prometheus. They have vLLM's names where it has them, with our prefix.

    asyncllm:num_requests_running ...         the engine's own numbers, read at each scrape
    asyncllm:time_to_first_token_seconds ...  once per request, when it ends, including the program's own requests
    asyncllm:http_requests_total ...          once per HTTP request, when it has been answered
    asyncllm:event_loop_lag_seconds           twice a second
    process_cpu_seconds_total ...             this process

Labels take their values from fixed sets (the served model, the route table, statuses, finish reasons), never from
client input, so that clients cannot make the number of series grow.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from asyncllm.engine.stats import EngineStats
from asyncllm.errors import EngineError
from asyncllm.server.supervisor import Supervisor
from asyncllm.types import FinishReason, RequestRecord

__all__ = ["Instruments", "LoopLag"]

PREFIX = "asyncllm:"

Reading = tuple[str, str, Callable[[EngineStats], float]]
"""(name, help, function that reads the value)."""

GAUGES: tuple[Reading, ...] = (
    ("num_requests_running", "Sequences with a row in the batch.", lambda stats: stats.running),
    ("num_requests_waiting", "Sequences in the queue, preempted ones included.", lambda stats: stats.waiting),
    ("num_requests_swapped", "Waiting sequences whose KV blocks are in host memory.", lambda stats: stats.swapped),
    ("num_sessions", "Open sessions.", lambda stats: stats.sessions),
    (
        "kv_cache_usage_perc",
        "Fraction of the KV blocks that running sequences hold, from 0 to 1.",
        lambda stats: stats.blocks_held / stats.blocks_total if stats.blocks_total else 0.0,
    ),
    (
        "cpu_cache_usage_perc",
        "Fraction of the KV blocks in host memory that swapped sequences hold, from 0 to 1.",
        lambda stats: stats.host_blocks_held / stats.host_blocks_total if stats.host_blocks_total else 0.0,
    ),
    ("num_adapters_resident", "LoRA adapters in a slot of the device.", lambda stats: stats.adapters_resident),
    ("num_adapters_in_host_memory", "LoRA adapters in host memory.", lambda stats: stats.adapters_in_host_memory),
    ("num_adapters_running", "LoRA adapters that running sequences use.", lambda stats: stats.adapters_running),
    ("sleep_level", "Sleep level of the model, 1 or 2; 0 if it is awake.", lambda stats: stats.sleep_level),
    (
        "seconds_since_progress",
        "Seconds since the last step completed while there is work; 0 without work.",
        lambda stats: stats.seconds_since_progress,
    ),
)

COUNTERS: tuple[Reading, ...] = (
    (
        "prompt_tokens",
        "Prompt tokens admitted to the batch, including cached ones, and again after a preemption.",
        lambda stats: stats.prompt_tokens,
    ),
    ("generation_tokens", "Generated tokens.", lambda stats: stats.sampled_tokens),
    ("prefix_cache_queries", "Tokens looked up in the prefix cache.", lambda stats: stats.prompt_tokens),
    ("prefix_cache_hits", "Tokens found in the prefix cache.", lambda stats: stats.cached_tokens),
    ("computed_prompt_tokens", "Tokens computed in prefill rows.", lambda stats: stats.prefill_tokens),
    ("steps", "Steps launched.", lambda stats: stats.steps),
    ("steps_failed", "Steps that failed, with their requests.", lambda stats: stats.steps_failed),
    ("num_preemptions", "Preemptions of running sequences.", lambda stats: stats.preemptions),
    ("blocks_swapped_out", "KV blocks copied to host memory.", lambda stats: stats.blocks_swapped_out),
    ("blocks_swapped_in", "KV blocks copied back to the device.", lambda stats: stats.blocks_swapped_in),
    (
        "swap_fallbacks",
        "Preempted sequences that are recomputed because host memory had too few free blocks.",
        lambda stats: stats.swap_fallbacks,
    ),
    ("adapter_reads", "Reads of an adapter from its folder.", lambda stats: stats.adapter_reads),
    ("adapter_uploads", "Uploads of an adapter to the device.", lambda stats: stats.adapter_uploads),
    ("requests_refused", "Calls refused because the queue was full.", lambda stats: stats.requests_refused),
    ("requests_expired", "Requests that ended at their deadline.", lambda stats: stats.requests_expired),
)


def _decades(first: int, last: int) -> tuple[float, ...]:
    """Return the bounds of buckets: 1, 2.5 and 5 times each power of ten, and the end of the last decade."""
    return (*(float(f"{step}e{power}") for power in range(first, last) for step in (1, 2.5, 5)), float(f"1e{last}"))


SECONDS = _decades(-3, 3)
SHORT_SECONDS = _decades(-4, 1)
TOKENS = _decades(0, 6)


class _EngineReadings(Collector):
    """The engine's own numbers at each scrape."""

    def __init__(self, model_name: str) -> None:
        self.stats: EngineStats | None = None
        """Set before each scrape. None: the engine is not running."""
        self.num_restarts = 0
        """Set before each scrape."""
        self._model_name = model_name

    def describe(self) -> Iterator[Metric]:
        """Yield nothing. Otherwise prometheus-client would collect to learn the names before there are any numbers."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily(f"{PREFIX}engine_up", "1 while the engine runs, otherwise 0.", labels=["model_name"])
        up.add_metric([self._model_name], float(self.stats is not None))
        yield up
        restarts = CounterMetricFamily(
            f"{PREFIX}engine_restarts", "Engines started to replace one that died.", labels=["model_name"]
        )
        restarts.add_metric([self._model_name], self.num_restarts)
        yield restarts
        if self.stats is None:
            return
        for readings, family in ((GAUGES, GaugeMetricFamily), (COUNTERS, CounterMetricFamily)):
            for name, text, read in readings:
                metric = family(PREFIX + name, text, labels=["model_name"])
                metric.add_metric([self._model_name], read(self.stats))
                yield metric


class Instruments:
    """One registry per service, so that services in one process stay apart. The event loop writes it, a thread reads
    it."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        engine = supervisor.engine
        self._registry = CollectorRegistry()
        self._readings = _EngineReadings(engine.model_name)
        self._registry.register(self._readings)
        ProcessCollector(registry=self._registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
            made = Histogram(PREFIX + name, text, ["model_name"], registry=self._registry, buckets=buckets)
            return made.labels(engine.model_name)

        self._first_token = histogram(
            "time_to_first_token_seconds", "From the call, before its prompt is encoded, to its first token."
        )
        self._per_token = histogram(
            "request_time_per_output_token_seconds",
            "Mean time between two tokens of a request's longest answer.",
            SHORT_SECONDS,
        )
        self._whole = histogram("e2e_request_latency_seconds", "From the call to the end of all its answers.")
        self._queue = histogram("request_queue_time_seconds", "From the end of encoding to a row in the batch.")
        self._prefill = histogram("request_prefill_time_seconds", "From a row in the batch to the first token.")
        self._decode = histogram("request_decode_time_seconds", "From the first token to the end of all answers.")
        self._prompt_tokens = histogram("request_prompt_tokens", "Tokens of the prompt, including history.", TOKENS)
        self._cached_tokens = histogram(
            "request_cached_tokens", "Tokens of the prompt found in the prefix cache.", TOKENS
        )
        self._generation_tokens = histogram("request_generation_tokens", "Tokens of all answers to a prompt.", TOKENS)
        answers = Counter(
            f"{PREFIX}request_success",
            "Answers that have ended, by finish_reason; a request with n answers counts n times.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._answers = {reason: answers.labels(engine.model_name, reason) for reason in get_args(FinishReason)}
        self._http_requests = Counter(
            f"{PREFIX}http_requests",
            "HTTP requests by final status: 499 if the client left, that of the error if a stream failed.",
            ["method", "route", "status"],
            registry=self._registry,
        )
        self._http_seconds = Histogram(
            f"{PREFIX}http_request_duration_seconds",
            "From a request's headers to the last byte of its answer.",
            ["route"],
            registry=self._registry,
            buckets=SECONDS,
        )
        loop_lag = Histogram(
            f"{PREFIX}event_loop_lag_seconds",
            "Delay of a timer in the event loop, measured twice a second.",
            registry=self._registry,
            buckets=SHORT_SECONDS,
        )
        self._lag = LoopLag(loop_lag.observe)
        # Writing the text takes a few milliseconds and reads files in /proc.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="asyncllm-metrics")

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure in the running event loop while the block runs. May be entered once."""
        self._supervisor.engine.observers.append(self._ended)
        self._lag.start()
        try:
            yield
        finally:
            self._lag.stop()
            self._supervisor.engine.observers.remove(self._ended)
            self._thread.shutdown(wait=False)

    def _ended(self, record: RequestRecord) -> None:
        """Record a finished request."""
        for reason in record.finish_reasons:
            self._answers[reason].inc()
        self._whole.observe(record.ended - record.arrived)
        self._prompt_tokens.observe(record.prompt_tokens)
        self._generation_tokens.observe(record.generated_tokens)
        if record.admitted is None:
            return
        self._queue.observe(record.admitted - record.queued)
        self._cached_tokens.observe(record.cached_tokens)
        if record.prefilled is None:
            return
        self._prefill.observe(record.prefilled - record.admitted)
        if record.generated_tokens:
            self._first_token.observe(record.prefilled - record.arrived)
            self._decode.observe(record.ended - record.prefilled)
        if record.longest_answer > 1:
            self._per_token.observe((record.ended - record.prefilled) / (record.longest_answer - 1))

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Record an HTTP request. `method` and `route` come from the route table or stand for all others."""
        self._http_requests.labels(method, route, status).inc()
        self._http_seconds.labels(route).observe(seconds)

    async def scrape(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics in the format that the Accept header asks for, and the content type."""
        try:
            stats = self._supervisor.engine.stats()
        except EngineError:
            stats = None
        encode, content_type = choose_encoder(accept)

        def write() -> bytes:
            self._readings.stats = stats
            self._readings.num_restarts = self._supervisor.num_restarts
            return encode(self._registry)

        return await asyncio.get_running_loop().run_in_executor(self._thread, write), content_type


INTERVAL_S = 0.5


class LoopLag:
    """Measures how late timers run, one at a time. Written by the event loop."""

    def __init__(self, report: Callable[[float], None]) -> None:
        """`report` gets the seconds by which each timer was late."""
        self._report = report
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start in the running event loop."""
        self._due = time.monotonic() + INTERVAL_S
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._went_off)

    def stop(self) -> None:
        """Stop, and leave nothing scheduled in the event loop."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _went_off(self) -> None:
        # uvloop rounds to whole milliseconds, so a timer may be early.
        self._report(max(0.0, time.monotonic() - self._due))
        self.start()
