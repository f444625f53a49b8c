"""Scripts that train the checkpoint bundled in `hybrid_jax/bundled/`; not part of the wheel."""
