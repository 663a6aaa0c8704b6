"""The command line: answers, exit statuses, and a conversation in a real terminal."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncllm import EngineConfig, cli
from asyncllm.cli import doctor, flags
from asyncllm.testing import FakePipeline
from asyncllm.text.templates import registry
from tests.processes import children_seconds
from tests.terminal import Terminal

ROOT = Path(__file__).parents[2]
COLD_START_S = 6
SMALL = ["--num-gpu-blocks", "200"]


def test_the_file_of_requests_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requests = tmp_path / "requests.jsonl"
    requests.write_text("{}\n", encoding="utf-8")
    for output, says in (
        (f"{tmp_path}/./requests.jsonl", "OUTPUT: .* holds the requests"),
        (str(tmp_path / "no" / "answers.jsonl"), "OUTPUT: .* cannot be opened"),
    ):
        assert cli.main(["batch", "tiny-chat", str(requests), output]) == 2
        assert re.search(says, capsys.readouterr().err)
    assert requests.read_text(encoding="utf-8") == "{}\n"


def test_lines_of_a_batch_that_are_no_text(tmp_path: Path, tiny_checkpoint: Path) -> None:
    """Each is refused by itself. A byte order mark is none of the first line's text."""
    requests, answers = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    body = b'"url": "/v1/completions", "body": {"prompt": "hi", "max_tokens": 2}'
    ids = [b"first", b"no \xff text", rb"half \ud800"]
    requests.write_bytes(b"\xef\xbb\xbf" + b"\n".join(b'{"custom_id": "%b", %b}' % (name, body) for name in ids))
    assert cli.main(["batch", str(tiny_checkpoint), str(requests), str(answers), *SMALL]) == 0
    found = {json.loads(line)["custom_id"]: json.loads(line)["error"] for line in answers.read_bytes().splitlines()}
    assert found == {"first": None, "no \udcff text": None, "half \ud800": None}


