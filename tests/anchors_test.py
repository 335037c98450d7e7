"""Tests of anchor ids: exact, with history, by turn and by similarity."""

import difflib

import numpy as np
import pytest
import rapidfuzz

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


def test_all_states_of_a_group_are_one():
  assert assign(anchor='group') == [[0, 0, 0, -1], [0, 0, 0, 0], [1, 1, -1]]


def test_shuffled_states_are_permuted_within_their_group():
  episodes = [(0, [*'abcabc', 'x']), (1, [*'ddef', None]), (0, [*'aab', 'y'])]
  groups, states = zip(*episodes, strict=True)
  shuffled = anchors.shuffle(groups, states, seed=(3, 5), has_final_state=True)
  for group in (0, 1):
    given, permuted = (
      [s[:-1] for g, s in zip(groups, lists, strict=True) if g == group]
      for lists in (states, shuffled)
    )
    assert sorted(sum(given, [])) == sorted(sum(permuted, []))
  assert [s[-1] for s in shuffled] == ['x', None, 'y']
  assert [len(s) for s in shuffled] == [7, 5, 4]
  assert shuffled != [list(s) for s in states]
  # A function of the seed and the group alone.
  other = anchors.shuffle([1], [states[1]], seed=(3, 5), has_final_state=True)
  assert other == [shuffled[1]]
  for seed in ((3, 6), (4, 5)):
    assert shuffled != anchors.shuffle(
      groups, states, seed=seed, has_final_state=True
    )
  ids = anchors.assign_ids(
    episodes, anchor='shuffled', has_final_state=True, seed=(3, 5)
  )
  expected = anchors.assign_ids(
    list(zip(groups, shuffled, strict=True)), has_final_state=True
  )
  assert [x.tolist() for x in ids] == [x.tolist() for x in expected]


@pytest.mark.parametrize('history', [0, 1, 2])
def test_shuffled_groups_keep_their_sizes(history):
  episodes = [(0, [*'abcab', 'end'])] * 4 + [(1, [*'abbab', 'end'])] * 2
  sizes = []
  for anchor in ('observation', 'shuffled'):
    ids = anchors.assign_ids(
      episodes, anchor=anchor, history=history, has_final_state=True
    )
    counts = np.unique([i[:-1] for i in ids], return_counts=True)[1]
    sizes.append(sorted(counts.tolist()))
  assert sizes[0] == sizes[1]


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


def test_long_states_merge_only_if_they_are_equal(monkeypatch):
  # 8,191 of 8,192 characters are equal.
  short = ['a' * 8191 + 'b', 'a' * 8191 + 'c']
  assert anchors.merge_similar([0], [short], threshold=0.9) == [[short[0]] * 2]
  monkeypatch.setattr(difflib, 'SequenceMatcher', pytest.fail)
  monkeypatch.setattr(rapidfuzz.distance, 'Indel', None)
  long = ['x' + text for text in (*short, short[0])]
  assert anchors.merge_similar([0], [long], threshold=0.9) == [long]


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
