"""Tests of the trial run of an environment before compilation."""

import pathlib

import broken_env
import pytest

import envs
from configs import base as base_config
from envs import base
from gigpo_jax import builders, env_pool, mesh, train
from gigpo_jax import config as config_lib
from gigpo_jax.run import model_builders, remat, run_builders, trial
from gigpo_jax.runtime import distributed, errors

TASKS = [base.Task('train', index) for index in range(3)]


def _pool(name: str = 'toy', num_workers: int = 0, **kwargs):
  return env_pool.EnvPool(
    name,
    kwargs,
    num_envs=2,
    num_workers=num_workers,
    step_timeout_secs=30,
    reset_timeout_secs=30,
  )


def _walk(pool: env_pool.EnvPool) -> list:
  pool.reset(0, TASKS[0])
  replies = pool.receive()
  for response in ('<action>right</action>', '', '<action>left</action>'):
    pool.step(0, response)
    replies += pool.receive()
  return replies


@pytest.mark.parametrize('num_workers', [0, 1])
def test_trial_does_not_change_later_episodes(num_workers: int):
  with _pool() as pool:
    expected = _walk(pool)
  with _pool(num_workers=num_workers) as pool:
    observations, failures = trial.run(pool, 'toy', TASKS)
    assert [o.prompt[:6] for o in observations] == [
      'Step 0',
      'Step 1',
      'Step 2',
    ]
    assert failures == pool.failures == []
    assert _walk(pool) == expected


@pytest.mark.parametrize('num_workers', [0, 1])
@pytest.mark.parametrize('fails', ['reset', 'step', 'action'])
def test_error_shows_the_line_of_the_environment(num_workers: int, fails: str):
  with _pool('broken_env', num_workers, fails=fails) as pool:
    with pytest.raises(ValueError) as error:
      trial.run(pool, 'broken_env', TASKS)
  line = str(error.value)
  start = 'env.name=broken_env: cannot be played: train/0 raised: JSONDecode'
  assert line.startswith(start) and '\n' not in line
  code = pathlib.Path(broken_env.__file__).read_text().splitlines()
  line_number = (
    1 + [n for n, text in enumerate(code) if 'json.loads' in text][0]
  )
  assert f'called in broken_env.py:{line_number})' in line


def test_an_unusable_result_names_the_environment_once():
  with _pool('broken_env', fails='result') as pool:
    with pytest.raises(ValueError) as error:
      trial.run(pool, 'broken_env', TASKS)
  assert str(error.value).startswith(
    'env.name=broken_env: cannot be played: train/0 garbage: step returned None'
  )
  assert str(error.value).count('env.name=') == 1


@pytest.mark.parametrize('num_workers', [0, 1])
def test_an_episode_is_played_to_its_end(num_workers):
  with _pool(num_workers=num_workers, max_steps=5) as pool:
    episode = trial.play_to_end(pool, TASKS)
  assert len(episode.steps) == 5 and episode.steps[-1].result.done
  assert episode.first_observation.prompt.startswith('Step 0')
  assert [step.observation for step in episode.steps[1:]] == [
    step.result.observation.text for step in episode.steps[:-1]
  ]


def test_no_long_episode_is_played_to_its_end(monkeypatch):
  with _pool(max_steps=1000) as pool:
    assert trial.play_to_end(pool, TASKS[:1]) is None
  monkeypatch.setattr(trial, '_MAX_SECS', 0.0)
  with _pool(max_steps=5) as pool:
    assert trial.play_to_end(pool, TASKS) is None
  with _pool('broken_env', fails='step') as pool:
    assert trial.play_to_end(pool, TASKS) is None


@pytest.mark.parametrize('field', ['reward.functions', 'reward.scored'])
def test_a_faulty_reward_ends_the_run_before_compilation(
  tmp_path, monkeypatch, field
):
  def make_parts(*_):
    raise AssertionError('compiles')

  monkeypatch.setattr(run_builders, 'make_parts', make_parts)
  (tmp_path / 'my_rewards.py').write_text('def text(episode): return "good"\n')
  monkeypatch.syspath_prepend(str(tmp_path))
  config = _config(fails='')
  config.update_from_flattened_dict({field: ('my_rewards:text',)})
  with pytest.raises((ValueError, errors.RunError), match=f'^{field}=.*return'):
    train.train(config, str(tmp_path / 'run'))


def test_failed_tasks_are_reported_and_others_tried():
  with _pool('broken_env', fails='reset', below=2) as pool:
    observations, failures = trial.run(pool, 'broken_env', TASKS)
  assert len(observations) == 3
  assert [f.task.index for f in failures] == [0, 1]


def test_a_task_that_differs_in_each_episode_is_reported(capsys):
  for fails, expected in (('', ''), ('random', 'turn 0 of train/0 differs')):
    with _pool('broken_env', fails=fails) as pool:
      observations, _ = trial.run(pool, 'broken_env', TASKS)
      line = trial.differs(pool, 'broken_env', TASKS[0], observations)
    assert bool(line) == bool(expected) and expected in line
  config = _config(fails='random')
  with builders.make_pool(config) as pool:
    trial.try_environment(config, pool, 'train')
  assert capsys.readouterr().out == f'{line}\n'


