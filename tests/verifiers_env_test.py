"""Tests of envs/verifiers_env.py with environments of the package verifiers."""

import asyncio
import json
import signal
import time

import pools
import pytest

import envs
from envs import (
  base,
  tool_calls,
  verifiers_env,
  verifiers_letters,
  verifiers_session,
)

TASK = base.Task('train', 3)


@pytest.fixture(name='package')
def fixture_package():
  pytest.importorskip('verifiers.types', exc_type=ImportError)


def _make(kind: str, **kwargs):
  kwargs = {'timeout_secs': 10.0} | kwargs
  return envs.make(
    'verifiers',
    environment='verifiers_cases',
    options={'kind': kind},
    **kwargs,
  )


def _call(name: str, **arguments) -> str:
  return tool_calls.write(tool_calls.Call(name, arguments))


def test_a_single_turn_and_its_rubric(package):
  env = _make('once')
  first = env.reset(TASK)
  assert first.messages == (
    base.Message('system', 'Use <answer> tags.'),
    base.Message('user', 'Double 3.'),
  )
  assert not first.tools and first.task == 'Double 3.'
  right = '<think>3 + 3</think><answer>6</answer>'
  for response, reward in ((right, 1.5), ('6', 0.5)):
    assert env.reset(TASK) == first
    result = env.step(response)
    # 1.0 * _exact + 0.5 * _short.
    assert result.done and result.reward == result.score == reward
    assert result.success == (reward == 1.5) and result.valid
    assert result.metrics['_exact'] == (reward == 1.5)
    assert result.metrics['_short'] == result.metrics['num_turns'] == 1
  env.close()


def test_several_turns(package):
  env = _make('chat', state_fields=('seen',))
  first = env.reset(TASK)
  assert first.anchor == '{"seen": []}'
  result = env.step('hello')
  assert result.observation.messages == (
    base.Message('user', 'You said hello.'),
  )
  assert result.observation.anchor == '{"seen": ["hello"]}'
  assert result.reward == 0 and not result.done
  result = env.step('huge')
  assert result.observation.text == (
    'Error: the message has 10,000,000 characters; at most 8,000'
  )
  assert env.step('more').observation.text == 'You said more.'
  # The prompt no longer continues: another conversation.
  observation = env.step('forget').observation
  assert observation.conversation == '1'
  assert [m.text for m in observation.messages] == [
    'Double 3.',
    'You said forget.',
  ]
  observation = env.step('and').observation
  assert observation.conversation == '1' and len(observation.messages) == 1
  result = env.step('right')
  # 2 * right + 0.25 * words.
  assert result.done and result.reward == 2 + 0.25 * 6
  assert result.metrics['words'] == 6 and result.final_anchor.endswith('"]}')
  env.close()


def test_an_unknown_field_of_the_state_is_refused(package):
  env = _make('chat', state_fields=('seen', 'heard'))
  with pytest.raises(ValueError, match='the state has no heard; has .*, seen'):
    env.reset(TASK)
  env.close()


def test_the_step_limit_ends_and_scores_an_episode(package):
  env = _make('chat', max_steps=2)
  first = env.reset(TASK)
  assert first.anchor == 'Double 3.'
  assert env.step('a').observation.anchor == 'You said a.'
  result = env.step('b')
  assert result.done and result.reward == 0.5 and not result.success
  assert result.final_anchor is None
  env.close()


def test_tools(package):
  env = _make('tools')
  first = env.reset(TASK)
  (tool,) = map(json.loads, first.tools)
  assert tool['name'] == '_add' and tool['description'] == 'Adds two numbers.'
  assert verifiers_env.uses_tools(
    {'environment': 'verifiers_cases', 'options': {'kind': 'tools'}}
  )
  both = f'<think>so</think>{_call("_add", a=1, b=2)}{_call("_add", a=3, b=4)}'
  result = env.step(both)
  assert [m.text for m in result.observation.messages] == ['3', '7']
  assert [m.call_id for m in result.observation.messages] == [
    'call-1-1',
    'call-1-2',
  ]
  assert result.valid and not result.observation.tools
  for arguments, valid, text in (
    ({'a': 1, 'b': 13}, True, 'an unlucky number'),
    ({'a': 1}, False, 'missing 1 required'),
  ):
    result = env.step(_call('_add', **arguments))
    assert result.valid == valid and text in result.observation.text
    assert not result.observation.conversation
  result = env.step('It is 6.')
  assert result.success and result.metrics['total_tool_calls'] == 4
  for response in ('<tool_call>', _call('_add', a=1, b=1) * 9, ''):
    env.reset(TASK)
    result = env.step(response)
    assert result.done and not result.valid and not result.success
  env.close()


