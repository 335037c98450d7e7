"""Which steps of a group were taken in the same state: numbers for anchors.

Input: the states of episodes, as their environments tell them. Output: an
integer for each, equal where a group's steps are to be compared (GiGPO,
Eq. 6). Exact: a dictionary of the texts themselves, so that no hash collides.
"""

import difflib
import hashlib
from collections.abc import Sequence

import numpy as np
import rapidfuzz

# What environments tell: `observation` and `observation_and_actions`. Made of
# them: similar ones joined, or none but the number of the turn.
KINDS = ('observation', 'observation_and_actions', 'similarity', 'turn')


def number(
  episodes: Sequence[tuple[int, Sequence[str | None]]],
  *,
  kind: str = 'observation',
  threshold: float = 0.9,
  history: int = 0,
  ends: bool = False,
) -> list[np.ndarray]:
  """Returns ids of the states of each episode, int32.

  Args:
    episodes: (group, states in order); None where a state is not known.
    kind: one of KINDS.
    threshold: Ratcliff-Obershelp ratio from which two states of a group are
      one, for similarity; see `similar`.
    history: how many states before it have to be equal, too; what lies before
      an episode's first one equals itself.
    ends: whether the last state of each episode is where it ended, in which
      no step was taken: nothing is joined on account of it.

  Returns:
    Ids from 0 on, and -1 where a state is not known.
  """
  states = [
    [_named(state, t, kind) for t, state in enumerate(states)]
    for _, states in episodes
  ]
  if kind == 'similarity':
    states = similar(
      [group for group, _ in episodes],
      states,
      threshold=threshold,
      ends=ends,
    )
  ids: dict[tuple, int] = {}
  found = []
  for (group, _), told in zip(episodes, states, strict=True):
    padded = [None] * history + told
    keys = [
      (group, *padded[t : t + history + 1]) if told[t] is not None else None
      for t in range(len(told))
    ]
    found.append(
      np.array(
        [-1 if k is None else ids.setdefault(k, len(ids)) for k in keys],
        np.int32,
      )
    )
  return found


def digests(texts: Sequence[str]) -> np.ndarray:
  """Returns 128-bit hashes of states, uint32 [R, 4], for `advantages.gigpo`.

  Among 10^12 of them two that are equal have a chance of 10^-15.
  """
  joined = b''.join(
    hashlib.blake2b(text.encode(), digest_size=16).digest() for text in texts
  )
  return np.frombuffer(joined, np.uint32).reshape(-1, 4)


def _named(state: str | None, turn: int, kind: str) -> str | None:
  return str(turn) if kind == 'turn' and state is not None else state


def similar(
  groups: Sequence[int],
  episodes: Sequence[Sequence[str | None]],
  *,
  threshold: float,
  ends: bool = False,
) -> list[list[str | None]]:
  """Replaces each state by the first similar one of its group.

  Greedy, in order, against the first member of each cluster, with the
  Ratcliff-Obershelp ratio 2M/T as difflib computes it: the similarity
  grouping of GiGPO's released code. It is never above the ratio of the longest
  common subsequence, which is had a hundred times as fast and looked at first.

  Args:
    groups: of the episodes.
    episodes: states of each; None stays.
    threshold: ratio from which two are one, at most 1.
    ends: whether the last ones found no cluster; see `number`.
  """
  clusters: dict[int, list[str]] = {}
  first: dict[tuple[int, str], str] = {}
  told = list(zip(groups, episodes, strict=True))
  taken = [(g, text) for g, s in told for text in (s[:-1] if ends else s)]
  ended = [(g, s[-1]) for g, s in told if s] if ends else []
  for n, (group, text) in enumerate(taken + ended):
    if text is None or (group, text) in first:
      continue
    members = clusters.setdefault(group, [])
    match = next((m for m in members if _alike(text, m, threshold)), None)
    if match is None and n < len(taken):
      members.append(text)
    first[group, text] = text if match is None else match
  return [
    [None if text is None else first[group, text] for text in states]
    for group, states in zip(groups, episodes, strict=True)
  ]


def _alike(text: str, member: str, threshold: float) -> bool:
  most = rapidfuzz.distance.Indel.normalized_similarity(text, member)
  # Its last bits are not difflib's.
  if most < threshold - 1e-9:
    return False
  return difflib.SequenceMatcher(None, text, member).ratio() >= threshold
