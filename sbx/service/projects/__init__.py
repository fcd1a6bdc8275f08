"""Sandboxes over a project directory of the host, with and without walls.

projects           the projects of a service
sessions, session  the sessions of a project
sandbox            a sandbox over the directory
server, client, calls  a process that runs as the owner of the directory, and its protocol
host_mode, host_files  a session without walls
"""
