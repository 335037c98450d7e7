"""Training runs with skipped updates, failed episodes or no signal."""

import contextlib
import json
import types

import group_filter_test
import jax
import numpy as np
import orbax.checkpoint as ocp
import preloaded
import pytest
import small_runs

from configs import alfworld
from envs import base
from envs.alfworld import games
from gigpo_jax import group_filter, metrics, tasks, train
from gigpo_jax.run import (
  collection,
  rollback,
  run_builders,
  run_logs,
  run_state,
)


@pytest.mark.slow
def test_updates_that_come_to_nothing_stop_the_run(tmp_path):
  line = small_runs.stopped_run(
    tmp_path,
    '--config.optimizer.learning_rate=1e38',
    '--config.learner.max_skipped_in_row=2',
  )
  assert line.startswith('learner.max_skipped_in_row=2: the loss or gradient ')
  lines = small_runs.read_lines(tmp_path)
  assert [line['update/skipped'] for line in lines] == [0, 1]
  with np.load(tmp_path / 'skipped_update.npz') as rows:
    assert len(rows['tokens']) == len(rows['advantages']) > 0
    assert not np.isfinite(rows['old_log_probs']).all()


@pytest.mark.slow
@pytest.mark.parametrize('bad', [1, 20], ids=['one', 'most'])
def test_damaged_games_end_their_own_episodes(tmp_path, bad):
  data, workdir = tmp_path / 'data', tmp_path / 'run'
  for split in ('train', 'valid_unseen'):
    games.main(['--out', str(data), '--split', split, '--num', '24'])
  for path in sorted(data.rglob('train/**/game.tw-pddl'))[-bad:]:
    # Its header is whole, so that it counts as a game.
    path.write_text(path.read_text().replace('(:init', '(:int'))
  flags = (
    f'--config.env.data_dir={data}',
    '--config.env.engine=native',
    '--config.rollout.groups=8',
    '--config.rollout.batch_buckets=(32,)',
  )
  if bad > 1:
    line = small_runs.stopped_run(workdir, *flags)
    assert line.startswith('pool.max_failed_share=0.25: ')
    assert 'episodes failed: ' in line and 'raised, such as train/' in line
    return
  printed = preloaded.run(small_runs.small(workdir, *flags))
  lines = small_runs.read_lines(workdir)[:3]
  # Every game is played once.
  assert sum(line['train/failed_episodes'] for line in lines) == 4
  assert sum(line.get('train/failed_episodes/raised', 0) for line in lines) == 4
  assert '4 of 32 episodes failed: 4 raised, such as train/23 (' in printed


@pytest.mark.slow
@pytest.mark.parametrize(
  ('variant', 'flags'),
  [
    (
      'smoke,ppo',
      (
        '--config.critic.warmup_iterations=1',
        # An alarm in each iteration.
        '--config.guard.action=shrink',
        '--config.guard.max_kl=1e-12',
        '--config.rollout.groups=8',
        '--config.rollout.episodes_per_group=1',
      ),
    ),
    (
      'smoke,sampo',
      (
        '--config.filter.warmup_iterations=0',
        '--config.filter.max_refills=1',
        '--config.tasks.draw=uncertain',
        '--config.rollout.horizon=((0,3),(2,6))',
        '--config.loss.entropy_weight=0.01',
        '--config.loss.entropy_band.weight=1.0',
        # Falls with the share of num_iterations otherwise.
        '--config.loss.entropy_band.decay=0.0',
      ),
    ),
  ],
  ids=['critic', 'feedback'],
)
def test_what_a_run_knows_of_its_past_is_kept(tmp_path, variant, flags):
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'

  def run(workdir, *more):
    flags_ = (*flags, '--config.evaluation.every=0', *more)
    return preloaded.run(small_runs.small(workdir, *flags_, variant=variant))

  run(whole)
  run(parts, '--config.num_iterations=2')
  assert 'resuming' in run(parts)
  spent = small_runs.read_lines(whole)[2]['spent/episodes']
  assert spent >= 3 * 8
  if 'sampo' in variant:
    path = small_runs.newest_checkpoint(whole) / 'host' / 'metadata'
    outcomes = json.loads(path.read_text())['tasks'].values()
    assert sum(played for _, played in outcomes) == spent
  small_runs.assert_same_end(parts, whole)


