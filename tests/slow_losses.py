"""The losses by loops over tokens, float64, written from their formulas."""

import math


def policy_gradient(  # noqa: PLR0913
  inputs,
  *,
  ratio_level='token',
  clip_epsilon=0.2,
  clip_epsilon_high=None,
  dual_clip=None,
  kl_weight=0.01,
  entropy_weight=0.001,
):
  """Returns the loss of every token of a batch, a list of lines."""
  mask, rows = inputs['mask'], inputs['rows']
  high = clip_epsilon if clip_epsilon_high is None else clip_epsilon_high
  found = []
  for b in range(len(mask)):
    line = []
    for c in range(len(mask[b])):
      if not mask[b][c]:
        line.append(0.0)
        continue
      alike = [
        k
        for k in range(len(mask[b]))
        if mask[b][k] and rows[b][k] == rows[b][c]
      ]
      used = alike if ratio_level == 'row' else [c]
      gaps = [
        float(inputs['log_probs'][b][k]) - float(inputs['old_log_probs'][b][k])
        for k in used
      ]
      ratio = math.exp(sum(gaps) / len(gaps))
      advantage = float(inputs['advantages'][b][c])
      advantage *= float(inputs['importance'][b][c])
      clipped = min(max(ratio, 1 - clip_epsilon), 1 + high)
      loss = -min(ratio * advantage, clipped * advantage)
      if dual_clip is not None and advantage < 0:
        loss = min(loss, -dual_clip * advantage)
      if kl_weight:
        d = float(inputs['ref_log_probs'][b][c])
        d -= float(inputs['log_probs'][b][c])
        loss += kl_weight * (math.exp(d) - d - 1)
      entropy = float(inputs['entropies'][b][c])
      bonus = entropy
      if inputs.get('corridor') is not None:
        low = float(inputs['entropy_low'][b][c])
        top = float(inputs['entropy_high'][b][c])
        outside = max(0.0, low - entropy) + max(0.0, entropy - top)
        bonus -= float(inputs['corridor'][b][c]) * outside
      line.append(loss - entropy_weight * bonus)
    found.append(line)
  return found


def aggregated(sums, lengths, max_length, aggregation):
  """Returns the loss of an update, given each row's sum over its tokens."""
  real = [(s, n) for s, n in zip(sums, lengths, strict=True) if n]
  if aggregation == 'token_mean':
    return sum(s for s, _ in real) / sum(n for _, n in real)
  if aggregation == 'sequence_mean':
    return sum(s / n for s, n in real) / len(real)
  return sum(s / max_length for s, _ in real) / len(real)


def value_regression(values, before, targets, weights, value_clip):
  """Returns the loss of every place, lists of numbers."""
  found = []
  for v, old, target, weight in zip(
    values, before, targets, weights, strict=True
  ):
    near = old + min(max(v - old, -value_clip), value_clip)
    found.append(weight * max((v - target) ** 2, (near - target) ** 2) / 2)
  return found
