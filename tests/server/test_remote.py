"""Media by URL: what is fetched, and what must never be asked for. The site is real; only its name is made up."""

from __future__ import annotations

import base64
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import httpx
import msgspec
import pytest
import trustme
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from omniflow.config import ServerConfig
from omniflow.errors import DeadlineError, InvalidInputError, OverloadedError
from omniflow.media import AudioPart, Chat, ChatMessage, ImagePart, VideoPart
from omniflow.server.app import build_app
from omniflow.server.chat_request import ChatRequest, chat_of, wanted_media
from omniflow.server.failures import BodyTooLargeError
from omniflow.server.remote import Fetched, Limits, RemoteMedia, Wanted, is_public
from omniflow.server.serve import Address, serve
from omniflow.server.transcripts import Transcripts

from .scripted import ScriptedRuntime

pytestmark = pytest.mark.anyio
PNG = b"\x89PNG\r\n\x1a\n" + bytes(100)


class Site:
    """Some files, some traps, and the paths and hosts that were asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.hosts: list[str] = []
        self.release = anyio.Event()

    async def answer(self, request: Request) -> Response:
        path = request.url.path
        self.asked.append(path)
        self.hosts.append(request.headers["host"])
        assert request.headers["accept-encoding"] == "identity" and "authorization" not in request.headers
        match path.split("/")[1:]:
            case ["hop", number]:
                return RedirectResponse(f"/hop/{int(number) - 1}" if int(number) else "/a.png", 302)
            case ["to"]:
                return RedirectResponse(request.query_params["url"], 307)
            case ["status", number]:
                return Response(b"no", int(number))
            case ["slow"]:
                await self.release.wait()
            case ["endless"]:
                return StreamingResponse(self.endless(), media_type="image/png")
            case ["gzip"]:
                return Response(PNG, headers={"content-encoding": "gzip"}, media_type="image/png")
            case ["empty"]:
                return Response(b"", media_type="image/png")
            case ["untyped.wav"]:
                return Response(b"RIFF")
        types = {"png": "image/png; x=1", "mp3": "audio/mpeg", "mp4": "video/mp4", "html": "text/html"}
        return Response(PNG, media_type=types.get(path.rpartition(".")[2], "application/octet-stream"))

    async def endless(self) -> AsyncIterator[bytes]:
        while True:
            yield bytes(1000)
            await anyio.sleep(0.001)


@pytest.fixture
def site() -> Site:
    return Site()


@pytest.fixture
async def address(site: Site) -> AsyncIterator[Address]:
    app = Starlette(routes=[Route("/{path:path}", site.answer)])
    async with serve(app, port=0) as address:
        yield address
        site.release.set()


async def resolved(host: str, port: int) -> list[str]:
    """The made-up names. The first address of `two.test` has nobody behind it."""
    names = {
        "site.test": ["127.0.0.1"],
        "two.test": ["127.0.0.2", "127.0.0.1"],
        "inner.test": ["10.0.0.1"],
        "mixed.test": ["127.0.0.1", "10.0.0.1"],
        "void.test": [],
    }
    if host in names:
        return names[host]
    if host.replace(".", "").isdecimal():
        return [host]
    raise OSError("no such name")


def remote(max_bytes: int = 10_000, **limits: Any) -> RemoteMedia:
    """Takes this machine's own addresses for public ones."""
    allowed = {"127.0.0.1", "127.0.0.2"}.__contains__
    return RemoteMedia(Limits(max_bytes, **limits), resolve=resolved, is_allowed=allowed)


async def fetched(url: str, **limits: Any) -> Fetched:
    return (await remote(**limits).fetch([Wanted(url, "here")]))[url]


@pytest.mark.parametrize("host", ["site.test", "two.test", "127.0.0.1"])
async def test_a_file(address: Address, site: Site, host: str) -> None:
    found = await fetched(f"http://{host}:{address.port}/a.png?b=c#d")
    assert found == Fetched("image/png", PNG)
    assert site.asked == ["/a.png"] and site.hosts == [f"{host}:{address.port}"], "the name is told, as by browsers"


async def test_redirects_are_followed_three_times(address: Address, site: Site) -> None:
    assert (await fetched(f"http://site.test:{address.port}/hop/2")).data == PNG
    with pytest.raises(InvalidInputError, match="here: leads through more than 3 redirects"):
        await fetched(f"http://site.test:{address.port}/hop/3")
    assert (await fetched(f"http://site.test:{address.port}/to?url=http://two.test:{address.port}/a.png")).data == PNG


@pytest.mark.parametrize("host", ["inner.test", "mixed.test", "void.test", "10.0.0.1", "0.0.0.0", "169.254.169.254"])
async def test_what_is_not_public_is_not_asked(address: Address, site: Site, host: str) -> None:
    """Not even where only one of several addresses is not, and not by a redirect either."""
    there = f"http://{host}:{address.port}/a.png"
    for url, asked in ((there, []), (f"http://site.test:{address.port}/to?url={there}", ["/to"])):
        site.asked.clear()
        with pytest.raises(InvalidInputError, match="here: does not lead to a public address") as refused:
            await fetched(url)
        assert refused.value.param == "here" and site.asked == asked


