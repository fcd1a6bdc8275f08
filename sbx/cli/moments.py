"""Times of the service as a person reads them."""

from datetime import UTC, datetime

_UNITS = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def moment(told: object) -> datetime | None:
    """What the service told: ISO 8601 with `Z`, or seconds of the epoch."""
    if isinstance(told, (int, float)):
        return datetime.fromtimestamp(told, UTC)
    if not isinstance(told, str):
        return None
    try:
        read = datetime.fromisoformat(told)
    except ValueError:
        return None
    return read if read.tzinfo else read.replace(tzinfo=UTC)


def since(told: object, now: datetime | None = None) -> str:
    """`3 min ago`, `in 2 h`, or nothing where nothing was told."""
    if (at := moment(told)) is None:
        return ""
    gone = ((now or datetime.now(UTC)) - at).total_seconds()
    return f"{span(gone)} ago" if gone >= 0 else f"in {span(-gone)}"


def clock(told: object) -> str:
    """The moment itself, to the second, in the time of this machine's user."""
    at = moment(told)
    return at.astimezone().strftime("%Y-%m-%d %H:%M:%S") if at else ""


def span(length_s: float) -> str:
    """The largest unit that it has two of, so that nothing is off by a half."""
    for unit_s, unit in _UNITS:
        if length_s >= 2 * unit_s:
            return f"{int(length_s // unit_s)} {unit}"
    return f"{int(length_s)} s"


def milliseconds(told: object) -> str:
    if not isinstance(told, (int, float)):
        return ""
    return f"{told:.0f} ms" if told < 10_000 else f"{told / 1000:.1f} s"
