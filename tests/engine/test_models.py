"""Logits of each architecture against transformers, float32, however a sequence is cut and batched."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kvsteward_engine.runner import Runner
from kvsteward_engine.sequence import Sequence, Step, Work
from support.oracle import VARIANTS, Oracle, random_tokens, sequence, step
from support.proof import record

TOLERANCE = 1e-4
BLOCK = 8


@pytest.fixture(scope="module", params=sorted(VARIANTS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Oracle, Runner]:
    oracle = Oracle(tmp_path_factory.mktemp("oracle"), request.param)
    return oracle, Runner(oracle.folder, "FP32", pages=64, block_tokens=BLOCK, device="cpu", threads=1)


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max())


def test_a_prompt_in_one_chunk_gives_the_oracles_logits(pair: tuple[Oracle, Runner]) -> None:
    oracle, runner = pair
    tokens = random_tokens(45, seed=1)
    logits = runner.logits(step((sequence(tokens, range(7, 13)), 0, 45)))
    assert difference(logits[0], oracle.logits(tokens)[-1]) <= TOLERANCE


def test_chunks_at_odd_places_and_single_steps_give_the_oracles_logits(pair: tuple[Oracle, Runner]) -> None:
    oracle, runner = pair
    tokens = random_tokens(60, seed=2)
    expected = oracle.logits(tokens)
    held = sequence(tokens, [9, 3, 30, 4, 60, 11, 12, 2])  # pages in no order
    start, differences = 0, []
    for count in (13, 1, 8, 17, 2, *[1] * 19):
        logits = runner.logits(step((held, start, count)))
        start += count
        differences.append(difference(logits[0], expected[start - 1]))
    assert start == 60
    record("logits", "logits against transformers, float32, prefill + chunks + steps: <= 1e-4",
           {"largestDifference": max(differences)}, part=oracle.variant)  # fmt: skip
    assert max(differences) <= TOLERANCE


def test_prefills_continuations_and_decodes_in_one_step_do_not_disturb_each_other(pair: tuple[Oracle, Runner]) -> None:
    oracle, runner = pair
    lengths = (3, 50, 26, 40, 9)
    tokens = [random_tokens(length, seed=10 + index) for index, length in enumerate(lengths)]
    pages = iter(range(63, 0, -1))
    held = [
        sequence(each, [next(pages) for _ in range(-(-len(each) // BLOCK))], name=str(index))
        for index, each in enumerate(tokens)
    ]
    expected = [oracle.logits(each) for each in tokens]
    runner.run(
        Step(
            (Work(held[1], 0, 49, sample=False), Work(held[2], 0, 11, sample=False), Work(held[4], 0, 8, sample=False))
        )
    )
    mixed = step((held[0], 0, 3), (held[4], 8, 1), (held[2], 11, 15), (held[1], 49, 1), (held[3], 0, 40))
    logits = runner.logits(mixed)
    for row, index in enumerate((0, 4, 2, 1, 3)):
        assert difference(logits[row], expected[index][-1]) <= TOLERANCE


def test_decodes_of_very_different_lengths_share_a_step(pair: tuple[Oracle, Runner]) -> None:
    oracle, runner = pair
    lengths = (2, 300, 18, 150)  # far enough apart to be gathered in separate groups
    tokens = [random_tokens(length, seed=20 + index) for index, length in enumerate(lengths)]
    pages = iter(range(64))
    held = [
        sequence(each, [next(pages) for _ in range(-(-len(each) // BLOCK))], name=str(index))
        for index, each in enumerate(tokens)
    ]
    runner.run(Step(tuple(Work(each, 0, len(each.tokens) - 1, sample=False) for each in held)))
    logits = runner.logits(step(*((each, len(each.tokens) - 1, 1) for each in held)))
    for row, each in enumerate(tokens):
        assert difference(logits[row], oracle.logits(each)[-1]) <= TOLERANCE


def test_pages_computed_by_another_sequence_serve_as_a_prefix(pair: tuple[Oracle, Runner]) -> None:
    oracle, runner = pair
    shared, tails = random_tokens(32, seed=3), [random_tokens(9, seed=4), random_tokens(21, seed=5)]
    first = sequence(shared + tails[0], [5, 6, 7, 8, 20, 21])
    runner.run(step((first, 0, 41)))
    second = sequence(shared + tails[1], [5, 6, 7, 8, 30, 31, 32])
    logits = runner.logits(step((second, 32, 21)))
    assert difference(logits[0], oracle.logits(second.tokens)[-1]) <= TOLERANCE


def test_a_page_that_changes_hands_shows_nothing_of_its_last_content(pair: tuple[Oracle, Runner]) -> None:
    _, runner = pair
    runner.run(step((sequence(random_tokens(16, seed=6), [40, 41]), 0, 16)))
    assert runner.pool.keys[:, 41].abs().min() > 0
    runner.run(step((sequence(random_tokens(10, seed=7), [40, 41]), 0, 10)))
    assert runner.pool.keys[:, 41, :2].abs().min() > 0
    assert not runner.pool.keys[:, 41, 2:].any() and not runner.pool.values[:, 41, 2:].any()


def test_only_sampled_works_return_a_token_and_in_their_order(pair: tuple[Oracle, Runner]) -> None:
    oracle, runner = pair
    tokens = [random_tokens(12, seed=8), random_tokens(12, seed=9)]
    held: list[Sequence] = [sequence(tokens[0], [1, 2]), sequence(tokens[1], [3, 4])]
    works = (Work(held[0], 0, 11, sample=False), Work(held[1], 0, 12, sample=True))
    sampled = runner.run(Step(works))
    assert [each.token for each in sampled] == [int(oracle.logits(tokens[1])[-1].argmax())]
    both = runner.run(step((held[1], 11, 1), (held[0], 11, 1)))
    assert [each.token for each in both] == [int(oracle.logits(each)[-1].argmax()) for each in reversed(tokens)]


@pytest.mark.slow
@pytest.mark.model
def test_smollm2_answers_twenty_prompts_with_transformers_tokens(smollm2: Path) -> None:
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    runner = Runner(smollm2, "FP32", pages=400, block_tokens=16, device="cpu", threads=1)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]
    held = []
    for index, prompt in enumerate(prompts):
        held.append(sequence(prompt, range(index * 20, index * 20 + 20), name=str(index)))
    works = [(each, 0, len(each.tokens)) for each in held]
    for _ in range(32):
        for (each, _, _), sampled in zip(works, runner.run(step(*works)), strict=True):
            each.tokens.append(sampled.token)
        works = [(each, len(each.tokens) - 1, 1) for each in held]
    for each, prompt in zip(held, prompts, strict=True):
        with torch.no_grad():
            # An explicit mask: transformers would else hide every <|im_end|> of the prompt, which is also its padding.
            ids = torch.tensor([prompt])
            expected = reference.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False, eos_token_id=None
            )
        assert each.output == expected[0, len(prompt) :].tolist()
    record("smollm2-greedy", "SmolLM2 greedy, 20 prompts x 32 tokens, against transformers float32: same tokens",
           {"promptsEqual": len(prompts), "tokens": sum(len(each.output) for each in held)})  # fmt: skip


QUESTIONS = [
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain photosynthesis to a child.",
    "List three uses of copper.",
    "Who wrote Romeo and Juliet?",
    "What is 17 plus 25?",
    "Translate 'good morning' into Spanish.",
    "Name four planets.",
    "How do I boil an egg?",
    "Why is the sky blue?",
    "Give me a name for a cat.",
    "What does HTTP stand for?",
    "Write a Python function that reverses a string.",
    "Summarise the story of Cinderella.",
    "What is the boiling point of water?",
    "Tell me a joke about computers.",
    "How far away is the moon?",
    "Describe the taste of a lemon.",
    "What is a prime number?",
    "Give three tips for better sleep.",
]
