"""Rewards by functions of users, computed while other episodes are played.

`Scorer` sends finished episodes to worker processes, which call the functions
(`envs.rewards`). An episode fails if a function raises an exception, returns
something unusable, ends its process or takes too long. The episode is then not
trained on. Its cause is that of the same fault of an environment
(`env_pool.CAUSES`).
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import ml_collections

import envs
from envs import base, rewards
from gigpo_jax import batch, env_pool, options, reward_shaping, trajectory
from gigpo_jax.run import config_fields

_MODULE = 'envs.rewards'
# Reasons of failures begin with this.
BLAMED = 'reward.functions: '
# Step metric with the environment's own reward.
ENVIRONMENT = 'environment_reward'
# Weights in the total reward.
_WEIGHTS = ('reward.function_weights', 'reward.environment_weight')
# Names of components with another meaning.
_TAKEN = (*batch.COMPONENTS, ENVIRONMENT)


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of reward functions, `config.reward`.

  Attributes:
    functions: the functions, see `envs.rewards`; () for none.
    function_weights: weight of each function in the reward; () is 1 each.
    environment_weight: weight of the environment's own reward.
    num_workers: processes that call functions; one episode each at a time.
    timeout_secs: time limit of all functions of an episode together.
  """

  functions: tuple[str, ...] = ()
  function_weights: tuple[float, ...] = ()
  environment_weight: float = options.number(1.0)
  num_workers: int = options.number(2, low=1)
  timeout_secs: float = options.number(60.0, above=0)

  def __post_init__(self):
    options.check(self)
    functions, weights = tuple(self.functions), tuple(self.function_weights)
    names = [rewards.name_of(path) for path in functions]
    if weights and len(weights) != len(functions):
      raise ValueError(
        f'function_weights={weights}: functions={functions}; must be one '
        'weight per function, or ()'
      )
    wrong = [n for n in names if names.count(n) > 1 or n in _TAKEN or not n]
    if wrong:
      raise ValueError(
        f'functions={functions}: the name {wrong[0]!r} is taken; must be '
        f'different names other than {", ".join(_TAKEN)}'
      )


def sections(
  section: ml_collections.ConfigDict,
) -> dict[str, dict[str, Any]]:
  """Returns the options of each function, by its name."""
  return {
    name: value.to_dict()
    for name, value in section.items()
    if isinstance(value, ml_collections.ConfigDict)
  }


