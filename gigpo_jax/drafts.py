"""Drafts: tokens that a completion may repeat from earlier responses.

A decoding pass with a draft of D tokens costs little more than one without, as
long as reading the parameters takes most of its time. It adds the tokens of the
completion that the draft has guessed, and one more. Samples do not depend on
drafts: each token is sampled from the policy, and a draft only decides how many
are sampled in one pass.

Here a draft continues the last two tokens as the newest response of the group
did that has them (n-gram or prompt-lookup drafts).

Shapes: **B** slots, **N** tokens of a text, **D** tokens of a draft, **L** = D
+ 1 tokens of a pass.
"""

import collections
from collections.abc import Hashable

import jax
import jax.numpy as jnp
import numpy as np

# Tokens that a draft continues.
_LAST = 2
# In place of the token before the first one; no text has it.
NO_TOKEN = -2
# Longest text in tokens, and in responses of maximum length.
_MAX_TOKENS, _MAX_RESPONSES = 2048, 16


def text_size(draft_tokens: int, max_completion_tokens: int) -> int:
  """Returns N, the number of tokens of a text; 0 without drafts."""
  longest = _MAX_RESPONSES * (max_completion_tokens + _LAST)
  return min(_MAX_TOKENS, longest) if draft_tokens else 0


class Texts:
  """The newest responses of each group.

  Args:
    size: N; 0: there are no drafts.
  """

  def __init__(self, size: int):
    self._size = size
    self._ids = collections.defaultdict(lambda: np.zeros(0, np.int32))

  def add(
    self, group: Hashable, prompt_ids: np.ndarray, completion_ids: np.ndarray
  ) -> None:
    """Adds a response; drops the oldest tokens of a group beyond N."""
    if self._size:
      parts = self._ids[group], prompt_ids[-_LAST:], completion_ids
      self._ids[group] = np.concatenate(parts)[-self._size :]

  def of(self, group: Hashable) -> np.ndarray:
    """Returns the text of a group, int32 [<= N]."""
    return self._ids[group]


def propose(
  texts_BN: jax.Array,
  previous_B: jax.Array,
  last_B: jax.Array,
  draft_tokens: int,
) -> jax.Array:
  """Returns a draft of the tokens after the last one, [B, D].

  Args:
    texts_BN: texts, newest tokens last; -1 is no token.
    previous_B: the token before the last one, or NO_TOKEN.
    last_B: the last token.
    draft_tokens: D.

  Returns:
    The tokens after the last occurrence of both tokens in the text; -1 where
    there is none.
  """
  b, n = texts_BN.shape
  if not draft_tokens:
    return jnp.zeros((b, 0), jnp.int32)
  is_match_BN = (texts_BN[:, :-1] == previous_B[:, None]) & (
    texts_BN[:, 1:] == last_B[:, None]
  )
  starts_N = jnp.arange(n - 1) + _LAST
  start_B = jnp.max(jnp.where(is_match_BN, starts_N, 0), axis=1)
  start_B = jnp.where(start_B > 0, start_B, n)
  indices_BD = start_B[:, None] + jnp.arange(draft_tokens)
  return jnp.take_along_axis(
    texts_BN, indices_BD, axis=1, mode='fill', fill_value=-1
  )


def accept(
  active_B: jax.Array,
  drafts_BD: jax.Array,
  ids_BL: jax.Array,
  ends_BL: jax.Array,
) -> jax.Array:
  """Returns which of the sampled tokens belong to the completion, [B, L].

  The first does. Another one does if the draft equals the tokens sampled before
  it, none of which ends the completion.

  Args:
    active_B: whether the completion is unfinished.
    drafts_BD: the draft.
    ids_BL: the tokens sampled after the last one, and after each of the draft.
    ends_BL: whether the completion ends with a token.
  """
  is_right_BD = (ids_BL[:, :-1] == drafts_BD) & ~ends_BL[:, :-1]
  first_B1 = active_B[:, None]
  is_kept_BL = jnp.concatenate([first_B1, is_right_BD], axis=1)
  return jnp.cumprod(is_kept_BL, axis=1) > 0
