"""Client of OpenEnv servers: an environment behind a web address.

An OpenEnv server runs environments with typed actions, and one connection (a
WebSocket) plays in one environment. The policy acts by calling the tool `act`,
whose arguments are the fields of the server's action. Observations become text
by rule. A task is the seed that is passed to `reset`.

The protocol is that of openenv-core 0.3: `/schema` describes actions, `/ws`
accepts reset, step and state messages.
"""

import contextlib
import importlib.util
import json
import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from envs import base, demonstrators, messages, seeds, tool_turns

CONTEXTS = ('conversation',)
TOOL = 'act'
# Fields of every action and state that do not belong to a single environment.
_COMMON = {'metadata', 'episode_id', 'step_count'}
_MAX_BYTES = 2**20  # of a message


def uses_tools(kwargs: Mapping[str, Any]) -> bool:
  """Returns that conversations have tools."""
  del kwargs
  return True


def check_installation(kwargs: Mapping[str, Any]) -> Iterator[str]:
  """Yields a line if a package is missing."""
  del kwargs
  for name in ('httpx', 'jsonschema', 'websockets'):
    if not importlib.util.find_spec(name):
      yield (
        f'env.name=openenv: {name} is not installed; run pip install -e '
        "'.[openenv]'"
      )


class RefusedError(Exception):
  """Raised for an action that the server refuses; the message is one line."""


class Connection:
  """A connection to a server, which plays in an environment of its own.

  Args:
    server: URL of the server, http or https.
    timeout_secs: limit of a request.

  Attributes:
    schema: JSON schema of an action.

  Raises:
    ConnectionError: in one line, if the server cannot be used. The other
      methods raise it, too, and TimeoutError.
  """

  def __init__(self, server: str, *, timeout_secs: float):
    import httpx
    from websockets.sync import client

    self._server, self._timeout = server.rstrip('/'), timeout_secs
    with self._one_line('schema'):
      reply = httpx.get(
        f'{self._server}/schema', timeout=timeout_secs, trust_env=False
      )
      self.schema = reply.raise_for_status().json()['action']
      if not isinstance(self.schema, dict):
        raise ValueError('the schema of an action is no JSON object')
    with self._one_line('connection'):
      self._open = contextlib.ExitStack()
      self._socket = self._open.enter_context(
        client.connect(
          f'ws{self._server.removeprefix("http")}/ws',
          open_timeout=timeout_secs,
          close_timeout=1,
          max_size=_MAX_BYTES,
          proxy=None,
        )
      )

  def reset(self, **options: Any) -> dict[str, Any]:
    """Starts an episode; returns observation, reward and done."""
    return self._play('reset', options)

  def step(self, action: dict[str, Any]) -> dict[str, Any]:
    """Acts; returns observation, reward and done."""
    return self._play('step', action)

  def state(self) -> dict[str, Any]:
    """Returns the fields of the environment's state."""
    with self._one_line('state'):
      return self._ask('state', None)

  def close(self) -> None:
    """Closes the connection."""
    self._open.close()

  def _play(self, request: str, data: dict[str, Any]) -> dict[str, Any]:
    with self._one_line(request):
      reply = self._ask(request, data)
      reward = reply.get('reward') or 0.0
      if not isinstance(reply.get('observation'), dict):
        raise ValueError('its observation is no JSON object')
      if not isinstance(reward, numbers.Real) or not math.isfinite(reward):
        raise ValueError(f'its reward is {reward!r:.80}, no number')
      return {**reply, 'reward': float(reward), 'done': bool(reply.get('done'))}

  def _ask(self, request: str, data: dict[str, Any] | None) -> dict[str, Any]:
    message = {'type': request} | ({} if data is None else {'data': data})
    self._socket.send(json.dumps(message))
    reply = json.loads(self._socket.recv(timeout=self._timeout))
    if not isinstance(reply, dict) or not isinstance(reply.get('data'), dict):
      raise ValueError('its reply is no JSON object with data')
    data = reply['data']
    if reply.get('type') == 'error':
      if request == 'step' and data.get('code') == 'VALIDATION_ERROR':
        reason = data.get('errors') or data.get('message')
        raise RefusedError(messages.to_line(str(reason))[:200])
      raise ValueError(f'error {data.get("message")}')
    return data

  @contextlib.contextmanager
  def _one_line(self, request: str) -> Iterator[None]:
    """Turns a failure of a request into an error in one line."""
    import httpx
    from websockets import exceptions

    try:
      yield
    except (TimeoutError, httpx.TimeoutException) as error:
      raise TimeoutError(
        f'env.server={self._server}: {request}: no response within '
        f'{self._timeout:g} s'
      ) from error
    except (
      OSError,
      KeyError,
      OverflowError,  # An integer that is no float.
      RecursionError,  # A reply that is nested too deep.
      TypeError,
      ValueError,
      httpx.HTTPError,
      exceptions.WebSocketException,
    ) as error:
      reason = messages.to_line(str(error))[:300] or type(error).__name__
      if isinstance(error, (ConnectionRefusedError, httpx.ConnectError)):
        reason += '; must be the address of a running server'
      raise ConnectionError(
        f'env.server={self._server}: {request}: {reason}'
      ) from error


