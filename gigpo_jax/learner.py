"""The update: rows and advantages in, new parameters and metrics out.

Rows on the host are shuffled and cut into mini-batches, one optimizer step
each; these into microbatches of few shapes, whose gradients are summed in
float32. The loss's normaliser is known before the first microbatch, so that
neither microbatch size nor length bucket nor mesh changes the loss. Knows no
environment, no text and no algorithm.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from gigpo_jax import batch, losses
from gigpo_jax import mesh as mesh_lib
from gigpo_jax.models import qwen


@flax.struct.dataclass
class TrainState:
  """All that training changes on the device.

  Attributes:
    params: float32.
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
  """

  def schedule(count):
    rate = learning_rate * jnp.minimum(1, (count + 1) / (warmup_updates or 1))
    if decay_updates:
      rate *= jnp.maximum(0, 1 - count / decay_updates)
    return rate

  return optax.chain(
    optax.clip_by_global_norm(max_grad_norm),
    optax.adamw(schedule, b1=b1, b2=b2, weight_decay=weight_decay),
  )


class Learner:
  """Compiled programs for updates and log-probs of one model on one mesh."""

  def __init__(
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
    seed: int = 0,
  ):
    """Prepares; compiles nothing yet.

    Args:
      config: shape of the model.
      mesh: devices; rows of a microbatch go over (data, fsdp).
      loss: called by name with the arguments of `losses.policy_gradient` up
        to mask; returns a loss for each token and metrics for each token.
      optimizer: see `adamw`.
      minibatch_rows: most rows of an update.
      microbatch_rows: rows in memory at once.
      length_buckets: rising; lengths that rows are padded to.
      max_completion_tokens: C.
      temperature: by which log-probs and entropies are meant.
      aggregation: of tokens into the loss; see `losses.row_weights`.
      seed: of the shuffling.

    Raises:
      ValueError: if a size does not fit, or the aggregation is unknown.
    """
    row_shards = mesh_lib.batch_shards(mesh)
    if microbatch_rows % row_shards:
      raise ValueError(
        f'learner.microbatch_rows={microbatch_rows}: mesh axes data and fsdp '
        f'share its rows; must be a multiple of {row_shards}'
      )
    losses.row_weights(np.ones(1, np.int32), 1, aggregation)
    self._config, self._mesh = config, mesh
    self._loss, self._optimizer = loss, optimizer
    self._minibatch_rows = minibatch_rows
    self._microbatch_rows = microbatch_rows
    self._length_buckets = tuple(length_buckets)
    self._max_completion = max_completion_tokens
    self._temperature = temperature
    self._aggregation = aggregation
    self._seed = seed
    self._with_reference = _needs_reference(loss)
    self._metric_names = _metric_names(loss, self._with_reference)
    self._row_sharding = mesh_lib.batch_sharding(mesh)
    self._replicated = jax.NamedSharding(mesh, jax.P())
    self._param_shardings = mesh_lib.shardings(mesh, qwen.logical_axes(config))
    self._state_shardings = self._shardings_of_state()
    self._jit()

  def _shardings_of_state(self) -> TrainState:
    params = jax.eval_shape(
      functools.partial(qwen.init, self._config), jax.random.key(0)
    )
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
        lambda params: (jax.tree.map(jnp.zeros_like, params), self._sums()),
        out_shardings=(grads, self._replicated),
      ),
      'log_probs': jax.jit(
        lambda params, rows: self._forward(params, rows)[0],
        out_shardings=self._row_sharding,
      ),
      'accumulate': jax.jit(
        self._accumulate,
        donate_argnames=('grads', 'sums'),
        out_shardings=(grads, self._replicated),
      ),
      'apply': jax.jit(
        self._apply,
        donate_argnames=('state', 'grads', 'sums'),
        out_shardings=(state, grads, self._replicated),
      ),
    }

  @property
  def compilations(self) -> int:
    """Programs compiled so far."""
    return sum(f._cache_size() for f in self._programs.values())

  def init(self, params: dict) -> TrainState:
    """Returns a fresh state; takes over the parameters, which it may donate."""
    with jax.set_mesh(self._mesh):
      params = jax.device_put(params, self._param_shardings)
      updates = mesh_lib.place(np.zeros((), np.int32), self._replicated)
      return TrainState(params, self._programs['init'](params), updates)

  def warm_up(self, state: TrainState, reference: dict | None = None) -> None:
    """Compiles every program, so that none compiles later.

    Args:
      state: shapes and types of the parameters; unchanged.
      reference: frozen parameters, where their type is another.
    """
    with jax.set_mesh(self._mesh):
      grads, sums = self._programs['zeros'](state.params)
      for length in self._length_buckets:
        rows = self._put(self._no_rows(length))
        inputs = {name: rows[name] for name in _INPUTS}
        for params in (state.params, reference):
          if params is not None:
            self._programs['log_probs'](params, inputs)
        grads, sums = self._programs['accumulate'](
          state.params, rows, grads=grads, sums=sums
        )
      # A copy, for apply would donate the caller's state.
      copy = jax.device_put(
        jax.tree.map(jnp.copy, state), self._state_shardings
      )
      jax.block_until_ready(
        self._programs['apply'](state=copy, grads=grads, sums=sums)
      )

  def log_probs(self, params: dict, rows: batch.Rows) -> np.ndarray:
    """Returns log-probs of all completion tokens, [R, C] float32.

    Of `params`, in any float type, at the learner's temperature; 0 past the
    end of a completion and in padding rows.
    """
    result = np.zeros(rows.sampler_log_probs.shape, np.float32)
    with jax.set_mesh(self._mesh):
      pending = [
        (
          index,
          self._programs['log_probs'](
            params, self._put(self._inputs(rows, index))
          ),
        )
        for index in self._microbatches(rows, np.flatnonzero(rows.real))
      ]
    for index, values in pending:
      result[index] = mesh_lib.fetch(values)[: len(index)]
    return np.where(rows.completion_mask, result, 0)

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
  ) -> tuple[TrainState, dict[str, float]]:
    """Passes once over the rows; one optimizer step for each mini-batch.

    Args:
      state: donated.
      rows: of the iteration; padding rows are left out.
      advantages: one a row, [R].
      old_log_probs: under the policy that the ratio compares with, [R, C].
      ref_log_probs: under the reference, [R, C]; None where the loss has no
        use for it.
      iteration: with the seed it determines the shuffling.
      importance: weight of each token's surrogate, [R, C]; None is 1.

    Returns:
      The new state and metrics: means over all trained tokens ('/max':
      maxima), and counts of updates and tokens.

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
    if self._with_reference:
      columns['ref_log_probs'] = ref_log_probs
    minibatches = self._minibatches(rows, iteration)
    with jax.set_mesh(self._mesh):
      grads, sums = self._programs['zeros'](state.params)
      for minibatch in minibatches:
        weights = self._weights(rows, minibatch)
        for index in self._microbatches(rows, minibatch):
          microbatch = self._inputs(rows, index) | {
            name: self._pad(column[index]) for name, column in columns.items()
          }
          microbatch['weights'] = self._pad(weights[index])
          grads, sums = self._programs['accumulate'](
            state.params, self._put(microbatch), grads=grads, sums=sums
          )
        state, grads, sums = self._programs['apply'](
          state=state, grads=grads, sums=sums
        )
    return state, _finish(jax.device_get(sums), len(minibatches))

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
      index = next(self._microbatches(rows, index))
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
    index = np.random.default_rng((self._seed, iteration)).permutation(index)
    count = math.ceil(len(index) / self._minibatch_rows)
    return np.array_split(index, count)

  def _microbatches(self, rows, index) -> Iterator[np.ndarray]:
    """Yields rows of similar length, the longest first."""
    index = index[np.argsort(-rows.lengths[index], kind='stable')]
    for start in range(0, len(index), self._microbatch_rows):
      yield index[start : start + self._microbatch_rows]

  def _weights(self, rows, minibatch) -> np.ndarray:
    weights = np.zeros(len(rows.groups), np.float32)
    lengths = (rows.lengths - rows.prompt_lengths)[minibatch]
    weights[minibatch] = losses.row_weights(
      lengths, self._max_completion, self._aggregation
    )
    return weights

  def _inputs(self, rows, index) -> dict[str, np.ndarray]:
    longest = rows.lengths[index].max()
    length = next((b for b in self._length_buckets if b >= longest), None)
    if length is None:
      raise ValueError(
        f'learner.length_buckets={self._length_buckets}: a row has {longest} '
        'tokens; the last bucket must hold it'
      )
    tokens = rows.tokens[index, :length]
    missing = length - tokens.shape[1]
    return {
      'tokens': self._pad(np.pad(tokens, ((0, 0), (0, missing)))),
      # Padding rows get one token of prompt and no completion.
      'prompt_lengths': self._pad(rows.prompt_lengths[index], 1),
      'lengths': self._pad(rows.lengths[index], 1),
    }

  def _pad(self, column: np.ndarray, value=0) -> np.ndarray:
    missing = self._microbatch_rows - len(column)
    widths = ((0, missing),) + ((0, 0),) * (column.ndim - 1)
    return np.pad(column, widths, constant_values=value)

  def _no_rows(self, length: int) -> dict[str, np.ndarray]:
    B, C = self._microbatch_rows, self._max_completion
    zeros = np.zeros((B, C), np.float32)
    rows = {
      'tokens': np.zeros((B, length), np.int32),
      'prompt_lengths': np.ones(B, np.int32),
      'lengths': np.ones(B, np.int32),
      'advantages': zeros[:, 0],
      'weights': zeros[:, 0],
      'old_log_probs': zeros,
      'importance': zeros,
    }
    return rows | ({'ref_log_probs': zeros} if self._with_reference else {})

  def _put(self, arrays):
    return mesh_lib.place_rows(self._mesh, arrays)

  # On the device: traced once for each length.

  def _forward(self, params, rows):
    return qwen.completion_log_probs(
      self._config,
      params,
      rows['tokens'],
      rows['prompt_lengths'],
      rows['lengths'],
      max_completion=self._max_completion,
      temperature=self._temperature,
    )

  def _accumulate(self, params, rows, *, grads, sums):
    completions = rows['lengths'] - rows['prompt_lengths']
    mask = jnp.arange(self._max_completion) < completions[:, None]

    def loss_of(params):
      log_probs, entropies = self._forward(params, rows)
      loss, metrics = self._loss(
        log_probs=log_probs,
        entropies=entropies,
        old_log_probs=rows['old_log_probs'],
        ref_log_probs=rows.get('ref_log_probs'),
        advantages=rows['advantages'],
        importance=rows['importance'],
        mask=mask,
      )
      loss = jnp.where(mask, loss, 0)
      total = jnp.sum(loss * rows['weights'][:, None])
      return total, metrics | {'loss/total': loss}

    new_grads, metrics = jax.grad(loss_of, has_aux=True)(params)
    grads = jax.tree.map(
      lambda old, new: old + new.astype(jnp.float32), grads, new_grads
    )
    sums = dict(sums)
    for name, values in metrics.items():
      if name.endswith('/max'):
        largest = jnp.max(jnp.where(mask, values, -jnp.inf))
        sums[name] = jnp.maximum(sums[name], largest)
      else:
        sums[name] += jnp.sum(jnp.where(mask, values, 0))
    sums['update/tokens'] += jnp.sum(mask, dtype=jnp.float32)
    return grads, sums

  def _apply(self, *, state, grads, sums):
    norm = optax.global_norm(grads)
    finite = jnp.isfinite(norm)
    changes, opt_state = self._optimizer.update(
      grads, state.opt_state, state.params
    )
    params = optax.apply_updates(state.params, changes)
    stepped = TrainState(params, opt_state, state.updates + 1)
    state = jax.tree.map(
      lambda new, old: jnp.where(finite, new, old), stepped, state
    )
    sums = dict(sums)
    sums['update/grad_norm'] += jnp.where(finite, norm, 0)
    sums['update/skipped'] += 1.0 - finite
    return state, jax.tree.map(jnp.zeros_like, grads), sums

  def _sums(self):
    names = (
      *self._metric_names,
      'loss/total',
      'update/tokens',
      'update/grad_norm',
      'update/skipped',
    )
    # A weak type would compile every program a second time.
    return {
      name: jnp.full((), -jnp.inf if name.endswith('/max') else 0, jnp.float32)
      for name in names
    }


