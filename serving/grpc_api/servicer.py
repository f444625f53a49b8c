"""The methods of `hybrid_jax.v1.InferenceService`; `inference.proto` says what they promise."""

from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial

import grpc

from hybrid_jax.engine.types import Request
from hybrid_jax.errors import InvalidRequest
from hybrid_jax.llm import RequestOutput
from serving.async_engine import TokenStream
from serving.context import ServerContext, new_id
from serving.grpc_api import inference_pb2 as pb
from serving.grpc_api.inference_pb2_grpc import InferenceServiceServicer
from serving.grpc_api.messages import (
    conversation,
    event_message,
    result_message,
    sampling_params,
    session_message,
)
from serving.grpc_api.status import Aborted, reported
from serving.server_info import server_info
from serving.sessions import Sessions
from serving.snapshots import SnapshotFiles, from_pieces, pieces_of

Context = grpc.aio.ServicerContext


class Servicer(InferenceServiceServicer):
    """Serves one engine, in the event loop that its server runs in."""

    def __init__(self, server: ServerContext, sessions: Sessions) -> None:
        self._server = server
        self._engine = server.engine
        self._sessions = sessions
        self._files = SnapshotFiles(server.config.snapshot_dir)

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Streams one request's events. A client that has gone cancels this, and so aborts it."""
        async with reported(context):
            with await self._start(request, whole=False) as stream:
                async for event in stream:
                    if event.error is not None:
                        raise event.error
                    if event.finish_reason == "abort":
                        raise Aborted(f"request {event.request_id} was aborted")
                    yield event_message(event)

    async def GenerateBatch(
        self, request: pb.GenerateBatchRequest, context: Context
    ) -> pb.GenerateBatchResponse:
        """Collects the outputs of all requests."""
        async with reported(context):
            count, most = len(request.requests), self._server.config.max_prompts
            if not 1 <= count <= most:
                raise InvalidRequest(
                    f"{count} requests but max_prompts is {most}; send 1 to {most}"
                )
            with ExitStack() as stack:
                streams = [
                    stack.enter_context(await self._start(each, whole=True))
                    for each in request.requests
                ]
                outputs = [_checked(await stream.collect()) for stream in streams]
            return pb.GenerateBatchResponse(results=map(result_message, outputs))
        raise AssertionError("unreachable")

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Token ids of a text or a conversation."""
        async with reported(context):
            special = request.add_special_tokens or not request.HasField("add_special_tokens")
            _, ids = await self._encode(request.prompt, add_special_tokens=special)
            return pb.TokenizeResponse(token_ids=ids)
        raise AssertionError("unreachable")

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        """The text of token ids."""
        async with reported(context):
            size = self._engine.model_config.vocab_size
            if request.token_ids and max(request.token_ids) >= size:
                raise InvalidRequest(
                    f"token id {max(request.token_ids)} is outside the vocabulary [0, {size}); "
                    "leave it out"
                )
            skip = request.skip_special_tokens or not request.HasField("skip_special_tokens")
            tokenizer = self._engine.require_tokenizer()
            text = tokenizer.decode(list(request.token_ids), skip_special_tokens=skip)
            return pb.DetokenizeResponse(text=text)
        raise AssertionError("unreachable")

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """Ends a request of any client."""
        return pb.AbortResponse(known=self._engine.abort(request.request_id))

    async def OpenSession(self, request: pb.OpenSessionRequest, context: Context) -> pb.Session:
        """A session without tokens."""
        async with reported(context):
            return session_message(await self._sessions.open())
        raise AssertionError("unreachable")

    async def ListSessions(
        self, request: pb.ListSessionsRequest, context: Context
    ) -> pb.ListSessionsResponse:
        """The sessions of all clients."""
        async with reported(context):
            found = await self._sessions.infos()
            return pb.ListSessionsResponse(sessions=map(session_message, found))
        raise AssertionError("unreachable")

    async def CloseSession(
        self, request: pb.CloseSessionRequest, context: Context
    ) -> pb.CloseSessionResponse:
        """Gives a session's memory back."""
        async with reported(context):
            await self._sessions.close(request.session_id)
            return pb.CloseSessionResponse()
        raise AssertionError("unreachable")

    async def Fork(self, request: pb.ForkRequest, context: Context) -> pb.Session:
        """A session with the same past."""
        async with reported(context):
            return session_message(await self._sessions.fork(request.session_id))
        raise AssertionError("unreachable")

    async def Snapshot(
        self, request: pb.SnapshotRequest, context: Context
    ) -> AsyncIterator[pb.SnapshotPiece]:
        """Sends a session's memory, or writes it to a file."""
        async with reported(context):
            snapshot = await self._sessions.snapshot(request.session_id)
            if request.file:
                await self._files.save(snapshot, request.file)
                return
            async for piece in pieces_of(snapshot):
                yield pb.SnapshotPiece(data=piece)

    async def Restore(
        self, request_iterator: AsyncIterator[pb.RestoreRequest], context: Context
    ) -> pb.Session:
        """A session from a snapshot that is sent or in a file."""
        async with reported(context):
            first = await anext(aiter(request_iterator), pb.RestoreRequest())
            if first.file:
                snapshot = await self._files.load(first.file)
            else:
                most = self._server.config.max_snapshot_bytes
                snapshot = await from_pieces(_data(first, request_iterator), most)
            return session_message(await self._sessions.restore(snapshot))
        raise AssertionError("unreachable")

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        """Layers and limits."""
        config, tokenizer = self._engine.config, self._engine.tokenizer
        info = server_info(self._engine, self._server.model_name)
        return pb.GetModelInfoResponse(
            name=info.model,
            model_type=info.model_type,
            vocab_size=info.vocab_size,
            layers=[pb.Layer(**asdict(layer)) for layer in info.layers],
            limits=pb.Limits(
                max_model_len=config.max_model_len,
                max_num_seqs=config.max_num_seqs,
                max_queue=config.max_queue,
                max_logprobs=config.max_logprobs,
                max_logit_bias=config.max_logit_bias,
            ),
            has_tokenizer=tokenizer is not None,
            has_chat_template=tokenizer is not None and bool(tokenizer.hf.chat_template),
        )

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        """Versions, devices, buckets and the kernel table."""
        info = server_info(self._engine, self._server.model_name)
        return pb.GetServerInfoResponse(
            versions=info.versions,
            platform=info.platform,
            devices=info.devices,
            row_buckets=self._engine.config.row_buckets,
            token_buckets=self._engine.config.token_buckets,
            compiled_steps=info.compiles,
            kernels=[
                pb.KernelChoice(
                    op=choice.op,
                    implementation=choice.implementation,
                    forced=choice.forced,
                    device_kind=choice.device_kind,
                    operands=choice.operands,
                    refused=[
                        pb.Refusal(implementation=i, reason=r) for i, r in choice.refused.items()
                    ],
                )
                for choice in info.kernels
            ],
        )

    async def GetMemory(
        self, request: pb.GetMemoryRequest, context: Context
    ) -> pb.GetMemoryResponse:
        """A snapshot of sequences and caches."""
        info = server_info(self._engine, self._server.model_name)
        return pb.GetMemoryResponse(
            running=info.running,
            waiting=info.waiting,
            preemptions=info.preemptions,
            recomputed_tokens=info.recomputed_tokens,
            swap=pb.Swap(**asdict(info.swap)),
            caches=[pb.CacheClass(**asdict(cache)) for cache in info.caches],
            parameter_bytes=info.parameter_bytes,
        )

    async def _start(self, request: pb.GenerateRequest, *, whole: bool) -> TokenStream:
        """Gives a request to the engine."""
        self._server.check_model(request.model or None)
        params = sampling_params(request.sampling)
        self._server.check_params(params)
        request_id = request.request_id or new_id("grpc")
        max_tokens = params.max_tokens if request.sampling.HasField("max_tokens") else None
        if request.session_id:
            encode = partial(self._encode_turn, request.prompt, max_tokens)
            return await self._sessions.generate(
                request.session_id, encode, params, request_id, whole=whole
            )
        text, ids = await self._encode(request.prompt)
        self._server.check_length(len(ids), max_tokens)
        wanted = Request(request_id, tuple(ids), params, text)
        if params.structured is not None:
            await self._engine.check(wanted)
        return self._engine.generate(wanted, whole=whole)

    async def _encode_turn(
        self, prompt: pb.Prompt, max_tokens: int | None, known: tuple[int, ...]
    ) -> tuple[str | None, list[int]]:
        """What a session's turn adds to the tokens it knows. Raises InvalidRequest."""
        if known and prompt.WhichOneof("kind") == "chat":
            raise InvalidRequest(
                "a session goes on with text or token_ids; only its first prompt may be a chat"
            )
        text, ids = await self._encode(prompt, add_special_tokens=not known)
        self._server.check_length(len(known) + len(ids), max_tokens)
        return text, ids

    async def _encode(
        self, prompt: pb.Prompt, *, add_special_tokens: bool = True
    ) -> tuple[str | None, list[int]]:
        kind = prompt.WhichOneof("kind")
        if kind == "text":
            ids = await self._engine.encode(prompt.text, add_special_tokens=add_special_tokens)
            return prompt.text, ids
        if kind == "token_ids":
            return None, list(prompt.token_ids.ids)
        if kind == "chat" and prompt.chat.messages:
            messages, template_args = conversation(prompt.chat)
            return await self._engine.encode_chat(messages, **template_args)
        raise InvalidRequest("there is no prompt; give text, token_ids or a chat with messages")


async def _data(
    first: pb.RestoreRequest, rest: AsyncIterator[pb.RestoreRequest]
) -> AsyncIterator[bytes]:
    yield first.data
    async for request in rest:
        yield request.data


def _checked(output: RequestOutput) -> RequestOutput:
    """The output, unless a completion failed or was aborted: then that is raised."""
    for completion in output.outputs:
        if completion.error is not None:
            raise completion.error
        if completion.finish_reason == "abort":
            raise Aborted(f"request {output.request_id} was aborted")
    return output
