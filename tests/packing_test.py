"""Tests of packing: by hand, and compared with the rows that are packed."""

import jax.numpy as jnp
import numpy as np
import pytest

from gigpo_jax import batch, losses, packing, row_packs


def _rows(prompts, completions, longest_prompt=8, longest_completion=4):
  return batch.pack(
    [np.array(ids) for ids in prompts],
    [np.array(ids) for ids in completions],
    max_prompt_tokens=longest_prompt,
    max_completion_tokens=longest_completion,
    row_multiple=4,
  )


def test_sequences_by_hand():
  rows = _rows([[5, 6], [7], [5, 6]], [[1, 2], [3], [4]])
  packer = packing.Packer(8, 1, (8,), 4)
  microbatch, last = packer.microbatches(rows, np.arange(3))
  # Rows of 4, 2 and 3 tokens: the longest first, then the longest that fits.
  np.testing.assert_array_equal(microbatch.rows, [0, 2])
  np.testing.assert_array_equal(microbatch.tokens, [[5, 6, 1, 2, 5, 6, 4, 0]])
  np.testing.assert_array_equal(
    microbatch.positions, [[0, 1, 2, 3, 0, 1, 2, 0]]
  )
  np.testing.assert_array_equal(microbatch.ends, [[4, 4, 4, 4, 7, 7, 7, 8]])
  mask = microbatch.mask
  np.testing.assert_array_equal(microbatch.before[mask], [1, 2, 5])
  np.testing.assert_array_equal(microbatch.targets[mask], [1, 2, 4])
  np.testing.assert_array_equal(microbatch.row[mask], [0, 0, 2])
  np.testing.assert_array_equal(microbatch.column[mask], [0, 1, 0])
  np.testing.assert_array_equal(microbatch.local_rows[mask], [0, 0, 1])
  np.testing.assert_array_equal(last.rows, [1])


