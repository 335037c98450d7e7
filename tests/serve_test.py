"""Tests of launch/serve.py, with a harness in this process."""

import concurrent.futures
import json
import re
import types

import httpx
import openai
import preloaded
import pytest
import small_runs

from configs import endpoint
from gigpo_jax import config as config_lib
from gigpo_jax.run import serving
from gigpo_jax.runtime import web
from launch import serve

TOKEN = 'a-token-of-some-length'


@pytest.mark.parametrize(
  ('name', 'host', 'token', 'problem'),
  [
    ('endpoint', '127.0.0.1', None, ''),
    ('endpoint', '::1', None, ''),
    ('endpoint', 'localhost', None, ''),
    ('endpoint', '0.0.0.0', 'file', ''),
    ('endpoint', '0.0.0.0', None, '--host=0.0.0.0.*needs --token_file'),
    ('endpoint', 'gpu.example', None, '--host=gpu.example'),
    (
      'alfworld',
      '127.0.0.1',
      None,
      'env.name=alfworld.*must be that of a harness',
    ),
  ],
)
def test_other_machines_need_a_token(name, host, token, problem):
  if not problem:
    serve._check(name, host, token)
    return
  with pytest.raises(ValueError, match=problem):
    serve._check(name, host, token)


def test_the_token_is_read_from_a_file(tmp_path):
  path = tmp_path / 'token'
  assert serve._read_token(None) == ''
  path.write_text(f'{TOKEN}\n')
  assert serve._read_token(str(path)) == TOKEN
  for text in ('short', 'two words of a token', 'ä' * 20):
    path.write_text(text)
    with pytest.raises(ValueError, match='--token_file='):
      serve._read_token(str(path))
  with pytest.raises(ValueError, match='cannot be read'):
    serve._read_token(str(tmp_path / 'none'))


def test_a_harness_needs_a_limit_of_turns():
  config = endpoint.get_config()
  config.env.max_steps = None
  with pytest.raises(ValueError, match='^env.max_steps=None: .* must be'):
    config_lib.validate(config, needs_model=False, has_harness=True)
  del config.env.max_steps
  with pytest.raises(ValueError, match='^env.max_steps=None: .* must be'):
    config_lib.validate(config, needs_model=False, has_harness=True)


def test_a_config_may_leave_out_whether_a_harness_has_tools():
  config = endpoint.get_config('smoke')
  del config.env.tools
  config_lib.validate(config, needs_model=False, has_harness=True)
  with web.listen('127.0.0.1', 0) as listening:
    with serving.open_pool(
      config,
      types.SimpleNamespace(decode=None),
      listening=listening,
      host='127.0.0.1',
      names=(),
      token='',
      max_bytes=1,
      max_requests_per_sec=1.0,
    ) as pool:
      assert pool.num_envs


def _play(url: str) -> int:
  """Plays episodes to the end of the run; returns their number."""
  count, headers = 0, {'Authorization': f'Bearer {TOKEN}'}
  with httpx.Client(headers=headers, timeout=60.0) as http:
    while True:
      try:
        reply = http.post(f'{url}/episodes', json={})
      except httpx.HTTPError:
        return count
      if reply.status_code == 410:
        return count
      if reply.status_code == 204:
        continue
      episode = reply.json()
      client = openai.OpenAI(
        base_url=f'{url}/v1',
        api_key=TOKEN,
        default_headers={'X-Episode': episode['id']},
      )
      messages = [{'role': 'user', 'content': f'Count to {episode["task"]}.'}]
      letters = 0
      for _ in range(3):
        reply = client.chat.completions.create(model='x', messages=messages)
        message = reply.choices[0].message
        letters += (message.content or '').count('e')
        messages.append(message.model_dump(exclude_none=True))
        messages.append({'role': 'user', 'content': 'More.'})
      http.post(
        f'{url}/episodes/{episode["id"]}/reward', json={'reward': letters / 10}
      )
      count += 1


def _train(workdir, num_players: int) -> int:
  """Trains with so many episodes at once; returns the number of episodes."""
  token = workdir.parent / 'token'
  token.write_text(TOKEN)
  process = preloaded.Process(
    small_runs.command(
      'serve',
      '--config=configs/endpoint.py:smoke',
      '--config.model.path=configs/warm_starts/alfworld_tiny_conversation',
      '--config.env.tools=False',
      '--config.episodes.every=1',
      f'--token_file={token}',
      '--port=0',
      f'--workdir={workdir}',
    )
  )
  url = ''
  while not url:
    line = process.stdout.readline()
    assert line, 'the server did not start'
    match = re.search(r'waiting for a harness at (\S+)/', line)
    url = match[1] if match else ''
  with concurrent.futures.ThreadPoolExecutor(num_players) as threads:
    counts = [threads.submit(_play, url) for _ in range(num_players)]
    out, errors = process.communicate(timeout=400)
    assert process.returncode == 0, out + errors
    return sum(count.result() for count in counts)


@pytest.mark.slow
def test_a_run_does_not_depend_on_the_speed_of_its_harness(tmp_path):
  assert _train(tmp_path / 'one', 7) == 2 * 16
  assert _train(tmp_path / 'other', 3) == 2 * 16
  small_runs.assert_same_end(tmp_path / 'one', tmp_path / 'other')
  lines = (tmp_path / 'one' / 'metrics.jsonl').read_text().splitlines()
  metrics = json.loads(lines[0])
  assert metrics['train/failed_episodes'] == 0.0
  assert metrics['update/grad_norm'] > 0
  episodes = small_runs.read_episodes(tmp_path / 'one')
  assert {len(e['steps']) for e in episodes} == {4}  # And the final state.
