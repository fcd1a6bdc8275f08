"""The files: where they lie on the host, and every access to them from outside the walls.

    a caller's path → paths.resolve → Location → Files → Tree → beneath (openat2) → linux

`paths` is the one path rule; `Tree` one root, held by an fd; `Uploads` what a user put in;
`ConversationFiles` and `DataDirectory` the layout on disk; `HostDirectory` a directory of the
user's as workspace, and `allowed_paths` which of those a sandbox may see; `removal` and `measure`
walk trees that were built to break such walks. `snapshot` tells what a tree holds and `freezing`
copies it, `changes` compares two moments, and `committing` makes the difference real, all or none:
also for who is killed meanwhile (`journal`, `rollback`).
The code inside changes the files at the same time and against us: every name is taken as racing.

Everything here is synchronous and bounded; the runtime calls it in worker threads. Imports only
the standard library, `sbx.linux`, `sbx.protocol`, `sbx.forbidden_directories` and `sbx.errors`.
Errors of linux become sbx's own in `refusals`.
"""

from sbx.protocol.files import Entry, Listing, Upload
from sbx.workspace.files import Files
from sbx.workspace.host_directory import HostDirectory
from sbx.workspace.layout import ConversationFiles, DataDirectory
from sbx.workspace.measure import Usage
from sbx.workspace.paths import Location, Part, check_name, resolve
from sbx.workspace.streams import OpenFile
from sbx.workspace.tree import Tree
from sbx.workspace.uploads import UploadLimits, Uploads

__all__ = [
    "ConversationFiles",
    "DataDirectory",
    "Entry",
    "Files",
    "HostDirectory",
    "Listing",
    "Location",
    "OpenFile",
    "Part",
    "Tree",
    "Upload",
    "UploadLimits",
    "Uploads",
    "Usage",
    "check_name",
    "resolve",
]