_INPUTS = ('tokens', 'prompt_lengths', 'lengths')


def _loss_shapes(loss, ref_log_probs):
  token = jax.ShapeDtypeStruct((1, 1), jnp.float32)
  return jax.eval_shape(
    loss,
    log_probs=token,
    entropies=token,
    old_log_probs=token,
    ref_log_probs=token if ref_log_probs else None,
    advantages=jax.ShapeDtypeStruct((1,), jnp.float32),
    importance=token,
    mask=jax.ShapeDtypeStruct((1, 1), bool),
  )


def _needs_reference(loss: Callable) -> bool:
  """Whether the loss refuses to do without a reference policy."""
  try:
    _loss_shapes(loss, ref_log_probs=False)
  except ValueError:
    return True
  return False


def _metric_names(loss: Callable, with_reference: bool) -> tuple[str, ...]:
  return tuple(_loss_shapes(loss, with_reference)[1])


def _finish(sums: dict, updates: int) -> dict[str, float]:
  sums = {name: float(value) for name, value in sums.items()}
  tokens = sums.pop('update/tokens')
  skipped = sums.pop('update/skipped')
  grad_norm = sums.pop('update/grad_norm') / max(updates - skipped, 1)
  means = {
    name: value if name.endswith('/max') else value / max(tokens, 1)
    for name, value in sums.items()
  }
  return means | {
    'update/grad_norm': grad_norm,
    'update/skipped': skipped,
    'update/count': float(updates),
    'update/tokens': tokens,
  }
