"""Train a policy: run episodes, compute advantages, update, repeat.

`train` builds what a run needs, `loop` is the run, and `update` learns from the
episodes of an iteration. The rest of the algorithm is in run/collection.py
(which episodes are played), algorithms/gigpo.py (advantages), token_batch.py
(what a loss reads) and losses.py.

Departures from the paper (GiGPO, arXiv:2505.10978):

1. The loss has an entropy bonus (`loss.entropy_weight`), as in the authors'
   code. `--config=FILE:paper` drops it.
2. The mini-batches of an iteration differ by at most one row (without shared
   prompts), and padding rows have weight 0. The authors' code makes all
   mini-batches full by duplicating random rows.
3. Episodes whose environment failed are counted but not trained on.
4. An iteration without any row to train on makes no update.
5. The evaluation tasks are fixed, and success has a 95 % interval.

docs/algorithm.md lists differences in formulas and environments.
"""

import contextlib
import time
from collections.abc import Callable

import jax
import ml_collections
import numpy as np

from gigpo_jax import (
  algorithms,
  batch,
  builders,
  checkpoint,
  evaluation,
  group_filter,
  rollout,
  teacher,
  tokenizer,
)
from gigpo_jax import metrics as metrics_lib
from gigpo_jax.programs import update_sums
from gigpo_jax.run import (
  collection,
  model_builders,
  rollback,
  run_builders,
  run_config,
  run_logs,
  run_state,
  update_inputs,
)
from gigpo_jax.runtime import (
  compilation,
  distributed,
  errors,
  preemption,
)

Metrics = dict[str, float]

# Maps config and tokenizer to a context with the pool of environments.
OpenPool = Callable[
  [ml_collections.ConfigDict, tokenizer.Tokenizer],
  contextlib.AbstractContextManager,
]


def train(
  config: ml_collections.ConfigDict,
  workdir: str,
  *,
  allow_config_change: bool = False,
  grace_secs: float = 25.0,
  open_pool: OpenPool | None = None,
) -> None:
  """Runs an experiment, or resumes an interrupted one.

  Random numbers are functions of (seed, iteration, task, member, step, token)
  and no generator has a state, so a resumed run equals an uninterrupted one.

  Writes to `workdir`: config.json, metrics.jsonl, tensorboard/, checkpoints/,
  learning_curve.png, and in policy/ the trained policy as a Hugging Face
  directory, with the number of iterations in training.json. Line k of the
  metrics, from 0, is about iteration k and includes the evaluation, if one is
  due, of the policy before that iteration. The last line holds the final
  evaluation.

  The processes of a multi-process run share episodes and devices. All of them
  write checkpoints, so `workdir` must be shared; the main process writes the
  other files.

  After SIGTERM the run saves its state and returns; see `preemption`.

  Args:
    config: the experiment.
    workdir: its folder.
    allow_config_change: whether a run may resume with a changed config.
    grace_secs: seconds between SIGTERM and the end of the process.
    open_pool: opens a pool in which an agent harness plays the episodes; None:
      the environment's own episodes, in worker processes.

  Raises:
    ValueError: one line per problem, before devices or simulators start, if
      the config is invalid or the folder holds another experiment.
    errors.RunError: in one line, if the run cannot continue.
  """
  inputs = run_builders.check_run(
    config,
    workdir,
    allow_config_change=allow_config_change,
    has_harness=open_pool is not None,
  )
  if not allow_config_change and run_builders.is_finished(config, workdir):
    print(
      f'{workdir}: finished; a larger num_iterations continues the run, '
      'launch/evaluate.py evaluates its policy',
      flush=True,
    )
    return
  open_pool = open_pool or builders.open_pool

  def save_config() -> None:
    if distributed.is_main_process():
      run_config.save(
        config, workdir, inputs=inputs, keep_earlier=allow_config_change
      )

  with (
    preemption.PreemptionGuard(grace_secs) as preemption_guard,
    # Preempted before the loop: there is nothing to save.
    contextlib.suppress(preemption.Preempted),
    errors.explain_disk_errors(workdir),
  ):
    distributed.initialize()
    with distributed.lock(workdir):
      run_builders.check_episodes(workdir)
      run_builders.print_notes(config)
      bundle = model_builders.make_model_bundle(config)
      distributed.check_same(inputs)
      with (
        jax.set_mesh(bundle.mesh),
        run_builders.open_checkpoints(config, workdir) as saver,
      ):
        with (
          open_pool(config, bundle.tokenizer) as pool,
          builders.make_scorer(config) as scorer,
        ):
          parts = run_builders.make_parts(config, workdir, bundle)
          saver.check(parts.abstract_states())
          if saver.latest() is None:
            save_config()
          runner = builders.make_runner(config, bundle, pool, scorer)
          loop(parts, runner, saver, preemption_guard, save_config)


