"""Advantages of every algorithm by loops over steps, float64.

Written from the formulas, for comparison; groups and episodes are found with
dictionaries, and statistics are numpy's.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass
class Options:
  """As the algorithms have them, their defaults."""

  discount: float = 0.95
  step_weight: float = 1.0
  invalid_penalty: float = 0.1
  norm: str = 'mean_std'
  episode_stats: str = 'trajectories'
  penalty_scope: str = 'reward'
  lone_episode: str = 'zero'
  history: int = 2
  level_exponent: float = 1.0
  episode_weight: float = 0.0
  graph_discount: float = 0.1
  component_weights: tuple = ()
  gae_level: str = 'token'
  gae_discount: float = 1.0
  gae_lambda: float = 1.0
  whiten_advantages: bool = True


class Steps:
  """Rows as dictionaries by row number, padding left out."""

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
      for one, other in zip(chain, chain[1:], strict=False):
        self.after[one], self.before[other] = other, one

  def raw(self, r):
    return float(self.rows.rewards[r])

  def returns(self):
    """Episode and step returns, with penalties where they belong."""
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
    """Values above the mean of those with their key."""
    o = dataclasses.replace(self.o, **changes)
    return {
      r: _above(
        values[r],
        [values[s] for s in entries or self.all if keys[s] == keys[r]],
        o,
      )
      for r in values
    }

  def by_episode(self, values, **changes):
    """As `above`, within groups, an entry for each episode."""
    return self.above(values, self.group, self.firsts, **changes)


def _above(value, others, o, ddof=1, epsilon=1e-6):
  if len(others) == 1:
    return value if o.lone_episode == 'raw' else 0.0
  # Sums of equal numbers are not always equal.
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


def _by_steps(steps, values):
  return steps.above(values, steps.anchor, lone_episode='zero')


def gigpo(steps):
  one, other = _episode_part(steps), _by_steps(steps, steps.returns()[1])
  return {r: one[r] + steps.o.step_weight * other[r] for r in steps.all}


def grpo(steps):
  return _episode_part(steps)


def rloo(steps):
  steps.o.norm = 'leave_one_out'
  return _episode_part(steps)


def dr_grpo(steps):
  steps.o.norm = 'mean'
  return _episode_part(steps)


def graphgpo(steps):
  # Bellman and Ford: steps from a state to success.
  distance = {}

  def left(r):
    if steps.rows.success[r]:
      return 0
    return distance.get(steps.next_anchor[r], np.inf)

  for _ in steps.all:
    for r in steps.all:
      here = steps.anchor[r]
      distance[here] = min(distance.get(here, np.inf), 1 + left(r))
  values = {}
  for r in steps.all:
    known = [d for (g, _), d in distance.items() if g == steps.group[r]]
    farthest = max((d for d in known if d < np.inf), default=0)
    d = min(left(r), farthest + 1)
    values[r] = 10 * steps.o.graph_discount**d + steps.cost[r]
  one, other = _episode_part(steps), _by_steps(steps, values)
  return {r: one[r] + steps.o.step_weight * other[r] for r in steps.all}


def g2po(steps):
  reward, ahead = {}, {}
  for chain in steps.chains:
    for k, r in enumerate(chain):
      reward[r] = sum(steps.raw(s) for s in chain)
      ahead[r] = steps.o.discount ** (len(chain) - k) * reward[r]
  value = {}
  for key in set(steps.anchor.values()):
    value[key] = np.mean(
      [ahead[r] for r in steps.all if steps.anchor[r] == key]
    )
  led = {
    r: value[steps.anchor[steps.after[r]]] if r in steps.after else reward[r]
    for r in steps.all
  }
  node = _by_steps(steps, {r: led[r] + steps.cost[r] for r in steps.all})
  gain = {r: led[r] - value[steps.anchor[r]] for r in steps.all}
  task = steps.above(gain, steps.group, lone_episode='zero')
  one = _episode_part(steps)
  return {
    r: one[r] + steps.o.step_weight * (node[r] + task[r]) for r in steps.all
  }


def hgpo(steps):
  _, returns = steps.returns()
  total = dict.fromkeys(steps.all, 0.0)
  weights = dict.fromkeys(steps.all, 0.0)
  for level in range(1, steps.o.history + 2):
    # Windows of `level` anchors inside of an episode; none before its start.
    keys = {}
    for chain in steps.chains:
      for end in range(level, len(chain) + 1):
        window = [steps.anchor[r] for r in chain[end - level : end]]
        keys[chain[end - 1]] = (steps.group[chain[0]], *window)
    for r in keys:
      others = [returns[s] for s in keys if keys[s] == keys[r]]
      if len(others) > 1:
        weight = (level + 1) ** steps.o.level_exponent
        total[r] += weight * _above(returns[r], others, steps.o, ddof=0)
        weights[r] += weight
  one = _episode_part(steps)
  return {
    r: steps.o.episode_weight * one[r] + total[r] / (weights[r] or 1)
    for r in steps.all
  }


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
  number = steps.rows.components.shape[1]
  weights = steps.o.component_weights or (1.0,) * number
  total = dict.fromkeys(steps.all, 0.0)
  for k in range(number):
    sums = {}
    for chain in steps.chains:
      whole = sum(float(steps.rows.components[r, k]) for r in chain)
      sums |= dict.fromkeys(chain, whole)
    for r in steps.all:
      others = [
        sums[s] for s in steps.firsts if steps.group[s] == steps.group[r]
      ]
      total[r] += weights[k] * _above(sums[r], others, steps.o, epsilon=1e-4)
  each = np.array([total[r] for r in steps.firsts])
  return {
    r: (total[r] - each.mean()) / (each.std(ddof=1) + 1e-6) for r in steps.all
  }


def ppo(steps, values):
  """Advantages of tokens [R, C]: sums of what is to come, link by link."""
  found = np.zeros(values.shape)
  length = steps.rows.lengths - steps.rows.prompt_lengths
  for chain in steps.chains:
    links = [
      (r, c)
      for r in chain
      for c in range(length[r] if steps.o.gae_level == 'token' else 1)
    ]
    reward = {r: steps.raw(r) + steps.cost[r] for r in chain}
    told = [float(values[link]) for link in links] + [0.0]
    # A row's reward comes with its last link.
    ends = {r: k for k, (r, _) in enumerate(links)}
    deltas = [
      (reward[r] if ends[r] == k else 0.0)
      + steps.o.gae_discount * told[k + 1]
      - told[k]
      for k, (r, _) in enumerate(links)
    ]
    for k, link in enumerate(links):
      decay = steps.o.gae_discount * steps.o.gae_lambda
      found[link] = sum(decay**d * x for d, x in enumerate(deltas[k:]))
  if steps.o.gae_level == 'turn':
    found[:] = found[:, :1]
  mask = steps.rows.completion_mask
  if steps.o.whiten_advantages:
    inside = found[mask]
    found = (found - inside.mean()) / (inside.std(ddof=1) + 1e-8)
  return np.where(mask, found, 0)
