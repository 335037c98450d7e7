"""Read safetensors files: check them against a config, and load them.

Tensors are read one at a time, transposed to our layout, placed on the mesh,
and cast to float32 by the devices. Missing tensors, unknown tensors and wrong
shapes are errors.
"""

import functools
import itertools
import json
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (teaches numpy, and so safetensors, bfloat16)
import numpy as np
import safetensors

from gigpo_jax import mesh as mesh_lib
from gigpo_jax.models import parameters
from gigpo_jax.models.huggingface import layout
from gigpo_jax.models.qwen_config import QwenConfig
from gigpo_jax.runtime import console

# Maximum number of differences in an error.
_MAX_NAMED = 4
# Rows of an embedding that are compared at a time.
_TIED_ROWS = 8192
INDEX = 'model.safetensors.index.json'
_ADAPTER = 'adapter_config.json'

# Accepted types of tensors, as safetensors names them.
_DTYPES = ('BF16', 'F16', 'F32', 'F64')


def _files(directory: str) -> list[pathlib.Path]:
  """Returns the safetensors files of a checkpoint."""
  root = pathlib.Path(directory)
  existing = sorted(root.glob('*.safetensors'))
  if not (root / INDEX).is_file():
    if not existing:
      raise ValueError(
        f'model.path={directory}: no *.safetensors files; needs '
        f'model.safetensors, or {INDEX} and its files (pytorch_model.bin and '
        'other formats are not supported)'
      )
    return existing
  indexed = sorted({root / file for file in read_index(root / INDEX).values()})
  missing = [path.name for path in indexed if not path.is_file()]
  if missing:
    raise ValueError(
      f'model.path={directory}: {missing[0]} of {INDEX} does not exist '
      f'({len(missing)} missing); needs all files of the index'
    )
  if extra := sorted(set(existing) - set(indexed)):
    raise ValueError(
      f'model.path={directory}: {extra[0].name} is not in {INDEX}; the folder '
      'must contain one checkpoint'
    )
  return indexed


def read_index(path: pathlib.Path) -> dict[str, str]:
  """Returns the file of each tensor, by the tensor's name."""
  try:
    index = json.loads(path.read_text(encoding='utf-8'))['weight_map']
    index = {str(name): str(file) for name, file in index.items()}
  except (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
  ) as error:
    raise ValueError(
      f'{path}: not an index of safetensors files ({error}); must have a '
      'weight_map'
    ) from error
  for file in index.values():
    if file in ('', '.', '..') or '/' in file or '\\' in file:
      raise ValueError(
        f'{path}: weight_map contains {json.dumps(file)}; must be a file in '
        'the same folder'
      )
  return index


class _Stored(NamedTuple):
  """A tensor's entry in the header of a safetensors file."""

  path: pathlib.Path
  name: str
  dtype: str
  shape: tuple[int, ...]
  slices: tuple[slice, ...]

  def read(self) -> np.ndarray:
    """Returns the tensor, or the part of it at `slices`."""
    with _open(self.path) as file:
      if self.slices:
        return file.get_slice(self.name)[self.slices][0]
      return file.get_tensor(self.name)


def _stored_tensors(directory: str) -> dict[str, _Stored]:
  """Returns the tensors of a checkpoint by name, from the files' headers."""
  stored: dict[str, _Stored] = {}
  for path in _files(directory):
    with _open(path) as tensors:
      for full_name in tensors.keys():  # noqa: SIM118  (not a dict)
        entry = tensors.get_slice(full_name)
        for name, shape, slices in layout.split_experts(
          layout.text_name(full_name), tuple(entry.get_shape())
        ):
          if name in stored:
            raise ValueError(
              f'model.path={directory}: {name} is in {stored[name].path.name} '
              f'and in {path.name}; must be in one file'
            )
          stored[name] = _Stored(
            path, full_name, entry.get_dtype(), shape, slices
          )
  return stored


def _open(path: pathlib.Path):
  try:
    return safetensors.safe_open(path, framework='np')
  except (OSError, safetensors.SafetensorError) as error:
    raise ValueError(f'{path}: not a readable safetensors file: {error}') from (
      error
    )


def check(directory: str, config: QwenConfig) -> None:
  """Checks that a checkpoint's tensors match a config.

  Reads only the headers of the files, except for tied embeddings: if the
  checkpoint stores both, their values are compared.

  Args:
    directory: the checkpoint.
    config: shape of its model.

  Raises:
    ValueError: in one line that names the first differences, with shapes.
  """
  stored = _stored_tensors(directory)
  if (pathlib.Path(directory) / _ADAPTER).is_file():
    raise ValueError(
      f'model.path={directory}: contains {_ADAPTER}, an adapter that would not '
      'be loaded; merge it into the weights, or remove it'
    )
  differences = [
    *itertools.islice(_differences(stored, config), _MAX_NAMED + 1)
  ]
  if differences:
    more = '; and more' if differences[_MAX_NAMED:] else ''
    shown = '; '.join(differences[:_MAX_NAMED])
    raise ValueError(f'model.path={directory}: {shown}{more}')
  if config.tie_embeddings and layout.TOP_NAMES['unembed'] in stored:
    _check_tied(directory, stored)