def loop(
  parts: run_builders.Parts,
  runner: rollout.EpisodeRunner,
  saver: checkpoint.Checkpointer,
  preemption_guard: preemption.PreemptionGuard,
  save_config: Callable[[], None],
) -> None:
  """Runs the remaining iterations, then evaluates and exports the policy.

  Args:
    parts: the objects of the run.
    runner: runs the episodes.
    saver: the checkpoints.
    preemption_guard: reports SIGTERM.
    save_config: stores the config in the work directory.
  """
  config, tasks = parts.config, parts.tasks
  last = None  # (iteration, state, history) of the last finished iteration.
  try:
    state, history, logs = prepare(parts, runner, saver)
    # Not before the logs are trimmed: after a kill, `Parts.max_repeated` still
    # follows from the earlier config.
    save_config()
    first = history.next_iteration
    for iteration in range(first, config.num_iterations):
      start, metrics = time.monotonic(), {}
      with_evaluation = _is_due(iteration, config.evaluation.every)
      if with_evaluation and not config.evaluation.inside_rollout:
        metrics |= evaluate(parts, runner, state)
        with_evaluation = False
      plot = logs.plot_rollout if iteration == first else None
      groups, rollout_metrics = collection.collect(
        parts,
        runner,
        state,
        iteration,
        plot,
        with_evaluation=with_evaluation,
        waiting=history.waiting,
      )
      preemption_guard.exit_if_requested()
      # The update donates the state of `last`: no preemption until the new one.
      with preemption_guard.defer():
        with run_logs.timed(metrics, 'time/update_secs'):
          tasks.record_outcomes(groups.outcomes)
          collection.prefetch(parts, runner, groups.waiting, iteration + 1)
          state, update_metrics = update(
            parts, state, history, groups, iteration, logs
          )
        history = history.after(
          iteration, groups, tasks.state(), update_metrics
        )
        metrics |= rollout_metrics | update_metrics | history.counts.metrics()
        state, history, alarms = rollback.check_alarms(
          parts, saver, state, history, metrics
        )
        metrics |= alarms
        metrics['time/iteration_secs'] = time.monotonic() - start
        logs.write(iteration, metrics)
        last = iteration, state, history
        if history.is_rolled_back or _is_checkpoint(config, iteration):
          run_builders.save(parts, saver, iteration, state, history)
      preemption_guard.exit_if_requested()
    finish(parts, runner, state, history, logs, saver)
  except preemption.Preempted:
    preemption_guard.disarm()
    run_builders.save_last(parts, saver, last)


def prepare(
  parts: run_builders.Parts,
  runner: rollout.EpisodeRunner,
  saver: checkpoint.Checkpointer,
) -> tuple[run_state.RunState, run_state.History, run_logs.RunLogs]:
  """Loads the state and starts environments while all programs compile."""
  with compilation.Compiler() as compiler:
    programs = run_builders.start_compilation(parts, compiler)
    state, history = run_builders.restore_or_init(parts, saver)
    collection.prefetch(parts, runner, history.waiting, history.next_iteration)
    logs = run_builders.open_logs(parts, history.next_iteration)
    # Compiles the advantages for the row shapes of this run.
    rows = builders.make_dummy_rows(parts.config)
    estimate_advantages(parts, state, history, rows)
    state = run_builders.warm_up(parts, state, programs, compiler.start)
    return state, history, logs


