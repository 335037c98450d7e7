"""Load and save Hugging Face directories: config.json and safetensors.

Needs no torch.
"""

from gigpo_jax.models.huggingface.config import read_config
from gigpo_jax.models.huggingface.export import save, save_adapters
from gigpo_jax.models.huggingface.hub import download, fingerprints, is_hub_name
from gigpo_jax.models.huggingface.weights import check, load

__all__ = [
  'check',
  'download',
  'fingerprints',
  'is_hub_name',
  'load',
  'read_config',
  'save',
  'save_adapters',
]
