"""Tests of the episode data set: reading with tfds, writing across kills."""

import dataclasses
import json
import math
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from envs import base
from gigpo_jax import (
  algorithms,
  batch,
  episode_records,
  episodes,
  group_filter,
  selectors,
  trajectory,
)

# Text that a model or an environment may write. Lone surrogates are escaped;
# everything else is stored unchanged.
HOSTILE = '<script>alert(1)</script> " \' & \u202eback 🧑‍🚀 \x00'


class Text:
  """A fake tokenizer with the members that an episode set needs."""

  fingerprint = 'fingerprint'

  def save(self, directory):
    del directory


def step(reward=0.0, *, anchor='start', done=False, success=False, tokens=2):
  return trajectory.Step(
    prompt_ids=np.arange(5, dtype=np.int32),
    completion_ids=np.arange(tokens, dtype=np.int32) + 7,
    log_probs=np.full(tokens, -0.1, np.float32),
    truncated=False,
    prompt_shortened=False,
    anchor=anchor,
    observation=HOSTILE,
    response='go \ud800',
    result=base.StepResult(
      None,
      reward,
      True,
      'go',
      success,
      done,
      final_anchor='end' if done else None,
    ),
  )


def episode(member, rewards, *, group=0, failure=''):
  last = len(rewards) - 1
  steps = tuple(
    step(reward, done=n == last, success=n == last and reward > 0)
    for n, reward in enumerate(rewards)
  )
  task = base.Task('train', 10 + group)
  return trajectory.Trajectory(task, 'pick', group, member, steps, failure)


def collected(collected_episodes=None):
  """Returns two groups of two; the first has zero variance and is dropped."""
  collected_episodes = collected_episodes or [
    episode(0, [0.0]),
    episode(1, [0.0]),
    episode(0, [0.0, 10.0], group=1),
    episode(1, [0.0], group=1),
  ]
  kept = [dataclasses.replace(t, group=0) for t in collected_episodes[2:]]
  return group_filter.CollectedGroups(collected_episodes, kept, [2, 3], {})


def rows_of(collected_episodes):
  return batch.from_trajectories(
    collected_episodes.kept,
    max_prompt_tokens=8,
    max_completion_tokens=4,
    row_multiple=4,
  )


def write(log, iteration, collected_episodes=None):
  collected_episodes = collected_episodes or collected()
  rows = rows_of(collected_episodes)
  output = algorithms.make('gigpo', norm='mean').compute_advantages(rows)
  return log.write(iteration, collected_episodes, rows, output)


def equal(a, b):
  np.testing.assert_equal(a, b)
  return True


def test_steps_that_are_not_trained_on_have_no_advantage(tmp_path):
  groups = collected()
  rows = rows_of(groups)
  output = algorithms.make('gigpo', norm='mean').compute_advantages(rows)
  # Without the first step of the first episode, and all of the second.
  rows = selectors.keep(rows, rows.steps == 1)
  log = episodes.EpisodeWriter(tmp_path, Text(), seed=5)
  log.write(0, groups, rows, output)
  *_, won, lost = episodes.open_dataset(tmp_path).read(0)
  assert won['trained'] and not lost['trained']
  for step in (won['steps'][0], lost['steps'][0]):
    assert math.isnan(step['advantage']) and step['anchor_group'] == -1
  assert won['steps'][1]['advantage'] > 0


def test_fields_of_a_record(tmp_path):
  write(episodes.EpisodeWriter(tmp_path, Text(), seed=5), 3)
  dropped, _, won, lost = episodes.open_dataset(tmp_path).read(3)
  assert (won['iteration'], won['group'], won['member']) == (3, 1, 0)
  assert (won['task_split'], won['task_index']) == ('train', 11)
  assert (won['kind'], won['seed'], won['return']) == ('pick', 5, 10.0)
  assert won['success'] and not lost['success'] and math.isnan(won['score'])
  assert won['trained'] and not dropped['trained']
  first, second, closing = won['steps']
  assert first['observation'] == HOSTILE
  assert first['response'] == 'go \\ud800'
  assert list(first['prompt_ids']) == [0, 1, 2, 3, 4]
  assert list(first['completion_ids']) == [7, 8]
  assert first['log_probs'].dtype == np.float32
  assert first['log_probs'][1] == np.float32(-0.1)
  flags = ('is_first', 'is_last', 'is_terminal')
  assert [[s[f] for f in flags] for s in won['steps']] == [
    [True, False, False],
    [False, False, False],
    [False, True, True],
  ]
  # The transition to the closing step is terminal.
  assert [s['discount'] for s in won['steps']] == [1, 0, 0]
  assert closing['observation'] == closing['anchor'] == 'end'
  assert not len(closing['completion_ids']) and not closing['reward']
  # Returns of the two episodes are 10 and 0; the mean is 5.
  assert first['episode_advantage'] == 5.0
  # Returns from the shared anchor are 9.5, 10 and 0; the mean is 6.5.
  assert [s['discounted_return'] for s in won['steps'][:2]] == [9.5, 10.0]
  assert [s['step_advantage'] for s in won['steps'][:2]] == [3.0, 3.5]
  assert lost['steps'][0]['step_advantage'] == -6.5
  assert lost['steps'][0]['advantage'] == -11.5
  assert first['anchor_group'] == lost['steps'][0]['anchor_group']
  assert dropped['steps'][0]['anchor_group'] == -1
  assert math.isnan(dropped['steps'][0]['advantage'])


