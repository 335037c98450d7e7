"""Eight virtual CPU devices, and compiled programs kept between runs."""

import os
import tempfile

os.environ['JAX_PLATFORMS'] = 'cpu'
# One cache of compiled programs for all tests, their processes and the next
# run; small programs, too, for tests compile many.
os.environ.setdefault(
  'JAX_COMPILATION_CACHE_DIR',
  os.path.join(tempfile.gettempdir(), 'gigpo_jax_test_cache'),
)
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')

import jax
import pytest

jax.config.update('jax_num_cpu_devices', 8)


# For less to compile; the programs are as right, and slower.
QUICK = '--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false'


def pytest_configure(config: pytest.Config) -> None:
  """Compiles quickly where no test runs for long, child processes as well."""
  flags = os.environ.get('XLA_FLAGS', '')
  if config.option.markexpr == 'not slow' and QUICK not in flags:
    os.environ['XLA_FLAGS'] = f'{QUICK} {flags}'


@pytest.fixture(autouse=True, scope='session')
def _shops_of_their_own(tmp_path_factory):
  """Keeps the catalogues that tests make out of the user's cache."""
  os.environ['GIGPO_JAX_CACHE'] = str(tmp_path_factory.mktemp('cache'))


@pytest.fixture(autouse=True)
def _no_official_data(monkeypatch):
  """Unsets what names the user's data; the package alfworld sets it, too."""
  for variable in ('ALFWORLD_DATA', 'SEARCH_QA_DATA', 'WEBSHOP_DATA'):
    monkeypatch.delenv(variable, raising=False)
