"""net: addresses, families of sockets, sockets of the host."""

from sbx.doctor.attacks.attack import Class, attacks

_NO_ROUTE = ("ENETUNREACH", "ECONNREFUSED", "EADDRNOTAVAIL", "EHOSTUNREACH", "EAFNOSUPPORT")
_NO_FAMILY = ("EAFNOSUPPORT", "EPROTONOSUPPORT", "ESOCKTNOSUPPORT")

REACH = attacks(
    Class.NET,
    "namespaces",
    {
        "connect to a service of the host": (
            "connect(socket.AF_INET, ('127.0.0.1', HOST['port']))"
        ),
        "connect to a service of the host by IPv6": (
            "connect(socket.AF_INET6, ('::ffff:127.0.0.1', HOST['port']))"
        ),
        "connect to the host by any of its addresses": (
            "connect(socket.AF_INET, ('0.0.0.0', HOST['port']))"
        ),
        "have a route to the metadata service": (
            "connect(socket.AF_INET, ('169.254.169.254', 80), socket.SOCK_DGRAM)"
        ),
        "have a route to the internet": (
            "connect(socket.AF_INET, ('192.0.2.1', 53), socket.SOCK_DGRAM)"
        ),
        "have a route to a private network": (
            "connect(socket.AF_INET, ('10.0.0.1', 53), socket.SOCK_DGRAM)"
        ),
        "have a route to a group of receivers": """
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 0)
    sock.connect(("224.0.0.251", 5353))
""",
        "have a second interface": "held_if([n for _, n in socket.if_nameindex()] == ['lo'])",
        "see a connection of the host": (
            "held_if(f\":{HOST['port']:04X}\".encode() not in read('/proc/net/tcp'))"
        ),
        "connect to an abstract socket of the host": (
            "connect(socket.AF_UNIX, '\\0' + HOST['abstract'])"
        ),
        "see an abstract socket of the host": (
            "held_if(HOST['abstract'].encode() not in open('/proc/net/unix', 'rb').read())"
        ),
        "connect to a socket of the host by its path": "connect(socket.AF_UNIX, HOST['socket'])",
        "send a descriptor to a socket of the host": """
with socket.socket(socket.AF_UNIX) as sock:
    sock.connect(HOST["socket"])
    socket.send_fds(sock, [b"x"], [0])
""",
        "take the address of a service of the host": """
with socket.socket(socket.AF_UNIX) as sock:
    try:
        sock.bind("\\0" + HOST["abstract"])
    except OSError as error:
        held_if(error.errno != errno.EADDRINUSE)
    else:
        raise Held
""",
    },
    (*_NO_ROUTE, "ENOENT"),
)

_CONNECT = "connect(socket.AF_UNIX, f\"{HOST['shown']}/%s\")"
_SEND = "sendto(b'x', 0x4000, f\"{HOST['shown']}/datagram\")"  # MSG_NOSIGNAL

SHOWN = attacks(
    Class.NET,
    "masks",
    {
        f"{what} in a mounted directory": "mounted(); " + code
        for what, code in {
            "connect to a socket of the host": _CONNECT % "below/stream",
            "connect by a link to a socket of the host": _CONNECT % "link",
            "connect by a descriptor to a socket of the host": (
                "fd = os.open(f\"{HOST['shown']}/below\", os.O_PATH);"
                " connect(socket.AF_UNIX, f'/proc/self/fd/{fd}/stream')"
            ),
            "send a datagram to a socket of the host": (
                f"socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).{_SEND}"
            ),
            "send a datagram of a pair to a socket of the host": (
                f"socket.socketpair(type=socket.SOCK_DGRAM)[0].{_SEND}"
            ),
            "rename the directory of a socket of the host": (
                "os.rename(f\"{HOST['shown']}/below\", f\"{HOST['shown']}/moved\");"
                " os.rename(f\"{HOST['shown']}/moved\", f\"{HOST['shown']}/below\")"
            ),
            "write to a pipe of the host": (
                "os.write(os.open(f\"{HOST['shown']}/pipe\", os.O_WRONLY | os.O_NONBLOCK), b'x')"
            ),
        }.items()
    },
    ("ECONNREFUSED", "EROFS", "EBUSY"),
)