def update(
  parts: run_builders.Parts,
  state: run_state.RunState,
  history: run_state.History,
  groups: group_filter.CollectedGroups,
  iteration: int,
  logs: run_logs.RunLogs,
) -> tuple[run_state.RunState, Metrics]:
  """Learns from the episodes of an iteration; returns state and metrics."""
  if not groups.kept:
    # Entropy bonus, KL and weight decay would still move the policy.
    metrics: Metrics = metrics_lib.no_update(
      has_critic=parts.critic is not None
    )
    return state, logs.write_episodes(iteration, groups) | metrics
  metrics = {}
  with run_logs.timed(metrics, 'time/rows_secs'):
    rows = batch.from_trajectories(
      groups.kept, **parts.rows_kwargs, seed=(parts.config.seed, iteration)
    )
  rows, scores = update_inputs.score_texts(parts, state, rows, groups.kept)
  signals, old_log_probs, signal_metrics = update_inputs.compute_signals(
    parts, state, history, rows, iteration
  )
  rows, ref_log_probs, reward_metrics = update_inputs.shape_rewards(
    parts, state, history, rows, old_log_probs
  )
  output, old_values, advantage_metrics = estimate_advantages(
    parts, state, history, rows
  )
  metrics |= scores | signal_metrics | reward_metrics | advantage_metrics
  output, trained_rows, token_mask, plugin_metrics = (
    update_inputs.apply_plugins(parts, rows, output, signals)
  )
  metrics |= plugin_metrics | logs.write_episodes(
    iteration, groups, trained_rows, output
  )
  if parts.critic:
    state, critic_metrics = update_critic(
      parts, state, history, rows, output, old_values, iteration
    )
    metrics |= critic_metrics
    if iteration < parts.config.critic.warmup_iterations:
      return state, metrics
  if not trained_rows.real.any():
    return state, metrics | metrics_lib.no_update(has_critic=False)
  columns = {'advantages': output.advantages} | update_inputs.loss_columns(
    parts,
    state,
    history,
    trained_rows,
    old_log_probs,
    iteration,
    ref_log_probs,
  )
  teacher_batch = update_inputs.make_teacher_batch(
    parts,
    state,
    trained_rows,
    groups.kept,
    columns,
    iteration,
    token_mask,
  )
  logs.write_teacher(iteration, teacher_batch)
  state, policy_metrics = update_policy(
    parts,
    state,
    history,
    trained_rows,
    columns,
    iteration,
    token_mask,
    teacher_batch,
  )
  metrics |= policy_metrics
  return state, metrics | parts.kl_control.next_metrics(
    history.kl_factor, metrics, int(trained_rows.real.sum())
  )


def estimate_advantages(
  parts: run_builders.Parts,
  state: run_state.RunState,
  history: run_state.History,
  rows: batch.Rows,
) -> tuple[algorithms.AlgorithmOutput, np.ndarray | None, Metrics]:
  """Returns the advantages of rows, the critic's values, and metrics."""
  old_values = None
  if parts.critic:
    old_values = parts.critic.values(state.critic.params, rows)
  metrics: Metrics = {}
  with run_logs.timed(metrics, 'time/advantages_secs'):
    output = algorithms.compute(
      parts.algorithm, rows, old_values, history.algorithm_state
    )
  metrics |= parts.diagnose(rows, output) | output.metrics
  return output, old_values, metrics


