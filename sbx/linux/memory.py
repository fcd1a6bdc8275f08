"""How short of memory this host is: proc_meminfo(5), and PSI (Documentation/accounting/psi)."""

_KIB = 1024


def available() -> tuple[int, int]:
    """(bytes that programs could take without swapping, bytes in all)."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        fields = dict(line.split(":", 1) for line in lines)
    return tuple(int(fields[name].split()[0]) * _KIB for name in ("MemAvailable", "MemTotal"))  # type: ignore[return-value]


def stalled() -> float:
    """Per cent of the last 10 s in which some task waited for memory; 0 where linux does not say.

    It says so since 4.20, unless it was built or started without.
    """
    try:
        with open("/proc/pressure/memory", encoding="ascii") as lines:
            some = next(line for line in lines if line.startswith("some "))
    except (OSError, StopIteration):
        return 0.0
    return float(dict(word.split("=") for word in some.split()[1:])["avg10"])
