"""Who may call: API keys, and the short-lived client secrets (`ek_...`) that are issued to browsers in their place.

`KeyCheck` asks for one on every route but `OPEN_PATHS`, before a body is read or a WebSocket accepted, so that no
route can forget to. An API key opens everything; a client secret opens WebSockets only, and carries the session that it
was issued for: a route finds it with `service.keys.secret(key_of(scope))`.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Collection

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from omniflow.server.exchange import exchange_of
from omniflow.server.failures import AuthenticationError, error_response

OPEN_PATHS = frozenset({"/live", "/ready", "/health", "/openapi.json"})
"""What orchestrators ask, and what tells how to ask: never under a key."""
_GUARDED = ("http", "websocket")
_SUBPROTOCOL = "openai-insecure-api-key."


class ClientSecret(msgspec.Struct, frozen=True):
    """A key for one browser: good until `expires_at` (Unix seconds), for the session that `session` is the JSON of."""

    value: str
    expires_at: int
    session: bytes = b""


class Keys:
    """The API keys of a server, none of which: everybody may call. Keeps their digests, not the keys.

    Of the client secrets, the last `max_secrets` are known; the oldest goes first.
    """

    def __init__(
        self, api_keys: Collection[str] = (), *, max_secrets: int = 4096, clock: Callable[[], float] = time.time
    ) -> None:
        self._digests = [_digest(key) for key in api_keys]
        self._max_secrets = max_secrets
        self._clock = clock
        self._secrets: OrderedDict[bytes, ClientSecret] = OrderedDict()

    @property
    def required(self) -> bool:
        """True where callers need a key."""
        return bool(self._digests)

    def check(self, key: str | None, *, secret: bool = False) -> None:
        """Raises AuthenticationError (401 `invalid_api_key`) unless `key` may call; `secret`: a client secret may, too.

        It takes the same time whichever key it is, and however much of it is right.
        """
        if not self.required:
            return
        if not key:
            raise AuthenticationError("an API key is needed: send it as `authorization: Bearer KEY`")
        given = _digest(key)
        # Compared with every one, whatever the first ones gave.
        known = sum(hmac.compare_digest(given, digest) for digest in self._digests)
        if not known and not (secret and self.secret(key)):
            raise AuthenticationError("this API key is not known here, or it has expired")

    def issue(self, lifetime_s: int, session: bytes = b"") -> ClientSecret:
        """A new client secret, for `session`."""
        issued = ClientSecret(f"ek_{secrets.token_hex(24)}", int(self._clock()) + lifetime_s, session)
        self._secrets[_digest(issued.value)] = issued
        while len(self._secrets) > self._max_secrets:
            self._secrets.popitem(last=False)
        return issued

    def secret(self, key: str | None) -> ClientSecret | None:
        """What was issued as `key`; None where it is none of ours or has expired."""
        issued = self._secrets.get(_digest(key)) if key else None
        return issued if issued is not None and self._clock() < issued.expires_at else None


def key_of(scope: Scope) -> str | None:
    """The key that a request or a WebSocket came with: `authorization: Bearer KEY`, or, as browsers can set no header
    on a WebSocket, the subprotocol `openai-insecure-api-key.KEY`.
    """
    scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip() or None
    for name in scope.get("subprotocols", ()):
        if name.startswith(_SUBPROTOCOL):
            return str(name).removeprefix(_SUBPROTOCOL) or None
    return None


class KeyCheck:
    """ASGI middleware: lets nobody in without a key, where keys are required. Stands behind `Exchanges`."""

    def __init__(self, app: ASGIApp, keys: Keys, open_paths: Collection[str] = OPEN_PATHS) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._keys.required and scope["type"] in _GUARDED and scope["path"] not in self._open_paths:
            try:
                self._keys.check(key_of(scope), secret=scope["type"] == "websocket")
            except AuthenticationError as error:
                exchange_of(scope).failure = error.code
                # A WebSocket is refused by a reply to its handshake, where the server can: Starlette knows both.
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
