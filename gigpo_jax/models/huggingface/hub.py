"""Download models from the Hugging Face hub."""

import contextlib
import functools
import pathlib
import re
import textwrap

import huggingface_hub

from gigpo_jax.models.huggingface import export, weights
from gigpo_jax.runtime import files

# Files that are downloaded from the hub.
_HUB_FILES = ['*.safetensors', '*.json', '*.jinja', 'vocab.*', 'merges.txt']
# Name of one of several files of weights, which an index lists.
_PART = re.compile(r'-\d{5}-of-(?!00001)\d{5}')
_HUB_NAME = re.compile(r'[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?')


def is_hub_name(path: str) -> bool:
  """Returns whether a path has the form ORGANISATION/NAME[@REVISION]."""
  return bool(_HUB_NAME.fullmatch(path))


def _is_complete(folder: pathlib.Path, *, only_config: bool) -> bool:
  """Returns whether all files of a checkpoint exist; does not check them."""
  if only_config:
    return (folder / 'config.json').is_file()
  if not (folder / 'tokenizer_config.json').is_file():
    return False
  index = folder / weights.INDEX
  if not index.is_file():
    names = [path.name for path in folder.glob('*.safetensors')]
    return bool(names) and not any(map(_PART.search, names))
  return all(
    (folder / file).is_file() for file in weights.read_index(index).values()
  )


@functools.cache
def download(name: str, *, only_config: bool = False) -> str:
  """Returns the local folder of a model on the hub; downloads it if needed.

  A cached model is used even if the hub has a newer revision, so that a resumed
  run continues with the same model.

  Args:
    name: organisation/name or organisation/name@revision.
    only_config: whether config.json is enough.

  Raises:
    ValueError: if the model does not exist or the hub cannot be reached; in one
      line.
  """
  name, _, revision = name.partition('@')
  options = {
    'revision': revision or None,
    'allow_patterns': 'config.json' if only_config else _HUB_FILES,
  }
  # On any error, such as a missing or incomplete cache, download the model.
  with contextlib.suppress(Exception):
    folder = huggingface_hub.snapshot_download(
      name, local_files_only=True, **options
    )
    if _is_complete(pathlib.Path(folder), only_config=only_config):
      return folder
  try:
    return huggingface_hub.snapshot_download(name, **options)
  except Exception as error:  # From the hub, its HTTP client or the disk.
    reason = textwrap.shorten(str(error), 160, placeholder=' ...')
    raise ValueError(
      f'model.path={name}: no such folder, and not available from the hub '
      f'({type(error).__name__}: {reason}); must be a folder, or a name on the '
      'hub with a connection to it (HF_HUB_OFFLINE unset)'
    ) from error


def fingerprints(directory: str) -> dict[str, str]:
  """Returns short texts that differ between models, and between tokenizers.

  Args:
    directory: local folder of a model. In the hub's cache, its name is the
      revision.

  Returns:
    The text of the config and the weights, `files`, and that of the files from
    which prompts and the tokens that end a response come, `tokenizer files`.
  """
  folder = pathlib.Path(directory)
  revision = folder.name if folder.parent.name == 'snapshots' else ''
  tensors = folder.glob('*.safetensors')
  text = [folder / name for name in export.TOKENIZER_FILES]
  return {
    'files': files.fingerprint([folder / 'config.json', *tensors], revision),
    'tokenizer files': files.fingerprint(
      path for path in text if path.exists()
    ),
  }
