"""Forced prefixes: texts with which the responses of some members begin.

The first members of a group respond with the first text, the next ones with the
second text, and so on; the others respond freely. The tokens of a prefix are
the end of the prompt. They are therefore not sampled, have no log-probs, and
are not trained on, while the environment gets the whole response.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
  from gigpo_jax import tokenizer


@dataclasses.dataclass(frozen=True)
class Prefix:
  """A text with which responses begin.

  Attributes:
    text: the text.
    ids: its tokens, int32 [P].
  """

  text: str = ''
  ids: np.ndarray = dataclasses.field(
    default_factory=lambda: np.zeros(0, np.int32)
  )


NONE = Prefix()


@dataclasses.dataclass(frozen=True)
class ForcedPrefixes:
  """The prefixes of the members of a group.

  Attributes:
    prefixes: the prefixes.
    members: number of members with each of them.
  """

  prefixes: tuple[Prefix, ...] = ()
  members: int = 0

  @property
  def longest(self) -> int:
    """Largest number of tokens of a forced prefix."""
    used = self.prefixes if self.members else ()
    return max((len(prefix.ids) for prefix in used), default=0)

  def of(self, member: int) -> Prefix:
    """Returns the prefix of a member of a group."""
    index = member // self.members if self.members else len(self.prefixes)
    return self.prefixes[index] if index < len(self.prefixes) else NONE


def make(
  texts: Sequence[str], members: int, text: 'tokenizer.Tokenizer'
) -> ForcedPrefixes:
  """Returns forced prefixes, with special tokens of the tokenizer as such.

  Args:
    texts: the prefixes.
    members: number of members with each of them.
    text: the tokenizer.
  """
  prefixes = (Prefix(t, text.encode_rendered(t, {})) for t in texts)
  return ForcedPrefixes(tuple(prefixes), members)


def find(response: str, texts: Sequence[str]) -> int:
  """Returns the index of the longest text that a response begins with, or -1.

  White space before and after them does not count.
  """
  response, stripped = response.strip(), [text.strip() for text in texts]
  begun = [n for n, t in enumerate(stripped) if response.startswith(t)]
  return max(begun, key=lambda n: len(stripped[n]), default=-1)


def unrecognized(
  forced: ForcedPrefixes, text: 'tokenizer.Tokenizer'
) -> list[str]:
  """Returns the prefixes that `find` misses in responses with their tokens.

  Responses are decoded without special tokens.
  """
  decoded = text.decode([prefix.ids for prefix in forced.prefixes])
  texts = [prefix.text for prefix in forced.prefixes]
  return [t for d, t in zip(decoded, texts, strict=True) if find(d, [t]) < 0]