_FAMILIES = {
    "a packet socket": (17, 3, 768),
    "a socket of the machine's monitor": (40, 1, 0),
    "a socket of Linux's ciphers": (38, 5, 0),
    "an XDP socket": (44, 3, 0),
    "a TIPC socket": (30, 1, 0),
    "a CAN socket": (29, 3, 1),
    "a Bluetooth socket": (31, 3, 0),
    "an RDS socket": (21, 5, 0),
    "an SMC socket": (43, 1, 0),
    "a KCM socket": (41, 2, 0),
    "a router's IPC socket": (42, 2, 0),
    "a key management socket": (15, 3, 2),
    "a phone network socket": (35, 2, 0),
    "a near field socket": (39, 5, 0),
    "a raw socket": (2, 3, 6),
    "a raw IPv6 socket": (10, 3, 58),
    "an old packet socket": (2, 10, 0x300),
    "a multipath socket": (2, 1, 262),
    "an SCTP socket": (2, 1, 132),
    "a DCCP socket": (2, 6, 33),
    "a UDP-Lite socket": (2, 2, 136),
}
_NETLINK = {
    "diagnosis": 4,
    "packet filters": 12,
    "audit": 9,
    "device events": 15,
    "generic families": 16,
    "process events": 11,
    "address translation": 6,
    "SELinux": 7,
    "ciphers": 21,
    "iSCSI": 8,
}

FAMILIES = attacks(
    Class.NET,
    "seccomp",
    {
        f"open {name}": f"os.close(call('socket', {family}, {kind}, {protocol}))"
        for name, (family, kind, protocol) in _FAMILIES.items()
    }
    | {
        f"ask Linux by netlink for {name}": f"os.close(call('socket', 16, 3, {number}))"
        for name, number in _NETLINK.items()
    },
    _NO_FAMILY,
)

_SOCKET = "sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
_ROUTE = "sock = socket.socket(16, 3, 0); sock.bind((0, 0))\n"
_ANSWER = """
answer = sock.recv(4096)
kind, number = struct.unpack_from("H", answer, 4)[0], struct.unpack_from("i", answer, 16)[0]
if kind == 2 and number:
    raise OSError(-number, "netlink")
"""
CHANGE = attacks(
    Class.NET,
    "privileges",
    {
        "take the loopback down and up": _SOCKET
        + """
found = bytearray(fcntl.ioctl(sock, 0x8913, struct.pack("16sH14x", b"lo", 0)))
fcntl.ioctl(sock, 0x8914, bytes(found))
""",
        "ask for a mode that sees all packets": _SOCKET
        + "fcntl.ioctl(sock, 0x8922, struct.pack('16si12x', b'lo', 65536))",
        "mark packets": _SOCKET + "sock.setsockopt(socket.SOL_SOCKET, 36, 1)",
        "send in the name of another": _SOCKET + "sock.setsockopt(socket.IPPROTO_IP, 19, 1)",
        "force a larger buffer": _SOCKET + "sock.setsockopt(socket.SOL_SOCKET, 33, 4096)",
        "look into TCP": ("socket.socket(socket.AF_INET).setsockopt(socket.IPPROTO_TCP, 19, 1)"),
        "replace the tables of packet filters": _SOCKET
        + "sock.setsockopt(socket.IPPROTO_IP, 64, bytes(96))",
        "listen where only root may": "socket.socket(socket.AF_INET).bind(('127.0.0.1', 1))",
        "make an interface": _ROUTE
        + "sock.send(struct.pack('IHHII', 32, 16, 0x605, 1, 0) + struct.pack('BxHiII', 0, 0, 0,"
        " 0, 0))" + _ANSWER + "raise OSError(errno.EINVAL, 'asked')",
        "add a route": _ROUTE
        + "sock.send(struct.pack('IHHII', 28, 24, 0x605, 1, 0) + struct.pack('8BI', 2, 0, 0, 0,"
        " 254, 4, 253, 1, 0))" + _ANSWER,
    },
    ("ENOPROTOOPT", "EAFNOSUPPORT", "ENOTTY"),
)

NETWORK = (*REACH, *SHOWN, *FAMILIES, *CHANGE)
