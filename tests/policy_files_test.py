"""Tests of the files of a trained policy: exports that are interrupted."""

import dataclasses
import pathlib
import types

import pytest

from gigpo_jax.models import lora
from gigpo_jax.run import policy_files
from gigpo_jax.runtime import files


@dataclasses.dataclass(frozen=True)
class Model:
  """A model that has adapters."""

  adapters: lora.Lora = lora.Lora(2, 4.0)


BUNDLE = types.SimpleNamespace(
  model=Model(), tokenizer=types.SimpleNamespace(directory='', stop_ids=())
)


class Killed(BaseException):
  """Ends an export at once."""


def _export(folder, text='new', error=None):
  """Exports a policy whose files have a text; fails in its adapters."""

  def save(path, *_, **__):
    pathlib.Path(path).mkdir(parents=True)
    (pathlib.Path(path) / 'weights').write_text(text)

  def save_adapters(path, *_):
    save(path)
    if error:
      raise error

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(policy_files.huggingface, 'save', save)
    patch.setattr(policy_files.huggingface, 'save_adapters', save_adapters)
    policy_files.export(folder, BUNDLE, {}, {}, 'start')


def _texts(folder):
  return {
    str(path.relative_to(folder)): path.read_text()
    for path in folder.rglob('*')
    if path.is_file()
  }


def test_an_export_that_fails_in_the_adapters_can_be_repeated(tmp_path):
  with pytest.raises(OSError, match='full'):
    _export(tmp_path, 'old', OSError('full'))
  policy_files.check_export(str(tmp_path), ['run'])
  _export(tmp_path)
  assert _texts(tmp_path) == dict.fromkeys(
    ('policy/weights', 'adapters/weights'), 'new'
  )
  with pytest.raises(ValueError, match='already has a folder policy'):
    policy_files.check_export(str(tmp_path), ['run'])


def test_an_export_that_ends_between_its_folders_can_be_repeated(
  tmp_path, monkeypatch
):
  keep = files.remove_or_keep

  def remove_or_keep(path, replaced):
    if path.name == 'policy':
      raise Killed
    keep(path, replaced)

  with monkeypatch.context() as patch, pytest.raises(Killed):
    patch.setattr(files, 'remove_or_keep', remove_or_keep)
    _export(tmp_path, 'old')
  assert set(_texts(tmp_path)) == {'policy.tmp/weights', 'adapters/weights'}
  policy_files.check_export(str(tmp_path), ['run'])
  # In the work directory of a run, the adapters are the run's.
  (tmp_path / 'config.json').write_text('{"rollout": {}}')
  with pytest.raises(ValueError, match='already has a folder adapters'):
    policy_files.check_export(str(tmp_path), ['run'])
  (tmp_path / 'config.json').unlink()
  _export(tmp_path)
  assert _texts(tmp_path) == dict.fromkeys(
    ('policy/weights', 'adapters/weights'), 'new'
  )
