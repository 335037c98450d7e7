"""Tests of envs/openenv_env.py with a scripted server, and with OpenEnv's."""

import contextlib
import json
import pathlib
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import envs
from envs import base, lamps_server, openenv_env, tool_calls

pytest.importorskip('websockets')

from websockets import datastructures, http11
from websockets.sync import server as websockets_server

TASK = base.Task('train', 3)
SCHEMA = {
  'description': 'Guesses a number from 0 to 7.',
  'type': 'object',
  'properties': {
    'metadata': {'type': 'object'},
    'number': {'type': 'integer'},
  },
  'required': ['number'],
}


def _guess(number) -> str:
  return tool_calls.write(tool_calls.Call('act', {'number': number}))


# Errors by number.
ERRORS = {
  2: {'message': 'no such\nnumber'},
  9: {
    'code': 'VALIDATION_ERROR',
    'errors': [{'loc': ['number'], 'msg': 'is nine'}],
  },
}


class Server:
  """A server whose game is scripted by the numbers that are guessed."""

  def __init__(self, schema=SCHEMA):
    self._schema = schema
    self._server = websockets_server.serve(
      self._play, '127.0.0.1', 0, process_request=self._describe
    )
    port = self._server.socket.getsockname()[1]
    self.url = f'http://127.0.0.1:{port}'
    threading.Thread(target=self._server.serve_forever, daemon=True).start()

  def __enter__(self):
    return self

  def __exit__(self, *exc):
    self._server.shutdown()

  def _describe(self, connection, request):
    if request.path != '/schema':
      return None
    body = json.dumps({'action': self._schema}).encode()
    headers = datastructures.Headers({'Content-Length': str(len(body))})
    return http11.Response(200, 'OK', headers, body)

  def _play(self, connection):
    for text in connection:
      message = json.loads(text)
      if message['type'] == 'state':
        data = {'episode_id': 'x', 'step_count': 9, 'low': 0}
        connection.send(json.dumps({'type': 'state', 'data': data}))
        continue
      number = message['data'].get('number', 0)
      data = {
        'observation': {'text': f'Read {number}.', 'metadata': {}},
        'reward': 1.0 if number == 7 else None,
        'done': number == 7,
      }
      if number == 1:
        time.sleep(1)
      data |= {
        3: {'observation': {'text': 'x' * 10_000_000}},
        4: {'observation': 'not an object'},
        5: {'reward': 'much'},
        8: {'reward': 10**400},
      }.get(number, {})
      reply = {'type': 'observation', 'data': data}
      if number in ERRORS:
        reply = {'type': 'error', 'data': ERRORS[number]}
      if number == 6:
        return
      connection.send(json.dumps(reply))


@pytest.fixture(name='server', scope='module')
def fixture_server():
  with Server() as server:
    yield server


def test_an_episode(server):
  env = envs.make('openenv', server=f'{server.url}/', task='Guess.')
  first = env.reset(TASK)
  assert first.messages == (base.Message('user', 'Guess.\ntext: Read 0.'),)
  (tool,) = map(json.loads, first.tools)
  assert tool['name'] == 'act' and tool['description'].startswith('Guesses')
  assert list(tool['parameters']['properties']) == ['number']
  # The state, without the fields that change with every step.
  assert first.anchor == '{"low": 0}'
  for response, valid, text in (
    (_guess(0), True, 'text: Read 0.'),
    (_guess('x'), False, "Error: arguments number: 'x' is not of type"),
    ('Seven.', False, 'Error: call the tool act.'),
    ('<tool_call>', False, 'Error: a <tool_call> tag'),
  ):
    result = env.step(response)
    assert result.valid == valid and not result.done
    assert result.observation.text.startswith(text)
  result = env.step(_guess(7) + _guess(0))
  assert result.done and result.success and result.reward == 1
  assert env.reset(TASK) == first
  env.close()


@pytest.mark.parametrize(
  ('number', 'message'),
  [
    (1, 'step: no response within 0.3 s'),
    (2, 'step: error no such number'),
    (3, 'step: .*too big|step: .*over size limit|step: .*exceeds limit'),
    (4, 'step: its observation is no JSON object'),
    (5, "step: its reward is 'much', no number"),
    (6, 'step: '),
    (8, 'step: '),
  ],
)
def test_a_bad_reply_is_one_line(server, number, message):
  env = envs.make('openenv', server=server.url)
  env.reset(TASK)
  if number == 1:
    env._connection._timeout = 0.3
  with pytest.raises((ConnectionError, TimeoutError), match=message) as e:
    env.step(_guess(number))
  assert len(str(e.value).splitlines()) == 1 and server.url in str(e.value)
  env.close()


def test_an_action_that_the_server_refuses_is_an_error_of_the_policy(
  server, monkeypatch
):
  # As for the connection, a proxy is not used.
  monkeypatch.setenv('HTTP_PROXY', 'http://127.0.0.1:9')
  env = envs.make('openenv', server=server.url)
  env.reset(TASK)
  result = env.step(_guess(9))
  assert not result.done and result.metrics['tool_errors'] == 1
  (message,) = result.observation.messages
  assert message.text.startswith('Error: ') and 'is nine' in message.text
  assert env.step(_guess(7)).success
  env.close()


