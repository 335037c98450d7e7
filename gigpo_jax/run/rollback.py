"""Answers to the alarms of a run: smaller steps and rollbacks.

A rollback restores policy, critic and their optimizers from the last good
checkpoint. Everything else continues: the next iteration plays its own tasks
with its own random numbers, the cost of the discarded iterations stays counted,
and later updates are smaller. The run therefore does not repeat the iterations
that ended in the alarm.

A checkpoint is good once the iteration after it, which its policy played, has
raised no alarm. Before there is one, a rollback restores the initial policy.
The restored state is the checkpoint of the iteration that raised the alarm, so
that a resumed run equals an uninterrupted one.
"""

import dataclasses

import jax

from gigpo_jax import checkpoint
from gigpo_jax.run import run_builders, run_state
from gigpo_jax.runtime import console


def check_alarms(
  parts: run_builders.Parts,
  saver: checkpoint.Checkpointer,
  state: run_state.RunState,
  history: run_state.History,
  metrics: dict[str, float],
) -> tuple[run_state.RunState, run_state.History, dict[str, float]]:
  """Reports the alarms of an iteration and answers them.

  Args:
    parts: the objects of the run.
    saver: the checkpoints.
    state: state after the iteration; deleted by a rollback.
    history: history after the iteration.
    metrics: metrics of the iteration.

  Returns:
    State, history and metrics of the guards. After a rollback,
    `history.is_rolled_back`, and the state must be saved.
  """
  before = history.guard_state
  warms_up = (
    parts.critic is not None
    and history.iteration < parts.config.critic.warmup_iterations
  )
  after, alarms = parts.guard.check(before, metrics, only_warn=warms_up)
  for alarm in alarms:
    console.log(f'alarm: {alarm}')
  if after.rollbacks > before.rollbacks:
    state = restore(parts, saver, state, before.good)
    after = dataclasses.replace(after, good=history.iteration)
  elif alarms and parts.guard.rolls_back and not warms_up:
    console.log(
      f'guard.max_rollbacks={before.rollbacks}: all are used; the policy stays'
    )
  elif not alarms and history.iteration % parts.config.checkpoint.every == 0:
    # Whatever the action: a resumed run may change it.
    latest = history.iteration - 1
    if saver.newest_until(latest) == latest:
      after = dataclasses.replace(after, good=latest)
  if after.step_scale != before.step_scale:
    console.log(f'later updates have {after.step_scale:g} of their size')
  history = dataclasses.replace(history, guard_state=after)
  return state, history, parts.guard.metrics(after, alarms)


def restore(
  parts: run_builders.Parts,
  saver: checkpoint.Checkpointer,
  state: run_state.RunState,
  iteration: int,
) -> run_state.RunState:
  """Returns the state after an earlier iteration; -1 is the start.

  Args:
    parts: the objects of the run.
    saver: the checkpoints.
    state: current state, which is deleted, because the other one needs the
      memory.
    iteration: iteration of a checkpoint. If it is gone or damaged, the newest
      intact one before it is restored.

  Raises:
    ValueError: in one line, if all of these checkpoints are damaged.
  """
  jax.tree.map(lambda x: x.delete(), state.to_dict())
  if saver.newest_until(iteration) < 0:
    console.log('rolled back to the initial policy')
    policy = parts.learner.init(parts.bundle.load())
    critic = run_builders.init_critic(parts)
    return state.replace(policy=policy, critic=critic)
  saver.wait()
  restored, states, _ = saver.restore(
    parts.abstract_states(), iteration=iteration, or_earlier=True
  )
  console.log(f'rolled back to the checkpoint of iteration {restored}')
  return state.replace(**states)
