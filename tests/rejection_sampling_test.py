"""Tests of rounds of rejection sampling."""

import contextlib
import pathlib
import shutil
import types

import preloaded
import programs
import pytest
import small_runs

from configs import alfworld
from gigpo_jax import episodes, mesh, rejection_sampling, rollout, sft


def _config(rounds: int):
  config = alfworld.get_config('smoke')
  config.sft.init, config.sft.rounds = '', rounds
  return config


@pytest.fixture(name='calls')
def fixture_calls(monkeypatch) -> list[tuple]:
  """Replaces the parts of a round; returns their calls."""
  calls = []

  def sample(config, folder, index):
    calls.append(('sample', config.model.path, index))
    return {'train/success_rate': index / 4}

  def warm_start(config, workdir):
    calls.append(('train', config.model.path, config.sft.data))
    (pathlib.Path(workdir) / 'policy').mkdir(parents=True)

  monkeypatch.setattr(rejection_sampling, 'sample', sample)
  monkeypatch.setattr(sft, 'warm_start', warm_start)
  monkeypatch.setattr(rejection_sampling.config_lib, 'validate', lambda _: None)
  return calls


def test_each_round_starts_from_the_policy_before(tmp_path, calls):
  config = _config(rounds=2)
  start = config.model.path
  rejection_sampling.run(config, str(tmp_path))
  first, second = tmp_path / 'round-0', tmp_path / 'round-1'
  assert calls == [
    ('sample', start, 0),
    ('train', start, str(first / 'episodes')),
    ('sample', str(first / 'policy'), 1),
    ('train', str(first / 'policy'), str(second / 'episodes')),
  ]
  rates = [x['train/success_rate'] for x in small_runs.read_lines(tmp_path)]
  assert rates == [0.0, 0.25]


def test_rounds_resume_with_another_path_of_the_model(tmp_path, calls):
  config, moved, workdir = _config(rounds=1), tmp_path / 'moved', tmp_path / 'a'
  shutil.copytree(programs.PROJECT / config.model.path, moved)
  rejection_sampling.run(config, str(workdir))
  config = _config(rounds=2)
  config.model.path = str(moved)
  rejection_sampling.run(config, str(workdir))
  assert [call[0] for call in calls] == ['sample', 'train'] * 2
  (moved / 'config.json').write_text('{}')
  config.model.path = str(moved)
  with pytest.raises(ValueError, match=f'model.path={moved}: files=.* .was'):
    rejection_sampling.run(config, str(workdir))


def test_each_rollout_has_its_own_tasks_and_random_numbers(
  monkeypatch, tmp_path
):
  config, calls = _config(rounds=2), []
  config.sft.rollouts, config.evaluation.every = 2, 0

  class Runner:
    sampler = types.SimpleNamespace(release=lambda: None)

    def run(self, params, tasks, *, stream, **_):
      calls.append((tasks, stream))
      return []

  bundle = types.SimpleNamespace(
    mesh=mesh.make_mesh(1, -1, 1),
    tokenizer=None,
    load=dict,
    compile_together=lambda _: None,
  )
  parts = rejection_sampling.builders
  monkeypatch.setattr(
    rejection_sampling.model_builders, 'make_model_bundle', lambda _: bundle
  )
  for name in ('open_pool', 'make_scorer'):
    monkeypatch.setattr(parts, name, lambda *_: contextlib.nullcontext())
  monkeypatch.setattr(parts, 'make_runner', lambda *_: Runner())
  for name in ('stop_if_failed', 'summarize'):
    monkeypatch.setattr(rejection_sampling.metrics, name, lambda *_, **__: {})
  monkeypatch.setattr(rejection_sampling.episodes, 'write', lambda *_, **__: 0)
  for index in range(2):
    rejection_sampling.sample(config, tmp_path, index)
  stream = parts.make_task_sampler(config)
  assert calls == [
    (stream.at(position), (rollout.TRAIN, position)) for position in range(4)
  ]


def test_the_same_command_resumes_after_the_last_round(tmp_path, calls):
  rejection_sampling.run(_config(rounds=1), str(tmp_path))
  del calls[:]
  rejection_sampling.run(_config(rounds=2), str(tmp_path))
  policy = str(tmp_path / 'round-0' / 'policy')
  assert [call[:2] for call in calls] == [('sample', policy), ('train', policy)]
  assert len(small_runs.read_lines(tmp_path)) == 2


