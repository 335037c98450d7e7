"""Set up a training run: its objects, checkpoints, compilation and export.

`builders` makes the objects that evaluation and imitation use as well.
"""

import concurrent.futures
import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import ml_collections

from configs import variants
from gigpo_jax import (
  advantages,
  algorithms,
  answer_scores,
  batch,
  builders,
  carry_over,
  checkpoint,
  critic,
  group_filter,
  guard,
  kl,
  learner,
  losses,
  metrics,
  modulators,
  options,
  privileged,
  reward_shaping,
  rollout,
  sampler,
  scored_rewards,
  selectors,
  tasks,
  teacher,
  token_batch,
  trajectory,
)
from gigpo_jax import config as config_lib
from gigpo_jax.run import (
  config_fields,
  loss_check,
  model_builders,
  policy_files,
  remat,
  run_config,
  run_logs,
  run_state,
  teacher_builders,
)
from gigpo_jax.runtime import (
  compilation,
  console,
  distributed,
  errors,
  files,
)

# Folders of episodes and of the rows of a teacher: `episodes.FOLDER` and
# `TEACHER_FOLDER`, whose module is slow to import.
_EPISODES, _TEACHER = 'episodes', 'teacher'

# Config fields that control the memory of programs, and remedies.
_SAMPLER_MEMORY = (
  'rollout.batch_buckets',
  'lower it, rollout.max_prompt_tokens or rollout.max_completion_tokens',
)
_LEARNER_MEMORY = (
  'learner.microbatch_tokens',
  'lower it or rollout.max_prompt_tokens',
)


def check_run(
  config: ml_collections.ConfigDict,
  workdir: str,
  *,
  allow_config_change: bool,
  has_harness: bool = False,
) -> dict[str, str]:
  """Checks the config and the work directory, without devices or simulators.

  Returns:
    What the run reads apart from its config, see `run_config.check_resume`.

  Raises:
    ValueError: one line per problem, if the config is invalid, or the work
      directory cannot be written or holds another experiment.
  """
  config_lib.validate(config, has_harness=has_harness)
  inputs = describe_inputs(config)
  run_config.check_workdir(workdir)
  run_config.check_resume(
    config,
    workdir,
    allow_change=allow_config_change,
    inputs=inputs,
    advice='use another --workdir, or --allow_config_change to resume with '
    'this config',
  )
  checkpoint.check_folder(pathlib.Path(workdir) / 'checkpoints')
  if config.metrics.wandb:
    metrics.read_wandb_run_id(workdir)
  policy_files.check_target(config.model.path, workdir)
  policy_files.check_owner(workdir)
  return inputs


def is_finished(config: ml_collections.ConfigDict, workdir: str) -> bool:
  """Returns whether the run of a config has nothing left to write."""
  folder = pathlib.Path(workdir)
  curve = folder / metrics.CURVE  # Written last.
  return (
    policy_files.is_finished(folder, config.num_iterations)
    and curve.exists()
    and not metrics.is_older(curve, folder)
  )


def describe_inputs(config: ml_collections.ConfigDict) -> dict[str, str]:
  """Returns texts that distinguish what a run reads apart from its config."""
  inputs = model_builders.describe_files(config)
  splits = ['train']
  if config.evaluation.every:
    splits.append(config.evaluation.split)
  for split in splits:
    inputs |= config_lib.list_tasks(config, split).describe()
  if config.teacher.mu_peak and (data := config.teacher.data):
    paths = [path for path in pathlib.Path(data).iterdir() if path.is_file()]
    inputs[f'teacher.data={data}: files'] = files.fingerprint(paths)
  return inputs


def check_episodes(workdir: str) -> None:
  """Checks that the episodes in a work directory, if any, can be continued.

  Raises:
    ValueError: in one line, if they cannot.
  """
  folders = [pathlib.Path(workdir) / name for name in (_EPISODES, _TEACHER)]
  if any(folder.is_dir() for folder in folders):
    # tensorflow_datasets is slow to import.
    from gigpo_jax import episodes

    for folder in folders:
      episodes.check_folder(folder)


