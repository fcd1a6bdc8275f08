"""Jupyter: a jailed kernel for any notebook client, by its own protocol over ZeroMQ.

    provisioner         starts kernels for jupyter_client (entry point `sbx`)
    kernelspec          writes the kernelspec for `sbx kernelspec install`
    __main__            a kernel as a process: `python -I -m sbx.jupyter -f CONNECTION_FILE`
    connection_file     reads the connection file of that process with care
    notebook            one notebook, for both entry points: a sandbox and a bridge, which is five
                        ZeroMQ sockets in front of one kernel after the other
    notebook_sandbox    the sandbox of a notebook and its lifetime
    directory           decides which host directories may be a notebook's workspace
    kernel_session      one of these kernels, from its start to its end, and its requests in order
    handlers            answer each request, and publish the output of the kernel
    channels            messages in and out: signed, and not blocked by a client that does not read
    sockets             the sockets, bound to the addresses of the connection, with limits
    connection          the addresses and keys
    parse, serialize    pure: checked requests of a client; frames as Jupyter messages
    history             the executed cells, for history requests

The sockets are bound here, on the host, with a key that the sandbox never sees. Data from inside
passes `sbx.kernels.frames` before any of it is put into a message.
"""

DEFAULT_POLICY = "notebook"
"""The policy of a kernel whose kernelspec names no other."""