class TestRun:
    def test_it_answers(self, tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
        options = ["--ignore-eos", "--max-new-tokens", "5", "--no-skip-special-tokens", *SMALL]
        assert cli.main(["run", str(tiny_checkpoint), "hi", *options]) == 0
        output = capsys.readouterr()
        assert output.out.endswith("\n")
        assert len(output.out) > 1
        assert "cut after 5 tokens" in output.err

    def test_the_bundled_model_answers_from_a_cold_process(self) -> None:
        with children_seconds() as taken:
            done = subprocess.run(
                [sys.executable, "-m", "asyncllm", "run", "--device-type", "cpu", "What is 17 + 25?"],
                capture_output=True,
                text=True,
                cwd=ROOT,
                timeout=50,
                check=True,
            )
        assert "42" in done.stdout
        assert sum(taken) < COLD_START_S

    def test_the_prompt_on_standard_input(
        self, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        answers = []
        for arguments in ([str(tiny_checkpoint)], [str(tiny_checkpoint), "-"], [str(tiny_checkpoint), "hi"]):
            monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
            assert cli.main(["run", *arguments, *SMALL, "--ignore-eos", "--max-new-tokens", "4"]) == 0
            answers.append(capsys.readouterr().out)
        assert answers[0] == answers[1] == answers[2]

    def test_a_process_without_standard_streams(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Input is empty and output is dropped."""
        monkeypatch.setattr(sys.modules["asyncllm.pipeline"], "Pipeline", lambda *_: FakePipeline("answer"))
        for name in ("stdin", "stdout", "stderr"):
            monkeypatch.setattr(sys, name, None)
        assert cli.main(["run", "fake", "hi"]) == 0
        with pytest.raises(SystemExit):
            cli.main(["run", "fake", "-"])
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            stream.close()

    @pytest.mark.parametrize("unbuffered", ["1", ""])
    def test_a_full_disk_behind_standard_output(self, unbuffered: str) -> None:
        with open("/dev/full", "wb", buffering=0) as full:
            done = subprocess.run(
                [sys.executable, "-m", "asyncllm", "list"],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                timeout=50,
                check=False,
                env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            )
        assert (done.returncode, done.stderr) == (
            1,
            "asyncllm: The output cannot be written: No space left on device. Free some space, or write elsewhere.\n",
        )

    def test_a_terminal_of_few_characters(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(sys.modules["asyncllm.pipeline"], "Pipeline", lambda *_: FakePipeline("Zo\xeb"))
        screen = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(screen, "ascii"))
        for typed, status in ((b"hi", 0), (b"hi \xff", 1)):
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed), "ascii"))
            assert cli.main(["run", "fake", "-"]) == status
        sys.stdout.flush()
        assert screen.getvalue() == rb"Zo\xeb" + b"\n"
        assert "lone surrogate" in capsys.readouterr().err

    def test_settings_reach_the_model(self, tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["run", str(tiny_checkpoint), "hi", "--num-gpu-blocks", "1", "--block-size", "4"]) == 1
        assert "KV cache of 4 tokens" in capsys.readouterr().err
        template = ["--chat-template", "llama2", "--meta-instruction", "x" * 3000, "--session-len", "50"]
        assert cli.main(["run", str(tiny_checkpoint), "hi", *SMALL, *template]) == 1
        assert "session length of 50" in capsys.readouterr().err

    @pytest.mark.parametrize("command", ["serve proxy x", "lite auto_awq", "debug compare", "serve --x", "run --x"])
    def test_a_mistake_is_shown_without_all_options(self, command: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            cli.main(command.split())
        assert len(capsys.readouterr().err.splitlines()) == 2

    @pytest.mark.parametrize(
        ("arguments", "status", "message"),
        [
            (["run", "./nowhere", "hi"], 1, "./nowhere"),
            (["run", "hi", "--temperature", "9"], 2, "--temperature"),
            (["run", "hi", "--tempature", "1"], 2, "did you mean --temperature?"),
            (["run", "hi", "--chat-template", "./no.json"], 2, "no.json"),
            (["run", "model", "a", "prompt"], 2, "quotes"),
            (["run", "model", ""], 2, "prompt is empty"),
            (["runn", "hi"], 2, "runn"),
            (["lite", "merge_lora", "tiny-chat"], 2, "--adapter: adapter is not given"),
            ([], 2, "COMMAND"),
        ],
    )
    def test_mistakes(
        self, arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        try:
            found = cli.main(arguments)
        except SystemExit as end:
            found = int(end.code or 0)
        assert found == status
        error = capsys.readouterr().err
        assert message in error
        assert "Traceback" not in error


class TestList:
    def test_text(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["list"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert {"  LlamaForCausalLM", "  Qwen3ForCausalLM", "chat templates:", "  internlm2"} <= set(lines)

    def test_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["list", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["chat_templates"] == registry.names()


class TestDoctor:
    @pytest.fixture(autouse=True)
    def _bundled(self, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor, "BUNDLED_MODEL", str(tiny_checkpoint))

    @pytest.mark.parametrize("name", ["doctor", "check_env"])
    def test_a_healthy_machine(self, name: str, tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main([name, str(tiny_checkpoint)]) == 0
        text = capsys.readouterr().out
        assert text.endswith("Ready.\n")
        assert "LlamaForCausalLM" in text
        assert re.search(r"cpu threads: \d+ for a model of any size: .+", text)

    def test_json_and_a_failure(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        file = tmp_path / "report.json"
        assert cli.main(["doctor", "./nowhere", "--json", "--dump-file", str(file)]) == 1
        assert capsys.readouterr().out == ""
        assert cli.main(["doctor", "--dump-file", str(tmp_path)]) == 2
        assert "--dump-file: " in capsys.readouterr().err
        report = json.loads(file.read_text(encoding="utf-8"))
        assert report["ok"] is False
        (failed,) = (check for check in report["checks"] if check["verdict"] == "fail")
        assert failed["name"] == "model ./nowhere"
        assert "Check the spelling" in failed["found"]
        assert failed["advice"] == ""

    def test_a_damaged_tokenizer(self, tiny_checkpoint: Path, tmp_path: Path) -> None:
        folder = shutil.copytree(tiny_checkpoint, tmp_path / "model")
        (folder / "tokenizer.json").write_text("{", encoding="utf-8")
        (failed,) = (check for check in doctor.examine(str(folder)) if check.verdict == "fail")
        assert "tokenizer.json" in failed.found

    def test_old_and_missing_packages(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(doctor.FLOORS, "msgspec", ("99.0", "it is too old"))
        monkeypatch.setitem(doctor.FLOORS, "no-such-package", ("1.0", "it is not there"))
        failed = {check.name: check for check in doctor.examine() if check.verdict == "fail"}
        assert set(failed) == {"msgspec", "no-such-package"}
        assert "msgspec>=99.0" in failed["msgspec"].advice
        assert "2 of " in doctor.as_text(list(doctor.examine()))


def test_convert_names_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["convert", str(tmp_path / "nowhere")]) == 1
    assert "nowhere" in capsys.readouterr().err


class TestChat:
    @pytest.fixture
    def terminal(self, tiny_checkpoint: Path) -> Iterator[Terminal]:
        long = ["--ignore-eos", "--max-new-tokens", "6000"]
        terminal = Terminal("chat", str(tiny_checkpoint), *SMALL, *long)
        yield terminal
        terminal.close()

    def test_ctrl_c_stops_the_answer_and_not_the_program(self, terminal: Terminal) -> None:
        terminal.expect("tiny: .*\r\n> ")
        for text in ("hi", "and more"):
            terminal.type(f"{text}\n")
            terminal.expect(f"{text}\r\n.")
            terminal.type("\x03")
            terminal.expect(r"\(stopped\)\r\n> ")
        terminal.type("half a line")
        while not terminal.shows("\r\n> ", within=1):
            # Python's input() misses a signal that comes between the prompt and its first read.
            terminal.type("\x03")
        terminal.expect("> ")
        for forgets in ("/reset", "end"):
            terminal.type(f"{forgets}\n")
            terminal.expect(r"\(forgotten\)\r\n> ")
        terminal.type("exit\n")
        assert terminal.process.wait(timeout=20) == 0

    def test_ctrl_d_leaves(self, terminal: Terminal) -> None:
        terminal.expect("> ")
        terminal.type("\x04")
        assert terminal.process.wait(timeout=20) == 0


@pytest.mark.parametrize("module", ["asyncllm.cli.commands", "gettext"], ids=["at the imports", "at the options"])
def test_ctrl_c_at_the_very_beginning(module: str) -> None:
    program = f"""
import os, signal, sys, asyncllm.cli
class Interrupting:
    def find_spec(self, name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.modules.pop({module!r}, None)
sys.meta_path.insert(0, Interrupting())
sys.exit(asyncllm.cli.main(["list"]))
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_the_default_model_is_the_bundled_one() -> None:
    assert flags.DEFAULT_MODEL == doctor.BUNDLED_MODEL == "tiny-chat"
    assert EngineConfig().device_type == "auto"
