"""Figures of what was planned and measured. Needs matplotlib: pip install "hybrid-jax[plots]".

Every function returns a `matplotlib.figure.Figure` of its own: nothing global is touched, so a
notebook shows it, and `figure.savefig(path)` writes it, wherever it is called.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hybrid_jax.cache.chips import GIB
from hybrid_jax.errors import HybridJaxError
from hybrid_jax.memory.plan import MemoryPlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hybrid_jax.measure.profile import PhaseProfile
    from hybrid_jax.measure.throughput import Throughput

COLORS = {"full": "tab:blue", "window": "tab:orange", "linear": "tab:green"}  # by kind of layer
FORMATS = ("png", "pdf", "svg")


def check_path(path: Path | None) -> None:
    """Raises an error unless a figure could be written there; for use before a long measurement.

    Raises:
        HybridJaxError: matplotlib is missing.
        ValueError: the file's name ends in no known format, or its directory does not exist.
    """
    if path is None:
        return
    _new_figure()
    if path.suffix.lstrip(".") not in FORMATS:
        raise ValueError(f"{str(path)!r} is no {', '.join(FORMATS)} file; name it figure.png")
    if not path.parent.is_dir():
        raise ValueError(f"there is no directory {str(path.parent)!r} for a plot; make it first")


def memory_plan(plan: MemoryPlan, contexts: Sequence[int] | None = None) -> "Figure":
    """Bytes of a device, stacked by class, if `max_num_seqs` sequences had each so many tokens.

    Args:
        plan: from `hybrid_jax.memory.plan.plan_memory`.
        contexts: tokens of each sequence, ascending; None: powers of two up to the model's longest.
    """
    if contexts is None:
        longest = max(plan.model.max_position, plan.config.max_model_len)
        contexts = [2**k for k in range(8, longest.bit_length()) if 2**k <= longest] or [longest]
    plans = [plan.at(context) for context in contexts]
    names = [line.name for line in plan.lines()]
    sizes = np.array([[line.nbytes for line in other.lines()] for other in plans]).T / GIB
    figure, axes = _new_figure()
    axes.stackplot(list(contexts), sizes, labels=names, colors=_class_colors(names))
    if sizes.sum(axis=0).max() > 0.5 * plan.available / GIB:
        axes.axhline(plan.available / GIB, color="black", linestyle="--", label="available")
    axes.set_xscale("log", base=2)
    _label(
        axes,
        "tokens of each sequence",
        "GiB",
        f"{plan.model.model_type} in {plan.dtype} on {plan.chip.name}, "
        f"{plan.config.max_num_seqs} sequences",
    )
    axes.legend(loc="upper left", fontsize="small")
    return figure


def throughput(results: Sequence["Throughput"]) -> "Figure":
    """Tokens per second, computed and generated, against the sequences that run at once."""
    ordered = sorted(results, key=lambda result: result.batch)
    batches = [result.batch for result in ordered]
    figure, axes = _new_figure()
    axes.plot(batches, [r.output_tokens_per_second for r in ordered], "o-", label="output")
    axes.plot(batches, [r.prompt_tokens_per_second for r in ordered], "s--", label="prompt")
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_ylim(bottom=0)
    _label(axes, "sequences at once", "tokens per second", "throughput")
    axes.legend()
    return figure


def layer_times(profile: "PhaseProfile") -> "Figure":
    """Time of every layer per step, and what is spent outside of the layers.

    Marks say what each would take if the time were shared out by work: by floating-point
    operations in prefill, by bytes in decode.
    """
    figure, axes = _new_figure()
    shares = profile.by("layer", "kind")
    layers = sorted((key for key in shares if key[0] is not None), key=lambda key: key[0])
    places = layers + [key for key in shares if key[0] is None]
    for kind in dict.fromkeys(kind for _, kind in layers):
        chosen = [i for i, place in enumerate(layers) if place[1] == kind]
        axes.bar(
            chosen,
            [1e3 * shares[places[i]].seconds for i in chosen],
            label=kind,
            color=COLORS[kind],
        )
    outside = range(len(layers), len(places))
    heights = [1e3 * shares[places[i]].seconds for i in outside]
    axes.bar(outside, heights, label="outside of the layers", color="tab:gray")
    work = "flops" if profile.phase == "prefill" else "nbytes"
    expected = [1e3 * getattr(shares[place], work) * profile.op_seconds for place in places]
    name = {"flops": "operations", "nbytes": "bytes"}[work]
    axes.plot(expected, "k_", markersize=10, label=f"if time went by {name}")
    names = [kind if layer is None else str(layer) for layer, kind in places]
    axes.set_xticks(range(len(places)), names, rotation=90, fontsize="small")
    title = f"{profile.phase} step, {profile.tokens} tokens"
    _label(axes, "layer", "ms per step, all operations", title)
    axes.legend(fontsize="small")
    return figure


def state_norms(norms: Mapping[int, Sequence[float]]) -> "Figure":
    """The size of recurrent states over decode steps, one line per linear layer.

    `norms`: Frobenius norms by layer, from `hybrid_jax.measure.record_state_norms`.
    """
    figure, axes = _new_figure()
    for layer, values in norms.items():
        axes.plot(range(1, len(values) + 1), list(values), label=f"layer {layer}")
    _label(axes, "decode step", "Frobenius norm", "recurrent states")
    axes.legend(fontsize="small", ncols=1 + len(norms) // 12)
    return figure


def _new_figure() -> "tuple[Figure, Axes]":
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise HybridJaxError('plots need matplotlib; pip install "hybrid-jax[plots]"') from None
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    return figure, figure.add_subplot()


def _label(axes: "Axes", x: str, y: str, title: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title)


def _class_colors(names: Sequence[str]) -> list[str]:
    """Cache classes by kind of layer, shaded if there are several; everything else grey."""
    greys = iter(("0.45", "0.7", "0.85"))
    return [COLORS.get(name.split()[0]) or next(greys) for name in names]
