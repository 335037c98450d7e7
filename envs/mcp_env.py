"""Tools of any MCP server as actions, in a growing conversation.

The config names the server and the tasks. The policy calls the server's tools
and ends the episode by answering in words. Tools of the server that are named
in the config serve the environment instead of the policy: one starts an
episode, one returns the state, one judges the episode.

A task is a dict:

    task: what to do, the first message.
    answer: the correct answer; needed without `score_tool`.
    arguments: arguments of `reset_tool`; default {}.
    type: task type; default 'all'.
    solution: calls that solve it, [{'name': .., 'arguments': {..}}]; needed
      for a warm start only.
    split: its split, in a file of tasks; default 'train'.
"""

import functools
import importlib.util
import json
import pathlib
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

import envs
from envs import base, mcp_session, messages, tool_calls, tool_turns

CONTEXTS = ('conversation',)
# Arguments of a score tool, if it accepts them.
_ANSWER = 'answer'


def uses_tools(kwargs: Mapping[str, Any]) -> bool:
  """Returns that conversations have tools."""
  del kwargs
  return True


def check_installation(kwargs: Mapping[str, Any]) -> Iterator[str]:
  """Yields a line if the package `mcp` or the server's command is missing."""
  if not importlib.util.find_spec('mcp'):
    yield "env.name=mcp: mcp is not installed; run pip install -e '.[mcp]'"
  server = kwargs.get('server') or ''
  if not server.startswith(mcp_session.URLS):
    try:
      command = (shlex.split(server) or [''])[0]
    except ValueError as error:
      yield f'env.server={server}: {error}; must be a command or a URL'
      return
    if command != 'python' and not shutil.which(command):
      yield (
        f'env.server={server}: no such command; must be a command or a URL '
        'that starts with http:// or https://'
      )


class Tasks:
  """The tasks of a split.

  Args:
    source: a file with a task a line as JSON, or `module:function`, a function
      that returns the tasks of a split.
    split: the split.

  Attributes:
    tasks: the tasks, see the module's documentation.

  Raises:
    ValueError: in one line, if the tasks cannot be read.
  """

  def __init__(self, source: str | None, split: str):
    self.tasks = _read_tasks(source, split)
    if not self.tasks:
      raise ValueError(f'env.tasks={source}: no task of the split {split}')
    for n, task in enumerate(self.tasks):
      if not isinstance(task, dict) or not isinstance(task.get('task'), str):
        raise ValueError(
          f'env.tasks={source}: task {n} of {split} is no dict with a text '
          "'task'"
        )

  def __len__(self) -> int:
    return len(self.tasks)

  def task_type(self, index: int) -> str:
    """Returns the task type."""
    return str(self.tasks[index].get('type') or 'all')


def tasks(split: str, **kwargs) -> Tasks:
  """Returns the tasks of a split; accepts and checks the kwargs of `Env`."""
  Env(**kwargs)
  source = kwargs.get('tasks')
  known = Tasks(source, split)
  for n, task in enumerate(known.tasks):
    if not kwargs.get('score_tool') and not _plain(str(task.get(_ANSWER, ''))):
      raise ValueError(
        f"env.tasks={source}: task {n} of {split} has no '{_ANSWER}', which is "
        'needed without env.score_tool'
      )
  return known


