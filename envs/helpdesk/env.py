"""A help desk with tools, in the style of tau-bench (arXiv:2406.12045).

A user asks for something that concerns an order. The policy asks the user, or
calls tools on a small database, and closes the case. An episode succeeds if the
final database equals the one after the solution, row by row. Nothing is
downloaded: cases, users and their answers are generated from a seed.

The anchor is what the next turn depends on: the changes of the database, what
the user has told, and what tools have shown; not the order of these.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from envs import base, checks, narrator, seeds, tool_calls
from envs.helpdesk import cases, database, expert, tools

CONTEXTS = ('conversation',)
SUCCESS_REWARD = 10.0
# Calls of a response that are executed; the others are ignored.
_MAX_CALLS = 8
_MIN_USERS, _MAX_USERS = 2, 9
_DEFAULTS = {'seed': 0, 'users': 3}


def uses_tools(kwargs: Mapping[str, Any]) -> bool:
  """Returns that conversations have tools."""
  del kwargs
  return True


def check_options(kwargs: Mapping[str, Any]) -> Iterator[str]:
  """Yields a line for each wrong option of the generator."""
  generator = kwargs.get('generator') or {}
  if unknown := sorted(set(generator) - set(_DEFAULTS)):
    yield (
      f'env.generator.{unknown[0]}={generator[unknown[0]]}: unknown; must be '
      f'of {", ".join(_DEFAULTS)}'
    )
  users, seed = generator.get('users'), generator.get('seed')
  if users is not None and not checks.is_between(users, _MIN_USERS, _MAX_USERS):
    yield (
      f'env.generator.users={users}: out of range; must be from {_MIN_USERS} '
      f'to {_MAX_USERS}'
    )
  if seed is not None and seed > seeds.MAX_SEED:
    yield (
      f'env.generator.seed={seed}: out of range; must be at most '
      f'{seeds.MAX_SEED:,}'
    )
  yield from checks.at_least(kwargs, max_steps=2)


class Tasks(seeds.Seeds):
  """The cases of a split; splits use disjoint seeds."""

  def __init__(self, split: str, options: Mapping[str, Any]):
    super().__init__(split, options['seed'])
    self._users = options['users']

  def task_type(self, index: int) -> str:
    """Returns the kind of the request, or 'refuse'."""
    return _case(self[index], self._users).task_type


@functools.lru_cache(maxsize=4096)
def _case(seed: int, num_users: int) -> cases.Case:
  return cases.generate(seed, num_users)


def tasks(split: str, **kwargs: Any) -> Tasks:
  """Returns the cases of a split; accepts the arguments of `Env`."""
  return Tasks(split, _DEFAULTS | dict(kwargs.get('generator') or {}))


class Env:
  """A help desk.

  Args:
    max_steps: step limit of an episode.
    prompt_style: 'paper': with the policy and definitions of tools; 'brief':
      without, for very small policies. Then each message repeats what is known,
      and what a call leaves out is taken from it.
    generator: options of the generator: seed, and users of a database.
  """

  def __init__(
    self,
    max_steps: int = 12,
    prompt_style: str = 'paper',
    generator: Mapping[str, Any] | None = None,
  ):
    narrator.check_style(prompt_style)
    self._max_steps = max_steps
    self._is_brief = prompt_style == 'brief'
    self._options = _DEFAULTS | dict(generator or {})
    self._db = database.Database({})

  def prepare(self, task: base.Task) -> None:
    """Does nothing; cases are generated in well under a millisecond."""

  def reset(self, task: base.Task) -> base.Observation:
    """Starts a case."""
    seed = Tasks(task.split, self._options)[task.index]
    self._case = _case(seed, self._options['users'])
    self._db.close()
    self._db = database.Database(self._case.tables)
    self._start, self._goal = self._db.rows(), self._case.goal()
    self._steps = 0
    # What the policy knows: facts of the user, results of calls that read.
    self._known: dict[str, str] = {}
    # The arguments of calls that follow from it.
    self._arguments = {'product': self._case.product}
    request = base.Message('user', self._case.request)
    if self._is_brief:
      return self._observe([request])
    policy = base.Message('system', cases.POLICY)
    return self._observe([policy, request], tools.definitions())

  def step(self, response: str) -> base.StepResult:
    """Answers a question, or executes the tool calls of a response."""
    self._steps += 1
    parsed = tool_calls.parse(response)
    calls = [self._complete(call) for call in parsed.calls[:_MAX_CALLS]]
    problem = parsed.problem or ''.join(map(tools.call_problem, calls[:1]))
    if problem or not (calls or parsed.text):
      valid, action = False, response[-narrator.UNPARSED_CHARACTERS :]
      replies = [base.Message('user', f'Error: {problem or "no response"}')]
    elif calls:
      valid, action = True, '; '.join(map(expert.describe, calls))
      replies = [self._run(call) for call in calls]
    else:
      fact, text = self._case.answer(parsed.text)
      if fact:
        self._known[expert.fact_key(fact)] = text
        self._arguments |= self._case.arguments(fact)
      valid, action = True, f'ask {fact or "nothing"}'
      replies = [base.Message('user', text)]
    return self._result(replies, valid=valid, action=action)

  def close(self) -> None:
    """Frees the database."""
    self._db.close()

  def _run(self, call: tool_calls.Call) -> base.Message:
    """Executes a call, unless the case is closed."""
    if self._is_closed:
      return base.Message('tool', 'Error: the case is closed')
    if problem := tools.call_problem(call):
      return base.Message('tool', f'Error: {problem}')
    text = tools.run(self._db, call)
    if not tools.TOOLS[call.name].writes:
      self._known[expert.describe(call)] = text
      self._arguments |= tools.ids(text)
    return base.Message('tool', text)

  def _complete(self, call: tool_calls.Call) -> tool_calls.Call:
    """Returns a call with the arguments that it may leave out."""
    if not self._is_brief or call.name not in tools.TOOLS:
      return call
    known = {
      parameter: self._arguments[parameter]
      for parameter in tools.TOOLS[call.name].parameters
      if parameter in self._arguments
    }
    return tool_calls.Call(call.name, known | call.arguments)

  @property
  def _is_closed(self) -> bool:
    return bool(self._db.find('outcomes'))

  def _result(
    self, replies: Sequence[base.Message], *, valid: bool, action: str
  ) -> base.StepResult:
    success = self._db.rows() == self._goal
    done = self._is_closed or self._steps == self._max_steps
    return base.StepResult(
      observation=None if done else self._observe(replies),
      reward=SUCCESS_REWARD * success,
      valid=valid,
      action=action,
      success=success,
      done=done,
      final_anchor=self._anchor() if done else None,
    )

  def _observe(
    self, replies: Sequence[base.Message], definitions: tuple[str, ...] = ()
  ) -> base.Observation:
    if self._is_brief:
      replies = [self._repeat_what_is_known(replies)]
    text = '\n'.join(message.text for message in replies)
    return base.Observation(
      prompt=text,
      short_prompt=text,
      anchor=self._anchor(),
      text=text,
      task=self._case.request,
      messages=tuple(replies),
      tools=definitions,
    )

  def _repeat_what_is_known(
    self, replies: Sequence[base.Message]
  ) -> base.Message:
    """Returns what is known, and then what is new, in one message."""
    known = [self._case.request, *self._known.values()]
    new = [message.text for message in replies if message.text not in known]
    return base.Message(replies[-1].role, '\n'.join([*known, *new]))

  def _anchor(self) -> str:
    """Returns the state: changes of the database, and what is known."""
    changes = sorted(map(str, self._db.rows() - self._start))
    facts = list(self._known.items())
    if self._is_brief:  # Calls are completed with the latest arguments.
      facts += self._arguments.items()
    known = sorted(f'{key}: {value}' for key, value in facts)
    return '\n'.join([self._case.request, *known, *changes])

  def demonstrate(
    self, task: base.Task, *, noise: float, seed: int
  ) -> Iterator[tuple[base.Observation, str]]:
    """Plays a shortest solution with random mistakes; yields each step.

    Args:
      task: the case to play.
      noise: probability that a step is drawn uniformly from questions and calls
        with known ids. The episode is left unfinished after a mistake that
        changes the database.
      seed: seed of the noise.

    Yields:
      (observation, response) of a step.
    """
    rng = np.random.default_rng([seed, task.index])
    observation: base.Observation | None = self.reset(task)
    while observation is not None:
      changes = self._db.rows() - self._start
      if changes - self._goal:
        return
      step = expert.next_step(self._case, self._known, is_changed=bool(changes))
      if rng.random() < noise:
        choices = expert.choices(self._case, self._known)
        step = choices[rng.integers(len(choices))]
      response = expert.respond(step, is_brief=self._is_brief)
      yield observation, response
      observation = self.step(response).observation
