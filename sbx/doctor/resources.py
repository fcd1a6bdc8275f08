"""The CPUs, the memory and the load of this host."""

import psutil
from msgspec import Struct

_MEMORY_MIN = 512 << 20  # bytes
_LOAD_MAX = 4.0  # for each CPU


class HostResources(Struct, frozen=True):
    """`cpus` that this process may use, memory in bytes, and the load of the last minute."""

    cpus: int
    memory_total: int
    memory_available: int
    load: float

    @classmethod
    def read(cls) -> "HostResources":
        memory = psutil.virtual_memory()
        cpus = len(psutil.Process().cpu_affinity() or ()) or 1
        return cls(cpus, memory.total, memory.available, psutil.getloadavg()[0])

    def sentence(self) -> str:
        available, total = self.memory_available / (1 << 30), self.memory_total / (1 << 30)
        memory = f"{available:.1f} of {total:.1f} GiB of memory available"
        return f"{self.cpus} CPUs, {memory}, load {self.load:.1f}"

    def hints(self) -> list[tuple[str, str]]:
        """Return the shortages, each with a label."""
        hints = []
        if self.memory_available < _MEMORY_MIN:
            text = "less than 512 MiB of memory is available: kernels may be killed"
            hints.append(("memory", text))
        if self.load > _LOAD_MAX * self.cpus:
            text = f"the load is {self.load:.0f} on {self.cpus} CPUs: starts and runs take longer"
            hints.append(("load", text))
        return hints
