"""What the operator puts into the cluster for one policy, as plain objects. Pure: no clock, no randomness, no I/O."""
