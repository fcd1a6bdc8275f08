"""The start configuration of a kernel."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """The `kernel` part of the boot frame: `KernelConfig(**frame["kernel"])`."""

    preload: Sequence[str] = ()
    """Modules to import before the first cell; `ready` names those that fail."""
    import_rules: Mapping[str, Any] | None = None
    """`{"allow": [names] or None, "forbid": [names]}`; see `sbx.guest.import_rules`."""
    packages: bool = False
    """Whether directories of packages may appear while the kernel lives."""
    processes: bool = True
    walls: bool = True
    """Whether to explain an error by the walls around the kernel."""
    user: str = "sandbox"
    home: str = "/workspace"
    cwd: str = "/workspace"
    output_max: int | None = None
    """Bytes that a run may output if its request has no limit; None is unlimited."""
    mime_max: int = 8 * 1024 * 1024
    """Bytes of one rich output; a note replaces larger output."""
    generated: str | None = None
    """A directory to create again before each run if code removed it."""
    planted: Mapping[str, str] | None = None
    """Files to create below /tmp before the first cell: path and content."""
