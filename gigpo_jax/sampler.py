"""Continuous batching: prompt ids in, completion ids and log-probs out.

A slot is a row of the key/value cache. Requests wait until a slot is free; a
step reads the prompts of those that got one, decodes a few tokens of all, and
hands out what is finished, so that nobody waits for the longest. The device
works on one step while the host looks at the one before. Knows ids, never
text.

The key of a completion's c-th token is a function of the sampler's seed, the
request's stream and c alone, so neighbours, order, slot and batch size never
change what is sampled.

Shapes. **B** slots, **R** prompts read at once, **P** prompt tokens, **K**
tokens decoded in a step, **V** vocabulary.
"""

import collections
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from gigpo_jax import hosts
from gigpo_jax import mesh as mesh_lib
from gigpo_jax.models import lora, qwen

_NEVER = -1e30
_NUMBERS = 5  # of a stream
_BLOCK = 128  # tokens of the vocabulary
# Prompts read at once: one, or so many by a copy of the model. They fill an
# accelerator; on a CPU what more of them need does not fit into its own cache.
_READ_AT_ONCE = 8
_READ_AT_ONCE_ON_CPU = 4
# Where the host waits for each choice of a program between two ways to go on,
# and so for the program: none is left to it that the host can make.
_WAITING = ('gpu',)
# Steps for which a smaller cache would have done before it is made smaller.
_PATIENCE = 4


