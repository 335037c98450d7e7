"""Reference advantages of every algorithm: loops over steps, in float64.

The functions are written from the formulas. They collect groups and episodes
in dictionaries and use numpy's statistics.
"""

import dataclasses
import itertools

import numpy as np


@dataclasses.dataclass
class Options:
  """Options of all algorithms, with their defaults."""

  discount: float = 0.95
  step_weight: float = 1.0
  invalid_penalty: float = 0.1
  norm: str = 'mean_std'
  episode_stats: str = 'trajectories'
  penalty_scope: str = 'reward'
  lone_episode: str = 'zero'
  history: int = 2
  level_exponent: float = 1.0
  episode_weight: float | None = None
  potential_weight: float = 1.0
  failure_exponent: float = 2.0
  potential_discount: float = 1.0
  step_lambda: float = 0.9
  prior_steps: float = 2.0
  evidence_steps: float = 4.0
  graph_discount: float = 0.1
  component_weights: tuple = ()
  gae_level: str = 'token'
  gae_discount: float = 1.0
  gae_lambda: float = 1.0
  whiten_advantages: bool = True
  set_size: int = 2


class Steps:
  """Rows as dictionaries by row index, without padding."""

  def __init__(self, rows, options):
    self.rows, self.o = rows, options
    self.all = [int(r) for r in np.flatnonzero(rows.groups >= 0)]
    self.group = {r: int(rows.groups[r]) for r in self.all}
    self.anchor = {r: (self.group[r], int(rows.anchors[r])) for r in self.all}
    self.next_anchor = {
      r: (self.group[r], int(rows.next_anchors[r])) for r in self.all
    }
    self.cost = {
      r: 0.0 if rows.valid[r] else -options.invalid_penalty for r in self.all
    }
    chains = {}
    for r in self.all:
      chains.setdefault((self.group[r], int(rows.episodes[r])), []).append(r)
    self.chains = [
      sorted(chain, key=lambda r: rows.steps[r]) for chain in chains.values()
    ]
    self.firsts = [chain[0] for chain in self.chains]
    self.before, self.after = {}, {}
    for chain in self.chains:
      for step, following in zip(chain, chain[1:], strict=False):
        self.after[step], self.before[following] = following, step

  def weigh(self, episode, step, default):
    """Returns the weighted sum of episode and step advantages.

    Args:
      episode: A_E.
      step: A_S.
      default: weight of A_E if the option is not set.
    """
    weight = self.o.episode_weight
    weight = default if weight is None else weight
    omega = self.o.step_weight
    return {r: weight * episode[r] + omega * step[r] for r in self.all}

  def mean(self, values, keys):
    """Returns the mean of the values with the same key."""
    return {
      r: np.mean([values[s] for s in self.all if keys[s] == keys[r]])
      for r in self.all
    }

  def raw(self, r):
    return float(self.rows.rewards[r])

  def returns(self):
    """Returns episode and step returns, with penalties by `penalty_scope`."""
    inside = self.o.penalty_scope == 'reward'
    episode, step = {}, {}
    for chain in self.chains:
      rewards = [self.raw(r) + (self.cost[r] if inside else 0) for r in chain]
      for k, r in enumerate(chain):
        later = enumerate(rewards[k:])
        episode[r] = sum(rewards)
        step[r] = sum(self.o.discount**d * x for d, x in later)
        if not inside:
          episode[r] += self.cost[r]
          step[r] += self.cost[r]
    return episode, step

  def above(self, values, keys, entries=None, **changes):
    """Returns normalized values, relative to values with the same key."""
    o = dataclasses.replace(self.o, **changes)
    return {
      r: _normalize(
        values[r],
        [values[s] for s in entries or self.all if keys[s] == keys[r]],
        o,
      )
      for r in values
    }

  def by_episode(self, values, **changes):
    """Returns `above` within groups, with one entry per episode."""
    return self.above(values, self.group, self.firsts, **changes)


