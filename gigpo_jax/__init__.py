"""gigpo_jax: GiGPO for LLM agents in JAX."""

import os

# transformers advises at import to install PyTorch; none is needed.
os.environ.setdefault('TRANSFORMERS_NO_ADVISORY_WARNINGS', '1')