def test_shared_prompts_by_hand():
  rows = _rows([[5, 6], [7], [5, 6]], [[1, 2], [3], [4]])
  packer = packing.Packer(16, 1, (4, 8), 4, share=True)
  (microbatch,) = packer.microbatches(rows, np.arange(3))
  np.testing.assert_array_equal(microbatch.rows, [0, 2, 1])
  np.testing.assert_array_equal(
    microbatch.tokens, [[5, 6, 1, 2, 4, 7, 3, 0], [0] * 8]
  )
  np.testing.assert_array_equal(
    microbatch.positions[0], [0, 1, 2, 3, 2, 0, 1, 0]
  )
  # Both completions see the prompt, which ends with the pack.
  np.testing.assert_array_equal(microbatch.ends[0], [5, 5, 4, 4, 5, 7, 7, 8])
  # Each completion's first token is preceded by the last of its prompt.
  assert microbatch.mask.sum() == 4
  np.testing.assert_array_equal(
    microbatch.before[microbatch.mask], [1, 2, 1, 5]
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


def test_a_conversation_is_one_text_by_hand():
  # Turns [5] -> [1], then [7] -> [2, 3]; another episode answers [4] first.
  rows = _rows([[5], [5, 1, 7], [5]], [[1], [2, 3], [4]])
  packer = packing.Packer(8, 1, (8,), 4, share=True, turns=2)
  (microbatch,) = packer.microbatches(rows, np.arange(3))
  np.testing.assert_array_equal(microbatch.rows, [0, 1, 2])
  np.testing.assert_array_equal(microbatch.tokens, [[5, 1, 7, 2, 3, 4, 0, 0]])
  np.testing.assert_array_equal(
    microbatch.positions[0], [0, 1, 2, 3, 4, 1, 0, 0]
  )
  np.testing.assert_array_equal(microbatch.ends[0], [6, 5, 5, 5, 5, 6, 7, 8])
  mask = microbatch.mask
  # Only completions are trained; the environment's 7 is not.
  np.testing.assert_array_equal(microbatch.targets[mask], [1, 2, 3, 4])
  np.testing.assert_array_equal(microbatch.before[mask], [0, 2, 3, 0])
  np.testing.assert_array_equal(microbatch.row[mask], [0, 1, 1, 2])
  np.testing.assert_array_equal(microbatch.column[mask], [0, 0, 1, 0])
  # Row 1 adds 3 of its 5 tokens, and row 2 one of two.
  assert packer.take_metrics()['packs/shared_tokens'] == 3


def test_equal_completions_of_many_rows_fit_their_sequence():
  # The 16 targets of four rows are more than the tokens of their sequence.
  rows = _rows([[5]] * 4, [[1, 2, 3, 4]] * 4)
  packer = packing.Packer(16, 1, (6, 16), 4, share=True)
  counts = [m.mask.sum() for m in packer.microbatches(rows, np.arange(4))]
  assert sum(counts) == 16 and max(counts) <= 12


def _conversations(rng, *, episodes, turns, alphabet=9):
  """Returns rows of episodes that grow from few first prompts."""
  firsts = [[8, 8, n] for n in range(2)]
  prompts, completions, owners = [], [], []
  for episode in range(episodes):
    text = firsts[episode % 2]
    for _ in range(turns):
      prompts.append(list(text))
      completions.append([*rng.integers(alphabet, size=rng.integers(1, 5))])
      owners.append(episode)
      text = [*text, *completions[-1], *rng.integers(alphabet, size=2)]
  rows = _rows(prompts, completions, longest_prompt=3 + 6 * turns)
  rows.episodes[: len(owners)] = owners
  return rows


@pytest.mark.parametrize('alphabet', [2, 9])
def test_conversations_are_packed_once(alphabet):
  rng = np.random.default_rng(0)
  rows = _conversations(rng, episodes=6, turns=4, alphabet=alphabet)
  index = np.flatnonzero(rows.real)
  packer = packing.Packer(60, 1, (31, 60), 4, share=True, turns=4)
  count = np.zeros((len(rows.groups), 4))
  for microbatch in packer.microbatches(rows, index):
    microbatch.scatter(
      np.ones(microbatch.mask.shape), into := np.zeros_like(count)
    )
    count += into
    for shard, n in zip(*np.nonzero(microbatch.mask), strict=True):
      _check_text(rows, microbatch, shard, n)
  np.testing.assert_array_equal(count, rows.completion_mask)


@pytest.mark.parametrize('turns', [5, 10, 20])
def test_tokens_of_a_conversation_grow_linearly(turns):
  rng = np.random.default_rng(0)
  rows = _conversations(rng, episodes=1, turns=turns)
  index = np.flatnonzero(rows.real)
  tokens = {}
  for share in (False, True):
    packer = packing.Packer(256, 1, (256,), 4, share=share, turns=turns)
    list(packer.microbatches(rows, index))
    tokens[share] = packer.take_metrics()['packs/tokens']
  # One row per turn repeats all earlier turns.
  assert tokens[False] == rows.lengths.sum()
  assert tokens[True] == rows.lengths.max() <= 3 + 6 * turns
  assert tokens[False] > tokens[True] * turns / 3


def test_rows_without_a_completion_take_no_number():
  # They come first, because their prompts are longer.
  rows = _rows([[5, 6, 7]] * 3 + [[8]], [[]] * 3 + [[1]], longest_completion=1)
  (microbatch,) = packing.Packer(16, 1, (16,), 1).microbatches(
    rows, np.arange(4)
  )
  assert microbatch.rows[-1] == 3 and microbatch.mask.shape == (1, 2)
  # Ids of rows are below the number of tokens: sums over rows need that.
  np.testing.assert_array_equal(microbatch.local_rows[microbatch.mask], [0])
  values = jnp.full(microbatch.mask.shape, 3.0)
  sums = losses.row_sums(
    values, jnp.asarray(microbatch.mask), jnp.asarray(microbatch.local_rows)
  )
  np.testing.assert_array_equal(sums[microbatch.mask], [3.0])


def test_conversations_longer_than_a_sequence_are_divided_between_episodes():
  rows = _conversations(np.random.default_rng(0), episodes=4, turns=3)
  index = np.flatnonzero(rows.real)
  packer = packing.Packer(25, 1, (25,), 4, share=True, turns=3)
  packs = [set(rows.episodes[m.rows]) for m in packer.microbatches(rows, index)]
  assert sorted(map(len, packs)) == [1, 1, 1, 1]
  # Without room for the completions, an episode's later turns are apart.
  packer = packing.Packer(25, 1, (25,), 4, share=True)
  (index,) = np.nonzero(rows.episodes == 0)
  index = index[rows.real[index]]
  assert len(list(packer.microbatches(rows, index))) == 1
  # Groups of more rows than a mini-batch are divided between episodes.
  index = np.flatnonzero(rows.real)
  for most, sizes in ((None, [6, 6]), (6, [6, 6]), (5, [3] * 4), (1, [3] * 4)):
    groups = packer.prompt_groups(rows, index, most)
    assert [len(group) for group in groups] == sizes


@pytest.mark.parametrize('share', [False, True])
@pytest.mark.parametrize(
  ('max_tokens', 'shards'), [(48, 1), (48, 2), (1, 2), (12, 1), (200, 1)]
)
def test_every_completion_token_is_packed_once(share, max_tokens, shards):
  rng = np.random.default_rng(0)
  prompts = [rng.integers(9, size=rng.integers(1, 9)) for _ in range(5)]
  rows = _rows(
    [prompts[rng.integers(5)] for _ in range(23)],
    [rng.integers(9, size=rng.integers(1, 5)) for _ in range(23)],
  )
  index = np.flatnonzero(rows.real)[3:]
  packer = packing.Packer(max_tokens, shards, (6, 12), 4, share=share)
  seen = np.zeros((len(rows.groups), 4))
  ids = np.zeros((len(rows.groups), 4), np.int32)
  for microbatch in packer.microbatches(rows, index):
    assert packing.Shape(*microbatch.tokens.shape) in packer.shapes
    microbatch.scatter(microbatch.targets, ids)
    microbatch.scatter(
      np.ones(microbatch.mask.shape), into := np.zeros_like(seen)
    )
    seen += into
    for shard, n in zip(*np.nonzero(microbatch.mask), strict=True):
      _check_text(rows, microbatch, shard, n)
  expected = rows.completion_mask.copy()
  expected[:3] = False
  np.testing.assert_array_equal(seen, expected)
  for r in index:
    completion = rows.tokens[r, rows.prompt_lengths[r] : rows.lengths[r]]
    np.testing.assert_array_equal(ids[r, : len(completion)], completion)


def _check_text(rows, microbatch, shard, n):
  """Checks that the tokens that a completion token sees are those before it."""
  length = microbatch.tokens.shape[1]
  per_shard = len(microbatch.tokens) // len(microbatch.mask)
  sequence, last = divmod(microbatch.before[shard, n], length)
  sequence += shard * per_shard
  seen = microbatch.ends[sequence, : last + 1] > last
  row = microbatch.row[shard, n]
  count = rows.prompt_lengths[row] + microbatch.column[shard, n]
  np.testing.assert_array_equal(
    microbatch.tokens[sequence, : last + 1][seen], rows.tokens[row, :count]
  )
  np.testing.assert_array_equal(
    microbatch.positions[sequence, : last + 1][seen], np.arange(count)
  )


def test_shapes():
  shapes = packing.shapes(100, 2, (10, 30, 80))
  assert shapes == (
    packing.Shape(10, 10),
    packing.Shape(2, 30),
    # At least one sequence per shard.
    packing.Shape(2, 80),
  )
  # Large microbatches have smaller ones for the rest of a mini-batch.
  assert packing.shapes(800, 1, (10,)) == tuple(
    packing.Shape(n, 10) for n in (80, 20, 5)
  )


def test_shapes_of_many_sequences_have_shorter_ones():
  assert packing.shapes(16 * 2560, 16, (2560, 4608)) == (
    packing.Shape(16, 2560),
    packing.Shape(16, 4608),
    packing.Shape(16, 1280),
    packing.Shape(16, 640),
  )
  # 576 tokens, rounded up to a multiple of 128; less than 512 are too few.
  assert packing.shapes(0, 64, (1152,)) == (
    packing.Shape(64, 1152),
    packing.Shape(64, 640),
  )
  # First half of the sequences, one per shard, then half of their length.
  assert packing.shapes(16 * 2560, 8, (2560,)) == (
    packing.Shape(16, 2560),
    packing.Shape(8, 2560),
    packing.Shape(8, 1280),
  )
  # Too few sequences for a fourth of them, and for shorter ones.
  assert packing.shapes(8 * 2560, 4, (2560,)) == (
    packing.Shape(8, 2560),
    packing.Shape(8, 1280),
  )
  assert packing.shapes(4 * 2560, 4, (2560,)) == (packing.Shape(4, 2560),)


@pytest.mark.parametrize(
  ('long', 'largest', 'sizes'),
  [
    (8, False, [(8, 1024), (8, 512)]),
    # All rows must be in the largest shape.
    (8, True, [(8, 1024), (8, 1024)]),
    # The ninth long row needs a long sequence, which has room for the others.
    (9, False, [(8, 1024), (8, 1024)]),
  ],
)
def test_short_sequences_hold_the_last_rows(long, largest, sizes):
  lengths = [1024] * long + [256] * 6
  rows = _rows(
    [[1] * (n - 1) for n in lengths], [[2]] * len(lengths), longest_prompt=1023
  )
  packer = packing.Packer(8 * 1024, 8, (1024,), 4)
  index = np.arange(len(lengths))
  microbatches = list(packer.microbatches(rows, index, largest=largest))
  assert [m.tokens.shape for m in microbatches] == sizes
  packed = np.concatenate([m.rows for m in microbatches])
  np.testing.assert_array_equal(np.sort(packed), index)
  # The short rows are in the last microbatch.
  assert set(range(long, long + 6)) <= set(microbatches[-1].rows)


def test_the_last_rows_use_the_smallest_shapes_that_hold_them():
  rows = _rows([[1] * 6] * 21, [[2] * 4] * 21)
  packer = packing.Packer(160, 1, (10,), 4)
  sizes = [
    len(m.tokens) for m in packer.microbatches(rows, np.flatnonzero(rows.real))
  ]
  assert sizes == [16, 4, 4]


def test_completion_tokens_of_a_sequence_are_limited():
  rows = _rows([[1]] * 4, [[2] * 4] * 4, longest_prompt=26)
  packer = packing.Packer(30, 1, (30,), 4)
  counts = [
    m.mask.sum() for m in packer.microbatches(rows, np.flatnonzero(rows.real))
  ]
  # Four rows of 5 tokens would fit, but logits are planned for 2 * 4 tokens.
  assert counts == [8, 8]


def paper_rows(count, seed=0):
  """Returns lengths of rows as in the paper: 700 + 120 tokens, up to 2,560."""
  rng = np.random.default_rng(seed)
  prompts = np.clip(rng.gamma(9.0, 700 / 9, count), 64, 2048).astype(int)
  completions = np.clip(rng.gamma(4.0, 30, count), 8, 512).astype(int)
  return _rows(
    [np.zeros(n, int) for n in prompts],
    [np.zeros(n, int) for n in completions],
    longest_prompt=2048,
    longest_completion=512,
  )


@pytest.mark.parametrize(
  ('sequences', 'shards', 'minibatch_rows', 'most'),
  [
    *((n, 1, 256, 0.05) for n in (16, 64, 256)),
    # As many tokens as fit into 80 GB without recomputation; 2 and 4 devices.
    (6, 1, 256, 0.05),
    (16, 2, 256, 0.05),
    (16, 4, 256, 0.05),
    # The last sequences are shorter.
    (8, 4, 256, 0.05),
    (12, 1, 256, 0.05),
    # Every shard has a sequence.
    (16, 8, 256, 0.05),
    (8, 8, 256, 0.05),
    (16, 16, 256, 0.05),
    (16, 16, 3072, 0.05),
  ],
)
def test_padding_of_rows_as_in_the_paper(
  sequences, shards, minibatch_rows, most
):
  rows = paper_rows(3072)
  packer = packing.Packer(2560 * sequences, shards, (2560,), 512)
  order = np.random.default_rng(0).permutation(3072)
  for start in range(0, 3072, minibatch_rows):
    index = order[start : start + minibatch_rows]
    for _ in packer.microbatches(rows, index):
      pass
  assert packer.take_metrics()['packs/padding'] < most


@pytest.mark.parametrize('shards', [8, 16, 32])
@pytest.mark.parametrize('minibatch_rows', [128, 256, 320])
def test_short_sequences_do_not_cost_much_exchange(shards, minibatch_rows):
  rows = paper_rows(1280)
  counts, tokens = [], []
  for largest in (False, True):
    packer = packing.Packer(2560 * shards, shards, (2560,), 512)
    sizes = [
      m.tokens.size
      for start in range(0, 1280, minibatch_rows)
      for m in packer.microbatches(
        rows, np.arange(start, start + minibatch_rows), largest=largest
      )
    ]
    counts.append(len(sizes))
    tokens.append(sum(sizes))
  # Another microbatch must save a fourth of the largest one.
  more = counts[0] - counts[1]
  assert tokens[1] - tokens[0] >= more * 2560 * shards / 4
  assert more <= 0.05 * counts[1]


def test_packs_fill_sequences_as_well_as_possible():
  lengths = [5, 4, 4, 3, 2, 2]
  rows = _rows([[1] * (n - 1) for n in lengths], [[2]] * 6)
  packer = packing.Packer(20, 1, (10,), 4)
  (only,) = packer.microbatches(rows, np.arange(6))
  # The longest first would be 5 + 4, 4 + 3 + 2 and 2: three sequences.
  assert packer.take_metrics()['packs/padding'] == 0
  np.testing.assert_array_equal(only.rows, [0, 3, 5, 2, 1, 4])


@pytest.mark.parametrize('fills_best', [False, True])
def test_packs_have_no_more_completion_tokens_than_fit(fills_best):
  # Both fill a sequence of 10 tokens, with one completion token too many.
  short, long = row_packs.Pack([0], 4, 1), row_packs.Pack([1], 6, 3)
  packs = row_packs.Packs([short, long], fills_best=fills_best)
  assert [packs.take(10, 3) for _ in range(3)] == [[long], [short], []]


def test_groups_are_divided_between_episodes():
  # The second part is filled to the last row; an episode of five is not cut.
  episodes = np.repeat([7, 8, 9, 5], [3, 2, 2, 5])
  parts = row_packs.divide(np.arange(12), episodes, 4)
  assert [list(part) for part in parts] == [
    [0, 1, 2],
    [3, 4, 5, 6],
    [7, 8, 9, 10, 11],
  ]
  assert len(row_packs.divide(np.arange(12), episodes, 12)) == 1


def test_a_row_that_is_too_long_is_refused():
  rows = _rows([[1] * 8], [[2] * 4])
  with pytest.raises(ValueError, match='a row has 12 tokens'):
    next(packing.Packer(8, 1, (8,), 4).microbatches(rows, np.array([0])))
  # A sequence has room for two completions of the longest length.
  packer = packing.Packer(8, 1, (8,), 2)
  rows = _rows([[1]] * 2, [[2] * 4, [2] * 5], longest_completion=5)
  (only,) = packer.microbatches(rows, np.array([0]))
  assert only.mask.sum() == 4
  with pytest.raises(ValueError, match='5 completion tokens; must be at least'):
    next(packer.microbatches(rows, np.array([1])))