def _normalize(value, others, o, ddof=1, epsilon=1e-6):
  if len(others) == 1:
    return value if o.lone_episode == 'raw' else 0.0
  # Sums of equal numbers may differ in their last bits.
  others = np.round(others, 9)
  gap = round(value, 9) - np.mean(others)
  if np.ptp(others) == 0:
    return 0.0 if abs(gap) < 1e-8 else gap / epsilon
  if o.norm == 'mean_std':
    return gap / (np.std(others, ddof=ddof) + epsilon)
  return gap * (
    len(others) / (len(others) - 1) if o.norm == 'leave_one_out' else 1
  )


def _episode_part(steps):
  returns, _ = steps.returns()
  if steps.o.episode_stats == 'rows':
    return steps.above(returns, steps.group)
  return steps.by_episode(returns)


def _step_part(steps, values):
  return steps.above(values, steps.anchor, lone_episode='zero')


def gigpo(steps):
  step = _step_part(steps, steps.returns()[1])
  return steps.weigh(_episode_part(steps), step, 1)


def pgpo(steps):
  _, returns = steps.returns()
  potential = steps.mean(returns, steps.anchor)
  difference, wins, episodes = {}, {}, {}
  for chain in steps.chains:
    group = steps.group[chain[0]]
    episodes[group] = episodes.get(group, 0) + 1
    wins[group] = wins.get(group, 0) + bool(steps.rows.success[chain[-1]])
    for r in chain:
      if r in steps.after:
        reached = steps.o.potential_discount * potential[steps.after[r]]
      else:
        reached = steps.raw(r) + steps.cost[r]
      difference[r] = reached - potential[r]
  own, other = _step_part(steps, returns), _step_part(steps, difference)
  step = {}
  for r in steps.all:
    failures = 1 - wins[steps.group[r]] / episodes[steps.group[r]]
    weight = steps.o.potential_weight * failures**steps.o.failure_exponent
    step[r] = own[r] + weight * other[r]
  return steps.weigh(_episode_part(steps), step, 0)


def gagpo(steps):
  inside = steps.o.penalty_scope == 'reward'
  value = steps.mean(steps.returns()[1], steps.anchor)
  estimate = {}
  for chain in steps.chains:
    deltas = []
    for r in chain:
      reward = steps.raw(r) + (steps.cost[r] if inside else 0)
      following = value[steps.after[r]] if r in steps.after else 0
      deltas.append(reward + steps.o.discount * following - value[r])
    decay = steps.o.discount * steps.o.step_lambda
    for k, r in enumerate(chain):
      estimate[r] = sum(decay**d * x for d, x in enumerate(deltas[k:]))
      estimate[r] += 0 if inside else steps.cost[r]
  step = steps.above(estimate, steps.group, lone_episode='zero')
  return steps.weigh(_episode_part(steps), step, 0)


def vineppo(steps):
  values, advantages = steps.rows.state_values, {}
  for chain in steps.chains:
    for k, r in enumerate(chain):
      following = values[chain[k + 1]] if k + 1 < len(chain) else 0
      gain = steps.o.discount * following - values[r]
      advantages[r] = steps.raw(r) + steps.cost[r] + gain
  if steps.o.whiten_advantages:
    tokens = steps.rows.completion_mask.sum(axis=1)
    sampled = np.repeat([advantages[r] for r in steps.all], tokens[steps.all])
    for r in steps.all:
      advantages[r] -= sampled.mean()
      advantages[r] /= sampled.std(ddof=1)
  return advantages


def remax(steps):
  advantages = {}
  for chain in steps.chains:
    total = sum(steps.raw(r) + steps.cost[r] for r in chain)
    for r in chain:
      advantages[r] = total - steps.rows.state_values[chain[0]]
  return advantages


