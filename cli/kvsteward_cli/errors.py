"""How a command fails: one sentence for a person, and an exit status."""


class CommandFailed(Exception):
    """The command can't do, or go on with, what was asked. `status`: 2 for a wrong request, 1 for what broke."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status
