"""The files of conversations: their layout on the host, and each access to them from the host.

    path of a caller → paths.resolve → Location → Files → Tree → safe_open (openat2) → Linux

    paths                    the rule for paths that callers name
    tree                     one tree of files, opened by a directory fd
    uploads                  the files that a user uploaded
    layout, unclaimed        the layout on disk
    host_directory           a directory of the user as the workspace
    host_executable*         which of its names a program of the host would obey
    quarantine               where new host executables wait for the user's approval
    allowed_paths            which host directories a sandbox may see or a client may name
    rmtree, disk_usage       walk trees that were built to break such walks
    snapshots                copies of a tree, and commits of changes: all of them, or none

The code inside changes the files at the same time and is hostile. Treat each name as a race.

Everything here is synchronous and bounded. The runtime calls it in worker threads. The package
imports only the standard library, `sbx.linux`, `sbx.protocol`, `sbx.forbidden_directories`,
`sbx.errors`, and `path_rules`, `guarded_paths` and `quarantine_items` of `sbx.guest`. `errors`
translates errors of Linux into errors of sbx.
"""
