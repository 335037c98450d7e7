"""The update: rows and advantages in, new parameters and metrics out.

Rows on the host are shuffled and cut into mini-batches, one optimizer step
each; these into microbatches of few shapes, whose gradients are summed in
float32. The loss's normaliser is known before the first microbatch, so that
neither microbatch size nor length bucket nor mesh nor shared prompts change the
loss. Knows no environment, no text and no algorithm.
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

from gigpo_jax import batch, hosts, losses, packs
from gigpo_jax import mesh as mesh_lib
from gigpo_jax.models import lora, qwen

# Completion tokens of a shard whose logits exist at a time.
_LOGITS_AT_ONCE = 512


@flax.struct.dataclass
class TrainState:
  """All that training changes on the device.

  Attributes:
    params: float32; of a network with adapters, these alone.
    opt_state: of the optimizer.
    updates: optimizer steps taken, int32; skipped ones do not count.
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
    learning_rate: reached after the warm-up.
    warmup_updates: update k of the warm-up, from 1, takes k / warmup_updates
      of the learning rate; 0 is none.
    decay_updates: the learning rate falls on a line, to reach zero after as
      many updates; 0 keeps it constant.
    b1: decay of the gradient's mean.
    b2: decay of the gradient's square.
    weight_decay: of all parameters, times the learning rate.
    max_grad_norm: gradients longer than this are scaled down to it.
    mu_dtype: in which the gradient's mean is kept.
  """

  def schedule(count):
    rate = learning_rate * jnp.minimum(1, (count + 1) / (warmup_updates or 1))
    if decay_updates:
      rate *= jnp.maximum(0, 1 - count / decay_updates)
    return rate

  def clip(grads, params=None):
    # optax's own divides each number, for which XLA keeps a copy of them all.
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
  """Compiled programs for updates and log-probs of one model on one mesh.

  Attributes:
    base: parameters of a network with adapters that are not trained.
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
    """Prepares; compiles nothing yet.

    Args:
      config: shape of the model.
      mesh: devices; rows of a microbatch are spread over `mesh.BATCH`.
      loss: called by name with the arguments of `losses.policy_gradient` up
        to rows; returns a loss for each token and metrics for each token.
      optimizer: see `adamw`.
      minibatch_rows: most rows of an update; with shared prompts those of the
        last prompt may be more.
      microbatch_rows: rows in memory at once; with shared prompts, packs.
      length_buckets: rising; lengths that rows are padded to.
      max_completion_tokens: C.
      temperature: by which log-probs and entropies are meant.
      aggregation: of tokens into the loss; see `losses.row_weights`.
      share_prompts: whether rows with the same prompt go into the same update
        and pay for it once.
      columns: names of further arguments of the loss.
      outputs: of parameters and the hidden state ahead of each token, what the
        loss has in place of log-probs and entropies; None: these.
      seed: of the shuffling.

    Raises:
      ValueError: if a size does not fit, or the aggregation is unknown.
    """
    row_shards = mesh_lib.batch_shards(mesh)
    if microbatch_rows % row_shards:
      raise ValueError(
        f'learner.microbatch_rows={microbatch_rows}: mesh axes '
        f'{", ".join(mesh_lib.BATCH)} share its rows; must be a multiple of '
        f'{row_shards}'
      )
    losses.row_weights(np.ones(1, np.int32), 1, aggregation)
    self._config, self._mesh = config, mesh
    self._loss, self._optimizer = loss, optimizer
    self._columns, self._outputs = tuple(columns), outputs
    self._minibatch_rows = minibatch_rows
    self._packer = packs.Packer(
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
    shardings = mesh_lib.shardings(mesh, qwen.logical_axes(config))
    self._param_shardings, self._base_shardings = self._split(shardings)
    self._state_shardings = self._shardings_of_state()
    self.base: dict = {}
    self._jit()

  def _split(self, params: dict) -> tuple[dict, dict]:
    """Returns what is trained, and what is not."""
    return lora.split(params) if self._config.adapters else (params, {})

  def _shapes(self) -> tuple[dict, dict]:
    """Returns shapes of what is trained, and of what is not, float32."""
    init = functools.partial(qwen.init, self._config)
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
      # Not a part of `apply`, which would make them beside the gradients.
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
    return hosts.settle(self._programs[name](*args, **kwargs))

  @property
  def compilations(self) -> int:
    """Programs compiled so far."""
    return sum(f._cache_size() for f in self._programs.values())

  def init(self, params: dict) -> TrainState:
    """Returns a fresh state; takes over the parameters, which it may donate.

    Args:
      params: of the network; of one with adapters, all but these are frozen,
        and kept here.
    """
    params, self.base = self._split(params)
    with jax.set_mesh(self._mesh):
      params = jax.device_put(params, self._param_shardings)
      self.base = jax.device_put(self.base, self._base_shardings)
      updates = mesh_lib.place(np.zeros((), np.int32), self._replicated)
      return TrainState(params, self._run('init', params), updates)

  def num_programs(self, *, reference: bool = False) -> int:
    """Returns how many calls `warm_up` counts, with a reference or without."""
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
      reference: frozen parameters, where their type is another.
      advance: called after each of `num_programs` programs.

    Returns:
      The state as it was.
    """
    held: dict = {'state': state}
    del state
    for call in self._warm_up_calls(held, reference):
      with jax.set_mesh(self._mesh):
        call()
      advance()
    return held['state']

  def _warm_up_calls(
    self, held: dict, reference: dict | None
  ) -> Iterator[Callable[[], object]]:
    """Yields calls that compile a program each; to be made in this order.

    Args:
      held: the state; holds gradients and sums from the first call on.
      reference: see `warm_up`.
    """

    def zeros() -> None:
      params = held['state'].params
      held['grads'], held['sums'] = self._run('zeros', params, np.float32(0))

    def log_probs(params: dict | None, length: int) -> None:
      params = held['state'].params if params is None else params
      self._log_probs(params, self._packer.empty(length))

    def accumulate(length: int) -> None:
      empty = self._packer.empty(length)
      held['grads'], held['sums'] = self._run(
        'accumulate',
        held['state'].params,
        self.base,
        self._put(empty, self._no_columns(empty)),
        grads=held['grads'],
        sums=held['sums'],
      )

    def apply() -> None:
      # An update that is no number is skipped.
      grads = self._run('fill', held.pop('grads'), np.float32(np.nan))
      held['state'], _ = self._run(
        'apply', state=held.pop('state'), grads=grads, sums=held.pop('sums')
      )
      jax.block_until_ready(held['state'])

    yield zeros
    for length in self._length_buckets:
      yield functools.partial(log_probs, None, length)
      if reference is not None:
        yield functools.partial(log_probs, reference, length)
      yield functools.partial(accumulate, length)
    yield apply

  def describe(self) -> tuple[TrainState, dict]:
    """Returns shapes, types and shardings of a state, and of `base`."""
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
      mesh_lib.described(state, self._state_shardings),
      mesh_lib.described(base, self._base_shardings),
    )

  def lower(self) -> dict[str, jax.stages.Lowered]:
    """Returns the largest programs, by name; nothing is compiled, nothing runs.

    The mesh's devices need not be there.
    """

    def everywhere(tree, sharding):
      return mesh_lib.described(tree, jax.tree.map(lambda _: sharding, tree))

    state, base = self.describe()
    empty = self._packer.empty(self._length_buckets[-1])
    columns = self._no_columns(empty)
    rows = empty.inputs() | {n: empty.take(x) for n, x in columns.items()}
    rows = everywhere(rows, self._row_sharding)
    sums = everywhere(
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

    At the learner's temperature; 0 past the end of a completion and in padding
    rows.

    Args:
      params: in any float type; of a network with adapters, these, or nothing
        for the network without them.
      rows: of an iteration.
    """
    result = np.zeros(rows.sampler_log_probs.shape, np.float32)
    index = np.flatnonzero(rows.real)
    with jax.set_mesh(self._mesh):
      pending = [
        (microbatch, self._log_probs(params, microbatch))
        for microbatch in self._packer.microbatches(rows, index)
      ]
    for microbatch, values in pending:
      microbatch.put(mesh_lib.fetch(values), result)
    return result

  def _log_probs(self, params: dict, microbatch: packs.Microbatch) -> jax.Array:
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
    """Passes once over the rows; one optimizer step for each mini-batch.

    Args:
      state: donated.
      rows: of the iteration; padding rows are left out.
      advantages: one a row, [R], or a token, [R, C].
      old_log_probs: under the policy that the ratio compares with, [R, C].
      ref_log_probs: under the reference, [R, C]; None where the loss has no
        use for it.
      iteration: with the seed it determines the shuffling.
      importance: weight of each token's surrogate, [R, C]; None is 1.
      skipped_before: how many of the updates before were skipped in a row.
      **further: the loss's further arguments, of rows or of tokens.

    Returns:
      The new state and metrics: means over all trained tokens ('/max':
      maxima), and counts of updates and tokens; of updates skipped because loss
      or gradient was not finite, of these the last ones in a row, and the most
      in a row.

    Raises:
      ValueError: if the loss needs a reference and there is none, or a row
        is longer than the last bucket.
    """
    if self._with_reference and ref_log_probs is None:
      raise ValueError('ref_log_probs=None: the loss compares with a reference')
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
    """Returns how far the sampler's log-probs are from the learner's.

    Args:
      params: that were sampled from.
      rows: of the iteration.
      old_log_probs: the learner's, [R, C]; if they are the sampler's own, the
        learner computes those of one microbatch, the longest rows.

    Returns:
      Mean and maximum of a token's difference, without its sign, and the mean
      over rows of their probability ratio, learner to sampler.
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
    tokens = np.abs(difference[mask])
    ratios = np.exp(np.where(mask, difference, 0).sum(axis=1))
    return {
      'sampler/log_prob_difference_mean': float(tokens.mean()),
      'sampler/log_prob_difference_max': float(tokens.max()),
      'sampler/sequence_ratio_mean': float(ratios.mean()),
      'sampler/sequence_ratio_max': float(ratios.max()),
    }

  # On the host: which rows go where.

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
    # What belongs together goes where it begins.
    parts = np.searchsorted(edges, starts, side='right')
    return [
      np.concatenate(
        [unit for unit, p in zip(units, parts, strict=True) if p == n]
      )
      for n in np.unique(parts)
    ]

  def _weights(self, rows, minibatch) -> np.ndarray:
    weights = np.zeros(len(rows.groups), np.float32)
    lengths = (rows.lengths - rows.prompt_lengths)[minibatch]
    weights[minibatch] = losses.row_weights(
      lengths, self._max_completion, self._aggregation
    )
    return weights

  def _no_columns(self, microbatch: packs.Microbatch) -> dict[str, np.ndarray]:
    names = ['advantages', 'weights', 'old_log_probs', 'importance']
    if self._with_reference:
      names.append('ref_log_probs')
    row = np.zeros(1, np.float32)
    return dict.fromkeys((*names, *self._columns), row)

  def _put(self, microbatch: packs.Microbatch, columns: dict) -> dict:
    """Puts a microbatch on the devices, and what belongs to its tokens."""
    arrays = microbatch.inputs()
    arrays |= {name: microbatch.take(x) for name, x in columns.items()}
    return mesh_lib.place_rows(self._mesh, arrays)

  # On the device: traced once for each length.

  def _forward(self, params, base, rows, sums=None):
    config = self._config
    if config.adapters and not params:
      config = dataclasses.replace(config, adapters=None)
    params = lora.join(base, params) if base else params
    if sums is not None:
      added = {name: sums[name] for name in params if name != 'layers'}
      params |= qwen.adding({name: params[name] for name in added}, added)
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
      chunk=_LOGITS_AT_ONCE,
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
      changes, opt_state = self._optimizer.update(
        grads, state.opt_state, state.params
      )
      params = optax.apply_updates(state.params, changes)
      return TrainState(params, opt_state, state.updates + 1)

    # A choice of each number would keep the old ones beside the new.
    state = jax.lax.cond(finite, step, lambda state, _: state, state, grads)
    sums = dict(sums)
    sums['update/grad_norm'] += jnp.where(finite, norm, 0)
    sums['update/skipped'] += 1.0 - finite
    in_row = jnp.where(finite, 0.0, sums['update/skipped_in_row'] + 1)
    most = jnp.maximum(sums['update/most_skipped_in_row'], in_row)
    sums['update/skipped_in_row'] = in_row
    sums['update/most_skipped_in_row'] = most
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
    # A weak type would compile every program a second time.
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
  """Whether the loss refuses to do without a reference policy."""
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
  most_in_row = sums.pop('update/most_skipped_in_row')
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
    'update/most_skipped_in_row': most_in_row,
    'update/count': float(updates),
    'update/tokens': tokens,
  }
