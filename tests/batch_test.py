import dataclasses

import algorithm_rows
import numpy as np
import pytest

from envs import base
from gigpo_jax import batch, trajectory


def make_step(prompt, completion, anchor, reward=0.0, valid=True):
  return trajectory.Step(
    prompt_ids=np.array(prompt, np.int32),
    completion_ids=np.array(completion, np.int32),
    log_probs=-np.arange(1, len(completion) + 1, dtype=np.float32),
    truncated=False,
    prompt_shortened=False,
    anchor=anchor,
    observation='',
    response='',
    result=base.StepResult(
      observation=None,
      reward=reward,
      valid=valid,
      action='',
      success=False,
      done=False,
    ),
  )


def make_episode(group, member, *steps, failure=''):
  return trajectory.Trajectory(
    task=base.Task('train', group),
    task_type='',
    group=group,
    member=member,
    steps=steps,
    failure=failure,
  )


EPISODES = [
  make_episode(
    0, 0, make_step([1, 2], [3], 'hall'), make_step([4], [5, 6], 'attic', 10.0)
  ),
  make_episode(0, 1, make_step([1, 2], [7], 'hall'), failure='died'),
  make_episode(0, 2, make_step([1, 2], [8, 9], 'hall', valid=False)),
  make_episode(1, 0, make_step([1, 2, 3], [4], 'hall')),
]
SIZES = {'max_prompt_tokens': 3, 'max_completion_tokens': 2}


@pytest.mark.parametrize('field', SIZES)
def test_rows_that_exceed_a_limit_are_refused(field):
  limit = SIZES[field] - 1
  line = f'^{field}={limit}: a row has {limit + 1}; must be no less'
  with pytest.raises(ValueError, match=line):
    batch.from_trajectories(EPISODES, **SIZES | {field: limit})


def test_rows_hold_the_steps():
  rows = batch.from_trajectories(EPISODES, **SIZES, row_multiple=3)
  # 4 steps of episodes that did not fail, padded from 3 to 6 rows.
  np.testing.assert_array_equal(
    rows.tokens,
    [
      [1, 2, 3, 0, 0],
      [4, 5, 6, 0, 0],
      [1, 2, 8, 9, 0],
      [1, 2, 3, 4, 0],
      [0, 0, 0, 0, 0],
      [0, 0, 0, 0, 0],
    ],
  )
  np.testing.assert_array_equal(rows.prompt_lengths, [2, 1, 2, 3, 0, 0])
  np.testing.assert_array_equal(rows.lengths, [3, 3, 4, 4, 0, 0])
  np.testing.assert_array_equal(
    rows.sampler_log_probs,
    [[-1, 0], [-1, -2], [-1, -2], [-1, 0], [0, 0], [0, 0]],
  )
  np.testing.assert_array_equal(
    rows.completion_mask,
    [[1, 0], [1, 1], [1, 1], [1, 0], [0, 0], [0, 0]],
  )
  np.testing.assert_array_equal(rows.groups, [0, 0, 0, 1, -1, -1])
  np.testing.assert_array_equal(rows.real, [1, 1, 1, 1, 0, 0])
  np.testing.assert_array_equal(rows.episodes[:4], [0, 0, 2, 3])
  np.testing.assert_array_equal(rows.steps[:4], [0, 1, 0, 0])
  # hall of group 0, attic, hall of group 0 again, hall of group 1.
  np.testing.assert_array_equal(rows.anchors[:4], [0, 1, 0, 2])
  np.testing.assert_array_equal(rows.rewards, [0, 10, 0, 0, 0, 0])
  np.testing.assert_array_equal(rows.valid, [1, 1, 0, 1, 1, 1])


def test_rows_hold_the_fields_of_their_steps():
  plain = make_step([1], [2], 'hall')
  last = dataclasses.replace(plain.result, valid=False, success=True, score=0.5)
  changes = [
    {'age': 2},
    {'truncated': True},
    {'forced_tokens': 1},
    {'state_value': 0.25},
    {'result': last},
  ]
  steps = [dataclasses.replace(plain, **change) for change in changes]
  rows = batch.from_trajectories(
    [make_episode(0, 0, *steps)],
    **SIZES,
    row_multiple=6,
    components=('valid', 'score'),
  )
  # The sixth row is padding.
  np.testing.assert_array_equal(rows.ages, [2, 0, 0, 0, 0, 0])
  np.testing.assert_array_equal(rows.truncated, [0, 1, 0, 0, 0, 0])
  np.testing.assert_array_equal(rows.forced, [0, 0, 1, 0, 0, 0])
  np.testing.assert_array_equal(
    rows.state_values, [*[np.nan] * 3, 0.25, *[np.nan] * 2]
  )
  np.testing.assert_array_equal(rows.success, [0, 0, 0, 0, 1, 0])
  # -1 for an invalid response; steps without a score have 0.
  np.testing.assert_array_equal(rows.components[:, 0], [0, 0, 0, 0, -1, 0])
  np.testing.assert_array_equal(rows.components[:, 1], [0, 0, 0, 0, 0.5, 0])


@pytest.mark.parametrize(('count', 'size'), [(1, 4), (4, 4), (5, 8), (9, 16)])
def test_row_counts_are_powers_of_two_times_the_multiple(count, size):
  ids = [np.array([1], np.int32)] * count
  rows = batch.pack(ids, ids, **SIZES, row_multiple=4)
  assert len(rows.groups) == size
  assert rows.real.sum() == count


