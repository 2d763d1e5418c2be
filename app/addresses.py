"""Which addresses are public, and connections to these alone.

The lists are IANA's registries of special-purpose addresses, written out: what Python calls global differs from one
version to the next. Of IPv6 only today's global unicast range counts, which leaves out mapped, translated (NAT64) and
unique local addresses at once; of what is inside it, tunnels that carry an IPv4 address are left out too.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network

import httpcore2

Address = IPv4Address | IPv6Address
AddressCheck = Callable[[Address], bool]

RESOLVING_THREADS = 16  # of their own: a name server that never answers must not hold up the encoding of pictures

GLOBAL_UNICAST = IPv6Network("2000::/3")
NOT_PUBLIC = tuple(
    ip_network(text)
    for text in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "168.63.129.16/32",  # public by its number, but the host of an Azure machine
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/3",  # multicast, reserved, broadcast
        "2001::/23",  # Teredo and other protocols' own
        "2001:db8::/32",
        "2002::/16",  # 6to4
        "3fff::/20",
    )
)


def is_public(address: Address) -> bool:
    """Whether a host anywhere on the internet may have this address."""
    if isinstance(address, IPv6Address) and (address.scope_id or address not in GLOBAL_UNICAST):
        return False
    return not any(address in network for network in NOT_PUBLIC)


class CheckedNetwork(httpcore2.AsyncNetworkBackend):
    """Resolves a name once and connects to what it has checked. One address that is not allowed bars the whole name."""

    def __init__(self, is_allowed: AddressCheck) -> None:
        self._is_allowed = is_allowed
        self._network = httpcore2.AnyIOBackend()
        self._resolving = ThreadPoolExecutor(RESOLVING_THREADS, thread_name_prefix="easel-resolve")

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 the interface has it
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        addresses = await self._resolve(host, port)
        if not addresses or not all(self._is_allowed(address) for address in addresses):
            raise httpcore2.ConnectError("the name has an address that is not allowed")
        for address in addresses[:-1]:
            try:
                return await self._network.connect_tcp(str(address), port, timeout, local_address, socket_options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout):
                continue
        return await self._network.connect_tcp(str(addresses[-1]), port, timeout, local_address, socket_options)

    async def _resolve(self, host: str, port: int) -> list[Address]:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(
                self._resolving, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            )
        except (OSError, UnicodeError) as error:
            raise httpcore2.ConnectError("the name has no address") from error
        return list(dict.fromkeys(ip_address(place[0]) for *_, place in found))