@pytest.mark.parametrize("url", ["file:///etc/passwd", "gopher://site.test/", "http://me:secret@site.test/a.png"])
async def test_what_is_no_plain_url(address: Address, site: Site, url: str) -> None:
    for tried in (url, f"http://site.test:{address.port}/to?url={url}"):
        with pytest.raises(InvalidInputError, match="here: is not a plain http or https URL"):
            await fetched(tried)
    assert site.asked == ["/to"]


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("status/404", "answered with status 404"),
        ("status/204", "answered with status 204"),
        ("gzip", "sent a compressed body that was not asked for"),
        ("empty", "is empty"),
    ],
)
async def test_what_sites_get_wrong(address: Address, path: str, why: str) -> None:
    with pytest.raises(InvalidInputError, match=f"here: {why}"):
        await fetched(f"http://site.test:{address.port}/{path}")


async def test_nobody_there() -> None:
    for url in (
        "http://nowhere.test/",
        "http://127.0.0.1:1/",
        "http://[::1/",
        "http://site.test:99999/",
        "http://a b/",
    ):
        with pytest.raises(InvalidInputError, match="here: (could not be fetched|does not lead|is not a plain)"):
            await fetched(url)


@pytest.mark.parametrize(("path", "max_bytes"), [("endless", 10_000), ("a.png", 50)])
async def test_what_is_too_large(address: Address, path: str, max_bytes: int) -> None:
    with pytest.raises(BodyTooLargeError, match=f"here: the media of this request are larger than {max_bytes} bytes"):
        await fetched(f"http://site.test:{address.port}/{path}", max_bytes=max_bytes)


async def test_all_media_of_a_request_together_are_bounded(address: Address, site: Site) -> None:
    urls = [f"http://site.test:{address.port}/{name}.png" for name in "abc"]
    wanted = [Wanted(url, url[-5:]) for url in urls]
    found = await remote(max_bytes=3 * len(PNG)).fetch([*wanted, *wanted])
    assert found == dict.fromkeys(urls, Fetched("image/png", PNG))
    assert len(site.asked) == 3, "each is fetched once"
    with pytest.raises(BodyTooLargeError):
        await remote(max_bytes=3 * len(PNG) - 1).fetch(wanted)
    with pytest.raises(InvalidInputError, match="more than 2 URLs in one request"):
        await remote(max_urls=2).fetch(wanted)


async def test_what_takes_too_long(address: Address) -> None:
    with pytest.raises(InvalidInputError, match=r"here: took longer than 0\.05 s"):
        await fetched(f"http://site.test:{address.port}/slow", timeout_s=0.05)


async def test_only_so_many_at_once(address: Address, site: Site) -> None:
    """Who waits for a place for all of its time is told to come again: the URL may be a good one."""
    media = remote(max_at_once=1, timeout_s=1.0)
    slow, good = f"http://site.test:{address.port}/slow", f"http://site.test:{address.port}/a.png"

    async def occupy() -> None:
        with pytest.raises(InvalidInputError, match="took longer"):
            await media.fetch([Wanted(slow, "there")])

    async with anyio.create_task_group() as group:
        group.start_soon(occupy)
        while not site.asked:
            await anyio.sleep(0.001)
        media._limits = Limits(10_000, timeout_s=0.01)
        with pytest.raises(OverloadedError):
            await media.fetch([Wanted(good, "here")])
        media._limits = Limits(10_000)
    assert (await media.fetch([Wanted(good, "here")]))[good].data == PNG


@pytest.mark.parametrize("trusted", [True, False])
async def test_certificates_are_checked_against_the_name(site: Site, tmp_path: Path, trusted: bool) -> None:
    authority = trustme.CA(key_type=trustme.KeyType.ECDSA)
    issued = authority.issue_cert("site.test", key_type=trustme.KeyType.ECDSA)
    issued.private_key_and_cert_chain_pem.write_to_path(tmp_path / "both.pem")
    context = ssl.create_default_context()
    if trusted:
        authority.configure_trust(context)
    app = Starlette(routes=[Route("/{path:path}", site.answer)])
    async with serve(app, ServerConfig(ssl_certfile=str(tmp_path / "both.pem")), port=0) as address:
        media = RemoteMedia(Limits(10_000), resolve=resolved, is_allowed=lambda _: True, tls=context)
        good = Wanted(f"https://site.test:{address.port}/a.png", "here")
        if trusted:
            assert (await media.fetch([good]))[good.url].data == PNG
        for url in [f"https://two.test:{address.port}/"] + [good.url] * (not trusted):
            with pytest.raises(InvalidInputError, match="could not be fetched"):
                await media.fetch([Wanted(url, "here")])


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700:4700::1111", True),
        ("::ffff:8.8.8.8", True),
        ("127.0.0.1", False),
        ("0.0.0.0", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("192.0.0.192", False),
        ("224.0.0.1", False),
        ("240.0.0.1", False),
        ("255.255.255.255", False),
        ("::", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("ff02::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:169.254.169.254", False),
        ("::127.0.0.1", False),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b:1::7f00:1", False),
        ("2002:7f00:1::1", False),
        ("2001:0:7f00:1::1", False),
        ("2001:db8::1", False),
        ("192.88.99.1", False),
    ],
)
def test_public_addresses(address: str, public: bool) -> None:
    assert is_public(address) is public


