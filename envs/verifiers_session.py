"""Rollouts of the package `verifiers`, for a policy that is asked turn by turn.

A verifiers environment plays an episode itself: its rollout asks a client for
each response of the model. Here the client is `_Policy`, which leaves a request
unanswered until the policy has responded. So the environment's own turn logic,
tools, stop conditions and rubric run unchanged, whatever its class.

The API is that of verifiers 0.3, `Environment.run_rollout`. All rollouts of a
process run in one event loop, which runs during calls only.
"""

import asyncio
import contextlib
import dataclasses
import functools
import json
import logging
import signal
from collections.abc import Iterator, Mapping
from typing import Any

from envs import messages, tool_calls

# Logger of the package's rubrics.
_RUBRICS = 'verifiers.legacy.rubrics'
# How long to wait for a rollout that is cancelled.
_CANCEL_SECS = 1.0


@dataclasses.dataclass
class Request:
  """A request of a rollout for a response.

  Attributes:
    prompt: the conversation so far, messages of verifiers.
    tools: name, description and parameters of the tools that may be called.
    state: the rollout's state.
    response: the response, once there is one.
  """

  prompt: list[Any]
  tools: list[dict[str, Any]]
  state: Mapping[str, Any]
  response: asyncio.Future


class _Policy:
  """A client, in verifiers' terms, that leaves requests to `Rollout`.

  Args:
    max_steps: number of requests. At the next one, the rollout learns that the
      prompt is too long, upon which it ends and is scored.

  Attributes:
    requests: requests that wait for a response.
  """

  def __init__(self, max_steps: int):
    self.requests: asyncio.Queue[Request] = asyncio.Queue()
    self._left = max_steps

  async def get_response(
    self, prompt, model, sampling_args, tools=None, state=None, **kwargs
  ):
    """Returns the response to a prompt; the signature is verifiers' own."""
    from verifiers import errors

    del model, sampling_args, kwargs
    if not self._left:
      raise errors.OverlongPromptError('env.max_steps is reached')
    self._left -= 1
    offered = [
      tool.model_dump(include={'name', 'description', 'parameters'})
      for tool in tools or ()
    ]
    response = asyncio.get_running_loop().create_future()
    self.requests.put_nowait(Request(prompt, offered, state, response))
    return await response


class _Errors(logging.Handler):
  """Collects errors of reward functions, which rubrics only log.

  Attributes:
    lines: the messages.
  """

  def __init__(self):
    super().__init__(logging.ERROR)
    self.lines: list[str] = []

  def emit(self, record: logging.LogRecord) -> None:
    """Keeps a message."""
    self.lines.append(record.getMessage())


