"""Which tokens each row of the key/value cache holds, and which row is next.

A request reuses the longest prefix of its prompt that any row of its agent
holds, and only the rest is prefilled. After a request of a conversation, its
row keeps the keys and values for the next turn. If another request needs the
row, these are moved to a parked row, which is not decoded, or dropped. Plain
NumPy on the host: the arrays on the devices belong to `sampler_cache`, which
executes the moves.

Which positions are reused decides whether samples depend on reuse. Keys and
values are equal bit for bit if the same program prefilled them. A decoding step
computes other products, which differ in the last bit, so REUSE has a form
without the positions that decoding wrote. A row with a state, which cannot be
cut back, is reused as a whole or not at all.

Shapes: **N** rows, **S** positions of a row.
"""

import dataclasses
from collections.abc import Hashable, Sequence

import numpy as np

# Positions that later requests reuse. none: of identical prompts. prompts:
# of prompts, as far as their tokens agree. all: also of completions.
REUSE = ('none', 'prompts', 'all')


@dataclasses.dataclass(frozen=True)
class Move:
  """A row to write: positions of another row, then prefilled tokens.

  Attributes:
    row: the row to write.
    source: the row to copy first; None: nothing is copied.
    start: position of the first token.
    tokens: tokens to prefill, possibly none.
    count: number of these before the last token of the prompt, which the first
      decoding step computes.
    level: a move needs all moves of lower levels and none of its own level.
    agent: index of the adapter that computes the tokens.
  """

  row: int
  source: int | None
  start: int
  tokens: np.ndarray
  level: int
  agent: int = 0
  count: int = 0


