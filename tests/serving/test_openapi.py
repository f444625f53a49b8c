"""The OpenAPI document is true: schemathesis sends what it allows and what it forbids."""

from collections.abc import Callable

import httpx
import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    negative_data_rejection,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)

from tests.helpers.http_server import HttpServer

Serve = Callable[..., HttpServer]

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
OPERATIONS = {
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/metrics"),
    ("GET", "/server_info"),
    ("GET", "/"),
}
CASES = [
    (method, path, mode)
    for method, path in sorted(OPERATIONS)
    for mode in GenerationMode
    if method == "POST" or mode is GenerationMode.POSITIVE  # a GET has nothing that can be wrong
]
EXAMPLES = 40


def test_the_document_lists_every_route(serve_bundled: Serve) -> None:
    document = httpx.get(f"{serve_bundled().url}/openapi.json").json()
    listed = {(m.upper(), path) for path, ms in document["paths"].items() for m in ms}
    assert listed == OPERATIONS
    statuses = {
        s for ms in document["paths"].values() for op in ms.values() for s in op["responses"]
    }
    assert statuses == {"200", "400", "401", "404", "413", "429", "500", "503"}


@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_answers_are_as_documented(
    serve_bundled: Serve, method: str, path: str, mode: GenerationMode
) -> None:
    server = serve_bundled(max_body_bytes=100_000)
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operation = schema[path][method]
    checks = CHECKS + ([negative_data_rejection] if mode is GenerationMode.NEGATIVE else [])

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def run(case: schemathesis.Case) -> None:
        # Valid ones would generate long. (An invalid one may be so by its max_tokens alone.)
        if mode is GenerationMode.POSITIVE and path.startswith("/v1/c"):
            assert isinstance(case.body, dict)
            case.body["max_tokens"] = 1
            case.body.pop("max_completion_tokens", None)
        case.call_and_validate(base_url=server.url, checks=checks, timeout=60)

    run()
