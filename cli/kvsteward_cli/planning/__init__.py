"""`kvsteward plan`, `kvsteward advise`, `kvsteward lint`: files in, text or JSON out; nothing is asked of a network.

The arithmetic is kvsteward_bench.plan's. What the engine serves today is asked of the engine and the contract here.
"""
