"""Packs by hand, and against rows one by one."""

import numpy as np
import pytest

from gigpo_jax import batch, packs


def _rows(prompts, completions):
  return batch.pack(
    [np.array(ids) for ids in prompts],
    [np.array(ids) for ids in completions],
    max_prompt_tokens=8,
    max_completion_tokens=4,
    row_multiple=4,
  )


def test_a_pack_by_hand():
  rows = _rows([[5, 6], [7], [5, 6]], [[1, 2], [3], [4]])
  packer = packs.Packer(2, 1, (4, 8), 4, share=True)
  (found,) = packer.microbatches(rows, np.arange(3))
  np.testing.assert_array_equal(found.rows, [0, 2, 1])
  np.testing.assert_array_equal(
    found.tokens, [[5, 6, 1, 2, 4, 0, 0, 0], [7, 3, 0, 0, 0, 0, 0, 0]]
  )
  np.testing.assert_array_equal(found.positions[0, :5], [0, 1, 2, 3, 2])
  np.testing.assert_array_equal(found.branches[0, :5], [0, 0, 1, 1, 2])
  # Ahead of each completion's first token is the end of its prompt.
  assert found.mask.sum() == 4
  np.testing.assert_array_equal(found.before[found.mask], [1, 2, 1, 8])
  np.testing.assert_array_equal(found.targets[found.mask], [1, 2, 4, 3])
  np.testing.assert_array_equal(found.row[found.mask], [0, 0, 2, 1])
  np.testing.assert_array_equal(found.column[found.mask], [0, 1, 0, 0])
  assert packer.take_metrics() == {
    'packs/tokens': 7.0,
    'packs/padding': 1 - 7 / 16,
    'packs/shared_tokens': 2.0,
  }
  values = np.array([10.0, 20.0, 30.0, 0.0])
  np.testing.assert_array_equal(
    found.take(values)[found.mask], [10, 10, 30, 20]
  )
  assert (found.take(values)[~found.mask] == 0).all()


@pytest.mark.parametrize('share', [False, True])
@pytest.mark.parametrize(('size', 'shards'), [(4, 1), (4, 2), (2, 2), (1, 1)])
def test_every_token_of_every_row_is_there_once(share, size, shards):
  rng = np.random.default_rng(0)
  prompts = [rng.integers(9, size=rng.integers(1, 9)) for _ in range(5)]
  rows = _rows(
    [prompts[rng.integers(5)] for _ in range(23)],
    [rng.integers(9, size=rng.integers(1, 5)) for _ in range(23)],
  )
  index = np.flatnonzero(rows.real)[3:]
  packer = packs.Packer(size, shards, (6, 12), 4, share=share)
  seen = np.zeros((len(rows.groups), 4))
  ids = np.zeros((len(rows.groups), 4), np.int32)
  for part in packer.microbatches(rows, index):
    assert part.tokens.shape[0] == size
    part.put(part.targets, ids)
    part.put(np.ones(part.mask.shape), into := np.zeros_like(seen))
    seen += into
    # What is ahead of a token is what its row has there.
    flat = part.tokens.reshape(shards, -1)
    for shard, n in zip(*np.nonzero(part.mask), strict=True):
      row = part.row[shard, n]
      place = rows.prompt_lengths[row] + part.column[shard, n]
      ahead = flat[shard, part.before[shard, n]]
      assert ahead == rows.tokens[row, place - 1]
  expected = rows.completion_mask.copy()
  expected[:3] = False
  np.testing.assert_array_equal(seen, expected)
  for r in index:
    completion = rows.tokens[r, rows.prompt_lengths[r] : rows.lengths[r]]
    np.testing.assert_array_equal(ids[r, : len(completion)], completion)


def test_a_row_that_is_too_long_is_refused():
  rows = _rows([[1] * 8], [[2] * 4])
  with pytest.raises(ValueError, match='a row has 12 tokens'):
    next(packs.Packer(1, 1, (8,), 4).microbatches(rows, np.array([0])))
