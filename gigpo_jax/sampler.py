"""Continuous batching: prompt ids in, completion ids and log-probs out.

A slot is a row of the key/value cache. Requests wait in a queue for a free
slot. A step prefills the prompts of newly admitted requests, decodes a few
tokens of all slots and returns finished completions, so short completions do
not wait for long ones. The device runs a step while the host processes the
results of the previous step. The sampler handles token ids only, no text.

The random key of a completion's c-th token depends only on the sampler's seed,
the request's stream and c. Other requests, their order, the slot and the batch
size therefore never change the sampled tokens.

Shapes: **B** slots, **R** rows of a prefill, **P** prompt tokens, **K** tokens
decoded in a step, **V** vocabulary, **N** blocks of the vocabulary, **I**
tokens of a block.
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

from gigpo_jax import mesh as mesh_lib
from gigpo_jax.models import kv_cache, lora, parameters, quantization, qwen
from gigpo_jax.runtime import distributed

# Logit of a token that is never sampled.
_MASKED = -1e30
# Integers of a stream.
_STREAM_SIZE = 5
# Tokens of a block of the vocabulary.
_BLOCK_SIZE = 128
# Prompts that a copy of the model prefills at once; the alternative is one. 8
# fill an accelerator. On a CPU, activations of more than 4 exceed its caches.
_PREFILL_ROWS = 8
_PREFILL_ROWS_ON_CPU = 4
# Platforms on which a conditional in a program makes the host wait for the
# program. There the host selects a program without conditionals.
_HOST_SELECTS = ('gpu',)
# Consecutive steps that a smaller cache would suffice for before it shrinks.
_SHRINK_AFTER = 4


WEIGHTS = ('model', 'int8', 'adapters')


@dataclasses.dataclass(frozen=True)
class Sampling:
  """Options of sampling.

  Attributes:
    temperature: divides the logits; 0 is greedy.
    top_k: number of most likely tokens to sample from; 0: all tokens.
    top_p: minimum probability mass of the most likely tokens to sample from; 1:
      all tokens. It applies to the distribution after top_k.
    min_p: minimum probability of a token relative to the most likely token.
  """

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0

  @property
  def truncates(self) -> bool:
    """Returns whether top_k, top_p or min_p exclude tokens."""
    return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclasses.dataclass(frozen=True)
class Request:
  """A prompt to complete.

  Attributes:
    prompt_ids: int32 [P], at least one token.
    stream: integers that identify the random stream: (domain, iteration, task,
      member, step).
    sampling: options of sampling.
    max_tokens: maximum length of the completion; None: the sampler's maximum.
  """

  prompt_ids: np.ndarray
  stream: tuple[int, int, int, int, int]
  sampling: Sampling = Sampling()
  max_tokens: int | None = None


@dataclasses.dataclass(frozen=True)
class Completion:
  """A sampled completion.

  Attributes:
    ids: int32 [C]; includes the stop token, if any, as the last.
    log_probs: float32 [C]; log-probability of each token under the full
      distribution at the sampling temperature, before top-k, top-p and min-p.
      The loss uses these. Greedy sampling reports them at temperature 1.
    sampled_log_probs: float32 [C]; log-probability under the truncated
      distribution that was sampled, after top-k, top-p and min-p.
    finish_reason: 'stop', or 'length' at the maximum number of tokens.
  """

  ids: np.ndarray
  log_probs: np.ndarray
  sampled_log_probs: np.ndarray
  finish_reason: str


@dataclasses.dataclass
class Stats:
  """Counters of a sampler since the last `take_stats`.

  Attributes:
    prefill_tokens: prompt tokens prefilled, without padding.
    padded_tokens: prompt tokens prefilled, with padding.
    shared_tokens: prompt tokens that needed no prefill because a slot already
      held their keys and values.
    decode_tokens: tokens sampled.
    slot_steps: decoding steps of one token, summed over all slots, including
      empty slots.
    idle_secs: upper bound of the time that the device was idle while requests
      were in progress.
    spans: (slot, 'prefill' or 'decode', start, end) for a timeline, recorded if
      `load` was called with `trace`; host time in monotonic seconds.
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
  """A request that waits or has a slot.

  Attributes:
    request_id: the caller's id of it; None for a request of another process.
    request: the request.
    limit: maximum number of tokens.
    is_new: whether no step has decoded it yet.
    outputs: ids, log-probs and sampled log-probs of each step so far.
  """

  request_id: int | None
  request: Request
  limit: int
  is_new: bool = True
  outputs: list[tuple[np.ndarray, ...]] = dataclasses.field(
    default_factory=list
  )


@dataclasses.dataclass
class _Step:
  """A dispatched step.

  Attributes:
    outputs: arrays on the device, see `_decode`.
    entries: (slot, entry) of the requests that it decodes.
    start: time of its dispatch, in monotonic seconds.
  """

  outputs: tuple
  entries: list[tuple[int, _Entry]]
  start: float


