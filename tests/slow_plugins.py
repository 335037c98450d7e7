"""Reference modulators and selectors: loops over rows, from the formulas.

Each takes `Table` and the options of the plug-in. Modulators return a list of
advantages of tokens by row; selectors return the chosen (row, column) pairs.
"""

import itertools
import math
import statistics


class Table:
  """Rows as plain Python values, without padding."""

  def __init__(self, rows, advantages, signals):
    self.rows = [int(r) for r in range(len(rows.groups)) if rows.groups[r] >= 0]
    self.length = {
      r: int(rows.lengths[r] - rows.prompt_lengths[r]) for r in self.rows
    }
    self.group = {r: int(rows.groups[r]) for r in self.rows}
    self.episode = {
      r: (self.group[r], int(rows.episodes[r])) for r in self.rows
    }
    self.step = {r: int(rows.steps[r]) for r in self.rows}
    self.truncated = {r: bool(rows.truncated[r]) for r in self.rows}
    self.advantage = {r: float(advantages[r]) for r in self.rows}
    self.members = {}
    for r in self.rows:
      self.members.setdefault(self.episode[r], []).append(r)
    self.returns = {
      e: sum(float(rows.rewards[r]) for r in members)
      for e, members in self.members.items()
    }
    self.success = {
      e: any(rows.success[r] for r in members)
      for e, members in self.members.items()
    }
    self.groups = sorted(set(self.group.values()))
    self.prompt_length = {r: int(rows.prompt_lengths[r]) for r in self.rows}
    self.sampled = {
      r: list(map(float, rows.sampler_log_probs[r])) for r in self.rows
    }
    self.out = {
      name: {r: list(map(float, values[r])) for r in self.rows}
      for name, values in signals.outputs.items()
    }
    self.progress = signals.progress
    self.learning_rate = signals.learning_rate

  def episodes(self, group):
    return [e for e in self.members if e[0] == group]

  def rate(self, group):
    return statistics.mean(self.success[e] for e in self.episodes(group))

  def tokens(self, name, r):
    return self.out[name][r][: self.length[r]]

  def pairs(self, rows):
    return {(r, c) for r in rows for c in range(self.length[r])}

  def spread_tokens(self, values):
    return {r: [values[r]] * self.length[r] for r in self.rows}


def dgpo(t, accuracy_temperature=2.0):
  spread = [
    g for g in t.groups if len({t.returns[e] for e in t.episodes(g)}) > 1
  ]
  hardness = {
    g: math.exp(-(t.rate(g) or 1) / accuracy_temperature) for g in spread
  }
  inside = sum(t.length[r] for r in t.rows if t.group[r] in spread)
  values = {}
  for r in t.rows:
    weight = 1.0
    if t.group[r] in spread:
      weight = len(spread) * hardness[t.group[r]] / sum(hardness.values())
      weight *= sum(t.length.values()) / inside
    values[r] = t.advantage[r] * weight
  return t.spread_tokens(values)


def adora(t, short_weight=0.1, length_unit='turns'):
  values = {}
  for r in t.rows:
    right, wrong = [], []
    for e in t.episodes(t.group[r]):
      if any(t.truncated[s] for s in t.members[e]):
        continue
      count = len(t.members[e])
      if length_unit == 'tokens':
        count = sum(t.length[s] for s in t.members[e])
      (right if t.success[e] else wrong).append(count)
    longer = right and (not wrong or max(right) > sum(wrong) / len(wrong))
    values[r] = t.advantage[r] * (1 if longer else short_weight)
  return t.spread_tokens(values)


def progrpo(t, confidence_weight=0.1, confidence_share=0.2):
  def confidence(values):
    count = max(math.ceil(len(values) * confidence_share - 1e-9), 0)
    lowest = sorted(values)[:count]
    return math.exp(sum(lowest) / len(lowest)) if lowest else 1.0

  values = {}
  for r in t.rows:
    values[r] = t.advantage[r]
    if t.rate(t.group[r]):
      prompt = t.out['prompt_log_probs'][r][: t.prompt_length[r] - 1]
      gap = confidence(prompt) - confidence(t.tokens('log_probs', r))
      values[r] += confidence_weight * gap
  return t.spread_tokens(values)


def egpo(t, entropy_bonus=0.4, entropy_bound=2.0):
  values = {}
  for r in t.rows:
    entropy = statistics.mean(t.tokens('entropies', r))
    bound = abs(t.advantage[r]) / entropy_bound
    values[r] = t.advantage[r] + min(entropy_bonus * entropy, bound)
  return t.spread_tokens(values)


