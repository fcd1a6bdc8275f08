"""The page of the console and its files, at the listeners for browsers.

The addresses of all its pages return the same document, which shows the right one. Its policy (CSP)
lets it load nothing but its own files; the policies of the two frames let their content load
nothing at all.
"""

import base64
import hashlib
import mimetypes
import re
import secrets
from functools import cache

from fastapi import APIRouter, Request, Response
from starlette.responses import RedirectResponse

from sbx.api.console.listener import NO_PAGE, demanded_site
from sbx.console import STATIC, build
from sbx.errors import NotFound

router = APIRouter(include_in_schema=False)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,80}")
_SCRIPT = re.compile(rb"<script>(.*?)</script>", re.DOTALL)


@router.get("/")
async def root(request: Request) -> Response:
    demanded_site(request.scope)
    return RedirectResponse("/console/", 302)


@router.get("/console/static/{name:path}")
async def static(name: str, request: Request) -> Response:
    """Return a built file. A browser asks each time whether it has changed."""
    demanded_site(request.scope)
    if not _NAME.fullmatch(name) or (content := _file(name)) is None:
        raise NotFound(f"the console has no file {name[:80]!r}")
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {"cache-control": "no-cache", "etag": etag}
    if request.headers.get("if-none-match") == etag:
        return Response(None, 304, headers)
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    return Response(content, 200, headers, kind)


@router.get("/console/{frame}.html")
async def frame(frame: str, request: Request) -> Response:
    """Return a frame for output of sandboxes. Only at the second name of the console."""
    site = demanded_site(request.scope)
    content = _file(f"{frame}.html")
    if not site.is_frames or content is None:
        raise NotFound(NO_PAGE)
    scripts = [base64.b64encode(hashlib.sha256(each).digest()).decode() for each in
               _SCRIPT.findall(content)]  # fmt: skip
    # With 'unsafe-inline' and a hash, browsers ignore the first.
    allowed = "'unsafe-inline'" if frame == "frame-scripts" else " ".join(
        f"'sha256-{each}'" for each in scripts
    )  # fmt: skip
    policy = (
        f"sandbox allow-scripts; default-src 'none'; script-src {allowed};"
        " style-src 'unsafe-inline'; img-src data: blob:; font-src data:; media-src data: blob:;"
        " connect-src 'none'; frame-src 'none'; form-action 'none'; base-uri 'none';"
        f" frame-ancestors {site.origin}"
    )
    headers = {"content-security-policy": policy, "cache-control": "no-cache"}
    return Response(content, 200, headers, "text/html; charset=utf-8")


@router.get("/console")
@router.get("/console/{path:path}")
async def page(request: Request) -> Response:
    """Return the document of the console, with a nonce for its styles."""
    site = demanded_site(request.scope)
    nonce = secrets.token_urlsafe(18)
    content = _index().replace("{{nonce}}", nonce).replace("{{build}}", build())
    content = content.replace("{{frames}}", site.frames)
    policy = (
        f"default-src 'none'; script-src 'self'; style-src 'self' 'nonce-{nonce}';"
        " img-src 'self' blob: data:; font-src 'self'; connect-src 'self'; worker-src 'self';"
        f" manifest-src 'self'; frame-src {site.frames}; form-action 'none'; base-uri 'none';"
        " frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types dompurify"
    )
    headers = {"content-security-policy": policy, "cache-control": "no-store"}
    return Response(content, 200, headers, "text/html; charset=utf-8")


@cache
def _file(name: str) -> bytes | None:
    """Return a built file. The service must not read the disk for each request of a browser."""
    try:
        return (STATIC / name).read_bytes()
    except OSError:
        return None


def _index() -> str:
    content = _file("index.html")
    assert content is not None
    return content.decode("utf-8")
