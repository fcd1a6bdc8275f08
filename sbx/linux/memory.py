"""The memory shortage of this host: proc_meminfo(5), and PSI (Documentation/accounting/psi)."""

_KIB = 1024


def available() -> tuple[int, int]:
    """Return (the bytes that programs could use without swapping, the bytes in total)."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        fields = dict(line.split(":", 1) for line in lines)
    return tuple(int(fields[name].split()[0]) * _KIB for name in ("MemAvailable", "MemTotal"))  # type: ignore[return-value]


def stalled() -> float:
    """Return the percentage of the last 10 s in which some task waited for memory.

    Return 0 if Linux does not report it. Linux has reported it since 4.20, unless it was built or
    booted without PSI.
    """
    try:
        with open("/proc/pressure/memory", encoding="ascii") as lines:
            some = next(line for line in lines if line.startswith("some "))
    except (OSError, StopIteration):
        return 0.0
    return float(dict(word.split("=") for word in some.split()[1:])["avg10"])