def test_rounds_resume_without_the_policies_of_earlier_rounds(tmp_path, calls):
  rejection_sampling.run(_config(rounds=2), str(tmp_path))
  del calls[:]
  # The user needs the space.
  shutil.rmtree(tmp_path / 'round-0' / 'policy')
  rejection_sampling.run(_config(rounds=3), str(tmp_path))
  policy = str(tmp_path / 'round-1' / 'policy')
  assert [call[:2] for call in calls] == [('sample', policy), ('train', policy)]
  lines = small_runs.read_lines(tmp_path)
  assert [line['iteration'] for line in lines] == [0, 1, 2]


def test_damaged_episodes_are_refused_before_the_rollouts(tmp_path, calls):
  folder = tmp_path / 'round-0' / 'episodes'
  folder.mkdir(parents=True)
  (folder / episodes.INFO).touch()
  (tmp_path / 'rounds.json').write_text(_config(rounds=1).to_json_best_effort())
  with pytest.raises(ValueError, match=f'^{folder}/.*; move the folder away'):
    rejection_sampling.run(_config(rounds=1), str(tmp_path))
  assert not calls


def test_repeated_rounds_keep_the_earlier_metrics(tmp_path, calls):
  rejection_sampling.run(_config(rounds=2), str(tmp_path))
  before = (tmp_path / 'metrics.jsonl').read_bytes()
  for index in range(2):
    shutil.rmtree(tmp_path / f'round-{index}' / 'policy')
  rejection_sampling.run(_config(rounds=2), str(tmp_path))
  assert (tmp_path / 'metrics.jsonl.bak').read_bytes() == before


def test_rounds_without_their_config_are_refused(tmp_path, calls):
  rejection_sampling.run(_config(rounds=1), str(tmp_path))
  (tmp_path / 'rounds.json').unlink()
  (tmp_path / 'metrics.jsonl').unlink()
  del calls[:]
  with pytest.raises(ValueError, match='its round-0 is of another command'):
    rejection_sampling.run(_config(rounds=2), str(tmp_path))
  assert not calls


def test_complete_rounds_are_reported(tmp_path, calls, capsys):
  rejection_sampling.run(_config(rounds=1), str(tmp_path))
  assert 'complete' not in capsys.readouterr().out
  rejection_sampling.run(_config(rounds=1), str(tmp_path))
  assert f'{tmp_path}: all 1 rounds are complete' in capsys.readouterr().out


def test_rounds_of_another_config_are_refused(tmp_path, calls):
  rejection_sampling.run(_config(rounds=1), str(tmp_path))
  del calls[:]
  other = _config(rounds=2)
  other.seed = 1
  with pytest.raises(
    ValueError, match=r'seed=1 \(was 0\); use another'
  ) as info:
    rejection_sampling.run(other, str(tmp_path))
  assert '--allow_config_change' not in str(info.value)
  with pytest.raises(ValueError, match=r'sft.rounds=0 \(was 1\)'):
    rejection_sampling.run(_config(rounds=0), str(tmp_path))
  assert not calls


@pytest.mark.parametrize('field', ['init', 'data'])
def test_another_start_is_refused(tmp_path, field):
  config = _config(rounds=2)
  config.sft[field] = 'scratch'
  with pytest.raises(ValueError, match=f'sft.rounds=2: .*sft.{field}=scratch'):
    rejection_sampling.run(config, str(tmp_path))


def test_tasks_that_depend_on_outcomes_are_refused(tmp_path):
  config = _config(rounds=2)
  config.tasks.draw = 'uncertain'
  with pytest.raises(ValueError, match='tasks.draw=uncertain: depends on outc'):
    rejection_sampling.run(config, str(tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rounds_train_on_the_policy_s_successes(tmp_path):
  flags = [flag for flag in small_runs.SMALL if 'episodes.every' not in flag]
  command = small_runs.command(
    'sft',
    '--config=configs/alfworld.py:smoke',
    f'--workdir={tmp_path}',
    *flags,
    '--config.env.max_steps=20',
    '--config.sft.init=',
    '--config.sft.rounds=2',
    '--config.sft.rollouts=2',
    '--config.sft.minibatch_rows=16',
  )
  preloaded.run(command)
  lines = small_runs.read_lines(tmp_path)
  assert len(lines) == 2 and lines[0]['train/success_rate'] > 0
  assert 'eval/success_rate' in lines[1]
  stored = [
    episodes.open_dataset(tmp_path / f'round-{n}/episodes') for n in (0, 1)
  ]
  assert [x.iterations for x in stored] == [[0, 1], [2, 3]]
  assert (tmp_path / 'round-1' / 'policy' / 'model.safetensors').exists()
  rates = [sum(e['success'] for e in x) / len(x.source) for x in stored]
  assert rates == [line['train/success_rate'] for line in lines]
