"""The engine: paged attention state with scopes, scheduling, Llama-family models, an OpenAI-compatible server.

Knows nothing of tenants, stages or Kubernetes: what may be reused it is told request by request, in a Directive, and
by epoch. It never decides who may share with whom, never logs text, token ids or salts, and listens for its sidecar
alone. What decides about pages and turns runs without torch; README.md beside this package says which module is which.
"""
