"""Options of rollouts, a section of the config."""

import dataclasses
from collections.abc import Sequence

from gigpo_jax import conversation, options, sampler, sampling, tokenizer
from gigpo_jax.models import kv_cache

SCHEDULES = ('async', 'lockstep')


def _is_horizon(horizon: Sequence) -> bool:
  """Returns whether it is pairs (iteration, turns), iterations increasing."""
  for pair in horizon:
    if not isinstance(pair, tuple) or [*map(type, pair)] != [int, int]:
      return False
  starts = [start for start, _ in horizon]
  rising = starts == sorted(set(starts)) and min(starts, default=0) >= 0
  return rising and all(turns >= 1 for _, turns in horizon)


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of collecting episodes, `config.rollout`; see configs/base.py."""

  groups: int = options.number(16, low=1)
  episodes_per_group: int = options.number(8, low=1)
  max_prompt_tokens: int = options.number(2048, low=1)
  max_completion_tokens: int = options.number(512, low=1)
  prompt_overflow: str = options.choice(
    'drop_history', tokenizer.OVERFLOW_POLICIES
  )
  earlier_thinking: str = options.choice('keep', conversation.THINKING)
  prefixes: tuple[str, ...] = options.texts()
  forced_members: int = options.number(0, low=0)
  horizon: tuple[tuple[int, int], ...] = options.field(
    (),
    _is_horizon,
    'must be pairs (iteration, turns) with rising iterations of at least 0 and '
    'turns of at least 1',
  )
  temperature: float = options.field(
    1.0,
    lambda value: sampling.MIN_TEMPERATURE <= value < float('inf'),
    f'out of range; must be at least {sampling.MIN_TEMPERATURE}; greedy '
    'episodes of a group are identical',
  )
  top_p: float = options.number(1.0, above=0, high=1)
  top_k: int = options.field(
    0,
    lambda count: count == 0 or 2 <= count <= options.MAX_INT,
    'out of range; must be 0, which is off, or at least 2; greedy episodes of '
    'a group are identical',
  )
  min_p: float = options.number(0.0, low=0, below=1, note='0 is off')
  stop_at_action: bool = False
  schedule: str = options.choice('async', SCHEDULES)
  weights: str = options.choice('model', sampler.WEIGHTS)
  cache: str = options.choice('model', kv_cache.TYPES)
  tensor: int = options.number(
    0, low=0, note='0 is the smallest that fits the memory'
  )
  decode_tokens: int = options.number(8, low=1)
  draft_tokens: int = options.number(0, low=0, note='0 is off')
  reuse_cache: str = options.choice('none', sampler.REUSE)
  prefill_chunk: int = options.number(0, low=0, note='0 is the whole prompt')
  parked_slots: int = options.number(0, low=0)
  prompt_buckets: tuple[int, ...] = options.sizes(
    (512, 1024, 2048), or_none=True
  )
  batch_buckets: tuple[int, ...] = options.sizes((32, 128))

  def __post_init__(self):
    options.check(self)
    forced = self.forced_members * len(self.prefixes)
    if forced > self.episodes_per_group:
      raise ValueError(
        f'forced_members={self.forced_members}: {len(self.prefixes)} prefixes '
        f'need {forced} members of a group; rollout.episodes_per_group='
        f'{self.episodes_per_group} must be at least that'
      )
