"""Reward functions for tests: good ones, and one for each fault."""

import dataclasses
import os
import time


def brevity(episode):
  """A reward per turn: 1 for a response of fewer than 4 characters."""
  return [float(len(turn.response) < 4) for turn in episode.turns]


def solved(episode):
  """A rubric: one number for the episode."""
  return 2.0 if episode.success else -1.0


@dataclasses.dataclass(frozen=True)
class Faulty:
  """Has a fault in the episodes of some tasks."""

  faults: tuple = ()

  def __call__(self, episode):
    fault = dict(self.faults).get(episode.task.index, '')
    if fault == 'raise':
      raise RuntimeError('no opinion')
    if fault == 'hang':
      time.sleep(60)
    if fault == 'die':
      os._exit(3)
    values = {'short': [1.0], 'text': 'good', 'nan': float('nan')}
    return values.get(fault, 0.5)


@dataclasses.dataclass(frozen=True)
class Patient:
  """Takes up to 40 seconds."""

  longest_call_secs = 40.0

  def __call__(self, episode):
    return 0.0


@dataclasses.dataclass
class Wrong:
  """Refuses its option."""

  size: int = 1

  def __post_init__(self):
    if self.size < 0:
      raise ValueError(f'size={self.size}: must not be negative')


class Plain:
  """Not a dataclass."""
