"""Tests of packs: by hand, and compared with the rows they contain."""

import numpy as np
import pytest

from gigpo_jax import batch, packing


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
  packer = packing.Packer(2, 1, (4, 8), 4, share=True)
  (microbatch,) = packer.microbatches(rows, np.arange(3))
  np.testing.assert_array_equal(microbatch.rows, [0, 2, 1])
  np.testing.assert_array_equal(
    microbatch.tokens, [[5, 6, 1, 2, 4, 0, 0, 0], [7, 3, 0, 0, 0, 0, 0, 0]]
  )
  np.testing.assert_array_equal(microbatch.positions[0, :5], [0, 1, 2, 3, 2])
  np.testing.assert_array_equal(microbatch.branches[0, :5], [0, 0, 1, 1, 2])
  # Each completion's first token is preceded by the last of its prompt.
  assert microbatch.mask.sum() == 4
  np.testing.assert_array_equal(
    microbatch.before[microbatch.mask], [1, 2, 1, 8]
  )
  np.testing.assert_array_equal(
    microbatch.targets[microbatch.mask], [1, 2, 4, 3]
  )
  np.testing.assert_array_equal(microbatch.row[microbatch.mask], [0, 0, 2, 1])
  np.testing.assert_array_equal(
    microbatch.column[microbatch.mask], [0, 1, 0, 0]
  )
  assert packer.take_metrics() == {
    'packs/tokens': 7.0,
    'packs/padding': 1 - 7 / 16,
    'packs/shared_tokens': 2.0,
  }
  values = np.array([10.0, 20.0, 30.0, 0.0])
  np.testing.assert_array_equal(
    microbatch.gather(values)[microbatch.mask], [10, 10, 30, 20]
  )
  assert (microbatch.gather(values)[~microbatch.mask] == 0).all()


@pytest.mark.parametrize('share', [False, True])
@pytest.mark.parametrize(('size', 'shards'), [(4, 1), (4, 2), (2, 2), (1, 1)])
def test_every_completion_token_is_packed_once(share, size, shards):
  rng = np.random.default_rng(0)
  prompts = [rng.integers(9, size=rng.integers(1, 9)) for _ in range(5)]
  rows = _rows(
    [prompts[rng.integers(5)] for _ in range(23)],
    [rng.integers(9, size=rng.integers(1, 5)) for _ in range(23)],
  )
  index = np.flatnonzero(rows.real)[3:]
  packer = packing.Packer(size, shards, (6, 12), 4, share=share)
  seen = np.zeros((len(rows.groups), 4))
  ids = np.zeros((len(rows.groups), 4), np.int32)
  for microbatch in packer.microbatches(rows, index):
    assert microbatch.tokens.shape[0] == size
    microbatch.scatter(microbatch.targets, ids)
    microbatch.scatter(
      np.ones(microbatch.mask.shape), into := np.zeros_like(seen)
    )
    seen += into
    # `before` points at the preceding token of the same row.
    flat = microbatch.tokens.reshape(shards, -1)
    for shard, n in zip(*np.nonzero(microbatch.mask), strict=True):
      row = microbatch.row[shard, n]
      position = rows.prompt_lengths[row] + microbatch.column[shard, n]
      before = flat[shard, microbatch.before[shard, n]]
      assert before == rows.tokens[row, position - 1]
  expected = rows.completion_mask.copy()
  expected[:3] = False
  np.testing.assert_array_equal(seen, expected)
  for r in index:
    completion = rows.tokens[r, rows.prompt_lengths[r] : rows.lengths[r]]
    np.testing.assert_array_equal(ids[r, : len(completion)], completion)


def test_a_row_that_is_too_long_is_refused():
  rows = _rows([[1] * 8], [[2] * 4])
  with pytest.raises(ValueError, match='a row has 12 tokens'):
    next(packing.Packer(1, 1, (8,), 4).microbatches(rows, np.array([0])))
