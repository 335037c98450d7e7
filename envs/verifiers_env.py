"""Environments of the package `verifiers`, with their rubrics as rewards.

The environment decides what a response means: its tools run, its messages
answer, its stop conditions end the episode, and its rubric scores it. Rows of
its datasets are the tasks. `verifiers_session` plays its rollouts.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import envs
from envs import (
  base,
  demonstrators,
  messages,
  tool_calls,
  tool_turns,
  verifiers_session,
)

CONTEXTS = ('conversation',)


def uses_tools(kwargs: Mapping[str, Any]) -> bool:
  """Returns whether the environment defines tools."""
  if list(check_installation(kwargs)) or not kwargs.get('environment'):
    return False  # Reported elsewhere.
  environment = verifiers_session.load(
    kwargs['environment'], kwargs.get('options')
  )
  return bool(environment.tool_defs)


def check_installation(kwargs: Mapping[str, Any]) -> Iterator[str]:
  """Yields a line if a package is missing."""
  del kwargs
  # Release 0.4 has no `legacy`, in which 0.3 has load_environment.
  for name in ('jsonschema', 'verifiers.legacy'):
    if not envs.can_import(name):
      yield (
        f'env.name=verifiers: cannot import {name}; run pip install -e '
        "'.[verifiers]'"
      )


class Tasks:
  """The rows of a dataset of an environment.

  Args:
    environment: the verifiers environment.
    split: `train` for its training data, any other for its evaluation data. An
      environment with one dataset uses it for both.

  Raises:
    ValueError: in one line, if the dataset is empty.
  """

  def __init__(self, environment: Any, split: str):
    training = split == 'train' and environment.dataset_source is not None
    self._rows = (
      environment.get_dataset() if training else environment.get_eval_dataset()
    )
    if not len(self._rows):
      raise ValueError(f'env.environment: no task of the split {split}')

  def __len__(self) -> int:
    return len(self._rows)

  def __getitem__(self, index: int) -> dict[str, Any]:
    return self._rows[index]

  def task_type(self, index: int) -> str:
    """Returns the row's `task` if it is a text, else 'all'."""
    task = self._rows[index].get('task')
    return task if task and isinstance(task, str) else 'all'


def tasks(split: str, **kwargs) -> Tasks:
  """Returns the tasks of a split; accepts and checks the kwargs of `Env`."""
  Env(**kwargs)
  return Tasks(
    verifiers_session.load(kwargs['environment'], kwargs.get('options')), split
  )