class Env:
  """Episodes of an environment behind an OpenEnv server.

  Args:
    server: URL of the server, such as 'http://127.0.0.1:8000'.
    task: sentence that states the task, the first message.
    options: further arguments of the server's `reset`.
    success_return: an episode succeeds if the server ends it and the sum of its
      rewards is at least this.
    seed: base seed of the tasks.
    timeout_secs: limit of a request to the server.
    max_result_chars: length limit of an observation's text. Of a longer one,
      the policy reads the length only.
    max_steps: step limit of an episode.
    demonstrator: play for a warm start, see `demonstrators`; '' for none.

  Raises:
    ValueError: in one line, if an argument is not valid.
  """

  def __init__(
    self,
    *,
    server: str | None = None,
    task: str = '',
    options: Mapping[str, Any] | None = None,
    success_return: float = 1.0,
    seed: int = 0,
    timeout_secs: float = 20.0,
    max_result_chars: int = 8000,
    max_steps: int = 20,
    demonstrator: str = '',
  ):
    if not (server or '').startswith(('http://', 'https://')):
      raise ValueError(
        f'env.server={server}: must start with http:// or https://'
      )
    seeds.check_seed(seed)
    self._server, self._task, self._options = server, task, dict(options or {})
    self._success_return, self._seed = success_return, seed
    self._timeout, self._max_chars = timeout_secs, max_result_chars
    self._max_steps, self._demonstrator = max_steps, demonstrator
    self._connection: Connection | None = None
    self._tools: tool_turns.Tools
    self._last: dict[str, Any] = {}
    self._step, self._return, self._reward = 0, 0.0, 0.0

  def prepare(self, task: base.Task) -> None:
    """Does nothing; there is nothing to load."""

  def reset(self, task: base.Task) -> base.Observation:
    """Starts an episode with the task's seed."""
    if self._connection is None:
      self._connect()
    seed = seeds.Seeds(task.split, self._seed)[task.index]
    self._last = self._connection.reset(seed=seed, **self._options)
    self._step, self._return = 0, 0.0
    shown = self._tools.limit(tool_turns.Result(self._text()))
    text = '\n'.join(filter(None, [self._task, shown.text]))
    return self._observe((base.Message('user', text),), tools=self._tools.texts)

  def step(self, response: str) -> base.StepResult:
    """Acts; a response without a call of the tool only uses up a step."""
    self._step, self._reward = self._step + 1, 0.0
    turn = self._tools.take(response)
    new = turn.messages
    if turn.answer is not None:
      new = (base.Message('user', f'Error: call the tool {TOOL}.'),)
    self._return += self._reward
    ended = self._last['done']
    done = ended or self._step >= self._max_steps
    return base.StepResult(
      observation=None if done else self._observe(new),
      reward=self._reward,
      valid=turn.valid and turn.answer is None,
      action=turn.action,
      success=ended and self._return >= self._success_return,
      done=done,
      metrics={'tool_errors': float(turn.errors)},
      final_anchor=self._anchor() if done else None,
    )

  def close(self) -> None:
    """Closes the connection."""
    if self._connection is not None:
      self._connection.close()
      self._connection = None

  def demonstrate(
    self, task: base.Task, *, noise: float, seed: int
  ) -> Iterator[tuple[base.Observation, str]]:
    """Yields (observation, response) of each step of `env.demonstrator`."""
    yield from demonstrators.play(
      self, task, self._demonstrator, noise=noise, seed=seed
    )

  def _connect(self) -> None:
    self._connection = Connection(self._server, timeout_secs=self._timeout)
    schema = dict(self._connection.schema)
    fields = schema.get('properties')
    if isinstance(fields, dict):
      schema['properties'] = {
        name: field for name, field in fields.items() if name not in _COMMON
      }
    description = str(schema.pop('description', '') or 'Acts.')
    tool = {'name': TOOL, 'description': description, 'parameters': schema}
    try:
      self._tools = tool_turns.Tools(
        [tool], self._act, max_chars=self._max_chars
      )
    except ValueError as error:
      raise ValueError(f'env.server={self._server}: {error}') from error

  def _act(self, name: str, action: dict[str, Any]) -> tool_turns.Result:
    """Plays an action, unless an earlier call has ended the episode."""
    del name
    if self._last['done']:
      return tool_turns.Result('Error: the episode is over', True)
    try:
      self._last = self._connection.step(action)
    except RefusedError as error:
      return tool_turns.Result(f'Error: {error}', True)
    self._reward += self._last['reward']
    return tool_turns.Result(self._text())

  def _text(self) -> str:
    """Returns the last observation as text, a field a line."""
    return '\n'.join(
      f'{name}: {value if isinstance(value, str) else _json(value)}'
      for name, value in self._last['observation'].items()
      if name not in _COMMON and value not in (None, '', [], {})
    )

  def _anchor(self) -> str:
    """Returns the state's own fields, or else the observation."""
    state = self._connection.state()
    own = {name: state[name] for name in sorted(state.keys() - _COMMON)}
    text = json.dumps(own) if own else self._text()
    return text[: messages.MAX_TEXT_CHARS]

  def _observe(
    self, new: Sequence[base.Message], *, tools: tuple[str, ...] = ()
  ) -> base.Observation:
    text = '\n'.join(message.text for message in new)
    return base.Observation(
      prompt=text,
      short_prompt=text,
      anchor=self._anchor(),
      text=text[: messages.MAX_TEXT_CHARS],
      task=self._task,
      messages=tuple(new),
      tools=tools,
    )


def _json(value: Any) -> str:
  return json.dumps(value, ensure_ascii=False)


def tasks(split: str, **kwargs) -> seeds.Seeds:
  """Returns the seeds of a split; accepts and checks the kwargs of `Env`."""
  Env(**kwargs)
  return seeds.Seeds(split, kwargs.get('seed', 0))
