"""The command line: what it prints, and one sentence with exit code 2 for every mistake."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from hybrid_jax import LLM, EngineConfig, SamplingParams
from hybrid_jax.generate import generate
from hybrid_jax.loading import load_model
from pallas_kernels import registry
from tests.helpers import tiny
from tests.helpers.text import byte_tokenizer
from tests.unit.conftest import Run, change_tensors, is_one_sentence

SHORT = ("--max-tokens", 6, "--max-model-len", 64)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint of all layer kinds with a tokenizer."""
    directory = tiny.write_checkpoint("lara_mini-untied", tmp_path_factory.mktemp("model"), seed=0)
    byte_tokenizer().hf.save_pretrained(directory)
    return directory


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A checkpoint for a test to break."""
    return tiny.write_checkpoint("lara_mini-untied", tmp_path / "broken", seed=0)


def change_json(path: Path, **changes: object) -> None:
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | changes))


def change_config(directory: Path, **changes: object) -> None:
    change_json(directory / "config.json", **changes)


def expected(model: Path, prompt: str) -> str:
    """What `generate` prints: the prompt and the oracle's text."""
    tokenizer = byte_tokenizer()
    tokens = generate(load_model(model), tokenizer.encode(prompt), max_tokens=6)
    return f"{prompt}{tokenizer.decode(tokens)}\n"


def test_generate_prints_the_oracles_text(run: Run, model: Path) -> None:
    """One prompt streams; several are one batch. Both are greedy by default."""
    one, two = expected(model, "to be"), expected(model, "or not")
    assert run("generate", "to be", "--model", model, *SHORT) == (0, one, "")
    assert run("generate", "to be", "or not", "--model", model, *SHORT) == (0, one + two, "")


