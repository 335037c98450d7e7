"""Tests of groups that continue in the next iteration."""

import dataclasses
import types

import numpy as np
import pytest

from configs import base as config_base
from envs import base
from gigpo_jax import carry_over, rollout, trajectory
from gigpo_jax.run import collection, run_builders, run_state

FIRST = base.Observation('p', 's', 'a', 't', 'x', ('go',))


def make_step(index: int = 0, *, done: bool = False) -> trajectory.Step:
  observation = None if done else dataclasses.replace(FIRST, prompt=f'{index}')
  return trajectory.Step(
    prompt_ids=np.arange(3, dtype=np.int32),
    completion_ids=np.array([5, index], np.int32),
    log_probs=np.array([-1 / 3, -0.1 * index], np.float32),
    truncated=False,
    prompt_shortened=index == 1,
    anchor='a',
    observation='t',
    response='go \ud800',  # A lone surrogate, as tokens may decode to.
    result=base.StepResult(
      observation, 0.1, True, 'go', done, done, {'room': 0.3}, None
    ),
  )


def make_episode(
  turns: int, length: int, group: int = 0, member: int = 0
) -> trajectory.Trajectory:
  """Returns an episode of `length` turns, of which `turns` were played."""
  over = turns >= length
  steps = [make_step(n, done=n + 1 == length) for n in range(turns)]
  return trajectory.Trajectory(
    task=base.Task('train', group),
    task_type='pick',
    group=group,
    member=member,
    steps=tuple(steps),
    first_observation=FIRST,
    is_paused=not over,
  )


def continue_episode(
  episode: trajectory.Trajectory, length: int, turns: int | None
) -> trajectory.Trajectory:
  """Plays up to `turns` more turns of an episode."""
  played = len(episode.steps)
  end = length if turns is None else min(played + turns, length)
  new = tuple(make_step(n, done=n + 1 == length) for n in range(played, end))
  return dataclasses.replace(
    episode,
    steps=episode.steps + new,
    is_paused=end != length,
  )


def play(
  rule: carry_over.CarryOver, lengths: list, groups: int, iterations: int
) -> list[tuple[list, tuple]]:
  """Plays iterations; returns (trained, waiting) groups of each.

  Args:
    rule: the rule.
    lengths: number of turns by group, in the order of their start, and member.
    groups: G.
    iterations: number of iterations.
  """
  waiting, started, results = (), 0, []
  for iteration in range(iterations):
    played = [
      [
        continue_episode(
          t, lengths[t.group][t.member], rule.turns(iteration - start)
        )
        for t in episodes
      ]
      for start, episodes in carry_over.paused_episodes(waiting).items()
    ]
    count = rule.num_new(waiting, groups)
    new = [
      continue_episode(
        make_episode(0, length, n, member), length, rule.turns(0)
      )
      for n in range(started, started + count)
      for member, length in enumerate(lengths[n])
    ]
    started += count
    merged = carry_over.merge(waiting, [*played, new], iteration)
    trained, waiting = rule.select(merged, groups, iteration)
    results.append((trained, waiting))
  return results


def tasks(groups) -> list[int]:
  return [group.episodes[0].task.index for group in groups]


def ages(group: carry_over.WaitingGroup) -> list[list[int]]:
  return [[step.age for step in t.steps] for t in group.episodes]


def test_groups_and_ages_by_hand():
  # Two turns per iteration, G = 2, two members each.
  rule = carry_over.CarryOver(2)
  lengths = [[1, 5], [2, 2], [3, 1], [1, 1], [4, 2], [2, 2], [1, 2]]
  (one, wait), (two, wait_two), (three, wait_three) = play(rule, lengths, 2, 3)
  # Group 1 is complete: 1 >= G / 2. Group 0 waits for its member of 5 turns.
  assert (tasks(one), tasks(wait)) == ([1], [0])
  assert ages(one[0]) == [[0, 0], [0, 0]]
  # Groups 2 and 3 start. 3 ends; 0 has played 4 turns, 2 lacks one.
  assert (tasks(two), tasks(wait_two)) == ([3], [0, 2])
  # 4 and 5 start. 0, 2 and 5 are complete; the oldest two are trained on.
  assert (tasks(three), tasks(wait_three)) == ([0, 2], [4, 5])
  assert ages(three[0]) == [[2], [2, 2, 1, 1, 0]]
  assert ages(three[1]) == [[1, 1, 0], [1]]
  # Group 5 is complete and waits, so that only one group starts.
  assert rule.num_new(wait_three, 2) == 1
  values = rule.metrics(carry_over.assign_group_indices(three), wait_three)
  assert values == {
    'carry/waiting_groups': 2,
    'carry/paused_episodes': 1,
    'carry/staleness_mean': pytest.approx((2 + 2 + 2 + 1 + 1 + 1 + 1 + 1) / 10),
    'carry/staleness_max': 2,
    'carry/stale_share': 0.8,
  }
  # Failed episodes are not trained on.
  long, short = three[1].episodes
  failed = dataclasses.replace(long, failure='worker died')
  values = rule.metrics([failed, short], wait_three)
  assert values['carry/staleness_mean'] == values['carry/stale_share'] == 1


def test_no_group_starts_while_more_than_enough_wait():
  # One turn per iteration, G = 2. Groups 0 to 5 end together in iteration 2.
  rule = carry_over.CarryOver(1)
  lengths = [[3], [3], [2], [2], [1], [1]]
  *_, (trained, waiting) = play(rule, lengths, 2, 3)
  assert (tasks(trained), tasks(waiting)) == ([0, 1], [2, 3, 4, 5])
  assert rule.num_new(waiting, 2) == 0


