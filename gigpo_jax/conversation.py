"""Prompts of growing conversations, as token ids.

The prompt of a turn is the prompt and the completion of the turn before, and
the new messages in the checkpoint's chat template. The tokens of earlier turns
stay as they were sampled: the template renders the conversation with a mark in
place of each response, and only the text after the last mark is tokenized. A
prompt is a function of the turns so far, so paused episodes need no state.
"""

import bisect
import dataclasses
import itertools
import re
from collections.abc import Sequence

import numpy as np

from envs import base
from gigpo_jax import tokenizer, trajectory

# Thinking in earlier turns. keep: stays as sampled. template: is dropped where
# the chat template drops it, and the other sampled tokens stay.
THINKING = ('keep', 'template')

_OPEN, _CLOSE = '<think>', '</think>'


# A longer prompt fails its episode before it is tokenized. No text has so many
# characters per token; the minimum leaves room to shorten a prompt.
_CHARS_PER_TOKEN = 64
_MIN_CHARS = 65_536


@dataclasses.dataclass(frozen=True)
class Turn:
  """An earlier turn, and the messages that followed it.

  Attributes:
    prompt_ids: int32 [P]; its prompt, without a forced prefix.
    completion_ids: int32 [C]; the forced prefix and the sampled tokens, which
      may end with the token that ends a turn.
    response: their text.
    messages: the environment's messages after the response.
  """

  prompt_ids: np.ndarray
  completion_ids: np.ndarray
  response: str
  messages: tuple[base.Message, ...]


def split_turns(
  first: base.Observation, steps: Sequence[trajectory.Step]
) -> tuple[base.Observation, list[Turn]]:
  """Returns the start and the earlier turns of the current conversation.

  It is the conversation of the latest observation. An episode may have several
  of them, whose turns alternate.

  Args:
    first: the first observation of the episode.
    steps: its turns so far; the last one has an observation.

  Returns:
    The first observation of the conversation, and its turns.
  """
  observations = [first, *(step.result.observation for step in steps)]
  name = observations[-1].conversation
  own = [n for n, o in enumerate(observations) if o.conversation == name]
  turns = []
  for n, after in itertools.pairwise(own):
    step = steps[n]
    start = len(step.prompt_ids) - step.forced_tokens
    prompt, prefix = step.prompt_ids[:start], step.prompt_ids[start:]
    completion = np.concatenate([prefix, step.completion_ids])
    messages = observations[after].messages
    turns.append(Turn(prompt, completion, step.response, messages))
  return observations[own[0]], turns


