"""Mamba-1's selective scan (Gu and Dao 2023, arXiv:2312.00752)."""

from pallas_kernels.selective_scan.api import selective_scan
from pallas_kernels.selective_scan.reference import recurrent

__all__ = ["recurrent", "selective_scan"]