def a_star_po(steps):
  totals, groups = {}, {}
  for chain in steps.chains:
    total = sum(steps.raw(r) + steps.cost[r] for r in chain)
    totals[chain[0]] = total
    groups.setdefault(steps.group[chain[0]], []).append(total)
  advantages = {}
  for chain in steps.chains:
    others = groups[steps.group[chain[0]]]
    mean = sum(np.exp(x / 0.5) for x in others) / len(others)
    for r in chain:
      advantages[r] = totals[chain[0]] - 0.5 * np.log(mean)
  return advantages


def rebel(steps):
  totals, groups = {}, {}
  for chain in steps.chains:
    totals[chain[0]] = sum(steps.raw(r) + steps.cost[r] for r in chain)
    groups.setdefault(steps.group[chain[0]], []).append(totals[chain[0]])
  means = {group: sum(x) / len(x) for group, x in groups.items()}
  return {
    r: totals[chain[0]] - means[steps.group[r]]
    for chain in steps.chains
    for r in chain
  }


def _z_by_group(steps, of):
  scores = {}
  for r, x in of.items():
    others = [y for s, y in of.items() if steps.group[s] == steps.group[r]]
    if len(others) > 1:
      scores[r] = (x - np.mean(others)) / (np.std(others, ddof=1) + 1e-6)
  return scores


def igpo(steps):
  values, gains = steps.rows.state_values, {}
  for chain in steps.chains:
    for r, following in zip(chain, chain[1:], strict=False):
      gains[r] = values[following] - values[r]
  rewards = _z_by_group(steps, gains)
  for k, weight in enumerate(steps.o.component_weights or (1.0,)):
    given = {r: steps.raw(r) + steps.cost[r] for r in steps.all}
    if steps.o.component_weights:
      given = {r: float(steps.rows.components[r, k]) for r in steps.all}
    sums = {c[-1]: sum(given[r] for r in c) for c in steps.chains}
    for r, score in _z_by_group(steps, sums).items():
      rewards[r] = rewards.get(r, 0) + weight * score
  advantages = {}
  for chain in steps.chains:
    for k, r in enumerate(chain):
      advantages[r] = sum(
        steps.o.discount**d * rewards.get(s, 0) for d, s in enumerate(chain[k:])
      )
  return advantages


def polychromic(steps):
  k, groups, advantages = 2, {}, {}
  for chain in steps.chains:
    groups.setdefault(steps.group[chain[0]], []).append(chain)
  for chains in groups.values():
    value = {}
    for chosen in itertools.combinations(range(len(chains)), k):
      own = [chains[n] for n in chosen]
      total = sum(steps.raw(r) + steps.cost[r] for c in own for r in c)
      actions = {tuple(int(steps.rows.actions[r]) for r in c) for c in own}
      value[chosen] = total / k * len(actions) / k
    for n, chain in enumerate(chains):
      mine = [f for chosen, f in value.items() if n in chosen]
      for r in chain:
        if mine:
          advantages[r] = np.mean(mine) - np.mean([*value.values()])
  return advantages


def polychromic_vine(steps):
  # Without branches, all sets are formed at the start.
  return polychromic(steps)


def vines(episodes, k=2):
  """Returns the advantage of each (group, member, turn) that was sampled.

  All responses are valid.
  """

  def before(e, t):
    return e.group, tuple(id(s) for s in e.steps[:t])

  def value(tails):
    distinct = len({tuple(s.result.action for s in tail) for tail in tails})
    returns = [sum(s.result.reward for s in tail) for tail in tails]
    return np.mean(returns) * distinct / k

  advantages = {}
  for t in range(max(len(e.steps) for e in episodes)):
    states = {}
    for e in episodes:
      if e.num_repeated == t:
        states.setdefault(before(e, t), []).append(e)
    for state, own in states.items():
      parents = (
        e for e in episodes if e.num_repeated < t and before(e, t) == state
      )
      own = [*itertools.islice(parents, 1), *own]
      values = {
        chosen: value([own[n].steps[t:] for n in chosen])
        for chosen in itertools.combinations(range(len(own)), k)
      }
      for n, e in enumerate(own if len(own) > k else ()):
        mine = np.mean([f for chosen, f in values.items() if n in chosen])
        for turn in range(t, len(e.steps)):
          key = e.group, e.member, turn
          advantages[key] = mine - np.mean([*values.values()])
  return advantages


