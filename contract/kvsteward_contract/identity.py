"""Who may share a page with whom: identities, page keys, scope salts and the keys derived from a policy's secret.

Every input of a digest is length-delimited and tagged with a version, so that no two different inputs serialise alike
(the same string in two fields, an adapter named like a salt). Token ids enter as little-endian unsigned 32-bit words.
"""

import hashlib
import hmac
from array import array
from collections.abc import Sequence
from sys import byteorder

import msgspec

IDENTITY_TAG = b"kvsteward.identity.v1"
PAGE_TAG = b"kvsteward.page.v1"
SALT_TAG = b"kvsteward.salt.v1"
DERIVE_TAG = b"kvsteward.derive.v1"
ADMIN_TAG = b"kvsteward.admin.v1"

DIGEST_BYTES = 32


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """All that changes what a page means. Two requests share a page only if these and every token id are equal."""

    model_revision: str
    tokenizer_revision: str
    adapter_digest: str  # "" = the base model
    layout: str  # dtype, block size and engine build, as the engine names them
    salt: bytes  # the scope's, see `scope_salt`


def length_delimited(*fields: bytes | str) -> bytes:
    """Fields, each behind its length as 8 big-endian bytes; injective over sequences of fields."""
    parts = []
    for field in fields:
        data = field.encode() if isinstance(field, str) else field
        parts.append(len(data).to_bytes(8, "big"))
        parts.append(data)
    return b"".join(parts)


def root_key(identity: Identity) -> bytes:
    """The key that an identity's first page chains on (32 bytes)."""
    fields = (identity.model_revision, identity.tokenizer_revision, identity.adapter_digest, identity.layout)
    return hashlib.sha256(length_delimited(IDENTITY_TAG, *fields, identity.salt)).digest()


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids as fixed-width words. Raises OverflowError for ids outside 0 .. 2**32-1."""
    words = array("I", tokens)
    if byteorder == "big":
        words.byteswap()
    return words.tobytes()


def extend_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of the page that holds `tokens`, after the page with key `parent` (or a root key)."""
    return hashlib.sha256(PAGE_TAG + parent + token_bytes(tokens)).digest()


def page_keys(root: bytes, tokens: Sequence[int], block_tokens: int) -> list[bytes]:
    """Keys of every full page of `tokens`, first page first. All pages of a chain have the same size, which the
    layout in the identity names, so tag, parent and words need no further delimiting."""
    words = memoryview(token_bytes(tokens))
    size = 4 * block_tokens
    keys = []
    key, sha256 = root, hashlib.sha256
    for start in range(0, len(words) - size + 1, size):
        key = sha256(b"".join((PAGE_TAG, key, words[start : start + size]))).digest()
        keys.append(key)
    return keys


def scope_salt(secret: bytes, kind: str, namespace: str, uid: str, tenant: str) -> bytes:
    """The salt of a scope (32 bytes): a client can neither choose nor compute it."""
    return hmac.digest(secret, length_delimited(SALT_TAG, kind, namespace, uid, tenant), "sha256")


def derived_key(secret: bytes, purpose: str) -> bytes:
    """A key (32 bytes) for one purpose, so that no key serves two: see the PURPOSE constants."""
    return hmac.digest(secret, length_delimited(DERIVE_TAG, purpose), "sha256")


COHORT_PURPOSE = "cohort"
TENANT_PURPOSE = "tenant-digest"
OUTPUT_PURPOSE = "output-digest"


def opaque_digest(key: bytes, text: str) -> str:
    """A stand-in (32 hex digits) for a name that may not be shown, stable under one key."""
    return hmac.digest(key, text.encode(), "sha256")[:16].hex()


def output_digest(key: bytes, tokens: Sequence[int]) -> str:
    """Digest of generated token ids (32 hex digits). Keyed: a plain digest of a short answer gives the answer away."""
    return hmac.digest(key, token_bytes(tokens), "sha256")[:16].hex()


def admin_token(operator_key: bytes, uid: str) -> str:
    """The bearer token (64 hex digits) of the admin endpoints of the policy with this uid."""
    return hmac.digest(operator_key, length_delimited(ADMIN_TAG, uid), "sha256").hex()
