"""Tests of groups that grow by branches, in the toy corridor and by hand."""

import dataclasses
import types

import algorithm_rows
import numpy as np
import pytest
import slow_advantages
import walks

from envs import base, toy
from gigpo_jax import (
  algorithms,
  batch,
  branching,
  group_filter,
  plugins,
  rollout,
  trajectory,
)
from gigpo_jax.run import collection, run_builders, update_inputs
from gigpo_jax.selectors import best_and_worst

PADDED = {'max_prompt_tokens': 1, 'max_completion_tokens': 3}
# Every turn, or no turn, has a branch.
EAGER, NEVER = ({'branch_probability': p} for p in (1.0, 0.0))


def make_episode(entropies, rewards=None, *, member=0, **fields):
  """Returns an episode whose turns have given mean -log p of their tokens."""
  rewards = rewards or [0.0] * len(entropies)
  steps = tuple(
    trajectory.Step(
      prompt_ids=np.array([1]),
      completion_ids=np.array([2, 3, 4]),
      # The first two tokens count, with the mean h.
      log_probs=np.array([0.5 - h, -0.5 - h, -99]),
      truncated=False,
      prompt_shortened=False,
      anchor=str(t),
      observation='',
      response=f'{member} {t}',
      result=base.StepResult(None, r, True, 'go', False, False),
    )
    for t, (h, r) in enumerate(zip(entropies, rewards, strict=True))
  )
  task = base.Task('train', 0)
  return trajectory.Trajectory(task, '', 0, member, steps, **fields)


def grow(
  name='tree_grpo', *, size=6, num_tasks=2, num_envs=8, at_once=100, **options
):
  """Returns groups of random walks, their roots, and streams of requests."""
  rule, streams, rounds = algorithms.make(name, **options), [], []

  def play(episodes):
    (played,), requests = walks.play(
      [episodes], num_envs=num_envs, at_once=at_once
    )
    streams.extend(requests)
    rounds.append(episodes)
    return played

  like = walks.make_groups(algorithms.num_roots(rule, size), num_tasks)
  episodes = branching.grow(
    play(like), rule, like, members=size, seed=5, play=play
  )
  return episodes, rounds, streams


def test_order_of_branches_by_hand():
  rule = algorithms.make('arpo', branch_tokens=2)
  # Changes of entropy 0, 0, 2, -1, 0; u - 0.2 change: 0.9, 0.6, 0.4, 0.6, 0.5.
  episode = make_episode([1, 1, 3, 0, 1])
  order = rule.branch_order(episode, np.array([0.9, 0.6, 0.8, 0.4, 0.5]))
  np.testing.assert_array_equal(order, [np.inf, np.inf, 2, np.inf, 4])
  # u - 0.4 change: 0.9, 0.6, 0.15, 0.45, 0.5.
  doubled = dataclasses.replace(rule, branch_entropy_weight=0.4)
  draws = np.array([0.9, 0.6, 0.95, 0.05, 0.5])
  order = doubled.branch_order(episode, draws)
  np.testing.assert_array_equal(order, [np.inf, np.inf, 2, 3, 4])
  # u - w change is limited to [0, 1].
  sure = dataclasses.replace(rule, branch_probability=1.0)
  assert np.isfinite(sure.branch_order(episode, np.full(5, 0.999))).all()
  tree = algorithms.make('tree_grpo')
  draws = np.array([0.1, 0.7, 0.3, 0.5])
  order = tree.branch_order(make_episode([0] * 4), draws)
  np.testing.assert_allclose(order, [np.inf, 2.7, 0.3, 1.5])
  # A branch that repeats one turn has branches from turn 2 on.
  branch = make_episode([0] * 4, num_repeated=1)
  order = tree.branch_order(branch, draws)
  np.testing.assert_allclose(order, [np.inf, np.inf, 0.3, 1.5])


@pytest.mark.parametrize(
  ('change', 'expected'),
  [
    # All turns have a branch: first those at turn 1, by member.
    (100, [(2, 0, 1), (3, 1, 1), (4, 0, 2)]),
    # None has: the other members are further roots.
    (-100, [(2, None, 0), (3, None, 0), (4, None, 0)]),
  ],
)
def test_forced_entropies_decide_the_branches(change, expected):
  roots = [make_episode([1] + [1 + change] * 2, member=m) for m in (0, 1)]
  starts = branching.next_starts(
    roots, roots, algorithms.make('arpo'), members=5, seed=(0, 0)
  )
  assert [(s.member, s.parent, s.num_repeated) for s in starts] == expected
  for start in starts:
    assert start.is_paused
    parent = roots[start.parent or 0]
    assert start.steps == parent.steps[: start.num_repeated]
  # A branch that repeats two turns has branches from turn 3 on.
  branch = make_episode([1] + [1 + change] * 4, member=1, num_repeated=2)
  starts = branching.next_starts(
    [roots[0], branch],
    [branch],
    algorithms.make('arpo'),
    members=9,
    seed=(0, 0),
  )
  turns = [s.num_repeated for s in starts if s.parent is not None]
  assert turns == ([3, 4] if change > 0 else [])
  failed = [dataclasses.replace(e, failure='died: x') for e in roots]
  starts = branching.next_starts(
    failed, failed, algorithms.make('arpo'), members=3, seed=(0, 0)
  )
  assert [(s.parent, s.failure, s.steps) for s in starts] == [(None, '', ())]
  assert not branching.next_starts(
    roots, roots, algorithms.make('arpo'), members=2, seed=(0, 0)
  )


