"""GET /: a page for people."""

from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

router = APIRouter()

_PAGE = files("serving.http_api").joinpath("page.html").read_text(encoding="utf-8")
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
        "connect-src 'self'; img-src data:; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
}


@router.get("/", response_class=HTMLResponse)
async def page() -> HTMLResponse:
    """Chat, caches and kernels in one file that needs nothing else."""
    return HTMLResponse(_PAGE, headers=_HEADERS)
