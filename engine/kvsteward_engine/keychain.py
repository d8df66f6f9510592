"""The page keys of one sequence, computed a page at a time as its tokens become known. No torch, no pages."""

from __future__ import annotations

from collections.abc import Sequence

from kvsteward_contract.identity import page_keys


class KeyChain:
    """Two chained digests a page: `keys` start from the whole identity, salt included, and are what pages are matched
    by; `contents` start from a secret of this process alone and only tell, for a page that missed, whether the same
    tokens are resident under another scope or revision."""

    __slots__ = ("_block_tokens", "_content_root", "_root", "contents", "keys")

    def __init__(self, root: bytes, content_root: bytes, block_tokens: int) -> None:
        self._root = root
        self._content_root = content_root
        self._block_tokens = block_tokens
        self.keys: list[bytes] = []
        self.contents: list[bytes] = []

    def extend(self, tokens: Sequence[int], pages: int) -> None:
        """Make sure that the keys of the first `pages` full pages of `tokens` are there. A page's tokens never change
        once it is full, so keys once computed stay."""
        known = len(self.keys)
        if pages <= known:
            return
        block = self._block_tokens
        fresh = tokens[known * block : pages * block]
        self.keys += page_keys(self.keys[-1] if known else self._root, fresh, block)
        self.contents += page_keys(self.contents[-1] if known else self._content_root, fresh, block)
