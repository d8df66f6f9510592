"""The `kvsteward` command: KVSteward on a laptop, and what people need beside a cluster.

The top layer: it may start and import any part, lazily, so that each command needs only the extras it uses. No part
imports it.
"""
