"""Save and restore: equal values, another mesh, another model, a kill."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gigpo_jax import checkpoint, learner


def _state(shape=(8, 4), axes=('data', None)) -> learner.TrainState:
  mesh = jax.make_mesh(
    (8,), ('data',), axis_types=(jax.sharding.AxisType.Auto,)
  )
  sharding = jax.NamedSharding(mesh, jax.P(*axes))
  weights = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
  params = {
    'a': {'w': jax.device_put(weights, sharding)},
    'half': jax.device_put(jnp.ones(8, jnp.bfloat16) / 3),
  }
  return learner.TrainState(
    params, optax.adamw(1e-3).init(params), jnp.asarray(5, jnp.int32)
  )


def test_entries_that_are_not_wanted_take_no_device_memory(tmp_path):
  policy = {'w': jnp.arange(3.0), 'mean': jnp.ones(4)}
  state = {'policy': policy, 'critic': {'w': jnp.ones(5)}}
  with checkpoint.Checkpointer(tmp_path) as saver:
    saver.save(4, state, {})
    saver.wait()
    (ignored,) = saver._add_entries(4, {})['critic'].values()
    assert isinstance(ignored, np.ndarray) and ignored.strides == (0,)
    wanted = checkpoint.abstract_state({'policy': {'w': state['policy']['w']}})
    iteration, restored, _ = saver.restore(wanted, partial=True)
    other = checkpoint.abstract_state({'policy': {'w': jnp.ones(2)}})
    with pytest.raises(ValueError, match='policy/w is'):
      saver.restore(other, partial=True)
  assert iteration == 4 and restored.keys() == {'policy'}
  assert restored['policy'].keys() == {'w'}
  np.testing.assert_array_equal(restored['policy']['w'], [0, 1, 2])


def test_a_save_after_the_warm_up_compiles_no_checksums(tmp_path):
  state = _state(shape=(16, 2))
  programs = checkpoint._checksums._cache_size()
  checkpoint.warm_up(state)
  compiled = checkpoint._checksums._cache_size()
  assert compiled > programs
  with checkpoint.Checkpointer(tmp_path) as saver:
    saver.save(0, state, {})
  assert checkpoint._checksums._cache_size() == compiled


def test_restored_state_is_equal(tmp_path):
  state = _state()
  with checkpoint.Checkpointer(tmp_path / 'c', keep=2) as saved:
    assert saved.latest() is None
    for iteration in range(3):
      saved.save(iteration, state, {'iteration': iteration})
  with checkpoint.Checkpointer(tmp_path / 'c') as again:
    # Onto another sharding.
    wanted = checkpoint.abstract_state(_state(axes=(None, None)))
    iteration, restored, host = again.restore(wanted)
  assert (iteration, host) == (2, {'iteration': 2})
  jax.tree.map(np.testing.assert_array_equal, restored, state)
  assert restored.params['half'].dtype == jnp.bfloat16
  assert restored.params['a']['w'].sharding.is_fully_replicated
  assert sorted(p.name for p in (tmp_path / 'c').iterdir()) == ['1', '2']


def test_another_checkpoint_is_kept_while_it_is_wanted(tmp_path):
  names = []
  with checkpoint.Checkpointer(tmp_path, keep=1) as saved:
    for iteration, other in enumerate((None, 0, 0, 2, None)):
      saved.save(iteration, {'x': jnp.zeros(4)}, {}, other=other)
      saved.wait()
      names.append(sorted(p.name for p in tmp_path.iterdir()))
  assert names == [['0'], ['0', '1'], ['0', '2'], ['2', '3'], ['4']]


def test_the_newest_checkpoint_up_to_an_iteration(tmp_path):
  with checkpoint.Checkpointer(tmp_path) as saved:
    for iteration in (1, 3):
      saved.save(iteration, {'x': jnp.full(4, float(iteration))}, {})
    saved.wait()
    assert saved.newest == 3
    assert [saved.newest_until(n) for n in range(5)] == [-1, 1, 1, 3, 3]
    assert [saved.latest(n) for n in range(5)] == [None, 1, 1, 3, 3]
    wanted = checkpoint.abstract_state({'x': jnp.zeros(4)})
    iteration, state, _ = saved.restore(wanted, iteration=2, or_earlier=True)
    assert (iteration, saved.newest) == (1, 1)
    np.testing.assert_array_equal(state['x'], np.ones(4))


def test_another_model_is_refused_by_name(tmp_path):
  with checkpoint.Checkpointer(tmp_path) as saved:
    saved.save(0, _state(), {})
    saved.wait()
    wanted = checkpoint.abstract_state(_state(shape=(8, 5)))
    with pytest.raises(
      ValueError, match=r'a/w is \(8, 4\) in the checkpoint and \(8, 5\)'
    ):
      saved.restore(wanted)


KILLED = """
import os, signal, sys, jax.numpy as jnp
from gigpo_jax import checkpoint
saved = checkpoint.Checkpointer(sys.argv[1])
saved.save(0, {'x': jnp.zeros(4)}, {})
saved.wait()
saved.save(1, {'x': jnp.ones(40_000_000)}, {})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_checkpoint_that_a_kill_cut_short_is_passed_over(tmp_path):
  script = tmp_path / 'killed.py'
  script.write_text(KILLED)
  directory = tmp_path / 'c'
  done = subprocess.run(
    [sys.executable, str(script), str(directory)],
    stderr=subprocess.DEVNULL,
    check=False,
  )
  assert done.returncode == -9
  with checkpoint.Checkpointer(directory) as saved:
    assert saved.latest() == 0
    iteration, state, _ = saved.restore(
      checkpoint.abstract_state({'x': jnp.ones(4)})
    )
  assert iteration == 0
  np.testing.assert_array_equal(state['x'], np.zeros(4))


