"""The compiled programs of a sampler.

Shapes: **B** slots, **R** rows that move together, **P** prompt tokens, **L**
tokens of a chunk or, in decoding, of a pass over the network: one and those of
a draft; **K** passes of a step, **V** vocabulary.
"""

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gigpo_jax import drafts, sampling
from gigpo_jax import mesh as mesh_lib
from gigpo_jax.models import (
  decode_attention,
  kv_cache,
  parameters,
  quantization,
  qwen,
)
from gigpo_jax.programs import sampler_rows, sampler_weights
from gigpo_jax.runtime import compilation, distributed

# Inputs of a step for each slot, besides the stream and the text for drafts,
# and the state that a step passes to the next.
INTEGERS = (
  'in_use',
  'is_new',
  'token',
  'position',
  'limit',
  'agent',
  'top_k',
  'previous',
)
FLOATS = ('temperature', 'top_p', 'min_p')
STATE = ('active', 'token', 'position', 'count', 'previous')
# Integers of a stream.
STREAM_SIZE = 5

Slots = sampler_rows.Slots


@dataclasses.dataclass(frozen=True)
class _DecodeConfig:
  """Static inputs of all steps.

  Attributes:
    model: shape of the model.
    seed: seed of all random streams.
    stop_ids: tokens that end a completion.
    vocab_size: this and larger ids are not sampled.
    chunk: K, maximum number of passes.
    draft_tokens: number of tokens of a draft.
    conditionals: whether a step ends early once no slot is active, and skips
      the work of options that no slot uses.
  """

  model: qwen.QwenConfig
  seed: np.uint32
  stop_ids: tuple[int, ...]
  vocab_size: int
  chunk: int
  draft_tokens: int
  conditionals: bool


@dataclasses.dataclass(frozen=True)
class _Function:
  """A jitted function of static arguments, which come first, and arrays.

  Samplers with equal static arguments share its trace.

  Attributes:
    jitted: the function.
    static: the static arguments.
  """

  jitted: Any
  static: tuple

  def lower(self, *args: Any) -> jax.stages.Lowered:
    """Lowers the program for arrays, or for their shapes."""
    return self.jitted.lower(*self.static, *args)


