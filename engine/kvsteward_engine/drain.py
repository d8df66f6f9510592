"""`kvsteward-engine drain`: the pod's preStop hook. Asks the sidecar to drain, and waits until it has.

Standard library alone, and no torch: it must start fast, in a container that is about to be stopped.
"""

import http.client
from urllib.parse import urlsplit

GRACE_SECONDS = 10  # the answer may come this much after the deadline


def drain(url: str, seconds: int) -> str | None:
    """Returns None once drained, or if there is nobody to ask; else one sentence that says what went wrong."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "http" or not parts.hostname or port is None:
        return f"--url {url} is not of the form http://host:port"
    connection = http.client.HTTPConnection(parts.hostname, port, timeout=seconds + GRACE_SECONDS)
    try:
        connection.request("POST", f"/drain?seconds={seconds}", headers={"Content-Length": "0"})
        status = connection.getresponse().status
    except TimeoutError:
        return f"the sidecar at {url} did not finish draining within {seconds + GRACE_SECONDS} seconds"
    except (OSError, http.client.HTTPException):
        return None  # the sidecar is gone, and so is all traffic
    finally:
        connection.close()
    return None if status < 300 else f"the sidecar at {url} answered the drain with status {status}"
