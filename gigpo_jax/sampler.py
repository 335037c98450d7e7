"""Continuous batching: prompt ids in, completion ids and log-probs out.

A slot is a row of the key/value cache. Requests wait in a queue for a free
slot. A step prefills the prompts of newly admitted requests, decodes a few
tokens of all slots and returns finished completions, so short completions do
not wait for long ones. The device runs a step while the host processes the
results of the previous step. The sampler handles token ids only, no text.

The random key of a completion's c-th token depends only on the sampler's seed,
the request's stream and c. Other requests, their order, the slot and the batch
size therefore never change the sampled tokens.

Shapes: **B** slots, **R** rows of a prefill, **P** prompt tokens, **K** passes
over the network in a decoding step, **L** tokens of a pass.
"""

import collections
import concurrent.futures
import dataclasses
import itertools
import time
from collections.abc import Callable, Hashable, Sequence

import jax
import numpy as np

from gigpo_jax import drafts, options, prefix_cache, sampler_types, sampling
from gigpo_jax import mesh as mesh_lib
from gigpo_jax import sampler_checks as checks
from gigpo_jax.models import decode_attention, kv_cache, qwen
from gigpo_jax.programs import sampler_cache, sampler_programs, sampler_weights
from gigpo_jax.runtime import compilation, distributed, errors

# Tokens of a prompt that are prefilled together where later turns continue it.
# With 8 prompts, they fill an accelerator.
_CHUNK = 64
# Platforms on which a conditional in a program makes the host wait for the
# program. On these, the host selects a program without conditionals.
_HOST_SELECTS = ('gpu',)

WEIGHTS, REUSE = sampler_weights.WEIGHTS, prefix_cache.REUSE
parameter_bytes = sampler_weights.parameter_bytes
Request = sampler_types.Request
Completion = sampler_types.Completion
Entry = sampler_types.Entry
Stats = sampler_types.Stats
Sampling = sampling.Sampling


