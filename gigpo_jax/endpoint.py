"""Episodes that an agent harness plays by requests for chat completions.

`EndpointPool` replaces `env_pool.EnvPool` in a rollout. A request is an
observation, the policy's response is its reply, and a call with the reward ends
the episode. The threads of a server call `take`, `complete` and `reward`; the
thread of the rollout calls the methods that `EnvPool` also has.

A request continues a conversation of its episode if it begins with the messages
of that conversation and the policy's response, as the replies had them. Only
its new messages are then tokenized. Any other request, such as one with a
shortened history or of another agent, starts a conversation in the episode.

A turn is a response that a client received. If a client leaves before, the same
request, sent again, gets the response; any other call of the harness drops it.
"""

import collections
import concurrent.futures
import dataclasses
import math
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from envs import base, messages
from gigpo_jax import chat_completions, env_pool, trajectory
from gigpo_jax.runtime import console, worker_process

# Python handles signals between waits.
_POLL_SECS = 0.2
# Time without a request, a final reward or a failure until a line reports it.
_NOTICE_SECS = 60.0

Decode = Callable[[Sequence[np.ndarray]], list[str]]


@dataclasses.dataclass
class _Conversation:
  """A conversation as the harness sees it.

  Attributes:
    name: its name in the episode.
    tools: the tools that its requests offer.
    messages: the messages and responses so far.
  """

  name: str
  tools: tuple[str, ...] = ()
  messages: tuple[base.Message, ...] = ()

  def is_continued_by(self, request: chat_completions.ChatRequest) -> bool:
    """Returns whether a request only adds messages to the conversation."""
    size = len(self.messages)
    return (
      request.tools == self.tools
      and request.messages[:size] == self.messages
      and len(request.messages) > size
      and all(m.role != 'assistant' for m in request.messages[size:])
    )


@dataclasses.dataclass(frozen=True)
class Reward:
  """What a harness reports about an episode.

  Attributes:
    reward: added to the reward of the last turn.
    success: whether the task was accomplished.
    score: see `base.StepResult`.
    done: whether the episode is over.
  """

  reward: float
  success: bool = False
  score: float | None = None
  done: bool = True


@dataclasses.dataclass(eq=False)
class _Call:
  """A request or a reward, and its reply.

  Attributes:
    request: what the harness sent.
    is_connected: returns whether its client still waits.
    conversation: the conversation of a request that the policy answers.
    answer: the response to it; None before.
    is_unread: whether its client left before the reply.
    reply: the reply.
  """

  request: chat_completions.ChatRequest | Reward
  is_connected: Callable[[], bool] = lambda: True
  conversation: _Conversation | None = None
  answer: chat_completions.Answer | None = None
  is_unread: bool = False
  reply: concurrent.futures.Future = dataclasses.field(
    default_factory=concurrent.futures.Future
  )

  @property
  def is_abandoned(self) -> bool:
    """Whether its client left before the reply."""
    return self.is_unread or not self.is_connected()


@dataclasses.dataclass(eq=False)
class _Episode:
  """An episode that a harness plays or will play.

  Attributes:
    env: index of the environment.
    task: its task.
    name: its id, which nobody can guess.
    deadline: time, by the pool's clock, at which it fails without another call.
    conversations: its conversations.
    waiting: calls to handle after the current request.
    current: the request that the policy answers, or whose reply is unread;
      None: the harness acts.
    is_revised: whether a request after the last turn was dropped after the
      policy had received it.
    answer: the last response that a client received; None before the first.
    turns: count of these responses.
    reward: reward of the last turn so far.
  """

  env: int
  task: base.Task
  name: str
  deadline: float = math.inf
  conversations: list[_Conversation] = dataclasses.field(default_factory=list)
  waiting: collections.deque[_Call] = dataclasses.field(
    default_factory=collections.deque
  )
  current: _Call | None = None
  is_revised: bool = False
  answer: chat_completions.Answer | None = None
  turns: int = 0
  reward: float = 0.0

  @property
  def is_busy(self) -> bool:
    """Whether calls wait for the reply to the current request."""
    return self.current is not None and not self.current.is_unread

  @property
  def requests(self) -> list[_Call]:
    """The calls for a completion that no client has received."""
    calls = filter(None, (self.current, *self.waiting))
    return [call for call in calls if not isinstance(call.request, Reward)]


