"""Comms: the two-way channel of widgets, over frames instead of ZMQ.

The `comm` package asks whoever runs the kernel to say how a comm is made and how its messages
leave; `install` does that, as ipykernel does for its own. Binary buffers, for which a frame has no
place, travel as base64 in the metadata, under `buffers_base64`.
"""

import base64
from collections.abc import Callable, Mapping
from typing import Any

import comm
from comm.base_comm import BaseComm, CommManager

from sbx.guest import frames

_BUFFERS = "buffers_base64"

Publish = Callable[[str, Mapping[str, Any]], None]


def install(publish: Publish) -> CommManager:
    """From now on `comm.create_comm` makes comms that publish their frames by `publish`."""
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
            metadata = dict(metadata or {})
            if buffers:
                metadata[_BUFFERS] = [base64.b64encode(part).decode() for part in buffers]
            frames.check_json([data, metadata])
            content = {"comm_id": self.comm_id, "data": data or {}, "metadata": metadata}
            if "target_name" in keys:
                content["target_name"] = keys["target_name"]
            publish(msg_type, content)

    comm.create_comm = FrameComm
    comm.get_comm_manager = lambda: manager
    return manager


def deliver(manager: CommManager, kind: str, content: Mapping[str, Any]) -> None:
    """Hand a `comm_open`, `comm_msg` or `comm_close` of the other side to whom it is for.

    What its handler raises is logged by the `comm` package, on stderr, as in Jupyter.
    """
    metadata = content.get("metadata") or {}
    message = {
        "header": {"msg_type": kind},
        "content": dict(content),
        "metadata": metadata,
        "buffers": [base64.b64decode(part) for part in metadata.get(_BUFFERS) or ()],
    }
    getattr(manager, kind)(None, None, message)
