"""Rows for tests of algorithms: the golden batch and random ones."""

import numpy as np

from gigpo_jax import batch


def golden_rows():
  """Returns the golden batch of advantages_test and two padding rows."""
  rows = batch.pack(
    [np.array([1, 2])] * 8,
    [np.array([3])] * 8,
    max_prompt_tokens=2,
    max_completion_tokens=1,
    row_multiple=10,
    num_components=2,
  )
  rows.groups[:8] = 0
  rows.episodes[:8] = [0, 0, 0, 1, 1, 1, 2, 2]
  rows.steps[:8] = [0, 1, 2, 0, 1, 2, 0, 1]
  rows.anchors[:8] = [0, 1, 2, 0, 1, 1, 0, 3]
  rows.rewards[[2, 7]] = rows.components[[2, 7], 0] = 10
  rows.next_anchors[:8] = [1, 2, -1, 1, 1, 1, 3, -1]
  rows.success[[2, 7]] = True
  # In a: to b, to d; in b: to c, stay.
  rows.actions[:8] = [0, 2, 4, 0, 3, 3, 1, 5]
  # The first two turns of episodes 0 and 1 start with the same responses.
  rows.state_values[:8] = [5, 6, 10, 5, 6, 2, 5, 8]
  return rows


def random_rows(seed, groups=4):
  """Returns random walks over few states, in random order, with padding.

  They include a group of one episode, zero-variance groups, invalid actions,
  unknown final states and responses of several lengths.
  """
  rng = np.random.default_rng(seed)
  walks = []
  for group in range(groups):
    wins = (True, False, None)[rng.integers(3)]
    for member in range(1 if group == 0 else rng.integers(2, 6)):
      states = rng.integers(0, 4, rng.integers(2, 8))
      won = rng.random() < 0.5 if wins is None else wins
      walks.append((group, member, states, won))
  steps = [
    (group, member, t, states[t], states[t + 1], t == len(states) - 2, won)
    for group, member, states, won in walks
    for t in range(len(states) - 1)
  ]
  rng.shuffle(steps)
  rows = batch.pack(
    [np.array([1])] * len(steps),
    [np.ones(rng.integers(1, 6), int) for _ in steps],
    max_prompt_tokens=1,
    max_completion_tokens=6,
    row_multiple=128,
    num_components=2,
  )
  for r, (group, member, t, state, following, last, won) in enumerate(steps):
    rows.groups[r], rows.episodes[r], rows.steps[r] = group, member, t
    unknown = last and rng.random() < 0.5
    rows.anchors[r], rows.next_anchors[r] = state, -1 if unknown else following
    rows.success[r] = won and last
    rows.rewards[r] = 10.0 * rows.success[r]
    rows.valid[r] = rng.random() < 0.8
    rows.components[r] = rows.rewards[r], rng.integers(3)
    rows.actions[r] = rng.integers(3)
    words = np.random.default_rng((seed, r)).integers(1, 3, 5)
    rows.tokens[r, 1 : rows.lengths[r]] = words[: rows.lengths[r] - 1]
  rows.state_values[:] = np.random.default_rng(seed).normal(5, 2, 128)
  return rows