@pytest.mark.parametrize("host", ["localhost", "127.1", "2130706433", "0x7f000001", "017700000001", "[::1]", "[::]"])
async def test_this_machine_by_any_name_is_not_public(address: Address, site: Site, host: str) -> None:
    """The real resolver, which knows more ways to write an address than one thinks of."""
    with pytest.raises(InvalidInputError):
        await RemoteMedia(Limits(1000)).fetch([Wanted(f"http://{host}:{address.port}/a.png", "here")])
    assert site.asked == []


def request(*urls: str) -> ChatRequest:
    kinds = {"png": "image_url", "mp4": "video_url"}
    parts = []
    for url in urls:
        kind = "image_url" if url.startswith("data:image/") else kinds.get(url.rpartition(".")[2], "audio_url")
        parts.append({"type": kind, kind: {"url": url}})
    return msgspec.convert({"model": "m", "messages": [{"role": "user", "content": parts}]}, ChatRequest)


async def test_parts_by_url(address: Address) -> None:
    urls = [f"http://site.test:{address.port}/{name}" for name in ("a.png", "b.mp4", "c.mp3", "untyped.wav")]
    asked = request(*urls, "data:image/png;base64,UE5H")
    wanted = list(wanted_media(asked.messages))
    assert [each.at for each in wanted] == [
        f"messages[0].content[{i}].{kind}.url"
        for i, kind in enumerate(["image_url", "video_url", "audio_url", "audio_url"])
    ]
    found = await remote().fetch(wanted)
    assert chat_of(asked.messages, Transcripts(), found) == Chat(
        (
            ChatMessage(
                "user",
                (ImagePart(PNG), VideoPart(PNG), AudioPart(PNG, "mp3"), AudioPart(b"RIFF", "wav"), ImagePart(b"PNG")),
            ),
        )
    )


@pytest.mark.parametrize(
    ("part", "mime", "why"),
    [
        ("x.png", "text/html", "leads to text/html, not to image/..."),
        ("x.mp3", "video/mp4", "leads to video/mp4, not to audio/..."),
        ("x.mp3", "audio/midi", "audio/midi is not taken"),
        ("x.txt", "application/octet-stream", "application/octet-stream is not taken"),
    ],
)
def test_a_url_that_leads_to_something_else(part: str, mime: str, why: str) -> None:
    url = f"http://site.test/{part}"
    with pytest.raises(InvalidInputError, match=f"messages.0..content.0..*_url.url: {why}"):
        chat_of(request(url).messages, Transcripts(), {url: Fetched(mime, b"x")})


async def test_the_server_fetches_only_where_it_is_told_to(address: Address, site: Site) -> None:
    runtime = ScriptedRuntime()
    part = {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{address.port}/a.png"}}
    body = {"model": "tiny", "messages": [{"role": "user", "content": [part]}]}
    for allowed, why in ((False, "this server fetches no media"), (True, "does not lead to a public address")):
        app = build_app(runtime, model="tiny", config=ServerConfig(remote_media=allowed))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://tiny") as client:
            response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code == 400 and why in response.json()["error"]["message"]
            assert response.json()["error"]["param"] == "messages[0].content[0].image_url.url"
            part_in = {
                "type": "image_url",
                "image_url": {"url": f"data:image/png;base64,{base64.b64encode(PNG).decode()}"},
            }
            valid = {"model": "tiny", "messages": [{"role": "user", "content": [part_in]}]}
            assert (await client.post("/v1/chat/completions", json=valid)).status_code == 200
    assert site.asked == []


async def test_more_than_was_declared_is_counted() -> None:
    """Where a body is chunked as well, its declared length says nothing."""

    async def site(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.receive()
            head = b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\ncontent-length: 10\r\n"
            await stream.send(head + b"transfer-encoding: chunked\r\n\r\n")
            with contextlib.suppress(anyio.BrokenResourceError):
                for _ in range(1000):
                    await stream.send(b"2710\r\n" + bytes(10_000) + b"\r\n")

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, site)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        with pytest.raises(BodyTooLargeError, match="larger than 50000 bytes"):
            await fetched(f"http://site.test:{port}/a.png", max_bytes=50_000)
        tasks.cancel_scope.cancel()


async def test_a_request_does_not_wait_for_media_longer_than_its_deadline(address: Address) -> None:
    with pytest.raises(DeadlineError, match="0.05 s passed while media were fetched"):
        await remote().fetch([Wanted(f"http://site.test:{address.port}/slow", "here")], 0.05)
