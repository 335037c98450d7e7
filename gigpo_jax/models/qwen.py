"""The Qwen2 and Qwen2.5 decoder in Flax, pure functions at every boundary.

Parameters are one nested dict of float32 arrays, layers stacked on the first
dimension; sampler, learner, checkpoint and safetensors share it. Compute is in
`dtype`; norms, rotary angles, attention weights and logits are float32.

Shapes. **B** rows, **L** tokens, **P** prompt tokens, **C** completion tokens,
**S** cache slots, **V** vocabulary, **D** width, **H** query heads, **K**
key/value heads, **Q** = H / K query heads of one key/value head, **E** head
size, **F** MLP width, **N** layers.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from gigpo_jax import mesh

# Attention weight of a position that must not be seen, before the softmax.
_HIDDEN = -1e30


@dataclasses.dataclass(frozen=True)
class QwenConfig:
  """Shape of a network; names as in Hugging Face's config.json.

  Attributes:
    dtype: compute type, 'bfloat16' or 'float32'; parameters stay float32.
    remat: recompute a layer's activations in the backward pass.
  """

  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  rope_theta: float = 1e6
  rms_norm_eps: float = 1e-6
  tie_embeddings: bool = True
  dtype: str = 'bfloat16'
  remat: bool = True


# Keys and values of all layers: {'k': [N, B, S, K, E], 'v': [N, B, S, K, E]}.
Cache = dict[str, jax.Array]


def _layer_table(c: QwenConfig) -> dict[str, dict[str, tuple]]:
  """Shape and logical axes of each array of one layer."""
  d, h, k, e = c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim
  f = c.intermediate_size
  return {
    'attention': {
      'q': ((d, h, e), ('embed', 'heads', 'head')),
      'k': ((d, k, e), ('embed', 'kv_heads', 'head')),
      'v': ((d, k, e), ('embed', 'kv_heads', 'head')),
      'q_bias': ((h, e), ('heads', 'head')),
      'k_bias': ((k, e), ('kv_heads', 'head')),
      'v_bias': ((k, e), ('kv_heads', 'head')),
      'o': ((h, e, d), ('heads', 'head', 'embed')),
    },
    'mlp': {
      'gate': ((d, f), ('embed', 'mlp')),
      'up': ((d, f), ('embed', 'mlp')),
      'down': ((f, d), ('mlp', 'embed')),
    },
    'norm': {
      'attention': ((d,), (None,)),
      'mlp': ((d,), (None,)),
    },
  }


def _table(c: QwenConfig) -> dict[str, Any]:
  """(shape, logical axes) of every parameter; the one place that says so."""
  table: dict[str, Any] = {
    'embed': ((c.vocab_size, c.hidden_size), ('vocab', 'embed')),
    'layers': jax.tree.map(
      lambda leaf: ((c.num_layers, *leaf[0]), ('layers', *leaf[1])),
      _layer_table(c),
      is_leaf=lambda x: isinstance(x, tuple),
    ),
    'norm': ((c.hidden_size,), (None,)),
  }
  if not c.tie_embeddings:
    table['unembed'] = ((c.vocab_size, c.hidden_size), ('vocab', 'embed'))
  return table


def _of_table(config: QwenConfig, part: int) -> dict[str, Any]:
  return jax.tree.map(
    lambda leaf: leaf[part],
    _table(config),
    is_leaf=lambda x: isinstance(x, tuple),
  )


def shapes(config: QwenConfig) -> dict[str, Any]:
  """Returns the shape of every parameter, as a tree of tuples."""
  return _of_table(config, 0)


def logical_axes(config: QwenConfig) -> dict[str, Any]:
  """Returns the logical axes of every parameter, as a tree of tuples."""
  return _of_table(config, 1)


def init(config: QwenConfig, key: jax.Array) -> dict[str, Any]:
  """Returns random parameters; consumes the key.

  Normal with deviation 0.02 as Qwen's own, output projections scaled down by
  the square root of twice the depth; norms one, biases zero.
  """
  leaves, treedef = jax.tree_util.tree_flatten_with_path(
    shapes(config), is_leaf=lambda x: isinstance(x, tuple)
  )
  keys = jax.random.split(key, len(leaves))

  def make(path: tuple, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    names = [entry.key for entry in path]
    if 'norm' in names:
      return jnp.ones(shape, jnp.float32)
    if names[-1].endswith('bias'):
      return jnp.zeros(shape, jnp.float32)
    scale = 0.02
    if names[-1] in ('o', 'down'):
      scale /= (2 * config.num_layers) ** 0.5
    return scale * jax.random.normal(key, shape, jnp.float32)

  arrays = [
    make(path, shape, key)
    for (path, shape), key in zip(leaves, keys, strict=True)
  ]
  return jax.tree.unflatten(treedef, arrays)


class _Parameters(nn.Module):
  """A named group of arrays, as Flax keeps them."""

  table: Any

  @nn.compact
  def __call__(self, dtype: jnp.dtype) -> dict[str, jax.Array]:
    return {
      name: self.param(name, nn.initializers.zeros, shape, jnp.float32).astype(
        dtype
      )
      for name, (shape, _) in self.table.items()
    }


def _rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
  x32 = x.astype(jnp.float32)
  scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
  return (x32 * scale).astype(x.dtype) * weight.astype(x.dtype)


def _project(x_BLI: jax.Array, w: jax.Array) -> jax.Array:
  """Multiplies [B, L, I] by [I, ...] as one matrix product.

  Rows and tokens are folded together: XLA's CPU backend is three times as
  slow on the weight gradient of a product with two batch dimensions.
  """
  b, length, width = x_BLI.shape
  flat = x_BLI.reshape(b * length, width) @ w.reshape(width, -1)
  return flat.reshape(b, length, *w.shape[1:])


def _rotary(positions_BL: jax.Array, config: QwenConfig) -> jax.Array:
  """Returns cos and sin of the rotary angles, float32 [2, B, L, 1, E/2]."""
  half = config.head_dim // 2
  powers = jnp.arange(half, dtype=jnp.float32) / half
  angles = positions_BL[..., None, None] / config.rope_theta**powers
  return jnp.stack([jnp.cos(angles), jnp.sin(angles)])


def _rotate(x_BLHE: jax.Array, rotary: jax.Array) -> jax.Array:
  """Turns the first half of a head's numbers against the second."""
  cos, sin = rotary
  a, b = jnp.split(x_BLHE.astype(jnp.float32), 2, axis=-1)
  turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return turned.astype(x_BLHE.dtype)


