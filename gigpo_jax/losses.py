"""Losses of tokens and their aggregation: pure functions of arrays.

Input: log-probabilities and entropies of completions, [B, C]. Output: one loss
a token and metrics, one value a token. Knows no model, no optimizer and no
device. Summing loss * row weight over all microbatches gives the loss of the
update, however the rows are cut; see `row_weights`.

A loss has the arguments of `policy_gradient` up to `rows`, so that the learner
can take any of them, and maybe further ones, which the learner is told of.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from gigpo_jax.arrays import typechecked

RATIOS = ('token', 'row')
AGGREGATIONS = ('token_mean', 'sequence_mean', 'fixed_length')

TokenLoss = tuple[Float[Array, 'B C'], dict[str, Float[Array, 'B C']]]


@typechecked
def k3(
  log_probs: Float[Array, '*S'],
  ref_log_probs: Float[Array, '*S'],
  clamp: float | None = None,
) -> Float[Array, '*S']:
  """Returns an estimate of KL(policy || reference), never negative.

  exp(d) - d - 1 with d = ref_log_probs - log_probs, unbiased for samples of
  the policy: the k3 of http://joschu.net/blog/kl-approx.html, as in GRPO
  (arXiv:2402.03300, Eq. 4). Its gradient is 1 - exp(d).

  Args:
    log_probs: of the policy.
    ref_log_probs: of the reference.
    clamp: largest estimate; a token above it has no gradient. None is off.
  """
  difference = ref_log_probs - log_probs
  if clamp is None:
    return jnp.expm1(difference) - difference
  # The estimate is above the clamp at both ends of this interval. An infinite
  # exp(d) would make the gradient NaN.
  difference = jnp.clip(difference, -clamp - 2, clamp + 2)
  return jnp.minimum(jnp.expm1(difference) - difference, clamp)


@typechecked
def clipped_surrogate(
  log_ratios: Float[Array, '*S'],
  advantages: Float[Array, '*S'],
  *,
  clip_epsilon: float = 0.2,
  clip_epsilon_high: float | None = None,
  dual_clip: float | None = None,
) -> Float[Array, '*S']:
  """Returns the negated clipped objective of PPO (arXiv:1707.06347, Eq. 7).

  -min(rho A, clip(rho, 1 - low, 1 + high) A). For A < 0 and with a dual clip
  c (arXiv:1912.09729, Eq. 5) at most -c A: a ratio that ran away upwards
  contributes no gradient.

  Args:
    log_ratios: log rho = log-prob minus that of the sampling policy.
    advantages: A; broadcast to tokens.
    clip_epsilon: low.
    clip_epsilon_high: high ("clip-higher", arXiv:2503.14476); None is low.
    dual_clip: c, above 1; None is off.
  """
  ratio = jnp.exp(log_ratios)
  high = clip_epsilon if clip_epsilon_high is None else clip_epsilon_high
  clipped = jnp.clip(ratio, 1 - clip_epsilon, 1 + high)
  loss = -jnp.minimum(ratio * advantages, clipped * advantages)
  if dual_clip is not None:
    bound = jnp.where(advantages < 0, -dual_clip * advantages, jnp.inf)
    loss = jnp.minimum(loss, bound)
  return loss


@typechecked
def truncated_importance(
  old_log_probs: Float[np.ndarray, 'R C'],
  sampler_log_probs: Float[np.ndarray, 'R C'],
  tis_clip: float,
) -> Float[np.ndarray, 'R C']:
  """Returns weights that make up for sampling from another program's policy.

  min(pi_learner / pi_sampler, clip) of each token, both before the update:
  the sampler's arithmetic (bf16, int8) is not quite the learner's. Truncated
  importance sampling as in Yao et al., "Your efficient RL framework secretly
  brings you off-policy RL training" (2025).

  Args:
    old_log_probs: of the learner.
    sampler_log_probs: as sampled.
    tis_clip: bound of a weight, above 0.
  """
  ratio = np.exp(old_log_probs - sampler_log_probs)
  return np.minimum(ratio, np.float32(tis_clip)).astype(np.float32)


@typechecked
def row_means(
  values: Float[Array, 'B C'],
  mask: Bool[Array, 'B C'],
  rows: Int[Array, 'B C'],
) -> Float[Array, 'B C']:
  """Returns to each token the mean over the masked tokens of its row.

  Args:
    values: of tokens; 0 where the mask does not hold.
    mask: which tokens count.
    rows: number of a token's row, in [0, C), among those that share its line.
  """

  def of_line(values_C: Array, mask_C: Array, rows_C: Array) -> Array:
    sums, counts = (
      jax.ops.segment_sum(x.astype(jnp.float32), rows_C, len(rows_C))
      for x in (jnp.where(mask_C, values_C, 0), mask_C)
    )
    return (sums / jnp.maximum(counts, 1))[rows_C]

  return jax.vmap(of_line)(values, mask, rows)


@typechecked
def entropy_outside(
  entropies: Float[Array, '*S'],
  low: Float[Array, '*S'],
  high: Float[Array, '*S'],
) -> Float[Array, '*S']:
  """Returns how far entropies are outside of a corridor, in nats.

  relu(low - H) + relu(H - high): EPO (arXiv:2509.22576), with low and high
  shares of the mean entropy of all iterations before.

  # Differs from the paper: not from its formula, but from its code, whose
  penalty is a constant without a gradient.
  """
  return jax.nn.relu(low - entropies) + jax.nn.relu(entropies - high)


def corridor_weight(
  iteration: int, num_iterations: int, decay: float = 1.0
) -> float:
  """Returns EPO's beta_k = 1 + exp(-decay k / floor(K / 2))."""
  return 1 + float(np.exp(-decay * iteration / max(num_iterations // 2, 1)))


@typechecked
def policy_gradient(  # noqa: PLR0913
  log_probs: Float[Array, 'B C'],
  entropies: Float[Array, 'B C'],
  old_log_probs: Float[Array, 'B C'],
  ref_log_probs: Float[Array, 'B C'] | None,
  advantages: Float[Array, '#B #C'],
  importance: Float[Array, 'B C'],
  mask: Bool[Array, 'B C'],
  rows: Int[Array, 'B C'],
  entropy_low: Float[Array, 'B C'] | None = None,
  entropy_high: Float[Array, 'B C'] | None = None,
  corridor: Float[Array, 'B C'] | None = None,
  *,
  ratio_level: str = 'token',
  clip_epsilon: float = 0.2,
  clip_epsilon_high: float | None = None,
  dual_clip: float | None = None,
  kl_clamp: float | None = None,
  kl_weight: float = 0.01,
  entropy_weight: float = 0.001,
) -> TokenLoss:
  """Returns the loss of GiGPO and GRPO for each token, Eq. (9).

  Clipped surrogate + kl_weight * k3 - entropy_weight * (entropy - corridor *
  what of it is outside of [entropy_low, entropy_high]).

  A token's surrogate has the ratio of that token, or of its row, the geometric
  mean of its tokens': GSPO (arXiv:2507.18071, Eq. 7), and, a row being a turn,
  Turn-PPO. The gradient of a row's ratio goes through each token's own
  log-prob (GSPO-token, section 4.3), so that a token counts with its own
  importance; with equal importance the row's gradient is GSPO's.

  # Differs from the paper: the entropy bonus, as in the authors' code.

  Args:
    log_probs: of the sampled tokens under the policy being trained.
    entropies: of the policy at each token, in nats.
    old_log_probs: under the policy before the iteration's first update.
    ref_log_probs: under the frozen reference; None only if kl_weight is 0.
    advantages: of each row's tokens, or one for all of them.
    importance: weight of each token's surrogate, no less than 0; see
      `truncated_importance`.
    mask: which tokens were sampled; elsewhere the loss is 0.
    rows: see `row_means`.
    entropy_low: see `entropy_outside`; None, like the next two, leaves it out.
    entropy_high: the same.
    corridor: weight of what is outside, beside that of the entropy.
    ratio_level: of RATIOS.
    clip_epsilon: see `clipped_surrogate`.
    clip_epsilon_high: see `clipped_surrogate`.
    dual_clip: see `clipped_surrogate`.
    kl_clamp: see `k3`.
    kl_weight: beta.
    entropy_weight: 0 drops the bonus.

  Returns:
    Loss, and metrics to average over tokens, but for '/max': their maximum.

  Raises:
    ValueError: if the dual clip is not above 1, or the reference is missing.
  """
  if dual_clip is not None and dual_clip <= 1:
    raise ValueError(f'dual_clip={dual_clip}: must be above 1, or None for off')
  if ratio_level not in RATIOS:
    raise ValueError(
      f'ratio_level={ratio_level}: unknown; must be one of {", ".join(RATIOS)}'
    )
  if kl_weight and ref_log_probs is None:
    raise ValueError(
      f'kl_weight={kl_weight}: needs ref_log_probs; or set kl_weight to 0'
    )
  # Masked first: 0 times an infinite ratio would be NaN, in the gradient too.
  log_ratios = of_tokens = jnp.where(mask, log_probs - old_log_probs, 0)
  if ratio_level == 'row':
    of_rows = jnp.where(mask, row_means(of_tokens, mask, rows), 0)
    # The row's value with the token's gradient.
    fixed_rows, fixed = jax.lax.stop_gradient((of_rows, of_tokens))
    log_ratios = of_tokens - fixed + fixed_rows
  # A surrogate is as large as its advantage, so the weight goes there.
  advantages_BC = jnp.where(mask, advantages * importance, 0)
  policy = clipped_surrogate(
    log_ratios,
    advantages_BC,
    clip_epsilon=clip_epsilon,
    clip_epsilon_high=clip_epsilon_high,
    dual_clip=dual_clip,
  )
  entropy = jnp.where(mask, entropies, 0)
  outside = jnp.zeros_like(entropy)
  if corridor is not None:
    outside = entropy_outside(entropy, entropy_low, entropy_high)
    outside = jnp.where(mask, corridor * outside, 0)
  loss = policy - entropy_weight * (entropy - outside)
  high = clip_epsilon if clip_epsilon_high is None else clip_epsilon_high
  ratio = jnp.exp(log_ratios)
  metrics = {
    'loss/policy': policy,
    'loss/entropy': entropy,
    'ratio/mean': ratio,
    'ratio/max': ratio,
    # Of the policy now and the one that sampled, k3; of tokens in any case.
    'ratio/kl': jnp.expm1(of_tokens) - of_tokens,
    'ratio/clipped_low': (ratio < 1 - clip_epsilon) & (advantages_BC < 0),
    'ratio/clipped_high': (ratio > 1 + high) & (advantages_BC > 0),
  }
  if corridor is not None:
    metrics['loss/entropy_outside'] = outside
  if dual_clip is not None:
    metrics['ratio/clipped_dual'] = (ratio > dual_clip) & (advantages_BC < 0)
  if kl_weight:
    kl = k3(
      jnp.where(mask, log_probs, 0), jnp.where(mask, ref_log_probs, 0), kl_clamp
    )
    loss += kl_weight * kl
    metrics['loss/kl'] = kl
  metrics = {k: v.astype(jnp.float32) for k, v in metrics.items()}
  return loss, jax.lax.stop_gradient(metrics)


@typechecked
def supervised(
  log_probs: Float[Array, 'B C'],
  entropies: Float[Array, 'B C'],
  old_log_probs: Float[Array, 'B C'],
  ref_log_probs: Float[Array, 'B C'] | None,
  advantages: Float[Array, '#B #C'],
  importance: Float[Array, 'B C'],
  mask: Bool[Array, 'B C'],
  rows: Int[Array, 'B C'],
) -> TokenLoss:
  """Returns the negative log-likelihood of each token, for imitation."""
  del old_log_probs, ref_log_probs, advantages, importance, rows
  metrics = {'loss/entropy': jnp.where(mask, entropies, 0)}
  return jnp.where(mask, -log_probs, 0), jax.lax.stop_gradient(metrics)


@typechecked
def value_regression(
  log_probs: Float[Array, 'B C'],
  entropies: Float[Array, 'B C'],
  old_log_probs: Float[Array, 'B C'],
  ref_log_probs: Float[Array, 'B C'] | None,
  advantages: Float[Array, 'B C'],
  importance: Float[Array, 'B C'],
  mask: Bool[Array, 'B C'],
  rows: Int[Array, 'B C'],
  *,
  value_clip: float = 0.5,
) -> TokenLoss:
  """Returns half the squared error of values, the larger of two.

  max((V - target)^2, (clip(V, V_old - clip, V_old + clip) - target)^2) / 2, as
  PPO's reference implementations have it.

  Args:
    log_probs: values V.
    entropies: of no use.
    old_log_probs: V_old, before the update.
    ref_log_probs: of no use.
    advantages: targets.
    importance: weight of each place.
    mask: which places there are.
    rows: of no use.
    value_clip: how far a value may be moved.
  """
  del entropies, ref_log_probs, rows
  old = jnp.where(mask, old_log_probs, 0)
  new, target = (jnp.where(mask, x, 0) for x in (log_probs, advantages))
  near = old + jnp.clip(new - old, -value_clip, value_clip)
  one, other = (new - target) ** 2, (near - target) ** 2
  loss = importance * jnp.maximum(one, other) / 2
  counted = mask & (importance > 0)
  metrics = {'value/clipped': (counted & (other > one)).astype(jnp.float32)}
  return jnp.where(mask, loss, 0), jax.lax.stop_gradient(metrics)


@typechecked
def row_weights(
  lengths: Int[np.ndarray, ' R'], max_length: int, aggregation: str
) -> Float[np.ndarray, ' R']:
  """Returns the weight of each row's tokens in the loss of an update.

  From all rows of the update, before they are cut into microbatches, so that
  sums of loss * weight over microbatches, buckets and devices add up to

  - token_mean: the mean over all tokens (DAPO, arXiv:2503.14476);
  - sequence_mean: the mean over rows of the mean over a row's tokens (GRPO);
  - fixed_length: the mean over rows of the sum over a row's tokens divided by
    the longest possible length (Dr. GRPO, arXiv:2503.20783).

  Args:
    lengths: completion tokens of each row; rows of 0 do not count.
    max_length: cap of a completion, for fixed_length.
    aggregation: one of the above.

  Raises:
    ValueError: if the aggregation is unknown.
  """
  rows = max(np.count_nonzero(lengths), 1)
  if aggregation == 'token_mean':
    tokens = np.full(len(lengths), max(lengths.sum(), 1), np.float64)
  elif aggregation == 'sequence_mean':
    tokens = np.maximum(lengths, 1).astype(np.float64) * rows
  elif aggregation == 'fixed_length':
    tokens = np.full(len(lengths), max_length * rows, np.float64)
  else:
    raise ValueError(
      f'aggregation={aggregation}: unknown; must be one of '
      f'{", ".join(AGGREGATIONS)}'
    )
  return np.where(lengths > 0, 1 / tokens, 0).astype(np.float32)
