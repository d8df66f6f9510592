"""What a call to the API server may raise, named by what the caller should do.

ApiError
+-- NotFound       take it as absent
+-- AlreadyExists  take it as there
+-- Conflict       read again, decide again
+-- Refused        the request itself is wrong (400, 422) or not allowed (401, 403): say so, change something
+-- Unavailable    nothing was decided (no connection, 429, 5xx): try the same again later
"""


class ApiError(Exception):
    """One failed call: `status` is the HTTP status, 0 without an answer; the text is one sentence."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class NotFound(ApiError):
    pass


class AlreadyExists(ApiError):
    pass


class Conflict(ApiError):
    pass


class Refused(ApiError):
    pass


class Unavailable(ApiError):
    pass


def api_error(status: int, reason: str, message: str) -> ApiError:
    """The error that a status answer stands for."""
    if status == 404:
        return NotFound(status, message)
    if status == 409:
        return AlreadyExists(status, message) if reason == "AlreadyExists" else Conflict(status, message)
    if status in (400, 401, 403, 405, 415, 422):
        return Refused(status, message)
    return Unavailable(status, message)