def conflicts(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields a line for each function that cannot be used."""
  own = sections(config.reward)
  names = set(map(rewards.name_of, config.reward.functions))
  fields = [
    f'reward.{name}.{option}'
    for name in sorted(own.keys() - names)
    for option in own[name]
  ]
  for field, value, default in config_fields.non_default(config, fields):
    yield (
      f'{field}={value}: has no effect; needs reward.functions to name the '
      f'function {field.split(".")[1]}, or must be {default}'
    )
  secs = 0.0
  for path in config.reward.functions:
    try:
      function = rewards.make(path, own.get(rewards.name_of(path), {}))
    except ValueError as error:
      yield from str(error).splitlines()
      continue
    if problem := getattr(function, 'problem', ''):
      yield f'reward.{rewards.name_of(path)}.{problem}'
    secs += getattr(function, 'longest_call_secs', 0)
  if secs > (limit := config.reward.timeout_secs):
    yield (
      f'reward.timeout_secs={limit}: the calls of reward.functions='
      f'{tuple(config.reward.functions)} may take {secs:g} seconds; must be at '
      'least that'
    )


def unused(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields a line for each reward that an algorithm's components leave out."""
  name = config.algorithm.name
  yield from reward_shaping.refuse_later(
    config, f'changes the total reward, but {name} uses its components'
  )
  paths, components = config.reward.functions, config.algorithm.components
  agents = envs.agents(config.env.name, config.env)
  if ENVIRONMENT in components and len(agents) > 1:
    yield (
      f'algorithm.components={tuple(components)}: {ENVIRONMENT} lacks rewards '
      "for other agents' turns; must use reward"
    )
  names = tuple(map(rewards.name_of, paths))
  if 'reward' in components or not paths:
    return
  if set(names) - set(components):
    wanted = (ENVIRONMENT, *names, 'valid')
    yield (
      f'algorithm.components={tuple(components)}: leaves out reward.functions='
      f'{tuple(paths)}; must name them, such as {wanted}'
    )
  # A filter may read the total reward.
  if config.filter.select or config.filter.drop_zero_variance:
    return
  for field, value, default in config_fields.non_default(config, _WEIGHTS):
    yield (
      f'{field}={value}: has no effect on algorithm.components='
      f'{tuple(components)}; must be {default}, with weights in '
      'algorithm.component_weights'
    )


def refuse_success_only(
  config: ml_collections.ConfigDict,
) -> Iterator[str]:
  """Yields a line for each reward that an algorithm of successes ignores."""
  reason = f'{config.algorithm.name} reads only whether episodes succeed'
  yield from reward_shaping.refuse_later(config, reason)
  if config.reward.functions:
    yield (
      f'reward.functions={tuple(config.reward.functions)}: {reason}; must be ()'
    )


def check_weights(
  components: tuple[str, ...], weights: tuple[float, ...]
) -> None:
  """Raises ValueError unless each of an algorithm's components has a weight.

  Args:
    components: names of the components.
    weights: their weights; () gives each the weight 1.
  """
  if not components or (weights and len(weights) != len(components)):
    raise ValueError(
      f'component_weights={tuple(weights)}: components={tuple(components)}; '
      'must be one weight per component, with at least one component'
    )


class Scorer:
  """Computes the rewards of episodes in worker processes; a context manager.

  Args:
    options: the functions.
    sections: options of each function, by its name.
  """

  def __init__(
    self, options: Options, sections: Mapping[str, Mapping[str, Any]]
  ):
    self._options = options
    self._names = [rewards.name_of(path) for path in options.functions]
    self._weights = options.function_weights or (1.0,) * len(self._names)
    own = {n: dict(sections[n]) for n in self._names if n in sections}
    self._pool = env_pool.EnvPool(
      _MODULE,
      {'functions': tuple(options.functions), 'options': own},
      num_envs=options.num_workers,
      num_workers=options.num_workers,
      step_timeout_secs=options.timeout_secs,
      reset_timeout_secs=options.timeout_secs,
    )
    self._free = list(range(options.num_workers))
    self._waiting: collections.deque[tuple[int, trajectory.Trajectory]] = (
      collections.deque()
    )
    self._running: dict[int, int] = {}  # Environment: ticket.
    self._tickets = itertools.count()
    self._values: dict[int, list[Mapping[str, float]]] = {}
    self._failures: dict[int, str] = {}

  def __enter__(self) -> 'Scorer':
    return self

  def __exit__(self, *exception) -> None:
    self._pool.close()

  def submit(self, episode: trajectory.Trajectory) -> int:
    """Starts to score an episode with at least one turn; returns a ticket."""
    ticket = next(self._tickets)
    self._values[ticket] = []
    self._waiting.append((ticket, episode))
    self._start()
    return ticket

  def poll(self, timeout_secs: float | None = 0.0) -> None:
    """Takes the rewards that have arrived, and starts other episodes."""
    for env, reply in self._pool.receive(timeout_secs) if self._running else ():
      if isinstance(reply, base.Observation):
        continue
      ticket = self._running[env]
      if isinstance(reply, base.StepResult):
        self._values[ticket].append(reply.metrics)
        if not reply.done:
          continue
      else:
        self._failures[ticket] = self._describe(reply)
      del self._running[env]
      self._free.append(env)
    self._start()

  def finish(self) -> None:
    """Waits for the rewards of all episodes."""
    while self._running or self._waiting:
      self.poll(None)

  def apply(
    self, ticket: int, episode: trajectory.Trajectory
  ) -> trajectory.Trajectory:
    """Returns an episode with its final rewards, or as failed.

    The reward of a turn is the weighted sum of the environment's and of the
    functions'. Each of them is also a step metric, and so a component for
    `algorithm.components`.
    """
    values = self._values.pop(ticket)
    if failure := self._failures.pop(ticket, ''):
      return dataclasses.replace(episode, failure=failure)
    steps = [
      dataclasses.replace(step, result=self._combine(step.result, value))
      for step, value in zip(episode.steps, values, strict=True)
    ]
    return dataclasses.replace(episode, steps=tuple(steps))

  def _combine(
    self, result: base.StepResult, values: Mapping[str, float]
  ) -> base.StepResult:
    """Returns a step's result with the final reward."""
    scale = self._options.environment_weight
    reward = scale * result.reward + sum(
      weight * values[name]
      for name, weight in zip(self._names, self._weights, strict=True)
    )
    own = {ENVIRONMENT: result.reward}
    return dataclasses.replace(
      result,
      reward=reward,
      metrics={**result.metrics, **own, **values},
      other_rewards={k: scale * x for k, x in result.other_rewards.items()},
    )

  def _start(self) -> None:
    """Sends waiting episodes to free workers."""
    while self._waiting and self._free:
      env = self._free.pop()
      ticket, episode = self._waiting.popleft()
      self._running[env] = ticket
      self._pool.reset(env, episode.task)
      self._pool.step(env, rewards.encode(to_episode(episode)))
      for _ in episode.steps[1:]:
        self._pool.step(env, '')

  def _describe(self, failure: env_pool.Failure) -> str:
    """Returns a failure as `CAUSE: REASON`, in terms of reward functions."""
    reason = failure.reason.removeprefix(f'env.name={_MODULE}: ')
    if failure.cause == 'hung':
      limit = self._options.timeout_secs
      reason = f'took longer than reward.timeout_secs={limit:g}'
    return f'{failure.cause}: {BLAMED}{reason}'


def try_out(
  section: ml_collections.ConfigDict, episode: trajectory.Trajectory
) -> str:
  """Calls the functions with one episode.

  Args:
    section: `config.reward`.
    episode: an episode with at least one turn.

  Returns:
    A warning if they took too long, which may be due to the first call; ''
    otherwise.

  Raises:
    ValueError: in one line, if a function fails in another way.
  """
  options_of_one = dataclasses.replace(
    options.of_section(Options, section), num_workers=1
  )
  with Scorer(options_of_one, sections(section)) as scorer:
    ticket = scorer.submit(episode)
    scorer.finish()
    scored = scorer.apply(ticket, episode)
  if not scored.failure:
    return ''
  _, _, reason = scored.failure.partition(BLAMED)
  line = (
    f'reward.functions={tuple(section.functions)}: {reason} (trial of '
    f'{episode.task})'
  )
  if scored.cause != 'hung':
    raise ValueError(f'{line}; fix the function and rerun the same command')
  return line


def to_episode(episode: trajectory.Trajectory) -> rewards.Episode:
  """Returns a recorded episode as reward functions see it."""
  first = episode.first_observation
  observations = [first, *(s.result.observation for s in episode.steps[:-1])]
  last = episode.steps[-1].result
  return rewards.Episode(
    task=episode.task,
    task_text=first.task if first else '',
    turns=tuple(
      rewards.Turn(
        text=step.observation,
        prompt=observation.prompt if observation else '',
        messages=tuple(
          (message.role, message.text)
          for message in (observation.messages if observation else ())
        ),
        response=step.response,
        action=step.result.action,
        reward=float(step.result.reward),
        valid=bool(step.result.valid),
        metrics=dict(step.result.metrics),
      )
      for observation, step in zip(observations, episode.steps, strict=True)
    ),
    success=episode.success,
    score=last.score,
    final_state=episode.end[1] if episode.end else None,
  )
