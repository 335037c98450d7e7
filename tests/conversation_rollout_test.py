"""Tests of conversations with tools, from the environment to rows."""

import dataclasses

import numpy as np
import pytest
import tool_script

from envs import base, messages, tool_calls
from gigpo_jax import (
  batch,
  carry_over,
  conversation,
  env_pool,
  rollout,
  sampler,
)


@pytest.fixture(name='text', scope='module')
def fixture_text(tmp_path_factory: pytest.TempPathFactory):
  return tool_script.make_tokenizer(tmp_path_factory.mktemp('tokenizer'))


GROUPS = rollout.EpisodeBatch(
  [base.Task('train', n) for n in range(2)],
  2,
  (rollout.TRAIN, 3),
  sampler.Sampling(),
)


def _play(text, groups=GROUPS, limit=999, overflow='end', num_envs=3):
  script = tool_script.Script(text)
  with env_pool.EnvPool(
    'tool_env',
    {},
    num_envs=num_envs,
    num_workers=0,
    step_timeout_secs=9,
    reset_timeout_secs=9,
  ) as pool:
    runner = rollout.EpisodeRunner(pool, script, text, limit, overflow)
    (episodes,) = runner.run_batches({}, [groups])
  return episodes


def _assert_same(one, other):
  for a, b in zip(one, other, strict=True):
    assert [s.result for s in a.steps] == [s.result for s in b.steps]
    for x, y in zip(a.steps, b.steps, strict=True):
      np.testing.assert_array_equal(x.prompt_ids, y.prompt_ids)


def test_every_prompt_begins_with_the_turn_before(text):
  episodes = _play(text)
  assert [(len(t.steps), t.success) for t in episodes] == [
    (2, True),
    (4, True),
  ] * 2
  for episode in episodes:
    for step, after in zip(episode.steps, episode.steps[1:], strict=False):
      begin = np.concatenate([step.prompt_ids, step.completion_ids])
      np.testing.assert_array_equal(after.prompt_ids[: len(begin)], begin)
  step = episodes[3].steps[0]
  assert not step.result.valid and 'no partner' in step.result.observation.text
  raw = text._hf.decode(episodes[3].steps[3].prompt_ids)
  assert raw.count('"name": "add"') == 2 + 1  # The tool, and two calls.
  assert raw.count('<|im_start|>system') == 2
  assert '<tool_response>\n3\n</tool_response>' in raw
  # A response that reached its limit gets the end that it lacks.
  assert 'five<|im_end|>\n<|im_start|>user\nCall add.' in raw


def test_rows_train_on_sampled_tokens_only(text):
  episodes = _play(text)
  rows = batch.from_trajectories(
    episodes, max_prompt_tokens=999, max_completion_tokens=90, row_multiple=4
  )
  steps = [step for episode in episodes for step in episode.steps]
  for r, step in enumerate(steps):
    trained = rows.tokens[r, rows.prompt_lengths[r] : rows.lengths[r]]
    np.testing.assert_array_equal(trained, step.completion_ids)
    assert rows.completion_mask[r].sum() == len(step.completion_ids)
  turns = [n for episode in episodes for n in range(len(episode.steps))]
  np.testing.assert_array_equal(rows.steps[rows.real], turns)


def test_a_paused_conversation_continues_as_if_it_had_not_paused(text):
  expected, played = _play(text), {}
  groups = dataclasses.replace(GROUPS, pause_after=1)
  while groups.tasks or groups.paused:
    episodes = _play(text, groups)
    (stored,) = carry_over.decode(
      carry_over.encode([carry_over.WaitingGroup(3, tuple(episodes))])
    )
    assert [t.first_observation for t in stored.episodes] == [
      t.first_observation for t in episodes
    ]
    played |= {(t.group, t.member): t for t in stored.episodes}
    paused = [t for t in stored.episodes if t.is_paused]
    groups = dataclasses.replace(groups, tasks=(), paused=paused)
  _assert_same(expected, [played[key] for key in sorted(played)])


def test_an_episode_ends_when_its_conversation_is_too_long(text):
  whole = _play(text)
  limit = max(len(step.prompt_ids) for step in whole[1].steps) - 1
  episodes = _play(text, limit=limit)
  assert [len(t.steps) for t in episodes] == [2, 3, 2, 3]
  ended = episodes[1]
  # The observation that did not fit is the final state, as with max_turns.
  assert not ended.success and not ended.failure and not ended.is_paused
  assert ended.end[1] == 'known: True'
  _assert_same(
    [dataclasses.replace(whole[1], steps=whole[1].steps[:3])], [ended]
  )
  # Without room for the first prompt, the episode fails.
  failed = _play(text, limit=9)
  assert all('the first prompt exceeds' in t.failure for t in failed)
  assert not any(t.steps for t in failed)


