"""pipeline(): inputs, streams, conversations, threads and ends. Over the fake device; no model is loaded."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from asyncllm import (
    Embedding,
    EngineClosed,
    EngineConfig,
    EngineDead,
    EngineError,
    GenerationConfig,
    InvalidMessage,
    InvalidParameter,
    ModelNotFound,
    Response,
    SessionBusy,
    SessionNotFound,
    UnsupportedFeature,
    pipeline,
)
from asyncllm.testing import FakePipeline


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, also in a test run that was started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def pipe() -> Iterator[FakePipeline]:
    with FakePipeline({"ping": "pong", "long": "x" * 500}) as pipe:
        yield pipe


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class TestCall:
    def test_one_prompt_gives_one_response(self, pipe: FakePipeline) -> None:
        assert pipe("ping").text == "pong"
        assert pipe([user("ping")]).text == "pong"

    def test_a_list_gives_a_list_in_order(self, pipe: FakePipeline) -> None:
        answers = pipe(["long", "ping", "other"])
        assert [answer.text for answer in answers] == ["x" * 500, "pong", "other"]
        assert [answer.index for answer in answers] == [0, 1, 2]
        assert [answer.text for answer in pipe([[user("ping")], [user("other")]])] == ["pong", "other"]
        assert pipe([]) == []

    def test_batch_infer_is_the_same(self, pipe: FakePipeline) -> None:
        assert pipe.batch_infer(["ping"], GenerationConfig(max_new_tokens=2))[0].text == "po"
        assert pipe.infer("ping", GenerationConfig(max_new_tokens=2), True, None, False).text == "po"

    def test_one_config_for_all_or_one_for_each(self, pipe: FakePipeline) -> None:
        short, shorter = GenerationConfig(max_new_tokens=3), GenerationConfig(max_new_tokens=1)
        assert [answer.text for answer in pipe(["ping", "abcdef"], short)] == ["pon", "abc"]
        assert [answer.text for answer in pipe(["ping", "abcdef"], [short, shorter])] == ["pon", "a"]
        with pytest.raises(InvalidParameter, match="2 prompts and 1 generation"):
            pipe(["ping", "abcdef"], [short])

    def test_raw_prompts(self, pipe: FakePipeline) -> None:
        assert pipe("ping", do_preprocess=False).text == "pong"

    def test_options_about_the_log_have_no_effect(self, pipe: FakePipeline) -> None:
        """LMDeploy's own tests pass them to each call."""
        assert pipe("ping", log_level="INFO", max_log_len=10).text == "pong"
        assert len(list(pipe.stream_infer("ping", log_level="INFO"))) > 0
        assert pipe.chat("ping", max_log_len=10).response is not None

    def test_options_of_older_programs_win_over_the_config(self, pipe: FakePipeline) -> None:
        answer = pipe("abcdef", GenerationConfig(max_new_tokens=5), request_output_len=2, top_k=40, temperature=0.5)
        assert (answer.text, answer.finish_reason) == ("ab", "length")
        assert [each.text for each in pipe(["abc"], [GenerationConfig()], request_output_len=1)] == ["a"]
        with pytest.raises(InvalidParameter, match="temperature"):
            pipe("ping", temperature=3.0)
        with pytest.raises(InvalidParameter, match="no option 'temprature'"):
            pipe("ping", temprature=0.5)

    def test_a_prompt_that_cannot_be_read_does_not_lose_the_others(self, pipe: FakePipeline) -> None:
        prompts = ["ping", "", "long" * 9999, "ping"]
        answers = pipe(prompts)
        assert [answer.text for answer in answers] == ["pong", "", "", "pong"]
        assert [answer.finish_reason for answer in answers] == ["stop", "error", "error", "stop"]
        codes = [None, "invalid_request", "context_length_exceeded", None]
        assert [answer.error_code for answer in answers] == codes
        assert "session length" in (answers[2].error_message or "")
        ends = {chunk.index: chunk for chunk in pipe.stream_infer(prompts) if chunk.finish_reason}
        assert [ends[index].error_code for index in range(4)] == codes
        assert [ends[index].error_message for index in range(4)] == [answer.error_message for answer in answers]

    def test_bad_input_raises_before_anything_starts(self, pipe: FakePipeline) -> None:
        with pytest.raises(InvalidMessage):
            pipe("")
        with pytest.raises(InvalidParameter, match="no adapter of that name"):
            pipe("ping", adapter_name="mine")
        assert pipe.stats().requests_finished == 0
        assert pipe("ping").text == "pong"

    def test_progress(self, pipe: FakePipeline, capsys: pytest.CaptureFixture[str]) -> None:
        pipe(["ping", "other"], use_tqdm=True)
        assert "2/2" in capsys.readouterr().err

    def test_progress_of_one_conversation(self, pipe: FakePipeline, capsys: pytest.CaptureFixture[str]) -> None:
        turns = [("user", "Hi"), ("assistant", "Hello!"), ("user", "ping")]
        pipe([{"role": role, "content": content} for role, content in turns], use_tqdm=True)
        assert "1/1" in capsys.readouterr().err


