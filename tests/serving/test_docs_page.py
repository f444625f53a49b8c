"""The Python of the page about serving runs against servers."""

from collections.abc import Callable

import pytest

from tests.helpers.docs import DOCS, python_of
from tests.helpers.grpc_server import GrpcServer
from tests.helpers.http_server import HttpServer

PAGE = DOCS / "how-to" / "serve.md"


def test_the_clients_of_the_page(
    serve_bundled: Callable[..., HttpServer],
    serve_grpc: Callable[..., GrpcServer],
    capsys: pytest.CaptureFixture[str],
) -> None:
    http, grpc = serve_bundled(), serve_grpc()
    code = python_of(PAGE)
    for given, here in (("http://127.0.0.1:8000", http.url), ("127.0.0.1:8001", grpc.address)):
        assert given in code
        code = code.replace(given, here)
    exec(compile(code, str(PAGE), "exec"), {"__name__": "page"})
    assert capsys.readouterr().out.strip()