@dataclasses.dataclass(frozen=True)
class Parts:
  """The objects of a training run, apart from environments and checkpoints.

  Attributes:
    config: the experiment.
    workdir: its folder.
    bundle: the model with its mesh, tokenizer and sampler.
    loss: the policy's loss.
    teacher: rows of a teacher, for updates of the policy.
    privileged_context: adds solutions to prompts; None if the teacher needs
      none.
    entropy_band: the entropy band of the policy's loss.
    kl_control: adapts the weight of the KL.
    reward: changes rewards.
    learner: updates the policy.
    critic: updates the critic; None for algorithms without one.
    algorithm: computes advantages.
    answer_scorer: scores reference answers; None for algorithms without them.
    scored_rewards: rewards from probabilities of the policy; None for none.
    modulators: change the advantages.
    selectors: choose the rows and tokens to train on.
    group_filter: selects the groups to train on.
    carry_over: decides which groups continue in the next iteration.
    guard: the guards against collapse.
    tasks: the stream of training tasks, which may depend on outcomes.
    eval_batch: the episodes of an evaluation; None if there are none.
    sampling: sampling options of training.
    rows_kwargs: arguments of `batch.from_trajectories`.
    max_repeated: number of iterations that a kill may have to repeat.
  """

  config: ml_collections.ConfigDict
  workdir: pathlib.Path
  bundle: model_builders.ModelBundle
  loss: token_batch.Loss
  teacher: teacher.Teacher
  privileged_context: privileged.PrivilegedContext | None
  entropy_band: losses.EntropyBand
  kl_control: kl.Control
  reward: reward_shaping.RewardShaping
  learner: learner.Learner
  critic: critic.Critic | None
  algorithm: algorithms.Algorithm
  answer_scorer: answer_scores.AnswerScorer | None
  scored_rewards: scored_rewards.ScoredRewards | None
  modulators: tuple[modulators.Modulator, ...]
  selectors: tuple[selectors.Selector, ...]
  group_filter: group_filter.GroupFilter
  carry_over: carry_over.CarryOver
  guard: guard.Guard
  tasks: tasks.TaskSampler
  eval_batch: rollout.EpisodeBatch | None
  sampling: sampler.Sampling
  rows_kwargs: dict[str, Any]
  max_repeated: int

  @property
  def needs_reference(self) -> bool:
    """Whether a reference policy is needed."""
    return losses.needs_reference(self.loss) or self.reward.needs_reference

  @property
  def group_size(self) -> int:
    """Number of episodes with which a group starts."""
    members = self.config.rollout.episodes_per_group
    return algorithms.num_roots(self.algorithm, members)

  def diagnose(
    self, rows: batch.Rows, output: algorithms.AlgorithmOutput
  ) -> dict[str, float]:
    """Returns metrics of anchor groups, if the algorithm itself has none.

    They can be compared between algorithms.
    """
    if output.components is not None:
      return {}
    section = self.config.algorithm
    return advantages.diagnose(
      *rows.steps_taken(),
      discount=section.discount,
      invalid_penalty=section.invalid_penalty,
      norm=section.norm,
    )

  def stop_if_failed(self, episodes: Sequence[trajectory.Trajectory]) -> None:
    """Reports failed episodes; see `metrics.stop_if_failed`."""
    metrics.stop_if_failed(episodes, self.config.pool.max_failed_share)

  def abstract_states(self) -> dict[str, learner.TrainState]:
    """Returns shapes, dtypes and shardings of the states of a checkpoint."""
    states = {'policy': self.learner.abstract_state()[0]}
    if self.critic:
      states['critic'] = self.critic.abstract_state()
    return states