def test_a_row_that_fails_does_not_lose_the_others() -> None:
    with FakePipeline(row_failure=lambda history: "spoilt" if 120 in history else None) as pipe:
        good, bad = pipe(["abc", "x"])
    assert (good.text, good.finish_reason) == ("abc", "stop")
    assert bad.finish_reason == "error"


class TestStream:
    def test_chunks_make_up_the_answers(self, pipe: FakePipeline) -> None:
        texts = {0: "", 1: ""}
        for chunk in pipe.stream_infer(["ping", "long"]):
            texts[chunk.index] += chunk.text
        assert texts == {0: "pong", 1: "x" * 500}

    def test_chunks_are_responses_that_can_be_added_up(self, pipe: FakePipeline) -> None:
        answer: Response | None = None
        for chunk in pipe.stream_infer("long", enable_thinking=False):
            assert isinstance(chunk, Response)
            answer = answer.extend(chunk) if answer else chunk
        whole = pipe("long")
        assert answer is not None
        assert (answer.text, answer.token_ids, answer.finish_reason) == (whole.text, whole.token_ids, "stop")

    def test_leaving_the_loop_ends_the_answers(self) -> None:
        with FakePipeline("x" * 500, delay_per_token=0.001) as pipe:
            for chunk in pipe.stream_infer(["a", "b"]):
                assert chunk.text
                break
            deadline = time.monotonic() + 5
            while pipe.stats().running and time.monotonic() < deadline:
                time.sleep(0.005)
            assert pipe.stats().running == 0
            assert pipe.stats().requests_cancelled == 2

    def test_a_stream_that_is_never_read_starts_nothing(self, pipe: FakePipeline) -> None:
        pipe.stream_infer(["ping"])
        assert pipe.stats().requests_started == 0

    def test_bad_input(self, pipe: FakePipeline) -> None:
        with pytest.raises(InvalidMessage):
            next(iter(pipe.stream_infer("")))
        with pytest.raises(InvalidParameter):
            pipe.stream_infer("ping", nonsense=1)
        positions: Any = (None, GenerationConfig())  # LMDeploy's order since 0.10
        with pytest.raises(InvalidParameter, match="do_preprocess must be True or False"):
            next(pipe.stream_infer("ping", *positions))