@dataclasses.dataclass
class _Step:
  """A dispatched step.

  Attributes:
    outputs: arrays on the device, see `sampler_programs`.
    entries: (slot, entry) of the requests that it decodes.
    start: time of its dispatch, in monotonic seconds.
  """

  outputs: tuple
  entries: list[tuple[int, Entry]]
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
    vocab_size: number of tokens; this and larger ids are unused rows of the
      embedding and are never sampled.
    decode_tokens: K, tokens decoded in a step without drafts. A larger value
      has less overhead per token but leaves finished slots idle for longer.
    draft_tokens: tokens of a draft, see `drafts`; 0: no drafts.
    weights: one of WEIGHTS. 'model': the model's compute type, with adapters
      merged. 'int8': int8 with a scale per output channel, half the memory of
      bfloat16. 'adapters': the compute type with separate adapters, which is
      slower, but exact where merging into a bfloat16 matrix would round small
      adapters away.
    tensor: devices that a copy of the model is sharded over; 0: the size of the
      mesh's axis `tensor`.
    truncates: whether requests may use top-k, top-p or min-p.
    reuse: positions of the cache that later requests reuse, one of REUSE.
    prefill_chunk: tokens of a prompt that are prefilled together, at most those
      of the longest prompt. 0: all, or 64 if `reuse` is not none.
    parked: rows, besides the slots, that hold conversations between turns.
    find_stop: for stop strings; a function of (ids of a completion so far,
      number of new ids) that returns the number of tokens to keep if the
      completion ends, else None.

  Attributes:
    stats: counters since the last `take_stats`.
    is_shared: whether `step` waits for other processes.
    text_size: longest `Request.text`; 0 without drafts.
  """

  def __init__(  # noqa: PLR0913
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
    draft_tokens: int = 0,
    weights: str = 'model',
    tensor: int = 0,
    truncates: bool = True,
    reuse: str = 'none',
    prefill_chunk: int = 0,
    parked: int = 0,
    find_stop: Callable[[np.ndarray, int], int | None] | None = None,
  ):
    checks.check_sizes(config, prompt_buckets, batch_buckets, vocab_size)
    options.check_choice('rollout.weights', weights, WEIGHTS)
    agents = config.adapters.agents if config.adapters else ()
    checks.check_adapters(agents, weights)
    options.check_choice('rollout.reuse_cache', reuse, REUSE)
    checks.check_counts(
      least=0,
      seed=seed,
      prefill_chunk=prefill_chunk,
      parked=parked,
      draft_tokens=draft_tokens,
    )
    if problem := kv_cache.draft_problem(config, draft_tokens):
      raise ValueError(problem)
    checks.check_counts(
      least=1,
      decode_tokens=decode_tokens,
      max_completion_tokens=max_completion_tokens,
    )
    # Parameters are prepared on the full mesh; `mesh` is the part of it that
    # this sampler uses.
    full_mesh = mesh_lib.sampling_mesh(mesh, tensor or mesh.shape['tensor'])
    multi_process = jax.process_count() > 1
    self.is_shared = multi_process and not mesh_lib.on_one_host(full_mesh)
    self._local = multi_process and not self.is_shared
    mesh = mesh_lib.local_mesh(full_mesh) if self._local else full_mesh
    shards = mesh_lib.batch_shards(mesh)
    checks.check_shards(batch_buckets, shards)
    self._full_mesh, self._mesh = full_mesh, mesh
    self._prompt_buckets = tuple(prompt_buckets)
    self._row_buckets = tuple(batch_buckets)
    platform = mesh.devices.flat[0].platform
    # `truncated` of each program of a step, see `sampling.sample_tokens`.
    conditionals = platform not in _HOST_SELECTS
    self._truncations: tuple[bool | None, ...] = (False,)
    if truncates:
      self._truncations = (None,) if conditionals else (False, True)
    self._prefill_sizes = sampler_cache.prefill_sizes(
      prompt_buckets, shards, batch_buckets[-1], platform
    )
    # Rows that move together.
    self._row_batch = self._prefill_sizes[-1][0]
    self._max_tokens = max_completion_tokens
    # Lengths of a slot, ascending. Shorter slots help plain attention only.
    kernel = config.decode_attention
    needs_all = decode_attention.reads_all_slots(kernel)
    self._lengths = tuple(
      decode_attention.num_slots(kernel, n + max_completion_tokens)
      for n in (prompt_buckets if needs_all else prompt_buckets[-1:])
    )
    self._stop_ids, self._find_stop = frozenset(stop_ids), find_stop
    self._decode_chunk = min(decode_tokens, max_completion_tokens)
    self.text_size = drafts.text_size(draft_tokens, max_completion_tokens)
    self._programs = sampler_programs.Programs(
      config,
      mesh,
      full_mesh,
      weights=weights,
      seed=seed,
      stop_ids=stop_ids,
      vocab_size=vocab_size,
      decode_chunk=self._decode_chunk,
      draft_sizes=(draft_tokens, self.text_size),
      row_batch=self._row_batch,
      max_length=self._lengths[-1],
      conditionals=conditionals,
    )
    self._config, self._reuse = config, reuse
    chunk = prefill_chunk or (reuse != 'none') * _CHUNK
    self._chunk = min(chunk, prompt_buckets[-1])
    # The copies of the model share the parked rows.
    self._parked = -(-parked // shards) * shards
    self._cache = sampler_cache.SlotCache(
      self._programs,
      mesh,
      num_slots=batch_buckets[-1],
      num_parked=self._parked,
      max_length=self._lengths[-1],
      prefill_sizes=self._prefill_sizes,
      reuse=reuse,
      chunk=self._chunk,
    )
    self._num_submitted = 0
    self.stats = Stats()
    self.release()

  def _clear(self) -> None:
    self._submitted: list[Entry] = []
    self._ended: list[Hashable] = []
    self._waiting: collections.deque[Entry] = collections.deque()
    self._slots: list[Entry | None] = [None] * self._row_buckets[-1]
    self._cache.clear()
    self._in_flight: _Step | None = None
    self._last_return = time.monotonic()

  @property
  def compilations(self) -> int:
    """Returns the number of programs compiled so far."""
    return self._programs.compilations

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
          self._programs.prepare(params, base or {})
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
    self._cache.release()

  def compile(
    self, compiler: compilation.Compiler, params: dict, base: dict | None = None
  ) -> list[concurrent.futures.Future]:
    """Starts the compilation of all programs, so that none compiles later.

    Args:
      compiler: compiles in the background.
      params: parameters of the policy, or their shapes and shardings.
      base: the same of the frozen parameters of a network with adapters; None:
        no adapters.

    Returns:
      One future per program, except for that of `load`.
    """
    keys = self._program_keys()
    return self._programs.compile(compiler, params, base or {}, keys)

  def warm_up(self, params: dict, base: dict | None = None) -> None:
    """Compiles the programs that are missing and runs the largest ones once.

    This shows whether they fit into memory, all of which is freed. If there is
    no room for a second cache, the cache always has its largest size.

    Args:
      params: parameters of the policy.
      base: frozen parameters of a network with adapters; None: no adapters.
    """
    with compilation.Compiler() as compiler:
      compilation.wait(self.compile(compiler, params, base))
    self.load(params, base)
    rows, length = self._sizes()[-1]
    prompt = np.zeros(self._prompt_buckets[-1], np.int32)
    with jax.set_mesh(self._mesh):
      self._cache.allocate(rows, length)
      for n in range(self._row_batch):
        self._cache.prefixes.place(prompt + n)
      self._cache.fill(self._params, self._cache.prefixes.take_moves())
      inputs = _step_inputs([], rows, self.text_size)
      truncated = self._truncations[-1]
      outputs = self._cache.decode(self._params, *inputs, truncated)
      jax.block_until_ready(outputs)
      can_resize = self._can_resize()
    if not all(distributed.all_gather_objects(can_resize)):
      self._row_buckets = self._row_buckets[-1:]
      self._lengths = self._lengths[-1:]
    self.release()

  def _can_resize(self) -> bool:
    """Returns whether the largest two caches fit into memory together."""
    try:
      for size in self._sizes()[-2:-1]:
        jax.block_until_ready(self._programs.new_slots(*size))
    except jax.errors.JaxRuntimeError as error:
      if not errors.is_out_of_memory(error):
        raise
      return False
    return True

  def _sizes(self) -> list[tuple[int, int]]:
    """Returns the sizes of the cache, ascending."""
    return list(itertools.product(self._row_buckets, self._lengths))

  def _prefills(self) -> list[tuple]:
    """Returns the programs that prefill, ascending in size."""
    if self._chunk:
      return [('extend', self._row_batch, self._chunk)]
    return [('prefill', *size) for size in self._prefill_sizes]

  def _program_keys(self) -> list[tuple]:
    """Returns (name, sizes) of all programs but `prepare`, slow ones first."""
    sizes = self._sizes()
    caches = dict.fromkeys(sizes)
    if self._parked:
      caches[self._parked, self._lengths[-1]] = None
    moves = self._cache.moves()
    return [
      *(('decode', *size, x) for size in sizes for x in self._truncations),
      *self._prefills(),
      *((name, *size, x) for size in caches for name, x in moves),
      *(('new', *size) for size in caches),
    ]

  def lowerings(
    self, params: dict, base: dict
  ) -> dict[tuple, Callable[[], jax.stages.Lowered]]:
    """Returns functions that lower all programs, by (name, sizes).

    Args:
      params: shapes and shardings of the parameters of `load`.
      base: shapes and shardings of the frozen parameters.
    """
    return self._programs.lowerings(params, base, self._program_keys())

  def lower(self, params: dict, base: dict) -> dict[str, jax.stages.Lowered]:
    """Lowers the largest programs, by name; see `lowerings`."""
    keys = {
      'prepare': ('prepare',),
      'prefill': self._prefills()[-1],
      'decode': ('decode', *self._sizes()[-1], self._truncations[0]),
    }
    lowerings = self.lowerings(params, base)
    return {name: lowerings[key]() for name, key in keys.items()}

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
        another field is out of range.
    """
    checks.check_request(request, self._config, self._prompt_buckets[-1])
    limit = self._max_tokens
    if request.max_tokens is not None:
      limit = request.max_tokens
    if not 1 <= limit <= self._max_tokens:
      raise ValueError(
        f'max_tokens={limit}: must be between 1 and {self._max_tokens} '
        '(rollout.max_completion_tokens)'
      )
    if request.sampling.truncates and self._truncations == (False,):
      raise ValueError(
        f'sampling={request.sampling}: top_k, top_p or min_p exclude tokens; '
        'the sampler accepts them with truncates=True'
      )
    self._num_submitted += 1
    entry = Entry(self._num_submitted, request, limit, request.conversation)
    self._submitted.append(entry)
    return self._num_submitted

  def end_conversation(self, conversation: Hashable) -> None:
    """Frees the slot of a conversation for other requests.

    A request of the conversation that is not finished is still sampled.
    """
    if self._reuse != 'none':
      self._ended.append(conversation)

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
    mine = self._submitted, self._ended, done
    self._submitted, self._ended = [], []
    gathered = (
      distributed.all_gather_objects(mine) if self.is_shared else [mine]
    )
    for process, (submitted, ended, _) in enumerate(gathered):
      for entry in submitted:
        if self.is_shared and process != jax.process_index():
          entry.request_id = None
      self._waiting += submitted
      for conversation in ended:
        self._cache.prefixes.forget(conversation)
      for entry in self._waiting:
        if entry.conversation in ended:
          entry.conversation = None
    return all(done for *_, done in gathered)

  def _record_idle_time(self) -> None:
    if self._in_flight and self._in_flight.outputs[-1].is_ready():
      self.stats.idle_secs += time.monotonic() - self._last_return

  def _advance(self) -> list[tuple[int, Completion]]:
    """Dispatches the next step; returns the completions of the previous one."""
    previous = self._in_flight
    with jax.set_mesh(self._mesh):
      entries = self._admit()
      self._in_flight = self._dispatch(entries) if entries else None
    finished = self._fetch(previous) if previous else []
    self._last_return = time.monotonic()
    return finished

  def _admit(self) -> list[tuple[int, Entry]]:
    """Assigns slots to waiting requests and fills in their prompts.

    Returns:
      (slot, entry) of each slot in use.
    """
    prefixes, start = self._cache.prefixes, time.monotonic()
    while self._waiting:
      entry = self._waiting[0]
      request = entry.request
      placed = prefixes.place(
        request.prompt_ids, entry.conversation, request.agent
      )
      if placed is None:
        break
      slot, reused = placed
      self._slots[slot] = self._waiting.popleft()
      self.stats.reused_tokens += reused
    used = [(n, entry) for n, entry in enumerate(self._slots) if entry]
    if not used:
      return used
    moves = prefixes.take_moves()
    rows, longest = prefixes.needed(moves)
    prompt = max(len(entry.request.prompt_ids) for _, entry in used)
    bucket = sampler_cache.bucket
    self._cache.fit(
      bucket(self._row_buckets, rows),
      bucket(self._lengths, max(longest, prompt + self._max_tokens)),
    )
    self.stats.prefill_tokens += sum(len(move.tokens) for move in moves)
    self.stats.padded_tokens += self._cache.fill(self._params, moves)
    end = time.monotonic()
    if self._trace:
      prefilled = [move.row for move in moves if len(move.tokens)]
      self.stats.spans += [(slot, 'prefill', start, end) for slot in prefilled]
    return used

  def _dispatch(self, entries: list[tuple[int, Entry]]) -> _Step:
    """Dispatches a step that decodes the given (slot, entry) of requests."""
    rows = self._cache.rows
    truncated = any(e.request.sampling.truncates for _, e in entries)
    outputs = self._cache.decode(
      self._params,
      *_step_inputs(entries, rows, self.text_size),
      truncated if truncated in self._truncations else None,
    )
    for _, entry in entries:
      entry.is_new = False
    self.stats.slot_steps += self._decode_chunk * rows
    return _Step(outputs, entries, time.monotonic())

  def _fetch(self, step: _Step) -> list[tuple[int, Completion]]:
    """Waits for a step; returns finished requests and frees their slots."""
    *outputs, counts_KB, active_B = jax.device_get(step.outputs)
    end = time.monotonic()
    finished = []
    # The first tokens of each pass are new.
    is_new_KLB = np.arange(outputs[0].shape[1])[:, None] < counts_KB[:, None]
    for slot, entry in step.entries:
      if self._slots[slot] is not entry:
        continue  # The previous step had already finished it.
      count = int(counts_KB[:, slot].sum())
      self.stats.decode_tokens += count
      self.stats.active_steps += int(np.count_nonzero(counts_KB[:, slot]))
      if self._trace:
        self.stats.spans.append((slot, 'decode', step.start, end))
      entry.outputs.append(
        tuple(x[..., slot][is_new_KLB[..., slot]] for x in outputs)
      )
      completion = entry.completion(
        count, bool(active_B[slot]), self._stop_ids, self._find_stop
      )
      if completion is not None:
        self._slots[slot] = None
        self._cache.prefixes.finish(slot, completion.ids)
        if entry.request_id is not None:
          finished.append((entry.request_id, completion))
    return finished


