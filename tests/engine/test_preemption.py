"""A prompt that is preempted between its chunks gives everything once."""

from __future__ import annotations

from tests.engine.driver import Driver

PROMPT = [1, 2, 3, 4, 5, 6, 7, 0, 1, 2]


def test_logits() -> None:
    driver = Driver(budget=4)
    request = driver.submit(PROMPT, 0)
    request.output_logits = True
    request.reuses_prefix = False
    driver.turn(1)
    assert len(request.logits) == 1
    driver.scheduler._preempt(request.sequences[0])
    driver.drain()
    assert sum(len(logits) for logits in request.logits) == len(PROMPT)


def test_log_probabilities() -> None:
    driver = Driver(budget=4)
    request = driver.submit(PROMPT, 2, prompt_logprobs=1)
    driver.turn(1)
    assert len(request.prompt_logprobs) == 4
    driver.scheduler._preempt(request.sequences[0])
    driver.drain()
    assert [entry[0][0] for entry in request.prompt_logprobs] == PROMPT[1:]
