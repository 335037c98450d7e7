"""Fetching the official files, with a stand-in for the network."""

import hashlib
import json
import pathlib
import sys
import types

import pytest
import reference_data

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
  # The stand-ins are not the published files.
  monkeypatch.setattr(download, 'SHA256', {})
  return asked


def test_what_is_missing_is_fetched_and_loads(
  tmp_path, fetched, monkeypatch, capsys
):
  (tmp_path / 'items_human_ins.json').write_text('{}')
  monkeypatch.setattr(sys, 'argv', ['download', '--out', str(tmp_path)])
  download.main()
  small = ('items_shuffle_1000.json', 'items_ins_v2_1000.json')
  assert fetched == [download.FILES[name] for name in small]
  files = sorted(path.name for path in tmp_path.iterdir())
  assert files == sorted([*CONTENT, download.SUMS])
  told = f'3 products; now: export WEBSHOP_DATA={tmp_path}\n'
  recorded, _, rest = capsys.readouterr().out.partition('\n')
  assert recorded.startswith('no published digest, recorded in SHA256SUMS: ')
  assert rest == told
  download.main()
  assert len(fetched) == 2
  assert capsys.readouterr().out == told


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


def test_files_are_compared_with_their_first_download(tmp_path, fetched):
  assert download.download(tmp_path) == list(download.wanted(full=False))
  sums = (tmp_path / download.SUMS).read_text()
  expected = [
    f'{hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()}  {name}'
    for name in sorted(CONTENT)
  ]
  assert sums.splitlines() == expected
  assert not download.download(tmp_path)
  changed = tmp_path / 'items_human_ins.json'
  changed.write_text('{"B": []}')
  with pytest.raises(ValueError, match='SHA256SUMS .* has .*Delete it') as e:
    download.download(tmp_path)
  assert str(changed) in str(e.value) and '\n' not in str(e.value)
  changed.unlink()
  assert not download.download(tmp_path)
  assert (tmp_path / download.SUMS).read_text() == sums
  (tmp_path / download.SUMS).write_text('not a digest\n')
  with pytest.raises(ValueError, match='no line of sha256sum'):
    download.download(tmp_path)


def test_a_file_other_than_the_published_one_is_refused(
  tmp_path, fetched, monkeypatch
):
  name = 'items_ins_v2_1000.json'
  monkeypatch.setattr(download, 'SHA256', {name: 64 * '0'})
  with pytest.raises(ValueError, match=f'{name}.*the published one is 0000'):
    download.download(tmp_path)
  assert not (tmp_path / name).exists()


@reference_data.needs_whole
def test_the_published_digest_is_that_of_the_reference_data():
  for name, digest in download.SHA256.items():
    data = (reference_data.WEBSHOP / name).read_bytes()
    assert hashlib.sha256(data).hexdigest() == digest
