"""Names to addresses, and from exactly these addresses to a connection: no name is resolved twice.

The client inside decides how often a name is resolved, and the owner of the name how long that
takes. So the threads are our own, and each sandbox has a few of them at most: a slow name server
delays no files or names of other sandboxes.
"""

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

Lookup = Callable[[str, int], Coroutine[Any, Any, list[str]]]
_ADDRESSES_MAX = 16
_THREADS = 8
_AT_ONCE = 3
_CONNECT_S = 5.0  # for each address, within the time for all
_threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="sbx-lookup")


class NotReached(Exception):
    """The host is unknown or does not answer; the text has the reason."""


async def system_lookup(host: str, port: int) -> list[str]:
    loop = asyncio.get_running_loop()
    entries = await loop.run_in_executor(
        _threads, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    )
    return [str(entry[4][0]) for entry in entries]


class Resolver:
    def __init__(self, lookup: Lookup, deadline_s: float) -> None:
        self._lookup = lookup
        self._deadline_s = deadline_s
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._under_way: set[asyncio.Task[list[str]]] = set()

    async def resolve(self, host: str, port: int) -> tuple[str, ...]:
        """Return all addresses of a host, each once. Raise NotReached."""
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._places.acquire()
                looking = asyncio.create_task(self._lookup(host, port))
                self._under_way.add(looking)
                looking.add_done_callback(self._looked)
                addresses = await asyncio.shield(looking)
        except TimeoutError:
            raise NotReached(f"{host} was not resolved within {self._deadline_s:g} s") from None
        except (OSError, UnicodeError):
            raise NotReached(f"{host} has no address") from None
        if not addresses:
            raise NotReached(f"{host} has no address")
        return tuple(dict.fromkeys(addresses))[:_ADDRESSES_MAX]

    async def close(self) -> None:
        """Cancel the lookups. A thread that still waits for a name server ends later."""
        left = list(self._under_way)
        for looking in left:
            looking.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _looked(self, looking: asyncio.Task[list[str]]) -> None:
        """Free the place of a lookup: its thread was busy until now, also after a time-out."""
        self._under_way.discard(looking)
        self._places.release()
        if not looking.cancelled():
            looking.exception()  # asyncio would log an exception that was never read


def own(addresses: tuple[str, ...]) -> frozenset[str]:
    """Return the addresses that belong to this host: a service that listens on all interfaces is
    reachable by the public address as well, and no firewall is passed on that way.

    A connection to an own address has that same address as its source. A UDP socket shows the
    source address without sending a packet.
    """
    return frozenset(address for address in addresses if _is_own(address))


def _is_own(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((address, 9))
            return bool(sock.getsockname()[0] == sock.getpeername()[0])
    except OSError:
        return False  # it cannot be reached either


async def connect(addresses: tuple[str, ...], port: int, deadline_s: float) -> socket.socket:
    """Return a connection to the first address that answers. Raise NotReached."""
    loop = asyncio.get_running_loop()
    until = loop.time() + deadline_s
    why = "no address"
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError as error:
            why = error.strerror or "no socket"
            continue
        try:
            async with asyncio.timeout_at(min(until, loop.time() + _CONNECT_S)):
                await loop.sock_connect(sock, (address, port))
        except TimeoutError:
            why = "no answer"
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else "no connection"
        except BaseException:
            sock.close()
            raise
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
        sock.close()
    raise NotReached(why)
