"""Eight virtual CPU devices, and compiled programs kept between runs."""

import os
import pathlib
import tempfile

os.environ['JAX_PLATFORMS'] = 'cpu'
# Reference data beside the project; tests that use it skip without.
os.environ.setdefault(
  'GIGPO_JAX_SHARED', str(pathlib.Path(__file__).parents[2] / 'shared')
)

import jax
import pytest

jax.config.update('jax_num_cpu_devices', 8)
jax.config.update(
  'jax_compilation_cache_dir',
  os.path.join(tempfile.gettempdir(), 'gigpo_jax_test_cache'),
)
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)


@pytest.fixture(autouse=True, scope='session')
def _shops_of_their_own(tmp_path_factory):
  """Keeps the catalogues that tests make out of the user's cache."""
  os.environ['GIGPO_JAX_CACHE'] = str(tmp_path_factory.mktemp('cache'))


@pytest.fixture(autouse=True)
def _no_official_data(monkeypatch):
  """Unsets what names the user's data; the package alfworld sets it, too."""
  for variable in ('ALFWORLD_DATA', 'SEARCH_QA_DATA', 'WEBSHOP_DATA'):
    monkeypatch.delenv(variable, raising=False)
