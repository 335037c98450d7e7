"""Prompts of environments that tell in words what is seen and can be done.

`paper` has the structure of the GiGPO experiments' (role, task, history,
observation, admissible actions, instruction; arXiv:2505.10978, appendix on
prompts); `brief` holds the same facts in few tokens, for policies so small
that they learn the instruction rather than read it.
"""

import collections
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from envs import base, turns

STYLES = ('paper', 'brief')

# How much of an invalid response stands for its action.
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
  """Remembers the turns of an episode, and writes prompts with the last ones.

  Args:
    role: who the policy is and where, a sentence; of the paper style.
    rules: what else it has to know, of the paper style; '' for nothing.
    history_length: K, how many past turns a prompt shows.
    prompt_style: one of STYLES.
    require_think: whether a response must hold a `<think>` part.
    brief_observations: whether the brief style shows what was seen in past
      turns, or only what was done.
    act: the instruction's last sentences, of the paper style.

  Attributes:
    step: number of turns taken.

  Raises:
    ValueError: if there is no such style.
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
    """Begins an episode, whose task a sentence says."""
    self._task, self.step = task, 0
    self._history.clear()

  def observe(
    self, text: str, *, anchor: str, actions: Sequence[str]
  ) -> base.Observation:
    """Returns what the policy sees, given what there is to see and to do."""
    self._text = text
    tell = self._brief if self._style == 'brief' else self._paper
    return base.Observation(
      prompt=tell(tuple(self._history), actions),
      short_prompt=tell((), actions),
      anchor=anchor,
      text=text,
      task=self._task,
      actions=tuple(actions),
    )

  def take(self, action: str) -> None:
    """Remembers what was done about the last observation."""
    self._history.append(turns.Turn(self._text, action))
    self.step += 1

  def project(
    self, response: str, *, keep_case: bool = False
  ) -> tuple[str, bool]:
    """Returns (action, valid); see `turns.project`."""
    return turns.project(
      response,
      require_think=self._require_think,
      unparsed_characters=UNPARSED_CHARACTERS,
      keep_case=keep_case,
    )

  def respond(self, thought: str, action: str) -> str:
    """Returns a response of the required form."""
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
  """Yields (prompt, response) of random play: of an example only the form.

  Args:
    env: what is played.
    task: the episode.
    actions: of which one is drawn at each step.
    respond: makes a response of a thought and an action.
    seed: of the draws.
  """
  rng = np.random.default_rng([seed, task.index])
  observation: base.Observation | None = env.reset(task)
  while observation is not None:
    action = actions[rng.integers(len(actions))]
    response = respond(f'I try {action}.', action)
    yield observation.prompt, response
    observation = env.step(response).observation


def check_style(prompt_style: str) -> None:
  """Raises ValueError if there is no such style."""
  if prompt_style not in STYLES:
    raise ValueError(
      f'env.prompt_style={prompt_style}: must be one of {", ".join(STYLES)}'
    )
