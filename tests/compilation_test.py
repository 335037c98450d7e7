"""Tests of the compilation cache: its folder and size limit, progress."""

import functools
import os
import pathlib
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import PROJECT

from gigpo_jax.runtime import compilation

_VARIABLES = ('JAX_COMPILATION_CACHE_DIR', 'GIGPO_JAX_CACHE')
_OPTIONS = """
import jax
from gigpo_jax.runtime import compilation
compilation.enable_cache()
print(jax.config.jax_compilation_cache_dir)
print(jax.config.jax_persistent_cache_min_compile_time_secs)
print(jax.config.jax_persistent_cache_min_entry_size_bytes)
"""


def _run(*command: str, **variables: str) -> str:
  inherited = {
    name: value
    for name, value in os.environ.items()
    if name not in _VARIABLES and not name.startswith('JAX_PERSISTENT')
  }
  return subprocess.run(
    [sys.executable, *command],
    cwd=PROJECT,
    env=inherited | variables,
    stdout=subprocess.PIPE,
    text=True,
    timeout=500,
    check=True,
  ).stdout


def test_cache_is_on_by_default_and_a_set_folder_is_used(tmp_path):
  home, chosen = str(tmp_path / 'home'), str(tmp_path / 'chosen')
  folder, *rest = _run('-c', _OPTIONS, GIGPO_JAX_CACHE=home).split()
  assert folder.startswith(f'{home}/programs-') and rest == ['0.0', '-1']
  assert os.path.isdir(folder)
  folder, *rest = _run(
    '-c',
    _OPTIONS,
    GIGPO_JAX_CACHE=home,
    JAX_COMPILATION_CACHE_DIR=chosen,
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS='3',
  ).split()
  assert folder == chosen and rest == ['3.0', '-1']
  # A run continues without a cache if its folder cannot be written.
  (tmp_path / 'file').touch()
  folder, *_ = _run(
    '-c', _OPTIONS, GIGPO_JAX_CACHE=str(tmp_path / 'file')
  ).split()
  assert folder == 'None'


def test_the_oldest_programs_are_deleted(tmp_path):
  for age in range(6):
    path = tmp_path / str(age)
    path.write_bytes(bytes(100))
    os.utime(path, (1000 - age, 1000 - age))
  compilation._trim(tmp_path, 600)
  assert len(list(tmp_path.iterdir())) == 6
  compilation._trim(tmp_path, 500)
  assert sorted(path.name for path in tmp_path.iterdir()) == ['0', '1']


def test_old_files_of_xlas_own_caches_are_deleted_too(tmp_path):
  (tmp_path / 'xla_gpu_per_fusion_autotune_cache_dir').mkdir()
  old = tmp_path / 'xla_gpu_per_fusion_autotune_cache_dir' / 'old'
  for path, size, age in ((old, 300, 9), (tmp_path / 'new', 100, 1)):
    path.write_bytes(bytes(size))
    os.utime(path, (1000 - age, 1000 - age))
  compilation._trim(tmp_path, 300)
  assert not old.exists()
  assert (tmp_path / 'new').exists()


def test_progress_is_printed_in_lines_without_a_terminal(monkeypatch, capsys):
  clock = [0.0]
  monkeypatch.setattr(compilation.time, 'monotonic', lambda: clock[0])
  with compilation.progress(4, start=-3.0) as advance:
    for seconds in (6, 6, 30, 1):
      clock[0] += seconds
      advance()
  assert capsys.readouterr().out.splitlines() == [
    'compiled 2 of 4 programs, 15 s',
    'compiled 3 of 4 programs, 45 s',
    'compiled 4 programs in 46 s',
  ]


def test_programs_compiled_at_once_give_the_results_of_jit():
  functions = {n: jax.jit(lambda x, n=n: x**n + n) for n in range(6)}
  x, table = jnp.arange(4.0), compilation.ProgramTable()
  lowerings = {n: functools.partial(f.lower, x) for n, f in functions.items()}
  with compilation.Compiler() as compiler:
    programs = table.compile(compiler, lowerings)
    # It waits for the program.
    np.testing.assert_array_equal(table.run(5, None, x), functions[5](x))
    compilation.wait(programs)
    assert all(program.done() for program in programs)
    assert table.compile(compiler, lowerings) == programs
  assert len(programs) == len(table) == 6
  for n, function in functions.items():
    np.testing.assert_array_equal(table.run(n, None, x), function(x))


def test_a_missing_program_is_compiled_once():
  table, traces = compilation.ProgramTable(), []
  lower = functools.partial(
    jax.jit(lambda x: traces.append(1) or x + 1).lower, np.int32(1)
  )
  assert [int(table.run('f', lower, np.int32(n))) for n in (1, 2)] == [2, 3]
  assert traces == [1] and len(table) == 1


def _fail():
  raise ValueError('out of memory')


class _Broken:
  compile = staticmethod(_fail)


@pytest.mark.parametrize('lower', [_fail, _Broken], ids=['trace', 'compile'])
def test_an_error_of_one_program_ends_the_compilation(lower):
  table = compilation.ProgramTable()
  with (
    compilation.Compiler() as compiler,
    pytest.raises(ValueError, match='out of memory'),
  ):
    compilation.wait(table.compile(compiler, {n: lower for n in range(3)}))


def test_a_program_dropped_at_the_end_is_compiled_when_it_is_needed():
  table, entered, wait = (
    compilation.ProgramTable(),
    threading.Event(),
    threading.Event(),
  )
  lower = functools.partial(jax.jit(lambda x: x + 1).lower, np.int32(1))

  def slow():
    entered.set()
    wait.wait(60)
    return lower()

  with pytest.raises(RuntimeError), compilation.Compiler() as compiler:
    table.compile(compiler, {'slow': slow, 'dropped': lower})
    entered.wait(60)
    raise RuntimeError
  wait.set()
  for key in ('slow', 'dropped'):
    assert int(table.run(key, lower, np.int32(2))) == 3
  assert len(table) == 2


def test_a_file_deleted_meanwhile_does_not_disable_the_cache(
  tmp_path, monkeypatch
):
  (tmp_path / 'a').write_bytes(bytes(10))
  stat = pathlib.Path.stat

  def vanish(path, **kwargs):
    if path.name == 'a':
      path.unlink(missing_ok=True)
    return stat(path, **kwargs)

  monkeypatch.setattr(pathlib.Path, 'is_file', lambda path: True)
  monkeypatch.setattr(pathlib.Path, 'stat', vanish)
  compilation._trim(tmp_path, 1)
