"""Inference for hybrid-attention language models in JAX."""

from hybrid_jax.cache.chips import find_chip as find_chip
from hybrid_jax.cache.snapshot import Snapshot as Snapshot
from hybrid_jax.calibration import calibrate_kv as calibrate_kv
from hybrid_jax.config import EngineConfig as EngineConfig
from hybrid_jax.config import ModelConfig as ModelConfig
from hybrid_jax.generate import generate as generate
from hybrid_jax.inspection import kernel_report as kernel_report
from hybrid_jax.inspection import plan_kernels as plan_kernels
from hybrid_jax.llm import LLM as LLM
from hybrid_jax.loading import LoadedModel as LoadedModel
from hybrid_jax.loading import load_config as load_config
from hybrid_jax.loading import load_model as load_model
from hybrid_jax.memory.plan import plan_memory as plan_memory
from hybrid_jax.runtime.step import init_carry as init_carry
from hybrid_jax.sampling_params import SamplingParams as SamplingParams
from hybrid_jax.session import Session as Session
from hybrid_jax.structured import StructuredOutput as StructuredOutput

__version__ = "0.1.0"
