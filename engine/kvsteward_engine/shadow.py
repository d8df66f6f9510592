"""The content-free index behind Shadow: what would be matched if every request that may be predicted were reused.

It is the block manager itself, with the same capacity, quotas, ages and eviction, mirroring every allocation and every
publication of the real one, so that its prediction includes memory pressure. Cold requests take capacity in it and are
never indexed. It holds keys and page numbers of its own; nothing it says can make a page of the real pool be used.
"""

from __future__ import annotations

from kvsteward_contract.directive import Directive

from kvsteward_engine.block_manager import BlockManager, Match, Published
from kvsteward_engine.keychain import KeyChain
from kvsteward_engine.request import Request


class ShadowIndex:
    """Mirrors requests into a block manager of its own. Where the mirror has no room (its order of eviction differs
    from the real one's, so it rarely may), it lets that request go and predicts nothing more for it: a prediction is
    never a reason to hold up a request."""

    def __init__(self, pages: BlockManager) -> None:
        self.pages = pages

    def lookup(self, request: Request, chain: KeyChain, directive: Directive, pages: int, now: float) -> Match:
        """What this request would find."""
        return self.pages.lookup(chain, directive.scope, directive.retention, pages, now)

    def admitted(self, request: Request, match: Match, pages: int, now: float) -> None:
        """The request was given `pages` pages."""
        request.shadow_lost = not self.pages.can_hold(match, pages)
        if not request.shadow_lost:
            self.pages.acquire(request.shadow, match, pages, now)

    def grown(self, request: Request, pages: int, now: float) -> None:
        """The request was given more pages, `pages` in all."""
        if not request.shadow_lost and not self.pages.grow(request.shadow, pages, now):
            self._lose(request, now)

    def published(self, request: Request, chain: KeyChain, directive: Directive, pages: int, now: float) -> bool:
        """The request's first `pages` pages are complete. False if a key is taken in another scope."""
        holding = request.shadow
        while not request.shadow_lost and holding.published < pages:
            place = holding.published
            result = self.pages.publish(
                holding,
                chain.keys[place],
                chain.contents[place],
                directive.scope,
                directive.retention,
                directive.version,
                now,
            )
            if result is Published.VIOLATION:
                return False
        return True

    def released(self, request: Request, now: float) -> None:
        """The request holds nothing any more."""
        self.pages.release(request.shadow, now)

    def _lose(self, request: Request, now: float) -> None:
        request.shadow_lost = True
        self.pages.release(request.shadow, now)
