"""Prompts for environments that have text observations and an action list.

The `paper` style has the structure of the GiGPO prompts: role, task, history,
observation, admissible actions, instruction (arXiv:2505.10978, appendix on
prompts). The `brief` style has the same facts in few tokens. It is for very
small policies, which learn the instruction instead of reading it.
"""

import collections
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from envs import base, turns

STYLES = ('paper', 'brief')

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


class Narrator:
  """Keeps the history of an episode and builds prompts from it.

  Args:
    role: sentence that says who and where the policy is; `paper` style only.
    rules: further text on the environment, '' for none; `paper` style only.
    history_length: K, how many past turns a prompt shows.
    prompt_style: one of STYLES.
    require_think: whether a response must contain a `<think>` part.
    brief_observations: whether the `brief` style shows the observations of past
      turns, or their actions only.
    act: last sentences of the instruction; `paper` style only.

  Attributes:
    step: number of turns taken so far in the episode.

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
    brief_observations: bool = False,
    act: str = _ACT,
  ):
    check_style(prompt_style)
    self._role, self._rules, self._act = role, rules, act
    self._style, self._require_think = prompt_style, require_think
    self._brief_observations = brief_observations
    self._history: collections.deque[turns.Turn] = collections.deque(
      maxlen=history_length
    )
    self._task = self._text = ''
    self.step = 0

  def begin(self, task: str) -> None:
    """Starts an episode.

    Args:
      task: sentence that states the task.
    """
    self._task, self.step = task, 0
    self._history.clear()

  def observe(
    self, text: str, *, anchor: str, actions: Sequence[str]
  ) -> base.Observation:
    """Returns the observation of a turn, with its prompts.

    Args:
      text: the environment's text.
      anchor: state by which steps are grouped.
      actions: admissible actions.
    """
    self._text = text
    build = self._brief if self._style == 'brief' else self._paper
    return base.Observation(
      prompt=build(tuple(self._history), actions),
      short_prompt=build((), actions),
      anchor=anchor,
      text=text,
      task=self._task,
      actions=tuple(actions),
    )

  def take(self, action: str) -> None:
    """Adds a turn to the history: the last observation and this action."""
    self._history.append(turns.Turn(self._text, action))
    self.step += 1

  def project(
    self, response: str, *, keep_case: bool = False
  ) -> tuple[str, bool]:
    """Parses a response; returns (action, valid). See `turns.project`."""
    return turns.project(
      response,
      require_think=self._require_think,
      unparsed_characters=UNPARSED_CHARACTERS,
      keep_case=keep_case,
    )

  def respond(self, thought: str, action: str) -> str:
    """Returns a response in the required format."""
    think = f'<think>{thought}</think>' if self._require_think else ''
    return f'{think}<action>{action}</action>'

  def _paper(
    self, history: Sequence[turns.Turn], actions: Sequence[str]
  ) -> str:
    lines = [self._role]
    if self._rules:
      lines.append(f'\n{self._rules}\n')
    lines.append(f'Your task is to: {self._task}')
    if self.step:
      lines.append(
        f'Before this step, you have already taken {self.step} step(s).'
      )
      if history:
        lines.append(turns.recall(history, self.step))
      lines.append(
        f'You are now at step {self.step + 1} and your current observation is:'
      )
    else:
      lines.append('Your current observation is:')
    quoted = ', '.join(f"'{action}'" for action in actions)
    think = _THINK if self._require_think else ''
    lines += [
      self._text,
      f'Your admissible actions of the current situation are: [{quoted}].',
      f'\nNow it is your turn to act. {think}{self._act}',
    ]
    return '\n'.join(lines)

  def _brief(
    self, history: Sequence[turns.Turn], actions: Sequence[str]
  ) -> str:
    lines = [f'Task: {self._task}']
    for turn in history:
      if self._brief_observations:
        lines.append(turn.observation)
      lines.append(f'> {turn.action}')
    return '\n'.join([*lines, self._text, 'Actions: ' + ', '.join(actions)])


def random_play(
  env: base.Env,
  task: base.Task,
  actions: Sequence[str],
  *,
  respond: Callable[[str, str], str],
  seed: int,
) -> Iterator[tuple[str, str]]:
  """Plays random actions; yields (prompt, response) of each step.

  As training data these teach the response format only.

  Args:
    env: the environment.
    task: the task to play.
    actions: actions to draw from, uniformly.
    respond: returns a response from a thought and an action.
    seed: seed of the draws.
  """
  rng = np.random.default_rng([seed, task.index])
  observation: base.Observation | None = env.reset(task)
  while observation is not None:
    action = actions[rng.integers(len(actions))]
    response = respond(f'I try {action}.', action)
    yield observation.prompt, response
    observation = env.step(response).observation


def check_style(prompt_style: str) -> None:
  """Raises ValueError if the prompt style is unknown."""
  if prompt_style not in STYLES:
    raise ValueError(
      f'env.prompt_style={prompt_style}: must be one of {", ".join(STYLES)}'
    )
