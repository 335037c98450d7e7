"""Fetching the official files, with a stand-in for the network."""

import json
import pathlib
import sys
import types

import pytest

from envs.webshop import catalogue, download

ITEMS, INSTRUCTIONS = catalogue.generate(num_products=3)
CONTENT = {
  'items_shuffle_1000.json': ITEMS,
  'items_ins_v2_1000.json': INSTRUCTIONS,
  'items_human_ins.json': {},
}


@pytest.fixture
def fetched(monkeypatch) -> list[str]:
  """Puts a package gdown in place; returns the ids it was asked for."""
  asked = []

  def fetch(*, id, output):
    asked.append(id)
    name = next(n for n, i in download.FILES.items() if i == id)
    pathlib.Path(output).write_text(json.dumps(CONTENT[name]))
    return output

  package = types.SimpleNamespace(download=fetch)
  monkeypatch.setitem(sys.modules, 'gdown', package)
  return asked


def test_what_is_missing_is_fetched_and_loads(
  tmp_path, fetched, monkeypatch, capsys
):
  (tmp_path / 'items_human_ins.json').write_text('{}')
  monkeypatch.setattr(sys, 'argv', ['download', '--out', str(tmp_path)])
  download.main()
  small = ('items_shuffle_1000.json', 'items_ins_v2_1000.json')
  assert fetched == [download.FILES[name] for name in small]
  assert sorted(path.name for path in tmp_path.iterdir()) == sorted(CONTENT)
  told = f'3 products; now: export WEBSHOP_DATA={tmp_path}\n'
  assert capsys.readouterr().out == told
  download.main()
  assert len(fetched) == 2


def test_the_full_set_has_the_small_one_too():
  assert set(download.wanted(full=True)) == set(download.FILES)
  assert set(download.wanted(full=False)) == set(CONTENT)


def test_a_broken_transfer_leaves_no_file(tmp_path, monkeypatch):
  def fail(*, id, output):
    pathlib.Path(output).write_text('[{"as')
    raise OSError('the line is dead')

  package = types.SimpleNamespace(download=fail)
  monkeypatch.setitem(sys.modules, 'gdown', package)
  with pytest.raises(ValueError, match='the line is dead; or put https') as e:
    download.download(tmp_path)
  assert '\n' not in str(e.value)
  assert not list(tmp_path.glob('*.json'))


def test_a_refusal_says_what_to_do_by_hand(tmp_path, monkeypatch):
  package = types.SimpleNamespace(download=lambda *, id, output: None)
  monkeypatch.setitem(sys.modules, 'gdown', package)
  with pytest.raises(ValueError, match='not fetched; put https://drive'):
    download.download(tmp_path)
  monkeypatch.setitem(sys.modules, 'gdown', None)
  with pytest.raises(ValueError, match='pip install gdown'):
    download.download(tmp_path)
