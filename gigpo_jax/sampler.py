"""Prompt ids in, completion ids and log-probabilities out.

One compiled program per (batch, prompt length) bucket reads the prompts and
decodes until every row has stopped. Knows ids, never text.

The key of a row's c-th token is a function of the sampler's seed, the
request's stream and c alone, so neighbours, order and batch size never change
what is sampled.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from gigpo_jax import mesh as mesh_lib
from gigpo_jax.models import qwen

_NEVER = -1e30


@dataclasses.dataclass(frozen=True)
class Request:
  """A prompt to answer.

  Attributes:
    prompt_ids: int32 [P], at least one token.
    stream: integers that make its random stream: (domain, iteration, task,
      member, step).
  """

  prompt_ids: np.ndarray
  stream: tuple[int, int, int, int, int]


@dataclasses.dataclass(frozen=True)
class Completion:
  """A sampled answer.

  Attributes:
    ids: int32 [C]; the stop token, where there is one, is the last.
    log_probs: float32 [C]; of each token under the whole distribution at the
      sampling temperature, before top-k and top-p. This is what the loss
      needs. Greedy sampling reports temperature 1.
    finish_reason: 'stop', or 'length' at the limit of tokens.
  """

  ids: np.ndarray
  log_probs: np.ndarray
  finish_reason: str


class Sampler:
  """Compiled sampling of one model on one mesh.

  Args:
    config: shape of the model.
    mesh: the devices; rows go over (data, fsdp).
    seed: of all random streams.
    prompt_buckets: rising lengths that prompts are padded to.
    batch_buckets: rising numbers of rows that a program is compiled for.
    max_completion_tokens: limit of a completion.
    stop_ids: tokens that end a completion.
    vocab_size: ids from here on are embedding rows without a token, which
      are never sampled.
    top_p: least mass of the most likely tokens to sample from; 1 is all.
    top_k: how many of the most likely tokens to sample from; 0 is all. With
      both, top_p is taken inside top_k.
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
    top_p: float = 1.0,
    top_k: int = 0,
  ):
    for name, sizes in (
      ('prompt_buckets', prompt_buckets),
      ('batch_buckets', batch_buckets),
    ):
      if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
        raise ValueError(
          f'rollout.{name}={tuple(sizes)}: must be rising and positive'
        )
    if not 0 < vocab_size <= config.vocab_size:
      raise ValueError(
        f'vocab_size={vocab_size}: the model embeds {config.vocab_size} '
        'tokens; must be between 1 and that'
      )
    shards = mesh_lib.batch_shards(mesh)
    if any(size % shards for size in batch_buckets):
      raise ValueError(
        f'rollout.batch_buckets={tuple(batch_buckets)}: mesh axes data and '
        f'fsdp share the rows; must be multiples of {shards}'
      )
    self._prompt_buckets = tuple(prompt_buckets)
    self._batch_buckets = tuple(batch_buckets)
    self._mesh = mesh
    gathered = mesh_lib.shardings(
      mesh, qwen.logical_axes(config), gathered=('fsdp',)
    )
    self._program = jax.jit(
      functools.partial(
        _generate,
        config,
        gathered,
        np.uint32(seed),
        tuple(stop_ids),
        vocab_size,
        max_completion_tokens,
        top_p,
        top_k,
      )
    )

  @property
  def compilations(self) -> int:
    """How many programs have been compiled."""
    return self._program._cache_size()

  def warm_up(self, params: dict) -> None:
    """Compiles every bucket, so that nothing compiles later."""
    for length in self._prompt_buckets:
      for rows in self._batch_buckets:
        request = Request(np.zeros(length, np.int32), (0,) * 5)
        self._run(params, [request] * rows, 1.0)

  def generate(
    self,
    params: dict,
    requests: Sequence[Request],
    *,
    temperature: float = 1.0,
  ) -> list[Completion]:
    """Returns a completion for each request, in their order.

    Args:
      params: the policy; only read.
      requests: any number; none gives none.
      temperature: divides the logits; 0 takes the likeliest token.

    Raises:
      ValueError: if a prompt is empty or longer than the largest bucket.
    """
    lengths = [len(r.prompt_ids) for r in requests]
    longest, shortest = max(lengths, default=1), min(lengths, default=1)
    if shortest < 1:
      raise ValueError('a prompt has 0 tokens; must have at least 1')
    if longest > self._prompt_buckets[-1]:
      raise ValueError(
        f'a prompt has {longest} tokens; at most {self._prompt_buckets[-1]} '
        '(the last of rollout.prompt_buckets)'
      )
    # By length, so that short prompts share a short bucket.
    order = sorted(range(len(requests)), key=lengths.__getitem__)
    completions: list[Completion | None] = [None] * len(requests)
    start = 0
    while start < len(order):
      part = order[start : start + self._batch_buckets[-1]]
      answers = self._run(params, [requests[i] for i in part], temperature)
      for i, answer in zip(part, answers, strict=True):
        completions[i] = answer
      start += len(part)
    return completions

  def _run(
    self, params: dict, requests: Sequence[Request], temperature: float
  ) -> list[Completion]:
    lengths = [len(request.prompt_ids) for request in requests]
    num_rows = _bucket(self._batch_buckets, len(requests))
    num_tokens = _bucket(self._prompt_buckets, max(lengths))
    tokens = np.zeros((num_rows, num_tokens), np.int32)
    # A length of 0 marks a row that fills up the batch.
    rows = np.zeros(num_rows, np.int32)
    rows[: len(requests)] = lengths
    streams = np.zeros((num_rows, 5), np.uint32)
    for n, request in enumerate(requests):
      tokens[n, : lengths[n]] = request.prompt_ids
      streams[n] = request.stream
    placed = mesh_lib.place_rows(self._mesh, (tokens, rows, streams))
    with jax.set_mesh(self._mesh):
      ids, log_probs, counts, stopped = jax.device_get(
        self._program(params, *placed, np.float32(temperature))
      )
    return [
      Completion(
        ids=ids[n, : counts[n]],
        log_probs=log_probs[n, : counts[n]],
        finish_reason='stop' if stopped[n] else 'length',
      )
      for n in range(len(requests))
    ]