class Sampler:
  """Samples completions from one model on the devices of a mesh.

  The devices form groups of `tensor` devices. Each group has a copy of the
  model and a part of the slots. If every group is within one host, each process
  samples its own requests independently. Otherwise all processes share one
  sampler: every process must make the same calls of `load` and `warm_up`, keep
  calling `step`, and call `finish`. Each process submits its own requests and
  gets their completions only. A shared sampler does not overlap the work of
  host and device: processes exchange requests between steps, which waits for
  the device.

  Args:
    config: shape of the model.
    mesh: the devices of the parameters.
    seed: seed of all random streams.
    prompt_buckets: ascending lengths that prompts are padded to.
    batch_buckets: ascending numbers of slots that a step is compiled for; the
      last is the total number of slots.
    max_completion_tokens: maximum length of a completion.
    stop_ids: tokens that end a completion.
    vocab_size: number of tokens; ids from here on are unused rows of the
      embedding and are never sampled.
    decode_tokens: K, tokens decoded in a step. A larger value has less overhead
      per token but leaves finished slots idle for longer.
    weights: one of WEIGHTS. 'model': the model's compute type, with adapters
      merged. 'int8': int8 with a scale per output channel, half the memory of
      bfloat16. 'adapters': the compute type with separate adapters, which is
      slower, but exact where merging into a bfloat16 matrix would round small
      adapters away.
    tensor: devices that a copy of the model is sharded over; 0: the size of the
      mesh's axis `tensor`.
    find_stop: for stop strings; a function of (ids of a completion so far,
      number of new ids) that returns the number of tokens to keep if the
      completion ends, else None.

  Attributes:
    stats: counters since the last `take_stats`.
    is_shared: whether `step` waits for other processes.
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
    find_stop: Callable[[np.ndarray, int], int | None] | None = None,
  ):
    for name, sizes in (
      ('prompt_buckets', prompt_buckets),
      ('batch_buckets', batch_buckets),
    ):
      if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
        raise ValueError(
          f'rollout.{name}={tuple(sizes)}: must be ascending and positive'
        )
    if weights not in WEIGHTS:
      raise ValueError(
        f'rollout.weights={weights}: must be one of {", ".join(WEIGHTS)}'
      )
    if not 0 < vocab_size <= config.vocab_size:
      raise ValueError(
        f'vocab_size={vocab_size}: the model embeds {config.vocab_size} '
        f'tokens; must be between 1 and {config.vocab_size}'
      )
    # Parameters are prepared on the full mesh; `mesh` is the part of it that
    # this sampler uses.
    full_mesh = mesh_lib.sampling_mesh(mesh, tensor or mesh.shape['tensor'])
    multi_process = jax.process_count() > 1
    self.is_shared = multi_process and not mesh_lib.on_one_host(full_mesh)
    self._local = multi_process and not self.is_shared
    mesh = mesh_lib.local_mesh(full_mesh) if self._local else full_mesh
    shards = mesh_lib.batch_shards(mesh)
    if any(size % shards for size in batch_buckets):
      raise ValueError(
        f'rollout.batch_buckets={tuple(batch_buckets)}: {shards} copies of '
        f'the model share the slots; must be multiples of {shards}'
      )
    self._full_mesh, self._mesh = full_mesh, mesh
    self._prompt_buckets = tuple(prompt_buckets)
    self._row_buckets = tuple(batch_buckets)
    platform = mesh.devices.flat[0].platform
    on_cpu = platform == 'cpu'
    prefill_rows = shards * (_PREFILL_ROWS_ON_CPU if on_cpu else _PREFILL_ROWS)
    # `truncated` of each program of a step, see `_sample_tokens`.
    self._truncations = (False, True) if platform in _HOST_SELECTS else (None,)
    self._prefill_buckets = tuple(
      sorted({shards, min(prefill_rows, batch_buckets[-1])})
    )
    self._length_buckets = tuple(
      size + max_completion_tokens for size in prompt_buckets
    )
    self._max_tokens = max_completion_tokens
    self._stop_ids, self._find_stop = frozenset(stop_ids), find_stop
    self._decode_chunk = min(decode_tokens, max_completion_tokens)
    rows = mesh_lib.batch_sharding(mesh)
    int8, merge, trained = weights == 'int8', weights != 'adapters', config
    if merge:
      config = dataclasses.replace(config, adapters=None)
    cache_formats = mesh_lib.cache_formats(
      mesh, jax.eval_shape(lambda: kv_cache.new(config, 1, 1))
    )
    axes = (quantization.quantized_axes if int8 else parameters.logical_axes)(
      config
    )
    self._params_shardings = mesh_lib.shardings(
      full_mesh, parameters.unstack_axes(config, axes)
    )
    self._prepare_params = jax.jit(
      functools.partial(_prepare, trained, merge, int8),
      out_shardings=self._params_shardings,
    )
    self._new_cache = jax.jit(
      functools.partial(kv_cache.new, config),
      static_argnums=(0, 1),
      out_shardings=cache_formats,
    )
    self._resize = jax.jit(
      _resize,
      static_argnums=(2, 3),
      out_shardings=(cache_formats, rows),
    )
    self._prefill = jax.jit(functools.partial(qwen.prefill, config))
    self._insert = jax.jit(
      kv_cache.insert, donate_argnums=(0,), out_shardings=cache_formats
    )
    self._copy = jax.jit(
      kv_cache.copy_rows, donate_argnums=(0,), out_shardings=cache_formats
    )
    self._decode = jax.jit(
      functools.partial(
        _decode,
        config,
        np.uint32(seed),
        tuple(stop_ids),
        vocab_size,
        self._decode_chunk,
      ),
      static_argnums=5,
      donate_argnums=(1, 2),
      out_shardings=(cache_formats, rows, mesh_lib.replicated_sharding(mesh)),
    )
    self._cache_formats = cache_formats
    self._num_submitted = 0
    self.stats = Stats()
    self.release()

  def _clear(self) -> None:
    self._submitted: list[_Entry] = []
    self._waiting: collections.deque[_Entry] = collections.deque()
    self._slots: list[_Entry | None] = [None] * self._row_buckets[-1]
    # The prompt whose keys and values each slot holds, and the inverse map.
    self._prompts: list[bytes | None] = [None] * self._row_buckets[-1]
    self._slot_of_prompt: dict[bytes, int] = {}
    self._in_flight: _Step | None = None
    self._oversized_steps = 0
    self._last_return = time.monotonic()

  @property
  def compilations(self) -> int:
    """Returns the number of programs compiled so far."""
    programs = (
      self._prepare_params,
      self._new_cache,
      self._resize,
      self._prefill,
    ) + (
      self._insert,
      self._copy,
      self._decode,
    )
    return sum(program._cache_size() for program in programs)

  @property
  def busy(self) -> bool:
    """Returns whether any request is not finished."""
    pending = self._submitted or self._waiting or self._in_flight
    return bool(pending or any(self._slots))

  def take_stats(self) -> Stats:
    """Returns the counters since the last call, and resets them."""
    stats, self.stats = self.stats, Stats()
    return stats

  def load(
    self, params: dict, base: dict | None = None, *, trace: bool = False
  ) -> None:
    """Sets the parameters to sample from; drops unfinished requests.

    Casts and reshards the parameters, unless they are already loaded.

    Args:
      params: the learner's parameters.
      base: frozen parameters of a network with adapters; None: no adapters.
      trace: whether to record `Stats.spans` until the next `load`.
    """
    self._clear()
    self._trace = trace
    if params is not self._source or base is not self._source_base:
      with jax.set_mesh(self._full_mesh):
        prepared = distributed.block_on_cpu(
          self._prepare_params(params, base or {})
        )
      if self._local:
        prepared = mesh_lib.localize(prepared, self._mesh)
      self._source, self._source_base = params, base
      self._params = prepared

  def release(self) -> None:
    """Frees the memory of parameters and cache, until the next `load`."""
    self._clear()
    self._source: dict | None = None
    self._source_base: dict | None = None
    self._params: dict | None = None
    self._cache: kv_cache.Cache | None = None
    self._state: jax.Array | None = None

  @property
  def num_programs(self) -> int:
    """Returns the number of programs that `warm_up` compiles."""
    return 1 + len(self._warm_up_calls)

  def warm_up(
    self,
    params: dict,
    base: dict | None = None,
    *,
    on_compiled: Callable[[], None] = lambda: None,
  ) -> None:
    """Compiles all programs, so that nothing compiles later.

    Frees all memory that it allocates.

    Args:
      params: parameters of the policy.
      base: frozen parameters of a network with adapters; None: no adapters.
      on_compiled: called after each of `num_programs` programs.
    """
    self.load(params, base)
    on_compiled()
    with jax.set_mesh(self._mesh):
      prompts: dict[tuple[int, int], kv_cache.Cache] = {}
      for call, *sizes in self._warm_up_calls:
        call(self, prompts, *sizes)
        on_compiled()
    self.release()

  @functools.cached_property
  def _warm_up_calls(self) -> list[tuple]:
    """Returns (method, *sizes) that compile one program each, in this order.

    Each method also takes the prefilled prompts, by (rows, length).
    """
    sizes = list(itertools.product(self._row_buckets, self._length_buckets))
    prefills = list(
      itertools.product(self._prefill_buckets, self._prompt_buckets)
    )
    calls: list[tuple] = [(Sampler._warm_up_prefill, r, p) for r, p in prefills]
    for rows, length in sizes:
      calls.append((Sampler._warm_up_allocate, rows, length))
      for other in sizes:
        if (rows == other[0]) != (length == other[1]):
          calls.append((Sampler._warm_up_resize, *other))
      for r in self._prefill_buckets:
        calls.append((Sampler._warm_up_copy, r, rows))
      for r, p in prefills:
        if p <= length:
          calls.append((Sampler._warm_up_insert, r, p, rows))
      for truncated in self._truncations:
        calls.append((Sampler._warm_up_decode, rows, truncated))
    return calls

  def _warm_up_prefill(self, prompts: dict, r: int, p: int) -> None:
    ids = self._place(np.zeros((r, p), np.int32))
    prompts[r, p] = self._prefill(self._params, ids)

  def _warm_up_allocate(self, _: dict, rows: int, length: int) -> None:
    self._allocate(rows, length)

  def _warm_up_resize(self, _: dict, rows: int, length: int) -> None:
    self._resize(self._cache, self._state, rows, length)

  def _warm_up_copy(self, _: dict, r: int, rows: int) -> None:
    # Slot `rows` does not exist, so nothing is copied.
    slots = self._place(np.full(r, rows, np.int32))
    self._cache = self._copy(self._cache, slots, slots)

  def _warm_up_insert(self, prompts: dict, r: int, p: int, rows: int) -> None:
    slots = self._place(np.full(r, rows, np.int32))
    self._cache = self._insert(self._cache, prompts[r, p], slots)

  def _warm_up_decode(self, _: dict, rows: int, truncated: bool | None) -> None:
    jax.block_until_ready(self._dispatch([], rows, truncated).outputs)

  def lower(self, params: dict, base: dict) -> dict[str, jax.stages.Lowered]:
    """Lowers the largest programs, by name, without compiling or running them.

    Args:
      params: shapes and shardings of the parameters of `load`.
      base: shapes and shardings of the frozen parameters.
    """
    rows, length = self._row_buckets[-1], self._length_buckets[-1]
    with_shardings = mesh_lib.with_shardings
    row_sharding = mesh_lib.batch_sharding(self._mesh)

    def row_array(*shape: int, dtype: str = 'int32') -> jax.ShapeDtypeStruct:
      return jax.ShapeDtypeStruct(shape, dtype, sharding=row_sharding)

    with jax.set_mesh(self._full_mesh):
      prepare = self._prepare_params.lower(params, base)
    with jax.set_mesh(self._mesh):
      prepared = with_shardings(prepare.out_info, self._params_shardings)
      cache = jax.eval_shape(self._new_cache, rows, length)
      return {
        'prepare': prepare,
        'prefill': self._prefill.lower(
          prepared,
          row_array(self._prefill_buckets[-1], self._prompt_buckets[-1]),
        ),
        'decode': self._decode.lower(
          prepared,
          with_shardings(cache, self._cache_formats),
          row_array(rows, len(_STATE)),
          row_array(rows, len(_INTEGERS) + _STREAM_SIZE),
          row_array(rows, len(_FLOATS), dtype='float32'),
          self._truncations[0],
        ),
      }

  def generate(
    self, params: dict, requests: Sequence[Request], base: dict | None = None
  ) -> list[Completion]:
    """Returns a completion for each request, in their order.

    Args:
      params: parameters of the policy; not donated.
      requests: any number of requests, possibly none.
      base: frozen parameters of a network with adapters; None: no adapters.

    Raises:
      ValueError: if a request is invalid; see `submit`.
    """
    self.load(params, base)
    request_ids = [self.submit(request) for request in requests]
    completions: dict[int, Completion] = {}
    while self.busy:
      completions.update(self.step())
    self.finish()
    return [completions[request_id] for request_id in request_ids]

  def submit(self, request: Request) -> int:
    """Queues a request; returns the id under which `step` returns it.

    Args:
      request: the request.

    Raises:
      ValueError: if the prompt is empty or longer than the last bucket, or
        `max_tokens` is out of range.
    """
    length = len(request.prompt_ids)
    if length < 1:
      raise ValueError('a prompt has 0 tokens; must have at least 1')
    if length > self._prompt_buckets[-1]:
      raise ValueError(
        f'a prompt has {length} tokens; at most {self._prompt_buckets[-1]} '
        'are accepted (the last of rollout.prompt_buckets)'
      )
    limit = self._max_tokens
    if request.max_tokens is not None:
      limit = request.max_tokens
    if not 1 <= limit <= self._max_tokens:
      raise ValueError(
        f'max_tokens={limit}: must be between 1 and {self._max_tokens} '
        '(rollout.max_completion_tokens)'
      )
    self._num_submitted += 1
    self._submitted.append(_Entry(self._num_submitted, request, limit))
    return self._num_submitted

  def step(self) -> list[tuple[int, Completion]]:
    """Dispatches a step; returns (id, completion) of finished requests.

    The returned completions were finished by the previous step. The new step is
    in flight when this returns.
    """
    self._record_idle_time()
    self._enqueue(done=False)
    return self._advance()

  def finish(self) -> None:
    """Continues steps of a shared sampler until all processes call this."""
    while self.is_shared and not self._enqueue(done=True):
      self._advance()
      self._record_idle_time()

  # Work on the host.

  def _enqueue(self, *, done: bool) -> bool:
    """Queues submitted requests; returns whether all processes are `done`."""
    entries, self._submitted = self._submitted, []
    if not self.is_shared:
      self._waiting += entries
      return done
    gathered = distributed.all_gather_objects((entries, done))
    for process, (theirs, _) in enumerate(gathered):
      for entry in theirs:
        if process != jax.process_index():
          entry.request_id = None
        self._waiting.append(entry)
    return all(done for _, done in gathered)

  def _record_idle_time(self) -> None:
    if self._in_flight and self._in_flight.outputs[-1].is_ready():
      self.stats.idle_secs += time.monotonic() - self._last_return

  def _advance(self) -> list[tuple[int, Completion]]:
    """Dispatches the next step; returns the completions of the previous one."""
    previous = self._in_flight
    with jax.set_mesh(self._mesh):
      entries = self._admit()
      self._in_flight = None
      if entries:
        truncated = any(e.request.sampling.truncates for _, e in entries)
        self._in_flight = self._dispatch(
          entries,
          self._rows,
          truncated if truncated in self._truncations else None,
        )
    finished = self._fetch(previous) if previous else []
    self._last_return = time.monotonic()
    return finished

  def _admit(self) -> list[tuple[int, _Entry]]:
    """Assigns free slots to waiting requests and fills in their prompts.

    Returns:
      (slot, entry) of each slot in use.
    """
    free = [n for n, entry in enumerate(self._slots) if entry is None]
    new: list[tuple[int, _Entry]] = []
    copies: list[tuple[int, int]] = []
    while self._waiting and free:
      entry = self._waiting.popleft()
      prompt = entry.request.prompt_ids.tobytes()
      source = self._slot_of_prompt.get(prompt)
      slot = source if source in free else free[0]
      free.remove(slot)
      self._slots[slot] = entry
      if source is None:
        new.append((slot, entry))
      else:
        self.stats.shared_tokens += len(entry.request.prompt_ids)
        if slot != source:
          copies.append((source, slot))
      self._set_prompt(slot, prompt)
    used = [(n, entry) for n, entry in enumerate(self._slots) if entry]
    if not used:
      return used
    rows = used[-1][0] + 1
    longest = max(len(entry.request.prompt_ids) for _, entry in used)
    length = _bucket(self._prompt_buckets, longest) + self._max_tokens
    self._resize_if_needed(_bucket(self._row_buckets, rows), length)
    start = time.monotonic()
    for batch, size in self._prefill_batches(new):
      self._prefill_prompts(batch, size)
    for batch in self._batches(copies):
      # Padding copies to slots that do not exist.
      pairs = np.full(
        (2, _bucket(self._prefill_buckets, len(batch))), self._rows
      )
      pairs[:, : len(batch)] = np.transpose(batch)
      sources, slots = (self._place(p.astype(np.int32)) for p in pairs)
      self._cache = self._copy(self._cache, sources, slots)
    end = time.monotonic()
    if self._trace:
      self.stats.spans += [(slot, 'prefill', start, end) for slot, _ in new]
    return used

  def _set_prompt(self, slot: int, prompt: bytes | None) -> None:
    """Records the prompt whose keys and values a slot holds."""
    old = self._prompts[slot]
    if old is not None and self._slot_of_prompt.get(old) == slot:
      del self._slot_of_prompt[old]
    self._prompts[slot] = prompt
    if prompt is not None:
      self._slot_of_prompt.setdefault(prompt, slot)

  def _prefill_batches(
    self, entries: list[tuple[int, _Entry]]
  ) -> Iterator[tuple[list[tuple[int, _Entry]], int]]:
    """Yields entries to prefill together, and the bucket of their prompts."""
    by_length = collections.defaultdict(list)
    for slot, entry in entries:
      length = len(entry.request.prompt_ids)
      by_length[_bucket(self._prompt_buckets, length)].append((slot, entry))
    for length, group in sorted(by_length.items()):
      for batch in self._batches(group):
        yield batch, length

  def _batches(self, items: list) -> Iterator[list]:
    """Yields items in batches for which programs are compiled."""
    while items:
      size = _bucket(
        self._prefill_buckets, len(items[: self._prefill_buckets[-1]])
      )
      if size > 2 * len(items) and size > self._prefill_buckets[0]:
        # This batch would be mostly padding; use a smaller size first.
        size = max(s for s in self._prefill_buckets if s < size)
      yield items[:size]
      items = items[size:]

  def _prefill_prompts(
    self, batch: list[tuple[int, _Entry]], length: int
  ) -> None:
    rows = _bucket(self._prefill_buckets, len(batch))
    tokens = np.zeros((rows, length), np.int32)
    slots = np.full(rows, self._rows, np.int32)
    for n, (slot, entry) in enumerate(batch):
      ids = entry.request.prompt_ids
      tokens[n, : len(ids)], slots[n] = ids, slot
      self.stats.prefill_tokens += len(ids)
    self.stats.padded_tokens += tokens.size
    prompts = self._prefill(self._params, self._place(tokens))
    distributed.block_on_cpu(prompts)
    self._cache = self._insert(self._cache, prompts, self._place(slots))

  def _dispatch(
    self,
    entries: list[tuple[int, _Entry]],
    rows: int,
    truncated: bool | None,
  ) -> _Step:
    """Dispatches a step.

    Args:
      entries: (slot, entry) of the requests to decode.
      rows: slots of the cache.
      truncated: see `_sample_tokens`.
    """
    integers = np.zeros((rows, len(_INTEGERS) + _STREAM_SIZE), np.int32)
    floats = np.ones((rows, len(_FLOATS)), np.float32)
    for slot, entry in entries:
      request, sampling = entry.request, entry.request.sampling
      integers[slot, : len(_INTEGERS)] = (
        1,
        entry.is_new,
        request.prompt_ids[-1],
        len(request.prompt_ids) - 1,
        entry.limit,
        sampling.top_k,
      )
      integers[slot, len(_INTEGERS) :] = np.array(
        request.stream, np.uint32
      ).view(np.int32)
      floats[slot] = sampling.temperature, sampling.top_p, sampling.min_p
      entry.is_new = False
    self._cache, self._state, outputs = self._decode(
      self._params,
      self._cache,
      self._state,
      self._place(integers),
      self._place(floats),
      truncated,
    )
    distributed.block_on_cpu(outputs)
    self.stats.slot_steps += self._decode_chunk * rows
    return _Step(outputs, entries, time.monotonic())

  def _fetch(self, step: _Step) -> list[tuple[int, Completion]]:
    """Waits for a step; returns finished requests and frees their slots."""
    ids_KB, log_probs_KB, sampled_KB, counts_B, active_B = jax.device_get(
      step.outputs
    )
    end = time.monotonic()
    finished = []
    for slot, entry in step.entries:
      if self._slots[slot] is not entry:
        continue  # The previous step had already finished it.
      count = counts_B[slot]
      self.stats.decode_tokens += int(count)
      if self._trace:
        self.stats.spans.append((slot, 'decode', step.start, end))
      entry.outputs.append(
        tuple(x[:count, slot] for x in (ids_KB, log_probs_KB, sampled_KB))
      )
      completion = self._completion(entry, int(count), bool(active_B[slot]))
      if completion is not None:
        self._slots[slot] = None
        if entry.request_id is not None:
          finished.append((entry.request_id, completion))
    return finished

  def _completion(
    self, entry: _Entry, count: int, active: bool
  ) -> Completion | None:
    """Returns the completion of an entry, or None if it is not finished.

    Args:
      entry: the request with its outputs so far.
      count: number of new tokens.
      active: whether it has no stop token and is below its limit.
    """
    keep = None
    if self._find_stop is not None:
      ids = np.concatenate([output[0] for output in entry.outputs])
      keep = self._find_stop(ids, count)
    if active and keep is None:
      return None
    ids, log_probs, sampled = (
      np.concatenate(arrays)[:keep]
      for arrays in zip(*entry.outputs, strict=True)
    )
    stopped = keep is not None or int(ids[-1]) in self._stop_ids
    return Completion(ids, log_probs, sampled, 'stop' if stopped else 'length')

  # The cache.

  def _place(self, array: np.ndarray) -> jax.Array:
    return mesh_lib.place_rows(self._mesh, array)

  def _allocate(self, rows: int, length: int) -> None:
    self._rows, self._length = rows, length
    # Free the old cache first: two caches may not fit into memory.
    self._cache = None
    self._cache = self._new_cache(rows, length)
    self._state = self._place(np.zeros((rows, len(_STATE)), np.int32))

  def _resize_if_needed(self, rows: int, length: int) -> None:
    """Grows the cache to a size, or shrinks it after `_SHRINK_AFTER` steps."""
    if self._cache is None:
      self._allocate(rows, length)
      return
    if (rows, length) == (self._rows, self._length):
      self._oversized_steps = 0
      return
    if rows <= self._rows and length <= self._length:
      self._oversized_steps += 1
      if self._oversized_steps < _SHRINK_AFTER:
        return
    else:
      rows, length = max(rows, self._rows), max(length, self._length)
    self._oversized_steps = 0
    # Resizing one dimension at a time needs fewer programs than all pairs of
    # sizes.
    for size in ((rows, self._length), (rows, length)):
      if size != (self._rows, self._length):
        self._cache, self._state = self._resize(self._cache, self._state, *size)
        self._rows, self._length = size
    for slot, prompt in enumerate(self._prompts):
      # A token of a prompt has 4 bytes.
      is_lost = slot >= rows or (prompt and len(prompt) // 4 > length)
      if is_lost and self._slots[slot] is None:
        self._set_prompt(slot, None)


def parameter_bytes(config: qwen.QwenConfig, weights: str) -> int:
  """Returns the bytes of a model's parameters in the sampler.

  Args:
    config: shape of the model.
    weights: one of WEIGHTS.
  """
  prepare = functools.partial(_prepare, config, True, weights == 'int8')
  params = jax.eval_shape(
    lambda: prepare(parameters.init(config, jax.random.key(0)), {})
  )
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))


def _bucket(sizes: Sequence[int], needed: int) -> int:
  return next(size for size in sizes if size >= needed)


# Work on the device. Inputs of a step for each slot, without the stream, and
# the state that a step passes to the next.
_INTEGERS = ('in_use', 'is_new', 'token', 'position', 'limit', 'top_k')
_FLOATS = ('temperature', 'top_p', 'min_p')
_STATE = ('active', 'token', 'position', 'count')


def _prepare(
  config: qwen.QwenConfig, merge: bool, int8: bool, params: dict, base: dict
) -> dict:
  """Returns parameters in the form that `qwen.prefill` and `decode` take.

  Args:
    config: shape of the model.
    merge: whether to merge adapters into the matrices.
    int8: whether to quantize the matrices.
    params: the learner's parameters.
    base: frozen parameters of a network with adapters, else {}.
  """
  params = lora.combine(base, params)
  if config.adapters and merge:
    params = lora.merge(config.adapters, params)
    config = dataclasses.replace(config, adapters=None)
  if int8:
    params = quantization.quantize(config, params)
  else:
    params = jax.tree.map(lambda x: x.astype(config.dtype), params)
  return parameters.unstack_layers(config, params)


def _resize(
  cache: kv_cache.Cache, state_BX: jax.Array, rows: int, length: int
) -> tuple[kv_cache.Cache, jax.Array]:
  padding = max(0, rows - state_BX.shape[0])
  state_BX = jnp.pad(state_BX[:rows], ((0, padding), (0, 0)))
  return kv_cache.resize(cache, rows, length), state_BX


def _row_keys(seed: np.uint32, streams: jax.Array) -> jax.Array:
  """Returns a key for each row: the seed with its stream folded in."""

  def key(stream: jax.Array) -> jax.Array:
    folded = jax.random.key(seed)
    for integer in stream:
      folded = jax.random.fold_in(folded, integer)
    return folded

  return jax.vmap(key)(streams)


def _as_integer(x: jax.Array) -> jax.Array:
  """Maps float32 to int32 monotonically."""
  bits = jax.lax.bitcast_convert_type(x, jnp.int32)
  return jnp.where(bits < 0, bits ^ np.int32(0x7FFFFFFF), bits)


def _smallest_true(
  holds: Callable[[jax.Array], jax.Array], rows: int
) -> jax.Array:
  """Returns the smallest int32 of each row that satisfies a predicate, [B].

  Uses bisection: 32 evaluations over a distribution are cheaper than a sort.

  Args:
    holds: monotone predicate; takes integers [B, 1] and returns booleans [B].
      True for the largest integer, and for all integers above a true one.
    rows: B.
  """

  def halve(_, ends: tuple[jax.Array, jax.Array]):
    low_B, high_B = ends
    # The floor of the mean, without the overflow of a sum.
    middle_B = (low_B & high_B) + ((low_B ^ high_B) >> 1)
    holds_B = holds(middle_B[:, None])
    return jnp.where(holds_B, low_B, middle_B + 1), jnp.where(
      holds_B, middle_B, high_B
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
  """Returns the mask of tokens that top-k, then top-p, and min-p keep, [B, V].

  Args:
    scaled_BV: logits divided by the temperature.
    usable_BV: mask of tokens that may be sampled at all.
    top_k_B: see `Sampling`.
    top_p_B: see `Sampling`.
    min_p_B: see `Sampling`.
  """
  b, v = scaled_BV.shape
  scaled_BV = jnp.where(usable_BV, scaled_BV, _MASKED)
  order_BV = _as_integer(scaled_BV)
  k_B = jnp.where(top_k_B > 0, jnp.minimum(top_k_B, v), v)
  # Fewer than k logits are larger than the k-th largest.
  kth_B = _smallest_true(
    lambda at_B1: jnp.sum(order_BV > at_B1, axis=-1) < k_B, b
  )
  kept_BV = usable_BV & (order_BV >= kth_B[:, None])
  mass_BV = jax.nn.softmax(jnp.where(kept_BV, scaled_BV, _MASKED), axis=-1)
  # A token is kept if the mass of more likely tokens is below top_p, so the
  # most likely token is always kept.
  nucleus_B = _smallest_true(
    lambda at_B1: (
      (jnp.sum(jnp.where(order_BV > at_B1, mass_BV, 0.0), axis=-1) < top_p_B)
      | (top_p_B >= 1)
    ),
    b,
  )
  min_logit_B1 = jnp.max(scaled_BV, axis=-1, keepdims=True) + jnp.log(
    jnp.maximum(min_p_B, 1e-30)[:, None]
  )
  return (
    kept_BV & (order_BV >= nucleus_B[:, None]) & (scaled_BV >= min_logit_B1)
  )


def _sample_index(weights_BN: jax.Array, noise_BN: jax.Array) -> jax.Array:
  """Samples an index of each row in proportion to its weight, [B].

  Uses Gumbel noise. Rounding differences of a weight rarely change the sample.
  Inverting the cumulative sum would be cheaper, but there a difference in one
  weight shifts all later indices.

  Args:
    weights_BN: nonnegative weights, not normalized.
    noise_BN: Gumbel noise.
  """
  return _first_argmax(jnp.log(weights_BN) + noise_BN, weights_BN > 0)


def _sample_tokens(
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

  First samples a block of the vocabulary, then a token of the block. This needs
  noise for each block and each token of one block, instead of each token of the
  vocabulary.

  Args:
    keys_B: key of each row.
    counts_B: index of the token in its completion.
    floats_BX: temperature, top_p and min_p of each row.
    top_k_B: see `Sampling`.
    logits_BV: float32 logits.
    vocab_size: ids from here on are not sampled.
    truncated: whether any row may use top-k, top-p or min-p; None: the program
      decides at run time, and also whether any row is greedy.

  Returns:
    (ids [B], log-probs before truncation [B], log-probs after it [B]).
  """
  b, v = logits_BV.shape
  temperature_B, top_p_B, min_p_B = floats_BX.T
  greedy_B = temperature_B == 0
  scaled_BV = logits_BV * (1 / jnp.where(greedy_B, 1.0, temperature_B))[:, None]
  usable_BV = jnp.broadcast_to(jnp.arange(v) < vocab_size, (b, v))
  max_B1 = jnp.max(
    jnp.where(usable_BV, scaled_BV, _MASKED), axis=-1, keepdims=True
  )
  weights_BV = jnp.where(usable_BV, jnp.exp(scaled_BV - max_B1), 0.0)
  total_B = max_B1[:, 0] + jnp.log(jnp.sum(weights_BV, axis=-1))
  if vocab_size < v:
    # The learner's distribution includes all rows of the embedding.
    rest_B = jax.nn.logsumexp(scaled_BV[:, vocab_size:], axis=-1)
    total_B = jnp.logaddexp(total_B, rest_B)
  kept_BV = _cond(
    truncated,
    jnp.any((top_k_B > 0) | (top_p_B < 1) | (min_p_B > 0)),
    lambda: _truncate(scaled_BV, usable_BV, top_k_B, top_p_B, min_p_B),
    lambda: usable_BV,
  )
  weights_BV = jnp.where(kept_BV, weights_BV, 0.0)
  size = min(_BLOCK_SIZE, v)
  weights_BNI = jnp.pad(weights_BV, ((0, 0), (0, -v % size))).reshape(
    b, -1, size
  )
  sums_BN = jnp.sum(weights_BNI, axis=-1)
  kept_total_B = max_B1[:, 0] + jnp.log(jnp.sum(sums_BN, axis=-1))

  num_blocks = sums_BN.shape[1]

  def noise(key: jax.Array, count: jax.Array) -> jax.Array:
    return jax.random.gumbel(
      jax.random.fold_in(key, count), (num_blocks + size,)
    )

  noise_BX = jax.vmap(noise)(keys_B, counts_B)
  block_B = _sample_index(sums_BN, noise_BX[:, :num_blocks])
  weights_BI = jnp.take_along_axis(weights_BNI, block_B[:, None, None], axis=1)[
    :, 0
  ]
  ids_B = block_B * size + _sample_index(weights_BI, noise_BX[:, num_blocks:])
  ids_B = _cond(
    None if truncated is None else True,
    jnp.any(greedy_B),
    lambda: jnp.where(greedy_B, _first_argmax(scaled_BV, kept_BV), ids_B),
    lambda: ids_B,
  )
  chosen_B = jnp.take_along_axis(scaled_BV, ids_B[:, None], axis=-1)[:, 0]
  return ids_B, chosen_B - total_B, chosen_B - kept_total_B


