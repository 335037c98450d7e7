"""Reference losses: loops over tokens in float64, written from the formulas."""

import math

import numpy as np


def policy_gradient(  # noqa: PLR0913
  inputs,
  *,
  ratio_level='token',
  clip_epsilon=0.2,
  clip_epsilon_high=None,
  dual_clip=None,
  kl_clamp=None,
  kl_weight=0.01,
  entropy_weight=0.001,
):
  """Returns the loss of every token of a batch, as a list of lines.

  With `inputs['fixed_log_probs']`, the ratio of a row is that of the fixed
  log-probs, times each token's own change from them (GSPO-token).
  """
  fixed = inputs.get('fixed_log_probs')
  fixed = inputs['log_probs'] if fixed is None else fixed
  mask, row_ids = inputs['mask'], inputs['row_ids']
  high = clip_epsilon if clip_epsilon_high is None else clip_epsilon_high
  lines = []
  for b in range(len(mask)):
    line = []
    for c in range(len(mask[b])):
      if not mask[b][c]:
        line.append(0.0)
        continue
      row_tokens = [
        k
        for k in range(len(mask[b]))
        if mask[b][k] and row_ids[b][k] == row_ids[b][c]
      ]
      ratio_tokens = row_tokens if ratio_level == 'row' else [c]
      log_ratios = [
        float(fixed[b][k]) - float(inputs['old_log_probs'][b][k])
        for k in ratio_tokens
      ]
      change = float(inputs['log_probs'][b][c]) - float(fixed[b][c])
      ratio = math.exp(sum(log_ratios) / len(log_ratios) + change)
      advantage = float(inputs['advantages'][b][c])
      advantage *= float(inputs['importance'][b][c])
      clipped = min(max(ratio, 1 - clip_epsilon), 1 + high)
      loss = -min(ratio * advantage, clipped * advantage)
      if dual_clip is not None and advantage < 0:
        loss = min(loss, -dual_clip * advantage)
      if kl_weight:
        d = float(inputs['ref_log_probs'][b][c])
        d -= float(inputs['log_probs'][b][c])
        kl = math.exp(d) - d - 1
        loss += kl_weight * (kl if kl_clamp is None else min(kl, kl_clamp))
      entropy = float(inputs['entropies'][b][c])
      bonus = entropy
      if inputs.get('entropy_band_weight') is not None:
        low = float(inputs['entropy_low'][b][c])
        high_bound = float(inputs['entropy_high'][b][c])
        outside = max(0.0, low - entropy) + max(0.0, entropy - high_bound)
        bonus -= float(inputs['entropy_band_weight'][b][c]) * outside
      line.append(loss - entropy_weight * bonus)
    lines.append(line)
  return lines


def slopes(inputs, **options):
  """Returns the gradient with respect to the log-probs, by differences."""
  point = inputs['log_probs'].astype('float64')
  inputs = {'fixed_log_probs': point} | inputs
  gradient, h = np.zeros_like(point), 1e-6
  for b, c in np.ndindex(point.shape):
    totals = []
    for sign in (1, -1):
      moved = point.copy()
      moved[b, c] += sign * h
      losses = policy_gradient(inputs | {'log_probs': moved}, **options)
      totals.append(sum(map(sum, losses)))
    gradient[b, c] = (totals[0] - totals[1]) / (2 * h)
  return gradient


def aggregated(sums, lengths, max_length, aggregation):
  """Returns the loss of an update, given each row's sum over its tokens."""
  real = [(s, n) for s, n in zip(sums, lengths, strict=True) if n]
  if aggregation == 'token_mean':
    return sum(s for s, _ in real) / sum(n for _, n in real)
  if aggregation == 'sequence_mean':
    return sum(s / n for s, n in real) / len(real)
  if aggregation == 'sequence_sum':
    return sum(s for s, _ in real) / len(real)
  return sum(s / max_length for s, _ in real) / len(real)


def value_regression(values, before, targets, weights, value_clip):
  """Returns the loss of every token; arguments are lists of numbers."""
  losses = []
  for v, old, target, weight in zip(
    values, before, targets, weights, strict=True
  ):
    clipped = old + min(max(v - old, -value_clip), value_clip)
    losses.append(weight * max((v - target) ** 2, (clipped - target) ** 2) / 2)
  return losses
