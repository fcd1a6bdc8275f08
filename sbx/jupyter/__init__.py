"""Jupyter: a jailed kernel for any notebook client, by its own protocol over ZeroMQ.

    provisioner   what jupyter_client asks to start a kernel (entry point `sbx`)
    kernelspec    what `sbx kernelspec install` writes
    __main__      the same as a process of its own: `python -P -m sbx.jupyter -f CONNECTION_FILE`
    connection_file   what that process is handed, read with care
    notebook      what both doors hold: a seat, and a bridge
    seat          which sandbox a notebook gets, and for how long: its directory, or one kept for it
    directory     which directories of the host may be that
    bridge        five ZeroMQ sockets before one kernel after the other
    life          one of these kernels, from its start to its end: who is served when, who waits
    answers       what becomes of each request, and of what the kernel shows
    channels      messages in and out: signed, and never held up by a client that does not read
    gathering     text that belongs together becomes one message
    sockets       bound where the connection says, and bounded
    connection    where that is
    waiting       requests in line for the kernel
    requests      what a client may ask, checked; pure
    messages      a frame of ours as the messages of Jupyter; pure
    history       what was executed, for those who ask
    comms         which comms are open, for those who ask

The sockets are bound here, on the host, with a key that the inside never sees. What comes from
inside has passed `sbx.kernels.frames` before any of it is put into a message.
"""

DEFAULT_POLICY = "notebook"
"""Of a kernel for which no other is named."""