def _differences(
  stored: dict[str, _Stored], config: QwenConfig
) -> Iterator[str]:
  """Yields the differences between stored tensors and those of a network.

  The iterator is lazy, because an invalid config.json may imply a billion
  tensors.
  """
  expected = {}
  for tensor in layout.tensors(config):
    expected[tensor.name] = tensor.shape
    if tensor.name not in stored:
      yield f'{tensor.name} {tensor.shape} is missing'
  if config.tie_embeddings and layout.TOP_NAMES['unembed'] in stored:
    expected[layout.TOP_NAMES['unembed']] = expected[layout.TOP_NAMES['embed']]
  for name, (_, _, dtype, shape, _) in stored.items():
    if layout.is_other_part(config, name):
      continue
    if name not in expected:
      if not name.endswith('rotary_emb.inv_freq'):
        yield f'{json.dumps(name)[1:-1]} is unknown'
    elif shape != expected[name]:
      yield (
        f'{name} is {shape} in the file and {expected[name]} by config.json'
      )
    elif dtype not in _DTYPES:
      yield (
        f'{name} is {dtype} in the file; must be one of {", ".join(_DTYPES)}'
      )


def _check_tied(directory: str, stored: dict[str, _Stored]) -> None:
  """Refuses an unembedding that differs from the embedding it is tied to."""
  names = [layout.TOP_NAMES[name] for name in ('embed', 'unembed')]
  entries = [stored[name] for name in names]
  with (
    _open(entries[0].path) as embed_file,
    _open(entries[1].path) as unembed_file,
  ):
    slices = [
      embed_file.get_slice(entries[0].name),
      unembed_file.get_slice(entries[1].name),
    ]
    # Both are large, so they are compared in blocks of rows.
    num_rows = entries[0].shape[0]
    for start in range(0, num_rows, _TIED_ROWS):
      block = slice(start, min(start + _TIED_ROWS, num_rows))
      if not np.array_equal(*(tensor[block] for tensor in slices)):
        raise ValueError(
          f'model.path={directory}: {names[1]} differs from '
          f'{names[0]} and tie_word_embeddings is true; must be '
          'equal, or tie_word_embeddings false'
        )


def load(
  directory: str,
  config: QwenConfig,
  mesh: jax.sharding.Mesh,
  *,
  dtype: str = 'float32',
) -> dict:
  """Loads a checkpoint's parameters, sharded over the mesh, without adapters.

  Host memory holds one tensor at a time, and a copy while it is transposed.

  Args:
    directory: the checkpoint.
    config: shape of its model.
    mesh: the devices.
    dtype: type of the parameters.

  Raises:
    ValueError: if tensors are missing, unknown, of a wrong shape or not finite;
      in one line.
  """
  check(directory, config)
  stored = _stored_tensors(directory)
  shapes = parameters.shapes(config)
  shardings = mesh_lib.shardings(mesh, parameters.logical_axes(config))
  params: dict = {}
  for tensor in console.progress_bar(
    list(layout.tensors(config)), desc=f'reading {directory}'
  ):
    *groups, last = tensor.path
    node = params
    for key in groups:
      node = node.setdefault(key, {})
    shape, sharding = (
      layout.leaf(shapes, tensor.path),
      layout.leaf(shardings, tensor.path),
    )
    depth = len(tensor.index)
    part_sharding = jax.NamedSharding(mesh, jax.P(*sharding.spec[depth:]))
    values = tensor.to_ours(stored[tensor.name].read(), shape[depth:])
    part = mesh_lib.place(values, part_sharding)
    if not depth:
      node[last], finite = _cast(part, sharding, dtype)
    else:
      if last not in node:
        node[last] = _zeros(shape, sharding, dtype)
      first_column = tensor.columns[0] if tensor.columns else 0
      node[last], finite = _insert(
        node[last], part, tensor.index, first_column, sharding
      )
    # Fetching blocks until the tensor is written; otherwise tensors would
    # accumulate in memory.
    if not mesh_lib.to_host(finite):
      raise ValueError(
        f'model.path={directory}: {tensor.name} contains NaN or infinity, or '
        f'numbers too large for {dtype}; must be finite'
      )
    del values, part
  return params


@functools.partial(jax.jit, static_argnums=(1, 2))
def _cast(
  part: jax.Array, sharding: jax.NamedSharding, dtype: str
) -> tuple[jax.Array, jax.Array]:
  """Returns a tensor cast to a type, and whether all its values are finite."""
  part = part.astype(dtype)
  array = jax.lax.with_sharding_constraint(part, sharding)
  return array, _is_finite(part, sharding)


def _is_finite(part: jax.Array, sharding: jax.NamedSharding) -> jax.Array:
  replicated = jax.NamedSharding(sharding.mesh, jax.P())
  finite = jnp.isfinite(part).all()
  return jax.lax.with_sharding_constraint(finite, replicated)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _zeros(
  shape: tuple[int, ...], sharding: jax.NamedSharding, dtype: str
) -> jax.Array:
  return jax.lax.with_sharding_constraint(jnp.zeros(shape, dtype), sharding)


@functools.partial(jax.jit, static_argnums=(3, 4), donate_argnums=0)
def _insert(
  stack: jax.Array,
  part: jax.Array,
  index: tuple[int, ...],
  first_column: int,
  sharding: jax.NamedSharding,
) -> tuple[jax.Array, jax.Array]:
  """Returns the stack with `part` at `index`, and whether `part` is finite."""
  part = part.astype(stack.dtype)
  if part.ndim:
    columns = slice(first_column, first_column + part.shape[-1])
    stack = stack.at[(*index, ..., columns)].set(part)
  else:
    stack = stack.at[index].set(part)
  stack = jax.lax.with_sharding_constraint(stack, sharding)
  return stack, _is_finite(part, sharding)
