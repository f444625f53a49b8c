"""Clients that know no proto: reflection, and the grpcurl commands of the documents."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from serving.client import Client
from serving.grpc_api.front import SERVICE
from tests.helpers.grpc_server import GrpcServer

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = [
    command
    for document in ("README.md", "docs/how-to/serve.md")
    for command in re.findall(r"^grpcurl (?:.*\\\n)*.*", (ROOT / document).read_text(), re.M)
]


def test_reflection_lists_the_service(serve_grpc: Callable[..., GrpcServer]) -> None:
    with grpc.insecure_channel(serve_grpc().address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert SERVICE in database.get_services()
        found = DescriptorPool(database).FindServiceByName(SERVICE)
        assert [method.name for method in found.methods][:2] == ["Generate", "GenerateBatch"]


def by_reflection(address: str, data: str, method: str) -> list[dict[str, Any]]:
    """What grpcurl does: asks the server for the types, and knows only JSON itself."""
    service, _, name = method.partition("/")
    with grpc.insecure_channel(address) as channel:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        found = pool.FindServiceByName(service).FindMethodByName(name)
        make = channel.unary_stream if found.server_streaming else channel.unary_unary
        answer = GetMessageClass(found.output_type)
        call = make(f"/{method}", lambda m: m.SerializeToString(), answer.FromString)
        replies = call(json_format.Parse(data, GetMessageClass(found.input_type)()))
        replies = replies if found.server_streaming else [replies]
        return [json_format.MessageToDict(reply) for reply in replies]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_grpcurl_commands_are_answered(
    command: str, serve_grpc: Callable[..., GrpcServer]
) -> None:
    words = shlex.split(command, comments=True)
    assert words[:2] == ["grpcurl", "-plaintext"] and words[-2] == "127.0.0.1:8001"
    data = words[words.index("-d") + 1] if "-d" in words else "{}"
    server = serve_grpc()
    replies = by_reflection(server.address, data, words[-1])
    if words[-1].endswith("/Generate"):
        asked = json.loads(data)
        text = "".join(reply.get("text", "") for reply in replies)
        usage = replies[-1]["usage"]
        assert text and usage["completionTokens"] == asked["sampling"]["max_tokens"]
        with Client(server.address) as client:
            assert usage["promptTokens"] == len(client.tokenize(asked["prompt"]["text"]))
    else:
        assert replies[0]["kernels"][0]["implementation"]


def test_the_documents_have_three_commands() -> None:
    assert len(COMMANDS) == 3  # or the test above would pass without any
