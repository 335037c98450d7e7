"""gigpo_jax."""
