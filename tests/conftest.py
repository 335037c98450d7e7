"""Sets up eight virtual CPU devices and a compilation cache for all tests."""

import gc
import os
import signal
import tempfile

os.environ['JAX_PLATFORMS'] = 'cpu'
# All tests, their processes and later test runs share one compilation cache. It
# also stores small programs, because tests compile many of them.
os.environ.setdefault(
  'JAX_COMPILATION_CACHE_DIR',
  os.path.join(tempfile.gettempdir(), 'gigpo_jax_test_cache'),
)
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')
# A shell lets commands in the background ignore Ctrl-C. Their processes would
# inherit that, and tests of Ctrl-C would wait for ever.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
  signal.signal(signal.SIGINT, signal.default_int_handler)

import jax
import programs
import pytest

jax.config.update('jax_num_cpu_devices', 8)


def pytest_configure(config: pytest.Config) -> None:
  """Compiles quickly in this process if no slow tests are selected.

  Processes that tests start run complete trainings, for which optimized
  programs take less time.
  """
  if config.option.markexpr != 'not slow':
    return
  with pytest.MonkeyPatch.context() as patch:
    flags = f'{programs.QUICK} {os.environ.get("XLA_FLAGS", "")}'
    patch.setenv('XLA_FLAGS', flags)
    jax.devices()  # XLA reads the flags here, once.
  # Cache keys include the restored variable and not the flags in use, so these
  # programs have their own folder.
  folder = f'{os.environ["JAX_COMPILATION_CACHE_DIR"]}_quick'
  jax.config.update('jax_compilation_cache_dir', folder)


def pytest_collection_finish() -> None:
  """Makes garbage collections fast and rare.

  JAX allocates many objects while it traces, and few of them are garbage.
  """
  gc.collect()
  gc.freeze()
  gc.set_threshold(200_000, 20, 20)


@pytest.fixture(autouse=True, scope='session')
def _temporary_cache(tmp_path_factory):
  """Stores the catalogues that tests generate outside the user's cache."""
  os.environ['GIGPO_JAX_CACHE'] = str(tmp_path_factory.mktemp('cache'))


@pytest.fixture(autouse=True)
def _no_official_data(monkeypatch):
  """Unsets the variables of data folders, which the package alfworld sets."""
  for variable in ('ALFWORLD_DATA', 'SEARCH_QA_DATA', 'WEBSHOP_DATA'):
    monkeypatch.delenv(variable, raising=False)
