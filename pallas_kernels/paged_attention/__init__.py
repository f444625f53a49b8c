"""Attention over K/V pages: write this step's tokens, then attend to the whole context."""

from pallas_kernels.paged_attention.api import paged_attention, pages_shape

__all__ = ["paged_attention", "pages_shape"]
