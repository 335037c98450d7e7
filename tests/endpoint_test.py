"""Tests of the endpoint: a harness with the `openai` client plays episodes."""

import concurrent.futures
import contextlib
import dataclasses
import json
import socket
import threading
import time

import httpx
import numpy as np
import openai
import pytest
import tool_env
import tool_script

from envs import base, tool_calls
from gigpo_jax import (
  batch,
  chat_completions,
  endpoint,
  endpoint_server,
  env_pool,
  rollout,
  sampler,
  trajectory,
)
from gigpo_jax.runtime import web

GROUPS = rollout.EpisodeBatch(
  [base.Task('train', n) for n in range(2)],
  2,
  (rollout.TRAIN, 3),
  sampler.Sampling(),
)
TOKEN = 'a-token-of-some-length'
HELLO = chat_completions.ChatRequest((base.Message('user', 'hello'),))


@pytest.fixture(name='text', scope='module')
def fixture_text(tmp_path_factory: pytest.TempPathFactory):
  return tool_script.make_tokenizer(tmp_path_factory.mktemp('tokenizer'))


@contextlib.contextmanager
def _serve(
  text, *, num_envs=3, max_steps=9, timeout=30.0, step_timeout=30.0, **options
):
  """Yields a pool and the address of its server."""
  with endpoint.EndpointPool(
    text.decode,
    num_envs=num_envs,
    max_steps=max_steps,
    has_tools=True,
    step_timeout_secs=step_timeout,
    reset_timeout_secs=timeout,
  ) as pool:
    app = endpoint_server.application(pool, **options)
    with web.listen('127.0.0.1', 0) as listening:
      url = web.url(*listening.getsockname()).rstrip('/')
      with endpoint_server.serve(app, listening, num_envs):
        yield pool, url


class _SlowScript(tool_script.Script):
  """Takes the seconds in `delays`, one a step, before it answers."""

  def __init__(self, text):
    super().__init__(text)
    self.delays = []

  def step(self):
    if self.busy and self.delays:
      time.sleep(self.delays.pop())
    return super().step()


def _run(text, harness, *, batch=GROUPS, limit=999, script=None, **options):
  """Plays a batch with a harness, a function of (client, episode, url)."""

  def play_all(url):
    while True:
      reply = httpx.post(f'{url}/episodes', json={}, timeout=60.0)
      if reply.status_code == 410:
        return
      if reply.status_code == 204:
        continue
      episode = reply.json()
      base_url = f'{url}/episodes/{episode["id"]}'
      with openai.OpenAI(
        base_url=f'{base_url}/v1', api_key='none', max_retries=0
      ) as client:
        harness(client, episode, base_url)

  with (
    concurrent.futures.ThreadPoolExecutor(3) as threads,
    _serve(text, **options) as (pool, url),
  ):
    players = [threads.submit(play_all, url) for _ in range(3)]
    script = script or tool_script.Script(text)
    runner = rollout.EpisodeRunner(pool, script, text, limit, 'end')
    (episodes,) = runner.run_batches({}, [batch])
    pool.close()
    for player in players:
      player.result(timeout=30)
  return episodes


def _post_reward(url, **reward):
  return httpx.post(f'{url}/reward', json=reward)


def _play_tool_env(client, episode, url):
  """Plays `tool_env` with the client's messages only."""
  game = tool_env.Env()
  observation = game.reset(base.Task('train', episode['task']))
  tool = {'type': 'function', 'function': json.loads(tool_env.TOOL)}
  messages, result, ids = [], None, []
  while observation:
    for message in observation.messages:
      fields = {'role': message.role, 'content': message.text}
      if message.role == 'tool':
        fields['tool_call_id'] = ids[-1]
      messages.append(fields)
    reply = client.chat.completions.create(
      model='policy',
      messages=messages,
      tools=[tool],
      logprobs=True,
      metadata={'anchor': observation.anchor},
    )
    (choice,) = reply.choices
    messages.append(choice.message.model_dump(exclude_none=True))
    calls = choice.message.tool_calls or []
    ids += [call.id for call in calls]
    assert choice.finish_reason == ('tool_calls' if calls else 'stop')
    tokens = choice.logprobs.content
    assert [token.logprob for token in tokens] == [
      -n for n in range(len(tokens))
    ]
    assert reply.usage.completion_tokens == len(tokens)
    result = game.step(
      (choice.message.content or '')
      + ''.join(
        tool_calls.write(
          tool_calls.Call(
            call.function.name, json.loads(call.function.arguments)
          )
        )
        for call in calls
      )
    )
    observation = result.observation
  _post_reward(url, reward=result.reward, success=result.success)