class EndpointPool:
  """The episodes of a rollout, which a harness plays; a context manager.

  Args:
    decode: returns the texts of token ids.
    num_envs: number of episodes that run at the same time.
    max_steps: limit of turns; after it, an episode only accepts its reward.
    has_tools: whether requests may offer tools.
    step_timeout_secs: longest time of the harness between a reply and its next
      call. The time in which this process was stopped does not count.
    reset_timeout_secs: the same from the start of an episode.

  Attributes:
    num_envs: number of episodes that run at the same time.
    failures: all failures so far.
    repeated: count of requests that were sent again, because their client left
      before the reply.
    dropped: count of requests whose client left and that were not sent again.
    restarts: 0; there are no workers.
    recycled: 0; there are no workers.
  """

  def __init__(
    self,
    decode: Decode,
    *,
    num_envs: int,
    max_steps: int,
    has_tools: bool,
    step_timeout_secs: float,
    reset_timeout_secs: float,
  ):
    self.num_envs = num_envs
    self.restarts = self.recycled = 0
    self.failures: list[env_pool.Failure] = []
    self.repeated = self.dropped = 0
    self._decode = decode
    self._max_steps, self._has_tools = max_steps, has_tools
    self._step_timeout = step_timeout_secs
    self._reset_timeout = reset_timeout_secs
    self._clock = worker_process.Clock()
    self._changed = threading.Condition()
    self._offered: collections.deque[_Episode] = collections.deque()
    # Running episodes, by environment and by name.
    self._running: dict[int, _Episode] = {}
    self._named: dict[str, _Episode] = {}
    self._arrived: collections.deque[tuple[int, env_pool.Reply]] = (
      collections.deque()
    )
    self._is_closed = False

  def __enter__(self) -> 'EndpointPool':
    return self

  def __exit__(self, *exception) -> None:
    self.close()

  # The harness's side; called by threads of the server.

  def take(
    self,
    timeout_secs: float,
    is_connected: Callable[[], bool] = lambda: True,
  ) -> dict[str, Any] | None:
    """Returns the next episode, {id, split, task}; None after the timeout.

    Args:
      timeout_secs: longest time to wait for an episode.
      is_connected: returns whether the harness still waits. If it does not, the
        episode stays for the next call.

    Raises:
      RequestError: with status 410, if the run is over.
    """
    with self._changed:
      self._changed.wait_for(
        lambda: self._offered or self._is_closed, timeout_secs
      )
      if self._is_closed:
        raise chat_completions.RequestError('the run is over', 410, 'over')
      if not self._offered or not is_connected():
        return None
      episode = self._offered.popleft()
      episode.deadline = self._clock.now() + self._reset_timeout
      return {
        'id': episode.name,
        'split': episode.task.split,
        'task': episode.task.index,
      }

  def complete(
    self,
    name: str,
    request: chat_completions.ChatRequest,
    is_connected: Callable[[], bool] = lambda: True,
  ) -> dict[str, Any]:
    """Returns the reply to a request, after the policy has answered it.

    Args:
      name: id of the episode.
      request: the request. Requests of an episode are answered in the order in
        which they arrive.
      is_connected: returns whether the client still waits. If it does not, an
        equal request gets the reply, or the request is dropped.

    Raises:
      RequestError: if the episode is over, or the request is invalid.
    """
    if request.tools and not self._has_tools:
      raise chat_completions.RequestError(
        'tools: the run has env.tools=False; must be omitted'
      )
    with self._changed:
      episode = self._find(name)
      self._check_turns(episode)
      abandoned = (c for c in episode.requests if c.is_abandoned)
      call = next((c for c in abandoned if c.request == request), None)
      if call:
        call.is_connected, call.is_unread = is_connected, False
        self.repeated += 1
        self._report_departures()
      else:
        call = _Call(request, is_connected)
        episode.waiting.append(call)
        self._advance(episode)
    reply = call.reply.result()
    with self._changed:
      self._deliver(episode, call)
    return reply

  def reward(
    self,
    name: str,
    reward: Reward,
    is_connected: Callable[[], bool] = lambda: True,
  ) -> None:
    """Adds a reward to the last turn of an episode; by default, ends it.

    Waits until the earlier requests of the episode are answered.

    Args:
      name: id of the episode.
      reward: the reward.
      is_connected: returns whether the client still waits. If it has left while
        the reward waits, the reward is dropped: the client may send it again.

    Raises:
      RequestError: if the episode is over, ends before the reward is added, or
        has no turn, or if the sum of a turn's rewards is too large.
    """
    call = _Call(reward, is_connected)
    with self._changed:
      episode = self._find(name)
      episode.waiting.append(call)
      self._advance(episode)
    call.reply.result()

  def _find(self, name: str) -> _Episode:
    if name not in self._named:
      raise chat_completions.RequestError(
        f'episode={name[:80]}: unknown, or over', 404, 'no_episode'
      )
    return self._named[name]

  def _check_turns(self, episode: _Episode) -> None:
    """Raises RequestError if another request would exceed the limit."""
    pending = sum(not call.is_abandoned for call in episode.requests)
    if episode.turns + pending >= self._max_steps:
      raise chat_completions.RequestError(
        f'env.max_steps={self._max_steps}: the episode has no turns left; '
        'send its reward',
        code='max_steps',
      )

  # The rollout's side.

  def reset(self, env: int, task: base.Task) -> None:
    """Offers an episode; `receive` returns its first observation."""
    name = f'{task.split}-{task.index}-{secrets.token_hex(8)}'
    with self._changed:
      episode = self._running[env] = _Episode(env, task, name)
      self._named[name] = episode
      self._offered.append(episode)
      self._changed.notify_all()

  def prepare(self, env: int, task: base.Task) -> None:
    """Does nothing; there is nothing to load."""

  def step(self, env: int, response: str, turn: trajectory.SampledTurn) -> None:
    """Sends a response with its tokens; `receive` returns what follows."""
    with self._changed:
      episode = self._running.get(env)
      if episode is None:  # It has failed; its failure is still queued.
        return
      call = episode.current
      request = call.request
      # Each token by itself, which takes milliseconds.
      ids = turn.completion_ids
      single = np.split(ids, ids.size) if request.log_probs else []
      tokens = self._decode(single)
      call.answer = chat_completions.answer(
        response, has_tools=bool(request.tools)
      )
      turn_id = episode.name, episode.turns + 1
      call.reply.set_result(
        chat_completions.reply(request, call.answer, turn, tokens, turn_id)
      )

  def end(self, env: int) -> None:
    """Ends an episode; its request is refused."""
    with self._changed:
      self._close(
        self._running[env],
        'the prompt exceeds rollout.max_prompt_tokens; the episode ends with '
        'its rewards so far',
        'context_length_exceeded',
      )

  def refuse(self, env: int, reason: str) -> env_pool.Failure:
    """Ends an episode whose request is unusable; returns the failure."""
    with self._changed:
      return self._fail(self._running[env], 'garbage', reason)

  def receive(
    self, timeout_secs: float | None = None
  ) -> list[tuple[int, env_pool.Reply]]:
    """Returns what has arrived, after waiting for at least one.

    An episode that no harness has taken waits without limit. A line per minute
    reports what a longer wait is for.

    Args:
      timeout_secs: longest time to wait; 0 does not wait; None waits until a
        call arrives or an episode fails.

    Returns:
      Pairs (environment, reply); empty only after the timeout.
    """
    deadline = math.inf if timeout_secs is None else timeout_secs
    start = time.monotonic()
    deadline, notice = deadline + start, start + _NOTICE_SECS
    with self._changed:
      self._fail_late()
      while not self._arrived and (left := deadline - time.monotonic()) > 0:
        self._changed.wait(min(left, _POLL_SECS))
        self._fail_late()
        if time.monotonic() > notice:
          notice += _NOTICE_SECS
          self._report_wait()
      replies = list(self._arrived)
      self._arrived.clear()
    return replies

  def close(self) -> None:
    """Ends all episodes; later calls of the harness are refused."""
    with self._changed:
      self._is_closed = True
      for episode in list(self._running.values()):
        self._close(episode, 'the run is over', 'over')
      self._changed.notify_all()
    self._clock.close()

  # Both sides; called with the lock.

  def _advance(self, episode: _Episode) -> None:
    """Handles the calls of an episode until the policy has to answer."""
    while episode.waiting and not episode.is_busy:
      call = episode.waiting.popleft()
      if not call.is_connected():
        self._drop(call)
        continue
      if episode.current:
        self._drop(episode.current)
        episode.current, episode.is_revised = None, True
      try:
        if isinstance(call.request, Reward):
          self._add_reward(episode, call.request)
          call.reply.set_result(None)
        else:
          self._observe_request(episode, call)
      except chat_completions.RequestError as error:  # It costs nothing.
        call.reply.set_exception(error)
    self._changed.notify_all()

  def _deliver(self, episode: _Episode, call: _Call) -> None:
    """Makes an answered request a turn if its client still waits."""
    if call is not episode.current:  # Another thread of the call was first.
      return
    episode.deadline = self._clock.now() + self._step_timeout
    if call.is_connected():
      if not call.conversation.messages:
        episode.conversations.append(call.conversation)
      call.conversation.messages = (*call.request.messages, call.answer.message)
      episode.answer, episode.current = call.answer, None
      episode.turns, episode.reward = episode.turns + 1, 0.0
      episode.is_revised = False
    else:
      call.is_unread = True
    self._advance(episode)

  def _drop(self, call: _Call) -> None:
    """Drops a request whose client has left."""
    if not call.reply.done():
      error = chat_completions.RequestError('the client has left')
      call.reply.set_exception(error)
    self.dropped += 1
    self._report_departures()

  def _report_departures(self) -> None:
    """Prints a line for the first departure and each doubling of the count."""
    total = self.repeated + self.dropped
    if total & (total - 1) == 0:
      console.log(
        'requests whose client left before the completion: '
        f'{self.repeated} sent again, {self.dropped} dropped; set a longer '
        'timeout in the client'
      )

  def _report_wait(self) -> None:
    """Prints for what the rollout waits."""
    offered = len(self._offered)
    waiting = sum(not episode.is_busy for episode in self._running.values())
    console.log(
      'the policy waits for a harness; episodes that none has taken: '
      f'{offered}, without a next request: {waiting - offered}'
    )

  def _add_reward(self, episode: _Episode, reward: Reward) -> None:
    """Adds a reward to the last turn of an episode.

    Raises:
      RequestError: if there is no turn, or the turn's sum is too large.
    """
    if not episode.turns:
      raise chat_completions.RequestError(
        'the episode has no turn; send a chat completion first'
      )
    total, bound = episode.reward + reward.reward, messages.BOUNDS['reward']
    if not abs(total) <= bound:
      raise chat_completions.RequestError(
        f'reward: the sum of the turn would be {total:,.0f}; must be within '
        f'+-{bound:,.0f}'
      )
    episode.reward = total
    if reward.done:
      self._reply(episode, self._result(episode, None, reward))
      self._close(episode, 'the episode is over', 'no_episode')
    else:
      episode.deadline = self._clock.now() + self._step_timeout

  def _observe_request(self, episode: _Episode, call: _Call) -> None:
    """Passes a request to the policy.

    Raises:
      RequestError: if what it adds to its conversation is invalid.
    """
    request = call.request
    continued = [c for c in episode.conversations if c.is_continued_by(request)]
    if continued:
      conversation = max(continued, key=lambda c: len(c.messages))
    else:
      name = str(len(episode.conversations))
      conversation = _Conversation(name, request.tools)
    observation = _observe(request, conversation)
    _check(observation)
    reply = observation
    if episode.answer:
      reply = self._result(episode, observation, Reward(0.0, done=False))
    episode.current, call.conversation = call, conversation
    episode.deadline = math.inf
    self._reply(episode, reply)

  def _reply(
    self, episode: _Episode, reply: base.Observation | base.StepResult
  ) -> None:
    """Passes what follows the last turn to the rollout."""
    if episode.is_revised:
      reply = env_pool.Revision(reply)
    self._arrived.append((episode.env, reply))

  def _result(
    self,
    episode: _Episode,
    observation: base.Observation | None,
    reward: Reward,
  ) -> base.StepResult:
    """Returns the result of the last response."""
    answer = episode.answer
    return base.StepResult(
      observation=observation,
      reward=episode.reward,
      valid=not answer.problem,
      action=answer.message.text,
      success=reward.success and reward.done,
      done=reward.done,
      score=reward.score if reward.done else None,
    )

  def _close(self, episode: _Episode, reason: str, code: str) -> None:
    """Forgets an episode and refuses its requests."""
    del self._running[episode.env], self._named[episode.name]
    if episode in self._offered:
      self._offered.remove(episode)
    for call in filter(None, (episode.current, *episode.waiting)):
      if not call.reply.done():
        error = chat_completions.RequestError(reason, code=code)
        call.reply.set_exception(error)
    episode.current = None
    episode.waiting.clear()

  def _fail(
    self, episode: _Episode, cause: str, reason: str
  ) -> env_pool.Failure:
    last_action = episode.answer.message.text if episode.answer else ''
    failure = env_pool.Failure(
      episode.env, episode.task, last_action, cause, reason
    )
    self.failures.append(failure)
    self._close(episode, f'the episode failed: {failure}', 'failed')
    return failure

  def _fail_late(self) -> None:
    """Fails episodes whose harness is late."""
    now = self._clock.now()
    for episode in list(self._running.values()):
      if now > episode.deadline:
        has_called = episode.turns or episode.current
        limit = self._step_timeout if has_called else self._reset_timeout
        reason = f'the harness sent no call for {limit:g} s'
        failure = self._fail(episode, 'hung', reason)
        self._arrived.append((episode.env, failure))


def _observe(
  request: chat_completions.ChatRequest, conversation: _Conversation
) -> base.Observation:
  """Returns what a request adds to a conversation."""
  new = request.messages[len(conversation.messages) :]
  text = '\n'.join(message.text for message in new)
  shown = text[: messages.MAX_TEXT_CHARS]
  return base.Observation(
    prompt=text,
    short_prompt=text,
    anchor=request.anchor or shown,
    text=shown,
    messages=new,
    tools=() if conversation.messages else request.tools,
    conversation=conversation.name,
  )


def _check(observation: base.Observation) -> None:
  """Raises RequestError if an observation is invalid."""
  try:
    messages.check('reset', observation)
  except messages.UnusableReplyError as error:
    raise chat_completions.RequestError(str(error)) from error
