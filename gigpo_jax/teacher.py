"""Rows of a teacher in the updates of RL.

    L = (1 - mu) L_RL + mu L_teacher

mu rises linearly over the warm-up, and then falls from its peak to its valley
along half a cosine (CHORD, arXiv:2508.11408). L_teacher is one of

- imitation (CHORD): the negative log-likelihood of responses of the
  environment's expert, or of the successful episodes of a run. With
  token_weight=phi, each token has the constant weight p (1 - p), p the policy's
  probability of the token, so that tokens that the policy knows, or finds
  absurd, change it little;
- replay: the surrogate of RL on the successful episodes of a run, with their
  advantages, and ratios to their stored log-probs;
- distillation: the surrogate of RL on steps of the iteration, where the
  advantage of a token is log p(token | prompt with a solution) - log p(token |
  prompt); see `privileged`.

Both losses are normalized by their own rows in every optimizer step. The
teacher's rows have a program of their own. It does not run if mu is 0, so that
the update is that of RL, bit for bit.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from jaxtyping import Array, Bool, Float

import envs
from gigpo_jax import batch, losses, options, token_batch

LOSSES = ('imitation', 'replay', 'distillation')
TOKEN_WEIGHTS = ('phi', 'none')


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of a teacher, `config.teacher`.

  Attributes:
    mu_peak: the largest mu; 0 is no teacher.
    mu_valley: mu after the decay.
    warmup_iterations: iterations in which mu rises from 0 to its peak.
    decay_iterations: iterations in which it falls to its valley; 0 keeps it at
      its peak.
    loss: one of LOSSES.
    token_weight: one of TOKEN_WEIGHTS.
    data: folder of recorded episodes; '' is the environment's expert.
    num_episodes: episodes of the expert.
    rows: rows of the teacher in an iteration.
  """

  mu_peak: float = options.number(0.0, low=0, high=1, note='0 is off')
  mu_valley: float = options.number(0.0, low=0, high=1)
  warmup_iterations: int = options.number(0, low=0)
  decay_iterations: int = options.number(0, low=0, note='0 is constant')
  loss: str = options.choice('imitation', LOSSES)
  token_weight: str = options.choice('phi', TOKEN_WEIGHTS)
  data: str = ''
  num_episodes: int = options.number(200, low=1)
  rows: int = options.number(64, low=1)

  def __post_init__(self):
    options.check(self)
    if self.mu_valley > self.mu_peak:
      raise ValueError(
        f'mu_valley={self.mu_valley}: above mu_peak={self.mu_peak}; must be at '
        'most that'
      )

  def mu(self, iteration: int) -> float:
    """Returns the weight of the teacher's loss in an iteration."""
    if iteration < self.warmup_iterations:
      return self.mu_peak * iteration / self.warmup_iterations
    if not self.decay_iterations:
      return self.mu_peak
    progress = (iteration - self.warmup_iterations) / self.decay_iterations
    cosine = (1 + math.cos(math.pi * min(progress, 1.0))) / 2
    return self.mu_valley + (self.mu_peak - self.mu_valley) * cosine


@dataclasses.dataclass(frozen=True)
class Imitation:
  """L_teacher of imitation: the weighted negative log-likelihood of tokens.

  As all of the update, it is that of the policy at `rollout.temperature`;
  sft.py's is at 1.

  Attributes:
    token_weight: one of TOKEN_WEIGHTS.
  """

  token_weight: str = 'phi'

  columns = ()

  def __call__(
    self, outputs: token_batch.PolicyOutputs, tokens: token_batch.TokenBatch
  ) -> token_batch.TokenLoss:
    """Returns the loss of each token; it has no metrics."""
    log_probs = jnp.where(tokens.mask, outputs.log_probs, 0)
    if self.token_weight == 'none':
      return -log_probs, {}
    return -uncertainty(jax.lax.stop_gradient(log_probs)) * log_probs, {}


def uncertainty(log_probs: Float[Array, '...']) -> Float[Array, '...']:
  """Returns p (1 - p): the token weight of CHORD-phi."""
  probabilities = jnp.exp(log_probs)
  return probabilities * (1 - probabilities)


def make_loss(
  options: Options, policy_options: Mapping[str, Any]
) -> token_batch.Loss | None:
  """Returns the loss of a teacher's rows; None without a teacher.

  Args:
    options: the options.
    policy_options: `config.loss`, of which the surrogate is used.
  """
  if not options.mu_peak:
    return None
  if options.loss == 'imitation':
    return Imitation(options.token_weight)
  own = {'kl_weight': 0.0, 'kl_target': None, 'entropy_weight': 0.0}
  is_row = policy_options.get('ratio_level') == 'row'
  if options.loss == 'distillation' and is_row:
    # Each token has its own advantage. The bounds are those of tokens, too.
    names = ('ratio_level', 'clip_epsilon', 'clip_epsilon_high')
    own |= {n: getattr(losses.PolicyGradient, n) for n in names}
  bands = {'entropy_band': {'weight': 0.0}}
  return losses.of_section(
    {**policy_options, **own, **bands, 'name': 'policy_gradient'}
  )


