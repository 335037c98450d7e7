"""The update: rows and advantages in, new parameters and metrics out.

Rows on the host are shuffled and split into mini-batches, with one optimizer
step each. Mini-batches are split into microbatches of few shapes, whose
gradients are summed in float32. The loss's normaliser is computed before the
first microbatch. The loss is therefore independent of the microbatch size, the
length buckets, the mesh and the sharing of prompts. This module knows no
environment, text or algorithm.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from gigpo_jax import batch, losses, packing
from gigpo_jax import mesh as mesh_lib
from gigpo_jax.models import layer_gradients, lora, parameters, qwen
from gigpo_jax.runtime import distributed

# Number of completion tokens per shard whose logits are in memory at a time.
_LOGITS_CHUNK = 512


@flax.struct.dataclass
class TrainState:
  """The device state that training changes.

  Attributes:
    params: trained parameters, float32; for a network with adapters, only the
      adapters.
    opt_state: state of the optimizer.
    updates: number of optimizer steps, int32; skipped updates do not count.
  """

  params: dict
  opt_state: optax.OptState
  updates: jax.Array


def adamw(
  learning_rate: float,
  warmup_updates: int = 0,
  decay_updates: int = 0,
  b1: float = 0.9,
  b2: float = 0.999,
  weight_decay: float = 0.01,
  max_grad_norm: float = 1.0,
  mu_dtype: str = 'float32',
) -> optax.GradientTransformation:
  """Returns AdamW after a clip of the global gradient norm.

  Args:
    learning_rate: learning rate after the warm-up.
    warmup_updates: number of warm-up updates; update k, from 1, uses
      k / warmup_updates of the learning rate. 0 disables the warm-up.
    decay_updates: number of updates after which the learning rate reaches 0
      by linear decay; 0 keeps it constant.
    b1: decay rate of the gradient's mean.
    b2: decay rate of the squared gradient's mean.
    weight_decay: decay of all parameters per update, relative to the learning
      rate.
    max_grad_norm: larger gradients are scaled down to this global norm.
    mu_dtype: dtype of the gradient's mean.
  """

  def schedule(count):
    rate = learning_rate * jnp.minimum(1, (count + 1) / (warmup_updates or 1))
    if decay_updates:
      rate *= jnp.maximum(0, 1 - count / decay_updates)
    return rate

  def clip(grads, params=None):
    # optax's clip divides each element; XLA then keeps a copy of all gradients.
    del params
    factor = jnp.minimum(1, max_grad_norm / optax.global_norm(grads))
    return jax.tree.map(lambda x: x * factor, grads)

  return optax.chain(
    optax.stateless(clip),
    optax.adamw(
      schedule, b1=b1, b2=b2, weight_decay=weight_decay, mu_dtype=mu_dtype
    ),
  )


class Learner:
  """Compiled programs for updates and log-probs of a model on a mesh.

  Attributes:
    base: frozen parameters of a network with adapters; otherwise empty.
  """

  def __init__(  # noqa: PLR0913
    self,
    config: qwen.QwenConfig,
    mesh: jax.sharding.Mesh,
    *,
    loss: Callable,
    optimizer: optax.GradientTransformation,
    minibatch_rows: int,
    microbatch_rows: int,
    length_buckets: Sequence[int],
    max_completion_tokens: int,
    temperature: float = 1.0,
    aggregation: str = 'token_mean',
    share_prompts: bool = False,
    columns: Sequence[str] = (),
    outputs: Callable[[dict, jax.Array], tuple] | None = None,
    seed: int = 0,
  ):
    """Defines the programs without compiling them.

    Args:
      config: shape of the model.
      mesh: device mesh; rows of a microbatch are sharded over `mesh.BATCH`.
      loss: called with the arguments of `losses.policy_gradient` up to `rows`
        as keywords; returns a loss and metrics for each token.
      optimizer: see `adamw`.
      minibatch_rows: maximum number of rows of an update; with shared prompts,
        the rows of the last prompt may exceed it.
      microbatch_rows: number of rows of a microbatch; with shared prompts,
        number of packs.
      length_buckets: increasing lengths to which rows are padded.
      max_completion_tokens: C.
      temperature: temperature of log-probs and entropies.
      aggregation: one of `losses.AGGREGATIONS`.
      share_prompts: whether rows with the same prompt are in the same update
        and share its computation.
      columns: names of further arguments of the loss.
      outputs: maps parameters and the hidden state before each token to the
        loss's arguments log_probs and entropies; None for the policy's.
      seed: seed of the shuffling.

    Raises:
      ValueError: if microbatch_rows does not fit the mesh, or the aggregation
        is unknown.
    """
    row_shards = mesh_lib.batch_shards(mesh)
    if microbatch_rows % row_shards:
      raise ValueError(
        f'learner.microbatch_rows={microbatch_rows}: rows are sharded over the '
        f'mesh axes {", ".join(mesh_lib.BATCH)}; must be a multiple of '
        f'{row_shards}'
      )
    losses.row_weights(np.ones(1, np.int32), 1, aggregation)
    self._config, self._mesh = config, mesh
    self._loss, self._optimizer = loss, optimizer
    self._columns, self._outputs = tuple(columns), outputs
    self._minibatch_rows = minibatch_rows
    self._packer = packing.Packer(
      microbatch_rows,
      row_shards,
      length_buckets,
      max_completion_tokens,
      share=share_prompts,
    )
    self._length_buckets = tuple(length_buckets)
    self._max_completion = max_completion_tokens
    self._temperature = temperature
    self._aggregation = aggregation
    self._seed = seed
    self._with_reference = _needs_reference(loss)
    self._metric_names = _metric_names(
      loss, self._with_reference, self._columns
    )
    self._row_sharding = mesh_lib.batch_sharding(mesh)
    self._replicated = jax.NamedSharding(mesh, jax.P())
    shardings = mesh_lib.shardings(mesh, parameters.logical_axes(config))
    self._param_shardings, self._base_shardings = self._split(shardings)
    self._state_shardings = self._shardings_of_state()
    self.base: dict = {}
    self._jit()

  def _split(self, params: dict) -> tuple[dict, dict]:
    """Returns the trained and the frozen parameters."""
    return lora.split(params) if self._config.adapters else (params, {})

  def _shapes(self) -> tuple[dict, dict]:
    """Returns shapes of the trained and the frozen parameters, float32."""
    init = functools.partial(parameters.init, self._config)
    return self._split(jax.eval_shape(init, jax.random.key(0)))

  def _shardings_of_state(self) -> TrainState:
    params, _ = self._shapes()
    moments = optax.tree_utils.tree_map_params(
      self._optimizer,
      lambda _, sharding: sharding,
      jax.eval_shape(self._optimizer.init, params),
      self._param_shardings,
      transform_non_params=lambda _: self._replicated,
    )
    return TrainState(self._param_shardings, moments, self._replicated)

  def _jit(self) -> None:
    state, grads = self._state_shardings, self._param_shardings
    self._programs = {
      'init': jax.jit(self._optimizer.init, out_shardings=state.opt_state),
      'zeros': jax.jit(
        lambda params, skipped: (
          jax.tree.map(jnp.zeros_like, params),
          self._sums(skipped),
        ),
        out_shardings=(grads, self._replicated),
      ),
      # Separate from `apply`, which would hold two copies of the gradients.
      'fill': jax.jit(
        lambda grads, value: jax.tree.map(
          lambda x: jnp.full(x.shape, value, x.dtype), grads
        ),
        donate_argnums=0,
        keep_unused=True,
        out_shardings=grads,
      ),
      'log_probs': jax.jit(
        lambda params, base, rows: self._forward(params, base, rows)[0],
        out_shardings=self._row_sharding,
      ),
      'accumulate': jax.jit(
        self._accumulate,
        donate_argnames=('grads', 'sums'),
        out_shardings=(grads, self._replicated),
      ),
      'apply': jax.jit(
        self._apply,
        donate_argnames=('state', 'sums'),
        out_shardings=(state, self._replicated),
      ),
    }

  def _run(self, name: str, *args, **kwargs):
    return distributed.block_on_cpu(self._programs[name](*args, **kwargs))

  @property
  def compilations(self) -> int:
    """Number of programs compiled so far."""
    return sum(f._cache_size() for f in self._programs.values())

  def init(self, params: dict) -> TrainState:
    """Returns an initial state.

    Args:
      params: parameters of the network; the learner takes ownership and may
        donate them. With adapters, all other parameters become `base`.
    """
    params, self.base = self._split(params)
    with jax.set_mesh(self._mesh):
      params = jax.device_put(params, self._param_shardings)
      self.base = jax.device_put(self.base, self._base_shardings)
      updates = mesh_lib.place(np.zeros((), np.int32), self._replicated)
      return TrainState(params, self._run('init', params), updates)

  def num_programs(self, *, reference: bool = False) -> int:
    """Returns the number of programs that `warm_up` compiles."""
    calls = self._warm_up_calls({}, {} if reference else None)
    return sum(1 for _ in calls)

  def warm_up(
    self,
    state: TrainState,
    reference: dict | None = None,
    advance: Callable[[], None] = lambda: None,
  ) -> TrainState:
    """Compiles every program, so that none compiles later.

    Args:
      state: donated.
      reference: frozen parameters, if their dtype differs from the state's.
      advance: called after each of `num_programs` programs.

    Returns:
      The unchanged state.
    """
    buffers: dict = {'state': state}
    del state
    for call in self._warm_up_calls(buffers, reference):
      with jax.set_mesh(self._mesh):
        call()
      advance()
    return buffers['state']

  def _warm_up_calls(
    self, buffers: dict, reference: dict | None
  ) -> Iterator[Callable[[], object]]:
    """Yields calls that each compile one program; their order matters.

    Args:
      buffers: holds the state and, after the first call, gradients and sums.
      reference: see `warm_up`.
    """

    def zeros() -> None:
      params = buffers['state'].params
      buffers['grads'], buffers['sums'] = self._run(
        'zeros', params, np.float32(0)
      )

    def log_probs(params: dict | None, length: int) -> None:
      params = buffers['state'].params if params is None else params
      self._log_probs(params, self._packer.empty(length))

    def accumulate(length: int) -> None:
      empty = self._packer.empty(length)
      buffers['grads'], buffers['sums'] = self._run(
        'accumulate',
        buffers['state'].params,
        self.base,
        self._put(empty, self._no_columns(empty)),
        grads=buffers['grads'],
        sums=buffers['sums'],
      )

    def apply() -> None:
      # An update with NaN gradients is skipped and leaves the state unchanged.
      grads = self._run('fill', buffers.pop('grads'), np.float32(np.nan))
      buffers['state'], _ = self._run(
        'apply',
        state=buffers.pop('state'),
        grads=grads,
        sums=buffers.pop('sums'),
      )
      jax.block_until_ready(buffers['state'])

    yield zeros
    for length in self._length_buckets:
      yield functools.partial(log_probs, None, length)
      if reference is not None:
        yield functools.partial(log_probs, reference, length)
      yield functools.partial(accumulate, length)
    yield apply

  def describe(self) -> tuple[TrainState, dict]:
    """Returns shapes, dtypes and shardings of a state and of `base`."""
    params, base = self._shapes()
    base = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, self._config.dtype), base
    )
    state = TrainState(
      params,
      jax.eval_shape(self._optimizer.init, params),
      jax.ShapeDtypeStruct((), jnp.int32),
    )
    return (
      mesh_lib.with_shardings(state, self._state_shardings),
      mesh_lib.with_shardings(base, self._base_shardings),
    )

  def lower(self) -> dict[str, jax.stages.Lowered]:
    """Returns the lowered programs 'accumulate' and 'apply', not compiled.

    The mesh's devices need not exist.
    """

    def with_sharding(tree, sharding):
      shardings = jax.tree.map(lambda _: sharding, tree)
      return mesh_lib.with_shardings(tree, shardings)

    state, base = self.describe()
    empty = self._packer.empty(self._length_buckets[-1])
    columns = self._no_columns(empty)
    rows = empty.inputs() | {n: empty.take(x) for n, x in columns.items()}
    rows = with_sharding(rows, self._row_sharding)
    sums = with_sharding(
      jax.eval_shape(self._sums, np.float32(0)), self._replicated
    )
    with jax.set_mesh(self._mesh):
      return {
        'accumulate': self._programs['accumulate'].lower(
          state.params, base, rows, grads=state.params, sums=sums
        ),
        'apply': self._programs['apply'].lower(
          state=state, grads=state.params, sums=sums
        ),
      }

  def log_probs(self, params: dict, rows: batch.Rows) -> np.ndarray:
    """Returns log-probs of all completion tokens, [R, C] float32.

    They are at the learner's temperature, and 0 past a completion and in
    padding rows.

    Args:
      params: parameters in any float dtype. For a network with adapters: the
        adapters, or {} for the network without them.
      rows: the rows of an iteration.
    """
    result = np.zeros(rows.sampler_log_probs.shape, np.float32)
    index = np.flatnonzero(rows.real)
    with jax.set_mesh(self._mesh):
      pending = [
        (microbatch, self._log_probs(params, microbatch))
        for microbatch in self._packer.microbatches(rows, index)
      ]
    for microbatch, values in pending:
      microbatch.put(mesh_lib.to_host(values), result)
    return result

  def _log_probs(
    self, params: dict, microbatch: packing.Microbatch
  ) -> jax.Array:
    return self._run('log_probs', params, self.base, self._put(microbatch, {}))

  def update(
    self,
    state: TrainState,
    rows: batch.Rows,
    advantages: np.ndarray,
    *,
    old_log_probs: np.ndarray,
    ref_log_probs: np.ndarray | None,
    iteration: int,
    importance: np.ndarray | None = None,
    skipped_before: float = 0.0,
    **further: np.ndarray,
  ) -> tuple[TrainState, dict[str, float]]:
    """Trains for one pass over the rows, one optimizer step per mini-batch.

    Args:
      state: donated.
      rows: the rows of the iteration; padding rows are ignored.
      advantages: one per row, [R], or per token, [R, C].
      old_log_probs: log-probs under the policy in the ratio's denominator,
        [R, C].
      ref_log_probs: log-probs under the reference, [R, C]; None if the loss
        does not use them.
      iteration: with the seed, determines the shuffling.
      importance: weight of each token's surrogate, [R, C]; None for 1.
      skipped_before: number of consecutive updates skipped just before.
      **further: further arguments of the loss, per row or per token.

    Returns:
      The new state and metrics. Metrics of the loss are means over all trained
      tokens, or maxima if their names end in '/max'. The others count tokens,
      updates, and updates skipped because the loss or the gradient was not
      finite: in total, consecutive ones at the end, and the longest run of
      consecutive ones.

    Raises:
      ValueError: if the loss needs a reference and ref_log_probs is None, or a
        row is longer than the last bucket.
    """
    if self._with_reference and ref_log_probs is None:
      raise ValueError('ref_log_probs=None: the loss needs a reference')
    columns = {
      'advantages': np.asarray(advantages, np.float32),
      'old_log_probs': old_log_probs,
      'importance': (
        np.ones_like(old_log_probs) if importance is None else importance
      ),
    }
    columns |= {name: further[name] for name in self._columns}
    if self._with_reference:
      columns['ref_log_probs'] = ref_log_probs
    minibatches = self._minibatches(rows, iteration)
    self._packer.forget()
    with jax.set_mesh(self._mesh):
      grads, sums = self._run('zeros', state.params, np.float32(skipped_before))
      for minibatch in minibatches:
        columns['weights'] = self._weights(rows, minibatch)
        for microbatch in self._packer.microbatches(rows, minibatch):
          grads, sums = self._run(
            'accumulate',
            state.params,
            self.base,
            self._put(microbatch, columns),
            grads=grads,
            sums=sums,
          )
        state, sums = self._run('apply', state=state, grads=grads, sums=sums)
        grads = self._run('fill', grads, np.float32(0))
    metrics = _finish(jax.device_get(sums), len(minibatches))
    return state, metrics | self._packer.take_metrics()

  def sampler_difference(
    self, params: dict, rows: batch.Rows, old_log_probs: np.ndarray
  ) -> dict[str, float]:
    """Returns metrics of the sampler's deviation from the learner's log-probs.

    Args:
      params: the parameters that were sampled from.
      rows: the rows of the iteration.
      old_log_probs: the learner's log-probs, [R, C]. If it is
        `rows.sampler_log_probs`, the learner computes those of one microbatch
        of the longest rows.

    Returns:
      Mean and maximum over tokens of the absolute difference, and mean and
      maximum over rows of the probability ratio of learner to sampler.
    """
    index = np.flatnonzero(rows.real)
    if old_log_probs is rows.sampler_log_probs:
      index = next(self._packer.microbatches(rows, index)).rows
      old_log_probs = self.log_probs(params, rows.take(index))
    else:
      old_log_probs = old_log_probs[index]
    rows = rows.take(index)
    mask = rows.completion_mask
    if not mask.any():
      return {}
    difference = old_log_probs - rows.sampler_log_probs
    absolute = np.abs(difference[mask])
    ratios = np.exp(np.where(mask, difference, 0).sum(axis=1))
    return {
      'sampler/log_prob_difference_mean': float(absolute.mean()),
      'sampler/log_prob_difference_max': float(absolute.max()),
      'sampler/sequence_ratio_mean': float(ratios.mean()),
      'sampler/sequence_ratio_max': float(ratios.max()),
    }

  # On the host: assignment of rows to updates and microbatches.

  def _minibatches(self, rows, iteration) -> list[np.ndarray]:
    index = np.flatnonzero(rows.real)
    if not len(index):
      raise ValueError('rows: all are padding; at least one must be real')
    rng = np.random.default_rng((self._seed, iteration))
    units = self._packer.units(rows, index)
    units = [units[n] for n in rng.permutation(len(units))]
    count = math.ceil(len(index) / self._minibatch_rows)
    edges = np.cumsum([len(x) for x in np.array_split(index, count)])
    starts = np.cumsum([0, *map(len, units)])[:-1]
    # A unit belongs to the mini-batch that contains its first row.
    minibatches = np.searchsorted(edges, starts, side='right')
    return [
      np.concatenate(
        [unit for unit, m in zip(units, minibatches, strict=True) if m == n]
      )
      for n in np.unique(minibatches)
    ]

  def _weights(self, rows, minibatch) -> np.ndarray:
    weights = np.zeros(len(rows.groups), np.float32)
    lengths = (rows.lengths - rows.prompt_lengths)[minibatch]
    weights[minibatch] = losses.row_weights(
      lengths, self._max_completion, self._aggregation
    )
    return weights

  def _no_columns(
    self, microbatch: packing.Microbatch
  ) -> dict[str, np.ndarray]:
    names = ['advantages', 'weights', 'old_log_probs', 'importance']
    if self._with_reference:
      names.append('ref_log_probs')
    row = np.zeros(1, np.float32)
    return dict.fromkeys((*names, *self._columns), row)

  def _put(self, microbatch: packing.Microbatch, columns: dict) -> dict:
    """Transfers a microbatch and its columns to the devices."""
    arrays = microbatch.inputs()
    arrays |= {name: microbatch.take(x) for name, x in columns.items()}
    return mesh_lib.place_rows(self._mesh, arrays)

  # On the device: traced once per length bucket.

  def _forward(self, params, base, rows, sums=None):
    config = self._config
    if config.adapters and not params:
      config = dataclasses.replace(config, adapters=None)
    params = lora.combine(base, params) if base else params
    if sums is not None:
      accumulators = {name: sums[name] for name in params if name != 'layers'}
      params |= layer_gradients.accumulate_gradients(
        {name: params[name] for name in accumulators}, accumulators
      )
      sums = sums['layers']
    hidden_SND = qwen.hidden_states(
      config,
      params,
      rows['tokens'],
      rows.get('positions'),
      rows.get('branches'),
      rows['before'],
      sums=sums,
    )
    if self._outputs:
      return self._outputs(params, hidden_SND)
    return qwen.token_log_probs(
      config,
      params,
      hidden_SND,
      rows['targets'],
      count=jnp.max(jnp.sum(rows['mask'], axis=1)),
      temperature=self._temperature,
      chunk=_LOGITS_CHUNK,
    )

  def _accumulate(self, params, base, rows, *, grads, sums):
    mask = rows['mask']
    in_place = qwen.adds_in_place(self._config)

    def loss_of(params):
      log_probs, entropies = self._forward(
        params, base, rows, grads if in_place else None
      )
      loss, metrics = self._loss(
        log_probs=log_probs,
        entropies=entropies,
        old_log_probs=rows['old_log_probs'],
        ref_log_probs=rows.get('ref_log_probs'),
        advantages=rows['advantages'],
        importance=rows['importance'],
        mask=mask,
        rows=rows['local'],
        **{name: rows[name] for name in self._columns},
      )
      loss = jnp.where(mask, loss, 0)
      total = jnp.sum(loss * rows['weights'])
      return total, metrics | {'loss/total': loss}

    (total, metrics), new_grads = jax.value_and_grad(loss_of, has_aux=True)(
      params
    )
    grads = new_grads if in_place else jax.tree.map(jnp.add, grads, new_grads)
    sums = dict(sums)
    for name, values in metrics.items():
      if name.endswith('/max'):
        largest = jnp.max(jnp.where(mask, values, -jnp.inf))
        sums[name] = jnp.maximum(sums[name], largest)
      else:
        sums[name] += jnp.sum(jnp.where(mask, values, 0))
    sums['update/tokens'] += jnp.sum(mask, dtype=jnp.float32)
    sums['update/objective'] += total
    return grads, sums

  def _apply(self, *, state, grads, sums):
    norm = optax.global_norm(grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(sums['update/objective'])

    def step(state, grads):
      parameter_updates, opt_state = self._optimizer.update(
        grads, state.opt_state, state.params
      )
      params = optax.apply_updates(state.params, parameter_updates)
      return TrainState(params, opt_state, state.updates + 1)

    # `jnp.where` on each element would keep the old state next to the new.
    state = jax.lax.cond(finite, step, lambda state, _: state, state, grads)
    sums = dict(sums)
    sums['update/grad_norm'] += jnp.where(finite, norm, 0)
    sums['update/skipped'] += 1.0 - finite
    in_row = jnp.where(finite, 0.0, sums['update/skipped_in_row'] + 1)
    longest = jnp.maximum(sums['update/most_skipped_in_row'], in_row)
    sums['update/skipped_in_row'] = in_row
    sums['update/most_skipped_in_row'] = longest
    sums['update/objective'] = jnp.zeros_like(norm)
    return state, sums

  def _sums(self, skipped):
    names = (
      *self._metric_names,
      'loss/total',
      'update/tokens',
      'update/grad_norm',
      'update/objective',
      'update/skipped',
      'update/most_skipped_in_row',
    )
    # Weakly typed values would compile every program a second time.
    sums = {
      name: jnp.full((), -jnp.inf if name.endswith('/max') else 0, jnp.float32)
      for name in names
    }
    return sums | {'update/skipped_in_row': skipped}


def _loss_shapes(loss, ref_log_probs, columns=()):
  token = jax.ShapeDtypeStruct((1, 1), jnp.float32)
  return jax.eval_shape(
    loss,
    log_probs=token,
    entropies=token,
    old_log_probs=token,
    ref_log_probs=token if ref_log_probs else None,
    advantages=token,
    importance=token,
    mask=jax.ShapeDtypeStruct((1, 1), bool),
    rows=jax.ShapeDtypeStruct((1, 1), jnp.int32),
    **dict.fromkeys(columns, token),
  )


def _needs_reference(loss: Callable) -> bool:
  """Returns whether the loss rejects ref_log_probs=None."""
  try:
    _loss_shapes(loss, ref_log_probs=False)
  except ValueError:
    return True
  return False


def _metric_names(
  loss: Callable, with_reference: bool, columns: tuple[str, ...]
) -> tuple[str, ...]:
  return tuple(_loss_shapes(loss, with_reference, columns)[1])


def _finish(sums: dict, updates: int) -> dict[str, float]:
  sums = {name: float(value) for name, value in sums.items()}
  tokens = sums.pop('update/tokens')
  skipped = sums.pop('update/skipped')
  in_row = sums.pop('update/skipped_in_row')
  longest_in_row = sums.pop('update/most_skipped_in_row')
  del sums['update/objective']
  grad_norm = sums.pop('update/grad_norm') / max(updates - skipped, 1)
  means = {
    name: value if name.endswith('/max') else value / max(tokens, 1)
    for name, value in sums.items()
  }
  return means | {
    'update/grad_norm': grad_norm,
    'update/skipped': skipped,
    'update/skipped_in_row': in_row,
    'update/most_skipped_in_row': longest_in_row,
    'update/count': float(updates),
    'update/tokens': tokens,
  }
