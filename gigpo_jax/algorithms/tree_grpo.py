"""Tree-GRPO (arXiv:2509.21240): trees of episodes, compared within and across.

A group consists of trees: a root and the episodes that branch from it at random
turns (`branching`). All turns of an episode are equally likely, and every tree
of a group gets a branch before any gets the next one. With E the return of an
episode, z(E) = (E - mean) / (std + 1e-6), and

    A = z(E) over the episodes of its tree + z(E) over those of its group.

A tree of one episode has no first term. A turn that several episodes share has
the mean of their advantages.

# Differs from the paper: one round of expansion. A shared turn is trained on
once. The share of roots is this project's.
"""

import dataclasses
from typing import ClassVar

from gigpo_jax import algorithms, batch, branching, options, row_stats

PRESETS = {'tree_grpo': {'algorithm.root_share': 0.25}}
conflicts = branching.conflicts


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """A = z(E) in the tree + z(E) in the group; branches at random.

  Attributes:
    root_share: share of a group's episodes that are played from the start; the
      others branch from them.
    invalid_penalty: subtracted from the reward of an invalid response.
  """

  needs_values: ClassVar[bool] = False
  needs_group: ClassVar[bool] = True

  root_share: float = options.number(0.5, above=0, high=1, note='1 is GRPO')
  invalid_penalty: float = options.number(0.1, low=0, high=1_000_000)

  def __post_init__(self):
    options.check(self)

  branch_order = staticmethod(branching.random_order)

  def compute_advantages(self, rows: batch.Rows) -> algorithms.AlgorithmOutput:
    """Returns one advantage per row, 0 for padding."""
    episodes = row_stats.episodes(rows, self.invalid_penalty)
    # Episodes of a tree share the response of the first turn.
    roots = rows.responses[row_stats.first_rows(rows, episodes)].astype(int)
    # An agent's episodes are compared with each other only.
    trees = roots * episodes.num_groups + episodes.groups
    advantages = episodes.to_rows(
      row_stats.group_z_scores(episodes.returns, trees)
      + row_stats.group_z_scores(episodes.returns, episodes.groups)
    )
    return algorithms.make_output(advantages, rows)
