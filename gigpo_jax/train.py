"""The experiment, top to bottom: collect, compare, update, repeat."""

import contextlib
import dataclasses
import functools
import math
import pathlib
import time

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
  losses,
  metrics,
  rollout,
  run_config,
  trajectory,
)
from gigpo_jax import config as config_lib
from gigpo_jax import learner as learner_lib
from gigpo_jax.algorithms import gigpo
from gigpo_jax.models import huggingface, lora
from gigpo_jax.runtime import (
  compilation,
  console,
  distributed,
  errors,
  files,
  preemption,
)
from gigpo_jax.tools import timeline

_MODEL_MEMORY = ('model.path', 'take a smaller model')
_SAMPLER_MEMORY = (
  'rollout.batch_buckets',
  'lower it, rollout.max_prompt_tokens or rollout.max_completion_tokens',
)
_LEARNER_MEMORY = (
  'learner.microbatch_rows',
  'lower it or rollout.max_prompt_tokens',
)


def train(
  config: ml_collections.ConfigDict,
  workdir: str,
  *,
  allow_config_change: bool = False,
  grace_secs: float = 25.0,
) -> None:
  """Runs an experiment, or goes on with one that was broken off.

  Everything random is a function of (seed, iteration), so a resumed run
  equals an uninterrupted one. Writes to `workdir`: config.json,
  metrics.jsonl, tensorboard/, checkpoints/, learning_curve.png, and in
  policy/ the trained policy as a Hugging Face directory. Line k of the
  metrics evaluates the policy after k iterations; k = 0 is the start.

  Several processes (see `hosts`) share episodes and devices; the first one
  writes, checkpoints apart, for which `workdir` has to be one folder for all.

  After SIGTERM it saves what it has, and returns; see `preemption`.

  Args:
    config: the experiment.
    workdir: its folder.
    allow_config_change: whether a run may go on with another config than it
      was begun with.
    grace_secs: time between SIGTERM and the end of the machine.

  Raises:
    ValueError: in one line a problem, before devices or simulators start, if
      the config cannot work or the directory holds another experiment.
    errors.RunError: in one line, if the run cannot go on.
  """
  config_lib.validate(config)
  run_config.check_resume(config, workdir, allow_change=allow_config_change)
  run_config.check_workdir(workdir)
  checkpoint.check_folder(pathlib.Path(workdir) / 'checkpoints')
  policy = (pathlib.Path(workdir) / 'policy').resolve()
  if pathlib.Path(config.model.path).resolve() == policy:
    raise ValueError(
      f'--workdir={workdir}: its policy/ is model.path, and would be written '
      'over at the end; must be another folder'
    )
  with (
    preemption.PreemptionGuard(grace_secs) as notice,
    contextlib.suppress(preemption.Preempted),
    errors.explain_disk_errors(workdir),
  ):
    distributed.initialize()
    with distributed.lock(workdir):
      _train(config, workdir, notice)


def _train(
  config: ml_collections.ConfigDict,
  workdir: str,
  notice: preemption.PreemptionGuard,
) -> None:
  """Trains in a work directory that no other experiment uses."""
  builders.check_episodes(config, workdir)
  policy = builders.make_model_bundle(config)
  with (
    jax.set_mesh(policy.mesh),
    checkpoint.Checkpointer(
      pathlib.Path(workdir) / 'checkpoints', keep=config.checkpoint.keep
    ) as checkpointer,
  ):
    # What is wrong with one of these is known before workers start.
    run = _Run(config, workdir, policy, checkpointer, notice)
    with builders.make_pool(config) as pool:
      builders.try_environment(config, pool, 'train', policy.tokenizer)
      # Of a run that cannot start, nothing stands in the way of another one.
      if distributed.is_main_process():
        run_config.save(config, workdir)
      run.go(builders.make_runner(config, policy, pool))


