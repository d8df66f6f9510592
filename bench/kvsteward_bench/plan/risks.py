"""Settings that are accepted and likely to be regretted, each with its reason: a spec in, findings out."""

from __future__ import annotations

from collections.abc import Iterable

from kvsteward_contract.policy import KillSwitch, PolicySpec, Progress, Stage
from kvsteward_contract.quantity import parse_quantity

from kvsteward_bench.plan.findings import Finding, risk

MOVING = {"main", "master", "head", "latest", "dev", "nightly", "stable"}
ANSWER_TOKENS = 4096  # a long answer
TOKENS_PER_SECOND = 40  # of one stream, while its pod is busy
DAY = 86_400


def risks(spec: PolicySpec) -> Iterable[Finding]:
    """Of an acceptable spec."""
    yield from _rollout_risks(spec)
    yield from _scope_risks(spec)
    yield from _engine_risks(spec)


def _rollout_risks(spec: PolicySpec) -> Iterable[Finding]:
    rollout = spec.rollout
    reuses = rollout.stage in (Stage.CANARY, Stage.FULL)
    if reuses and rollout.protected_percent == 0:
        yield risk(
            "NoProtectedGroup",
            "spec.rollout.protectedPercent",
            f"0 at stage {rollout.stage.value} leaves no cold traffic to compare with: a slow-down by the cache can't "
            "be told from load",
        )
    if rollout.protected_percent > 50:
        yield risk(
            "MostlyProtected",
            "spec.rollout.protectedPercent",
            f"{rollout.protected_percent} % of all sessions never reuse anything, whatever the stage",
        )
    if rollout.stage is Stage.CANARY and rollout.canary.percent == 0:
        yield risk(
            "EmptyCanary",
            "spec.rollout.canary.percent",
            "0 at stage Canary: nobody reuses, and the stage tells nothing that Shadow doesn't",
        )
    if reuses and rollout.kill_switch is KillSwitch.ENGAGED:
        yield risk(
            "KillSwitchEngaged",
            "spec.rollout.killSwitch",
            f"Engaged with stage {rollout.stage.value}: nothing is reused, and releasing it goes straight back to "
            f"{rollout.stage.value}; lower the stage first",
        )
    if rollout.progress is Progress.PAUSED:
        yield risk(
            "Paused",
            "spec.rollout.progress",
            "Paused: a stage or canary raised in this file waits, so what runs may be less than what is written",
        )
    answer = min(ANSWER_TOKENS, spec.engine.model.max_tokens // 2)
    wanted = -(-answer // TOKENS_PER_SECOND)
    if spec.rollover.drain_seconds < wanted:
        yield risk(
            "DrainTooShort",
            "spec.rollover.drainSeconds",
            f"{spec.rollover.drain_seconds} s cut answers of {answer:,} tokens, which take some {wanted} s at "
            f"{TOKENS_PER_SECOND} tokens a second, whenever a pod goes",
        )


def _scope_risks(spec: PolicySpec) -> Iterable[Finding]:
    scopes, running = spec.scopes, spec.engine.max_concurrent
    private = scopes.private
    if private.quota_percent == 100 and len(scopes.overrides) > 1:
        yield risk(
            "QuotaWithoutLimit",
            "spec.scopes.private.quotaPercent",
            f"100 with {len(scopes.overrides)} tenants named in overrides: any tenant without a quota of its own may "
            "fill the whole cache and push the others out",
        )
    limits: list[tuple[str, int | None, int | None, int | None]] = [
        ("spec.scopes.private", private.quota_percent, private.max_age_seconds, private.max_in_flight)
    ]
    limits += [
        (f"spec.scopes.overrides[{one.tenant}]", one.quota_percent, one.max_age_seconds, one.max_in_flight)
        for one in scopes.overrides
    ]
    for field, quota, age, in_flight in limits:
        if quota == 0:
            yield risk(
                "NothingRetained",
                f"{field}.quotaPercent",
                "0 keeps no page once its request has ended: nothing can be reused but between requests that overlap",
            )
        if age is not None and age > DAY:
            yield risk(
                "LongRetention",
                f"{field}.maxAgeSeconds",
                f"{age:,} keeps what tenants wrote in memory for {age / DAY:.1f} days after its last use",
            )
        if in_flight is not None and in_flight > running:
            yield risk(
                "NoEffect",
                f"{field}.maxInFlight",
                f"{in_flight:,} is more than maxConcurrent {running:,}, which comes first",
            )


def _engine_risks(spec: PolicySpec) -> Iterable[Finding]:
    engine, block = spec.engine, spec.cache.block_tokens
    if engine.replicas == 0:
        yield risk("NoReplicas", "spec.engine.replicas", "0: no pod serves until somebody scales it up")
    if engine.replicas == 1:
        yield risk(
            "OneReplica",
            "spec.engine.replicas",
            "1: while its only pod is down nothing is served, and a node drain interrupts everything",
        )
    for name, revision in (("revision", engine.model.revision), ("tokenizerRevision", engine.model.tokenizer_revision)):
        if revision.lower() in MOVING:
            yield risk(
                "MovingRevision",
                f"spec.engine.model.{name}",
                f"{revision} may mean other weights tomorrow, and pages are told apart by this word alone: write a "
                "commit, a digest or a date",
            )
    if engine.image and "@" not in engine.image:
        tag = engine.image.rpartition("/")[2].partition(":")[2]
        if tag in ("", "latest"):
            yield risk(
                "MovingImage",
                "spec.engine.image",
                f"{engine.image} may be another build after a pod restart, on some pods and not on others: name a "
                "version or a digest",
            )
    if block > 64:
        yield risk(
            "LargePages",
            "spec.cache.blockTokens",
            f"only whole pages are reused: prompts that share fewer than {block} tokens share nothing, and each "
            f"sequence loses up to {block - 1} tokens of memory",
        )
    if block < 8:
        yield risk(
            "SmallPages",
            "spec.cache.blockTokens",
            f"{block}: a key and a record for every {block} tokens cost more time than the finer match saves",
        )
    memory = engine.resources.limits.get("memory")
    if memory is not None and not any("/" in resource for resource in engine.resources.limits):
        capacity, limit = parse_quantity(spec.cache.capacity), parse_quantity(str(memory))
        if capacity * 4 > limit * 3:
            yield risk(
                "TightMemory",
                "spec.engine.resources.limits.memory",
                f"the pool takes {capacity / limit:.0%} of {memory}; weights and the process must fit into the rest",
            )
