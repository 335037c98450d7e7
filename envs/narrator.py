"""Prompts for environments that have text observations and an action list.

The `paper` style has the structure of the GiGPO prompts: role, task, history,
observation, admissible actions, instruction (arXiv:2505.10978, appendix on
prompts). The `brief` style has the same facts in few tokens. It is for very
small policies whose warm start has already taught them the format.
"""

import collections
import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from envs import base, turns

STYLES = ('paper', 'brief')

# history: every turn has a prompt of its own, with the last turns.
# conversation: the first message states the task, and each turn adds a message.
CONTEXTS = ('history', 'conversation')

# Length of the end of an invalid response that is used as its action.
UNPARSED_CHARACTERS = 30

_THINK = (
  'First reason step by step about the current situation. This reasoning '
  'must be enclosed within <think> </think> tags. '
)
_ACT = (
  'Choose one admissible action for the current step and present it within '
  '<action> </action> tags.'
)


class Transcript:
  """Keeps the history of an episode, builds prompts and parses responses.

  Args:
    build: returns the user message of a turn. It is called with keyword
      arguments: task, observation, actions, history (the turns to show, oldest
      first), step (number of turns taken so far), style and require_think. In a
      conversation, it is also called with continues: whether an earlier message
      states the task and the instruction; then the history is empty.
    history_length: K, how many past turns a prompt shows.
    prompt_style: one of STYLES.
    require_think: whether a response must contain a `<think>` part.
    context: one of CONTEXTS.
    unparsed_characters: length of the end of an invalid response that is used
      as its action.
    short_history_length: how many past turns the short prompt shows.

  Attributes:
    step: number of turns taken so far in the episode.

  Raises:
    ValueError: if the prompt style or the context is unknown.
  """

  def __init__(
    self,
    build: Callable[..., str],
    *,
    history_length: int = 2,
    prompt_style: str = 'paper',
    require_think: bool = True,
    context: str = 'history',
    unparsed_characters: int = UNPARSED_CHARACTERS,
    short_history_length: int = 0,
  ):
    check_style(prompt_style)
    if context not in CONTEXTS:
      raise ValueError(
        f'env.context={context}: must be one of {", ".join(CONTEXTS)}'
      )
    self._is_conversation = context == 'conversation'
    self._build = functools.partial(
      build, style=prompt_style, require_think=require_think
    )
    self._require_think = require_think
    self._unparsed_characters = unparsed_characters
    self._short_history_length = short_history_length
    self._history: collections.deque[turns.Turn] = collections.deque(
      maxlen=history_length
    )
    self._task = self._prompt_text = ''
    self.step = 0

  def reset(self, task: str) -> None:
    """Starts an episode.

    Args:
      task: sentence that states the task.
    """
    self._task, self.step = task, 0
    self._history.clear()

  def observe(
    self,
    text: str,
    *,
    anchor: str,
    actions: Sequence[str],
    shown: str | None = None,
  ) -> base.Observation:
    """Returns the observation of a turn, with its prompts.

    Args:
      text: the environment's text.
      anchor: state by which steps are grouped.
      actions: admissible actions.
      shown: the text in the form that prompts show; None for `text` itself.
    """
    self._prompt_text = text if shown is None else shown
    messages: tuple[base.Message, ...] = ()
    if self._is_conversation:
      prompt = short = self._prompt((), actions, continues=self.step > 0)
      messages = (base.Message('user', prompt),)
    else:
      history = tuple(self._history)
      recent = history[max(0, len(history) - self._short_history_length) :]
      prompt, short = (self._prompt(h, actions) for h in (history, recent))
    return base.Observation(
      prompt=prompt,
      short_prompt=short,
      anchor=anchor,
      text=text,
      task=self._task,
      actions=tuple(actions),
      messages=messages,
    )

  def _prompt(
    self, history: Sequence[turns.Turn], actions: Sequence[str], **kwargs: bool
  ) -> str:
    return self._build(
      task=self._task,
      observation=self._prompt_text,
      actions=actions,
      history=history,
      step=self.step,
      **kwargs,
    )

  def record_action(self, action: str) -> None:
    """Adds a turn to the history: the last observation and this action."""
    self.record_turn(turns.Turn(self._prompt_text, action))

  def record_turn(self, turn: turns.Turn | None) -> None:
    """Counts a turn; adds it to the history unless it is None."""
    if turn is not None:
      self._history.append(turn)
    self.step += 1

  def parse(
    self, response: str, *, keep_case: bool = False
  ) -> tuple[str, bool]:
    """Parses a response; returns (action, valid). See `turns.parse`."""
    return turns.parse(
      response,
      require_think=self._require_think,
      unparsed_characters=self._unparsed_characters,
      keep_case=keep_case,
    )

  def format_response(
    self, thought: str, action: str, *, tag: str = 'action'
  ) -> str:
    """Returns a response in the required format."""
    think = f'<think>{thought}</think>' if self._require_think else ''
    return f'{think}<{tag}>{action}</{tag}>'


