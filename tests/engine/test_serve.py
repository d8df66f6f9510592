"""`kvsteward-engine serve` as a process: flags, start, drain, exit codes."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from kvsteward_engine.config import load_config
from kvsteward_engine.errors import StartError
from kvsteward_engine.load import Wanted, sizes
from kvsteward_engine.main import main, make_parser
from kvsteward_engine.serve import _serve, wanted_of
from kvsteward_engine.service import Loaded
from support.engine_server import TOKENIZER, eventually, serving
from support.tiny_model import make_tiny_model

SECONDS = 120  # for anything a process does on a busy machine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


# ---- flags


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        pytest.param([], "--model", id="no model"),
        pytest.param(["--model", "x", "--dtype", "FP8"], "FP8", id="a dtype it can't do"),
        pytest.param(["--model", "x", "--capacity", "much"], "'much' is not a size", id="capacity no size"),
        pytest.param(["--model", "x", "--port", "70000"], "not a port", id="port"),
        pytest.param(["--model", "x", "--block-tokens", "0"], "at least 1", id="block of none"),
        pytest.param(["--model", "x", "--max-concurrent", "-1"], "not a whole number", id="negative"),
        pytest.param(["--model", "x", "--modell", "y"], "--modell", id="unknown flag"),
    ],
)
def test_bad_flags_are_one_sentence_and_exit_code_2(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", *flags])
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert words in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        pytest.param(["--model", "/nowhere"], "/nowhere", id="no folder"),
        pytest.param(["--model", "MODEL", "--max-tokens", "5000"], "4096 positions", id="context beyond the model"),
        pytest.param(["--model", "MODEL", "--capacity", "1Ki"], "--capacity holds 0 tokens", id="no page fits"),
        pytest.param(
            ["--model", "MODEL", "--capacity", "16Ki", "--max-tokens", "64"], "give at least 32768 bytes", id="context"
        ),
        pytest.param(["--model", "MODEL", "--token-file", "/nowhere/token"], "/nowhere/token", id="no token"),
    ],
)
def test_what_cannot_start_says_why_in_one_sentence(
    model: Path,
    flags: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvsteward_engine.serve.TOKEN_PATIENCE_SECONDS", 0.0)
    assert main(["serve", *(str(model) if flag == "MODEL" else flag for flag in flags)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("kvsteward-engine: ")
    assert words in told
    assert told.count("\n") == 1


def test_the_context_is_what_model_and_capacity_allow(model: Path) -> None:
    config = load_config(model)
    asked = wanted_of(make_parser().parse_args(["serve", "--model", str(model), "--capacity", "1Mi"]))
    per_token = 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, head dimension, bytes of FP32
    size = sizes(asked, config)
    assert (size.bytes_per_token, size.pages, size.max_tokens) == (per_token, 2**20 // per_token // 16, 2048)
    assert sizes(replace(asked, capacity=2**30), config).max_tokens == 4096
    assert sizes(replace(asked, max_tokens=100), config).max_tokens == 100
    with pytest.raises(StartError, match="capacity"):
        sizes(replace(asked, max_tokens=2049), config)


# ---- processes


@dataclass
class Running:
    process: asyncio.subprocess.Process
    url: str
    session: aiohttp.ClientSession

    async def until(self, status: int) -> None:
        async with asyncio.timeout(SECONDS):
            while True:
                async with self.session.get(self.url + "/health") as response:
                    if response.status == status:
                        return
                await asyncio.sleep(0.05)

    async def ended(self) -> tuple[int, str]:
        """Exit code, and what stderr said."""
        async with asyncio.timeout(SECONDS):
            _, err = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, err.decode()

    def complete(self, **fields: Any) -> Any:
        body = {"model": "tiny", "prompt": "the time was now", "temperature": 0, "ignore_eos": True} | fields
        return self.session.post(self.url + "/v1/completions", json=body)


@asynccontextmanager
async def engine(model: Path, *flags: str) -> AsyncIterator[Running]:
    command = [sys.executable, "-m", "kvsteward_engine.main", "serve", "--model", str(model), "--port", "0"]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, "--capacity", "4Mi", "--threads", "1", *flags, stdout=pipe, stderr=pipe
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(SECONDS):
            line = (await process.stdout.readline()).decode()
        assert line.startswith("listening on http://127.0.0.1:"), line
        async with aiohttp.ClientSession() as session:
            yield Running(process, line.split()[-1], session)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


@pytest.mark.slow
async def test_it_says_loading_then_serves_then_drains_and_exits_0(model: Path) -> None:
    async with engine(model) as running:
        async with running.session.get(running.url + "/health") as response:
            assert (response.status, (await response.json())["status"]) == (503, "loading")
        async with running.complete() as response:
            assert response.status == 503 and response.headers["Retry-After"]
        await running.until(200)
        answers = []
        for _ in range(2):
            async with running.complete(max_tokens=20) as response:
                assert response.status == 200
                answers.append((await response.json())["choices"][0]["text"])
        assert answers[0] == answers[1] != ""
        async with running.complete(stream=True, max_tokens=400) as response:
            assert response.status == 200
            running.process.send_signal(signal.SIGTERM)
            await running.until(503)
            async with running.complete() as refused:
                assert refused.status == 503
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        assert (await running.ended())[0] == 0


@pytest.mark.slow
async def test_what_is_not_done_in_time_is_cut_and_does_not_look_complete(model: Path) -> None:
    async with engine(model, "--drain-seconds", "0") as running:
        await running.until(200)
        async with running.complete(stream=True, max_tokens=2000) as response:
            await response.content.readuntil(b"\n\n")
            running.process.send_signal(signal.SIGTERM)
            with pytest.raises(aiohttp.ClientError):
                await response.read()
        code, told = await running.ended()
        assert code == 0
        assert "1 requests were cut" in told


async def test_an_engine_that_serves_no_more_ends_the_process_with_code_1(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving() as served:

        def load(wanted: Wanted, on_failure: Callable[[str], None]) -> Loaded:
            served.engine._on_failure = on_failure
            return Loaded(served.engine, TOKENIZER, served.runner.vocab_size, 512)

        monkeypatch.setattr("kvsteward_engine.serve.load", load)
        asked = make_parser().parse_args(["serve", "--model", str(model), "--port", "0"])
        said: list[str] = []
        process = asyncio.ensure_future(_serve(asked, wanted_of(asked), None, said.append))
        await eventually(lambda: len(said) == 2)
        url = said[1].removeprefix("ready ")
        body = {"model": "tiny", "prompt": "x"}
        async with aiohttp.ClientSession() as session:
            async with session.post(url + "/v1/completions", json=body) as response:
                assert response.status == 200
            served.runner.failure = RuntimeError("a kernel went wrong")
            with contextlib.suppress(aiohttp.ClientError):  # it may be gone before the third
                for _ in range(3):
                    async with session.post(url + "/v1/completions", json=body) as response:
                        assert response.status in (500, 503)
            async with asyncio.timeout(SECONDS):
                assert await process == 1


@pytest.mark.slow
async def test_sigterm_while_loading_ends_it_at_once(model: Path) -> None:
    async with engine(model) as running:
        running.process.send_signal(signal.SIGTERM)
        assert (await running.ended())[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        pytest.param("model.safetensors", b"cut", "model.safetensors", id="weights cut off"),
        pytest.param("tokenizer.json", b"{}", "tokenizer.json", id="tokenizer of another kind"),
    ],
)
async def test_a_broken_checkpoint_is_one_sentence_and_exit_code_2(
    tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    broken = make_tiny_model(tmp_path / "broken")
    (broken / name).write_bytes(content)
    async with engine(broken) as running:
        code, told = await running.ended()
    assert code == 2
    assert words in told
    assert "Traceback" not in told
    assert told.count("\n") == 1


@pytest.mark.slow
async def test_a_port_in_use_is_one_sentence_and_exit_code_2(model: Path) -> None:
    taken = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    async with taken:
        port = taken.sockets[0].getsockname()[1]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvsteward_engine.main", "serve", "--model", str(model), "--port", str(port)),
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(SECONDS):
            _, err = await process.communicate()
    assert process.returncode == 2
    assert f"port {port}" in err.decode() and err.decode().count("\n") == 1


@pytest.mark.slow
@pytest.mark.model
async def test_smollm2_knows_the_capital_of_france(smollm2: Path) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": "smollm2", "messages": question, "temperature": 0, "max_tokens": 32}
    async with engine(smollm2, "--dtype", "FP32", "--capacity", "256Mi") as running:
        await running.until(200)
        async with running.session.post(running.url + "/v1/chat/completions", json=body) as response:
            answer = await response.json()
    assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."
    assert answer["choices"][0]["finish_reason"] == "stop"
