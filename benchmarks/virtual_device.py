"""A device in virtual time: the sampler and the runner without a model.

`installed` replaces the compiled programs of samplers created inside it. Their
requests end at `Request.max_tokens` (see forced.py), and the programs take the
time that a function returns. Slots, chunks, buckets and the order of all work
are those of gigpo_jax.sampler and gigpo_jax.rollout, whose code runs unchanged.
"""

import collections
import contextlib
import dataclasses
import functools
import heapq
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np

from envs import base
from gigpo_jax import mesh, sampler
from gigpo_jax.models import qwen
from gigpo_jax.programs import sampler_cache, sampler_programs

# Any model: only its shape is read, to make shardings. Prompts are hashes.
_MODEL = qwen.QwenConfig(
  vocab_size=2**31,
  hidden_size=2,
  intermediate_size=2,
  num_layers=1,
  num_heads=1,
  num_kv_heads=1,
  head_dim=2,
)
_IN_USE, _IS_NEW, _POSITION, _LIMIT = map(
  sampler_programs.INTEGERS.index, ('in_use', 'is_new', 'position', 'limit')
)
_STATE_SIZE = len(sampler_programs.STATE)
_ACTIVE, _COUNT = map(sampler_programs.STATE.index, ('active', 'count'))

# Rows and length, and the fields of STATE.
Slots = tuple[tuple[int, int], np.ndarray]


class Clock:
  """Virtual time of a host and of its device, which works in order.

  Attributes:
    now: time of the host, seconds.
    free: time at which the device has done all its work, seconds.
    secs: time of the device by the name of the work.
    host_secs: time of the host by the name of the work.
  """

  def __init__(self):
    self.now = self.free = 0.0
    self.secs: dict[str, float] = collections.defaultdict(float)
    self.host_secs: dict[str, float] = collections.defaultdict(float)

  def dispatch(self, name: str, secs: float) -> float:
    """Queues work of the device; returns the time at which it is done."""
    self.free = max(self.free, self.now) + secs
    self.secs[name] += secs
    return self.free

  def work(self, name: str, secs: float) -> None:
    """Lets the host work."""
    self.now += secs
    self.host_secs[name] += secs

  def wait(self, until: float) -> None:
    """Lets the host wait."""
    self.now = max(self.now, until)


@dataclasses.dataclass(frozen=True)
class HostCosts:
  """Seconds of the host.

  Attributes:
    chunk_secs: per dispatched step of the sampler.
    slot_secs: per slot in use and step.
    turn_secs: per turn: tokens of the prompt, text of the response, messages to
      the environment.
    env_secs: of an environment's step, in its worker.
    workers: processes of environments.
  """

  chunk_secs: float = 0.0
  slot_secs: float = 0.0
  turn_secs: float = 0.0
  env_secs: float = 0.0
  workers: int = 8


@dataclasses.dataclass(frozen=True)
class Costs:
  """Seconds of the device's programs.

  Attributes:
    prefill: (prompts, padded length) -> seconds.
    decode: (steps, slots, length of a slot, positions in use) -> seconds.
    copy: (slots, length of a slot) -> seconds of moving a part of the cache.
    extend: (prompts, tokens, length of a slot) -> seconds of a chunk.
    host: seconds of the host.
  """

  prefill: Callable[[int, int], float] = lambda rows, length: 0.0
  decode: Callable[[int, int, int, float], float] = lambda *sizes: 0.0
  copy: Callable[[int, int], float] = lambda rows, length: 0.0
  extend: Callable[[int, int, int], float] = lambda *sizes: 0.0
  host: HostCosts = HostCosts()


@dataclasses.dataclass(frozen=True)
class _Pending:
  """An array of the device; the host waits for it when it reads it."""

  value: np.ndarray
  done: float
  clock: Clock

  def __array__(self, *args, **kwargs) -> np.ndarray:
    self.clock.wait(self.done)
    return self.value

  def is_ready(self) -> bool:
    """Returns whether the device has done the work."""
    return self.done <= self.clock.now