WEIGHTS = ('model', 'int8', 'adapters')


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How tokens are chosen.

  Attributes:
    temperature: divides the logits; 0 takes the likeliest token.
    top_k: how many of the most likely tokens to sample from; 0 is all.
    top_p: least mass of the most likely tokens to sample from; 1 is all. With
      top_k, taken inside it.
    min_p: least probability of a token as a share of the likeliest one's.
  """

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0

  @property
  def truncates(self) -> bool:
    """Whether some tokens are never sampled."""
    return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclasses.dataclass(frozen=True)
class Request:
  """A prompt to answer.

  Attributes:
    prompt_ids: int32 [P], at least one token.
    stream: integers that make its random stream: (domain, iteration, task,
      member, step).
    sampling: how tokens are chosen.
    max_tokens: limit of the completion; None is the sampler's.
  """

  prompt_ids: np.ndarray
  stream: tuple[int, int, int, int, int]
  sampling: Sampling = Sampling()
  max_tokens: int | None = None


@dataclasses.dataclass(frozen=True)
class Completion:
  """A sampled answer.

  Attributes:
    ids: int32 [C]; the stop token, where there is one, is the last.
    log_probs: float32 [C]; of each token under the whole distribution at the
      sampling temperature, before top-k, top-p and min-p. This is what the
      loss needs. Greedy sampling reports temperature 1.
    sampled_log_probs: float32 [C]; under the distribution that was sampled,
      after them.
    finish_reason: 'stop', or 'length' at the limit of tokens.
  """

  ids: np.ndarray
  log_probs: np.ndarray
  sampled_log_probs: np.ndarray
  finish_reason: str


@dataclasses.dataclass
class Stats:
  """What a sampler did since these were last taken.

  Attributes:
    prefill_tokens: prompt tokens read, padding left out.
    padded_tokens: the same with padding.
    shared_tokens: prompt tokens that were there already, and copied or kept.
    decode_tokens: tokens sampled.
    slot_steps: slots advanced, empty ones among them.
    idle_secs: time, at most, that the device had nothing to do while requests
      were under way.
    spans: (slot, 'prefill' or 'decode', begin, end) for a picture, where the
      sampler's `trace` is set; monotonic seconds as the host sees them.
  """

  prefill_tokens: int = 0
  padded_tokens: int = 0
  shared_tokens: int = 0
  decode_tokens: int = 0
  slot_steps: int = 0
  idle_secs: float = 0.0
  spans: list[tuple[int, str, float, float]] = dataclasses.field(
    default_factory=list
  )


@dataclasses.dataclass(eq=False)
class _Entry:
  """A request in a slot.

  Attributes:
    ticket: the caller's number for it; None if it is another process's.
    request: what is asked.
    limit: of tokens.
    fresh: whether no step has had it yet.
    found: ids, log-probs and sampled log-probs of the steps so far.
  """

  ticket: int | None
  request: Request
  limit: int
  fresh: bool = True
  found: list[tuple[np.ndarray, ...]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Step:
  """A step under way: its outputs, and who was in which slot."""

  outputs: tuple
  entries: list[tuple[int, _Entry]]
  begin: float


class Sampler:
  """Compiled sampling of one model on the devices of a mesh.

  They form groups of `tensor` devices, each with a copy of the model and some
  of the slots. Where all groups keep within a host, each process samples by
  itself, for its own requests. Otherwise all processes share one sampler: each
  has to make the same calls of `load` and `warm_up`, to go on with `step` and
  to `finish`; what it submits, and gets back, is its own. There the host's work
  does not overlap with the device's: a step is told of after the one before.

  Args:
    config: shape of the model.
    mesh: the devices, as the parameters lie on them.
    seed: of all random streams.
    prompt_buckets: rising lengths that prompts are padded to.
    batch_buckets: rising numbers of slots that a step is compiled for; the
      last is how many there are.
    max_completion_tokens: limit of a completion.
    stop_ids: tokens that end a completion.
    vocab_size: ids from here on are embedding rows without a token, which
      are never sampled.
    decode_tokens: K, tokens of a step. More are cheaper, and let a finished
      slot idle for longer.
    weights: one of WEIGHTS: as the model computes; int8, a scale for each
      output channel, of which memory holds half as much as of bfloat16; or as
      the model computes, with adapters beside the matrices, not merged: slower,
      and exact where a bfloat16 matrix would round them away.
    tensor: devices that a copy of the model is cut over; 0 is the mesh's own.
    stop: given a completion so far and how many of its tokens are new, returns
      how many tokens to keep if it is to end there, or None: for stop strings.

  Attributes:
    base: parameters that stay as they are, of a network with adapters.
    stats: what happened since they were last taken.
    trace: whether they are to hold spans.
    shared: whether the calls of `step` wait for other processes.
  """

  def __init__(
    self,
    config: qwen.QwenConfig,
    mesh: jax.sharding.Mesh,
    *,
    seed: int,
    prompt_buckets: Sequence[int],
    batch_buckets: Sequence[int],
    max_completion_tokens: int,
    stop_ids: Sequence[int],
    vocab_size: int,
    decode_tokens: int = 8,
    weights: str = 'model',
    tensor: int = 0,
    stop: Callable[[np.ndarray, int], int | None] | None = None,
  ):
    for name, sizes in (
      ('prompt_buckets', prompt_buckets),
      ('batch_buckets', batch_buckets),
    ):
      if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
        raise ValueError(
          f'rollout.{name}={tuple(sizes)}: must be rising and positive'
        )
    if weights not in WEIGHTS:
      raise ValueError(
        f'rollout.weights={weights}: must be one of {", ".join(WEIGHTS)}'
      )
    if not 0 < vocab_size <= config.vocab_size:
      raise ValueError(
        f'vocab_size={vocab_size}: the model embeds {config.vocab_size} '
        'tokens; must be between 1 and that'
      )
    # Where all processes hold the parameters, and where this one samples.
    whole = mesh_lib.sampling_mesh(mesh, tensor or mesh.shape['tensor'])
    several = jax.process_count() > 1
    self.shared = several and not mesh_lib.on_one_host(whole)
    self._local = several and not self.shared
    mesh = mesh_lib.local_mesh(whole) if self._local else whole
    shards = mesh_lib.batch_shards(mesh)
    if any(size % shards for size in batch_buckets):
      raise ValueError(
        f'rollout.batch_buckets={tuple(batch_buckets)}: {shards} copies of '
        f'the model share the slots; must be multiples of {shards}'
      )
    self._whole, self._mesh = whole, mesh
    self._prompt_buckets = tuple(prompt_buckets)
    self._row_buckets = tuple(batch_buckets)
    platform = mesh.devices.flat[0].platform
    on_cpu = platform == 'cpu'
    most = shards * (_READ_AT_ONCE_ON_CPU if on_cpu else _READ_AT_ONCE)
    # Whether tokens may be truncated, in each program of a step.
    self._truncations = (False, True) if platform in _WAITING else (None,)
    self._read_buckets = tuple(sorted({shards, min(most, batch_buckets[-1])}))
    self._length_buckets = tuple(
      size + max_completion_tokens for size in prompt_buckets
    )
    self._max_tokens = max_completion_tokens
    self._stop_ids, self._stop = frozenset(stop_ids), stop
    self._chunk = min(decode_tokens, max_completion_tokens)
    rows = mesh_lib.batch_sharding(mesh)
    int8, merge, trained = weights == 'int8', weights != 'adapters', config
    if merge:
      config = dataclasses.replace(config, adapters=None)
    cached = mesh_lib.cache_formats(
      mesh, jax.eval_shape(lambda: qwen.new_cache(config, 1, 1))
    )
    axes = (qwen.quantized_axes if int8 else qwen.logical_axes)(config)
    self._ready_shardings = mesh_lib.shardings(
      whole, qwen.split_axes(config, axes)
    )
    self._ready = jax.jit(
      functools.partial(_prepare, trained, merge, int8),
      out_shardings=self._ready_shardings,
    )
    self._new = jax.jit(
      functools.partial(qwen.new_cache, config),
      static_argnums=(0, 1),
      out_shardings=cached,
    )
    self._resize = jax.jit(
      _resize,
      static_argnums=(2, 3),
      out_shardings=(cached, rows),
    )
    self._read = jax.jit(functools.partial(qwen.prefill, config))
    self._insert = jax.jit(
      qwen.insert, donate_argnums=(0,), out_shardings=cached
    )
    self._copy = jax.jit(
      qwen.copy_rows, donate_argnums=(0,), out_shardings=cached
    )
    self._decode = jax.jit(
      functools.partial(
        _decode,
        config,
        np.uint32(seed),
        tuple(stop_ids),
        vocab_size,
        self._chunk,
      ),
      static_argnums=5,
      donate_argnums=(1, 2),
      out_shardings=(cached, rows, mesh_lib.everywhere(mesh)),
    )
    self._cached = cached
    self.base: dict = {}
    self._tickets = 0
    self.stats, self.trace = Stats(), False
    self.release()

  def _clear(self) -> None:
    self._submitted: list[_Entry] = []
    self._waiting: collections.deque[_Entry] = collections.deque()
    self._slots: list[_Entry | None] = [None] * self._row_buckets[-1]
    # The prompt whose keys and values a slot still holds, and the reverse.
    self._prompts: list[bytes | None] = [None] * self._row_buckets[-1]
    self._holders: dict[bytes, int] = {}
    self._under_way: _Step | None = None
    self._spare_steps = 0
    self._left = time.monotonic()

  @property
  def compilations(self) -> int:
    """How many programs have been compiled."""
    programs = (self._ready, self._new, self._resize, self._read) + (
      self._insert,
      self._copy,
      self._decode,
    )
    return sum(program._cache_size() for program in programs)

  @property
  def busy(self) -> bool:
    """Whether requests are waiting or under way."""
    pending = self._submitted or self._waiting or self._under_way
    return bool(pending or any(self._slots))

  def take_stats(self) -> Stats:
    """Returns what happened since the last call, and begins anew."""
    taken, self.stats = self.stats, Stats()
    return taken

  def load(self, params: dict) -> None:
    """Takes the parameters to sample from; drops what is under way.

    They are cast, and moved from device to device as sampling needs them, once.
    """
    self._clear()
    if params is not self._source:
      with jax.set_mesh(self._whole):
        ready = hosts.settle(self._ready(params, self.base))
      if self._local:
        ready = mesh_lib.localize(ready, self._mesh)
      self._source, self._params = params, ready

  def release(self) -> None:
    """Gives the memory of parameters and cache back, until `load`."""
    self._clear()
    self._source: dict | None = None
    self._params: dict | None = None
    self._cache: qwen.Cache | None = None
    self._state: jax.Array | None = None

  @property
  def num_programs(self) -> int:
    """How many programs `warm_up` counts."""
    return 1 + sum(1 for _ in self._warm_up_calls())

  def warm_up(
    self, params: dict, advance: Callable[[], None] = lambda: None
  ) -> None:
    """Compiles every bucket, so that nothing compiles later.

    Returns all memory that it takes.

    Args:
      params: of the policy.
      advance: called after each of `num_programs` programs.
    """
    self.load(params)
    advance()
    with jax.set_mesh(self._mesh):
      for call in self._warm_up_calls():
        call()
        advance()
    self.release()

  def _warm_up_calls(self) -> Iterator[Callable[[], object]]:
    """Yields calls that compile a program each; to be made in this order."""
    sizes = list(itertools.product(self._row_buckets, self._length_buckets))
    reads = list(itertools.product(self._read_buckets, self._prompt_buckets))
    prompts: dict[tuple[int, int], dict] = {}
    for r, p in reads:
      yield functools.partial(self._warm_up_prefill, prompts, r, p)
    for rows, length in sizes:
      yield functools.partial(self._allocate, rows, length)
      for other in sizes:
        if (rows == other[0]) != (length == other[1]):
          yield functools.partial(self._warm_up_resize, *other)
      for r in self._read_buckets:
        yield functools.partial(self._warm_up_copy, r, rows)
      for r, p in reads:
        if p <= length:
          yield functools.partial(self._warm_up_insert, prompts, r, p, rows)
      for truncated in self._truncations:
        yield functools.partial(self._warm_up_decode, rows, truncated)

  def _warm_up_prefill(self, prompts: dict, r: int, p: int) -> None:
    ids = self._place(np.zeros((r, p), np.int32))
    prompts[r, p] = self._read(self._params, ids)

  def _warm_up_resize(self, rows: int, length: int) -> None:
    self._resize(self._cache, self._state, rows, length)

  def _warm_up_copy(self, r: int, rows: int) -> None:
    # Slots from `rows` on do not exist.
    slots = self._place(np.full(r, rows, np.int32))
    self._cache = self._copy(self._cache, slots, slots)

  def _warm_up_insert(self, prompts: dict, r: int, p: int, rows: int) -> None:
    slots = self._place(np.full(r, rows, np.int32))
    self._cache = self._insert(self._cache, prompts[r, p], slots)

  def _warm_up_decode(self, rows: int, truncated: bool | None) -> None:
    jax.block_until_ready(self._dispatch([], rows, truncated).outputs)

  def lower(self, params: dict, base: dict) -> dict[str, jax.stages.Lowered]:
    """Returns the largest programs, by name; nothing is compiled, nothing runs.

    Args:
      params: shapes and shardings, as of `load`.
      base: the same of what stays as it is.
    """
    rows, length = self._row_buckets[-1], self._length_buckets[-1]
    described = mesh_lib.described
    split = mesh_lib.batch_sharding(self._mesh)

    def numbers(*shape: int, dtype: str = 'int32') -> jax.ShapeDtypeStruct:
      return jax.ShapeDtypeStruct(shape, dtype, sharding=split)

    with jax.set_mesh(self._whole):
      prepare = self._ready.lower(params, base)
    with jax.set_mesh(self._mesh):
      ready = described(prepare.out_info, self._ready_shardings)
      cache = jax.eval_shape(self._new, rows, length)
      return {
        'prepare': prepare,
        'prefill': self._read.lower(
          ready, numbers(self._read_buckets[-1], self._prompt_buckets[-1])
        ),
        'decode': self._decode.lower(
          ready,
          described(cache, self._cached),
          numbers(rows, len(_STATE)),
          numbers(rows, len(_INTEGERS) + _NUMBERS),
          numbers(rows, len(_FLOATS), dtype='float32'),
          self._truncations[0],
        ),
      }

  def generate(
    self, params: dict, requests: Sequence[Request]
  ) -> list[Completion]:
    """Returns a completion for each request, in their order.

    Args:
      params: the policy; only read.
      requests: any number; none gives none.

    Raises:
      ValueError: if one can never fit; see `submit`.
    """
    self.load(params)
    tickets = [self.submit(request) for request in requests]
    found: dict[int, Completion] = {}
    while self.busy:
      found.update(self.step())
    self.finish()
    return [found[ticket] for ticket in tickets]

  def submit(self, request: Request) -> int:
    """Queues a request; returns the number that `step` will give it by.

    Raises:
      ValueError: if its prompt is empty or longer than the largest bucket, or
        its limit of tokens is out of range.
    """
    length = len(request.prompt_ids)
    if length < 1:
      raise ValueError('a prompt has 0 tokens; must have at least 1')
    if length > self._prompt_buckets[-1]:
      raise ValueError(
        f'a prompt has {length} tokens; at most {self._prompt_buckets[-1]} '
        '(the last of rollout.prompt_buckets)'
      )
    limit = self._max_tokens
    if request.max_tokens is not None:
      limit = request.max_tokens
    if not 1 <= limit <= self._max_tokens:
      raise ValueError(
        f'max_tokens={limit}: must be between 1 and {self._max_tokens} '
        '(rollout.max_completion_tokens)'
      )
    self._tickets += 1
    self._submitted.append(_Entry(self._tickets, request, limit))
    return self._tickets

  def step(self) -> list[tuple[int, Completion]]:
    """Goes on with all requests; returns those that are finished.

    What is returned was finished by the step before; this one is under way
    when the call returns.
    """
    self._note_idleness()
    self._take_in(over=False)
    return self._advance()

  def finish(self) -> None:
    """Goes on for processes that share the sampler, until all call this."""
    while self.shared and not self._take_in(over=True):
      self._advance()
      self._note_idleness()

  # The host's part.

  def _take_in(self, *, over: bool) -> bool:
    """Queues what was submitted; returns whether all processes are `over`."""
    entries, self._submitted = self._submitted, []
    if not self.shared:
      self._waiting += entries
      return over
    told = hosts.tell_all((entries, over))
    for process, (theirs, _) in enumerate(told):
      for entry in theirs:
        if process != jax.process_index():
          entry.ticket = None
        self._waiting.append(entry)
    return all(over for _, over in told)

  def _note_idleness(self) -> None:
    if self._under_way and self._under_way.outputs[-1].is_ready():
      self.stats.idle_secs += time.monotonic() - self._left

  def _advance(self) -> list[tuple[int, Completion]]:
    before = self._under_way
    with jax.set_mesh(self._mesh):
      entries = self._admit()
      self._under_way = None
      if entries:
        truncated = any(e.request.sampling.truncates for _, e in entries)
        self._under_way = self._dispatch(
          entries,
          self._rows,
          truncated if truncated in self._truncations else None,
        )
    finished = self._collect(before) if before else []
    self._left = time.monotonic()
    return finished

  def _admit(self) -> list[tuple[int, _Entry]]:
    """Gives free slots to waiting requests and their prompts to the cache.

    Returns:
      The slots in use and what is in them.
    """
    free = [n for n, entry in enumerate(self._slots) if entry is None]
    new: list[tuple[int, _Entry]] = []
    copies: list[tuple[int, int]] = []
    while self._waiting and free:
      entry = self._waiting.popleft()
      prompt = entry.request.prompt_ids.tobytes()
      holder = self._holders.get(prompt)
      slot = holder if holder in free else free[0]
      free.remove(slot)
      self._slots[slot] = entry
      if holder is None:
        new.append((slot, entry))
      else:
        self.stats.shared_tokens += len(entry.request.prompt_ids)
        if slot != holder:
          copies.append((holder, slot))
      self._hold(slot, prompt)
    used = [(n, entry) for n, entry in enumerate(self._slots) if entry]
    if not used:
      return used
    rows = used[-1][0] + 1
    longest = max(len(entry.request.prompt_ids) for _, entry in used)
    length = _bucket(self._prompt_buckets, longest) + self._max_tokens
    self._fit(_bucket(self._row_buckets, rows), length)
    begin = time.monotonic()
    for part, size in self._parts(new):
      self._read_prompts(part, size)
    for part in self._packs(copies):
      places = np.full((2, _bucket(self._read_buckets, len(part))), self._rows)
      places[:, : len(part)] = np.transpose(part)
      sources, slots = (self._place(p.astype(np.int32)) for p in places)
      self._cache = self._copy(self._cache, sources, slots)
    end = time.monotonic()
    if self.trace:
      self.stats.spans += [(slot, 'prefill', begin, end) for slot, _ in new]
    return used

  def _hold(self, slot: int, prompt: bytes | None) -> None:
    """Notes which prompt a slot holds from now on."""
    old = self._prompts[slot]
    if old is not None and self._holders.get(old) == slot:
      del self._holders[old]
    self._prompts[slot] = prompt
    if prompt is not None:
      self._holders.setdefault(prompt, slot)

  def _parts(
    self, entries: list[tuple[int, _Entry]]
  ) -> Iterator[tuple[list[tuple[int, _Entry]], int]]:
    """Yields entries whose prompts are read at once, and their bucket."""
    by_length = collections.defaultdict(list)
    for slot, entry in entries:
      length = len(entry.request.prompt_ids)
      by_length[_bucket(self._prompt_buckets, length)].append((slot, entry))
    for length, found in sorted(by_length.items()):
      for part in self._packs(found):
        yield part, length

  def _packs(self, items: list) -> Iterator[list]:
    """Yields items in parts of the sizes that programs are compiled for."""
    while items:
      size = _bucket(self._read_buckets, len(items[: self._read_buckets[-1]]))
      if size > 2 * len(items) and size > self._read_buckets[0]:
        # More padding than prompts: a full part of the size below first.
        size = max(s for s in self._read_buckets if s < size)
      yield items[:size]
      items = items[size:]

  def _read_prompts(self, part: list[tuple[int, _Entry]], length: int) -> None:
    rows = _bucket(self._read_buckets, len(part))
    tokens = np.zeros((rows, length), np.int32)
    slots = np.full(rows, self._rows, np.int32)
    for n, (slot, entry) in enumerate(part):
      ids = entry.request.prompt_ids
      tokens[n, : len(ids)], slots[n] = ids, slot
      self.stats.prefill_tokens += len(ids)
    self.stats.padded_tokens += tokens.size
    prompts = self._read(self._params, self._place(tokens))
    hosts.settle(prompts)
    self._cache = self._insert(self._cache, prompts, self._place(slots))

  def _dispatch(
    self,
    entries: list[tuple[int, _Entry]],
    rows: int,
    truncated: bool | None,
  ) -> _Step:
    """Starts a step of these entries; see `_pick` for the last argument."""
    integers = np.zeros((rows, len(_INTEGERS) + _NUMBERS), np.int32)
    floats = np.ones((rows, len(_FLOATS)), np.float32)
    for slot, entry in entries:
      request, sampling = entry.request, entry.request.sampling
      integers[slot, : len(_INTEGERS)] = (
        1,
        entry.fresh,
        request.prompt_ids[-1],
        len(request.prompt_ids) - 1,
        entry.limit,
        sampling.top_k,
      )
      integers[slot, len(_INTEGERS) :] = np.array(
        request.stream, np.uint32
      ).view(np.int32)
      floats[slot] = sampling.temperature, sampling.top_p, sampling.min_p
      entry.fresh = False
    self._cache, self._state, outputs = self._decode(
      self._params,
      self._cache,
      self._state,
      self._place(integers),
      self._place(floats),
      truncated,
    )
    hosts.settle(outputs)
    self.stats.slot_steps += self._chunk * rows
    return _Step(outputs, entries, time.monotonic())

  def _collect(self, step: _Step) -> list[tuple[int, Completion]]:
    """Waits for a step; returns who is finished and frees their slots."""
    ids_KB, log_probs_KB, sampled_KB, numbers_B, active_B = jax.device_get(
      step.outputs
    )
    end = time.monotonic()
    finished = []
    for slot, entry in step.entries:
      if self._slots[slot] is not entry:
        continue  # It was finished when this step began.
      number = numbers_B[slot]
      self.stats.decode_tokens += int(number)
      if self.trace:
        self.stats.spans.append((slot, 'decode', step.begin, end))
      entry.found.append(
        tuple(x[:number, slot] for x in (ids_KB, log_probs_KB, sampled_KB))
      )
      completion = self._finish(entry, int(number), bool(active_B[slot]))
      if completion is not None:
        self._slots[slot] = None
        if entry.ticket is not None:
          finished.append((entry.ticket, completion))
    return finished

  def _finish(
    self, entry: _Entry, number: int, active: bool
  ) -> Completion | None:
    """Returns the completion if it is over; `number` tokens of it are new."""
    keep = None
    if self._stop is not None:
      ids = np.concatenate([part[0] for part in entry.found])
      keep = self._stop(ids, number)
    if active and keep is None:
      return None
    ids, log_probs, sampled = (
      np.concatenate(parts)[:keep] for parts in zip(*entry.found, strict=True)
    )
    stopped = keep is not None or int(ids[-1]) in self._stop_ids
    return Completion(ids, log_probs, sampled, 'stop' if stopped else 'length')

  # The cache.

  def _place(self, array: np.ndarray) -> jax.Array:
    return mesh_lib.place_rows(self._mesh, array)

  def _allocate(self, rows: int, length: int) -> None:
    self._rows, self._length = rows, length
    self._cache = None  # Two at a time may be more than there is room for.
    self._cache = self._new(rows, length)
    self._state = self._place(np.zeros((rows, len(_STATE)), np.int32))

  def _fit(self, rows: int, length: int) -> None:
    """Makes the cache of at least a size; smaller after a while only."""
    if self._cache is None:
      self._allocate(rows, length)
      return
    if (rows, length) == (self._rows, self._length):
      self._spare_steps = 0
      return
    if rows <= self._rows and length <= self._length:
      self._spare_steps += 1
      if self._spare_steps < _PATIENCE:
        return
    else:
      rows, length = max(rows, self._rows), max(length, self._length)
    self._spare_steps = 0
    # One after the other: fewer programs than for every pair of sizes.
    for size in ((rows, self._length), (rows, length)):
      if size != (self._rows, self._length):
        self._cache, self._state = self._resize(self._cache, self._state, *size)
        self._rows, self._length = size
    for slot, prompt in enumerate(self._prompts):
      lost = slot >= rows or (prompt and len(prompt) // 4 > length)
      if lost and self._slots[slot] is None:
        self._hold(slot, None)


def parameter_bytes(config: qwen.QwenConfig, weights: str) -> int:
  """Returns the memory of a model as it is sampled from."""
  prepare = functools.partial(_prepare, config, True, weights == 'int8')
  params = jax.eval_shape(
    lambda: prepare(qwen.init(config, jax.random.key(0)), {})
  )
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))


def _bucket(sizes: Sequence[int], needed: int) -> int:
  return next(size for size in sizes if size >= needed)


# The device's part. What a step is told of a slot, the stream's numbers apart;
# what it keeps for the next.
_INTEGERS = ('taken', 'fresh', 'token', 'position', 'limit', 'top_k')
_FLOATS = ('temperature', 'top_p', 'min_p')
_STATE = ('active', 'token', 'position', 'count')


def _prepare(
  config: qwen.QwenConfig, merge: bool, int8: bool, params: dict, base: dict
) -> dict:
  """Returns parameters as they are sampled from."""
  params = lora.join(base, params)
  if config.adapters and merge:
    params = lora.merge(config.adapters, params)
    config = dataclasses.replace(config, adapters=None)
  if int8:
    params = qwen.quantize(config, params)
  else:
    params = jax.tree.map(lambda x: x.astype(config.dtype), params)
  return qwen.split_layers(config, params)


def _resize(
  cache: qwen.Cache, state_BX: jax.Array, rows: int, length: int
) -> tuple[qwen.Cache, jax.Array]:
  room = max(0, rows - state_BX.shape[0])
  state_BX = jnp.pad(state_BX[:rows], ((0, room), (0, 0)))
  return qwen.resize_cache(cache, rows, length), state_BX


def _row_keys(seed: np.uint32, streams: jax.Array) -> jax.Array:
  """Returns a key for each row: (seed, stream) folded in one after another."""

  def key(stream: jax.Array) -> jax.Array:
    folded = jax.random.key(seed)
    for number in stream:
      folded = jax.random.fold_in(folded, number)
    return folded

  return jax.vmap(key)(streams)


def _as_integer(x: jax.Array) -> jax.Array:
  """Returns int32 in the same order as these float32."""
  bits = jax.lax.bitcast_convert_type(x, jnp.int32)
  return jnp.where(bits < 0, bits ^ np.int32(0x7FFFFFFF), bits)


def _least(holds: Callable[[jax.Array], jax.Array], rows: int) -> jax.Array:
  """Returns the least integer of each row from which on something holds.

  By halving: 32 looks at a distribution are cheaper than sorting it.

  Args:
    holds: takes integers [B, 1], returns whether it holds [B]; it does for
      the largest, and for all that are larger than one for which it does.
    rows: B.
  """

  def halve(_, ends: tuple[jax.Array, jax.Array]):
    low_B, high_B = ends
    # The floor of the mean, which a sum could overflow.
    middle_B = (low_B & high_B) + ((low_B ^ high_B) >> 1)
    held_B = holds(middle_B[:, None])
    return jnp.where(held_B, low_B, middle_B + 1), jnp.where(
      held_B, middle_B, high_B
    )

  limits = jnp.iinfo(jnp.int32)
  ends = jnp.full(rows, limits.min), jnp.full(rows, limits.max)
  return jax.lax.fori_loop(0, 32, halve, ends)[1]


def _truncate(
  scaled_BV: jax.Array,
  usable_BV: jax.Array,
  top_k_B: jax.Array,
  top_p_B: jax.Array,
  min_p_B: jax.Array,
) -> jax.Array:
  """Returns which usable logits are in top-k, its top-p mass, and min-p."""
  b, v = scaled_BV.shape
  scaled_BV = jnp.where(usable_BV, scaled_BV, _NEVER)
  order_BV = _as_integer(scaled_BV)
  wanted_B = jnp.where(top_k_B > 0, jnp.minimum(top_k_B, v), v)
  # Fewer than k are larger than the k-th.
  kth_B = _least(lambda at_B1: jnp.sum(order_BV > at_B1, axis=-1) < wanted_B, b)
  kept_BV = usable_BV & (order_BV >= kth_B[:, None])
  mass_BV = jax.nn.softmax(jnp.where(kept_BV, scaled_BV, _NEVER), axis=-1)
  # The mass ahead of a token decides, so the likeliest is always kept.
  nucleus_B = _least(
    lambda at_B1: (
      (jnp.sum(jnp.where(order_BV > at_B1, mass_BV, 0.0), axis=-1) < top_p_B)
      | (top_p_B >= 1)
    ),
    b,
  )
  least_B1 = jnp.max(scaled_BV, axis=-1, keepdims=True) + jnp.log(
    jnp.maximum(min_p_B, 1e-30)[:, None]
  )
  return kept_BV & (order_BV >= nucleus_B[:, None]) & (scaled_BV >= least_B1)


def _draw(weights_BN: jax.Array, noise_BN: jax.Array) -> jax.Array:
  """Returns a place in proportion to its weight, by Gumbel noise.

  Weights that change in their last bits hardly ever change the place; an
  inverted running sum, cheaper yet, would let each move all that come after.
  """
  return _likeliest(jnp.log(weights_BN) + noise_BN, weights_BN > 0)


def _pick(
  keys_B: jax.Array,
  counts_B: jax.Array,
  floats_BX: jax.Array,
  top_k_B: jax.Array,
  logits_BV: jax.Array,
  *,
  vocab_size: int,
  truncated: bool | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Samples the next token of each row.

  First one of the blocks that the vocabulary is cut into, then one of its
  tokens: a random number for each of these, not for the whole vocabulary.

  Args:
    keys_B: key of each row.
    counts_B: number of the token in its completion.
    floats_BX: temperature, top_p and min_p of each row.
    top_k_B: as in `Sampling`.
    logits_BV: float32.
    vocab_size: ids from here on are not sampled.
    truncated: whether a row may be by top-k, top-p or min-p; None: to be found
      out, as well as whether one is greedy.

  Returns:
    ids [B], their log-probs [B] before truncation, and after it [B].
  """
  b, v = logits_BV.shape
  temperature_B, top_p_B, min_p_B = floats_BX.T
  greedy_B = temperature_B == 0
  scaled_BV = logits_BV * (1 / jnp.where(greedy_B, 1.0, temperature_B))[:, None]
  usable_BV = jnp.broadcast_to(jnp.arange(v) < vocab_size, (b, v))
  top_B1 = jnp.max(
    jnp.where(usable_BV, scaled_BV, _NEVER), axis=-1, keepdims=True
  )
  weights_BV = jnp.where(usable_BV, jnp.exp(scaled_BV - top_B1), 0.0)
  total_B = top_B1[:, 0] + jnp.log(jnp.sum(weights_BV, axis=-1))
  if vocab_size < v:
    # The learner's distribution is one of all rows of the embedding.
    rest_B = jax.nn.logsumexp(scaled_BV[:, vocab_size:], axis=-1)
    total_B = jnp.logaddexp(total_B, rest_B)
  kept_BV = _choose(
    truncated,
    jnp.any((top_k_B > 0) | (top_p_B < 1) | (min_p_B > 0)),
    lambda: _truncate(scaled_BV, usable_BV, top_k_B, top_p_B, min_p_B),
    lambda: usable_BV,
  )
  weights_BV = jnp.where(kept_BV, weights_BV, 0.0)
  size = min(_BLOCK, v)
  weights_BNI = jnp.pad(weights_BV, ((0, 0), (0, -v % size))).reshape(
    b, -1, size
  )
  sums_BN = jnp.sum(weights_BNI, axis=-1)
  left_B = top_B1[:, 0] + jnp.log(jnp.sum(sums_BN, axis=-1))

  blocks = sums_BN.shape[1]

  def noise(key: jax.Array, count: jax.Array) -> jax.Array:
    return jax.random.gumbel(jax.random.fold_in(key, count), (blocks + size,))

  noise_BX = jax.vmap(noise)(keys_B, counts_B)
  block_B = _draw(sums_BN, noise_BX[:, :blocks])
  weights_BI = jnp.take_along_axis(weights_BNI, block_B[:, None, None], axis=1)[
    :, 0
  ]
  ids_B = block_B * size + _draw(weights_BI, noise_BX[:, blocks:])
  ids_B = _choose(
    None if truncated is None else True,
    jnp.any(greedy_B),
    lambda: jnp.where(greedy_B, _likeliest(scaled_BV, kept_BV), ids_B),
    lambda: ids_B,
  )
  chosen_B = jnp.take_along_axis(scaled_BV, ids_B[:, None], axis=-1)[:, 0]
  return ids_B, chosen_B - total_B, chosen_B - left_B


