"""The server process: sockets, rights and protocols, before any route.

serve, sockets, systemd            the listening sockets, and the end of the process
privileges, private_mounts         drop the rights of root
http_protocol, websocket_protocol  uvicorn's protocols, with limits
peer_credentials                   the user at the other end of a Unix socket
project_process                    the process with the rights for directories of projects
preload                            imports in a thread, after the start
settings                           the settings of `sbx serve`
"""
