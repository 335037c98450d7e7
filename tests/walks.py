"""Random walks in the toy corridor, with their exact values."""

import functools

import numpy as np
import pools

from envs import base
from gigpo_jax import rollout, sampler

ROOMS, MAX_STEPS = 4, 5
RIGHT = 0.6  # Probability of a step to the right.
TEXTS = ('<action>left</action>', '<action>right</action>')


class Tokenizer:
  """Prompts of one token; a response is the index of its text."""

  def fit(self, prompts, short_prompts, *, max_tokens, policy):
    del short_prompts, max_tokens, policy
    return [(np.zeros(1, np.int32), False) for _ in prompts]

  def decode(self, ids):
    return [TEXTS[i[0]] for i in ids]


class RandomWalk:
  """A policy that steps to the right with probability RIGHT.

  It answers the latest `at_once` requests first, and records streams.
  """

  def __init__(self, at_once: int = 100):
    self._at_once, self._queue, self.streams = at_once, [], []
    self.stats, self.is_shared, self.compilations = sampler.Stats(), False, 0
    self.text_size = 0

  @property
  def busy(self) -> bool:
    return bool(self._queue)

  def load(self, params, base=None, *, trace=False):
    del params, base, trace

  def finish(self):
    assert not self.busy

  def end_conversation(self, conversation):
    del conversation

  def take_stats(self):
    return sampler.Stats()

  def submit(self, request) -> int:
    self.streams.append(request.stream)
    self._queue.append((len(self.streams), request.stream))
    return len(self.streams)

  def step(self):
    done = self._queue[-self._at_once :]
    del self._queue[-self._at_once :]
    return [(ticket, self._answer(stream)) for ticket, stream in done]

  def _answer(self, stream) -> sampler.Completion:
    goes_right = np.random.default_rng((7, *stream)).random() < RIGHT
    ids = np.array([int(goes_right)], np.int32)
    return sampler.Completion(ids, np.zeros(1), np.zeros(1), 'stop')


def play(batches, *, num_envs: int = 8, at_once: int = 100, **env):
  """Plays batches; returns their episodes and the streams of requests."""
  walk = RandomWalk(at_once)
  kwargs = {'rooms': ROOMS, 'max_steps': MAX_STEPS} | env
  with pools.make(num_workers=0, num_envs=num_envs, env=kwargs) as pool:
    runner = rollout.EpisodeRunner(pool, walk, Tokenizer(), 99, 'error')
    return runner.run_batches({}, batches), walk.streams


def make_groups(size: int = 2, num_tasks: int = 2) -> rollout.EpisodeBatch:
  return rollout.EpisodeBatch(
    [base.Task('train', n) for n in range(num_tasks)],
    size,
    (rollout.TRAIN, 3),
    sampler.Sampling(),
  )


@functools.cache
def exact_value(room: int, step: int, discount: float) -> float:
  """The walk's expected discounted return, by dynamic programming."""
  if step == MAX_STEPS:
    return 0.0
  left, right = max(0, room - 1), room + 1
  after = 10.0 / discount
  if right < ROOMS - 1:
    after = exact_value(right, step + 1, discount)
  back = exact_value(left, step + 1, discount)
  return discount * (RIGHT * after + (1 - RIGHT) * back)


def exact_values(states, discount: float) -> np.ndarray:
  values = []
  for start in states.starts:
    room = start.task.index % (ROOMS - 1)
    for step in start.steps:
      room = max(0, room + (1 if 'right' in step.response else -1))
    values.append(exact_value(room, len(start.steps), discount))
  return np.array(values)
