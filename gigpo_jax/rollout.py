"""The turn loop: environments and sampler, tasks in, trajectories out.

Waves: every running episode gets one response, then every one of them takes
its step in the worker processes; a finished episode leaves the batch at once
and a waiting one takes its environment. Nothing here depends on the order in
which environments answer, so a rollout is a function of its arguments.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

from envs import base
from gigpo_jax import env_pool, sampler, tokenizer, trajectory

# First number of a request's random stream: what the tokens are for.
TRAIN, EVALUATION = 0, 1


@dataclasses.dataclass
class _Episode:
  """An episode under way in an environment of the pool."""

  task: base.Task
  group: int
  member: int
  observation: base.Observation | None = None
  failure: str = ''
  steps: list[trajectory.Step] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Roller:
  """Plays episodes of a policy.

  Attributes:
    pool: the environments.
    sampler: turns prompts into responses.
    tokenizer: text to ids and back.
    max_prompt_tokens: limit of a rendered prompt.
    prompt_overflow: what to do past it; `tokenizer.OVERFLOW_POLICIES`.
  """

  pool: env_pool.EnvPool
  sampler: sampler.Sampler
  tokenizer: tokenizer.Tokenizer
  max_prompt_tokens: int
  prompt_overflow: str

  def collect(
    self,
    params: dict,
    tasks: Sequence[base.Task],
    *,
    episodes_per_group: int,
    stream: tuple[int, int],
    temperature: float,
    kind: Callable[[base.Task], str],
    on_finished: Callable[[int], None] = lambda count: None,
  ) -> list[trajectory.Trajectory]:
    """Plays N episodes of each task to the end.

    Args:
      params: the policy; only read.
      tasks: the initial states; one group each.
      episodes_per_group: N.
      stream: (TRAIN or EVALUATION, iteration): with a task's index, the
        member and the step it makes the random stream of a response.
      temperature: of the sampling; 0 is greedy.
      kind: type of a task.
      on_finished: told how many episodes a wave finished.

    Returns:
      G x N trajectories, group by group, member by member.
    """
    episodes = [
      _Episode(task, group, member)
      for group, task in enumerate(tasks)
      for member in range(episodes_per_group)
    ]
    waiting = list(reversed(episodes))
    running: dict[int, _Episode] = {}
    free = list(reversed(range(self.pool.num_envs)))
    while waiting or running:
      while waiting and free:
        env = free.pop()
        running[env] = waiting.pop()
        self.pool.reset(env, running[env].task)
      self._receive(running)
      turns = self._respond(params, running, stream, temperature)
      self._receive(running, turns)
      ended = [env for env, e in running.items() if e.observation is None]
      for env in sorted(ended, reverse=True):
        del running[env]
        free.append(env)
      on_finished(len(ended))
    return [
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

  def prepare(self, tasks: Sequence[base.Task], num_members: int) -> None:
    """Lets the workers load the next tasks while the device is busy."""
    for group, task in enumerate(tasks):
      self.pool.prepare((group * num_members) % self.pool.num_envs, task)

  def _respond(
    self,
    params: dict,
    running: dict[int, _Episode],
    stream: tuple[int, int],
    temperature: float,
  ) -> dict[int, functools.partial]:
    """Samples a response for each running episode and sends it off.

    Returns:
      By environment, the turn's `trajectory.Step`, lacking its result.
    """
    envs = sorted(e for e, ep in running.items() if ep.observation is not None)
    if not envs:
      return {}
    observations = [running[env].observation for env in envs]
    fitted = self.tokenizer.fit(
      [o.prompt for o in observations],
      [o.short_prompt for o in observations],
      max_tokens=self.max_prompt_tokens,
      policy=self.prompt_overflow,
    )
    requests = [
      sampler.Request(
        prompt_ids=ids,
        stream=(
          *stream,
          running[env].task.index,
          running[env].member,
          len(running[env].steps),
        ),
      )
      for env, (ids, _) in zip(envs, fitted, strict=True)
    ]
    completions = self.sampler.generate(
      params, requests, temperature=temperature
    )
    responses = self.tokenizer.decode([c.ids for c in completions])
    turns = {}
    for n, env in enumerate(envs):
      self.pool.step(env, responses[n])
      turns[env] = functools.partial(
        trajectory.Step,
        prompt_ids=fitted[n][0],
        completion_ids=completions[n].ids,
        log_probs=completions[n].log_probs,
        truncated=completions[n].finish_reason == 'length',
        prompt_shortened=fitted[n][1],
        anchor=observations[n].anchor,
        observation=observations[n].text,
        response=responses[n],
      )
    return turns

  def _receive(
    self,
    running: dict[int, _Episode],
    turns: dict[int, functools.partial] | None = None,
  ) -> None:
    """Waits until every call under way is answered; files the answers.

    Args:
      running: the episodes by environment.
      turns: the turns whose outcome is awaited; None awaits resets.
    """
    if turns is None:
      awaited = {
        env
        for env, e in running.items()
        if e.observation is None and not e.failure and not e.steps
      }
    else:
      awaited = set(turns)
    while awaited:
      for env, reply in self.pool.receive():
        episode = running[env]
        awaited.discard(env)
        if isinstance(reply, env_pool.Failure):
          episode.observation = None
          episode.failure = reply.reason
        elif isinstance(reply, base.Observation):
          episode.observation = reply
        else:
          episode.observation = reply.observation
          episode.steps.append(turns[env](result=reply))
