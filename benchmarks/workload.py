"""The episodes of simulated iterations, and their lengths.

With `carry_over`, paused episodes continue in the next iteration by the rule of
gigpo_jax.carry_over.
"""

import dataclasses
from collections.abc import Callable, Sequence

import forced

from envs import base
from gigpo_jax import carry_over, rollout, sampler, trajectory
from gigpo_jax.runtime import distributed

_EVALUATION = 10**6  # First index of the evaluation tasks.

Trajectories = list[trajectory.Trajectory]


@dataclasses.dataclass(frozen=True)
class Workload:
  """Episodes of an iteration, and their lengths.

  Attributes:
    groups: groups of an iteration.
    members: episodes of a group.
    evaluation_tasks: episodes of an evaluation; ALFWorld's valid_seen has 140.
    evaluation_every: iterations between two evaluations.
    lengths: turns, prompt tokens and response tokens.
  """

  groups: int = 16
  members: int = 8
  evaluation_tasks: int = 140
  evaluation_every: int = 5
  lengths: forced.Lengths = forced.Lengths()

  def training(self, iteration: int = 0) -> rollout.EpisodeBatch:
    """Returns the episodes that start in an iteration.

    Each has a task of its own; those of a group are consecutive.
    """
    count = self.groups * self.members
    first = iteration * count
    return _batch([base.Task('train', first + n) for n in range(count)])

  def evaluation(self) -> rollout.EpisodeBatch:
    """Returns the evaluation episodes; their lengths are others."""
    count = self.evaluation_tasks
    return _batch(
      [base.Task('evaluation', _EVALUATION + n) for n in range(count)]
    )


def _batch(tasks: Sequence[base.Task]) -> rollout.EpisodeBatch:
  return rollout.EpisodeBatch(tasks, 1, (rollout.TRAIN, 0), sampler.Sampling())


def host_part(
  batch: rollout.EpisodeBatch, host: int, hosts: int
) -> rollout.EpisodeBatch:
  """Returns the episodes of a batch that a host runs."""
  tasks, paused = (
    [episodes[n] for n in distributed.equal_slice(len(episodes), host, hosts)]
    for episodes in (batch.tasks, batch.paused)
  )
  return dataclasses.replace(batch, tasks=tasks, paused=paused)


@dataclasses.dataclass
class Iterations:
  """Iterations one after another, with the groups that wait between them.

  Attributes:
    work: the episodes of each iteration.
    rule: decides which groups wait.
    iteration: index of the next iteration.
    waiting: groups that continue in it.
  """

  work: Workload
  rule: carry_over.CarryOver
  iteration: int = 0
  waiting: tuple[carry_over.WaitingGroup, ...] = ()

  def batches(self) -> list[rollout.EpisodeBatch]:
    """Returns the next iteration's episodes, as `collection.train_batches`."""
    new = self.work.training(self.iteration)
    num_new = self.rule.num_new(self.waiting, self.work.groups)
    started = new.tasks[: num_new * self.work.members]
    paused = carry_over.paused_episodes(self.waiting)
    return [
      *(
        dataclasses.replace(
          new,
          tasks=(),
          paused=episodes,
          pause_after=self.rule.turns(self.iteration - start),
        )
        for start, episodes in paused.items()
      ),
      dataclasses.replace(new, tasks=started, pause_after=self.rule.turns(0)),
    ]

  def play(
    self,
    run: Callable[[list[rollout.EpisodeBatch]], list[Trajectories]],
  ) -> Trajectories:
    """Plays the next iteration; returns the episodes that it trains on.

    Args:
      run: returns the trajectories of each batch.
    """
    *continued, new = run(self.batches())
    members = self.work.members
    new = [
      dataclasses.replace(t, group=t.group // members, member=t.group % members)
      for t in new
    ]
    trained, self.waiting = self.rule.select(
      carry_over.merge(self.waiting, [*continued, new], self.iteration),
      self.work.groups,
      self.iteration,
    )
    self.iteration += 1
    return carry_over.assign_group_indices(trained)
