"""ALFWorld prompts, and the parsing of actions from responses.

The `paper` style has the structure of the GiGPO prompts: task, history,
observation, admissible actions, instruction (arXiv:2505.10978, appendix on
prompts). The `brief` style has the same facts in a third of the tokens. It is
for very small policies, which learn the instruction instead of reading it.
"""

from collections.abc import Sequence

from envs import turns

# As in the released code, the end of an invalid response is used as its action.
# The engine answers it with "Nothing happens."
UNPARSED_CHARACTERS = 30

_TASK_MARK = 'Your task is to: '

_PAPER_THINK = (
  'First reason step by step about the current situation. This reasoning '
  'must be enclosed within <think> </think> tags. '
)
_PAPER_ACTION = (
  'Choose one admissible action for the current step and present it within '
  '<action> </action> tags.'
)


def split_task(initial_feedback: str) -> tuple[str, str]:
  """Splits an engine's first text into (observation, task sentence).

  Raises:
    ValueError: if the text states no task.
  """
  observation, mark, task = initial_feedback.partition(_TASK_MARK)
  if not mark:
    raise ValueError(
      f'no "{_TASK_MARK}" in the first text of the game, '
      f'{initial_feedback[:80]!r}'
    )
  _, _, observation = observation.rpartition('=-')
  return observation.strip(), task.strip()


def listed(admissible: Sequence[str]) -> tuple[str, ...]:
  """Returns the commands that a prompt lists: all except `help`."""
  return tuple(command for command in admissible if command != 'help')


def _paper(
  task: str,
  observation: str,
  actions: Sequence[str],
  history: Sequence[turns.Turn],
  step: int,
  require_think: bool,
  continues: bool,
) -> str:
  lines = [
    'You are an expert agent operating in the ALFRED embodied environment.'
  ]
  if continues:
    lines = [f'Your current observation is: {observation}']
  elif step == 0:
    lines.append(f'Your current observation is: {observation}')
    lines.append(f'Your task is to: {task}')
  else:
    lines.append(f'Your task is to: {task}')
    lines.append(f'Before this step, you have already taken {step} step(s).')
    if history:
      lines.append(turns.recall(history, step))
    lines.append(
      f'You are now at step {step + 1} and your current observation is: '
      f'{observation}'
    )
  quoted = ',\n '.join(f"'{action}'" for action in actions)
  lines.append(
    f'Your admissible actions of the current situation are: [{quoted}].'
  )
  if continues:
    return '\n'.join(lines)
  think = _PAPER_THINK if require_think else ''
  lines.append(f'\nNow it is your turn to act. {think}{_PAPER_ACTION}')
  return '\n'.join(lines)


def _brief(
  task: str,
  observation: str,
  actions: Sequence[str],
  history: Sequence[turns.Turn],
  continues: bool,
) -> str:
  lines = [] if continues else [f'Task: {task}']
  for turn in history:
    lines.append(turn.observation)
    lines.append(f'> {turn.action}')
  lines.append(observation)
  lines.append('Actions: ' + ', '.join(actions))
  return '\n'.join(lines)


def build(
  *,
  task: str,
  observation: str,
  actions: Sequence[str],
  history: Sequence[turns.Turn],
  step: int,
  style: str = 'paper',
  require_think: bool = True,
  continues: bool = False,
) -> str:
  """Returns the user message of a turn.

  Args:
    task: the goal sentence.
    observation: the engine's latest text.
    actions: the commands to list, from `listed`.
    history: the last K turns, oldest first; may be empty.
    step: number of turns taken so far in the episode.
    style: one of `narrator.STYLES`.
    require_think: whether the instruction asks for a `<think>` part.
    continues: whether an earlier message of a conversation states the task and
      the instruction.
  """
  if style == 'brief':
    return _brief(task, observation, actions, history, continues)
  return _paper(
    task, observation, actions, history, step, require_think, continues
  )
