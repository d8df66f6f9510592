"""The sidecar of a model server: one request at a time, who sent it, may it reuse, what happened.

It may import `kvsteward_contract` and nothing of the operator, the engine or the bench: it talks to the engine over
HTTP and to the operator through a document, a resource and its admin port. It never holds prompts or answers longer
than it takes to pass them on, and never writes text, token ids, tenant names or salts anywhere.
"""
