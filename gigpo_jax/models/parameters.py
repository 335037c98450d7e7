"""Parameters of a Qwen network: shapes, logical axes and random values.

Parameters are one nested dict of float32 arrays with the layers stacked on the
first dimension. The sampler, the learner, checkpoints and safetensors files all
use it.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from gigpo_jax.models import fusion, layer_runs, lora
from gigpo_jax.models.qwen_config import QwenConfig

# Contracted dimensions of each matrix, without the dimension of the layers.
CONTRACTED = {
  ('attention', 'q'): (0,),
  ('attention', 'k'): (0,),
  ('attention', 'v'): (0,),
  ('attention', 'qkv'): (0,),
  ('attention', 'o'): (0, 1),
  ('delta', 'qkvz'): (0,),
  ('delta', 'o'): (0, 1),
  ('mlp', 'gate'): (0,),
  ('mlp', 'up'): (0,),
  ('mlp', 'gate_up'): (0,),
  ('mlp', 'down'): (0,),
  ('shared', 'gate'): (0,),
  ('shared', 'up'): (0,),
  ('shared', 'gate_up'): (0,),
  ('shared', 'down'): (0,),
  ('experts', 'gate'): (1,),
  ('experts', 'up'): (1,),
  ('experts', 'down'): (1,),
}


def layer_table(c: QwenConfig) -> dict[str, dict[str, tuple]]:
  """Returns the shape and logical axes of each array of one layer."""
  d, h, k, e = c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim
  # Queries, and a gate for each output of a head.
  q = 2 * e if c.attention_gate else e
  biases = {
    'q_bias': ((h, q), ('heads', 'head')),
    'k_bias': ((k, e), ('kv_heads', 'head')),
    'v_bias': ((k, e), ('kv_heads', 'head')),
  }
  head_norms = {'q': ((e,), (None,)), 'k': ((e,), (None,))}
  attention = {
    'attention': {
      'q': ((d, h, q), ('embed', 'heads', 'head')),
      'k': ((d, k, e), ('embed', 'kv_heads', 'head')),
      'v': ((d, k, e), ('embed', 'kv_heads', 'head')),
      **(biases if c.qkv_bias else {}),
      'o': ((h, e, d), ('heads', 'head', 'embed')),
      **({'o_bias': ((d,), (None,))} if c.o_bias else {}),
    },
  }
  has_attention = not c.delta or bool(c.delta_layers)
  table = {
    **(attention if has_attention else {}),
    **_delta_table(c),
    **_mlp_tables(c),
    'norm': {
      'attention': ((d,), (None,)),
      'mlp': ((d,), (None,)),
      **(head_norms if c.qk_norm and has_attention else {}),
    },
  }
  for group, names in table.items():
    table[group] = names | _adapter_table(c, group, names)
  return fusion.fuse(table, fusion.join_shapes) if c.fused else table


def _delta_table(c: QwenConfig) -> dict[str, dict[str, tuple]]:
  """Returns the group 'delta' of layers that have a state; see `delta_net`."""
  if not c.delta:
    return {}
  heads, width = c.delta.key_heads, c.delta.widths
  values, per_head = width['v'], ((heads, c.delta.ratio), ('heads', None))
  inputs = ('embed', 'heads', 'head')
  group = {
    'qkvz': ((c.hidden_size, heads, c.delta.mixed_size + values), inputs),
    'ba': ((c.hidden_size, heads, width['b'] + width['a']), inputs),
    'conv': (
      (c.delta.kernel, heads, c.delta.mixed_size),
      (None, 'heads', 'head'),
    ),
    'log_rate': per_head,
    'step_bias': per_head,
    'norm': ((c.delta.value_size,), (None,)),
    'o': ((heads, values, c.hidden_size), ('heads', 'head', 'embed')),
  }
  return {'delta': group}


def _mlp_tables(c: QwenConfig) -> dict[str, dict[str, tuple]]:
  """Returns the groups of dense layers and of layers with experts."""

  def mlp(f: int) -> dict[str, tuple]:
    return {
      'gate': ((c.hidden_size, f), ('embed', 'mlp')),
      'up': ((c.hidden_size, f), ('embed', 'mlp')),
      'down': ((f, c.hidden_size), ('mlp', 'embed')),
    }

  if not c.num_experts:
    return {'mlp': mlp(c.intermediate_size)}
  # Each expert has the arrays of an MLP.
  experts = {
    name: ((c.num_experts, *shape), ('experts', *axes))
    for name, (shape, axes) in mlp(c.intermediate_size).items()
  } | {'router': ((c.hidden_size, c.num_experts), ('embed', None))}
  groups = {'mlp': mlp(c.dense_size)} if c.dense_layers else {}
  groups['experts'] = experts
  if c.shared_size:
    # The output is multiplied by a sigmoid of the product with 'mix'.
    mix = {'mix': ((c.hidden_size, 1), ('embed', None))}
    groups['shared'] = mlp(c.shared_size) | mix
  return groups


def _adapter_table(c: QwenConfig, group: str, names: dict) -> dict[str, tuple]:
  """Returns shape and logical axes of the adapters in a layer's group."""
  table = {}
  for name, (shape, axes) in names.items() if c.adapters else ():
    if (group, name) in CONTRACTED and c.adapters.adapts(name):
      # An expert's adapter, like its matrix, follows the expert's index.
      first, last = CONTRACTED[group, name][0], CONTRACTED[group, name][-1] + 1
      rank = c.adapters.width
      table[name + lora.A] = (*shape[:last], rank), (*axes[:last], None)
      table[name + lora.B] = (
        (*shape[:first], rank, *shape[last:]),
        (*axes[:first], None, *axes[last:]),
      )
  return table


