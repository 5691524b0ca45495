"""The console: static files under a policy that lets nothing else run."""

from importlib.resources import files

from fastapi import APIRouter, Response

_POLICY = "; ".join(
    (
        "default-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "object-src 'none'",
        "require-trusted-types-for 'script'",
    )
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def console_router() -> APIRouter:
    """Reads the files once, when the router is built."""
    router = APIRouter(include_in_schema=False)
    folder = files("gateway") / "console"
    pages = {
        name: (folder / name).read_bytes() for name in ("index.html", "console.js", "console.css", "favicon.svg")
    }

    @router.get("/")
    async def index() -> Response:
        return _page(pages["index.html"], "text/html")

    @router.get("/console/console.js")
    async def script() -> Response:
        return _page(pages["console.js"], "text/javascript")

    @router.get("/console/console.css")
    async def style() -> Response:
        return _page(pages["console.css"], "text/css")

    @router.get("/favicon.ico")
    async def icon() -> Response:
        return _page(pages["favicon.svg"], "image/svg+xml")

    return router


def _page(content: bytes, kind: str) -> Response:
    return Response(content, media_type=kind, headers=_HEADERS)
