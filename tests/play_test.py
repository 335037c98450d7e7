"""Tests of envs/play.py: typed actions, printed observations, clean exits."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

import envs
from envs import base, play
from envs.alfworld import expert

ROOT = pathlib.Path(envs.__file__).parents[1]


def _play(*arguments: str, stdin: str) -> subprocess.CompletedProcess:
  return subprocess.run(
    [sys.executable, '-m', 'envs.play', *arguments],
    input=stdin,
    capture_output=True,
    text=True,
    check=False,
    cwd=ROOT,
    timeout=120,
  )


def test_playing_an_episode_to_the_end():
  # Task 0 starts in room 0 of 5.
  result = _play('toy', stdin='right\n' * 4)
  assert result.returncode == 0, result.stderr
  assert result.stdout.endswith('Success after 4 steps, reward 10.\n')
  assert 'You are in room 3 of 5.' in result.stdout
  assert result.stderr == ''


def test_winning_an_alfworld_game():
  env = envs.make('alfworld', engine='native')
  task = base.Task('valid_seen', 2)
  commands = expert.plan(env.game(task))
  result = _play(
    'alfworld',
    *('--split', 'valid_seen', '--index', '2'),
    stdin='\n'.join(commands) + '\n',
  )
  assert result.returncode == 0, result.stderr
  end = f'Success after {len(commands)} steps, reward 10.\n'
  assert result.stdout.endswith(end)
  assert env.reset(task).task in result.stdout


@pytest.mark.parametrize('line', ['fly to the moon', '', '<action>', '日本語'])
def test_unknown_actions_reach_the_environment(line: str):
  result = _play('alfworld', stdin=f'{line}\n:quit\n')
  assert result.returncode == 0, result.stderr
  assert 'Nothing happens.' in result.stdout
  assert result.stdout.endswith('> Left.\n')


def test_prompt_and_actions_are_shown_on_request():
  env = envs.make('alfworld', engine='native')
  first = env.reset(base.Task('train', 0))
  output = _play('alfworld', stdin=':prompt\n:actions\n').stdout
  assert first.prompt in output
  assert '\n'.join(first.actions) in output
  assert first.prompt in _play('alfworld', '--prompt', stdin='').stdout
  assert first.prompt not in _play('alfworld', stdin='').stdout


def test_end_of_input_ends_the_program():
  result = _play('toy', stdin='left\n')
  assert result.returncode == 0
  assert result.stdout.endswith('> \nLeft.\n')
  assert result.stderr == ''


def test_ctrl_c_exits_with_status_130():
  process = subprocess.Popen(
    [sys.executable, '-u', '-m', 'envs.play', 'toy'],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    cwd=ROOT,
  )
  while not process.stdout.readline().startswith('You are in'):
    assert process.poll() is None
  time.sleep(0.2)
  os.kill(process.pid, signal.SIGINT)
  output, errors = process.communicate(timeout=60)
  assert process.returncode == 130
  assert output.endswith('Left.\n')
  assert errors == ''


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (('alfred',), 'unknown; must be one of'),
    (('toy', '--index', '100'), 'split train has 100 tasks'),
    (('toy', '--index', '-1'), 'split train has 100 tasks'),
    (('toy', '--set', 'engine=native'), 'toy has no such option'),
    (('alfworld', '--split', 'moon'), 'split=moon: must be one of train'),
    (
      ('alfworld', '--set', 'engine="unity"'),
      'env.engine=unity: unknown; must',
    ),
    (('alfworld', '--data_dir', '/nowhere'), 'no folder json_2.1.1/train'),
    (('webshop', '--data_dir', '/nowhere'), 'has no items_shuffle_1000.json'),
    (('search_qa', '--data_dir', '/nowhere'), 'has no corpus.jsonl'),
    (('sokoban', '--set', 'num_boxes=0'), 'num_boxes=0: must be at least 1'),
    (('keydoor', '--set', 'anchor=bad'), 'env.anchor=bad: unknown; must be'),
    (
      ('alfworld', '--data_dir', 'generated', '--set', "generator={'x': 1}"),
      'env.generator.x: unknown; must be one of expected_counts, num_games',
    ),
    (('sokoban', '--set', 'num_boxes'), 'num_boxes: must be NAME=VALUE'),
    (
      ('sokoban', '--set', 'boxes=2'),
      'env.boxes=2: sokoban has no such option',
    ),
  ],
)
def test_invalid_arguments_are_reported_in_one_line(arguments, message, capsys):
  with pytest.raises(SystemExit) as error:
    play.main(arguments)
  assert error.value.code == 2
  assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_line_with_action_tags_is_sent_unchanged():
  assert play.respond('look') == (
    '<think>Played by hand.</think><action>look</action>'
  )
  assert play.respond('<action>look</action>') == '<action>look</action>'


def test_lines_are_unchanged_if_the_policy_calls_tools(tmp_path, monkeypatch):
  (tmp_path / 'echo_env.py').write_text(
    'from envs import toy\n'
    'tasks = toy.tasks\n'
    'uses_tools = bool\n'
    'class Env(toy.Env):\n'
    '  def step(self, response):\n'
    '    print(f"Got {response}.")\n'
    '    return super().step(response)\n'
  )
  monkeypatch.setenv('PYTHONPATH', str(tmp_path))
  with_tools = _play('echo_env', '--max_steps=9', stdin='left\n')
  assert 'Got left.' in with_tools.stdout
  without = _play('echo_env', stdin='left\n')
  assert 'Got <think>Played by hand.</think><action>left' in without.stdout


def test_a_lost_connection_is_one_line(tmp_path, monkeypatch):
  (tmp_path / 'lost_env.py').write_text(
    'from envs import toy\n'
    'tasks = toy.tasks\n'
    'class Env(toy.Env):\n'
    '  def reset(self, task):\n'
    '    raise ConnectionError("env.server=x: refused")\n'
  )
  monkeypatch.setenv('PYTHONPATH', str(tmp_path))
  result = _play('lost_env', stdin='left\n')
  assert (result.returncode, result.stdout) == (2, '')
  assert result.stderr == 'env.server=x: refused\n'


def test_playing_webshop():
  env = envs.make('webshop')
  task = base.Task('test', 1)
  responses = [r for _, r in env.demonstrate(task, noise=0.0, seed=0)]
  result = _play(
    'webshop',
    *('--split', 'test', '--index', '1'),
    stdin='\n'.join(['fly', *responses]) + '\n',
  )
  assert result.returncode == 0, result.stderr
  end = f'Success after {len(responses) + 1} steps, reward 10, score 1.000.\n'
  assert result.stdout.endswith(end)
  # After an unknown action the page is shown again, unchanged.
  assert result.stdout.count('> search[<your query>]\n') == 1
  assert 'page 1 [back to search] [next >]' in result.stdout


@pytest.mark.parametrize(
  ('name', 'settings'),
  [('sokoban', {'num_boxes': 1, 'size': (7, 7)}), ('search_qa', {'top_k': 2})],
)
def test_playing_the_oracles_actions(name, settings):
  env = envs.make(name, **settings)
  steps = env.demonstrate(base.Task('train', 4), noise=0.0, seed=0)
  tagged = [response.partition('</think>')[2] for _, response in steps]
  lines = [
    text.replace('<action>', '').replace('</action>', '') for text in tagged
  ]
  result = _play(
    name,
    *('--index', '4'),
    *(f'--set={key}={value}' for key, value in settings.items()),
    stdin='\n'.join(lines) + '\n',
  )
  assert result.returncode == 0, result.stderr
  assert f'Success after {len(lines)} steps' in result.stdout
  assert 'invalid' not in result.stdout


def test_data_dir_defaults_to_the_environment_variable(monkeypatch, capsys):
  monkeypatch.setenv('WEBSHOP_DATA', '/nowhere')
  with pytest.raises(SystemExit):
    play.main(['webshop'])
  assert 'env.data_dir=/nowhere: has no items_' in capsys.readouterr().err
  # As in configs: 'generated' ignores the variable.
  monkeypatch.setattr('builtins.input', lambda _: ':quit')
  assert play.main(['webshop', '--data_dir', 'generated']) == 0


def test_invalid_utf8_input_is_accepted():
  result = subprocess.run(
    [sys.executable, '-m', 'envs.play', 'toy'],
    input=b'\xff\xfe\n:quit\n',
    capture_output=True,
    cwd=ROOT,
  )
  assert result.returncode == 0, result.stderr
  assert result.stdout.endswith(b'Left.\n')
