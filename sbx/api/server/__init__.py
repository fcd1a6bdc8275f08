"""The server process: sockets, rights and protocols, before any route.

serve, sockets, systemd   the listening sockets, and the end of the process
privileges, private_mounts  what a service started as root gives up
http_protocol, websocket_protocol  uvicorn's protocols, with limits
peer_credentials          who is at the other end of a Unix socket
project_process           the process that works as the owner of a project
settings                  the settings of `sbx serve`
"""