@dataclasses.dataclass(frozen=True, eq=False)
class TeacherBatch:
  """The rows of a teacher for an update.

  Attributes:
    rows: the rows.
    weight: mu, the weight of their loss; that of RL has the rest.
    columns: the columns that their loss reads, [R] or [R, C], float32.
    trained: True at the completion tokens to train on, [R, C]; None for all.
  """

  rows: batch.Rows
  weight: float
  columns: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
  trained: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Teacher:
  """The rows of a teacher, and when they count.

  Attributes:
    options: the options.
    rows: all rows of the teacher; None without a teacher, and if the rows are
      those of an iteration.
    seed: seed of the run.
    loss: the loss of the rows; None without a teacher.
    columns: the columns of all rows.
  """

  options: Options
  rows: batch.Rows | None
  seed: int
  loss: token_batch.Loss | None = None
  columns: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

  def choose(
    self, available: Bool[np.ndarray, ' R'], iteration: int
  ) -> np.ndarray:
    """Returns the indices of an iteration's rows.

    They depend on the available rows, the seed and the iteration only.
    """
    index = np.flatnonzero(available)
    rng = np.random.default_rng((self.seed, iteration))
    count = min(self.options.rows, len(index))
    return np.sort(rng.choice(index, count, replace=False))

  def batch(self, iteration: int) -> TeacherBatch | None:
    """Returns the recorded batch of an iteration; None if mu is 0."""
    mu = self.options.mu(iteration)
    if self.rows is None or not mu:
      return None
    chosen = self.choose(self.rows.real, iteration)
    columns = {name: x[chosen] for name, x in self.columns.items()}
    return TeacherBatch(self.rows.take(chosen), mu, columns)


def surrogate_columns(
  advantages: Float[np.ndarray, 'R ...'],
  old_log_probs: Float[np.ndarray, 'R C'],
  importance: Float[np.ndarray, 'R C'] | float = 1.0,
) -> dict[str, np.ndarray]:
  """Returns the columns that replay and distillation read.

  Args:
    advantages: advantage of each row or token.
    old_log_probs: denominators of the ratios.
    importance: weight of each token; see `losses.truncated_importance`.
  """
  return {
    'advantages': advantages.astype(np.float32),
    'old_log_probs': old_log_probs,
    'importance': np.broadcast_to(np.float32(importance), old_log_probs.shape),
  }


def conflicts(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields a line for each conflict of a teacher's options."""
  options, name = config.teacher, config.env.name
  if not options.mu_peak:
    return
  if options.loss != 'imitation' and options.token_weight != 'phi':
    yield (
      f'teacher.token_weight={options.token_weight}: teacher.loss='
      f'{options.loss} has no such option; must be phi'
    )
  yield from _unused_episodes(options)
  if options.loss == 'distillation' and options.data:
    yield (
      f'teacher.data={options.data}: teacher.loss=distillation teaches with '
      "the iteration's own steps; must be ''"
    )
  elif options.data:
    yield from _unreadable(options.data)
  elif options.loss == 'replay':
    yield 'teacher.data=: teacher.loss=replay needs a folder of episodes'
  elif not envs.has_expert(name):
    is_imitation = options.loss == 'imitation'
    remedy = ', or teacher.data a folder of recorded episodes' * is_imitation
    yield (
      f'teacher.mu_peak={options.mu_peak}: env.name={name} has no expert; must '
      f'be 0{remedy}'
    )
  is_history = config.env.get('context', 'history') == 'history'
  if options.loss == 'distillation' and not is_history:
    yield (
      f'env.context={config.env.context}: teacher.loss=distillation adds a '
      'solution to the prompt of a turn; must be history'
    )


def _unused_episodes(options: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields a line if the expert plays no episodes in advance."""
  default = Options.num_episodes
  if options.num_episodes == default:
    return
  if options.loss == 'distillation':
    reason = 'teacher.loss=distillation plays the tasks of each iteration'
  elif options.data:
    reason = f'the episodes are those of teacher.data={options.data}'
  else:
    return
  yield (
    f'teacher.num_episodes={options.num_episodes}: has no effect, because '
    f'{reason}; must be {default}'
  )


def _unreadable(folder: str) -> Iterator[str]:
  # tensorflow_datasets is slow to import.
  from gigpo_jax import episodes

  try:
    episodes.open_dataset(folder)
  except ValueError as error:
    yield f'teacher.data={error}'
