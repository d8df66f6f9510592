"""`kubectl kvcache`, which is also `kvsteward cluster`: policies on a cluster, seen and steered by people.

It reads and edits the KVCachePolicy and asks the pods' admin ports; it needs neither the operator nor anything that is
installed for it in the cluster. `api.py` is the one module that talks to Kubernetes; tables, next stages, verdicts and
differences are pure.
"""