class Programs:
  """Replaces `sampler_programs.Programs`."""

  compilations = 0

  def __init__(
    self,
    clock: Clock,
    costs: Costs,
    tokens_per_step: float,
    ends_early: bool,
    model: qwen.QwenConfig,
    *unused,
    decode_chunk: int,
    max_length: int,
    **unused_kwargs,
  ):
    del unused, unused_kwargs
    self.model, self._max_length = model, max_length
    self._clock, self._costs = clock, costs
    self._speed, self._ends_early = tokens_per_step, ends_early
    self._chunk = decode_chunk

  def prepare(self, params: dict, base_params: dict) -> dict:
    """Returns no parameters."""
    del params, base_params
    return {}

  def new_slots(self, rows: int, length: int) -> Slots:
    """Returns empty slots."""
    return (rows, length), np.zeros((rows, _STATE_SIZE), np.int32)

  def prefill(
    self,
    params: dict,
    tokens: np.ndarray,
    counts: np.ndarray,
    agents: np.ndarray,
  ) -> None:
    """Returns no rows."""
    del params, counts, agents
    self._clock.dispatch('prefill', self._costs.prefill(*tokens.shape))

  def extend(
    self,
    params: dict,
    tokens: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    agents: np.ndarray,
    rows: np.ndarray,
  ) -> np.ndarray:
    """Prefills a part of prompts; returns the rows."""
    del params, starts, counts, agents
    secs = self._costs.extend(*tokens.shape, self._max_length)
    self._clock.dispatch('prefill', secs)
    return rows

  def size_of(self, slots: Slots) -> tuple[int, int]:
    """Returns the number of rows of slots, and their length."""
    return slots[0]

  def take(
    self, slots: Slots, indices: np.ndarray, *, is_own: bool
  ) -> np.ndarray:
    """Returns the state of some rows; the time includes that of `put`."""
    del is_own
    (_, length), state_BX = slots
    indices = np.asarray(indices)
    self._clock.dispatch('copy', 2 * self._costs.copy(len(indices), length))
    return np.asarray(state_BX)[indices]

  def put(
    self,
    slots: Slots,
    rows: np.ndarray | None,
    indices: np.ndarray,
    *,
    is_own: bool,
  ) -> Slots:
    """Returns the slots with the state of rows; None: of prefilled prompts."""
    del is_own
    size, state_BX = slots
    state_BX, indices = np.array(state_BX), np.asarray(indices)
    kept = indices < len(state_BX)
    state_BX[indices[kept]] = 0 if rows is None else rows[kept]
    return size, state_BX

  def decode(self, params, slots, integers_BX, floats, truncated):
    """Decodes up to K tokens of every active slot; see the real programs."""
    del params, floats, truncated
    size, state_BX = slots
    host, clock = self._costs.host, self._clock
    integers_BX, state_BX = np.asarray(integers_BX), np.asarray(state_BX)
    in_use_B = integers_BX[:, _IN_USE] > 0
    is_new_B = integers_BX[:, _IS_NEW] > 0
    active_B = in_use_B & ((state_BX[:, _ACTIVE] > 0) | is_new_B)
    count_B = np.where(is_new_B, 0, state_BX[:, _COUNT])
    left_B = np.where(active_B, integers_BX[:, _LIMIT] - count_B, 0)
    new_B = np.minimum(left_B, round(self._chunk * self._speed))
    steps = self._chunk
    if self._ends_early:
      steps = min(steps, int(np.ceil(new_B.max() / self._speed)))
    used_B = integers_BX[:, _POSITION] + count_B + new_B / 2
    clock.work('chunk', host.chunk_secs + host.slot_secs * in_use_B.sum())
    done = clock.dispatch(
      'decode',
      self._costs.decode(steps, *size, float((used_B * active_B).sum())),
    )
    count_B = count_B + new_B
    active_B = active_B & (new_B < left_B)
    state_BX = np.zeros((len(count_B), _STATE_SIZE), np.int32)
    state_BX[:, _ACTIVE], state_BX[:, _COUNT] = active_B, count_B
    # Tokens up to each pass.
    until_K = np.round(np.arange(self._chunk + 1) * self._speed).astype(int)
    counts_KB = np.diff(np.minimum(new_B, until_K[:, None]), axis=0)
    most = int(np.ceil(self._speed))
    ids_KLB = np.zeros((self._chunk, most, len(count_B)), np.int32)
    log_probs_KLB = ids_KLB.astype(np.float32)
    outputs = ids_KLB, log_probs_KLB, log_probs_KLB, counts_KB, active_B
    return (size, state_BX), tuple(_Pending(x, done, clock) for x in outputs)


@contextlib.contextmanager
def installed(
  clock: Clock,
  costs: Costs,
  *,
  copies: int = 1,
  tokens_per_step: float = 1.0,
  ends_early: bool = False,
  platform: str = 'tpu',
  transfers: bool = False,
) -> Iterator[None]:
  """Samplers created inside have virtual programs.

  Args:
    clock: receives the time.
    costs: seconds of each program.
    copies: copies of the model that share the slots.
    tokens_per_step: tokens that a decoding step adds to a completion; more than
      one with speculation.
    ends_early: whether a program ends when no slot is active, as on a CPU or
      TPU.
    platform: 'cpu', 'gpu' or 'tpu'; determines the sizes of prefills.
    transfers: whether inputs are moved to the device of this process.
  """
  programs = functools.partial(
    Programs, clock, costs, tokens_per_step, ends_early
  )
  sizes = sampler_cache.prefill_sizes
  place = mesh.place_rows if transfers else lambda _, arrays: arrays
  with (
    mock.patch.object(sampler_programs, 'Programs', programs),
    mock.patch.object(
      sampler_cache,
      'prefill_sizes',
      lambda *args: sizes(*args[:-1], platform),
    ),
    mock.patch.object(mesh, 'batch_shards', lambda _: copies),
    mock.patch.object(mesh, 'place_rows', place),
  ):
    yield