def risk_po(steps):
  """Bundles of two groups; the quantiles are those of this batch."""
  by_group = {}
  for chain in sorted(steps.chains, key=lambda c: steps.rows.episodes[c[0]]):
    total = sum(steps.raw(r) + steps.cost[r] for r in chain)
    by_group.setdefault(steps.group[chain[0]], []).append((total, chain))
  sums = []
  groups = [by_group[g] for g in sorted(by_group)]
  for one, other in zip(groups[::2], groups[1::2], strict=False):
    own = [(x + y, c + d) for (x, c), (y, d) in zip(one, other, strict=False)]
    deviation = np.std([x for x, _ in own], ddof=1) if len(own) > 1 else 1
    sums += [(x, rows, deviation or np.inf) for x, rows in own]
  values = np.array([value for value, *_ in sums])
  low, high = np.quantile(values, 0.2), np.quantile(values, 0.8)
  advantages = {}
  for value, rows, deviation in sums:
    rvar = (max(value - low, 0) - max(value - high, 0) + low - high) / 0.6
    cvar = -max(low - value, 0) / 0.2
    for r in rows:
      advantages[r] = (1.5 * cvar + rvar) / 2.5 / deviation
  return advantages


def ecpo(steps):
  _, returns = steps.returns()
  key = {r: (steps.anchor[r], int(steps.rows.actions[r])) for r in steps.all}
  mean, action_mean = (steps.mean(returns, k) for k in (steps.anchor, key))
  shrunk = {}
  for r in steps.all:
    count = sum(key[s] == key[r] for s in steps.all)
    prior = steps.o.prior_steps
    shrunk[r] = (count * action_mean[r] + prior * mean[r]) / (count + prior)
  standardized = _step_part(steps, shrunk)
  between = {r: (action_mean[r] - mean[r]) ** 2 for r in steps.all}
  within = {r: (returns[r] - action_mean[r]) ** 2 for r in steps.all}
  between, within = (steps.mean(x, steps.anchor) for x in (between, within))
  step = {}
  for r in steps.all:
    size = sum(steps.anchor[s] == steps.anchor[r] for s in steps.all)
    signal = between[r] / (between[r] + within[r] + 1e-6)
    weight = np.tanh(size / steps.o.evidence_steps) * signal
    step[r] = weight * standardized[r]
  return steps.weigh(_episode_part(steps), step, 1)


def grpo(steps):
  return _episode_part(steps)


def rloo(steps):
  steps.o.norm = 'leave_one_out'
  return _episode_part(steps)


def dr_grpo(steps):
  steps.o.norm = 'mean'
  return _episode_part(steps)


def graphgpo(steps):
  # Bellman-Ford: number of steps from a state to success.
  distance = {}

  def remaining(r):
    if steps.rows.success[r]:
      return 0
    return distance.get(steps.next_anchor[r], np.inf)

  for _ in steps.all:
    for r in steps.all:
      node = steps.anchor[r]
      distance[node] = min(distance.get(node, np.inf), 1 + remaining(r))
  values = {}
  for r in steps.all:
    known = [d for (g, _), d in distance.items() if g == steps.group[r]]
    farthest = max((d for d in known if d < np.inf), default=0)
    d = min(remaining(r), farthest + 1)
    values[r] = 10 * steps.o.graph_discount**d + steps.cost[r]
  return steps.weigh(_episode_part(steps), _step_part(steps, values), 1)


