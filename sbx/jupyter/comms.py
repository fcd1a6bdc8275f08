"""Which comms are open, known on the host: a front end asks while the kernel may be busy."""

from typing import Any

from sbx.jupyter.messages import Message

_MOST = 20_000  # a large dashboard has some thousands
_NAME_MAX = 256  # characters of an id, and of a target


class Comms:
    """By what either side said. What is beyond the bounds is passed on, and not listed."""

    def __init__(self) -> None:
        self._targets: dict[str, str] = {}

    def note(self, message: Message) -> None:
        """One that was opened or closed, by whichever side."""
        name = message.content["comm_id"]
        if message.kind == "comm_close":
            self._targets.pop(name, None)
        elif message.kind == "comm_open" and len(self._targets) < _MOST:
            target = message.content["target_name"]
            if max(len(name), len(target)) <= _NAME_MAX:
                self._targets[name] = target

    def listed(self, target: str | None) -> dict[str, Any]:
        """The content of the reply: all, or those of one target."""
        return {
            "status": "ok",
            "comms": {
                name: {"target_name": found}
                for name, found in self._targets.items()
                if target in (None, found)
            },
        }