def make_sampler(decode_attention: str = 'xla', **kwargs) -> sampler.Sampler:
  """Returns a sampler of no model; call it inside `installed`.

  Args:
    decode_attention: see `QwenConfig`; determines the lengths of slots.
    **kwargs: further arguments of the sampler.
  """
  return sampler.Sampler(
    dataclasses.replace(_MODEL, decode_attention=decode_attention),
    mesh.make_mesh(1, 1, 1, devices=jax.devices()[:1]),
    seed=0,
    stop_ids=(),
    vocab_size=_MODEL.vocab_size,
    **kwargs,
  )


class VirtualPool:
  """Environments in virtual time, in place of `env_pool.EnvPool`.

  Episodes never end; `forced.Pool` ends them.

  Args:
    clock: the time.
    costs: seconds of the host.
    num_envs: number of environments.
    members: number of consecutive tasks of the split 'train' with the same
      first prompt.
  """

  def __init__(
    self, clock: Clock, costs: HostCosts, num_envs: int, members: int = 1
  ):
    self.num_envs, self.restarts, self.recycled = num_envs, 0, 0
    self._clock, self._costs, self._members = clock, costs, members
    self._episodes: dict[int, tuple[base.Task, int]] = {}
    self._workers = [0.0] * costs.workers
    self._pending: list[tuple[float, int]] = []

  def reset(self, env: int, task: base.Task) -> None:
    """Starts an episode."""
    self._episodes[env] = task, 0
    self._submit(env)

  def resume(
    self, env: int, task: base.Task, responses: Sequence[str], replies: Sequence
  ) -> None:
    """Continues an episode, after its worker has replayed it."""
    del replies
    self._episodes[env] = task, len(responses)
    self._work(env, 1 + len(responses))

  def step(self, env: int, response: str, turn: Any = None) -> None:
    """Takes a turn."""
    del response, turn
    task, taken = self._episodes[env]
    self._episodes[env] = task, taken + 1
    self._clock.work('turn', self._costs.turn_secs)
    self._submit(env)

  def end(self, env: int) -> None:
    """Ends an episode."""
    del self._episodes[env]

  def _submit(self, env: int) -> None:
    heapq.heappush(self._pending, (self._work(env, 1), env))

  def _work(self, env: int, calls: int) -> float:
    """Lets the worker of an environment work; returns its time at the end."""
    worker = env % len(self._workers)
    start = max(self._clock.now, self._workers[worker])
    self._workers[worker] = start + calls * self._costs.env_secs
    return self._workers[worker]

  def receive(self, timeout_secs: float | None = None) -> list:
    """Returns replies that have arrived, see `EnvPool.receive`."""
    first = self._pending[0][0]
    longest = np.inf if timeout_secs is None else timeout_secs
    self._clock.wait(min(first, self._clock.now + longest))
    replies = []
    while self._pending and self._pending[0][0] <= self._clock.now:
      _, env = heapq.heappop(self._pending)
      replies.append((env, self._reply(*self._episodes[env])))
    return replies

  def _reply(
    self, task: base.Task, turn: int
  ) -> base.Observation | base.StepResult:
    index = task.index
    if task.split == 'train' and not turn:
      index = index // self._members * self._members
    text = f'{task.split} {index} {turn}'
    observation = base.Observation(text, text, text, text)
    if turn == 0:
      return observation
    return base.StepResult(observation, 0.0, True, '', False, False)


class VirtualTokenizer:
  """Short unique ids for each prompt; `forced.Tokenizer` sets their number."""

  vocab_size = 2

  def fit(
    self, prompts: Sequence[str], short_prompts: Sequence[str], **unused
  ) -> list[tuple[np.ndarray, bool]]:
    """Returns ids, and that no prompt was shortened."""
    del short_prompts, unused
    hashes = [zlib.crc32(prompt.encode()) >> 1 for prompt in prompts]
    return [(np.array([h], np.int32), False) for h in hashes]

  def decode(self, ids: Sequence[np.ndarray]) -> list[str]:
    """Returns empty texts."""
    return [''] * len(ids)
