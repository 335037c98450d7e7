"""WebShop prompts, and the parsing of actions from responses.

The `paper` style has the structure of the GiGPO prompts: the task, the page as
quoted strings without the instruction, and the admissible actions
(arXiv:2505.10978, appendix on prompts). The `brief` style is for very small
policies, which learn the instruction instead of reading it. It marks clickable
texts by brackets on the page, so it needs no list of actions, and shows only
the actions of past turns.
"""

from collections.abc import Sequence

from envs import turns
from envs.webshop import engine, pages

# As in the released code: length of the end of an invalid response that is used
# as its action, and length above which a prompt is shown without history.
UNPARSED_CHARACTERS = 20
MAX_CHARACTERS = 13_000

SEARCH = 'search[<your query>]'
# Words of a title on result pages in the brief style; item pages show all.
_BRIEF_TITLE_WORDS = 10

_PAPER_THINK = (
  'First reason step by step about the current situation, and think carefully '
  'which admissible action best advances the shopping goal. This reasoning '
  'must be enclosed within <think> </think> tags. '
)
_PAPER_ACTION = (
  'Choose one admissible action for the current step and present it within '
  '<action> </action> tags.'
)


def actions(has_search_bar: bool, clickables: Sequence[str]) -> tuple[str, ...]:
  """Returns the admissible actions of a page.

  # Differs from the paper: its code also lists `click[search]`, which the shop
  ignores.

  Args:
    has_search_bar: whether the page is the search page.
    clickables: texts that can be clicked, in lower case.
  """
  search = (SEARCH,) if has_search_bar else ()
  return search + tuple(f'click[{c}]' for c in clickables if c != 'search')


def admits(admissible: Sequence[str], action: str) -> bool:
  """Returns whether the shop reads an action as an admissible one.

  Args:
    admissible: admissible actions from `actions`.
    action: the action to check; any search is admissible on the search page.
  """
  verb, argument = engine.parse_action(action)
  if verb == 'search' and argument:
    return SEARCH in admissible
  return f'{verb}[{argument}]' in admissible


def describe(
  parts: Sequence[str], clickables: Sequence[str], *, style: str = 'paper'
) -> str:
  """Returns the observation text of a page.

  Args:
    parts: strings of the page, without the instruction.
    clickables: texts that can be clicked, in lower case.
    style: one of `narrator.STYLES`.
  """
  if style == 'paper':
    return pages.SEPARATOR.join(f"'{part}'" for part in parts)
  return lay_out(parts, clickables, title_words=_BRIEF_TITLE_WORDS)


def lay_out(
  parts: Sequence[str],
  clickables: Sequence[str],
  *,
  title_words: int | None = None,
) -> str:
  """Returns a page as lines of text, with clickable texts in brackets.

  Args:
    parts: strings of the page, without the instruction.
    clickables: texts that can be clicked, in lower case.
    title_words: maximum number of words of a title on result pages; None for
      all.
  """
  view = pages.read(parts, clickables)
  buttons = ' '.join(map(_bracket, view.buttons))
  if view.page_type == pages.INDEX:
    return SEARCH
  if view.page_type == pages.RESULTS:
    # The total number of results is omitted: it is nearly always 50.
    lines = [f'page {view.page_number} {buttons}']
    for asin, title, price in view.products:
      title = ' '.join(title.split()[:title_words])
      lines.append(f'{_bracket(asin)} {title} {price}')
  elif view.page_type == pages.ITEM:
    lines = [buttons]
    for name, values in view.options.items():
      lines.append(f'{name}: {" ".join(map(_bracket, values))}')
    lines.append(f'{view.title} {view.price}')
    lines.append(' '.join(map(_bracket, view.actions)))
  else:
    lines = [buttons, *view.lines]
  return '\n'.join(lines)


def _bracket(part: str) -> str:
  return f'[{part.lower()}]'


def _paper(
  task: str,
  observation: str,
  admissible: Sequence[str],
  history: Sequence[turns.Turn],
  step: int,
  require_think: bool,
  continues: bool,
) -> str:
  lines = [
    'You are an expert autonomous agent operating in the WebShop e-commerce '
    'environment.',
    f'Your task is to: {task}.',
  ]
  if continues:
    lines = []
  if step == 0 or not history:
    lines.append(f'Your current observation is: {observation}.')
  else:
    lines.append(
      f'Before this step, you have already taken {step} step(s). '
      f'{turns.recall(history, step)}'
    )
    lines.append(
      f'You are now at step {step + 1} and your current observation is: '
      f'{observation}.'
    )
  quoted = '\n'.join(f"'{action}'," for action in admissible)
  lines.append(
    f'Your admissible actions of the current situation are:\n[\n{quoted}\n].'
  )
  if continues:
    return '\n'.join(lines)
  think = _PAPER_THINK if require_think else ''
  lines.append(f'\nNow it is your turn to act. {think}{_PAPER_ACTION}')
  return '\n'.join(lines)


def _brief(
  task: str,
  observation: str,
  history: Sequence[turns.Turn],
  continues: bool,
) -> str:
  if continues:
    return observation
  past_actions = [f'> {turn.action}' for turn in history]
  return '\n'.join([f'Task: {task}', *past_actions, observation])


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
    task: the instruction.
    observation: the page, from `describe`.
    actions: admissible actions, from the function `actions`.
    history: the last K turns, oldest first; may be empty. It is omitted if the
      message would be longer than MAX_CHARACTERS.
    step: number of turns taken so far in the episode.
    style: one of `narrator.STYLES`.
    require_think: whether the instruction asks for a `<think>` part.
    continues: whether an earlier message of a conversation states the task and
      the instruction.
  """

  def text(history: Sequence[turns.Turn]) -> str:
    if style == 'brief':
      return _brief(task, observation, history, continues)
    return _paper(
      task, observation, actions, history, step, require_think, continues
    )

  full = text(history)
  return full if len(full) <= MAX_CHARACTERS else text(())
