"""Gradients of stacked layers, added to sums as soon as they are computed.

Memory then never holds a second gradient of all layers.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp


@jax.custom_vjp
def accumulate_gradients(params: dict, sums: dict) -> dict:
  """Returns the parameters; `sums` is added to their gradient."""
  del sums
  return params


accumulate_gradients.defvjp(
  lambda params, sums: (params, sums),
  lambda sums, grads: (jax.tree.map(jnp.add, sums, grads), None),
)


def apply_layers(
  inner: Callable,
  outer: Callable,
  params: dict,
  sums: dict,
  x_BLD: jax.Array,
  *where: jax.Array | None,
) -> jax.Array:
  """Applies the layers and adds the gradient of their parameters to `sums`.

  The loop saves the input of each layer. The backward pass recomputes the rest
  and adds each layer's gradient to `sums`.

  Args:
    inner: (parameters of a layer, x_BLD, *where) -> x_BLD, for all layers but
      the last.
    outer: the same for the last layer; its result may have another shape.
    params: stacked parameters of the layers.
    sums: tree like `params`; the gradient of `params` is `sums` plus its own
      value.
    x_BLD: input of the first layer.
    *where: arguments without gradient.
  """
  last = jax.tree.leaves(params)[0].shape[0] - 1

  def forward(params: dict, sums: dict, x_BLD: jax.Array, *where):
    def step(x_BLD: jax.Array, n: jax.Array):
      return inner(_layer(params, n), x_BLD, *where), x_BLD

    x_BLD, inputs_NBLD = jax.lax.scan(step, x_BLD, jnp.arange(last))
    x_SND = outer(_layer(params, last), x_BLD, *where)
    return x_SND, (params, sums, inputs_NBLD, x_BLD, where)

  def backward(residuals: tuple, grad_SND: jax.Array) -> tuple:
    params, sums, inputs_NBLD, x_BLD, where = residuals

    def step(m: jax.Array, carry: tuple) -> tuple:
      n = last - 1 - m
      return _backward(inner, params, n, inputs_NBLD[n], where, *carry)

    carry = _backward(outer, params, last, x_BLD, where, grad_SND, sums)
    if last:  # Without inputs, the body of the loop cannot be traced.
      carry = jax.lax.fori_loop(0, last, step, carry)
    grad_BLD, sums = carry
    return sums, None, grad_BLD, *(None for _ in where)

  @jax.custom_vjp
  def run(params, sums, x_BLD, *where):
    return forward(params, sums, x_BLD, *where)[0]

  run.defvjp(forward, backward)
  return run(params, sums, x_BLD, *where)


def _layer(params: dict, n: jax.Array | int) -> dict:
  return jax.tree.map(lambda leaf: leaf[n], params)


def _backward(
  apply: Callable, params: dict, n, x_BLD, where: tuple, grad, sums: dict
) -> tuple[jax.Array, dict]:
  """Returns the gradient of a layer's input, and `sums` plus the layer's own.

  Args:
    apply: applies the layer.
    params: stacked parameters of the layers.
    n: index of the layer.
    x_BLD: input of the layer.
    where: arguments without gradient.
    grad: gradient of the layer's output.
    sums: tree like `params`.
  """
  _, vjp = jax.vjp(
    lambda layer, x_BLD: apply(layer, x_BLD, *where),
    _layer(params, n),
    x_BLD,
  )
  grads, grad_BLD = vjp(grad)
  return grad_BLD, jax.tree.map(lambda s, g: s.at[n].add(g), sums, grads)
