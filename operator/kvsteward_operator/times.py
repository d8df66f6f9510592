"""Times as the API server writes them: RFC 3339, whole seconds, UTC. Elsewhere times are Unix seconds."""

from datetime import UTC, datetime


def to_text(seconds: float) -> str:
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def to_seconds(text: str) -> float:
    """0.0 for what is no time."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0
