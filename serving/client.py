"""Clients of the gRPC server: `Client`, and `AsyncClient` for asyncio. No JAX is imported.

    with Client("127.0.0.1:8001") as client:
        print(client.generate("In the beginning", max_tokens=20).completions[0].text)

Sampling parameters are the fields of `SamplingParams` in `inference.proto`. What is returned are
messages of that file; a failed call raises `grpc.RpcError`, whose `code()` and `details()` say why.
"""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc

from serving.grpc_api import inference_pb2 as pb
from serving.grpc_api.inference_pb2_grpc import InferenceServiceStub

PromptLike = str | Sequence[int] | Sequence[Mapping[str, str]]
"""A text, token ids, or the messages of a conversation (`{"role": ..., "content": ...}`)."""

_PIECE = 2**20  # bytes of a snapshot per message
_OPTIONS = (("grpc.max_receive_message_length", -1),)


def prompt_message(prompt: PromptLike) -> pb.Prompt:
    """A prompt as the protocol has it."""
    if isinstance(prompt, str):
        return pb.Prompt(text=prompt)
    if prompt and isinstance(prompt[0], Mapping):
        messages = [pb.ChatMessage(**message) for message in prompt]  # type: ignore[arg-type]
        return pb.Prompt(chat=pb.Chat(messages=messages))
    return pb.Prompt(token_ids=pb.TokenIds(ids=prompt))  # type: ignore[arg-type]


def _request(
    prompt: PromptLike, sampling: dict[str, Any], *, request_id: str = "", session_id: str = ""
) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        prompt=prompt_message(prompt),
        sampling=pb.SamplingParams(**sampling),
        request_id=request_id,
        session_id=session_id,
    )


def _batch(
    prompts: Sequence[PromptLike], sampling: dict[str, Any], *, session_id: str = ""
) -> pb.GenerateBatchRequest:
    requests = [_request(prompt, sampling, session_id=session_id) for prompt in prompts]
    return pb.GenerateBatchRequest(requests=requests)


def _restore_requests(data: bytes, file: str) -> Iterator[pb.RestoreRequest]:
    if file:
        yield pb.RestoreRequest(file=file)
        return
    for start in range(0, len(data), _PIECE):
        yield pb.RestoreRequest(data=data[start : start + _PIECE])


def _metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    return () if api_key is None else (("authorization", f"Bearer {api_key}"),)


def _credentials(ca_file: str | Path | None) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(None if ca_file is None else Path(ca_file).read_bytes())