class Rollout:
  """A rollout that is being played.

  Args:
    name: name of the environment, for errors.
    environment: the verifiers environment.
    row: the row of its dataset.
    max_steps: limit of responses.
    timeout_secs: limit of the environment's part of a turn, and of the rubric.

  Attributes:
    request: the request that waits for a response; None once it has ended.
    state: the rollout's state.

  Raises:
    RuntimeError: in one line, if the environment fails; so do the methods.
    TimeoutError: in one line, if it takes too long.
  """

  def __init__(
    self,
    name: str,
    environment: Any,
    row: dict[str, Any],
    *,
    max_steps: int,
    timeout_secs: float,
  ):
    self._where, self._timeout = f'env.environment={name}: ', timeout_secs
    self._policy, self._turn = _Policy(max_steps), 0
    self._errors = _Errors()
    self._task = _loop().create_task(
      environment.run_rollout(row, self._policy, 'policy', {})
    )
    self.request: Request | None = None
    self.state: Mapping[str, Any] = {}
    try:
      self._advance()
    except TimeoutError:
      self.close()
      raise
    if self.request is None:
      self.score()
      raise RuntimeError(f'{self._where}the episode ends before its first turn')

  def respond(self, response: str, parsed: tool_calls.Response) -> Any:
    """Answers the request and waits for the next one or the end.

    Args:
      response: the response of the policy, verbatim.
      parsed: the same, parsed.

    Returns:
      The response as a message of verifiers.
    """
    self._turn += 1
    answer = _make_response(response, parsed, self._turn)
    self.request.response.set_result(answer)
    self._advance()
    return answer.message

  def score(self) -> tuple[float, dict[str, float]]:
    """Returns reward and metrics of a rollout that has ended.

    The metrics are the values of the rubric's functions, by name.
    """
    try:
      output = self._task.result()
    except Exception as error:
      line = messages.to_line(f'{type(error).__name__}: {error}')[:300]
      raise RuntimeError(f'{self._where}{line}') from error
    problems = self._errors.lines
    if output['error'] is not None:
      problems = [output['error']['error_chain_repr'], *problems]
    if problems:
      raise RuntimeError(f'{self._where}{messages.to_line(problems[0])[:300]}')
    return float(output['reward']), dict(output['metrics'] or {})

  def close(self) -> None:
    """Ends the rollout."""
    if not self._task.done():
      self._task.cancel()
      _loop().run_until_complete(
        asyncio.wait({self._task}, timeout=_CANCEL_SECS)
      )

  def _advance(self) -> None:
    log = logging.getLogger(_RUBRICS)
    log.addHandler(self._errors)
    try:
      self.request = _loop().run_until_complete(self._next_request())
    finally:
      log.removeHandler(self._errors)
    if self.request is not None:
      self.state = self.request.state

  async def _next_request(self) -> Request | None:
    """Returns the next request; None if the rollout ends."""
    waiting = asyncio.ensure_future(self._policy.requests.get())
    await asyncio.wait(
      {waiting, self._task},
      timeout=self._timeout,
      return_when=asyncio.FIRST_COMPLETED,
    )
    if waiting.done():
      return waiting.result()
    waiting.cancel()
    if self._task.done():
      return None
    raise TimeoutError(
      f'{self._where}turn {self._turn}: no response within {self._timeout:g} s'
    )


def load(name: str | None, options: Mapping[str, Any] | None) -> Any:
  """Returns this process's instance of an environment.

  Args:
    name: what `verifiers.load_environment` gets.
    options: its further arguments.

  Raises:
    ValueError: in one line, if it cannot be loaded or used.
  """
  return _load(name, json.dumps(dict(options or {}), sort_keys=True))


@functools.lru_cache(maxsize=4)
def _load(name: str, options: str) -> Any:
  import datasets
  import verifiers
  from verifiers import clients

  clients.Client.register(_Policy)
  datasets.disable_progress_bars()
  try:
    with _kept_signals():
      environment = verifiers.load_environment(name, **json.loads(options))
  # Code of others may raise anything.
  except Exception as error:
    line = messages.to_line(str(error))[:300]
    raise ValueError(f'env.environment={name}: {line}') from error
  if environment.requires_group_rollouts:
    raise ValueError(
      f'env.environment={name}: its rubric compares the rollouts of a group; '
      'must score each on its own'
    )
  # Its limit of an episode would count the time in which the policy samples.
  for part in (environment, *getattr(environment, 'envs', ())):
    part.timeout_seconds = None
  return environment


@contextlib.contextmanager
def _kept_signals() -> Iterator[None]:
  """Restores signal handlers, which environments of verifiers replace."""
  signals = (signal.SIGINT, signal.SIGTERM)
  kept = {number: signal.getsignal(number) for number in signals}
  try:
    yield
  finally:
    for number, handler in kept.items():
      if handler is not None:
        signal.signal(number, handler)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
  """Returns the event loop of this process's rollouts."""
  return asyncio.new_event_loop()


def _make_response(
  response: str, parsed: tool_calls.Response, turn: int
) -> Any:
  """Returns a response of the policy as a client of verifiers returns it."""
  from verifiers import types

  calls = [
    types.ToolCall(
      id=f'call-{turn}-{n + 1}',
      name=call.name,
      arguments=json.dumps(call.arguments),
    )
    for n, call in enumerate(parsed.calls)
  ]
  message = types.ResponseMessage(
    content=tool_calls.without_calls(response) if calls else response,
    tool_calls=calls or None,
    finish_reason='tool_calls' if calls else 'stop',
    is_truncated=False,
  )
  return types.Response(
    id=str(turn), created=0, model='policy', message=message
  )
