"""The experiment, top to bottom: collect, compare, update, repeat."""

import pathlib
import time

import jax
import ml_collections

from gigpo_jax import (
  algorithms,
  batch,
  checkpoint,
  evaluation,
  experiment,
  hosts,
  losses,
  metrics,
  rollout,
  timeline,
)
from gigpo_jax import (
  config as config_lib,
)
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


def train(config: ml_collections.ConfigDict, workdir: str) -> None:
  """Runs an experiment, or goes on with one that was broken off.

  Everything random is a function of (seed, iteration), so a resumed run
  equals an uninterrupted one. Writes to `workdir`: config.json,
  metrics.jsonl, tensorboard/, checkpoints/, learning_curve.png, and in
  policy/ the trained policy as a Hugging Face directory. Line k of the
  metrics evaluates the policy after k iterations; k = 0 is the start.

  Several processes (see `hosts`) share episodes and devices; the first one
  writes, checkpoints apart, for which `workdir` has to be one folder for all.

  Raises:
    ValueError: in one line a problem, before devices or simulators start, if
      the config cannot work or the directory holds another experiment.
  """
  config_lib.validate(config)
  config_lib.check_resume(config, workdir)
  hosts.join()
  if hosts.first():
    config_lib.save(config, workdir)
  policy = experiment.make_policy(config)
  with (
    jax.set_mesh(policy.mesh),
    experiment.make_pool(config) as pool,
    checkpoint.Checkpointer(
      pathlib.Path(workdir) / 'checkpoints', keep=config.checkpoint.keep
    ) as checkpointer,
  ):
    _run(config, workdir, policy, pool, checkpointer)


def _run(config, workdir, policy, pool, checkpointer) -> None:
  task_sampler = experiment.make_task_sampler(config)
  kind = experiment.make_kind(config)
  panel = experiment.make_panel(config) if config.evaluation.every else []
  algorithm = algorithms.make(**config_lib.algorithm_kwargs(config))
  roller = experiment.make_roller(config, policy, pool)
  learner = experiment.make_learner(
    config, policy, experiment.policy_gradient(config)
  )
  with experiment.explained(*_MODEL_MEMORY):
    state, reference, first_iteration = _start(
      config, policy, learner, checkpointer
    )
  if first_iteration:
    hosts.say(f'resuming {workdir} after iteration {first_iteration - 1}')
  writer = experiment.make_writer(workdir, first_iteration)
  hosts.say(f'compiling for {len(jax.devices())} device(s)')
  with experiment.explained(*_SAMPLER_MEMORY):
    policy.sampler.warm_up(state.params)
  with experiment.explained(*_LEARNER_MEMORY):
    state = learner.warm_up(state, reference)

  def evaluate() -> dict[str, float]:
    begin = time.monotonic()
    rates = evaluation.evaluate(
      roller,
      state.params,
      panel,
      sampling=experiment.make_sampling(config, evaluation=True),
      kind=kind,
    )
    return rates | {'time/evaluation_secs': time.monotonic() - begin}

  for iteration in range(first_iteration, config.num_iterations):
    begin = time.monotonic()
    values = {}
    if config.evaluation.every and iteration % config.evaluation.every == 0:
      values |= evaluate()
    tasks = task_sampler.at(iteration)
    policy.sampler.trace = hosts.first() and iteration == first_iteration
    rollout_begin = time.monotonic()
    with hosts.bar(
      total=len(hosts.share(len(tasks))) * config.rollout.episodes_per_group,
      desc=f'iteration {iteration}',
    ) as bar:
      trajectories = roller.collect(
        state.params,
        tasks,
        episodes_per_group=config.rollout.episodes_per_group,
        stream=(rollout.TRAIN, iteration),
        sampling=experiment.make_sampling(config),
        kind=kind,
        on_finished=bar.update,
      )
    rollout_metrics = roller.metrics()
    if policy.sampler.trace:
      timeline.plot(
        roller.stats.spans, roller.clock.env_spans, pathlib.Path(workdir)
      )
    # What it held is room for the update.
    policy.sampler.release()
    update_begin = time.monotonic()
    roller.prepare(
      task_sampler.at(iteration + 1), config.rollout.episodes_per_group
    )
    rows = batch.from_trajectories(trajectories, **experiment.row_sizes(config))
    advantages, advantage_metrics = algorithm.advantages(rows)
    old_log_probs = (
      learner.log_probs(state.params, rows)
      if config.loss.old_log_probs == 'learner'
      else rows.sampler_log_probs
    )
    values |= learner.sampler_difference(state.params, rows, old_log_probs)
    state, update_metrics = learner.update(
      state,
      rows,
      advantages,
      old_log_probs=old_log_probs,
      ref_log_probs=(
        None if reference is None else learner.log_probs(reference, rows)
      ),
      importance=(
        losses.truncated_importance(
          old_log_probs, rows.sampler_log_probs, config.loss.tis_clip
        )
        if config.loss.tis_clip
        else None
      ),
      iteration=iteration,
    )
    values |= metrics.summarize(trajectories, prefix='train')
    values |= advantage_metrics | update_metrics | rollout_metrics
    values |= {
      'time/rollout_secs': update_begin - rollout_begin,
      'time/update_secs': time.monotonic() - update_begin,
      'time/iteration_secs': time.monotonic() - begin,
    }
    writer.write(iteration, values)
    hosts.say(metrics.console_line(iteration, values))
    if (iteration + 1) % config.checkpoint.every == 0 or (
      iteration == config.num_iterations - 1
    ):
      checkpointer.save(iteration, state, {'iteration': iteration})

  if config.evaluation.every:
    values = evaluate()
    writer.write(config.num_iterations, values)
    hosts.say(metrics.console_line(config.num_iterations, values))
  writer.close()
  checkpointer.wait()
  policy.sampler.release()
  _export(config, workdir, policy, state.params, learner.base)
  if hosts.first():
    print(f'learning curve: {metrics.plot(workdir)}', flush=True)


def _start(config, policy, learner, checkpointer) -> tuple:
  """Returns the state to go on from, the reference and the iteration."""
  start = policy.load()
  reference = experiment.make_reference(config, policy, start)
  state = learner.init(start)
  policy.sampler.base = learner.base
  if checkpointer.latest() is None:
    return state, reference, 0
  like = checkpoint.abstract(state)
  del start, state  # There is no room for two.
  saved, state, _ = checkpointer.restore(like)
  return state, reference, saved + 1


def _export(config, workdir, policy, params: dict, base: dict) -> None:
  """Writes the policy, and the adapters by themselves, for others to load."""
  root = pathlib.Path(workdir)
  huggingface.save(
    str(root / 'policy'),
    policy.model,
    lora.join(base, params),
    tokenizer_directory=policy.tokenizer.directory,
  )
  if policy.model.adapters:
    huggingface.save_adapters(
      str(root / 'adapters'), policy.model, params, config.model.path
    )
