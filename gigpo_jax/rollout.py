"""The turn loop: environments and sampler, tasks in, trajectories out.

Every episode goes on by itself: its observation becomes a prompt, the prompt a
request, the response a step of its environment in a worker process, and what
comes of it the next prompt, while the device decodes for the others. In
lockstep all wait for the last, turn by turn: slower, and easier to follow.

What is sampled depends on a request alone and trajectories come in the order
of their tasks, so a rollout is a function of its arguments, however it was
scheduled.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

from envs import base
from gigpo_jax import env_pool, hosts, sampler, tokenizer, trajectory

# First number of a request's random stream: what the tokens are for.
TRAIN, EVALUATION = 0, 1

# Longest wait for environments of a process that shares its sampler.
_SHARED_WAIT_SECS = 0.05

SCHEDULES = ('async', 'lockstep')

# Longest prompt that is tokenized, in characters: more than tokens ever have
# (the longest of Qwen's 150,000 are lines of dashes), and never fewer than
# what a small limit of tokens may cut from.
_CHARS_PER_TOKEN = 64
_LEAST_CHARS = 65_536


@dataclasses.dataclass(eq=False)
class _Episode:
  """An episode, waiting or under way in an environment of the pool."""

  task: base.Task
  group: int
  member: int
  # The turn that the environment is answering, lacking its result.
  turn: functools.partial | None = None
  failure: str = ''
  steps: list[trajectory.Step] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Clock:
  """Where the time of a rollout went, besides the sampler's own account.

  Attributes:
    begin: when it began, monotonic seconds.
    env_wait_secs: time that nothing could be sampled because all episodes
      were waiting for their environments.
    env_spans: when each call of an environment began, and when its answer was
      there; monotonic seconds.
    total_secs: of the whole rollout.
  """

  begin: float = 0.0
  env_wait_secs: float = 0.0
  env_spans: list[tuple[float, float]] = dataclasses.field(default_factory=list)
  total_secs: float = 0.0


@dataclasses.dataclass
class Roller:
  """Plays episodes of a policy.

  Attributes:
    pool: the environments.
    sampler: turns prompts into responses.
    tokenizer: text to ids and back.
    max_prompt_tokens: limit of a rendered prompt.
    prompt_overflow: what to do past it; `tokenizer.OVERFLOW_POLICIES`.
    schedule: one of SCHEDULES.
    clock: of the last rollout.
    stats: of the sampler in the last rollout.
    max_turns: after which an episode is over, whatever its environment says;
      None: never.
  """

  pool: env_pool.EnvPool
  sampler: sampler.Sampler
  tokenizer: tokenizer.Tokenizer
  max_prompt_tokens: int
  prompt_overflow: str
  schedule: str = 'async'
  clock: Clock = dataclasses.field(default_factory=Clock)
  stats: sampler.Stats = dataclasses.field(default_factory=sampler.Stats)
  max_turns: int | None = None

  def collect(
    self,
    params: dict,
    tasks: Sequence[base.Task],
    *,
    episodes_per_group: int,
    stream: tuple[int, int],
    sampling: sampler.Sampling,
    kind: Callable[[base.Task], str],
    on_finished: Callable[[int], None] = lambda count: None,
  ) -> list[trajectory.Trajectory]:
    """Plays N episodes of each task to the end.

    Of several processes each plays a share of the tasks, and all return all.

    Args:
      params: the policy; only read.
      tasks: the initial states; one group each.
      episodes_per_group: N.
      stream: (TRAIN or EVALUATION, iteration): with a task's index, the
        member and the step it makes the random stream of a response.
      sampling: how tokens are chosen.
      kind: type of a task.
      on_finished: told how many episodes have just ended.

    Returns:
      G x N trajectories, group by group, member by member.
    """
    episodes = [
      _Episode(tasks[group], group, member)
      for group in hosts.share(len(tasks))
      for member in range(episodes_per_group)
    ]
    self.clock = Clock(begin=time.monotonic())
    self.sampler.load(params)
    self.sampler.take_stats()
    _Rollout(self, episodes, stream, sampling, on_finished).play()
    self.sampler.finish()
    self.clock.total_secs = time.monotonic() - self.clock.begin
    self.stats = self.sampler.take_stats()
    played = [
      trajectory.Trajectory(
        task=e.task,
        kind=kind(e.task),
        group=e.group,
        member=e.member,
        steps=tuple(e.steps),
        failure=e.failure,
      )
      for e in episodes
    ]
    return [t for part in hosts.tell_all(played) for t in part]

  def prepare(self, tasks: Sequence[base.Task], num_members: int) -> None:
    """Lets the workers load the next tasks while the device is busy."""
    for place, group in enumerate(hosts.share(len(tasks))):
      env = (place * num_members) % self.pool.num_envs
      self.pool.prepare(env, tasks[group])

  def metrics(self) -> dict[str, float]:
    """Returns what the last rollout tells of itself, names 'rollout/...'.

    Of time and scheduling: the one thing that is not the same every time. Of
    several processes it is about this one, restarts of environments apart.
    """
    stats, clock = self.stats, self.clock
    seconds = max(clock.total_secs, 1e-9)
    values = {
      'prefill_tokens_per_sec': stats.prefill_tokens / seconds,
      'decode_tokens_per_sec': stats.decode_tokens / seconds,
      'slot_occupancy': stats.decode_tokens / max(stats.slot_steps, 1),
      'shared_prompt_share': stats.shared_tokens
      / max(stats.shared_tokens + stats.prefill_tokens, 1),
      'prefill_padding_share': 1
      - stats.prefill_tokens / max(stats.padded_tokens, 1),
      'host_wait_share': stats.idle_secs / seconds,
      'env_wait_share': clock.env_wait_secs / seconds,
      'env_secs_per_step': sum(end - begin for begin, end in clock.env_spans)
      / max(len(clock.env_spans), 1),
      'env_restarts': sum(hosts.tell_all(self.pool.restarts)),
      'env_recycled': sum(hosts.tell_all(self.pool.recycled)),
      'compilations': self.sampler.compilations,
    }
    return {f'rollout/{name}': float(value) for name, value in values.items()}


class _Rollout:
  """One rollout under way."""

  def __init__(self, roller: Roller, episodes, stream, sampling, on_finished):
    self._roller, self._pool = roller, roller.pool
    self._sampler, self._clock = roller.sampler, roller.clock
    self._stream, self._sampling = stream, sampling
    self._on_finished = on_finished
    self._waiting: list[_Episode] = list(reversed(episodes))
    self._running: dict[int, _Episode] = {}
    self._free = list(reversed(range(roller.pool.num_envs)))
    # Environments whose answer is awaited, since when; requests under way.
    self._called: dict[int, float] = {}
    self._asked: dict[int, tuple[int, _Episode, functools.partial]] = {}

  def play(self) -> None:
    """Goes on until all episodes are over."""
    lockstep = self._roller.schedule == 'lockstep'
    while self._waiting or self._running:
      self._begin()
      observations = self._receive()
      while lockstep and self._called:
        observations |= self._receive()
      self._ask(observations)
      finished = self._sampler.step()
      while lockstep and self._sampler.busy:
        finished += self._sampler.step()
      self._answer(finished)

  def _begin(self) -> None:
    """Gives free environments to waiting episodes."""
    while self._waiting and self._free:
      env = self._free.pop()
      self._running[env] = self._waiting.pop()
      self._called[env] = time.monotonic()
      self._pool.reset(env, self._running[env].task)

  def _receive(self) -> dict[int, base.Observation]:
    """Files what environments answered; returns what is to be answered now.

    Waits for an answer if nothing is being sampled; not for long if other
    processes wait for this one's next step.
    """
    if not self._called:
      return {}
    idle = not self._sampler.busy
    before = time.monotonic()
    longest = _SHARED_WAIT_SECS if self._sampler.shared else None
    replies = self._pool.receive(longest if idle else 0.0)
    now = time.monotonic()
    if idle:
      self._clock.env_wait_secs += now - before
    observations = {}
    for env, reply in replies:
      # A worker may be lost while the policy is thinking: an answer unasked.
      called = self._called.pop(env, now)
      self._clock.env_spans.append((called, now))
      episode = self._running[env]
      if isinstance(reply, env_pool.Failure):
        episode.failure = str(reply)
        observation = None
      elif isinstance(reply, base.Observation):
        observation = reply
      else:
        episode.steps.append(episode.turn(result=reply))
        observation = reply.observation
        if observation and len(episode.steps) == self._roller.max_turns:
          self._pool.end(env)
          observation = None
      limit = self._roller.max_prompt_tokens
      if observation and (reason := refusal(observation, limit)):
        episode.failure = str(self._pool.refuse(env, reason))
        observation = None
      if observation is None:
        self._end(env)
      else:
        observations[env] = observation
    return observations

  def _end(self, env: int) -> None:
    del self._running[env]
    self._free.append(env)
    self._on_finished(1)

  def _ask(self, observations: dict[int, base.Observation]) -> None:
    """Asks the policy for responses."""
    # One may have been lost after it had answered.
    envs = sorted(env for env in observations if env in self._running)
    if not envs:
      return
    fitted = self._roller.tokenizer.fit(
      [observations[env].prompt for env in envs],
      [observations[env].short_prompt for env in envs],
      max_tokens=self._roller.max_prompt_tokens,
      policy=self._roller.prompt_overflow,
    )
    for env, (ids, shortened) in zip(envs, fitted, strict=True):
      episode, observation = self._running[env], observations[env]
      request = sampler.Request(
        prompt_ids=ids,
        stream=(
          *self._stream,
          episode.task.index,
          episode.member,
          len(episode.steps),
        ),
        sampling=self._sampling,
      )
      turn = functools.partial(
        trajectory.Step,
        prompt_ids=ids,
        prompt_shortened=shortened,
        anchor=observation.anchor,
        observation=observation.text,
      )
      self._asked[self._sampler.submit(request)] = (env, episode, turn)

  def _answer(self, finished: list[tuple[int, sampler.Completion]]) -> None:
    """Sends responses to their environments."""
    if not finished:
      return
    responses = self._roller.tokenizer.decode([c.ids for _, c in finished])
    for (ticket, found), response in zip(finished, responses, strict=True):
      env, episode, turn = self._asked.pop(ticket)
      if self._running.get(env) is not episode:
        continue  # Its environment was lost meanwhile.
      episode.turn = functools.partial(
        turn,
        completion_ids=found.ids,
        log_probs=found.log_probs,
        truncated=found.finish_reason == 'length',
        response=response,
      )
      self._called[env] = time.monotonic()
      self._pool.step(env, response)


def refusal(observation: base.Observation, max_prompt_tokens: int) -> str:
  """Returns why a prompt is not even tokenized; '' if it is."""
  limit = max(_LEAST_CHARS, _CHARS_PER_TOKEN * max_prompt_tokens)
  longest = max(len(observation.prompt), len(observation.short_prompt))
  if longest <= limit:
    return ''
  return (
    f'a prompt of {longest:,} characters; rollout.max_prompt_tokens='
    f'{max_prompt_tokens} takes at most {limit:,}'
  )
