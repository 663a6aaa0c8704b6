"""GET /metrics, read back by prometheus-client's own parser."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from asyncllm.config import EngineConfig
from asyncllm.server.http.errors import ApiError
from asyncllm.server.routes import ROUTES
from asyncllm.testing import FakeEngine
from tests.engine.waits import settle, until
from tests.server.serving import Served, serving

pytestmark = pytest.mark.anyio

PING: list[Any] = [{"role": "user", "content": "ping"}]

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


async def scrape(served: Served, **options: Any) -> Series:
    """Every series by its name and sorted labels, `model_name` left out."""
    async with served.http.get(f"{served.url}/metrics", **options) as response:
        assert response.status == 200
        assert response.content_type == "text/plain"
        text = await response.text()
    return {
        (sample.name, tuple(sorted((name, value) for name, value in sample.labels.items() if name != "model_name"))): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(series: Series, name: str, **labels: str) -> float:
    return series[f"asyncllm:{name}", tuple(sorted(labels.items()))]


async def test_requests_are_counted_with_their_tokens_times_and_reasons() -> None:
    async with serving(FakeEngine({"ping": "pong"}, delay_per_token=0.002)) as served:
        before = await scrape(served)
        body = {"messages": PING, "n": 2}
        assert (await served.post("/v1/chat/completions", body))[0] == 200
        async with served.http.post(
            f"{served.url}/v1/chat/completions", json={"messages": PING, "stream": True, "max_tokens": 3}
        ) as response:
            await response.read()
        async with served.openai() as client:
            usage = (await client.completions.create(model="fake", prompt="ping", max_tokens=1)).usage
        after = await scrape(served)
        stats = served.engine.stats()
    assert usage is not None
    assert value(before, "request_success_total", finished_reason="stop") == 0
    assert value(after, "request_success_total", finished_reason="stop") == 2
    assert value(after, "request_success_total", finished_reason="length") == 2
    assert value(after, "generation_tokens_total") == 2 * 5 + 3 + 1 == stats.sampled_tokens
    assert value(after, "prompt_tokens_total") == stats.prompt_tokens
    assert value(after, "prefix_cache_hits_total") == stats.cached_tokens > 0
    assert value(after, "request_prompt_tokens_count") == 3
    assert value(after, "request_generation_tokens_sum") == 14
    for name in ("time_to_first_token_seconds", "request_queue_time_seconds", "request_prefill_time_seconds"):
        assert value(after, f"{name}_count") == 3
    assert value(after, "request_time_per_output_token_seconds_count") == 2  # one token has no time between two
    assert value(after, "request_prefill_time_seconds_sum") > 0
    parts = sum(value(after, f"request_{part}_time_seconds_sum") for part in ("queue", "prefill", "decode"))
    whole = value(after, "e2e_request_latency_seconds_sum")
    assert parts <= whole < parts + 1
    assert value(after, "time_to_first_token_seconds_sum") < whole
    assert value(after, "engine_up") == 1
    assert ("process_resident_memory_bytes", ()) in after
    answered = {"method": "POST", "route": "/v1/chat/completions", "status": "200"}
    assert value(after, "http_requests_total", **answered) == 2


async def test_gauges_are_of_the_moment_and_a_client_that_leaves_is_an_abort() -> None:
    engine = FakeEngine("x" * 100, EngineConfig(max_batch_size=1))
    async with serving(engine) as served:
        engine.executor.pause()
        asking = [asyncio.create_task(served.post("/v1/chat/completions", {"messages": PING})) for _ in range(2)]
        await until(lambda: engine.stats().running + engine.stats().waiting == 2)
        busy = await scrape(served)
        for each in asking:
            each.cancel()
        await asyncio.wait(asking)
        engine.executor.resume()
        await served.service.state.idle.wait()
        await settle(engine)
        idle = await scrape(served)
    assert (value(busy, "num_requests_running"), value(busy, "num_requests_waiting")) == (1, 1)
    assert value(busy, "kv_cache_usage_perc") > 0
    assert value(busy, "seconds_since_progress") > 0
    assert (value(idle, "num_requests_running"), value(idle, "num_requests_waiting")) == (0, 0)
    assert value(idle, "seconds_since_progress") == 0
    assert value(idle, "request_success_total", finished_reason="abort") == 2
    left = {"method": "POST", "route": "/v1/chat/completions", "status": "499"}
    assert value(idle, "http_requests_total", **left) == 2


async def test_what_waits_in_host_memory() -> None:
    config = EngineConfig(max_batch_size=4, eviction_type="copy", enable_prefix_caching=False)
    engine = FakeEngine("x" * 100, config, num_blocks=12, block_size=8, num_host_blocks=12)
    async with serving(engine) as served:
        asking = [asyncio.create_task(served.post("/v1/chat/completions", {"messages": PING})) for _ in range(4)]
        await until(lambda: engine.stats().swapped)
        busy = await scrape(served)
        await asyncio.wait(asking)
        await settle(engine)
        idle, stats = await scrape(served), engine.stats()
    assert value(busy, "num_requests_swapped") >= 1
    assert 0 < value(busy, "cpu_cache_usage_perc") <= 1
    assert value(idle, "num_requests_swapped") == value(idle, "cpu_cache_usage_perc") == value(idle, "sleep_level") == 0
    assert value(idle, "blocks_swapped_out_total") == stats.blocks_swapped_out > 0
    assert value(idle, "blocks_swapped_in_total") == stats.blocks_swapped_in > 0
    assert value(idle, "swap_fallbacks_total") == stats.swap_fallbacks


async def test_adapters_on_the_device() -> None:
    config = EngineConfig(adapters={"a": "somewhere", "b": "somewhere"}, max_loras=1)
    engine = FakeEngine("x" * 20, config)
    async with serving(engine) as served:
        for model in ("a", "b", "a"):
            status, _ = await served.post("/v1/chat/completions", {"model": model, "messages": PING})
            assert status == 200
        await settle(engine)
        found = await scrape(served)
    assert value(found, "num_adapters_resident") == 1
    assert value(found, "num_adapters_running") == 0
    assert value(found, "adapter_uploads_total") == 3


async def test_what_clients_make_up_adds_no_series() -> None:
    async with serving(FakeEngine()) as served:

        async def disturb(count: int) -> None:
            for start in range(0, count, 50):
                await asyncio.gather(*(disturb_once(number) for number in range(start, start + 50)))

        async def disturb_once(number: int) -> None:
            name = f"model-{number}"
            status, _ = await served.post("/v1/chat/completions", {"model": name, "messages": PING})
            assert status == 404
            if number < 100:
                assert (await served.get(f"/v1/models/{name}"))[0] == 404
                assert (await served.get(f"/{name}"))[0] == 404
                method = ("DELETE", "PUT", "PATCH", "TRACE")[number % 4]
                async with served.http.request(method, f"{served.url}/health?model-{number}") as response:
                    assert response.status == 405

        await disturb(100)
        await scrape(served)
        before = await scrape(served)
        await disturb(2000)
        after = await scrape(served)
    assert set(after) == set(before)
    assert not any("model-" in str(key) or "TRACE" in str(key) for key in after)
    known = {route.path for route in ROUTES} | {"other"}
    assert {dict(labels)["route"] for name, labels in after if name == "asyncllm:http_requests_total"} <= known


async def test_a_full_server_and_a_dead_engine_are_still_measured() -> None:
    async with serving(FakeEngine(fail_at=0), max_concurrent_requests=1) as served:
        with served.service.state.work():
            with pytest.raises(ApiError), served.service.state.work():
                pass
            assert value(await scrape(served), "engine_up") == 1
        assert (await served.post("/v1/chat/completions", {"messages": PING}))[0] == 503
        dead = await scrape(served)
    assert value(dead, "engine_up") == 0
    assert value(dead, "request_success_total", finished_reason="error") == 1
    assert ("asyncllm:num_requests_running", ()) not in dead


async def test_numbers_need_a_key_and_can_be_switched_off() -> None:
    async with serving(FakeEngine(), api_keys=["secret"]) as served:
        assert (await served.get("/metrics"))[0] == 401
        await scrape(served, headers={"Authorization": "Bearer secret"})
    async with serving(FakeEngine(), disable_metrics=True) as served:
        assert (await served.get("/metrics"))[0] == 404
        assert (await served.post("/v1/chat/completions", {"messages": PING}))[0] == 200


async def test_two_services_do_not_mix() -> None:
    async with serving(FakeEngine()) as first, serving(FakeEngine()) as second:
        await first.post("/v1/chat/completions", {"messages": PING})
        assert value(await scrape(first), "request_prompt_tokens_count") == 1
        assert value(await scrape(second), "request_prompt_tokens_count") == 0


async def test_openmetrics_is_given_to_who_accepts_it() -> None:
    async with (
        serving(FakeEngine()) as served,
        served.http.get(f"{served.url}/metrics", headers={"Accept": "application/openmetrics-text"}) as response,
    ):
        assert response.content_type == "application/openmetrics-text"
        assert (await response.text()).endswith("# EOF\n")


async def test_the_lag_of_the_loop_is_noticed() -> None:
    async with serving(FakeEngine()) as served:
        await asyncio.sleep(1.2)
        lag = await scrape(served)
    assert value(lag, "event_loop_lag_seconds_count") >= 1
    assert 0 <= value(lag, "event_loop_lag_seconds_sum") < 2