def g2po(steps):
  reward, discounted = {}, {}
  for chain in steps.chains:
    for k, r in enumerate(chain):
      reward[r] = sum(steps.raw(s) for s in chain)
      discounted[r] = steps.o.discount ** (len(chain) - k) * reward[r]
  value = {}
  for key in set(steps.anchor.values()):
    value[key] = np.mean(
      [discounted[r] for r in steps.all if steps.anchor[r] == key]
    )
  reached = {
    r: value[steps.anchor[steps.after[r]]] if r in steps.after else reward[r]
    for r in steps.all
  }
  by_anchor = _step_part(
    steps, {r: reached[r] + steps.cost[r] for r in steps.all}
  )
  gain = {r: reached[r] - value[steps.anchor[r]] for r in steps.all}
  by_group = steps.above(gain, steps.group, lone_episode='zero')
  step = {r: by_anchor[r] + by_group[r] for r in steps.all}
  return steps.weigh(_episode_part(steps), step, 1)


def hgpo(steps):
  _, returns = steps.returns()
  total = dict.fromkeys(steps.all, 0.0)
  weights = dict.fromkeys(steps.all, 0.0)
  for level in range(1, steps.o.history + 2):
    # Windows of `level` anchors within an episode.
    keys = {}
    for chain in steps.chains:
      for end in range(level, len(chain) + 1):
        window = [steps.anchor[r] for r in chain[end - level : end]]
        keys[chain[end - 1]] = (steps.group[chain[0]], *window)
    for r in keys:
      others = [returns[s] for s in keys if keys[s] == keys[r]]
      if len(others) > 1:
        weight = (level + 1) ** steps.o.level_exponent
        total[r] += weight * _normalize(returns[r], others, steps.o, ddof=0)
        weights[r] += weight
  step = {r: total[r] / (weights[r] or 1) for r in steps.all}
  return steps.weigh(_episode_part(steps), step, 0)


def pass_at_k(steps):
  """Averages over all sets of k episodes of a group."""
  k, advantages = steps.o.set_size, {}
  wins = {c[0]: any(steps.rows.success[r] for r in c) for c in steps.chains}
  for chain in steps.chains:
    members = [f for f in wins if steps.group[f] == steps.group[chain[0]]]
    sets = list(itertools.combinations(members, k))
    scores = [float(any(wins[f] for f in chosen)) for chosen in sets]
    value = 0.0
    if sets and np.std(scores) > 0:
      own = [x for s, x in zip(sets, scores, strict=True) if chain[0] in s]
      value = (np.mean(own) - np.mean(scores)) / np.std(scores)
    advantages |= dict.fromkeys(chain, value)
  return advantages


def t_spmo(steps):
  """Compares every two rows, token by token; returns [R, C]."""
  rows, returns = steps.rows, steps.returns()[1]
  advantages = np.zeros(rows.completion_mask.shape)
  for r in steps.all:
    prompt, ids = int(rows.prompt_lengths[r]), list(rows.tokens[r])
    for end in range(prompt, int(rows.lengths[r])):
      same, others = [], []
      for s in steps.all:
        other = list(rows.tokens[s])
        if (
          steps.group[s] == steps.group[r]
          and rows.prompt_lengths[s] == prompt
          and rows.lengths[s] > end
          and other[:end] == ids[:end]
        ):
          (same if other[end] == ids[end] else others).append(returns[s])
      if others:
        advantages[r, end - prompt] = np.mean(same) - np.mean(others)
  return advantages


def reinforce_pp(steps, baseline=False):
  returns, _ = steps.returns()
  if baseline:
    returns = {
      r: returns[r]
      - np.mean(
        [returns[s] for s in steps.firsts if steps.group[s] == steps.group[r]]
      )
      for r in steps.all
    }
  length = steps.rows.lengths - steps.rows.prompt_lengths
  tokens = np.repeat(
    [returns[r] for r in steps.all], [length[r] for r in steps.all]
  )
  return {
    r: (returns[r] - tokens.mean()) / (tokens.std(ddof=1) + 1e-6)
    for r in steps.all
  }


