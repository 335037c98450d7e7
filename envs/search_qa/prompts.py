"""Search QA prompts, and the parsing of searches and answers from responses.

The styles are those of `envs.narrator`.
"""

import bisect
import re
from collections.abc import Sequence

from envs import turns

_TAG = re.compile(r'<(/?)(search|answer)>', re.ASCII | re.IGNORECASE)

ACTIONS = ('<search>your query</search>', '<answer>your answer</answer>')
_THINK = (
  'First reason about what is known and what is missing. This reasoning must '
  'be enclosed within <think> </think> tags. '
)
_ACT = (
  'Then do one of two things, not both:\n'
  '- if something is missing, search for it: <search> your query </search>\n'
  '- if you know the answer, give it in as few words as possible: '
  '<answer> your answer </answer>'
)


def parse(
  response: str, *, require_think: bool = True
) -> tuple[str, str, bool]:
  """Parses a response; returns ('search' or 'answer', words, valid).

  As in the paper's code, the action is the first search or, if there is none,
  the first answer. A response is valid if it has exactly one opening tag and,
  if required, a thought. Without any action, ('', '', False) is returned.

  # Differs from the paper: its code requires no thought, and it also reads
  tags inside a thought.
  """
  rest, has_thought = _without_thought(response)
  actions, num_opening = _tagged(rest)
  actions = sorted((a for a in actions if a[1]), key=lambda a: a[0] != 'search')
  if not actions:
    return '', '', False
  is_valid = num_opening == 1 and (has_thought or not require_think)
  return *actions[0], is_valid


def _without_thought(response: str) -> tuple[str, bool]:
  """Returns a response without its first thought, and whether it has one."""
  start = turns.find(response, '<think>')
  end = turns.find(response, '</think>', start) if start >= 0 else -1
  if end < 0:
    return response, False
  return response[:start] + response[end + len('</think>') :], True


def _tagged(text: str) -> tuple[list[tuple[str, str]], int]:
  """Returns (tag, words) of all actions, and the number of opening tags.

  An action ends at the first closing tag of its name. The time is linear in
  the length, also for opening tags without an end.
  """
  tags = [(m[2].lower(), bool(m[1]), m.span()) for m in _TAG.finditer(text)]
  closing = {
    name: [span for other, closes, span in tags if closes and other == name]
    for name in ('search', 'answer')
  }
  actions, position = [], 0
  for name, closes, (start, end) in tags:
    if closes or start < position:
      continue
    later = bisect.bisect_left(closing[name], (end, 0))
    if later < len(closing[name]):
      until, position = closing[name][later]
      actions.append((name, text[end:until].strip()))
  return actions, sum(not closes for _, closes, _ in tags)


def answer_start(*, require_think: bool) -> str:
  """Returns the start of a valid response up to the answer."""
  thought = '<think>Now I can answer.</think>' if require_think else ''
  return f'{thought}<answer>'


def build(
  *,
  task: str,
  history: Sequence[turns.Turn],
  step: int,
  max_steps: int,
  style: str,
  require_think: bool,
  **other_parts,
) -> str:
  """Returns the user message of a turn.

  Args:
    task: the question.
    history: the last K searches and their passages, oldest first; may be empty.
    step: number of turns taken so far in the episode.
    max_steps: step limit of an episode.
    style: one of `narrator.STYLES`.
    require_think: whether the instruction asks for a `<think>` part.
    other_parts: observation and actions. The passages of the last search are in
      the history, and the instruction names the actions.
  """
  del other_parts
  if style == 'brief':
    return _brief(task, history)
  return _paper(task, history, step, max_steps, require_think)


def _paper(
  task: str,
  history: Sequence[turns.Turn],
  step: int,
  max_steps: int,
  require_think: bool,
) -> str:
  lines = [
    'You are an expert agent that answers questions by searching for '
    'information step by step.',
    f'Your question is: {task}',
  ]
  if step:
    lines.append(
      f'Before this step, you have already taken {step} of {max_steps} step(s).'
    )
  if history:
    lines.append(
      'Here are your last searches, each with the information found:'
    )
  for turn in history:
    lines.append(f'<search>{turn.action}</search>')
    lines.append(f'<information>\n{turn.observation}\n</information>')
  think = _THINK if require_think else ''
  lines.append(f'\nNow it is your turn to act. {think}{_ACT}')
  return '\n'.join(lines)


def _brief(task: str, history: Sequence[turns.Turn]) -> str:
  lines = [f'Question: {task}']
  for turn in history:
    lines += [f'> {turn.action}', turn.observation]
  return '\n'.join(lines)