def test_generate_guesses(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same text."""
    options: list[dict[str, object]] = []
    of = EngineConfig.of
    monkeypatch.setattr(EngineConfig, "of", lambda given: options.append(given) or of(given))
    guesses = ("--num-speculative-tokens", 2)
    text = expected(model, "to be")
    assert run("generate", "to be", "--model", model, *SHORT, *guesses) == (0, text, "")
    assert options[0]["num_speculative_tokens"] == 2


def test_inspect_prints_layers_parameters_and_bytes(run: Run, model: Path, tmp_path: Path) -> None:
    """From a directory, or from its config.json alone."""
    code, out, err = run("inspect", model, "--max-model-len", 64)
    assert (code, err) == (0, "")
    assert "layers: 1 window, 1 linear, 1 full" in out
    tensors = load_file(model / "model.safetensors")
    assert f"parameters: {sum(t.size for t in tensors.values()):,}" in out
    # K and V of two heads of 16 in bfloat16; a window of 8; 64 tokens of full attention.
    for words in ("128 B", "1.0 KiB", "8.0 KiB"):
        assert words in out
    alone = tmp_path / "config.json"
    alone.write_bytes((model / "config.json").read_bytes())
    assert run("inspect", alone, "--max-model-len", 64) == (0, out, "")


PLAN = ("--chip", "v5e", "--estimate")


def test_plan_needs_a_config_alone(run: Run, model: Path, tmp_path: Path) -> None:
    """The same from a directory and from its config.json; tables, or JSON with the same numbers."""
    config = tmp_path / "config.json"
    config.write_bytes((model / "config.json").read_bytes())
    options = (*PLAN, "--max-num-seqs", 3, "--max-model-len", 64, "--page-size", 8)
    code, out, err = run("plan", config, *options)
    assert (code, err) == (0, "")
    assert (0, out, "") == run("plan", model, *options)
    for words in (
        "lara_mini in float32 on v5e: max_num_seqs 3, max_model_len 64",
        "25 pages of 8",
        "10 slots",  # three running, six checkpoints and the null slot
        "estimated",
        "largest layer",
    ):
        assert words in out
    report = json.loads(run("plan", config, *options, "--json")[1])
    assert [line["unit"] for line in report["classes"]] == ["", "page", "slot", "page", "row", ""]
    assert report["total"] == sum(line["nbytes"] for line in report["classes"])
    assert [c["context"] for c in report["concurrency"]] == [64, 256, 1024]
    bfloat16 = json.loads(run("plan", config, *options, "--dtype", "bfloat16", "--json")[1])
    assert bfloat16["total"] < report["total"]


def test_kernels_says_what_would_run_where_and_why(run: Run, model: Path) -> None:
    options = ("--max-num-seqs", 2, "--max-num-batched-tokens", 32)
    tpu = json.loads(run("kernels", model / "config.json", "--chip", "v6e", *options, "--json")[1])
    assert {(x["phase"], x["choice"]["op"]) for x in tpu} == {
        (phase, op)
        for phase in ("decode", "mixed")
        for op in ("paged_attention", "gated_delta_net", "gated_delta_rule", "causal_conv1d")
    }
    assert {x["choice"]["device_kind"] for x in tpu} == {"TPU v6 lite"}
    layers = [x["layers"] for x in tpu if x["choice"]["op"] == "causal_conv1d"]
    code, out, err = run("inspect", model)
    assert f"{layers[0]} linear" in out and layers[0] == layers[1]
    chosen = {x["choice"]["op"]: x["choice"] for x in reversed(tpu)}  # the decode step's
    assert chosen["paged_attention"]["operands"]["table"].startswith("int32[2,")
    refused = chosen["gated_delta_rule"]["refused"]["mosaic_tpu"]
    assert "multiples of 128" in refused  # the model is too small for it

    gpu = json.loads(run("kernels", model, "--chip", "h100", *options, "--json")[1])
    choices = {(x["phase"], x["choice"]["op"]): x["choice"] for x in gpu}
    # Chunks of the gated delta rule take bfloat16 only.
    kernels = ("paged_attention", "gated_delta_rule", "causal_conv1d")
    prefill = dict.fromkeys(kernels, "triton_gpu") | {"gated_delta_rule": "triton_gpu_recurrent"}
    for op in kernels:
        assert choices["decode", op]["implementation"] == "triton_gpu"
        assert choices["mixed", op]["implementation"] == prefill[op]
    reason = choices["mixed", "gated_delta_rule"]["refused"]["triton_gpu"]
    assert "prefill" in reason and "bfloat16" in reason

    reason = choices["decode", "gated_delta_net"]["refused"]["mosaic_tpu"]
    assert reason == (
        "is for tpu, not for gpu, where causal_conv1d and gated_delta_rule choose for themselves"
    )
    # No terminal: a cell is on one line, however long it is.
    table = run("kernels", model, "--chip", "h100", *options)[1]
    assert f"mosaic_tpu: {reason} " in table and "..." not in table and "…" not in table

    fp8 = json.loads(
        run("kernels", model, "--chip", "h100", "--kv-dtype", "fp8", *options, "--json")[1]
    )
    (pages, *_) = [
        x["choice"]["operands"]["pages"] for x in fp8 if x["choice"]["op"] == "paged_attention"
    ]
    assert pages.startswith("float8_e4m3fn[")

    code, out, err = run("kernels", model, *options)  # the device at hand
    assert code == 0 and err == "" and "reference" in out and "mosaic_tpu" not in out
    code, out, err = run(
        "kernels",
        model,
        "--chip",
        "v6e",
        *options,
        "--implementation",
        "gated_delta_rule=mosaic_tpu",
    )
    assert code == 2 and err.count("\n") == 1 and "gated_delta_rule" in err and "128" in err
    code, out, err = run("kernels", model, "--chip", "v9")
    assert code == 2 and "chip 'v9' is not known" in err


def test_plan_compares_with_a_snapshot(run: Run, model: Path, tmp_path: Path) -> None:
    """The snapshot's flags apply, unless others are given."""
    with LLM(model, max_num_seqs=3, max_model_len=64, page_size=8) as llm:
        llm.generate([5, 6, 7], SamplingParams(max_tokens=3), use_tqdm=False)
        snapshot = tmp_path / "memory.json"
        snapshot.write_text(llm.memory().to_json())
    code, out, err = run("plan", model, "--chip", "cpu", "--estimate", "--compare", snapshot)
    assert (code, err) == (0, "")
    assert "max_num_seqs 3" in out and "planned for cpu, live on cpu" in out
    options = ("--chip", "cpu", "--estimate", "--compare", snapshot, "--json")
    lines = json.loads(run("plan", model, *options)[1])["comparison"]
    assert lines[-1] == {"name": "step temporaries", "planned": lines[-1]["planned"], "live": None}
    for line in lines[:-1]:
        assert line["planned"] == pytest.approx(line["live"], rel=0.01, abs=64 * 16)
    other = json.loads(run("plan", model, *options, "--max-num-seqs", 5)[1])
    assert other["max_num_seqs"] == 5
    snapshot.write_text("{}")
    code, out, err = run("plan", model, *options)
    assert code == 2 and out == "" and is_one_sentence(err) and "no memory snapshot" in err


PLAN_MISTAKES = {
    "chip": (["--chip", "v99"], ["'v99' is not known", "v5e"]),
    "kv dtype": (["--kv-dtype", "int4"], ["kv_dtype 'int4'", "bfloat16", "fp8"]),
    "state dtype": (["--state-dtype", "int8"], ["state_dtype 'int8'", "bfloat16"]),
    "page size": (["--page-size", "0"], ["page_size", "0"]),
    "devices": (["--tp", "0"], ["tensor_parallel_size", "0"]),
    "share": (["--memory-utilization", "1.5"], ["memory_utilization", "1.5"]),
    "sequences": (
        ["--max-num-seqs", "2000", "--memory-utilization", "0.002"],
        ["max_num_seqs 2,000", "at most max_num_seqs", "would fit"],
    ),
}


@pytest.mark.parametrize("name", PLAN_MISTAKES)
def test_a_plan_that_cannot_be_is_one_sentence(name: str, run: Run, model: Path) -> None:
    options, words = PLAN_MISTAKES[name]
    chip = () if "--chip" in options else PLAN
    code, out, err = run("plan", model, *chip, *options)
    assert code == 2 and out == "" and is_one_sentence(err), err
    assert all(word in err for word in words), err


def test_check_drift_ends_with_1_above_the_threshold(run: Run, model: Path) -> None:
    code, out, err = run("check", "drift", model, "--tokens", 100)
    assert (code, err) == (0, "")
    assert "1 - 64" in out and "65 - 100" in out and "the most likely token" in out
    assert "passes: " in out and "deviations, at most 0.05" in out
    code, out, err = run("check", "drift", model, "--tokens", 100, "--threshold", 0)
    assert (code, err) == (1, "") and "drifts: " in out
    code, out, err = run("check", "drift", model, "--tokens", 5000)
    assert code == 2 and out == "" and is_one_sentence(err) and "tokens 5000" in err


def test_convert_writes_a_checkpoint_that_generates_the_same(
    run: Run, model: Path, tmp_path: Path
) -> None:
    target = tmp_path / "converted"
    code, out, err = run("convert", model, target)
    assert (code, err) == (0, "") and str(target) in out
    loaded, again = load_model(model), load_model(target)
    assert loaded.params.keys() == again.params.keys()
    for path, array in loaded.params.items():
        assert again.params[path].dtype == array.dtype
        np.testing.assert_array_equal(again.params[path], array)
    assert run("generate", "to be", "--model", target, *SHORT) == (0, expected(model, "to be"), "")
    code, out, err = run("convert", model, target)
    assert code == 2 and is_one_sentence(err)  # never onto something that exists


def missing_path(directory: Path) -> None:
    (directory / "config.json").unlink()
    (directory / "model.safetensors").unlink()
    directory.rmdir()


def truncated(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def header_cut(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:50])


def deep_header(directory: Path) -> None:
    header = b"[" * 100_000
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def misfit(tensors: dict[str, np.ndarray]) -> None:
    del tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.k_proj.weight"] = np.zeros((3, 64), np.float32)
    tensors["model.layers.0.surprise.weight"] = np.zeros(1, np.float32)


BROKEN: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "no such path": (missing_path, ["broken' does not exist", "give a model directory"]),
    "no config": (
        lambda d: (d / "config.json").unlink(),
        ["not a model directory", "no config.json"],
    ),
    "config is no JSON": (
        lambda d: (d / "config.json").write_text('{"model_type": '),  # type: ignore[func-returns-value]
        ["config.json' is not readable as JSON"],
    ),
    "config is a list": (
        lambda d: (d / "config.json").write_text("[]"),  # type: ignore[func-returns-value]
        ["holds no JSON object"],
    ),
    "no weights": (
        lambda d: (d / "model.safetensors").unlink(),
        ["has no *.safetensors"],
    ),
    "truncated": (truncated, ["model.safetensors' is truncated", "download it again"]),
    "header cut": (header_cut, ["model.safetensors' is truncated"]),
    "unknown architecture": (
        lambda d: change_config(d, model_type="mystery"),
        ["'mystery' is not supported", "gemma3_text, lara_mini, olmo_hybrid, qwen3, qwen3_5"],
    ),
    "no architecture": (
        lambda d: change_config(d, model_type=None),
        ["None is not supported; supported: "],
    ),
    "contradictory layer map": (
        lambda d: change_config(
            d, layer_types=["linear_attention", "linear_attention", "full_attention"]
        ),
        ["layer 0 is linear attention by config.json but has self_attn", "correct layer_types"],
    ),
    "unknown layer type": (
        lambda d: change_config(d, layer_types=["mystery", "linear_attention", "full_attention"]),
        ["layer 0 is 'mystery'"],
    ),
    "layer list too short": (
        lambda d: change_config(d, layer_types=["linear_attention"]),
        ["lists 1 layers but num_hidden_layers is 3"],
    ),
    "missing field": (
        lambda d: change_config(d, hidden_size=None),
        ["'hidden_size'", "add it"],
    ),
    "field of the wrong type": (
        lambda d: change_config(d, num_attention_heads="abc"),
        ["num_attention_heads of config.json must be an integer, got 'abc'; correct it"],
    ),
    "negative size": (
        lambda d: change_config(d, intermediate_size=-1, vocab_size=-5),
        ["vocab_size of config.json must be at least 1, got -5"],
    ),
    "deep JSON": (
        lambda d: (d / "config.json").write_text("[" * 100_000),  # type: ignore[func-returns-value]
        ["config.json' is not readable as JSON", "copy it again"],
    ),
    "number too long": (
        lambda d: (d / "config.json").write_text('{"vocab_size": ' + "9" * 5000 + "}"),  # type: ignore[func-returns-value]
        ["config.json' is not readable as JSON"],
    ),
    "deep header": (
        deep_header,
        ["model.safetensors' is truncated or not a safetensors file", "download it"],
    ),
    "odd stop tokens": (
        lambda d: change_json(d / "generation_config.json", eos_token_id=["</s>"]),
        ["eos_token_id of generation_config.json must be an integer, got '</s>'; correct it"],
    ),
    "far too many stop tokens": (
        lambda d: change_json(d / "generation_config.json", eos_token_id=list(range(100))),
        ["eos_token_id of generation_config.json must have at most 32 items, got 100"],
    ),
    "tensors": (
        lambda d: change_tensors(d, misfit),
        [
            "missing model.norm.weight",
            "layers.0.self_attn.k_proj.weight gives shape (3, 64), not (32, 64)",
            "unknown model.layers.0.surprise.weight",
        ],
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_model_is_one_sentence(name: str, run: Run, broken: Path) -> None:
    change, words = BROKEN[name]
    change(broken)
    code, out, err = run("generate", "x", "--model", broken)
    assert code == 2 and out == ""
    assert is_one_sentence(err), err
    for word in words:
        assert word in err


@pytest.mark.parametrize("name", ["no such path", "no config", "unknown architecture"])
@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_other_commands_refuse_it_in_the_same_words(
    command: str, name: str, run: Run, broken: Path, tmp_path: Path
) -> None:
    change, words = BROKEN[name]
    change(broken)
    target = tmp_path / "target"
    code, out, err = run(command, broken, *([target] if command == "convert" else []))
    assert code == 2 and out == "" and is_one_sentence(err), err
    assert all(word in err for word in words)
    assert not target.exists()


def test_inspect_refuses_a_layer_map_that_contradicts_the_tensors(run: Run, broken: Path) -> None:
    BROKEN["contradictory layer map"][0](broken)
    code, _, err = run("inspect", broken)
    assert code == 2 and is_one_sentence(err) and "layer 0 is linear attention" in err


def test_inspect_refuses_an_unknown_dtype(run: Run, model: Path) -> None:
    code, _, err = run("inspect", model, "--dtype", "int3")
    assert code == 2 and is_one_sentence(err) and "'int3' is not supported; choose float32" in err


OPTIONS: dict[str, tuple[list[str], list[str]]] = {
    "negative temperature": (["--temperature", "-0.5"], ["temperature", "-0.5", "use 0"]),
    "temperature is NaN": (["--temperature", "nan"], ["temperature", "nan", "use 0"]),
    "max tokens 0": (["--max-tokens", "0"], ["max_tokens", "0", "use 1"]),
    "top p 0": (["--top-p", "0"], ["top_p", "got 0", "use 1"]),
    "dtype": (["--dtype", "int3"], ["'int3' is not supported; choose auto, float32"]),
    "too many devices": (["--tensor-parallel-size", "99"], ["99", "XLA_FLAGS"]),
    "no device": (["--tensor-parallel-size", "0"], ["tensor_parallel_size", "at least 1"]),
    "model length": (["--max-model-len", "-3"], ["max_model_len", "-3"]),
    "more than the model": (["--max-model-len", "99999"], ["99999", "use at most 1024"]),
    "no number": (["--max-tokens", "abc"], ["--max-tokens", "integer", "; see hybrid-jax --help"]),
    "no such option": (["--frob"], ["No such option", "--frob", "; see hybrid-jax --help"]),
    "huge number": (["--max-tokens", "9" * 30], ["max_tokens must be at most", "lower it"]),
    "no pair": (["--implementation", "frob"], ["must be op=name, got 'frob'"]),
    "no such op": (["--implementation", "frob=x"], ["unknown op 'frob'; known: "]),
    "wrong chip": (["--implementation", "paged_attention=mosaic_tpu"], ["is for tpu"]),
    "prompt too long": (["--max-model-len", "4"], ["5 tokens but max_model_len is 4", "shorten"]),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_bad_option_is_one_sentence(name: str, run: Run, model: Path) -> None:
    options, words = OPTIONS[name]
    code, out, err = run("generate", "to be", "--model", model, *options)
    assert code == 2, err
    assert is_one_sentence(err), err
    assert all(word in err for word in words), err
    assert out == ""


KV_COMMANDS = {
    "generate": ["generate", "to be", "--model"],
    "kernels": ["kernels"],
    "plan": ["plan"],
    "latency": ["bench", "latency"],
    "throughput": ["bench", "throughput"],
    "profile": ["profile"],
}


@pytest.mark.parametrize("name", KV_COMMANDS)
def test_the_dtype_of_keys_and_values_is_an_option(name: str, run: Run, model: Path) -> None:
    """Where weights are read, so are the ranges that int8 needs."""
    command = [*KV_COMMANDS[name], model]
    code, out, err = run(*command, "--kv-dtype", "int4")
    assert code == 2 and out == "" and is_one_sentence(err)
    assert "kv_dtype 'int4' is not supported; choose auto, float32" in err
    if name in ("kernels", "plan"):
        return
    for options, words in (
        (["--kv-dtype", "int8"], "kv_dtype int8 needs the ranges of K and V"),
        (["--kv-dtype", "int8", "--kv-ranges", "none"], "kv_ranges 'none' is no file"),
        (["--kv-ranges", "none"], "are for kv_dtype fp8 or int8, not for auto"),
    ):
        code, out, err = run(*command, *options)
        assert code == 2 and out == "" and is_one_sentence(err) and words in err, err


def test_an_empty_prompt_and_text_without_a_tokenizer_are_refused(
    run: Run, model: Path, broken: Path
) -> None:
    code, _, err = run("generate", "", "--model", model)
    assert code == 2 and is_one_sentence(err) and "prompt is empty" in err
    code, _, err = run("generate", "to be", "--model", broken)
    assert code == 2 and is_one_sentence(err) and "needs a tokenizer" in err


def test_help_and_unknown_commands(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0 and all(name in out for name in ("generate", "inspect", "convert"))
    code, out, _ = run()
    assert code == 2 and "Usage" in out
    for arguments in (["frobnicate"], ["inspect"], ["convert", "x"], ["inspect", "x", "y"]):
        code, out, err = run(*arguments)
        assert code == 2 and is_one_sentence(err) and out == ""


def test_an_implementation_can_be_named(run: Run, model: Path) -> None:
    named = ("--implementation", "paged_attention=reference")
    named += ("--implementation", "gated_delta_rule=reference")
    out = expected(model, "to be")
    assert run("generate", "to be", "--model", model, *named, *SHORT) == (0, out, "")
    chosen = {s.op for s in registry.report() if s.forced and s.implementation == "reference"}
    assert {"paged_attention", "gated_delta_rule"} <= chosen


def test_the_process_ends_with_code_2_and_no_traceback(tmp_path: Path) -> None:
    """The console script itself, once."""
    code = "from serving.cli import main; main()"
    command = [sys.executable, "-c", code, "inspect", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert is_one_sentence(done.stderr) and "is not a model directory" in done.stderr


@pytest.mark.parametrize("command", [("serve", "m", "--http-port", "1"), ("bench", "serve")])
def test_the_server_without_its_extra_says_what_to_install(command: tuple[str, ...]) -> None:
    code = "import sys\nfor name in ('fastapi', 'httpx', 'pydantic_settings'):\n"
    code += "    sys.modules[name] = None\n"
    code += "from serving.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True)
    assert done.returncode == 2
    assert is_one_sentence(done.stderr) and 'pip install "hybrid-jax[serve]"' in done.stderr
    listed = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True)
    assert 'Needs pip install "hybrid-jax[serve]"' in listed.stdout