def _bucket(sizes: Sequence[int], needed: int) -> int:
  return next(size for size in sizes if size >= needed)


def _row_keys(seed: np.uint32, streams: jax.Array) -> jax.Array:
  """Returns a key for each row: (seed, stream) folded in one after another."""

  def key(stream: jax.Array) -> jax.Array:
    folded = jax.random.key(seed)
    for number in stream:
      folded = jax.random.fold_in(folded, number)
    return folded

  return jax.vmap(key)(streams)


def _truncate(scaled_BV: jax.Array, top_p: float, top_k: int) -> jax.Array:
  """Hides logits outside the top-k and the top-p mass within it."""
  vocab_size = scaled_BV.shape[-1]
  if top_p >= 1 and not 0 < top_k < vocab_size:
    return scaled_BV
  kept = top_k if 0 < top_k < vocab_size else vocab_size
  top_BK, _ = jax.lax.top_k(scaled_BV, kept)
  if top_p < 1:
    mass_BK = jax.nn.softmax(top_BK, axis=-1)
    # The mass ahead of a token decides, so the likeliest is always kept.
    ahead_BK = jnp.cumsum(mass_BK, axis=-1) - mass_BK
    top_BK = jnp.where(ahead_BK < top_p, top_BK, jnp.inf)
  threshold_B1 = jnp.min(top_BK, axis=-1, keepdims=True)
  return jnp.where(scaled_BV < threshold_B1, _NEVER, scaled_BV)