def _choose(
  known: bool | None,
  found: jax.Array,
  one: Callable[[], jax.Array],
  other: Callable[[], jax.Array],
) -> jax.Array:
  """Returns what one of two functions makes: of what is known, or found."""
  if known is None:
    return jax.lax.cond(found, one, other)
  return one() if known else other()


def _likeliest(scaled_BV: jax.Array, kept_BV: jax.Array) -> jax.Array:
  """Returns the first of the largest that are kept.

  As argmax would, at five times the cost on a CPU; the minimum keeps rows of
  NaN within bounds.
  """
  v = scaled_BV.shape[-1]
  scaled_BV = jnp.where(kept_BV, scaled_BV, _NEVER)
  largest_B1 = jnp.max(scaled_BV, axis=-1, keepdims=True)
  places_BV = jnp.where(scaled_BV == largest_B1, jnp.arange(v), v - 1)
  return jnp.min(places_BV, axis=-1).astype(jnp.int32)


def _decode(
  config: qwen.QwenConfig,
  seed: np.uint32,
  stop_ids: tuple[int, ...],
  vocab_size: int,
  chunk: int,
  params: dict,
  cache: qwen.Cache,
  state_BX: jax.Array,
  integers_BX: jax.Array,
  floats_BX: jax.Array,
  truncated: bool | None,
) -> tuple[qwen.Cache, jax.Array, tuple[jax.Array, ...]]:
  """Decodes up to `chunk` tokens of every slot that is active.

  Until none is, if it is not known whether tokens are `truncated`; see `_pick`.

  Returns:
    the cache; the state; ids, log-probs and sampled log-probs [K, B], how
    many of them are a slot's [B], and whether it goes on [B].
  """
  taken_B, fresh_B, token_B, position_B, limit_B, top_k_B = integers_BX[
    :, : len(_INTEGERS)
  ].T
  streams = integers_BX[:, len(_INTEGERS) :].astype(jnp.uint32)
  keys_B = _row_keys(seed, streams)
  is_fresh_B = fresh_B > 0
  active_B, last_B, at_B, count_B = state_BX.T
  start = (
    (taken_B > 0) & ((active_B > 0) | is_fresh_B),
    jnp.where(is_fresh_B, token_B, last_B),
    jnp.where(is_fresh_B, position_B, at_B),
    jnp.where(is_fresh_B, 0, count_B),
  )
  b = state_BX.shape[0]
  numbers = jnp.zeros((chunk, b), jnp.float32)

  def go_on(loop: tuple) -> jax.Array:
    return (loop[0] < chunk) & jnp.any(loop[2][0])

  def advance(loop: tuple) -> tuple:
    c, cache, (active_B, last_B, at_B, count_B), written = loop
    logits_BV, cache = qwen.decode(config, params, cache, last_B, at_B)
    ids_B, *log_probs = _pick(
      keys_B,
      count_B,
      floats_BX,
      top_k_B,
      logits_BV,
      vocab_size=vocab_size,
      truncated=truncated,
    )
    # A slot that is not active keeps what it has.
    written = tuple(
      whole_KB.at[c].set(jnp.where(active_B, part_B, 0))
      for whole_KB, part_B in zip(written, (ids_B, *log_probs), strict=True)
    )
    last_B = jnp.where(active_B, ids_B, last_B)
    at_B, count_B = at_B + active_B, count_B + active_B
    is_stop_B = (ids_B[:, None] == jnp.asarray(stop_ids, jnp.int32)).any(axis=1)
    active_B = active_B & ~is_stop_B & (count_B < limit_B)
    return c + 1, cache, (active_B, last_B, at_B, count_B), written

  begin_B = start[3]
  loop = (
    jnp.int32(0),
    cache,
    start,
    (jnp.zeros((chunk, b), jnp.int32), numbers, numbers),
  )
  if truncated is None:
    loop = jax.lax.while_loop(go_on, advance, loop)
  else:
    loop = jax.lax.fori_loop(0, chunk, lambda _, loop: advance(loop), loop)
  _, cache, end, written = loop
  state_BX = jnp.stack([x.astype(jnp.int32) for x in end], axis=1)
  return cache, state_BX, (*written, end[3] - begin_B, end[0])
