"""Text to tokens and back: as the tokenizers package itself decodes, for both kinds of decoder."""

import json
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvsteward_engine.errors import BadCheckpoint, InvalidRequest, UnsupportedModel
from kvsteward_engine.tokenizer import Tokenizer
from support.tiny_model import make_tiny_model, make_tokenizer
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

BYTE_LEVEL = make_tokenizer()
BYTE_LEVEL.add_tokens([AddedToken("\u4f60\u597d", special=False)])


def sentencepiece() -> Backend:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", "a", "b", "\u2581a", "\u2581the", "\u00e9", "\u2581\u2581"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


SENTENCEPIECE = sentencepiece()


@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1)))
def test_byte_level_tokens_decode_as_the_package_decodes_them(ids: list[int]) -> None:
    assert Tokenizer(BYTE_LEVEL).decode(ids) == BYTE_LEVEL.decode(ids, skip_special_tokens=True)


@given(st.lists(st.integers(0, SENTENCEPIECE.get_vocab_size() - 1).filter(lambda i: not 131 <= i < 259)))
def test_sentencepiece_chats_decode_as_the_package_decodes_them(ids: list[int]) -> None:
    assert Tokenizer(SENTENCEPIECE).decode(ids, chat=True) == SENTENCEPIECE.decode(ids, skip_special_tokens=True)


def test_sentencepiece_completions_keep_the_space_that_joins_them_to_the_prompt() -> None:
    the = SENTENCEPIECE.token_to_id("\u2581the")
    tokenizer = Tokenizer(SENTENCEPIECE)
    assert tokenizer.decode([the]) == " the"
    assert tokenizer.decode([the], chat=True) == "the"


def test_sentencepiece_byte_tokens_make_characters() -> None:
    ids = [SENTENCEPIECE.token_to_id(f"<0x{byte:02X}>") for byte in "\u4f60".encode()]
    assert Tokenizer(SENTENCEPIECE).decode(ids) == "\u4f60"


@given(st.text())
def test_what_is_encoded_comes_back(text: str) -> None:
    tokenizer = Tokenizer(make_tokenizer())
    ids = tokenizer.encode(text)
    assert b"".join(tokenizer.names_bytes[i] for i in ids).decode() == text


def test_a_long_text_is_tokenised_without_holding_up_other_threads() -> None:
    """Streams, steps and the kill switch once stood still for as long as the longest prompt took: seconds."""
    tokenizer = Tokenizer(make_tokenizer())
    thread = threading.Thread(target=tokenizer.encode, args=("the time was now " * 20_000,))
    began, turns = time.perf_counter(), 0
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        turns += 1
    assert time.perf_counter() - began > 0.05  # else it says nothing
    assert turns >= 10



def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        Tokenizer(BYTE_LEVEL).encode("a\ud800")


def test_truncation_left_in_the_file_by_a_training_run_is_ignored(tmp_path: Path) -> None:
    backend = make_tokenizer()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.load(tmp_path).encode("\u0001" * 100)) == 100


@pytest.mark.slow
def test_the_chat_template_writes_what_transformers_writes(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    make_tiny_model(tmp_path)
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi <there> & \u4f60"}]
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.load(tmp_path)
    assert ours.render(chat) == theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    expected = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ours.encode(ours.render(chat), add_special_tokens=False) == expected


def test_a_template_file_goes_before_the_one_in_the_settings(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("file: {{ messages[0].content }}")
    assert Tokenizer.load(tmp_path).render([{"role": "user", "content": "x"}]) == "file: x"


def test_a_model_without_a_template_completes_but_does_not_chat(tmp_path: Path) -> None:
    BYTE_LEVEL.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("x")
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("files", "error", "words"),
    [
        pytest.param({}, BadCheckpoint, "has no tokenizer.json", id="missing"),
        pytest.param({"tokenizer.json": "{}"}, BadCheckpoint, "can read", id="not a tokenizer"),
        pytest.param({"tokenizer_config.json": "[]"}, BadCheckpoint, "not a JSON object", id="settings are a list"),
        pytest.param({"tokenizer_config.json": "{"}, BadCheckpoint, "is not JSON", id="settings cut off"),
        pytest.param(
            {"tokenizer_config.json": '{"chat_template": "{% if %}"}'}, BadCheckpoint, "does not compile", id="template"
        ),
    ],
)
def test_a_folder_that_will_not_do_is_refused_in_one_sentence(
    tmp_path: Path, files: dict[str, str], error: type[Exception], words: str
) -> None:
    if files:
        BYTE_LEVEL.save(str(tmp_path / "tokenizer.json"))
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(error, match=words):
        Tokenizer.load(tmp_path)


def test_a_decoder_that_would_be_decoded_wrongly_is_refused(tmp_path: Path) -> None:
    decoder = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    described = json.loads(make_tokenizer().to_str()) | {"decoder": decoder}
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(UnsupportedModel, match="WordPiece"):
        Tokenizer.load(tmp_path)