class TestChat:
    def test_turns(self, pipe: FakePipeline) -> None:
        session = pipe.chat("ping")
        assert session.response.text == "pong"
        assert pipe.chat("more", session=session) is session
        assert session.response.text == "more"
        assert session.history == [("ping", "pong"), ("more", "more")]
        assert session.response.history_token_len > 0
        session.close()
        session.close()
        with pytest.raises(SessionNotFound):
            session.chat("again")

    def test_streamed_turns(self, pipe: FakePipeline) -> None:
        with pipe.session() as session:
            assert "".join(chunk.text for chunk in pipe.chat("ping", session, stream_response=True)) == "pong"
            assert "".join(chunk.text for chunk in session.chat("a", stream_response=True)) == "a"
            assert session.history == [("ping", "pong"), ("a", "a")]

    def test_sessions_of_a_stream_take_their_next_turns(self, pipe: FakePipeline) -> None:
        sessions = [pipe.chat("first"), pipe.session()]
        chunks = list(pipe.stream_infer(["ping", "long"], sessions=sessions, stream_response=False))
        assert sorted((chunk.index, chunk.text) for chunk in chunks) == [(0, "pong"), (1, "x" * 500)]
        assert [len(session.history) for session in sessions] == [2, 1]
        assert "".join(chunk.text for chunk in pipe.stream_infer("ping", sessions=sessions[1])) == "pong"
        assert sessions[1].history[-1] == ("ping", "pong")
        with pytest.raises(InvalidParameter, match="1 prompts and 2 sessions"):
            next(pipe.stream_infer("ping", sessions=sessions))

    def test_sessions_of_others_are_refused(self, pipe: FakePipeline) -> None:
        with FakePipeline("x") as other, other.session() as session:
            with pytest.raises(InvalidParameter, match="no session of this engine"):
                pipe.chat("ping", session)
            with pytest.raises(InvalidParameter, match="no session of this engine"):
                next(pipe.stream_infer("ping", sessions=session))
            assert other.stats().requests_started == 0
        strange: Any
        for strange in ("abc", 5, ["abc"]):
            with pytest.raises(InvalidParameter, match="is no session"):
                pipe.chat("ping", strange)
            with pytest.raises(InvalidParameter, match="is no session"):
                next(pipe.stream_infer("ping", sessions=strange))

    def test_an_aborted_turn_keeps_its_text(self) -> None:
        with FakePipeline("x" * 500, delay_per_token=0.001) as pipe, pipe.session() as session:
            turn = session.chat("a", stream_response=True)
            next(turn)
            session.abort()
            chunks = list(turn)
            assert chunks[-1].finish_reason == "abort"
            assert 0 < len(session.history[0][1]) < 500
            assert session.session_id == session.id

    def test_forks_go_separate_ways(self, pipe: FakePipeline) -> None:
        with pipe.session() as session:
            session.chat("ping")
            with session.fork() as other:
                other.chat("there")
                assert len(other.history) == 2
                assert other.id != session.id
            assert session.history == [("ping", "pong")]

    def test_options_and_bad_input(self, pipe: FakePipeline) -> None:
        with pipe.session() as session:
            session.chat("ping", GenerationConfig(max_new_tokens=3), request_output_len=1)
            assert session.response is not None
            assert session.response.text == "p"
        with pytest.raises(InvalidParameter, match="session"):
            pipe.chat("ping", session=3)  # type: ignore[arg-type]

    def test_a_second_turn_at_once_is_refused(self) -> None:
        with FakePipeline("x" * 100, delay_per_token=0.002) as pipe, pipe.session() as session:
            first = session.chat("a", stream_response=True)
            next(first)
            with pytest.raises(SessionBusy):
                session.chat("b")
            first.close()
            session.chat("c", GenerationConfig(max_new_tokens=1))


class TestScoring:
    def test_ppl(self, pipe: FakePipeline) -> None:
        one = pipe.get_ppl([1, 2, 3])
        assert len(one) == 1
        assert pipe.get_ppl([[1, 2, 3], [4, 5]])[0] == one[0] > 0
        with pytest.raises(InvalidParameter, match="at least 2 tokens"):
            pipe.get_ppl([[1, 2], [1]])

    def test_embeddings(self, pipe: FakePipeline) -> None:
        one = pipe.embed("hi")
        assert isinstance(one, Embedding)
        assert sum(value * value for value in one.values) == pytest.approx(1)
        several = pipe.embed(["hi", [104, 105]], pooling="mean", normalize=False, dimensions=3)
        assert isinstance(several, list)
        assert several[0] == several[1]
        assert len(several[0].values) == 3
        with pytest.raises(InvalidParameter, match="dimensions"):
            pipe.embed("hi", dimensions=17)

    def test_prepare_inputs(self, pipe: FakePipeline) -> None:
        single = pipe.prepare_inputs("hi")["input_ids"]
        assert pipe.tokenizer.decode(single) == "\x02user\x1fhi\x03\x02assistant\x1f"
        assert pipe.prepare_inputs([[user("hi")], [user("hi")]])["input_ids"] == [single, single]
        assert pipe.prepare_inputs("hi", do_preprocess=False)["input_ids"] == [104, 105]
        part = {"type": "image_url", "image_url": {"url": "data:,"}}
        for prompt in (("hi", Image.new("RGB", (8, 8))), [{"role": "user", "content": [part]}]):
            with pytest.raises(UnsupportedFeature, match="would lose them"):
                pipe.prepare_inputs(prompt)


