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
  checkpoint,
  collection,
  compilation,
  evaluation,
  experiment,
  files,
  hosts,
  losses,
  metrics,
  preemption,
  rollout,
  timeline,
  trajectory,
)
from gigpo_jax import (
  config as config_lib,
)
from gigpo_jax import (
  learner as learner_lib,
)
from gigpo_jax.algorithms import gigpo
from gigpo_jax.models import huggingface, lora

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
    hosts.Stopped: in one line, if the run cannot go on.
  """
  config_lib.validate(config)
  config_lib.check_resume(config, workdir, allow_change=allow_config_change)
  config_lib.check_workdir(workdir)
  checkpoint.check_folder(pathlib.Path(workdir) / 'checkpoints')
  policy = (pathlib.Path(workdir) / 'policy').resolve()
  if pathlib.Path(config.model.path).resolve() == policy:
    raise ValueError(
      f'--workdir={workdir}: its policy/ is model.path, and would be written '
      'over at the end; must be another folder'
    )
  with (
    preemption.Notice(grace_secs) as notice,
    contextlib.suppress(preemption.Leave),
    experiment.disk(workdir),
  ):
    hosts.join()
    with hosts.locked(workdir):
      _train(config, workdir, notice)


def _train(
  config: ml_collections.ConfigDict, workdir: str, notice: preemption.Notice
) -> None:
  """Trains in a work directory that no other experiment uses."""
  experiment.check_episodes(config, workdir)
  policy = experiment.make_policy(config)
  with (
    jax.set_mesh(policy.mesh),
    checkpoint.Checkpointer(
      pathlib.Path(workdir) / 'checkpoints', keep=config.checkpoint.keep
    ) as checkpointer,
  ):
    # What is wrong with one of these is known before workers start.
    run = _Run(config, workdir, policy, checkpointer, notice)
    with experiment.make_pool(config) as pool:
      experiment.try_environment(config, pool, 'train', policy.tokenizer)
      # Of a run that cannot start, nothing stands in the way of another one.
      if hosts.first():
        config_lib.save(config, workdir)
      run.go(experiment.make_roller(config, policy, pool))


class _Run:
  """An experiment under way."""

  def __init__(self, config, workdir, policy, checkpointer, notice):
    self._config, self._workdir = config, workdir
    self._policy, self._checkpointer = policy, checkpointer
    self._notice = notice
    self._tasks = experiment.make_task_sampler(config)
    self._kind = experiment.make_kind(config)
    self._panel = (
      experiment.make_panel(config) if config.evaluation.every else []
    )
    self._algorithm = algorithms.make(**config_lib.algorithm_kwargs(config))
    self._filter = collection.Filter(**config.filter)
    self._roller: rollout.Roller
    self._learner = experiment.make_learner(
      config, policy, experiment.policy_gradient(config)
    )
    self._critic = (
      experiment.make_critic(config, policy)
      if self._algorithm.needs_values
      else None
    )
    like = {'policy': self._learner.describe()[0]}
    if self._critic:
      like['critic'] = self._critic.describe()
    checkpointer.check(like)
    self._like = like
    # Of policy and critic; what the policy is held near to.
    self._states: dict[str, learner_lib.TrainState] = {}
    self._reference: dict | None = None
    self._log = None
    # What a resumed run needs to know of the past.
    self._spent = collection.Spent()
    self._entropies: list[float] = []
    # Updates that were skipped, the last ones in a row, of policy and critic.
    self._skipped: dict[str, float] = {}
    # What there was after the last iteration, and which one is saved.
    self._finished: tuple[int, dict, dict] | None = None
    self._saved: int | None = None

  @property
  def _params(self) -> dict:
    return self._states['policy'].params

  def go(self, roller: rollout.Roller) -> None:
    """Iterates to the end, or until it has to leave."""
    self._roller = roller
    try:
      self._go()
    except preemption.Leave:
      self._leave()

  def _go(self) -> None:
    config = self._config
    with experiment.explained(*_MODEL_MEMORY):
      first = self._start()
    if first:
      hosts.say(f'resuming {self._workdir} after iteration {first - 1}')
    repeated = experiment.most_repeated(config, self._workdir, first)
    writer = experiment.make_writer(config, self._workdir, first, repeated)
    self._log = experiment.make_episode_log(
      config, self._workdir, self._policy.tokenizer, first, repeated
    )
    hosts.say(f'compiling for {len(jax.devices())} device(s)')
    self._warm_up()
    for iteration in range(first, config.num_iterations):
      begin = time.monotonic()
      values = {}
      if config.evaluation.every and iteration % config.evaluation.every == 0:
        values |= self._evaluate()
      self._policy.sampler.trace = hosts.first() and iteration == first
      collected, found = self._collect(iteration)
      # The update might not be over in time, and uses up what it begins with.
      self._leave_if_told()
      with self._notice.hold():
        values |= found | self._update(collected, iteration)
        values['time/iteration_secs'] = time.monotonic() - begin
        writer.write(iteration, values)
        hosts.say(metrics.console_line(iteration, values))
        self._finished = iteration, dict(self._states), self._past(iteration)
      if (iteration + 1) % config.checkpoint.every == 0 or (
        iteration == config.num_iterations - 1
      ):
        self._save()
      self._leave_if_told()
    if config.evaluation.every:
      values = self._evaluate() | self._spent.metrics()
      writer.write(config.num_iterations, values)
      hosts.say(metrics.console_line(config.num_iterations, values))
    writer.close()
    self._checkpointer.wait()
    self._policy.sampler.release()
    _export(
      config, self._workdir, self._policy, self._params, self._learner.base
    )
    if hosts.first():
      print(f'learning curve: {metrics.plot(self._workdir)}', flush=True)

  def _start(self) -> int:
    """Loads the model, or the newest checkpoint; returns the next iteration."""
    start = self._policy.load()
    self._reference = experiment.make_reference(
      self._config, self._policy, start
    )
    states = {'policy': self._learner.init(start)}
    self._policy.sampler.base = self._learner.base
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
    self._spent = collection.Spent(
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
    with self._notice.hold():
      self._checkpointer.save(*self._finished)
      self._saved = self._finished[0]

  def _leave_if_told(self) -> None:
    if self._notice.agreed():
      raise preemption.Leave

  def _leave(self) -> None:
    """Saves what there was after the last iteration."""
    self._notice.leave()
    if self._finished and self._finished[0] != self._saved:
      self._save()
    self._checkpointer.wait()
    hosts.say(
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
      with experiment.explained(*_SAMPLER_MEMORY):
        self._policy.sampler.warm_up(self._params, advance)
      with experiment.explained(*_LEARNER_MEMORY):
        self._states['policy'] = self._learner.warm_up(
          self._states['policy'], self._reference, advance
        )
        if self._critic:
          self._states['critic'] = self._critic.warm_up(
            self._states['critic'], advance
          )
    self._credit(experiment.make_row(self._config))

  def _evaluate(self) -> dict[str, float]:
    begin = time.monotonic()
    self._roller.max_turns = None
    found = evaluation.play(
      self._roller,
      self._params,
      self._panel,
      sampling=experiment.make_sampling(self._config, evaluation=True),
      kind=self._kind,
    )
    self._check_failures(found)
    return evaluation.rates(found) | {
      'time/evaluation_secs': time.monotonic() - begin
    }

  def _check_failures(self, played: list[trajectory.Trajectory]) -> None:
    """Says which episodes failed; stops the run if they are too many."""
    report = metrics.failure_report(played)
    if not report:
      return
    hosts.say(report)
    share = sum(bool(t.failure) for t in played) / len(played)
    most = self._config.pool.max_failed_share
    if share > most or share == 1:
      raise hosts.Stopped(
        f'pool.max_failed_share={most}: {report}; mend the environment or '
        'its data, then the same command goes on'
      )

  def _collect(
    self, iteration: int
  ) -> tuple[collection.Collected, dict[str, float]]:
    """Plays the episodes of an iteration; returns metrics, too."""
    config, sampler, begin = (
      self._config,
      self._policy.sampler,
      time.monotonic(),
    )
    self._roller.max_turns = collection.horizon(
      config.rollout.horizon, iteration
    )
    collected = collection.collect(
      functools.partial(self._play, iteration),
      self._tasks,
      self._filter,
      groups=config.rollout.groups,
      iteration=iteration,
    )
    self._check_failures(collected.played)
    values = self._roller.metrics()
    if sampler.trace:
      timeline.plot(
        self._roller.stats.spans,
        self._roller.clock.env_spans,
        pathlib.Path(self._workdir),
      )
    # What it held is room for the update.
    sampler.release()
    values |= collected.metrics
    values |= metrics.summarize(collected.played, prefix='train')
    return collected, values | {'time/rollout_secs': time.monotonic() - begin}

  def _play(
    self, iteration: int, tasks: list, place: int
  ) -> list[trajectory.Trajectory]:
    """Plays groups of tasks with the random numbers of a place."""
    members = self._config.rollout.episodes_per_group
    with hosts.bar(
      total=len(hosts.share(len(tasks))) * members,
      desc=f'iteration {iteration}',
      unit='episode',
    ) as bar:
      return self._roller.collect(
        self._params,
        tasks,
        episodes_per_group=members,
        stream=(rollout.TRAIN, place),
        sampling=experiment.make_sampling(self._config),
        kind=self._kind,
        on_finished=hosts.advance(
          bar, lambda: self._policy.sampler.stats.decode_tokens
        ),
      )

  def _update(
    self, collected: collection.Collected, iteration: int
  ) -> dict[str, float]:
    """Counts, keeps and learns from episodes; returns the metrics."""
    begin = time.monotonic()
    self._tasks.observe(
      (t.task, t.success) for t in collected.played if not t.failure
    )
    self._spent.add(collected.played)
    self._roller.prepare(
      self._tasks.at(self._filter.positions(iteration + 1)[0]),
      self._config.rollout.episodes_per_group,
    )
    values = self._spent.metrics() | self._learn(collected, iteration)
    return values | {'time/update_secs': time.monotonic() - begin}

  def _learn(
    self, collected: collection.Collected, iteration: int
  ) -> dict[str, float]:
    """Learns from episodes, and keeps them; returns the metrics."""
    if not collected.kept:
      return self._learn_nothing(collected, iteration)
    config, learner = self._config, self._learner
    begin = time.monotonic()
    rows = batch.from_trajectories(
      collected.kept, **experiment.row_sizes(config)
    )
    values = {'time/rows_secs': time.monotonic() - begin}
    credit, told, found = self._credit(rows)
    values |= found
    if self._log:
      values |= self._log.write(iteration, collected, rows, credit)
    values |= metrics.effective_tokens(credit.advantages, rows.completion_mask)
    old_log_probs, importance = rows.sampler_log_probs, None
    if config.loss.old_log_probs == 'learner':
      old_log_probs = learner.log_probs(self._params, rows)
    values |= learner.sampler_difference(self._params, rows, old_log_probs)
    if self._critic:
      self._states['critic'], found = self._critic.update(
        self._states['critic'],
        rows,
        values=told,
        targets=credit.value_targets,
        links=rows.completion_mask if credit.links is None else credit.links,
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
    self._states['policy'], found = learner.update(
      self._states['policy'],
      rows,
      credit.advantages,
      old_log_probs=old_log_probs,
      ref_log_probs=reference,
      importance=importance,
      iteration=iteration,
      skipped_before=self._skipped.get('update', 0.0),
      **experiment.corridor(config, rows, self._entropies, iteration),
    )
    self._check_skipped(
      'update',
      found,
      rows,
      advantages=credit.advantages,
      old_log_probs=old_log_probs,
    )
    if math.isfinite(found['loss/entropy']):
      self._entropies.append(found['loss/entropy'])
    return values | found

  def _learn_nothing(
    self, collected: collection.Collected, iteration: int
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
  ) -> tuple[algorithms.Credit, np.ndarray | None, dict[str, float]]:
    """Returns advantages, what the critic tells, and metrics."""
    told = None
    if self._critic:
      told = self._critic.values(self._states['critic'].params, rows)
    begin = time.monotonic()
    credit = self._algorithm.credit(rows, told)
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
    if hosts.first():
      rows.save(path, **arrays)
    raise hosts.Stopped(
      f'{what}/skipped_in_row={in_row:.0f}: loss or gradient was not finite in '
      f'so many updates (learner.max_skipped_in_row); the last rows are in '
      f'{path}; try a lower optimizer.learning_rate'
    )


def _export(config, workdir, policy, params: dict, base: dict) -> None:
  """Writes the policy, and the adapters by themselves, for others to load."""
  root = pathlib.Path(workdir)
  with hosts.whole(root / 'policy') as folder:
    huggingface.save(
      folder,
      policy.model,
      lora.join(base, params),
      tokenizer_directory=policy.tokenizer.directory,
    )
  if policy.model.adapters:
    with hosts.whole(root / 'adapters') as folder:
      huggingface.save_adapters(folder, policy.model, params, config.model.path)
