"""The demo: one story of a policy's rollout, told on a cluster or by `kvsteward local`, that fails unless all of it was
seen to happen."""
