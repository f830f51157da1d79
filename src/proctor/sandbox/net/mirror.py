"""Dated mirrors: a Python index and an npm registry as they were at a date, so that a task from the past is solved with
the packages of its time, and a fix that was released since cannot be installed.

A release newer than the cut-off, or of unknown date, does not exist. The mirror fetches nothing but what its own index
has named, so it is no way to fetch anything else. Sources: the simple API in JSON (PEP 691) with upload times
(PEP 700); the package metadata of the npm registry with its `time` table.
"""

from __future__ import annotations

import datetime
import hashlib
import html
import json
import re
from collections import OrderedDict
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urljoin, urlsplit

import httpx
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from proctor.common import ConfigError
from proctor.sandbox.net.authority import upstream_context
from proctor.sandbox.net.services import Service

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from starlette.requests import Request

_INDEX_MAX = 128 << 20
_FILES_MAX = 200_000
_TIMEOUT = httpx.Timeout(60.0, connect=10.0)
_JSON = "application/vnd.pypi.simple.v1+json"
_HTML = "application/vnd.pypi.simple.v1+html"
_PROJECT = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,199}[A-Za-z0-9])?")
_NPM_NAME = re.compile(r"(@[a-z0-9~][a-z0-9._~-]{0,99}/)?[A-Za-z0-9_~-][A-Za-z0-9._~-]{0,199}")


class _Gone(Exception):
    """What was asked for does not exist, or not yet at the date."""


class _Mirror:
    """What both kinds share: fetching from upstream, and files by the names that the index has given them."""

    def __init__(self, upstream: str, cutoff: datetime.datetime, trust: str | None) -> None:
        self._upstream = upstream.rstrip("/") + "/"
        self._cutoff = cutoff
        self._trust = trust
        self._files: OrderedDict[str, str] = OrderedDict()
        self._client: httpx.AsyncClient | None = None

    @property
    def client(self) -> httpx.AsyncClient:
        """Made when first needed, on the loop that serves."""
        if self._client is None:
            verify: Any = upstream_context(self._trust) if self._upstream.startswith("https:") else True
            self._client = httpx.AsyncClient(timeout=_TIMEOUT, verify=verify, follow_redirects=True)
        return self._client

    def in_time(self, moment: object) -> bool:
        """Whether a time (ISO 8601) is known and not after the cut-off."""
        if not isinstance(moment, str):
            return False
        try:
            parsed = datetime.datetime.fromisoformat(moment)
        except ValueError:
            return False
        return (parsed if parsed.tzinfo else parsed.replace(tzinfo=datetime.UTC)) <= self._cutoff

    def name_file(self, url: str) -> str:
        """The path below which the mirror gives the file at `url`."""
        token = hashlib.sha256(url.encode()).hexdigest()[:32]
        self._files[token] = url
        self._files.move_to_end(token)
        while len(self._files) > _FILES_MAX:
            self._files.popitem(last=False)
        return f"/-files/{token}/{quote(unquote(urlsplit(url).path.rpartition('/')[2]))}"

    async def fetch(self, url: str, accept: str) -> Any:
        """A JSON document from upstream. Raises _Gone, httpx.HTTPError."""
        async with self.client.stream("GET", url, headers={"Accept": accept}) as answer:
            if answer.status_code in (404, 410):
                raise _Gone("upstream has no such package")
            answer.raise_for_status()
            body = bytearray()
            async for chunk in answer.aiter_bytes():
                body += chunk
                if len(body) > _INDEX_MAX:
                    raise httpx.DecodingError("the index is too long")
        try:
            return json.loads(body)
        except ValueError as error:
            raise httpx.DecodingError("upstream does not speak JSON here, so dates are unknown") from error

    async def file(self, request: Request) -> Response:
        """One file that the index has named (or its `.metadata`, PEP 658)."""
        url = self._files.get(request.path_params["token"])
        if url is None:
            return PlainTextResponse("not named by this index\n", 404)
        if request.path_params["name"].endswith(".metadata"):
            url = url.partition("#")[0] + ".metadata"
        sent = self.client.build_request("GET", url)
        answer = await self.client.send(sent, stream=True)

        async def body() -> AsyncIterator[bytes]:
            try:
                async for chunk in answer.aiter_raw():
                    yield chunk
            finally:
                await answer.aclose()

        kept = ("content-length", "content-type", "content-encoding")
        headers = {name: value for name, value in answer.headers.items() if name in kept}
        return StreamingResponse(body(), answer.status_code, headers)

    def app(self, *routes: Route) -> Starlette:
        """The application: files, then the routes of the kind."""
        handlers: Any = {
            _Gone: lambda _, error: PlainTextResponse(f"{error}\n", 404),
            httpx.HTTPError: lambda _, error: PlainTextResponse(f"upstream: {type(error).__name__}: {error}\n", 502),
        }
        return Starlette(routes=[Route("/-files/{token}/{name}", self.file), *routes], exception_handlers=handlers)


