"""Environments of the package verifiers, for tests."""

import asyncio
import time
import types

import datasets
import verifiers

QUESTIONS = [
  {'question': f'Double {n}.', 'answer': str(2 * n)} for n in range(4)
]


def _table():
  return datasets.Dataset.from_list(QUESTIONS)


async def _exact(parser, completion, answer) -> float:
  return float((parser.parse_answer(completion) or '').strip() == answer)


async def _short(completion) -> float:
  return 1.0 if len(completion) < 3 else 0.0


def _answer_once(**kwargs):
  """Returns a single-turn environment; the prompt has a system message."""
  parser = verifiers.XMLParser(['answer'])
  rubric = verifiers.Rubric(
    funcs=[_exact, _short], weights=[1.0, 0.5], parser=parser
  )
  return verifiers.SingleTurnEnv(
    dataset=_table(),
    system_prompt='Use <answer> tags.',
    parser=parser,
    rubric=rubric,
    **kwargs,
  )


class _Chat(verifiers.MultiTurnEnv):
  """Answers a word with what its name says; `right` ends the episode."""

  async def setup_state(self, state, **kwargs):
    state['seen'] = []
    return state

  async def env_response(self, messages, state, **kwargs):
    word = messages[-1].content
    state['seen'].append(word)
    if word == 'hang':
      await asyncio.sleep(60)
    if word == 'block':
      time.sleep(60)
    if word == 'raise':
      raise KeyError('no\nsuch thing')
    if word == 'stop':
      raise verifiers.ToolCallError('the tool\nis broken')
    if word == 'image':
      part = {'type': 'image_url', 'image_url': {'url': 'data:'}}
      return [{'role': 'user', 'content': [part]}]
    if word == 'odd':
      return 7
    text = 'x' * 10_000_000 if word == 'huge' else f'You said {word}.'
    reply = [{'role': 'user', 'content': text}]
    if word == 'right':
      state['final_env_response'] = reply
    return reply

  async def get_prompt_messages(self, state):
    messages = await super().get_prompt_messages(state)
    if state.get('seen', [''])[-1:] == ['forget']:
      return [*messages[:1], messages[-1]]
    return messages


class _Slow(_Chat):
  """Takes a minute to start."""

  async def setup_state(self, state, **kwargs):
    await asyncio.sleep(60)
    return state


def _judge(kind: str):
  async def words(state) -> float:
    if 'unfair' in state['seen']:
      raise ValueError('no\njudge')
    return float('nan') if 'nan' in state['seen'] else len(state['seen'])

  async def right(state) -> float:
    return float('right' in state['seen'])

  return verifiers.Rubric(funcs=[right, words], weights=[2.0, 0.25])


def _add(a: int, b: int) -> int:
  """Adds two numbers."""
  if b == 13:
    raise ValueError('an unlucky number')
  return a + b


async def _sum_is_right(completion, answer) -> float:
  return float(answer in (completion[-1].content or ''))


def _tools():
  return verifiers.ToolEnv(
    tools=[_add],
    dataset=_table(),
    rubric=verifiers.Rubric(funcs=[_sum_is_right]),
    max_turns=5,
  )


def _bad_schema():
  environment = _tools()
  environment.tool_defs[0].parameters = {'type': 'words'}
  return environment


def _rank(states) -> list[float]:
  return [float(n) for n in range(len(states))]


def _compare():
  rubric = verifiers.Rubric(funcs=[_exact, _rank])
  return verifiers.SingleTurnEnv(dataset=_table(), rubric=rubric)


def _no_rows():
  return verifiers.SingleTurnEnv(
    dataset=datasets.Dataset.from_list(QUESTIONS).select([])
  )


def load_environment(kind: str = 'once'):
  """Returns an environment.

  Args:
    kind: once, chat, slow, timed, tools, schema, group, empty; another raises
      an error.
  """
  makers = {
    'once': _answer_once,
    'chat': lambda: _Chat(dataset=_table(), rubric=_judge(kind)),
    'timed': lambda: _Chat(
      dataset=_table(), rubric=_judge(kind), timeout_seconds=0.2
    ),
    'slow': lambda: _Slow(dataset=_table(), rubric=_judge(kind)),
    'tools': _tools,
    'schema': _bad_schema,
    'group': _compare,
    'empty': _no_rows,
  }
  return types.MappingProxyType(makers)[kind]()