def test_similarity_changes_anchor_ids_only():
  steps = [make_step([1], [2], name) for name in ('hall 1', 'hall 2', 'attic')]
  episodes = [make_episode(0, 0, *steps)]
  exact = batch.from_trajectories(episodes, **SIZES)
  np.testing.assert_array_equal(exact.anchors[:3], [0, 1, 2])
  near = batch.from_trajectories(
    episodes, **SIZES, anchor='similarity', similarity_threshold=0.8
  )
  # hall 1, hall 2: 2 * 5 / 12 = 0.83.
  np.testing.assert_array_equal(near.anchors[:3], [0, 0, 1])
  np.testing.assert_array_equal(near.tokens, exact.tokens)


def test_anchors_may_include_preceding_states():
  steps = [make_step([1], [2], name) for name in ('hall', 'attic', 'hall')]
  episodes = [make_episode(0, n, *steps) for n in range(2)]
  for history, expected in ((0, [0, 1, 0]), (1, [0, 1, 2])):
    rows = batch.from_trajectories(
      episodes, **SIZES, row_multiple=6, anchor_history=history
    )
    np.testing.assert_array_equal(rows.anchors, expected * 2)


def test_shuffled_anchors_are_a_function_of_seed_and_iteration():
  episodes = [
    make_episode(0, n, *(make_step([1], [2], str(t)) for t in range(5)))
    for n in range(3)
  ]

  def anchors(anchor, **seed):
    rows = batch.from_trajectories(
      episodes, **SIZES, row_multiple=15, anchor=anchor, **seed
    )
    # The state after a step is that of the next step.
    inside = rows.steps < 4
    following = rows.anchors[1:][inside[:-1]]
    np.testing.assert_array_equal(rows.next_anchors[inside], following)
    return rows.anchors

  shuffled = anchors('shuffled', seed=(7, 3))
  np.testing.assert_array_equal(shuffled, anchors('shuffled', seed=(7, 3)))
  assert (shuffled != anchors('shuffled', seed=(7, 4))).any()
  assert (shuffled != anchors('shuffled', seed=(8, 3))).any()
  # Three rows each, as before.
  assert np.unique(shuffled, return_counts=True)[1].tolist() == [3] * 5
  assert (shuffled != anchors('observation')).any()


def test_equal_actions_of_a_group_share_an_id():
  actions = [('go  North', 'go north', 'go south'), ('go north',)]
  episodes = [
    make_episode(
      group,
      0,
      *(
        dataclasses.replace(
          make_step([1], [2], 'hall'),
          result=dataclasses.replace(
            make_step([1], [2], 'hall').result, action=action
          ),
        )
        for action in texts
      ),
    )
    for group, texts in enumerate(actions)
  ]
  rows = batch.from_trajectories(episodes, **SIZES, row_multiple=4)
  assert rows.actions.tolist() == [0, 0, 1, 2]


@pytest.mark.parametrize('option', ['anchor', 'agent_rewards'])
def test_unknown_options_are_refused(option):
  with pytest.raises(ValueError, match=f'^{option}=x: unknown; must be one of'):
    batch.from_trajectories(EPISODES, **SIZES, **{option: 'x'})


def test_failed_episodes_only_are_rejected():
  failed = [make_episode(0, 0, make_step([1], [2], 'hall'), failure='hung')]
  with pytest.raises(ValueError, match='all episodes failed.*hung'):
    batch.from_trajectories(failed, **SIZES)


def test_next_anchor_is_known_after_the_turn_limit():
  observation = base.Observation(
    prompt='', short_prompt='', anchor='hall', text=''
  )
  result = base.StepResult(observation, 0.0, True, '', False, False)
  step = make_step([1], [2], 'attic')
  limited = dataclasses.replace(step, result=result)
  episodes = [
    make_episode(0, 0, make_step([1], [2], 'hall'), limited),
    make_episode(0, 1, make_step([1], [2], 'hall'), step),
  ]
  rows = batch.from_trajectories(episodes, **SIZES, row_multiple=4)
  assert rows.next_anchors.tolist() == [
    rows.anchors[1],
    rows.anchors[0],
    rows.anchors[3],
    -1,
  ]


def test_unreported_components_are_rejected():
  last = EPISODES[0].steps[-1]
  end = dataclasses.replace(
    last, result=dataclasses.replace(last.result, done=True)
  )
  ended = [dataclasses.replace(EPISODES[0], steps=(end,)), *EPISODES[1:]]
  with pytest.raises(ValueError, match='reports no metric rewrd'):
    batch.from_trajectories(ended, **SIZES, components=('rewrd', 'valid'))
  # The last step may be the one that reports it, and was not reached.
  rows = batch.from_trajectories(EPISODES, **SIZES, components=('rewrd',))
  assert not rows.components.any()


def test_the_checksum_is_that_of_tokens_and_rewards():
  rows = algorithm_rows.golden_rows()
  changed = dataclasses.replace(
    rows, sampler_log_probs=rows.sampler_log_probs - 1
  )
  assert rows.checksum() == changed.checksum()
  others = [
    dataclasses.replace(rows, rewards=rows.rewards + 1),
    dataclasses.replace(rows, tokens=rows.tokens + 1),
    dataclasses.replace(rows, lengths=rows.lengths + 1),
    rows.take(np.arange(len(rows.lengths))[::-1]),
  ]
  assert len({each.checksum() for each in (rows, *others)}) == 5
