"""Copies and clears rows of a pool, in place: slots of states, pages of keys and values."""

from pallas_kernels.rows.api import clear_rows, copy_rows

__all__ = ["clear_rows", "copy_rows"]
