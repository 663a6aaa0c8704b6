"""EngineStats: a frozen snapshot of an engine's contents and totals."""

from __future__ import annotations

from typing import Any

import msgspec

from asyncllm.engine.schedule.scheduler import Scheduler

__all__ = ["EngineStats", "scheduler_stats"]


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's current contents, and totals since its start."""

    running: int
    """Sequences with a row in the batch."""
    waiting: int
    """Sequences in the queue, preempted ones included."""
    swapped: int
    """Waiting sequences whose keys and values are in host memory."""
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
    """Cached blocks without a reference, which are also available."""
    blocks_held: int
    """Blocks of running sequences, and those that steps in flight may still write."""
    host_blocks_total: int
    host_blocks_free: int
    host_blocks_cached: int
    """Cached blocks without a reference in host memory, which are also available there."""
    host_blocks_held: int
    """Blocks of swapped sequences, and those that steps in flight copy to or from."""
    blocks_swapped_out: int
    """Blocks copied to host memory, of preempted sequences and of the prefix cache."""
    blocks_swapped_in: int
    """Blocks copied back to the device."""
    adapters_resident: int
    """LoRA adapters in a slot on the device."""
    adapters_in_host_memory: int
    """LoRA adapters that can be uploaded without being read from disk."""
    adapter_reads: int
    """Adapters read from their folders since the start."""
    adapters_running: int
    """LoRA adapters that running sequences use."""
    adapter_uploads: int
    """Copies of adapters to the device."""
    steps: int
    steps_failed: int
    """Steps that raised and ended their rows."""
    prompt_tokens: int
    """Known tokens of admitted sequences."""
    cached_tokens: int
    """How many of these were found in the prefix cache."""
    prefill_tokens: int
    """Tokens computed in prefill rows, including recomputed ones."""
    decode_tokens: int
    """Tokens computed in decode rows, including the few that were discarded."""
    sampled_tokens: int
    """Generated tokens."""
    preemptions: int
    swap_fallbacks: int
    """Preemptions with eviction_type='copy' for which there were too few host blocks, so that the sequence is
    recomputed."""
    requests_started: int
    requests_finished: int
    requests_cancelled: int
    requests_failed: int
    requests_expired: int
    """Requests that ended at their deadline."""
    requests_refused: int
    """Requests that were refused because the queue was full. They do not count as started."""
    user_tokens: dict[str, int]
    """Prompt tokens computed and tokens generated in the last 60 s, by user; empty without quality of service."""
    sleep_level: int
    """The level of `sleep` (1 or 2) until everything is awake again, then 0."""
    weight_updates: int
    """Calls of `update_weights` that have replaced weights."""
    seconds_since_progress: float
    """Seconds of work without a completed step; 0 without work, and while the model sleeps."""
    step_ms: float
    """Moving average over about 20 steps of the time of a step on the device, in milliseconds."""

    @property
    def prefix_hit_rate(self) -> float:
        """Fraction of prompt tokens that came from the prefix cache."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def scheduler_stats(scheduler: Scheduler, arrived: int) -> dict[str, Any]:
    """Return the fields of EngineStats that the scheduler knows. `arrived`: sequences not yet passed to it."""
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
