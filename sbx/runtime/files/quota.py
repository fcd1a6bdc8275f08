"""Which of two means holds a conversation's files to their size here: linux's quota, or our looks.

Decided once for each opening of the files: a quota takes root's broker and a file system that has
them, and the setting `disk_quota` says whether less will do.
"""

from sbx.errors import CannotEnforce
from sbx.isolation.plan import Wall
from sbx.isolation.probe import Capabilities, Layer
from sbx.policy import Policy
from sbx.runtime.files.open_files import OpenFiles
from sbx.runtime.resources import RuntimeResources

WATCHED = (
    "watched: looked at every 0.5 s of a run, sooner when the disk fills, and the kernel killed;"
    " until then a writer of 1 GB/s may leave about 0.3 GB too much, and another 1 GB where walking"
    " its files takes as long as it may; the host's own disk is what ends many such kernels"
)
_FOREIGN = "nothing: a directory of the host is the workspace"
_OLD = "this workspace is older than the quota of its file system, and its files do not count there"
_NAMES = 5  # of a workspace, which are there before anything is put into it


def refused(setting: str, capabilities: Capabilities) -> CannotEnforce | None:
    """Why no sandbox is to be had here, by the setting; pure."""
    layer = capabilities.layer("disk")
    if setting != "required" or layer.found:
        return None
    return _cannot(str(layer.cause), layer.remedy)


def wall(setting: str, layer: Layer, *, charged: bool, ours: bool, policy: Policy) -> Wall:
    """What the receipt says; pure."""
    demanded = "hard" if setting == "required" else "best-effort"
    if not ours:
        return Wall("disk", demanded, _FOREIGN, weaker=True)
    if not charged:
        return Wall("disk", demanded, WATCHED, weaker=True)
    limits = policy.limits
    sizes = f"{limits.workspace_max} bytes, {limits.workspace_files} files and directories"
    return Wall("disk", demanded, f"quota, hard: {layer.detail}, {sizes}")


async def limited(means: RuntimeResources, policy: Policy, opened: OpenFiles) -> OpenFiles:
    """The files, from now on held to the size that the policy gives them. Before a jail uses them.

    Raises CannotEnforce where the setting requires what cannot be had.
    """
    layer, setting = means.capabilities.layer("disk"), means.disk_quota
    ours = opened.measured is not None
    if ours and layer.found and setting != "off":
        limits = policy.limits
        charged = True
        for path in (opened.own.path, opened.shared_path):
            if path is not None:
                charged &= await means.broker.charge(
                    str(path),
                    bytes_max=limits.workspace_max,
                    inodes_max=limits.workspace_files + _NAMES,
                )
        opened.has_quota = charged
    if setting == "required" and not opened.has_quota:
        await opened.close()
        if not ours:
            raise _cannot(_FOREIGN, "let sbx make the workspace, and copy what it is to hold")
        raise _cannot(_OLD, "copy its files into a new conversation")
    opened.disk = wall(setting, layer, charged=opened.has_quota, ours=ours, policy=policy)
    return opened


def _cannot(cause: str, remedy: str | None) -> CannotEnforce:
    return CannotEnforce(
        f"the setting disk_quota requires a hard quota, and there is none: {cause}",
        hint=remedy,
        details={"layer": "disk", "cause": cause, "remedy": remedy},
    )