def update_policy(
  parts: run_builders.Parts,
  state: run_state.RunState,
  history: run_state.History,
  rows: batch.Rows,
  columns: dict[str, np.ndarray | float],
  iteration: int,
  token_mask: np.ndarray | None,
  teacher_batch: teacher.TeacherBatch | None,
) -> tuple[run_state.RunState, Metrics]:
  """Updates the policy on rows, of which a mask chooses tokens."""
  policy, metrics = parts.learner.update(
    state.policy,
    rows,
    iteration=iteration,
    skipped_before=history.skipped.get('update', 0.0),
    step_scale=parts.guard.step_scale(history.guard_state),
    trained=token_mask,
    teacher_batch=teacher_batch,
    **{name: columns[name] for name in parts.loss.columns},
  )
  stop_if_skipped(parts, metrics, 'update', rows, columns)
  return state.replace(policy=policy), metrics


def update_critic(
  parts: run_builders.Parts,
  state: run_state.RunState,
  history: run_state.History,
  rows: batch.Rows,
  output: algorithms.AlgorithmOutput,
  old_values: np.ndarray,
  iteration: int,
) -> tuple[run_state.RunState, Metrics]:
  """Fits the critic to the value targets of an iteration."""
  critic, metrics = parts.critic.update(
    state.critic,
    rows,
    values=old_values,
    targets=output.value_targets,
    value_mask=output.value_mask,
    iteration=iteration,
    skipped_before=history.skipped.get('critic', 0.0),
  )
  arrays = {'values': old_values, 'targets': output.value_targets}
  stop_if_skipped(parts, metrics, 'critic', rows, arrays)
  return state.replace(critic=critic), metrics


def stop_if_skipped(
  parts: run_builders.Parts,
  metrics: Metrics,
  name: str,
  rows: batch.Rows,
  arrays: dict[str, np.ndarray | float],
) -> None:
  """Stops the run if too many updates in a row were skipped.

  Args:
    parts: the objects of the run.
    metrics: metrics of the update.
    name: 'update' or 'critic'.
    rows: the rows of the iteration, which are saved.
    arrays: further arrays to save.
  """
  limit = parts.config.learner.max_skipped_in_row
  problem = update_sums.skipped_problem(metrics, limit, name)
  if not problem:
    return
  path = parts.workdir / f'skipped_{name}.npz'
  if distributed.is_main_process():
    # Scalars, such as importance weights of 1, are left out.
    rows.save(path, **{k: x for k, x in arrays.items() if np.ndim(x)})
  raise errors.RunError(
    f'{problem}; the rows of this iteration are in {path}; try a lower '
    'optimizer.learning_rate'
  )


def evaluate(
  parts: run_builders.Parts,
  runner: rollout.EpisodeRunner,
  state: run_state.RunState,
) -> Metrics:
  """Returns metrics of the policy on the evaluation tasks."""
  metrics: Metrics = {}
  with run_logs.timed(metrics, 'time/evaluation_secs'):
    (episodes,) = runner.run_batches(
      state.policy.params,
      [parts.eval_batch],
      base_params=parts.learner.base,
      label='evaluation',
    )
    parts.stop_if_failed(episodes)
    metrics |= evaluation.summarize(episodes)
  return metrics


def finish(
  parts: run_builders.Parts,
  runner: rollout.EpisodeRunner,
  state: run_state.RunState,
  history: run_state.History,
  logs: run_logs.RunLogs,
  saver: checkpoint.Checkpointer,
) -> None:
  """Evaluates and exports the policy; draws the learning curve."""
  if parts.config.evaluation.every:
    metrics = evaluate(parts, runner, state) | history.counts.metrics()
    logs.write(parts.config.num_iterations, metrics)
  logs.close()
  saver.wait()
  runner.sampler.release()
  run_builders.export(parts, state, parts.config.num_iterations)
  if distributed.is_main_process():
    print(f'learning curve: {metrics_lib.plot(str(parts.workdir))}', flush=True)


def _is_checkpoint(config: ml_collections.ConfigDict, iteration: int) -> bool:
  """Returns whether the state after an iteration is saved."""
  is_last = iteration + 1 == config.num_iterations
  return is_last or _is_due(iteration + 1, config.checkpoint.every)


def _is_due(iteration: int, every: int) -> bool:
  return bool(every) and iteration % every == 0
