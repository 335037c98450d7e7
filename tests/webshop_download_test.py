"""Tests of the WebShop download, with a fake network."""

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
  """Installs a fake gdown package; returns the ids that were requested."""
  requested = []

  def fetch(*, id, output):
    requested.append(id)
    name = next(n for n, i in download.FILES.items() if i == id)
    pathlib.Path(output).write_text(json.dumps(CONTENT[name]))
    return output

  package = types.SimpleNamespace(download=fetch)
  monkeypatch.setitem(sys.modules, 'gdown', package)
  # The fake files do not have the published digests.
  monkeypatch.setattr(download, 'SHA256', {})
  return requested


def test_missing_files_are_downloaded(tmp_path, fetched, monkeypatch, capsys):
  (tmp_path / 'items_human_ins.json').write_text('{}')
  monkeypatch.setattr(sys, 'argv', ['download', '--out', str(tmp_path)])
  download.main()
  small = ('items_shuffle_1000.json', 'items_ins_v2_1000.json')
  assert fetched == [download.FILES[name] for name in small]
  files = sorted(path.name for path in tmp_path.iterdir())
  assert files == sorted([*CONTENT, download.SUMS])
  summary = f'3 products; now: export WEBSHOP_DATA={tmp_path}\n'
  recorded, _, rest = capsys.readouterr().out.partition('\n')
  assert recorded.startswith('no published digest; recorded in SHA256SUMS: ')
  assert rest == summary
  download.main()
  assert len(fetched) == 2
  assert capsys.readouterr().out == summary


def test_full_set_includes_the_small_set():
  assert set(download.wanted(full=True)) == set(download.FILES)
  assert set(download.wanted(full=False)) == set(CONTENT)


def test_failed_download_leaves_no_file(tmp_path, monkeypatch):
  def fail(*, id, output):
    pathlib.Path(output).write_text('[{"as')
    raise OSError('the line is dead')

  package = types.SimpleNamespace(download=fail)
  monkeypatch.setitem(sys.modules, 'gdown', package)
  with pytest.raises(
    ValueError, match='the line is dead; or download https'
  ) as e:
    download.download(tmp_path)
  assert '\n' not in str(e.value)
  assert not list(tmp_path.glob('*.json'))


def test_errors_describe_the_manual_download(tmp_path, monkeypatch):
  package = types.SimpleNamespace(download=lambda *, id, output: None)
  monkeypatch.setitem(sys.modules, 'gdown', package)
  with pytest.raises(
    ValueError, match='not downloaded; download https://drive'
  ):
    download.download(tmp_path)
  monkeypatch.setitem(sys.modules, 'gdown', None)
  with pytest.raises(ValueError, match='pip install gdown'):
    download.download(tmp_path)


def test_files_are_checked_against_the_first_download(tmp_path, fetched):
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
  with pytest.raises(ValueError, match='not a line of sha256sum'):
    download.download(tmp_path)


def test_file_with_another_digest_is_refused(tmp_path, fetched, monkeypatch):
  name = 'items_ins_v2_1000.json'
  monkeypatch.setattr(download, 'SHA256', {name: 64 * '0'})
  with pytest.raises(ValueError, match=f'{name}.*the published one is 0000'):
    download.download(tmp_path)
  assert not (tmp_path / name).exists()


@reference_data.needs_full_data
def test_published_digests_match_the_reference_data():
  for name, digest in download.SHA256.items():
    data = (reference_data.WEBSHOP / name).read_bytes()
    assert hashlib.sha256(data).hexdigest() == digest
