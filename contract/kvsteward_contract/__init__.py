"""What KVSteward's parts say to each other, and the decisions they must agree on.

Types are frozen `msgspec` structs that reject unknown fields; decisions are pure functions. This package does no I/O
and imports neither torch, aiohttp, kopf nor kubernetes, so that each part can use it without the others' dependencies.
"""