def test_a_server_that_does_not_start_or_lies_is_one_line():
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    port = free.getsockname()[1]
  env = envs.make(
    'openenv',
    server=f'http://127.0.0.1:{port}',
    demonstrator=f'{__name__}:guess_high',
  )
  expected = r'env.server=.*: schema: .*refused; must be .* a running server'
  with pytest.raises(ConnectionError, match=f'^{expected}$'):
    env.reset(TASK)
  with pytest.raises(ValueError, match=f'^{expected}$'):
    envs.demonstrate('openenv', env, TASK, noise=0.0, seed=0)
  for schema, message in (
    ('words', 'schema: the schema of an action is no JSON object'),
    ({'properties': 3}, 'tool act: no JSON schema'),
  ):
    with Server(schema) as server:
      env = envs.make('openenv', server=server.url)
      with pytest.raises((ConnectionError, ValueError), match=message) as e:
        env.reset(TASK)
      assert len(str(e.value).splitlines()) == 1
      env.close()


def test_a_long_first_observation_is_not_cut(server):
  env = envs.make(
    'openenv', server=server.url, task='A long task.', max_result_chars=9
  )
  assert env.reset(TASK).text == (
    'A long task.\nError: the result has 13 characters; at most 9'
  )
  env.close()


def guess_high(observation, noise, rng):
  """Guesses 0 at random, else the winning number."""
  del observation
  return _guess(0 if rng.random() < noise else 7)


def test_a_demonstrator_plays_for_a_warm_start(server):
  def make(name: str):
    return envs.make('openenv', server=server.url, demonstrator=name)

  env = make(f'{__name__}:guess_high')
  (only,) = env.demonstrate(TASK, noise=0.0, seed=0)
  assert only == (env.reset(TASK), _guess(7))
  noisy = list(env.demonstrate(TASK, noise=0.7, seed=1))
  assert len(noisy) > 1 and noisy[-1][1] == _guess(7)
  assert noisy == list(env.demonstrate(TASK, noise=0.7, seed=1))
  env.close()
  for name, reason in (
    ('', 'not of the form module:name'),
    (f'{__name__}:none', "no attribute 'none'"),
    ('no_such_module:play', 'No module named'),
  ):
    message = f'env.demonstrator={name}: unknown .*{reason}.*module:function'
    with pytest.raises(ValueError, match=message):
      next(make(name).demonstrate(TASK, noise=0.0, seed=0))


def test_lamps():
  lamps = [True, False, False, True, False]
  assert lamps_server.show(lamps) == '1 4'
  assert lamps_server.press(lamps, 2) == [True, True, False, True, False]
  assert lamps_server.press(lamps, 4) == [True, False, False, False, False]
  assert lamps_server.show([False] * 5) == 'none'
  starts = {tuple(lamps_server.start(seed)) for seed in range(400)}
  assert len(starts) == 31
  rng = np.random.default_rng(0)
  observation = base.Observation('', '', '{"on": "2 5"}', '')

  def buttons(noise: float) -> set[int]:
    played = [
      lamps_server.demonstrate(observation, noise, rng) for _ in range(60)
    ]
    return {
      tool_calls.parse(response).calls[0].arguments['button']
      for response in played
    }

  assert buttons(0.0) == {2, 5} and buttons(1.0) == {1, 2, 3, 4, 5}


def test_wrong_arguments_are_refused_in_one_line():
  with pytest.raises(ValueError, match='env.server=None: must start with'):
    envs.tasks('openenv', 'train')
  assert not list(openenv_env.check_installation({}))


@contextlib.contextmanager
def _openenv_server(*command: str):
  """Starts a server of openenv-core; yields an environment and its reset."""
  pytest.importorskip('openenv')
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    port = free.getsockname()[1]
  process = subprocess.Popen([sys.executable, *command, str(port)])
  env = envs.make('openenv', server=f'http://127.0.0.1:{port}')
  try:
    for _ in range(100):
      try:
        first = env.reset(TASK)
        break
      except ConnectionError:
        time.sleep(0.3)
    yield env, first
  finally:
    env.close()
    process.kill()
    process.wait()


@pytest.mark.slow
def test_an_episode_with_openenvs_own_server():
  path = pathlib.Path(__file__).parent / 'openenv_server.py'
  with _openenv_server(str(path)) as (env, first):
    assert first.text == 'text: Guess a number from 0 to 7.'
    assert first.anchor == '{"high": 7, "low": 0}'
    result = env.step(_guess(0))
    assert result.observation.text == 'text: Higher.'
    assert result.observation.anchor == '{"high": 7, "low": 1}'
    assert not env.step(_guess('x')).valid
    # The seed of train/3 is 3.
    result = env.step(_guess(3))
    assert result.success and result.reward == 1
    assert result.final_anchor == '{"high": 7, "low": 1}'


@pytest.mark.slow
def test_the_example_with_openenvs_own_server():
  def press(button: int) -> str:
    return tool_calls.write(tool_calls.Call('act', {'button': button}))

  with _openenv_server('-m', 'envs.lamps_server') as (env, first):
    lamps = lamps_server.start(3)
    assert first.text == f'on: {lamps_server.show(lamps)}'
    assert first.anchor == f'{{"on": "{lamps_server.show(lamps)}"}}'
    assert not env.step(press(6)).valid
    for button in map(int, lamps_server.show(lamps).split()):
      result = env.step(press(button))
    assert result.success and result.reward == 1