def test_a_harness_plays_what_the_environment_plays(text):
  """Tokens, rewards and anchors are those of a run without the endpoint."""
  with env_pool.EnvPool(
    'tool_env',
    {},
    num_envs=3,
    num_workers=0,
    step_timeout_secs=9,
    reset_timeout_secs=9,
  ) as pool:
    runner = rollout.EpisodeRunner(
      pool, tool_script.Script(text), text, 999, 'end'
    )
    (expected,) = runner.run_batches({}, [GROUPS])
  episodes = _run(text, _play_tool_env)
  assert [len(t.steps) for t in expected] == [2, 4, 2, 4]
  for t, wanted in zip(episodes, expected, strict=True):
    assert not t.failure and (t.task, t.member) == (wanted.task, wanted.member)
    assert (t.reward, t.success) == (wanted.reward, wanted.success)
    for step, other in zip(t.steps, wanted.steps, strict=True):
      np.testing.assert_array_equal(step.prompt_ids, other.prompt_ids)
      np.testing.assert_array_equal(step.completion_ids, other.completion_ids)
      assert (step.anchor, step.result.valid) == (
        other.anchor,
        other.result.valid,
      )


def _ask(client, messages):
  reply = client.chat.completions.create(model='policy', messages=messages)
  return [*messages, reply.choices[0].message.model_dump(exclude_none=True)]


ONE_EPISODE = dataclasses.replace(
  GROUPS, tasks=GROUPS.tasks[:1], episodes_per_group=1
)


def test_requests_continue_the_conversation_that_they_begin_with(text):
  def harness(client, episode, url):
    del episode
    planner = _ask(client, [{'role': 'user', 'content': 'Plan.'}])
    actor = _ask(client, [{'role': 'user', 'content': 'Act.'}])
    planner = _ask(client, [*planner, {'role': 'user', 'content': 'Go on.'}])
    # Another text than the sampled one: a conversation of its own.
    actor[1] = actor[1] | {'content': 'I did something else.'}
    _ask(client, [*actor, {'role': 'user', 'content': 'And?'}])
    # A reward of a turn, then that of the last turn.
    _post_reward(url, reward=1.0, done=False).raise_for_status()
    _ask(client, [*planner, {'role': 'user', 'content': 'End.'}])
    _post_reward(url, reward=2.5, success=True, score=0.5).raise_for_status()

  (episode,) = _run(text, harness, batch=ONE_EPISODE)
  assert [s.result.reward for s in episode.steps] == [0, 0, 0, 1.0, 2.5]
  assert episode.success and episode.score == 0.5
  plan, act, again, edited, end = episode.steps
  for step, after in ((plan, again), (again, end)):
    begin = np.concatenate([step.prompt_ids, step.completion_ids])
    np.testing.assert_array_equal(after.prompt_ids[: len(begin)], begin)
  for step in (act, edited):
    assert not np.array_equal(step.prompt_ids[:20], plan.prompt_ids[:20])
  seen = text._hf.decode(edited.prompt_ids)
  assert 'assistant\nI did something else.<|im_end|>' in seen
  assert 'add' not in seen  # What was sampled.
  rows = batch.from_trajectories(
    [episode], max_prompt_tokens=400, max_completion_tokens=90, row_multiple=1
  )
  for r, step in enumerate(episode.steps):
    trained = rows.tokens[r, rows.prompt_lengths[r] : rows.lengths[r]]
    np.testing.assert_array_equal(trained, step.completion_ids)


def test_parallel_requests_are_turns_one_after_another(text):
  def harness(client, episode, url):
    del episode
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
      [
        *threads.map(
          lambda n: _ask(client, [{'role': 'user', 'content': f'{n}'}]),
          range(4),
        )
      ]
    _post_reward(url, reward=1.0)

  (episode,) = _run(text, harness, batch=ONE_EPISODE)
  assert len(episode.steps) == 4 and episode.reward == 1.0


