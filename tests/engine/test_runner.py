"""What a runner says of itself, what it refuses at start, and what it refuses in a step."""

from __future__ import annotations

import pytest
import torch
from kvsteward_engine import device
from kvsteward_engine.errors import OutOfMemory, UnsupportedDevice
from kvsteward_engine.runner import Runner
from kvsteward_engine.sequence import Step, Work
from support.oracle import SIZES, Oracle, random_tokens, sequence, step


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(tmp_path_factory.mktemp("oracle"), "llama-gqa")


def load(oracle: Oracle, dtype: str = "FP32", pages: int = 16, device: str = "cpu") -> Runner:
    return Runner(oracle.folder, dtype, pages=pages, block_tokens=8, device=device, threads=1)


@pytest.mark.parametrize(("dtype", "size"), [("FP32", 4), ("BF16", 2), ("FP16", 2)])
def test_the_pool_takes_the_bytes_that_the_model_says(oracle: Oracle, dtype: str, size: int) -> None:
    runner = load(oracle, dtype)
    heads, layers = SIZES["num_key_value_heads"], SIZES["num_hidden_layers"]
    assert runner.bytes_per_token == 2 * layers * heads * 16 * size == runner.config.bytes_per_token(dtype)
    assert runner.pool.nbytes == 16 * 8 * runner.bytes_per_token
    assert (runner.vocab_size, runner.max_positions, runner.dtype) == (160, 512, dtype)


def test_auto_is_the_checkpoints_own_dtype(oracle: Oracle) -> None:
    assert load(oracle, "Auto").dtype == "FP32"


@pytest.mark.parametrize("dtype", ["BF16", "FP16"])
def test_half_precision_stays_near_the_oracle(oracle: Oracle, dtype: str) -> None:
    tokens = random_tokens(50, seed=1)
    logits = load(oracle, dtype).logits(step((sequence(tokens, range(7)), 0, 50)))[0]
    expected = oracle.logits(tokens)[-1]
    assert logits.dtype == torch.float32
    assert float((logits - expected).abs().mean()) < 0.03 * float(expected.abs().max())


@pytest.mark.parametrize(
    ("dtype", "name", "words"),
    [
        pytest.param("FP8", "cpu", "dtype FP8 is not supported", id="dtype"),
        pytest.param("FP32", "tpu", "device tpu is unknown", id="device"),
    ],
)
def test_settings_that_cannot_be_met_are_refused(oracle: Oracle, dtype: str, name: str, words: str) -> None:
    with pytest.raises(UnsupportedDevice, match=words):
        load(oracle, dtype, device=name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(oracle: Oracle) -> None:
    with pytest.raises(UnsupportedDevice, match="no usable GPU"):
        load(oracle, device="cuda")


def test_a_dtype_the_device_cannot_compute_in_is_refused(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'\nand more lines")

    monkeypatch.setattr(device.F, "linear", missing)
    with pytest.raises(
        UnsupportedDevice, match=r"cpu device can't compute in FP16 .*not implemented for 'Half'"
    ) as caught:
        load(oracle, "FP16")
    assert "\n" not in str(caught.value)


def test_negative_threads_are_refused(oracle: Oracle) -> None:
    with pytest.raises(UnsupportedDevice, match="threads is -1"):
        Runner(oracle.folder, "FP32", pages=4, device="cpu", threads=-1)


@pytest.mark.parametrize(
    ("start", "count", "words"),
    [
        pytest.param(0, 25, "outside sequence s's tokens", id="past the tokens"),
        pytest.param(0, 0, "outside sequence s's tokens", id="nothing"),
        pytest.param(-1, 2, "outside sequence s's tokens", id="before the start"),
        pytest.param(0, 17, "holds 2 pages, too few for position 16", id="past the pages"),
    ],
)
def test_illegal_work_is_refused(oracle: Oracle, start: int, count: int, words: str) -> None:
    held = sequence(random_tokens(24, seed=1), [0, 1])
    with pytest.raises(ValueError, match=words):
        load(oracle).run(step((held, start, count)))


def test_a_step_without_room_is_told_apart_and_can_be_repeated(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, tokens = load(oracle), random_tokens(20, seed=1)
    held = sequence(tokens, range(3))
    with monkeypatch.context() as patched:
        patched.setattr(
            runner._attention, "attend", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory"))
        )
        with pytest.raises(OutOfMemory, match="step of 1 works"):
            runner.run(step((held, 0, 20)))
    assert runner.run(step((held, 0, 20)))[0].token == int(oracle.logits(tokens)[-1].argmax())


def test_a_step_that_samples_nothing_gives_nothing(oracle: Oracle) -> None:
    held = sequence(random_tokens(20, seed=1), range(3))
    runner = load(oracle)
    assert runner.run(Step((Work(held, 0, 20, sample=False),))) == []
    assert runner.run(Step(())) == []


def test_seeded_answers_are_the_same_cold_reused_and_after_a_recompute(oracle: Oracle) -> None:
    runner, prompt = load(oracle), random_tokens(21, seed=5)

    def answer(pages: list[int], start: int, cut: int) -> list[int]:
        held = sequence(prompt, pages, prompt_len=21, temperature=1.0, seed=3, top_p=0.9)
        while held.output_len < 12:
            if held.output_len == cut:  # preempted: everything is computed again, into other pages
                held.pages, start = [page + 4 for page in pages], 0
            held.tokens.append(runner.run(step((held, start, len(held.tokens) - start)))[0].token)
            start = len(held.tokens) - 1
        return held.output

    cold = answer([0, 1, 2, 3, 4], 0, cut=99)
    assert answer([0, 1, 7, 8, 9], 16, cut=99) == cold
    assert answer([10, 11, 2, 3, 5], 0, cut=6) == cold
    assert len(set(cold)) > 3