@dataclasses.dataclass(frozen=True)
class Conversations:
  """Makes the prompts of conversations.

  Attributes:
    text: the tokenizer with the chat template.
    max_tokens: limit of a prompt.
    overflow: treatment of longer prompts, one of
      `tokenizer.OVERFLOW_POLICIES` other than truncate_left.
    thinking: one of THINKING.
  """

  text: tokenizer.Tokenizer
  max_tokens: int
  overflow: str
  thinking: str = 'keep'

  def prompt(
    self, first: base.Observation, turns: Sequence[Turn]
  ) -> tuple[np.ndarray | None, bool]:
    """Returns the ids of a prompt, int32 [P], and whether turns were dropped.

    With overflow='drop_history', the oldest turns are dropped until half of the
    limit is free; the first messages stay. With thinking='keep', the next
    prompts grow from there. The ids are None if the prompt is too long and
    nothing else can be dropped, and with overflow='end'.

    Args:
      first: the first observation of the episode.
      turns: all earlier turns.

    Raises:
      tokenizer.TemplateError: in one line, if the template cannot render the
        messages.
      ValueError: if a prompt is too long with overflow='error'.
    """
    if turns and self.thinking == 'keep':
      *_, piece = self._pieces(first, turns)
      last = turns[-1]
      ids = self._join(last.prompt_ids, last.completion_ids, piece)
    else:
      ids = self._compose(first, turns)
    if len(ids) <= self.max_tokens:
      return ids, False
    if self.overflow == 'error':
      raise ValueError(
        f'rollout.max_prompt_tokens={self.max_tokens}: a conversation has '
        f'{len(ids)} tokens; raise the limit or set rollout.prompt_overflow to '
        'end or drop_history'
      )
    if self.overflow == 'drop_history':
      for start in range(1, len(turns)):
        ids = self._compose(first, turns[start:])
        if len(ids) <= self.max_tokens // 2:
          break
      if len(ids) <= self.max_tokens:
        return ids, True
    return None, True

  def check(self, *, has_tools: bool) -> None:
    """Checks that the chat template can render conversations.

    Args:
      has_tools: whether the environment has tools.

    Raises:
      tokenizer.TemplateError: in one line, if it cannot.
    """
    tools = ('{"name": "probe_tool", "description": "-"}',) if has_tools else ()
    role = 'tool' if has_tools else 'user'
    probes = [base.Message('user', 'probe 1'), base.Message(role, 'probe 2')]
    first = base.Observation('', '', '', '', messages=(probes[0],), tools=tools)
    empty = np.zeros(0, np.int32)
    turns = [Turn(empty, empty, '', (probes[1],))]
    rendered = self.text.decode([self._compose(first, turns)])[0]
    wanted = [probe.text for probe in probes] + ['probe_tool'] * has_tools
    missing = [text for text in wanted if text not in rendered]
    if missing:
      part = 'tools' if has_tools else 'messages'
      raise tokenizer.TemplateError(
        f'the chat template omits {part}; use another checkpoint, or an '
        f'environment without {part if has_tools else "conversations"}'
      )

  def _compose(
    self, first: base.Observation, turns: Sequence[Turn]
  ) -> np.ndarray:
    """Returns the prompt as the template renders it, with sampled tokens."""
    start, *pieces = self._pieces(first, turns)
    ids = self.text.encode_rendered(start.text, start.placeholders)
    for turn, piece in zip(turns, pieces, strict=True):
      completion = turn.completion_ids
      if piece.drops_thinking:
        completion = completion[self._count_thinking(completion) :]
      ids = self._join(ids, completion, piece)
    return ids

  def _join(
    self, ids: np.ndarray, completion: np.ndarray, piece: '_Piece'
  ) -> np.ndarray:
    """Returns the concatenation, with one token that ends the response."""
    new = self.text.encode_rendered(piece.text, piece.placeholders)
    ends = len(completion) and len(new) and completion[-1] == new[0]
    if ends and new[0] in self.text.stop_ids:
      new = new[1:]
    return np.concatenate([ids, completion, new])

  def _pieces(
    self, first: base.Observation, turns: Sequence[Turn]
  ) -> list['_Piece']:
    """Returns the rendered conversation before and after each response."""
    messages = [_fields(message) for message in first.messages]
    texts = [m.text for turn in turns for m in turn.messages]
    unique = tokenizer.unique_text([*texts, *(m['content'] for m in messages)])
    marks = []
    for n, turn in enumerate(turns):
      marks.append(_Mark.of(f'{unique}{n:06}', turn.response, self.thinking))
      messages.append({'role': 'assistant', 'content': marks[-1].content})
      messages += map(_fields, turn.messages)
    text, placeholders = self.text.render_messages(messages, first.tools)
    pieces, position, drops_thinking = [], 0, False
    for mark in marks:
      match = mark.pattern.search(text, position)
      if not match:
        raise tokenizer.TemplateError('the chat template omits a response')
      piece = text[position : match.start()]
      pieces.append(_Piece(piece, placeholders, drops_thinking))
      drops_thinking = bool(mark.thought) and mark.thought not in match[0]
      position = match.end()
    return [*pieces, _Piece(text[position:], placeholders, drops_thinking)]

  def _count_thinking(self, completion: np.ndarray) -> int:
    """Returns the number of tokens up to the end of the thinking.

    0 if the end of the thinking, with the line breaks after it, is not the end
    of a token.
    """

    def decode(end: int) -> str:
      return self.text.decode([completion[:end]])[0]

    size = bisect.bisect_left(
      range(len(completion)), True, key=lambda n: _CLOSE in decode(n + 1)
    )
    while size < len(completion) and (
      completion[size] not in self.text.stop_ids
      and not decode(size + 1).rpartition(_CLOSE)[2].strip('\n')
    ):
      size += 1
    ends = decode(size).rpartition(_CLOSE)
    return size if ends[1] and not ends[2].strip('\n') else 0


@dataclasses.dataclass(frozen=True)
class _Piece:
  """Rendered text between two responses.

  Attributes:
    text: the text.
    placeholders: see `Tokenizer.render_messages`.
    drops_thinking: whether the template drops the thinking of the response
      before it.
  """

  text: str
  placeholders: dict[str, str]
  drops_thinking: bool


@dataclasses.dataclass(frozen=True)
class _Mark:
  """What stands for a response while the template renders.

  Attributes:
    content: content of the message.
    thought: what stands for its thinking; '' if the response has none.
    pattern: matches the mark in the rendered text.
  """

  content: str
  thought: str
  pattern: re.Pattern

  @classmethod
  def of(cls, name: str, response: str, thinking: str) -> '_Mark':
    before, close, _ = response.partition(_CLOSE)
    if thinking == 'keep' or not close:
      return cls(name, '', re.compile(name))
    thought = f'{name}thought'
    # The generation prompt of some templates opens the thinking.
    start, opening = '', ''
    if _OPEN in before:
      start, opening = f'{_OPEN}\n', rf'(?:{_OPEN}\s*)?'
    return cls(
      f'{start}{thought}\n{_CLOSE}\n\n{name}answer',
      thought,
      re.compile(rf'(?:{opening}{thought}\s*{_CLOSE}\s*)?{name}answer'),
    )


def prompt_error(
  observation: base.Observation,
  max_prompt_tokens: int,
  first: base.Observation | None = None,
) -> str:
  """Returns why an observation cannot be tokenized; '' if it can.

  Args:
    observation: the observation.
    max_prompt_tokens: limit of a prompt.
    first: the first observation of its episode.
  """
  if first and bool(first.messages) != bool(observation.messages):
    return 'only some turns have messages; must be all turns, or none'
  limit = max(_MIN_CHARS, _CHARS_PER_TOKEN * max_prompt_tokens)
  messages = sum(len(message.text) for message in observation.messages)
  longest = max(
    len(observation.prompt),
    len(observation.short_prompt),
    messages + sum(map(len, observation.tools)),
  )
  if longest <= limit:
    return ''
  return (
    f'a prompt of {longest:,} characters; rollout.max_prompt_tokens='
    f'{max_prompt_tokens} allows at most {limit:,}'
  )


def _fields(message: base.Message) -> dict[str, str]:
  """Returns the fields of a message for a chat template."""
  fields = {'role': message.role, 'content': message.text}
  return fields | ({'tool_call_id': message.call_id} if message.call_id else {})