class Narrator(Transcript):
  """A `Transcript` whose prompts suit any environment with an action list.

  Args:
    role: sentence that says who and where the policy is; `paper` style only.
    rules: further text on the environment, '' for none; `paper` style only.
    history_length: K, how many past turns a prompt shows.
    prompt_style: one of STYLES.
    require_think: whether a response must contain a `<think>` part.
    context: one of CONTEXTS.
    brief_observations: whether the `brief` style shows the observations of past
      turns, or their actions only.
    act: last sentences of the instruction; `paper` style only.

  Raises:
    ValueError: if the prompt style is unknown.
  """

  def __init__(
    self,
    role: str,
    *,
    rules: str = '',
    history_length: int = 2,
    prompt_style: str = 'paper',
    require_think: bool = True,
    context: str = 'history',
    brief_observations: bool = False,
    act: str = _ACT,
  ):
    self._role, self._rules, self._act = role, rules, act
    self._brief_observations = brief_observations
    super().__init__(
      self._build_prompt,
      history_length=history_length,
      prompt_style=prompt_style,
      require_think=require_think,
      context=context,
    )

  def _build_prompt(self, *, style: str, **turn) -> str:
    return self._brief(**turn) if style == 'brief' else self._paper(**turn)

  def _paper(
    self,
    *,
    task: str,
    observation: str,
    actions: Sequence[str],
    history: Sequence[turns.Turn],
    step: int,
    require_think: bool,
    continues: bool = False,
  ) -> str:
    lines = [] if continues else [self._role]
    if self._rules and not continues:
      lines.append(f'\n{self._rules}\n')
    if not continues:
      lines.append(f'Your task is to: {task}')
    if step and not continues:
      lines.append(f'Before this step, you have already taken {step} step(s).')
      if history:
        lines.append(turns.recall(history, step))
      lines.append(
        f'You are now at step {step + 1} and your current observation is:'
      )
    else:
      lines.append('Your current observation is:')
    quoted = ', '.join(f"'{action}'" for action in actions)
    think = _THINK if require_think else ''
    lines += [
      observation,
      f'Your admissible actions of the current situation are: [{quoted}].',
    ]
    if not continues:
      lines.append(f'\nNow it is your turn to act. {think}{self._act}')
    return '\n'.join(lines)

  def _brief(
    self,
    *,
    task: str,
    observation: str,
    actions: Sequence[str],
    history: Sequence[turns.Turn],
    continues: bool = False,
    **unused,
  ) -> str:
    del unused
    lines = [] if continues else [f'Task: {task}']
    for turn in history:
      if self._brief_observations:
        lines.append(turn.observation)
      lines.append(f'> {turn.action}')
    return '\n'.join([*lines, observation, 'Actions: ' + ', '.join(actions)])


def random_play(
  env: base.Env,
  task: base.Task,
  actions: Sequence[str] | Callable[[np.random.Generator], str],
  *,
  respond: Callable[[str, str], str],
  seed: int,
  expert: Callable[[], str] | None = None,
  noise: float = 1.0,
) -> Iterator[tuple[base.Observation, str]]:
  """Plays random or an expert's actions; yields observations and responses.

  As training data, random actions teach the response format only.

  Args:
    env: the environment.
    task: the task to play.
    actions: actions to draw from, uniformly; or a function that draws one.
    respond: returns a response from a thought and an action.
    seed: seed of the draws.
    expert: returns the best action in the environment's state; None: all
      actions are random.
    noise: probability of a random action per step, if there is an expert.
  """
  rng = np.random.default_rng([seed, task.index])
  observation: base.Observation | None = env.reset(task)
  while observation is not None:
    if expert and rng.random() >= noise:
      action = expert()
    elif callable(actions):
      action = actions(rng)
    else:
      action = actions[rng.integers(len(actions))]
    response = respond(f'I try {action}.', action)
    yield observation, response
    observation = env.step(response).observation


def check_style(prompt_style: str) -> None:
  """Raises ValueError if the prompt style is unknown."""
  if prompt_style not in STYLES:
    raise ValueError(
      f'env.prompt_style={prompt_style}: must be one of {", ".join(STYLES)}'
    )
