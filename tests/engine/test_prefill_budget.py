"""How many prompt tokens a step computes: whole tiles, and room for the rows that decode."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from asyncllm.engine.requests.delivery import Delivery
from asyncllm.engine.schedule.sequence import Request, SequenceState
from asyncllm.prompt_image import PromptImage
from tests.engine.driver import Driver, chunk_sizes, expected_answer

PROMPT = [1, 2, 3, 4, 5, 6, 7, 0, 1, 2]


@pytest.mark.parametrize(
    ("decoding", "others", "taken"), [(3, 0, 10), (3, 1, 9), (3, 3, 9), (4, 0, 8), (4, 3, 8), (2, 0, 10), (2, 3, 10)]
)
def test_big_steps_that_decode_end_at_a_whole_tile(decoding: int, others: int, taken: int) -> None:
    """A device of tiles of 4 tokens: 3 decode rows and a prompt of 10 tokens are 13, one more than three tiles. The
    prompt is cut if more than three others gain a quarter of the step each."""
    driver = Driver(max_batch_size=decoding + 1, budget=16, caching=False, token_tile=4)
    running = [driver.submit([index], 30) for index in range(decoding)]
    driver.turn(1)
    request = driver.submit(PROMPT, 2)
    waiting = [driver.submit(PROMPT, 2) for _ in range(others)]
    batch = driver.schedule()
    assert batch is not None
    assert chunk_sizes(batch.prefill) == [taken]
    driver.drain()
    for each in (request, *waiting):
        assert driver.answers(each) == [expected_answer(PROMPT, 2)]
    for each in running:
        assert len(driver.answers(each)[0]) == 30
    driver.check_drained()


@pytest.mark.parametrize(("others", "taken"), [(0, 13), (3, 13), (4, 12)])
def test_a_prompt_alone_is_cut_only_while_enough_others_wait(others: int, taken: int) -> None:
    driver = Driver(max_batch_size=1, budget=16, caching=False, token_tile=4)
    prompts = [[1] * 13] * (1 + others)
    requests = [driver.submit(prompt, 2) for prompt in prompts]
    batch = driver.schedule()
    assert batch is not None
    assert chunk_sizes(batch.prefill) == [taken]
    driver.drain()
    for request, prompt in zip(requests, prompts, strict=True):
        assert driver.answers(request) == [expected_answer(prompt, 2)]
    driver.check_drained()


@pytest.mark.parametrize(("length", "chunks"), [(18, [15, 3]), (32, [16, 16])])
def test_a_prompt_is_cut_beside_one_other_only_if_it_takes_no_step_more(length: int, chunks: list[int]) -> None:
    """Of 18 tokens the second step has the rest either way; of 32 a cut would leave more than a step."""
    driver = Driver(max_batch_size=2, budget=16, caching=False, token_tile=4)
    driver.submit([1], 30)
    driver.turn(1)
    driver.submit([1] * length, 2)
    for chunk in chunks:
        batch = driver.schedule()
        assert batch is not None
        assert chunk_sizes(batch.prefill) == [chunk]
        driver.complete()
    driver.drain()
    driver.check_drained()


def test_small_steps_are_not_cut() -> None:
    driver = Driver(max_batch_size=2, budget=16, caching=False, token_tile=8)
    driver.submit([1], 30)
    driver.turn(1)
    for _ in range(3):
        driver.submit(PROMPT, 2)
    batch = driver.schedule()
    assert batch is not None
    assert chunk_sizes(batch.prefill) == [10]
    driver.drain()
    driver.check_drained()


@pytest.mark.parametrize(("last", "taken"), [(2, 2), (3, 1)])
def test_a_chunk_is_not_cut_away_altogether(last: int, taken: int) -> None:
    """Of 12 + 2 tokens the two beyond three tiles are a whole prompt; of 11 + 3 they are the end of one."""
    driver = Driver(max_batch_size=2, budget=16, caching=False, token_tile=4)
    prompts = [[1] * (14 - last), [2] * last, [3], [4], [5]]
    requests = [driver.submit(prompt, 2) for prompt in prompts]
    batch = driver.schedule()
    assert batch is not None
    assert chunk_sizes(batch.prefill) == [14 - last, taken]
    driver.drain()
    for request, prompt in zip(requests, prompts, strict=True):
        assert driver.answers(request) == [expected_answer(prompt, 2)]
    driver.check_drained()


def test_nothing_is_cut_if_no_sequence_can_be_admitted() -> None:
    """13 decode rows are one more than three tiles, and no row is free for a waiting request."""
    driver = Driver(max_batch_size=13, num_blocks=128, caching=False, token_tile=4)
    for index in range(14):
        driver.submit([index % 8], 30)
    driver.turn(1)
    batch = driver.schedule()
    assert batch is not None
    assert (len(batch.decode), chunk_sizes(batch.prefill)) == (13, [])
    driver.drain()
    driver.check_drained()


@pytest.mark.parametrize(
    ("streams", "taken"),
    [
        ([], [14]),
        ([True], [7]),
        ([True] * 3, [5]),
        ([True] * 7, [2]),
        ([False], [14]),
        ([False] * 7, [14]),
        ([True, False, False], [5]),
        ([False, False, True], [5]),
    ],
)
def test_prompts_leave_room_for_streams_that_decode(streams: list[bool], taken: list[int]) -> None:
    """A step that a stream waits for has 8 tokens in all, and at least a quarter of them for prompts."""
    driver = Driver(budget=20, caching=False, tokens_beside_decode=8)
    running = [
        driver.submit([index], 30, delivery=Delivery(streaming=streaming)) for index, streaming in enumerate(streams)
    ]
    while not all(each.sequences[0].state is SequenceState.DECODE for each in running):
        driver.turn(1)
    request = driver.submit([1] * 14, 2)
    batch = driver.schedule()
    assert batch is not None
    assert len(batch.decode) == len(streams)
    assert chunk_sizes(batch.prefill) == taken
    driver.drain()
    assert driver.answers(request) == [expected_answer([1] * 14, 2)]
    driver.check_drained()


def with_image(driver: Driver, work: int, *, ahead: int = 20) -> Request:
    """Queue a prompt with an image of 600 tokens, whose encoding is the work of so many."""
    pixels = SimpleNamespace(size=work * 8 * 588)
    request = driver.build([1] * (ahead + 630), 2)
    request.images = [PromptImage(position=ahead, length=600, digest=bytes([len(driver.requests)]), pixels=pixels)]
    return driver.add(request)


@pytest.mark.parametrize(
    ("streaming", "works", "steps"),
    [
        # A step beside a stream has room for 399 tokens.
        (True, [200], [[199], [399], [52]]),
        # An image that leaves less than that has 128 tokens in its step all the same.
        (True, [350], [[49], [399], [202]]),
        (True, [9000], [[20], [128], [399], [103]]),
        # One image at a time is encoded; the other's begins where there is room for it.
        (True, [200, 200], [[199], [399], [52, 147], [398], [105]]),
        (False, [200, 9000], [[650, 650]]),
    ],
    ids=["room", "little room", "none", "two", "no stream"],
)
def test_images_are_encoded_out_of_the_budget_beside_streams(
    streaming: bool, works: list[int], steps: list[list[int]]
) -> None:
    driver = Driver(
        num_blocks=64, block_size=64, max_batch_size=4, budget=2000, caching=False, tokens_beside_decode=400
    )
    running = driver.submit([1], 30, delivery=Delivery(streaming=streaming))
    driver.turn(1)
    for work in works:
        with_image(driver, work)
    sizes = []
    while any(each.sequences[0].state in (SequenceState.WAITING, SequenceState.PREFILL) for each in driver.requests):
        batch = driver.schedule()
        assert batch is not None
        sizes.append(chunk_sizes(batch.prefill))
        driver.complete()
    assert sizes == steps
    driver.drain()
    assert len(driver.answers(running)[0]) == 30
    driver.check_drained()


def test_steps_of_a_video_are_paid_for_one_by_one() -> None:
    """Of 600 tokens in 6 places, each of which is the work of 100."""
    driver = Driver(
        num_blocks=64, block_size=64, max_batch_size=4, budget=2000, caching=False, tokens_beside_decode=400
    )
    driver.submit([1], 30, delivery=Delivery(streaming=True))
    driver.turn(1)
    request = with_image(driver, 600)
    places = tuple((start, start + 100) for start in range(0, 600, 100))
    request.images = [
        msgspec.structs.replace(image, separate=True, spans=places, placeholder_rows=(100,) * 6)
        for image in request.images
    ]
    sizes = []
    while request.sequences[0].state in (SequenceState.WAITING, SequenceState.PREFILL):
        batch = driver.schedule()
        assert batch is not None
        sizes += chunk_sizes(batch.prefill)
        driver.complete()
    # 399 tokens are 200 of work and 199 that are computed, which begin two places.
    assert sizes == [199, 199, 199, 53]
    driver.drain()
    driver.check_drained()