def test_without_a_change_the_share_of_branches_is_the_probability():
  rule, turns, count = algorithms.make('arpo', branch_probability=0.3), 40, 0

  def branch_turns(episode, position=2):
    found = branching._ordered_turns(episode, rule, (11, position))
    return [t for *_, t, _ in found]

  for member in range(100):
    episode = make_episode([1] * turns, member=member)
    count += len(branch_turns(episode))
    assert branch_turns(episode) != branch_turns(episode, position=3)
    # The number of a turn does not depend on later turns.
    shorter = dataclasses.replace(episode, steps=episode.steps[:20])
    assert branch_turns(shorter) == [t for t in branch_turns(episode) if t < 20]
  # 3,900 draws: the standard deviation of the share is 0.0073.
  assert count / (100 * (turns - 1)) == pytest.approx(0.3, abs=0.03)


@pytest.mark.parametrize('name', ['arpo', 'tree_grpo'])
def test_branches_repeat_turns_and_sample_the_others(name):
  episodes, rounds, streams = grow(name, root_share=0.3)
  assert [(e.group, e.member) for e in episodes] == [
    (g, m) for g in range(2) for m in range(6)
  ]
  assert len(streams) == len(set(streams))
  sampled = {stream[2:] for stream in streams}
  for e in episodes:
    assert not e.is_paused and not e.failure
    own = range(e.num_repeated, len(e.steps))
    assert {(e.task.index, e.member, t) for t in own} <= sampled
    if e.parent is not None:
      parent = episodes[6 * e.group + e.parent]
      assert e.parent < e.member
      assert 0 < e.num_repeated < len(parent.steps)
      shared = parent.steps[: e.num_repeated]
      assert all(a is b for a, b in zip(e.steps, shared, strict=False))
  assert len(sampled) == sum(len(e.steps) - e.num_repeated for e in episodes)
  assert {stream[:2] for stream in streams} == {(rollout.TRAIN, 3)}
  assert sum(e.num_repeated > 0 for e in episodes) > 2
  # Neither the schedule nor the number of environments changes them.
  others, *_ = grow(name, root_share=0.3, num_envs=1, at_once=1)
  for one, other in zip(episodes, others, strict=True):
    assert [s.response for s in one.steps] == [s.response for s in other.steps]
    assert (one.parent, one.num_repeated) == (other.parent, other.num_repeated)
  assert len(rounds) >= 2


def test_branches_grow_from_branches_and_groups_are_filled():
  episodes, rounds, _ = grow('arpo', root_share=0.1, size=9, **EAGER)
  parents = {e.member: e.parent for e in episodes[:9]}
  assert any(p is not None and parents[p] is not None for p in parents.values())
  episodes, rounds, _ = grow('arpo', root_share=0.5, **NEVER)
  assert all(e.parent is None and not e.num_repeated for e in episodes)
  assert [len(r.paused) for r in rounds] == [0, 6]
  # The order of tree_grpo spreads branches over the roots.
  episodes, rounds, _ = grow(size=6, root_share=0.5)
  first = [(s.group, s.parent) for s in rounds[1].paused]
  long = {(e.group, e.member) for e in episodes if len(e.steps) > 1}
  assert {p for p in long if p[1] < 3} == set(first)


def test_cost_has_replayed_steps_and_new_tokens(monkeypatch):
  calls, step = [], toy.Env.step
  monkeypatch.setattr(
    toy.Env, 'step', lambda self, text: calls.append(text) or step(self, text)
  )
  episodes, _, streams = grow()
  cost = group_filter.SampleCounts.of(episodes)
  assert cost == group_filter.SampleCounts(12, len(calls), len(streams))
  found = branching.metrics(episodes)
  repeated = [e.num_repeated for e in episodes if e.num_repeated]
  assert found == {
    'branching/branches_share': len(repeated) / 12,
    'branching/turn_mean': pytest.approx(np.mean(repeated)),
    'branching/repeated_steps': len(calls) - len(streams),
    'branching/new_steps': len(streams),
  }
  alone = branching.metrics([e for e in episodes if not e.num_repeated])
  assert alone['branching/turn_mean'] == 0


