"""Losses per token, and the weights with which an update sums them.

A loss maps the outputs of a model and a `TokenBatch` to one loss per token and
metrics with one value per token; see `token_batch.Loss`. It is independent of
model, optimizer and devices. The sum of loss * row weight over all microbatches
is the loss of the update, however rows are split; see `row_weights`.

Shapes [S, T] are those of `token_batch`: shards of a microbatch, tokens of a
shard.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from envs import checks
from gigpo_jax import (
  arrays,
  deprecated,
  entropy_band,
  kl,
  options,
  token_batch,
)
from gigpo_jax.arrays import typechecked
from gigpo_jax.entropy_band import EntropyBand

RATIO_LEVELS = ('token', 'row')
SURROGATES = ('clipped', 'cispo')
AGGREGATIONS = (
  'token_mean',
  'sequence_mean',
  'sequence_sum',
  'fixed_length',
)

# Columns that every loss of a policy can read.
POLICY_COLUMNS = ('advantages', 'old_log_probs', 'importance')
KL_COLUMN = 'kl_factor'
# All columns that a run provides to the losses that list them.
TRAINING_COLUMNS = (
  *POLICY_COLUMNS,
  'ref_log_probs',
  KL_COLUMN,
  *entropy_band.COLUMNS,
)


# Of a token; e^80 times an advantage is finite in float32.
_MAX_LOG_RATIO = 80.0


def clip_range(low: float, high: float | None) -> tuple[float, float]:
  """Returns the bounds 1 - low and 1 + high of ratios; high of None is low."""
  return 1 - low, 1 + (low if high is None else high)


@typechecked
def clipped_surrogate(
  log_ratios: Float[Array, '...'],
  advantages: Float[Array, '...'],
  *,
  clip_epsilon: float = 0.2,
  clip_epsilon_high: float | None = None,
  dual_clip: float | None = None,
) -> Float[Array, '...']:
  """Returns the negated clipped objective of PPO (arXiv:1707.06347, Eq. 7).

  -min(rho A, clip(rho, 1 - low, 1 + high) A). A dual clip c (arXiv:1912.09729,
  Eq. 5) bounds it by -c A for A < 0, so a very large ratio contributes no
  gradient.

  Args:
    log_ratios: log rho, the log-prob minus that before the update.
    advantages: A, broadcast to tokens.
    clip_epsilon: low.
    clip_epsilon_high: high ("clip-higher", arXiv:2503.14476); None uses low.
    dual_clip: c, above 1; None disables the dual clip.
  """
  # An infinite ratio would have the gradient NaN.
  ratio = jnp.exp(jnp.minimum(log_ratios, _MAX_LOG_RATIO))
  clipped = jnp.clip(ratio, *clip_range(clip_epsilon, clip_epsilon_high))
  loss = -jnp.minimum(ratio * advantages, clipped * advantages)
  if dual_clip is not None:
    bound = jnp.where(advantages < 0, -dual_clip * advantages, jnp.inf)
    loss = jnp.minimum(loss, bound)
  return loss


@typechecked
def cispo(
  log_ratios: Float[Array, '...'],
  log_probs: Float[Array, '...'],
  advantages: Float[Array, '...'],
  *,
  clip_epsilon: float = 0.2,
  clip_epsilon_high: float | None = None,
) -> Float[Array, '...']:
  """Returns the negated objective of CISPO (MiniMax-M1, arXiv:2506.13585).

  -clip(rho, 1 - low, 1 + high) A log pi, in which the clipped ratio is a
  constant: clipping limits the weight of a token, but drops none. Arguments as
  for `clipped_surrogate`; low of 1 leaves ratios unbounded below, as in the
  paper.
  """
  bounds = clip_range(clip_epsilon, clip_epsilon_high)
  weights = jnp.clip(jnp.exp(log_ratios), *bounds)
  return -jax.lax.stop_gradient(weights) * advantages * log_probs


@typechecked
def truncated_importance(
  old_log_probs: Float[np.ndarray, 'R C'],
  sampler_log_probs: Float[np.ndarray, 'R C'],
  tis_clip: float,
  tis_level: str = 'token',
) -> Float[np.ndarray, 'R C']:
  """Returns importance weights that correct for another sampling policy.

  min(pi_learner / pi_sampler, clip) per token or row, with the learner's policy
  before the update. The sampler's arithmetic (bf16, int8) differs slightly from
  the learner's. This is truncated importance sampling as in Yao et al., "Your
  efficient RL framework secretly brings you off-policy RL training" (2025).
  With `carry_over`, an earlier policy may have sampled the token. Weight and
  clipped surrogate are then the decoupled objective of Hilton et al.
  (arXiv:2110.00641), which AReaL (arXiv:2505.24298) uses, with truncation.

  Args:
    old_log_probs: log-probs of the learner before the update.
    sampler_log_probs: log-probs of the policy that sampled the tokens.
    tis_clip: upper bound of a weight, above 0.
    tis_level: 'token', or 'row' for the product over a row's tokens; both
      log-probs are 0 past the completion.
  """
  options.check_choice('tis_level', tis_level, RATIO_LEVELS)
  difference = old_log_probs - sampler_log_probs
  if tis_level == 'row':
    total = np.sum(difference, axis=1, keepdims=True)
    difference = np.broadcast_to(total, difference.shape)
  ratio = np.exp(np.minimum(difference, np.float32(_MAX_LOG_RATIO)))
  return np.minimum(ratio, np.float32(tis_clip)).astype(np.float32)


@typechecked
def row_sums(
  values: Float[Array, 'S T'],
  mask: Bool[Array, 'S T'],
  row_ids: Int[Array, 'S T'],
) -> Float[Array, 'S T']:
  """Returns, for each token, the sum over the masked tokens of its row.

  Args:
    values: values of tokens; ignored where mask is False.
    mask: True for the tokens to add.
    row_ids: index of a token's row, in [0, T), among the rows packed into the
      same shard.
  """
  values = values.astype(jnp.float32)
  return jax.vmap(arrays.segment_sum)(values, row_ids, mask)


@typechecked
def row_means(
  values: Float[Array, 'S T'],
  mask: Bool[Array, 'S T'],
  row_ids: Int[Array, 'S T'],
) -> Float[Array, 'S T']:
  """Returns, for each token, the mean over the masked tokens of its row.

  Arguments as for `row_sums`.
  """
  sums = row_sums(values, mask, row_ids)
  return sums / jnp.maximum(row_sums(jnp.ones_like(sums), mask, row_ids), 1)


@dataclasses.dataclass(frozen=True)
class PolicyGradient:
  """`policy_gradient`, the loss of GiGPO (arXiv:2505.10978, Eq. 9) and GRPO.

  Surrogate + kl_weight * KL - entropy_weight * (entropy - penalty of the
  entropy band).

  A token's surrogate uses the ratio of that token or of its row. The ratio of
  a row is the geometric mean of its tokens' ratios, as in GSPO
  (arXiv:2507.18071, Eq. 7); as a row is a turn, this is also Turn-PPO. The
  gradient of a row's ratio flows through each token's own log-prob
  (GSPO-token, section 4.3), so that truncated importance weights stay per
  token. Without these weights, and with loss.aggregation=sequence_mean, the
  gradient is that of GSPO; token_mean weights rows by their length.

  Differs from the paper: adds an entropy bonus, as the authors' code does.

  Attributes:
    surrogate: clipped is PPO's clipped surrogate; cispo has clipped ratios as
      constant weights. TRL's cispo with epsilon_high=E has no lower bound:
      clip_epsilon=1 and clip_epsilon_high=E-1.
    ratio_level: token has one ratio per token; row has their geometric mean per
      row, which is nearer to 1 the longer the row is. GSPO clips it with
      clip_epsilon=3e-4 and clip_epsilon_high=4e-4, SAMPO, for turns, with 3e-3
      and 4e-3; bounds such as 0.2 hardly ever clip it.
    clip_epsilon: clipping bound of ratios; 0.2 in the released code.
    clip_epsilon_high: upper clipping bound ("clip-higher", such as 0.28). None:
      `clip_epsilon`.
    dual_clip: bound of the ratio for negative advantages, such as 3. None: off,
      as in the paper.
    kl_weight: beta, the weight of the KL, 0.01 in the paper; 0 disables the KL
      term and needs no reference policy.
    kl_estimator: k3, k2 or abs; see `gigpo_jax/kl.py`.
    kl_clamp: largest KL estimate of a token, above which the KL has no
      gradient; 10 in the released code. None: off, as in the paper.
    kl_target: not None if `kl.Control` adapts the weight of the KL.
    entropy_weight: weight of the entropy bonus, 0.001 in the released code; 0
      disables it.
    entropy_band: penalty on entropy outside a band; see `EntropyBand`.
  """

  surrogate: str = options.choice('clipped', SURROGATES)
  ratio_level: str = options.choice('token', RATIO_LEVELS)
  clip_epsilon: float = options.number(0.2, above=0, high=1)
  clip_epsilon_high: float | None = options.number(None, above=0)
  dual_clip: float | None = options.number(None, above=1, note='None is off')
  kl_weight: float = options.number(
    0.01, low=0, note='0 drops the reference policy'
  )
  # k1 has an error of its own, without a KL none.
  kl_estimator: str = options.field(
    'k3',
    lambda name: name in kl.ESTIMATORS,
    'unknown; must be one of k2, k3, abs',
  )
  kl_clamp: float | None = options.number(
    None, above=0, high=80, note='None is off'
  )
  kl_target: float | None = None
  entropy_weight: float = options.number(0.001, low=0)
  entropy_band: EntropyBand = EntropyBand()

  def __post_init__(self):
    options.check(self)
    if self.kl_weight and self.kl_estimator == 'k1':
      raise ValueError(
        'kl_estimator=k1: its gradient is 0 on average; must be k2, k3 or abs'
      )
    if self.surrogate == 'cispo' and self.dual_clip is not None:
      raise ValueError(
        f'dual_clip={self.dual_clip}: surrogate=cispo has none; must be None'
      )
    if self.entropy_band.weight and not self.entropy_weight:
      raise ValueError(
        f'entropy_band.weight={self.entropy_band.weight}: is a multiple of '
        'entropy_weight; must be 0, or entropy_weight above 0'
      )

  @property
  def columns(self) -> tuple[str, ...]:
    """Names of the columns that the loss reads."""
    reference = ('ref_log_probs',) if self.kl_weight else ()
    if self.kl_weight and self.kl_target is not None:
      reference += (KL_COLUMN,)
    band = entropy_band.COLUMNS if self.entropy_band.weight else ()
    return (*POLICY_COLUMNS, *reference, *band)

  def __call__(
    self, outputs: token_batch.PolicyOutputs, tokens: token_batch.TokenBatch
  ) -> token_batch.TokenLoss:
    """Returns the loss and metrics of each token."""
    mask = tokens.mask
    # Mask first: 0 times an infinite ratio would be NaN, also in the gradient.
    token_log_ratios = jnp.where(
      mask, outputs.log_probs - tokens.old_log_probs, 0
    )
    log_ratios = self._surrogate_log_ratios(token_log_ratios, tokens)
    # The surrogate is linear in the advantage, so the weight can scale that.
    advantages = jnp.where(mask, tokens.advantages * tokens.importance, 0)
    surrogate = self._surrogate(
      log_ratios, jnp.where(mask, outputs.log_probs, 0), advantages
    )
    entropy = jnp.where(mask, outputs.entropies, 0)
    penalty = jnp.zeros_like(entropy)
    metrics = {'loss/policy': surrogate, 'loss/entropy': entropy}
    if self.entropy_band.weight:
      penalty = self.entropy_band.penalty(entropy, tokens)
      metrics['loss/entropy_outside'] = penalty
    loss = surrogate - self.entropy_weight * (entropy - penalty)
    # KL(old policy || current policy), per token also with row ratios.
    metrics['ratio/kl'] = jnp.expm1(token_log_ratios) - token_log_ratios
    metrics |= self._ratio_metrics(jnp.exp(log_ratios), advantages)
    if self.kl_weight:
      estimates = kl.estimate(
        jnp.where(mask, outputs.log_probs, 0),
        jnp.where(mask, tokens.ref_log_probs, 0),
        self.kl_estimator,
        self.kl_clamp,
      )
      metrics['loss/kl'] = estimates
      if self.kl_target is not None:
        estimates *= tokens.extras[KL_COLUMN]
      loss += self.kl_weight * estimates
    metrics = {k: v.astype(jnp.float32) for k, v in metrics.items()}
    return loss, metrics

  def _surrogate(
    self,
    log_ratios: Float[Array, 'S T'],
    log_probs: Float[Array, 'S T'],
    advantages: Float[Array, 'S T'],
  ) -> Float[Array, 'S T']:
    clip = {
      'clip_epsilon': self.clip_epsilon,
      'clip_epsilon_high': self.clip_epsilon_high,
    }
    if self.surrogate == 'cispo':
      return cispo(log_ratios, log_probs, advantages, **clip)
    return clipped_surrogate(
      log_ratios, advantages, dual_clip=self.dual_clip, **clip
    )

  def _surrogate_log_ratios(
    self, log_ratios: Float[Array, 'S T'], tokens: token_batch.TokenBatch
  ) -> Float[Array, 'S T']:
    """Returns the log-ratio of each token, or of its row."""
    if self.ratio_level == 'token':
      return log_ratios
    row_log_ratios = row_means(log_ratios, tokens.mask, tokens.row_ids)
    row_log_ratios = jnp.where(tokens.mask, row_log_ratios, 0)
    # The row's value with the token's gradient.
    row_constants, token_constants = jax.lax.stop_gradient(
      (row_log_ratios, log_ratios)
    )
    return log_ratios - token_constants + row_constants

  def _ratio_metrics(
    self, ratio: Float[Array, 'S T'], advantages: Float[Array, 'S T']
  ) -> dict[str, Array]:
    low, high = clip_range(self.clip_epsilon, self.clip_epsilon_high)
    below, above = ratio < low, ratio > high
    if self.surrogate == 'clipped':  # It clips only what lowers the objective.
      below, above = below & (advantages < 0), above & (advantages > 0)
    metrics = {
      'ratio/mean': ratio,
      'ratio/max': ratio,
      'ratio/clipped_low': below,
      'ratio/clipped_high': above,
    }
    if self.dual_clip is not None:
      clipped = (ratio > self.dual_clip) & (advantages < 0)
      metrics['ratio/clipped_dual'] = clipped
    return metrics


@dataclasses.dataclass(frozen=True)
class Supervised:
  """Negative log-likelihood of each token, for SFT."""

  columns = ()

  def __call__(
    self, outputs: token_batch.PolicyOutputs, tokens: token_batch.TokenBatch
  ) -> token_batch.TokenLoss:
    """Returns the loss and metrics of each token."""
    metrics = {'loss/entropy': jnp.where(tokens.mask, outputs.entropies, 0)}
    loss = jnp.where(tokens.mask, -outputs.log_probs, 0)
    return loss, metrics


@dataclasses.dataclass(frozen=True)
class ValueRegression:
  """Clipped squared error of a critic's values.

  max((V - target)^2, (clip(V, V_old - clip, V_old + clip) - target)^2) / 2, as
  in reference implementations of PPO. The columns are V_old, the regression
  target, and the weight of each token.

  Attributes:
    value_clip: clip, in reward units.
  """

  value_clip: float = options.number(0.5, above=0)

  columns = ('old_values', 'value_targets', 'value_weights')

  def __post_init__(self):
    options.check(self)

  def __call__(
    self, outputs: token_batch.ValueOutputs, tokens: token_batch.TokenBatch
  ) -> token_batch.TokenLoss:
    """Returns the loss and metrics of each token."""
    mask = tokens.mask
    old, target, weights = (tokens.extras[name] for name in self.columns)
    old, new, target = (
      jnp.where(mask, x, 0) for x in (old, outputs.values, target)
    )
    clipped = old + jnp.clip(new - old, -self.value_clip, self.value_clip)
    error, clipped_error = (new - target) ** 2, (clipped - target) ** 2
    loss = weights * jnp.maximum(error, clipped_error) / 2
    counted = mask & (weights > 0)
    metrics = {
      'value/clipped': (counted & (clipped_error > error)).astype(jnp.float32)
    }
    return jnp.where(mask, loss, 0), metrics


# Losses of the policy by `config.loss.name`: 'module:class'.
REGISTRY = {
  'policy_gradient': 'gigpo_jax.losses:PolicyGradient',
  'row_regression': 'gigpo_jax.row_regression:RowRegression',
}


@dataclasses.dataclass(frozen=True)
class FunctionLoss:
  """A function of (outputs, tokens) as a loss.

  Attributes:
    function: returns the loss and metrics of each token. It may read the
      columns of POLICY_COLUMNS.
  """

  function: Callable[
    [token_batch.PolicyOutputs, token_batch.TokenBatch], token_batch.TokenLoss
  ]

  columns = POLICY_COLUMNS

  def __call__(
    self, outputs: token_batch.PolicyOutputs, tokens: token_batch.TokenBatch
  ) -> token_batch.TokenLoss:
    """Returns the loss and metrics of each token."""
    return self.function(outputs, tokens)


def make(name: str = 'policy_gradient', **values: Any) -> token_batch.Loss:
  """Creates a loss of the policy.

  Args:
    name: a name in REGISTRY, or 'module:attribute' of an importable module:
      the name of a function of (outputs, tokens), or of a class that follows
      `token_batch.Loss`, for example a dataclass with options.
    **values: its options.

  Raises:
    ValueError: in one line, if the name is unknown, or the loss does not have
      an option or rejects it.
  """
  options.refuse_unknown(_import(name), values, field=name)
  return of_section({'name': name, **values})


def of_section(section: Mapping[str, Any]) -> token_batch.Loss:
  """Creates the loss of a config's section `loss`.

  Args:
    section: `name`, see `make`, and options of any loss; those that this loss
      does not have are ignored.

  Raises:
    ValueError: one line per problem, if the name is unknown or the loss
      rejects an option.
  """
  name, values = section['name'], dict(section)
  factory = _import(name)
  if not isinstance(factory, type):
    return FunctionLoss(factory)
  for option, default in options.defaults(factory).items():
    if isinstance(group := values.get(option), Mapping):
      options.refuse_unknown(
        type(default), group, field=option, prefix=f'{option}.'
      )
      values[option] = type(default)(**group)
  return options.make(
    factory, values, field=f'name={name}', needs=('columns', '__call__')
  )


def needs_reference(loss: token_batch.Loss) -> bool:
  """Returns whether a loss compares with a reference policy."""
  return 'ref_log_probs' in loss.columns


def is_per_row(name: str) -> bool:
  """Returns whether a loss has one error for all tokens of a row.

  Raises:
    ValueError: in one line, if the name is unknown.
  """
  return getattr(_import(name), 'per_row', False)


def refuse_rows(
  loss: Mapping[str, Any], reason: str, *, accepted: str
) -> Iterator[str]:
  """Yields a line if the loss has one ratio or one error per row.

  Args:
    loss: options of the loss, `config.loss`.
    reason: why tokens need their own ones.
    accepted: what is accepted instead of a ratio per row.
  """
  if is_per_row(loss['name']):
    yield f'loss.name={loss["name"]}: {reason}; must be another loss'
  elif loss['ratio_level'] == 'row':
    yield f'loss.ratio_level=row: {reason}; {accepted}'


def options_of(name: str) -> set[str]:
  """Returns the names of the options that a loss has.

  Raises:
    ValueError: in one line, if the name is unknown.
  """
  return set(options.defaults(_import(name)))


def all_options() -> set[str]:
  """Returns the names of the options of all losses of REGISTRY."""
  return set().union(*map(options_of, REGISTRY))


def _import(name: str) -> Any:
  return checks.import_named(
    'name',
    REGISTRY.get(name, name),
    accepted=f'one of {", ".join(REGISTRY)}, or module:function',
    takes=('outputs', 'tokens'),
  )


@typechecked
def row_weights(
  lengths: Int[np.ndarray, ' R'], max_length: int, aggregation: str
) -> Float[np.ndarray, ' R']:
  """Returns the weight of each row's tokens in the loss of an update.

  Weights are computed from all rows of the update, before these are split into
  microbatches. Sums of loss * weight over microbatches, length buckets and
  devices then add up to

  - token_mean: the mean over all tokens (DAPO, arXiv:2503.14476);
  - sequence_mean: the mean over rows of the mean over a row's tokens (GRPO);
  - sequence_sum: the mean over rows of the sum over a row's tokens;
  - fixed_length: the mean over rows of the sum over a row's tokens divided by
    the longest possible length (Dr. GRPO, arXiv:2503.20783).

  Args:
    lengths: number of completion tokens of each row; 0 excludes a row.
    max_length: limit of a completion, for fixed_length.
    aggregation: one of the above.

  Raises:
    ValueError: if the aggregation is unknown.
  """
  options.check_choice('aggregation', aggregation, AGGREGATIONS)
  num_rows = max(np.count_nonzero(lengths), 1)
  if aggregation == 'token_mean':
    divisors = np.full(len(lengths), max(lengths.sum(), 1), np.float64)
  elif aggregation == 'sequence_mean':
    divisors = np.maximum(lengths, 1).astype(np.float64) * num_rows
  elif aggregation == 'sequence_sum':
    divisors = np.full(len(lengths), num_rows, np.float64)
  else:  # fixed_length
    divisors = np.full(len(lengths), max_length * num_rows, np.float64)
  return np.where(lengths > 0, 1 / divisors, 0).astype(np.float32)


def policy_gradient(  # noqa: PLR0913
  log_probs: Float[Array, 'S T'],
  entropies: Float[Array, 'S T'],
  old_log_probs: Float[Array, 'S T'],
  ref_log_probs: Float[Array, 'S T'] | None,
  advantages: Float[Array, '#B #C'],
  importance: Float[Array, 'S T'],
  mask: Bool[Array, 'S T'],
  rows: Int[Array, 'S T'],
  entropy_low: Float[Array, 'S T'] | None = None,
  entropy_high: Float[Array, 'S T'] | None = None,
  corridor: Float[Array, 'S T'] | None = None,
  **values: Any,
) -> token_batch.TokenLoss:
  """Deprecated: call a `PolicyGradient` instead."""
  deprecated.warn('losses.policy_gradient', 'losses.PolicyGradient')
  band = EntropyBand(weight=0.0 if corridor is None else 1.0)
  loss = PolicyGradient(entropy_band=band, **values)
  if needs_reference(loss) and ref_log_probs is None:
    raise ValueError(
      f'kl_weight={loss.kl_weight}: needs ref_log_probs; or set kl_weight to 0'
    )
  columns = {
    'advantages': advantages,
    'old_log_probs': old_log_probs,
    'ref_log_probs': ref_log_probs,
    'importance': importance,
    'entropy_low': entropy_low,
    'entropy_high': entropy_high,
    'entropy_band_weight': corridor,
  }
  columns = {name: columns[name] for name in loss.columns}
  outputs = token_batch.PolicyOutputs(log_probs, entropies)
  return loss(outputs, token_batch.make(mask, rows, columns))


def replace_old(loss: Callable) -> token_batch.Loss:
  """Returns `PolicyGradient` for `policy_gradient` or a partial of it."""
  if loss is policy_gradient:
    loss = functools.partial(policy_gradient)
  if isinstance(loss, functools.partial) and loss.func is policy_gradient:
    deprecated.warn('losses.policy_gradient', 'losses.PolicyGradient')
    return PolicyGradient(**loss.keywords)
  return loss
