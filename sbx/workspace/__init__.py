"""The files of conversations: their layout on the host, and each access to them from the host.

    path of a caller → paths.resolve → Location → Files → Tree → beneath (openat2) → Linux

    paths                  the rule for paths that callers name
    Tree                   one tree of files, opened by a directory fd
    Uploads                the files that a user uploaded
    ConversationFiles, DataDirectory
                           the layout on disk
    HostDirectory          a directory of the user as the workspace
    allowed_paths          which host directories a sandbox may see, and which ones clients may name
    removal, measure       walk trees that were built to break such walks
    snapshot, freezing     list the nodes of a tree, copy a tree
    changes                compare two snapshots
    committing             apply changes: all of them, or none
    journal, rollback      undo a commit whose process was killed

The code inside changes the files at the same time and is hostile. Treat each name as a race.

Everything here is synchronous and bounded. The runtime calls it in worker threads. The package
imports only the standard library, `sbx.linux`, `sbx.protocol`, `sbx.forbidden_directories`,
`sbx.guest.path_rules`, `sbx.guest.guarded_paths` and `sbx.errors`. `refusals` translates errors of
Linux into errors of sbx.
"""

from sbx.protocol.files import FileEntry, Listing, Upload
from sbx.workspace.disk_usage import DiskUsage
from sbx.workspace.files import Files
from sbx.workspace.host_directory import HostDirectory
from sbx.workspace.layout import ConversationFiles, DataDirectory
from sbx.workspace.paths import Location, WorkspaceArea, check_name, resolve
from sbx.workspace.streams import OpenFile
from sbx.workspace.tree import Tree
from sbx.workspace.uploads import UploadLimits, Uploads

__all__ = [
    "ConversationFiles",
    "DataDirectory",
    "DiskUsage",
    "FileEntry",
    "Files",
    "HostDirectory",
    "Listing",
    "Location",
    "OpenFile",
    "Tree",
    "Upload",
    "UploadLimits",
    "Uploads",
    "WorkspaceArea",
    "check_name",
    "resolve",
]