class Env:
  """Episodes with the tools of an MCP server.

  Args:
    server: URL of a server, or a command that starts one. Each environment
      starts its own; `python` is this interpreter.
    tasks: see `Tasks`.
    tools: names of the policy's tools; () for all that have no other use.
    reset_tool: tool that starts an episode with the task's arguments; its
      result belongs to the first message. '' connects anew for each episode.
    state_tool: tool that returns the state, by which steps are grouped. ''
      groups by the last messages; then algorithm.anchor=similarity may help.
    score_tool: tool that returns the score of an episode, from 0 to 1, at its
      end. It gets the policy's answer if it has an argument `answer`. ''
      compares the answer with the task's.
    success_score: an episode succeeds if its score is at least this.
    system: system message; '' uses the server's instructions, if any.
    variables: names of environment variables that the server's command gets.
    timeout_secs: limit of a request to the server.
    max_result_chars: length limit of a result. Of a longer one, the policy
      reads the length only.
    max_steps: step limit of an episode.

  Raises:
    ValueError: in one line, if an argument is not valid.
  """

  def __init__(
    self,
    *,
    server: str | None = None,
    tasks: str | None = None,
    tools: Sequence[str] = (),
    reset_tool: str = '',
    state_tool: str = '',
    score_tool: str = '',
    success_score: float = 1.0,
    system: str = '',
    variables: Sequence[str] = ('PYTHONPATH',),
    timeout_secs: float = 20.0,
    max_result_chars: int = 8000,
    max_steps: int = 10,
  ):
    if not server:
      raise ValueError(f'env.server={server}: must be a URL or a command')
    self._source = tasks
    self._tool_names = tuple(tools)
    self._reset_tool, self._state_tool = reset_tool, state_tool
    self._score_tool, self._success_score = score_tool, success_score
    self._system = system
    self._max_chars, self._max_steps = max_result_chars, max_steps
    self._open = functools.partial(
      mcp_session.Session,
      server,
      variables=variables,
      timeout_secs=timeout_secs,
    )
    self._server = server
    self._session: mcp_session.Session | None = None
    self._tools: tool_turns.Tools
    self._score_arguments: tuple[str, ...] = ()
    self._task: dict[str, Any] = {}
    self._step = 0

  def prepare(self, task: base.Task) -> None:
    """Does nothing; there is nothing to load."""

  def reset(self, task: base.Task) -> base.Observation:
    """Starts an episode: resets the server, or connects to it anew."""
    self._task, self._step = self._find_task(task), 0
    if self._session is None or not self._reset_tool:
      self.close()
      self._session = self._open()
      self._use_tools(self._session.list_tools())
    texts = [self._task['task']]
    if self._reset_tool:
      texts.append(self._ask(self._reset_tool, self._task.get('arguments', {})))
    user = base.Message('user', '\n'.join(filter(None, texts)))
    system = self._system or self._session.instructions
    first = (base.Message('system', system),) if system else ()
    return self._observe((*first, user), tools=self._tools.texts)

  def step(self, response: str) -> base.StepResult:
    """Calls tools; an answer ends the episode."""
    turn = self._tools.take(response)
    self._step += 1
    done = turn.answer is not None or self._step >= self._max_steps
    score = self._score(turn.answer or '') if done else None
    return base.StepResult(
      observation=None if done else self._observe(turn.messages),
      reward=score or 0.0,
      valid=turn.valid,
      action=turn.action,
      success=done and score >= self._success_score,
      done=done,
      metrics={'tool_errors': float(turn.errors)},
      score=score,
      final_anchor=self._final_anchor(turn) if done else None,
    )

  def close(self) -> None:
    """Closes the connection, and ends a server that it has started."""
    if self._session is not None:
      self._session.close()
      self._session = None

  def demonstrate(
    self, task: base.Task, *, noise: float, seed: int
  ) -> Iterator[tuple[base.Observation, str]]:
    """Plays the task's solution with mistakes; yields each step.

    Args:
      task: the task to play.
      noise: probability that a step plays a call of another task's solution
        before it continues. It must not prevent success.
      seed: seed of the noise.

    Yields:
      (observation, response) of a step.

    Raises:
      ValueError: in one line, if the task has no solution.
    """
    rng = np.random.default_rng([seed, task.index])
    known = Tasks(self._source, task.split)
    observation: base.Observation | None = self.reset(task)
    plan = _responses(self._source, self._task)
    while observation is not None:
      wrong_calls = []
      if rng.random() < noise:
        other = known.tasks[rng.integers(len(known))]
        *wrong_calls, _ = _responses(self._source, other)
      if wrong_calls:
        response = wrong_calls[rng.integers(len(wrong_calls))]
      else:
        response = plan.pop(0)
      yield observation, response
      observation = self.step(response).observation

  def _find_task(self, task: base.Task) -> dict[str, Any]:
    return Tasks(self._source, task.split).tasks[task.index]

  def _use_tools(self, listed: list[dict[str, Any]]) -> None:
    """Divides the server's tools between the policy and the environment."""
    schemas = {schema['name']: schema for schema in listed}
    own = [self._reset_tool, self._state_tool, self._score_tool]
    names = self._tool_names or [name for name in schemas if name not in own]
    for name in filter(None, (*names, *own)):
      if name not in schemas:
        raise ValueError(
          f'env.server={self._server}: has no tool {name}; has '
          f'{", ".join(schemas) or "none"}'
        )
    try:
      self._tools = tool_turns.Tools(
        [schemas[name] for name in names],
        self._session.call,
        max_chars=self._max_chars,
      )
    except ValueError as error:
      raise ValueError(f'env.server={self._server}: {error}') from error
    if self._score_tool:
      parameters = schemas[self._score_tool]['parameters']
      self._score_arguments = tuple(parameters.get('properties', ()))

  def _ask(self, name: str, arguments: dict[str, Any]) -> str:
    """Returns the result of one of the environment's own calls."""
    result = self._session.call(name, arguments)
    if result.is_error or len(result.text) > self._max_chars:
      raise ValueError(
        f'env.server={self._server}: tool {name}: {result.text[:200]!r} of '
        f'{len(result.text):,} characters; must be a result without an error '
        f'of at most {self._max_chars:,} characters'
      )
    return result.text

  def _score(self, answer: str) -> float:
    if not self._score_tool:
      return float(_plain(answer) == _plain(str(self._task[_ANSWER])))
    arguments = {_ANSWER: answer} if _ANSWER in self._score_arguments else {}
    text = self._ask(self._score_tool, arguments)
    try:
      score = float(text)
    except ValueError:
      score = -1.0
    if not 0 <= score <= 1:
      raise ValueError(
        f'env.score_tool={self._score_tool}: returned {text[:80]!r}; must be a '
        'number from 0 to 1'
      )
    return score

  def _anchor(self, new: Sequence[base.Message]) -> str:
    if self._state_tool:
      return self._ask(self._state_tool, {})
    text = '\n'.join(message.text for message in new)
    return text[: messages.MAX_TEXT_CHARS]

  def _final_anchor(self, turn: tool_turns.Turn) -> str:
    anchor = self._anchor(turn.messages)
    if turn.answer is None:
      return anchor
    # An answer ends the episode: it is no step that changes nothing.
    own = f'{anchor}\nAnswer: {_plain(turn.answer)}'
    return own[-messages.MAX_TEXT_CHARS :]

  def _observe(
    self, new: tuple[base.Message, ...], *, tools: tuple[str, ...] = ()
  ) -> base.Observation:
    text = '\n'.join(message.text for message in new)
    return base.Observation(
      prompt=text,
      short_prompt=text,
      anchor=self._anchor(new),
      text=text[: messages.MAX_TEXT_CHARS],
      task=self._task['task'],
      messages=new,
      tools=tools,
    )


def _plain(text: str) -> str:
  return ' '.join(text.lower().split())


def _responses(source: str | None, task: dict[str, Any]) -> list[str]:
  """Returns the responses that solve a task: its calls, then its answer."""
  if 'solution' not in task:
    raise ValueError(f"env.tasks={source}: a task has no 'solution' to imitate")
  calls = [tool_calls.Call(**call) for call in task['solution']]
  return [*map(tool_calls.write, calls), str(task.get(_ANSWER, 'Done.'))]


@functools.lru_cache(maxsize=8)
def _read_tasks(source: str | None, split: str) -> tuple[dict[str, Any], ...]:
  path = pathlib.Path(source or '').expanduser()
  try:
    if path.is_file():
      lines = path.read_text(encoding='utf-8').split('\n')
      listed = [json.loads(line) for line in lines if line.strip()]
      return tuple(t for t in listed if t.get('split', 'train') == split)
    if ':' not in (source or ''):
      raise ValueError('no such file; must be a file or module:function')
    return tuple(envs.import_attribute(source)(split))
  except (AttributeError, ImportError, KeyError, OSError, ValueError) as error:
    raise ValueError(f'env.tasks={source}: {error}') from error