@pytest.mark.parametrize(
  ('kind', 'response', 'message'),
  [
    ('chat', 'hang', 'turn 1: no response within 0.5 s'),
    ('chat', 'raise', "KeyError: 'no.*such thing'"),
    ('chat', 'stop', 'ToolCallError.*is broken'),
    ('chat', 'image', "a part of type 'image_url'; must be text"),
    ('chat', 'odd', 'TypeError|ValueError'),
    ('chat', 'unfair', 'Error calling reward function words: no judge'),
    ('schema', '', 'tool _add: no JSON schema'),
  ],
)
def test_a_failure_is_one_line(package, kind, response, message):
  env = _make(kind, timeout_secs=0.5, max_steps=1 + (response != 'unfair'))
  errors = (RuntimeError, TimeoutError, ValueError)
  with pytest.raises(errors, match=message) as e:
    env.reset(TASK)
    env.step(response)
  assert len(str(e.value).splitlines()) == 1
  assert str(e.value).startswith('env.environment=verifiers_cases: ')
  env.close()


def test_a_rollout_that_starts_too_slowly_ends(package):
  env = _make('slow', timeout_secs=0.1)
  with pytest.raises(TimeoutError, match='no response within 0.1 s'):
    env.reset(TASK)
  assert not asyncio.all_tasks(verifiers_session._loop())


def test_the_time_of_the_policy_does_not_count(package):
  env = _make('timed')
  env.reset(TASK)
  time.sleep(0.3)
  assert not env.step('hello').done
  env.close()


@pytest.mark.slow
def test_a_failure_costs_its_own_episode_only(package):
  kwargs = {'environment': 'verifiers_cases', 'options': {'kind': 'chat'}}
  responses = {0: 'good', 1: 'huge', 2: 'raise', 3: 'hang', 4: 'nan'}
  with pools.make(
    name='verifiers',
    env=kwargs | {'timeout_secs': 3.0, 'max_steps': 2},
    num_envs=5,
  ) as pool:
    for env in responses:
      pool.reset(env, TASK)
    pools.gather(pool, set(responses))
    for env, response in responses.items():
      pool.step(env, response)
    replies = pools.gather(pool, set(responses))
    assert replies[0].observation.text == 'You said good.'
    assert '10,000,000 characters' in replies[1].observation.text
    assert 'KeyError' in str(replies[2]) and 'thing' in str(replies[2])
    assert 'no response within 3 s' in str(replies[3])
    for env in (0, 4):
      pool.step(env, 'good')
    replies = pools.gather(pool, {0, 4})
    assert replies[0].done and replies[0].reward == 0.5
    assert 'reward=nan: must be a number' in str(replies[4])


def test_loading(package):
  before = signal.getsignal(signal.SIGTERM)
  kwargs = {'environment': 'verifiers_cases', 'options': {'kind': 'once'}}
  tasks = envs.tasks('verifiers', 'valid', **kwargs)
  assert len(tasks) == 4 and tasks.task_type(0) == 'all'
  assert signal.getsignal(signal.SIGTERM) == before
  for changes, message in (
    ({'environment': None}, 'env.environment=None: must name'),
    ({'environment': 'no_such_thing'}, 'Could not import .no_such_thing.'),
    ({'options': {'kind': 'none'}}, "Failed to load .*'none'"),
    ({'options': {'kind': 'group'}}, 'its rubric compares the rollouts'),
    ({'options': {'kind': 'empty'}}, 'no task of the split train'),
  ):
    with pytest.raises(ValueError, match=message) as e:
      envs.tasks('verifiers', 'train', **(kwargs | changes))
    assert len(str(e.value).splitlines()) == 1


def test_the_example(package):
  env = envs.make(
    'verifiers',
    environment='envs.verifiers_letters',
    state_fields=('left',),
    demonstrator='envs.verifiers_letters:demonstrate',
  )
  noisy = list(env.demonstrate(TASK, noise=1.0, seed=0))
  assert noisy == list(env.demonstrate(TASK, noise=1.0, seed=0))
  row = json.loads(env.reset(TASK).anchor)['left']
  # The expert takes all letters in order.
  played = list(env.demonstrate(TASK, noise=0.0, seed=0))
  env.reset(TASK)
  *_, result = [env.step(response) for _, response in played]
  assert len(played) == 4 and result.success
  assert result.final_anchor == '{"left": []}'
  assert result.reward == pytest.approx(1.2)
  # Any other letter costs a turn, up to the limit of six.
  env.reset(TASK)
  left = json.dumps(row)
  for letter in ('x', max(row), max(row), max(row)):
    result = env.step(_take(letter))
    assert result.valid and not result.done
    assert result.observation.text == f'Not the first. Left: {left}'
  env.step(_take(min(row)))
  result = env.step(_take('x'))
  assert result.done and not result.success
  assert result.reward == pytest.approx(0.2 / 4)
  env.close()


def _take(letter: str) -> str:
  return tool_calls.write(tool_calls.Call('take', {'letter': letter}))


def test_rows_of_letters():
  rows = verifiers_letters.rows()
  assert len(rows) == 7 * 6 * 5 * 4 == len({r['question'] for r in rows})
  assert rows == verifiers_letters.rows()


def test_a_missing_package_is_reported(monkeypatch):
  monkeypatch.setattr(envs, 'can_import', lambda name: False)
  lines = list(verifiers_env.check_installation({}))
  assert len(lines) == 2 and "pip install -e '.[verifiers]'" in lines[1]
  assert not verifiers_env.uses_tools({'environment': 'x'})