def test_only_completions_that_a_client_received_are_turns(text, capsys):
  """Timeouts, with and without the client's own retries."""
  script, received = _SlowScript(text), []

  def create(client, content, **options):
    reply = client.with_options(**options).chat.completions.create(
      model='policy', messages=[{'role': 'user', 'content': content}]
    )
    received.append((content, reply.choices[0].message.content))

  def harness(client, episode, url):
    del episode
    # The first try leaves after 2 s; the second comes 0.4 to 0.5 s later.
    script.delays = [3.0]
    create(client, 'first', timeout=2.0, max_retries=1)
    for content in ('left', 'left as well'):
      script.delays = [0.8]
      with pytest.raises(openai.APITimeoutError):
        create(client, content, timeout=0.2)
    create(client, 'second')
    script.delays = [0.8]
    with pytest.raises(openai.APITimeoutError):
      create(client, 'left at the end', timeout=0.2)
    _post_reward(url, reward=2.0, success=True).raise_for_status()

  (episode,) = _run(
    text, harness, batch=ONE_EPISODE, script=script, max_steps=3
  )
  assert [(s.observation, s.response) for s in episode.steps] == received
  assert [content for content, _ in received] == ['first', 'second']
  assert [s.result.reward for s in episode.steps] == [0.0, 2.0]
  assert episode.success and not episode.failure
  out = capsys.readouterr().out
  first, *_, last = out.splitlines()
  assert first.startswith(
    'requests whose client left before the completion: 1 sent again, 0 dropped'
  )
  assert '1 sent again, 3 dropped; ' in last


def test_bad_calls_cost_only_their_own_episode(text):
  errors = {}

  def harness(client, episode, url):
    first = [{'role': 'user', 'content': 'Hi.'}]
    task = episode['task']
    if task == 1:
      return  # It ends without a call.
    if task == 2:  # The policy cannot read so much.
      first[0]['content'] = 'x' * 70_000
    if task == 3:
      errors['early'] = _post_reward(url, reward=1.0).json()
    try:
      messages = _ask(client, first)
      messages = _ask(client, [*messages, *first])
      _ask(client, [*messages, *first])
    except openai.APIStatusError as error:
      errors[task] = error
    _post_reward(url, reward=1.0)
    errors['over'] = _post_reward(url, reward=1.0)

  tasks = [base.Task('train', n) for n in range(4)]
  played = dataclasses.replace(GROUPS, tasks=tasks, episodes_per_group=1)
  episodes = _run(text, harness, batch=played, max_steps=2, timeout=3.0)
  assert [t.reward for t in episodes] == [1.0, 0.0, 0.0, 1.0]
  assert [t.cause for t in episodes] == ['', 'hung', 'garbage', '']
  assert 'sent no call for 3 s' in episodes[1].failure
  assert '70,000 characters' in episodes[2].failure
  assert '70,000 characters' in errors[2].message
  assert 'has no turn' in errors['early']['error']['message']
  assert 'env.max_steps=2' in errors[0].message
  assert errors['over'].status_code == 404


def _start_episode(pool, threads, is_connected=lambda: True):
  """Starts an episode; returns its id and its first request, in a thread."""
  pool.reset(0, base.Task('train', 0))
  name = pool.take(9.0)['id']
  call = threads.submit(pool.complete, name, HELLO, is_connected)
  assert pool.receive()
  return name, call


def _answer(pool, text, response='Hello.'):
  """Answers the current request."""
  (ids,) = text.encode([response])
  log_probs = np.zeros(len(ids), np.float32)
  turn = trajectory.SampledTurn(ids, ids, log_probs, False, False, '', '', '')
  pool.step(0, response, turn)


def _request(content):
  return chat_completions.ChatRequest((base.Message('user', content),))


def _wait_for_call(pool, name):
  while not pool._named[name].waiting:
    time.sleep(0.01)