def make_parts(
  config: ml_collections.ConfigDict,
  workdir: str,
  bundle: model_builders.ModelBundle,
) -> Parts:
  """Returns the objects of a training run.

  Compiles nothing, except for model.remat=auto.
  """
  algorithm = algorithms.of_section(config.algorithm.to_dict())
  loss = builders.make_loss(config)
  bundle = remat.resolve(config, bundle, has_critic=algorithm.needs_values)
  tutor = teacher_builders.make_teacher(config, bundle.tokenizer)
  return Parts(
    config=config,
    workdir=pathlib.Path(workdir),
    bundle=bundle,
    loss=loss,
    teacher=tutor,
    privileged_context=teacher_builders.make_privileged_context(
      config, bundle.tokenizer
    ),
    entropy_band=losses.EntropyBand(**config.loss.entropy_band),
    kl_control=options.of_section(kl.Control, config.loss),
    reward=builders.make_reward_shaping(config),
    learner=builders.make_learner(config, bundle, loss, tutor.loss),
    critic=builders.make_critic(config, bundle)
    if algorithm.needs_values
    else None,
    algorithm=algorithm,
    answer_scorer=builders.make_answer_scorer(config, bundle.tokenizer.encode)
    if algorithms.scores_answers(algorithm)
    else None,
    scored_rewards=scored_rewards.make(config.reward, bundle.tokenizer),
    modulators=modulators.FAMILY.make(config.algorithm),
    selectors=selectors.FAMILY.make(config.filter),
    group_filter=options.of_section(group_filter.GroupFilter, config.filter),
    carry_over=options.of_section(carry_over.CarryOver, config.rollout),
    guard=guard.Guard(**config.guard),
    tasks=builders.make_task_sampler(config),
    eval_batch=builders.make_eval_batch(config)
    if config.evaluation.every
    else None,
    sampling=model_builders.make_sampling(config),
    rows_kwargs=builders.rows_kwargs(config),
    max_repeated=_max_repeated(config, workdir),
  )


def open_checkpoints(
  config: ml_collections.ConfigDict, workdir: str
) -> checkpoint.Checkpointer:
  """Returns the checkpoints of a run."""
  return checkpoint.Checkpointer(
    pathlib.Path(workdir) / 'checkpoints', keep=config.checkpoint.keep
  )


def restore_or_init(
  parts: Parts, saver: checkpoint.Checkpointer
) -> tuple[run_state.RunState, run_state.History]:
  """Returns the state and history of the newest checkpoint, or of the start.

  Raises:
    ValueError: in one line, if the model does not fit on the devices or the
      checkpoint belongs to another experiment.
  """
  with errors.explain_out_of_memory('model.path', 'use a smaller model'):
    params = parts.bundle.load()
    reference = None
    if parts.needs_reference:
      reference = builders.make_reference(parts.bundle, params)
    # With adapters, these set the parameters that are not trained.
    policy, critic_state = parts.learner.init(params), init_critic(parts)
    if saver.latest() is None:
      state = run_state.RunState(policy, critic_state, reference)
      return state, run_state.History()
    del params, policy, critic_state  # The restored state needs the memory.
    iteration, states, values = saver.restore(parts.abstract_states())
  try:
    history = run_state.History.from_json(values, iteration)
    parts.tasks.restore(history.task_outcomes)
  except (KeyError, TypeError, ValueError, AttributeError, IndexError) as e:
    raise ValueError(
      f'{parts.workdir}/checkpoints/{iteration}/host: not the state of a run '
      f'({type(e).__name__}: {e}); delete this checkpoint to resume from the '
      'previous one, or give another --workdir'
    ) from e
  history = _drop_long_groups(parts.config, history)
  is_last = iteration + 1 == parts.config.num_iterations
  note = '; no iteration is left' if is_last else ''
  console.log(f'resuming {parts.workdir} after iteration {iteration}{note}')
  return run_state.RunState(**states, reference=reference), history


def _drop_long_groups(
  config: ml_collections.ConfigDict, history: run_state.History
) -> run_state.History:
  """Drops waiting groups that were played with larger limits of tokens."""
  limits = {
    name: config.rollout[name]
    for name in ('max_prompt_tokens', 'max_completion_tokens')
  }
  kept = carry_over.without_long_turns(history.waiting, **limits)
  if dropped := len(history.waiting) - len(kept):
    shown = ', '.join(f'rollout.{name}={x}' for name, x in limits.items())
    console.log(f'{shown}: {dropped} waiting groups are longer and are dropped')
  return dataclasses.replace(history, waiting=kept)