class _Run:
  """An experiment under way."""

  def __init__(self, config, workdir, policy, checkpointer, notice):
    self._config, self._workdir = config, workdir
    self._policy, self._checkpointer = policy, checkpointer
    self._notice = notice
    self._tasks = builders.make_task_sampler(config)
    self._task_type = builders.make_task_type(config)
    self._panel = (
      builders.make_eval_tasks(config) if config.evaluation.every else []
    )
    self._algorithm = algorithms.make(**config_lib.algorithm_kwargs(config))
    self._filter = group_filter.GroupFilter(**config.filter)
    self._runner: rollout.EpisodeRunner
    self._learner = builders.make_learner(
      config, policy, builders.make_loss(config)
    )
    self._critic = (
      builders.make_critic(config, policy)
      if self._algorithm.needs_values
      else None
    )
    like = {'policy': self._learner.abstract_state()[0]}
    if self._critic:
      like['critic'] = self._critic.abstract_state()
    checkpointer.check(like)
    self._like = like
    # Of policy and critic; what the policy is held near to.
    self._states: dict[str, learner_lib.TrainState] = {}
    self._reference: dict | None = None
    self._log = None
    # What a resumed run needs to know of the past.
    self._spent = group_filter.SampleCounts()
    self._entropies: list[float] = []
    # Updates that were skipped, the last ones in a row, of policy and critic.
    self._skipped: dict[str, float] = {}
    # What there was after the last iteration, and which one is saved.
    self._finished: tuple[int, dict, dict] | None = None
    self._saved: int | None = None

  @property
  def _params(self) -> dict:
    return self._states['policy'].params

  def go(self, runner: rollout.EpisodeRunner) -> None:
    """Iterates to the end, or until it has to leave."""
    self._runner = runner
    try:
      self._go()
    except preemption.Preempted:
      self._leave()

  def _go(self) -> None:
    config = self._config
    with errors.explain_out_of_memory(*_MODEL_MEMORY):
      first = self._start()
    if first:
      console.log(f'resuming {self._workdir} after iteration {first - 1}')
    repeated = builders.most_repeated(config, self._workdir, first)
    writer = builders.make_writer(config, self._workdir, first, repeated)
    self._log = builders.make_episode_log(
      config, self._workdir, self._policy.tokenizer, first, repeated
    )
    console.log(f'compiling for {len(jax.devices())} device(s)')
    self._warm_up()
    for iteration in range(first, config.num_iterations):
      begin = time.monotonic()
      values = {}
      if config.evaluation.every and iteration % config.evaluation.every == 0:
        values |= self._evaluate()
      self._trace = distributed.is_main_process() and iteration == first
      collected, found = self._collect(iteration)
      # The update might not be over in time, and uses up what it begins with.
      self._leave_if_told()
      with self._notice.defer():
        values |= found | self._update(collected, iteration)
        values['time/iteration_secs'] = time.monotonic() - begin
        writer.write(iteration, values)
        console.log(metrics.console_line(iteration, values))
        self._finished = iteration, dict(self._states), self._past(iteration)
      if (iteration + 1) % config.checkpoint.every == 0 or (
        iteration == config.num_iterations - 1
      ):
        self._save()
      self._leave_if_told()
    if config.evaluation.every:
      values = self._evaluate() | self._spent.metrics()
      writer.write(config.num_iterations, values)
      console.log(metrics.console_line(config.num_iterations, values))
    writer.close()
    self._checkpointer.wait()
    self._policy.sampler.release()
    _export(
      config, self._workdir, self._policy, self._params, self._learner.base
    )
    if distributed.is_main_process():
      print(f'learning curve: {metrics.plot(self._workdir)}', flush=True)

  def _start(self) -> int:
    """Loads the model, or the newest checkpoint; returns the next iteration."""
    start = self._policy.load()
    self._reference = builders.make_reference(self._config, self._policy, start)
    states = {'policy': self._learner.init(start)}
    if self._checkpointer.latest() is None:
      if self._critic:
        # The one before is taken over.
        states['critic'] = self._critic.init(self._policy.load())
      self._states = states
      return 0
    del start, states  # There is no room for two.
    self._saved, self._states, host = self._checkpointer.restore(self._like)
    try:
      self._restore_past(files.take_version(host, 'host state'))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as e:
      raise ValueError(
        f'{self._workdir}/checkpoints/{self._saved}/host: not the state of a '
        f'run ({type(e).__name__}: {e}); delete this checkpoint to resume from '
        'the one before, or give another --workdir'
      ) from e
    return self._saved + 1

  def _restore_past(self, past: dict) -> None:
    """Takes over what `_past` returned."""
    if past['iteration'] != self._saved:
      raise ValueError(f'iteration is {past["iteration"]}')
    self._tasks.restore(past['tasks'])
    self._spent = group_filter.SampleCounts(
      **{name: int(value) for name, value in past['spent'].items()}
    )
    self._entropies = [float(value) for value in past['entropies']]
    self._skipped = {
      str(name): float(value) for name, value in past['skipped'].items()
    }

  def _past(self, iteration: int) -> dict:
    """Returns what a resumed run needs to know besides the states."""
    return {
      'version': files.VERSION,
      'iteration': iteration,
      'tasks': self._tasks.state(),
      'spent': dataclasses.asdict(self._spent),
      'entropies': list(self._entropies),
      'skipped': dict(self._skipped),
    }

  def _save(self) -> None:
    """Begins to save what there was after the last iteration."""
    with self._notice.defer():
      self._checkpointer.save(*self._finished)
      self._saved = self._finished[0]

  def _leave_if_told(self) -> None:
    self._notice.exit_if_requested()

  def _leave(self) -> None:
    """Saves what there was after the last iteration."""
    self._notice.disarm()
    if self._finished and self._finished[0] != self._saved:
      self._save()
    self._checkpointer.wait()
    console.log(
      'SIGTERM: '
      + ('nothing is' if self._saved is None else f'iteration {self._saved} is')
      + ' saved; the same command goes on'
    )

  def _warm_up(self) -> None:
    total = self._policy.sampler.num_programs + self._learner.num_programs(
      reference=self._reference is not None
    )
    if self._critic:
      total += self._critic.num_programs()
    with compilation.progress(total) as advance:
      with errors.explain_out_of_memory(*_SAMPLER_MEMORY):
        self._policy.sampler.warm_up(
          self._params, self._learner.base, on_compiled=advance
        )
      with errors.explain_out_of_memory(*_LEARNER_MEMORY):
        self._states['policy'] = self._learner.warm_up(
          self._states['policy'], self._reference, advance
        )
        if self._critic:
          self._states['critic'] = self._critic.warm_up(
            self._states['critic'], advance
          )
    self._credit(builders.make_dummy_rows(self._config))

  def _evaluate(self) -> dict[str, float]:
    begin = time.monotonic()
    self._runner.max_turns = None
    found = evaluation.run(
      self._runner,
      self._params,
      self._panel,
      sampling=builders.make_sampling(self._config, evaluation=True),
      task_type=self._task_type,
      base_params=self._learner.base,
    )
    self._check_failures(found)
    return evaluation.summarize(found) | {
      'time/evaluation_secs': time.monotonic() - begin
    }

  def _check_failures(self, played: list[trajectory.Trajectory]) -> None:
    """Says which episodes failed; stops the run if they are too many."""
    report = metrics.failure_report(played)
    if not report:
      return
    console.log(report)
    share = sum(bool(t.failure) for t in played) / len(played)
    most = self._config.pool.max_failed_share
    if share > most or share == 1:
      raise errors.RunError(
        f'pool.max_failed_share={most}: {report}; mend the environment or '
        'its data, then the same command goes on'
      )

  def _collect(
    self, iteration: int
  ) -> tuple[group_filter.CollectedGroups, dict[str, float]]:
    """Plays the episodes of an iteration; returns metrics, too."""
    config, sampler, begin = (
      self._config,
      self._policy.sampler,
      time.monotonic(),
    )
    self._runner.max_turns = group_filter.max_turns(
      config.rollout.horizon, iteration
    )
    collected = group_filter.collect(
      functools.partial(self._play, iteration),
      self._tasks,
      self._filter,
      groups=config.rollout.groups,
      iteration=iteration,
    )
    self._check_failures(collected.episodes)
    values = self._runner.metrics()
    if self._trace:
      timeline.plot(
        self._runner.stats.spans,
        self._runner.clock.env_spans,
        pathlib.Path(self._workdir),
      )
    # What it held is room for the update.
    sampler.release()
    values |= collected.metrics
    values |= metrics.summarize(collected.episodes, prefix='train')
    return collected, values | {'time/rollout_secs': time.monotonic() - begin}

  def _play(
    self, iteration: int, tasks: list, place: int
  ) -> list[trajectory.Trajectory]:
    """Plays groups of tasks with the random numbers of a place."""
    members = self._config.rollout.episodes_per_group
    with console.progress_bar(
      total=len(distributed.process_slice(len(tasks))) * members,
      desc=f'iteration {iteration}',
      unit='episode',
    ) as bar:
      return self._runner.run(
        self._params,
        tasks,
        episodes_per_group=members,
        stream=(rollout.TRAIN, place),
        sampling=builders.make_sampling(self._config),
        task_type=self._task_type,
        base_params=self._learner.base,
        trace=self._trace,
        on_finished=console.count_episodes(
          bar, lambda: self._policy.sampler.stats.decode_tokens
        ),
      )

  def _update(
    self, collected: group_filter.CollectedGroups, iteration: int
  ) -> dict[str, float]:
    """Counts, keeps and learns from episodes; returns the metrics."""
    begin = time.monotonic()
    self._tasks.observe(
      (t.task, t.success) for t in collected.episodes if not t.failure
    )
    self._spent = self._spent.plus(collected.episodes)
    self._runner.prefetch(
      self._tasks.at(self._filter.positions(iteration + 1)[0]),
      self._config.rollout.episodes_per_group,
    )
    values = self._spent.metrics() | self._learn(collected, iteration)
    return values | {'time/update_secs': time.monotonic() - begin}

  def _learn(
    self, collected: group_filter.CollectedGroups, iteration: int
  ) -> dict[str, float]:
    """Learns from episodes, and keeps them; returns the metrics."""
    if not collected.kept:
      return self._learn_nothing(collected, iteration)
    config, learner = self._config, self._learner
    begin = time.monotonic()
    rows = batch.from_trajectories(
      collected.kept, **builders.rows_kwargs(config)
    )
    values = {'time/rows_secs': time.monotonic() - begin}
    credit, told, found = self._credit(rows)
    values |= found
    if self._log:
      values |= self._log.write(iteration, collected, rows, credit)
    values |= metrics.effective_tokens(credit.advantages, rows.completion_mask)
    old_log_probs, importance = rows.sampler_log_probs, 1.0
    if config.loss.old_log_probs == 'learner':
      old_log_probs = learner.log_probs(self._params, rows)
    values |= learner.sampler_difference(self._params, rows, old_log_probs)
    if self._critic:
      self._states['critic'], found = self._critic.update(
        self._states['critic'],
        rows,
        values=told,
        targets=credit.value_targets,
        value_mask=(
          rows.completion_mask
          if credit.value_mask is None
          else credit.value_mask
        ),
        iteration=iteration,
        skipped_before=self._skipped.get('critic', 0.0),
      )
      self._check_skipped(
        'critic', found, rows, values=told, targets=credit.value_targets
      )
      values |= found
      if iteration < config.critic.warmup_iterations:
        return values
    if config.loss.tis_clip:
      importance = losses.truncated_importance(
        old_log_probs, rows.sampler_log_probs, config.loss.tis_clip
      )
    reference = None
    if self._reference is not None:
      reference = learner.log_probs(self._reference, rows)
    columns = {
      'advantages': credit.advantages,
      'old_log_probs': old_log_probs,
      'ref_log_probs': reference,
      'importance': importance,
    } | builders.entropy_band(config).make_columns(
      self._entropies, iteration, config.num_iterations
    )
    self._states['policy'], found = learner.update(
      self._states['policy'],
      rows,
      iteration=iteration,
      skipped_before=self._skipped.get('update', 0.0),
      **{name: columns[name] for name in learner.columns},
    )
    self._check_skipped(
      'update',
      found,
      rows,
      advantages=credit.advantages,
      old_log_probs=old_log_probs,
    )
    if math.isfinite(found.get('loss/entropy', math.nan)):
      self._entropies.append(found['loss/entropy'])
    return values | found

  def _learn_nothing(
    self, collected: group_filter.CollectedGroups, iteration: int
  ) -> dict[str, float]:
    """Keeps the episodes of an iteration that has nothing to learn from.

    Policy, critic, optimizers and counters stay as they are: entropy bonus, KL
    and weight decay would move the parameters without a signal.
    """
    values = self._log.write(iteration, collected) if self._log else {}
    values |= metrics.effective_tokens(np.zeros(0), np.zeros((0, 0), bool))
    names = ['update/count', 'update/tokens', 'update/grad_norm']
    names += ['critic/count'] if self._critic else []
    return values | dict.fromkeys(names, 0.0)

  def _credit(
    self, rows: batch.Rows
  ) -> tuple[algorithms.AlgorithmOutput, np.ndarray | None, dict[str, float]]:
    """Returns advantages, what the critic tells, and metrics."""
    told = None
    if self._critic:
      told = self._critic.values(self._states['critic'].params, rows)
    begin = time.monotonic()
    credit = self._algorithm.compute_advantages(rows, told)
    values = {'time/credit_secs': time.monotonic() - begin}
    if not isinstance(self._algorithm, gigpo.Algorithm):
      values |= gigpo.diagnose(
        rows,
        discount=self._config.algorithm.discount,
        invalid_penalty=self._config.algorithm.invalid_penalty,
        norm=self._config.algorithm.norm,
      )
    return credit, told, values | credit.metrics

  def _check_skipped(
    self, what: str, found: dict[str, float], rows: batch.Rows, **arrays
  ) -> None:
    """Stops the run when too many updates in a row had to be skipped."""
    self._skipped[what] = found[f'{what}/skipped_in_row']
    in_row = found[f'{what}/most_skipped_in_row']
    if in_row < self._config.learner.max_skipped_in_row:
      return
    path = pathlib.Path(self._workdir) / f'skipped_{what}.npz'
    if distributed.is_main_process():
      rows.save(path, **arrays)
    raise errors.RunError(
      f'{what}/skipped_in_row={in_row:.0f}: loss or gradient was not finite in '
      f'so many updates (learner.max_skipped_in_row); the last rows are in '
      f'{path}; try a lower optimizer.learning_rate'
    )


def _export(config, workdir, policy, params: dict, base: dict) -> None:
  """Writes the policy, and the adapters by themselves, for others to load."""
  root = pathlib.Path(workdir)
  with distributed.atomic_directory(root / 'policy') as folder:
    huggingface.save(
      folder,
      policy.model,
      lora.combine(base, params),
      tokenizer_directory=policy.tokenizer.directory,
    )
  if policy.model.adapters:
    with distributed.atomic_directory(root / 'adapters') as folder:
      huggingface.save_adapters(folder, policy.model, params, config.model.path)
