"""Tests of envs/mcp_env.py: episodes with real servers, and bad servers."""

import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import pools
import pytest

import envs
from envs import base, mcp_env, mcp_session, notes_server, tool_calls

pytest.importorskip('mcp')

TASK = base.Task('train', 3)
NOTES = {
  'max_steps': 6,
  'server': 'python -m envs.notes_server',
  'tasks': 'envs.notes_server:tasks',
  'reset_tool': 'reset',
  'state_tool': 'state',
  'score_tool': 'score',
}
BAD = pathlib.Path(__file__).parent / 'bad_mcp_server.py'
# A server of numbers, over HTTP.
HTTP = """
import sys
from mcp.server import MCPServer
server = MCPServer('sums', instructions='Use add.', log_level='WARNING')
@server.tool()
def add(a: int, b: int) -> int:
  return a + b
server.run('streamable-http', port=int(sys.argv[1]))
"""


def _call(name: str, **arguments) -> str:
  return tool_calls.write(tool_calls.Call(name, arguments))


@pytest.fixture(name='notes', scope='module')
def fixture_notes():
  env = envs.make('mcp', **NOTES)
  yield env
  env.close()


def _bad(tmp_path, fault: str = '', **kwargs):
  """Returns an environment with the bad server, and a task for it."""
  path = tmp_path / 'tasks.jsonl'
  tasks = [{'task': 'Do it.', 'answer': 'Yes'}, {'task': 'b', 'split': 'test'}]
  path.write_text('\n'.join(map(json.dumps, tasks)))
  kwargs = {'tasks': str(path), 'timeout_secs': 5.0} | kwargs
  return {'server': f'python {BAD} "{fault}"'} | kwargs


def test_only_line_feeds_separate_tasks(tmp_path):
  # JSON texts may contain the other separators of lines of Unicode.
  tasks = [{'task': 'one\u2028two\u2029three\x85four'}, {'task': 'five'}]
  path = tmp_path / 'tasks.jsonl'
  lines = [json.dumps(task, ensure_ascii=False) for task in tasks]
  path.write_text('\r\n'.join(lines), encoding='utf-8')
  assert list(mcp_env.Tasks(str(path), 'train').tasks) == tasks


def test_an_episode_with_a_real_server(notes):
  first = notes.reset(TASK)
  (tool,) = map(json.loads, first.tools)
  assert tool['name'] == 'open' and 'note' in tool['description']
  assert tool['parameters']['required'] == ['drawer']
  arguments = notes_server.tasks('train')[3]['arguments']
  drawers, password = notes_server._lay_out(arguments['seed'])
  one, two = drawers
  (message,) = first.messages
  assert message.role == 'user'
  assert message.text.endswith(f'Notes: {one} {two}')
  assert first.anchor == f'unread: {one} {two}'
  result = notes.step(_call('open', drawer=two))
  (message,) = result.observation.messages
  assert message == base.Message('tool', f'Notes: {one}', '1')
  assert result.valid and result.observation.anchor == f'unread: {one}'
  assert not result.observation.tools
  both = _call('open', drawer=two) + _call('open', drawer=one)
  result = notes.step(both)
  assert [m.call_id for m in result.observation.messages] == ['1', '2']
  assert result.observation.messages[1].text == f'Password: {password}'
  result = notes.step(f'<think>so</think>{password}')
  assert result.done and result.success and result.reward == result.score == 1
  # An answer is no step that changes nothing.
  assert result.final_anchor == f'unread: none\nAnswer: {password.lower()}'


def test_a_guessed_password_does_not_help(notes):
  arguments = notes_server.tasks('train')[3]['arguments']
  drawers, password = notes_server._lay_out(arguments['seed'])
  notes.reset(TASK)
  assert notes.step(password).score == 0
  for answer in (password, 'no idea'):
    notes.reset(TASK)
    notes.step(_call('open', drawer=drawers[1]))
    result = notes.step(answer)
    assert result.done and not result.success
    assert result.reward == result.score == 0.25


def test_wrong_calls_are_answered_and_episodes_are_equal(notes):
  responses = [
    '<tool_call>',
    _call('close', drawer=1),
    _call('open', drawer='red'),
    _call('open'),
    _call('open', drawer=7),
    _call('open', drawer=1) * 9,
  ]

  def play():
    return [notes.reset(TASK), *map(notes.step, responses)]

  first, *results = play()
  assert play() == [first, *results]
  texts = [r.observation.text for r in results[:-1]]
  assert 'no partner' in texts[0] and 'must be one of open' in texts[1]
  assert "drawer: 'red' is not of type 'integer'" in texts[2]
  assert "'drawer' is a required property" in texts[3]
  assert texts[4] == 'The drawers are 1 to 6.'
  assert [r.valid for r in results] == [False] * 4 + [True, False]
  last = results[-1]
  assert last.done and not last.success and last.score == 0


def test_the_solution_solves_every_task(notes):
  for index in range(5):
    task = base.Task('valid', index)
    steps = list(notes.demonstrate(task, noise=0.0, seed=0))
    assert len(steps) == 3 and steps[0][0].tools
    known = [steps[n][0].anchor for n in range(len(steps))]
    assert len(set(known)) == len(known)
    assert (
      mcp_env.Tasks(NOTES['tasks'], 'valid').tasks[index]['answer']
      == (steps[-1][1])
    )
  noisy = list(notes.demonstrate(TASK, noise=0.9, seed=1))
  assert noisy == list(notes.demonstrate(TASK, noise=0.9, seed=1))


