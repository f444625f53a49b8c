"""`--kv-dtype` and `--kv-ranges`: how keys and values are kept, the same for all commands."""

from pathlib import Path
from typing import Annotated, Any

import typer

KV_DTYPE_HELP = "Of keys and values: float32, bfloat16, fp8 or int8; auto: the activations'."
KV_RANGES_HELP = "File of hybrid_jax.calibrate_kv, for fp8 and int8; none: the checkpoint's."

KvDtypeOption = Annotated[str | None, typer.Option(help=KV_DTYPE_HELP)]
KvRangesOption = Annotated[Path | None, typer.Option(help=KV_RANGES_HELP)]


def kv_options(kv_dtype: str | None, kv_ranges: Path | None = None) -> dict[str, Any]:
    """Those that were given, for `EngineConfig`."""
    given = {"kv_dtype": kv_dtype, "kv_ranges": kv_ranges}
    return {name: value for name, value in given.items() if value is not None}
