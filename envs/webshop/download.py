r"""Download the official WebShop files from their authors' Google Drive.

python -m envs.webshop.download --out DIR [--full]

The small set has 1,000 products (10 MB); `--full` downloads all 1.18 million (6
GB).

Every file is checked against a SHA-256 digest: a published digest if there is
one, otherwise the digest of the first download, recorded in DIR/SHA256SUMS. The
first download of such a file is trusted, and later changes are detected.
`sha256sum -c SHA256SUMS` checks the same digests.
"""

import argparse
import hashlib
import pathlib
import re
import sys

from envs.webshop import products

# Google Drive ids from the setup script of princeton-nlp/WebShop.
FILES = {
  'items_shuffle_1000.json': '1EgHdxQ_YxqIQlvvq5iKlCrkEKR6-j0Ib',
  'items_ins_v2_1000.json': '1IduG0xl544V_A_jv3tHXC0kyFi7PnyBu',
  'items_shuffle.json': '1A2whVgOO0euk5O13n2iYDM0bQRkkRduB',
  'items_ins_v2.json': '1s2j6NgHljiZzQNL3veZaAiyW_qDEgBNi',
  'items_human_ins.json': '14Kb5SPBk_jfdLZ_CDBNitW98QLDlKR5O',
}
# Digests of copies that others have published; the authors publish none.
SHA256 = {
  # github.com/WooooDyy/AgentGym, MIT.
  'items_ins_v2_1000.json': (
    'f88a36314a397b53b3d9c3fa5878e5f7b26d35019a51ec83fbedeca61a948f6f'
  ),
}
SUMS = 'SHA256SUMS'
_FULL = ('items_shuffle.json', 'items_ins_v2.json')


def wanted(full: bool) -> list[str]:
  """Returns the file names of the small or the full set."""
  return [name for name in FILES if full or name not in _FULL]


def download(out: pathlib.Path, *, full: bool = False) -> list[str]:
  """Downloads missing files and verifies all of them.

  Args:
    out: folder for the files.
    full: whether to download the full set.

  Returns:
    The names of the files whose digests were recorded for the first time.

  Raises:
    ValueError: in one line, if a file cannot be downloaded or has another
      digest.
  """
  names = wanted(full)
  expected = _recorded(out) | SHA256
  missing = [name for name in names if not (out / name).is_file()]
  for name in names:
    if name not in missing and name in expected:
      _verify(out / name, name, expected[name])
  if missing:
    _fetch(out, missing, expected)
  new = [name for name in names if name not in expected]
  # Write atomically, and without lines for files that are not in the folder.
  sums = expected | {name: _digest(out / name) for name in new}
  lines = [
    f'{digest}  {name}\n'
    for name, digest in sorted(sums.items())
    if (out / name).is_file()
  ]
  temporary = out / f'{SUMS}.part'
  temporary.write_text(''.join(lines))
  temporary.replace(out / SUMS)
  return new


def _fetch(
  out: pathlib.Path, missing: list[str], expected: dict[str, str]
) -> None:
  manual = ', '.join(
    f'https://drive.google.com/uc?id={FILES[name]} as {name}'
    for name in missing
  )
  try:
    import gdown
  except ImportError as error:
    raise ValueError(
      f'gdown is not installed: run `pip install gdown`, or download {manual} '
      f'to {out}'
    ) from error
  out.mkdir(parents=True, exist_ok=True)
  for name in missing:
    temporary = out / f'{name}.part'
    try:
      path = gdown.download(id=FILES[name], output=str(temporary))
    except Exception as error:
      raise ValueError(f'{name}: {error}; or download {manual} to {out}') from (
        error
      )
    if not path:
      raise ValueError(f'{name}: not downloaded; download {manual} to {out}')
    if name in expected:
      _verify(temporary, name, expected[name])
    temporary.rename(out / name)


def _recorded(out: pathlib.Path) -> dict[str, str]:
  """Returns the digests that an earlier download recorded, by file name."""
  path = out / SUMS
  digests = {}
  for line in path.read_text().splitlines() if path.is_file() else ():
    match = re.fullmatch(r'([0-9a-f]{64})  (\S+)', line)
    if not match:
      raise ValueError(
        f'{path}: {line[:80]!r} is not a line of sha256sum; delete the '
        'file to record new digests'
      )
    digests[match[2]] = match[1]
  return digests


def _verify(path: pathlib.Path, name: str, expected: str) -> None:
  digest = _digest(path)
  if digest != expected:
    raise ValueError(
      f'{path}: SHA-256 is {digest}; {_origin(name)} {expected}. Delete it and '
      'run the command again'
    )


def _origin(name: str) -> str:
  if name in SHA256:
    return 'the published one is'
  return f'{SUMS} (delete its line to accept another file) has'


def _digest(path: pathlib.Path) -> str:
  with path.open('rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


def main() -> None:
  """Runs the command line."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--out', type=pathlib.Path, required=True)
  parser.add_argument('--full', action='store_true')
  arguments = parser.parse_args()
  try:
    new = download(arguments.out, full=arguments.full)
    size = len(products.load(arguments.out))
  except (OSError, ValueError) as error:
    sys.exit(str(error))
  if new:
    print(f'no published digest; recorded in {SUMS}: {", ".join(new)}')
  print(f'{size} products; now: export WEBSHOP_DATA={arguments.out}')


if __name__ == '__main__':
  main()