def _step_inputs(
  entries: list[tuple[int, Entry]], rows: int, text_size: int = 0
) -> tuple[np.ndarray, np.ndarray]:
  """Returns `sampler_programs` INTEGERS with stream and text, and FLOATS."""
  num_integers = len(sampler_programs.INTEGERS)
  text = num_integers + sampler_programs.STREAM_SIZE
  integers = np.zeros((rows, text + text_size), np.int32)
  integers[:, text:] = -1
  # Slots without a request exclude no tokens, which would take time.
  floats = np.tile(np.float32(_floats(Sampling())), (rows, 1))
  for slot, entry in entries:
    request, options = entry.request, entry.request.sampling
    prompt, size = request.prompt_ids, min(len(request.text), text_size)
    integers[slot, :num_integers] = (
      1,
      entry.is_new,
      prompt[-1],
      len(prompt) - 1,
      entry.limit,
      request.agent,
      options.top_k,
      prompt[-2] if len(prompt) > 1 else drafts.NO_TOKEN,
    )
    stream = np.array(request.stream, np.uint32)
    integers[slot, num_integers:text] = stream.view(np.int32)
    if size:
      integers[slot, -size:] = request.text[-size:]
    floats[slot] = _floats(options)
  return integers, floats


def _floats(options: Sampling) -> tuple[float, ...]:
  """Returns `sampler_programs` FLOATS of a slot."""
  return options.temperature, options.top_p, options.min_p
