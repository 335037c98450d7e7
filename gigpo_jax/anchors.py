"""Anchor ids: which steps of a group were taken in the same state.

Input: the states of episodes, as reported by their environments. Output: an
integer for each state, equal where a group's steps are to be compared (GiGPO,
Eq. 6). The texts themselves are compared, so no hash can collide.
"""

import dataclasses
import difflib
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import rapidfuzz

from gigpo_jax import deprecated, options

# Environments may report these, and always `state`: the anchor that best tells
# their states apart. `similarity` merges similar observations, `turn` uses only
# the turn's index, `group` nothing, and `shuffled` permutes the observations of
# a group.
REPORTED = ('observation', 'observation_and_actions')
ANCHORS = (*REPORTED, 'state', 'similarity', 'turn', 'group', 'shuffled')


# Longer states are merged only if they are equal: a comparison of two of them
# could take seconds.
_MAX_COMPARED_CHARS = 8192

# Separates the permutations from other random streams of a run.
_SHUFFLING = 1_634_624_371


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of anchors, for all algorithms.

  Attributes:
    anchor: observation (released code), observation_and_actions, state,
      similarity, turn, group or shuffled. state is the anchor by which the
      environment tells states apart best. The last two are controls: group
      treats all states of a group as one, and shuffled permutes observations
      within a group.
    similarity_threshold: lowest Ratcliff-Obershelp ratio of equal anchors, for
      similarity.
    anchor_history: number of earlier anchors that must also be equal.
  """

  anchor: str = options.choice('observation', ANCHORS)
  similarity_threshold: float = options.number(0.9, low=0, high=1)
  anchor_history: int = options.number(0, low=0)

  def __post_init__(self):
    options.check(self)


def assign_ids(
  episodes: Sequence[tuple[int, Sequence[str | None]]],
  *,
  anchor: str = 'observation',
  threshold: float = 0.9,
  history: int = 0,
  has_final_state: bool = False,
  agents: Sequence[Sequence[str]] | None = None,
  seed: Sequence[int] = (0,),
) -> list[np.ndarray]:
  """Assigns an anchor id to each state of each episode, int32.

  Args:
    episodes: (group, states in order); None for an unknown state.
    anchor: one of ANCHORS.
    threshold: for `similarity`: Ratcliff-Obershelp ratio at or above which two
      states of a group are merged; see `merge_similar`.
    history: number of preceding states that must be equal, too; missing states
      before an episode's first one are equal to each other.
    has_final_state: whether the last state of each episode is its final state,
      in which no step was taken; a final state starts no cluster.
    agents: for `similarity`: see `merge_similar`.
    seed: for `shuffled`: see `shuffle`.

  Returns:
    Ids from 0, and -1 for unknown states.

  Raises:
    ValueError: if the anchor is unknown.
  """
  options.check_choice('anchor', anchor, ANCHORS)
  states = [
    [_anchor_text(state, t, anchor) for t, state in enumerate(states)]
    for _, states in episodes
  ]
  if anchor == 'similarity':
    states = merge_similar(
      [group for group, _ in episodes],
      states,
      threshold=threshold,
      has_final_state=has_final_state,
      agents=agents,
    )
  keys = []
  for (group, _), texts in zip(episodes, states, strict=True):
    padded = [None] * history + texts
    keys.append(
      [
        (group, *padded[t : t + history + 1]) if text is not None else None
        for t, text in enumerate(texts)
      ]
    )
  if anchor == 'shuffled':
    keys = shuffle(
      [group for group, _ in episodes],
      keys,
      seed=seed,
      has_final_state=has_final_state,
    )
  ids: dict[tuple, int] = {}
  return [
    np.array(
      [-1 if k is None else ids.setdefault(k, len(ids)) for k in own],
      np.int32,
    )
    for own in keys
  ]


def digests(texts: Sequence[str]) -> np.ndarray:
  """Returns 128-bit hashes of states, uint32 [R, 4], for `advantages.gigpo`.

  Among 10^12 hashes, the probability of a collision is 10^-15.
  """
  joined = b''.join(
    hashlib.blake2b(text.encode(), digest_size=16).digest() for text in texts
  )
  return np.frombuffer(joined, np.uint32).reshape(-1, 4)


def _anchor_text(state: str | None, turn: int, anchor: str) -> str | None:
  if state is None or anchor not in ('turn', 'group'):
    return state
  return str(turn) if anchor == 'turn' else ''


def merge_similar(
  groups: Sequence[int],
  episodes: Sequence[Sequence[str | None]],
  *,
  threshold: float,
  has_final_state: bool = False,
  agents: Sequence[Sequence[str]] | None = None,
) -> list[list[str | None]]:
  """Replaces each state by the first similar state of its group and agent.

  Clustering is greedy, in order, and compares a state with the first member
  of each cluster, as GiGPO's released code does. The similarity is the
  Ratcliff-Obershelp ratio 2M/T as difflib computes it: of a first member of
  200 characters or more, it ignores those that are more than 1 % of the text.
  The ratio of the longest common subsequence bounds it from above and is a
  hundred times as fast, so it is tested first. States of more than 8,192
  characters are merged only if they are equal.

  Args:
    groups: group of each episode.
    episodes: states of each episode; None stays None.
    threshold: ratio at or above which two states are merged, at most 1.
    has_final_state: whether an episode's last state is its final state, which
      starts no cluster.
    agents: agent of each state of each episode; None: there is only one.
  """
  agents = agents or [[''] * len(states) for states in episodes]
  keyed = [
    [(group, agent, text) for agent, text in zip(own, states, strict=True)]
    for group, own, states in zip(groups, agents, episodes, strict=True)
  ]
  clusters: dict[tuple[int, str], list[str]] = {}
  first: dict[tuple[int, str, str | None], str] = {}
  end = -1 if has_final_state else None
  visited = [key for keys in keyed for key in keys[:end]]
  final = [keys[-1] for keys in keyed if keys] if has_final_state else []
  for n, key in enumerate(visited + final):
    group, agent, text = key
    if text is None or key in first:
      continue
    members = clusters.setdefault((group, agent), [])
    match = next((m for m in members if _is_similar(text, m, threshold)), None)
    if match is None and n < len(visited):
      members.append(text)
    first[key] = text if match is None else match
  return [[first.get(key) for key in keys] for keys in keyed]


def shuffle(
  groups: Sequence[int],
  episodes: Sequence[Sequence[Any]],
  *,
  seed: Sequence[int],
  has_final_state: bool = False,
) -> list[list[Any]]:
  """Permutes the states of each group among its steps.

  This is a control: sizes of anchor groups stay the same, but the steps of an
  anchor group have nothing in common.

  Args:
    groups: group of each episode.
    episodes: states of each episode, or what stands for them.
    seed: non-negative integers, such as (seed of the run, iteration). The
      permutation of a group is a function of them and the group.
    has_final_state: whether an episode's last state is its final state, which
      stays in place.
  """
  shuffled = [list(states) for states in episodes]
  for group in sorted(set(groups)):
    steps = [
      (episode, t)
      for episode, states in enumerate(episodes)
      if groups[episode] == group
      for t in range(len(states) - has_final_state)
    ]
    rng = np.random.Generator(np.random.Philox([*seed, _SHUFFLING, group]))
    for (episode, t), n in zip(steps, rng.permutation(len(steps)), strict=True):
      source, source_t = steps[n]
      shuffled[episode][t] = episodes[source][source_t]
  return shuffled


def _is_similar(text: str, member: str, threshold: float) -> bool:
  if max(len(text), len(member)) > _MAX_COMPARED_CHARS:
    return False
  # The two libraries may differ in the last bits.
  limit = max(0.0, threshold - 1e-9)
  bound = rapidfuzz.distance.Indel.normalized_similarity(
    text, member, score_cutoff=limit
  )
  if bound < limit:
    return False
  return difflib.SequenceMatcher(None, text, member).ratio() >= threshold


__getattr__ = deprecated.names(
  __name__,
  {'KINDS': 'ANCHORS', 'number': 'assign_ids', 'similar': 'merge_similar'},
  {'number': {'kind': 'anchor', 'ends': 'has_final_state'}},
)
