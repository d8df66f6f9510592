"""The operator: turns KVCachePolicy resources into pods, and what the pods report into status and events.

Level-based: each pass reads the world, decides, applies once. `decide`, `acceptance`, `generations`, `conditions`,
`history`, `events`, `evidence` and `objects` are pure; `api` alone speaks to the API server, `scrape` alone to pods.
It imports `kvsteward_contract` and nothing of the sidecar, the engine or the bench, and never handles a prompt.
"""