def test_continued_episodes_keep_their_stream_and_their_horizon():
  rollout_options = types.SimpleNamespace(groups=3, horizon=((0, 10), (4, 20)))
  parts = types.SimpleNamespace(
    config=types.SimpleNamespace(rollout=rollout_options),
    carry_over=carry_over.CarryOver(2, max_staleness=2),
    group_size=2,
    sampling=None,
  )
  # Of two episodes each; the group of iteration 5 is complete.
  waiting = [
    carry_over.WaitingGroup(
      start, (make_episode(2, 2), make_episode(2, length))
    )
    for start, length in ((3, 9), (4, 9), (5, 2))
  ]
  new = [base.Task('train', n) for n in range(3)]
  batches = collection.train_batches(parts, waiting, new, 7, 5)
  assert [
    (b.stream, b.max_turns, b.pause_after, len(b.paused), len(b.tasks))
    for b in batches
  ] == [
    # Carried twice, it runs to its end.
    ((rollout.TRAIN, 3), 10, None, 1, 0),
    ((rollout.TRAIN, 4), 20, 2, 1, 0),
    ((rollout.TRAIN, 7), 20, 2, 0, 2),
  ]


def test_few_complete_groups_wait_for_others():
  rule = carry_over.CarryOver(2)
  lengths = [[1], [3], [3], [3], [2], [2], [2]]
  (one, wait), (two, wait_two) = play(rule, lengths, 4, 2)
  # One of four groups is not half of them; three start in the next iteration.
  assert (tasks(one), tasks(wait)) == ([], [0, 1, 2, 3])
  assert (tasks(two), tasks(wait_two)) == ([0, 1, 2, 3], [4, 5, 6])
  assert ages(two[0]) == [[1]] and ages(two[1]) == [[1, 1, 0]]


@pytest.mark.parametrize('seed', range(5))
@pytest.mark.parametrize('most', [1, 2, 4])
def test_no_turn_is_older_than_the_bound(seed, most):
  rng = np.random.default_rng(seed)
  lengths = rng.choice([1, 2, 9, 30], (400, 3), p=[0.3, 0.3, 0.2, 0.2])
  rule = carry_over.CarryOver(3, most)
  results = play(rule, lengths.tolist(), 6, 60)
  trained = [group for groups, _ in results for group in groups]
  # Each group is trained on once, with all of its turns.
  indices = tasks(trained)
  assert len(set(indices)) == len(indices) > 150
  for index, group in zip(indices, trained, strict=True):
    assert [len(t.steps) for t in group.episodes] == lengths[index].tolist()
  found = [age for g in trained for episode in ages(g) for age in episode]
  assert max(found) == most
  # Those that are not trained on wait.
  waiting = tasks(results[-1][1])
  assert sorted(indices + waiting) == list(range(len(indices + waiting)))
  assert max(len(groups) for groups, _ in results) <= 6


def test_without_carry_over_every_group_is_trained_on():
  rule = carry_over.CarryOver()
  ((trained, waiting),) = play(rule, [[1, 9], [5, 2], [3, 3]], 3, 1)
  assert (tasks(trained), waiting) == ([0, 1, 2], ())
  assert rule.metrics(carry_over.assign_group_indices(trained), waiting) == {}
  assert [t.group for t in carry_over.assign_group_indices(trained)] == [
    0,
    0,
    1,
    1,
    2,
    2,
  ]


def _assert_equal(one, other) -> None:
  """Compares trees of dataclasses and arrays, with their types."""
  assert type(one) is type(other)
  if dataclasses.is_dataclass(one):
    for field in dataclasses.fields(one):
      _assert_equal(getattr(one, field.name), getattr(other, field.name))
  elif isinstance(one, np.ndarray):
    assert one.dtype == other.dtype
    np.testing.assert_array_equal(one, other)
  elif isinstance(one, tuple):
    for a, b in zip(one, other, strict=True):
      _assert_equal(a, b)
  else:
    assert one == other


def test_waiting_groups_survive_a_checkpoint():
  lengths = [[1, 5], [9, 7], [3, 1]]
  (_, waiting), *_ = play(carry_over.CarryOver(2), lengths, 3, 1)
  assert len(waiting) == 3
  _assert_equal(carry_over.decode(carry_over.encode(waiting)), waiting)
  assert carry_over.decode(carry_over.encode(())) == ()


@pytest.mark.parametrize(
  ('prompt', 'completion', 'kept'), [(3, 2, 3), (2, 2, 1), (3, 1, 1)]
)
def test_groups_longer_than_the_limits_of_a_resumed_run_are_dropped(
  prompt, completion, kept, capsys
):
  config = config_base.get_config()
  config.rollout.max_prompt_tokens = prompt
  config.rollout.max_completion_tokens = completion
  groups = (
    carry_over.WaitingGroup(3, (make_episode(2, 4),)),
    carry_over.WaitingGroup(3, (make_episode(0, 4), make_episode(1, 1))),
    carry_over.WaitingGroup(4, (make_episode(0, 4),)),
  )
  history = run_state.History(waiting=groups)
  waiting = run_builders._drop_long_groups(config, history).waiting
  assert waiting == groups[-kept:]
  line = f'max_completion_tokens={completion}: 2 waiting groups are longer'
  assert (line in capsys.readouterr().out) == (kept < 3)


@pytest.mark.parametrize('cut', [1, 40])
def test_damaged_groups_are_refused(cut):
  group = carry_over.WaitingGroup(0, (make_episode(2, 4),))
  with pytest.raises(
    ValueError, match=r'waiting groups|padding|base64|Invalid'
  ):
    carry_over.decode(carry_over.encode([group])[:-cut])
