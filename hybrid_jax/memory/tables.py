"""The memory plan and its comparisons as tables for people."""

from rich.table import Table

from hybrid_jax.cache.chips import format_bytes
from hybrid_jax.memory.plan import MemoryPlan
from hybrid_jax.memory.snapshot import MemorySnapshot, compare


def plan_line(plan: MemoryPlan) -> str:
    """The plan in one line, for a log."""
    classes = ", ".join(
        f"{line.name} {format_bytes(line.nbytes)}"
        + (f" ({line.count:,} {line.unit}s)" if line.unit else "")
        for line in plan.lines()
    )
    return (
        f"memory of {plan.model.model_type} in {plan.dtype} on {plan.chip.name}: {classes}; total "
        f"{format_bytes(plan.total)} of {format_bytes(plan.available)}; max_num_seqs "
        f"{plan.config.max_num_seqs}, max_model_len {plan.config.max_model_len}"
    )


def plan_table(plan: MemoryPlan) -> Table:
    """One line per class, and the total against what there is to fill."""
    config, devices = plan.config, plan.config.tensor_parallel_size
    table = Table(
        title=f"{plan.model.model_type} in {plan.dtype} on {plan.chip.name}"
        f"{f', each of {devices}' if devices > 1 else ''}: max_num_seqs {config.max_num_seqs:,}, "
        f"max_model_len {config.max_model_len:,}",
        caption=f"step temporaries: {plan.temporaries.source}",
    )
    table.add_column("class", no_wrap=True)
    for name in ("layers", "units", "bytes", "of it padding", "expected tails"):
        table.add_column(name, justify="right")
    for line in plan.lines():
        units = {"page": f"pages of {config.page_size}"}.get(line.unit, f"{line.unit}s")
        table.add_row(
            line.name,
            str(line.layers or ""),
            f"{line.count:,} {units}" if line.unit else "",
            format_bytes(line.nbytes),
            format_bytes(line.padding) if line.padding else "",
            format_bytes(line.tails) if line.tails else "",
        )
    table.add_section()
    table.add_row("total", "", "", format_bytes(plan.total))
    table.add_row("available", "", "", format_bytes(plan.available))
    return table


def concurrency_table(plan: MemoryPlan) -> Table:
    """Sequences that the same bytes hold, layer by layer and by the formulas of other engines."""
    table = Table(
        title=f"sequences that {format_bytes(plan.cache_budget)} of caches hold",
        caption="without checkpoints; bytes of one sequence in brackets; counted up to "
        f"{plan.most_sequences:,}; formulas: hybrid_jax/memory/formulas.py",
    )
    table.add_column("tokens each", justify="right")
    for name in ("layer by layer", "unified pages", "largest layer", "gain"):
        table.add_column(name, justify="right")
    for line in plan.concurrency():
        counts = (line.layer_by_layer, line.unified_pages, line.largest_layer)
        sizes = (line.bytes_by_layer, line.bytes_unified, line.bytes_largest)
        cells = (
            f"{'>= ' if count == plan.most_sequences else ''}{count:,} ({format_bytes(nbytes)})"
            for count, nbytes in zip(counts, sizes, strict=True)
        )
        ours = line.layer_by_layer
        gains = (
            f"{ours / other:.2f}x" if other and ours < plan.most_sequences else "-"
            for other in counts[1:]
        )
        table.add_row(f"{line.context:,}", *cells, " / ".join(gains))
    return table


def comparison_table(plan: MemoryPlan, snapshot: MemorySnapshot) -> Table:
    """Planned and live bytes by class."""
    table = Table(title=f"planned for {plan.chip.name}, live on {snapshot.chip}")
    table.add_column("class", no_wrap=True)
    for name in ("planned", "live", "difference"):
        table.add_column(name, justify="right")
    for line in compare(plan, snapshot):
        both = line.planned is not None and line.live is not None
        table.add_row(
            line.name,
            "-" if line.planned is None else format_bytes(line.planned),
            "-" if line.live is None else format_bytes(line.live),
            f"{(line.live or 0) / max(line.planned or 0, 1) - 1:+.2%}" if both else "",
        )
    return table


def pools_table(snapshot: MemorySnapshot) -> Table:
    """Use of every pool of a snapshot."""
    table = Table(title="pools")
    table.add_column("class", no_wrap=True)
    for name in ("total", "used", "cached", "free", "peak", "peak bytes", "fragmentation"):
        table.add_column(name, justify="right")
    for pool in snapshot.pools:
        counts = (pool.total, pool.used, pool.cached, pool.free, pool.peak)
        table.add_row(
            f"{pool.name} ({pool.unit}s)",
            *(f"{count:,}" for count in counts),
            format_bytes(pool.peak * pool.unit_bytes),
            f"{pool.fragmentation:.1%}",
        )
    return table
