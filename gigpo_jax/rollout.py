"""The turn loop of environments and sampler: tasks in, trajectories out.

With the `async` schedule, each episode advances independently. Its observation
becomes a prompt, the prompt a request, and the response a step of its
environment in a worker process. Meanwhile the device decodes for the other
episodes. With `lockstep`, all episodes wait for the slowest in every turn,
which is slower and easier to follow.

The sampled tokens depend only on the request, and trajectories are returned in
the order of their tasks. A rollout is therefore a function of its arguments,
independent of the schedule.
"""

import dataclasses
import functools
import math
import operator
import time
from collections.abc import Callable, Sequence

import numpy as np

from envs import base
from gigpo_jax import (
  conversation,
  deprecated,
  drafts,
  env_pool,
  forced_prefixes,
  options,
  reward_functions,
  rollout_options,
  sampler,
  tokenizer,
  trajectory,
)
from gigpo_jax.runtime import console, distributed

# First component of a request's random stream: the purpose of the tokens.
TRAIN, EVALUATION, CONTINUATION = 0, 1, 2

# Longest wait for environments, and with a sampler of several processes.
_WAIT_SECS = 30.0
_SHARED_WAIT_SECS = 0.05

SCHEDULES = rollout_options.SCHEDULES


@dataclasses.dataclass(frozen=True)
class EpisodeBatch:
  """N episodes of each task, all with the same options.

  Attributes:
    tasks: the G initial states, one group each.
    episodes_per_group: N.
    stream: (TRAIN, EVALUATION or CONTINUATION, iteration). With the task index,
      the member and the step, it identifies the random stream of a response.
    sampling: sampling options.
    max_turns: limit of turns per episode, in addition to the environment's own
      limit; None for no limit.
    pause_after: turns in this rollout after which an episode pauses; None:
      episodes run to their end.
    paused: episodes of an earlier rollout to continue. If there are any, no
      others start, and `tasks` is empty.
  """

  tasks: Sequence[base.Task]
  episodes_per_group: int
  stream: tuple[int, int]
  sampling: sampler.Sampling
  max_turns: int | None = None
  pause_after: int | None = None
  paused: Sequence[trajectory.Trajectory] = ()


@dataclasses.dataclass(eq=False)
class _Episode:
  """An episode that waits for an environment or runs in one."""

  batch: EpisodeBatch
  start: trajectory.Trajectory  # As it was before this rollout.
  # Number of turns, including those of earlier rollouts, at which it pauses.
  pauses_at: float = math.inf
  # The current turn without its result, while the environment steps.
  turn: trajectory.SampledTurn | None = None
  failure: str = ''
  is_paused: bool = False
  ticket: int | None = None  # Of its reward functions.

  def __post_init__(self):
    self.first_observation = self.start.first_observation
    self.steps = list(self.start.steps)

  @property
  def conversation(self) -> tuple[int, ...]:
    """Returns the streams of its requests, without the step."""
    return (*self.group, self.start.member)

  @property
  def group(self) -> tuple[int, ...]:
    """Returns the streams of its group's requests, without the member."""
    return (*self.batch.stream, self.start.task.index)

  @property
  def is_scored(self) -> bool:
    """Returns whether reward functions apply to it once it has ended."""
    is_over = bool(self.steps) and not self.is_paused and not self.failure
    return is_over and self.batch.stream[0] == TRAIN

  def to_trajectory(self, task_type: str) -> trajectory.Trajectory:
    """Returns the recorded episode."""
    return dataclasses.replace(
      self.start,
      task_type=task_type,
      steps=tuple(self.steps),
      failure=self.failure,
      first_observation=self.first_observation,
      is_paused=self.is_paused,
    )


@dataclasses.dataclass
class RolloutClock:
  """Timing of a rollout; the sampler keeps its own statistics.

  Attributes:
    start: start of the rollout, monotonic seconds.
    env_wait_secs: time in which the sampler was idle because all episodes
      were waiting for their environments.
    reward_wait_secs: time after the last episode in which only reward functions
      ran.
    env_spans: start and end of each call of an environment, monotonic seconds.
    total_secs: duration of the rollout.
  """

  start: float = 0.0
  env_wait_secs: float = 0.0
  reward_wait_secs: float = 0.0
  env_spans: list[tuple[float, float]] = dataclasses.field(default_factory=list)
  total_secs: float = 0.0


