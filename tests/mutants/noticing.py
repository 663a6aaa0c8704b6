"""Which tests should notice the faults of a file."""

from __future__ import annotations

__all__ = ["TESTS"]

# The quickest first.
SCHEDULER = (
    "test_scheduler test_prefill_budget test_preemption test_host_blocks test_prefix_cache test_embeddings "
    "test_record test_groups test_block_groups test_machine"
)
PREPARE = (
    "test_input_processor test_async_engine test_start test_literals "
    "test_template_options ../test_bad_input ../test_pipeline"
)
TESTS = {
    "engine/loop/engine_loop.py": "test_turns test_look_ahead test_async_engine test_lifecycle",
    "engine/loop/turns.py": "test_turns test_look_ahead test_async_engine test_lifecycle",
    "engine/schedule/scheduler.py": f"{SCHEDULER} test_session test_quality_of_service test_async_engine",
    "engine/schedule/sequence.py": (
        f"{SCHEDULER} test_session test_waiting_queue test_adapters test_quality_of_service test_async_engine"
    ),
    "engine/schedule/admission.py": f"{SCHEDULER} test_quality_of_service",
    "engine/cache/block_groups.py": f"{SCHEDULER} test_swapping",
    "engine/schedule/chunked_prefill.py": "test_prefill_budget test_machine",
    "engine/cache/prefix_sharing.py": f"{SCHEDULER} test_session test_waiting_queue",
    "engine/cache/host_blocks.py": "test_host_blocks test_machine",
    "engine/cache/block_manager.py": "test_block_manager test_scheduler test_host_blocks test_machine",
    "engine/cache/prefix_cache.py": "test_prefix_cache test_block_manager test_scheduler test_machine",
    "engine/schedule/waiting_queue.py": (
        "test_waiting_queue test_groups test_quality_of_service test_backpressure test_machine"
    ),
    "engine/sessions/history.py": "test_session test_machine",
    "engine/sessions/session_table.py": "test_session test_async_engine test_template_options test_machine",
    "engine/requests/input_processor.py": (
        f"{PREPARE} test_session test_machine test_embeddings test_long_prompts ../models/test_embedding_parity"
    ),
    "engine/requests/prompt_encoder.py": f"{PREPARE} test_session",
    "engine/requests/split_answer.py": PREPARE,
    "engine/requests/words.py": f"{PREPARE} test_long_prompts",
    "engine/schedule/backpressure.py": "test_backpressure test_machine",
    "text/detokenizer.py": "../text/test_detokenizer ../text/test_tokenizer test_async_engine",
}
"""File -> files of tests/engine that should notice what is wrong in it."""
