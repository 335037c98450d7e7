"""The episodes of an iteration: which start, which continue, which are kept.

The current policy plays new groups, the unfinished groups of earlier iterations
and, if it is due, the evaluation in one rollout. The filter may draw further
groups. Some algorithms then play continuations from the states of episodes.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

from envs import base
from gigpo_jax import (
  algorithms,
  branching,
  carry_over,
  continuations,
  evaluation,
  group_filter,
  rollout,
  sampler,
  trajectory,
)
from gigpo_jax import metrics as metrics_lib
from gigpo_jax.run import run_builders, run_logs, run_state
from gigpo_jax.runtime import distributed

Metrics = dict[str, float]


def collect(
  parts: run_builders.Parts,
  runner: rollout.EpisodeRunner,
  state: run_state.RunState,
  iteration: int,
  plot: Callable[[rollout.EpisodeRunner], None] | None = None,
  *,
  with_evaluation: bool = False,
  waiting: Sequence[carry_over.WaitingGroup] = (),
) -> tuple[group_filter.CollectedGroups, Metrics]:
  """Runs the episodes of an iteration with the current policy.

  Args:
    parts: the objects of the run.
    runner: runs the episodes.
    state: parameters of the policy.
    iteration: index of the iteration.
    plot: draws the timeline of the rollout, which is then traced.
    with_evaluation: whether the rollout also plays the evaluation tasks.
    waiting: groups of earlier iterations that continue.
  """
  metrics: Metrics = {}
  play = functools.partial(
    runner.run_batches,
    state.policy.params,
    base_params=parts.learner.base,
    trace=plot is not None,
    label=f'iteration {iteration}',
  )

  def refill(position: int) -> Sequence[trajectory.Trajectory]:
    tasks = parts.tasks.at(position)
    (like,) = train_batches(parts, (), tasks, position, iteration)
    (roots,) = play([like], is_continued=True)
    return add_branches(parts, roots, like, play)

  with run_logs.timed(metrics, 'time/rollout_secs'):
    tasks = parts.tasks.at(iteration)
    batches = train_batches(parts, waiting, tasks, iteration, iteration)
    others = [parts.eval_batch] if with_evaluation else []
    played = play([*batches, *others])
    evaluated = played[len(batches) :]
    chosen, waiting = parts.carry_over.select(
      carry_over.merge(waiting, played[: len(batches)], iteration),
      parts.config.rollout.groups,
      iteration,
    )
    roots = carry_over.assign_group_indices(chosen)
    first = add_branches(parts, roots, batches[-1], play)
    groups = group_filter.collect(
      first,
      map(refill, parts.group_filter.refills(iteration)),
      parts.group_filter,
      groups=parts.config.rollout.groups,
      iteration=iteration,
    )
    parts.stop_if_failed(groups.episodes)
    metrics |= runner.metrics()
    if plot:
      plot(runner)
  groups = dataclasses.replace(groups, waiting=waiting)
  groups, value_metrics = estimate_state_values(
    parts, runner, state, groups, iteration
  )
  metrics |= value_metrics
  runner.sampler.release()  # The update needs the memory.
  metrics |= groups.metrics
  metrics |= parts.carry_over.metrics(groups.episodes, groups.waiting)
  if algorithms.branches(parts.algorithm):
    metrics |= branching.metrics(groups.episodes)
  for episodes in evaluated:
    parts.stop_if_failed(episodes)
    metrics |= evaluation.summarize(episodes)
  if groups.episodes:  # Not all groups wait.
    metrics |= metrics_lib.summarize(groups.episodes, prefix='train')
  return groups, metrics


def add_branches(
  parts: run_builders.Parts,
  roots: Sequence[trajectory.Trajectory],
  like: rollout.EpisodeBatch,
  play: Callable[..., list[list[trajectory.Trajectory]]],
) -> Sequence[trajectory.Trajectory]:
  """Returns groups with the branches of the algorithm, if it has any.

  Args:
    parts: the objects of the run.
    roots: the episodes with which groups start, by group and member.
    like: the batch in which they were played.
    play: `EpisodeRunner.run_batches` with the current policy.
  """
  if not algorithms.branches(parts.algorithm):
    return roots
  return branching.grow(
    roots,
    parts.algorithm,
    like,
    members=parts.config.rollout.episodes_per_group,
    seed=parts.config.seed,
    play=lambda batch: play([batch], is_continued=True)[0],
  )


def estimate_state_values(
  parts: run_builders.Parts,
  runner: rollout.EpisodeRunner,
  state: run_state.RunState,
  groups: group_filter.CollectedGroups,
  iteration: int,
) -> tuple[group_filter.CollectedGroups, Metrics]:
  """Adds values of states if the algorithm needs them; returns metrics, too."""
  count = algorithms.num_continuations(parts.algorithm)
  if not count or not groups.kept:
    return groups, {}
  is_greedy = algorithms.has_greedy_start(parts.algorithm)
  states = continuations.find_states(groups.kept, only_starts=is_greedy)
  (like,) = train_batches(parts, (), [], iteration, iteration)
  if is_greedy:
    like = dataclasses.replace(like, sampling=sampler.Sampling(temperature=0.0))
  metrics: Metrics = {}
  with run_logs.timed(metrics, 'time/continuations_secs'):
    (played,) = runner.run_batches(
      state.policy.params,
      [continuations.make_batch(states, count, like)],
      base_params=parts.learner.base,
      label=f'continuations {iteration}',
    )
  parts.stop_if_failed(played)
  groups, value_metrics = continuations.add_values(
    groups,
    states,
    played,
    1.0 if is_greedy else getattr(parts.algorithm, 'discount', 1.0),
    algorithms.invalid_penalty(parts.algorithm),
  )
  return groups, metrics | value_metrics


def train_batches(
  parts: run_builders.Parts,
  waiting: Sequence[carry_over.WaitingGroup],
  tasks: list[base.Task],
  position: int,
  iteration: int,
) -> list[rollout.EpisodeBatch]:
  """Returns the training episodes for a runner: paused ones, then new ones.

  Args:
    parts: the objects of the run.
    waiting: groups of earlier iterations that continue.
    tasks: the tasks at a position, one per group; the first of them start.
    position: position of the tasks in the stream of tasks.
    iteration: index of the iteration.
  """
  options, rule = parts.config.rollout, parts.carry_over

  def make_batch(
    tasks: Sequence[base.Task], position: int, start: int
  ) -> rollout.EpisodeBatch:
    return rollout.EpisodeBatch(
      tasks,
      parts.group_size,
      (rollout.TRAIN, position),
      parts.sampling,
      group_filter.max_turns(options.horizon, start),
      rule.turns(iteration - start),
    )

  return [
    *(
      dataclasses.replace(make_batch((), start, start), paused=episodes)
      for start, episodes in carry_over.paused_episodes(waiting).items()
    ),
    make_batch(
      tasks[: rule.num_new(waiting, options.groups)], position, iteration
    ),
  ]


def prefetch(
  parts: run_builders.Parts,
  runner: rollout.EpisodeRunner,
  waiting: Sequence[carry_over.WaitingGroup],
  iteration: int,
) -> None:
  """Makes the workers load the tasks that start in an iteration, if any."""
  if iteration == parts.config.num_iterations:
    return
  *others, new = train_batches(
    parts, waiting, parts.tasks.at(iteration), iteration, iteration
  )
  before = [len(distributed.process_slice(len(b.paused))) for b in others]
  runner.prefetch(new.tasks, parts.group_size, sum(before))
