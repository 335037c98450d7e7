"""Tests of the bookkeeping of cached tokens, without a model."""

import numpy as np
import pytest

from gigpo_jax import prefix_cache

GARBAGE = -7


def _ids(*tokens: int) -> np.ndarray:
  return np.array(tokens, np.int32)


def _moves(cache: prefix_cache.PrefixCache) -> list[tuple]:
  return [
    (m.row, m.source, m.start, m.tokens.tolist(), m.level)
    for m in cache.take_moves()
  ]


@pytest.mark.parametrize('reuse', prefix_cache.REUSE)
def test_agents_share_no_rows(reuse):
  cache = prefix_cache.PrefixCache(3, 0, 16, reuse)
  prompt = _ids(1, 2, 3)
  assert cache.place(prompt, 'a', 0) == (0, 0)
  assert cache.place(prompt, 'b', 1) == (1, 0)
  # The row of the same agent is copied.
  slot, reused = cache.place(prompt, 'c', 1)
  assert slot == 2 and reused >= 2
  moves = cache.take_moves()
  assert [(m.source, m.agent) for m in moves] == [(None, 0), (None, 1), (1, 1)]
  # The next turn of a conversation is of another agent.
  cache.finish(0, _ids(4))
  slot, reused = cache.place(_ids(1, 2, 3, 4, 5), 'a', 1)
  assert slot == 0 and reused == (0 if reuse == 'none' else 2)
  assert [m.source for m in cache.take_moves()] in ([None], [1], [2])


def test_a_conversation_by_hand():
  cache = prefix_cache.PrefixCache(3, 0, 16, 'prompts')
  assert cache.place(_ids(1, 2, 3), 'a') == (0, 0)
  # The sibling's prompt is the same: a copy, after the prefill.
  assert cache.place(_ids(1, 2, 3), 'b') == (1, 2)
  assert _moves(cache) == [(0, None, 0, [1, 2], 0), (1, 0, 2, [], 1)]
  cache.finish(0, _ids(4, 5))
  assert cache.needed() == (2, 3)  # The slot of 'a' waits for its next turn.
  # 3 and 4 were computed by decoding steps. 9 will be.
  assert cache.place(_ids(1, 2, 3, 4, 5, 8, 9), 'a') == (0, 2)
  assert _moves(cache) == [(0, 0, 2, [3, 4, 5, 8], 0)]
  cache.finish(0, _ids(4))
  cache.forget('a')
  assert cache.needed() == (2, 3)  # 'b' is still running.


def test_all_reuses_completions():
  cache = prefix_cache.PrefixCache(1, 0, 16, 'all')
  cache.place(_ids(1, 2, 3), 'a')
  cache.take_moves()
  cache.finish(0, _ids(4, 5))
  # No step computed 5, the last sampled token.
  assert cache.place(_ids(1, 2, 3, 4, 5, 8, 9), 'a') == (0, 4)
  assert _moves(cache) == [(0, 0, 4, [5, 8], 0)]


def test_none_reuses_identical_prompts_only():
  cache = prefix_cache.PrefixCache(2, 0, 16, 'none')
  assert cache.place(_ids(1, 2, 3), 'a') == (0, 0)
  assert cache.place(_ids(1, 2, 3), 'b') == (1, 3)
  assert _moves(cache) == [(0, None, 0, [1, 2, 3], 0), (1, 0, 2, [], 1)]
  cache.finish(0, _ids(4))
  assert cache.needed() == (2, 3)
  cache.finish(1, _ids(4))
  assert cache.needed() == (0, 0)  # No slot waits.
  assert cache.place(_ids(1, 2, 3, 4), 'a') == (0, 0)


def test_the_last_to_finish_is_parked_then_lost():
  cache = prefix_cache.PrefixCache(2, 1, 16, 'prompts')
  for n, name in enumerate('ab'):
    cache.place(_ids(n, 2, 3), name)
  assert cache.place(_ids(5, 2, 3), 'c') is None
  cache.finish(1, _ids(4))
  cache.finish(0, _ids(4))
  cache.take_moves()
  assert cache.place(_ids(5, 2, 3), 'c') == (0, 0)
  assert cache.place(_ids(6, 2, 3), 'd') == (1, 0)
  # 'a' is parked before its slot is written; there is no row left for 'b'.
  assert _moves(cache) == [
    (2, 0, 2, [], 0),
    (0, None, 0, [5, 2], 1),
    (1, None, 0, [6, 2], 0),
  ]
  cache.finish(0, _ids(4))
  cache.forget('c')
  assert cache.place(_ids(0, 2, 3, 4, 9), 'a') == (0, 2)
  assert _moves(cache) == [(0, 2, 2, [3, 4], 0)]
  cache.finish(1, _ids(4))
  assert cache.place(_ids(1, 2, 3, 4, 9), 'b')[1] == 0


