"""Media that requests name by URL, fetched from public addresses only.

A caller must not reach through this server what it could not reach itself. So the name is resolved here, every address
of it must be public, and the connection goes to the address that was looked at, not to the name again. The same holds
for each redirect. Proxies of the environment are not used: they would resolve the name once more.
"""

from __future__ import annotations

import functools
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import TYPE_CHECKING, NamedTuple

import anyio
import anyio.to_thread

from omniflow.errors import DeadlineError, InvalidInputError, OverloadedError, RequestError
from omniflow.server.failures import BodyTooLargeError

if TYPE_CHECKING:
    import httpx

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""(host, port) -> all addresses of the host. Raises OSError where there is none."""
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PORTS = {"http": 80, "https": 443}
_HEADERS = {"accept-encoding": "identity", "user-agent": "omniflow"}


class Wanted(NamedTuple):
    """A URL, and the path of the field that names it."""

    url: str
    at: str


class Fetched(NamedTuple):
    """What a URL led to; `mime` in lower case, without parameters."""

    mime: str
    data: bytes


class Limits(NamedTuple):
    """Bounds: bytes and URLs a request, seconds and redirects a URL, and fetches at a time in all."""

    max_bytes: int
    max_urls: int = 16
    timeout_s: float = 10.0
    max_redirects: int = 3
    max_at_once: int = 8


def is_public(address: str) -> bool:
    """True for an address of the open internet."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    if isinstance(ip, ipaddress.IPv6Address) and ip not in _UNICAST:
        return False
    return ip.is_global and not ip.is_multicast and not any(ip in network for network in _SPECIAL)


_UNICAST = ipaddress.ip_network("2000::/3")
"""The part of IPv6 that is given to networks; gateways to IPv4 are among the rest."""
_SPECIAL = tuple(
    ipaddress.ip_network(network)
    for network in ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "2002::/16", "3fff::/20")
)
"""For protocols, relays to IPv4 and examples: not all Python versions know that nobody's server is there."""


async def resolve(host: str, port: int) -> list[str]:
    """The addresses of `host`, by the system's resolver."""
    found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class RemoteMedia:
    """Fetches for all requests of a server."""

    def __init__(
        self,
        limits: Limits,
        *,
        resolve: Resolve = resolve,
        is_allowed: Callable[[str], bool] = is_public,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._limits = limits
        self._resolve = resolve
        self._is_allowed = is_allowed
        self._tls = tls
        self._places = anyio.Semaphore(limits.max_at_once)

    async def fetch(self, wanted: Iterable[Wanted], deadline_s: float | None = None) -> dict[str, Fetched]:
        """What the URLs of one request lead to, each fetched once. All errors name the field of the URL.

        Raises InvalidInputError where one cannot be fetched, BodyTooLargeError where they are too large together,
        OverloadedError where too many are being fetched, and DeadlineError where they take longer than `deadline_s`.
        """
        first = {each.url: each for each in reversed(list(wanted))}
        if len(first) > self._limits.max_urls:
            at = list(first.values())[0].at
            raise InvalidInputError(f"{at}: more than {self._limits.max_urls} URLs in one request", param=at)
        found: dict[str, Fetched] = {}
        errors: list[RequestError] = []
        budget = _Budget(self._limits.max_bytes)

        async def fetch_one(each: Wanted) -> None:
            try:
                found[each.url] = await self._in_time(each, budget)
            except RequestError as error:
                errors.append(error)
                group.cancel_scope.cancel()

        with anyio.move_on_after(deadline_s) as scope:
            async with anyio.create_task_group() as group:
                for each in first.values():
                    group.start_soon(fetch_one, each)
        if errors:
            raise errors[0]
        if scope.cancelled_caught:
            raise DeadlineError(f"the deadline of {deadline_s:g} s passed while media were fetched")
        return found

    async def _in_time(self, wanted: Wanted, budget: _Budget) -> Fetched:
        started = False
        try:
            with anyio.fail_after(self._limits.timeout_s):
                async with self._places:
                    started = True
                    return await self._follow(wanted, budget)
        except TimeoutError as error:
            if not started:
                raise OverloadedError("too many media are being fetched; try again later") from error
            raise _refused(wanted.at, f"took longer than {self._limits.timeout_s:g} s") from error

    async def _follow(self, wanted: Wanted, budget: _Budget) -> Fetched:
        import httpx

        if self._tls is None:  # reading the certificates takes 20 ms
            self._tls = await anyio.to_thread.run_sync(functools.partial(httpx.create_ssl_context, trust_env=False))
        async with httpx.AsyncClient(verify=self._tls, trust_env=False, timeout=None) as client:
            url = wanted.url
            for _ in range(self._limits.max_redirects + 1):
                try:
                    reply = await self._get(client, httpx.URL(url), wanted.at)
                    async with aclosing(reply):
                        if reply.status_code in _REDIRECTS and "location" in reply.headers:
                            url = str(httpx.URL(url).join(reply.headers["location"]))
                            continue
                        return await _read(reply, wanted.at, budget)
                except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
                    raise _refused(wanted.at, f"could not be fetched: {type(error).__name__}") from error
        raise _refused(wanted.at, f"leads through more than {self._limits.max_redirects} redirects")

    async def _get(self, client: httpx.AsyncClient, url: httpx.URL, at: str) -> httpx.Response:
        """The head of the reply from one of the addresses of `url`, which are all looked at before."""
        import httpx

        port = url.port or _PORTS.get(url.scheme, 0)
        if not url.host or url.userinfo or url.scheme not in _PORTS or port > 65535:
            raise _refused(at, "is not a plain http or https URL")
        host = url.raw_host.decode()
        addresses = await self._resolve(host, port)
        if not addresses or not all(map(self._is_allowed, addresses)):
            raise _refused(at, "does not lead to a public address")
        headers = {**_HEADERS, "host": url.netloc.decode()}
        for number, address in enumerate(addresses, 1):
            request = client.build_request(
                "GET", url.copy_with(host=address), headers=headers, extensions={"sni_hostname": host}
            )
            try:
                return await client.send(request, stream=True)
            except httpx.ConnectError:
                if number == len(addresses):
                    raise
        raise _refused(at, "could not be fetched")


class _Budget:
    """Bytes that are left for one request."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = self._left = num_bytes

    def take(self, num_bytes: int, at: str) -> None:
        """Raises BodyTooLargeError where so many are not left."""
        self._left -= num_bytes
        if self._left < 0:
            raise BodyTooLargeError(
                f"{at}: the media of this request are larger than {self._num_bytes} bytes, the most that is taken",
                param=at,
            )


async def _read(reply: httpx.Response, at: str, budget: _Budget) -> Fetched:
    if reply.status_code != 200:
        raise _refused(at, f"answered with status {reply.status_code}")
    if reply.headers.get("content-encoding", "identity") != "identity":
        raise _refused(at, "sent a compressed body that was not asked for")
    declared = reply.headers.get("content-length", "")
    taken = int(declared) if declared.isdecimal() else 0
    budget.take(taken, at)
    data = bytearray()
    async for piece in reply.aiter_raw():
        data += piece
        # More than was declared comes where the body is chunked as well: then its head says nothing.
        if len(data) > taken:
            budget.take(len(data) - taken, at)
            taken = len(data)
    if not data:
        raise _refused(at, "is empty")
    mime = reply.headers.get("content-type", "application/octet-stream").partition(";")[0].strip().lower()
    return Fetched(mime, bytes(data))


def _refused(at: str, why: str) -> InvalidInputError:
    return InvalidInputError(f"{at}: {why}", param=at)