def init_critic(parts: Parts) -> learner.TrainState | None:
  """Returns the critic's state before the first iteration, if there is one."""
  return parts.critic and parts.critic.init(parts.bundle.load())


def save(
  parts: Parts,
  saver: checkpoint.Checkpointer,
  iteration: int,
  state: run_state.RunState,
  history: run_state.History,
) -> None:
  """Starts to write the state after an iteration."""
  good = history.guard_state.good if parts.guard.rolls_back else None
  saver.save(iteration, state.to_dict(), history.to_json(), other=good)


def save_last(
  parts: Parts,
  saver: checkpoint.Checkpointer,
  last: tuple[int, run_state.RunState, run_state.History] | None,
) -> None:
  """Saves the last finished iteration of a preempted run."""
  if last and last[0] != saver.newest:
    save(parts, saver, *last)
  saver.wait()
  if saver.newest is None:
    console.log('SIGTERM: nothing is saved; the same command starts again')
  else:
    console.log(
      f'SIGTERM: iteration {saver.newest} is saved; rerun the same command to '
      'resume'
    )


def print_notes(config: ml_collections.ConfigDict) -> None:
  """Prints presets that are not applied, and options that are not used."""
  for name, field, value, preset in variants.unapplied(config):
    console.log(f'{field}={value}: the variant :{name} has {preset}')
  for field, value, name, instead in unused_options(config):
    meant = f'; did you mean {", ".join(instead)}?' if instead else ''
    console.log(f'{field}={value}: {name} does not use it{meant}')
  for line in loss_check.without_effect(config):
    console.log(line)
  horizon, end = config.rollout.horizon, config.num_iterations
  if late := [start for start, _ in horizon if start >= end]:
    console.log(
      f'rollout.horizon={tuple(horizon)}: num_iterations={end} ends before '
      f'iteration {late[0]}'
    )
  warmup = config.filter.warmup_iterations
  if config.filter.drop_zero_variance and warmup >= end:
    # Not refused, because short runs of a preset have fewer iterations.
    console.log(
      f'filter.warmup_iterations={warmup}: no group is dropped within '
      f'num_iterations={end}'
    )
  if config.evaluation.inside_rollout and not config.evaluation.every:
    # Not refused, because configs of environments set it.
    console.log(
      'evaluation.inside_rollout=True: evaluation.every=0 makes no evaluation'
    )


def unused_options(
  config: ml_collections.ConfigDict,
) -> Iterator[tuple[str, object, str, list[str]]]:
  """Yields options that algorithm or loss ignore, and similar ones that it has.

  Each as field, value, name of the algorithm or loss, similar fields.
  These are common options, and those that others switch off (`unused`). They
  are not refused, because configs of environments and presets set them.
  """
  for section, plugin in (
    ('algorithm', algorithms.of_section(config.algorithm.to_dict())),
    ('loss', builders.make_loss(config)),
  ):
    known = config_fields.defaults()[section]
    unused = [x for x in getattr(plugin, 'unused', ()) if x in known]
    own = options.defaults(plugin).keys() - unused
    names = dict.fromkeys((*config_lib.COMMON_OPTIONS[section], *unused))
    fields = [f'{section}.{option}' for option in names if option not in own]
    for field, value, _ in config_fields.non_default(config, fields):
      ending = field.replace(f'{section}.', '_')
      similar = [f'{section}.{x}' for x in own if x.endswith(ending)]
      if value:  # Otherwise nothing is to be used.
        yield field, value, config[section].name, similar


def start_compilation(
  parts: Parts, compiler: compilation.Compiler
) -> dict[concurrent.futures.Future, tuple[str, str]]:
  """Starts the compilation of a run's programs, from their shapes.

  Args:
    parts: the objects of the run.
    compiler: compiles in the background.

  Returns:
    The programs, each with the config field that controls its memory and a
    remedy.
  """
  devices = jax.devices()
  console.log(f'compiling for {len(devices)} x {devices[0].device_kind}')
  state, base = parts.learner.abstract_state()
  updates = parts.learner.compile(compiler, reference=parts.needs_reference)
  if parts.critic:
    updates += parts.critic.compile(compiler)
  samples = parts.bundle.sampler.compile(compiler, state.params, base)
  return dict.fromkeys(updates, _LEARNER_MEMORY) | dict.fromkeys(
    samples, _SAMPLER_MEMORY
  )