def _cond(
  static: bool | None,
  dynamic: jax.Array,
  true_fn: Callable[[], jax.Array],
  false_fn: Callable[[], jax.Array],
) -> jax.Array:
  """Returns the result of one of two functions.

  Args:
    static: the condition, if it is known while tracing; None: not known.
    dynamic: the condition at run time, used if `static` is None.
    true_fn: called if the condition is true.
    false_fn: called if the condition is false.
  """
  if static is None:
    return jax.lax.cond(dynamic, true_fn, false_fn)
  return true_fn() if static else false_fn()


def _first_argmax(scaled_BV: jax.Array, kept_BV: jax.Array) -> jax.Array:
  """Returns the first index of the largest kept value of each row, [B].

  `jnp.argmax` takes five times as long on a CPU. The default of v - 1 keeps the
  result within bounds if a row is all NaN.
  """
  v = scaled_BV.shape[-1]
  scaled_BV = jnp.where(kept_BV, scaled_BV, _MASKED)
  largest_B1 = jnp.max(scaled_BV, axis=-1, keepdims=True)
  indices_BV = jnp.where(scaled_BV == largest_B1, jnp.arange(v), v - 1)
  return jnp.min(indices_BV, axis=-1).astype(jnp.int32)


def _decode(
  config: qwen.QwenConfig,
  seed: np.uint32,
  stop_ids: tuple[int, ...],
  vocab_size: int,
  chunk: int,
  params: dict,
  cache: kv_cache.Cache,
  state_BX: jax.Array,
  integers_BX: jax.Array,
  floats_BX: jax.Array,
  truncated: bool | None,
) -> tuple[kv_cache.Cache, jax.Array, tuple[jax.Array, ...]]:
  """Decodes up to `chunk` tokens of every active slot.

  If `truncated` is None, the loop ends early once no slot is active; see
  `_sample_tokens`.

  Args:
    config: shape of the model.
    seed: seed of all random streams.
    stop_ids: tokens that end a completion.
    vocab_size: ids from here on are not sampled.
    chunk: K, maximum number of tokens per slot.
    params: parameters; see `_prepare`.
    cache: keys and values; donated.
    state_BX: the fields of `_STATE` from the previous step; donated.
    integers_BX: the fields of `_INTEGERS` and the stream of each slot.
    floats_BX: the fields of `_FLOATS` of each slot.
    truncated: see `_sample_tokens`; static.

  Returns:
    (cache, state, outputs). Outputs are ids, log-probs and sampled log-probs
    [K, B], the number of new tokens of each slot [B], and whether the slot is
    still active [B].
  """
  in_use_B, new_B, token_B, position_B, limit_B, top_k_B = integers_BX[
    :, : len(_INTEGERS)
  ].T
  streams = integers_BX[:, len(_INTEGERS) :].astype(jnp.uint32)
  keys_B = _row_keys(seed, streams)
  is_new_B = new_B > 0
  active_B, last_B, at_B, count_B = state_BX.T
  start = (
    (in_use_B > 0) & ((active_B > 0) | is_new_B),
    jnp.where(is_new_B, token_B, last_B),
    jnp.where(is_new_B, position_B, at_B),
    jnp.where(is_new_B, 0, count_B),
  )
  b = state_BX.shape[0]
  zeros_KB = jnp.zeros((chunk, b), jnp.float32)

  def any_active(loop: tuple) -> jax.Array:
    return (loop[0] < chunk) & jnp.any(loop[2][0])

  def advance(loop: tuple) -> tuple:
    c, cache, (active_B, last_B, at_B, count_B), outputs = loop
    logits_BV, cache = qwen.decode(config, params, cache, last_B, at_B)
    ids_B, *log_probs = _sample_tokens(
      keys_B,
      count_B,
      floats_BX,
      top_k_B,
      logits_BV,
      vocab_size=vocab_size,
      truncated=truncated,
    )
    # The state of an inactive slot does not change.
    outputs = tuple(
      output_KB.at[c].set(jnp.where(active_B, value_B, 0))
      for output_KB, value_B in zip(outputs, (ids_B, *log_probs), strict=True)
    )
    last_B = jnp.where(active_B, ids_B, last_B)
    at_B, count_B = at_B + active_B, count_B + active_B
    is_stop_B = (ids_B[:, None] == jnp.asarray(stop_ids, jnp.int32)).any(axis=1)
    active_B = active_B & ~is_stop_B & (count_B < limit_B)
    return c + 1, cache, (active_B, last_B, at_B, count_B), outputs

  start_count_B = start[3]
  loop = (
    jnp.int32(0),
    cache,
    start,
    (jnp.zeros((chunk, b), jnp.int32), zeros_KB, zeros_KB),
  )
  if truncated is None:
    loop = jax.lax.while_loop(any_active, advance, loop)
  else:
    loop = jax.lax.fori_loop(0, chunk, lambda _, loop: advance(loop), loop)
  _, cache, end, outputs = loop
  state_BX = jnp.stack([x.astype(jnp.int32) for x in end], axis=1)
  return cache, state_BX, (*outputs, end[3] - start_count_B, end[0])
