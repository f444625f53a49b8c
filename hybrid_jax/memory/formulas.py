"""What a sequence takes by the formulas of engines with one kind of page for all layers.

Both enlarge the page of attention layers until it holds the state of a linear layer, and enlarge
the smaller of the two to match, so that one allocator serves all layers.

- *Largest layer*: every layer that remembers anything gets as many pages as a full-attention layer
  has, as if all layers were of the largest kind. An engine that knows only one kind does this.
- *Unified pages*: each kind of layer gets the pages it needs, but all pages have the size of the
  largest. Layers are dealt into sets of equal size, one table per set; sets are padded. A window
  reserves its tokens and a step's token budget. vLLM's hybrid cache manager does this.
"""

from collections.abc import Sequence

from hybrid_jax.cache.plan import Placement, layer_bytes, pages_for
from hybrid_jax.config import EngineConfig
from hybrid_jax.specs import CacheGroup, StateSpec, WindowSpec

_MANY = 1024


def unified_page(
    groups: Sequence[CacheGroup], page_size: int, placement: Placement
) -> tuple[int, int]:
    """Tokens and bytes of the page that all layers share; tokens are those of the largest layer."""
    states = [_unit(g, page_size, placement) for g in groups if isinstance(g.spec, StateSpec)]
    pages = [_unit(g, page_size, placement) for g in groups if not isinstance(g.spec, StateSpec)]
    if not pages:
        return page_size, max(states)
    blow_up = max(1, -(-max(states, default=0) // max(pages)))
    return page_size * blow_up, blow_up * max(pages)


def largest_layer_bytes(
    groups: Sequence[CacheGroup], config: EngineConfig, placement: Placement, context: int
) -> int:
    """Bytes of a sequence of `context` tokens by the largest-layer formula."""
    tokens, nbytes = unified_page(groups, config.page_size, placement)
    return sum(len(group.layers) for group in groups) * pages_for(context, tokens) * nbytes


def unified_bytes(
    groups: Sequence[CacheGroup], config: EngineConfig, placement: Placement, context: int
) -> int:
    """Bytes of a sequence of `context` tokens with unified pages."""
    page_size = config.page_size
    _, nbytes = unified_page(groups, page_size, placement)
    layers = min(len(group.layers) for group in groups)
    total = 0
    for group in groups:
        if isinstance(group.spec, StateSpec):
            pages = config.tokens_per_decode  # a state after each
        else:
            tokens = page_size * (nbytes // _unit(group, page_size, placement))
            pages = pages_for(context, tokens)
            if isinstance(group.spec, WindowSpec):
                reach = group.spec.window - 1 + config.max_num_batched_tokens
                pages = min(pages, pages_for(reach, tokens) + 1)
        total += -(-len(group.layers) // layers) * layers * pages * nbytes
    return total


def _unit(group: CacheGroup, page_size: int, placement: Placement) -> int:
    """Bytes of one page or slot of one layer; of many, so that alignment does not count."""
    return layer_bytes(group.spec, _MANY, page_size, placement) // _MANY
