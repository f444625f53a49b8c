"""The recurrences against the torch paths of transformers' own mixers: needs torch."""

from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gated_delta_rule, gla, mamba2, selective_scan, ssd
from pallas_kernels.causal_conv1d import state_shape
from pallas_kernels.gated_delta_rule.cases import Case as DeltaCase
from pallas_kernels.mamba2.cases import Case as Mamba2Case
from pallas_kernels.selective_scan.cases import Case as ScanCase
from pallas_kernels.ssd.cases import Case as SsdCase
from tests.helpers.ragged import Rows
from tests.kernels import test_gated_delta_rule as delta_tests
from tests.kernels import test_mamba2 as mamba2_tests
from tests.kernels import test_selective_scan as scan_tests
from tests.kernels import test_ssd as ssd_tests

torch = pytest.importorskip("torch", reason="compares with transformers, which needs torch")

# Deprecations inside transformers and torch are not ours to fix.
pytestmark = pytest.mark.filterwarnings("ignore")
TOKENS = 150
ATOL = 1e-4  # both sides are float32, over 150 tokens and states of a few units


def batched(arrays: dict[str, np.ndarray]) -> dict:
    """[T, ...] as torch float32[1, T, ...]."""
    return {name: torch.tensor(x, dtype=torch.float32)[None] for name, x in arrays.items()}


def parameters(arrays: dict[str, np.ndarray]) -> dict:
    return {name: torch.tensor(x, dtype=torch.float32) for name, x in arrays.items()}


def same(ours, theirs) -> None:
    """Out and final state, theirs in a batch of one."""
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other[0].numpy(), rtol=0, atol=ATOL)


@pytest.mark.parametrize("model", ["mamba2", "bamba", "nemotron_h"])
@pytest.mark.parametrize("dt_limit", [(0.0, float("inf")), (0.1, 0.5)])
def test_ssd(model: str, dt_limit: tuple[float, float]) -> None:
    case = SsdCase("hf", 4, 8, 2, 16, dt_limit=dt_limit)
    tokens, layer = ssd_tests.draw(case, TOKENS), ssd_tests.parameters(case)
    module = import_module(f"transformers.models.{model}.modeling_{model}")
    scan = next(x for name, x in vars(module).items() if name.endswith("chunk_scan"))
    given, weights = batched(tokens.arrays), parameters(layer)
    y, state = scan(
        given["x"], given["dt"], weights["A"], given["B"], given["C"], chunk_size=32,
        D=weights["D"], dt_bias=weights["dt_bias"], dt_softplus=True, dt_limit=dt_limit,
        return_final_states=True,
    )  # fmt: skip
    for form in (ssd.recurrent, ssd.chunked):
        ours = form(**tokens.on_device(), **ssd_tests.on_device(case), dt_limit=dt_limit)
        channels = state.flatten(1, 2).transpose(1, 2)  # [1, H, P, N] -> [1, N, H P]
        same(ours, (y, channels))


