"""A conversation with a tool, for tests: add two numbers with `add`, answer."""

import json

from envs import base, tool_calls
from envs.toy import Tasks as Tasks
from envs.toy import tasks as tasks

CONTEXTS = ('conversation',)
TOOL = json.dumps(
  {
    'name': 'add',
    'description': 'Adds two integers.',
    'parameters': {
      'type': 'object',
      'properties': {'a': {'type': 'integer'}, 'b': {'type': 'integer'}},
    },
  }
)


def uses_tools(kwargs) -> bool:
  del kwargs
  return True


class Env:
  """Task i asks for i + 2; a wrong response is answered with the problem."""

  def __init__(self, max_steps: int = 4):
    self._max_steps, self._steps, self._known = max_steps, 0, False

  def prepare(self, task): ...

  def close(self): ...

  def reset(self, task):
    self._wanted, self._steps, self._known = task.index + 2, 0, False
    ask = base.Message('user', f'What is {task.index} + 2? Use the tool.')
    system = base.Message('system', 'You compute.')
    return self._observe(system, ask, tools=(TOOL,))

  def step(self, response):
    self._steps += 1
    parsed = tool_calls.parse(response)
    valid, success = not parsed.problem, False
    message = base.Message('user', parsed.problem or 'Call add.')
    if parsed.calls:
      call = parsed.calls[0]
      try:
        total = call.arguments['a'] + call.arguments['b']
        message = base.Message('tool', str(total), call_id='1')
        self._known = total == self._wanted
      except (KeyError, TypeError):
        valid = False
    elif valid:
      success = self._known and parsed.text == str(self._wanted)
    done = success or self._steps == self._max_steps
    return base.StepResult(
      observation=None if done else self._observe(message),
      reward=10.0 * success,
      valid=valid,
      action=parsed.text,
      success=success,
      done=done,
    )

  def _observe(self, *messages, tools=()):
    text = '\n'.join(message.text for message in messages)
    anchor = f'known: {self._known}'
    return base.Observation(
      text, text, anchor, text, messages=messages, tools=tools
    )
