"""Which side of a rollout a session is on.

A session is hashed into one of 10,000 buckets under a secret seed, so that a conversation stays on one side and nobody
can choose theirs. The canary is cut from the low end (a wider percentage contains every narrower one), the protected
group from the high end, so that the two cannot meet while canary + protected <= 100.
"""

import hmac

BUCKETS = 10_000


def bucket(seed: bytes, session: str) -> int:
    """0 .. 9,999; the modulo's bias is below 2**-50."""
    return int.from_bytes(hmac.digest(seed, session.encode(), "sha256")[:8], "big") % BUCKETS


def in_canary(bucket: int, percent: int) -> bool:
    return bucket < percent * (BUCKETS // 100)


def is_protected(bucket: int, percent: int) -> bool:
    return bucket >= BUCKETS - percent * (BUCKETS // 100)