class _Python(_Mirror):
    async def project(self, request: Request) -> Response:
        name = request.path_params["name"]
        if not _PROJECT.fullmatch(name):
            raise _Gone("not the name of a project")
        normal = re.sub(r"[-_.]+", "-", name).lower()
        page_url = urljoin(self._upstream, f"{normal}/")
        document = await self.fetch(page_url, _JSON)
        files = [
            file | {"url": self.name_file(urljoin(page_url, file["url"]))}
            for file in document.get("files", [])
            if self.in_time(file.get("upload-time")) and isinstance(file.get("url"), str)
        ]
        if not files:
            raise _Gone(f"{normal} has no file of known date up to {self._cutoff:%Y-%m-%d}")
        meta = {"api-version": "1.0"}
        if _JSON in request.headers.get("accept", ""):
            return JSONResponse({"meta": meta, "name": normal, "files": files}, media_type=_JSON)
        links = "".join(_link(file) for file in files)
        return Response(f"<!DOCTYPE html><html><body>{links}</body></html>", media_type=_HTML)


def _link(file: Mapping[str, Any]) -> str:
    hashes = file.get("hashes") or {}
    fragment = f"#sha256={hashes['sha256']}" if "sha256" in hashes else ""
    requires = file.get("requires-python")
    extra = f' data-requires-python="{html.escape(requires)}"' if isinstance(requires, str) else ""
    extra += ' data-yanked=""' if file.get("yanked") else ""
    name = html.escape(str(file.get("filename", "")))
    return f'<a href="{html.escape(file["url"] + fragment)}"{extra}>{name}</a><br>'


class _Npm(_Mirror):
    async def package(self, request: Request) -> Response:
        name = unquote(request.path_params["name"])
        if not _NPM_NAME.fullmatch(name):
            raise _Gone("not the name of a package")
        document = await self.fetch(urljoin(self._upstream, quote(name, safe="@")), "application/json")
        times = document.get("time") or {}
        versions = {
            version: self._with_tarball(entry, request)
            for version, entry in (document.get("versions") or {}).items()
            if self.in_time(times.get(version))
        }
        if not versions:
            raise _Gone(f"{name} has no version of known date up to {self._cutoff:%Y-%m-%d}")
        tags = {tag: version for tag, version in (document.get("dist-tags") or {}).items() if version in versions}
        if "latest" not in tags:
            released = [version for version in versions if "-" not in version] or list(versions)
            tags["latest"] = max(released, key=lambda version: str(times[version]))
        kept = {version: times[version] for version in versions}
        return JSONResponse({"name": name, "dist-tags": tags, "versions": versions, "time": kept})

    def _with_tarball(self, entry: Mapping[str, Any], request: Request) -> dict[str, Any]:
        dist = dict(entry.get("dist") or {})
        if isinstance(dist.get("tarball"), str):
            path = self.name_file(dist["tarball"])
            dist["tarball"] = f"{self._scheme(request)}://{request.headers['host']}{path}"
        return {**entry, "dist": dist}

    @staticmethod
    def _scheme(request: Request) -> str:
        visit = request.scope.get("extensions", {}).get("proctor.visit")
        return "https" if visit is not None and visit.encrypted else "http"


def _cutoff(date: datetime.date | datetime.datetime | str) -> datetime.datetime:
    """The last moment that counts: the end of a day, in UTC."""
    try:
        given = datetime.datetime.fromisoformat(date) if isinstance(date, str) else date
    except ValueError:
        raise ConfigError(f"{date!r} is no date", field="mirror", remedy="like 2024-06-30") from None
    if isinstance(given, datetime.datetime) and (given.hour or given.minute or given.second or given.tzinfo):
        return given if given.tzinfo else given.replace(tzinfo=datetime.UTC)
    return datetime.datetime(given.year, given.month, given.day, 23, 59, 59, 999_999, datetime.UTC)


def _check_upstream(upstream: str) -> None:
    parts = urlsplit(upstream)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{upstream!r} is no URL", field="mirror", remedy="like https://index.example/simple/")


def python_mirror(upstream: str, cutoff: datetime.date | str, *, trust: str | None = None) -> Service:
    """A Python index (`upstream`: the base URL of a simple API in JSON) as it was at the end of a day."""
    _check_upstream(upstream)
    mirror = _Python(upstream, _cutoff(cutoff), trust)
    base = urlsplit(upstream).path.rstrip("/") or ""
    routes = (Route(f"{base}/{{name}}/", mirror.project), Route(f"{base}/{{name}}", mirror.project))
    return Service.asgi(mirror.app(*routes), ports=(80,), tls_ports=(443,))


def npm_mirror(upstream: str, cutoff: datetime.date | str, *, trust: str | None = None) -> Service:
    """An npm registry (`upstream`: its base URL) as it was at the end of a day."""
    _check_upstream(upstream)
    mirror = _Npm(upstream, _cutoff(cutoff), trust)
    base = urlsplit(upstream).path.rstrip("/") or ""
    return Service.asgi(mirror.app(Route(f"{base}/{{name:path}}", mirror.package)), ports=(80,), tls_ports=(443,))


def mirror(text: str) -> tuple[str, Service]:
    """`python:URL@DATE` or `npm:URL@DATE`, as the command line has it: the name to answer, and the service."""
    kind, _, rest = text.partition(":")
    url, _, date = rest.rpartition("@")
    makers = {"python": python_mirror, "npm": npm_mirror}
    if kind not in makers or not url:
        raise ConfigError(f"{text!r} is not python:URL@DATE or npm:URL@DATE", field="mirror")
    return urlsplit(url).hostname or "", makers[kind](url, date)
