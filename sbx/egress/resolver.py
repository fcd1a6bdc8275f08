"""Names to addresses, and from those very addresses to a connection: nothing is looked up twice.

Whoever inside asks decides how often a name is looked up, and whoever owns the name how long that
takes. So the threads are our own, and each sandbox has a few of them at most: a slow name server
keeps nobody else's files or names waiting.
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
_CONNECT_S = 5.0  # for each address, within what there is for all
_threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="sbx-lookup")


class NotReached(Exception):
    """The host is unknown or does not answer; the text says so."""


async def system_lookup(host: str, port: int) -> list[str]:
    """Both families, as the host's own resolver has them."""
    loop = asyncio.get_running_loop()
    found = await loop.run_in_executor(
        _threads, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    )
    return [str(entry[4][0]) for entry in found]


class Resolver:
    """The lookups of one sandbox."""

    def __init__(self, lookup: Lookup, deadline_s: float) -> None:
        self._lookup = lookup
        self._deadline_s = deadline_s
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._under_way: set[asyncio.Task[list[str]]] = set()

    async def resolve(self, host: str, port: int) -> tuple[str, ...]:
        """All its addresses, each once. Raises NotReached."""
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._places.acquire()
                looking = asyncio.create_task(self._lookup(host, port))
                self._under_way.add(looking)
                looking.add_done_callback(self._looked)
                found = await asyncio.shield(looking)
        except TimeoutError:
            raise NotReached(f"{host} was not resolved within {self._deadline_s:g} s") from None
        except (OSError, UnicodeError):
            raise NotReached(f"{host} has no address") from None
        if not found:
            raise NotReached(f"{host} has no address")
        return tuple(dict.fromkeys(found))[:_ADDRESSES_MAX]

    async def close(self) -> None:
        """A thread that still waits for a name server ends by itself; nobody waits for it."""
        left = list(self._under_way)
        for looking in left:
            looking.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _looked(self, looking: asyncio.Task[list[str]]) -> None:
        """Only now its place is free: the thread is busy for as long as it takes."""
        self._under_way.discard(looking)
        self._places.release()
        if not looking.cancelled():
            looking.exception()  # seen, should nobody wait for it any more


def own(addresses: tuple[str, ...]) -> frozenset[str]:
    """Those of them that are this host's: a service of it that listens on all interfaces is behind
    its public address as well, where no firewall on the way is passed.

    Linux gives a connection to an address of its own that same address to come from; a socket of
    UDP asks for that, and sends nothing.
    """
    return frozenset(address for address in addresses if _is_own(address))


def _is_own(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect((address, 9))
            return bool(asking.getsockname()[0] == asking.getpeername()[0])
    except OSError:
        return False  # nor will it be reached


async def connect(addresses: tuple[str, ...], port: int, deadline_s: float) -> socket.socket:
    """A connection to the first of them that answers. Raises NotReached."""
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
