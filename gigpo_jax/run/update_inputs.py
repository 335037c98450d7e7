"""What an update reads besides rows: log-probs, final advantages, columns."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from gigpo_jax import (
  algorithms,
  answer_scores,
  batch,
  branching,
  losses,
  modulators,
  optimizer,
  plugins,
  privileged,
  selectors,
  teacher,
  trajectory,
)
from gigpo_jax import mesh as mesh_lib
from gigpo_jax import metrics as metrics_lib
from gigpo_jax.run import run_builders, run_state

Metrics = dict[str, float]


def compute_signals(
  parts: run_builders.Parts,
  state: run_state.RunState,
  history: run_state.History,
  rows: batch.Rows,
  iteration: int,
) -> tuple[plugins.Signals, np.ndarray, Metrics]:
  """Returns what plug-ins read, the old log-probs [R, C], and metrics.

  One pass over the rows computes both, if plug-ins need outputs of the learner.
  """
  outputs = parts.learner.signals(state.policy.params, rows)
  old_log_probs, gap_metrics = choose_old_log_probs(
    parts, state, rows, outputs.get('log_probs')
  )
  schedule = optimizer.AdamW(**parts.config.optimizer).schedule
  learning_rate = float(schedule(mesh_lib.to_host(state.policy.updates)))
  signals = plugins.Signals(
    {'log_probs': old_log_probs} | outputs,
    progress=iteration / parts.config.num_iterations,
    seed=(parts.config.seed, iteration),
    # The guards may have shrunk the step.
    learning_rate=learning_rate * parts.guard.step_scale(history.guard_state),
    invalid_penalty=algorithms.invalid_penalty(parts.algorithm),
  )
  metrics = gap_metrics | {'update/learning_rate': learning_rate}
  return signals, old_log_probs, metrics


def score_texts(
  parts: run_builders.Parts,
  state: run_state.RunState,
  rows: batch.Rows,
  episodes: Sequence[trajectory.Trajectory],
) -> tuple[batch.Rows, Metrics]:
  """Returns rows with what the policy's probabilities of texts define.

  These are the probability of the answer as value of a state, if the algorithm
  needs it, and rewards of users; with metrics of the latter.
  """

  def log_probs(scored: batch.Rows) -> np.ndarray:
    return parts.learner.log_probs(state.policy.params, scored)

  if parts.answer_scorer is not None:
    scored, mask = parts.answer_scorer.make_rows(rows, episodes)
    values = answer_scores.probabilities(log_probs(scored), mask)
    rows = dataclasses.replace(rows, state_values=values)
  if parts.scored_rewards is None:
    return rows, {}
  return parts.scored_rewards.add(rows, episodes, log_probs)


def make_teacher_batch(
  parts: run_builders.Parts,
  state: run_state.RunState,
  rows: batch.Rows,
  episodes: Sequence[trajectory.Trajectory],
  columns: Mapping[str, np.ndarray | float],
  iteration: int,
  trained: np.ndarray | None = None,
) -> teacher.TeacherBatch | None:
  """Returns the teacher's batch of an iteration; None if there is none.

  Args:
    parts: the objects of the run.
    state: the policy before the update.
    rows: the rows of the iteration.
    episodes: the episodes to which `Rows.episodes` refers.
    columns: the columns of the rows' own loss; see `loss_columns`.
    iteration: index of the iteration.
    trained: the trained tokens of the rows, [R, C]; None for all.
  """
  subject, context = parts.teacher, parts.privileged_context
  mu = subject.options.mu(iteration)
  if context is None or not mu:
    return subject.batch(iteration)
  index = subject.choose(rows.real, iteration)
  scored = context.make_rows(rows.take(index), episodes)
  index, scored = index[scored.real], scored.take(scored.real)
  if not len(index):
    return None
  chosen, old_log_probs = rows.take(index), columns['old_log_probs'][index]
  mask, own = rows.completion_mask, old_log_probs
  if parts.config.loss.old_log_probs != 'learner':
    # The difference must be that of the solution alone.
    own = parts.learner.log_probs(state.policy.params, chosen)
  advantages = privileged.advantages(
    parts.learner.log_probs(state.policy.params, scored), own, mask[index]
  )
  importance = np.broadcast_to(columns['importance'], mask.shape)[index]
  taught = teacher.surrogate_columns(advantages, old_log_probs, importance)
  own_tokens = None if trained is None else trained[index]
  return teacher.TeacherBatch(chosen, mu, taught, own_tokens)


def shape_rewards(
  parts: run_builders.Parts,
  state: run_state.RunState,
  history: run_state.History,
  rows: batch.Rows,
  old_log_probs: np.ndarray,
) -> tuple[batch.Rows, np.ndarray | None, Metrics]:
  """Returns rows with the final rewards, reference log-probs, and metrics.

  The reference's log-probs, [R, C], are None without a KL penalty.
  """
  ref_log_probs = None
  if parts.reward.needs_reference:
    ref_log_probs = parts.learner.log_probs(state.reference, rows)
  rows, values = parts.reward.shape(
    rows, old_log_probs, ref_log_probs, history.kl_factor
  )
  return rows, ref_log_probs, values


def apply_plugins(
  parts: run_builders.Parts,
  rows: batch.Rows,
  output: algorithms.AlgorithmOutput,
  signals: plugins.Signals,
) -> tuple[algorithms.AlgorithmOutput, batch.Rows, np.ndarray | None, Metrics]:
  """Applies modulators and selectors to the advantages of an algorithm.

  Between them, the rows of branches that repeat a response become padding.

  Returns:
    The final advantages; the rows to train on, where others are padding; their
    trained tokens [R, C], or None for all; and metrics.
  """
  signals = dataclasses.replace(signals, rows=rows)
  advantages = output.advantages
  if parts.modulators:
    advantages = modulators.apply(parts.modulators, advantages, rows, signals)
  if rows.repeated.any():
    advantages = branching.merge(advantages, rows)
    rows = branching.drop_repeated(rows)
  output = output._replace(advantages=advantages)
  metrics = metrics_lib.effective_tokens(advantages, rows.completion_mask)
  if not parts.selectors:
    return output, rows, None, metrics
  kept, trained, select_metrics = selectors.apply(
    parts.selectors, advantages, rows, signals
  )
  return output, kept, trained, metrics | select_metrics


def choose_old_log_probs(
  parts: run_builders.Parts,
  state: run_state.RunState,
  rows: batch.Rows,
  computed: np.ndarray | None = None,
) -> tuple[np.ndarray, Metrics]:
  """Returns the denominators of the ratios, [R, C], and metrics.

  They are the log-probs before the update, as sampled or recomputed. With
  loss.old_log_probs=auto, those of the sampler are used if their mean
  difference from the learner's on one microbatch is small. This depends on the
  parameters and the rows only. An earlier policy may have sampled a row
  (`carry_over`). Its log-probs are recomputed for the weights of loss.tis_clip;
  without these, the ratio is to the policy that sampled it.

  Args:
    parts: the objects of the run.
    state: its parameters.
    rows: the rows of the iteration.
    computed: the learner's log-probs, if they are known.
  """

  def compute(index: np.ndarray | slice) -> np.ndarray:
    if computed is not None:
      return computed[index]
    return learner.log_probs(params, rows.take(index))

  options, learner = parts.config.loss, parts.learner
  params, sampled = state.policy.params, rows.sampler_log_probs
  metrics: Metrics = {}
  reuse = options.old_log_probs == 'sampler'
  if options.old_log_probs != 'learner':
    metrics = learner.sampler_difference(params, rows)
  if options.old_log_probs == 'auto':
    gap = metrics.get('sampler/log_prob_difference_mean', np.inf)
    reuse = gap <= options.max_log_prob_gap  # False if the gap is not finite.
    metrics['sampler/log_probs_reused'] = float(reuse)
  if not reuse:
    old_log_probs = compute(slice(None))
    metrics |= learner.sampler_difference(params, rows, old_log_probs)
    return old_log_probs, metrics
  stale = np.flatnonzero(rows.ages)
  if not len(stale) or not options.tis_clip:
    return sampled, metrics
  old_log_probs = sampled.copy()
  old_log_probs[stale] = compute(stale)
  return old_log_probs, metrics


def loss_columns(  # noqa: PLR0913
  parts: run_builders.Parts,
  state: run_state.RunState,
  history: run_state.History,
  rows: batch.Rows,
  old_log_probs: np.ndarray,
  iteration: int,
  ref_log_probs: np.ndarray | None = None,
) -> dict[str, np.ndarray | float]:
  """Returns all columns that a loss can read, except for the advantages.

  See `token_batch.TokenBatch` and `losses.EntropyBand`. A number applies to all
  tokens.
  """
  options, learner = parts.config.loss, parts.learner
  columns = {
    'old_log_probs': old_log_probs,
    'importance': 1.0,
    losses.KL_COLUMN: history.kl_factor,
  }
  # With the sampler's own log-probs, all weights are 1.
  if options.tis_clip and old_log_probs is not rows.sampler_log_probs:
    columns['importance'] = losses.truncated_importance(
      old_log_probs,
      rows.sampler_log_probs,
      options.tis_clip,
      options.tis_level,
    )
  if losses.needs_reference(parts.loss):
    if ref_log_probs is None:
      ref_log_probs = learner.log_probs(state.reference, rows)
    columns['ref_log_probs'] = ref_log_probs
  return columns | parts.entropy_band.make_columns(
    history.entropies, iteration, parts.config.num_iterations
  )