class PrefixCache:
  """The tokens of each row; chooses rows for requests.

  Rows from `num_slots` on are parked: they hold keys and values only.

  Args:
    num_slots: number of rows that are decoded.
    num_parked: number of other rows.
    length: S, positions of a row.
    reuse: one of REUSE.
    whole: whether a row can be reused only as a whole.
  """

  def __init__(
    self,
    num_slots: int,
    num_parked: int,
    length: int,
    reuse: str,
    *,
    whole: bool = False,
  ):
    self._num_slots, self._reuse, self._whole = num_slots, reuse, whole
    self._tokens_NS = np.zeros((num_slots + num_parked, length), np.int32)
    self.clear()

  def clear(self) -> None:
    """Forgets all tokens and conversations."""
    count = len(self._tokens_NS)
    # Number of tokens of each row whose keys and values may be reused; -1: the
    # row is empty.
    self._valid_N = np.full(count, -1)
    # The agent whose adapter computed them.
    self._agents_N = np.zeros(count, int)
    self._running_N = np.zeros(count, bool)
    # Whether a row belongs to a conversation that is not running.
    self._waiting_N = np.zeros(count, bool)
    # Order in which requests finished.
    self._finished_N = np.zeros(count, int)
    self._num_finished = 0
    self._conversations: list[Hashable | None] = [None] * count
    self._row_of: dict[Hashable, int] = {}
    self._start_moves()

  def _start_moves(self) -> None:
    self._moves: list[Move] = []
    # Highest level of the moves that write and that read a row.
    self._written: dict[int, int] = {}
    self._read: dict[int, int] = {}

  def take_moves(self) -> list[Move]:
    """Returns the moves since the last call, in their order."""
    moves = self._moves
    self._start_moves()
    return moves

  def place(
    self,
    prompt: np.ndarray,
    conversation: Hashable | None = None,
    agent: int = 0,
  ) -> tuple[int, int] | None:
    """Places a request; returns its slot and the number of reused tokens.

    Args:
      prompt: its tokens.
      conversation: id of its conversation, whose next turn begins with this
        prompt; None: it has none.
      agent: index of its adapter; rows of other agents are not reused.

    Returns:
      None if all slots are running.
    """
    if self._running_N[: self._num_slots].all():
      return None
    if self._reuse == 'none':
      conversation = None
    own = self._row_of.get(conversation)
    # First the slot: parking its conversation may overwrite another row.
    slot = self._choose_slot(own)
    source, start = self._find(prompt, own, agent)
    if own is not None:
      self._release(own)
    last, reused = len(prompt) - 1, start
    if self._reuse != 'none':
      # The first decoding step computes the last token.
      tokens = prompt[start:last]
    else:
      tokens = prompt[:0] if source is not None else prompt
      reused = len(prompt) - len(tokens)
    if len(tokens) or source not in (None, slot):
      count = min(last - start, len(tokens))
      self._move(slot, source, start, tokens, agent, count)
    self._tokens_NS[slot, : len(prompt)] = prompt
    self._agents_N[slot] = agent
    self._valid_N[slot] = last
    self._running_N[slot] = True
    self._conversations[slot] = conversation
    if conversation is not None:
      self._row_of[conversation] = slot
    return slot, reused

  def finish(self, slot: int, completion: np.ndarray) -> None:
    """Marks the request of a slot as finished, with the ids it sampled."""
    self._running_N[slot] = False
    self._waiting_N[slot] = self._conversations[slot] is not None
    self._num_finished += 1
    self._finished_N[slot] = self._num_finished
    if self._reuse == 'all':
      # No step computed the last token.
      start = self._valid_N[slot] + 1
      end = start + len(completion) - 1
      self._tokens_NS[slot, start:end] = completion[:-1]
      self._valid_N[slot] = end

  def forget(self, conversation: Hashable) -> None:
    """Ends a conversation: no later request continues it."""
    row = self._row_of.get(conversation)
    if row is not None:
      self._release(row)

  def needed(self, moves: Sequence[Move] = ()) -> tuple[int, int]:
    """Returns the number of slots in use and their number of positions.

    Args:
      moves: moves that are not executed yet.
    """
    used_N, lengths_N = self._running_N | self._waiting_N, self._valid_N + 1
    for move in moves:
      if move.source is not None:
        used_N[move.source] = True
        # Later moves may have written the source, with fewer tokens.
        lengths_N[move.source] = max(lengths_N[move.source], move.start + 1)
    used = np.flatnonzero(used_N[: self._num_slots])
    if not len(used):
      return 0, 0
    return int(used[-1]) + 1, int(lengths_N[used].max())

  def drop(self, rows: int, length: int) -> list[int]:
    """Forgets slots beyond a size; returns the slots that hold tokens."""
    slots = np.arange(self._num_slots)
    valid = self._valid_N[: self._num_slots]
    lost = (slots >= rows) | (valid > length)
    used = (self._running_N | self._waiting_N)[: self._num_slots]
    valid[lost & ~used] = -1
    return np.flatnonzero(valid >= 0).tolist()

  def _find(
    self, prompt: np.ndarray, own: int | None, agent: int
  ) -> tuple[int | None, int]:
    """Returns the row with the longest prefix of a prompt, and its length.

    Args:
      prompt: its tokens.
      own: row of the request's conversation, which is compared first.
      agent: the agent of the row.
    """
    last = len(prompt) - 1
    valid_N = np.where(self._agents_N == agent, self._valid_N, -1)
    if self._reuse == 'none':
      rows = np.flatnonzero(valid_N == last)
      same = (self._tokens_NS[rows, : last + 1] == prompt).all(axis=1)
      return (int(rows[same.argmax()]), last) if same.any() else (None, 0)
    if own is not None and self._agents_N[own] == agent:
      valid = self._valid_N[own]
      if (
        valid <= last and (self._tokens_NS[own, :valid] == prompt[:valid]).all()
      ):
        return own, int(valid)
    # The first difference; the column after the last one always differs.
    different_NS = np.ones((len(self._tokens_NS), last + 1), bool)
    np.not_equal(
      self._tokens_NS[:, :last], prompt[:last], out=different_NS[:, :last]
    )
    common_N = np.minimum(different_NS.argmax(axis=1), valid_N)
    if self._whole:
      common_N = np.where(common_N == valid_N, common_N, 0)
    row = int(common_N.argmax())
    length = int(common_N[row])
    return (row, length) if length > 0 else (None, 0)

  def _choose_slot(self, own: int | None) -> int:
    """Returns the slot of a request, which is not running.

    The lowest slot, so that the cache can be small. If all slots belong to
    waiting conversations, the one that waits for the shortest time moves: its
    next turn is likely to be the last.

    Args:
      own: row of the request's conversation.
    """
    slots = slice(self._num_slots)
    free = ~self._running_N[slots]
    unused = free & ~self._waiting_N[slots]
    if own is not None and own < self._num_slots:
      unused[own] = free[own]
    if unused.any():
      return int(unused.argmax())
    slot = int(np.where(free, self._finished_N[slots], -1).argmax())
    self._park(slot)
    return slot

  def _park(self, slot: int) -> None:
    """Moves a waiting conversation to a parked row, or ends it if none is."""
    conversation = self._conversations[slot]
    self._release(slot)
    unused = ~self._waiting_N[self._num_slots :]
    if not unused.any():
      return
    row = self._num_slots + int(unused.argmax())
    length = self._valid_N[slot]
    self._move(row, slot, int(length), self._tokens_NS[slot, :0])
    self._tokens_NS[row] = self._tokens_NS[slot]
    self._agents_N[row] = self._agents_N[slot]
    self._valid_N[row] = length
    self._conversations[row] = conversation
    self._waiting_N[row] = True
    self._row_of[conversation] = row

  def _release(self, row: int) -> None:
    """Frees a row for other requests; it keeps its tokens until then."""
    self._row_of.pop(self._conversations[row], None)
    self._conversations[row] = None
    self._waiting_N[row] = False

  def _move(
    self,
    row: int,
    source: int | None,
    start: int,
    tokens: np.ndarray,
    agent: int = 0,
    count: int = 0,
  ) -> None:
    level = 1 + max(
      self._written.get(source, -1),
      self._written.get(row, -1),
      self._read.get(row, -1),
    )
    self._written[row] = level
    if source is not None:
      self._read[source] = max(level, self._read.get(source, -1))
    move = Move(row, source, start, tokens, level, agent, count)
    self._moves.append(move)