def test_a_row_that_parking_overwrites_is_not_reused():
  cache = prefix_cache.PrefixCache(1, 1, 16, 'prompts')
  cache.place(_ids(1, 2, 3), 'a')
  cache.finish(0, _ids(4))
  cache.place(_ids(5, 2, 3), 'b')
  cache.finish(0, _ids(4))
  cache.forget('a')  # Its row still holds 1, 2.
  cache.take_moves()
  assert cache.place(_ids(1, 2, 9), 'c') == (0, 0)
  # 'b' is parked there.
  assert _moves(cache) == [(1, 0, 2, [], 0), (0, None, 0, [1, 2], 1)]


def test_a_conversation_that_is_parked_needs_all_its_positions():
  cache = prefix_cache.PrefixCache(1, 1, 16, 'prompts')
  cache.place(_ids(1, 2, 3, 4, 5, 6), 'a')
  cache.finish(0, _ids(4))
  cache.take_moves()
  assert cache.place(_ids(7, 8), 'b') == (0, 0)
  # 5 positions of 'a' are copied before those of 'b' are written.
  assert cache.needed(cache.take_moves()) == (1, 6)


def test_a_parked_row_keeps_its_agent():
  cache = prefix_cache.PrefixCache(1, 1, 16, 'prompts')
  cache.place(_ids(1, 2, 3), 'a', 1)
  cache.finish(0, _ids(4))
  assert cache.place(_ids(5, 6), 'b', 0) == (0, 0)  # 'a' is parked.
  cache.finish(0, _ids(4))
  cache.forget('b')
  assert cache.place(_ids(1, 2, 3), 'c', 0) == (0, 0)
  cache.finish(0, _ids(4))
  cache.forget('c')
  assert cache.place(_ids(1, 2, 3, 4, 9), 'a', 1) == (0, 2)


def test_a_wrong_conversation_never_changes_the_prompt():
  cache = prefix_cache.PrefixCache(2, 0, 16, 'prompts')
  cache.place(_ids(1, 2, 3, 4), 'a')
  cache.finish(0, _ids(4))
  cache.take_moves()
  assert cache.place(_ids(1, 9, 3, 4, 5), 'a') == (0, 1)
  assert _moves(cache) == [(0, 0, 1, [9, 3, 4], 0)]
  # A running request keeps its slot.
  assert cache.place(_ids(1, 9, 3, 4, 5), 'a') == (1, 4)
  assert cache.place(_ids(1, 9, 3, 4, 5), 'a') is None


@pytest.mark.parametrize('reuse', prefix_cache.REUSE)
def test_a_slot_that_holds_the_prompt_needs_no_move(reuse):
  cache = prefix_cache.PrefixCache(2, 0, 16, reuse)
  cache.place(_ids(1, 2, 3), 'a')
  cache.finish(0, _ids(4))
  cache.take_moves()
  assert cache.place(_ids(1, 2, 3), 'a')[0] == 0
  assert not cache.take_moves()


def test_a_conversation_prefers_its_own_row():
  cache = prefix_cache.PrefixCache(2, 0, 16, 'prompts')
  for n, name in enumerate('ab'):
    cache.place(_ids(1, 2, 3), name)
    cache.finish(n, _ids(4))
  cache.take_moves()
  assert cache.place(_ids(1, 2, 3), 'b') == (1, 2)
  assert not cache.take_moves()


def test_a_conversation_may_become_shorter():
  cache = prefix_cache.PrefixCache(1, 0, 16, 'prompts')
  cache.place(_ids(1, 2, 3, 4, 5), 'a')
  cache.finish(0, _ids(4))
  assert cache.place(_ids(1, 2, 3), 'a') == (0, 2)


def test_the_shortest_wait_loses_its_slot():
  cache = prefix_cache.PrefixCache(3, 0, 16, 'prompts')
  for n, name in enumerate('abc'):
    cache.place(_ids(n, 2, 3), name)
  for slot in (0, 2, 1):
    cache.finish(slot, _ids(4))
  assert cache.place(_ids(5, 2, 3), 'd') == (1, 0)
  assert cache.place(_ids(6, 2, 3), 'e') == (2, 0)


def test_a_conversation_that_ends_while_it_runs_does_not_wait():
  cache = prefix_cache.PrefixCache(1, 0, 16, 'prompts')
  cache.place(_ids(1, 2, 3), 'a')
  cache.forget('a')
  cache.finish(0, _ids(4))
  assert cache.needed() == (0, 0)


def test_rows_that_are_copied_next_are_needed():
  cache = prefix_cache.PrefixCache(3, 0, 16, 'prompts')
  for n in range(3):
    cache.place(_ids(n, 2, 3))
  for n in range(3):
    cache.finish(n, _ids(4))
  cache.take_moves()
  assert cache.place(_ids(2, 2, 3, 4, 5)) == (0, 2)
  assert cache.needed(cache.take_moves()) == (3, 5)
  assert cache.needed() == (1, 5)