def _pick(
  keys_B: jax.Array,
  temperature: jax.Array,
  c: jax.Array,
  logits_BV: jax.Array,
  *,
  vocab_size: int,
  top_p: float,
  top_k: int,
) -> tuple[jax.Array, jax.Array]:
  """Samples token number c of each row.

  Args:
    keys_B: key of each row.
    temperature: divides the logits; 0 takes the likeliest token.
    c: number of the token in its completion.
    logits_BV: float32.
    vocab_size: ids from here on are not sampled.
    top_p: as in `Sampler`.
    top_k: as in `Sampler`.

  Returns:
    ids [B] and their log-probs [B] before truncation.
  """
  v = logits_BV.shape[-1]
  greedy = temperature == 0
  scaled_BV = logits_BV * (1 / jnp.where(greedy, 1.0, temperature))
  total_B = jax.nn.logsumexp(scaled_BV, axis=-1)
  usable_BV = jnp.where(jnp.arange(v) < vocab_size, scaled_BV, _NEVER)
  usable_BV = _truncate(usable_BV, top_p, top_k)

  def noise(key: jax.Array) -> jax.Array:
    return jax.random.gumbel(jax.random.fold_in(key, c), (v,), jnp.float32)

  noisy_BV = jax.lax.cond(
    greedy,
    lambda: usable_BV,
    lambda: usable_BV + jax.vmap(noise)(keys_B),
  )
  # The first of the largest, as argmax would find it at five times the cost
  # on a CPU; the minimum keeps rows of NaN within bounds.
  largest_B1 = jnp.max(noisy_BV, axis=-1, keepdims=True)
  places_BV = jnp.where(noisy_BV == largest_B1, jnp.arange(v), v - 1)
  ids_B = jnp.min(places_BV, axis=-1).astype(jnp.int32)
  chosen_B = jnp.take_along_axis(scaled_BV, ids_B[:, None], axis=-1)[:, 0]
  return ids_B, chosen_B - total_B


def _generate(  # noqa: PLR0913  (what is static, then what is not)
  config: qwen.QwenConfig,
  gathered: dict,
  seed: np.uint32,
  stop_ids: tuple[int, ...],
  vocab_size: int,
  max_tokens: int,
  top_p: float,
  top_k: int,
  params: dict,
  tokens_BP: jax.Array,
  lengths_B: jax.Array,
  streams_B5: jax.Array,
  temperature: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """Reads the prompts and decodes until all rows are done.

  Returns:
    ids [B, C], log-probs [B, C], number of sampled tokens [B], whether a stop
    token ended the row [B].
  """
  # Gathered and cast once: inside the loop it would be for every token.
  params = jax.tree.map(lambda x: x.astype(config.dtype), params)
  params = jax.lax.with_sharding_constraint(params, gathered)
  b, p = tokens_BP.shape
  keys_B = _row_keys(seed, streams_B5)
  starts_B = jnp.maximum(lengths_B, 1)
  pick = functools.partial(
    _pick, keys_B, temperature, vocab_size=vocab_size, top_p=top_p, top_k=top_k
  )

  def go_on(state: tuple) -> jax.Array:
    c, _, _, done_B, _, _, _ = state
    return (c < max_tokens) & ~jnp.all(done_B)

  def step(state: tuple) -> tuple:
    c, ids_B, cache, done_B, ids_BC, log_probs_BC, counts_B = state
    # Reads token c - 1 and samples token c.
    logits_BV, cache = qwen.decode(
      config, params, cache, ids_B, starts_B + c - 1
    )
    ids_B, *written = write(
      c, logits_BV, done_B, ids_BC, log_probs_BC, counts_B
    )
    return c + 1, ids_B, cache, *written

  def write(
    c: jax.Array,
    logits_BV: jax.Array,
    done_B: jax.Array,
    ids_BC: jax.Array,
    log_probs_BC: jax.Array,
    counts_B: jax.Array,
  ) -> tuple:
    ids_B, chosen_B = pick(c, logits_BV)
    # A row that is done keeps what it has.
    ids_BC = ids_BC.at[:, c].set(jnp.where(done_B, 0, ids_B))
    log_probs_BC = log_probs_BC.at[:, c].set(jnp.where(done_B, 0.0, chosen_B))
    counts_B = counts_B + ~done_B
    is_stop_B = (ids_B[:, None] == jnp.asarray(stop_ids, jnp.int32)).any(axis=1)
    return ids_B, done_B | is_stop_B, ids_BC, log_probs_BC, counts_B

  logits_BV, cache = qwen.prefill(
    config, params, tokens_BP, starts_B, cache_length=p + max_tokens
  )
  ids_B, *written = write(
    jnp.int32(0),
    logits_BV,
    lengths_B == 0,
    jnp.zeros((b, max_tokens), jnp.int32),
    jnp.zeros((b, max_tokens), jnp.float32),
    jnp.zeros(b, jnp.int32),
  )
  _, _, _, done_B, ids_BC, log_probs_BC, counts_B = jax.lax.while_loop(
    go_on, step, (jnp.int32(1), ids_B, cache, *written)
  )
  return ids_BC, log_probs_BC, counts_B, done_B
