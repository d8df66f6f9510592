"""What keeps a plan from being made: one sentence that says what to do."""


class CannotPlan(ValueError):
    """The model, or what was asked, can't be planned."""
