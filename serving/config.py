"""The settings of a server, in one place: flags, then HYBRID_JAX_* variables, then a YAML file."""

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_type_hints

from pydantic import Field, ValidationError, create_model, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)
from yaml import YAMLError

from hybrid_jax.config import EngineConfig
from serving.kv_options import KV_DTYPE_HELP, KV_RANGES_HELP

ENV_PREFIX = "HYBRID_JAX_"
_NOT_SETTINGS = "HYBRID_JAX_TEST_"  # variables of the test suite

_ENGINE_HELP = {
    "max_num_seqs": "Most sequences that run at once; 0: 16, or as many as fit.",
    "max_model_len": "Most tokens of a sequence, prompt and output; 0: the model's, at most 8,192.",
    "max_num_batched_tokens": "Token budget of a step.",
    "page_size": "Tokens per page.",
    "num_pages": "Pages per full-attention group; 0: enough for max_num_seqs.",
    "cache_bytes": "Upper bound for all caches; 0: from memory_utilization.",
    "memory_utilization": "Share of the device's memory to use.",
    "kv_dtype": KV_DTYPE_HELP,
    "kv_ranges": KV_RANGES_HELP,
    "state_dtype": "Of stored recurrent states: float32 or bfloat16.",
    "row_buckets": "Numbers of rows to compile for.",
    "token_buckets": "Numbers of tokens to compile for.",
    "enforce_eager": "Run the step unjitted, to debug.",
    "run_ahead": "Launch a step before reading the tokens of the one before.",
    "compilation_cache": "Keep compiled steps across starts.",
    "tensor_parallel_size": "Devices to cut the model over.",
    "max_logprobs": "Most log probabilities per token that a client may ask for.",
    "max_logit_bias": "Most logit_bias entries that a client may send.",
    "prefix_cache": "Keep what is computed, for prompts that begin with the same tokens.",
    "checkpoint_interval": "Tokens between the states kept of a prompt; 0: chosen.",
    "num_checkpoints": "State rows kept for reuse; 0: twice max_num_seqs.",
    "swap_bytes": "Host memory for preempted sequences; 0: they are computed again.",
    "num_speculative_tokens": "Tokens guessed per step by prompt lookup and verified; 0: none.",
    "prefill_alignment": "Prefill chunks end at multiples of so many tokens; 0: chosen.",
    "debug_poison": "Fill freed memory with NaN and check every id after every step; slow.",
    "implementations": "op=name: what must run an op, such as paged_attention=reference.",
    "seed": "From which requests without a seed get theirs.",
}


def _engine_fields() -> dict[str, Any]:
    """Every field of EngineConfig, with its default, as a setting."""
    hints, defaults = get_type_hints(EngineConfig), EngineConfig()
    return {
        name: (hints[name], setting("Engine", _ENGINE_HELP.get(name, ""), getattr(defaults, name)))
        for name in (f.name for f in fields(EngineConfig))
    }


def setting(group: str, help_text: str, default: Any) -> Any:
    """A field with its help and the group of flags that `--help` shows it in."""
    return Field(default, description=help_text, json_schema_extra={"group": group})


_EngineSettings = create_model("_EngineSettings", __base__=BaseSettings, **_engine_fields())


