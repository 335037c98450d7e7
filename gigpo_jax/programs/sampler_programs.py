"""The compiled programs of a sampler.

Shapes: **B** slots, **K** tokens decoded in a step, **V** vocabulary.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from gigpo_jax import mesh as mesh_lib
from gigpo_jax import sampling
from gigpo_jax.models import (
  decode_attention,
  kv_cache,
  lora,
  parameters,
  quantization,
  qwen,
)

# Forms of the parameters; see `sampler.Sampler`.
WEIGHTS = ('model', 'int8', 'adapters')

# Inputs of a step for each slot, without the stream, and the state that a step
# passes to the next.
INTEGERS = ('in_use', 'is_new', 'token', 'position', 'limit', 'top_k')
FLOATS = ('temperature', 'top_p', 'min_p')
STATE = ('active', 'token', 'position', 'count')
# Integers of a stream.
STREAM_SIZE = 5


@dataclasses.dataclass(frozen=True)
class _DecodeConfig:
  """Static inputs of all steps.

  Attributes:
    model: shape of the model.
    seed: seed of all random streams.
    stop_ids: tokens that end a completion.
    vocab_size: this and larger ids are not sampled.
    chunk: K, maximum number of tokens per slot.
  """

  model: qwen.QwenConfig
  seed: np.uint32
  stop_ids: tuple[int, ...]
  vocab_size: int
  chunk: int


class Programs:
  """The jitted functions of a sampler, with their shardings.

  Args:
    config: shape of the model.
    mesh: the devices that sample.
    full_mesh: the devices on which parameters are prepared; `mesh` is a part.
    weights: one of WEIGHTS.
    seed: seed of all random streams.
    stop_ids: tokens that end a completion.
    vocab_size: this and larger ids are not sampled.
    decode_chunk: K, tokens decoded in a step.

  Attributes:
    prepare: (params, base) -> parameters for the other programs.
    new_cache: (rows, length) -> cache.
    resize: (cache, state, rows, length) -> (cache, state).
    prefill: (params, tokens) -> rows of a cache.
    insert: (cache, rows, slots) -> cache; donates the cache.
    copy: (cache, sources, slots) -> cache; donates the cache.
    decode: see `_decode`; donates cache and state.
  """

  def __init__(
    self,
    config: qwen.QwenConfig,
    mesh: jax.sharding.Mesh,
    full_mesh: jax.sharding.Mesh,
    *,
    weights: str,
    seed: int,
    stop_ids: Sequence[int],
    vocab_size: int,
    decode_chunk: int,
  ):
    self._mesh, self._full_mesh = mesh, full_mesh
    rows = mesh_lib.batch_sharding(mesh)
    int8, merge, trained = weights == 'int8', weights != 'adapters', config
    config = _sampled(config, merge, mesh.shape['tensor'])
    cache_formats = mesh_lib.cache_formats(
      mesh,
      jax.eval_shape(lambda: kv_cache.new(config, 1, 1)),
      by_head=decode_attention.reads_heads(config.decode_attention),
    )
    axes = (quantization.quantized_axes if int8 else parameters.logical_axes)(
      config
    )
    self._params_shardings = mesh_lib.shardings(
      full_mesh, parameters.unstack_axes(config, axes)
    )
    self.prepare = jax.jit(
      functools.partial(_prepare, trained, config, int8),
      out_shardings=self._params_shardings,
    )
    self.new_cache = jax.jit(
      functools.partial(kv_cache.new, config),
      static_argnums=(0, 1),
      out_shardings=cache_formats,
    )
    self.resize = jax.jit(
      _resize,
      static_argnums=(2, 3),
      out_shardings=(cache_formats, rows),
    )
    self.prefill = jax.jit(functools.partial(qwen.prefill, config))
    self.insert = jax.jit(
      kv_cache.insert, donate_argnums=(0,), out_shardings=cache_formats
    )
    self.copy = jax.jit(
      kv_cache.copy_rows, donate_argnums=(0,), out_shardings=cache_formats
    )
    self.decode = jax.jit(
      functools.partial(
        _decode,
        _DecodeConfig(
          config, np.uint32(seed), tuple(stop_ids), vocab_size, decode_chunk
        ),
      ),
      static_argnums=5,
      donate_argnums=(1, 2),
      out_shardings=(cache_formats, rows, mesh_lib.replicated_sharding(mesh)),
    )
    self._cache_formats = cache_formats

  @property
  def compilations(self) -> int:
    """Returns the number of programs compiled so far."""
    programs = (
      self.prepare,
      self.new_cache,
      self.resize,
      self.prefill,
    ) + (
      self.insert,
      self.copy,
      self.decode,
    )
    return sum(program._cache_size() for program in programs)

  def lower(
    self,
    params: dict,
    base: dict,
    *,
    cache_size: tuple[int, int],
    prefill_size: tuple[int, int],
    truncated: bool | None,
  ) -> dict[str, jax.stages.Lowered]:
    """Lowers the largest programs, by name, without compiling or running them.

    Args:
      params: shapes and shardings of the learner's parameters.
      base: shapes and shardings of the frozen parameters.
      cache_size: rows and length of the cache.
      prefill_size: rows and length of the prompts of a prefill.
      truncated: see `sampling.sample_tokens`.
    """
    rows, length = cache_size
    with_shardings = mesh_lib.with_shardings
    row_sharding = mesh_lib.batch_sharding(self._mesh)

    def row_array(*shape: int, dtype: str = 'int32') -> jax.ShapeDtypeStruct:
      return jax.ShapeDtypeStruct(shape, dtype, sharding=row_sharding)

    with jax.set_mesh(self._full_mesh):
      prepare = self.prepare.lower(params, base)
    with jax.set_mesh(self._mesh):
      prepared = with_shardings(prepare.out_info, self._params_shardings)
      cache = jax.eval_shape(self.new_cache, rows, length)
      return {
        'prepare': prepare,
        'prefill': self.prefill.lower(prepared, row_array(*prefill_size)),
        'decode': self.decode.lower(
          prepared,
          with_shardings(cache, self._cache_formats),
          row_array(rows, len(STATE)),
          row_array(rows, len(INTEGERS) + STREAM_SIZE),
          row_array(rows, len(FLOATS), dtype='float32'),
          truncated,
        ),
      }


def parameter_bytes(config: qwen.QwenConfig, weights: str) -> int:
  """Returns the bytes of a model's parameters in the sampler.

  Args:
    config: shape of the model.
    weights: one of WEIGHTS.
  """
  copy = _sampled(config, True)
  prepare = functools.partial(_prepare, config, copy, weights == 'int8')
  params = jax.eval_shape(
    lambda: prepare(parameters.init(config, jax.random.key(0)), {})
  )
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))


def _sampled(
  config: qwen.QwenConfig, merge: bool, tensor: int = 1
) -> qwen.QwenConfig:
  """Returns the shape of the sampler's copy of the model.

  Args:
    config: shape of the model.
    merge: whether adapters are merged into the matrices.
    tensor: devices that a copy is sharded over.
  """
  adapters = None if merge else config.adapters
  return dataclasses.replace(config, adapters=adapters, fused=tensor)


def _prepare(
  trained: qwen.QwenConfig,
  config: qwen.QwenConfig,
  int8: bool,
  params: dict,
  base: dict,
) -> dict:
  """Returns parameters in the form that `qwen.prefill` and `decode` take.

  Args:
    trained: shape of the learner's model.
    config: shape of the sampler's copy; see `_sampled`.
    int8: whether to quantize the matrices.
    params: the learner's parameters.
    base: frozen parameters of a network with adapters, else {}.
  """
  params = lora.combine(base, params)
  if trained.adapters and not config.adapters:
    params = lora.merge(trained.adapters, params)
  params = parameters.fuse(config, params)
  if int8:
    params = quantization.quantize(config, params)
  else:
    params = jax.tree.map(lambda x: x.astype(config.dtype), params)
  return parameters.unstack_layers(config, params)


def _resize(
  cache: kv_cache.Cache, state_BX: jax.Array, rows: int, length: int
) -> tuple[kv_cache.Cache, jax.Array]:
  padding = max(0, rows - state_BX.shape[0])
  state_BX = jnp.pad(state_BX[:rows], ((0, padding), (0, 0)))
  return kv_cache.resize(cache, rows, length), state_BX


def _decode(
  static: _DecodeConfig,
  params: dict,
  cache: kv_cache.Cache,
  state_BX: jax.Array,
  integers_BX: jax.Array,
  floats_BX: jax.Array,
  truncated: bool | None,
) -> tuple[kv_cache.Cache, jax.Array, tuple[jax.Array, ...]]:
  """Decodes up to `chunk` tokens of every active slot.

  If `truncated` is None, the loop ends early once no slot is active; see
  `sampling.sample_tokens`.

  Args:
    static: static inputs of all steps.
    params: parameters; see `_prepare`.
    cache: keys and values; donated.
    state_BX: the fields of `STATE` from the previous step; donated.
    integers_BX: the fields of `INTEGERS` and the stream of each slot.
    floats_BX: the fields of `FLOATS` of each slot.
    truncated: see `sampling.sample_tokens`; static.

  Returns:
    (cache, state, outputs). Outputs are ids, log-probs and sampled log-probs
    [K, B], the number of new tokens of each slot [B], and whether the slot is
    still active [B].
  """
  *_, limit_B, top_k_B = integers_BX[:, : len(INTEGERS)].T
  streams = integers_BX[:, len(INTEGERS) :].astype(jnp.uint32)
  keys_B = sampling.row_keys(static.seed, streams)
  start = _start(state_BX, integers_BX)
  b, chunk = state_BX.shape[0], static.chunk
  zeros_KB = jnp.zeros((chunk, b), jnp.float32)
  advance = functools.partial(
    _decode_token,
    static,
    params,
    (keys_B, limit_B, floats_BX, top_k_B),
    truncated,
  )

  def any_active(loop: tuple) -> jax.Array:
    return (loop[0] < chunk) & jnp.any(loop[2][0])

  start_count_B = start[3]
  loop = (
    jnp.int32(0),
    cache,
    start,
    (jnp.zeros((chunk, b), jnp.int32), zeros_KB, zeros_KB),
  )
  if truncated is None:
    loop = jax.lax.while_loop(any_active, advance, loop)
  else:
    loop = jax.lax.fori_loop(0, chunk, lambda _, loop: advance(loop), loop)
  _, cache, end, outputs = loop
  state_BX = jnp.stack([x.astype(jnp.int32) for x in end], axis=1)
  return cache, state_BX, (*outputs, end[3] - start_count_B, end[0])


def _decode_token(
  static: _DecodeConfig,
  params: dict,
  inputs: tuple[jax.Array, ...],
  truncated: bool | None,
  loop: tuple,
) -> tuple:
  """Decodes one token of every slot, the body of a loop.

  Args:
    static: static inputs of all steps.
    params: parameters; see `_prepare`.
    inputs: key, limit, FLOATS and top_k of each slot.
    truncated: see `sampling.sample_tokens`; static.
    loop: (index of the token in the step, cache, STATE, outputs).
  """
  keys_B, limit_B, floats_BX, top_k_B = inputs
  c, cache, (active_B, last_B, position_B, count_B), outputs = loop
  logits_BV, cache = qwen.decode(
    static.model, params, cache, last_B, position_B
  )
  ids_B, *log_probs = sampling.sample_tokens(
    keys_B,
    count_B,
    floats_BX,
    top_k_B,
    logits_BV,
    vocab_size=static.vocab_size,
    truncated=truncated,
  )
  # The state of an inactive slot does not change.
  outputs = tuple(
    output_KB.at[c].set(jnp.where(active_B, value_B, 0))
    for output_KB, value_B in zip(outputs, (ids_B, *log_probs), strict=True)
  )
  last_B = jnp.where(active_B, ids_B, last_B)
  position_B, count_B = position_B + active_B, count_B + active_B
  stop_ids = jnp.asarray(static.stop_ids, jnp.int32)
  is_stop_B = (ids_B[:, None] == stop_ids).any(axis=1)
  active_B = active_B & ~is_stop_B & (count_B < limit_B)
  return c + 1, cache, (active_B, last_B, position_B, count_B), outputs


def _start(
  state_BX: jax.Array, integers_BX: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """Returns the STATE of each slot, [B] each, before the first token."""
  in_use_B, new_B, first_B, start_B, *_ = integers_BX[:, : len(INTEGERS)].T
  is_new_B = new_B > 0
  active_B, last_B, position_B, count_B = state_BX.T
  return (
    (in_use_B > 0) & ((active_B > 0) | is_new_B),
    jnp.where(is_new_B, first_B, last_B),
    jnp.where(is_new_B, start_B, position_B),
    jnp.where(is_new_B, 0, count_B),
  )
