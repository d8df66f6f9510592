"""Capacity planning: what a model's cache costs, what fits into a pool, which technique answers which constraint, and
which settings of a policy are risky.

Arithmetic and tables alone: reads no weights, asks no engine and imports nothing of the other parts but contract/.
What the engine can serve today is told to it by the command that has both.
"""
