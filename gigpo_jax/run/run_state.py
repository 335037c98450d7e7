"""The state of a run between two iterations, which checkpoints save.

Tasks, random streams and environments are functions of the seed and the
iteration. A resumed run therefore needs only the state on the devices
(`RunState`) and a few plain values about the past (`History`).
"""

import dataclasses
import math
from typing import Any

import flax.struct

from gigpo_jax import algorithms, carry_over, group_filter, guard, learner
from gigpo_jax.runtime import files


@flax.struct.dataclass
class RunState:
  """Parameters and optimizer states, on the devices. Updates donate them.

  Attributes:
    policy: state of the policy.
    critic: state of the critic; None for algorithms without a critic.
    reference: frozen parameters of the reference policy, which are never saved;
      None if neither the loss nor the reward needs it.
  """

  policy: learner.TrainState
  critic: learner.TrainState | None = None
  reference: dict | None = None

  def to_dict(self) -> dict[str, learner.TrainState]:
    """Returns the states to save, by their names in a checkpoint."""
    states = {'policy': self.policy, 'critic': self.critic}
    return {name: s for name, s in states.items() if s is not None}


@dataclasses.dataclass(frozen=True)
class History:
  """Values on the host that later iterations depend on.

  Attributes:
    iteration: the last finished iteration; -1 before the first.
    task_outcomes: state of the task sampler, `TaskSampler.state()`.
    counts: total cost of the training episodes.
    entropies: mean token entropy of the policy in each update, in nats.
    skipped: number of updates skipped in a row at the end, of the policy
      ('update') and of the critic ('critic').
    waiting: groups that continue in the next iteration.
    guard_state: state of the guards against collapse.
    kl_factor: factor of the KL's weight; see `kl.Control`.
    algorithm_state: state of a stateful algorithm; see `algorithms.Algorithm`.
  """

  iteration: int = -1
  task_outcomes: dict[str, Any] = dataclasses.field(default_factory=dict)
  counts: group_filter.SampleCounts = group_filter.SampleCounts()
  entropies: tuple[float, ...] = ()
  skipped: dict[str, float] = dataclasses.field(default_factory=dict)
  waiting: tuple[carry_over.WaitingGroup, ...] = ()
  guard_state: guard.GuardState = guard.GuardState()
  kl_factor: float = 1.0
  algorithm_state: dict[str, float] = dataclasses.field(default_factory=dict)

  @property
  def next_iteration(self) -> int:
    """The first iteration of a resumed run."""
    return self.iteration + 1

  @property
  def is_rolled_back(self) -> bool:
    """Whether the last finished iteration ended in a rollback."""
    return 0 <= self.iteration == self.guard_state.good

  def after(
    self,
    iteration: int,
    groups: group_filter.CollectedGroups,
    task_outcomes: dict[str, Any],
    metrics: dict[str, float],
  ) -> 'History':
    """Returns the history extended by an iteration.

    Args:
      iteration: index of the iteration.
      groups: its episodes.
      task_outcomes: state of the task sampler after these episodes.
      metrics: metrics of its update. Without an update they have no entropy.
    """
    entropies = self.entropies
    if math.isfinite(entropy := metrics.get('loss/entropy', math.nan)):
      entropies += (entropy,)
    skipped = {
      name: metrics[f'{name}/skipped_in_row']
      for name in ('update', 'critic')
      if f'{name}/skipped_in_row' in metrics
    }
    spent = group_filter.SampleCounts.of(groups.episodes)
    return History(
      iteration=iteration,
      task_outcomes=task_outcomes,
      counts=self.counts + spent + groups.further,
      entropies=entropies,
      skipped=self.skipped | skipped,
      waiting=groups.waiting,
      guard_state=self.guard_state,
      kl_factor=metrics.get('update/next_kl_factor', self.kl_factor),
      algorithm_state=algorithms.next_state(self.algorithm_state, metrics),
    )

  def to_json(self) -> dict[str, Any]:
    """Returns plain values under the names of the checkpoint format."""
    return {
      'version': files.VERSION,
      'iteration': self.iteration,
      'tasks': self.task_outcomes,
      'spent': dataclasses.asdict(self.counts),
      'entropies': list(self.entropies),
      'skipped': dict(self.skipped),
      'waiting': carry_over.encode(self.waiting),
      'guard': self.guard_state.to_json(),
      'kl_factor': self.kl_factor,
      'algorithm': dict(self.algorithm_state),
    }

  @classmethod
  def from_json(cls, values: dict[str, Any], iteration: int) -> 'History':
    """Returns the history that `to_json` wrote.

    Args:
      values: plain values of a checkpoint.
      iteration: iteration of the checkpoint.

    Raises:
      ValueError, KeyError, TypeError or AttributeError: if they are not the
        history of this iteration.
    """
    values = files.take_version(values, 'host state')
    if values['iteration'] != iteration:
      raise ValueError(f'iteration is {values["iteration"]}')
    return cls(
      iteration=iteration,
      task_outcomes=values['tasks'],
      counts=group_filter.SampleCounts(
        **{name: int(value) for name, value in values['spent'].items()}
      ),
      entropies=tuple(float(value) for value in values['entropies']),
      skipped={
        str(name): float(value) for name, value in values['skipped'].items()
      },
      # Older checkpoints have none.
      waiting=carry_over.decode(values['waiting'])
      if 'waiting' in values
      else (),
      # Older releases have no guards.
      guard_state=guard.GuardState.from_json(values['guard'])
      if 'guard' in values
      else guard.GuardState(),
      kl_factor=float(values.get('kl_factor', 1.0)),
      algorithm_state={
        str(name): float(value)
        for name, value in values.get('algorithm', {}).items()
      },
    )