def test_an_equal_request_gets_the_reply_that_nobody_received(text):
  with (
    concurrent.futures.ThreadPoolExecutor(1) as threads,
    _serve(text, max_steps=1) as (pool, _),
  ):
    clients = ['first']
    name, first = _start_episode(pool, threads, lambda: bool(clients))
    clients.clear()
    _answer(pool, text)
    reply = first.result(30)  # It is written to a closed connection.
    assert pool.complete(name, HELLO) == reply
    assert (pool.repeated, pool.dropped) == (1, 0)
    with pytest.raises(ValueError, match='no turns left'):
      pool.complete(name, HELLO)
    pool.reward(name, endpoint.Reward(1.0))
    ((_, result),) = pool.receive()
    assert result.reward == 1.0


def test_equal_requests_of_clients_that_wait_are_turns(text):
  with (
    concurrent.futures.ThreadPoolExecutor(2) as threads,
    _serve(text) as (pool, _),
  ):
    name, first = _start_episode(pool, threads)
    second = threads.submit(pool.complete, name, HELLO)
    _wait_for_call(pool, name)
    _answer(pool, text, 'One.')
    assert first.result(30)['choices'][0]['message']['content'] == 'One.'
    ((_, result),) = pool.receive()
    assert result.action == 'One.'
    _answer(pool, text, 'Two.')
    assert second.result(30)['choices'][0]['message']['content'] == 'Two.'


def test_a_request_that_waits_is_dropped_with_its_client(text):
  with (
    concurrent.futures.ThreadPoolExecutor(3) as threads,
    _serve(text) as (pool, _),
  ):
    name, first = _start_episode(pool, threads)
    gone = threads.submit(pool.complete, name, _request('gone'), lambda: False)
    _wait_for_call(pool, name)
    last = threads.submit(pool.complete, name, _request('last'))
    _answer(pool, text)
    first.result(30)
    ((_, reply),) = pool.receive()
    assert reply.observation.text == 'last'
    assert 'has left' in str(gone.exception(30))
    _answer(pool, text)
    last.result(30)
    assert (pool.repeated, pool.dropped) == (0, 1)


def test_a_reward_needs_a_turn_that_a_client_received(text):
  with (
    concurrent.futures.ThreadPoolExecutor(1) as threads,
    _serve(text) as (pool, _),
  ):
    clients = ['first']
    name, call = _start_episode(pool, threads, lambda: bool(clients))
    clients.clear()
    _answer(pool, text)
    call.result(30)
    with pytest.raises(ValueError, match='has no turn'):
      pool.reward(name, endpoint.Reward(1.0))


def _send_reward(pool, name, threads, reward, *is_connected):
  """Sends a reward in a thread; returns once it waits."""
  call = threads.submit(pool.reward, name, reward, *is_connected)
  _wait_for_call(pool, name)
  return call


def test_a_reward_that_waits_is_dropped_with_its_client(text):
  with (
    concurrent.futures.ThreadPoolExecutor(2) as threads,
    _serve(text) as (pool, _),
  ):
    name, call = _start_episode(pool, threads)
    reward = endpoint.Reward(1.0, done=False)
    gone = _send_reward(pool, name, threads, reward, lambda: False)
    _answer(pool, text)
    call.result(30)
    assert 'has left' in str(gone.exception(30))
    pool.reward(name, endpoint.Reward(1.0))  # It is sent again.
    ((_, result),) = pool.receive()
    assert result.reward == 1.0


def test_a_reward_that_waits_takes_no_turn(text):
  with (
    concurrent.futures.ThreadPoolExecutor(3) as threads,
    _serve(text, max_steps=2) as (pool, _),
  ):
    name, *calls = _start_episode(pool, threads)
    reward = endpoint.Reward(1.0, done=False)
    calls.append(_send_reward(pool, name, threads, reward))
    calls.append(threads.submit(pool.complete, name, HELLO))
    concurrent.futures.wait(calls, 0.5, concurrent.futures.FIRST_COMPLETED)
    pool.close()
    assert [call.exception(30).code for call in calls] == ['over'] * 3


def test_a_reward_waits_for_the_reply_before_it(text):
  with (
    concurrent.futures.ThreadPoolExecutor(2) as threads,
    _serve(text) as (pool, _),
  ):
    name, call = _start_episode(pool, threads)
    reward = _send_reward(pool, name, threads, endpoint.Reward(2.0))
    _answer(pool, text)
    call.result(30)
    assert reward.result(30) is None
    ((_, result),) = pool.receive()
    assert result.done and result.reward == 2.0


