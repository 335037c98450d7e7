"""What prompts of all environments share: past turns, actions in responses.

One user message a step, rebuilt each time; the model answers with a thought
and an action between tags (arXiv:2505.10978, appendix on prompts).
"""

import dataclasses
import re
from collections.abc import Sequence

# Chinese, Japanese and Korean: ideographs with extensions, kana, hangul.
_CJK = re.compile(
  '[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff'
  '\U00020000-\U0002fa1f]'
)

# What ends a response of any environment.
ENDS = ('</action>', '</search>', '</answer>')


@dataclasses.dataclass(frozen=True)
class Turn:
  """A past step as the prompt shows it: what was seen and what was done."""

  observation: str
  action: str


def recall(history: Sequence[Turn], step: int) -> str:
  """Returns the paper's sentence on the last turns.

  Args:
    history: the last K turns, oldest first; at least one.
    step: number of turns already taken.
  """
  first = step - len(history) + 1
  pairs = '\n'.join(
    f"[Observation {first + i}: '{turn.observation}', "
    f"Action {first + i}: '{turn.action}']"
    for i, turn in enumerate(history)
  )
  return (
    f'Here are the last {len(history)} observation(s) and the action(s) '
    f'you took:\n{pairs}'
  )


def project(
  response: str,
  *,
  require_think: bool,
  unparsed_characters: int,
  keep_case: bool = False,
) -> tuple[str, bool]:
  """Returns (action, valid): what the response asks for, and its form.

  The action is the lower-cased text between the first `<action>` and the
  first `</action>` after it. The form is invalid when that pair is missing or
  out of order, when `<think>`...`</think>` is missing (unless not required),
  or when the response holds CJK characters. Whether the action is admissible
  is another matter, which the environment answers.

  Args:
    response: the model's words.
    require_think: whether there must be a thought.
    unparsed_characters: how much of its end stands for the action of an
      invalid response, as in the released code.
    keep_case: whether the action is left as it was written.
  """
  text = response if keep_case else response.lower()
  start = _find(text, '<action>')
  end = _find(text, '</action>', start + len('<action>')) if start >= 0 else -1
  if end < 0:
    return text[-unparsed_characters:], False
  valid = not _CJK.search(response)
  if require_think:
    opened = _find(text, '<think>')
    valid = valid and 0 <= opened < _find(text, '</think>', opened)
  if not valid:
    return text[-unparsed_characters:], False
  return text[start + len('<action>') : end].strip(), True


def _find(text: str, tag: str, start: int = 0) -> int:
  found = re.compile(tag, re.ASCII | re.IGNORECASE).search(text, max(start, 0))
  return found.start() if found else -1
