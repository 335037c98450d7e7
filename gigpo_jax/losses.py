"""Losses per token and their aggregation: pure functions of arrays.

Input: log-probabilities and entropies of completions, [B, C]. Output: one loss
per token, and metrics with one value per token. This module knows no model,
optimizer or device. The sum of loss * row weight over all microbatches is the
loss of the update, independent of how rows are split; see `row_weights`.

Every loss takes the arguments of `policy_gradient` up to `rows`, so that the
learner can use any of them. Further arguments are declared to the learner.
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
  """Returns a non-negative estimate of KL(policy || reference) per token.

  exp(d) - d - 1 with d = ref_log_probs - log_probs, which is unbiased for
  samples of the policy. This is k3 of http://joschu.net/blog/kl-approx.html,
  used by GRPO (arXiv:2402.03300, Eq. 4). Its gradient is 1 - exp(d).

  Args:
    log_probs: log-probs under the policy.
    ref_log_probs: log-probs under the reference.
    clamp: upper bound of the estimate; a token above it has no gradient. None
      disables the bound.
  """
  difference = ref_log_probs - log_probs
  if clamp is None:
    return jnp.expm1(difference) - difference
  # The estimate exceeds the clamp at both ends of this interval. Without the
  # interval, an infinite exp(d) would make the gradient NaN.
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

  -min(rho A, clip(rho, 1 - low, 1 + high) A). A dual clip c (arXiv:1912.09729,
  Eq. 5) bounds it by -c A for A < 0, so a very large ratio contributes no
  gradient.

  Args:
    log_ratios: log rho, the log-prob minus that of the sampling policy.
    advantages: A, broadcast to tokens.
    clip_epsilon: low.
    clip_epsilon_high: high ("clip-higher", arXiv:2503.14476); None uses low.
    dual_clip: c, above 1; None disables the dual clip.
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
  """Returns importance weights that correct for the sampler's arithmetic.

  min(pi_learner / pi_sampler, clip) per token, both before the update. The
  sampler's arithmetic (bf16, int8) differs slightly from the learner's. This
  is truncated importance sampling as in Yao et al., "Your efficient RL
  framework secretly brings you off-policy RL training" (2025).

  Args:
    old_log_probs: log-probs of the learner before the update.
    sampler_log_probs: log-probs of the sampler.
    tis_clip: upper bound of a weight, above 0.
  """
  ratio = np.exp(old_log_probs - sampler_log_probs)
  return np.minimum(ratio, np.float32(tis_clip)).astype(np.float32)


@typechecked
def row_means(
  values: Float[Array, 'B C'],
  mask: Bool[Array, 'B C'],
  rows: Int[Array, 'B C'],
) -> Float[Array, 'B C']:
  """Returns, for each token, the mean over the masked tokens of its row.

  Args:
    values: values of tokens; ignored where mask is False.
    mask: True for the tokens to average.
    rows: index of a token's row, in [0, C), among the rows packed into the
      same line of the batch.
  """

  def line_means(values_C: Array, mask_C: Array, rows_C: Array) -> Array:
    sums, counts = (
      jax.ops.segment_sum(x.astype(jnp.float32), rows_C, len(rows_C))
      for x in (jnp.where(mask_C, values_C, 0), mask_C)
    )
    return (sums / jnp.maximum(counts, 1))[rows_C]

  return jax.vmap(line_means)(values, mask, rows)


@typechecked
def entropy_outside(
  entropies: Float[Array, '*S'],
  low: Float[Array, '*S'],
  high: Float[Array, '*S'],
) -> Float[Array, '*S']:
  """Returns the distance of entropies H from the band [low, high], in nats.

  relu(low - H) + relu(H - high), as in EPO (arXiv:2509.22576). There, low and
  high are fractions of the mean entropy of all previous iterations.

  # Differs from the paper: follows its formula, not its code, in which the
  penalty is a constant without a gradient.
  """
  return jax.nn.relu(low - entropies) + jax.nn.relu(entropies - high)


def corridor_weight(
  iteration: int, num_iterations: int, decay: float = 1.0
) -> float:
  """Returns EPO's penalty weight beta_k = 1 + exp(-decay k / floor(K / 2))."""
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
  distance of the entropy from [entropy_low, entropy_high]).

  A token's surrogate uses the ratio of that token or of its row. The ratio of
  a row is the geometric mean of its tokens' ratios, as in GSPO
  (arXiv:2507.18071, Eq. 7). As a row is a turn, this is also Turn-PPO. The
  gradient of a row's ratio flows through each token's own log-prob
  (GSPO-token, section 4.3), so that each token keeps its own importance weight.
  With equal weights, the row's gradient is that of GSPO.

  # Differs from the paper: adds an entropy bonus, as the authors' code does.

  Args:
    log_probs: log-probs of the sampled tokens under the trained policy.
    entropies: entropy of the policy at each token, in nats.
    old_log_probs: log-probs before the iteration's first update.
    ref_log_probs: log-probs under the frozen reference; None only if kl_weight
      is 0.
    advantages: one advantage per token, or one per line of the batch.
    importance: weight of each token's surrogate, at least 0; see
      `truncated_importance`.
    mask: True for sampled tokens; elsewhere the loss is 0.
    rows: see `row_means`.
    entropy_low: see `entropy_outside`; None iff corridor is None.
    entropy_high: see `entropy_outside`; None iff corridor is None.
    corridor: weight of the distance from the band, times entropy_weight; None
      disables the band.
    ratio_level: one of RATIOS.
    clip_epsilon: see `clipped_surrogate`.
    clip_epsilon_high: see `clipped_surrogate`.
    dual_clip: see `clipped_surrogate`.
    kl_clamp: see `k3`.
    kl_weight: beta; 0 disables the KL term.
    entropy_weight: weight of the entropy bonus; 0 disables it.

  Returns:
    The loss, and metrics per token. Metrics are averaged over tokens, except
    that names ending in '/max' take the maximum.

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
  # Mask first: 0 times an infinite ratio would be NaN, also in the gradient.
  log_ratios = token_log_ratios = jnp.where(mask, log_probs - old_log_probs, 0)
  if ratio_level == 'row':
    row_log_ratios = jnp.where(mask, row_means(token_log_ratios, mask, rows), 0)
    # The row's value with the token's gradient.
    fixed_rows, fixed_tokens = jax.lax.stop_gradient(
      (row_log_ratios, token_log_ratios)
    )
    log_ratios = token_log_ratios - fixed_tokens + fixed_rows
  # The surrogate is linear in the advantage, so the weight can scale that.
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
    # k3 of KL(sampling policy || current policy), per token at both levels.
    'ratio/kl': jnp.expm1(token_log_ratios) - token_log_ratios,
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
  """Returns the negative log-likelihood of each token, for SFT.

  Uses log_probs, entropies and mask; the other arguments are ignored.
  """
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
  """Returns the clipped squared-error loss of values.

  max((V - target)^2, (clip(V, V_old - clip, V_old + clip) - target)^2) / 2, as
  in reference implementations of PPO.

  Args:
    log_probs: values V.
    entropies: unused.
    old_log_probs: V_old, the values before the update.
    ref_log_probs: unused.
    advantages: regression targets.
    importance: weight of each token.
    mask: True for completion tokens; elsewhere the loss is 0.
    rows: unused.
    value_clip: clip, in reward units.
  """
  del entropies, ref_log_probs, rows
  old = jnp.where(mask, old_log_probs, 0)
  new, target = (jnp.where(mask, x, 0) for x in (log_probs, advantages))
  clipped = old + jnp.clip(new - old, -value_clip, value_clip)
  error, clipped_error = (new - target) ** 2, (clipped - target) ** 2
  loss = importance * jnp.maximum(error, clipped_error) / 2
  counted = mask & (importance > 0)
  metrics = {
    'value/clipped': (counted & (clipped_error > error)).astype(jnp.float32)
  }
  return jnp.where(mask, loss, 0), jax.lax.stop_gradient(metrics)


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
  - fixed_length: the mean over rows of the sum over a row's tokens divided by
    the longest possible length (Dr. GRPO, arXiv:2503.20783).

  Args:
    lengths: number of completion tokens of each row; 0 excludes a row.
    max_length: limit of a completion, for fixed_length.
    aggregation: one of the above.

  Raises:
    ValueError: if the aggregation is unknown.
  """
  num_rows = max(np.count_nonzero(lengths), 1)
  if aggregation == 'token_mean':
    divisors = np.full(len(lengths), max(lengths.sum(), 1), np.float64)
  elif aggregation == 'sequence_mean':
    divisors = np.maximum(lengths, 1).astype(np.float64) * num_rows
  elif aggregation == 'fixed_length':
    divisors = np.full(len(lengths), max_length * num_rows, np.float64)
  else:
    raise ValueError(
      f'aggregation={aggregation}: unknown; must be one of '
      f'{", ".join(AGGREGATIONS)}'
    )
  return np.where(lengths > 0, 1 / divisors, 0).astype(np.float32)