def test_a_deletion_that_a_kill_cut_short_is_continued(tmp_path, capsys):
  state = {'x': jnp.ones(4)}
  with checkpoint.Checkpointer(tmp_path) as saver:
    for iteration in range(2):
      saver.save(iteration, state, {})
  for name in ('manifest.json', '_CHECKPOINT_METADATA'):
    (tmp_path / '0' / name).unlink()
  with checkpoint.Checkpointer(tmp_path) as saver:
    assert saver.restore(checkpoint.abstract_state(state))[0] == 1
    saver.save(2, state, {})
  assert capsys.readouterr().out == ''
  assert sorted(path.name for path in tmp_path.iterdir()) == ['1', '2']


FULL = """
import resource, sys, jax.numpy as jnp
from gigpo_jax import checkpoint
from gigpo_jax.runtime import errors
with checkpoint.Checkpointer(sys.argv[1]) as saved:
  saved.save(0, {'x': jnp.zeros(4)}, {})
  saved.wait()
  # No file may be larger, which to a program is much like a full disk.
  resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
  try:
    saved.save(1, {'x': jnp.arange(1e6)}, {})
    saved.wait()
  except errors.RunError as error:
    print(error)
    sys.exit(1)
"""


def test_what_cannot_be_written_is_said_and_the_one_before_is_intact(tmp_path):
  directory = tmp_path / 'c'
  done = subprocess.run(
    [sys.executable, '-c', FULL, str(directory)],
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 1, done.stderr
  assert len(done.stdout.splitlines()) == 1, done.stdout
  # The reason is whole and has no paths.
  assert re.fullmatch(
    f'{directory}: a checkpoint cannot be written '
    r'\(Failed to write \d+ bytes to file \d+: File too large\); .*'
    'resume from iteration 0\n',
    done.stdout,
  ), done.stdout
  with checkpoint.Checkpointer(directory) as saved:
    assert saved.latest() == 0
    saved.save(1, {'x': jnp.arange(1e6)}, {})


def _largest(folder: pathlib.Path) -> pathlib.Path:
  files = [path for path in folder.rglob('*') if path.is_file()]
  return max(files, key=lambda path: path.stat().st_size)


def _flip(path: pathlib.Path) -> None:
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  path.write_bytes(data)


DAMAGES = {
  'a bit': lambda folder: _flip(_largest(folder / 'state')),
  'cut': lambda folder: os.truncate(_largest(folder / 'state'), 10),
  'empty': lambda folder: os.truncate(_largest(folder / 'state'), 0),
  'a file': lambda folder: _largest(folder / 'state').unlink(),
  'the host': lambda folder: shutil.rmtree(folder / 'host'),
  'host bit': lambda folder: _flip(folder / 'host' / 'metadata'),
  'manifest': lambda folder: (folder / 'manifest.json').unlink(),
  'torn manifest': lambda folder: os.truncate(folder / 'manifest.json', 60),
  'odd manifest': lambda folder: (folder / 'manifest.json').write_text('[1]'),
  'all': lambda folder: [shutil.rmtree(p) for p in folder.glob('*/')],
}


@pytest.mark.parametrize('spoil', DAMAGES.values(), ids=DAMAGES)
def test_what_is_damaged_is_named_and_passed_over(tmp_path, capsys, spoil):
  state = {'x': jnp.arange(1000.0)}
  with checkpoint.Checkpointer(tmp_path) as saved:
    for iteration in (1, 3):
      saved.save(iteration, state, {'iteration': iteration})
  spoil(tmp_path / '3')
  with checkpoint.Checkpointer(tmp_path) as saved:
    assert saved.latest() == 1
    iteration, restored, _ = saved.restore(checkpoint.abstract_state(state))
    printed = capsys.readouterr().out
    assert printed.startswith(f'{tmp_path}/3: damaged, skipped: ')
    assert len(printed.splitlines()) == 1
    np.testing.assert_array_equal(restored['x'], state['x'])
    # The run gets there again.
    for later in (iteration + 1, 3):
      saved.save(later, state, {'iteration': later})
  assert sorted(p.name for p in tmp_path.iterdir()) == ['2', '3', '3.damaged']
  with checkpoint.Checkpointer(tmp_path) as saved:
    assert saved.restore(checkpoint.abstract_state(state))[2] == {
      'iteration': 3
    }


@pytest.mark.parametrize('change', ['value', 'file'])
def test_damage_in_large_files_is_found_by_restoring(
  tmp_path, capsys, monkeypatch, change
):
  digest, hashed = checkpoint._digest, set()

  def record_digest(path):
    hashed.add(path.relative_to(tmp_path).parts[1:])
    return digest(path)

  # As if all files were large.
  monkeypatch.setattr(checkpoint, '_MAX_HASHED_BYTES', -1)
  monkeypatch.setattr(checkpoint, '_digest', record_digest)
  state = {
    'x': jnp.arange(1000.0),
    'n': jnp.int32(3),
    'h': jnp.ones(3, 'bfloat16'),
  }
  with checkpoint.Checkpointer(tmp_path) as saved:
    saved.save(1, state, {})
    if change == 'value':
      find = checkpoint._find_checksums
      monkeypatch.setattr(
        checkpoint, '_find_checksums', lambda s: find(s | {'n': jnp.int32(2)})
      )
    saved.save(3, state, {})
  assert {item for item, *_ in hashed} == {'host'}
  monkeypatch.undo()
  if change == 'file':
    _flip(_largest(tmp_path / '3' / 'state'))
  with checkpoint.Checkpointer(tmp_path) as saved:
    assert saved.latest() == 3
    iteration, restored, host = saved.restore(checkpoint.abstract_state(state))
    np.testing.assert_array_equal(restored['x'], state['x'])
    assert (iteration, host, saved.latest()) == (1, {}, 1)
    printed = capsys.readouterr().out
    assert printed.startswith(f'{tmp_path}/3: damaged, skipped: ')
    with pytest.raises(ValueError, match='3: damaged: '):
      saved.restore(checkpoint.abstract_state(state), iteration=3)
    with pytest.raises(ValueError, match='has no checkpoint'):
      saved.restore(
        checkpoint.abstract_state(state), iteration=0, or_earlier=True
      )
    saved.save(3, state, {})
  assert (tmp_path / '3.damaged').is_dir()
  # Damaged again: the first one is kept, too.
  (tmp_path / '3' / checkpoint._MANIFEST).write_text('damaged')
  with checkpoint.Checkpointer(tmp_path) as saved:
    assert saved.latest() == 1
    saved.save(3, state, {})
  names = [path.name for path in tmp_path.glob('3*')]
  assert sorted(names) == ['3', '3.damaged', '3.damaged.1']


def _save_many_values(folder: pathlib.Path) -> dict:
  """Saves iterations 1 and 3 with plain values above 1 MiB; returns a state."""
  state, host = {'x': jnp.arange(4.0)}, {'entropies': [0.5] * 300_000}
  with checkpoint.Checkpointer(folder) as saved:
    for iteration in (1, 3):
      saved.save(iteration, state, host)
  return state


def test_damage_in_large_plain_values_skips_the_checkpoint(tmp_path, capsys):
  state = _save_many_values(tmp_path)
  path = tmp_path / '3' / 'host' / 'metadata'
  assert path.stat().st_size > 1 << 20
  # They can still be read as JSON.
  path.write_text(path.read_text().replace('0.5', '0.7', 1))
  with checkpoint.Checkpointer(tmp_path) as saved:
    iteration, _, host = saved.restore(checkpoint.abstract_state(state))
  assert iteration == 1 and set(host['entropies']) == {0.5}
  assert capsys.readouterr().out == (
    f'{tmp_path}/3: damaged, skipped: host/metadata has changed since it was '
    'written\n'
  )


def test_large_plain_values_of_an_older_release_have_no_hash(tmp_path):
  state = _save_many_values(tmp_path)
  path = tmp_path / '3' / checkpoint._MANIFEST
  manifest = json.loads(path.read_text())
  manifest['files']['host/metadata'][1] = ''
  path.write_text(json.dumps(manifest))
  with checkpoint.Checkpointer(tmp_path) as saved:
    assert saved.restore(checkpoint.abstract_state(state))[0] == 3


@pytest.mark.parametrize('flip', [(0, 0), (5, 31), (7, 1)], ids=str)
def test_checksums_depend_on_every_bit_and_its_position(flip):
  index, bit = flip
  bits = np.arange(12, dtype=np.uint32).reshape(3, 4)
  changed = bits.copy()
  changed.flat[index] ^= np.uint32(1) << np.uint32(bit)
  # By hand: the sum of value * (2 * index + 1), modulo 2 ** 32.
  weights = 2 * np.arange(12, dtype=np.uint64) + 1
  expected = [int((x.ravel() * weights).sum()) % 2**32 for x in (bits, changed)]
  arrays = {'a': bits.view(np.float32), 'b': changed.view(np.float32)}
  sums = checkpoint._checksums(arrays)
  assert [int(sums['a']), int(sums['b'])] == expected
  assert expected[0] != expected[1]
  swapped = bits.copy()
  swapped[0, [1, 2]] = swapped[0, [2, 1]]
  assert int(checkpoint._checksums({'a': swapped})['a']) != expected[0]


def test_nothing_but_damage_is_no_reason_to_begin_anew(tmp_path):
  with checkpoint.Checkpointer(tmp_path) as saved:
    saved.save(0, {'x': jnp.ones(4)}, {})
  _flip(_largest(tmp_path / '0' / 'state'))
  with checkpoint.Checkpointer(tmp_path) as saved:
    with pytest.raises(
      ValueError, match=r'all checkpoints are damaged \(\[0\]'
    ):
      saved.latest()


def _on_mesh(shape: tuple[int, int], scale: float = 1.0) -> learner.TrainState:
  mesh = jax.make_mesh(
    shape,
    ('data', 'fsdp'),
    devices=jax.devices()[: shape[0] * shape[1]],
    axis_types=(jax.sharding.AxisType.Auto,) * 2,
  )
  weights = scale * jnp.arange(64.0).reshape(16, 4)
  params = {'w': weights, 'half': weights.astype(jnp.bfloat16) / 3}
  state = learner.TrainState(
    params, optax.adamw(1e-3).init(params), jnp.int32(3)
  )
  return jax.tree.map(
    lambda x: jax.device_put(
      x, jax.NamedSharding(mesh, jax.P('fsdp') if x.ndim else jax.P())
    ),
    state,
  )


def _assert_same(got, wanted) -> None:
  assert jax.tree.structure(got) == jax.tree.structure(wanted)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
    assert a.dtype == b.dtype and a.sharding == b.sharding
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize('shape', [(2, 4), (4, 2), (1, 8), (1, 1)], ids=str)
def test_a_state_comes_back_on_any_mesh(tmp_path, shape):
  host = {'iteration': 7, 'nested': {'y': [1, 2.5, None]}}
  with checkpoint.Checkpointer(tmp_path) as saved:
    saved.save(7, _on_mesh((2, 4)), host)
  with checkpoint.Checkpointer(tmp_path) as again:
    wanted = checkpoint.abstract_state(_on_mesh(shape, scale=0.0))
    iteration, restored, restored_host = again.restore(wanted)
  assert (iteration, restored_host) == (7, host)
  _assert_same(restored, _on_mesh(shape))


def test_the_state_may_be_donated_while_it_is_saved(tmp_path):
  state = _on_mesh((1, 8))
  double = jax.jit(
    lambda tree: jax.tree.map(lambda x: x * 2, tree), donate_argnums=0
  )
  with checkpoint.Checkpointer(tmp_path) as saved:
    saved.save(0, state, {})
    doubled = double(state)
    saved.wait()
    _, restored, _ = saved.restore(checkpoint.abstract_state(doubled))
  _assert_same(restored, _on_mesh((1, 8)))


def test_a_relative_directory(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with checkpoint.Checkpointer('runs/x') as saved:
    saved.save(0, {'x': jnp.ones(4)}, {})
  assert (tmp_path / 'runs' / 'x' / '0').is_dir()


def test_nothing_to_restore_is_said_in_one_line(tmp_path):
  with checkpoint.Checkpointer(tmp_path) as saved:
    with pytest.raises(ValueError, match='has no checkpoint$'):
      saved.restore({})


@pytest.mark.parametrize(
  'other, message',
  [
    (
      {'x': jnp.ones(4), 'y': jnp.ones(4)},
      'y is int32 in the checkpoint and float32 in',
    ),
    ({'x': jnp.ones(4)}, r'y is \(4,\) in the checkpoint and missing in'),
    (
      {'w': jnp.ones(2), 'x': jnp.ones(4), 'y': jnp.arange(4)},
      r'w is missing in the checkpoint and \(2,\) in',
    ),
  ],
  ids=['type', 'missing', 'additional'],
)
def test_what_differs_is_named_in_one_line(tmp_path, other, message):
  with checkpoint.Checkpointer(tmp_path) as saved:
    saved.save(0, {'x': jnp.ones(4), 'y': jnp.arange(4)}, {})
    saved.wait()
    with pytest.raises(ValueError, match=message) as error:
      saved.restore(checkpoint.abstract_state(other))
  assert '\n' not in str(error.value)


def test_a_reader_leaves_a_writer_alone(tmp_path):
  with checkpoint.Checkpointer(tmp_path) as saved:
    saved.save(0, {'x': jnp.ones(4)}, {})
  under_way = tmp_path / '1.orbax-checkpoint-tmp'
  under_way.mkdir()
  with checkpoint.Checkpointer(tmp_path, read_only=True) as found:
    assert found.restore(checkpoint.abstract_state({'x': jnp.ones(4)}))[0] == 0
  assert under_way.is_dir()


def test_an_iteration_cut_short_by_a_kill_is_saved_again(tmp_path):
  (tmp_path / '1.orbax-checkpoint-tmp').mkdir()
  with checkpoint.Checkpointer(tmp_path) as saved:
    assert saved.latest() is None
    saved.save(1, {'x': jnp.ones(4)}, {'i': 1})
    saved.wait()
    assert saved.latest() == 1