def test_an_environment_without_close_is_refused(tmp_path, monkeypatch):
  (tmp_path / 'no_close.py').write_text(
    'from envs import toy\ntasks = toy.tasks\n'
    'class Env:\n  reset, step = toy.Env.reset, toy.Env.step\n'
  )
  monkeypatch.syspath_prepend(str(tmp_path))
  with pytest.raises(TypeError, match=r'Env has no close\(\); must have reset'):
    envs.make('no_close')
  line = r'^env.name=no_close: Env raises TypeError: Env has no demonstrate'
  with pytest.raises(ValueError, match=line):
    envs.make_expert('no_close')


@pytest.mark.parametrize(
  ('tokens', 'limit', 'fitting'),
  [(100, 2048, 256), (100, 512, 256), (160, 2048, 320), (20, 2048, 64)],
)
def test_limit_far_above_the_prompts_gives_a_warning(tokens, limit, fitting):
  line = trial.advice('guess', tokens, limit)
  assert line.startswith(f'rollout.max_prompt_tokens={limit}: ')
  assert f'rollout.max_prompt_tokens={fitting} compiles' in line
  assert f'at most {tokens} tokens' in line and '\n' not in line


@pytest.mark.parametrize(('tokens', 'limit'), [(600, 2048), (100, 256)])
def test_adequate_limit_gives_no_warning(tokens, limit):
  assert not trial.advice('guess', tokens, limit)


def _config(**env):
  config = base_config.get_config()
  base_config.use_tiny_policy(config)
  config.variant = ''
  config.model.remat = 'auto'
  config.env.name = 'broken_env'
  config.env.update(env)
  config.pool.num_workers = 0
  config.rollout.groups = config.rollout.episodes_per_group = 2
  config.model.path = 'configs/warm_starts/alfworld_tiny'
  config.evaluation.every = 0
  return config


def test_failing_environment_ends_the_run_before_compilation(
  tmp_path, monkeypatch
):
  def update_bytes(*_):
    raise AssertionError('compiles')

  # As on a GPU, where model.remat=auto compiles a program.
  monkeypatch.setattr(mesh, 'device_bytes', lambda: 2**40)
  monkeypatch.setattr(remat, 'update_bytes', update_bytes)
  message = 'env.name=broken_env: cannot be played: train/0 raised: JSONDecode'
  with pytest.raises(ValueError, match=message):
    train.train(_config(fails='step'), str(tmp_path))
  # The fixed config counts as the same experiment.
  with pytest.raises(AssertionError, match='compiles'):
    train.train(_config(fails=''), str(tmp_path))


def test_warning_about_the_limit_has_measured_numbers(capsys):
  class Text:
    def render(self, prompts):
      full = all(p.startswith('Step ') for p in prompts)
      return [range(50 * full + 20 + n) for n, _ in enumerate(prompts)]

  config = _config(fails='')
  with builders.make_pool(config) as pool:
    trial.try_environment(config, pool, 'train', Text())
    output = capsys.readouterr().out
    assert 'max_prompt_tokens=512: the first prompts of env.name=brok' in output
    assert 'have at most 72 tokens; rollout.max_prompt_tokens=192 ' in output
    assert 'even without their history' not in output
    # Buckets set by the user give no warning.
    config.rollout.prompt_buckets = (512,)
    trial.try_environment(config, pool, 'train', Text())
    assert not capsys.readouterr().out
    # Prompts that are too long even without their history.
    config.rollout.max_prompt_tokens = 21
    trial.try_environment(config, pool, 'train', Text())
  printed = capsys.readouterr().out
  assert 'have 22 tokens even without their history, for which' in printed
  assert 'rollout.prompt_overflow=drop_history cuts off the first' in printed


class Tasks(tuple):
  """Tasks that are given by their types."""

  def task_type(self, index):
    return self[index]


def test_processes_compare_their_tasks(monkeypatch):
  compared = []
  monkeypatch.setattr(distributed, 'check_same', compared.append)
  for types in ('aab', 'aab', 'abb', 'aabb'):
    monkeypatch.setattr(
      broken_env, 'tasks', lambda split, types=types, **_: Tasks(types)
    )
    config = _config(fails='')
    with builders.make_pool(config) as pool:
      trial.try_environment(config, pool, 'train')
  same, again, another_type, another_number = compared
  assert same == again
  (value,) = same.values()
  assert list(same) == ['env.name=broken_env: split train']
  assert value.startswith('3 tasks')
  assert another_type.values() != same.values()
  assert next(iter(another_type.values())).startswith('3 tasks')
  assert next(iter(another_number.values())).startswith('4 tasks')


def test_buckets_follow_the_limits_of_tokens():
  config = _config(fails='')
  config.rollout.max_prompt_tokens = 160
  config.rollout.max_completion_tokens = 32
  sizes = model_builders.sampler_kwargs(config)['prompt_buckets']
  assert sizes == (80, 160)
  assert builders._learner_sizes(config)['length_buckets'] == (96, 192)
  assert not list(config_lib._values(config))
