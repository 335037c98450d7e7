"""Playing by hand: typed lines in, pages out, a tidy end."""

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


def _play(*arguments: str, typed: str) -> subprocess.CompletedProcess:
  return subprocess.run(
    [sys.executable, '-m', 'envs.play', *arguments],
    input=typed,
    capture_output=True,
    text=True,
    check=False,
    cwd=ROOT,
    timeout=120,
  )


def test_a_walk_to_the_end():
  # Task 0 of the corridor starts in room 0 of 5.
  done = _play('toy', typed='right\n' * 4)
  assert done.returncode == 0, done.stderr
  assert done.stdout.endswith('Success after 4 steps, reward 10.\n')
  assert 'You are in room 3 of 5.' in done.stdout
  assert done.stderr == ''


def test_winning_a_household():
  env = envs.make('alfworld', engine='native')
  task = base.Task('valid_seen', 2)
  commands = expert.plan(env.game(task))
  done = _play(
    'alfworld',
    *('--split', 'valid_seen', '--index', '2'),
    typed='\n'.join(commands) + '\n',
  )
  assert done.returncode == 0, done.stderr
  end = f'Success after {len(commands)} steps, reward 10.\n'
  assert done.stdout.endswith(end)
  assert env.reset(task).task in done.stdout


@pytest.mark.parametrize('line', ['fly to the moon', '', '<action>', '日本語'])
def test_nonsense_gets_the_environments_answer(line: str):
  done = _play('alfworld', typed=f'{line}\n:quit\n')
  assert done.returncode == 0, done.stderr
  assert 'Nothing happens.' in done.stdout
  assert done.stdout.endswith('> Left.\n')


def test_what_a_policy_sees_on_request():
  env = envs.make('alfworld', engine='native')
  first = env.reset(base.Task('train', 0))
  asked = _play('alfworld', typed=':prompt\n:actions\n').stdout
  assert first.prompt in asked
  assert '\n'.join(first.actions) in asked
  assert first.prompt in _play('alfworld', '--prompt', typed='').stdout
  assert first.prompt not in _play('alfworld', typed='').stdout


def test_the_end_of_the_input_leaves():
  done = _play('toy', typed='left\n')
  assert done.returncode == 0
  assert done.stdout.endswith('> \nLeft.\n')
  assert done.stderr == ''


def test_an_interrupt_leaves():
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
    (('alfred',), 'unknown environment'),
    (('toy', '--index', '100'), 'split train has 100 tasks'),
    (('toy', '--index', '-1'), 'split train has 100 tasks'),
    (('toy', '--engine', 'native'), '--engine=native: toy has only one'),
    (('alfworld', '--split', 'moon'), 'split=moon: must be one of train'),
    (('alfworld', '--engine', 'unity'), 'unknown engine; known: textworld'),
    (('alfworld', '--data_dir', '/nowhere'), 'no json_2.1.1/train folder'),
    (('webshop', '--data_dir', '/nowhere'), 'no items_shuffle_1000.json there'),
    (('search_qa', '--data_dir', '/nowhere'), 'no corpus.jsonl there'),
    (('sokoban', '--set', 'num_boxes=0'), 'num_boxes=0: must be at least 1'),
    (('sokoban', '--set', 'num_boxes'), 'num_boxes: must be NAME=VALUE'),
    (('sokoban', '--set', 'boxes=2'), "unexpected keyword argument 'boxes'"),
  ],
)
def test_wrong_arguments_are_refused_in_one_line(arguments, message, capsys):
  with pytest.raises(SystemExit) as error:
    play.main(arguments)
  assert error.value.code == 2
  assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_whole_response_goes_as_it_is():
  assert play.respond('look') == (
    '<think>Played by hand.</think><action>look</action>'
  )
  assert play.respond('<action>look</action>') == '<action>look</action>'


def test_shopping_by_hand():
  env = envs.make('webshop')
  task = base.Task('test', 1)
  responses = [r for _, r in env.demonstrate(task, noise=0.0, seed=0)]
  done = _play(
    'webshop',
    *('--split', 'test', '--index', '1'),
    typed='\n'.join(['fly', *responses]) + '\n',
  )
  assert done.returncode == 0, done.stderr
  end = f'Success after {len(responses) + 1} steps, reward 10, score 1.000.\n'
  assert done.stdout.endswith(end)
  # The answer to nonsense is the page as it was.
  assert done.stdout.count('> search[<your query>]\n') == 1
  assert 'page 1 [back to search] [next >]' in done.stdout


@pytest.mark.parametrize(
  ('name', 'settings'),
  [('sokoban', {'num_boxes': 1, 'size': (7, 7)}), ('search_qa', {'top_k': 2})],
)
def test_playing_what_an_oracle_does(name, settings):
  env = envs.make(name, **settings)
  steps = env.demonstrate(base.Task('train', 4), noise=0.0, seed=0)
  typed = [response.partition('</think>')[2] for _, response in steps]
  bare = [
    line.replace('<action>', '').replace('</action>', '') for line in typed
  ]
  done = _play(
    name,
    *('--index', '4'),
    *(f'--set={key}={value}' for key, value in settings.items()),
    typed='\n'.join(bare) + '\n',
  )
  assert done.returncode == 0, done.stderr
  assert f'Success after {len(typed)} steps' in done.stdout
  assert 'invalid' not in done.stdout


def test_the_variable_names_the_data(monkeypatch, capsys):
  monkeypatch.setenv('WEBSHOP_DATA', '/nowhere')
  with pytest.raises(SystemExit):
    play.main(['webshop'])
  assert 'env.data_dir=/nowhere: no items_' in capsys.readouterr().err
  # As in configurations: no official data, whatever there is.
  monkeypatch.setattr('builtins.input', lambda _: ':quit')
  assert play.main(['webshop', '--data_dir', 'generated']) == 0


def test_bytes_that_are_no_text_get_an_answer():
  done = subprocess.run(
    [sys.executable, '-m', 'envs.play', 'toy'],
    input=b'\xff\xfe\n:quit\n',
    capture_output=True,
    cwd=ROOT,
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.endswith(b'Left.\n')
