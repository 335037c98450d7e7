"""Tests of stored files, and of locks: held, refused, released on a kill."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys

import filelock
import pytest

from gigpo_jax.runtime import distributed, files
from gigpo_jax.tools import plots

_HOLD_LOCK = """
import pathlib, sys, time
from gigpo_jax.runtime import files
with files.lock(pathlib.Path(sys.argv[1])):
  print('held', flush=True)
  time.sleep(60)
"""


@pytest.mark.parametrize('text', ['', '[]', '{"a": 1', '[' * 100_000])
def test_a_damaged_object_is_a_value_error_with_its_path(tmp_path, text):
  path = tmp_path / 'config.json'
  path.write_text(text)
  with pytest.raises(ValueError, match=r'config\.json: '):
    files.read_object(path)


def test_a_replaced_folder_with_further_files_is_kept(tmp_path, capsys):
  path = tmp_path / 'policy'
  for n, further in enumerate((False, True, False)):
    with distributed.atomic_directory(path) as new:
      folder = pathlib.Path(new)
      folder.mkdir()
      (folder / 'model').write_text(str(n))
    assert [p.read_text() for p in path.iterdir()] == [str(n)]
    if further:
      (path / 'README.md').write_text('mine')
  kept = tmp_path / 'policy.bak'
  assert (
    f'{path}: has further files; kept as {kept}\n' == capsys.readouterr().out
  )
  assert (kept / 'README.md').read_text() == 'mine'
  assert sorted(p.name for p in tmp_path.iterdir()) == ['policy', 'policy.bak']


def test_a_further_file_in_a_replaced_subfolder_is_kept(tmp_path):
  path = tmp_path / 'policy'
  for n in range(2):
    with distributed.atomic_directory(path) as new:
      folder = pathlib.Path(new, 'actor')
      folder.mkdir(parents=True)
      (folder / 'model').write_text(str(n))
    assert [p.name for p in path.rglob('*')] == ['actor', 'model']
    (path / 'actor' / 'notes.md').write_text('mine')
  assert (tmp_path / 'policy.bak' / 'actor' / 'model').read_text() == '0'
  kept = tmp_path / 'policy.bak' / 'actor' / 'notes.md'
  assert kept.read_text() == 'mine'


def test_a_picture_on_a_full_disk_keeps_the_earlier_one(tmp_path):
  path, partial = tmp_path / 'curves.png', tmp_path / 'curves.png.tmp'
  path.write_bytes(b'before')
  partial.symlink_to('/dev/full')
  with pytest.raises(OSError, match='No space left'), plots.image(path):
    pass
  assert path.read_bytes() == b'before'
  with plots.image(path):
    pass
  assert path.read_bytes().startswith(b'\x89PNG')
  assert list(tmp_path.iterdir()) == [path]


def test_no_other_folder_is_deleted(tmp_path):
  other = tmp_path / 'qwen2.tmp' / 'weights'
  other.mkdir(parents=True)
  with distributed.atomic_directory(tmp_path / 'qwen2.5') as new:
    pathlib.Path(new).mkdir()
  assert other.is_dir()


def test_what_a_link_points_to_is_replaced(tmp_path):
  store, link = tmp_path / 'store', tmp_path / 'run' / 'policy'
  store.mkdir()
  link.parent.mkdir()
  link.symlink_to(store)
  with distributed.atomic_directory(link) as new:
    pathlib.Path(new).mkdir()
    (pathlib.Path(new) / 'model').write_text('new')
  assert link.is_symlink() and (store / 'model').read_text() == 'new'


def test_a_second_process_is_refused_until_the_first_ends(tmp_path):
  with subprocess.Popen(
    [sys.executable, '-c', _HOLD_LOCK, str(tmp_path)],
    stdout=subprocess.PIPE,
    text=True,
  ) as other:
    try:
      assert other.stdout.readline() == 'held\n'
      with pytest.raises(ValueError) as error, files.lock(tmp_path):
        pass
    finally:
      other.send_signal(signal.SIGKILL)
  assert str(error.value) == (
    f'--workdir={tmp_path}: in use by process {other.pid} on host '
    f'{socket.gethostname()}; use another --workdir, or wait until that '
    'process ends'
  )
  # The killed process's files remain, but its lock is released.
  assert (tmp_path / '.lock_owner.json').is_file()
  with files.lock(tmp_path):
    owner = files.read_object(tmp_path / '.lock_owner.json')
    assert owner['pid'] == os.getpid()
  with files.lock(tmp_path):
    pass


@pytest.mark.parametrize('error', [OSError, NotImplementedError])
def test_a_file_system_without_locks_is_reported(
  tmp_path, monkeypatch, capsys, error
):
  def acquire(self):
    raise error('no locks')

  monkeypatch.setattr(filelock.FileLock, 'acquire', acquire)
  with contextlib.ExitStack() as stack:
    stack.enter_context(files.lock(tmp_path))
    stack.enter_context(files.lock(tmp_path))
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == 2 and 'cannot be locked (no locks)' in lines[0]