def warm_up(
  parts: Parts,
  state: run_state.RunState,
  programs: dict[concurrent.futures.Future, tuple[str, str]],
  start: float,
) -> run_state.RunState:
  """Waits for the programs of a run and runs the largest ones once.

  Args:
    parts: the objects of the run.
    state: donated.
    programs: the result of `start_compilation`.
    start: when compilation started, by `time.monotonic()`.

  Returns:
    The unchanged state.

  Raises:
    ValueError: in one line, if a program does not fit on the devices.
  """
  with compilation.progress(len(programs), start) as advance:
    for program in concurrent.futures.as_completed(programs):
      with errors.explain_out_of_memory(*programs[program]):
        program.result()
      advance()
  with errors.explain_out_of_memory(*_SAMPLER_MEMORY):
    parts.bundle.sampler.warm_up(state.policy.params, parts.learner.base)
  with errors.explain_out_of_memory(*_LEARNER_MEMORY):
    checkpoint.warm_up(state.to_dict())
    policy = parts.learner.warm_up(state.policy, state.reference)
    state = state.replace(policy=policy)
    if parts.critic:
      state = state.replace(critic=parts.critic.warm_up(state.critic))
  return state


def open_logs(parts: Parts, first_iteration: int) -> run_logs.RunLogs:
  """Returns the logs of a run; those of other processes write nothing."""
  config, workdir = parts.config, parts.workdir
  is_main = distributed.is_main_process()
  # Without any checkpoint, a kill and the deletion of all of them look the
  # same: nothing may be dropped.
  max_repeated = 0
  if first_iteration:
    # Newer checkpoints are damaged, and their iterations are repeated, too.
    saved = files.numbered_folders(workdir / 'checkpoints')
    num_damaged = max(saved, default=0) + 1 - first_iteration
    max_repeated = parts.max_repeated + max(num_damaged, 0)
  writer = builders.make_writer(
    config, str(workdir), first_iteration, max_repeated
  )
  folders = (_EPISODES, _TEACHER) if parts.teacher.loss else (_EPISODES,)
  episode_writers = {}
  every = config.episodes.every
  folders = [x for x in folders if every or (workdir / x).is_dir()]
  if folders and is_main:
    # tensorflow_datasets is slow to import, and only some runs need it.
    from gigpo_jax import episodes

    for folder in folders:
      # Even if no more are kept, those of repeated iterations are dropped.
      if not every and not (workdir / folder / episodes.INFO).exists():
        continue
      episode_writers[folder] = episodes.EpisodeWriter(
        workdir / folder,
        parts.bundle.tokenizer,
        seed=config.seed,
        every=every,
        first_iteration=first_iteration,
        most_repeated=max_repeated,
      )
  return run_logs.RunLogs(
    writer,
    episode_writers.get(_EPISODES),
    episode_writers.get(_TEACHER),
    workdir if is_main else None,
  )


def _max_repeated(config: ml_collections.ConfigDict, workdir: str) -> int:
  """Returns how many iterations a resumed run may repeat after a kill.

  More repeated iterations mean that checkpoints were deleted. Checkpoints may
  have been rarer before the run was resumed.
  """
  before = run_config.stored_section(workdir, 'checkpoint')
  every, keep = (
    max(config.checkpoint[name], before.get(name, 0))
    for name in ('every', 'keep')
  )
  # Allow for damaged checkpoints, one being written, and the last evaluation.
  return (keep + 2) * every + 1


def export(parts: Parts, state: run_state.RunState, iterations: int) -> None:
  """Writes the policy of a run; see `policy_files.export`."""
  policy_files.export(
    parts.workdir,
    parts.bundle,
    parts.learner.base,
    state.policy.params,
    parts.config.model.path,
    iterations=iterations,
  )
