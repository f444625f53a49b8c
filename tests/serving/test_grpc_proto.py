"""The generated code is what protoc makes of inference.proto, whose names are the library's."""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from hybrid_jax import SamplingParams, StructuredOutput
from serving.grpc_api import inference_pb2 as pb
from serving.grpc_api import inference_pb2_grpc
from serving.grpc_api.servicer import Servicer

ROOT = Path(__file__).resolve().parents[2]
PROTO = "serving/grpc_api/inference.proto"


def test_the_generated_code_is_current(tmp_path: Path) -> None:
    """Compares what the code describes, for its text depends on protoc's version."""
    target = tmp_path / "descriptors"
    command = ["-m", "grpc_tools.protoc", "-I.", f"--descriptor_set_out={target}", PROTO]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
    (expected,) = FileDescriptorSet.FromString(target.read_bytes()).file
    actual = FileDescriptorProto.FromString(pb.DESCRIPTOR.serialized_pb)
    assert str(actual) == re.sub(r"\n *json_name: .*", "", str(expected))  # follow from the names


def test_the_stub_and_the_servicer_have_every_method() -> None:
    methods = {m.name for m in pb.DESCRIPTOR.services_by_name["InferenceService"].methods}
    stub = Path(inference_pb2_grpc.__file__).read_text()
    for name in methods:
        assert f"/hybrid_jax.v1.InferenceService/{name}'" in stub
        assert name in vars(Servicer)


def test_messages_have_every_field_of_the_library() -> None:
    for ours, theirs in (
        (SamplingParams, pb.SamplingParams),
        (StructuredOutput, pb.StructuredOutput),
    ):
        assert {f.name for f in fields(ours)} == set(theirs.DESCRIPTOR.fields_by_name)