def test_mistakes_of_a_demonstration_are_calls(notes):
  known = mcp_env.Tasks(NOTES['tasks'], 'valid').tasks
  task = base.Task('valid', 0)
  for seed in range(8):
    *calls, last = [r for _, r in notes.demonstrate(task, noise=0.6, seed=seed)]
    assert all(tool_calls.parse(call).calls for call in calls)
    # It ends with the task's own answer or at the step limit.
    assert last == known[0]['answer'] or tool_calls.parse(last).calls


def test_a_server_over_http(tmp_path):
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    port = free.getsockname()[1]
  server = subprocess.Popen([sys.executable, '-c', HTTP, str(port)])
  url = f'http://127.0.0.1:{port}/mcp'
  env = envs.make('mcp', **_bad(tmp_path, server=url))
  try:
    for _ in range(60):
      try:
        first = env.reset(base.Task('train', 0))
        break
      except ConnectionError as error:
        assert len(str(error).splitlines()) == 1 and url in str(error)
        time.sleep(0.2)
    assert [m.text for m in first.messages] == ['Use add.', 'Do it.']
    assert env.step(_call('add', a=2, b=3)).observation.text == '5'
    assert env.step(' yes ').success
    env.reset(base.Task('train', 0))
    assert not env.step('no').success
  finally:
    env.close()
    server.kill()
    server.wait()


@pytest.mark.parametrize(
  ('fault', 'changes', 'message'),
  [
    ('down', {}, 'start: Connection closed .its log ends: no licence found'),
    ('mute', {'timeout_secs': 0.5}, 'start: no response within 0.5 s'),
    ('lie', {}, 'tool do: no JSON schema: .words. is not valid'),
    ('endless', {}, 'more than 256 tools'),
    ('', {'tools': ('dig',)}, 'has no tool dig; has do, score'),
    ('', {'server': 'nothing-here x'}, 'start: .*nothing-here'),
  ],
)
def test_a_server_that_does_not_start_is_one_line(
  tmp_path, fault, changes, message
):
  env = envs.make('mcp', **_bad(tmp_path, fault, **changes))
  with pytest.raises((OSError, ValueError), match=message) as e:
    env.reset(base.Task('train', 0))
  assert len(str(e.value).splitlines()) == 1 and 'env.server=' in str(e.value)
  env.close()


def test_a_call_that_hangs_is_one_line(tmp_path):
  env = envs.make('mcp', **_bad(tmp_path))
  env.reset(base.Task('train', 0))
  env._session._timeout = 0.3
  with pytest.raises(TimeoutError, match='tool do: no response within 0.3 s'):
    env.step(_call('do', what='hang'))
  env.close()


def test_a_long_log_is_emptied(tmp_path, monkeypatch):
  monkeypatch.setattr(mcp_session, '_MAX_LOG_BYTES', 12_000)
  env = envs.make('mcp', **_bad(tmp_path))
  env.reset(base.Task('train', 0))
  sizes = []
  for _ in range(4):
    env.step(_call('do', what='chat'))
    sizes.append(os.fstat(env._session._log.fileno()).st_size)
  env.close()
  assert sizes == [5_001, 10_002, 0, 5_001]


def test_a_bad_call_costs_its_own_episode_only(tmp_path):
  kwargs = _bad(tmp_path, score_tool='score', timeout_secs=60.0)
  responses = {
    0: _call('do', what='good'),
    1: _call('do', what='huge'),
    2: _call('do', what='die'),
    3: _call('do', what='odd'),
    4: 'An answer.',
  }
  with pools.make(name='mcp', env=kwargs, num_envs=5) as pool:
    for env in responses:
      pool.reset(env, base.Task('train', 0))
    pools.gather(pool, set(responses))
    for env, response in responses.items():
      pool.step(env, response)
    replies = pools.gather(pool, set(responses))
  assert replies[0].observation.text == 'did good'
  assert replies[1].observation.text == (
    'Error: the result has 10,000,000 characters; at most 8,000'
  )
  assert 'tool do: Connection closed' in str(replies[2])
  assert 'out of cheese' in str(replies[2])
  assert 'tool do: ' in str(replies[3])
  assert "env.score_tool=score: returned 'splendid'" in str(replies[4])


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'server': None}, 'env.server=None: must be a URL or a command'),
    ({'tasks': None}, 'env.tasks=None: no such file'),
    (
      {'tasks': 'envs.toy:nothing'},
      'env.tasks=envs.toy:nothing: .*no attribute',
    ),
    ({'tasks': 'json:dumps'}, "task 0 of train is no dict with a text 'task'"),
  ],
)
def test_wrong_arguments_are_refused_in_one_line(changes, message):
  with pytest.raises(ValueError, match=message) as e:
    envs.tasks('mcp', 'train', **(NOTES | changes))
  assert len(str(e.value).splitlines()) == 1


def test_a_task_needs_an_answer_without_a_score_tool(tmp_path):
  given = _bad(tmp_path)
  assert len(envs.tasks('mcp', 'train', **given)) == 1
  problem = "task 0 of test has no 'answer', which is needed without env.score"
  with pytest.raises(ValueError, match=problem):
    envs.tasks('mcp', 'test', **given)
  assert len(envs.tasks('mcp', 'test', **given, score_tool='score')) == 1


def test_missing_requirements_are_reported(monkeypatch):
  check = mcp_env.check_installation
  assert not list(check(NOTES))
  assert not list(check({'server': 'https://example.org/mcp'}))
  (line,) = check({'server': 'nothing-here --fast'})
  assert line.startswith('env.server=nothing-here --fast: no such command')
  monkeypatch.setattr(mcp_env.importlib.util, 'find_spec', lambda name: None)
  assert 'pip install' in next(check(NOTES))