def make_tree():
  """Returns a root, its branch at turn 1, and a branch of that at turn 2."""
  root = make_episode([0] * 3, [0, 0, 10])
  one, two = (make_episode([0] * 3, member=m) for m in (1, 2))
  return [
    root,
    dataclasses.replace(
      one, steps=root.steps[:1] + one.steps[1:], parent=0, num_repeated=1
    ),
    dataclasses.replace(
      two,
      steps=root.steps[:1] + one.steps[1:2] + two.steps[2:],
      parent=1,
      num_repeated=2,
    ),
  ]


def test_shared_turns_have_the_mean_of_their_leaves_by_hand():
  rows = batch.from_trajectories(make_tree(), **PADDED, row_multiple=10)
  np.testing.assert_array_equal(rows.responses, [0, 1, 2, 0, 3, 4, 0, 3, 5, 9])
  repeated = [False] * 6 + [True, True, False, False]
  repeated[3] = True
  np.testing.assert_array_equal(rows.repeated, repeated)
  given = np.array([1, 1, 1, -1, -1, -1, -3, -3, -3, 0], np.float32)
  merged = branching.merge(given, rows)
  expected = [-1, 1, 1, -1, -2, -1, -1, -2, -3, 0]
  np.testing.assert_array_equal(merged, expected)
  assert merged.dtype == np.float32
  tokens = branching.merge(np.stack([given, 2 * given], 1), rows)
  np.testing.assert_array_equal(tokens, np.stack([merged, 2 * merged], 1))
  np.testing.assert_array_equal(
    branching.drop_repeated(rows).real, rows.real & ~rows.repeated
  )
  plain = algorithm_rows.golden_rows()
  assert branching.drop_repeated(plain) is plain
  # E = 10, 0, 0 in one tree: z = 1.1547, -0.5774, -0.5774 twice.
  output = algorithms.make('tree_grpo').compute_advantages(rows)
  leaves = np.repeat([2.3094, -1.1547, -1.1547], 3)
  np.testing.assert_allclose(output.advantages, [*leaves, 0], atol=1e-4)


def test_vines_by_hand():
  # Two roots and, at turn 1 of the first one, two branches.
  one = make_episode([0] * 3, [0, 0, 8])
  two = make_episode([0] * 2, [0, 0], member=1)
  others = [
    make_episode([0] * 2, [0, reward], member=member)
    for member, reward in ((2, 4), (3, 0))
  ]
  vines = [
    dataclasses.replace(
      e, steps=one.steps[:1] + e.steps[1:], parent=0, num_repeated=1
    )
    for e in others
  ]
  rows = batch.from_trajectories([one, two, *vines], **PADDED, row_multiple=10)
  # Roots: a single pair. At turn 1, returns 8, 4, 0; the last two took the same
  # actions. Pairs: 6 distinct, 4 distinct, 2 alike: f = 6, 4, 1, mean 11 / 3.
  rows.actions[:9] = [0, 1, 2, 0, 1, 0, 3, 0, 3]
  output = algorithms.make('polychromic_vine').compute_advantages(rows)
  a, b, c = 5 - 11 / 3, 3.5 - 11 / 3, 2.5 - 11 / 3
  expected = [0, a, a, 0, 0, 0, b, 0, c, 0]
  np.testing.assert_allclose(output.advantages, expected, atol=1e-6)


@pytest.mark.parametrize(('count', 'share'), [(1, 0.5), (2, 0.4), (3, 0.25)])
def test_vines_match_a_slow_reference(count, share):
  options = {'root_share': share, 'branches_per_turn': count}
  episodes, *_ = grow('polychromic_vine', size=10, num_tasks=8, **options)
  rows = batch.from_trajectories(episodes, **PADDED, row_multiple=256)
  vine = algorithms.make('polychromic_vine', **options)
  advantages = vine.compute_advantages(rows).advantages
  expected = slow_advantages.vines(episodes)
  new = rows.real & ~rows.repeated
  for r in np.flatnonzero(new):
    e = episodes[rows.episodes[r]]
    value = expected.get((e.group, e.member, rows.steps[r]), 0.0)
    assert advantages[r] == pytest.approx(value, abs=1e-5)
  # One branch makes a single pair with its parent, which counts for nothing.
  by_episode = {}
  for (group, member, _), value in expected.items():
    by_episode.setdefault((group, member), set()).add(value)
  assert (max(map(len, by_episode.values())) > 1) == (count > 1)
  np.testing.assert_array_equal(advantages, branching.merge(advantages, rows))