class ServerConfig(_EngineSettings):
    """What `hybrid-jax serve` needs to know. Unknown keys are errors, wherever they stand."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True)

    model: Path | None = setting(
        "Model", "Directory or .gguf file. Default: the bundled one.", None
    )
    served_model_name: str = setting("Model", "What clients call it; empty: the path's name.", "")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "Model", "Of weights and activations.", "auto"
    )

    max_queue: int = setting("Engine", "Waiting sequences; more are refused with 429.", 256)
    warmup: bool = setting("Engine", "Compile every bucket before the first request.", True)

    host: str = setting("Network", "Address to listen on.", "127.0.0.1")
    http_port: int = setting("Network", "0: any free port.", 8000)
    grpc_port: int | None = setting("Network", "0: any free port. Without it: no gRPC.", None)
    tls_cert_file: Path | None = setting("Network", "PEM certificate chain; turns TLS on.", None)
    tls_key_file: Path | None = setting("Network", "PEM private key of the certificate.", None)
    api_key_file: Path | None = setting("Network", "Accepted API keys, one a line.", None)

    max_body_bytes: int = setting("Limits", "Of one request.", 4 * 2**20)
    max_n: int = setting("Limits", "Completions per prompt.", 16)
    max_prompts: int = setting("Limits", "Prompts per request.", 64)
    max_stop: int = setting("Limits", "Stop strings per request.", 16)

    max_sessions: int = setting("Limits", "Sessions open at once; each pins its memory.", 16)
    session_idle_seconds: float = setting("Limits", "Until an unused session is closed.", 600.0)
    max_snapshot_bytes: int = setting("Limits", "Of one snapshot that a client sends.", 2**30)
    snapshot_dir: Path | None = setting(
        "Limits", "Where clients may have the server keep snapshots. Without it: nowhere.", None
    )

    drain_seconds: float = setting("Operations", "From SIGTERM until requests are aborted.", 30.0)
    stall_seconds: float = setting("Operations", "Longest healthy step.", 60.0)
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "Operations", "Least severe records to log.", "info"
    )

    otlp_endpoint: str = setting("Operations", "Where to send traces; empty: nowhere.", "")

    replicas: int = setting("Replicas", "Copies of the model behind one port, run by Ray.", 1)
    replica_resources: Mapping[str, float] = setting(
        "Replicas", "name=amount: what Ray reserves for each, such as GPU=1; default: CPU=1.", {}
    )

    @model_validator(mode="after")
    def _consistent(self) -> "ServerConfig":
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file go together; give both or neither")
        at_least_one = ("max_body_bytes", "max_n", "max_prompts", "max_stop", "max_snapshot_bytes")
        for name in (*at_least_one, "replicas"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("http_port", "grpc_port"):
            if not 0 <= (getattr(self, name) or 0) <= 65_535:
                raise ValueError(f"{name} must be from 0 to 65535, got {getattr(self, name)}")
        if self.max_sessions < 0 or self.session_idle_seconds <= 0:
            raise ValueError(
                "max_sessions must not be negative, session_idle_seconds must be positive"
            )
        if self.snapshot_dir is not None and not self.snapshot_dir.is_dir():
            raise ValueError(f"snapshot_dir {self.snapshot_dir} is no directory; make it first")
        if self.drain_seconds < 0 or self.stall_seconds <= 0:
            raise ValueError("drain_seconds must not be negative, stall_seconds must be positive")
        if self.replicas > 1 and self.grpc_port is not None:
            raise ValueError("replicas are reached over HTTP only; leave grpc_port out")
        self.engine_options()
        return self

    def engine_options(self) -> dict[str, Any]:
        """Keyword arguments of EngineConfig. Raises ValueError if they make none."""
        options = {f.name: getattr(self, f.name) for f in fields(EngineConfig)}
        EngineConfig(**options)
        return options

    def api_keys(self) -> tuple[str, ...]:
        """The accepted API keys; empty: everybody may come in.

        Raises:
            ValueError: the file has no key. OSError: it cannot be read.
        """
        if self.api_key_file is None:
            return ()
        lines = self.api_key_file.read_text().splitlines()
        keys = tuple(line.strip() for line in lines if line.strip())
        if not keys:
            raise ValueError(f"{self.api_key_file} has no API key; write one a line")
        return keys


def load_config(flags: Mapping[str, Any], file: Path | None = None) -> ServerConfig:
    """The settings from `flags`, the environment and `file`, the first of these that has a value.

    Raises:
        ValueError: one sentence that names the first unknown or impossible value.
    """
    if file is not None and not file.is_file():
        raise ValueError(f"there is no settings file {file}; check --config")

    class _Sources(ServerConfig):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            yaml = YamlConfigSettingsSource(settings_cls, yaml_file=file)
            return init_settings, env_settings, yaml

    _check_environment()
    try:
        return _Sources(**flags)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        reason = first["msg"].removeprefix("Value error, ")
        shown = f"{name}: {reason}, got {first['input']!r}" if name else reason
        raise ValueError(f"{shown}; see hybrid-jax serve --help") from None
    except (YAMLError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{file or 'the environment'} holds no settings: {reason}") from None


def _check_environment() -> None:
    known = {ENV_PREFIX + name.upper() for name in ServerConfig.model_fields}
    for name in map(str.upper, os.environ):
        if name.startswith(ENV_PREFIX) and not name.startswith(_NOT_SETTINGS) and name not in known:
            raise ValueError(f"the environment variable {name} is no setting; unset it")