def test_records_have_the_score_and_the_limits_that_steps_reached():
  played = episode(0, [0.0, 1.0])
  first, second = played.steps
  scored = dataclasses.replace(second.result, score=0.25)
  steps = (
    dataclasses.replace(first, truncated=True),
    dataclasses.replace(second, prompt_shortened=True, result=scored),
  )
  played = dataclasses.replace(played, steps=steps)
  record = episode_records.make_record(
    played, iteration=0, seed=0, step_fields=None
  )
  assert record['score'] == 0.25
  fields = 'truncated', 'prompt_shortened'
  assert [[s[f] for f in fields] for s in record['steps']] == [
    [True, False],
    [False, True],
    [False, False],
  ]


def test_records_of_a_teacher_by_hand():
  rows = batch.pack(
    [[1, 2, 3], [4]],
    [[5, 6], [7]],
    max_prompt_tokens=3,
    max_completion_tokens=2,
    row_multiple=4,
  )
  columns = {
    'old_log_probs': np.array([[-1, -2], [-3, 0], [0, 0], [0, 0]], np.float32),
    'advantages': np.array([[1, 2], [4, 0], [0, 0], [0, 0]], np.float32),
  }
  records = episode_records.make_teacher_records(
    rows, columns, ['a', 'b'], iteration=3, seed=5
  )
  decoded = [
    episode_records.decode(episode_records.encode(record)) for record in records
  ]
  assert [r['group'] for r in decoded] == [episode_records.TEACHER] * 2
  assert [(r['iteration'], r['seed'], r['member']) for r in decoded] == [
    (3, 5, 0),
    (3, 5, 1),
  ]
  (one, closing), (other, _) = (record['steps'] for record in decoded)
  assert (one['response'], other['response']) == ('a', 'b')
  assert one['prompt_ids'].tolist() == [1, 2, 3]
  assert one['completion_ids'].tolist() == [5, 6]
  assert one['log_probs'].tolist() == [-1, -2]
  assert other['log_probs'].tolist() == [-3]
  # Means over the tokens of a row.
  assert (one['advantage'], other['advantage']) == (1.5, 4)
  assert (one['is_last'], closing['is_last']) == (False, True)
  # A supervised teacher has neither log-probs nor advantages.
  (record, _) = episode_records.make_teacher_records(
    rows, {}, ['a', 'b'], iteration=3, seed=5
  )
  assert np.isnan(record['steps'][0]['log_probs']).all()
  assert math.isnan(record['steps'][0]['advantage'])


def test_iteration_without_rows_is_stored_as_not_trained_on(tmp_path):
  dropped = collected().episodes[:2]
  log = episodes.EpisodeWriter(tmp_path, Text(), seed=5)
  log.write(0, group_filter.CollectedGroups(dropped, [], [], {}))
  first, second = episodes.open_dataset(tmp_path).read(0)
  assert not first['trained'] and not second['trained']
  assert math.isnan(first['steps'][0]['advantage'])


def test_token_advantages_are_averaged():
  collected_episodes = collected()
  rows = rows_of(collected_episodes)
  advantages = np.zeros((len(rows.groups), 4), np.float32)
  advantages[0] = 1, 2, 100, 100  # The completion has two tokens.
  by_episode = episode_records.make_step_fields(
    rows, algorithms.AlgorithmOutput(advantages, {})
  )
  assert by_episode[0][0]['advantage'] == 1.5
  assert 'step_advantage' not in by_episode[0][0]