def test_a_reward_is_refused_if_its_episode_ends_before_it(text):
  with (
    concurrent.futures.ThreadPoolExecutor(2) as threads,
    _serve(text) as (pool, _),
  ):
    name, first = _start_episode(pool, threads)
    _answer(pool, text)
    first.result(30)
    second = threads.submit(pool.complete, name, HELLO)
    assert pool.receive()
    reward = _send_reward(pool, name, threads, endpoint.Reward(10.0))
    pool.end(0)  # The second prompt is too long.
    for call in (second, reward):
      assert call.exception(30).code == 'context_length_exceeded'


def test_only_the_new_messages_of_a_request_are_limited(text):
  with (
    concurrent.futures.ThreadPoolExecutor(1) as threads,
    _serve(text) as (pool, _),
  ):
    pool.reset(0, base.Task('train', 0))
    name = pool.take(9.0)['id']
    long = HELLO.messages * 1000
    with pytest.raises(ValueError, match='1025 messages'):
      pool.complete(name, chat_completions.ChatRequest(HELLO.messages * 1025))
    for _ in range(2):
      request = chat_completions.ChatRequest(long)
      call = threads.submit(pool.complete, name, request)
      ((_, reply),) = pool.receive()
      _answer(pool, text)
      content = call.result(30)['choices'][0]['message']['content']
      long += (base.Message('assistant', content), *HELLO.messages * 100)
    # The messages continue the conversation, and the refused ones took no turn.
    assert len(reply.observation.messages) == 100
    assert reply.observation.conversation == '0'
    pool.reward(name, endpoint.Reward(1.0))


def test_a_line_reports_that_a_harness_is_missing(text, monkeypatch, capsys):
  monkeypatch.setattr(endpoint, '_NOTICE_SECS', 0.5)
  with _serve(text) as (pool, _):
    for env in range(3):
      pool.reset(env, base.Task('train', env))
    assert not pool.receive(0.1) and not capsys.readouterr().out
    assert pool.take(9.0)
    assert not pool.receive(1.4)
  lines = capsys.readouterr().out.splitlines()
  assert lines and set(lines) == {
    'the policy waits for a harness; episodes that none has taken: 2, without '
    'a next request: 1'
  }


def test_the_text_of_a_request_counts_once(text):
  """A text within the limit of a request is at most too long for the policy."""
  content = 'x' * (7 << 20)
  errors = []

  def harness(client, episode, url):
    del episode, url
    with pytest.raises(openai.BadRequestError) as caught:
      _ask(client, [{'role': 'user', 'content': content}])
    errors.append(caught.value.message)

  (episode,) = _run(text, harness, batch=ONE_EPISODE)
  (message,) = errors
  problem = (
    'a prompt of 7,340,032 characters; rollout.max_prompt_tokens=999 allows at '
    'most 65,536'
  )
  assert problem in message and problem in episode.failure


def test_an_abandoned_request_takes_no_episode(text):
  with _serve(text) as (pool, url):
    address = url.removeprefix('http://').split(':')
    with socket.create_connection((address[0], int(address[1]))) as client:
      client.sendall(
        b'POST /episodes HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n'
        b'Content-Type: application/json\r\n\r\n{}'
      )
      time.sleep(0.5)  # The server waits for an episode.
    pool.reset(0, base.Task('train', 0))
    time.sleep(0.5)
    reply = httpx.post(f'{url}/episodes', json={}, timeout=9.0)
    assert reply.json()['task'] == 0


def test_the_sum_of_the_rewards_of_a_turn_is_limited(text):
  with (
    concurrent.futures.ThreadPoolExecutor(1) as threads,
    _serve(text) as (pool, _),
  ):
    name, call = _start_episode(pool, threads)
    _answer(pool, text)
    call.result(30)
    pool.reward(name, endpoint.Reward(9e5, done=False))
    with pytest.raises(ValueError, match=r'would be 1,800,000; must be within'):
      pool.reward(name, endpoint.Reward(9e5, done=False))
    pool.reward(name, endpoint.Reward(1.0))
    ((_, result),) = pool.receive()
    assert result.reward == 900_001


