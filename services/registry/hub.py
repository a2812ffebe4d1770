"""Downloads adapters from a Hugging Face hub: one or two files of a repository, pinned to a commit.

    model info: commit, sizes -> checked -> GET each file, redirects followed by hand -> counted and hashed on arrival

The hub is not trusted. For every connection the resolved address is checked: loopback, link-local and private addresses are
refused unless the operator named the host. Every download has one deadline, and no more bytes are read than were announced.
No hub library is used, so nothing else reaches the network. The token is sent to the hub only.
"""

from __future__ import annotations

import asyncio
import fnmatch
import hashlib
import ipaddress
import os
import re
import socket
import tempfile
from typing import BinaryIO
from urllib.parse import quote
from urllib.request import getproxies

import aiohttp
import msgspec
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from motet.services.registry.files import MAX_CONFIG_BYTES, Layout, PeftFiles, Source, Texts, shown, too_large
from motet.shared.errors import InvalidAdapter, TooLarge, Unavailable
from motet.shared.text_files import is_text_file

PARAM = "location"
PUBLIC_ENDPOINT = "https://huggingface.co"
_WORDS = r"(?![^/@]*(?:--|\.\.))\w(?:[\w.-]*\w)?"  # as the hub names owners and repositories
_REF = r"(?!.*(?:\.\.|//|/\.|\.lock(?:/|$)))\w(?:[\w./-]*[\w-])?"  # as git-check-ref-format; of its signs those of paths only
HUB_ID = re.compile(rf"({_WORDS}/{_WORDS})(?:@({_REF}))?", re.ASCII)
MAX_ID_CHARS = 256
CONNECT_S, SILENCE_S = 10.0, 30.0
MAX_INFO_BYTES = 8 * 1024 * 1024  # of a repository with tens of thousands of files
MAX_REDIRECTS = 5
_READ_BYTES = 1 << 20
_COMMIT = re.compile(r"[0-9a-f]{40,64}")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class HubOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The hub, what is allowed, and time and size limits. `private_hosts`: `name` or `name:port`."""

    endpoint: str
    allowed: bool = True
    repositories: tuple[str, ...] = ()  # patterns; none: all
    private_hosts: tuple[str, ...] = ()
    timeout_s: float = 300.0
    max_bytes: int


class _Lfs(msgspec.Struct):
    sha256: str = ""


class _File(msgspec.Struct):
    rfilename: str
    size: int | None = None
    lfs: _Lfs | None = None


class _Info(msgspec.Struct):
    sha: str
    siblings: list[_File] = []


_info = msgspec.json.Decoder(_Info)


def is_public(address: str) -> bool:
    """Whether an IP address is public. For an IPv6 address that contains an IPv4 address, the latter decides."""
    ip: _Address = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if ip in _NAT64 else ip.ipv4_mapped or ip.sixtofour
        ip = inner or ip
    return ip.is_global and not ip.is_multicast


class _Guard(AbstractResolver):
    """Resolves names for connections and refuses private addresses of hosts that the operator did not name."""

    def __init__(self, options: HubOptions) -> None:
        endpoint = URL(options.endpoint)
        proxies = [URL(url if "://" in url else f"http://{url}") for url in getproxies().values()]
        self._named = {f"{url.host}:{url.port}" for url in (endpoint, *proxies)}
        self._named.update(host.lower() for host in options.private_hosts)
        self._schemes = {"https", endpoint.scheme}
        self._inner = aiohttp.ThreadedResolver()

    def check(self, url: URL) -> None:
        """Check a URL before its request. A literal address is never resolved, so it is checked here."""
        if url.scheme not in self._schemes or not url.host:
            raise InvalidAdapter(
                f"the hub redirects to {shown(f'{url.scheme}://{url.host}')}, which does not use https", param=PARAM
            )
        try:
            ipaddress.ip_address(url.host)
        except ValueError:
            return
        self._check_address(url.host, url.port or 0, url.host)

    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET) -> list[ResolveResult]:
        found = await self._inner.resolve(host, port, family)
        for result in found:
            self._check_address(host, port, result["host"])
        return found

    async def close(self) -> None:
        await self._inner.close()

    def _check_address(self, host: str, port: int, address: str) -> None:
        if host in self._named or f"{host}:{port}" in self._named or is_public(address):
            return
        raise InvalidAdapter(
            f"the download leads to {shown(host)}, which has no public address (allow it with --hub-private-hosts)",
            param=PARAM,
        )


class HubSource(Source):
    """Downloads adapters. Downloads may run concurrently; each has its own connections."""

    remote = True

    def __init__(self, options: HubOptions) -> None:
        self._options = options
        self.refusal = "" if options.allowed else "this registry takes no adapters from the hub (--hub-allowed false)"

    async def fetch(self, location: str, *, chat: bool = True) -> PeftFiles:
        """The adapter `owner/name` or `owner/name@revision`.

        `chat`: also what it brings for chats. Raises InvalidAdapter when the repository is missing, forbidden, or has no
        adapter; TooLarge; Unavailable when the hub cannot be reached or takes too long. Credentials are the process's own
        (`HF_TOKEN`).
        """
        match = HUB_ID.fullmatch(location)
        if match is None or len(location) > MAX_ID_CHARS:
            raise InvalidAdapter(f"{shown(location)} is not a hub id (owner/name or owner/name@revision)", param=PARAM)
        allowed = self._options.repositories
        if allowed and not any(fnmatch.fnmatchcase(match[1], pattern) for pattern in allowed):
            raise InvalidAdapter(
                f"{location}: this registry takes adapters from {', '.join(allowed)} only (--hub-repositories)", param=PARAM
            )
        try:
            async with asyncio.timeout(self._options.timeout_s):
                return await self._fetch(match[1], match[2], chat)
        except TimeoutError:
            reason = f"it takes longer than {self._options.timeout_s:g} s (--hub-timeout-s)"
        except aiohttp.ClientError as error:
            reason = shown(error) or type(error).__name__
        raise Unavailable(
            f"cannot get {location} from the Hugging Face hub: {reason}; register it from a path or an upload", param=PARAM
        )

    async def _fetch(self, repository: str, revision: str | None, chat: bool) -> PeftFiles:
        if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
            raise aiohttp.ClientError("HF_HUB_OFFLINE is set")
        token = await asyncio.to_thread(_token)
        guard = _Guard(self._options)
        connector = aiohttp.TCPConnector(resolver=guard)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, trust_env=True, auto_decompress=False, headers={"Accept-Encoding": "identity"}
        ) as session:
            download = _Download(session, guard, self._options.endpoint.rstrip("/"), token, repository)
            info = await download.info(revision)
            files, chosen = _checked(repository, info, self._options.max_bytes, layout := self.layout)
            config_json = await download.small(info.sha, files[layout.configuration]) if layout.configuration else b""
            texts = Texts()
            for name in sorted(filter(is_text_file, files)) if chat and layout.chats else ():
                _check_size(repository, files[name], texts.limit(name))
                texts.add(name, await download.small(info.sha, files[name]))
            weights = tempfile.TemporaryFile()  # noqa: SIM115 - the caller's
            try:
                await download.file(info.sha, chosen, weights)
            except BaseException:
                weights.close()
                raise
        weights.seek(0)
        source = f"hub:{repository}@{info.sha}"
        size_bytes = chosen.size or 0
        return PeftFiles(config_json=config_json, weights=weights, size_bytes=size_bytes, source=source, texts=texts.found)


class _Download:
    """Requests for one repository."""

    def __init__(
        self, session: aiohttp.ClientSession, guard: _Guard, endpoint: str, token: str | None, repository: str
    ) -> None:
        self._session, self._guard, self._endpoint, self._repository = session, guard, endpoint, repository
        self._authorization = {"Authorization": f"Bearer {token}"} if token else {}

    async def info(self, revision: str | None) -> _Info:
        """Commit and files of the repository."""
        at = f"/revision/{quote(revision, safe='')}" if revision else ""
        response = await self._get(f"{self._endpoint}/api/models/{self._repository}{at}?blobs=true")
        async with response:
            text = bytearray()
            async for chunk in response.content.iter_chunked(_READ_BYTES):
                text += chunk
                if len(text) > MAX_INFO_BYTES:
                    raise TooLarge(f"{self._repository} on the hub: its list of files is too long", param=PARAM)
        try:
            info = _info.decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise aiohttp.ClientError("its answer is not that of a Hugging Face hub") from None
        if not _COMMIT.fullmatch(info.sha):
            raise aiohttp.ClientError("its answer names no commit")
        return info

    async def small(self, commit: str, file: _File) -> bytes:
        """The content of a file."""
        with tempfile.TemporaryFile() as sink:
            await self.file(commit, file, sink)
            sink.seek(0)
            return sink.read()

    async def file(self, commit: str, file: _File, sink: BinaryIO) -> None:
        """Write a file of exactly the announced size and digest to `sink`."""
        name, expected = file.rfilename, file.size or 0
        response = await self._get(f"{self._endpoint}/{self._repository}/resolve/{commit}/{quote(name)}")
        received, digest = 0, hashlib.sha256()
        async with response:
            async for chunk in response.content.iter_chunked(_READ_BYTES):
                received += len(chunk)
                if received > expected:
                    raise TooLarge(f"the hub sends more than the {expected} bytes that {shown(name)} has", param=PARAM)
                digest.update(chunk)
                try:
                    await asyncio.to_thread(sink.write, chunk)
                except OSError as error:
                    raise Unavailable("the registry's disk has no room for the download", param=PARAM) from error
        if received != expected or (file.lfs is not None and file.lfs.sha256 not in ("", digest.hexdigest())):
            raise aiohttp.ClientError(f"the downloaded {name} does not match its listed size and digest")

    async def _get(self, url: str) -> aiohttp.ClientResponse:
        """The answer at the end of all redirects. Raises InvalidAdapter, Unavailable or aiohttp.ClientError."""
        at, home = URL(url), URL(self._endpoint).origin()
        for _ in range(MAX_REDIRECTS + 1):
            self._guard.check(at)
            headers = self._authorization if at.origin() == home else {}
            response = await self._session.get(at, headers=headers, allow_redirects=False)
            if response.status == 200:
                return response
            location = response.headers.get("Location")
            response.release()
            if response.status in (301, 302, 303, 307, 308) and location:
                try:
                    at = at.join(URL(location))
                except ValueError:
                    raise aiohttp.ClientError("it redirects to an invalid URL") from None
            elif response.status in (400, 401, 403, 404):
                raise InvalidAdapter(
                    f"the hub has no {self._repository}, or it is private (status {response.status})", param=PARAM
                )
            else:
                raise aiohttp.ClientError(f"it answers with status {response.status}")
        raise aiohttp.ClientError(f"it redirects more than {MAX_REDIRECTS} times")


def _checked(repository: str, info: _Info, max_bytes: int, layout: Layout) -> tuple[dict[str, _File], _File]:
    """(all files, the one with the weights). The sizes of those to download are known and allowed."""
    files = {file.rfilename: file for file in info.siblings}
    weights = files[layout.weights(f"{repository} on the hub", [name for name in files if "/" not in name])]
    if layout.configuration:
        _check_size(repository, files[layout.configuration], MAX_CONFIG_BYTES)
    _check_size(repository, weights, max_bytes)
    return files, weights


def _check_size(repository: str, file: _File, limit: int) -> None:
    if file.size is None or file.size < 0:
        raise aiohttp.ClientError(f"it does not say how large {shown(file.rfilename)} is")
    if file.size > limit:
        raise too_large(f"{repository} on the hub: {shown(file.rfilename)}", file.size, limit)


def _token() -> str | None:
    """The process's token, from the environment or the hub's own file."""
    from huggingface_hub import get_token

    return get_token()
