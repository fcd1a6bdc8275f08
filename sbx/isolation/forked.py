"""Handles do not survive a fork; see `sbx.protocol.handles`."""

from sbx.protocol.handles import check_process

__all__ = ["check_process"]