def test_a_reward_is_a_call_for_the_time_limit(text):
  with (
    concurrent.futures.ThreadPoolExecutor(1) as threads,
    _serve(text, step_timeout=2.0) as (pool, _),
  ):
    name, call = _start_episode(pool, threads)
    _answer(pool, text)
    call.result(30)
    for _ in range(4):
      time.sleep(0.8)
      pool.reward(name, endpoint.Reward(0.5, done=False))
    pool.reward(name, endpoint.Reward(1.0, done=True))
    ((_, result),) = pool.receive()
    assert result.reward == 3.0
    pool.close()


def test_a_conversation_that_is_too_long_ends_its_episode(text):
  def harness(client, episode, url):
    del episode, url
    messages = _ask(client, [{'role': 'user', 'content': 'Hi.'}])
    with pytest.raises(openai.BadRequestError) as caught:
      _ask(client, [*messages, {'role': 'user', 'content': 'long ' * 50}])
    assert caught.value.code == 'context_length_exceeded'
    assert 'the prompt exceeds rollout.max_prompt_tokens;' in str(caught.value)

  (episode,) = _run(text, harness, batch=ONE_EPISODE, limit=100)
  assert len(episode.steps) == 1 and not episode.failure


def test_requests_are_limited(text):
  with _serve(text, token=TOKEN, max_bytes=5000) as (pool, url):
    key = {'Authorization': f'Bearer {TOKEN}'}
    chat = f'{url}/v1/chat/completions'

    def post(headers, **kwargs):
      return httpx.post(chat, headers=headers, **kwargs).status_code

    assert post({}, json={}) == 401
    assert post({'Authorization': f'Bearer {TOKEN}x'}, json={}) == 401
    assert post(key | {'Host': 'evil.example'}, json={}) == 400
    # A web page may send text to another site without its permission.
    assert post(key | {'Content-Type': 'text/plain'}, content='{}') == 415
    assert post(key, json={'messages': 'x' * 6000}) == 413
    reply = httpx.post(chat, headers=key, json={'messages': 'x' * 6000})
    assert reply.json()['error']['message'] == (
      'the request has more than 5,000 bytes, the limit of --max_request_mib'
    )
    # Requests in chunks have no length.
    for size, status in ((4998, 400), (4999, 413), (9999, 413)):
      chunks = (b'{}', b' ' * size)
      json_key = key | {'Content-Type': 'application/json'}
      assert post(json_key, content=iter(chunks)) == status
    assert post(key, content=b'[' * 4000) == 415
    deep = key | {'Content-Type': 'application/json'}
    assert post(deep, content=b'[' * 4000) == 400
    assert post(key, json={}) == 400
    messages = [{'role': 'user', 'content': 'Hi.'}]
    assert post(key, json={'messages': messages}) == 400  # Without X-Episode.
    assert post(key | {'X-Episode': 'x'}, json={'messages': messages}) == 404
    assert httpx.get(f'{url}/v1/models', headers=key).json()['data']
    waiting = threading.Thread(target=pool.close)
    waiting.start()
    waiting.join()


def _connect(url, text=''):
  host, port = url.removeprefix('http://').split(':')
  client = socket.create_connection((host, int(port)), timeout=20.0)
  client.sendall(text.encode())
  return client


def _is_closed(client):
  """Waits a little for the end of a connection."""
  client.settimeout(1.5)
  try:
    while client.recv(1000):
      pass
  except TimeoutError:
    return False
  except OSError:
    return True
  return True


@pytest.mark.parametrize(
  'start',
  [
    'POST /episodes HTTP/1.1\r\nX-A: ',
    f'POST /episodes HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n'
    'Host: localhost\r\nContent-Length: 999\r\n\r\n',
    # After the reply, the server reads what the client still sends.
    'GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\nx',
  ],
  ids=['headers', 'body', 'rest'],
)
def test_a_client_that_sends_slowly_is_disconnected(text, monkeypatch, start):
  monkeypatch.setattr(endpoint_server, '_IDLE_SECS', 1.0)
  with _serve(text, token=TOKEN) as (_, url), _connect(url, start) as client:
    end = time.monotonic() + 15
    with pytest.raises(OSError, match='(?i)broken pipe|reset'):
      while time.monotonic() < end:
        client.sendall(b'x')
        time.sleep(0.1)


