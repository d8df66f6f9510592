"""Requests and their pages: which mode is in force, what an admission may match, what may be published.

The one place where a request meets the pool, and so the one place where the epoch is checked. Every call runs under
the engine's lock; none blocks. No torch.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from kvsteward_contract.directive import Directive, EnginePolicy, MissReason, Mode
from kvsteward_contract.identity import root_key

from kvsteward_engine.block_manager import NO_MATCH, BlockManager, Match, Published
from kvsteward_engine.eviction import LRU
from kvsteward_engine.keychain import KeyChain
from kvsteward_engine.request import Request
from kvsteward_engine.settings import EngineSettings
from kvsteward_engine.shadow import ShadowIndex

NO_POLICY = EnginePolicy(epoch=0, version="", retention={})


class Residency:
    """Starts without a policy: everything is Cold until one is set. A scope violation latches the whole engine Cold
    until a policy says that the sidecar knows of it: an epoch that was raised for something else ends no latch."""

    def __init__(self, settings: EngineSettings, content_root: bytes, wall: Callable[[], float]) -> None:
        self._settings = settings
        self._wall = wall
        self._content_root = content_root
        self.policy = NO_POLICY
        self.scope_violations = 0
        self._answered_violations = 0
        self.last_match_seconds = 0.0  # Unix time when a request last took over pages that it had not computed
        self.predicted_tokens = 0  # by the shadow index, over all requests it was asked for
        self.reused_tokens = 0
        self.pages = self._manager()
        self.shadow = ShadowIndex(self._manager())

    def _manager(self) -> BlockManager:
        s = self._settings
        return BlockManager(s.pages, s.block_tokens, LRU(), s.ghost_limit, s.regret_window_seconds)

    # ---- policy

    def set_policy(self, policy: EnginePolicy) -> None:
        """Put a policy in force: from here on nothing matches under an older epoch. One whose epoch is below the
        engine's changes nothing."""
        if policy.epoch < self.policy.epoch:
            return
        if not policy.retention:
            policy = msgspec.structs.replace(policy, retention=self.policy.retention)
        # Never ahead of what was found: a count meant for an earlier process must not answer a later violation.
        self._answered_violations = max(self._answered_violations, min(policy.violations, self.scope_violations))
        self.policy = policy
        self.pages.set_retention(policy.retention)
        self.shadow.pages.set_retention(policy.retention)

    @property
    def latched(self) -> bool:
        """Whether a scope violation holds everything Cold."""
        return self.scope_violations > self._answered_violations

    def epoch_is_current(self, directive: Directive) -> bool:
        """Whether the permission in the directive still stands."""
        return directive.epoch == self.policy.epoch

    def mode_in_force(self, directive: Directive | None) -> Mode:
        """The directive's mode, or Cold for whatever is missing, stale, unknown or latched."""
        if directive is None or directive.mode is Mode.COLD or self.latched:
            return Mode.COLD
        if not self.epoch_is_current(directive) or directive.retention not in self.policy.retention:
            return Mode.COLD
        if not directive.namespace or not directive.scope:
            return Mode.COLD
        return directive.mode

    def root(self, directive: Directive) -> bytes:
        """The key that this request's pages chain on: the engine's identity under the scope's salt."""
        salt = bytes.fromhex(directive.namespace)
        return root_key(msgspec.structs.replace(self._settings.identity, salt=salt))

    def max_in_flight(self, directive: Directive | None) -> int:
        """Running requests that the directive's queue may have; 0 = no limit. Holds for Cold requests too."""
        limits = self.policy.retention.get(directive.retention) if directive is not None else None
        return limits.max_in_flight if limits is not None else 0

    def _violated(self, request: Request) -> None:
        request.violation = True
        self.scope_violations += 1

    # ---- a request's pages

    def admit(self, request: Request, now: float, spare: int) -> bool:
        """Give the request pages for all tokens it has, matched ones where that is allowed; `spare` pages must stay
        available. False, and nothing changed, if there is no room."""
        sequence = request.sequence
        size = self._settings.block_tokens
        pages = self._settings.pages_for(len(sequence.tokens))
        matchable = (len(sequence.tokens) - 1) // size  # never the whole prompt: the last token must be computed
        directive = sequence.directive
        mode = self.mode_in_force(directive)
        reusable = matchable if mode is Mode.REUSE else 0
        if pages - reusable + spare > self.pages.available:
            return False  # not even if everything matched; spares the look-up to a request that waits for room
        match = predicted = NO_MATCH
        if mode is not Mode.COLD and directive is not None:
            chain = request.chain
            if chain is None:
                chain = request.chain = KeyChain(self.root(directive), self._content_root, size)
            chain.extend(sequence.tokens, matchable)
            if mode is Mode.REUSE:
                match = self.pages.lookup(chain, directive.scope, directive.retention, matchable, now)
            predicted = self.shadow.lookup(request, chain, directive, matchable, now)
            if match.violation or predicted.violation:
                self._violated(request)
                mode, match, predicted = Mode.COLD, NO_MATCH, NO_MATCH
        if not self.pages.can_hold(match, pages, spare):
            return False
        self.pages.acquire(request.holding, match, pages, now)
        self.shadow.admitted(request, predicted, pages, now)
        request.mode = mode
        sequence.computed = request.planned = len(match.records) * size
        self._report(request, match if mode is Mode.REUSE else predicted, matchable, now)
        if match.records:
            self.last_match_seconds = self._wall()
        self.reused_tokens += len(match.records) * size
        self.predicted_tokens += len(predicted.records) * size
        request.peak = max(request.peak, pages)
        return True

    def _report(self, request: Request, match: Match, matchable: int, now: float) -> None:
        if request.admitted is None:
            request.admitted = now
            request.epoch = self.policy.epoch
        if request.looked_up or request.mode is Mode.COLD:
            return
        request.looked_up = True
        request.reported_mode = request.mode
        request.epoch = self.policy.epoch
        request.eligible = match.eligible
        request.resident = len(match.records)
        request.reused = len(match.records) if request.mode is Mode.REUSE else 0
        request.misses = dict(match.misses) if matchable else {MissReason.SHORT_PROMPT: 1}

    def grow(self, request: Request, now: float) -> bool:
        """Make room for the next position; False, and nothing changed, if there is none."""
        pages = request.sequence.computed // self._settings.block_tokens + 1
        if pages <= len(request.holding.pages):
            return True
        if not self.pages.grow(request.holding, pages, now):
            return False
        self.shadow.grown(request, pages, now)
        request.peak = max(request.peak, pages)
        return True

    def complete_pages(self, request: Request) -> int:
        """Pages whose content is there in full: only these may ever be published."""
        return request.sequence.computed // self._settings.block_tokens

    def publish(self, request: Request, now: float) -> None:
        """Make the request's complete pages matchable, as far as its mode allows and its permission still stands."""
        directive = request.sequence.directive
        chain = request.chain
        if chain is None or directive is None or request.mode is Mode.COLD:
            return
        complete = self.complete_pages(request)
        if complete <= request.offered:
            return
        request.offered = complete
        if self.mode_in_force(directive) is not request.mode:
            return
        chain.extend(request.sequence.tokens, complete)
        agreed = self.shadow.published(request, chain, directive, complete, now)
        if request.mode is Mode.REUSE:
            agreed = self._publish(request, chain, directive, complete, now) and agreed
        if not agreed:
            self._violated(request)

    def _publish(self, request: Request, chain: KeyChain, directive: Directive, pages: int, now: float) -> bool:
        holding = request.holding
        for place in range(holding.published, pages):
            key, content = chain.keys[place], chain.contents[place]
            result = self.pages.publish(
                holding, key, content, directive.scope, directive.retention, directive.version, now
            )
            if result is Published.VIOLATION:
                return False
            if result is Published.SHARED:
                self.last_match_seconds = self._wall()
            else:
                request.stored += 1
        return True

    def release(self, request: Request, now: float) -> None:
        """Take all of the request's pages back."""
        self.pages.release(request.holding, now)
        self.shadow.released(request, now)
        request.sequence.computed = request.planned = request.offered = 0

    def sweep(self, now: float, pages: int) -> None:
        """Drop expired and over-quota pages, about `pages` at most."""
        self.pages.sweep(now, pages)
        self.shadow.pages.sweep(now, pages)
