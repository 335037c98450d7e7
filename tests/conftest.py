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
import programs
import pytest

jax.config.update('jax_num_cpu_devices', 8)


def pytest_configure(config: pytest.Config) -> None:
  """Compiles quickly in this process if no test runs a program for long.

  Processes that tests start run whole trainings, for which optimized programs
  take less time.
  """
  if config.option.markexpr != 'not slow':
    return
  with pytest.MonkeyPatch.context() as patch:
    flags = f'{programs.QUICK} {os.environ.get("XLA_FLAGS", "")}'
    patch.setenv('XLA_FLAGS', flags)
    jax.devices()  # Reads the flags, once.
  # Keys of the cache depend on the variable, which does not tell them apart.
  folder = f'{os.environ["JAX_COMPILATION_CACHE_DIR"]}_quick'
  jax.config.update('jax_compilation_cache_dir', folder)


@pytest.fixture(autouse=True, scope='session')
def _shops_of_their_own(tmp_path_factory):
  """Keeps the catalogues that tests make out of the user's cache."""
  os.environ['GIGPO_JAX_CACHE'] = str(tmp_path_factory.mktemp('cache'))


@pytest.fixture(autouse=True)
def _no_official_data(monkeypatch):
  """Unsets what names the user's data; the package alfworld sets it, too."""
  for variable in ('ALFWORLD_DATA', 'SEARCH_QA_DATA', 'WEBSHOP_DATA'):
    monkeypatch.delenv(variable, raising=False)