@dataclasses.dataclass
class EpisodeRunner:
  """Runs episodes of a policy.

  Attributes:
    pool: the environments.
    sampler: samples responses to prompts.
    tokenizer: encodes prompts and decodes responses.
    max_prompt_tokens: limit of a rendered prompt.
    prompt_overflow: treatment of longer prompts, one of
      `tokenizer.OVERFLOW_POLICIES`.
    schedule: one of SCHEDULES.
    earlier_thinking: thinking in earlier turns of a conversation, one of
      `conversation.THINKING`.
    scorer: computes rewards of training episodes by functions; None: there are
      no functions.
    prefixes: forced prefixes of training episodes.
    agents: names of the agents that have adapters of their own; (): none has.
    task_type: maps a task to its task type; by default its split.
    clock: timing of the last rollout.
    stats: statistics of the sampler in the last rollout.
    endless_notice: reports that no episode ends.
  """

  pool: env_pool.EnvPool
  sampler: sampler.Sampler
  tokenizer: tokenizer.Tokenizer
  max_prompt_tokens: int
  prompt_overflow: str
  schedule: str = 'async'
  earlier_thinking: str = 'keep'
  scorer: reward_functions.Scorer | None = None
  prefixes: forced_prefixes.ForcedPrefixes = forced_prefixes.ForcedPrefixes()
  agents: Sequence[str] = ()
  task_type: Callable[[base.Task], str] = operator.attrgetter('split')
  clock: RolloutClock = dataclasses.field(default_factory=RolloutClock)
  stats: sampler.Stats = dataclasses.field(default_factory=sampler.Stats)
  endless_notice: console.EndlessNotice = dataclasses.field(
    default_factory=console.EndlessNotice
  )

  prepare = deprecated.method('Roller.prepare', 'prefetch')

  def __post_init__(self):
    for name, accepted in (
      ('prompt_overflow', tokenizer.OVERFLOW_POLICIES),
      ('schedule', SCHEDULES),
      ('earlier_thinking', conversation.THINKING),
    ):
      options.check_choice(name, getattr(self, name), accepted)

  def collect(self, *args, kind: Callable[[base.Task], str], **kwargs):
    """Calls `run`, with the task types as an argument, and warns."""
    deprecated.warn('Roller.collect', 'run')
    self.task_type = kind
    return self.run(*args, **kwargs)

  def run(
    self,
    params: dict,
    tasks: Sequence[base.Task],
    *,
    episodes_per_group: int,
    stream: tuple[int, int],
    sampling: sampler.Sampling,
    base_params: dict | None = None,
    max_turns: int | None = None,
    label: str = '',
  ) -> list[trajectory.Trajectory]:
    """Runs N episodes of each task to the end.

    See `EpisodeBatch` for the arguments that are not listed here, and
    `run_batches`.

    Args:
      params: the policy's parameters; not modified.
      tasks: the G initial states, one group each.
      episodes_per_group: N.
      stream: see `EpisodeBatch`.
      sampling: sampling options.
      base_params: frozen parameters of a network with adapters; None: no
        adapters.
      max_turns: see `EpisodeBatch`.
      label: text of the progress bar; '' shows none.

    Returns:
      G x N trajectories, ordered by group and member.
    """
    episodes = EpisodeBatch(
      tasks, episodes_per_group, stream, sampling, max_turns
    )
    (trajectories,) = self.run_batches(
      params, [episodes], base_params=base_params, label=label
    )
    return trajectories

  def run_batches(
    self,
    params: dict,
    batches: Sequence[EpisodeBatch],
    *,
    base_params: dict | None = None,
    trace: bool = False,
    label: str = '',
    is_continued: bool = False,
  ) -> list[list[trajectory.Trajectory]]:
    """Runs the episodes of several batches together to the end.

    Episodes start in the order of the batches. Those of a later batch fill the
    slots that the last episodes of an earlier one leave empty. The trajectories
    are those of separate calls. In a multi-process run, each process runs a
    part of each batch, and every process returns all trajectories.

    Args:
      params: the policy's parameters; not modified.
      batches: the episodes.
      base_params: frozen parameters of a network with adapters; None: no
        adapters.
      trace: whether to record `sampler.Stats.spans`.
      label: text of the progress bar; '' shows none.
      is_continued: whether clock and statistics include the previous call.

    Returns:
      For each batch its trajectories, ordered by group and member, or in the
      order of `paused`.
    """
    local = [_local_episodes(batch) for batch in batches]
    episodes = [episode for part in local for episode in part]
    if not is_continued:
      self.clock, self.stats = RolloutClock(time.monotonic()), sampler.Stats()
    self.sampler.load(params, base_params, trace=trace)
    self.sampler.take_stats()
    with console.progress_bar(
      total=len(episodes), desc=label, unit='episode', hide=not label
    ) as bar:
      on_finished = console.count_episodes(
        bar, lambda: self.sampler.stats.decode_tokens
      )
      _Rollout(self, episodes, on_finished).run()
    self.sampler.finish()
    if self.scorer:
      before = time.monotonic()
      self.scorer.finish()
      self.clock.reward_wait_secs += time.monotonic() - before
    self.clock.total_secs = time.monotonic() - self.clock.start
    self.stats += self.sampler.take_stats()
    gathered = distributed.all_gather_objects(
      [[self._record(e) for e in part] for part in local]
    )
    return [
      [t for process in gathered for t in process[n]]
      for n in range(len(batches))
    ]

  def _record(self, episode: _Episode) -> trajectory.Trajectory:
    """Returns a finished or paused episode with its final rewards."""
    played = episode.to_trajectory(self.task_type(episode.start.task))
    if episode.ticket is None:
      return played
    return self.scorer.apply(episode.ticket, played)

  def agent_error(self, observation: base.Observation) -> str:
    """Returns why an observation's agent has no adapter; '' if it has one."""
    unknown = self.agents and observation.agent not in self.agents
    text = f'agent {observation.agent!r} is not in lora.agents={self.agents}'
    return text if unknown else ''

  def agent_index(self, observation: base.Observation) -> int:
    """Returns the index of the adapter of an observation's agent."""
    return self.agents.index(observation.agent) if self.agents else 0

  def prefetch(
    self, tasks: Sequence[base.Task], num_members: int, num_before: int = 0
  ) -> None:
    """Makes the workers load the next tasks while the device is busy.

    Args:
      tasks: the initial states, one group each.
      num_members: episodes of a group.
      num_before: episodes of this process that start before these.
    """
    episodes = distributed.process_slice(len(tasks) * num_members)
    groups = [n // num_members for n in episodes]
    for group in dict.fromkeys(groups):
      env = (num_before + groups.index(group)) % self.pool.num_envs
      self.pool.prepare(env, tasks[group])

  def metrics(self) -> dict[str, float]:
    """Returns metrics of the last rollout, named 'rollout/...'.

    They describe time and scheduling and so differ between repeated runs. In a
    multi-process run they describe this process, except for the restarts of
    workers, which are summed over processes.
    """
    stats, clock = self.stats, self.clock
    seconds = max(clock.total_secs, 1e-9)
    values = {
      'prefill_tokens': stats.prefill_tokens,
      'reused_tokens': stats.reused_tokens,
      'prefill_tokens_per_sec': stats.prefill_tokens / seconds,
      'decode_tokens_per_sec': stats.decode_tokens / seconds,
      'slot_occupancy': stats.active_steps / max(stats.slot_steps, 1),
      'shared_prompt_share': stats.reused_tokens
      / max(stats.reused_tokens + stats.prefill_tokens, 1),
      'prefill_padding_share': 1
      - stats.prefill_tokens / max(stats.padded_tokens, 1),
      'host_wait_share': stats.idle_secs / seconds,
      'env_wait_share': clock.env_wait_secs / seconds,
      'env_secs_per_step': sum(end - begin for begin, end in clock.env_spans)
      / max(len(clock.env_spans), 1),
      'env_restarts': sum(distributed.all_gather_objects(self.pool.restarts)),
      'env_recycled': sum(distributed.all_gather_objects(self.pool.recycled)),
      'compilations': self.sampler.compilations,
    }
    if self.scorer:
      values['reward_wait_secs'] = clock.reward_wait_secs
    if self.sampler.text_size:
      values['tokens_per_step'] = stats.decode_tokens / max(
        stats.active_steps, 1
      )
    return {f'rollout/{name}': float(value) for name, value in values.items()}


def _local_episodes(batch: EpisodeBatch) -> list[_Episode]:
  """Returns the episodes of a batch that this process runs."""
  limit = math.inf if batch.pause_after is None else batch.pause_after
  starts = batch.paused or [
    trajectory.Trajectory(task, '', group, member, ())
    for group, task in enumerate(batch.tasks)
    for member in range(batch.episodes_per_group)
  ]
  mine = distributed.process_slice(len(starts))
  return [
    _Episode(batch, start, len(start.steps) + limit)
    for start in starts[mine.start : mine.stop]
  ]


class _Rollout:
  """The state of a rollout."""

  def __init__(
    self,
    runner: EpisodeRunner,
    episodes: list[_Episode],
    on_finished: Callable[[int], None],
  ):
    self._runner, self._pool = runner, runner.pool
    self._sampler, self._clock = runner.sampler, runner.clock
    self._on_finished = on_finished
    # Room for a forced prefix in every prompt.
    self._max_prompt = runner.max_prompt_tokens - runner.prefixes.longest
    self._conversations = conversation.Conversations(
      runner.tokenizer,
      self._max_prompt,
      runner.prompt_overflow,
      runner.earlier_thinking,
    )
    self._texts = drafts.Texts(runner.sampler.text_size)
    self._waiting: list[_Episode] = list(reversed(episodes))
    self._running: dict[int, _Episode] = {}
    self._free = list(reversed(range(runner.pool.num_envs)))
    # Start time of the pending call of each environment.
    self._calls: dict[int, float] = {}
    # Pending requests of the sampler, by id.
    self._requests: dict[int, tuple[int, _Episode, functools.partial]] = {}

  def run(self) -> None:
    """Runs all episodes to their end."""
    lockstep = self._runner.schedule == 'lockstep'
    self._runner.endless_notice.restart()
    while self._waiting or self._running:
      self._submit_requests(self._start_episodes())
      observations = self._receive()
      while lockstep and self._calls:
        observations |= self._receive()
      self._submit_requests(observations)
      finished = self._sampler.step()
      while lockstep and self._sampler.busy:
        finished += self._sampler.step()
      self._step_environments(finished)
      if self._runner.scorer:
        self._runner.scorer.poll()
      self._runner.endless_notice.check(self._reason)

  def _reason(self) -> str:
    """Returns why no episode has ended for a long time."""
    call_secs = time.monotonic() - min(self._calls.values(), default=math.inf)
    if call_secs >= _WAIT_SECS:
      return (
        f'an environment has not answered for {call_secs:.0f} s. Its episode '
        'fails after pool.step_timeout_secs or, at the start of an episode, '
        'pool.reset_timeout_secs'
      )
    turns = max((len(e.steps) for e in self._running.values()), default=0)
    return (
      f'the longest has {turns} turns so far. An episode ends when the '
      'environment returns done=True, which a limit such as env.max_steps '
      'ensures'
    )

  def _start_episodes(self) -> dict[int, base.Observation]:
    """Starts waiting episodes in free environments.

    Returns:
      The observations of episodes that continue. Their environments are
      replayed in the meantime.
    """
    observations = {}
    while self._waiting and self._free:
      env = self._free.pop()
      episode = self._running[env] = self._waiting.pop()
      if episode.steps:
        self._pool.resume(
          env,
          episode.start.task,
          [step.response for step in episode.steps],
          [episode.first_observation, *(s.result for s in episode.steps)],
        )
        observations[env] = episode.steps[-1].result.observation
      else:
        self._calls[env] = time.monotonic()
        self._pool.reset(env, episode.start.task)
    return observations

  def _receive(self) -> dict[int, base.Observation]:
    """Records replies of environments; returns observations to respond to.

    Waits for a reply if the sampler is idle, at most for a time after which
    `run` may report a slow environment. The wait is short if other processes
    depend on this process's next step of a shared sampler.
    """
    if not self._calls:
      return {}
    idle = not self._sampler.busy
    before = time.monotonic()
    timeout = _SHARED_WAIT_SECS if self._sampler.is_shared else _WAIT_SECS
    replies = self._pool.receive(timeout if idle else 0.0)
    now = time.monotonic()
    if idle:
      self._clock.env_wait_secs += now - before
    observations = {}
    for env, reply in replies:
      if env not in self._running:
        continue  # The episode ended before its replay failed.
      # A worker lost while the policy samples replies without a pending call.
      start = self._calls.pop(env, now)
      self._clock.env_spans.append((start, now))
      observation = self._record(env, reply)
      if observation is None:
        self._end(env)
      else:
        observations[env] = observation
    return observations

  def _record(self, env: int, reply: env_pool.Reply) -> base.Observation | None:
    """Records a reply; returns the observation to respond to.

    It is None if the episode ends or pauses.
    """
    episode = self._running[env]
    if isinstance(reply, env_pool.Failure):
      episode.failure = str(reply)
      return None
    if isinstance(reply, env_pool.Revision):
      reply = reply.reply
      if episode.steps:  # The current turn was dropped.
        episode.turn = episode.steps.pop()
    if isinstance(reply, base.Observation):
      observation = episode.first_observation = reply
    else:
      turn = vars(episode.turn) | {'result': reply}
      episode.steps.append(trajectory.Step(**turn))
      observation = reply.observation
    if observation is None:
      return None
    max_turns = episode.batch.max_turns
    if max_turns is not None and len(episode.steps) >= max_turns:
      self._pool.end(env)
      return None
    reason = conversation.prompt_error(
      observation, self._runner.max_prompt_tokens, episode.first_observation
    )
    if reason := reason or self._runner.agent_error(observation):
      episode.failure = str(self._pool.refuse(env, reason))
      return None
    if len(episode.steps) >= episode.pauses_at:
      episode.is_paused = True
      self._pool.end(env)
      return None
    return observation

  def _end(self, env: int) -> None:
    episode = self._running.pop(env)
    self._sampler.end_conversation(episode.conversation)
    if self._runner.scorer and episode.is_scored:
      episode.ticket = self._runner.scorer.submit(episode.to_trajectory(''))
    self._free.append(env)
    self._on_finished(1)
    self._runner.endless_notice.restart()

  def _submit_requests(self, observations: dict[int, base.Observation]) -> None:
    """Submits the prompts of observations to the sampler."""
    # An environment may have been lost after its observation arrived.
    envs = sorted(env for env in observations if env in self._running)
    if not envs:
      return
    prompts = self._render({env: observations[env] for env in envs})
    for env, (ids, shortened) in sorted(prompts.items()):
      episode, observation = self._running[env], observations[env]
      if ids is None:
        self._end_at_limit(env)
        continue
      prefix = self._prefix(episode)
      ids = np.concatenate([ids, prefix.ids])
      request = sampler.Request(
        prompt_ids=ids,
        stream=(*episode.conversation, len(episode.steps)),
        sampling=episode.batch.sampling,
        conversation=episode.conversation,
        agent=self._runner.agent_index(observation),
        text=self._texts.of(episode.group),
      )
      turn = functools.partial(
        trajectory.SampledTurn,
        prompt_ids=ids,
        prompt_shortened=shortened,
        forced_tokens=len(prefix.ids),
        anchor=observation.anchor,
        observation=observation.text,
      )
      self._requests[self._sampler.submit(request)] = (env, episode, turn)

  def _prefix(self, episode: _Episode) -> forced_prefixes.Prefix:
    """Returns the forced prefix of an episode's responses."""
    if episode.batch.stream[0] != TRAIN:
      return forced_prefixes.NONE
    return self._runner.prefixes.of(episode.start.member)

  def _render(
    self, observations: dict[int, base.Observation]
  ) -> dict[int, tuple[np.ndarray | None, bool]]:
    """Returns (ids, whether shortened) of the prompt of each environment.

    The ids are None if the episode ends because of the limit. An episode whose
    messages cannot be rendered fails and is left out.
    """
    runner = self._runner
    own = {env: o for env, o in observations.items() if not o.messages}
    fitted = runner.tokenizer.fit(
      [observation.prompt for observation in own.values()],
      [observation.short_prompt for observation in own.values()],
      max_tokens=self._max_prompt,
      policy=runner.prompt_overflow,
    )
    prompts = dict(zip(own, fitted, strict=True))
    for env in observations.keys() - own.keys():
      episode = self._running[env]
      try:
        prompts[env] = self._conversations.prompt(
          *conversation.split_turns(episode.first_observation, episode.steps)
        )
      except tokenizer.TemplateError as error:
        episode.failure = str(self._pool.refuse(env, str(error)))
        self._end(env)
    return prompts

  def _end_at_limit(self, env: int) -> None:
    """Ends an episode whose next prompt is too long."""
    episode, limit = self._running[env], self._runner.max_prompt_tokens
    if episode.steps:
      self._pool.end(env)
    else:
      reason = f'the first prompt exceeds rollout.max_prompt_tokens={limit}'
      if forced := self._runner.prefixes.longest:
        reason += f' minus {forced} for forced prefixes'
      episode.failure = str(self._pool.refuse(env, reason))
    self._end(env)

  def _step_environments(
    self, finished: list[tuple[int, sampler.Completion]]
  ) -> None:
    """Sends finished responses to their environments."""
    if not finished:
      return
    responses = self._runner.tokenizer.decode([c.ids for _, c in finished])
    for (request_id, completion), response in zip(
      finished, responses, strict=True
    ):
      env, episode, turn = self._requests.pop(request_id)
      prompt_ids = turn.keywords['prompt_ids']
      self._texts.add(episode.group, prompt_ids, completion.ids)
      if self._running.get(env) is not episode:
        continue  # The environment was lost in the meantime.
      response = self._prefix(episode).text + response
      episode.turn = turn(
        completion_ids=completion.ids,
        log_probs=completion.log_probs,
        truncated=completion.finish_reason == 'length',
        response=response,
      )
      self._calls[env] = time.monotonic()
      self._pool.step(env, response, episode.turn)


__getattr__ = deprecated.names(
  __name__, {'Roller': 'EpisodeRunner', 'Clock': 'RolloutClock'}
)
