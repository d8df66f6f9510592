"""What the sidecar costs: added time to first token, CPU a chunk and a request, memory, how fast a cancel arrives.

A generator and a fast fake engine share one process and one core; the proxy under test has another core to itself. The
same load goes straight to the engine, through nginx and through the sidecar, in one run, so that the machine's state
cancels out. Run `python -m kvsteward_bench.sidecar`; the last line is JSON.
"""