def test_connections_without_the_token_leave_room(text, monkeypatch):
  monkeypatch.setattr(endpoint_server, '_EXTRA_CONNECTIONS', -1)
  key = {'Authorization': f'Bearer {TOKEN}'}
  take = (
    f'POST /episodes HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n'
    'Host: localhost\r\nContent-Type: application/json\r\n'
    'Content-Length: 2\r\n\r\n{}'
  )
  with (
    _serve(text, num_envs=1, token=TOKEN) as (pool, url),
    contextlib.ExitStack() as stack,
  ):

    def connect(start):
      client = stack.enter_context(_connect(url, start))
      time.sleep(0.5)  # The server reads it.
      return client

    slow = connect('POST ')
    takes = [connect(take), connect(take)]
    assert httpx.get(f'{url}/v1/models', headers=key).status_code == 200
    assert _is_closed(slow)
    time.sleep(0.5)  # The server closes that connection.
    # Those with the token stay, and no place is left.
    takes.append(connect(take))
    with pytest.raises(httpx.TransportError):
      httpx.get(f'{url}/v1/models', headers=key)
    assert not any(map(_is_closed, takes))
    pool.close()


def test_unknown_requests_get_the_known_ones(text):
  with (
    _serve(text) as (_, url),
    openai.OpenAI(
      base_url=f'{url}/episodes/ID/v1', api_key='none', max_retries=0
    ) as client,
  ):
    assert client.models.retrieve('policy').id == 'policy'
    with pytest.raises(openai.NotFoundError, match='/v1/models/policy, '):
      client.models.retrieve('other')
    for create in (
      lambda: client.responses.create(model='policy', input='Hi.'),
      lambda: client.completions.create(model='policy', prompt='Hi.'),
    ):
      with pytest.raises(openai.NotFoundError) as caught:
        create()
      message = caught.value.body['message']
      assert 'unknown; must be one of GET' in message
      assert 'POST /episodes/ID/v1/chat/completions, ' in message
      assert '\n' not in message
    reply = httpx.get(f'{url}/v1/chat/completions')
    assert reply.status_code == 405
    assert 'POST /v1/chat/completions' in reply.json()['error']['message']
    with client.with_options(base_url=f'{url}/v1') as unnamed:
      with pytest.raises(openai.BadRequestError, match='X-Episode is missing'):
        _ask(unnamed, [{'role': 'user', 'content': 'Hi.'}])


def test_the_rate_of_requests_is_limited(text):
  options = {'token': TOKEN, 'max_requests_per_sec': 2.0}
  with _serve(text, **options) as (_, url), httpx.Client() as client:
    key = {'Authorization': f'Bearer {TOKEN}'}

    def statuses(count, headers):
      chat = f'{url}/v1/chat/completions'
      return {
        client.post(chat, headers=headers, json={}).status_code
        for _ in range(count)
      }

    assert statuses(40, key) == {400, 429}
    # Strangers take no part of the rate.
    time.sleep(1.1)
    assert statuses(20, {}) == {401}
    assert statuses(1, key) == {400}


@pytest.mark.parametrize(
  ('body', 'problem'),
  [
    ({}, 'must be a number'),
    ({'reward': True}, 'must be a number'),
    ({'reward': float('nan')}, 'must be a number'),
    ({'reward': 10**400}, 'must be a number'),
    ({'reward': 1e7}, r'within \+-1,000,000'),
    ({'reward': 1, 'success': 1}, 'success: must be true or false'),
    ({'reward': 1, 'score': 'x'}, 'score: must be a number'),
    ({'reward': 1, 'rewards': 2}, 'only'),
    ({'reward': 1, 'success': True, 'done': False}, 'done=false: success and'),
    ({'reward': 1, 'score': 0.5, 'done': False}, 'done=false: success and'),
    ([], 'JSON object'),
  ],
)
def test_wrong_rewards_are_refused(body, problem):
  with pytest.raises(ValueError, match=problem):
    endpoint_server.parse_reward(body)


def test_rewards_have_defaults():
  assert endpoint_server.parse_reward({'reward': 1}) == endpoint.Reward(1.0)
