"""The open comms, tracked on the host: a front end may ask while the kernel is busy."""

from typing import Any

from sbx.jupyter.serialize import JupyterMessage

_COMMS_MAX = 20_000  # a large dashboard has some thousands
_NAME_MAX = 256  # characters of an id, and of a target


class Comms:
    """Tracks the messages of both sides. Comms beyond the limits work, but are not listed."""

    def __init__(self) -> None:
        self._targets: dict[str, str] = {}

    def note(self, message: JupyterMessage) -> None:
        """Record that one side opened or closed a comm."""
        name = message.content["comm_id"]
        if message.kind == "comm_close":
            self._targets.pop(name, None)
        elif message.kind == "comm_open" and len(self._targets) < _COMMS_MAX:
            target = message.content["target_name"]
            if max(len(name), len(target)) <= _NAME_MAX:
                self._targets[name] = target

    def listed(self, target: str | None) -> dict[str, Any]:
        """Return the content of the reply: all comms, or those of one target."""
        return {
            "status": "ok",
            "comms": {
                name: {"target_name": own_target}
                for name, own_target in self._targets.items()
                if target in (None, own_target)
            },
        }
