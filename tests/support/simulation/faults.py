"""Faults to plant into the product, one at a time: each takes out one thing that an invariant stands on.

A simulation that doesn't notice one of these proves nothing by passing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import msgspec
from kvsteward_contract.directive import Directive, Mode
from kvsteward_contract.identity import Identity, root_key
from kvsteward_contract.policy import KillSwitch
from kvsteward_engine import residency
from kvsteward_engine.residency import Residency
from kvsteward_sidecar import control, kube, permission, policy_source
from kvsteward_sidecar.latch import Latch, LatchFile
from kvsteward_sidecar.permission import Permission, ResourceView


@contextmanager
def skipped_epoch_check() -> Iterator[None]:
    """The engine takes a Directive's word whatever its epoch."""
    with mock.patch.object(Residency, "epoch_is_current", return_value=True):
        yield


@contextmanager
def lost_watch_never_relisted() -> Iterator[None]:
    """The sidecar waits for ever for a watch that went silent."""
    patient = functools.partial(kube.follow, inactivity_seconds=float("inf"))
    with mock.patch.object(policy_source, "follow", patient):
        yield


@contextmanager
def salt_left_out_of_the_key() -> Iterator[None]:
    """Tenants' pages have the same keys. The scope stored in each page catches it: that counts as a violation."""

    def unsalted(identity: Identity) -> bytes:
        return root_key(msgspec.structs.replace(identity, salt=b""))

    with mock.patch.object(residency, "root_key", unsalted):
        yield


@contextmanager
def salt_and_scope_left_out() -> Iterator[None]:
    """As before, and pages don't say whose they are either."""
    of_page = Residency.admit
    of_publishing = Residency.publish

    def everybody(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Residency, request: Any, *rest: Any, **named: Any) -> Any:
            directive: Directive | None = request.sequence.directive
            if directive is not None and directive.mode is not Mode.COLD:
                request.sequence.directive = msgspec.structs.replace(directive, scope="Private/everybody")
            return method(self, request, *rest, **named)

        return call

    with (
        salt_left_out_of_the_key(),
        mock.patch.object(Residency, "admit", everybody(of_page)),
        mock.patch.object(Residency, "publish", everybody(of_publishing)),
    ):
        yield


@contextmanager
def publish_before_compute() -> Iterator[None]:
    """Pages become matchable when they are handed out, before anything is in them."""
    admit = Residency.admit

    def eager(self: Residency, request: Any, now: float, spare: int) -> bool:
        if not admit(self, request, now, spare):
            return False
        computed, request.sequence.computed = request.sequence.computed, len(request.sequence.tokens)
        self.publish(request, now)
        request.sequence.computed = computed
        return True

    with mock.patch.object(Residency, "admit", eager):
        yield


@contextmanager
def latch_not_persisted() -> Iterator[None]:
    """The latch lives in the sidecar's memory alone."""

    def forgotten(self: LatchFile, latch: Latch | None) -> None:
        return None

    with mock.patch.object(LatchFile, "store", forgotten):
        yield


@contextmanager
def kill_switch_of_the_document() -> Iterator[None]:
    """The switch acts only once the operator has written it into the document."""
    permission_for = permission.permission_for

    def indirect(document: Any, version: str, resource: ResourceView | None, *rest: Any) -> Permission:
        made = permission_for(document, version, resource, *rest)
        if document is None:
            return made
        return replace(made, kill_switch=document.rollout.kill_switch is KillSwitch.ENGAGED)

    with mock.patch.object(control, "permission_for", indirect):
        yield