def _attend(
  q_BLHE: jax.Array, k_BSKE: jax.Array, v_BSKE: jax.Array, mask_BLS: jax.Array
) -> jax.Array:
  """Grouped-query attention; weights in float32. Returns [B, L, H, E]."""
  b, length, h, e = q_BLHE.shape
  k = k_BSKE.shape[2]
  q_BLKQE = q_BLHE.reshape(b, length, k, h // k, e)
  scores_BKQLS = jnp.einsum(
    'BLKQE,BSKE->BKQLS',
    q_BLKQE,
    k_BSKE,
    preferred_element_type=jnp.float32,
  )
  scores_BKQLS = jnp.where(
    mask_BLS[:, None, None], scores_BKQLS * e**-0.5, _HIDDEN
  )
  weights_BKQLS = jax.nn.softmax(scores_BKQLS, axis=-1).astype(v_BSKE.dtype)
  out_BLKQE = jnp.einsum('BKQLS,BSKE->BLKQE', weights_BKQLS, v_BSKE)
  return out_BLKQE.reshape(b, length, h, e)


class _Layer(nn.Module):
  """One decoder layer, scanned over; the cache rides in the carry."""

  config: QwenConfig

  @nn.compact
  def __call__(
    self,
    carry: tuple[jax.Array, Cache | None],
    layer: jax.Array,
    positions_BL: jax.Array,
    rotary: jax.Array,
    mask_BLS: jax.Array,
  ) -> tuple[tuple[jax.Array, Cache | None], None]:
    """Args as `_Decoder`; `layer` is this layer's number."""
    c, dtype = self.config, jnp.dtype(self.config.dtype)
    (x_BLD, cache), table = carry, _layer_table(self.config)
    norm = _Parameters(table['norm'], name='norm')(jnp.float32)
    w = _Parameters(table['attention'], name='attention')(dtype)
    m = _Parameters(table['mlp'], name='mlp')(dtype)

    y_BLD = _rms_norm(x_BLD, norm['attention'], c.rms_norm_eps)
    q_BLHE = _project(y_BLD, w['q']) + w['q_bias']
    k_BLKE = _project(y_BLD, w['k']) + w['k_bias']
    v_BLKE = _project(y_BLD, w['v']) + w['v_bias']
    q_BLHE, k_BLKE = _rotate(q_BLHE, rotary), _rotate(k_BLKE, rotary)
    if cache is not None:
      # Each row writes at its own positions: a scatter, which XLA does in
      # place where a slice update at a traced layer would copy the cache.
      rows = jnp.arange(x_BLD.shape[0])[:, None]
      cache = {
        'k': cache['k'].at[layer, rows, positions_BL].set(k_BLKE),
        'v': cache['v'].at[layer, rows, positions_BL].set(v_BLKE),
      }
      k_BLKE, v_BLKE = cache['k'][layer], cache['v'][layer]
    heads_BLHE = _attend(q_BLHE, k_BLKE, v_BLKE, mask_BLS)
    heads_BLA = heads_BLHE.reshape(*x_BLD.shape[:2], -1)
    x_BLD = x_BLD + _project(heads_BLA, w['o'].reshape(-1, c.hidden_size))

    y_BLD = _rms_norm(x_BLD, norm['mlp'], c.rms_norm_eps)
    gate_BLF = jax.nn.silu(_project(y_BLD, m['gate']))
    up_BLF = _project(y_BLD, m['up'])
    x_BLD = x_BLD + _project(gate_BLF * up_BLF, m['down'])
    return (mesh.constrain_rows(x_BLD), cache), None


class _Decoder(nn.Module):
  """Embedding, layers and the last norm; no logits."""

  config: QwenConfig

  @nn.compact
  def __call__(
    self,
    tokens_BL: jax.Array,
    positions_BL: jax.Array,
    mask_BLS: jax.Array,
    cache: Cache | None = None,
  ) -> tuple[jax.Array, Cache | None]:
    """Returns (hidden states [B, L, D], cache with these tokens written).

    Args:
      tokens_BL: token ids.
      positions_BL: place of each token in its row, and in the cache.
      mask_BLS: whether token l may see key s: S is L without a cache, else
        the cache's length.
      cache: keys and values so far; None attends among the tokens alone.
    """
    c = self.config
    table = _table(c)
    names = [name for name in table if name != 'layers']
    top = _Parameters({n: table[n] for n in names}, name='top')(jnp.float32)
    x_BLD = top['embed'].astype(c.dtype)[tokens_BL]
    x_BLD = mesh.constrain_rows(x_BLD)
    layer = _Layer
    if c.remat:
      layer = nn.remat(_Layer, prevent_cse=False)
    stack = nn.scan(
      layer,
      variable_axes={'params': 0},
      split_rngs={'params': True},
      in_axes=(0, nn.broadcast, nn.broadcast, nn.broadcast),
      length=c.num_layers,
    )
    (x_BLD, cache), _ = stack(c, name='layers')(
      (x_BLD, cache),
      jnp.arange(c.num_layers),
      positions_BL,
      _rotary(positions_BL, c),
      mask_BLS,
    )
    return _rms_norm(x_BLD, top['norm'], c.rms_norm_eps), cache


def _apply(config: QwenConfig, params: dict, *args) -> Any:
  top = {name: leaf for name, leaf in params.items() if name != 'layers'}
  variables = {'params': {'top': top, 'layers': params['layers']}}
  return _Decoder(config).apply(variables, *args)


def hidden_states(
  config: QwenConfig,
  params: dict,
  tokens_BL: jax.Array,
  lengths_B: jax.Array,
) -> jax.Array:
  """Returns the last layer's normed output, [B, L, D] in the compute type.

  Rows hold their tokens from position 0 on; what comes after `lengths_B` is
  padding, whose output means nothing.
  """
  del lengths_B  # Padding comes after every token that could see it.
  b, length = tokens_BL.shape
  positions_BL = jnp.broadcast_to(jnp.arange(length), (b, length))
  mask_BLS = jnp.broadcast_to(
    jnp.tril(jnp.ones((length, length), bool)), (b, length, length)
  )
  return _apply(config, params, tokens_BL, positions_BL, mask_BLS)[0]


def logits(config: QwenConfig, params: dict, hidden: jax.Array) -> jax.Array:
  """Returns next-token logits, float32 [..., V], of hidden states [..., D]."""
  matrix = params['embed' if config.tie_embeddings else 'unembed']
  return jnp.einsum(
    '...D,VD->...V',
    hidden,
    matrix.astype(config.dtype),
    preferred_element_type=jnp.float32,
  )


def token_log_probs(
  config: QwenConfig,
  params: dict,
  hidden_BCD: jax.Array,
  targets_BC: jax.Array,
  *,
  temperature: float = 1.0,
  chunk: int = 64,
) -> tuple[jax.Array, jax.Array]:
  """Returns log-probability of each target and entropy, float32 [B, C] both.

  Logits exist for `chunk` positions at a time only, in the backward pass too,
  where they are computed again.

  Args:
    config: shape of the network.
    params: its parameters.
    hidden_BCD: hidden state before each target.
    targets_BC: token ids.
    temperature: divides the logits; of the distribution that was sampled.
    chunk: positions of a row whose logits exist at a time.
  """
  b, c, d = hidden_BCD.shape
  chunk = min(chunk, c)
  padded = -(-c // chunk) * chunk
  hidden = jnp.pad(hidden_BCD, ((0, 0), (0, padded - c), (0, 0)))
  targets = jnp.pad(targets_BC, ((0, 0), (0, padded - c)))

  @jax.checkpoint
  def of_chunk(args: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
    x_BID, targets_BI = args
    scaled_BIV = logits(config, params, x_BID) / temperature
    log_BIV = jax.nn.log_softmax(scaled_BIV, axis=-1)
    chosen_BI = jnp.take_along_axis(log_BIV, targets_BI[..., None], axis=-1)
    entropy_BI = -jnp.sum(jnp.exp(log_BIV) * log_BIV, axis=-1)
    return chosen_BI[..., 0], entropy_BI

  if padded == chunk:
    log_probs, entropies = of_chunk((hidden, targets))
  else:
    chunks = padded // chunk
    split_hidden = hidden.reshape(b, chunks, chunk, d).swapaxes(0, 1)
    split_targets = targets.reshape(b, chunks, chunk).swapaxes(0, 1)
    log_probs, entropies = (
      x.swapaxes(0, 1).reshape(b, padded)
      for x in jax.lax.map(of_chunk, (split_hidden, split_targets))
    )
  return log_probs[:, :c], entropies[:, :c]


def completion_log_probs(
  config: QwenConfig,
  params: dict,
  tokens_BL: jax.Array,
  prompt_lengths_B: jax.Array,
  lengths_B: jax.Array,
  *,
  max_completion: int,
  temperature: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
  """Returns log-probs and entropies of the completions, float32 [B, C] both.

  Args:
    config: shape of the network.
    params: its parameters.
    tokens_BL: prompt and completion, contiguous from position 0.
    prompt_lengths_B: tokens of the prompt.
    lengths_B: tokens of prompt and completion.
    max_completion: C; positions past a row's completion mean nothing.
    temperature: of the distribution that was sampled.
  """
  hidden_BLD = hidden_states(config, params, tokens_BL, lengths_B)
  # The state before completion token c is that of the token ahead of it.
  index_BC = prompt_lengths_B[:, None] - 1 + jnp.arange(max_completion)
  index_BC = jnp.clip(index_BC, 0, tokens_BL.shape[1] - 2)
  hidden_BCD = jnp.take_along_axis(hidden_BLD, index_BC[..., None], axis=1)
  targets_BC = jnp.take_along_axis(tokens_BL, index_BC + 1, axis=1)
  return token_log_probs(
    config, params, hidden_BCD, targets_BC, temperature=temperature
  )


def prefill(
  config: QwenConfig,
  params: dict,
  tokens_BP: jax.Array,
  lengths_B: jax.Array,
  *,
  cache_length: int,
) -> tuple[jax.Array, Cache]:
  """Reads prompts; returns (logits after the last token [B, V], cache).

  Args:
    config: shape of the network.
    params: its parameters.
    tokens_BP: prompts from position 0, padded right.
    lengths_B: tokens of each prompt, at least 1.
    cache_length: S, tokens that the cache can hold per row.
  """
  b, p = tokens_BP.shape
  shape = (config.num_layers, b, p, config.num_kv_heads, config.head_dim)
  cache = {name: jnp.zeros(shape, config.dtype) for name in ('k', 'v')}
  positions_BP = jnp.broadcast_to(jnp.arange(p), (b, p))
  mask_BPP = jnp.broadcast_to(jnp.tril(jnp.ones((p, p), bool)), (b, p, p))
  hidden_BPD, cache = _apply(
    config, params, tokens_BP, positions_BP, mask_BPP, cache
  )
  room = ((0, 0), (0, 0), (0, cache_length - p), (0, 0), (0, 0))
  cache = {name: jnp.pad(leaf, room) for name, leaf in cache.items()}
  last_BD = jnp.take_along_axis(
    hidden_BPD, (lengths_B - 1)[:, None, None], axis=1
  )[:, 0]
  return logits(config, params, last_BD), cache


def decode(
  config: QwenConfig,
  params: dict,
  cache: Cache,
  tokens_B: jax.Array,
  positions_B: jax.Array,
) -> tuple[jax.Array, Cache]:
  """Reads one more token a row; returns (logits [B, V], cache).

  Args:
    config: shape of the network.
    params: its parameters.
    cache: keys and values of the positions before.
    tokens_B: the token at each row's position.
    positions_B: where it stands in its row.
  """
  slots = jnp.arange(cache['k'].shape[2])
  mask_B1S = (slots <= positions_B[:, None])[:, None]
  hidden_B1D, cache = _apply(
    config, params, tokens_B[:, None], positions_B[:, None], mask_B1S, cache
  )
  return logits(config, params, hidden_B1D[:, 0]), cache
