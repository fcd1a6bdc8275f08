"""Comms: the two-way channel of widgets, over frames instead of ZMQ.

The `comm` package lets the kernel decide how a comm is made and how its messages are sent.
`install` sets this up, as ipykernel does. Binary buffers travel as base64.
"""

import base64
from collections.abc import Callable, Mapping
from typing import Any

import comm
from comm.base_comm import BaseComm, CommManager

from sbx.guest import frames

# Keys of a frame that do not belong to the content of the comm's message.
_ENVELOPE_KEYS = frozenset({"metadata", "buffers", "output_max", "msg_id"})

Publish = Callable[[str, Mapping[str, Any]], None]


def install(publish: Publish) -> CommManager:
    """Let `comm.create_comm` make comms that send their frames with `publish`."""
    manager = CommManager()

    class FrameComm(BaseComm):
        def publish_msg(
            self,
            msg_type: str,
            data: Any = None,
            metadata: Any = None,
            buffers: Any = None,
            **keys: Any,
        ) -> None:
            metadata = metadata or {}
            frames.check_json([data, metadata])
            content = {"comm_id": self.comm_id, "data": data or {}, "metadata": metadata}
            if buffers:
                if len(buffers) > frames.MAX_BUFFERS:
                    raise frames.FrameError(
                        f"{len(buffers)} buffers at once: the limit is {frames.MAX_BUFFERS}"
                    )
                content["buffers"] = [base64.b64encode(part).decode() for part in buffers]
            if "target_name" in keys:
                content["target_name"] = keys["target_name"]
            publish(msg_type, content)

    comm.create_comm = FrameComm
    comm.get_comm_manager = lambda: manager
    return manager


def deliver(manager: CommManager, kind: str, content: Mapping[str, Any]) -> None:
    """Hand a `comm_open`, `comm_msg` or `comm_close` from the host to its comm.

    The `comm` package logs errors of its handler on stderr, as in Jupyter.
    """
    message = {
        "header": {"msg_type": kind, "msg_id": content.get("msg_id", "")},
        "content": {key: value for key, value in content.items() if key not in _ENVELOPE_KEYS},
        "metadata": content.get("metadata") or {},
        "buffers": [base64.b64decode(part) for part in content.get("buffers") or ()],
    }
    getattr(manager, kind)(None, None, message)