def empg(t, confidence_rate=1.0, clarity_rate=1.0, clarity_weight=0.1):
  entropy = {r: statistics.mean(t.tokens('entropies', r)) for r in t.rows}
  low, high = min(entropy.values()), max(entropy.values())
  entropy = {r: (h - low) / (high - low) for r, h in entropy.items()}
  gain = {r: math.exp(-confidence_rate * entropy[r]) for r in t.rows}
  mean = statistics.mean(gain.values())
  values = {}
  for members in t.members.values():
    chain = sorted(members, key=lambda r: t.step[r])
    for r, following in itertools.zip_longest(chain, chain[1:]):
      values[r] = t.advantage[r] * gain[r] / mean
      if following is not None:
        clarity = math.exp(-clarity_rate * entropy[following])
        values[r] += clarity_weight * clarity
  centre = statistics.mean(values.values())
  return t.spread_tokens({r: v - centre for r, v in values.items()})


def dcpo(t, target_entropy=0.5, target_limit=0.1):
  rate = statistics.mean(t.success.values())
  if not rate:
    return t.spread_tokens(t.advantage)
  entropy = statistics.mean(h for r in t.rows for h in t.tokens('entropies', r))
  target = 'log_probs@1.2' if entropy <= target_entropy else 'log_probs@0.8'
  alpha = min(abs(target_entropy - entropy), target_limit) / rate
  alpha /= 1 + alpha
  return {
    r: [
      (1 - alpha) * t.advantage[r]
      + alpha * t.success[t.episode[r]] * math.exp(other - own)
      for other, own in zip(
        t.tokens(target, r), t.tokens('log_probs', r), strict=True
      )
    ]
    for r in t.rows
  }


def truncated(t):
  return t.pairs(r for r in t.rows if not t.truncated[r])


def snr(t, group_share=0.25):
  deviation = {
    g: statistics.pstdev(t.returns[e] for e in t.episodes(g)) for g in t.groups
  }
  order = sorted(t.groups, key=lambda g: -deviation[g])
  kept = order[: math.ceil(group_share * len(order) - 1e-9)]
  return t.pairs(r for r in t.rows if t.group[r] in kept)


def best_and_worst(t, kept_episodes=4):
  kept = set()
  for group in t.groups:
    order = sorted(sorted(t.episodes(group)), key=lambda e: t.returns[e])
    worst = kept_episodes // 2
    kept |= {*order[:worst], *order[-(kept_episodes - worst) :]}
  return t.pairs(r for r in t.rows if t.episode[r] in kept)


def capo(t, gain_low=0.0, gain_high=1e-2, fisher_high=1e-4):
  chosen = set()
  for r in t.rows:
    log_probs = t.tokens('log_probs', r)
    norms = t.tokens('feature_squares', r)
    for n, (log_prob, norm) in enumerate(zip(log_probs, norms, strict=True)):
      # Of two tokens, the first was sampled. x is (norm^.5, 0, ..).
      probs = [math.exp(log_prob), 1 - math.exp(log_prob)]
      score = [(1 - probs[0]) * norm**0.5, -probs[1] * norm**0.5]
      grad = [t.advantage[r] * x for x in score]
      step = [t.learning_rate * x for x in grad]
      logits = [x * norm**0.5 for x in step]
      mean = probs[0] * logits[0] + probs[1] * logits[1]
      variance = sum(
        p * (u - mean) ** 2 for p, u in zip(probs, logits, strict=True)
      )
      first = sum(a * b for a, b in zip(score, step, strict=True))
      second = t.advantage[r] * (first**2 - variance)
      gain = sum(a * b for a, b in zip(grad, step, strict=True)) + second / 2
      if gain_low <= gain <= gain_high and first**2 / 2 <= fisher_high:
        chosen.add((r, n))
  return chosen


def d3s(
  t,
  variance_scope='batch',
  variance_rows=(0.25, 0.5),
  variance_tokens=(0.2, 0.5),
):
  share, token_share = (
    a + (b - a) * t.progress for a, b in (variance_rows, variance_tokens)
  )
  kept = []
  scopes = [t.rows]
  if variance_scope == 'group':
    scopes = [[r for r in t.rows if t.group[r] == g] for g in t.groups]
  for scope in scopes:
    count = math.ceil(share * len(scope) - 1e-9)
    kept += max(
      itertools.combinations(scope, count),
      key=lambda c: (
        round(statistics.pvariance([t.advantage[r] for r in c]), 9),
        -sum(t.advantage[r] for r in c),
      ),
    )
  weight = {
    (r, c): abs(t.advantage[r]) * h
    for r in kept
    for c, h in enumerate(t.tokens('entropies', r))
  }
  count = math.ceil(token_share * len(weight) - 1e-9)
  return set(sorted(weight, key=lambda pair: -weight[pair])[:count])


def mismatch(t, mismatch_level='token', mismatch_low=0.5, mismatch_high=2.0):
  chosen = set()
  for r in t.rows:
    gaps = [
      a - b
      for a, b in zip(t.tokens('log_probs', r), t.sampled[r], strict=False)
    ]
    for c, gap in enumerate(gaps):
      if mismatch_level != 'token':
        gap = sum(gaps)
      if mismatch_level == 'row_mean':
        gap /= len(gaps)
      if mismatch_low <= math.exp(gap) <= mismatch_high:
        chosen.add((r, c))
  return chosen
