"""Shared parts of all prompts: the history of turns and action parsing.

Each step has one user message, which is rebuilt from scratch. The model answers
with a thought and an action in tags (arXiv:2505.10978, appendix on prompts).
"""

import dataclasses
import re
from collections.abc import Sequence

# Chinese, Japanese and Korean characters: ideographs, kana, hangul.
_CJK = re.compile(
  '[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff'
  '\U00020000-\U0002fa1f]'
)

# Stop strings: closing tags that end a response in any environment.
ENDS = ('</action>', '</search>', '</answer>')


@dataclasses.dataclass(frozen=True)
class Turn:
  """A past step as the prompt shows it: observation text and action."""

  observation: str
  action: str


def recall(history: Sequence[Turn], step: int) -> str:
  """Returns the history part of the paper's prompt.

  Args:
    history: the last K turns, oldest first; at least one.
    step: number of turns taken so far in the episode.
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


def parse(
  response: str,
  *,
  require_think: bool,
  unparsed_characters: int,
  keep_case: bool = False,
) -> tuple[str, bool]:
  """Parses a response; returns (action, whether its format is valid).

  The action is the lower-cased text between the first `<action>` and the
  first `</action>` after it. The format is invalid if that pair is missing or
  out of order, if `<think>`...`</think>` is required and missing, or if the
  response contains CJK characters. The environment checks separately whether
  the action is admissible.

  Args:
    response: the model's response.
    require_think: whether the response must contain a thought.
    unparsed_characters: length of the response's end that is used as the action
      of an invalid response. The released code does this only if the tags are
      missing, and executes the tagged action of other invalid responses.
    keep_case: whether to keep the action's upper-case letters.
  """
  text = response if keep_case else response.lower()
  start = find(text, '<action>')
  end = find(text, '</action>', start + len('<action>')) if start >= 0 else -1
  if end < 0:
    return text[-unparsed_characters:], False
  valid = not _CJK.search(response)
  if require_think:
    think = find(text, '<think>')
    valid = valid and 0 <= think < find(text, '</think>', think)
  if not valid:
    return text[-unparsed_characters:], False
  return text[start + len('<action>') : end].strip(), True


def find(text: str, tag: str, start: int = 0) -> int:
  """Returns where a tag is, in upper or lower case; -1 if there is none.

  Args:
    text: the text.
    tag: the tag, such as '<action>'.
    start: where the search starts; at least 0.
  """
  match = re.compile(tag, re.ASCII | re.IGNORECASE).search(text, max(start, 0))
  return match.start() if match else -1
