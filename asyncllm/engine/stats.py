"""EngineStats: a frozen snapshot of what an engine holds and has done."""

from __future__ import annotations

from typing import Any

import msgspec

from asyncllm.engine.schedule.scheduler import Scheduler

__all__ = ["EngineStats", "scheduler_stats"]


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges are of this moment, totals since start."""

    running: int
    """Sequences with a row in the batch."""
    waiting: int
    """Sequences in the queue, preempted ones included."""
    swapped: int
    """Those of them whose KV lies in host memory."""
    queued_requests: int
    """Requests whose first sequence waits for a row, as `max_queued_requests` counts them."""
    queued_tokens: int
    """Tokens of the waiting sequences, as `max_queued_tokens` counts them."""
    sessions: int
    steps_in_flight: int
    blocks_total: int
    blocks_free: int
    """Blocks with no content."""
    blocks_cached: int
    """Cached blocks without a reference, which the prefix cache can still give; they count as available."""
    blocks_held: int
    """Blocks of running sequences, and those that steps in flight may still write."""
    host_blocks_total: int
    host_blocks_free: int
    host_blocks_cached: int
    """The same in host memory; they count as available there."""
    host_blocks_held: int
    """Blocks of swapped sequences, and those that steps in flight copy to or from."""
    blocks_swapped_out: int
    """Blocks copied to host memory, of preempted sequences and of the prefix cache."""
    blocks_swapped_in: int
    """Blocks copied back."""
    adapters_resident: int
    """LoRA adapters in a slot of the device."""
    adapters_running: int
    """Those that running sequences have."""
    adapter_uploads: int
    """Times that an adapter was brought up to the device."""
    steps: int
    steps_failed: int
    """Those that raised and took their rows with them."""
    prompt_tokens: int
    """Known tokens of admitted sequences."""
    cached_tokens: int
    """Those of them that the prefix cache had."""
    prefill_tokens: int
    """Tokens computed in prefill rows, recomputed ones included."""
    decode_tokens: int
    """Tokens computed in decode rows, the few discarded ones included."""
    sampled_tokens: int
    """Tokens of answers."""
    preemptions: int
    swap_fallbacks: int
    """Those of them that found too few host blocks, and so are computed again although eviction_type is 'copy'."""
    requests_started: int
    requests_finished: int
    requests_cancelled: int
    requests_failed: int
    requests_expired: int
    """Requests that ended at their deadline."""
    requests_refused: int
    """Calls that found the queue full; they were never started."""
    user_tokens: dict[str, int]
    """Prompt tokens computed and tokens generated in the last 60 s, by user; empty without quality of service."""
    sleep_level: int
    """1 or 2 from a sleep until everything is awake again, else 0."""
    weight_updates: int
    """Calls of `update_weights` that have replaced weights."""
    seconds_since_progress: float
    """How long there has been work and no step has completed; 0 when there is none, or while the model sleeps."""
    step_ms: float
    """Moving average over about 20 steps of a step's time on the device."""

    @property
    def prefix_hit_rate(self) -> float:
        """Fraction of prompt tokens that came from the prefix cache."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def scheduler_stats(scheduler: Scheduler, arrived: int) -> dict[str, Any]:
    """Return the fields of EngineStats that a scheduler knows; `arrived`: sequences that it has not been given yet."""
    blocks, host, counts = scheduler.blocks, scheduler.host, scheduler.counts
    return {
        "running": scheduler.num_running,
        "waiting": scheduler.num_waiting + arrived,
        "swapped": len(host.swapped),
        "blocks_total": blocks.num_blocks,
        "blocks_free": blocks.num_free,
        "blocks_cached": blocks.num_idle,
        "blocks_held": blocks.num_held,
        "host_blocks_total": host.blocks.num_blocks,
        "host_blocks_free": host.blocks.num_free,
        "host_blocks_cached": host.blocks.num_idle,
        "host_blocks_held": host.blocks.num_held,
        "blocks_swapped_out": host.num_swapped_out,
        "blocks_swapped_in": host.num_swapped_in,
        "adapters_resident": len(scheduler.adapters.resident),
        "adapters_running": scheduler.adapters.num_running,
        "adapter_uploads": scheduler.adapters.num_taken,
        "steps": counts.steps,
        "steps_failed": counts.failed_steps,
        "prompt_tokens": counts.prompt_tokens,
        "cached_tokens": counts.cached_tokens,
        "prefill_tokens": counts.prefill_tokens,
        "decode_tokens": counts.decode_tokens,
        "sampled_tokens": counts.sampled_tokens,
        "preemptions": counts.preemptions,
        "swap_fallbacks": host.num_fallbacks,
        "user_tokens": {} if scheduler.waiting.quality is None else scheduler.waiting.quality.used(),
    }