def reinforce_pp_baseline(steps):
  return reinforce_pp(steps, baseline=True)


def gdpo(steps):
  num_components = steps.rows.components.shape[1]
  weights = steps.o.component_weights or (1.0,) * num_components
  total = dict.fromkeys(steps.all, 0.0)
  for k in range(num_components):
    sums = {}
    for chain in steps.chains:
      episode_sum = sum(float(steps.rows.components[r, k]) for r in chain)
      sums |= dict.fromkeys(chain, episode_sum)
    for r in steps.all:
      others = [
        sums[s] for s in steps.firsts if steps.group[s] == steps.group[r]
      ]
      total[r] += weights[k] * _normalize(
        sums[r], others, steps.o, epsilon=1e-4
      )
  per_episode = np.array([total[r] for r in steps.firsts])
  return {
    r: (total[r] - per_episode.mean()) / (per_episode.std(ddof=1) + 1e-6)
    for r in steps.all
  }


def ppo(steps, values):
  """Returns advantages of tokens [R, C] as sums over later positions."""
  advantages = np.zeros(values.shape)
  length = steps.rows.lengths - steps.rows.prompt_lengths
  for chain in steps.chains:
    positions = [
      (r, c)
      for r in chain
      for c in range(length[r] if steps.o.gae_level == 'token' else 1)
    ]
    reward = {r: steps.raw(r) + steps.cost[r] for r in chain}
    chain_values = [float(values[position]) for position in positions] + [0.0]
    # The last position of a row receives its reward.
    last_positions = {r: k for k, (r, _) in enumerate(positions)}
    deltas = [
      (reward[r] if last_positions[r] == k else 0.0)
      + steps.o.gae_discount * chain_values[k + 1]
      - chain_values[k]
      for k, (r, _) in enumerate(positions)
    ]
    for k, position in enumerate(positions):
      decay = steps.o.gae_discount * steps.o.gae_lambda
      advantages[position] = sum(decay**d * x for d, x in enumerate(deltas[k:]))
  if steps.o.gae_level == 'turn':
    advantages[:] = advantages[:, :1]
  mask = steps.rows.completion_mask
  if steps.o.whiten_advantages:
    sampled = advantages[mask]
    advantages = (advantages - sampled.mean()) / (sampled.std(ddof=1) + 1e-8)
  return np.where(mask, advantages, 0)


def arpo(steps):
  return _episode_part(steps)


def tree_grpo(steps):
  # Without branches, each episode is a tree of its own.
  steps.o = dataclasses.replace(steps.o, lone_episode='zero')
  return _episode_part(steps)


def branches(episodes, *, is_tree, invalid_penalty=0.1):
  """Returns the advantage of each (episode, turn) of groups with branches.

  A response belongs to the member that sampled it, which the parents tell.
  """
  members = {(e.group, e.member): e for e in episodes}

  def owner(e, t):
    while t < e.num_repeated:
      e = members[e.group, e.parent]
    return e.group, e.member, t

  def z(e, others):
    values = [returns[o.group, o.member] for o in others]
    if len(values) < 2:
      return 0.0
    difference = returns[e.group, e.member] - np.mean(values)
    return difference / (np.std(values, ddof=1) + 1e-6)

  returns = {
    key: sum(
      s.result.reward - invalid_penalty * (not s.result.valid) for s in e.steps
    )
    for key, e in members.items()
  }
  leaves = {}
  for e in episodes:
    group = [o for o in episodes if o.group == e.group]
    advantage = z(e, group)
    if is_tree:
      advantage += z(e, [o for o in group if owner(o, 0) == owner(e, 0)])
    for t in range(len(e.steps)):
      leaves.setdefault(owner(e, t), []).append(advantage)
  return {
    (n, t): np.mean(leaves[owner(e, t)])
    for n, e in enumerate(episodes)
    for t in range(len(e.steps))
  }