class Client:
    """A connection to a server, for one or many threads."""

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        tls: bool = False,
        ca_file: str | Path | None = None,
    ) -> None:
        """Connects with the first call.

        Args:
            address: host:port.
            api_key: one of the server's, if it has any.
            tls: whether the server has TLS on.
            ca_file: PEM certificates to trust; None: the system's.
        """
        if tls:
            self.channel = grpc.secure_channel(address, _credentials(ca_file), _OPTIONS)
        else:
            self.channel = grpc.insecure_channel(address, _OPTIONS)
        self._stub = InferenceServiceStub(self.channel)
        self._metadata = _metadata(api_key)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection and all calls on it. Idempotent."""
        self.channel.close()

    def stream(
        self,
        prompt: PromptLike,
        *,
        request_id: str = "",
        session_id: str = "",
        timeout: float | None = None,
        **sampling: Any,
    ) -> Iterator[pb.GenerateResponse]:
        """Completes a prompt, piece by piece; `timeout` in seconds. `cancel()` of it ends it.

        With `session_id` the prompt and its completion are that session's next turn.
        """
        request = _request(prompt, sampling, request_id=request_id, session_id=session_id)
        return self._stub.Generate(request, timeout=timeout, metadata=self._metadata)

    def generate(
        self,
        prompt: PromptLike,
        *,
        session_id: str = "",
        timeout: float | None = None,
        **sampling: Any,
    ) -> pb.GenerateResult:
        """Completes a prompt; with `session_id` as that session's next turn."""
        batch = _batch([prompt], sampling, session_id=session_id)
        return self._call("GenerateBatch", batch, timeout).results[0]

    def generate_batch(
        self, prompts: Sequence[PromptLike], *, timeout: float | None = None, **sampling: Any
    ) -> list[pb.GenerateResult]:
        """Completes several prompts, all with the same sampling parameters."""
        return list(self._call("GenerateBatch", _batch(prompts, sampling), timeout).results)

    def tokenize(self, prompt: PromptLike, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text or conversation."""
        request = pb.TokenizeRequest(
            prompt=prompt_message(prompt), add_special_tokens=add_special_tokens
        )
        return list(self._call("Tokenize", request).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return self._call("Detokenize", request).text

    def abort(self, request_id: str) -> bool:
        """Ends a request; False if there is none of that id."""
        return self._call("Abort", pb.AbortRequest(request_id=request_id)).known

    def open_session(self) -> str:
        """The id of a new session: a conversation that computes every token once."""
        return self._call("OpenSession", pb.OpenSessionRequest()).session_id

    def sessions(self) -> list[pb.Session]:
        """The sessions of all clients."""
        return list(self._call("ListSessions", pb.ListSessionsRequest()).sessions)

    def close_session(self, session_id: str) -> None:
        """Gives a session's memory back and aborts its turn, if one is under way."""
        self._call("CloseSession", pb.CloseSessionRequest(session_id=session_id))

    def fork(self, session_id: str) -> str:
        """The id of another session with the same past."""
        return self._call("Fork", pb.ForkRequest(session_id=session_id)).session_id

    def snapshot(self, session_id: str, *, file: str = "") -> bytes:
        """A session's memory, as a safetensors file; or nothing, if it goes to `file` in the
        server's snapshot directory."""
        request = pb.SnapshotRequest(session_id=session_id, file=file)
        return b"".join(piece.data for piece in self._call("Snapshot", request))

    def restore(self, snapshot: bytes = b"", *, file: str = "") -> str:
        """The id of a new session that goes on from a snapshot, or from one of the server's."""
        return self._call("Restore", _restore_requests(snapshot, file)).session_id

    def model_info(self) -> pb.GetModelInfoResponse:
        """The model's layers and the limits on requests."""
        return self._call("GetModelInfo", pb.GetModelInfoRequest())

    def server_info(self) -> pb.GetServerInfoResponse:
        """Versions, devices, compiled shapes and the kernel table."""
        return self._call("GetServerInfo", pb.GetServerInfoRequest())

    def memory(self) -> pb.GetMemoryResponse:
        """Sequences, and the use and bytes of every kind of memory."""
        return self._call("GetMemory", pb.GetMemoryRequest())

    def _call(self, method: str, request: Any, timeout: float | None = None) -> Any:
        return getattr(self._stub, method)(request, timeout=timeout, metadata=self._metadata)


class AsyncClient:
    """`Client`, for asyncio: the same methods, to be awaited or iterated with `async for`."""

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        tls: bool = False,
        ca_file: str | Path | None = None,
    ) -> None:
        """As `Client`'s; to be made in the event loop that uses it."""
        if tls:
            self.channel = grpc.aio.secure_channel(address, _credentials(ca_file), _OPTIONS)
        else:
            self.channel = grpc.aio.insecure_channel(address, _OPTIONS)
        self._stub = InferenceServiceStub(self.channel)
        self._metadata = _metadata(api_key)

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connection and all calls on it. Idempotent."""
        await self.channel.close()

    def stream(
        self,
        prompt: PromptLike,
        *,
        request_id: str = "",
        session_id: str = "",
        timeout: float | None = None,
        **sampling: Any,
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Completes a prompt, piece by piece; `timeout` in seconds. `cancel()` of it ends it.

        With `session_id` the prompt and its completion are that session's next turn.
        """
        request = _request(prompt, sampling, request_id=request_id, session_id=session_id)
        return self._stub.Generate(request, timeout=timeout, metadata=self._metadata)

    async def generate(
        self,
        prompt: PromptLike,
        *,
        session_id: str = "",
        timeout: float | None = None,
        **sampling: Any,
    ) -> pb.GenerateResult:
        """Completes a prompt; with `session_id` as that session's next turn."""
        batch = _batch([prompt], sampling, session_id=session_id)
        return (await self._call("GenerateBatch", batch, timeout)).results[0]

    async def generate_batch(
        self, prompts: Sequence[PromptLike], *, timeout: float | None = None, **sampling: Any
    ) -> list[pb.GenerateResult]:
        """Completes several prompts, all with the same sampling parameters."""
        return list((await self._call("GenerateBatch", _batch(prompts, sampling), timeout)).results)

    async def tokenize(self, prompt: PromptLike, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text or conversation."""
        request = pb.TokenizeRequest(
            prompt=prompt_message(prompt), add_special_tokens=add_special_tokens
        )
        return list((await self._call("Tokenize", request)).token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> str:
        """The text of token ids."""
        request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return (await self._call("Detokenize", request)).text

    async def abort(self, request_id: str) -> bool:
        """Ends a request; False if there is none of that id."""
        return (await self._call("Abort", pb.AbortRequest(request_id=request_id))).known

    async def open_session(self) -> str:
        """The id of a new session: a conversation that computes every token once."""
        return (await self._call("OpenSession", pb.OpenSessionRequest())).session_id

    async def sessions(self) -> list[pb.Session]:
        """The sessions of all clients."""
        return list((await self._call("ListSessions", pb.ListSessionsRequest())).sessions)

    async def close_session(self, session_id: str) -> None:
        """Gives a session's memory back and aborts its turn, if one is under way."""
        await self._call("CloseSession", pb.CloseSessionRequest(session_id=session_id))

    async def fork(self, session_id: str) -> str:
        """The id of another session with the same past."""
        return (await self._call("Fork", pb.ForkRequest(session_id=session_id))).session_id

    async def snapshot(self, session_id: str, *, file: str = "") -> bytes:
        """A session's memory, as a safetensors file; or nothing, if it goes to `file` in the
        server's snapshot directory."""
        request = pb.SnapshotRequest(session_id=session_id, file=file)
        call = self._stub.Snapshot(request, metadata=self._metadata)
        return b"".join([piece.data async for piece in call])

    async def restore(self, snapshot: bytes = b"", *, file: str = "") -> str:
        """The id of a new session that goes on from a snapshot, or from one of the server's."""
        return (await self._call("Restore", _restore_requests(snapshot, file))).session_id

    async def model_info(self) -> pb.GetModelInfoResponse:
        """The model's layers and the limits on requests."""
        return await self._call("GetModelInfo", pb.GetModelInfoRequest())

    async def server_info(self) -> pb.GetServerInfoResponse:
        """Versions, devices, compiled shapes and the kernel table."""
        return await self._call("GetServerInfo", pb.GetServerInfoRequest())

    async def memory(self) -> pb.GetMemoryResponse:
        """Sequences, and the use and bytes of every kind of memory."""
        return await self._call("GetMemory", pb.GetMemoryRequest())

    async def _call(self, method: str, request: Any, timeout: float | None = None) -> Any:
        return await getattr(self._stub, method)(request, timeout=timeout, metadata=self._metadata)
