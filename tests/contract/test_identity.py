import hashlib
import hmac
import json
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvsteward_contract.identity import (
    Identity,
    admin_token,
    derived_key,
    extend_key,
    length_delimited,
    opaque_digest,
    output_digest,
    page_keys,
    root_key,
    scope_salt,
)

GOLDEN = json.loads((Path(__file__).parents[2] / "contract/golden/page-keys.json").read_text())
BASE = Identity("model", "tokenizer", "", "BF16/16/build", b"s" * 32)

fields = st.lists(st.binary(max_size=6) | st.text(max_size=6), max_size=5)
token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(fields, fields)
def test_length_delimited_fields_serialise_alike_only_if_they_are_the_same_bytes(one, other):
    def plain(values):
        return [value.encode() if isinstance(value, str) else value for value in values]

    assert (length_delimited(*one) == length_delimited(*other)) == (plain(one) == plain(other))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"model_revision": "model2"}, id="model-revision"),
        pytest.param({"tokenizer_revision": "tokenizer2"}, id="tokenizer-revision"),
        pytest.param({"adapter_digest": "a"}, id="adapter"),
        pytest.param({"layout": "FP32/16/build"}, id="dtype"),
        pytest.param({"salt": b"t" * 32}, id="salt"),
        pytest.param({"model_revision": "modeltokenizer", "tokenizer_revision": ""}, id="shifted-between-fields"),
        pytest.param({"adapter_digest": "s" * 32, "salt": b""}, id="adapter-equal-to-salt"),
        pytest.param({"model_revision": "tokenizer", "tokenizer_revision": "model"}, id="fields-swapped"),
    ],
)
def test_every_part_of_an_identity_changes_every_key(change):
    import msgspec

    tokens = list(range(64))
    other = msgspec.structs.replace(BASE, **change)
    ours, theirs = page_keys(root_key(BASE), tokens, 16), page_keys(root_key(other), tokens, 16)
    assert not set(ours) & set(theirs)
    assert ours == page_keys(root_key(Identity("model", "tokenizer", "", "BF16/16/build", b"s" * 32)), tokens, 16)


@given(token_lists, token_lists, st.integers(1, 8))
def test_two_prompts_share_exactly_their_common_leading_full_pages(one, other, block):
    keys, theirs = (page_keys(root_key(BASE), tokens, block) for tokens in (one, other))
    common = 0
    for end in range(block, min(len(one), len(other)) + 1, block):
        if one[:end] != other[:end]:
            break
        common += 1
    assert keys[:common] == theirs[:common]
    assert not set(keys[common:]) & set(theirs[common:])


@given(token_lists, st.integers(1, 8))
def test_a_chain_grown_page_by_page_has_the_keys_of_the_whole(tokens, block):
    keys, key = [], root_key(BASE)
    for start in range(0, len(tokens) - block + 1, block):
        key = extend_key(key, tokens[start : start + block])
        keys.append(key)
    assert keys == page_keys(root_key(BASE), tokens, block)


def test_page_keys_follow_their_written_definition():
    """An independent computation of the golden file's keys, from the words in design and docstrings alone."""

    def field(data):
        return struct.pack(">Q", len(data)) + data

    identity = GOLDEN["identity"]
    names = ("modelRevision", "tokenizerRevision", "adapterDigest", "layout")
    root = hashlib.sha256(
        field(b"kvsteward.identity.v1")
        + b"".join(field(identity[name].encode()) for name in names)
        + field(bytes.fromhex(identity["saltHex"]))
    ).digest()
    assert root.hex() == GOLDEN["rootHex"]
    key, keys = root, []
    for start in (0, 16):
        page = struct.pack("<16I", *GOLDEN["tokens"][start : start + 16])
        key = hashlib.sha256(b"kvsteward.page.v1" + key + page).digest()
        keys.append(key.hex())
    assert keys == GOLDEN["keysHex"]


def test_the_scope_salt_follows_its_written_definition():
    given_, fields_ = GOLDEN["saltInput"], b""
    for text in ("kvsteward.salt.v1", given_["kind"], given_["namespace"], given_["uid"], given_["tenant"]):
        fields_ += struct.pack(">Q", len(text)) + text.encode()
    expected = hmac.new(bytes.fromhex(given_["secretHex"]), fields_, "sha256").hexdigest()
    assert expected == GOLDEN["saltHex"]
    salt = scope_salt(
        bytes.fromhex(given_["secretHex"]), given_["kind"], given_["namespace"], given_["uid"], given_["tenant"]
    )
    assert salt.hex() == expected


def test_token_ids_that_fit_no_word_are_refused():
    for token in (-1, 2**32):
        with pytest.raises(OverflowError):
            page_keys(root_key(BASE), [token] * 16, 16)


def test_keys_for_different_purposes_and_names_differ():
    secret = b"k" * 32
    assert len({derived_key(secret, purpose) for purpose in ("cohort", "tenant-digest", "output-digest")}) == 3
    assert opaque_digest(secret, "acme") != opaque_digest(secret, "globex")
    assert output_digest(secret, [1, 2]) != output_digest(derived_key(secret, "x"), [1, 2])
    assert admin_token(secret, "uid-1") != admin_token(secret, "uid-2")