def test_outcomes_count_before_the_next_tasks_are_drawn(monkeypatch):
  sampler = tasks.UncertaintySampler('train', 8, groups=1, seed=0)
  group = [
    group_filter_test.episode(base.Task('train', 3), 0, member, 10.0 * member)
    for member in range(2)
  ]
  groups = group_filter.CollectedGroups(group, group, [0, 1], {})
  drawn, saved = [], []
  logs = run_logs.RunLogs(metrics.NullWriter())
  for module, name, fake in (
    (train, 'prepare', lambda *_: (None, run_state.History(), logs)),
    (train, 'update', lambda *_: (None, {})),
    (train, 'finish', lambda *_: None),
    (collection, 'collect', lambda *_, **__: (groups, {})),
    (collection, 'prefetch', lambda *_: drawn.append(sampler.state())),
    (rollback, 'check_alarms', lambda *x: (x[2], x[3], {})),
    (run_builders, 'save', lambda *x: saved.append(x[4].task_outcomes)),
  ):
    monkeypatch.setattr(module, name, fake)
  config = alfworld.get_config('smoke')
  config.num_iterations, config.checkpoint.every = 2, 1
  config.evaluation.every = 0
  guard = types.SimpleNamespace(
    defer=contextlib.nullcontext, exit_if_requested=lambda: None
  )
  parts = types.SimpleNamespace(config=config, tasks=sampler)
  train.loop(parts, None, None, guard, lambda: None)
  # Successes and episodes of task 3 after each iteration.
  assert saved == [{'3': [1, 2]}, {'3': [2, 4]}]
  assert drawn == saved


def test_an_iteration_without_signal_calls_no_learner():
  unusable = object()  # Has none of the methods of a learner or a critic.
  parts = types.SimpleNamespace(
    learner=unusable, critic=unusable, algorithm=unusable, loss=unusable
  )
  state = run_state.RunState(unusable, unusable)
  history = run_state.History(entropies=(0.5,), skipped={'update': 1.0})
  groups = group_filter.CollectedGroups([], [], [], {})
  logs = run_logs.RunLogs(metrics.NullWriter())
  same_state, values = train.update(parts, state, history, groups, 3, logs)
  assert same_state is state
  history = history.after(3, groups, {}, values)
  assert (history.entropies, history.skipped) == ((0.5,), {'update': 1.0})
  assert values == {
    'advantage/std': 0,
    'advantage/trained_share': 0,
    'advantage/effective_tokens': 0,
    'update/count': 0,
    'update/tokens': 0,
    'update/grad_norm': 0,
    'critic/count': 0,
  }
  assert 'loss' not in metrics.console_line(3, values)


@pytest.mark.slow
@pytest.mark.parametrize('variant', ['smoke', 'smoke,ppo'])
def test_nothing_is_learnt_where_no_group_has_spread(tmp_path, variant):
  # All fail, some without form: what costs them something is not learnt from.
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'

  def run(workdir, *more):
    flags = (
      '--config.env.max_steps=2',
      '--config.rollout.temperature=2.0',
      '--config.filter.drop_zero_variance=True',
      '--config.filter.max_refills=0',
      '--config.filter.warmup_iterations=1',
      '--config.loss.kl_weight=0.1',
      '--config.loss.entropy_weight=0.1',
      '--config.optimizer.weight_decay=0.1',
      '--config.optimizer.decay_updates=9',
      '--config.checkpoint.keep=3',
      '--config.evaluation.every=0',
    )
    return preloaded.run(
      small_runs.small(workdir, *flags, *more, variant=variant)
    )

  run(whole)
  first, *others = small_runs.read_lines(whole)
  assert first['update/grad_norm'] > 0 and 'filter/refills' not in first
  for line in others:
    assert 0 < line['train/invalid_action_rate'] < 1
    assert line['filter/groups_kept'] == 0
    assert line['update/count'] == line['update/grad_norm'] == 0
    assert line.get('critic/count', 0) == 0
  # Parameters, moments and counts of updates, of policy and critic.
  with ocp.StandardCheckpointer() as reader:
    one, *later = (
      reader.restore(whole / 'checkpoints' / str(n) / 'state') for n in range(3)
    )
  assert len(jax.tree.leaves(one)) > len(small_runs.read_policy(whole))
  for state in later:
    jax.tree.map(np.testing.assert_array_equal, state, one)
  run(parts, '--config.num_iterations=2')
  assert 'resuming' in run(parts)
  small_runs.assert_same_end(parts, whole)
