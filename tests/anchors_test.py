"""Tests of anchor ids: exact, with history, by turn and by similarity."""

import difflib

import numpy as np
import pytest

from gigpo_jax import anchors

EPISODES = [
  (0, ['a', 'b', 'a', None]),
  (0, ['c', 'b', 'a', 'b']),
  (1, ['a', 'b', None]),
]


def assign(**kwargs):
  return [ids.tolist() for ids in anchors.assign_ids(EPISODES, **kwargs)]


def test_equal_states_of_a_group_share_an_id():
  assert assign() == [[0, 1, 0, -1], [2, 1, 0, 1], [3, 4, -1]]


def test_history_of_preceding_states():
  # a; a b; b a | c; c b; b a; a b | a; a b of another group.
  assert assign(history=1) == [[0, 1, 2, -1], [3, 4, 2, 1], [5, 6, -1]]


def test_turn_ids():
  assert assign(anchor='turn') == [[0, 1, 2, -1], [0, 1, 2, 3], [4, 5, -1]]


def test_similar_states_merge_into_the_first():
  # 'abcd' and 'abce' share 3 of 4: ratio 0.75.
  states = [['abcd', 'abce', 'abef'], ['abce', None]]
  merged = anchors.merge_similar([0, 0], states, threshold=0.75)
  assert merged == [['abcd', 'abcd', 'abef'], ['abcd', None]]
  assert anchors.merge_similar([0, 0], states, threshold=0.76) == states
  # Not across groups.
  assert anchors.merge_similar([0, 1], states, threshold=0.75)[1] == [
    'abce',
    None,
  ]


@pytest.mark.parametrize('threshold', [0.5, 0.8, 0.95, 1.0])
def test_similarity_matches_difflib(threshold):
  rng = np.random.default_rng(0)
  texts = [''.join(rng.choice(list('ab c'), 12)) for _ in range(60)]
  texts += [text[:6] + 'x' + text[7:] for text in texts[:30]]
  members, expected = [], []
  for text in texts:
    match = next(
      (
        m
        for m in members
        if difflib.SequenceMatcher(None, text, m).ratio() >= threshold
      ),
      None,
    )
    if match is None:
      members.append(text)
    expected.append(match or text)
  # Equal texts share one representative and are compared only once.
  assert anchors.merge_similar([0], [texts], threshold=threshold) == [expected]
