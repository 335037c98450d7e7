"""Tests of a worker's environments and their replies."""

import dataclasses
import json
import re
import types

import pytest

import envs
from envs import base, messages, toy, worker


def test_closing_also_closes_the_environment_of_the_check(monkeypatch):
  closed = []

  def make(name, **kwargs):
    del name, kwargs
    return types.SimpleNamespace(close=lambda: closed.append(1))

  monkeypatch.setattr(envs, 'make', make)
  host = worker.EnvHost('toy', {})
  host.start()
  host.close()
  host.close()
  assert closed == [1]


def decode_message(message, call):
  """Returns the status and value of a reply as the trainer decodes it."""
  return messages.decode(message[messages.HEADER.size :], call)


def _report(task):
  raise messages.ReportedError('no opinion')


@pytest.mark.parametrize(
  ('reset', 'reply'),
  [
    (lambda task: 'room', (messages.GARBAGE, 'env.name=toy: reset returned ')),
    (_report, (messages.ERROR, 'no opinion')),
  ],
)
def test_an_environment_that_fails_is_closed(monkeypatch, reset, reply):
  closed = []
  env = types.SimpleNamespace(reset=reset, close=lambda: closed.append(1))
  monkeypatch.setattr(envs, 'make', lambda name: env)
  host = worker.EnvHost('toy', {})
  status, line = decode_message(host.call(1, 'reset', 0, None), 'reset')
  assert status == reply[0] and line.startswith(reply[1])
  assert closed == [1]
  status, line = decode_message(host.call(2, 'step', 0, ''), 'step')
  assert status == messages.ERROR and 'env=0: no episode is running' in line


@pytest.mark.parametrize(
  'error', [messages.ReportedError('no data'), KeyError('data')]
)
def test_a_failed_preparation_does_not_end_the_running_episode(
  monkeypatch, error
):
  task, host = base.Task('train', 0), worker.EnvHost('toy', {})
  host.call(1, 'reset', 0, task)

  def fail(self, task):
    raise error

  monkeypatch.setattr(toy.Env, 'prepare', fail)
  status, line = decode_message(host.call(2, 'prepare', 0, task), 'prepare')
  assert status == messages.ERROR and 'data' in line
  status, _ = decode_message(host.call(3, 'step', 0, 'left'), 'step')
  assert status == messages.REPLY


def test_the_environment_of_the_check_is_the_first_to_play(monkeypatch):
  make, made = envs.make, []

  def counted(name):
    made.append(make(name))
    return made[-1]

  monkeypatch.setattr(envs, 'make', counted)
  host = worker.EnvHost('toy', {})
  host.start()
  for env, count in ((0, 1), (1, 2)):
    host.call(1, 'reset', env, base.Task('train', 0))
    assert len(made) == count


@pytest.mark.parametrize(
  ('fail', 'places'),
  [
    (lambda: json.loads('{'), r'decoder.py:\d+, called in env_host_test.py'),
    (lambda: 1 / 0, r'env_host_test.py'),
  ],
)
def test_exceptions_name_the_line_of_the_environment(fail, places):
  with pytest.raises((ValueError, ZeroDivisionError)) as error:
    fail()
  line = worker.format_exception(error.value, __file__)
  assert re.search(rf' \({places}:\d+\)$', line)
  assert 'called in' not in worker.format_exception(error.value)


class Mute(Exception):
  """Has no text."""

  def __str__(self):
    raise RuntimeError('no text')


@pytest.mark.parametrize(
  ('error', 'text'), [(Mute(), 'Mute: Mute'), (KeyError(), 'KeyError: KeyErr')]
)
def test_exceptions_without_a_text_show_their_type(error, text):
  assert worker.format_exception(error).startswith(text)


PLAIN = base.Observation('p', 'p', 'a', 't')
GOING = base.StepResult(PLAIN, 0.0, True, 'go', False, False)


def decode(call, value):
  return decode_message(messages.encode(1, call, value), call)


def test_replies_keep_all_fields():
  chat = dataclasses.replace(
    PLAIN, actions=('go',), conversation='c', agent='n' * 128
  )
  last = base.StepResult(
    observation=None,
    reward=1e6,
    valid=False,
    action='go',
    success=True,
    done=True,
    metrics={str(n): 1e12 for n in range(256)},
    score=0.5,
    final_anchor='end',
    other_rewards={'q': -1e6},
  )
  following = dataclasses.replace(GOING, observation=chat)
  for call, value in (('reset', chat), ('step', following), ('step', last)):
    assert decode(call, value) == (messages.REPLY, value)


@pytest.mark.parametrize(
  ('changes', 'problem'),
  [
    ({'done': True}, 'done=True: must be True exactly where observation'),
    ({'observation': None}, 'done=False: must be True exactly where'),
    ({'success': True}, 'success=True: must be False before the last step'),
    ({'valid': 1}, 'valid=1: must be True or False'),
    ({'metrics': {'': 1.0}}, "metrics has the name ''; must be 1 to 128"),
    ({'metrics': {'a' * 129: 1.0}}, "metrics has the name 'aaa"),
    ({'metrics': {'a\n': 1.0}}, 'printable characters'),
    ({'metrics': dict.fromkeys(map(str, range(257)), 1.0)}, '257 metrics of'),
    ({'other_rewards': {'q': 2e6}}, 'q=2000000.0: must be a number within'),
    ({'other_rewards': None}, 'other_rewards is NoneType, not dict'),
    ({'observation': 'room'}, 'observation is str, not Observation'),
  ],
)
def test_unusable_results_are_named(changes, problem):
  with pytest.raises(messages.UnusableReplyError) as error:
    messages.encode(1, 'step', dataclasses.replace(GOING, **changes))
  assert problem in str(error.value)


@pytest.mark.parametrize(
  ('changes', 'problem'),
  [
    ({'agent': 'n' * 129}, 'agent has 129 characters; at most 128'),
    ({'conversation': 'n' * 129}, 'conversation has 129 characters'),
    ({'tools': ('{"name": "add"}',) * 257}, '257 tools; at most 256'),
    ({'actions': 'go'}, 'actions is str, not tuple'),
    ({'prompt': 'x' * 9_000}, ' bytes; at most 9,000'),
  ],
)
def test_unusable_observations_are_named(monkeypatch, changes, problem):
  monkeypatch.setattr(messages, 'MAX_BYTES', 9_000)
  with pytest.raises(messages.UnusableReplyError) as error:
    messages.encode(1, 'reset', dataclasses.replace(PLAIN, **changes))
  assert problem in str(error.value)


@pytest.mark.parametrize(
  ('body', 'reason'),
  [
    (b'\xff', 'invalid reply: UnicodeDecodeError'),
    (b'["reply"]', 'invalid reply: ValueError'),
    (b'["reply", 3]', 'invalid reply: TypeError'),
    (b'["reply", {}]', 'invalid reply: KeyError'),
    (b'[' * 10**5, 'invalid reply: '),
    (b'["good", ""]', "status='good': must be one of reply, error, garbage"),
  ],
)
def test_bodies_that_are_no_reply_are_garbage(body, reason):
  status, line = messages.decode(body, 'step')
  assert status == messages.GARBAGE and line.startswith(reason)


def test_replies_of_earlier_releases_are_read():
  value = json.loads(messages.encode(1, 'step', GOING)[messages.HEADER.size :])
  del value[1]['other_rewards']
  for name in ('messages', 'tools', 'conversation', 'agent'):
    del value[1]['observation'][name]
  body = json.dumps(value).encode()
  assert messages.decode(body, 'step') == (messages.REPLY, GOING)
