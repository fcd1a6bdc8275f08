"""The memory shortage of this host: psutil, and PSI (Documentation/accounting/psi)."""


def available() -> tuple[int, int]:
    """Return (the bytes that programs could use without swapping, the bytes in total)."""
    import psutil  # 6 ms, which the first kernel does not need

    memory = psutil.virtual_memory()
    return memory.available, memory.total


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
