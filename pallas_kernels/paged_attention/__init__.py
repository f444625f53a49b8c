"""Attention over K/V pages: write this step's tokens, then attend to the whole context."""

from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.paged_attention.pages import pack, pages_shape, unpack

__all__ = ["pack", "paged_attention", "pages_shape", "unpack"]