def max_rank(c: QwenConfig, adapters: lora.Lora) -> int:
  """Returns the largest rank of the matrices that get adapters."""
  ranks = [1]
  for group, arrays in layer_table(c).items():
    for name, (shape, _) in arrays.items():
      if (group, name) in CONTRACTED and adapters.adapts(name):
        axes = CONTRACTED[group, name]
        inputs = math.prod(shape[axis] for axis in axes)
        ranks.append(min(inputs, math.prod(shape[axes[-1] + 1 :])))
  return max(ranks)


def _table(c: QwenConfig) -> dict[str, Any]:
  """Returns (shape, logical axes) of every parameter.

  This is the only definition of the network's parameters.
  """
  table: dict[str, Any] = {
    'embed': ((c.vocab_size, c.hidden_size), ('vocab', 'embed')),
    'layers': {
      group: {
        name: (
          (len(layer_runs.layers_of(c, group, name)), *shape),
          ('layers', *axes),
        )
        for name, (shape, axes) in arrays.items()
      }
      for group, arrays in layer_table(c).items()
    },
    'norm': ((c.hidden_size,), (None,)),
  }
  if c.value_head:
    table['value'] = ((c.hidden_size,), (None,))
  elif not c.tie_embeddings:
    table['unembed'] = ((c.vocab_size, c.hidden_size), ('vocab', 'embed'))
  return table


def _table_column(config: QwenConfig, column: int) -> dict[str, Any]:
  return jax.tree.map(
    lambda leaf: leaf[column],
    _table(config),
    is_leaf=lambda x: isinstance(x, tuple),
  )


def shapes(config: QwenConfig) -> dict[str, Any]:
  """Returns the shape of every parameter, as a tree of tuples."""
  return _table_column(config, 0)


def logical_axes(config: QwenConfig) -> dict[str, Any]:
  """Returns the logical axes of every parameter, as a tree of tuples."""
  return _table_column(config, 1)


def max_tensor_shards(config: QwenConfig) -> int:
  """Returns the number whose divisors are the valid sizes of axis `tensor`."""
  return math.gcd(
    config.num_heads,
    config.num_kv_heads,
    config.intermediate_size,
    config.dense_size,
    config.shared_size,
    config.delta.key_heads if config.delta else 0,
    config.vocab_size,
  )


def init(config: QwenConfig, key: jax.Array) -> dict[str, Any]:
  """Returns random parameters; consumes the key.

  Weights are normally distributed with standard deviation 0.02, as in Qwen.
  Output projections are divided by the square root of twice the depth. Norms
  are one, or zero if they are centered; biases and a critic's value head are
  zero. An adapter's first matrix is uniform with standard deviation
  (3 * inputs)^(-1/2), its second matrix zero.
  """
  leaves, treedef = jax.tree_util.tree_flatten_with_path(
    shapes(config), is_leaf=lambda x: isinstance(x, tuple)
  )
  keys = jax.random.split(key, len(leaves))

  def make(path: tuple, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    names = [entry.key for entry in path]
    if 'norm' in names:
      is_centered = config.centered_norms and 'delta' not in names
      return jnp.full(shape, 0.0 if is_centered else 1.0, jnp.float32)
    if names[-1] == 'log_rate':
      # The decay of the state takes between 1/16 token and 100 tokens.
      return jnp.log(jax.random.uniform(key, shape, jnp.float32, 0.01, 16))
    if names[-1] == 'step_bias':
      return jnp.ones(shape, jnp.float32)
    if names[-1].endswith(('bias', 'value', lora.B)):
      return jnp.zeros(shape, jnp.float32)
    if names[-1].endswith(lora.A):
      inputs = shape[2 if 'experts' in names else 1 : -1]
      bound = math.prod(inputs) ** -0.5
      return jax.random.uniform(key, shape, jnp.float32, -bound, bound)
    scale = 0.02
    if names[-1] in ('o', 'down'):
      scale /= (2 * config.num_layers) ** 0.5
    return scale * jax.random.normal(key, shape, jnp.float32)

  arrays = [
    make(path, shape, key)
    for (path, shape), key in zip(leaves, keys, strict=True)
  ]
  return jax.tree.unflatten(treedef, arrays)


def fuse(config: QwenConfig, params: dict) -> dict:
  """Returns parameters with fused matrices; see `fusion`.

  Args:
    config: shape of the network, with `fused`.
    params: parameters of the network with separate matrices.
  """
  join = functools.partial(fusion.join_arrays, config)
  return params | {'layers': fusion.fuse(params['layers'], join)}


def layers_per_stack(config: QwenConfig) -> int:
  """Returns how many layers share one stack of the cache.

  A stack of several layers is scanned, which copies each layer's keys and
  values out of it at each step. Stacks of one layer are read in place, which is
  twice as fast, but takes a compilation of each layer. Layers that differ do
  not share a stack.
  """
  is_split = config.num_layers <= config.max_split
  if is_split or len(layer_runs.runs(config)) > 1:
    return 1
  return config.num_layers


def unstack_layers(config: QwenConfig, params: dict) -> dict:
  """Returns parameters for `prefill` and `decode`: one tree for each stack.

  Call it once, before the decoding loop: inside the loop, each step would copy
  the layers' weights out of their stack.
  """
  size = layers_per_stack(config)
  stacks = (
    layer_runs.take(config, params['layers'], n, n + size)
    for n in range(0, config.num_layers, size)
  )
  return params | {'layers': list(stacks)}


def unstack_axes(config: QwenConfig, axes: dict) -> dict:
  """Returns the logical axes of the result of `unstack_layers`."""
  size = layers_per_stack(config)
  stacks = (
    layer_runs.take_groups(config, axes['layers'], n, n + size)
    for n in range(0, config.num_layers, size)
  )
  return axes | {'layers': list(stacks)}