@pytest.mark.slow
def test_mamba2_mixer() -> None:
    """A whole mixer but for its projections and its norm; ours takes the last tokens one by one."""
    from transformers.models.nemotron_h import modeling_nemotron_h as theirs

    case, last = Mamba2Case("hf", 4, 8, 2, 16), 3
    inner, weights = case.heads * case.head_dim, mamba2_tests.parameters(case)
    config = theirs.NemotronHConfig(
        hidden_size=64, mamba_num_heads=case.heads, mamba_head_dim=case.head_dim,
        n_groups=case.groups, ssm_state_size=case.state_size, conv_kernel=case.width,
        use_conv_bias=True, chunk_size=32, layer_types=["linear_attention"], num_hidden_layers=1,
        time_step_min=0.0,
    )  # fmt: skip
    mixer = theirs.NemotronHMamba2Mixer(config, 0).eval()
    mixer.in_proj = mixer.out_proj = torch.nn.Identity()
    mixer.norm = Ungated()
    loaded = {name: weights[name] for name in ("A_log", "D", "dt_bias")}
    loaded |= {"conv1d.weight": weights["weight"][:, None], "conv1d.bias": weights["bias"]}
    mixer.load_state_dict(parameters(loaded))
    tokens = mamba2_tests.draw(case, TOKENS)
    z = np.zeros((TOKENS, inner))
    with torch.no_grad():
        y = mixer(batched({"x": np.concatenate([z, *tokens.arrays.values()], axis=1)})["x"])

    states = mamba2.States(
        jnp.zeros(state_shape(2, case.width - 1, case.channels)),
        jnp.zeros((2, case.state_size, inner)),
    )
    run, slot = jax.jit(mamba2.mamba2), jnp.ones(1, jnp.int32)
    begun = TOKENS - last
    steps = [(0, Rows(prefill=((0, begun),)))]
    steps += [(n, Rows(decode=(n,))) for n in range(begun, TOKENS)]
    for start, rows in steps:
        part = {n: x[start : start + rows.num_tokens] for n, x in tokens.on_device().items()}
        out, states = run(
            **part, state=states, ragged=rows.ragged(), read_slots=slot, write_slots=slot,
            weights=mamba2_tests.weights_of(case),
        )  # fmt: skip
        other = y[0, start : start + rows.num_tokens].numpy()
        np.testing.assert_allclose(out, other, rtol=0, atol=ATOL)


class Ungated(torch.nn.Module):
    """In the place of a gated norm."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        del gate
        return x


def test_selective_scan() -> None:
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan

    case = ScanCase("hf", 12, 8)
    tokens, layer = scan_tests.draw(case, TOKENS), scan_tests.parameters(case)
    given, weights = batched(tokens.arrays), parameters(layer)
    given = {name: x.transpose(1, 2) for name, x in given.items()}
    y, state = mamba_selective_scan(
        given["x"], given["dt"], weights["A"].T, given["B"], given["C"], D=weights["D"],
        delta_bias=weights["dt_bias"], delta_softplus=True, return_last_state=True,
    )  # fmt: skip
    ours = selective_scan.recurrent(**tokens.on_device(), **scan_tests.on_device(case))
    same(ours, (y.transpose(1, 2), state.transpose(1, 2)))


def test_kimi_delta_attention() -> None:
    from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention

    tokens = delta_tests.draw(DeltaCase("hf", 3, 3, 16, 8, per_channel=True), TOKENS)
    q, k, v, g, beta = batched(tokens.arrays).values()
    theirs = recurrent_kimi_delta_attention(
        q, k, v, g, beta, None, True, use_qk_l2norm_in_kernel=True
    )
    for form in (gated_delta_rule.recurrent, gated_delta_rule.chunked):
        same(form(**tokens.on_device()), theirs)


def test_lightning_attention() -> None:
    """A MiniMax layer whose output is its attention's: no norm, gate or projection."""
    from transformers.models.minimax.modeling_minimax import (
        MiniMaxConfig,
        MiniMaxLightningAttention,
    )

    heads, dim = 4, 8
    config = MiniMaxConfig(
        hidden_size=heads * dim, num_attention_heads=heads, num_key_value_heads=heads,
        num_hidden_layers=2, head_dim=dim, block_size=32,
    )  # fmt: skip
    layer = MiniMaxLightningAttention(config, 0)
    layer.norm = layer.out_proj = torch.nn.Identity()
    layer.output_gate = torch.nn.Linear(heads * dim, heads * dim)
    torch.nn.init.zeros_(layer.output_gate.weight)
    torch.nn.init.constant_(layer.output_gate.bias, 100.0)  # its sigmoid is 1
    x = torch.tensor(np.random.default_rng(0).normal(size=(1, TOKENS, heads * dim))).float()
    with torch.no_grad():
        theirs = layer(x, None, None)
        qkv = layer.act_fn(layer.qkv_proj(x))[0].reshape(TOKENS, heads, 3 * dim).numpy()
    q, k, v = np.split(qkv, 3, axis=2)
    g = np.broadcast_to(-layer.slope_rate.numpy()[None, :, 0, 0], (TOKENS, heads))
    for form in (gla.recurrent, gla.chunked):
        out, state = form(q, k, v, g, scale=1.0)
        same((out.reshape(TOKENS, -1), state), theirs)