def test_a_parked_row_is_written_twice_in_order():
  cache = prefix_cache.PrefixCache(3, 1, 16, 'prompts')
  for n, name in enumerate('bea'):
    cache.place(_ids(n, 2, 3), name)
    cache.finish(n, _ids(4))
  cache.take_moves()
  # 'a' is parked, but its next prompt does not continue it. 'b' is parked next.
  for n, name in enumerate('cad', start=7):
    cache.place(_ids(n, n, n), name)
  moves = [m for m in cache.take_moves() if m.row == 3]
  assert [(m.source, m.level) for m in moves] == [(2, 0), (0, 1)]


def test_a_running_prompt_of_one_token_survives_another_size():
  cache = prefix_cache.PrefixCache(2, 0, 16, 'prompts')
  cache.place(_ids(1))
  assert cache.drop(2, 8) == [0]


class _Rows:
  """Executes moves on an array of tokens, in any order within a level."""

  def __init__(self, count: int, length: int, rng: np.random.Generator):
    self.tokens = np.full((count, length), GARBAGE, np.int32)
    self._rng = rng

  def shrink(self, held: list[int], slots: int, length: int) -> None:
    """Keeps the first positions of the slots that are held."""
    tokens = np.full_like(self.tokens[:slots], GARBAGE)
    tokens[held, :length] = self.tokens[held, :length]
    self.tokens[:slots] = tokens

  def fill(self, moves: list[prefix_cache.Move]) -> None:
    for level in sorted({move.level for move in moves}):
      batch = [move for move in moves if move.level == level]
      for n in self._rng.permutation(len(batch)):
        move = batch[n]
        row = np.full(self.tokens.shape[1], GARBAGE, np.int32)
        if move.source is not None:
          row[:] = self.tokens[move.source]
        end = move.start + len(move.tokens)
        row[move.start : end] = move.tokens
        row[end:] = GARBAGE  # Padding of the prefill.
        self.tokens[move.row] = row


@pytest.mark.parametrize('reuse', prefix_cache.REUSE)
@pytest.mark.parametrize('seed', range(12))
def test_random_conversations_find_their_tokens(reuse, seed):
  rng = np.random.default_rng(seed)
  slots, parked = 4, (0, 2, 6)[seed % 3]
  cache = prefix_cache.PrefixCache(slots, parked, 64, reuse)
  rows = _Rows(slots + parked, 64, rng)
  # Few different tokens, so that prompts share prefixes by chance.
  texts = [rng.integers(0, 2, 3).astype(np.int32) for _ in range(10)]
  waiting, running = list(range(10)), {}
  reused = 0
  for _ in range(120):
    for name in list(waiting):
      placed = cache.place(texts[name], name)
      if placed is None:
        break
      running[placed[0]] = name
      reused += placed[1]
      waiting.remove(name)
    moves = cache.take_moves()
    size = cache.needed(moves)
    rows.shrink(cache.drop(*size), slots, size[1])
    rows.fill(moves)
    for slot, name in running.items():
      last = len(texts[name]) - 1
      np.testing.assert_array_equal(
        rows.tokens[slot, :last], texts[name][:last]
      )
    for slot in rng.permutation(list(running))[: rng.integers(1, 4)].tolist():
      name = running.pop(slot)
      completion = rng.integers(0, 2, rng.integers(1, 4)).astype(np.int32)
      # Decoding wrote all but the last token, and anything after them.
      start, end = len(texts[name]), len(texts[name]) + len(completion)
      rows.tokens[slot, start - 1] = texts[name][-1]
      rows.tokens[slot, start : end - 1] = completion[:-1]
      cache.finish(slot, completion)
      new = rng.integers(0, 2, rng.integers(0, 4)).astype(np.int32)
      texts[name] = np.concatenate([texts[name], completion, new])
      if len(texts[name]) > 50 or rng.random() < 0.1:
        cache.forget(name)
        texts[name] = rng.integers(0, 2, 3).astype(np.int32)
      waiting.append(name)
  assert reused > 0


def test_a_smaller_cache_loses_rows_that_nobody_needs():
  cache = prefix_cache.PrefixCache(4, 0, 16, 'prompts')
  for n in range(4):
    cache.place(_ids(n, 2, 3, 4), n if n == 1 else None)
  cache.take_moves()
  for n in range(4):
    cache.finish(n, _ids(5))
  assert cache.needed() == (2, 4)
  assert cache.drop(3, 3) == [0, 1, 2]
  assert cache.drop(2, 2) == [1]
  assert cache.place(_ids(0, 2, 3, 4)) == (0, 0)
  assert cache.place(_ids(1, 2, 3, 4, 5), 1) == (1, 3)
