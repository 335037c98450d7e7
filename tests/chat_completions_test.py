"""Tests of requests and replies in the form of OpenAI's API."""

import numpy as np
import pytest
from openai.types import chat

from envs import base, tool_calls
from gigpo_jax import chat_completions, trajectory

USER = {'role': 'user', 'content': 'Hi.'}
TOOL = {'type': 'function', 'function': {'name': 'add', 'parameters': {}}}
CALL = {
  'id': '1',
  'type': 'function',
  'function': {'name': 'add', 'arguments': '{"b": 2, "a": 1}'},
}


DEEP = '{"a": %s}' % ('[' * 600 + ']' * 600)


def _calling(arguments):
  call = {'function': {'name': 'add', 'arguments': arguments}}
  return {'role': 'assistant', 'tool_calls': [call]}


def _parse(*messages, **fields):
  return chat_completions.parse_request({'messages': [*messages], **fields})


def _turn(response, truncated=False):
  ids = np.arange(3, dtype=np.int32)
  log_probs = np.array([-1.0, -0.5, 0.0], np.float32)
  return trajectory.SampledTurn(
    np.zeros(7, np.int32), ids, log_probs, truncated, False, '', '', response
  )


def test_requests_are_parsed():
  request = _parse(
    {'role': 'developer', 'content': [{'type': 'text', 'text': 'Be kind.'}]},
    USER,
    {'role': 'assistant', 'content': 'I add. ', 'tool_calls': [CALL]},
    {'role': 'tool', 'tool_call_id': '1', 'content': '3'},
    tools=[TOOL],
    temperature=0.3,
    logprobs=True,
    metadata={'anchor': 'room 1'},
  )
  assert request == chat_completions.ChatRequest(
    (
      base.Message('system', 'Be kind.'),
      base.Message('user', 'Hi.'),
      base.Message(
        'assistant',
        'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n'
        '</tool_call>',
      ),
      base.Message('tool', '3', '1'),
    ),
    ('{"name": "add", "parameters": {}}',),
    anchor='room 1',
    log_probs=True,
  )
  assert not _parse(USER, tools=[TOOL], tool_choice='none').tools


@pytest.mark.parametrize(
  ('messages', 'fields', 'problem'),
  [
    ([], {}, 'messages: missing'),
    ([USER], {'n': 2}, 'n=2: not supported; must be null or 1'),
    ([USER], {'stream': True}, 'stream=true'),
    ([USER], {'stop': ['.']}, 'stop='),
    ([USER], {'top_logprobs': 5}, 'top_logprobs=5'),
    ([USER], {'tool_choice': 'required'}, 'tool_choice="required"'),
    ([USER], {'functions': [{'name': 'add'}]}, 'functions='),
    ([USER], {'function_call': {'name': 'add'}}, 'function_call='),
    ([USER], {'parallel_tool_calls': False}, 'parallel_tool_calls=false'),
    ([USER], {'logit_bias': {'3': 1}}, 'logit_bias='),
    ([USER], {'tools': 'add'}, 'tools: must be a list'),
    ([USER], {'tools': [{}]}, r'tools\[0\]'),
    ([USER], {'tools': [{'function': {}}]}, r'tools\[0\].function.name'),
    ([USER], {'tools': [TOOL, TOOL]}, r'tools\[1\].function.name: must be'),
    ([USER], {'metadata': {'anchor': 3}}, 'metadata.anchor'),
    ([USER], {'metadata': 3}, 'metadata'),
    ([USER], {'model': 3}, 'model'),
    (['hi'], {}, r'messages\[0\].role'),
    ([{'role': 'robot'}], {}, r'messages\[0\].role'),
    ([{'role': ['user']}], {}, r'messages\[0\].role'),
    ([{'role': 'user', 'content': 3}], {}, 'content: must be'),
    (
      [{'role': 'user', 'content': [{'type': 'image_url'}]}],
      {},
      'only parts of type text',
    ),
    ([USER, {'role': 'assistant', 'content': ''}], {}, 'the last message'),
    (
      [{'role': 'assistant', 'tool_calls': [{}]}, USER],
      {},
      'function.arguments',
    ),
    ([_calling('{"a": NaN}'), USER], {}, 'function.arguments'),
    ([_calling('{"a": 1e999}'), USER], {}, 'function.arguments'),
    ([_calling(DEEP), USER], {}, 'function.arguments'),
    ([{'role': 'assistant', 'tool_calls': 3}, USER], {}, 'must be a list'),
    ([{'role': 'tool', 'tool_call_id': 3}], {}, 'tool_call_id'),
  ],
)
def test_requests_that_cannot_be_served_are_refused(messages, fields, problem):
  with pytest.raises(chat_completions.RequestError, match=problem) as caught:
    _parse(*messages, **fields)
  assert len(str(caught.value).splitlines()) == 1
  with pytest.raises(chat_completions.RequestError, match='JSON object'):
    chat_completions.parse_request([])


def test_the_order_of_arguments_does_not_matter():
  one, other = (
    _parse(_calling(text), USER)
    for text in ('{"b": {"d": 1, "c": 2}, "a": 3}', '{"a":3,"b":{"c":2,"d":1}}')
  )
  assert one == other


@pytest.mark.parametrize(
  'response',
  [
    'Five.',
    '<think>five</think>\n\nFive.',
    'I add.\n<tool_call>\n{"name": "add", "arguments": {"b": 2}}\n</tool_call>',
    '<think>a</think><tool_call>{"name": "add"}</tool_call> and '
    '<tool_call>{"name": "add"}</tool_call>',
    '<tool_call>{"name": 3}</tool_call>',
    '',
  ],
)
@pytest.mark.parametrize('has_tools', [True, False])
def test_replies_come_back_as_they_were_sent(response, has_tools):
  tools = {'tools': [TOOL]} if has_tools else {}
  request = _parse(USER, **tools)
  answer = chat_completions.answer(response, has_tools=has_tools)
  reply = chat_completions.reply(request, answer, _turn(response), '', ('x', 1))
  completion = chat.ChatCompletion.model_validate(reply)
  sent = completion.choices[0].message.model_dump(exclude_none=True)
  again = _parse(USER, sent, USER, **tools)
  assert again.messages[1] == answer.message
  is_valid = not tool_calls.parse(response).problem
  assert bool(answer.problem) == (has_tools and not is_valid)


def test_replies_list_the_sampled_tokens():
  request = _parse(USER, logprobs=True, model='some-model')
  turn = _turn('abc', truncated=True)
  answer = chat_completions.answer('abc', has_tools=False)
  reply = chat_completions.reply(
    request, answer, turn, ['é', '\N{REPLACEMENT CHARACTER}', ''], ('x', 1)
  )
  completion = chat.ChatCompletion.model_validate(reply)
  (choice,) = completion.choices
  assert (choice.finish_reason, completion.model) == ('length', 'some-model')
  assert choice.message.content == 'abc' and not choice.message.tool_calls
  tokens = choice.logprobs.content
  assert [(t.token, t.logprob) for t in tokens] == [
    ('é', -1.0),
    ('\N{REPLACEMENT CHARACTER}', -0.5),
    ('', 0.0),
  ]
  # The second is a part of a character.
  assert [t.bytes for t in tokens] == [[0xC3, 0xA9], None, []]
  assert completion.usage.prompt_tokens == 7
  assert completion.usage.total_tokens == 10
