"""Measure how many tokens a step of speculative decoding would accept.

    python benchmarks/drafts.py RUN/episodes

Replays the responses of a logged run (`--config.episodes.every=1`). A draft of
a response continues the last n tokens as an earlier response did: of the same
episode, or of any episode of the group in an earlier turn. A sampled token is a
function of the request alone, so a draft is accepted exactly as far as it
equals the logged response. Nothing is timed.
"""

import argparse
import collections
import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from gigpo_jax import episodes

SOURCES = ('own', 'group')


@dataclasses.dataclass
class NGrams:
  """The continuations of n tokens in all texts so far.

  Args:
    size: n.
    draft: maximum number of tokens of a draft.
  """

  size: int
  draft: int
  _ends: dict[tuple[int, ...], tuple[list[int], int]] = dataclasses.field(
    default_factory=dict
  )

  def add(self, ids: list[int]) -> None:
    """Adds a text; newer continuations replace older ones."""
    # A text starts with n times -1, so that its start can be drafted.
    ids = [-1] * self.size + ids
    for end in range(self.size, len(ids)):
      self._ends[tuple(ids[end - self.size : end])] = ids, end

  def propose(self, ids: list[int]) -> list[int]:
    """Returns a draft of the tokens after `ids`, possibly empty."""
    last = ([-1] * self.size + ids)[-self.size :]
    if tuple(last) not in self._ends:
      return []
    text, end = self._ends[tuple(last)]
    return text[end : end + self.draft]


def steps_of(ids: list[int], grams: NGrams) -> int:
  """Returns the decoding steps of a response: each adds a token and a draft."""
  position = steps = 0
  while position < len(ids):
    draft = grams.propose(ids[:position])
    left = ids[position:]
    accepted = next(
      (n for n, (a, b) in enumerate(zip(draft, left, strict=False)) if a != b),
      min(len(draft), len(left)),
    )
    position, steps = position + accepted + 1, steps + 1
  return steps


def groups(dataset: Iterable[dict]) -> Iterator[list[dict]]:
  """Yields the episodes of each group."""
  by_group = collections.defaultdict(list)
  for episode in dataset:
    by_group[int(episode['iteration']), int(episode['group'])].append(episode)
  yield from by_group.values()


def responses(episode: dict) -> list[list[int]]:
  """Returns the ids of each response of an episode."""
  return [
    list(map(int, step['completion_ids']))
    for step in episode['steps']
    if len(step['completion_ids'])
  ]


def tokens_per_step(
  texts: Sequence[Sequence[list[int]]], source: str, size: int, draft: int
) -> tuple[int, int]:
  """Returns the tokens of a group's responses and their decoding steps.

  Args:
    texts: responses of each episode, by turn.
    source: one of SOURCES.
    size: n.
    draft: maximum number of tokens of a draft.
  """
  grams = [NGrams(size, draft) for _ in texts]
  if source == 'group':
    grams = [grams[0]] * len(texts)
  tokens = steps = 0
  for turn in range(max(map(len, texts))):
    current = [(n, t[turn]) for n, t in enumerate(texts) if turn < len(t)]
    for n, ids in current:
      tokens, steps = tokens + len(ids), steps + steps_of(ids, grams[n])
    for n, ids in current:
      grams[n].add(ids)
  return tokens, steps


def main() -> None:
  """Runs the command line."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('folders', nargs='+')
  parser.add_argument('--sizes', type=int, nargs='+', default=[1, 2, 3])
  parser.add_argument('--draft', type=int, default=4)
  flags = parser.parse_args()
  print('| episodes | responses | tokens each | source | n | tokens/step |')
  print('|---|---|---|---|---|---|')
  for folder in flags.folders:
    texts = [
      [responses(episode) for episode in group]
      for group in groups(episodes.open_dataset(folder))
    ]
    flat = [ids for group in texts for episode in group for ids in episode]
    for source in SOURCES:
      for size in flags.sizes:
        counts = [
          tokens_per_step(group, source, size, flags.draft) for group in texts
        ]
        tokens, steps = np.sum(counts, axis=0)
        print(
          f'| {sum(map(len, texts))} | {len(flat)} '
          f'| {np.mean(list(map(len, flat))):.0f} | {source} | {size} '
          f'| {tokens / steps:.2f} |'
        )


if __name__ == '__main__':
  main()