class Env:
  """Episodes of a verifiers environment.

  Args:
    environment: what `verifiers.load_environment` gets: the name of a module
      or an installed package with a function `load_environment`.
    options: arguments of `load_environment`.
    state_fields: fields of the rollout's state by which steps are grouped. ()
      groups by the last messages; then algorithm.anchor=similarity may help.
    success_reward: an episode succeeds if the rubric's reward is at least this.
    timeout_secs: limit of the environment's part of a turn, and of the rubric.
    max_result_chars: length limit of a message after the first turn. Of a
      longer one, the policy reads the length only.
    max_steps: step limit of an episode, besides the environment's own.
    demonstrator: play for a warm start, see `demonstrators`; '' for none.

  Raises:
    ValueError: in one line, if an argument is not valid or the environment
      cannot be loaded. A process loads it once.
  """

  def __init__(
    self,
    *,
    environment: str | None = None,
    options: Mapping[str, Any] | None = None,
    state_fields: Sequence[str] = (),
    success_reward: float = 1.0,
    timeout_secs: float = 20.0,
    max_result_chars: int = 8000,
    max_steps: int = 10,
    demonstrator: str = '',
  ):
    if not environment:
      raise ValueError(
        f'env.environment={environment}: must name a module or a package with '
        'load_environment'
      )
    self._name = environment
    self._environment = verifiers_session.load(environment, options)
    self._fields, self._success_reward = tuple(state_fields), success_reward
    self._timeout, self._max_chars = timeout_secs, max_result_chars
    self._max_steps, self._demonstrator = max_steps, demonstrator
    self._rollout: verifiers_session.Rollout | None = None
    # The conversation that the policy has seen, including its last response.
    self._seen: list[tuple] = []
    self._tools: tool_turns.Tools
    self._offered: list[dict[str, Any]] = []
    self._conversation, self._task = -1, ''

  def prepare(self, task: base.Task) -> None:
    """Does nothing; there is nothing to load."""

  def reset(self, task: base.Task) -> base.Observation:
    """Starts a rollout of the task's row."""
    self.close()
    self._seen, self._conversation = [], -1
    self._rollout = verifiers_session.Rollout(
      self._name,
      self._environment,
      Tasks(self._environment, task.split)[task.index],
      max_steps=self._max_steps,
      timeout_secs=self._timeout,
    )
    (last,) = _show(self._rollout.request.prompt[-1:], self._name)
    self._task = last.text
    return self._observe()

  def step(self, response: str) -> base.StepResult:
    """Passes a response to the environment."""
    parsed = tool_calls.parse(response)
    if len(parsed.calls) > tool_turns.MAX_CALLS:
      parsed = tool_calls.Response(parsed.text, problem='too many tool calls')
    valid = self._is_valid(parsed)
    prompt = self._rollout.request.prompt
    answer = self._rollout.respond(response, parsed)
    self._seen = [_key(message) for message in (*prompt, answer)]
    done = self._rollout.request is None
    reward, metrics = self._rollout.score() if done else (0.0, {})
    return base.StepResult(
      observation=None if done else self._observe(),
      reward=reward,
      valid=valid,
      action='; '.join(map(tool_calls.to_json, parsed.calls)) or parsed.text,
      success=done and reward >= self._success_reward,
      done=done,
      metrics=metrics,
      score=reward if done else None,
      final_anchor=self._anchor(()) if done and self._fields else None,
    )

  def close(self) -> None:
    """Ends the rollout, if one is running."""
    if self._rollout is not None:
      self._rollout.close()
      self._rollout = None

  def demonstrate(
    self, task: base.Task, *, noise: float, seed: int
  ) -> Iterator[tuple[base.Observation, str]]:
    """Yields (observation, response) of each step of `env.demonstrator`."""
    yield from demonstrators.play(
      self, task, self._demonstrator, noise=noise, seed=seed
    )

  def _is_valid(self, parsed: tool_calls.Response) -> bool:
    """Returns whether the calls are well-formed and fit the tools."""
    if parsed.problem or not (parsed.text or parsed.calls):
      return False
    return all(self._tools.misuse(call) is None for call in parsed.calls)

  def _observe(self) -> base.Observation:
    """Returns what is new in the rollout's request.

    A prompt that does not continue what the policy has seen, or that offers
    other tools, starts a conversation of its own.
    """
    request, size = self._rollout.request, len(self._seen)
    continues = (
      size > 0
      and request.tools == self._offered
      and [_key(message) for message in request.prompt[:size]] == self._seen
    )
    new = _show(request.prompt[size if continues else 0 :], self._name)
    if size:
      new = tuple(map(self._shorten, new))
    if not continues:
      self._conversation += 1
      self._offer(request.tools)
    text = '\n'.join(message.text for message in new)
    return base.Observation(
      prompt=text,
      short_prompt=text,
      anchor=self._anchor(new),
      text=text[: messages.MAX_TEXT_CHARS],
      task=self._task,
      messages=new,
      tools=() if continues else self._tools.texts,
      conversation=str(self._conversation or ''),
    )

  def _offer(self, tools: list[dict[str, Any]]) -> None:
    """Uses the descriptions of tools to check calls."""
    self._offered = tools
    try:
      self._tools = tool_turns.Tools(tools, None, max_chars=self._max_chars)
    except ValueError as error:
      raise ValueError(f'env.environment={self._name}: {error}') from error

  def _shorten(self, message: base.Message) -> base.Message:
    if len(message.text) <= self._max_chars:
      return message
    text = (
      f'Error: the message has {len(message.text):,} characters; at most '
      f'{self._max_chars:,}'
    )
    return dataclasses.replace(message, text=text)

  def _anchor(self, new: Sequence[base.Message]) -> str:
    """Returns the chosen fields of the state, or else the new messages."""
    text = '\n'.join(message.text for message in new)
    if self._fields:
      state = self._rollout.state
      for field in self._fields:
        if field not in state:
          raise ValueError(
            f'env.state_fields={self._fields}: the state has no {field}; has '
            f'{", ".join(sorted(state))}'
          )
      text = json.dumps({f: state[f] for f in self._fields}, default=str)
    return text[: messages.MAX_TEXT_CHARS]


def _show(prompt: Sequence[Any], name: str) -> tuple[base.Message, ...]:
  """Returns messages of verifiers as messages to the policy."""
  shown = []
  for message in prompt:
    parts = [_text(message.content, name)]
    for call in getattr(message, 'tool_calls', None) or ():
      arguments = json.loads(call.arguments)
      parts.append(tool_calls.write(tool_calls.Call(call.name, arguments)))
    call_id = getattr(message, 'tool_call_id', '')
    text = '\n'.join(filter(None, parts))
    shown.append(base.Message(message.role, text, call_id))
  return tuple(shown)


def _text(content: Any, name: str) -> str:
  """Returns the content of a message as text.

  Raises:
    ValueError: in one line, if it has other parts.
  """
  if content is None or isinstance(content, str):
    return content or ''
  parts = [dict(part) for part in content]
  for part in parts:
    if part.get('type') != 'text':
      raise ValueError(
        f'env.environment={name}: a message has a part of type '
        f'{part.get("type")!r:.80}; must be text'
      )
  return '\n'.join(part['text'] for part in parts)


def _key(message: Any) -> tuple:
  """Returns what two messages that are the same have in common."""
  calls = getattr(message, 'tool_calls', None) or ()
  return (
    message.role,
    message.content or '',
    [(call.id, call.name, call.arguments) for call in calls],
    getattr(message, 'tool_call_id', ''),
  )
