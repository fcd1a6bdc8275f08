"""Format the times of the service for people."""

from datetime import UTC, datetime

_UNITS = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def moment(value: object) -> datetime | None:
    """Parse a time of the service: ISO 8601 with `Z`, or seconds since the epoch."""
    if isinstance(value, (int, float)):
        return datetime.fromtimestamp(value, UTC)
    if not isinstance(value, str):
        return None
    try:
        parsed = datetime.fromisoformat(value)
    except ValueError:
        return None
    return parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)


def since(value: object, now: datetime | None = None) -> str:
    """Return `3 min ago` or `in 2 h`, or an empty text without a time."""
    if (at := moment(value)) is None:
        return ""
    elapsed_s = ((now or datetime.now(UTC)) - at).total_seconds()
    return f"{span(elapsed_s)} ago" if elapsed_s >= 0 else f"in {span(-elapsed_s)}"


def clock(value: object) -> str:
    """Return the time to the second, in the time zone of the user."""
    at = moment(value)
    return at.astimezone().strftime("%Y-%m-%d %H:%M:%S") if at else ""


def span(length_s: float) -> str:
    """Return a duration in the largest unit that fits twice, to limit the rounding error."""
    for unit_s, unit in _UNITS:
        if length_s >= 2 * unit_s:
            return f"{int(length_s // unit_s)} {unit}"
    return f"{int(length_s)} s"


def milliseconds(value: object) -> str:
    if not isinstance(value, (int, float)):
        return ""
    return f"{value:.0f} ms" if value < 10_000 else f"{value / 1000:.1f} s"
