"""Measure speculative decoding: accepted tokens, and time of rollouts.

    python benchmarks/drafts.py RUN/episodes
    python benchmarks/drafts.py --config=configs/alfworld.py:mini

The first command measures how many tokens a step would accept. It replays the
responses of a logged run (`--config.episodes.every=1`). A draft of a response
continues the last n tokens as an earlier response did: of the same episode, or
of any episode of the group in an earlier turn. A sampled token is a function of
the request alone, so a draft is accepted exactly as far as it equals the logged
response. Nothing is timed.

The second command plays the first training episodes of a config without drafts
and with drafts of two and four tokens, with two numbers of `decode_tokens`, in
alternating rounds, and checks that the sampled tokens are the same.
"""

import argparse
import collections
import contextlib
import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Sequence

import jax
import numpy as np

from gigpo_jax import builders, episodes, rollout, trajectory
from gigpo_jax import config as config_lib
from gigpo_jax.run import model_builders
from gigpo_jax.tools import sweep_runs

SOURCES = ('own', 'group')
# `rollout.draft_tokens` and `rollout.decode_tokens` of timed rollouts.
SETTINGS = ((0, 8), (0, 3), (2, 3), (4, 3), (4, 8))


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


def time_rollouts(name: str, rounds: int) -> None:
  """Plays training episodes with each of SETTINGS; prints a table.

  Args:
    name: a config, such as configs/alfworld.py:mini.
    rounds: number of timed rollouts of each setting.
  """
  runners, params = {}, None
  config = sweep_runs.Run('', name, 0).load()
  tasks = builders.make_task_sampler(config).at(0)
  with contextlib.ExitStack() as stack:
    pool = stack.enter_context(builders.make_pool(config))
    for setting in SETTINGS:
      config.rollout.draft_tokens, config.rollout.decode_tokens = setting
      config_lib.validate(config)
      policy = model_builders.make_model_bundle(config)
      params = policy.load() if params is None else params
      policy.sampler.warm_up(params)
      runners[setting] = builders.make_runner(config, policy, pool)
    stack.enter_context(jax.set_mesh(policy.mesh))
    secs, played = collections.defaultdict(list), {}
    for _ in range(1 + rounds):
      for setting, runner in runners.items():
        played[setting] = runner.run(
          params,
          tasks,
          episodes_per_group=config.rollout.episodes_per_group,
          stream=(rollout.TRAIN, 0),
          sampling=model_builders.make_sampling(config),
        )
        secs[setting].append(runner.clock.total_secs)
  print('| draft | decode_tokens | tokens/step | s | speed | same tokens |')
  print('|---|---|---|---|---|---|')
  plain = statistics.median(secs[SETTINGS[0]][1:])
  for setting, runner in runners.items():
    median = statistics.median(secs[setting][1:])
    per_step = runner.stats.decode_tokens / runner.stats.active_steps
    same = _ids(played[setting]) == _ids(played[SETTINGS[0]])
    print(
      f'| {setting[0]} | {setting[1]} | {per_step:.2f} | {median:.2f} '
      f'| {plain / median:.2f} | {"yes" if same else "no"} |'
    )


def _ids(trajectories: Sequence[trajectory.Trajectory]) -> list:
  """Returns the sampled tokens of all episodes."""
  return [[s.completion_ids.tolist() for s in t.steps] for t in trajectories]


def main() -> None:
  """Runs the command line."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('folders', nargs='*')
  parser.add_argument('--config')
  parser.add_argument('--rounds', type=int, default=5)
  parser.add_argument('--sizes', type=int, nargs='+', default=[1, 2, 3])
  parser.add_argument('--draft', type=int, default=4)
  flags = parser.parse_args()
  if bool(flags.folders) == bool(flags.config):
    parser.error('needs folders of episodes, or --config')
  if flags.config:
    time_rollouts(flags.config, flags.rounds)
    return
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