class Programs:
  """The programs of a sampler, with their shardings.

  The slots are (cache, STATE [B, X]). Rows that move into or between slots are
  slots of a fixed size: `row_batch` rows of the longest length. The number of
  programs therefore grows by four for each size of the cache.

  Args:
    config: shape of the model.
    mesh: the devices that sample.
    full_mesh: the devices on which parameters are prepared; `mesh` is a part.
    weights: one of WEIGHTS.
    seed: seed of all random streams.
    stop_ids: tokens that end a completion.
    vocab_size: this and larger ids are not sampled.
    decode_chunk: K, passes of a step.
    draft_sizes: number of tokens of a draft, and of the text for drafts.
    row_batch: number of rows that move together.
    max_length: length of the longest slot.
    conditionals: whether programs may have conditionals.

  Attributes:
    prepare: (params, base) -> parameters for the other programs.
    model: shape of the sampler's copy of the model.
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
    draft_sizes: tuple[int, int],
    row_batch: int,
    max_length: int,
    conditionals: bool,
  ):
    self._mesh, self._full_mesh = mesh, full_mesh
    int8, merge, trained = weights == 'int8', weights != 'adapters', config
    config = sampler_weights.sampled(config, merge, mesh.shape['tensor'])
    axes = (quantization.quantized_axes if int8 else parameters.logical_axes)(
      config
    )
    self._param_axes = parameters.unstack_axes(config, axes)
    self.prepare = jax.jit(
      functools.partial(sampler_weights.prepare, trained, config, int8),
      out_shardings=mesh_lib.shardings(full_mesh, self._param_axes),
    )
    self.model = config
    self._row_size = row_batch, max_length
    draft_tokens, text_size = draft_sizes
    self._num_integers = len(INTEGERS) + STREAM_SIZE + text_size
    static = _DecodeConfig(
      config,
      np.uint32(seed),
      tuple(stop_ids),
      vocab_size,
      decode_chunk,
      draft_tokens,
      conditionals,
    )
    cache_formats = mesh_lib.cache_formats(
      mesh,
      jax.eval_shape(lambda: kv_cache.new(config, 1, 1)),
      by_head=decode_attention.reads_heads(config.decode_attention),
    )
    self._slot_formats = cache_formats, mesh_lib.batch_sharding(mesh)
    self._table = compilation.ProgramTable()
    # On several virtual devices of a CPU, jax may deadlock while many programs
    # with collectives are in flight.
    on_cpu = mesh.devices.flat[0].platform == 'cpu'
    self._blocks = on_cpu and mesh.size > 1
    self._prefill = self._jit(_prefill, config, self._row_size)
    self._extend = self._jit(_extend, config, donate_argnums=6)
    self._take = {
      is_own: self._jit(sampler_rows.take, self._row_size, is_own)
      for is_own in (True, False)
    }
    self._put = {
      is_own: self._jit(sampler_rows.put, is_own, donate_argnums=1)
      for is_own in (True, False)
    }
    stepped = self._slot_formats, mesh_lib.replicated_sharding(mesh)
    self._decode = {
      truncated: self._jit(
        _decode, static, truncated, donate_argnums=3, out_shardings=stepped
      )
      for truncated in (None, False, True)
    }

  def _jit(self, function: Callable, *static: Any, **kwargs: Any) -> _Function:
    """Returns a function that returns slots unless `kwargs` differ."""
    kwargs = {'out_shardings': self._slot_formats} | kwargs
    static_argnums = tuple(range(len(static)))
    return _Function(
      jax.jit(function, static_argnums=static_argnums, **kwargs), static
    )

  def _new(self, rows: int, length: int) -> _Function:
    return self._jit(
      sampler_rows.new_slots, self.model, len(STATE), rows, length
    )

  @property
  def compilations(self) -> int:
    """Returns the number of programs compiled so far."""
    return self.prepare._cache_size() + len(self._table)

  def size_of(self, slots: Slots) -> tuple[int, int]:
    """Returns the number of rows of slots, and their length."""
    return sampler_rows.size_of(slots)

  def _run(self, key: tuple, function: _Function, *args: Any) -> Any:
    lower = functools.partial(function.lower, *args)
    outputs = self._table.run(key, lower, *args)
    if self._blocks and key[0] != 'decode':
      jax.block_until_ready(outputs)
    return distributed.block_on_cpu(outputs)

  def new_slots(self, rows: int, length: int) -> Slots:
    """Returns empty slots."""
    return self._run(('new', rows, length), self._new(rows, length))

  def prefill(
    self,
    params: dict,
    tokens_RP: jax.Array,
    counts_R: jax.Array,
    agents_R: jax.Array,
  ) -> Slots:
    """Prefills prompts; returns rows to `put`, of which the first are used.

    Args:
      params: prepared parameters.
      tokens_RP: the prompts; padding follows them.
      counts_R: number of tokens before the last of each prompt.
      agents_R: the agent of each row.
    """
    key = ('prefill', *tokens_RP.shape)
    prompts = tokens_RP, counts_R, agents_R
    return self._run(key, self._prefill, params, *prompts)

  def extend(
    self,
    params: dict,
    tokens_RL: jax.Array,
    starts_R: jax.Array,
    counts_R: jax.Array,
    agents_R: jax.Array,
    rows: Slots,
  ) -> Slots:
    """Prefills tokens of taken rows at an offset; donates the rows.

    Args:
      params: prepared parameters.
      tokens_RL: the tokens; padding follows them.
      starts_R: position of the first token; the length of the rows if a row has
        no tokens.
      counts_R: number of tokens of each row.
      agents_R: the agent of each row.
      rows: the rows, with keys and values of all earlier positions.
    """
    key = ('extend', *tokens_RL.shape)
    chunk = tokens_RL, starts_R, counts_R, agents_R
    return self._run(key, self._extend, params, *chunk, rows)

  def take(self, slots: Slots, indices: jax.Array, *, is_own: bool) -> Slots:
    """Returns a copy of some rows.

    Args:
      slots: the slots.
      indices: indices of the rows.
      is_own: whether each row stays in its shard, see `sampler_rows`.
    """
    key = ('take', *self.size_of(slots), is_own)
    return self._run(key, self._take[is_own], slots, indices)

  def put(
    self, slots: Slots, rows: Slots, indices: jax.Array, *, is_own: bool
  ) -> Slots:
    """Writes rows into slots; donates the slots.

    Args:
      slots: the slots.
      rows: the rows; positions beyond the length of the slots are dropped.
      indices: the slot of each row; rows for slots past the end are dropped.
      is_own: whether each row stays in its shard, see `sampler_rows`.
    """
    key = ('put', *self.size_of(slots), is_own)
    return self._run(key, self._put[is_own], slots, rows, indices)

  def decode(
    self,
    params: dict,
    slots: Slots,
    integers_BX: jax.Array,
    floats_BX: jax.Array,
    truncated: bool | None,
  ) -> tuple[Slots, tuple[jax.Array, ...]]:
    """Decodes a step; see `_decode`. Donates the slots."""
    return self._run(
      ('decode', *self.size_of(slots), truncated),
      self._decode[truncated],
      params,
      slots,
      integers_BX,
      floats_BX,
    )

  def compile(
    self,
    compiler: compilation.Compiler,
    params: dict,
    base: dict,
    keys: Sequence[tuple],
  ) -> list[concurrent.futures.Future]:
    """Starts the compilation of programs; see `lowerings`."""
    lowerings = self.lowerings(params, base, keys)
    return self._table.compile(compiler, {key: lowerings[key] for key in keys})

  def lowerings(
    self, params: dict, base: dict, keys: Sequence[tuple]
  ) -> dict[tuple, Callable[[], jax.stages.Lowered]]:
    """Returns functions that lower `prepare` and programs, by key.

    `prepare` compiles at its first call, for any sharding of its arguments.

    Args:
      params: the learner's parameters, or their shapes and shardings.
      base: the frozen parameters, or their shapes and shardings.
      keys: (name, sizes) of the programs.
    """
    with jax.set_mesh(self._full_mesh):
      prepared = jax.eval_shape(self.prepare, params, base)
    prepared = mesh_lib.with_shardings(
      prepared, mesh_lib.shardings(self._mesh, self._param_axes)
    )

    def lower_prepare() -> jax.stages.Lowered:
      with jax.set_mesh(self._full_mesh):
        return self.prepare.lower(params, base)

    lowerings = {
      key: functools.partial(self._lower, prepared, *key) for key in keys
    }
    return lowerings | {('prepare',): lower_prepare}

  def _lower(
    self, prepared: dict, name: str, rows: int, length: int, *static: Any
  ) -> jax.stages.Lowered:
    """Lowers a program.

    Args:
      prepared: shapes and shardings of the prepared parameters.
      name: 'new', 'prefill', 'extend', 'take', 'put' or 'decode'.
      rows: slots, or prompts of a prefill.
      length: length of a slot, of the prompts or of a chunk.
      *static: `truncated` of 'decode', `is_own` of 'take' and 'put'.
    """
    sharding = mesh_lib.batch_sharding(self._mesh)

    def array(*shape: int, dtype: str = 'int32') -> jax.ShapeDtypeStruct:
      return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def shapes(rows: int, length: int) -> Slots:
      new = functools.partial(
        sampler_rows.new_slots, self.model, len(STATE), rows, length
      )
      return mesh_lib.with_shardings(jax.eval_shape(new), self._slot_formats)

    indices = array(self._row_size[0])
    with jax.set_mesh(self._mesh):
      if name == 'new':
        return self._new(rows, length).lower()
      if name == 'prefill':
        prompts = array(rows, length), array(rows), array(rows)
        return self._prefill.lower(prepared, *prompts)
      if name == 'extend':
        taken = shapes(*self._row_size)
        chunk = array(rows, length), *[array(rows)] * 3
        return self._extend.lower(prepared, *chunk, taken)
      if name == 'take':
        return self._take[static[0]].lower(shapes(rows, length), indices)
      if name == 'put':
        return self._put[static[0]].lower(
          shapes(rows, length), shapes(*self._row_size), indices
        )
      return self._decode[static[0]].lower(
        prepared,
        shapes(rows, length),
        array(rows, self._num_integers),
        array(rows, len(FLOATS), dtype='float32'),
      )


def _prefill(
  config: qwen.QwenConfig,
  row_size: tuple[int, int],
  params: dict,
  tokens_RP: jax.Array,
  counts_R: jax.Array,
  agents_R: jax.Array,
) -> Slots:
  cache = qwen.prefill(
    config, params, tokens_RP, _used(config, agents_R), counts_B=counts_R
  )
  state_RX = jnp.zeros((tokens_RP.shape[0], len(STATE)), jnp.int32)
  return sampler_rows.resize((cache, state_RX), *row_size)


def _extend(
  config: qwen.QwenConfig,
  params: dict,
  tokens_RL: jax.Array,
  starts_R: jax.Array,
  counts_R: jax.Array,
  agents_R: jax.Array,
  rows: Slots,
) -> Slots:
  cache, state_RX = rows
  positions_RL = starts_R[:, None] + jnp.arange(tokens_RL.shape[1])
  cache = qwen.extend(
    config,
    params,
    cache,
    tokens_RL,
    positions_RL,
    _used(config, agents_R),
    counts_B=counts_R,
  )
  return cache, state_RX


def _used(config: qwen.QwenConfig, agents_R: jax.Array) -> jax.Array | None:
  """Returns agents if they have adapters of their own, else None."""
  return agents_R if config.adapters and config.adapters.agents else None


def _decode(
  static: _DecodeConfig,
  truncated: bool | None,
  params: dict,
  slots: Slots,
  integers_BX: jax.Array,
  floats_BX: jax.Array,
) -> tuple[Slots, tuple[jax.Array, ...]]:
  """Decodes K passes of every active slot.

  Args:
    static: static inputs of all steps.
    truncated: see `sampling.sample_tokens`; static.
    params: parameters; see `sampler_weights.prepare`.
    slots: keys and values, and the fields of `STATE` from the previous step.
    integers_BX: the fields of `INTEGERS`, the stream and the text for drafts of
      each slot.
    floats_BX: the fields of `FLOATS` of each slot.

  Returns:
    (slots, outputs). Outputs are ids, log-probs and sampled log-probs
    [K, L, B], the number of new tokens of each pass [K, B], and whether the
    slot is still active [B].
  """
  cache, state_BX = slots
  integers_BX, streams, texts_BN = jnp.split(
    integers_BX, (len(INTEGERS), len(INTEGERS) + STREAM_SIZE), axis=1
  )
  *_, limit_B, agents_B, top_k_B, _ = integers_BX.T
  keys_B = sampling.row_keys(static.seed, streams.astype(jnp.uint32))
  start = _start(state_BX, integers_BX)
  is_new = INTEGERS.index('is_new')
  cache = kv_cache.start(cache, integers_BX[:, is_new] > 0)
  b, chunk = state_BX.shape[0], static.chunk
  zeros_KLB = jnp.zeros((chunk, 1 + static.draft_tokens, b), jnp.float32)
  advance = functools.partial(
    _decode_pass,
    static,
    params,
    (keys_B, limit_B, floats_BX, top_k_B, _used(static.model, agents_B)),
    texts_BN,
    truncated,
  )

  def any_active(loop: tuple) -> jax.Array:
    return (loop[0] < chunk) & jnp.any(loop[2][0])

  outputs = (
    jnp.zeros(zeros_KLB.shape, jnp.int32),
    zeros_KLB,
    zeros_KLB,
    jnp.zeros((chunk, b), jnp.int32),
  )
  loop = (jnp.int32(0), cache, start, outputs)
  if static.conditionals:
    loop = jax.lax.while_loop(any_active, advance, loop)
  else:
    loop = jax.lax.fori_loop(0, chunk, lambda _, loop: advance(loop), loop)
  _, cache, end, outputs = loop
  state_BX = jnp.stack([x.astype(jnp.int32) for x in end], axis=1)
  return (cache, state_BX), (*outputs, end[0])


def _decode_pass(
  static: _DecodeConfig,
  params: dict,
  inputs: tuple[jax.Array | None, ...],
  texts_BN: jax.Array,
  truncated: bool | None,
  loop: tuple,
) -> tuple:
  """Decodes a token of every slot and those of a right draft; a loop's body.

  All tokens of the draft are decoded with the last sampled token, and a token
  is sampled after each of them; see `drafts.accept`.

  Args:
    static: static inputs of all steps.
    params: parameters; see `sampler_weights.prepare`.
    inputs: key, limit, FLOATS, top_k and agent of each slot; without adapters
      of agents, the agents are None.
    texts_BN: text for drafts of each slot.
    truncated: see `sampling.sample_tokens`; static.
    loop: (index of the pass in the step, cache, STATE, outputs).
  """
  keys_B, limit_B, floats_BX, top_k_B, agents_B = inputs
  k, cache, (active_B, last_B, position_B, count_B, previous_B), outputs = loop
  drafts_BD = drafts.propose(texts_BN, previous_B, last_B, static.draft_tokens)
  tokens_BL = jnp.concatenate([last_B[:, None], drafts_BD], axis=1)
  b, size = tokens_BL.shape
  offsets_L = jnp.arange(size)
  logits_BLV, cache = qwen.decode(
    static.model,
    params,
    cache,
    jnp.maximum(tokens_BL, 0),
    position_B[:, None] + offsets_L,
    agents_B,
  )
  counts_BL = count_B[:, None] + offsets_L
  each = functools.partial(jnp.repeat, repeats=size, axis=0)
  sampled = sampling.sample_tokens(
    each(keys_B),
    counts_BL.reshape(-1),
    each(floats_BX),
    each(top_k_B),
    logits_BLV.reshape(b * size, -1),
    vocab_size=static.vocab_size,
    truncated=truncated,
    greedy=None if static.conditionals else True,
  )
  ids_BL, *log_probs = (x.reshape(b, size) for x in sampled)
  stop_ids = jnp.asarray(static.stop_ids, jnp.int32)
  is_stop_BL = (ids_BL[..., None] == stop_ids).any(axis=-1)
  ends_BL = is_stop_BL | (counts_BL + 1 >= limit_B[:, None])
  is_new_BL = drafts.accept(active_B, drafts_BD, ids_BL, ends_BL)
  new_B = jnp.sum(is_new_BL, axis=1)
  sampled = (jnp.where(is_new_BL, x, 0).T for x in (ids_BL, *log_probs))
  outputs = tuple(
    output.at[k].set(value)
    for output, value in zip(outputs, (*sampled, new_B), strict=True)
  )
  # The state of an inactive slot does not change.
  history_BL = jnp.concatenate(
    [previous_B[:, None], last_B[:, None], ids_BL], 1
  )
  previous_B, last_B = (
    jnp.take_along_axis(history_BL, (new_B + n)[:, None], axis=1)[:, 0]
    for n in range(2)
  )
  is_over_B = jnp.any(ends_BL & is_new_BL, axis=1)
  state = (
    active_B & ~is_over_B,
    last_B,
    position_B + new_B,
    count_B + new_B,
    previous_B,
  )
  return k + 1, cache, state, outputs


def _start(
  state_BX: jax.Array, integers_BX: jax.Array
) -> tuple[jax.Array, ...]:
  """Returns the STATE of each slot, [B] each, before the first token."""
  in_use_B, new_B, first_B, start_B, *_, before_B = integers_BX.T
  is_new_B = new_B > 0
  active_B, last_B, position_B, count_B, previous_B = state_BX.T
  return (
    (in_use_B > 0) & ((active_B > 0) | is_new_B),
    jnp.where(is_new_B, first_B, last_B),
    jnp.where(is_new_B, start_B, position_B),
    jnp.where(is_new_B, 0, count_B),
    jnp.where(is_new_B, before_B, previous_B),
  )