def test_failed_episodes(tmp_path):
  log = episodes.EpisodeWriter(tmp_path, Text(), seed=0)
  at_once = episode(0, [], failure='died')
  later = episode(1, [1.0], failure='hung')
  collected_episodes = collected(
    [episode(0, [0.0]), at_once, later, episode(1, [0.0])]
  )
  write(log, 0, collected_episodes)
  _, at_once, later, _ = episodes.open_dataset(tmp_path).read(0)
  assert at_once['failure'] == 'died' and not at_once['trained']
  assert len(at_once['steps']) == 1
  assert at_once['steps'][0]['is_first'] and at_once['steps'][0]['is_last']
  assert not later['trained'] and not later['success']
  assert not later['steps'][1]['is_terminal']
  assert later['steps'][0]['discount'] == later['steps'][1]['discount'] == 1


def test_every_second_iteration_is_stored(tmp_path):
  log = episodes.EpisodeWriter(tmp_path, Text(), seed=0, every=2)
  assert 'time/episodes_secs' in write(log, 0)
  assert write(log, 1) == {}
  write(log, 2)
  assert episodes.open_dataset(tmp_path).iterations == [0, 2]


@pytest.mark.parametrize('first', [0, 1, 2, 3])
def test_after_a_kill_each_iteration_is_stored_once(tmp_path, first):
  """Resumes a run that was killed after iteration 2 from a checkpoint."""
  log = episodes.EpisodeWriter(tmp_path, Text(), seed=0)
  for iteration in range(3):
    write(log, iteration)
  # The file of the next iteration exists, but the index does not list it.
  (tmp_path / 'episodes-train.array_record-00003').write_bytes(b'torn')
  (tmp_path / 'episodes-train.array_record-00004.tmp').write_bytes(b'torn')
  resumed = episodes.EpisodeWriter(
    tmp_path, Text(), seed=0, first_iteration=first
  )
  assert episodes.open_dataset(tmp_path).iterations == list(range(first))
  for iteration in range(first, 5):
    write(resumed, iteration)
  iterations = [
    record['iteration'] for record in episodes.open_dataset(tmp_path)
  ]
  assert iterations == [n for n in range(5) for _ in range(4)]
  assert len(list(tmp_path.glob('episodes-*'))) == 5


def test_files_of_the_user_stay(tmp_path):
  write(episodes.EpisodeWriter(tmp_path, Text(), seed=0), 0)
  (tmp_path / 'episodes-notes.txt').write_text('mine')
  write(episodes.EpisodeWriter(tmp_path, Text(), seed=0, first_iteration=1), 1)
  assert (tmp_path / 'episodes-notes.txt').read_text() == 'mine'
  assert episodes.open_dataset(tmp_path).iterations == [0, 1]


def test_kill_between_index_writes_leaves_a_readable_set(tmp_path):
  log = episodes.EpisodeWriter(tmp_path, Text(), seed=0)
  write(log, 0)
  before = (tmp_path / 'dataset_info.json').read_bytes()
  write(log, 1)
  # metadata.json and the file are renamed, dataset_info.json is not yet.
  (tmp_path / 'dataset_info.json').write_bytes(before)
  episode_set = episodes.open_dataset(tmp_path)
  assert episode_set.iterations == [0] and len(list(episode_set)) == 4
  resumed = episodes.EpisodeWriter(tmp_path, Text(), seed=0, first_iteration=1)
  write(resumed, 1)
  episode_set = episodes.open_dataset(tmp_path)
  assert episode_set.iterations == [0, 1] and len(list(episode_set)) == 8


@pytest.mark.parametrize('moment', range(13))
def test_killed_while_it_drops_iterations_a_set_is_dropped_again(
  tmp_path, monkeypatch, moment
):
  log = episodes.EpisodeWriter(tmp_path, Text(), seed=0)
  for iteration in range(4):
    write(log, iteration)
  changes = []

  def until_killed(change):
    def call(*args, **kwargs):
      if len(changes) == moment:
        raise KeyboardInterrupt
      changes.append(change)
      return change(*args, **kwargs)

    return call

  options = {'seed': 0, 'first_iteration': 1}
  with monkeypatch.context() as patch:
    for owner, name in (
      (episodes.files, 'rename_synced'),
      (pathlib.Path, 'unlink'),
    ):
      patch.setattr(owner, name, until_killed(getattr(owner, name)))
    with pytest.raises(KeyboardInterrupt):
      episodes.EpisodeWriter(tmp_path, Text(), **options)
  episodes.check_folder(tmp_path)
  episodes.EpisodeWriter(tmp_path, Text(), **options)
  assert episodes.open_dataset(tmp_path).iterations == [0]
  assert len(list(tmp_path.glob('episodes-*'))) == 1
  assert not list(tmp_path.parent.glob('*.bak'))