def test_messages_of_environments_are_checked():
  good = base.Observation(
    'p',
    'p',
    'a',
    't',
    messages=(base.Message('tool', 'x', '1'), base.Message('user', 'y')),
    tools=('{"name": "add", "parameters": {"maximum": 3}}',),
  )
  message = messages.encode(1, 'reset', good)
  assert messages.decode(message[messages.HEADER.size :], 'reset') == (
    messages.REPLY,
    good,
  )
  user = base.Message('user', 'x')
  for changes, problem in (
    ({'messages': 'hello'}, 'messages is str'),
    ({'messages': ('hello',)}, r'messages\[0\] is str, not Message'),
    ({'messages': (base.Message('robot', 'x'),)}, "role='robot'"),
    ({'messages': (base.Message('user', None),)}, 'text is NoneType'),
    ({'messages': (base.Message('user', 'x', 3),)}, 'call_id is int'),
    ({'messages': (base.Message('user', 'x', 'c' * 129),)}, 'at most 128'),
    ({'messages': (user,) * 1025}, '1025 messages of a turn; at most 1024'),
    ({'tools': ('add',)}, r"tools\[0\]='add': must be a JSON object"),
    ({'tools': ('[' * 10**5,)}, 'must be a JSON object with a name'),
    ({'tools': ({'name': 'add'},)}, r'tools\[0\] is dict, not str'),
    ({'tools': ('{"name": ""}',)}, 'with a name'),
    ({'tools': ('{"name": "\\ud800"}',)}, 'not valid Unicode'),
  ):
    bad = dataclasses.replace(good, **changes)
    with pytest.raises(messages.UnusableReplyError, match=problem):
      messages.encode(1, 'reset', bad)


def test_all_turns_have_messages_or_none():
  plain = base.Observation('p', 'p', 'a', 't')
  chat = dataclasses.replace(plain, messages=(base.Message('user', 'x'),))
  assert not conversation.prompt_error(chat, 9, chat)
  assert not conversation.prompt_error(plain, 9, plain)
  for one, other in ((plain, chat), (chat, plain)):
    assert 'only some turns' in conversation.prompt_error(one, 9, other)
  long = dataclasses.replace(
    plain, messages=(base.Message('user', 'x' * 40_000),) * 2
  )
  assert '80,000 characters' in conversation.prompt_error(long, 9, long)


@pytest.mark.parametrize(
  ('response', 'problem'),
  [
    ('<tool_call>', 'no partner'),
    ('</tool_call><tool_call>', 'no partner'),
    ('<tool_call><tool_call>{}</tool_call>', 'no partner'),
    ('<tool_call>{</tool_call>', 'malformed tool call'),
    ('<tool_call></tool_call>', 'malformed tool call'),
    ('<tool_call>[]</tool_call>', 'JSON object'),
    ('<tool_call>{"name": 3}</tool_call>', 'name must be'),
    ('<tool_call>{"name": "a", "arguments": []}</tool_call>', 'arguments must'),
    ('<tool_call>' + '[' * 10**5 + '</tool_call>', 'malformed tool call'),
    ('<tool_call>{"name": ' + '9' * 5000 + '}</tool_call>', 'malformed'),
    ('<tool_call>{"name": "\\ud800"}</tool_call>', 'surrogates not allowed'),
    (
      '<tool_call>{"name": "a", "arguments": {"x": [NaN]}}</tool_call>',
      'not JSON compliant',
    ),
  ],
)
def test_malformed_tool_calls_are_reported(response, problem):
  parsed = tool_calls.parse(response)
  assert problem in parsed.problem and not parsed.calls
  assert len(parsed.problem.splitlines()) == 1


def test_tool_calls_are_parsed():
  parsed = tool_calls.parse(
    '<think><tool_call>not one</think>First.\n'
    '<tool_call>\n{"name": "a", "arguments": {"x": [1, "2"]}}\n</tool_call>\n'
    '<tool_call>{"name": "b"}</tool_call> Then.'
  )
  assert parsed == tool_calls.Response(
    'First.\n\n Then.',
    (tool_calls.Call('a', {'x': [1, '2']}), tool_calls.Call('b', {})),
  )
  assert tool_calls.parse('5') == tool_calls.Response('5')


def test_opening_tags_without_an_end_take_linear_time():
  tags = 200_000 * '<tool_call>'
  parsed = tool_calls.parse(tags)
  assert parsed.problem == 'a <tool_call> tag has no partner'
  assert (
    tool_calls.without_calls(f'a<tool_call>b</tool_call>{tags}') == f'a{tags}'
  )
