"""TLS on both fronts, with one certificate that only those trust who are told to."""

import asyncio
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from serving.client import AsyncClient, Client
from tests.helpers.grpc_server import GrpcServer
from tests.helpers.http_server import HttpServer

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8}
PROMPT = "And it came to pass"
SECONDS = 30.0  # only a broken test takes so long


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Settings of a server: a certificate for localhost and its key."""
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
        + ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
        + ["-keyout", str(key), "-out", str(certificate)],
        check=True,
        capture_output=True,
    )
    return {"tls_cert_file": certificate, "tls_key_file": key}


def localhost(address: str) -> str:
    """The name that the certificate is for."""
    return address.replace("127.0.0.1", "localhost")


def test_http(serve_bundled: Callable[..., HttpServer], files: dict[str, Path]) -> None:
    server = serve_bundled(**files)
    assert server.url.startswith("https://")
    context = ssl.create_default_context(cafile=str(files["tls_cert_file"]))
    url = localhost(server.url)
    assert httpx.get(f"{url}/health", verify=context).status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_grpc(serve_grpc: Callable[..., GrpcServer], files: dict[str, Path]) -> None:
    server = serve_grpc(**files)
    assert server.front.url.startswith("grpcs://")
    address, trusted = localhost(server.address), files["tls_cert_file"]
    with Client(address, tls=True, ca_file=trusted) as client:
        expected = client.generate(PROMPT, **GREEDY, timeout=SECONDS).completions[0].text
        streamed = client.stream(PROMPT, **GREEDY, timeout=SECONDS)
        assert expected == "".join(event.text for event in streamed)

    async def same_again() -> str:
        async with AsyncClient(address, tls=True, ca_file=trusted) as client:
            return (await client.generate(PROMPT, **GREEDY, timeout=SECONDS)).completions[0].text

    assert asyncio.run(same_again()) == expected


@pytest.mark.parametrize("tls", [False, True], ids=["plaintext", "without the certificate"])
def test_grpc_turns_away_clients(
    tls: bool, serve_grpc: Callable[..., GrpcServer], files: dict[str, Path]
) -> None:
    with (
        Client(localhost(serve_grpc(**files).address), tls=tls) as client,
        pytest.raises(grpc.RpcError) as caught,
    ):
        client.generate(PROMPT, **GREEDY, timeout=SECONDS)
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.UNAVAILABLE