def test_an_update_trains_on_each_response_once():
  rows = batch.from_trajectories(make_tree(), **PADDED, row_multiple=10)
  output = algorithms.make('arpo').compute_advantages(rows)
  parts = types.SimpleNamespace(
    modulators=(lambda advantages, rows, signals: 2 * advantages,), selectors=()
  )
  output, trained, mask, metrics = update_inputs.apply_plugins(
    parts, rows, output, plugins.Signals()
  )
  assert mask is None
  # Twice 1.1547 and -0.5774; all episodes share turn 0, whose mean is 0.
  high, low = 2.3094, -1.1547
  np.testing.assert_allclose(
    output.advantages[trained.real], [0, high, high, low, low, low], atol=1e-4
  )
  assert trained.completion_mask.sum() == 3 * 6
  # (sum of |A|)^2 / sum of A^2, over the tokens that are trained on.
  total, squares = 2 * high - 3 * low, 2 * high**2 + 3 * low**2
  tokens = metrics['advantage/effective_tokens']
  assert tokens == pytest.approx(3 * total**2 / squares, rel=1e-4)


def test_a_kept_branch_keeps_its_reward_and_its_shared_turns():
  # The branch repeats turn 0 with its reward: returns 5, 4 and 6. The best and
  # the worst are episode 1 and the branch, whose first turn is row 0.
  one = make_episode([0] * 2, [5, 0])
  two = make_episode([0] * 2, [4, 0], member=1)
  branch = make_episode([0] * 2, [5, 1], member=2)
  branch = dataclasses.replace(branch, parent=0, num_repeated=1)
  rows = batch.from_trajectories([one, two, branch], **PADDED, row_multiple=8)
  chain = (best_and_worst.Selector(kept_episodes=2),)
  parts = types.SimpleNamespace(modulators=(), selectors=chain)
  output = algorithms.make('arpo').compute_advantages(rows)
  _, kept, *_ = update_inputs.apply_plugins(
    parts, rows, output, plugins.Signals()
  )
  np.testing.assert_array_equal(np.flatnonzero(kept.real), [0, 2, 3, 5])


@pytest.mark.parametrize(
  ('name', 'root_share'), [('arpo', 0.2), ('arpo', 0.5), ('tree_grpo', 0.3)]
)
def test_advantages_match_a_slow_reference(name, root_share):
  episodes, *_ = grow(name, size=8, num_tasks=5, root_share=root_share)
  rows = batch.from_trajectories(episodes, **PADDED, row_multiple=256)
  algorithm = algorithms.make(name, root_share=root_share)
  advantages = algorithm.compute_advantages(rows).advantages
  merged = branching.merge(advantages, rows)
  assert np.abs(merged - advantages).max() > 0.1
  expected = slow_advantages.branches(episodes, is_tree=name == 'tree_grpo')
  for r in np.flatnonzero(rows.real):
    key = rows.episodes[r], rows.steps[r]
    assert merged[r] == pytest.approx(expected[key], abs=1e-5)
  assert not merged[~rows.real].any()
  count = sum(len(e.steps) - e.num_repeated for e in episodes)
  assert branching.drop_repeated(rows).real.sum() == count


def test_a_run_branches_only_for_algorithms_with_a_rule():
  like, calls = walks.make_groups(2), []

  def play(batches, **kwargs):
    calls.append(kwargs)
    return walks.play(batches)[0]

  (roots,) = play([like])
  config = types.SimpleNamespace(
    seed=5, rollout=types.SimpleNamespace(episodes_per_group=4)
  )
  for name, size in {'gigpo': 4, 'arpo': 2, 'tree_grpo': 1}.items():
    share = {'root_share': 0.25} if name == 'tree_grpo' else {}
    parts = types.SimpleNamespace(
      algorithm=algorithms.make(name, **share), config=config
    )
    assert run_builders.Parts.group_size.fget(parts) == size
    del calls[:]
    found = collection.add_branches(parts, roots, like, play)
    assert (found is roots) == (not calls) == (name == 'gigpo')
    assert len(found) == (4 if name == 'gigpo' else 8)
    assert all(kwargs == {'is_continued': True} for kwargs in calls)


def test_statistics_of_rounds_add_up():
  (first,), walk = [walks.make_groups()], walks.RandomWalk()
  with walks.pools.make(
    num_workers=0, num_envs=4, env={'rooms': 4, 'max_steps': 5}
  ) as pool:
    runner = rollout.EpisodeRunner(pool, walk, walks.Tokenizer(), 99, 'error')
    walk.take_stats = lambda: rollout.sampler.Stats(decode_tokens=3)
    runner.run_batches({}, [first])
    start, calls = runner.clock.start, len(runner.clock.env_spans)
    assert runner.stats.decode_tokens == 3
    runner.run_batches({}, [first], is_continued=True)
    assert runner.clock.start == start
    assert len(runner.clock.env_spans) == 2 * calls
    assert runner.stats.decode_tokens == 6
    runner.run_batches({}, [first])
    assert runner.stats.decode_tokens == 3