def test_check_folder_reports_damaged_sets(tmp_path):
  episodes.check_folder(tmp_path)
  log = episodes.EpisodeWriter(tmp_path, Text(), seed=0)
  write(log, 0)
  write(log, 1)
  episodes.check_folder(tmp_path)
  (tmp_path / 'episodes-train.array_record-00000').unlink()
  with pytest.raises(
    ValueError, match='record-00000: missing; move the folder'
  ):
    episodes.check_folder(tmp_path)
  (tmp_path / episodes.INFO).write_text('{')
  with pytest.raises(ValueError, match='cannot be read: .*; move the folder'):
    episodes.check_folder(tmp_path)


READ = """
import json, sys
import tensorflow_datasets as tfds

builder = tfds.builder_from_directory(sys.argv[1])
source = builder.as_data_source('train')
episode = source[6]
steps = list(episode['steps'])
for module in ('tensorflow', 'jax', 'gigpo_jax', 'envs'):
  assert module not in sys.modules, module
print(json.dumps({
  'count': [len(source), builder.info.splits['train'].num_examples],
  'kind': episode['kind'].decode(),
  'iteration': episode['iteration'],
  'observation': steps[0]['observation'].decode(),
  'is_last': [bool(s['is_last']) for s in steps],
  'reward': [float(s['reward']) for s in steps],
  'ids': [[int(n) for n in s['completion_ids']] for s in steps],
  'tokenizer': builder.info.metadata['tokenizer'],
  'part': len(builder.as_data_source('train[2:5]')),
}))
"""


def test_tfds_reads_the_set_without_this_project(tmp_path):
  log = episodes.EpisodeWriter(tmp_path, Text(), seed=0)
  write(log, 0)
  write(log, 1)
  done = subprocess.run(
    [sys.executable, '-I', '-c', READ, str(tmp_path)],
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  assert json.loads(done.stdout) == {
    'count': [8, 8],
    'kind': 'pick',
    'iteration': 1,
    'observation': HOSTILE,
    'is_last': [False, False, True],
    'reward': [0.0, 10.0, 0.0],
    'ids': [[7, 8], [7, 8], []],
    'tokenizer': 'fingerprint',
    'part': 3,
  }


@pytest.mark.parametrize('exists', [False, True], ids=['none', 'other'])
def test_open_set_refuses_other_folders(tmp_path, exists):
  if exists:
    write(episodes.EpisodeWriter(tmp_path, Text(), seed=0), 0)
    (tmp_path / 'metadata.json').write_text('{}')
  message = 'lacks the tokenizer' if exists else 'holds no episodes'
  with pytest.raises(ValueError, match=message) as error:
    episodes.open_dataset(tmp_path)
  assert '\n' not in str(error.value)


@pytest.mark.parametrize('is_nested', [False, True])
def test_features_that_name_a_module_are_refused(
  tmp_path, monkeypatch, is_nested
):
  folder = tmp_path / 'episodes'
  write(episodes.EpisodeWriter(folder, Text(), seed=5), 0)
  (tmp_path / 'imported_by_tfds.py').write_text('')
  monkeypatch.syspath_prepend(tmp_path)
  path = folder / 'features.json'
  features = json.loads(path.read_text())
  fields = features['featuresDict']['features']
  fields['kind'] = {'pythonClassName': 'imported_by_tfds.Feature', 'text': {}}
  if is_nested:  # JSON in a string, with an escaped dot.
    text = json.dumps({'x': {'type': 'imported_by_tfds.F', 'content': {}}})
    text = text.replace('.', '\\u002e')
    fields['kind'] = features | {'jsonFeature': {'json': text}}
    del fields['kind']['featuresDict']
  path.write_text(json.dumps(features))
  with pytest.raises(ValueError, match=r'features.json: names .*imported') as e:
    episodes.open_dataset(folder)
  assert '\n' not in str(e.value)
  assert 'imported_by_tfds' not in sys.modules