class TestLoops:
    def test_inside_a_running_loop(self, pipe: FakePipeline) -> None:
        async def main() -> str:
            return pipe("ping").text

        assert asyncio.run(main()) == "pong"

    def test_opened_and_closed_inside_a_running_loop(self) -> None:
        async def main() -> str:
            with FakePipeline("x") as pipe:
                return "".join(chunk.text for chunk in pipe.stream_infer("y"))

        assert asyncio.run(main()) == "x"

    def test_from_many_threads(self) -> None:
        with FakePipeline() as pipe, ThreadPoolExecutor(8) as threads:
            prompts = [f"prompt {i}" for i in range(40)]
            assert [answer.text for answer in threads.map(pipe, prompts)] == prompts

    def test_several_at_once(self) -> None:
        with FakePipeline("a") as first, FakePipeline("b") as second:
            assert (first("x").text, second("x").text) == ("a", "b")

    def test_no_signal_handlers(self, pipe: FakePipeline) -> None:
        before = signal.getsignal(signal.SIGINT)
        pipe("ping")
        assert signal.getsignal(signal.SIGINT) is before

    @pytest.mark.parametrize("options", [{}, {"use_tqdm": True}], ids=str)
    def test_an_interrupted_call_ends_its_requests(self, options: dict[str, Any], interruptible: None) -> None:
        with FakePipeline("x" * 500, delay_per_token=0.005) as pipe:
            here = threading.get_ident()
            threading.Timer(0.05, lambda: signal.pthread_kill(here, signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                pipe(["a", "b"], **options)
            deadline = time.monotonic() + 5
            while pipe.stats().running and time.monotonic() < deadline:
                time.sleep(0.005)
            assert pipe.stats().requests_cancelled == 2

    def test_a_callback_that_calls_back_is_refused(self, pipe: FakePipeline) -> None:
        with pytest.raises(EngineError, match="wait for itself"):
            pipe._call(lambda: pipe("ping"))


class TestEnds:
    def test_close_ends_open_requests(self) -> None:
        pipe = FakePipeline("x" * 500, delay_per_token=0.005)
        outcome: list[BaseException] = []

        def ask() -> None:
            try:
                pipe("a")
            except EngineError as error:
                outcome.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        while not pipe.stats().running:
            time.sleep(0.002)
        pipe.close()
        thread.join()
        assert [type(error) for error in outcome] == [EngineClosed]

    def test_calls_after_close(self, pipe: FakePipeline) -> None:
        pipe.close()
        pipe.close()
        for call in (lambda: pipe("a"), lambda: pipe.chat("a"), pipe.stats, lambda: list(pipe.stream_infer("a"))):
            with pytest.raises(EngineClosed):
                call()

    def test_a_dead_engine_says_so(self) -> None:
        with FakePipeline(fail_at=1) as pipe:
            for _ in range(2):
                with pytest.raises(EngineDead):
                    pipe("a")

    def test_a_failed_start_leaves_nothing(self) -> None:
        with pytest.raises(ModelNotFound):
            FakePipeline(start_error=ModelNotFound("gone"))

    @pytest.mark.filterwarnings("ignore::ResourceWarning")
    def test_garbage_collection_warns_and_closes(self) -> None:
        pipes = [FakePipeline()]
        pipes[0]("a")
        with pytest.warns(ResourceWarning, match="was not closed"):
            pipes.clear()

    @pytest.mark.parametrize("ending", ["", "pipe.close()", "raise SystemExit(0)", "del pipe"])
    def test_the_interpreter_exits(self, ending: str) -> None:
        program = f"from asyncllm.testing import FakePipeline\npipe = FakePipeline()\nprint(pipe('a').text)\n{ending}"
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=20,
            cwd=Path(__file__).parent.parent,
            check=False,
        )
        assert (done.returncode, done.stdout) == (0, "a\n"), done.stderr
        assert "Traceback" not in done.stderr


class TestFactory:
    def test_log_level(self) -> None:
        with pytest.raises(InvalidParameter, match="log_level"):
            pipeline("tiny-chat", log_level="LOUD")
        with pytest.raises(ModelNotFound):
            pipeline("./no-such-folder", log_level="ERROR")
        assert logging.getLogger("asyncllm").level == logging.ERROR

    @pytest.mark.parametrize(
        ("arguments", "error"),
        [
            ({"vision_config": object()}, InvalidParameter),
            ({"backend": "other"}, InvalidParameter),
            ({"tp": 0}, InvalidParameter),
            ({"instance_num": 0}, InvalidParameter),
            ({"model_name": "llama2", "chat_template_config": "vicuna"}, InvalidParameter),
            ({"backend_config": {"tp": 1}}, InvalidParameter),
            ({"backend_config": EngineConfig(tp=1), "tp": 65}, InvalidParameter),
        ],
    )
    def test_refusals(self, arguments: dict[str, object], error: type[Exception]) -> None:
        with pytest.raises(error):
            pipeline("tiny-chat", **arguments)  # type: ignore[arg-type]
