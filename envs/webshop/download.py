r"""Gets the official WebShop files from where its authors keep them.

python -m envs.webshop.download --out DIR [--full]

The small set is 1,000 products, 10 MB; `--full` gets all 1.18 million, 6 GB.
"""

import argparse
import pathlib
import sys

from envs.webshop import products

# Google Drive ids, from the setup script of princeton-nlp/WebShop.
FILES = {
  'items_shuffle_1000.json': '1EgHdxQ_YxqIQlvvq5iKlCrkEKR6-j0Ib',
  'items_ins_v2_1000.json': '1IduG0xl544V_A_jv3tHXC0kyFi7PnyBu',
  'items_shuffle.json': '1A2whVgOO0euk5O13n2iYDM0bQRkkRduB',
  'items_ins_v2.json': '1s2j6NgHljiZzQNL3veZaAiyW_qDEgBNi',
  'items_human_ins.json': '14Kb5SPBk_jfdLZ_CDBNitW98QLDlKR5O',
}
_FULL = ('items_shuffle.json', 'items_ins_v2.json')


def wanted(full: bool) -> list[str]:
  """Returns the names of the files of a set."""
  return [name for name in FILES if full or name not in _FULL]


def download(out: pathlib.Path, *, full: bool = False) -> None:
  """Fetches what is not there yet.

  Raises:
    ValueError: in one line, if it cannot be fetched; says what to do instead.
  """
  missing = [name for name in wanted(full) if not (out / name).is_file()]
  by_hand = ', '.join(
    f'https://drive.google.com/uc?id={FILES[name]} as {name}'
    for name in missing
  )
  if not missing:
    return
  try:
    import gdown
  except ImportError as error:
    raise ValueError(
      f'gdown is not installed: run `pip install gdown`, or put {by_hand} '
      f'into {out}'
    ) from error
  out.mkdir(parents=True, exist_ok=True)
  for name in missing:
    part = out / f'{name}.part'
    try:
      fetched = gdown.download(id=FILES[name], output=str(part))
    except Exception as error:
      raise ValueError(f'{name}: {error}; or put {by_hand} into {out}') from (
        error
      )
    if not fetched:
      raise ValueError(f'{name}: not fetched; put {by_hand} into {out}')
    part.rename(out / name)


def main() -> None:
  """Parses the command line."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--out', type=pathlib.Path, required=True)
  parser.add_argument('--full', action='store_true')
  arguments = parser.parse_args()
  try:
    download(arguments.out, full=arguments.full)
    size = len(products.load(arguments.out))
  except ValueError as error:
    sys.exit(str(error))
  print(f'{size} products; now: export WEBSHOP_DATA={arguments.out}')


if __name__ == '__main__':
  main()
